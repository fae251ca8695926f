"""Steps of tiny models whose tokens four ranks share: by heads, by a ring, and by both.

    python -m benchmarks.context_parallel [--rounds 7]

Four gloo ranks on this machine hold the model three times: ranks exchange tokens for heads (as on
one node), pass keys and values around a ring (a rank a node), or do both (two ranks a node). The
ways take turns with the same latents. Counts the bytes that a rank sends in a step, and writes
benchmarks/results/context_parallel.md. Some minutes on two CPU cores; nothing runs on a GPU.
"""

import argparse
import copy
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _resolve_process_group  # type: ignore[attr-defined]
from torch.utils._python_dispatch import TorchDispatchMode

from longtake import config
from longtake.config import ParallelSection, Recipe
from longtake.models.components import Components, assemble
from longtake.models.conditioning import outline_conditioning
from longtake.models.objective import FlowBatch, flow_losses
from longtake.parallel.context_parallel import TokenExchange
from longtake.parallel.mesh import World, join

_RESULTS = Path(__file__).parent / "results" / "context_parallel.md"
_RANKS = 4
_WAYS = {"heads": 4, "heads and ring": 2, "ring": 1}  # ranks of a node
_TEXT = """
text.kind = "transformers"
text.config = { d_model = 16, d_kv = 8, d_ff = 16, num_layers = 1, num_heads = 2 }
text.max_tokens = 32
codec.kind = "autoencoder"
training = { steps = 1, global_batch_size = 1, device = "cpu", precision = "fp32" }
data.catalog = "none.parquet"
out = "none"
parallel.context = 4
"""
_RECIPES = {
    "Wan": """
model.family = "wan"
data.buckets = [{ num_frames = 5, height = 32, width = 32 }]
codec.config = { base_dim = 4, z_dim = 4, dim_mult = [1, 1], num_res_blocks = 1, \
temperal_downsample = [true] }
[model.config]
num_layers = 2
num_attention_heads = 4
attention_head_dim = 32
ffn_dim = 256
""",
    "FLUX": """
model.family = "flux"
data.buckets = [{ num_frames = 1, height = 32, width = 32 }]
text.pooled.max_tokens = 7
[codec.config]
block_out_channels = [4, 4]
down_block_types = ["DownEncoderBlock2D", "DownEncoderBlock2D"]
up_block_types = ["UpDecoderBlock2D", "UpDecoderBlock2D"]
latent_channels = 4
norm_num_groups = 2
[text.pooled.config]
hidden_size = 8
intermediate_size = 16
num_hidden_layers = 1
num_attention_heads = 2
[model.config]
num_layers = 1
num_single_layers = 1
num_attention_heads = 4
attention_head_dim = 32
joint_attention_dim = 16
pooled_projection_dim = 8
guidance_embeds = true
axes_dims_rope = [8, 12, 12]
""",
}
_LATENTS = {
    "Wan": {1024: (4, 32, 32), 3072: (12, 32, 32)},
    "FLUX": {1024: (1, 64, 64), 3072: (1, 96, 128)},
}
"""Frames, height and width of latents, by tokens (of the pictures)."""
_Row = dict[str, Any]


def main() -> None:
    """Start the ranks; print and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--rank-of", type=Path, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.rank_of is not None:
        with join("cpu", ParallelSection(context=_RANKS)) as world:
            _as_rank(world, asked.rank_of, asked.rounds)
        return
    with tempfile.TemporaryDirectory() as folder:
        found = Path(folder) / "rows.json"
        launched = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        script = ["-m", "benchmarks.context_parallel", "--rank-of", str(found)]
        command = [*launched, "--nproc-per-node", str(_RANKS), *script]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        subprocess.run([*command, "--rounds", str(asked.rounds)], env=environment, check=True)  # noqa: S603 - our own program
        rows = json.loads(found.read_text(encoding="utf-8"))
    lines = _report(rows, asked.rounds)
    _RESULTS.write_text("\n".join(lines) + "\n", encoding="utf-8")
    print("\n".join(lines))  # noqa: T201


def _as_rank(world: World, found: Path, rounds: int) -> None:
    rows = []
    for family, text in _RECIPES.items():
        recipe = config.parse(tomllib.loads(_TEXT + text), source="the benchmark's recipe")
        torch.manual_seed(0)
        alone = assemble(recipe, ["a red square"], None)
        ways = {way: _shared(alone, world, of_node) for way, of_node in _WAYS.items()}
        for tokens, sizes in _LATENTS[family].items():
            measured = _measure(ways, _drawn(alone, recipe, sizes), rounds)
            rows += [{"family": family, "tokens": tokens, **each} for each in measured]
    if world.is_first:
        found.write_text(json.dumps(rows), encoding="utf-8")


def _shared(alone: Components, world: World, of_node: int) -> Components:
    parts = replace(alone, model=copy.deepcopy(alone.model).train())
    os.environ["LOCAL_WORLD_SIZE"] = str(of_node)
    sharing = TokenExchange(world, parts.family.block.num_heads(parts.model))
    assert sharing.heads_size == of_node
    parts.family.block.share_tokens(parts.model, sharing)
    return parts


def _drawn(parts: Components, recipe: Recipe, sizes: Sequence[int]) -> FlowBatch:
    """A clip's latents and conditioning, the same on all ranks."""
    generator = torch.Generator().manual_seed(1)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    outline = outline_conditioning(parts, recipe, recipe.data.buckets[0])
    conditioning = {
        name: draw(*each.shape) if each.is_floating_point() else torch.ones_like(each, device="cpu")
        for name, each in outline.items()
    }
    shape = (1, 4, *sizes)
    return FlowBatch(draw(*shape), draw(*shape), torch.tensor([0.5]), conditioning)


def _measure(ways: Mapping[str, Components], batch: FlowBatch, rounds: int) -> list[_Row]:
    counts = {way: _Sent() for way in ways}
    losses = [_step(parts, batch, counts[way])[1] for way, parts in ways.items()]
    torch.testing.assert_close(losses[1:], losses[:1] * (len(ways) - 1))
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    for number in range(rounds):
        for way in list(ways) if number % 2 else reversed(list(ways)):
            seconds[way].append(_step(ways[way], batch)[0])
    return [
        {"way": way, "seconds": each, "heads": counts[way].heads, "ring": counts[way].ring}
        for way, each in seconds.items()
    ]


def _step(
    parts: Components, batch: FlowBatch, count: "_Sent | None" = None
) -> tuple[float, Tensor]:
    """Seconds of forward and backward pass, until all ranks have ended them, and the loss."""
    parts.model.zero_grad()
    dist.barrier()
    began = time.perf_counter()
    with nullcontext() if count is None else count:
        loss = flow_losses(parts, batch, "fp32", torch.device("cpu")).mean()
        loss.backward()  # type: ignore[no-untyped-call]
    dist.barrier()
    return time.perf_counter() - began, loss.detach()


class _Sent(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes that this rank sends to others for attention."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.heads = self.ring = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops._c10d_functional.all_to_all_single.default:
            tensor, _, sent, group = args
            own = sent[dist.get_rank(_resolve_process_group(group))]
            num_bytes = tensor.nbytes * (sum(sent) - own) // sum(sent)
            if sent.count(0) == len(sent) - 1:  # to the next rank only
                self.ring += num_bytes
            else:
                self.heads += num_bytes
        return func(*args, **(kwargs or {}))


def _report(rows: Sequence[_Row], rounds: int) -> list[str]:
    cells = (
        (
            row["family"],
            f"{row['tokens']:,}",
            row["way"],
            f"{1000 * statistics.median(row['seconds']):.0f} "
            f"({1000 * min(row['seconds']):.0f} to {1000 * max(row['seconds']):.0f})",
            f"{row['heads'] / 2**20:.2f}",
            f"{row['ring'] / 2**20:.2f}",
        )
        for row in rows
    )
    return [
        "# Sharing the tokens of a clip: heads, a ring, and both",
        "",
        f"`python -m benchmarks.context_parallel --rounds {rounds}`: {_RANKS} gloo ranks on "
        f"{os.cpu_count()} cores of {platform.machine()}, a thread each, torch "
        f"{torch.__version__}. **Nothing was measured on a GPU, or on several nodes**: here all "
        "ranks share the cores, and what they send does not leave the memory, so that nothing "
        "hides behind computation. Tiny models of two blocks with 4 heads of 32 channels, fp32, "
        "no recomputation; forward and backward pass of a clip, the ways in turn, beside other "
        "programs. Medians, with the least and the most; MiB that a rank sends in a step, those "
        "of the whole output with the heads'. The losses of the ways are equal up to rounding.",
        "",
        "| model | tokens | shared by | ms a step | MiB for heads | MiB around the ring |",
        "|---|---|---|---|---|---|",
        *(f"| {' | '.join(each)} |" for each in cells),
    ]


if __name__ == "__main__":
    main()
