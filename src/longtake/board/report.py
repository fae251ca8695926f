"""`longtake report`: the pages of a run as one HTML file that needs no server and no network."""

import base64
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Final

from markupsafe import Markup

from longtake import errors, fsio
from longtake.board import assets, overview
from longtake.board.pages import PageLinks, PageName, render_file, write_file
from longtake.board.registry import RENDER
from longtake.board.samples_page import COLUMNS_OF_TINY, columns
from longtake.evaluation_dir import EvaluationDirectory
from longtake.fsio import open_below
from longtake.inspection import posters
from longtake.inspection.facts import evaluated
from longtake.inspection.files import MEDIA_TYPES
from longtake.inspection.reader import RunFacts, RunReader

DEFAULT_MEDIA_MIB: Final = 24
_MIB = 2**20
_MOST_STILLS = 256


@dataclass
class ReportLinks(PageLinks):
    """Makes the URLs in a report that is one file, and embeds up to `media_bytes` of media.

    Media are videos and pictures.
    """

    run: RunFacts
    media_bytes: int | None
    """Maximum total bytes of the embedded videos and pictures; None: no page of the report shows
    any."""
    num_left_out: int = 0
    _chosen: dict[str, bytes] = field(default_factory=dict)
    _num_stills: int = 0

    def __post_init__(self) -> None:
        left = self.media_bytes or 0
        for name in newest_first(self.run) if self.media_bytes is not None else ():
            with suppress(OSError), open_below(self.run.run.path, name) as file:
                # One byte more shows that a file is too large.
                data = file.read(left + 1)
                if len(data) <= left:
                    self._chosen[name] = data
                    left -= len(data)
            self.num_left_out += name not in self._chosen

    def media(self, run: str, path: str) -> str | None:
        data = self._chosen.get(path)
        return None if data is None else data_url(PurePosixPath(path).suffix, data)

    def poster(self, run: str, path: str) -> str | None:
        if self._num_stills == _MOST_STILLS:
            return None
        self._num_stills += 1
        data = posters.poster_bytes(self.run.run.path, path)
        return None if data is None else f"data:{posters.kind_of(data)};base64,{_base64(data)}"


def data_url(suffix: str, data: bytes) -> str:
    kind = MEDIA_TYPES[suffix.lower()]
    return f"data:{kind};base64,{_base64(data)}"


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def newest_first(facts: RunFacts) -> Iterable[str]:
    """Yield paths of sampled videos and pictures relative to the run, most informative first.

    Those of the newest checkpoint of each preset come first, then of the first, then of those
    between.
    """
    directory = EvaluationDirectory(facts.run)
    by_preset = {name: steps for name in directory.presets() if (steps := directory.steps(name))}
    ranked = [
        (rank, preset, step)
        for preset, steps in by_preset.items()
        for rank, step in enumerate(_spread(columns(steps, steps[-1], COLUMNS_OF_TINY)))
    ]
    # By rank first: all presets have their newest checkpoint before any has its second.
    for _, preset, step in sorted(ranked):
        scores = directory.scores(preset, step)
        folder = directory.result_path(preset, step).relative_to(facts.run.path).as_posix()
        for video in scores["videos"] if scores else ():
            if PurePosixPath(video["file"]).suffix in MEDIA_TYPES:
                yield f"{folder}/{video['file']}"


def _spread(steps: list[int]) -> list[int]:
    """Order sampled steps: the last, the first, then the middle of each remaining gap."""
    found = [*steps[-1:], *steps[:1]]
    gaps = [(0, len(steps) - 1)]
    while gaps:
        first, last = gaps.pop(0)
        if last - first >= 2:
            middle = (first + last) // 2
            found.append(steps[middle])
            gaps += [(first, middle), (middle, last)]
    return list(dict.fromkeys(found))


def render_report(
    facts: RunFacts,
    links: ReportLinks,
    pages: Sequence[PageName] = tuple(RENDER),
    query: Mapping[str, str] | None = None,
) -> str:
    """Return the HTML of a report: a file with pages of a run, one below the other."""
    # Videos come first, if there are any.
    has_samples = facts.summary.sample is not None
    order = sorted(pages, key=lambda name: name != "samples") if has_samples else pages
    sections = {name: Markup(RENDER[name](facts, links, query or {})) for name in order}  # noqa: S704 - rendered
    files = assets.static_files()
    # Modules have a scope of their own; in a classic script a function replaces it.
    module = f"(() => {{\n{assets.bundled_module()}}})();\n"
    scripts = [*(files[name].decode() for name in assets.SCRIPTS), module]
    return render_file(
        "report.html",
        links,
        scripts,
        facts=facts,
        status=overview.status_of(facts),
        results=list(_results(facts)),
        sections=sections,
    )


def _results(facts: RunFacts) -> Iterable[str]:
    """Yield a line per preset (set of prompts) with the measures of its newest samples."""
    for each in evaluated(facts.run):
        numbers = [
            f"{name} {value:.0%}"
            if name == "adherence"
            else f"{name.replace('_', ' ')} {value:.3g}"
            for name, value in each["measures"].items()
        ]
        # Adherence comes first: the share of prompts that are shown right says most.
        numbers.sort(key=lambda text: not text.startswith("adherence"))
        if numbers:
            yield f"Preset {each['preset']} at step {each['steps'][-1]:,}: {', '.join(numbers)}"


def write_report(
    path: Path,
    out: Path,
    media_mib: float = DEFAULT_MEDIA_MIB,
    pages: Sequence[PageName] = tuple(RENDER),
    query: Mapping[str, str] | None = None,
) -> ReportLinks:
    """Write pages of a run to one HTML file, the report.

    Args:
        path: the run directory.
        out: the file.
        media_mib: room for videos and pictures of the page of samples.
        pages: names of the pages to write.
        query: settings of the pages, as in the board's URLs.

    Returns:
        The links of the file, with the videos and pictures that it embeds.

    Raises:
        RunError: there is no run, or the file cannot be written.
    """
    reader = RunReader(path.parent, path.name) if path.name else RunReader(path, "")
    if not reader.run.exists() and not reader.run.record_path.is_file():
        raise errors.RunError(
            f"{path} is not a run directory: it has no recipe.toml. Expected the `out` folder of a "
            "recipe that was trained."
        )
    fsio.check_picture_name(out, (".html",))
    # The run directory may be someone else's: no file outside of its folder is opened.
    with fsio.reading_below(reader.folder):
        facts = reader.facts()
        links = ReportLinks(facts, int(media_mib * _MIB) if "samples" in pages else None)
        text = render_report(facts, links, pages, query)
    write_file(out, text)
    return links
