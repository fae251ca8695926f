"""Faults of evaluation: servers that are killed or share a run, lost checkpoints, W&B out of reach.

After each, every checkpoint has one result for its saved weights, nothing partial is left, no
checkpoint is protected any more, and the training is not affected.
"""

import os
import signal
import socket
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal
from unittest import mock

import tomli_w

from longtake import errors, evaluation_dir, fsio, lease
from longtake.checkpoint.files import Trainer, delete, load_trainer, needed_steps
from longtake.config import TrackingSection
from longtake.faults.expect import Evidence
from longtake.faults.registry import NotPossibleHereError, fault
from longtake.faults.sandbox import (
    ONE_THREAD,
    SHORT_RECIPE,
    STEPS,
    Injection,
    RunObserver,
    TrainingProcess,
    TrainingSite,
)
from longtake.process import program, start
from longtake.run_dir import RunDirectory
from longtake.sampling.claims import checkpoint_key
from longtake.tracking import reader, tensorboard
from longtake.tracking.follower import Follower
from longtake.tracking.tracker import refuse_missing_packages

PRESET = "drill"
PROMPTS = 4  # sampled one by one, so that there is a first video while others are still to come

_TAKEOVER_SECONDS = 5.0
_WHOLE_SECONDS = 5.0  # limit of the evaluation after the copy of a checkpoint is complete
_KEEP = 2
_SOLVER_STEPS = 40
_MANY_SOLVER_STEPS = 80  # several checkpoints are saved while one is sampled
_DELETIONS = 3
_LAST_DELETED_STEP = STEPS - 10  # the last checkpoints stay: they are compared
_PRESETS = "presets.toml"
_DRIFT_PRESET = {
    "num_inference_steps": 4,
    "guidance_scale": 1.0,
    "prompts": ["a red square moving right", "a blue circle moving up"],
    "seeds": [0, 1],
}
_BRIGHTER = 0.03  # added to latents, which are pixels from -1 to 1: four of 255 grey levels
_BRIGHTER_TIMES = 4
_BRIGHTER_STEPS = 5  # steps between two brighter checkpoints
# Port 9 (discard) has no server, so a connection is refused at once. Without a key nothing would
# try to connect.
_UNREACHABLE = {"WANDB_BASE_URL": "http://127.0.0.1:9", "WANDB_API_KEY": "0" * 40}
_LONGEST_STEP_SECONDS = 10.0
_LONGEST_FOLLOWER_SECONDS = 60.0


class EvaluatorProcess(RunObserver):
    """A process `longtake evaluate` on the run of a training site; the run need not have begun."""

    NAME = "evaluation server"

    def __init__(self, site: TrainingSite, *options: str) -> None:
        super().__init__(site.folder, [], log="evaluator")
        with self._log.open("wb") as log:
            command = program("longtake", "evaluate", "run", *options)
            self._process = start(command, log, site.folder, **ONE_THREAD)
        self.pid = self._process.pid
        self.server = f"{socket.gethostname()}-{self.pid}"

    def exit_code(self) -> int | None:
        return self._process.poll()

    def kill(self) -> bool:
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        return self._process.wait() == -signal.SIGKILL

    def wait_for_video(self) -> int:
        """Wait for the first video that this server samples and has not published; return its step.

        Raises:
            RunError: the server ends before.
        """
        videos = self.wait_until(
            lambda: _partial_videos(self._run, self.server), "it had sampled a video"
        )
        _, step, *_ = videos[0].parent.name.split(".")  # .step_00000005.SERVER-0.partial
        return int(step.removeprefix("step_"))

    def wait_for_report(self, kind: str, step: int) -> None:
        """Wait until any evaluation server has reported an event of this kind about a step.

        Raises:
            RunError: this server ends before.
        """
        self.wait_until(
            lambda: any(
                (each["event"], each.get("step")) == (kind, step)
                for each in server_events(self._run)
            ),
            f"step {step} was reported as {kind}",
        )


def _recipe(solver_steps: int) -> str:
    """Return a short recipe with one preset, sampled with this number of solver steps."""
    prompts = [f"a red square moves left, number {number}" for number in range(PROMPTS)]
    return f"""\
{SHORT_RECIPE}
evaluation.reference_clips = 0
evaluation.presets.{PRESET}.prompts = {prompts}
evaluation.presets.{PRESET}.num_inference_steps = {solver_steps}
evaluation.presets.{PRESET}.batch_size = 1
"""


def server_events(run: RunDirectory) -> list[dict[str, Any]]:
    found = (fsio.read_json_lines(server.events_path) for server in evaluation_dir.all_servers(run))
    return [event for each in found for event in each]


def _partial_videos(run: RunDirectory, server: str = "*") -> list[Path]:
    folders = evaluation_dir.EvaluationDirectory(run).path / PRESET
    return sorted(folders.glob(f".step_*.{server}-*.partial/*.mp4"))


def _attempts(run: RunDirectory, step: int) -> list[dict[str, Any]]:
    claims = (evaluation_dir.EvaluationDirectory(run).path / "claims" / PRESET).glob(
        f"step_{step:08d}-*"
    )
    return [record for claim in sorted(claims) for record in lease.history(claim)]


def _expect_evaluated_once(evidence: Evidence, steps: Iterable[int]) -> None:
    """Expect one complete evaluation result for each of the steps, and no partial results."""
    run = evidence.site.run
    announced = Counter(
        each["step"] for each in server_events(run) if each["event"] == "evaluation_finished"
    )
    for step in steps:
        ends = [each["ended"] for each in _attempts(run, step)]
        evidence.expect(
            ends.count("done") == 1 and announced[step] == 1,
            f"step {step} was done {ends.count('done')} times, announced {announced[step]} times",
        )
        evidence.expect(_is_whole(run, step), f"the result of step {step} is not whole")
    left = [path.name for path in _partial_videos(run)]
    left += [f"the need of step {step}" for step in sorted(needed_steps(run))]
    evidence.expect(not left, f"this is left over: {', '.join(left)}")
    # A second result of a step moves the first one here, so the files alone would look complete.
    superseded = list((evaluation_dir.EvaluationDirectory(run).path / PRESET).glob("superseded/*"))
    evidence.expect(not superseded, f"{len(superseded)} results were made twice")


def _is_whole(run: RunDirectory, step: int) -> bool:
    """Return True if a step's result has all videos and belongs to its checkpoint, if any."""
    directory, checkpoint = evaluation_dir.EvaluationDirectory(run), run.checkpoint_path(step)
    scores = directory.scores(PRESET, step)
    if scores is None:
        return False
    folder = directory.result_path(PRESET, step)
    sizes = [(folder / video["file"]).stat().st_size for video in scores["videos"]]
    # The run's retention may have deleted the checkpoint since, which does not damage the result.
    key = checkpoint_key(checkpoint, scores["weights"])
    is_of_it = key == scores["key"] if checkpoint.exists() else True
    return is_of_it and len(sizes) == PROMPTS and all(sizes)


@fault(
    does="Kills one of two evaluation servers beside a run while it samples (SIGKILL).",
    must=(
        "The other takes its checkpoint over within 5 s; each checkpoint is evaluated once; the "
        "run is bitwise the same."
    ),
    recipe=_recipe(_SOLVER_STEPS),
)
def evaluator_killed_while_sampling(site: TrainingSite, evidence: Evidence) -> None:
    # Steps are slow late in the run, so that the servers have started when checkpoints come.
    with _two_servers(site, slow_from=30) as (first, second, process):
        step = first.wait_for_video()
        os.kill(first.pid, signal.SIGKILL)
        at = time.monotonic()
        second.wait_for_report("evaluation_lost", step)
        seconds = time.monotonic() - at
        process.finish()
        second.finish()
    evidence.detected_seconds = seconds
    late = f"it was taken over after {seconds:.1f} s, not within {_TAKEOVER_SECONDS:g}"
    evidence.expect(seconds <= _TAKEOVER_SECONDS, late)
    found = [(each.get("server"), each["ended"]) for each in _attempts(site.run, step)]
    evidence.expect(
        found == [(first.server, None), (second.server, "done")],
        f"step {step} was to be lost by {first.server} and done by {second.server}, and there is "
        f"{found}",
    )
    _expect_evaluated_once(evidence, site.run.checkpoint_steps())
    evidence.expect_undisturbed()
    count = len(site.run.checkpoint_steps())
    evidence.message = (
        f"{seconds:.1f} s after server {first.pid} was killed over step {step}, another began it "
        f"again; all {count} checkpoints were evaluated once, and every step of the training is "
        "bitwise the undisturbed run's."
    )


@contextmanager
def _two_servers(
    site: TrainingSite, slow_from: int
) -> Iterator[tuple[EvaluatorProcess, EvaluatorProcess, TrainingProcess]]:
    """Start two evaluation servers and a run that keeps all checkpoints, slow from a step on."""
    inject = Injection("slow-steps", slow_from)
    with (
        EvaluatorProcess(site, "--until-finished") as first,
        EvaluatorProcess(site, "--until-finished") as second,
        site.launch("checkpoint.keep=100", inject=inject) as process,
    ):
        yield first, second, process


@fault(
    does="Lets two evaluation servers evaluate one run.",
    must="They share its checkpoints; each is evaluated once; the run is bitwise the same.",
    recipe=_recipe(_SOLVER_STEPS),
)
def two_evaluators(site: TrainingSite, evidence: Evidence) -> None:
    # From step 20 on a checkpoint is due every 2.5 s, when both servers have long been started.
    with _two_servers(site, slow_from=20) as (first, second, process):
        process.finish()
        first.finish()
        second.finish()
    events = server_events(site.run)
    shares = Counter(e["server"] for e in events if e["event"] == "evaluation_finished")
    for server in (first.server, second.server):
        evidence.expect(shares[server] > 0, f"server {server} has evaluated nothing")
    _expect_evaluated_once(evidence, site.run.checkpoint_steps())
    evidence.expect_undisturbed()
    counts = " and ".join(str(shares[each]) for each in sorted(shares))
    evidence.message = (
        f"They evaluated {counts} checkpoints, each once; every step of the training is bitwise "
        "the undisturbed run's."
    )


@fault(
    does="Deletes checkpoints while an evaluation server reads them.",
    must=(
        "What is held is kept; what is deleted nevertheless is reported as gone, or was read "
        "before; the run is bitwise the same."
    ),
    recipe=_recipe(_MANY_SOLVER_STEPS),
)
def checkpoint_deleted_under_evaluator(site: TrainingSite, evidence: Evidence) -> None:
    run = site.run
    changes = (f"checkpoint.keep={_KEEP}", "checkpoint.every=1", "evaluation.hold_waiting=0")
    with (
        EvaluatorProcess(site, "--until-finished") as server,
        site.launch(*changes, inject=Injection("slow-steps", 20)) as process,
    ):
        held = server.wait_for_video()
        num_saves = _saves_while_held(run, server, held)
        deleted = _delete_held(run, server, held)
        process.finish()
        server.finish()
    evidence.expect(
        num_saves > _KEEP,
        f"step {held} was held for {num_saves} saves, and the run keeps {_KEEP} anyway",
    )
    evidence.expect(
        len(deleted) == _DELETIONS,
        f"{len(deleted)} checkpoints were deleted under the server, not {_DELETIONS}",
    )
    _expect_done_or_gone(evidence, held)
    evidence.expect_undisturbed()
    gone = sum(_ends(run, step)[-1:] == ["gone"] for step in deleted)
    evidence.message = (
        f"Step {held} stayed until it was sampled, for {num_saves} saves. Of {_DELETIONS} "
        f"that were deleted although they were held {gone} are recorded as gone, and all others "
        "were read before. Every step of the training is bitwise the undisturbed run's."
    )


def _saves_while_held(run: RunDirectory, server: EvaluatorProcess, held: int) -> int:
    """Wait until a checkpoint is no longer held (protected from deletion by a server).

    Returns the number of checkpoints that were saved after it until then.
    """
    num_saves = 0

    def is_released() -> bool:
        nonlocal num_saves
        if held in run.checkpoint_steps() and held in needed_steps(run):
            events = fsio.read_json_lines(run.events_path)
            saved = (each["step"] for each in events if each["event"] == "checkpoint")
            num_saves = max(num_saves, sum(step > held for step in saved))
            return False
        return True

    server.wait_until(is_released, "it released its first checkpoint")
    return num_saves


def _delete_held(run: RunDirectory, server: EvaluatorProcess, spared: int) -> list[int]:
    """Delete checkpoints by hand once a server holds (protects) them, before it reads them."""
    deleted = list[int]()

    def are_enough() -> bool:
        for step in needed_steps(run) - {spared, *deleted}:
            if step <= _LAST_DELETED_STEP and run.checkpoint_path(step).exists():
                delete([run.checkpoint_path(step)])
                deleted.append(step)
        last = run.metrics()[-1:][0]["step"]
        return len(deleted) >= _DELETIONS or last > _LAST_DELETED_STEP

    server.wait_until(are_enough, f"it held {_DELETIONS} checkpoints")
    return deleted


def _expect_done_or_gone(evidence: Evidence, held: int) -> None:
    """Expect that checkpoints claimed by servers were evaluated once, or are gone and not held."""
    run = evidence.site.run
    claimed = sorted(
        {each["step"] for each in server_events(run) if each["event"] == "evaluation_started"}
    )
    ends = {step: _ends(run, step) for step in claimed}
    for step, found in ends.items():
        # The run's retention may be faster than a claim, but must keep what is held.
        may_be_gone = step not in run.checkpoint_steps() and step != held
        is_right = found == ["done"] or (found == ["gone"] and may_be_gone)
        evidence.expect(is_right, f"step {step} ended as {', '.join(map(str, found))}")
    result_path = evaluation_dir.EvaluationDirectory(run).result_path
    of_gone = [s for s in ends if "gone" in ends[s] and result_path(PRESET, s).exists()]
    evidence.expect(not of_gone, f"there are results of steps {of_gone}, which were gone")
    done = {step for step, found in ends.items() if "done" in found}
    _expect_evaluated_once(evidence, sorted(done | set(run.checkpoint_steps())))


def _ends(run: RunDirectory, step: int) -> list[str | None]:
    return [each["ended"] for each in _attempts(run, step)]


@fault(
    does=(
        "Copies a checkpoint to an evaluation server by hand: COMMITTED first, weights by halves, "
        "then of the right size with wrong bytes, and stops in between."
    ),
    must=(
        "It is not sampled before it is whole, and within 5 s then, once; the other checkpoint is "
        "evaluated meanwhile."
    ),
    begins="killed",
)
def half_synced_checkpoint(site: TrainingSite, evidence: Evidence) -> None:
    run, trainer = site.run, RunDirectory(site.folder / "cluster")
    early, late = run.checkpoint_steps()[-2:]
    trainer.path.mkdir()
    run.checkpoints_path.rename(trainer.checkpoints_path)  # the site's run becomes a mirror
    prompts = [f"a square, number {number}" for number in range(PROMPTS)]
    _write_preset(site, {"prompts": prompts, "num_inference_steps": 4})
    _copy(trainer, run, late, weights="half")
    _copy(trainer, run, early)
    with EvaluatorProcess(site, "--presets", _PRESETS, "--follow") as server:
        server.wait_for_report("evaluation_finished", early)
        # By now the server has looked at the incomplete checkpoint, too.
        is_untouched = not _attempts(run, late)
        _copy(trainer, run, late, weights="garbled")
        server.wait_for_report("evaluation_failed", late)
        _copy(trainer, run, late)
        at = time.monotonic()
        server.wait_for_report("evaluation_finished", late)
        seconds = time.monotonic() - at
        # With --follow a server never ends by itself.
        os.kill(server.pid, signal.SIGTERM)
        server.finish(expected=128 + signal.SIGTERM)
    evidence.detected_seconds = seconds
    evidence.expect(is_untouched, f"step {late} was tried while its files were short")
    ends = _ends(run, late)
    evidence.expect(
        ends[-1:] == ["done"] and set(ends[:-1]) == {"damaged"},
        f"step {late} was to be refused until it was whole, and its attempts ended {ends}",
    )
    slow = f"it was evaluated {seconds:.1f} s after it was whole, not within {_WHOLE_SECONDS:g}"
    evidence.expect(seconds <= _WHOLE_SECONDS, slow)
    _expect_evaluated_once(evidence, (early, late))
    evidence.message = (
        f"Step {late} was not tried while files were short, and refused while their bytes were "
        f"wrong; it was evaluated once, {seconds:.1f} s after it was whole; the other meanwhile."
    )


def _write_preset(site: TrainingSite, preset: dict[str, Any]) -> None:
    (site.folder / _PRESETS).write_text(tomli_w.dumps({PRESET: preset}), encoding="utf-8")


def _copy(
    source_run: RunDirectory,
    run: RunDirectory,
    step: int,
    weights: Literal["whole", "half", "garbled"] = "whole",
) -> None:
    """Copy a checkpoint to another run, COMMITTED first; optionally only half of its weights.

    `garbled` fills the second half with zeros, so that the size is right.
    """
    source, target = source_run.checkpoint_path(step), run.checkpoint_path(step)
    files = sorted(path for path in source.rglob("*") if path.is_file())
    # False sorts first: a tool that copies in any order may leave COMMITTED beside missing files.
    for path in sorted(files, key=lambda each: each.name != "COMMITTED"):
        content, copy = path.read_bytes(), target / path.relative_to(source)
        if path.suffix == ".distcp" and weights != "whole":
            half = len(content) // 2
            rest = bytes(len(content) - half) if weights == "garbled" else b""
            content = content[:half] + rest
        copy.parent.mkdir(parents=True, exist_ok=True)
        with fsio.atomic_write(copy) as aside:
            aside.write_bytes(content)


@fault(
    does="Lets a run's EMA get a little brighter from checkpoint to checkpoint.",
    must="No loss shows it; the evaluator raises the alarm, and none before it.",
    begins="undisturbed",
)
def brightness_drift(site: TrainingSite, evidence: Evidence) -> None:
    """Drill: make the EMA's videos brighter from checkpoint to checkpoint, and expect an alarm.

    The loss is computed with the raw weights and videos are sampled from the EMA, so only videos
    show the drift.
    """
    before = site.run.checkpoint_steps()
    steps = _brighten(site.run, _BRIGHTER_TIMES, _BRIGHTER, _BRIGHTER_STEPS)
    _write_preset(site, _DRIFT_PRESET)
    began = time.monotonic()
    options = ("--presets", _PRESETS, "--preset", PRESET, "--device", "cpu")
    with EvaluatorProcess(site, *options) as evaluator:
        evaluator.finish()
    evidence.detected_seconds = time.monotonic() - began
    _expect_drift_alarm(evidence, before, steps)
    evidence.message = (
        f"Over {_BRIGHTER_TIMES} checkpoints the EMA got brighter by "
        f"{_BRIGHTER_TIMES * _BRIGHTER * 127.5:.0f} grey levels, and no loss changed. The "
        f"evaluator said: {' '.join(each['message'] for each in _drifts(site.run, steps[-1]))}"
    )


def _brighten(run: RunDirectory, times: int, brighter: float, distance: int) -> list[int]:
    """Save `times` further checkpoints, each with a brighter EMA, and return their steps."""
    import torch

    from longtake.checkpoint.store import write
    from longtake.models.trainable import trained_state
    from longtake.parallel.mesh import World
    from longtake.sampling.sampler import load_sampler

    sampler = load_sampler(run.path, device="cpu")
    newest_step = sampler.step
    trainer = load_trainer(run.checkpoint_path(newest_step), Trainer)
    weights = load_sampler(run.path, ema=False, device="cpu").components.model
    ema = sampler.components.model
    # `trained_state` returns parameters that require a gradient, and a sampler's require none.
    weights.requires_grad_(True)
    ema.requires_grad_(True)
    alone = World(rank=0, local_rank=0, size=1, device=torch.device("cpu"), mesh=None)
    steps = [newest_step + distance * (number + 1) for number in range(times)]
    for step in steps:
        with torch.no_grad():
            ema.get_parameter("tube_out.bias").add_(brighter)
        parts = {"model": dict(trained_state(weights)), sampler.weights: dict(trained_state(ema))}
        write(run, step, parts, {**trainer, "global_step": step}, alone)
    return steps


def _expect_drift_alarm(evidence: Evidence, before: Sequence[int], brighter: Sequence[int]) -> None:
    """Expect a drift alarm at the last of the brighter checkpoints, and none before the first."""
    run = evidence.site.run
    directory = evaluation_dir.EvaluationDirectory(run)
    done = directory.steps(PRESET)
    evidence.expect(done == [*before, *brighter], f"the steps {done} were evaluated")
    early = {step: _drifts(run, step) for step in before if _drifts(run, step)}
    evidence.expect(not early, f"an alarm was raised before anything drifted: {early}")
    messages = [each["message"] for each in _drifts(run, brighter[-1])]
    scores = directory.all_scores(PRESET)
    course = [round(each["measures"]["brightness"], 1) for each in scores]
    evidence.expect(
        any(each.startswith(f"brightness of {PRESET} rose ") for each in messages),
        f"no alarm was raised at step {brighter[-1]}, where brightness was {course}",
    )


def _drifts(run: RunDirectory, step: int) -> list[evaluation_dir.Alarm]:
    scores = evaluation_dir.EvaluationDirectory(run).scores(PRESET, step)
    alarms = scores["alarms"] if scores else []
    return [each for each in alarms if (each["measure"], each["kind"]) == ("brightness", "drift")]


@fault(
    does="Lets W&B be unreachable for as long as a run is trained.",
    must=(
        "No step waits for it; the run is bitwise the same. TensorBoard has every row, and so has "
        "W&B once it can be written to."
    ),
)
def tracker_down(site: TrainingSite, evidence: Evidence) -> None:
    try:
        refuse_missing_packages(TrackingSection(wandb="online"))
    except errors.RecipeError as error:
        raise NotPossibleHereError("W&B is not installed: pip install 'longtake[wandb]'") from error
    run, seen = site.run, None
    changes = ("tracking.wandb=online", "tracking.tensorboard=true")
    # The training inherits the variables from this process, and its follower from the training.
    with mock.patch.dict(os.environ, _UNREACHABLE), site.launch(*changes) as process:
        for _ in process.polls(0.05):
            writers = lease.history(evaluation_dir.writer_path(run))
            if any("wandb" in writer.get("troubles", {}) for writer in writers):
                seen = time.monotonic() - process.began
                break
        process.finish()
    rows_before = reader.Cursor.load(evaluation_dir.cursor_path(run, "wandb")).rows
    # The run's tracking process, which would retry for a minute, makes way for one that writes
    # W&B's offline files.
    writer = lease.newest(evaluation_dir.writer_path(run))
    until = time.monotonic() + _LONGEST_FOLLOWER_SECONDS
    if writer is not None and writer["ended"] is None and lease.is_alive(writer):
        os.kill(writer["pid"], signal.SIGTERM)
        while lease.is_alive(writer) and time.monotonic() < until:
            time.sleep(0.1)
    follower = Follower(run, "trainer", TrackingSection(wandb="offline"))
    follower.start()
    follower.close(_LONGEST_FOLLOWER_SECONDS)
    evidence.expect(seen is not None, "nothing reports that W&B cannot be reached")
    _expect_tracked(evidence, rows_before)
    evidence.expect_undisturbed()
    evidence.detected_seconds = seen
    evidence.message = (
        "The run is bitwise the undisturbed one; TensorBoard has every row, and so has W&B since "
        "it can be written to."
    )


def _expect_tracked(evidence: Evidence, rows_before: int) -> None:
    """Expect that trackers got every step once: TensorBoard and W&B's files.

    `rows_before` is the number of rows that W&B got while it was unreachable: 0.
    """
    from longtake.tracking.wandb import rows_from, run_id_of

    run = evidence.site.run
    steps = [row["step"] for row in run.metrics()]
    longest = max(row["step_seconds"] for row in run.metrics())
    evidence.expect(longest < _LONGEST_STEP_SECONDS, f"a step took {longest:.1f} s")
    files = tensorboard.event_files(run.tensorboard_path)
    found = [
        event.step for path in files for event in tensorboard.events_in(path) if event.summary.value
    ]
    evidence.expect(found == steps, "TensorBoard does not have every step once")
    evidence.expect(rows_before == 0, f"W&B got {rows_before} rows though it is unreachable")
    rows = rows_from(0, run.path / "wandb", run_id_of(run))
    tracked = sorted(row["train/step"] for row in rows if "train/step" in row)
    evidence.expect(tracked == steps, "W&B did not get every step once later")
