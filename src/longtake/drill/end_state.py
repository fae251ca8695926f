"""What a run has come to, as its newest checkpoint has it, compared with another run's."""

import json
from pathlib import Path
from typing import Any

from longtake.run_dir import RunDirectory

_OF_THE_SAVE = {".metadata", "COMMITTED", "trainer.json"}
"""Files that differ though what was saved does not: some have a number of their own."""
_FACTS = ("global_step", "data", "guard", "last_update")


def differences(run: RunDirectory, other: RunDirectory) -> list[str]:
    """What of two runs' newest checkpoints differs by even a bit, by name.

    Weights, averages and the optimizer's states are compared as the bytes of their files, which
    follow from them for as many processes; what the next step needs besides, as JSON.
    """
    if not run.checkpoint_steps() or not other.checkpoint_steps():
        return ["all of it: one of them has no checkpoint"]
    paths = [each.checkpoint_path(each.checkpoint_steps()[-1]) for each in (run, other)]
    files, facts = map(_files, paths), map(_facts, paths)
    return [*_unequal(*files), *_unequal(*facts)]


def _unequal(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    names = sorted(one.keys() | other.keys())
    return [name for name in names if name not in one or one[name] != other.get(name)]


def _files(checkpoint: Path) -> dict[str, bytes]:
    paths = (path for path in checkpoint.rglob("*") if path.is_file())
    return {
        str(path.relative_to(checkpoint)): path.read_bytes()
        for path in paths
        if path.name not in _OF_THE_SAVE
    }


def _facts(checkpoint: Path) -> dict[str, Any]:
    trainer = json.loads((checkpoint / "trainer.json").read_bytes())
    return {name: trainer[name] for name in _FACTS}
