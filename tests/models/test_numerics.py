"""Precision and operation counts. Run by torchrun, this file is one of two ranks."""

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from diffusers import DiTTransformer2DModel, WanTransformer3DModel
from tests.build import QUIET
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from longtake import config
from longtake.config import Recipe
from longtake.models import numerics
from longtake.models.numerics import choose_precision, count_flops, main_dtype
from longtake.run_dir import RunDirectory
from longtake.training.train import train

DIT_SIZES = {"S": (12, 6, 64), "B": (12, 12, 64), "L": (24, 16, 64), "XL": (28, 16, 72)}
"""Blocks, heads and the width of a head of the four published sizes."""


class _Attention(nn.Module):
    """Two tied projections around attention, and a buffer that meets the input."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.second = nn.Linear(8, 8)
        self.second.weight = self.first.weight
        self.register_buffer("positions", torch.ones(16, 8), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        tokens = self.first(tokens + self.get_buffer("positions"))
        return self.second(F.scaled_dot_product_attention(tokens, tokens, tokens))


def test_a_model_on_the_cpu_counts_its_projections_and_its_attention() -> None:
    """16 tokens of width 8: two projections of 2 T D^2 and an attention of 4 T^2 D."""
    counted = count_flops(_Attention(), {"tokens": torch.zeros(1, 1, 16, 8)}).total
    assert counted == 2 * (2 * 16 * 8 * 8) + 4 * 16 * 16 * 8


def test_counting_leaves_the_module_as_it_was() -> None:
    module = nn.Linear(3, 2)
    before = module.weight.detach().clone()
    assert count_flops(module, {"input": torch.zeros(5, 3)}).total == 2 * 5 * 3 * 2
    assert torch.equal(module.weight, before)
    assert module.weight.grad is None


def test_a_model_without_memory_can_be_counted() -> None:
    module = nn.Linear(10**6, 10**6, bias=False, device="meta")
    assert count_flops(module, {"input": torch.empty(1, 10**6, device="meta")}).total == 2 * 10**12


def test_a_video_family_counts_like_its_real_run() -> None:
    """A small Wan, with convolution, rotary buffers and an argument that is no tensor.

    The oracle is torch's counter over a real forward pass with attention as plain products.
    """
    model = WanTransformer3DModel(
        num_attention_heads=2,
        attention_head_dim=12,
        in_channels=4,
        out_channels=4,
        text_dim=16,
        freq_dim=32,
        ffn_dim=48,
        num_layers=2,
    )
    inputs = {
        "hidden_states": torch.zeros(1, 4, 3, 8, 8),
        "timestep": torch.tensor([500]),
        "encoder_hidden_states": torch.zeros(1, 7, 16),
        "return_dict": False,
    }
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(**inputs)
    assert count_flops(model, inputs).total == counter.get_total_flops() > 0


def test_training_costs_three_forward_passes() -> None:
    """Torch's own count of forward and backward of two linear layers is three times the forward's.

    The rule takes every layer to need the gradient of its input; the first one usually does not,
    so here the input asks for one.
    """
    module = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))
    tokens = torch.zeros(3, 4, requires_grad=True)
    with FlopCounterMode(display=False) as counter:
        module(tokens).sum().backward()
    assert count_flops(module, {"input": tokens}).for_training() == counter.get_total_flops()


def test_attention_costs_three_forward_passes_beside_frozen_weights_too() -> None:
    """Its backward pass has no weights to leave out: torch's own count of both passes."""

    class Attention(nn.Module):
        def forward(self, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
            return F.scaled_dot_product_attention(query, key, key)

    query, key = (torch.zeros(1, 2, n, 16, requires_grad=True) for n in (12, 20))
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        Attention()(query, key).sum().backward()
    flops = count_flops(Attention(), {"query": query, "key": key})
    assert flops.for_training(trains_all=False) == counter.get_total_flops() == 3 * flops.total
    linear = count_flops(nn.Linear(4, 8), {"input": torch.zeros(3, 4)})
    assert linear.for_training(trains_all=False) == 2 * linear.total


def test_the_dit_paper_s_table(anchors: Any) -> None:
    """All published sizes, patches and resolutions agree to the table's last digit.

    The table counts multiply-adds of one image in the original model, which embeds timestep and
    label once. diffusers' embeds them in each block and once more at the end; the surplus is known
    exactly and taken off. What remains is the table's rounding to 1e-3 billion.
    """
    table: dict[str, float] = anchors["dit_gmacs"]
    assert len(table) == 13
    for key, published in table.items():
        name, resolution = key.split("@")
        size, patch_size = name.split("/")
        num_blocks, heads, head_width = DIT_SIZES[size]
        width, latent_size = heads * head_width, int(resolution) // 8
        with torch.device("meta"):
            model = DiTTransformer2DModel(
                num_attention_heads=heads,
                attention_head_dim=head_width,
                num_layers=num_blocks,
                patch_size=int(patch_size),
                sample_size=latent_size,
                out_channels=8,  # the paper's models predict a variance too
            )
            inputs = {
                "hidden_states": torch.empty(1, 4, latent_size, latent_size),
                "timestep": torch.zeros(1, dtype=torch.long),
                "class_labels": torch.zeros(1, dtype=torch.long),
            }
        macs = count_flops(model, inputs).total / 2
        surplus = num_blocks * (256 * width + width * width)
        assert abs((macs - surplus) / 1e9 - published) <= 0.0005, key


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
    monkeypatch.setattr(numerics, "cpu_flags", lambda: frozenset(flags.split()))
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", limit)
    assert choose_precision("auto", _CPU) == chosen
    assert choose_precision("bf16", _CPU) == "bf16"


def test_all_ranks_must_have_bf16(
    small_recipe: Callable[..., Recipe], run_on_two_ranks: Callable[..., str], tmp_path: Path
) -> None:
    recipe = small_recipe("training.steps=1", "training.precision=auto")
    (tmp_path / "launched.toml").write_text(config.dump(recipe))
    run_on_two_ranks(__file__, tmp_path / "launched.toml")
    launches = json.loads(RunDirectory(recipe.out).record_path.read_text())["launches"]
    assert [launch["precision"] for launch in launches] == ["fp32"]


def test_a_models_dtype_is_that_of_most_of_its_weights() -> None:
    model = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8).bfloat16())
    assert main_dtype(model) == torch.bfloat16


if __name__ == "__main__":
    own_flags = {"avx512_bf16"} if os.environ["RANK"] == "0" else {"avx2"}
    with patch.object(numerics, "cpu_flags", lambda: frozenset(own_flags)):
        train(config.load(Path(sys.argv[1])), QUIET)
