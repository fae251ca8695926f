"""The samples of a run: its presets, and the results of each preset's checkpoints.

A result is cached until its scores.json changes. If scores.json is missing or damaged, the videos
are known by their file names alone.
"""

import math
import os
import re
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

from pydantic import TypeAdapter
from typing_extensions import TypedDict

from longtake import errors, evaluation_dir, fsio
from longtake.formatting import natural_key, one_line
from longtake.fsio import open_below, open_folder_below
from longtake.inspection.facts import failed_claims
from longtake.inspection.files import file_names, folder_names
from longtake.inspection.reader import Keep
from longtake.run_dir import RunDirectory

MOST_STEPS: Final = 2000
MOST_SCENES: Final = 96
_MOST_RECORD_BYTES = 2**24
_NOT_PRESETS = ("claims", "servers")
_STEP = re.compile(r"step_(\d{8,15})")
_FILE = re.compile(r"(\d{1,6})_s(-?\d{1,20})\.(mp4|png)")

R = TypeVar("R")
T = TypeVar("T")


class _Spread(TypedDict):
    low: fsio.Finite
    median: fsio.Finite
    high: fsio.Finite


class ReferenceRanges(TypedDict):
    """The keys of reference.json (usual ranges of measures) that pages use."""

    num_clips: fsio.Count
    measures: dict[str, _Spread]


_REFERENCE: Final = TypeAdapter(ReferenceRanges)
NO_REFERENCE: Final = ReferenceRanges(num_clips=0, measures={})


@dataclass(frozen=True)
class Result:
    """The videos or pictures sampled from one checkpoint for a preset, and their measures."""

    preset: str
    step: int
    files: Mapping[evaluation_dir.Scene, str]
    """Names of the sampled files in the result's folder, by prompt and seed."""
    weights: str = ""
    """Sampled weights: `model`, or `ema/` and the name of a profile; empty if unknown."""
    time: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)
    measures: Mapping[str, float] = field(default_factory=dict)
    """Mean of each measure over the result's videos."""
    adherence: Mapping[evaluation_dir.Scene, float] = field(default_factory=dict)
    """Adherence (agreement) of the videos to their prompts, by prompt and seed."""
    held_out: Mapping[str, float] = field(default_factory=dict)
    """Loss on held-out clips by noise level (sigma), and their `mean`."""
    alarms: Sequence[evaluation_dir.Alarm] = ()
    is_whole: bool = True
    """False if the scores.json of the result cannot be read."""


@dataclass(frozen=True)
class SampledPreset:
    """The results of one preset (set of prompts) of a run, by checkpoint."""

    run: RunDirectory
    name: str
    results: tuple[Result, ...]
    """Results of the sampled checkpoints in ascending order of steps."""
    scenes: tuple[evaluation_dir.Scene, ...]
    reference: ReferenceRanges
    failed: Sequence[Mapping[str, Any]]
    """`step`, `reason` and `attempts` of each checkpoint whose sampling failed."""
    problems: tuple[str, ...]

    @property
    def steps(self) -> list[int]:
        return [each.step for each in self.results]

    @property
    def newest(self) -> Result:
        """The newest result with a readable scores.json; without one, the newest of all results."""
        whole = [each for each in self.results if each.is_whole]
        return (whole or self.results)[-1]

    @property
    def weights(self) -> str:
        return self.newest.weights

    def result(self, step: int) -> Result | None:
        return next((each for each in self.results if each.step == step), None)

    def folder(self, step: int) -> str:
        """Return the path, relative to the run directory, of the result of a step's checkpoint."""
        return f"evaluations/{self.name}/step_{step:08d}"

    def files_there(self, step: int) -> set[str]:
        """Return the names of the files in the folder of a step's result; links are left out."""
        return set(file_names(self.run.path, self.folder(step)))

    def setting(self, name: str, scene: evaluation_dir.Scene | None = None) -> float | None:
        """Return a sampling setting of the newest result, or a scene's own.

        None: it is not a positive number.
        """
        own = {} if scene is None else dict(scene.settings)
        value = own.get(name, self.newest.settings.get(name))
        if isinstance(value, bool) or not isinstance(value, int | float):
            return None
        return value if 0 < value < 1e6 else None


def preset_names(run: RunDirectory) -> list[str]:
    """Return the names of the presets with sampled results, or whose sampling has begun."""
    with_claims = set(folder_names(run.path, "evaluations/claims"))
    names = [name for name in folder_names(run.path, "evaluations") if name not in _NOT_PRESETS]
    sampled = {name for name in names if next(_steps(run, name), None) is not None}
    return sorted(sampled | with_claims, key=natural_key)


def has_results(run: RunDirectory, preset: str) -> bool:
    is_name = fsio.is_file_name(preset) and preset not in _NOT_PRESETS
    return is_name and next(_steps(run, preset), None) is not None


def read_preset(run: RunDirectory, name: str, kept: Keep) -> SampledPreset:
    """Read the results of a preset; unreadable ones are left out and named in `problems`."""
    problems, results = list[str](), list[Result]()
    steps = sorted(_steps(run, name))
    if len(steps) > MOST_STEPS:
        problems.append(f"The newest {MOST_STEPS:,} of {len(steps):,} sampled checkpoints.")
    loose = []
    for step in steps[-MOST_STEPS:]:
        found = _read_result(run, name, step, kept)
        if isinstance(found, Result):
            results.append(found)
        else:
            loose.append(step)
            problems.append(f"Step {step:,} of {name} has no measures: {found}")
    # Prompts of whole results come first, in their order; they also name the files of the others.
    scenes = _all_scenes(results)
    results += [_loose_result(run, name, step, results) for step in loose]
    results = [each for each in results if each.files]
    scenes = list(dict.fromkeys((*scenes, *_all_scenes(results))))
    if len(scenes) > MOST_SCENES:
        problems.append(f"The first {MOST_SCENES} of {len(scenes):,} prompts and seeds.")
    reference, path = NO_REFERENCE, f"evaluations/{name}/reference.json"
    with suppress(OSError, errors.RecordError):
        reference = _read(run, path, _REFERENCE, lambda found: found, kept)
    return SampledPreset(
        run,
        name,
        tuple(sorted(results, key=lambda each: each.step)),
        tuple(scenes[:MOST_SCENES]),
        reference,
        _failed(run, name, {each.step for each in results}, kept),
        tuple(problems),
    )


def _steps(run: RunDirectory, preset: str) -> Iterator[int]:
    for name in folder_names(run.path, f"evaluations/{preset}"):
        found = _STEP.fullmatch(name)
        # Another spelling of the number would give one step two folders.
        if found and name == f"step_{int(found[1]):08d}":
            yield int(found[1])


def _read(run: RunDirectory, name: str, kind: fsio.Kind[R], use: Callable[[R], T], kept: Keep) -> T:
    """Return `use(record)` for a JSON file of a run, cached until it changes; follow no link.

    Raises:
        RecordError: the file is not such a record, or too large.
        OSError: the file cannot be read.
    """
    with open_below(run.path, name) as file:
        status = os.fstat(file.fileno())  # of the open file: its path may be replaced meanwhile
        if status.st_size > _MOST_RECORD_BYTES:
            raise errors.RecordError(run.path / name, "it is too large")

        # An error is returned so that it is cached too: a damaged file is parsed only once.
        def read() -> T | errors.RecordError:
            try:
                return use(fsio.parse_record(file.read(), kind, run.path / name))
            except errors.RecordError as error:
                return error

        found = kept(f"{run.path}/{name}", fsio.version_of(status), read)
    if isinstance(found, errors.RecordError):
        raise found
    return found


def _read_result(run: RunDirectory, preset: str, step: int, kept: Keep) -> Result | str:
    """Return the result of a step's checkpoint, or a sentence that says why it cannot be read."""
    name = f"evaluations/{preset}/step_{step:08d}/scores.json"
    try:
        found = _read(run, name, evaluation_dir.SCORES, _as_result, kept)
    except OSError as error:
        return f"scores.json cannot be read ({error.strerror})."
    except errors.RecordError as error:
        return one_line(error)
    # A folder that was copied has the scores of another result.
    if (found.preset, found.step) != (preset, step):
        return "its scores.json is of another result."
    return found


def _as_result(scores: evaluation_dir.Scores) -> Result:
    files = evaluation_dir.files_by_scene(scores)
    of_file = {each["file"]: each["measures"] for each in scores["videos"]}
    adherence = {scene: of_file[file].get("adherence") for scene, file in files.items()}
    return Result(
        scores["preset"],
        scores["step"],
        files,
        scores["weights"],
        scores["time"],
        scores["settings"],
        _finite(scores["measures"]),
        {scene: value for scene, value in adherence.items() if value is not None},
        _finite(scores.get("held_out", {})),
        tuple(scores["alarms"]),
    )


def _finite(values: Mapping[str, float]) -> dict[str, float]:
    return {name: value for name, value in values.items() if math.isfinite(value)}


def _all_scenes(results: Sequence[Result]) -> list[evaluation_dir.Scene]:
    """Return the prompts and seeds of all results: first the newest result's, in their order."""
    return list(dict.fromkeys(scene for each in reversed(results) for scene in each.files))


def _loose_result(run: RunDirectory, preset: str, step: int, others: Sequence[Result]) -> Result:
    """Make a result whose scores.json is unreadable from the names of its files.

    The prompts are those of other results, or of the preset.
    """
    known = {file: scene for each in others for scene, file in each.files.items()}
    name, record = f"evaluations/{preset}/preset.json", dict[str, Any]()
    with suppress(OSError, errors.RecordError), open_below(run.path, name) as preset_file:
        data = preset_file.read(_MOST_RECORD_BYTES)
        record = fsio.parse_record(data, dict[str, Any], run.path / name)
    found = {}
    for file in file_names(run.path, f"evaluations/{preset}/step_{step:08d}"):
        if parts := _FILE.fullmatch(file):
            prompts, number = record.get("prompts"), int(parts[1])
            prompt = file
            if isinstance(prompts, list) and number < len(prompts):
                prompt = str(prompts[number])
            found[known.get(file) or evaluation_dir.Scene(prompt, int(parts[2]))] = file
    return Result(preset, step, found, is_whole=False)


def _failed(
    run: RunDirectory, preset: str, done: Collection[int], kept: Keep
) -> Sequence[Mapping[str, Any]]:
    version, path = list[Hashable]([len(done)]), ("evaluations", "claims", preset)
    with (
        suppress(OSError),
        open_folder_below(run.path, path) as folder,
        os.scandir(folder) as entries,
    ):
        for each in entries:
            if each.is_symlink():
                return ()
            version.append((each.name, each.stat().st_mtime_ns))

    def read() -> Sequence[Mapping[str, Any]]:
        with suppress(OSError, ValueError, errors.LongtakeError):
            return failed_claims(evaluation_dir.EvaluationDirectory(run), preset, done)
        return ()

    return kept(f"{run.path}/claims/{preset}", tuple(version), read)
