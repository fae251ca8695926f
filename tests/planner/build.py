"""Steps of a small model in plain torch, and of a tiny FLUX and Wan."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F
from tests.build import TINY_T5, bare_recipe
from torch import Tensor, nn

from longtake import config
from longtake.planner.activation_checkpointing import BlockCall
from longtake.planner.devices import CPU, DeviceBudget
from longtake.planner.memory import MetaStep, outline_step
from longtake.planner.trace import Subject

_FLUX = (
    "data.buckets=[{num_frames=1, height=24, width=24}]",
    "data.conditioning.reference={kind='picture', path='{stem}.png'}",
    "model.family=flux_kontext",
    "model.config={num_layers=2, num_single_layers=3, num_attention_heads=2, "
    "attention_head_dim=16, axes_dims_rope=[4, 6, 6], guidance_embeds=true}",
    "codec.kind=autoencoder",
    "codec.config={block_out_channels=[4], layers_per_block=1, norm_num_groups=2}",
    "text={kind='transformers', max_tokens=8}",
    "text.config={d_model=12, d_kv=6, d_ff=12, num_layers=1, num_heads=2}",
    "text.pooled.max_tokens=9",
    "text.pooled.config={hidden_size=10, intermediate_size=10, num_hidden_layers=1, "
    "num_attention_heads=2}",
)
_WAN = (
    *TINY_T5,
    "text.max_tokens=8",
    "data.buckets=[{num_frames=5, height=128, width=128}]",
    "model.family=wan",
    "model.config={num_layers=4, num_attention_heads=2, attention_head_dim=24, ffn_dim=96}",
    "codec={kind='autoencoder', config={base_dim=4, z_dim=4, num_res_blocks=1}}",
)
_MODULES = (
    "data.conditioning.look={kind='picture', path='{stem}.png'}",
    "trainable.modules.look.module='examples.modules.ip_adapter:IPAdapter'",
    "trainable.modules.look.options={grid=2, hidden_size=16}",
    "trainable.modules.style.module='examples.modules.style_residual:StyleResidual'",
    "trainable.modules.style.options={rank=4}",
)
_MASK = ("flow.loss_mask=face", "data.conditioning.face={kind='mask', path='{stem}.png'}")
_CHANGES = {
    "flux_kontext": _FLUX,
    "flux_kontext with modules": (*_FLUX, *_MODULES),
    "wan": _WAN,
    "wan with modules": (*_WAN, *_MODULES),
    "wan with a mask": (*_WAN, *_MASK),
}


class ToyBlock(nn.Module):
    """Attention and two products, as in any transformer."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.before_attention = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width)
        self.before_products = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)
        self.dropout = dropout

    def forward(self, tokens: Tensor) -> Tensor:
        """[B, T, width] in and out."""
        projected = self.query_key_value(self.before_attention(tokens))
        heads = projected.unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(heads[0], heads[1], heads[2])
        tokens = tokens + attended.transpose(1, 2).flatten(2)
        hidden = F.gelu(self.up(self.before_products(tokens)))
        return tokens + F.dropout(self.down(hidden), self.dropout, self.training)


class Toy(nn.Module):
    """Some blocks between two products."""

    def __init__(self, num_blocks: int, width: int, dropout: float) -> None:
        super().__init__()
        self.embed = nn.Linear(6, width)
        self.blocks = nn.ModuleList(ToyBlock(width, dropout) for _ in range(num_blocks))
        self.head = nn.Linear(width, 6)
        self.call: BlockCall = lambda block, *args: block(*args)

    def forward(self, tokens: Tensor) -> Tensor:
        """[B, T, 6] in and out."""
        tokens = self.embed(tokens)
        for block in self.blocks:
            tokens = self.call(block, tokens)
        return cast("Tensor", self.head(tokens))


def make_toy(
    device: str = "meta",
    trained: str = "",
    num_blocks: int = 3,
    width: int = 32,
    dropout: float = 0.0,
    is_accumulating: bool = False,
    updates: int | None = None,
) -> Subject:
    """Make a step of a `Toy`: on the meta device to be traced, on the CPU to be run."""
    torch.manual_seed(0)
    with torch.device(device):
        model = Toy(num_blocks, width, dropout)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.startswith(trained))
    return Subject(
        model=model,
        blocks={f"blocks.{number}": block for number, block in enumerate(model.blocks)},
        call_blocks_by=lambda call: setattr(model, "call", call),
        make_inputs=lambda: torch.ones(2, 40, 6),
        loss=lambda inputs: model(inputs).square().mean(),
        is_accumulating=is_accumulating,
        updates=updates,
    )


def make_tiny(
    family: str,
    kind: str = "lora",
    dtype: str = "fp32",
    device: DeviceBudget = CPU,
    further: Sequence[str] = (),
    **training: Any,
) -> MetaStep:
    """Make a step of a tiny FLUX Kontext or Wan; `fill_weights` makes it one that can be run."""
    options: dict[str, Any] = {"trainable.kind": kind, "model.dtype": dtype}
    options |= {"training.global_batch_size": 2, "training.device": "cpu"}
    options |= {"training.precision": "fp32"}
    options |= {"trainable.rank": 4} if kind == "lora" else {}
    options |= {f"training.{key}": value for key, value in training.items()}
    changes = [f"{key}={value}" for key, value in options.items()]
    recipe = config.changed(bare_recipe(Path("run")), [*_CHANGES[family], *changes, *further])
    return outline_step(recipe, device)
