"""Steps of a small model in plain torch, and of a tiny FLUX and Wan."""

import tomllib
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from longtake import config
from longtake.planner.activation_checkpointing import BlockCall
from longtake.planner.devices import CPU, DeviceBudget
from longtake.planner.memory import MetaStep, outline_step
from longtake.planner.trace import Subject

_RECIPES = {
    "flux_kontext": """
out = "unused"
training = { steps = 1, global_batch_size = 2, device = "cpu", precision = "fp32" }
data.catalog = "unused"
data.buckets = [{ num_frames = 1, height = 24, width = 24 }]
data.conditioning.reference = { kind = "picture", path = "{stem}.png" }
[model]
family = "flux_kontext"
[model.config]
num_layers = 2
num_single_layers = 3
num_attention_heads = 2
attention_head_dim = 16
axes_dims_rope = [4, 6, 6]
guidance_embeds = true
[codec]
kind = "autoencoder"
config = { block_out_channels = [4], layers_per_block = 1, norm_num_groups = 2 }
[text]
kind = "transformers"
max_tokens = 8
config = { d_model = 12, d_kv = 6, d_ff = 12, num_layers = 1, num_heads = 2 }
[text.pooled]
max_tokens = 9
[text.pooled.config]
hidden_size = 10
intermediate_size = 10
num_hidden_layers = 1
num_attention_heads = 2
""",
    "wan": """
out = "unused"
training = { steps = 1, global_batch_size = 2, device = "cpu", precision = "fp32" }
data.catalog = "unused"
data.buckets = [{ num_frames = 5, height = 128, width = 128 }]
[model]
family = "wan"
config = { num_layers = 4, num_attention_heads = 2, attention_head_dim = 24, ffn_dim = 96 }
[codec]
kind = "autoencoder"
config = { base_dim = 4, z_dim = 4, num_res_blocks = 1 }
[text]
kind = "transformers"
max_tokens = 8
config = { d_model = 16, d_kv = 8, d_ff = 16, num_layers = 1, num_heads = 2 }
""",
}

_RECIPES["wan with a mask"] = (
    _RECIPES["wan"]
    + """
[flow]
loss_mask = "face"
[data.conditioning]
face = { kind = "mask", path = "{stem}.png" }
"""
)
_MODULES = """
[data.conditioning.look]
kind = "picture"
path = "{stem}.png"
[trainable.modules.look]
module = "examples.modules.ip_adapter:IPAdapter"
options = { grid = 2, hidden_size = 16 }
[trainable.modules.style]
module = "examples.modules.style_residual:StyleResidual"
options = { rank = 4 }
"""
for _name in ("wan", "flux_kontext"):
    _RECIPES[f"{_name} with modules"] = _RECIPES[_name] + _MODULES


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
    )


def make_tiny(
    family: str,
    kind: str = "lora",
    dtype: str = "fp32",
    device: DeviceBudget = CPU,
    **training: Any,
) -> MetaStep:
    """Make a step of a tiny FLUX Kontext or Wan; `fill_weights` makes it one that can be run."""
    values = tomllib.loads(_RECIPES[family])
    values["model"]["dtype"] = dtype
    trained = {"kind": kind, **({"rank": 4} if kind == "lora" else {})}
    values["trainable"] = values.get("trainable", {}) | trained
    values["training"] |= training
    return outline_step(config.parse(values, source="test"), device)
