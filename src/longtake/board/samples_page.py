"""The page of a run's samples: prompts by checkpoints, one checkpoint, or two side by side.

The HTML has the grid, the measures and the data for scripts; samples.js makes the other views.
"""

import shlex
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cache, partial
from typing import Any, Final

from markupsafe import Markup

from longtake import fsio, process
from longtake.board import svg
from longtake.board.overview import status_of
from longtake.board.pages import PageLinks, render, rounded
from longtake.config import Recipe
from longtake.evaluation_dir import Alarm, Scene
from longtake.formatting import natural_key
from longtake.inspection.reader import RunFacts
from longtake.inspection.sampled import SampledPreset, has_results, preset_names, read_preset
from longtake.run_dir import RunDirectory

COLUMNS: Final = 6
"""Default number of checkpoints side by side: as many videos as a browser decodes at once."""
COLUMNS_OF_TINY: Final = 12
COLUMN_CHOICES: Final = (4, 6, 8, 12, 24)
VIEWS: Final = ("grid", "single", "compare")
MODES: Final = ("side", "swipe", "difference")
TINY_SIDE: Final = 128
"""Longer side in pixels below which a clip is shown enlarged by a whole factor, so not blurred."""
_CELL_SIDE = 96
_MOST_OFFERED = 200
_MOST_PROMPT = 2000
_EARLIER: Final = {"before": "the checkpoint before", "first": "the first checkpoint"}


@dataclass(frozen=True)
class Cell:
    """The sample of one prompt and seed at one checkpoint; `url` is None without a file."""

    step: int
    scene: int
    url: str | None
    poster: str | None
    is_video: bool
    missing: str = ""


@dataclass(frozen=True)
class Measured:
    """One measure of the samples over the checkpoints, as a line of the page."""

    name: str
    unit: str
    values: list[float | None]
    """The measure's value at each checkpoint; None where it was not measured."""
    band: tuple[float, float] | None
    marks: dict[int, str]
    picture: Markup


@dataclass(frozen=True)
class Choice:
    """Choices of the samples page by the URL's query; defaults where missing or invalid."""

    preset: str
    step: int
    view: str
    mode: str
    against: str
    columns: int
    prompt: int | None
    notes: tuple[str, ...] = ()


def render_samples(facts: RunFacts, links: PageLinks, query: Mapping[str, str]) -> str:
    """Return the HTML of a run's samples page.

    Args:
        facts: the run's facts.
        links: how the page refers to others.
        query: `preset`, `step`, `view` (grid, single or compare), `with` (what the step is compared
            with: `preset:NAME`, `run:NAME`, `before` or `first`), `mode` (side, swipe or
            difference), `prompt` (a number, from 0) and `columns`.
    """
    run, path = facts.run, shlex.quote(str(facts.run.path))
    presets = {name: read_preset(run, name, facts.kept) for name in preset_names(run)}
    failed = [(name, each) for name, preset in presets.items() for each in preset.failed]
    common: dict[str, Any] = {
        "page": "samples",
        "facts": facts,
        "status": status_of(facts),
        "failed": failed,
        "command": f"{process.command()} evaluate {path}",
    }
    sampled = [each for each in presets.values() if each.results]
    if not sampled:
        return render("samples.html", links, **common, sampled=None)
    # The preset that the query names, else one with its step, else the newest sampled one.
    step = _number(query.get("step"))
    preset = max(
        sampled,
        key=lambda each: (each.name == query.get("preset"), step in each.steps, each.steps[-1]),
    )
    choice = _choice(preset, query)
    shown = columns(preset.steps, choice.step, choice.columns)
    measured = measures_of(preset, choice.step)
    payload = _payload(facts, links, preset, choice, shown, measured)
    return render(
        "samples.html",
        links,
        **common,
        said_of_alarm=said_of_alarm,
        sampled=preset,
        presets=sampled,
        choice=choice,
        notes=[*choice.notes, *preset.problems],
        columns=shown,
        column_choices=sorted({*COLUMN_CHOICES, choice.columns}),
        rows=[_row(facts, links, preset, number, shown) for number in range(len(preset.scenes))],
        is_tiny=_is_tiny(preset),
        measures=measured,
        index=preset.steps.index(choice.step),
        places=[preset.steps.index(step) for step in shown],
        result=preset.result(choice.step),
        offered=_offered(facts, presets, preset) if links.series(facts.name) else _earlier(preset),
        payload=payload,
        # A report cannot load other presets later, so it has their newest samples.
        galleries=[] if links.series(facts.name) else _galleries(facts, links, sampled, preset),
        modes=MODES,
        views=VIEWS,
    )


def _number(text: str | None) -> int | None:
    is_number = text is not None and text.isascii() and text.isdecimal() and len(text) <= 15
    return int(text) if is_number and text else None


def _choice(preset: SampledPreset, query: Mapping[str, str]) -> Choice:
    notes, asked = [], query.get("preset")
    if asked and asked != preset.name:
        notes.append(f"There is no sample of a preset {asked[:200]}; this is {preset.name}.")
    wanted = _number(query.get("step"))
    step = preset.steps[-1]
    if wanted is not None:
        step = min(preset.steps, key=lambda each: (abs(each - wanted), each))
        if step != wanted:
            notes.append(f"Step {wanted:,} was not sampled; the nearest is {step:,}.")
    prompt, count = _number(query.get("prompt")), _number(query.get("columns"))
    usual = COLUMNS_OF_TINY if _is_tiny(preset) else COLUMNS
    return Choice(
        preset.name,
        step,
        _one_of(VIEWS, query.get("view")),
        _one_of(MODES, query.get("mode")),
        query.get("with", "")[:1000],
        min(max(count or usual, 3), max(COLUMN_CHOICES)),
        prompt if prompt is not None and prompt < len(preset.scenes) else None,
        tuple(notes),
    )


def _one_of(known: Sequence[str], wanted: str | None) -> str:
    return wanted if wanted is not None and wanted in known else known[0]


def columns(steps: Sequence[int], chosen: int, count: int) -> list[int]:
    """Choose at most `count` sampled steps: first, chosen, newest, and others evenly between."""
    if len(steps) <= count:
        return list(steps)
    places = {round(place * (len(steps) - 1) / (count - 1)) for place in range(count)}
    wanted = steps.index(chosen)
    if wanted not in places:
        # The chosen step takes the place of its nearest neighbour, but never of the first or last.
        inner = places - {0, len(steps) - 1}
        places -= {min(inner, key=lambda place: abs(place - wanted))} if inner else set()
        places.add(wanted)
    return [steps[place] for place in sorted(places)]


# --- The grid ---------------------------------------------------------------------------------


def _row(
    facts: RunFacts, links: PageLinks, preset: SampledPreset, number: int, steps: Iterable[int]
) -> dict[str, Any]:
    scene = preset.scenes[number]
    cells = [_cell(facts, links, preset, number, step) for step in steps]
    height, width = (preset.setting(name, scene) for name in ("height", "width"))
    # The input pictures' files are named by the number of their prompt, as the videos are.
    files = (each.files[scene] for each in preset.results if scene in each.files)
    prompt, pictures = next(files, "").partition("_")[0], []
    for name, _ in scene.pictures if prompt.isdecimal() else ():
        path = f"evaluations/{preset.name}/pictures/{int(prompt):02d}_{name}.png"
        # The name is that of a record, and must not lead out of the folder.
        is_there = "/" not in name and (preset.run.path / path).is_file()
        if is_there and (url := links.media(facts.name, path)):
            pictures.append({"name": name, "url": url})
    return {
        "number": number,
        "prompt": _shown_prompt(scene),
        "note": scene.note,
        "pictures": pictures,
        "cells": cells,
        "size": cell_size(height, width, _CELL_SIDE),
    }


def _galleries(
    facts: RunFacts, links: PageLinks, sampled: Sequence[SampledPreset], shown: SampledPreset
) -> list[dict[str, Any]]:
    """Return the newest results of the other presets, for a page that cannot load them later."""
    found = []
    for preset in sampled:
        result = preset.results[-1]
        if preset.name != shown.name:
            rows = []
            for number, scene in enumerate(preset.scenes):
                # A video shows all that its prompt asks for, or not, or that was not measured.
                adherence = result.adherence.get(scene)
                is_right = None if adherence is None else adherence >= 1
                row = _row(facts, links, preset, number, [result.step])
                rows.append({**row, "is_right": is_right})
            about = {"name": preset.name, "step": result.step, "measures": result.measures}
            found.append({**about, "rows": rows, "is_tiny": _is_tiny(preset)})
    return found


def _cell(facts: RunFacts, links: PageLinks, preset: SampledPreset, number: int, step: int) -> Cell:
    result = preset.result(step)
    file = result.files.get(preset.scenes[number]) if result else None
    if file is None:
        return Cell(step, number, None, None, False, "not sampled")
    folder = preset.folder(step)
    path, whole, is_video = f"{folder}/{file}", preset.run.path / folder, file.endswith(".mp4")
    read = partial(preset.files_there, step)
    if file not in facts.kept(f"{whole}:files", fsio.file_version(whole), read):
        return Cell(step, number, None, None, is_video, f"{file} is gone")
    url = links.media(facts.name, path)
    poster = links.poster(facts.name, path) if is_video else None
    what = "only a still, as" if poster else "left out, as"
    missing = "" if url else f"{what} this page would be too large"
    return Cell(step, number, url, poster, is_video, missing)


def _shown_prompt(scene: Scene) -> str:
    return scene.prompt if len(scene.prompt) <= _MOST_PROMPT else f"{scene.prompt[:_MOST_PROMPT]}…"


def _is_tiny(preset: SampledPreset) -> bool:
    sides = preset.setting("height"), preset.setting("width")
    return all(side is not None and side < TINY_SIDE for side in sides)


def cell_size(height: float | None, width: float | None, side: int) -> tuple[int, int] | None:
    """Return the shown width and height of a clip; tiny ones are enlarged. None if unknown."""
    if height is None or width is None:
        return None
    longer = max(height, width)
    # A whole factor keeps the pixels of a tiny clip sharp.
    factor = max(1, side // longer) if longer < TINY_SIDE else 1.5 * side / longer
    return max(1, round(width * factor)), max(1, round(height * factor))


# --- Measures ---------------------------------------------------------------------------------


def measures_of(preset: SampledPreset, now: int) -> list[Measured]:
    """Return the means of a preset's measures over the checkpoints, then its held-out losses."""
    results = [each for each in preset.results if each.is_whole]
    names = dict.fromkeys(name for each in reversed(results) for name in each.measures)
    losses = dict.fromkeys(name for each in results for name in each.held_out)
    by_sigma = sorted((name for name in losses if name != "mean"), key=natural_key)
    found = []
    for name in names:
        values = [each.measures.get(name) for each in preset.results]
        spread = preset.reference["measures"].get(name)
        band = (
            (spread["low"], spread["high"]) if spread and spread["low"] <= spread["high"] else None
        )
        marks = {
            each.step: alarm["message"]
            for each in preset.results
            for alarm in each.alarms
            if alarm["measure"] == name and alarm["kind"] == "drift"
        }
        drawing = svg.sparkline(preset.steps, values, band=band, marks=marks, now=now)
        title, unit = name.replace("_", " "), _units().get(name, "")
        found.append(Measured(title, unit, _rounded(values), band, marks, drawing))
    for name in [*(["mean"] if "mean" in losses else []), *by_sigma]:
        title = "held-out loss" if name == "mean" else f"held-out loss, sigma {name}"
        values = [each.held_out.get(name) for each in preset.results]
        drawing = svg.sparkline(preset.steps, values, now=now)
        found.append(Measured(title, "", _rounded(values), None, {}, drawing))
    return found


def said_of_alarm(alarm: Alarm) -> str:
    """Describe an alarm about a preset's measures; all alarms but drift are called comparisons.

    Early models differ from their training clips by nature.
    """
    message = alarm["message"].replace(alarm["measure"], alarm["measure"].replace("_", " "), 1)
    return message if alarm["kind"] == "drift" else f"A comparison, not a fault: {message}"


def _rounded(values: Sequence[float | None]) -> list[float | None]:
    return rounded((float("nan") if value is None else value for value in values), digits=5)


# --- What is compared -------------------------------------------------------------------------


def _earlier(preset: SampledPreset) -> list[tuple[str, str]]:
    return list(_EARLIER.items()) if len(preset.steps) > 1 else []


def _offered(
    facts: RunFacts, presets: Mapping[str, SampledPreset], preset: SampledPreset
) -> list[tuple[str, str]]:
    """Return the results with which one can be compared (values of `with`), with titles."""
    scenes = set(preset.scenes)
    alike = [
        (f"preset:{name}", f"{name} ({each.weights or 'weights not known'})")
        for name, each in presets.items()
        if name != preset.name and scenes & set(each.scenes)
    ]
    runs = [
        (f"run:{name}", f"run {name or '.'}")
        for name, run in _runs_with(facts, preset.name).items()
    ]
    return [*_earlier(preset), *alike, *runs[:_MOST_OFFERED]]


def _runs_with(facts: RunFacts, preset: str) -> Mapping[str, RunDirectory]:
    """Return the other runs that have results of a preset, by name."""
    return {name: run for name, run in facts.neighbours().items() if has_results(run, preset)}


def _other(
    facts: RunFacts, preset: SampledPreset, against: str
) -> tuple[str, SampledPreset] | None:
    """Return run and preset to compare with, by the query's `with`; None if it is not found."""
    kind, _, name = against.partition(":")
    if not name:  # neither "run:" nor "preset:": the name of a run, a preset or its weights
        kind, name = "run" if against in facts.neighbours() else "preset", against
    if kind == "run":
        run = _runs_with(facts, preset.name).get(name)
        return None if run is None else (name, read_preset(run, preset.name, facts.kept))
    for each in preset_names(facts.run):
        if each != preset.name and has_results(facts.run, each):
            found = read_preset(facts.run, each, facts.kept)
            if name in (each, found.weights) and set(found.scenes) & set(preset.scenes):
                return facts.name, found
    return None


# --- What the script needs --------------------------------------------------------------------


def _payload(
    facts: RunFacts,
    links: PageLinks,
    preset: SampledPreset,
    choice: Choice,
    shown: list[int],
    measured: Sequence[Measured],
) -> dict[str, Any]:
    other_videos = None
    if choice.against and (other := _other(facts, preset, choice.against)) is not None:
        name, compared = other
        title = f"{name or compared.run.path.name}, {compared.name}"
        other_videos = {"title": title, **_videos(name, links, compared, preset.scenes)}
    checkpoints: list[int] = []
    with suppress(OSError):
        checkpoints = facts.run.checkpoint_folders()
    return {
        **_videos(facts.name, links, preset, preset.scenes),
        "columns": shown,
        "measures": [{"name": each.name, "values": each.values} for each in measured],
        "alarms": [
            [[said_of_alarm(alarm), alarm["kind"]] for alarm in each.alarms]
            for each in preset.results
        ],
        "command": {**_command(facts, preset), "checkpoints": checkpoints},
        "choice": asdict(choice),
        "other": other_videos,
        "sample": facts.summary.sample,
    }


def _videos(
    run: str, links: PageLinks, preset: SampledPreset, scenes: Sequence[Scene]
) -> dict[str, Any]:
    """Describe a preset's files of all checkpoints in the order of the scenes (prompt, seed).

    `sets` has each different list of file names once, as most checkpoints have the same; a step
    refers to its list by index.
    """
    sets: dict[tuple[str | None, ...], int] = {}
    steps, can_load = [], bool(links.series(run))
    for each in preset.results:
        files = tuple(each.files.get(scene) for scene in scenes)
        folder = preset.folder(each.step)
        steps.append(
            {
                "step": each.step,
                "set": sets.setdefault(files, len(sets)),
                "media": links.media(run, folder) if can_load else None,
                "poster": links.poster(run, folder) if can_load else None,
            }
        )
    return {
        "run": run,
        "preset": preset.name,
        "weights": preset.weights,
        "fps": preset.setting("fps") or 8,
        "frames": int(preset.setting("num_frames") or 0),
        "width": int(preset.setting("width") or 0),
        "height": int(preset.setting("height") or 0),
        "scenes": [{"prompt": _shown_prompt(each), "note": each.note} for each in scenes],
        "steps": steps,
        "sets": [list(files) for files in sets],
    }


def _command(facts: RunFacts, preset: SampledPreset) -> dict[str, Any]:
    """Return parts of the command that samples a video again; scripts add its step and file."""
    run, prompts = shlex.quote(str(facts.run.path)), list[str]()
    for scene in preset.scenes:
        settings = {**preset.newest.settings, **dict(scene.settings)}
        options = [f"--prompt {shlex.quote(scene.prompt)}", f"--seed {scene.seed}"]
        options += [f"--conditioning {shlex.quote(f'{name}=FILE')}" for name, _ in scene.pictures]
        options += sample_options(settings, preset.weights, facts.recipe)
        prompts.append(" ".join(options))
    return {"before": f"{process.command()} sample {run}", "prompts": prompts}


def sample_options(settings: Mapping[str, Any], weights: str, recipe: Recipe | None) -> list[str]:
    """Return the options of `longtake sample` for settings that differ from the recipe's."""
    usual: dict[str, Any] = {}
    if recipe is not None:
        usual = recipe.sampling.model_dump(mode="json")
        usual |= recipe.data.buckets[0].model_dump(include={"num_frames", "height", "width"})
    names = {
        "solver": "solver",
        "num_inference_steps": "steps",
        "guidance_scale": "guidance",
        "guidance_scale_2": "guidance-2",
        "shift": "shift",
        "num_frames": "frames",
        "height": "height",
        "width": "width",
        "fps": "fps",
        "negative_prompt": "negative",
        "adapter_strength": "adapter-strength",
        "other_expert": "other-expert",
    }
    options = [
        f"--{option} {shlex.quote(str(value))}"
        for name, option in names.items()
        if isinstance(value := settings.get(name), int | float | str) and value != usual.get(name)
    ]
    kept = recipe.ema.sampled() if recipe is not None else None
    # Without a recipe it is not known whether EMA weights are the default.
    if weights == "model" and (recipe is None or kept):
        options.append("--no-ema")
    profile = weights.removeprefix("ema/")
    if weights.startswith("ema/") and profile != kept:
        options.append(f"--profile {shlex.quote(profile)}")
    return options


@cache
def _units() -> Mapping[str, str]:
    """Return the units of longtake's own measures of samples, by name."""
    from longtake.evaluation.measures import MEASURES  # imports scipy, which is slow

    return {name: known.unit for name, known in MEASURES.items()}
