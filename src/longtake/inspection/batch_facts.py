"""The batches around the guard's verdicts, with the clips of the highest loss first."""

import re
import shlex
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from longtake import errors, fsio, process
from longtake.data.clip import Clip
from longtake.formatting import one_line
from longtake.inspection.data_facts import versions
from longtake.inspection.facts import samples_of_step, verdicts
from longtake.inspection.ledger_facts import clips_of
from longtake.inspection.reader import RunFacts, said_of_link
from longtake.run_dir import GuardReport, ReportedSample, RunDirectory

MOST_VERDICTS: Final = 20
MOST_CLIPS: Final = 12
"""Maximum number of clips that are listed of a batch that the guard judged."""
_MOST_BYTES: Final = 8 * 2**20
"""Maximum total bytes of guard reports read for one page, not counting the requested step's
report."""
_MOST_ASKED_BYTES: Final = 64 * 2**20
_REPORT_NAME = re.compile(r"guard/step_\d{1,12}_\d{1,6}\.json")


@dataclass(frozen=True)
class BatchClip:
    """A clip of a batch that the guard judged, with its loss."""

    identity: str
    caption: str
    loss: float
    sigma: float
    epoch: int
    path: str | None


@dataclass(frozen=True)
class VerdictBatch:
    """The guard's verdict on a training step, and the clips of the step by descending loss."""

    step: int
    kind: str
    reason: str
    message: str
    number: int | None
    """Number of the judged batch; None if the event of the verdict does not say."""
    clips: list[BatchClip] | None
    """The clips with the highest losses of the batch, or None if they were not read."""
    num_clips: int
    why: str
    """The reason why `clips` is None or empty, or what is wrong with them; empty if all is well."""
    command: str
    is_open: bool


@dataclass(frozen=True)
class _Reported:
    samples: list[ReportedSample]
    """Samples of a guard report, with the highest losses, that a page lists."""
    num_samples: int


def batches_around_verdicts(facts: RunFacts, step: int | None) -> tuple[list[VerdictBatch], int]:
    """Return batches of the guard's newest verdicts and of `step`, and the number of verdicts."""
    found = [each for each in verdicts(facts.events) if isinstance(each["step"], int)]
    newest = found[-MOST_VERDICTS:][::-1]
    if step is not None and all(each["step"] != step for each in newest):
        newest += [each for each in found if each["step"] == step][-1:]
    # The newest reports share a budget; the step that was opened may have a large one.
    left = _MOST_BYTES
    read = list[tuple[Mapping[str, Any], _Reported | None, str]]()
    for event in newest:
        path, is_asked = _report_path(facts.run, event), event["step"] == step
        size, why, reported = None, "", None
        with suppress(OSError):
            size = None if path is None else path.lstat().st_size
        if path is None or size is None:
            why = "The guard's report of it is missing."
        elif size > (_MOST_ASKED_BYTES if is_asked else left):
            why = "Its report is large, and read only if this step is opened by its link."
        else:
            left -= size
            try:
                reported = _read_report(facts, path, event["step"])
            except (errors.LongtakeError, OSError) as error:
                why = one_line(error)
        read.append((event, reported, why))
    names = {each["identity"] for _, report, _ in read if report for each in report.samples}
    known, trouble = dict[str, Clip](), ""
    try:
        known = clips_of(facts, "batches", names) if names else {}
    except (errors.LongtakeError, OSError) as error:
        trouble = one_line(error)
    return [_batch(facts, *each, step, known, trouble) for each in read], len(found)


def _report_path(run: RunDirectory, event: Mapping[str, Any]) -> Path | None:
    name = event.get("report")
    if isinstance(name, str) and _REPORT_NAME.fullmatch(name):
        return run.path / name
    # Events of older runs do not name their report. Its file name counts the steps done before.
    found = sorted(run.guard_path.glob(f"step_{event['step'] - 1:08d}_*.json"))
    return found[-1] if found else None


def _read_report(facts: RunFacts, path: Path, step: int) -> _Reported:
    """Read from a guard report the clips that had the highest losses in the step that was judged.

    Raises:
        RecordError: the report cannot be read.
        DataError: the report is a symbolic link.
    """
    if path.is_symlink() or path.parent.is_symlink():
        raise errors.DataError(said_of_link(path))

    def read() -> _Reported:
        samples = samples_of_step(fsio.require_record(path, GuardReport), step)
        return _Reported(samples[:MOST_CLIPS], len(samples))

    return facts.kept(f"report {path.name} {step}", versions([path]), read)


def _batch(
    facts: RunFacts,
    event: Mapping[str, Any],
    reported: _Reported | None,
    why: str,
    step: int | None,
    known: Mapping[str, Clip],
    trouble: str,
) -> VerdictBatch:
    path, number = shlex.quote(str(facts.run.path)), event.get("batch")
    samples = [] if reported is None else reported.samples
    clips = [
        BatchClip(
            sample["identity"],
            sample["caption"],
            float(sample["loss"]),
            float(sample["sigma"]),
            sample["epoch"],
            known[sample["identity"]].path if sample["identity"] in known else None,
        )
        for sample in samples
    ]
    if reported is not None and not reported.num_samples:
        why = "The guard's report lists no clip of this step."
    return VerdictBatch(
        step=event["step"],
        kind=event["verdict"],
        reason=event["reason"],
        message=event["message"],
        number=number if isinstance(number, int) else None,
        clips=None if reported is None else clips,
        num_clips=0 if reported is None else reported.num_samples,
        why=why or trouble,
        command=f"{process.command()} show {path} --around {event['step']}",
        is_open=event["step"] == step,
    )
