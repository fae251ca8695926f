"""The PNG files of `longtake data show`: buckets, histograms of scores, and real frames."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.patheffects import withStroke
from matplotlib.ticker import MaxNLocator, NullFormatter, StrMethodFormatter
from numpy.typing import NDArray
from PIL import Image, ImageDraw

from longtake import drawing, errors
from longtake.config import Bucket, DataSection, Recipe
from longtake.data import buckets, decode_worker
from longtake.data.catalog import Catalog
from longtake.data.clip import Clip
from longtake.data.plan import Plan, Stream
from longtake.data.stages import parse_condition, values
from longtake.data.window import Window
from longtake.formatting import plural

_MAX_DRAWN = 1e290  # beyond it, differences are not finite
MAX_DOTS = 4000  # different clip sizes that are drawn; of more, the most frequent
BARE = "#cfd3d8"  # what is not trained on
MAX_FRAMES = 6  # of a clip on the contact sheet
FRAME_HEIGHT, MAX_FRAME_WIDTH = 120, 480
MOST_ROWS = 36  # clips on the contact sheet
CLIPS_PER_BUCKET = 3

_LABEL_WIDTH, _FRAME_GAP, _CAPTION_LINES = 260, 6, 4
_FAILURE_WIDTH, _FAILURE_MARGIN = 420, 22
_CAPTION_LETTERS = 1000  # more than fill the lines; a file may hold megabytes
_MOST_FRAMES = 121  # of a clip that no recipe gives a length

_Drawing = tuple[str, Callable[[Path], None]]  # a file name, and what draws the file


@drawing.figure_text()
def buckets_picture(
    path: Path,
    shapes: Sequence[Bucket],
    choices: NDArray[np.integer],
    clip_sizes: NDArray[np.integer],
    clip_frames: NDArray[np.integer],
    *,
    dropped: Mapping[str, int] | None = None,
    stride: int = 1,
    title: str = "",
) -> None:
    """Draw clip sizes against buckets, clips per bucket, and lengths.

    `choices` [N] is each clip's bucket, -1 where it is dropped; `clip_sizes` [N, 2] is height and
    width in pixels.
    """
    sizes = list(dict.fromkeys(map(_size, shapes)))
    colours = [drawing.SERIES[sizes.index(_size(shape)) % len(drawing.SERIES)] for shape in shapes]
    bars = [
        _bucket_bar(shape, colours[i], clip_sizes[choices == i]) for i, shape in enumerate(shapes)
    ]
    bars += [_Bar(reason, n, f"{n:,}", BARE) for reason, n in (dropped or {}).items()]
    figure = Figure(figsize=(15, max(6.5, 3.2 + 0.42 * len(bars))), dpi=110, layout="constrained")
    figure.set_facecolor(drawing.PAPER)
    if title:
        figure.suptitle(title, x=0.01, ha="left", color=drawing.INK, fontsize=14, weight="bold")
    grid = figure.add_gridspec(2, 2, height_ratios=(max(1.3, 0.42 * len(bars) + 0.6), 2.2))
    _draw_sizes(figure.add_subplot(grid[:, 0]), shapes, colours, choices, clip_sizes)
    _draw_bars(figure.add_subplot(grid[0, 1]), bars)
    below = grid[1, 1].subgridspec(1, 2, width_ratios=(1, 2.4))
    _draw_to_scale(figure.add_subplot(below[0]), shapes, colours)
    _draw_lengths(figure.add_subplot(below[1]), shapes, clip_frames, stride)
    drawing.save_picture(figure, path)


def _draw_sizes(
    axes: Axes,
    shapes: Sequence[Bucket],
    colours: Sequence[str],
    choices: NDArray[np.integer],
    sizes: NDArray[np.integer],
) -> None:
    # Both axes are logarithmic: the distance of a dot from its bucket's line is how much is cut.
    _prepare(axes, "Sizes: a clip off its bucket's line is cropped", "width (pixels)", "height")
    different, counts = np.unique(np.column_stack([sizes, choices]), axis=0, return_counts=True)
    chance = np.random.default_rng(0).random(len(counts))  # among the equally frequent
    most = np.lexsort((chance, -counts))[:MAX_DOTS]
    different, counts = different[most], counts[most]
    dots = [colours[choice] if choice >= 0 else drawing.PALE_INK for choice in different[:, 2]]
    area = 12 + 240 * np.sqrt(counts / max(1, len(sizes)))
    axes.scatter(different[:, 1], different[:, 0], s=area, c=dots, alpha=0.45, linewidths=0)
    for shape, colour in dict(zip(map(_size, shapes), colours, strict=True)).items():
        height, width = shape
        axes.axline(
            (width, height), (2 * width, 2 * height), color=colour, linewidth=0.9, alpha=0.7
        )
        axes.plot(
            width, height, "s", color=drawing.PAPER, markeredgecolor=colour, markeredgewidth=2, ms=9
        )
        axes.annotate(
            f"{width}x{height}",
            (width, height),
            (9, -4),
            textcoords="offset points",
            va="top",
            color=colour,
            weight="bold",
            path_effects=[withStroke(linewidth=3, foreground=drawing.PAPER)],
        )
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    _write_plain_numbers(axes.xaxis)
    _write_plain_numbers(axes.yaxis)
    extent = np.concatenate([sizes, [_size(shape) for shape in shapes]])
    axes.set_xlim(extent[:, 1].min() / 1.5, extent[:, 1].max() * 1.8)
    axes.set_ylim(extent[:, 0].min() / 1.5, extent[:, 0].max() * 1.5)


def _draw_to_scale(axes: Axes, shapes: Sequence[Bucket], colours: Sequence[str]) -> None:
    for (height, width), colour in zip(map(_size, shapes), colours, strict=True):
        outline = Rectangle((0, 0), width, height, fill=False, edgecolor=colour, linewidth=1.6)
        axes.add_patch(outline)
    largest = max(max(_size(shape)) for shape in shapes)
    axes.set(xlim=(-0.03 * largest, 1.03 * largest), ylim=(-0.03 * largest, 1.03 * largest))
    axes.set(aspect="equal", xticks=[], yticks=[], facecolor=drawing.PAPER)
    axes.set_title("Buckets to scale", loc="left", color=drawing.INK, fontsize=11)
    axes.spines[:].set_visible(False)


def _size(shape: Bucket) -> tuple[int, int]:
    return shape.height, shape.width


@drawing.figure_text()
def batches_picture(path: Path, entry: Mapping[str, Any], title: str = "") -> None:
    """Draw clips, tokens, padding and predicted time of each bucket of a stage side by side.

    `entry` is one of `plan_summary`'s stages.
    """
    shapes = entry["buckets"]
    panels = (
        ("Clips in an epoch", "clips", "kept", "{:,}", ""),
        ("Tokens of a batch", "tokens", "batch_tokens", "{:,}", "not known"),
        ("Padding", "share of all batches", "padding", "{:.1%}", "none: no end"),
        ("Time of a batch", "seconds, predicted", "batch_seconds", "{:.3g}", "not known"),
        ("Time of an epoch", "share", "time_share", "{:.1%}", "not known"),
    )
    height = max(2.6, 1.6 + 0.42 * len(shapes))
    figure = Figure(figsize=(16, height), dpi=110, layout="constrained")
    figure.set_facecolor(drawing.PAPER)
    figure.suptitle(title, x=0.01, ha="left", color=drawing.INK, fontsize=14, weight="bold")
    labels = [
        f"{plural(each['num_frames'], 'frame')}, {each['width']}x{each['height']}: "
        f"{each['batch_size']:,}"
        for each in shapes
    ]
    sizes = list(dict.fromkeys((each["height"], each["width"]) for each in shapes))
    colours = [
        drawing.SERIES[sizes.index((s["height"], s["width"])) % len(drawing.SERIES)] for s in shapes
    ]
    for place, (axes, (name, unit, key, form, unknown)) in enumerate(
        zip(figure.subplots(1, len(panels), sharey=True), panels, strict=True)
    ):
        _prepare(axes, name, unit, "")
        numbers = [each[key] for each in shapes]
        known = [number or 0.0 for number in numbers]
        axes.barh(range(len(shapes)), known, color=colours, height=0.62)
        axes.set_xlim(0, 1.35 * max(known) or 1.0)
        axes.xaxis.set_major_locator(MaxNLocator(3, integer=form == "{:,}"))
        axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.9g}"))
        for row, number in enumerate(numbers):
            note = unknown if number is None else form.format(number)
            axes.annotate(
                note,
                (number or 0.0, row),
                (4, 0),
                textcoords="offset points",
                va="center",
                color=drawing.INK,
                fontsize=9,
            )
        if not place:
            axes.set_yticks(range(len(shapes)), labels)
            axes.set_ylabel("bucket: clips in a batch", color=drawing.INK)
            axes.set_ylim(max(3, len(shapes)) - 0.5, -0.5)
    drawing.save_picture(figure, path)


class _Bar(NamedTuple):
    label: str
    num_clips: int
    note: str
    colour: str


def _bucket_bar(shape: Bucket, colour: str, sizes: NDArray[np.integer]) -> _Bar:
    note = f"{len(sizes):,}"
    if len(sizes):
        ratio = (sizes[:, 1] / sizes[:, 0]) * (shape.height / shape.width)
        note += f"; {1 - np.minimum(ratio, 1 / ratio).mean():.0%} of the picture cut"
    frames = "1 frame" if shape.num_frames == 1 else f"{shape.num_frames} frames"
    return _Bar(f"{frames}, {shape.width}x{shape.height}", len(sizes), note, colour)


def _draw_bars(axes: Axes, bars: Sequence[_Bar]) -> None:
    _prepare(axes, "Clips in each bucket, and dropped ones", "", "")
    _count_clips(axes.xaxis)
    beside = axes.get_yaxis_transform()
    for row, bar in enumerate(bars):
        axes.barh(row, bar.num_clips, color=bar.colour, height=0.62)
        axes.text(1.02, row, bar.note, transform=beside, va="center", color=drawing.INK, fontsize=9)
    axes.set_yticks(range(len(bars)), [bar.label for bar in bars])
    axes.set_ylim(max(3, len(bars)) - 0.5, -0.5)


def _draw_lengths(
    axes: Axes, shapes: Sequence[Bucket], clip_frames: NDArray[np.integer], stride: int
) -> None:
    _prepare(axes, "Lengths: left of a bucket's line is too short for it", "frames", "")
    _count_clips(axes.yaxis)
    spans = sorted({(shape.num_frames - 1) * stride + 1 for shape in shapes})
    clip_frames = np.maximum(clip_frames, 1)  # at data.fps a short video has none; the axis no 0
    shown = np.concatenate([clip_frames, spans])
    lowest, highest = int(shown.min()), int(shown.max())
    if highest > 4 * lowest:
        axes.set_xscale("log")
        _write_plain_numbers(axes.xaxis)
        bins = list(np.geomspace(lowest / 1.1, highest * 1.1, 60))
    else:
        bins = _bins(np.array([lowest - 2, highest + 2], dtype=np.float64))
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.hist(clip_frames, bins=bins, color=BARE)
    for index, span in enumerate(spans):
        axes.axvline(span, color=drawing.INK, linewidth=1)
        place = (span, 1 - 0.1 * (index % 3))
        axes.annotate(
            f" {span}", place, xycoords=("data", "axes fraction"), va="top", color=drawing.INK
        )


@drawing.figure_text()
def histogram_picture(
    path: Path,
    name: str,
    values: NDArray[np.float64],
    stages: Sequence[tuple[str, NDArray[np.float64]]] = (),
) -> None:
    """Draw the histogram of a score over all clips, and below it over those of each stage."""
    known = _drawable(values)
    drawn = [("all clips", known), *((stage, _drawable(some)) for stage, some in stages)]
    figure = Figure(figsize=(10, 2.4 + 1.7 * len(drawn)), dpi=110, layout="constrained")
    figure.set_facecolor(drawing.PAPER)
    rows = figure.subplots(len(drawn), 1, sharex=True, squeeze=False)[:, 0]
    bins = _bins(known)
    for index, (axes, (stage, some)) in enumerate(zip(rows, drawn, strict=True)):
        mean = f", mean {some.mean():.3g}" if len(some) else ""
        _prepare(axes, f"{stage}: {len(some):,}{mean}", "", "")
        _count_clips(axes.yaxis)
        axes.hist(known, bins=bins, color=BARE)
        if index and len(some):
            axes.hist(
                some, bins=bins, color=drawing.SERIES[(index - 1) % len(drawing.SERIES)], alpha=0.8
            )
        if len(some):
            axes.axvline(some.mean(), color=drawing.INK, linewidth=1.2, linestyle=":")
    unknown = len(values) - len(known)
    rows[-1].set_xlabel(
        name + (f" (unknown of {unknown:,} clips)" if unknown else ""), color=drawing.INK
    )
    drawing.save_picture(figure, path)


def _drawable(values: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.clip(values[~np.isnan(values)], -_MAX_DRAWN, _MAX_DRAWN)


def _bins(values: NDArray[np.float64]) -> list[float]:
    """Edges of bins; whole numbers of a small range get one bin each."""
    low, high = float(values.min(initial=np.inf)), float(values.max(initial=-np.inf))
    if low > high:
        return [0.0, 1.0]
    if 0 < high - low < 1 / _MAX_DRAWN:
        return [low - 0.5, high + 0.5]
    if high - low <= 80 and np.array_equal(values, np.round(values)):
        return list(np.arange(low, high + 2) - 0.5)
    return list(np.histogram_bin_edges(values, 60))


def _write_plain_numbers(axis: Axis) -> None:
    axis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axis.set_minor_formatter(NullFormatter())


def _count_clips(axis: Axis) -> None:
    axis.set_major_locator(MaxNLocator(6, steps=[1, 2, 5, 10], integer=True))
    axis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    axis.set_label_text("clips", color=drawing.INK)


def _prepare(axes: Axes, title: str, x: str, y: str) -> None:
    axes.set_facecolor(drawing.PAPER)
    axes.set_title(title, loc="left", color=drawing.INK, fontsize=11)
    axes.set_xlabel(x, color=drawing.INK)
    axes.set_ylabel(y, color=drawing.INK)
    axes.grid(color=drawing.RULE, linewidth=0.7)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


@dataclass(frozen=True)
class CropRow:
    """One clip of a contact sheet."""

    bucket: str  # text above the caption
    caption: str
    frames: NDArray[np.uint8]  # [F, H, W, 3] RGB, whole pictures; F = 0: it cannot be decoded
    # top, left, height, width of the crop as fractions of the picture; None: it is not cropped
    kept: tuple[float, float, float, float] | None
    failure: str = ""  # why there are no frames


def frame_size(height: int, width: int) -> tuple[int, int]:
    scale = min(FRAME_HEIGHT / height, MAX_FRAME_WIDTH / width)
    return max(1, round(height * scale)), max(1, round(width * scale))


def contact_sheet(path: Path, rows: Sequence[CropRow]) -> None:
    drawing.save_picture(drawing.Grid([_grid_row(row) for row in rows], _LABEL_WIDTH).draw(), path)


def _grid_row(row: CropRow) -> drawing.GridRow:
    caption = drawing.wrap(row.caption[:_CAPTION_LETTERS], drawing.TEXT_SIZE, _LABEL_WIDTH)
    if len(caption) > _CAPTION_LINES:
        caption = [*caption[: _CAPTION_LINES - 1], f"{caption[_CAPTION_LINES - 1][:-2]}…"]
    label = drawing.wrapped_lines(row.bucket, _LABEL_WIDTH, ink=drawing.SERIES[0])
    label += [drawing.TextLine(line) for line in caption]
    if row.kept is not None:
        share = f"{row.kept[2] * row.kept[3]:.0%} of the picture is kept"
        label.append(drawing.TextLine(share, drawing.NOTE_SIZE, drawing.PALE_INK))
    strip = _draw_strip(row) if len(row.frames) else _draw_failure(row.failure)
    return drawing.GridRow(label, [drawing.GridCell(strip)])


def _draw_strip(row: CropRow) -> Image.Image:
    """Frames side by side, each in the middle of the strip's height."""
    num_frames = len(row.frames)
    height, width = frame_size(*row.frames.shape[1:3])
    chosen = np.linspace(0, num_frames - 1, min(num_frames, MAX_FRAMES)).round().astype(int)
    pictures = []
    for index in chosen:
        frame = Image.fromarray(np.ascontiguousarray(row.frames[index]))
        small = frame.resize((width, height), Image.Resampling.LANCZOS)
        picture = Image.new("RGB", (width, FRAME_HEIGHT), drawing.PAPER)
        top = (FRAME_HEIGHT - height) // 2
        picture.paste(small if row.kept is None else _cropped(small, row.kept), (0, top))
        pictures.append(picture)
    return drawing.side_by_side(pictures, _FRAME_GAP)


def _draw_failure(reason: str) -> Image.Image:
    strip = Image.new("RGB", (_FAILURE_WIDTH, FRAME_HEIGHT), BARE)
    pen = ImageDraw.Draw(strip)
    width = _FAILURE_WIDTH - 2 * _FAILURE_MARGIN
    for number, line in enumerate(
        drawing.wrap(f"Cannot be decoded: {reason}", drawing.NOTE_SIZE, width)
    ):
        place = (_FAILURE_MARGIN, _FAILURE_MARGIN + number * drawing.line_height(drawing.NOTE_SIZE))
        drawing.draw_text(pen, place, line, drawing.NOTE_SIZE, drawing.INK)
    return strip


def _cropped(frame: Image.Image, kept: tuple[float, float, float, float]) -> Image.Image:
    """The frame, pale outside the crop."""
    top, left, height, width = kept
    edges = np.array([left, top, left + width, top + height]) * (frame.size * 2)
    box = tuple(edges.round().astype(int).tolist())
    pale = Image.blend(frame, Image.new("RGB", frame.size, drawing.PAPER), 0.7)
    pale.paste(frame.crop(box), box[:2])
    outline = (box[0], box[1], box[2] - 1, box[3] - 1)
    ImageDraw.Draw(pale).rectangle(outline, outline=drawing.SERIES[1], width=2)
    return pale


def write_pictures(
    folder: Path,
    catalog: Catalog,
    plan: Plan | None = None,
    recipe: Recipe | None = None,
    progress: Callable[[int, int], None] | None = None,
    stages: Sequence[Mapping[str, Any]] = (),
) -> list[Path]:
    """Draw a catalog or, with a plan, what is trained on; `stages` are those of `plan_summary`.

    `buckets.png` (of the first stage; further ones are `buckets_STAGE_CATALOG.png`),
    `batches.png` in the same way,
    `histogram_ATTRIBUTE.png` for each score and each number that a stage has a condition on, and
    `contact_sheet.png`: frames of a few clips of each bucket, from the least to the most cropped.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise errors.DataError(f"The folder {folder} cannot be made: {error.strerror}.") from error
    with decode_worker.DecodePool(1) as pool:  # so that no file can hang or crash this process
        if plan is None or recipe is None:
            numbers = {name: catalog.column(name).astype(np.float64) for name in _scores(catalog)}
            drawings: list[_Drawing] = [
                (_file("histogram", name), partial(histogram_picture, name=name, values=each))
                for name, each in numbers.items()
            ]
            drawings += _sheet(_whole(catalog, pool))
        else:
            drawings = [
                *_buckets(plan, recipe.data),
                *_batches(plan, stages),
                *_stage_histograms(plan, recipe.data),
                *_sheet(_crops(plan, recipe, pool)),
            ]
        for done, (name, draw) in enumerate(drawings, start=1):
            draw(folder / name)
            if progress is not None:
                progress(done, len(drawings))
    return [folder / name for name, _ in drawings]


def _sheet(rows: Iterator[CropRow]) -> Iterator[_Drawing]:
    first = next(rows, None)
    if first is not None:
        chosen = islice(chain([first], rows), MOST_ROWS)
        yield "contact_sheet.png", lambda path: contact_sheet(path, list(chosen))


def _buckets(plan: Plan, data: DataSection) -> Iterator[_Drawing]:
    sources = {stream.source for stream in plan.streams()}
    name = "buckets.png"
    for stage in plan.stages:
        for stream in stage.streams:
            part = stream.parts[-1]
            catalog, shapes = part.catalog, part.members.shapes
            choices = np.full(len(catalog), -1)
            for index in range(len(shapes)):
                choices[part.rows_in(part.epoch_span.first_epoch, index)] = index
            known = (stream.stage, *([stream.source] if len(sources) > 1 else []))
            draw = partial(
                buckets_picture,
                shapes=shapes,
                choices=choices,
                clip_sizes=np.column_stack([catalog.column("height"), catalog.column("width")]),
                clip_frames=buckets.frame_counts(catalog, data.fps),
                dropped=stage.dropped[stream.source],
                stride=data.frame_stride,
                title=f"Stage {', catalog '.join(known)}",
            )
            yield (name if stream is plan.streams()[0] else _file("buckets", *known)), draw


def _batches(plan: Plan, stages: Sequence[Mapping[str, Any]]) -> Iterator[_Drawing]:
    has_several = len({stream.source for stream in plan.streams()}) > 1
    for number, entry in enumerate(stages):
        known = (entry["stage"], *([entry["source"]] if has_several else []))
        draw = partial(batches_picture, entry=entry, title=f"Stage {', catalog '.join(known)}")
        yield _file("batches", *(known if number else ())), draw


def _file(*parts: str) -> str:
    return "_".join(re.sub(r"[^\w.-]+", "-", part) for part in parts) + ".png"


def _stage_histograms(plan: Plan, data: DataSection) -> Iterator[_Drawing]:
    by_source: dict[str, list[Stream]] = {}
    for stream in plan.streams():
        by_source.setdefault(stream.source, []).append(stream)
    for source, streams in by_source.items():
        catalog = streams[0].parts[-1].catalog
        for name, numbers in _numbers_of_interest(catalog, plan, data).items():
            known = (name, source) if len(by_source) > 1 else (name,)
            stages = [
                (f"stage {stream.stage}", numbers[stream.parts[-1].members.all_rows()])
                for stream in streams
            ]
            label = " in catalog ".join(known)
            draw = partial(histogram_picture, name=label, values=numbers, stages=stages)
            yield _file("histogram", *known), draw


def _numbers_of_interest(
    catalog: Catalog, plan: Plan, data: DataSection
) -> Mapping[str, NDArray[np.float64]]:
    """[N] values by name: all scores, and what stages have conditions on."""
    asked = [
        parse_condition(condition)[0] for each in plan.stages for condition in each.stage.where
    ]
    asked += [data.difficulty] if data.difficulty else []
    found = {}
    for name in dict.fromkeys([*_scores(catalog), *asked]):
        if name == "difficulty":  # an alias of another
            continue
        try:
            column = values(catalog, name, data)
        except errors.DataError:  # another catalog has it
            continue
        if np.issubdtype(column.dtype, np.number):
            found[name] = column.astype(np.float64)
    return found


def _scores(catalog: Catalog) -> tuple[str, ...]:
    return catalog.attribute_names or ("duration_seconds",)


def _crops(plan: Plan, recipe: Recipe, pool: decode_worker.DecodePool) -> Iterator[CropRow]:
    sources = {stream.source for stream in plan.streams()}
    shown: set[tuple[str, Bucket]] = set()
    for stream in plan.streams():
        part = stream.parts[-1]
        for index, shape in enumerate(part.members.shapes):
            rows = part.rows_in(part.epoch_span.first_epoch, index)
            if len(rows) and (stream.source, shape) not in shown:
                shown.add((stream.source, shape))
                label = f"{shape}, catalog {stream.source}" if len(sources) > 1 else str(shape)
                for row in _least_to_most_cropped(part.catalog, rows, shape):
                    clip = part.catalog.clip(row)
                    seed = buckets.sample_seed(recipe.seed, stream.stage, stream.source, 0, clip)
                    window = buckets.sample_window(clip, shape, recipe.data, seed)
                    kept = (
                        window.top / window.scaled_height,
                        window.left / window.scaled_width,
                        window.height / window.scaled_height,
                        window.width / window.scaled_width,
                    )
                    yield _row(label, clip, window, kept, pool)


def _least_to_most_cropped(catalog: Catalog, rows: buckets.Rows, shape: Bucket) -> list[int]:
    widths, heights = catalog.column("width")[rows], catalog.column("height")[rows]
    cut = np.abs(np.log(widths / heights) - np.log(shape.width / shape.height))
    count = min(CLIPS_PER_BUCKET, len(rows))
    places = np.linspace(0, len(rows) - 1, count).round().astype(int)
    chosen: list[int] = rows[np.argsort(cut, kind="stable")[places]].tolist()
    return chosen


def _whole(catalog: Catalog, pool: decode_worker.DecodePool) -> Iterator[CropRow]:
    """Clips that are evenly spread over a catalog, whole."""
    count = min(MOST_ROWS // 3, len(catalog))
    for row in np.linspace(0, len(catalog) - 1, count).round().astype(int).tolist():
        clip = catalog.clip(row)
        frames = min(clip.num_frames, _MOST_FRAMES)
        shape = Bucket(num_frames=frames, height=clip.height, width=clip.width)
        window = buckets.sample_window(
            clip, shape, DataSection(catalog=Path(), buckets=(shape,)), 0
        )
        length = "image" if clip.kind == "image" else f"{clip.num_frames:,} frames"
        yield _row(f"{length} of {clip.width}x{clip.height}", clip, window, None, pool)


def _row(
    bucket: str,
    clip: Clip,
    window: Window,
    kept: tuple[float, float, float, float] | None,
    pool: decode_worker.DecodePool,
) -> CropRow:
    caption = clip.caption or f"(no caption) {Path(clip.path).name}"
    try:
        frames = pool.submit(_overview(window)).result()
    except errors.ClipError as error:
        return CropRow(bucket, caption, np.empty((0, 1, 1, 3), np.uint8), kept, error.reason)
    return CropRow(bucket, caption, frames.transpose(1, 2, 3, 0), kept)


def _overview(window: Window) -> Window:
    every = max(1, -(-(window.num_frames - 1) // (MAX_FRAMES - 1)))
    height, width = frame_size(window.source_height, window.source_width)
    return replace(
        window,
        num_frames=(window.num_frames - 1) // every + 1,
        stride=window.stride * every,
        timestamps=window.timestamps[::every],
        frames=window.frames[::every],
        scaled_height=height,
        scaled_width=width,
        top=0,
        left=0,
        height=height,
        width=width,
        is_flipped=False,
    )
