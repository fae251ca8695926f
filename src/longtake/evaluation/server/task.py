"""One thing to do: a preset's videos of one checkpoint; torch-free."""

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from longtake.evaluation.presets.preset import Preset
from longtake.evaluation_dir import EvaluationDirectory
from longtake.run_dir import RunDirectory

Tick = Callable[[str, int, int], None]
"""To be called as the work goes on: what is being done, how much of it, of how much."""


@dataclass(frozen=True)
class Task:
    """A checkpoint that is to be evaluated.

    Attributes:
        run: the run.
        preset: what is sampled.
        step: of the checkpoint.
        key: of its weights, see `checkpoint_key`.
        attempts: how often it was tried in vain.
        waited_seconds: since this server first saw it.
    """

    run: RunDirectory
    preset: Preset
    step: int
    key: str
    attempts: int = 0
    waited_seconds: float = 0.0

    @property
    def checkpoint(self) -> Path:
        """Its folder."""
        return self.run.checkpoint_path(self.step)

    @property
    def directory(self) -> EvaluationDirectory:
        """Where results go."""
        return EvaluationDirectory(self.run)

    @property
    def claim_path(self) -> Path:
        """The lease of who works on it."""
        return self.directory.claim_path(self.preset.name, self.step, self.key)

    @property
    def facts(self) -> dict[str, str | int]:
        """What events say of it."""
        return {"preset": self.preset.name, "step": self.step, "key": self.key}

    def __str__(self) -> str:
        return f"{self.run.path}: {self.preset.name} of step {self.step}"


def preset_key(preset: Preset) -> str:
    """Eight hexadecimal digits that change when what is sampled does.

    Attempts at what it was before do not count for what it is now.
    """
    text = json.dumps(preset.as_record(), sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:8]
