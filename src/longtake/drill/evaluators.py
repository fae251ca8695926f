"""`longtake evaluate` beside a run, and what must hold of everything that any number of them made.

Whatever befalls them, each checkpoint that is there has one result, made of the weights that were
saved; nothing half is left, nothing is held any more; and the training has not noticed.
"""

import os
import signal
import socket
import subprocess
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from longtake.checkpoint.deletion import needed_steps
from longtake.drill.launch import ONE_THREAD
from longtake.drill.place import SHORT, Place
from longtake.drill.verdict import Verdict, identities_of
from longtake.errors import RunError
from longtake.evaluation.server.checkpoints import checkpoint_key
from longtake.evaluation_dir import EvaluationDirectory, all_servers
from longtake.fsio import read_json_lines
from longtake.lease import history
from longtake.process import program, start
from longtake.run_dir import RunDirectory

PRESET = "drill"
PROMPTS = 4
"""Each is sampled by itself, so that there is a first video while others are still to come."""
_LOOK_SECONDS = 0.002
_LIMIT_SECONDS = 200.0


def recipe(solver_steps: int) -> str:
    """The recipe of most drills, with one preset; more steps of the solver take longer."""
    prompts = [f"a red square moves left, number {number}" for number in range(PROMPTS)]
    return f"""\
{SHORT}
evaluation.reference_clips = 0
evaluation.presets.{PRESET}.prompts = {prompts}
evaluation.presets.{PRESET}.num_inference_steps = {solver_steps}
evaluation.presets.{PRESET}.batch_size = 1
"""


class Evaluator:
    """An evaluation server of a place's run; ended for good when the block is left.

    Args:
        place: of the run, which need not have begun.
        options: of `longtake evaluate`.

    Attributes:
        pid: its process.
        server: the name by which others know it.
    """

    def __init__(self, place: Place, *options: str) -> None:
        self._log = place.folder / f"evaluator_{len(list(place.folder.glob('evaluator_*')))}.log"
        with self._log.open("wb") as log:
            command = program("longtake", "evaluate", "run", *options)
            self._process = start(command, log, place.folder, **ONE_THREAD)
        self.pid = self._process.pid
        self.server = f"{socket.gethostname()}-{self.pid}"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.kill()

    def kill(self) -> None:
        """End it as kill -9 does, and whatever it has started."""
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self._process.wait()

    def looks(self) -> Iterator[None]:
        """Yield again and again while it runs.

        Raises:
            RunError: it has ended, or nothing came of it in time.
        """
        until = time.monotonic() + _LIMIT_SECONDS
        while self._process.poll() is None and time.monotonic() < until:
            yield
            time.sleep(_LOOK_SECONDS)
        raise RunError(f"The evaluation server did not do what the drill waits for.{self._words()}")

    def finish(self, expected: int = 0) -> None:
        """Return when it has ended with the expected exit code.

        Raises:
            RunError: it does not end, or ends with an error.
        """
        try:
            code = self._process.wait(_LIMIT_SECONDS)
        except subprocess.TimeoutExpired:
            code = None
        if code != expected:
            raise RunError(f"The evaluation server ended with exit code {code}.{self._words()}")

    def _words(self) -> str:
        lines = self._log.read_text(encoding="utf-8", errors="replace").split("\n")
        said = " / ".join([line.strip() for line in lines if line.strip()][-3:])
        return f" It said: {said or 'nothing'} (all of it: {self._log})"


def events(run: RunDirectory) -> list[dict[str, Any]]:
    """What the servers of a run have told, each server's in their order."""
    found = (read_json_lines(server.events_path) for server in all_servers(run))
    return [event for each in found for event in each]


def partial_videos(run: RunDirectory, server: str = "*") -> list[Path]:
    """Videos of results that are not published yet."""
    folders = EvaluationDirectory(run).path / PRESET
    return sorted(folders.glob(f".step_*.{server}-*.partial/*.mp4"))


def step_of(video: Path) -> int:
    """The step of the checkpoint that an unpublished video was sampled from."""
    return int(video.parent.name.split(".")[1].removeprefix("step_"))


def attempts(run: RunDirectory, step: int) -> list[dict[str, Any]]:
    """The leases that a checkpoint was worked on under, the first one first."""
    claims = (EvaluationDirectory(run).path / "claims" / PRESET).glob(f"step_{step:08d}-*")
    return [record for claim in sorted(claims) for record in history(claim)]


def must_be_evaluated_once(verdict: Verdict, run: RunDirectory, steps: Iterable[int]) -> None:
    """Demand that each of some checkpoints has one whole result, and that nothing is left over."""
    told = Counter(each["step"] for each in events(run) if each["event"] == "evaluated")
    for step in steps:
        ends = [each["ended"] for each in attempts(run, step)]
        verdict.must(
            ends.count("done") == 1 and told[step] == 1,
            f"step {step} was done {ends.count('done')} times, and told of {told[step]} times",
        )
        verdict.must(_is_whole(run, step), f"the result of step {step} is not whole")
    left = [path.name for path in partial_videos(run)]
    left += [f"the need of step {step}" for step in sorted(needed_steps(run))]
    verdict.must(not left, f"this is left over: {', '.join(left)}")
    superseded = list((EvaluationDirectory(run).path / PRESET).glob("superseded/*"))
    verdict.must(not superseded, f"{len(superseded)} results were made twice")


def must_be_undisturbed(verdict: Verdict, place: Place, undisturbed: Place) -> None:
    """Demand that the training has come to what it comes to without an evaluator."""
    everything = identities_of(place.catalog())
    verdict.must_be_exact(place.run, everything, everything)
    verdict.must_be_equal(place.run, undisturbed.run)


def _is_whole(run: RunDirectory, step: int) -> bool:
    """Whether a result has all its videos, of the weights that the checkpoint has, if it is there.

    A checkpoint that was deleted since cannot be compared.
    """
    directory, checkpoint = EvaluationDirectory(run), run.checkpoint_path(step)
    scores = directory.scores(PRESET, step)
    if scores is None:
        return False
    folder = directory.result_path(PRESET, step)
    sizes = [(folder / video["file"]).stat().st_size for video in scores["videos"]]
    key = checkpoint_key(checkpoint, scores["weights"])
    is_of_it = key == scores["key"] if checkpoint.exists() else True
    return is_of_it and len(sizes) == PROMPTS and all(sizes)
