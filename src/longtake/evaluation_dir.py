"""Paths and records of evaluations in a run directory; torch-free.

evaluations/<preset>/preset.json                settings, prompts and seeds of the preset
evaluations/<preset>/pictures/                  small copies of its input pictures, by prompt
evaluations/<preset>/conditioning/              numeric inputs of the default preset's clips
evaluations/<preset>/reference.json             the preset's measures on training clips
evaluations/<preset>/step_00001000/             a result, renamed into place when it is complete:
    00_s0.mp4 01_s0.mp4 ...                     one video per prompt and seed; one frame: .png
    sheet.png                                   a contact sheet of the videos
    scores.json                                 the measures
evaluations/<preset>/superseded/step_…-<key>/   a result of weights that were saved again later
evaluations/claims/<preset>/step_…-<key>/       the lease of a server's work on it; its attempts
evaluations/servers/<name>/events.jsonl         what a server did (writer: that server)
evaluations/servers/<name>/heartbeat.json       its current work and the checkpoints it needs
tracking/writer/                                the lease of the process that writes the trackers
tracking/<tracker>.json                         the position up to which a tracker was written
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
"""Attempts to read a server's heartbeat: over NFS, a file can vanish while another host replaces
it."""

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


OwnSetting = str | int | float
"""Value of a setting that a prompt of a preset has of its own, such as its `width`."""


class VideoScores(TypedDict):
    """One sampled video of an evaluation result, with its measures."""

    file: fsio.FileName
    """Name of the sampled video's file in the folder of scores.json."""
    prompt: str
    seed: Annotated[int, Field(ge=-(2**63), lt=2**64)]
    measures: dict[str, float]
    """Measures of the video by name, without undefined ones, such as motion of one frame."""
    settings: NotRequired[dict[str, OwnSetting]]
    """Settings of this video that differ from the preset's; missing without any."""


class Alarm(TypedDict):
    """Alarm: a measure drifts over checkpoints, or is outside of the training clips' range."""

    measure: str
    kind: Literal["drift", "range"]
    message: str
    """The alarm in words: brightness of low4s rose 4 checkpoints in a row, +9 %."""


@fsio.with_other_fields
class Scores(TypedDict):
    """The result of an evaluation, as in scores.json: a checkpoint's videos and their measures."""

    preset: str
    step: fsio.Count
    key: fsio.FileName
    """Digest of the sampled weights, see `checkpoint_key`: a step can be saved again with
    others."""
    weights: str
    """The sampled weights: `model`, or `ema/` and the name of a profile."""
    time: fsio.Time
    server: str
    """Name of the evaluation server, which is also that of its folder in evaluations/servers/."""
    settings: dict[str, Any]
    """The sampling settings of the preset, as preset.json holds them, without its prompts."""
    videos: list[VideoScores]
    measures: dict[str, float]
    """Mean of each measure over the checkpoint's videos."""
    held_out: NotRequired[dict[str, float]]
    """Flow-matching loss on held-out clips by noise level (sigma), and the `mean` of these."""
    alarms: list[Alarm]
    seconds: dict[str, fsio.Finite]
    """Seconds of each part of the evaluation: wait load first_video sample measure write ..."""


@fsio.with_other_fields
class _Settings(TypedDict):
    fps: Annotated[float, Field(gt=0, le=1000)]
    conditioning: NotRequired[dict[str, list[str]]]


_SETTINGS: Final = TypeAdapter(_Settings)


def _check(scores: Scores) -> Scores:
    """Check settings in scores.json that readers use, and each video's list of input pictures."""
    pictures = _SETTINGS.validate_python(scores["settings"]).get("conditioning", {})
    for video in scores["videos"] if pictures else ():
        number = prompt_number(video["file"])
        # Readers index the pictures by the number in the name of the file, which may be any.
        if not 0 <= number < min(map(len, pictures.values())):
            raise ValueError(f"no picture is known that {video['file']} was sampled with")
    return scores


SCORES: Final[TypeAdapter[Scores]] = TypeAdapter(Annotated[Scores, AfterValidator(_check)])
"""Validator of the content of scores.json."""


class Scene(NamedTuple):
    """Prompt, seed, inputs and settings of a video, by which checkpoints' videos are compared."""

    prompt: str
    seed: int
    pictures: tuple[tuple[str, str], ...] = ()
    """Name and digest of each input besides the prompt, such as a picture.

    See `longtake.sampling.preset_files.InputFile`."""
    settings: tuple[tuple[str, OwnSetting], ...] = ()
    """Settings of the video that differ from its preset's."""

    @property
    def note(self) -> str:
        return note_of_video(self.seed, dict(self.settings))


def note_of_video(seed: int, settings: Mapping[str, OwnSetting]) -> str:
    """Return seed and own settings of a sampled video in words, such as `seed 3, width 64`."""
    return ", ".join([f"seed {seed}", *(f"{name} {value}" for name, value in settings.items())])


def files_by_scene(scores: Scores) -> dict[Scene, str]:
    """Return the file name of each video of an evaluation result, by its prompt and seed."""
    pictures = scores["settings"].get("conditioning", {})
    found = {}
    for video in scores["videos"]:
        number = prompt_number(video["file"]) if pictures else 0
        of_prompt = tuple((name, contents[number]) for name, contents in pictures.items())
        own = tuple(sorted(video.get("settings", {}).items()))
        found[Scene(video["prompt"], video["seed"], of_prompt, own)] = video["file"]
    return found


def prompt_number(file: str) -> int:
    """Return the index of a video's prompt in its preset, from the file's name."""
    return int(file.partition("_")[0])


@fsio.with_other_fields
class ServerHeartbeat(TypedDict):
    """The content of an evaluation server's heartbeat.json."""

    server: str
    time: fsio.Time
    needs: Annotated[list[fsio.Count], Field(max_length=_MOST_NEEDS)]
    """Steps whose checkpoints the server needs, so that they must not be deleted."""
    beat: NotRequired[fsio.Count]
    doing: NotRequired[dict[str, Any] | None]
    ended: NotRequired[str | None]
    """Time at which the evaluation server ended; None: it has not."""


@dataclass(frozen=True)
class EvaluationDirectory:
    """Paths and records of a run's evaluations, below its folder evaluations/."""

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
        # Superseded results lie one folder deeper, so that the pattern does not find them.
        return sorted({path.parents[1].name for path in self.path.glob("*/step_*/scores.json")})

    def steps(self, preset: str) -> list[int]:
        names = (path.parent.name for path in (self.path / preset).glob("step_*/scores.json"))
        steps = (name.removeprefix("step_") for name in names)
        # Somebody's copy, such as step_00001000.bak, is no result.
        return sorted(int(step) for step in steps if step.isdecimal())

    def scores(self, preset: str, step: int) -> Scores | None:
        """Read the result of a preset for the checkpoint of a step.

        None: there is no scores.json, or it is damaged or names another preset or step.
        """
        try:
            found = fsio.read_record(self.result_path(preset, step) / "scores.json", SCORES)
        except errors.RecordError:
            return None
        # A folder that was copied or renamed by hand holds the result of another checkpoint.
        is_it = found is not None and (found["preset"], found["step"]) == (preset, step)
        return found if is_it else None

    def all_scores(self, preset: str) -> list[Scores]:
        found = (self.scores(preset, step) for step in self.steps(preset))
        return [each for each in found if each is not None]


@dataclass(frozen=True)
class ServerDirectory:
    """Paths and records of one evaluation server in a run; that server is their only writer."""

    run: RunDirectory
    name: str  # name of the server, such as `vm-4711`

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
        """Append one line to the evaluation server's events.jsonl.

        Raises:
            OSError: the file cannot be written.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        fsio.append_json(
            self.events_path, {"time": fsio.now(), "event": kind, "server": self.name, **fields}
        )

    def write_heartbeat(self, record: Mapping[str, Any]) -> None:
        """Replace the server's heartbeat.json without flushing it to disk.

        Raises:
            OSError: the file cannot be written.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        with (
            fsio.atomic_write(self.heartbeat_path) as aside,
            # Mode x fails if somebody has put a symbolic link there, which would be written
            # through.
            aside.open("x", encoding="utf-8") as file,
        ):
            file.write(json.dumps(record, indent=2) + "\n")

    def read_heartbeat(self) -> ServerHeartbeat | None:
        """Read the server's heartbeat.json; None: it is missing or damaged."""
        for _ in range(_READS):
            with suppress(errors.RecordError):
                return fsio.read_record(self.heartbeat_path, ServerHeartbeat)
        return None

    def remove_heartbeat(self) -> None:
        """Remove the heartbeat file of a dead evaluation server; links are not followed."""
        # A server that was killed while it wrote has left the partial file.
        for path in (self.heartbeat_path, fsio.partial_path(self.heartbeat_path)):
            if not fsio.is_linked(path, self.run.path):
                with suppress(OSError):
                    path.unlink()


def all_servers(run: RunDirectory) -> list[ServerDirectory]:
    """Return all evaluation servers that have ever worked on a run, sorted by name."""
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
