"""Which videos of which results stand beside each other; torch-free.

A row is a scene: a prompt and a seed. A column is a checkpoint of one run, or one of several runs.
"""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from longtake.errors import RunError
from longtake.evaluation.comparing.scenes import Scene, files_by_scene, of_prompts, prompt_number
from longtake.evaluation.reference_pictures import kept_picture
from longtake.evaluation_dir import EvaluationDirectory, Scores
from longtake.formatting import did_you_mean
from longtake.process import command
from longtake.run_dir import RunDirectory

MAX_COLUMNS = 8
_MOST_MEASURES = 6


@dataclass(frozen=True)
class Column:
    """One result: what was sampled from a checkpoint.

    Attributes:
        run: the run directory.
        scores: the result's record.
        titles: what stands above it, a line each.
    """

    run: RunDirectory
    scores: Scores
    titles: tuple[str, ...]

    @property
    def fps(self) -> float:
        """Of its videos."""
        return float(self.scores["settings"]["fps"])

    def video(self, scene: Scene) -> Path:
        """The file of a video that it has."""
        preset, step = self.scores["preset"], self.scores["step"]
        folder = EvaluationDirectory(self.run).result_path(preset, step)
        return folder / files_by_scene(self.scores)[scene]

    def picture(self, scene: Scene, name: str) -> Path:
        """The small copy of a picture that the video goes by, whether it exists or not."""
        preset = EvaluationDirectory(self.run).preset_path(self.scores["preset"])
        return kept_picture(preset, prompt_number(files_by_scene(self.scores)[scene]), name)


@dataclass(frozen=True)
class Comparison:
    """What is drawn: scenes down, columns across.

    Attributes:
        title: above all of it.
        scenes: what the videos show.
        columns: the results.
    """

    title: str
    scenes: tuple[Scene, ...]
    columns: tuple[Column, ...]

    @property
    def preset(self) -> str:
        """Whose results they are."""
        return self.columns[0].scores["preset"]

    @property
    def has_seeds(self) -> bool:
        """Whether seeds tell videos of the same prompt apart."""
        return len({scene.seed for scene in self.scenes}) > 1

    @property
    def pictures(self) -> tuple[str, ...]:
        """Names of the pictures that the videos go by."""
        return tuple(dict.fromkeys(name for scene in self.scenes for name, _ in scene.pictures))

    def measures(self) -> dict[str, list[tuple[float | None, bool]]]:
        """A few measures of each column, by name: the value, and whether there is an alarm.

        Always what of these there is: adherence, held-out loss, brightness. Then those with an
        alarm, the newest first.
        """
        # A range alarm is no verdict: early in training nearly all measures have one.
        alarmed = [
            {alarm["measure"] for alarm in each.scores["alarms"] if alarm["kind"] == "drift"}
            for each in self.columns
        ]
        values = [_values(each.scores) for each in self.columns]
        newest_first = [name for names in reversed(alarmed) for name in sorted(names)]
        wanted = ["adherence", "held-out loss", "brightness", *newest_first]
        known = [name for name in dict.fromkeys(wanted) if any(name in each for each in values)]
        return {
            name: [(v.get(name), name in a) for v, a in zip(values, alarmed, strict=True)]
            for name in known[:_MOST_MEASURES]
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
    evenly spaced ones between them. Of several, it is the newest one that all have, or the newest
    of each where none is common.

    Args:
        runs: run directories.
        preset: whose results; None: of the only preset that all runs have results of.
        prompts: which prompts, counted from 0, such as 0:4 (not the fifth) or 2; all by default.
        steps: which checkpoints, instead.
        columns: of one run, at most.

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
        Column(RunDirectory(run), found[run][step], _titles(names[run], step, is_alone))
        for step, run in _chosen(found, steps, columns)
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
                f"{command()} evaluate {shlex.quote(str(run.path))}"
            )
    common = sorted(set.intersection(*map(set, known.values())))
    if not common:
        having = "; ".join(f"{path} has {', '.join(names)}" for path, names in known.items())
        raise RunError(
            f"The runs have results of no common preset: {having}. Sample one preset in all of "
            f"them with: {command()} evaluate RUN --preset NAME"
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
        f"{command()} evaluate {shlex.quote(str(run.path))} --preset {shlex.quote(preset)}"
    )


def _chosen(
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
    """The scenes of the prompts that are wanted, which every column has."""
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


def _values(scores: Scores) -> dict[str, float]:
    held_out = scores.get("held_out", {})
    loss = {"held-out loss": held_out["mean"]} if "mean" in held_out else {}
    return {**scores["measures"], **loss}


def _names(runs: Sequence[Path]) -> dict[Path, str]:
    """The folders' names, with as much of what is before them as tells them apart."""
    parts = {run: run.resolve().parts for run in runs}
    for length in range(1, max(map(len, parts.values())) + 1):
        names = {run: "/".join(each[-length:]) for run, each in parts.items()}
        if len(set(names.values())) == len(names):
            return names
    return {run: str(run) for run in runs}


def _titles(name: str, step: int, is_alone: bool) -> tuple[str, ...]:
    return (f"step {step}",) if is_alone else (name, f"step {step}")
