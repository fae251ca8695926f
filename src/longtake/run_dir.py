"""The run directory: paths and record schemas of all files of a run; torch-free.

A run's processes exchange data through these files only. Every file has exactly one writer; every
record is appended or renamed into place, so a reader never sees half a file. The names and record
schemas are here, but for those inside a checkpoint, the ledger and an evaluation:

    recipe.toml                  the resolved recipe of the newest launch
    run.json                     id, created, launches (host, world size, start step, versions)
    events.jsonl                 what happened, one line each
    metrics.jsonl                scalars per step (writer: rank 0)
    rollbacks.jsonl              each rollback, and the batches that the run skips after it
    guard/step_00001234_0.json   the guard's report on a verdict: the steps before it, their samples
    ledger/launch_0000/          which clips each step of a launch consumed: rank_0000.bin (writer:
                                 that rank); launch.json: plans and world size
    catalogs/                    copies of the catalogs that were trained on; inputs.jsonl: the
                                 digests of further input files when they were first used
    nodes/<host>/stacks/<time>_<pid>.json   a dump of a process that hung, or of a decoder
    components/                  frozen parts made for this run: vae, text_encoder, tokenizer
    checkpoints/step_00001000/   model/ ema/ optimizer/ trainer.json COMMITTED
    exports/RUN-00001000.safetensors   the LoRA of that step for another tool (checkpoint.export);
                                 exports.json: what was written there
    lease/0.json ...             which process trains the run: one file per holder, newest last
    evaluations/<preset>/step_00001000/   00_s0.mp4 ... scores.json: videos sampled from that
                                 checkpoint, and their measures (evaluation_dir.py)
    tensorboard/  wandb/         mirrors of metrics, events and evaluations
    tracking/                    the mirrors' lease, positions in their sources, and logs
"""

import secrets
import shlex
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib import metadata
from itertools import chain, count
from pathlib import Path
from typing import Annotated, Any, Final, Literal, NotRequired

from pydantic import Field
from typing_extensions import TypedDict

from longtake import __version__, config, errors, fsio
from longtake.metrics import Metrics
from longtake.process import command, host_identity

LAUNCH_VARIABLE = "LONGTAKE_LAUNCH"
"""Environment variable of a rank: identifier of the `longtake launch` that started it, equal on all
nodes."""

COMPUTING_PACKAGES = (
    *("torch", "torchao", "triton", "diffusers", "transformers", "tokenizers", "peft"),
    *("safetensors", "numpy", "scipy", "av", "pillow"),
)
"""Packages whose version can change the numerical results of training."""

EventKind = Literal[
    "launched",
    "resumed",
    "ranks_differ",
    "startup_timing",
    "data_changed",
    "stage",
    "epoch",
    "settings_changed",
    "checkpoint",
    "checkpoint_failed",
    "checkpoint_damaged",
    "first_loss_high",
    "anomaly_detected",
    "update_skipped",
    "rolled_back",
    "diverged",
    "sample_rejected",
    "decoder_stalled",
    "decoder_died",
    "captions_truncated",
    "ledger_damaged",
    "begun_from",
    "memory_planned",
    "memory_measured",
    "threads_chosen",
    "uncompiled",
    "sampled",
    "sampling_failed",
    "export_failed",
    "interrupted",
    "finished",
]
RunEnding = Literal["finished", "interrupted", "diverged"]

BEGINNINGS: Final = ("launched", "resumed")
ENDINGS: Final[tuple[RunEnding, ...]] = ("finished", "interrupted", "diverged")


def skipped_batches(rolled_back: Mapping[str, Any]) -> str:
    """Describe the batches that a rollback skips, such as "batches 20 to 29"."""
    first, end = rolled_back["skipped"]
    return f"batches {first} to {end - 1}" if first < end else "no batches"


class RolledBack(TypedDict):
    """One rollback (the guard went back to a checkpoint): a line of rollbacks.jsonl.

    The skipped batches stay skipped, whichever checkpoint the run is resumed from.
    """

    time: fsio.Time
    from_step: fsio.Count
    """Number of steps done before the rollback began."""
    to_step: fsio.Count
    """Step of the checkpoint to which the rollback returned."""
    skipped: fsio.Span
    """Half-open range [first, end) of batch numbers that are never trained again after the
    rollback."""
    reason: str
    message: str


@fsio.with_other_fields
class Launch(TypedDict):
    """One launch of a run (a start of its ranks), as run.json lists it."""

    time: fsio.Time
    host: str
    start_step: fsio.Count
    world_size: Annotated[int, Field(ge=1, le=2**24)]
    device: str


class Identity(TypedDict):
    """The user and host that began a run; see `longtake.process.host_identity`."""

    uid: fsio.Count
    host: str
    machine: str


class Parent(TypedDict):
    """The parent of a run: the run with whose weights it began (`longtake train --from`)."""

    path: str
    """Absolute path of the parent's run directory (the parent's weights were the start)."""
    id: str
    step: fsio.Count
    """Step of the parent's checkpoint with which the run began."""
    weights_only: bool
    """True: the run took the parent's weights without the optimizer states."""


FORMAT: Final = 1


@fsio.with_other_fields
class RunRecord(TypedDict):
    """The content of run.json: a run's identity and its launches."""

    format: NotRequired[fsio.format_number(FORMAT)]  # type: ignore[valid-type]
    id: str
    created: fsio.Time
    begun_by: NotRequired[Identity]
    parent: NotRequired[Parent]
    launches: list[Launch]


@fsio.with_other_fields
class EventBase(TypedDict):
    """Fields of each line of an events.jsonl: of the run, a node or an evaluation server."""

    time: fsio.Time
    event: str
    host: NotRequired[str]


class Event(EventBase):
    """An event whose kind has no schema of its own: all fields are optional."""

    step: NotRequired[fsio.Count | None]
    from_step: NotRequired[fsio.Count | None]
    sentence: NotRequired[str | None]
    message: NotRequired[str | None]
    reason: NotRequired[str | None]


class _Started(EventBase):
    step: fsio.Count
    seconds: dict[str, fsio.Finite]
    total: fsio.Finite
    slowest: dict[str, fsio.Count]
    down_seconds: fsio.Finite | None


class _Judged(EventBase):
    step: fsio.Count
    verdict: str
    reason: str
    message: str


class _WentBack(EventBase):
    step: fsio.Count
    from_step: fsio.Count
    skipped: fsio.Span


class _Stage(EventBase):
    step: fsio.Count
    stage: str


class _Epoch(_Stage):
    epoch: fsio.Count


class _SettingsChanged(_Stage):
    changes: dict[str, Annotated[list[Any], Field(min_length=2, max_length=2)]]


class _ThreadsChosen(EventBase):
    step: fsio.Count
    threads: fsio.Count
    seconds: dict[str, fsio.Finite]


class _RankFailed(EventBase):
    rank: fsio.Count
    world_size: fsio.Count
    launch: str
    pid: fsio.Count
    step: fsio.Count
    phase: str
    kind: Literal["error", "exception", "killed", "ended"]
    error: str
    log: NotRequired[str]
    source: NotRequired[Literal["rank", "launcher", "watcher"]]


class _ClockStepped(Event):
    seconds: NotRequired[fsio.Finite]


class _Launched(Event):
    lost_steps: NotRequired[fsio.Count]


@fsio.with_other_fields
class _Suspect(TypedDict):
    host: str
    pid: fsio.Count


class _Stalled(Event):
    launch: NotRequired[str]
    token: NotRequired[str]
    suspects: NotRequired[list[_Suspect]]


class _StallCleared(Event):
    token: NotRequired[str]
    seconds: NotRequired[fsio.Finite]


EVENT: Final = fsio.by_field(
    "event",
    {
        "startup_timing": _Started,
        "update_skipped": _Judged,
        "anomaly_detected": _Judged,
        "rolled_back": _WentBack,
        "stage": _Stage,
        "epoch": _Epoch,
        "settings_changed": _SettingsChanged,
        "threads_chosen": _ThreadsChosen,
        "rank_failed": _RankFailed,
        "clock_stepped": _ClockStepped,
        "launched": _Launched,
        "resumed": _Launched,
        "stalled": _Stalled,
        "stall_cleared": _StallCleared,
    },
    Event,
)
"""Schema of one line of an events.jsonl, chosen by its field `event`."""


class ReportedSample(TypedDict):
    """A training sample in a guard's report, from one of the steps before the verdict."""

    step: fsio.Count
    batch: fsio.Count
    rank: fsio.Count
    host: str
    identity: Annotated[str, Field(pattern="^([0-9a-f]{2}){8,64}$")]
    caption: str
    epoch: fsio.Count
    sigma: fsio.NumberOrText
    loss: fsio.NumberOrText


@fsio.with_other_fields
class ReportedVerdict(TypedDict):
    """The guard's verdict on a step in its report; `began`: the step at which the anomaly began."""

    kind: str
    reason: str
    message: str
    began: fsio.Count


@fsio.with_other_fields
class ReportedState(TypedDict):
    """The state of the run around a verdict: the step of the checkpoint it could go back to."""

    checkpoint: fsio.Count | None


@fsio.with_other_fields
class GuardReport(TypedDict):
    """The guard's report on a verdict: the content of guard/step_00001234_0.json."""

    step: fsio.Count
    """Number of steps done before the step that the guard judged."""
    batch: NotRequired[fsio.Count | None]
    verdict: ReportedVerdict
    samples: list[ReportedSample]
    state: NotRequired[ReportedState | None]


def last_ending(kinds: Iterable[str]) -> RunEnding | None:
    """Return the way in which the run's last launch ended, from its events' kinds in order.

    None: no ending is recorded, because the launch still runs or was killed.
    """
    found: RunEnding | None = None
    for kind in kinds:
        if kind in BEGINNINGS:
            # An earlier ending no longer holds: the run goes on.
            found = None
        elif kind in ENDINGS:
            found = kind
    return found


class _Below:
    """Descriptor of a file or folder in a run directory: reads as its path."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, run: "RunDirectory", owner: object = None) -> Path:
        return run.path / self._name


@dataclass(frozen=True)
class RunDirectory:
    """Paths and records of one run, in its run directory."""

    path: Path

    recipe_path = _Below("recipe.toml")
    record_path = _Below("run.json")
    events_path = _Below("events.jsonl")
    metrics_path = _Below("metrics.jsonl")
    plan_path = _Below("plan.json")
    components_path = _Below("components")
    tensorboard_path = _Below("tensorboard")
    checkpoints_path = _Below("checkpoints")
    ledger_path = _Below("ledger")
    lease_path = _Below("lease")
    catalogs_path = _Below("catalogs")
    rollbacks_path = _Below("rollbacks.jsonl")
    guard_path = _Below("guard")
    exports_path = _Below("exports")

    def guard_report_path(self, step: int, number: int) -> Path:
        return self.guard_path / f"step_{step:08d}_{number}.json"

    def stack_path(self, host: str, name: str) -> Path:
        return self.path / "nodes" / host / "stacks" / f"{name}.json"

    def checkpoint_path(self, step: int) -> Path:
        return self.checkpoints_path / f"step_{step:08d}"

    def step_of(self, checkpoint: Path) -> int:
        return int(checkpoint.name.removeprefix("step_"))

    def evaluation_path(self, preset: str, step: int) -> Path:
        return self.path / "evaluations" / preset / f"step_{step:08d}"

    def checkpoint_folders(self) -> list[int]:
        """Return the steps of all checkpoint folders, complete or not, in ascending order."""
        folder = self.checkpoints_path
        names = [path.name for path in folder.iterdir()] if folder.is_dir() else []
        steps = (name.removeprefix("step_") for name in names if name.startswith("step_"))
        # Somebody's copy, such as step_00001000.bak, is not one of the run's checkpoints.
        return sorted(
            int(step)
            for step in steps
            if step.isdecimal() and self.checkpoint_path(int(step)).name == f"step_{step}"
        )

    def checkpoint_steps(self) -> list[int]:
        steps = self.checkpoint_folders()
        return [step for step in steps if (self.checkpoint_path(step) / "COMMITTED").exists()]

    def exists(self) -> bool:
        return self.recipe_path.is_file()

    def recipe(self) -> config.Recipe:
        """Load the recipe of the run's newest launch, with all its --set changes.

        Raises:
            RunError: there is no run here.
        """
        if not self.exists():
            raise errors.RunError(
                f"{self.path} is not a run directory: it has no recipe.toml. "
                "Expected the `out` folder of a recipe that was trained."
            )
        return config.load(self.recipe_path)

    def claim(self, recipe: config.Recipe) -> None:
        """Make sure that a run of this recipe can be kept in this folder; writes no record yet.

        Raises:
            RecipeChangedError: the folder holds a run of another recipe.
            RunError: the folder holds half a run, or cannot be written.
        """
        with self._writing():
            if self.exists():
                self._refuse_another(recipe)
            # Somebody has deleted recipe.toml: a new run would append to the metrics of the old
            # one.
            elif self.metrics_path.exists():
                raise errors.RunError(
                    f"{self.path} has metrics but no recipe.toml: it is a damaged run directory. "
                    "Choose another folder with --set out=FOLDER."
                )
            # Tried now, as the first record is written only after the model is built.
            fsio.make_writable(self.path)

    def create(self, recipe: config.Recipe, parent: Parent | None = None) -> None:
        """Begin a run in this folder: write run.json, then recipe.toml, which makes it a run."""
        # Folders of two runs may have the same name, such as on two machines.
        run_id = f"{self.path.resolve().name}-{secrets.token_hex(4)}"
        with self._writing():
            begun: dict[str, Any] = {
                "format": FORMAT,
                "id": run_id,
                "created": fsio.now(),
                "begun_by": host_identity(),
            }
            begun |= {} if parent is None else {"parent": parent}
            # recipe.toml comes last: its presence is what `exists` tests.
            fsio.write_json(self.record_path, {**begun, "launches": []})
            fsio.write_text(self.recipe_path, config.dump(config.kept(recipe)))

    def adopt(self, recipe: config.Recipe) -> None:
        """Replace recipe.toml by the resuming launch's recipe, which `claim` has accepted."""
        if self.recipe() != config.kept(recipe):
            with self._writing():
                fsio.write_text(self.recipe_path, config.dump(config.kept(recipe)))

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise errors.RunError(
                f"The run directory {self.path} cannot be written: {error.strerror or error}. "
                "Make room or make it writable, or choose another one with --set out=FOLDER."
            ) from error

    def _refuse_another(self, recipe: config.Recipe) -> None:
        there = self.recipe()
        if not (changed := config.differences(there, recipe)):
            return
        options, catalogs = self._other_catalogs(recipe)
        listed = "\n".join(f"  {key}: {old!r} there, {new!r} now" for key, old, new in changed)
        listed += catalogs
        ways = ""
        # The message offers only commands that work. More steps can be resumed in place, changed
        # data with an `on_change`, and the same model and trainables by --from.
        keys = {key for key, _, _ in changed}
        beside_it = f"--set {shlex.quote(f'out={self.path}-2')}"
        if length := config.other_length(there, recipe):
            beside_it += f" --set {length}"
            ways = (
                "To train as long, with a learning-rate schedule of that length (training.epochs, "
                f"if set, decides training.steps):\n  {self.resume_command()} --set {length} "
                f"{options}--set data.on_change=finish\n(on_change, because the length also "
                "decides in which order the clips of the rest are taken.)\n"
            )
        elif all(map(config.decides_order, keys)) and keys != {"training.steps"}:
            ways = (
                "To resume with what is new, say how: --set data.on_change=merge (in the rest of "
                "the epoch exactly what it has not seen), finish (end the epoch as it was) or "
                "restart (begin the next epoch at once).\n"
            )
        if not any(key.startswith(("model.", "trainable.")) for key in keys):
            ways += (
                "To train on from its newest weights with the new recipe, as a run of its own, add "
                f"to this command: {beside_it} --from {shlex.quote(str(self.path))}\n"
            )
        raise errors.RecipeChangedError(
            f"{self.path} holds a run of another recipe, which is never overwritten. "
            f"They differ in\n{listed}\n{ways}"
            f"Start beside it, from scratch, with {beside_it}, or resume with the old recipe: "
            f"{self.resume_command()}"
        )

    def _other_catalogs(self, recipe: config.Recipe) -> tuple[str, str]:
        """Return --set options and message lines for catalogs whose path the new recipe changes.

        A new path is allowed, but the printed resume command loads this run's recipe.toml and so
        would train the old catalog without these options.
        """
        before, options, lines = self.recipe().data.sources(), "", ""
        for name, path in recipe.data.sources().items():
            key = "data.catalog" if recipe.data.catalog is not None else f"data.catalogs.{name}"
            if before.get(name) != path:
                options += f"--set {shlex.quote(f'{key}={path}')} "
                lines += f"\n  {key}: {str(before.get(name))!r} there, {str(path)!r} now"
        return options, lines

    def resume_command(self) -> str:
        """Return the command that resumes this run; for a moved run it sets the new `out`."""
        moved = (
            "" if self.recipe().out == self.path else f" --set {shlex.quote(f'out={self.path}')}"
        )
        return f"{command()} train {shlex.quote(str(self.recipe_path))}{moved}"

    def record_launch(self, **facts: Any) -> None:
        """Add a launch (host, time, versions and further `facts`) to the list in run.json."""
        launch = {
            "time": fsio.now(),
            "host": socket.gethostname(),
            "versions": {
                "longtake": __version__,
                "python": sys.version.split()[0],
                **package_versions(),
                **_revision(),
            },
            **facts,
        }
        record = self.record()
        with self._writing():
            fsio.write_json(self.record_path, {**record, "launches": [*record["launches"], launch]})

    def record(self) -> RunRecord:
        """Read the run's run.json.

        Raises:
            RunError: run.json is missing or damaged.
        """
        try:
            return fsio.require_record(self.record_path, RunRecord)
        except errors.RecordError as error:
            raise errors.RunError(
                f"{error} {self.path} holds a run: restore the file, or start in another folder "
                "with --set out=FOLDER."
            ) from error

    def events(self) -> list[dict[str, Any]]:
        return fsio.read_records(self.events_path, EVENT)

    def append_event(self, kind: EventKind, **fields: Any) -> None:
        """Append an event as one line to the run's events.jsonl, stamped with the time.

        Raises:
            RunError: the run directory cannot be written.
        """
        with self._writing():
            fsio.append_json(self.events_path, {"time": fsio.now(), "event": kind, **fields})

    def write_record(self, path: Path, record: Mapping[str, Any]) -> None:
        """Replace a JSON file of the run atomically, such as the one at `guard_report_path`.

        Raises:
            RunError: the run directory cannot be written.
        """
        with self._writing():
            path.parent.mkdir(parents=True, exist_ok=True)
            fsio.write_json(path, record)

    def append_rollback(self, rolled_back: RolledBack) -> None:
        """Append a rollback as one line to rollbacks.jsonl, and flush it to disk.

        Raises:
            RunError: the run directory cannot be written.
        """
        with self._writing():
            # On disk before anything else changes: a run that is killed during the rollback must
            # skip the same batches when it is resumed.
            fsio.append_json(self.rollbacks_path, rolled_back, durably=True)

    def rollbacks(self) -> list[RolledBack]:
        return fsio.read_records(self.rollbacks_path, RolledBack)

    def append_metrics(self, metrics: Metrics) -> None:
        with self._writing():
            fsio.append_json(self.metrics_path, metrics)

    def losses(self) -> list[float]:
        return [row["loss"] for row in self.metrics() if row["loss"] is not None]

    def metric_lines(self) -> list[Metrics]:
        return fsio.read_records(self.metrics_path, Metrics)

    def metrics(self) -> list[Metrics]:
        """Return the metrics of each step of the run, without steps that it abandoned.

        A rollback, or a resume from an older checkpoint, abandons the steps after it.
        """
        # The file is append-only: after a rollback or a resume from an older checkpoint, steps
        # repeat, and the later line of a step replaces all earlier ones from that step on.
        kept: list[Metrics] = []
        for row in self.metric_lines():
            while kept and kept[-1]["step"] >= row["step"]:
                kept.pop()
            kept.append(row)
        return kept


def beside(path: Path) -> Path:
    """Return a free folder for a new run: `path`, or the first free one of path-2, path-3, ...

    A folder is free if it does not exist or is empty.
    """
    numbered = (path.with_name(f"{path.name}-{number}") for number in count(2))
    for each in chain([path], numbered):
        if not each.exists() or (each.is_dir() and not any(each.iterdir())):
            return each
    raise AssertionError("there are more numbers")


def package_versions() -> dict[str, str]:
    """Return the installed versions of the packages that can change results, by name."""
    found = {}
    for name in COMPUTING_PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def _revision() -> dict[str, str]:
    """Return longtake's git revision as `revision` if it runs from a checkout, else nothing."""
    git, checkout = shutil.which("git"), Path(__file__).resolve().parents[2]
    # Installed in an environment inside somebody's repository, git would describe theirs.
    if git is None or not (checkout / ".git").exists():
        return {}
    command = [git, "-C", str(checkout), "describe", "--always", "--dirty", "--abbrev=12"]
    described = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603 - fixed arguments
    return {"revision": described.stdout.strip()} if described.returncode == 0 else {}


def refuse_moved(path: Path, recipe: config.Recipe, changes: Iterable[str]) -> None:
    """Refuse a recipe.toml in a run directory that was copied or moved from its `out`.

    Raises:
        RunError: `out` is another folder than the recipe's own, and `changes` (the --set options)
            do not set it.
    """
    run = RunDirectory(path.parent)
    # Any folder may have a recipe.toml of the user; only a run also has a run.json.
    is_kept = path.name == run.recipe_path.name and run.record_path.is_file()
    if not is_kept or any(change.partition("=")[0].strip() == "out" for change in changes):
        return
    if recipe.out.resolve() != path.parent.resolve():
        there = RunDirectory(recipe.out)
        other = f"\nTo resume the run in {recipe.out}: {there.resume_command()}" * there.exists()
        raise errors.RunError(
            f"{path} belongs to a run that was moved or copied: its recipe says out = "
            f'"{recipe.out}". To use the run beside it, add --set '
            f"{shlex.quote(f'out={run.path}')}, as in: {run.resume_command()}{other}"
        )
