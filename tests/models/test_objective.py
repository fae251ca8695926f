"""A step's loss and its precision."""

from collections.abc import Callable

import pytest
import torch

from longtake.config import Recipe
from longtake.models.build import Components, FlowBatch, assemble, flow_losses, latent_shape
from longtake.models.numerics import Precision

_WAN = (
    "data.buckets=[{num_frames=5, height=32, width=32}]",
    "model.family=wan",
    "model.config={num_layers=1, num_attention_heads=2, attention_head_dim=12, ffn_dim=16}",
    "text.kind=transformers",
    "text.config={d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2}",
)


def _asked(parts: Components, recipe: Recipe) -> FlowBatch:
    shape = latent_shape(parts.codec, recipe.data.buckets[0])
    generator = torch.Generator().manual_seed(0)
    latents, noise = torch.randn(2, 1, *shape, generator=generator)
    told = {name: value[:1] for name, value in parts.text.encode(["a red ball"]).items()}
    return FlowBatch(latents, noise, torch.tensor([0.5]), told)


@pytest.mark.parametrize(("dtype", "is_cast"), [("fp32", True), ("bf16", False)])
def test_weights_in_bf16_are_not_cast_again(
    dtype: str, is_cast: bool, small_recipe: Callable[..., Recipe]
) -> None:
    """Wan's first weight stays in fp32 all the same: what most of them are in decides."""
    recipe = small_recipe(*_WAN, f"model.dtype={dtype}")
    parts = assemble(recipe, ["a red ball"], None)
    assert next(parts.model.parameters()).dtype == torch.float32
    examples = _asked(parts, recipe)
    precisions: tuple[Precision, ...] = ("fp32", "bf16")
    exact, mixed = (
        flow_losses(parts, examples, precision, torch.device("cpu")) for precision in precisions
    )
    assert (not torch.equal(exact, mixed)) == is_cast
