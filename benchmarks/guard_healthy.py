"""False verdicts of the guard on healthy trainings, and the faults that it still finds in them.

    python benchmarks/guard_healthy.py [--steps 672] [--only TEXT] [--keep FOLDER]
        [--against COMMIT]

Trains a model of a few thousand weights in many settings that a user may choose, none of which is a
fault, and records what the guard measures in each step. Verdicts are a pure function of these
numbers, so judging the records gives exactly the verdicts of a run up to its first.
Each record is judged again with the faults of `guard_calibration` injected. `--against`
judges by the detectors of another commit as well. Writes benchmarks/results/guard_healthy.md; some
seconds of one CPU core for each setting. `--keep` keeps the records, which are then not made again.
"""

import argparse
import importlib
import json
import math
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

import torch
from benchmarks.guard_calibration import FAULTS, Fault
from rich.console import Console

from longtake import config
from longtake.data.index import index
from longtake.data.window import Window, read_window
from longtake.demo.shapes import write_clips
from longtake.guard import detectors, history
from longtake.guard.history import StepStatistics
from longtake.optim.update import learning_rate_factor
from longtake.training.train import train

_RESULTS = Path(__file__).parent / "results" / "guard_healthy.md"
_decoded: dict[Any, Any] = {}
_PLACES = (0.35, 0.6, 0.85)
_REACH = 100
_WARMUP = history.GuardSettings().warmup_steps
_BASE: dict[str, Any] = {
    "data": {"buckets": [{"num_frames": 4, "height": 16, "width": 16}], "workers": 0},
    "model": {
        "family": "tubelet",
        "config": {"patch_size": [4, 8, 8], "num_blocks": 1, "hidden_size": 24, "num_heads": 2},
    },
    "text": {"kind": "words", "max_tokens": 6},
    "flow": {"timestep_sampling": "logit_normal", "logit_mean": 2.0},
    "optimizer": {"kind": "adamw", "learning_rate": 1e-3, "warmup_steps": 30},
    "training": {"global_batch_size": 8, "device": "cpu", "precision": "fp32"},
    "checkpoint": {"every": 100_000},
    "watch": {"enabled": False},
    "tracking": {"tensorboard": False},
}


class DistanceOverGradients(torch.optim.Optimizer):
    """An optimizer of one's own that finds its rate and does not report it.

    After Ivgi, Hinder and Carmon, "DoG is SGD's Best Friend" (2023): the rate is the largest
    distance from the first weights over the root of the sum of all squared gradient norms.
    """

    def __init__(self, params: Iterable[torch.Tensor], lr: float = 1.0) -> None:
        super().__init__(params, {"lr": lr})
        self._squares, self._distance = 0.0, 0.0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Move all weights by the same rate."""
        weights = [each for each in self.param_groups[0]["params"] if each.grad is not None]
        for each in weights:
            self.state[each].setdefault("first", each.clone())
        moved = math.sqrt(sum(float((w - self.state[w]["first"]).square().sum()) for w in weights))
        norm = math.sqrt(sum(float(w.square().sum()) for w in weights))
        self._distance = max(self._distance, moved, 1e-6 * (1 + norm))
        self._squares += sum(float(w.grad.square().sum()) for w in weights)
        for each in weights:
            rate = self.param_groups[0]["lr"] * self._distance / math.sqrt(self._squares)
            each.sub_(each.grad, alpha=rate)


@dataclass(frozen=True)
class Setting:
    """One healthy training."""

    name: str
    changes: Mapping[str, Any] = field(default_factory=dict)
    """Of the recipe, by dotted keys."""
    clips: int = 100
    restarts: bool = False
    """Whether the rate returns to its full value every 150 steps after a cosine."""
    pause: bool = False
    """Whether it is stopped halfway by a signal, as a scheduler does, and started again."""


def _optimizer(kind: str, rate: float = 1e-3, **more: Any) -> dict[str, Any]:
    changes = {"optimizer.kind": kind, "optimizer.learning_rate": rate}
    return changes | {f"optimizer.{name}": value for name, value in more.items()}


def _stages(steps: int, **second: Any) -> dict[str, Any]:
    return {"data.stages": [{"name": "first", "steps": steps}, {"name": "second", **second}]}


_LORA = {"trainable.kind": "lora", "trainable.rank": 4, "trainable.targets": ["*"]}
_ADAMW, _MUON = _optimizer("adamw"), _optimizer("muon", 3e-3)
_PRODIGY = _optimizer("prodigy", 1.0)
_CONSTANT = {"optimizer.schedule": "constant"}
_DOG = _optimizer("benchmarks.guard_healthy:DistanceOverGradients", 1.0, warmup_steps=0)
_MODULE = {
    "trainable.kind": "full",
    "trainable.modules": {"style": {"module": "examples.modules.style_residual:StyleResidual"}},
}


def _settings() -> Iterator[Setting]:
    optimizers = {
        "AdamW": _ADAMW,
        "Muon": _MUON,
        "Prodigy": _PRODIGY,
        "8-bit AdamW": _optimizer("adamw8bit"),
        "DoG of one's own": _DOG,
    }
    for name, changes in optimizers.items():
        yield Setting(name, changes)
        yield Setting(f"{name}, LoRA", changes | _LORA)
    for name, changes in (("AdamW", _ADAMW), ("Muon", _MUON), ("Prodigy", _PRODIGY)):
        yield Setting(f"{name}, constant rate", changes | _CONSTANT)
    for times in (3, 10):
        for name, changes in (("AdamW", _ADAMW), ("Muon", _MUON), ("LoRA", _ADAMW | _LORA)):
            rate = times * changes["optimizer.learning_rate"] / (1 if times == 3 else 3)
            low = changes | {"optimizer.learning_rate": rate / times}
            for warmup in (0, 100):
                raised = _stages(300, learning_rate=rate, warmup_steps=warmup or None)
                name_of_it = f"rate times {times}, warm-up {warmup}, {name}"
                yield Setting(name_of_it, low | raised | _CONSTANT)
    for name, changes in (("AdamW", _ADAMW), ("Muon", _MUON)):
        yield Setting(f"restarts, {name}", changes | _CONSTANT, restarts=True)
    restarts = {"optimizer.schedule": "cosine_restarts"}
    yield Setting("cosine_restarts", _ADAMW | restarts)
    # A model that has learnt four clips loses much of what the end of a cycle gave it.
    hot = {"optimizer.learning_rate": 1e-2, "training.global_batch_size": 4}
    yield Setting("cosine_restarts, 4 clips, rate 0.01", _ADAMW | restarts | hot, 4)
    for clips in (1, 4):
        for dropout in (0.05, 0.1, 0.5):
            changes = {"data.caption_dropout": dropout, "training.global_batch_size": 4}
            yield Setting(f"{clips} clips, dropout {dropout}", _ADAMW | changes, clips)
    small = {"training.global_batch_size": 4, "data.caption_dropout": 0.05}
    yield Setting("4 clips, constant rate", small | _CONSTANT, 4)
    yield Setting("4 clips, LoRA", _ADAMW | _LORA | small, 4)
    yield Setting("4 clips, Muon", _MUON | small, 4)
    yield Setting("100 clips, dropout 0.5", {"data.caption_dropout": 0.5})
    # DoRA divides by the length of each row, and rows that begin at zero have none.
    in_blocks = {
        "trainable.kind": "dora",
        "trainable.targets": ["blocks.*.attention.*", "blocks.*.mlp_*"],
    }
    yield Setting("DoRA", _ADAMW | _LORA | in_blocks)
    yield Setting("a module that begins at zero", _ADAMW | _MODULE)
    yield Setting("a module that begins at zero, and a LoRA", _ADAMW | _MODULE | _LORA)
    yield Setting("batch 8 to 2", _stages(350, global_batch_size=2))
    yield Setting(
        "batch 2 to 16", {"training.global_batch_size": 2} | _stages(350, global_batch_size=16)
    )
    yield Setting("shift 1 to 3", _stages(350, shift=3.0))
    yield Setting(
        "dropout 0 to 0.5", {"data.caption_dropout": 0.0} | _stages(350, caption_dropout=0.5)
    )
    yield Setting(
        "batch, shift and dropout at once",
        _stages(350, global_batch_size=4, shift=3.0, caption_dropout=0.5),
    )
    yield Setting("accumulation", {"training.micro_batch_size": 2})
    yield Setting("resumed", _ADAMW, pause=True)
    yield Setting("resumed, Prodigy", _PRODIGY, pause=True)


# --- Recording --------------------------------------------------------------------------------


def _recipe(setting: Setting, material: Path, out: Path, steps: int) -> config.Recipe:
    values = json.loads(json.dumps(_BASE))
    values["out"] = str(out)
    values["data"]["catalog"] = str(material / f"{setting.clips}.parquet")
    values["training"]["steps"] = steps
    for name, value in setting.changes.items():
        section, key = name.split(".")
        values.setdefault(section, {})[key] = value
    return config.parse(values, source=setting.name)


@contextmanager
def _recording(found: list[StepStatistics], restarts: bool, stop_at: int | None) -> Iterator[None]:
    """Keep what the guard is given, and let it find nothing."""

    def read_once(window: Window, out: Any = None) -> Any:
        """Decode each window once: of decoding no number depends on the number of times."""
        if window not in _decoded:
            _decoded[window] = read_window(window)
        if out is None:
            return _decoded[window]
        out[:] = _decoded[window]
        return out

    def record(_: Any, now: StepStatistics, __: Any) -> detectors.GuardVerdict:
        found.append(now)
        if len(found) == stop_at:
            signal.raise_signal(signal.SIGTERM)
        return detectors.OK

    def restarted(recipe: config.Recipe, step: int, position: Any) -> float:
        wave = 0.5 * (1 + math.cos(math.pi * (step % 150) / 150))
        return learning_rate_factor(recipe, step, position) * (wave if restarts else 1.0)

    with (
        patch("longtake.training.guard_runner.judge", record),
        patch("longtake.training.step.learning_rate_factor", restarted),
        patch("longtake.data.conditioning.read_window", read_once),
    ):
        yield


def record(setting: Setting, material: Path, kept: Path, steps: int) -> list[Any]:
    """The statistics of each step of a setting."""
    # In each stage the first steps are not judged.
    steps += _WARMUP * (len(setting.changes.get("data.stages", [None])) - 1)
    path = kept / f"{setting.name.replace(' ', '_').replace(',', '')}_{steps}.jsonl"
    if path.is_file():
        rows = map(json.loads, path.read_text(encoding="utf-8").splitlines())
        return [StepStatistics.from_dict(row) for row in rows]
    found: list[StepStatistics] = []
    stop_at = steps // 2 if setting.pause else None
    with tempfile.TemporaryDirectory() as aside, _recording(found, setting.restarts, stop_at):
        recipe = _recipe(setting, material, Path(aside) / "run", steps)
        while len(found) < steps:
            train(recipe, Console(quiet=True))
    lines = (json.dumps(each.as_dict()) for each in found)
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return found


def make_material(folder: Path) -> None:
    """Catalogs of 1, 4 and 100 clips."""
    folder.mkdir(parents=True, exist_ok=True)
    for count in (1, 4, 100):
        captions = write_clips(folder / f"clips_{count}", count, 0)
        out = folder / f"{count}.parquet"
        if not out.exists():
            index([captions.parent], captions=captions, out=out)


# --- Judging ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Guard:
    """The detectors of this commit or of another."""

    history: ModuleType = history
    detectors: ModuleType = detectors

    @classmethod
    def of_commit(cls, commit: str, folder: Path) -> "Guard":
        """Those of a commit, as the package `guard_of_<commit>`."""
        name = f"guard_of_{commit}"
        package = folder / name
        package.mkdir()
        (package / "__init__.py").touch()
        for module in ("history", "detectors"):
            shown = subprocess.run(  # noqa: S603
                ["git", "show", f"{commit}:src/longtake/guard/{module}.py"],  # noqa: S607
                check=True,
                capture_output=True,
                text=True,
            )
            text = shown.stdout.replace("longtake.guard.", f"{name}.")
            (package / f"{module}.py").write_text(text, encoding="utf-8")
        sys.path.insert(0, str(folder))
        return cls(
            *(importlib.import_module(f"{name}.{each}") for each in ("history", "detectors"))
        )

    def as_own(self, step: StepStatistics) -> Any:
        own = self.history.StepStatistics
        return own(**{each.name: getattr(step, each.name) for each in fields(own)})

    def verdicts(self, steps: Sequence[StepStatistics]) -> list[Any]:
        """Those that are not `ok`, of a whole run."""
        settings, found = self.history.GuardSettings(), []
        past = self.history.History(settings.window)
        for step in steps:
            now = self.as_own(step)
            verdict = self.detectors.judge(past, now, settings)
            past = past.append(self.history.JudgedStep(now, verdict.kind))
            if verdict.kind != "ok":
                found.append((step.step, verdict))
        return found

    def delays(
        self, faults: Sequence[Fault], steps: Sequence[StepStatistics]
    ) -> Iterator[int | None]:
        """Of each fault at each place: the steps from its beginning until it is found."""
        settings, pasts = self.history.GuardSettings(), dict[int, Any]()
        for fault in faults:
            for first in _places(fault, steps):
                if first not in pasts:
                    pasts[first] = self.history.History(settings.window)
                    for step in steps[max(0, first - 4 * settings.window) : first]:
                        judged = self.history.JudgedStep(self.as_own(step), "ok")
                        pasts[first] = pasts[first].append(judged)
                yield self._delay(fault, steps[first : first + _REACH], pasts[first])

    def _delay(self, fault: Fault, steps: Sequence[StepStatistics], past: Any) -> int | None:
        settings = self.history.GuardSettings()
        for delay, step in enumerate(steps):
            now = self.as_own(fault.change(step, delay))
            if self.detectors.judge(past, now, settings).kind != "ok":
                return delay
            past = past.append(self.history.JudgedStep(now, "ok"))
        return None


def _places(fault: Fault, steps: Sequence[StepStatistics]) -> list[int]:
    places = [round(place * len(steps)) for place in _PLACES]
    if not fault.at_edge:
        return places
    edges = [number for number, step in enumerate(steps) if step.edge is not None]
    return sorted(
        {next((e for e in edges if e >= place), edges[-1]) for place in places} if edges else []
    )


def _is_possible(fault: Fault, steps: Sequence[StepStatistics]) -> bool:
    group = fault.group
    return not group or group in steps[-1].group_update_ratios


def main() -> None:
    """Record, judge, print and write the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=672)
    parser.add_argument("--only", default="", help="settings whose names contain this text")
    parser.add_argument("--keep", type=Path, help="folder in which records are kept")
    parser.add_argument("--against", help="a commit whose detectors judge the same records")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as aside:
        kept = asked.keep or Path(aside)
        make_material(kept / "material")
        guards = [Guard()]
        if asked.against:
            guards.append(Guard.of_commit(asked.against, Path(aside)))
        settings = [each for each in _settings() if asked.only in each.name]
        recorded = {}
        for each in settings:
            recorded[each.name] = record(each, kept / "material", kept, asked.steps)
            print(each.name, flush=True)  # noqa: T201
        lines = _report(recorded, guards, asked.steps, asked.against)
    print("\n".join(lines))  # noqa: T201
    if not asked.only:
        _RESULTS.write_text("\n".join(lines) + "\n", encoding="utf-8")


def _report(
    recorded: Mapping[str, Sequence[StepStatistics]],
    guards: Sequence[Guard],
    steps: int,
    against: str | None,
) -> list[str]:
    heads = ["this commit", *([against[:7]] if against else [])]
    lines = [
        "# Healthy trainings, judged",
        "",
        f"`python benchmarks/guard_healthy.py --steps {steps}"
        f"{f' --against {against}' if against else ''}`: no verdict is right. Of the faults of "
        f"`guard_calibration`, injected at {len(_PLACES)} places, the number that was found within "
        f"{_REACH} steps and the mean delay of those that both found.",
        "",
        "| setting | judged steps | "
        + " | ".join(f"skips, rollbacks ({h})" for h in heads)
        + " | "
        + " | ".join(f"faults found ({h})" for h in heads)
        + " | "
        + " | ".join(f"mean delay ({h})" for h in heads)
        + " |",
        "|---" * (2 + 3 * len(heads)) + "|",
    ]
    judged, totals = 0, [[0, 0] for _ in guards]
    for name, run in recorded.items():
        num_judged = len(run) - _WARMUP * len({step.stage for step in run})
        judged += num_judged
        false, delays = [], []
        for number, guard in enumerate(guards):
            kinds = [verdict.kind for _, verdict in guard.verdicts(run)]
            skips, others = kinds.count("skip"), len(kinds) - kinds.count("skip")
            totals[number][0] += skips
            totals[number][1] += others
            false.append(f"{skips}, {others}")
            possible = [fault for fault in FAULTS if _is_possible(fault, run)]
            delays.append(list(guard.delays(possible, run)))
        both = [each for each in zip(*delays, strict=True) if None not in each]
        found = [f"{sum(each is not None for each in mine)} of {len(mine)}" for mine in delays]
        means = [f"{statistics.mean(each):.1f}" for each in zip(*both, strict=True)]
        cells = [name, str(num_judged), *false, *found, *means]
        lines.append(f"| {' | '.join(cells)} |")
    sums = "; ".join(
        f"{head}: {skips} skips, {others} rollbacks and ends"
        for head, (skips, others) in zip(heads, totals, strict=True)
    )
    return [*lines, "", f"{len(recorded)} settings, {judged} judged steps. {sums}."]


if __name__ == "__main__":
    main()
