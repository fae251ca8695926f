"""`precision = "auto"` follows the processor. Run by torchrun, this file is one of two ranks."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from rich.console import Console

from longtake import config
from longtake.config import Recipe
from longtake.models import numerics
from longtake.models.numerics import choose_precision
from longtake.run_dir import RunDirectory
from longtake.training.train import train

_CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("flags", "limit", "chosen"),
    [
        ("fpu avx2 avx512f avx512_bf16", "", "bf16"),
        ("fpu avx2 avx512f avx512_bf16 amx_bf16 amx_tile", "", "bf16"),
        ("fpu avx2 avx512f avx512_bf16 amx_bf16", "AVX512_CORE_BF16", "bf16"),
        ("fpu avx2 avx512f avx512_bf16 amx_bf16", "AVX2", "fp32"),
        ("fpu avx2 avx512f avx512_bf16 amx_bf16", "avx512_core_vnni", "fp32"),
        ("fpu avx2 avx512f avx512_vnni", "", "fp32"),
        ("", "", "fp32"),  # not Linux, or not x86
    ],
)
def test_a_cpu_uses_bf16_if_it_has_instructions_for_it(
    monkeypatch: pytest.MonkeyPatch, flags: str, limit: str, chosen: str
) -> None:
    """What oneDNN is forbidden to use does not count."""
    monkeypatch.setattr(numerics, "cpu_flags", lambda: frozenset(flags.split()))
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", limit)
    assert choose_precision("auto", _CPU) == chosen
    assert choose_precision("bf16", _CPU) == "bf16"


def _recorded(recipe: Recipe) -> list[str]:
    launches = json.loads(RunDirectory(recipe.out).record_path.read_text())["launches"]
    return [launch["precision"] for launch in launches]


def test_all_ranks_must_have_bf16(
    small_recipe: Callable[..., Recipe], on_two_processes: list[str], tmp_path: Path
) -> None:
    """Rank 1 is on a processor without it."""
    recipe = small_recipe("training.steps=1", "training.precision=auto")
    (tmp_path / "launched.toml").write_text(config.dump(recipe))
    command = [*on_two_processes, __file__, str(tmp_path / "launched.toml")]
    ended = subprocess.run(
        command, capture_output=True, text=True, env=os.environ, timeout=120, check=False
    )
    assert ended.returncode == 0, ended.stderr
    assert _recorded(recipe) == ["fp32"]


def _train_as_one_of_two(path: Path) -> None:
    flags = {"avx512_bf16"} if os.environ["RANK"] == "0" else {"avx2"}
    with patch.object(numerics, "cpu_flags", lambda: frozenset(flags)):
        train(config.load(path), Console(quiet=True))


if __name__ == "__main__":
    _train_as_one_of_two(Path(sys.argv[1]))
