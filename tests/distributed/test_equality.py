"""However many ranks share a model and its clips, training is that of one process.

Run by several ranks, this file trains all cases, shared in all ways, one after the other, and
writes down how far they are from what one process did.
"""

import copy
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from longtake import config
from longtake.config import ParallelSection, Recipe
from longtake.data.catalog import Catalog
from longtake.data.loader import Loader
from longtake.models.assemble import Components, assemble
from longtake.parallel.fsdp import full
from longtake.parallel.mesh import World, arranged, join
from longtake.recompute.policies import options_of
from longtake.records import read_json_lines, append_json
from longtake.training.agree import agreed
from longtake.training.build import build_state
from longtake.training.caching import captions_of
from longtake.training.fit import run_blocks_by
from longtake.training.gauge import Gauge
from longtake.training.statistics import local_facts, reduce_facts
from longtake.training.step import apply_update, compute_gradients

_STEPS = 5
_RECIPE = """
[data]
workers = 0
[text]
max_tokens = 7
[optimizer]
learning_rate = 3e-3
warmup_steps = 2
[training]
steps = 5
batch_size = 4
micro_batch_size = 1
device = "cpu"
precision = "fp32"
[ema]
decay = 0.9
"""
_T5 = ('text.kind="transformers"', "text.config={d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2}")
_FLUX = (
    *_T5,
    "data.buckets=[{num_frames=1, height=28, width=20}]",
    "model.config={num_layers=1, num_single_layers=1, num_attention_heads=4, attention_head_dim=8, "
    "joint_attention_dim=16, pooled_projection_dim=8, guidance_embeds=true, axes_dims_rope=[2,2,4]}",
    "codec.kind=autoencoder",
    "codec.class_name=AutoencoderKL",
    'codec.config={block_out_channels=[4, 4], down_block_types=["DownEncoderBlock2D", '
    '"DownEncoderBlock2D"], up_block_types=["UpDecoderBlock2D", "UpDecoderBlock2D"], '
    "latent_channels=4, norm_num_groups=2}",
    "text.class_name=T5EncoderModel",
    "text.pooled={max_tokens=7, config={hidden_size=8, intermediate_size=16, num_hidden_layers=1, "
    "num_attention_heads=2}}",
)
_FAMILIES = {
    "tubelet": (
        "model.family=tubelet",
        "data.buckets=[{num_frames=8, height=32, width=32}]",
        "model.config={hidden_size=48, num_blocks=2, num_heads=4}",
    ),
    "wan": (
        *_T5,
        "model.family=wan",
        "data.buckets=[{num_frames=5, height=28, width=20}]",  # 105 tokens
        "model.config={num_layers=2, num_attention_heads=4, attention_head_dim=12, ffn_dim=16}",
        "codec.kind=autoencoder",
        "codec.config={base_dim=4, z_dim=4, dim_mult=[1, 1], num_res_blocks=1, "
        "temperal_downsample=[true]}",
    ),
    "flux": (*_FLUX, "model.family=flux"),  # 35 tokens and 7 of text
    "flux_kontext": (
        *_FLUX,
        "model.family=flux_kontext",
        'data.references.reference="../before/{stem}.png"',
    ),
}
"""Uneven numbers of tokens for 2 and for 4 ranks."""
_KINDS = {"full": (), "lora": ("trainable.kind=lora", "trainable.rank=4")}
_CASES = [("tubelet", "full"), ("wan", "full"), ("wan", "lora"), ("flux", "full"), ("flux_kontext", "lora")]
_WAYS: dict[int, dict[str, tuple[dict[str, Any], str]]] = {
    1: {"alone": ({}, "none")},
    2: {
        "replicate": ({}, "none"),
        "shard": ({"strategy": "shard"}, "none"),
        "sequence of 2": ({"sequence": 2}, "all"),
    },
    3: {"replicate": ({}, "none"), "shard": ({"strategy": "shard"}, "all")},
    4: {
        "replicate": ({}, "none"),
        "shard": ({"strategy": "shard"}, "none"),
        "hybrid of 2": ({"strategy": "hybrid", "shard_size": 2}, "none"),
        "sequence of 2, shard": ({"strategy": "shard", "sequence": 2}, "save-attention"),
        "sequence of 2, hybrid": ({"strategy": "hybrid", "shard_size": 2, "sequence": 2}, "none"),
        "sequence of 4": ({"sequence": 4}, "none"),
    },
}
"""By the number of ranks: how they share, and what is recomputed."""


def _few(catalog: Path) -> Path:
    """A catalog of 10 clips: with 4 a batch, the second epoch begins after 3 steps."""
    few = catalog.with_name("ten.parquet")
    Catalog.of(list(Catalog.load(catalog).clips())[:10]).save(few)
    return few


@pytest.fixture(scope="module")
def deviations(
    warm: list[str],
    shapes_catalog: Path,
    pairs: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> list[dict[str, Any]]:
    """How far each way is from one process, in all cases."""
    folder = Path("/tmp/exp/q/eq"); folder.mkdir(exist_ok=True)
    (folder / "base.toml").write_text(_RECIPE)
    catalogs = {"flux": _few(pairs / "catalog.parquet"), "other": _few(shapes_catalog)}
    for family, kind in _CASES:
        catalog = catalogs["flux" if family.startswith("flux") else "other"]
        always = f"out={folder / 'run'}", f"data.catalog={catalog}"
        recipe = config.load(
            folder / "base.toml", (*always, *_FAMILIES[family], *_KINDS[kind])
        )
        (folder / f"{family} {kind}.toml").write_text(config.dump(recipe))
    for count in _WAYS:
        ended = subprocess.run(
            [*warm, str(count), __file__, str(folder)],
            capture_output=True, text=True, timeout=120, check=False,
        )
        assert ended.returncode == 0, ended.stderr
    return read_json_lines(folder / "deviations.jsonl")


@pytest.mark.slow
def test_all_ways_have_the_losses_of_one(deviations: list[dict[str, Any]]) -> None:
    """Losses, norms and weights."""
    print()
    for row in deviations:
        print(*row.values(), sep="\t")
    for row in deviations:
        assert row["loss"] < 1e-6, row


def _train(parts: Components, recipe: Recipe, policy: str, world: World) -> dict[str, Tensor]:
    """Loss and norms of each step, and the weights at the end."""
    parts = replace(parts, model=copy.deepcopy(parts.model))
    names = {module: name for name, module in parts.model.named_modules()}
    blocks = [names[block] for block in parts.family.blocks(parts.model)]
    run_blocks_by(options_of(policy, tuple(blocks)), parts)
    state = build_state(parts, "fp32", recipe, world)
    gauge = Gauge(parts.model, parts.family.blocks(parts.model))
    loader = Loader(
        recipe.data,
        batch_size=recipe.training.batch_size,
        seed=recipe.seed,
        rank=world.data_rank,
        world_size=world.data_size,
    )
    rows = []
    for own_batch in loader.batches(loader.end_after(_STEPS)):
        batch = agreed(own_batch, world)
        samples = compute_gradients(state, batch, recipe, world)
        local = local_facts(loader, stop=None, save_failed=False)
        facts = reduce_facts(samples, batch, state, gauge, local, recipe, world)
        seen = facts.statistics
        rows.append([seen.loss, seen.grad_norm, seen.weight_norm, seen.update_ratio])
        with gauge.of_update():
            apply_update(state, recipe, seen.grad_norm, facts.scale)
    weights = {name: full(p.detach()) for name, p in parts.model.named_parameters() if p.requires_grad}
    return {"": torch.tensor(rows), **weights}


def _write(found: Mapping[str, Tensor], alone: Mapping[str, Tensor], row: dict[str, Any], folder: Path) -> None:
    off = (found[""] - alone[""]).abs() / (1 + alone[""].abs())
    for place, name in enumerate(("loss", "gradient", "weight", "update")):
        row[name] = float(off[:, place].max())
    row["weights"] = max(float((found[n] - alone[n]).abs().max()) for n in alone if n)
    append_json(folder / "deviations.jsonl", row)


def _main(folder: Path, joined: World) -> None:
    for family, kind in _CASES:
        case = f"{family} {kind}"
        recipe = config.load(folder / f"{case}.toml")
        captions = captions_of(Loader(recipe.data, batch_size=4, seed=0))
        parts = assemble(recipe, captions, None)
        for way, (section, policy) in _WAYS[joined.size].items():
            parallel = ParallelSection(**section)
            shared = recipe.model_copy(update={"parallel": parallel})
            world = joined if joined.mesh is None else arranged(joined, parallel)
            found = _train(parts, shared, policy, world)
            if world.mesh is None:
                torch.save(found, folder / f"{case}.pt")
            elif world.is_first:
                alone = torch.load(folder / f"{case}.pt")
                _write(found, alone, {"case": case, "ranks": world.size, "way": way}, folder)


if __name__ == "__main__":
    with join("cpu", ParallelSection()) as entered:
        _main(Path(sys.argv[1]), entered)
