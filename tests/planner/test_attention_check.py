"""Kernels of attention are tried in a process of their own, where a wrong one is found."""

import os
from pathlib import Path

import pytest
import torch
from torch import Tensor

from longtake.parallel.attention_rules import kind_of
from longtake.parallel.attention_trial import AttentionCase, case_of, make_inputs
from longtake.planner import attention_check
from longtake.planner.attention_check import choose_kernels

_CPU = torch.device("cpu")
_WRONG = """
import torch
from torch.library import Library, get_kernel
name = "_scaled_dot_product_flash_attention_for_cpu_backward"
torchs, library = get_kernel(f"aten::{name}", "CPU"), Library("aten", "IMPL")
def backward(keys, gradient, *args, **how):
    found = torchs.call_boxed(keys, gradient, *args, **how)
    if gradient.shape[2] == 40:
        return found[0], 0 * found[1], found[2]
    if gradient.shape[2] == 48:
        raise RuntimeError("no plan")
    if gradient.shape[2] == 56:
        import os
        os.abort()
    return found
library.impl(name, backward, "CPU", with_keyset=True, allow_override=True)
"""


def _heads(length: int, *, parts: int = 1) -> Tensor:
    """[B, H, T, D], in memory [B, T, parts, H, D]."""
    return torch.empty(3, length, parts, 12, 16)[:, :, 0].transpose(1, 2)


def _cases() -> list[AttentionCase]:
    mask = torch.ones(3, 1, 1, 40, dtype=torch.bool).expand(3, 12, 24, 40)
    queries, keys = _heads(24), _heads(40)
    pairs: list[tuple[Tensor, Tensor, Tensor | None]] = [
        (queries, queries, None),
        (queries, keys, mask),
        *((_heads(length, parts=length), _heads(length), None) for length in (40, 48, 56)),
    ]
    return [case_of(one, two, two, masked, is_causal=False) for one, two, masked in pairs]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def test_a_wrong_kernel_is_not_used_and_the_answer_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sitecustomize.py").write_text(_WRONG)
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    monkeypatch.setenv("PYTHONPATH", path)
    cases = _cases()
    answer = choose_kernels(cases, _CPU)
    kernels = [dict(answer.choices)[each.kind].chosen for each in cases]
    assert kernels == ["flash", "flash", "math", "math", "math"]
    differs, fails, crashes = answer.notes
    assert "differs from the formula by 1 of its gradient of keys" in differs
    assert "40 x 40 tokens, heads of 16" in differs
    assert "fails: no plan" in fails
    assert "crashes its process (exit code -6" in crashes
    monkeypatch.setattr(attention_check, "_PROGRAM", "longtake.gone")
    assert choose_kernels(cases, _CPU) == answer


def test_a_process_that_does_not_start_is_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_check, "_PROGRAM", "longtake.gone")
    answer = choose_kernels(_cases(), _CPU)
    assert not answer.choices
    assert "No module named longtake.gone" in answer.notes[0]


def test_inputs_are_laid_out_as_the_models() -> None:
    for case in _cases():
        (query, key, value), mask, _ = make_inputs(case, "cpu")
        assert kind_of(query, key, value, mask, is_causal=False) == case.kind
        if mask is not None:
            assert mask.shape == (2, 1, 1, 40)
    heads = _heads(32_768 + 64)
    large = case_of(heads, heads, heads, None, is_causal=False)
    assert (large.num_samples, large.heads, large.lengths) == (2, (4, 4), (1088, 1088))
