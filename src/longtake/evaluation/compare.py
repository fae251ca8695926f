"""Compares sampled videos of checkpoints or runs side by side, as a picture or a film; torch-free.

A row is a scene: a prompt, a seed and its further inputs. A column is a checkpoint of one run,
or one checkpoint of each of several runs.
"""

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
from av.container import InputContainer
from av.video.stream import VideoStream
from PIL import Image

from longtake import drawing, fsio, process
from longtake.data.clip import Media
from longtake.data.decode import decoded, opened, rgb
from longtake.data.encode import encode_frames, in_yuv
from longtake.errors import ClipError, DataError, RunError
from longtake.evaluation_dir import (
    EvaluationDirectory,
    Scene,
    Scores,
    files_by_scene,
    prompt_number,
)
from longtake.formatting import did_you_mean
from longtake.run_dir import RunDirectory
from longtake.sampling.preset_files import kept_picture

MAX_COLUMNS = 8
_MAX_MEASURES = 6
_NUM_PICTURES = 8
"""Pictures in a row of a sheet: with fewer columns, each shows more than one of its frames."""
_SHORT_SECONDS, _FILM_SECONDS = 2.0, 4.0
"""Videos shorter than the first are played several times, until about the second."""
_MAX_FPS = 60.0
_CRF = 16
_LABEL_WIDTH, _ROW_GAP, _COLUMN_GAP, _FRAME_GAP = 230, 18, 14, 3
_MIN_HEIGHT = 112
_PAGE_SIZE: drawing.Size = 1600, 1200
"""Pixels for all pictures of a page, unless they would be lower than `_MIN_HEIGHT`."""
_RANGE = re.compile(r"(\d*)(:?)(\d*)")


def of_prompts(scenes: Sequence[Scene], wanted: str | None) -> list[Scene]:
    """The scenes of the prompts in a range such as 0:4, 2: or 3; all if it is None.

    The same prompt with other inputs counts as another.
    """
    if wanted is None:
        return list(scenes)
    known = list(dict.fromkeys(scene._replace(seed=0) for scene in scenes))
    found = _RANGE.fullmatch(wanted.strip())
    if found is None or not any(found.groups()):
        raise RunError(f"--prompts {wanted}: expected a range such as 0:4, or a number.")
    start = int(found[1] or 0)
    end = int(found[3] or len(known)) if found[2] else start + 1
    if not 0 <= start < end <= len(known):
        raise RunError(
            f"--prompts {wanted}: there are {len(known)} prompts, counted from 0: choose from "
            f"0:{len(known)}, whose end is not part of it."
        )
    return [scene for scene in scenes if scene._replace(seed=0) in known[start:end]]


@dataclass(frozen=True)
class Column:
    """What was sampled from one checkpoint."""

    run: RunDirectory
    scores: Scores
    titles: tuple[str, ...]

    @property
    def measures(self) -> dict[str, float]:
        held_out = self.scores.get("held_out", {})
        loss = {"held-out loss": held_out["mean"]} if "mean" in held_out else {}
        return {**self.scores["measures"], **loss}

    @property
    def fps(self) -> float:
        return float(self.scores["settings"]["fps"])

    def video(self, scene: Scene) -> Path:
        preset, step = self.scores["preset"], self.scores["step"]
        folder = EvaluationDirectory(self.run).result_path(preset, step)
        return folder / files_by_scene(self.scores)[scene]

    def picture(self, scene: Scene, name: str) -> Path:
        preset = EvaluationDirectory(self.run).preset_path(self.scores["preset"])
        return kept_picture(preset, prompt_number(files_by_scene(self.scores)[scene]), name)


@dataclass(frozen=True)
class Comparison:
    """Scenes down, columns across."""

    title: str
    scenes: tuple[Scene, ...]
    columns: tuple[Column, ...]

    @property
    def preset(self) -> str:
        return self.columns[0].scores["preset"]

    @property
    def has_seeds(self) -> bool:
        return len({scene.seed for scene in self.scenes}) > 1

    @property
    def pictures(self) -> tuple[str, ...]:
        """Names of the inputs that are shown; numbers have no picture."""
        names = dict.fromkeys(name for scene in self.scenes for name, _ in scene.pictures)
        first = self.columns[0]
        kept = (name for name in names if self._is_kept(first, name))
        return tuple(kept)

    def _is_kept(self, column: Column, name: str) -> bool:
        return any(column.picture(scene, name).is_file() for scene in self.scenes)

    def measures(self) -> dict[str, list[tuple[float | None, bool]]]:
        """A few measures by name: for each column the value, and whether there is an alarm.

        These are adherence, held-out loss and brightness, then those with an alarm, the newest
        first.
        """
        alarmed = [  # not range alarms: early in training nearly all measures have one
            {alarm["measure"] for alarm in each.scores["alarms"] if alarm["kind"] == "drift"}
            for each in self.columns
        ]
        values = [column.measures for column in self.columns]
        newest_first = [name for names in reversed(alarmed) for name in sorted(names)]
        wanted = ["adherence", "held-out loss", "brightness", *newest_first]
        known = [name for name in dict.fromkeys(wanted) if any(name in each for each in values)]
        return {
            name: [(v.get(name), name in a) for v, a in zip(values, alarmed, strict=True)]
            for name in known[:_MAX_MEASURES]
        }


def choose(
    runs: Sequence[Path],
    preset: str | None = None,
    prompts: str | None = None,
    steps: Sequence[int] | None = None,
    columns: int = MAX_COLUMNS,
) -> Comparison:
    """Choose what to compare.

    Of one run these are its checkpoints: if there are more than `columns`, the first, the last and
    evenly spaced ones between them. Of several runs it is the newest checkpoint that all have, or
    the newest of each if they have none in common.

    Args:
        runs: run directories.
        preset: name; None: the only preset of which all runs have results.
        prompts: which prompts, counted from 0, such as 0:4 (not the fifth) or 2; all by default.
        steps: steps of the checkpoints instead.
        columns: at most so many checkpoints of one run.

    Raises:
        RunError: there are no such results or prompts, the runs' prompts differ, or the runs share
            no preset or several and none is named.
    """
    if preset is None:
        preset = _only_preset([RunDirectory(run) for run in dict.fromkeys(runs)])
    found = {run: _results(RunDirectory(run), preset) for run in dict.fromkeys(runs)}
    names = _names(list(found))
    is_alone = len(found) == 1
    chosen = [
        Column(
            RunDirectory(run),
            found[run][step],
            (f"step {step}",) if is_alone else (names[run], f"step {step}"),
        )
        for step, run in _choose_columns(found, steps, columns)
    ]
    scenes = _scenes(chosen, prompts)
    of_one = f"{names[next(iter(found))]}, " if is_alone else ""
    return Comparison(f"{of_one}preset {preset}", scenes, tuple(chosen))


def _only_preset(runs: Sequence[RunDirectory]) -> str:
    known: dict[Path, list[str]] = {}
    for run in runs:
        _refuse_no_run(run)
        known[run.path] = EvaluationDirectory(run).presets()
        if not known[run.path]:
            raise RunError(
                f"{run.path} has no results of any preset. Make some with: "
                f"{process.command()} evaluate {shlex.quote(str(run.path))}"
            )
    common = sorted(set.intersection(*map(set, known.values())))
    if not common:
        having = "; ".join(f"{path} has {', '.join(names)}" for path, names in known.items())
        raise RunError(
            f"The runs have results of no common preset: {having}. Sample one preset in all of "
            f"them with: {process.command()} evaluate RUN --preset NAME"
        )
    if len(common) > 1:
        who = "The runs have" if len(runs) > 1 else f"{runs[0].path} has"
        raise RunError(
            f"{who} results of {len(common)} presets: {', '.join(common)}. Choose one, such as "
            f"--preset {shlex.quote(common[0])}."
        )
    return common[0]


def _refuse_no_run(run: RunDirectory) -> None:
    if not run.exists():
        raise RunError(f"{run.path} is not a run directory: it has no recipe.toml.")


def _results(run: RunDirectory, preset: str) -> dict[int, Scores]:
    _refuse_no_run(run)
    directory = EvaluationDirectory(run)
    found = {scores["step"]: scores for scores in directory.all_scores(preset)}
    if found:
        return found
    known = directory.presets()
    near = did_you_mean(preset, known) if known else "it has none of any preset."
    raise RunError(
        f"{run.path} has no results of preset {preset}; {near} Make some with: "
        f"{process.command()} evaluate {shlex.quote(str(run.path))} --preset {shlex.quote(preset)}"
    )


def _choose_columns(
    found: Mapping[Path, Mapping[int, Scores]], steps: Sequence[int] | None, columns: int
) -> list[tuple[int, Path]]:
    """(step, run) of each column."""
    if steps:
        for run, results in found.items():
            if missing := [step for step in steps if step not in results]:
                raise RunError(
                    f"{run} has no result of step {', '.join(map(str, missing))}; it has: "
                    f"{', '.join(map(str, results))}."
                )
        return [(step, run) for step in dict.fromkeys(steps) for run in found]
    if len(found) == 1:
        run, results = next(iter(found.items()))
        return [(step, run) for step in spread(sorted(results), columns)]
    common = set.intersection(*(set(results) for results in found.values()))
    return [(max(common or results), run) for run, results in found.items()]


def spread(steps: Sequence[int], count: int) -> list[int]:
    """At most so many of them, evenly spaced, the first and the last always among them."""
    if len(steps) <= count:
        return list(steps)
    if count == 1:
        return [steps[-1]]
    places = np.linspace(0, len(steps) - 1, count).round().astype(int)
    return [steps[place] for place in places]


def _scenes(columns: Sequence[Column], prompts: str | None) -> tuple[Scene, ...]:
    """The scenes of the wanted prompts; every column must have them."""
    scenes = of_prompts(list(files_by_scene(columns[0].scores)), prompts)
    for column in columns[1:]:
        _refuse_missing(columns[0], column, scenes)
    return tuple(scenes)


def _refuse_missing(first: Column, column: Column, scenes: Sequence[Scene]) -> None:
    others = files_by_scene(column.scores)
    missing = next((scene for scene in scenes if scene not in others), None)
    if missing is not None:
        names = ", ".join(name for name, _ in missing.pictures)
        same = "prompts, seeds and pictures" if names else "prompts and seeds"
        raise RunError(
            f"{column.run.path}, step {column.scores['step']}, has no video of the prompt "
            f"{missing.prompt!r} with seed {missing.seed}"
            f"{f' and the same pictures ({names})' if names else ''}, which {first.run.path} has: "
            f"only results of the same {same} can stand beside each other."
        )


def _names(runs: Sequence[Path]) -> dict[Path, str]:
    """Names of the folders, with as many parent folders as make them different."""
    parts = {run: run.resolve().parts for run in runs}
    for length in range(1, max(map(len, parts.values())) + 1):
        names = {run: "/".join(each[-length:]) for run, each in parts.items()}
        if len(set(names.values())) == len(names):
            return names
    return {run: str(run) for run in runs}


def draw(comparison: Comparison, out: Path) -> None:
    """Write a comparison as .png or .mp4, aside first and then renamed.

    Raises:
        RunError: `out` is neither, cannot be written, or a video cannot be read.
    """
    {".png": draw_sheet, ".mp4": draw_film}[check_out(out)](comparison, out)


def check_out(out: Path) -> str:
    """The suffix of the file to write, .png or .mp4; RunError: it is neither, or has no folder."""
    fsio.check_picture_name(out, (".png", ".mp4"))
    if not out.absolute().parent.is_dir():
        raise RunError(f"--out {out}: there is no folder {out.parent}. Make it first.")
    return out.suffix.lower()


def draw_sheet(comparison: Comparison, out: Path) -> None:
    """Write a PNG with the middle frame of each video, or with several if there is room."""
    columns, scene, rows = comparison.columns, comparison.scenes[0], len(comparison.scenes)
    shortest = min(num_frames(column.video(scene)) for column in columns)
    count = max(1, min(_NUM_PICTURES // len(columns), shortest))
    across = count * len(columns) + len(comparison.pictures)
    size = fitting(size_of(columns[0].video(scene)), across, rows)
    cells = [
        [
            drawing.side_by_side(
                chosen_frames(column.video(scene), size, count), _FRAME_GAP, drawing.RULE
            )
            for column in columns
        ]
        for scene in comparison.scenes
    ]
    drawing.save_picture(_even(grid_of(comparison, cells, size).draw()), out)


def draw_film(comparison: Comparison, out: Path) -> None:
    """Write an mp4 (H.264) in which all videos play at once; short ones several times."""
    columns, rows = comparison.columns, len(comparison.scenes)
    first = columns[0].video(comparison.scenes[0])
    size = fitting(size_of(first), len(columns) + len(comparison.pictures), rows)
    fps = min(_MAX_FPS, max(column.fps for column in columns))
    seconds = num_frames(first) / columns[0].fps
    times = round(_FILM_SECONDS / seconds) if seconds < _SHORT_SECONDS else 1
    pictures = (each for _ in range(times) for each in _film_pictures(comparison, size, fps))
    try:
        encode_frames(out, _video_frames(pictures, fps), fps=fps, crf=_CRF, gop=max(1, round(fps)))
    except DataError as error:
        raise RunError(str(error)) from error


def grid_of(
    comparison: Comparison, cells: Sequence[Sequence[Image.Image]], size: drawing.Size
) -> drawing.Grid:
    """The page of a comparison."""
    names = comparison.pictures
    # The picture of an input stands close to the next one; a column keeps more distance.
    gaps = [0] + [_FRAME_GAP] * (len(names) - 1) if names else []
    gaps += [_FRAME_GAP + _COLUMN_GAP if names else 0]
    gaps += [_COLUMN_GAP] * (len(comparison.columns) - 1)
    rows = []
    for scene, of_columns in zip(comparison.scenes, cells, strict=True):
        label = drawing.wrapped_lines(scene.prompt, _LABEL_WIDTH)
        note = f"seed {scene.seed}" if comparison.has_seeds else ""
        label += drawing.wrapped_lines(note, _LABEL_WIDTH, drawing.NOTE_SIZE, drawing.PALE_INK)
        paths = (comparison.columns[0].picture(scene, name) for name in names)
        pictures = [*(_copied_picture(path, size) for path in paths), *of_columns]
        rows.append(drawing.GridRow(label, list(map(drawing.GridCell, pictures, gaps))))
    headings = [[drawing.TextLine(name.replace("_", " "), ink=drawing.PALE_INK)] for name in names]
    for column, picture in zip(comparison.columns, cells[0], strict=True):
        lines = [
            line for title in column.titles for line in drawing.wrapped_lines(title, picture.width)
        ]
        headings.append(
            [lines[0], *(drawing.TextLine(each.text, ink=drawing.PALE_INK) for each in lines[1:])]
        )
    footers = {
        name.replace("_", " "): [("", False)] * len(names)
        + [("" if value is None else f"{value:.3g}", is_alarm) for value, is_alarm in values]
        for name, values in comparison.measures().items()
    }
    gap, title = _ROW_GAP, comparison.title
    return drawing.Grid(rows, _LABEL_WIDTH, title, headings, footers, row_gap=gap, has_rules=False)


def _even(picture: Image.Image) -> Image.Image:
    """The picture on a page of even width and height, as H.264 wants it."""
    width, height = picture.size
    page = Image.new("RGB", (width + width % 2, height + height % 2), drawing.PAPER)
    page.paste(picture)
    return page


def _film_pictures(comparison: Comparison, size: drawing.Size, fps: float) -> Iterator[Image.Image]:
    """The page at each moment; the last frame of a video that is over stays."""
    blank = Image.new("RGB", size, drawing.RULE)
    blanks = [[blank] * len(comparison.columns)] * len(comparison.scenes)
    grid = grid_of(comparison, blanks, size)
    first = len(comparison.pictures)
    playing = {
        grid.corner(row, first + cell): _played(column, column.video(scene), size, fps)
        for row, scene in enumerate(comparison.scenes)
        for cell, column in enumerate(comparison.columns)
    }
    page = _even(grid.draw())
    while playing:
        shown = {corner: next(frames, None) for corner, frames in playing.items()}
        playing = {corner: playing[corner] for corner, frame in shown.items() if frame is not None}
        for corner, frame in shown.items():
            if frame is not None:
                page.paste(frame, corner)
        if playing:
            yield page


def _played(column: Column, path: Path, size: drawing.Size, fps: float) -> Iterator[Image.Image]:
    """A video's frames at another rate: some are repeated or left out."""
    with closing(read_frames(path, size)) as pictures:  # type: ignore[type-var]
        shown = 0
        for number, picture in enumerate(pictures):
            until = int((number + 1) * fps / column.fps)
            for _ in range(until - shown):
                yield picture
            shown = max(shown, until)


def _video_frames(pictures: Iterator[Image.Image], fps: float) -> Iterator[av.VideoFrame]:
    rate = Fraction(fps).limit_denominator(1001)
    for number, picture in enumerate(pictures):
        frame = in_yuv(av.VideoFrame.from_ndarray(np.asarray(picture), "rgb24"))
        frame.pts, frame.time_base = number, 1 / rate
        yield frame


def fitting(size: drawing.Size, across: int, down: int = 1) -> drawing.Size:
    """The size at which so many pictures of `size` make a page that fits a screen.

    Large pictures shrink, though not below 112 pixels of height; smaller ones are enlarged by
    whole factors to at least that, so that their pixels stay visible.
    """
    width, height = size
    if height < _MIN_HEIGHT:
        factor = -(-_MIN_HEIGHT // height)
        return width * factor, height * factor
    scale = min(1.0, _PAGE_SIZE[0] / (across * width), _PAGE_SIZE[1] / (down * height))
    scale = max(scale, _MIN_HEIGHT / height)
    return round(width * scale), round(height * scale)


def size_of(path: Path) -> drawing.Size:
    with _reading(path) as (_, stream):
        return stream.codec_context.width, stream.codec_context.height


def num_frames(path: Path) -> int:
    with _reading(path) as (container, stream):
        return sum(1 for _ in decoded(Media(str(path)), container, stream))


def read_frames(
    path: Path, size: drawing.Size, only: frozenset[int] | None = None
) -> Iterator[Image.Image]:
    """The frames of a video in this size, or only those of some numbers, counted from 0."""
    with _reading(path) as (container, stream):
        for number, frame in enumerate(decoded(Media(str(path)), container, stream)):
            if only is None or number in only:
                yield drawing.resized(Image.fromarray(rgb(frame)), size)


def chosen_frames(path: Path, size: drawing.Size, count: int) -> list[Image.Image]:
    """The middle frame, or `count` evenly spaced ones, the first and the last among them."""
    total = num_frames(path)
    numbers = [total // 2]
    if count > 1:
        numbers = np.linspace(0, total - 1, count).round().astype(int).tolist()
    read = read_frames(path, size, frozenset(numbers))
    found = dict(zip(sorted(set(numbers)), read, strict=True))
    return [found[number] for number in numbers]


def _copied_picture(path: Path, size: drawing.Size) -> Image.Image:
    """The kept copy of an input's picture in this size; blank if there is none."""
    if not path.is_file():
        return Image.new("RGB", size, drawing.PAPER)
    try:
        with fsio.open_regular(path) as file, Image.open(file) as picture:
            return drawing.resized(picture.convert("RGB"), size)
    except OSError as error:
        reason = error.strerror or "it is no picture"
        raise RunError(f"{path} cannot be read: {reason}. Is it still being copied?") from error


@contextmanager
def _reading(path: Path) -> Iterator[tuple[InputContainer, VideoStream]]:
    try:
        fsio.open_regular(path).close()  # opening a named pipe would block
        with opened(Media(str(path))) as both:
            yield both
    except (ClipError, OSError) as error:
        reason = error.reason if isinstance(error, ClipError) else error.strerror or error
        raise RunError(
            f"{path}, which was sampled, cannot be read: {reason}. Is it still being copied?"
        ) from error
