"""Encoders on a stream of their own; skipped where there is no GPU."""

from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from tests.build import TINY_WAN, MakeRecipe, wait_until

from longtake.data.loader import Loader
from longtake.models.components import assemble
from longtake.run_dir import RunDirectory
from longtake.training.inputs import InputQueue
from longtake.training.latent_cache import captions_of
from longtake.training.train import train

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA GPU here")


def test_what_is_encoded_ahead_is_what_is_encoded_in_line(small_recipe: MakeRecipe) -> None:
    """While the stream that computes is kept busy, and memory is freed and used again."""
    recipe = small_recipe(*TINY_WAN, "training.global_batch_size=4")
    device = torch.device("cuda", 0)
    loader = Loader(recipe.data, batch_size=4, seed=recipe.seed)
    parts = assemble(recipe, captions_of(loader), None)
    parts.codec.to(device)
    parts.text.to(device)
    ahead = InputQueue(parts, recipe, device, encodes_ahead=True)
    in_line = InputQueue(parts, recipe, device)
    busy = torch.randn(4096, 4096, device=device)
    for number, batch in enumerate(loader.batches(4)):
        found, wanted = list[Any](), list[Any]()
        for part in ahead.micro_batches(batch, 2):
            busy = (busy @ busy).clamp(-1, 1)  # a queue of work on the stream that computes
            found.append([tensor.double().sum() + 0 * busy[0, 0] for tensor in part.tensors()])
        if number < 3:
            ahead.encode_ahead(wait_until(loader.decoded_next), 2)
        for part in in_line.micro_batches(batch, 2):
            wanted.append([tensor.double().sum() for tensor in part.tensors()])
        assert [[float(x) for x in each] for each in found] == [
            [float(x) for x in each] for each in wanted
        ]


def test_a_run_that_encodes_ahead_has_the_losses_of_one_in_line(
    small_recipe: MakeRecipe, tmp_path: Path
) -> None:
    losses = []
    for mode in ("true", "false"):
        recipe = small_recipe(
            *TINY_WAN, "training.device=cuda", "training.precision=fp32", "training.steps=6",
            "training.micro_batch_size=2", f"training.encode_ahead={mode}",
            f"out={tmp_path / mode}",
        )  # fmt: skip
        train(recipe, Console(quiet=True))
        losses.append(RunDirectory(recipe.out).losses())
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
