"""Tables of `longtake data show`: a catalog, and what a recipe trains on."""

import shlex
from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import Any

from rich import box
from rich.console import Console, RenderableType
from rich.table import Table

from longtake.data.clip import MIRRORED
from longtake.formatting import escape, escape_lines, format_duration, plural

MOST_ROWS = 10
"""Maximum number of rejection reasons, or of values of one property of clips, that are listed."""
_PIPE_WIDTH = 100
_LEVELS = " ▁▂▃▄▅▆▇█"
_MUCH_IS_CUT = 0.25
_LITTLE_DRIFT = 0.05
_LEGEND = {
    "begins": "between two numbers, a stage is mixed with the one before",
    "size": "width x height",
    "cut": "share of the picture that is cropped away",
    "scale": "above 1, pictures are enlarged",
    "enlarged": "clips whose pictures are enlarged",
    "dropped": "counted in the bucket that a clip would be trained in otherwise",
    "tokens": "of a clip",
    "batch": "clips in an update",
    "batches": "in an epoch",
    "carried over": "clips that the first epoch leaves over; they begin the next one",
    "last batch": "clips in it, where epochs end",
    "padding": "share of all batches that stays empty because of it",
    "seconds": "of a batch in the model's forward and backward pass, predicted, without decoding",
    "time": "share of an epoch's",
}


def print_show(console: Console, result: Mapping[str, Any]) -> None:
    """Print facts of catalogs (`curriculum_facts.describe`) in 100 or more columns in a pipe."""
    if not console.is_terminal:
        console.width = max(console.width, _PIPE_WIDTH)
    catalogs = result.get("catalogs", {"": result})
    for name, facts in catalogs.items():
        print_catalog(console, facts, name)
    if "stages" in result:
        print_plan(console, result)


def print_catalog(console: Console, facts: Mapping[str, Any], name: str = "") -> None:
    called = f"Catalog {name}: {facts['catalog']}" if name else f"Catalog {facts['catalog']}"
    _title(console, called)
    count, seconds = facts["clips"], facts["hours"] * 3600
    parts = [
        f"{plural(count, 'clip')}: {plural(facts['videos'], 'video')} ({format_duration(seconds)}, "
        f"{plural(facts['frames'] - facts['images'], 'frame')}) and "
        f"{plural(facts['images'], 'image')}",
        f"{facts['captioned']:,} with a caption, {count - facts['captioned']:,} without",
        f"{plural(facts['duplicates'], 'duplicate')} left out, "
        f"{plural(len(facts['rejected']), 'file')} rejected",
    ]
    _print(console, f"{'; '.join(parts)}.\n")
    _print(console, _properties(facts))
    if facts["clips"]:
        _print(console, _spreads(facts))
    if reasons := facts["reject_reasons"]:
        table = _table("files", "rejected because", "such as")
        table.columns[0].justify = "right"
        first = {entry["reason"]: entry["path"] for entry in reversed(facts["rejected"])}
        for reason, number in list(reasons.items())[:MOST_ROWS]:
            table.add_row(_number(number), escape(reason), escape(_short(first[reason])))
        if len(reasons) > MOST_ROWS:
            rest = sum(list(reasons.values())[MOST_ROWS:])
            table.add_row(_number(rest), f"{len(reasons) - MOST_ROWS} other reasons (--json)", "")
        _print(console, table)


def _properties(facts: Mapping[str, Any]) -> Table:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="bold", no_wrap=True)
    grid.add_column(overflow="fold")
    sizes = {f"{size['width']}x{size['height']}": size["clips"] for size in facts["sizes"]}
    counted = {
        "sizes": sizes,
        "aspect ratios": facts["aspects"],
        "codecs": facts["codecs"],
        "pixel formats": facts["pixel_formats"],
        "colour range": facts["color_ranges"],
        "colour transfer": facts["color_transfers"],
        "colour matrix": facts["color_matrices"],
        "rotation": {_angle(int(each)): count for each, count in facts["rotations"].items()},
    }
    for name, counts in counted.items():
        grid.add_row(name, _listed(counts, facts["clips"]))
    special = {
        "HDR": facts["hdr"],
        "720 lines and more without a colour matrix (data.untagged)": facts["untagged_hd"],
        "variable frame rate": facts["variable_frame_rate"],
        "decoded from the beginning for want of timestamps": facts["unreliable_timestamps"],
        "transcoded by `data prepare`": facts["prepared"],
    }
    special = {name: count for name, count in special.items() if count}
    if special:
        grid.add_row("of these", _listed(special, facts["clips"]))
    return grid


def _angle(rotation: int) -> str:
    return f"{rotation % MIRRORED}°" + ", mirrored" * (rotation >= MIRRORED)


def _listed(counts: Mapping[str, int], total: int) -> str:
    """List the most frequent values of a property of clips, each with its number of clips."""
    shown = list(counts.items())[:MOST_ROWS]
    said = [f"{escape(name) or 'unspecified'} [dim]({count:,})[/]" for name, count in shown]
    if len(counts) > MOST_ROWS:
        said.append(f"others [dim]({total - sum(count for _, count in shown):,})[/]")
    return " · ".join(said) or "-"


def _spreads(facts: Mapping[str, Any]) -> Table:
    names = ("of clips", "min", "5 %", "25 %", "median", "75 %", "95 %", "max", "mean")
    table = _table("", numbers=names)
    for name, spread in [*facts["numbers"].items(), *facts["attributes"].items()]:
        keys = ("min", "q5", "q25", "median", "q75", "q95", "max", "mean")
        if spread["known"]:
            label = escape(name.replace("_", " "))
            table.add_row(label, _number(spread["known"]), *(_number(spread[key]) for key in keys))
    return table


def print_plan(console: Console, facts: Mapping[str, Any]) -> None:
    _title(console, "Plan")
    planned = facts["planned_steps"]
    stages = "the last stage has no end" if planned is None else f"the stages have {planned:,}"
    buckets = (bucket for each in facts["stages"] for bucket in each["buckets"])
    sizes = " or ".join(f"{n:,}" for n in sorted({each["batch_size"] for each in buckets}))
    _print(
        console,
        f"Training ends after {plural(facts['steps'], 'step')} of {sizes} clips; {stages}.\n",
    )
    _print(console, _stages(facts))
    if len(facts["timeline"]) > 1:
        _print(console, _timeline_bars(facts))
    sources = {entry["source"] for entry in facts["stages"]}
    for entry in facts["stages"]:
        catalog = f", catalog {entry['source']}" if len(sources) > 1 else ""
        _title(console, f"Stage {entry['stage']}{catalog}")
        _print(console, _buckets(entry))
        _print(console, _batches(entry))
        if entry["dropped"] and len(entry["buckets"]) > 1:
            _print(console, _drops(entry))
        if entry["dropped"]:
            _print(console, _examples(entry))
    used = {name for entry in facts["stages"] for name in _columns(entry)}
    legend = Table.grid(padding=(0, 2))
    for name, meaning in _LEGEND.items():
        if name in used:
            on = f"; on {facts['device']}" if name == "seconds" and facts["device"] else ""
            legend.add_row(f"[dim]{name}[/]", f"[dim]{escape(meaning + on)}[/]")
    _print(console, legend)
    if (found := facts.get("proposal")) is not None:
        _title(console, "Other buckets", "yellow")
        clips = plural(found["more_clips"], "more clip")
        _print(console, f"These keep {clips}; `longtake plan` says whether they fit:")
        console.print(f"  --set {shlex.quote(found['set'])}", markup=False, soft_wrap=True)
    if (drift := _drift(facts)).row_count:
        _title(console, "Drift from stage to stage")
        _print(console, drift)
    if facts["warnings"]:
        _title(console, "Warnings", "yellow")
        grid = Table.grid(padding=(0, 1))
        for sentence in facts["warnings"]:
            grid.add_row("-", escape_lines(sentence))
        _print(console, grid)
    if facts["refusal"]:
        _title(console, "Training would refuse to begin", "red")
        _print(console, escape_lines(facts["refusal"]))


def _stages(facts: Mapping[str, Any]) -> Table:
    names = ("share", "begins", "steps", "epochs", "clips", "kept", "dropped")
    table = _table("stage", "catalog", numbers=names)
    before = None
    for entry in facts["stages"]:
        # A stage has a row for each of its catalogs, and its name only in the first.
        is_new, before = entry["stage"] != before, entry["stage"]
        name, begins = (entry["stage"], _beginning(entry)) if is_new else ("", "")
        keys = ("trained_steps", "epochs", "clips", "selected")
        table.add_row(
            escape(name),
            escape(entry["source"]),
            f"{entry['share']:.0%}",
            begins,
            *(_number(entry[key]) for key in keys),
            _number(entry["clips"] - entry["selected"]),
        )
    return table


def _beginning(entry: Mapping[str, Any]) -> str:
    first, half = entry["first_step"], entry["ramp_steps"] // 2
    return f"{first - half:,} to {first + half:,}" if half else f"{first:,}"


def _timeline_bars(facts: Mapping[str, Any]) -> Table:
    """Return a line of text bars for each stage: its share of the batches over the training."""
    grid = Table.grid(padding=(0, 2))
    for stage, shares in facts["timeline"].items():
        # Any share above zero shows at least the lowest bar.
        levels = (max(round(share * (len(_LEVELS) - 1)), int(share > 0)) for share in shares)
        bars = "".join(_LEVELS[level] for level in levels)
        grid.add_row(f"  {escape(stage)}", bars)
    width = len(next(iter(facts["timeline"].values())))
    planned = facts["planned_steps"]
    end = facts["steps"] if planned is None else min(facts["steps"], planned)
    grid.add_row("", f"0{f'step {end:,}':>{max(0, width - 1)}}")
    return grid


def _buckets(entry: Mapping[str, Any]) -> Table:
    names = ("clips", "kept", "dropped", "cut", "scale", "enlarged")
    table = _table(numbers=("frames", "size", *names))
    for bucket in entry["buckets"]:
        table.add_row(
            *_shape(bucket),
            *(_number(bucket[key]) for key in ("clips", "kept", "dropped")),
            _share_cut(bucket["share_cut"]),
            _number(bucket["scale"]),
            f"[yellow]{_number(bucket['enlarged'])}[/]" if bucket["enlarged"] else "0",
        )
    return table


def _columns(entry: Mapping[str, Any]) -> set[str]:
    """Return the names of the columns that the tables of a curriculum stage show."""
    tables = (_buckets(entry), _batches(entry))
    begins = {"begins"} if entry["ramp_steps"] else set[str]()
    return {str(column.header) for table in tables for column in table.columns} | begins


def _batches(entry: Mapping[str, Any]) -> Table:
    """Return a table of the batches of a stage's buckets (clip shapes), without empty columns."""
    columns = {
        "tokens": [_number(each["tokens"]) for each in entry["buckets"]],
        "batch": [_number(each["batch_size"]) for each in entry["buckets"]],
        "batches": [f"{each['batches_per_epoch']:,.2f}" for each in entry["buckets"]],
        "carried over": [_number(each["tail"]) for each in entry["buckets"]],
        "last batch": [_number(each["last_batch"]) for each in entry["buckets"]],
        "padding": [_percent(each["padding"]) for each in entry["buckets"]],
        "seconds": [_number(each["batch_seconds"]) for each in entry["buckets"]],
        "time": [_percent(each["time_share"]) for each in entry["buckets"]],
    }
    shown = {name: each for name, each in columns.items() if not set(each) <= {"-", "0", "0.0%"}}
    if len(entry["buckets"]) == 1:
        shown.pop("time", None)
    table = _table(numbers=("frames", "size", *shown))
    for number, bucket in enumerate(entry["buckets"]):
        table.add_row(*_shape(bucket), *(cells[number] for cells in shown.values()))
    return table


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.1%}"


def _shape(bucket: Mapping[str, Any]) -> tuple[str, str]:
    return str(bucket["num_frames"]), f"{bucket['width']}x{bucket['height']}"


def _share_cut(share: float | None) -> str:
    if share is None:
        return "-"
    return f"[yellow]{share:.0%}[/]" if share > _MUCH_IS_CUT else f"{share:.0%}"


def _drops(entry: Mapping[str, Any]) -> Table:
    table = _table(numbers=("frames", "size", "dropped"))
    for reason in entry["dropped"]:
        table.add_column(escape(reason), justify="right", max_width=18, overflow="fold")
    for bucket in entry["buckets"]:
        counts = (bucket["reasons"].get(reason, 0) for reason in entry["dropped"])
        table.add_row(*_shape(bucket), _number(bucket["dropped"]), *map(_number, counts))
    return table


def _examples(entry: Mapping[str, Any]) -> Table:
    table = _table("clips", "dropped because", "such as")
    table.columns[0].justify = "right"
    for reason, count in entry["dropped"].items():
        paths = ", ".join(map(_short, entry["examples"][reason]))
        table.add_row(_number(count), escape(reason), escape(paths))
    return table


def _drift(facts: Mapping[str, Any]) -> Table:
    numbers = ("before", "after", "standard deviations")
    table = _table("into stage", "mean of", numbers=numbers)
    for drift in facts["drift"]:
        if drift["distance"] is not None and drift["distance"] < _LITTLE_DRIFT:
            continue
        distance = "all alike before" if drift["distance"] is None else f"{drift['distance']:.2f}"
        table.add_row(
            escape(drift["stage"]),
            escape(drift["attribute"].replace("_", " ")),
            _number(drift["before"]),
            _number(drift["after"]),
            f"[red]{distance}[/]" if drift["is_above_limit"] else distance,
        )
    return table


def _table(*texts: str, numbers: Sequence[str] = ()) -> Table:
    """Return an empty table with text columns, then number columns; numbers are never cut short."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for name in texts:
        table.add_column(name, overflow="fold")
    for name in numbers:
        table.add_column(name, justify="right", overflow="fold")
    return table


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    if isinstance(value, int) or abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def _short(path: str) -> str:
    return "/".join(PurePath(path).parts[-2:])


def _title(console: Console, text: str, colour: str = "default") -> None:
    _print(console, escape(text), style=f"bold {colour}")


def _print(console: Console, what: RenderableType, style: str | None = None) -> None:
    console.print(what, style=style, soft_wrap=False)  # tables need to know their width
