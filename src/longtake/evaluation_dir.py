"""Names and records of evaluation servers in a run directory; torch-free.

evaluations/<preset>/preset.json                what is sampled: settings, prompts, seeds
evaluations/<preset>/pictures/                  small copies of its inputs, by prompt
evaluations/<preset>/conditioning/              numbers of clips that the default preset samples
evaluations/<preset>/reference.json             the same measures, of clips that were trained on
evaluations/<preset>/step_00001000/             a result, renamed into place when it is whole:
    00_s0.mp4 01_s0.mp4 ...                     each prompt and seed; of one frame: .png
    sheet.png                                   the same as one picture
    scores.json                                 what was measured
evaluations/<preset>/superseded/step_…-<key>/   a result of a checkpoint that was saved anew
evaluations/claims/<preset>/step_…-<key>/       the lease of who works on it; its attempts
evaluations/servers/<name>/events.jsonl         what a server did (writer: that server)
evaluations/servers/<name>/heartbeat.json       what it does and needs, about once a second
tracking/writer/                                the lease of the one who writes to the trackers
tracking/<tracker>.json                         how far that tracker has been written
"""

import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final, Literal, NamedTuple, NotRequired

from pydantic import AfterValidator, Field, TypeAdapter
from typing_extensions import TypedDict

from longtake import errors, fsio
from longtake.run_dir import EVENT, RunDirectory

_MOST_NEEDS = 10_000
_READS = 2
"""A file that another host replaces each second may be gone while it is read over NFS."""

ServerEventKind = Literal[
    "evaluation_started",
    "evaluation_finished",
    "evaluation_failed",
    "evaluation_lost",
    "evaluation_missed",
    "drift_alert",
    "checkpoint_synced",
    "pull_failed",
]


class VideoScores(TypedDict):
    """One video of a result."""

    file: fsio.FileName
    """Its name, beside scores.json."""
    prompt: str
    seed: Annotated[int, Field(ge=-(2**63), lt=2**64)]
    measures: dict[str, float]
    """By name; without those that are not defined for it, such as motion of one frame."""


class Alarm(TypedDict):
    """A measure that moves, or lies where no training clip's does."""

    measure: str
    kind: Literal["drift", "range"]
    message: str
    """Such as: brightness of low4s rose 4 checkpoints in a row, +9 %."""


@fsio.with_other_fields
class Scores(TypedDict):
    """scores.json: what was sampled from a checkpoint, and what was measured of it."""

    preset: str
    step: fsio.Count
    key: fsio.FileName
    """Digest of the weights, which may be saved again at the same step: see `checkpoint_key`."""
    weights: str
    """The sampled weights: `model`, or `ema/` and the name of a profile."""
    time: fsio.Time
    server: str
    """Its name below evaluations/servers/."""
    settings: dict[str, Any]
    """Settings as in preset.json, without the prompts."""
    videos: list[VideoScores]
    measures: dict[str, float]
    """The mean over the videos of each."""
    held_out: NotRequired[dict[str, float]]
    """The flow-matching loss on clips that are not trained on: by sigma, and their `mean`."""
    alarms: list[Alarm]
    seconds: dict[str, fsio.Finite]
    """Seconds of each part: wait load first_video sample measure write ..."""


@fsio.with_other_fields
class _Settings(TypedDict):
    fps: Annotated[float, Field(gt=0, le=1000)]
    conditioning: NotRequired[dict[str, list[str]]]


_SETTINGS: Final = TypeAdapter(_Settings)


def _check(scores: Scores) -> Scores:
    """Check what is used of the settings, and that each video has the pictures it goes by."""
    pictures = _SETTINGS.validate_python(scores["settings"]).get("conditioning", {})
    for video in scores["videos"] if pictures else ():
        number = prompt_number(video["file"])
        if not 0 <= number < min(map(len, pictures.values())):
            raise ValueError(f"no picture is known that {video['file']} was sampled with")
    return scores


SCORES: Final[TypeAdapter[Scores]] = TypeAdapter(Annotated[Scores, AfterValidator(_check)])
"""scores.json."""


class Scene(NamedTuple):
    """Prompt, seed and inputs of a video, whatever checkpoint sampled it."""

    prompt: str
    seed: int
    pictures: tuple[tuple[str, str], ...] = ()
    """Name and content of each further input, see `longtake.sampling.preset_files.InputFile`."""


def files_by_scene(scores: Scores) -> dict[Scene, str]:
    """The file name of each video of a result, by its scene."""
    pictures = scores["settings"].get("conditioning", {})
    found = {}
    for video in scores["videos"]:
        number = prompt_number(video["file"]) if pictures else 0
        of_prompt = tuple((name, contents[number]) for name, contents in pictures.items())
        found[Scene(video["prompt"], video["seed"], of_prompt)] = video["file"]
    return found


def prompt_number(file: str) -> int:
    """The number of the prompt from which a video was sampled, from its file name."""
    return int(file.partition("_")[0])


@fsio.with_other_fields
class ServerHeartbeat(TypedDict):
    """heartbeat.json of an evaluation server."""

    server: str
    time: fsio.Time
    needs: Annotated[list[fsio.Count], Field(max_length=_MOST_NEEDS)]
    """Steps whose checkpoints must not be deleted."""
    beat: NotRequired[fsio.Count]
    doing: NotRequired[dict[str, Any] | None]
    ended: NotRequired[str | None]
    """When the server ended; None: it has not."""


@dataclass(frozen=True)
class EvaluationDirectory:
    """Paths and records of a run's evaluations."""

    run: RunDirectory

    @property
    def path(self) -> Path:
        return self.run.path / "evaluations"

    def preset_path(self, preset: str) -> Path:
        return self.path / preset / "preset.json"

    def reference_path(self, preset: str) -> Path:
        return self.path / preset / "reference.json"

    def result_path(self, preset: str, step: int) -> Path:
        return self.run.evaluation_path(preset, step)

    def superseded_path(self, preset: str, step: int, key: str) -> Path:
        return self.path / preset / "superseded" / f"step_{step:08d}-{key}"

    def claim_path(self, preset: str, step: int, key: str) -> Path:
        return self.path / "claims" / preset / f"step_{step:08d}-{key}"

    def presets(self) -> list[str]:
        return sorted({path.parents[1].name for path in self.path.glob("*/step_*/scores.json")})

    def steps(self, preset: str) -> list[int]:
        names = (path.parent.name for path in (self.path / preset).glob("step_*/scores.json"))
        steps = (name.removeprefix("step_") for name in names)
        return sorted(int(step) for step in steps if step.isdecimal())

    def scores(self, preset: str, step: int) -> Scores | None:
        """The measures of a checkpoint.

        None if there is no whole result: no scores.json, or one that is no record of this result.
        """
        try:
            found = fsio.read_record(self.result_path(preset, step) / "scores.json", SCORES)
        except errors.RecordError:
            return None
        is_it = found is not None and (found["preset"], found["step"]) == (preset, step)
        return found if is_it else None

    def all_scores(self, preset: str) -> list[Scores]:
        found = (self.scores(preset, step) for step in self.steps(preset))
        return [each for each in found if each is not None]


@dataclass(frozen=True)
class ServerDirectory:
    """Records of one evaluation server in a run; it alone writes here."""

    run: RunDirectory
    name: str  # of the server, such as `vm-4711`

    @property
    def path(self) -> Path:
        return EvaluationDirectory(self.run).path / "servers" / self.name

    @property
    def events_path(self) -> Path:
        return self.path / "events.jsonl"

    @property
    def heartbeat_path(self) -> Path:
        return self.path / "heartbeat.json"

    def append_event(self, kind: ServerEventKind, /, **fields: Any) -> None:
        """Append one line to events.jsonl; OSError: it cannot be written."""
        self.path.mkdir(parents=True, exist_ok=True)
        fsio.append_json(
            self.events_path, {"time": fsio.now(), "event": kind, "server": self.name, **fields}
        )

    def write_heartbeat(self, record: Mapping[str, Any]) -> None:
        """Replace heartbeat.json, which need not outlive a power cut; OSError: it cannot be."""
        self.path.mkdir(parents=True, exist_ok=True)
        with (
            fsio.atomic_write(self.heartbeat_path) as aside,
            aside.open("x", encoding="utf-8") as file,
        ):
            file.write(json.dumps(record, indent=2) + "\n")

    def read_heartbeat(self) -> ServerHeartbeat | None:
        """heartbeat.json; None if there is none, or it cannot be read."""
        for _ in range(_READS):
            with suppress(errors.RecordError):
                return fsio.read_record(self.heartbeat_path, ServerHeartbeat)
        return None

    def remove_heartbeat(self) -> None:
        """Remove the heartbeat of a server that is dead; a link is not followed."""
        for path in (self.heartbeat_path, fsio.partial_path(self.heartbeat_path)):
            if not fsio.is_linked(path, self.run.path):
                with suppress(OSError):
                    path.unlink()


def all_servers(run: RunDirectory) -> list[ServerDirectory]:
    """The servers that have ever worked on a run, by name."""
    folder = EvaluationDirectory(run).path / "servers"
    names: list[str] = []
    with suppress(FileNotFoundError, NotADirectoryError):
        names = sorted(path.name for path in folder.iterdir())
    return [ServerDirectory(run, name) for name in names]


def writer_path(run: RunDirectory) -> Path:
    return run.path / "tracking" / "writer"


def cursor_path(run: RunDirectory, tracker: str) -> Path:
    return run.path / "tracking" / f"{tracker}.json"


def server_events(run: RunDirectory) -> Iterator[list[dict[str, Any]]]:
    return (fsio.read_records(server.events_path, EVENT) for server in all_servers(run))
