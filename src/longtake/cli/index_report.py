"""What `longtake data index` and other commands say of files and captions, in lines."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from longtake.cli import say
from longtake.formatting import plural, printable

if TYPE_CHECKING:
    from longtake.data.catalog import Rejection
    from longtake.data.index import IndexReport

_CAPTIONS_SHOWN, _CAPTION_CHARS = 20, 120  # captions of duplicates, and characters of each


def say_indexed(report: "IndexReport", out: Path) -> None:
    """Say what a call of `index` has found and left out, and what to do about it."""
    from longtake.data.sources import describe_ignored

    say_failed("rejected", report.rejected)
    if report.num_rejected > len(report.rejected):
        more = report.num_rejected - len(report.rejected)
        say.line(f"  and {more} more rejected: the catalog has each with its reason")
    for name in report.unmatched_captions:
        say.line(f"  no such clip, though a caption names it: {printable(name)}")
    for sentence in describe_ignored(report.passed_over, report.unreadable):
        say.line(f"  {printable(sentence)}")
    for path, caption in report.other_captions[:_CAPTIONS_SHOWN]:
        text = caption if len(caption) <= _CAPTION_CHARS else f"{caption[:_CAPTION_CHARS]} ..."
        say.line(
            f"  left out with another caption than the equal clip that stays: {printable(path)}: "
            f"{printable(text)}"
        )
    if (more := len(report.other_captions) - _CAPTIONS_SHOWN) > 0:
        say.line(f"  and {more} more duplicates with another caption (--json names them)")
    if report.other_captions:
        say.line("  To train each of them with its own caption, index with --duplicates keep.")
    for sentence in report.unread_captions:
        say.line(f"  {printable(sentence)}")
    if report.scores_dropped:
        say.line(f"  {plural(report.scores_dropped, 'clip')} lost scores, as captions changed")
    several = f" ({report.with_several} with several)" if report.with_several else ""
    say.line(
        f"{plural(report.accepted, 'clip')} in {out}: {report.accepted - report.without_caption} "
        f"with a caption{several}, {report.without_caption} without; "
        f"{plural(report.num_rejected, 'file')} rejected, "
        f"{plural(report.duplicates, 'duplicate')} left out, {report.unchanged} not read again."
    )
    if report.in_hdr:
        say.line(f"{plural(report.in_hdr, 'clip')} in HDR: data.hdr says how they are trained.")
    if report.trusted:
        say.line(
            f"{plural(report.trusted, 'clip')} by the metadata of the container alone (attribute "
            "trusted_metadata): training leaves out those that turn out to be otherwise."
        )
    if report.without_caption:
        say.line(
            f"{plural(report.without_caption, 'clip')} without a caption: training leaves such "
            "clips out, unless data.keep_uncaptioned is set. Give captions with --captions, "
            "--uncaptioned or clip.txt beside clip.mp4, and index again; or let a local model "
            "write them: longtake data caption."
        )


def say_failed(what: str, failed: "Sequence[Rejection]") -> None:
    """Say each file that failed, with its reason."""
    for each in failed:
        say.line(f"  {what}: {printable(each.path)}: {printable(each.reason)}")
