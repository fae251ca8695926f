"""The cost of an evaluation server for a training on the same cores.

    python benchmarks/evaluator_beside_training.py [--rounds 3] [--every 160]

Runs `longtake train` of a small model, and `longtake evaluate --follow`, which samples every second
checkpoint with the preset `demo`: training alone and training beside the server alternate, one
checkpoint each. Steps while the server works are compared with those at the same distance from the
checkpoint before, which it does not sample, so that the cost of saving is in both. Writes
benchmarks/results/evaluator_beside_training.md. Two or three minutes.
"""

import argparse
import os
import platform
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

import psutil

from longtake.data.index import index
from longtake.demo.shapes import write_clips
from longtake.evaluation_dir import EvaluationDirectory, all_servers
from longtake.fsio import read_json_lines
from longtake.process import environment, program
from longtake.run_dir import RunDirectory

_RESULTS = Path(__file__).parent / "results" / "evaluator_beside_training.md"
_PRESET = "demo"
_LOOK_SECONDS = 0.05
_RECIPE = """\
out = "run"
data.catalog = "catalog.parquet"
data.buckets = [{{ num_frames = 8, height = 32, width = 32 }}]
data.workers = 0
model.family = "tubelet"
text.max_tokens = 6
flow.logit_mean = 2.0
model.config = {{ hidden_size = 96, num_blocks = 4 }}
sampling.num_inference_steps = 20
sampling.guidance_scale = 2.0
sampling.shift = 6.0
training.steps = {steps}
training.global_batch_size = 16
training.device = "cpu"
training.precision = "fp32"
checkpoint.every = {every}
checkpoint.keep = 100
evaluation.reference_clips = 0
"""


class Evaluation(NamedTuple):
    """Times of one checkpoint's evaluation, in seconds of this machine's clock."""

    step: int
    committed: float
    claimed: float
    done: float
    first_video: float
    """After the claim."""
    cores: float
    """Cores that the server used meanwhile, on average."""


class Turn(NamedTuple):
    """Steps during an evaluation, and the same steps after the checkpoint before."""

    alone: list[float]
    beside: list[float]
    evaluation: Evaluation


def main() -> None:
    """Train and evaluate; print and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3, help="evaluations that are measured")
    parser.add_argument("--every", type=int, default=160, help="steps between checkpoints")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        lines = _measure(Path(folder), asked.rounds, asked.every)
    _RESULTS.write_text("\n".join(lines) + "\n", encoding="utf-8")
    print("\n".join(lines))  # noqa: T201


def _measure(folder: Path, rounds: int, every: int) -> list[str]:
    captions = write_clips(folder / "clips", num_clips=64, seed=0)
    index([folder / "clips"], captions=captions, out=folder / "catalog.parquet")
    steps = every * (2 * rounds + 3)  # the first evaluation warms the server up, and is left out
    (folder / "recipe.toml").write_text(_RECIPE.format(steps=steps, every=every))
    used = _train(folder, every)
    run = RunDirectory(folder / "run")
    found = _in_time(_evaluations(run, used)[1:], run, every)
    return _report(
        [_turn(run, each, every) for each in found], f"--rounds {rounds} --every {every}"
    )


def _train(folder: Path, every: int) -> list[tuple[float, float]]:
    """Run both to the end; the server's processor time at each time."""
    options = ["--follow", "--preset", _PRESET, "--backlog", f"every={2 * every}"]
    with (
        _started(folder, "evaluate", "run", *options) as server,
        _started(folder, "train", "recipe.toml") as training,
    ):
        used, process = [], psutil.Process(server.pid)
        while training.poll() is None:
            used.append((time.time(), sum(process.cpu_times()[:2])))
            time.sleep(_LOOK_SECONDS)
    assert training.returncode == 0, (folder / "train.log").read_text()
    return used


@contextmanager
def _started(folder: Path, verb: str, *arguments: str) -> "Iterator[subprocess.Popen[bytes]]":
    with (folder / f"{verb}.log").open("wb") as log:
        process = subprocess.Popen(  # noqa: S603 - our own program
            program("longtake", verb, *arguments),
            cwd=folder,
            stdout=log,
            stderr=log,
            env=environment(),
        )
    try:
        yield process
    finally:
        process.terminate()
        process.wait()


def _evaluations(run: RunDirectory, used: Sequence[tuple[float, float]]) -> list[Evaluation]:
    [server] = all_servers(run)
    events = list(read_json_lines(server.events_path))
    claimed = {e["step"]: _seconds(e["time"]) for e in events if e["event"] == "evaluation_started"}
    found = []
    for event in events:
        if event["event"] != "evaluation_finished":
            continue
        step, done = event["step"], _seconds(event["time"])
        committed = (run.checkpoint_path(step) / "COMMITTED").stat().st_mtime
        videos = EvaluationDirectory(run).result_path(_PRESET, step).glob("*.mp4")
        first = min(path.stat().st_mtime for path in videos) - claimed[step]
        cores = _cores(used, claimed[step], done)
        found.append(Evaluation(step, committed, claimed[step], done, first, cores))
    return found


def _seconds(time_of_event: str) -> float:
    return datetime.fromisoformat(time_of_event).timestamp()


def _cores(used: Sequence[tuple[float, float]], since: float, until: float) -> float:
    within = [(at, seconds) for at, seconds in used if since <= at <= until]
    (begun, before), (ended, after) = within[0], within[-1]
    return (after - before) / (ended - begun)


def _turn(run: RunDirectory, evaluation: Evaluation, every: int) -> Turn:
    """The steps completely within an evaluation, and those `every` steps before them."""
    rows = {row["step"]: row for row in run.metrics()}
    beside = [
        step
        for step, row in rows.items()
        if row["time"] - row["step_seconds"] >= evaluation.claimed
        and row["time"] <= evaluation.done
        and step <= evaluation.step + every
    ]
    seconds = {step: row["step_seconds"] for step, row in rows.items()}
    return Turn(
        [seconds[step - every] for step in beside], [seconds[step] for step in beside], evaluation
    )


def _in_time(found: Sequence[Evaluation], run: RunDirectory, every: int) -> list[Evaluation]:
    """Evaluations that ended before the training was to run alone."""
    ended = {row["step"]: row["time"] for row in run.metrics()}
    good = [each for each in found if each.done <= ended.get(each.step + every, 0.0)]
    if not good:
        raise SystemExit(f"No evaluation took fewer than {every} steps: increase --every.")
    return good


def _report(turns: list[Turn], options: str) -> list[str]:
    found = [turn.evaluation for turn in turns]
    alone = [seconds for turn in turns for seconds in turn.alone]
    beside = [seconds for turn in turns for seconds in turn.beside]
    medians = statistics.median(alone), statistics.median(beside)
    slower = [statistics.median(t.beside) / statistics.median(t.alone) for t in turns]
    taken = [each.cores for each in found]
    count = os.cpu_count() or 1
    lost = [100 * (1 - 1 / each) for each in slower]
    waited = [each.claimed - each.committed for each in found]
    first = [each.first_video for each in found]
    lasted = [each.done - each.claimed for each in found]
    return [
        "# Cost of an evaluation server for a training on the same cores",
        "",
        f"`python benchmarks/evaluator_beside_training.py {options}`: a training and a server on "
        f"the same {count} cores of {platform.machine()}; {len(found)} evaluations of the preset "
        f"`{_PRESET}`, {len(beside)} steps beside them and as many alone, in turns. The load of "
        f"the machine was {os.getloadavg()[0]:.1f} at the end.",
        "",
        "| | alone | beside an evaluation |",
        "|---|---|---|",
        f"| median ms a step | {_ms(medians[0])} | {_ms(medians[1])} |",
        f"| longest step, ms | {_ms(max(alone))} | {_ms(max(beside))} |",
        "",
        "| | median | worst |",
        "|---|---|---|",
        f"| loss of training speed | {statistics.median(lost):.0f} % | {max(lost):.0f} % |",
        f"| share of the processor time that the server uses | "
        f"{100 * statistics.median(taken) / count:.0f} % | {100 * max(taken) / count:.0f} % |",
        _row("from COMMITTED to the claim, s", waited),
        _row("from the claim to the first video, s", first),
        _row("from the claim to the result, s", lasted),
    ]


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.0f}"


def _row(name: str, seconds: list[float]) -> str:
    return f"| {name} | {statistics.median(seconds):.2f} | {max(seconds):.2f} |"


if __name__ == "__main__":
    main()
