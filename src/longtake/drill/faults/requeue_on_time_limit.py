"""A job of Slurm comes to its time limit in the middle of the training."""

import signal
import time

from longtake.drill.comeback import judge_same_end
from longtake.drill.fault import Fault
from longtake.drill.fleet import cluster_of
from longtake.drill.ground import ON_TWO, Ground
from longtake.drill.looking import Sighting
from longtake.drill.private_slurm import private_slurm
from longtake.drill.result import Result
from longtake.drill.resumption import SAME
from longtake.drill.slurm_job import SlurmJob
from longtake.drill.verdict import Verdict

_NAME = "requeue-on-time-limit"
_STEP = 12
_SIGNAL_SECONDS = 120
"""Before the limit. Slurm looks twice a minute, and knows limits of whole minutes."""
_OPTIONS = (
    *("--nodes", "2", "--nproc-per-node", "1", "--no-preflight"),
    *("--time", "60", "--signal-seconds", str(_SIGNAL_SECONDS)),
    *(part for change in ON_TWO for part in ("--set", change)),
)


def drill(ground: Ground) -> Result:
    """Bring the limit of a running job near, and let Slurm do what it does then."""
    place, verdict = ground.fresh(_NAME), Verdict(_NAME)
    with (
        cluster_of(2, place.folder) as cluster,
        private_slurm(cluster, place.folder / "slurm") as slurm,
        SlurmJob(place.folder, slurm, _OPTIONS) as job,
    ):
        job.wait_for_rows(_STEP)
        with job.held() as ranks:  # so that the training is not over before Slurm looks
            job.set_limit(str(_minutes_since(job.began) + _SIGNAL_SECONDS // 60))
            job.wait_for_signal(ranks, signal.SIGUSR1)
        told_at = time.monotonic()
        interrupted = job.find("interrupted")
        job.wait_for_restart()
        job.set_limit("60")
        resumed = job.find("resumed")
        job.finish()
        starts = int(job.facts()["Restarts"])
    verdict.must(starts == 1, f"the job came again {starts} times")
    step = _judge_events(verdict, interrupted, resumed)
    judge_same_end(verdict, place, ground.undisturbed_on_two)
    verdict.must(verdict.steps_lost == 0, f"{verdict.steps_lost} steps were trained twice")
    verdict.detected_seconds = interrupted.at - told_at if interrupted else None
    return verdict.result(
        f"Slurm's signal before the limit let two ranks on two nodes save step {step} and end; the "
        f"job came again by itself, and went on from there. From the first to the last, {SAME}."
    )


def _judge_events(
    verdict: Verdict, interrupted: Sighting | None, resumed: Sighting | None
) -> int | None:
    """It was ended by that signal, and went on from the very step; which is returned."""
    by = interrupted.event["by"] if interrupted else None
    verdict.must(by == "SIGUSR1", f"it was interrupted by {by}, not by SIGUSR1")
    steps = [each.event["step"] if each else None for each in (interrupted, resumed)]
    verdict.must(steps[0] == steps[1], f"it saved step {steps[0]}, and went on from {steps[1]}")
    return steps[0]


def _minutes_since(began: float) -> int:
    return int(time.monotonic() - began) // 60


FAULT = Fault(
    _NAME,
    does="Lets a job of a private Slurm on two hosts (network namespaces) come to its time limit.",
    must="It saves, is requeued, and goes on; nothing is lost, and the end is the same to the bit.",
    drill=drill,
)
