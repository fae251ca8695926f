"""However many ranks share a model and its clips, training is that of one process.

Run by some ranks, this file trains all cases, shared in all ways, one after the other, and writes
down how far they are from what one process did.
"""

import copy
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partialmethod
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch
from tests.build import TINY_T5, block_names, quiet_session
from tests.data.catalogs import make_catalog
from torch import Tensor, nn

from longtake import config
from longtake.config import ParallelSection, Recipe
from longtake.data.catalog import Catalog
from longtake.data.loader import Loader
from longtake.fsio import append_json, read_json_lines
from longtake.models.components import Components, assemble
from longtake.parallel.fsdp import full
from longtake.parallel.mesh import World, arranged, join
from longtake.planner.activation_checkpointing import options_of
from longtake.planner.plan import run_blocks
from longtake.training.build import build_state
from longtake.training.compiled import compile_blocks
from longtake.training.latent_cache import captions_of
from longtake.training.statistics import NormStats, reduce_statistics
from longtake.training.step import apply_update, compute_gradients, drop_undecodable

_STEPS = 4
_RECIPE = """
[data]
workers = 0
[text]
max_tokens = 7
[optimizer]
learning_rate = 3e-3
warmup_steps = 2
[training]
steps = 4
global_batch_size = 4
micro_batch_size = 1
device = "cpu"
precision = "fp32"
[ema]
decay = 0.9
"""
_FLUX = (
    *TINY_T5,
    "data.buckets=[{num_frames=1, height=28, width=20}]",
    "model.config={num_layers=1, num_single_layers=1, num_attention_heads=4, attention_head_dim=8, "
    "joint_attention_dim=16, pooled_projection_dim=8, guidance_embeds=true, "
    "axes_dims_rope=[2, 2, 4]}",
    "codec.kind=autoencoder",
    'codec.config={block_out_channels=[4, 4], down_block_types=["DownEncoderBlock2D", '
    '"DownEncoderBlock2D"], up_block_types=["UpDecoderBlock2D", "UpDecoderBlock2D"], '
    "latent_channels=4, norm_num_groups=2}",
    "text.pooled={max_tokens=7, config={hidden_size=8, intermediate_size=16, num_hidden_layers=1, "
    "num_attention_heads=2}}",
)
_FAMILIES = {
    "tubelet": (
        "model.family=tubelet",
        "data.buckets=[{num_frames=8, height=32, width=32}]",  # 64 tokens beside 7 of the caption
        "model.config={hidden_size=48, num_blocks=2, num_heads=4}",
    ),
    "wan": (
        *TINY_T5,
        "model.family=wan",
        "data.buckets=[{num_frames=5, height=28, width=20}]",  # 105 tokens
        "model.config={num_layers=2, num_attention_heads=4, attention_head_dim=12, ffn_dim=16}",
        "codec.kind=autoencoder",
        "codec.config={base_dim=4, z_dim=4, dim_mult=[1, 1], num_res_blocks=1, "
        "temperal_downsample=[true]}",
    ),
    "flux": (*_FLUX, "model.family=flux"),  # 35 tokens beside 7 of the text
    "flux_kontext": (
        *_FLUX,
        "model.family=flux_kontext",
        'data.conditioning.reference={kind="picture", path="../before/{stem}.png"}',
    ),
}
_KINDS = {"full": (), "lora": ("trainable.kind=lora", "trainable.rank=4")}
_CASES = (
    ("tubelet", "full"),
    ("wan", "full"),
    ("wan", "lora"),
    ("flux", "full"),
    ("flux_kontext", "lora"),
)
_SHARD, _HYBRID = {"strategy": "shard"}, {"strategy": "hybrid", "shard_size": 2}


class _Way(NamedTuple):
    """How ranks share model and clips, and how they run the blocks."""

    section: Mapping[str, Any]
    policy: str = "none"
    compiled_by: str | None = None  # a backend of torch.compile
    of_node: int = 4
    cases: Sequence[tuple[str, str]] = _CASES


_WAYS = {
    1: {"alone": _Way({})},
    2: {
        "replicate": _Way({}, cases=_CASES[::2]),
        "shard": _Way(_SHARD, cases=_CASES[1::2]),
        "sequence of 2": _Way({"context": 2}, "all", cases=_CASES[::4]),
        "ring of 2, shard, compiled": _Way(
            _SHARD | {"context": 2}, "save-attention", "aot_eager", of_node=1, cases=_CASES[2:3]
        ),
    },
    3: {
        "replicate": _Way({}, cases=_CASES[3:4]),
        "shard": _Way(_SHARD, "all", cases=_CASES[4:]),
        "ring of 3, shard": _Way(_SHARD | {"context": 3}, "save-attention", cases=_CASES[1::2]),
    },
    4: {
        "shard": _Way(_SHARD, cases=_CASES[2:3]),
        "hybrid of 2": _Way(_HYBRID, cases=_CASES[:1]),
        "sequence of 2, shard": _Way(_SHARD | {"context": 2}, "save-attention", cases=_CASES[:4:2]),
        "sequence of 2, hybrid of 2": _Way(_HYBRID | {"context": 2}, cases=_CASES[3:4]),
        "sequence of 4": _Way({"context": 4}, "alternate", cases=_CASES[1::3]),
        "sequence of 2 in a ring of 2": _Way({"context": 4}, "all", of_node=2, cases=_CASES[::4]),
    },
}
"""By the number of ranks: each case in several ways, and each way with another kind of case.
Three cannot share a batch of 4 evenly."""
_WAYS_COMPILED = {
    1: {"alone": _Way({}, cases=_CASES[3:])},
    2: {
        "sequence of 2, shard, compiled": _Way(
            _SHARD | {"context": 2}, "save-attention", "inductor", cases=_CASES[4:]
        ),
    },
    4: {
        "sequence of 2 in a ring of 2, compiled": _Way(
            {"context": 4}, "all", "aot_eager", of_node=2, cases=_CASES[3:4]
        ),
    },
}
"""Of the same kind; compilers take most of their time."""
_ALL_WAYS = {"run": _WAYS, "compiled": _WAYS_COMPILED}


def _few(catalog: Path) -> Path:
    """A catalog of 10 clips: with 4 a batch, the second epoch begins after 3 steps."""
    few = catalog.with_name("ten.parquet")
    make_catalog(list(Catalog.load(catalog).clips())[:10]).save(few)
    return few


@pytest.fixture(scope="module")
def recipes(shapes_catalog: Path, pairs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the recipe of each case."""
    folder = tmp_path_factory.mktemp("equality")
    (folder / "base.toml").write_text(_RECIPE)
    clips, pictures = _few(shapes_catalog), _few(pairs / "catalog.parquet")
    for family, kind in _CASES:
        catalog = pictures if family.startswith("flux") else clips
        changes = (f"out={folder / 'run'}", f"data.catalog={catalog}", *_FAMILIES[family])
        recipe = config.load(folder / "base.toml", (*changes, *_KINDS[kind]))
        (folder / f"{family} {kind}.toml").write_text(config.dump(recipe))
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["run", pytest.param("compiled", marks=pytest.mark.drill)])
def test_however_many_share_it_training_is_that_of_one(
    kind: str, recipes: Path, run_on_ranks: Callable[..., str]
) -> None:
    ways_by_count = _ALL_WAYS[kind]
    for count in ways_by_count:
        run_on_ranks(count, __file__, recipes, kind)
    deviations = list(read_json_lines(recipes / f"{kind}.jsonl"))
    lines = ("\t".join(map(str, row.values())) for row in deviations)
    sys.stdout.write("\n".join(["", *lines, ""]))
    num_cells = sum(len(way.cases) for ways in ways_by_count.values() for way in ways.values())
    assert len(deviations) == num_cells - len(ways_by_count[1]["alone"].cases)
    for row in deviations:
        assert max(row["loss"], row["gradient_norm"], row["weight_norm"]) < 1e-6, row
        assert row["weights"] < 1e-4, row


def _train(parts: Components, recipe: Recipe, way: _Way, world: World) -> dict[str, Tensor]:
    """Loss and norms of each step, named "", and the weights at the end."""
    parts = replace(parts, model=copy.deepcopy(parts.model))
    options = options_of(way.policy, block_names(parts))
    if way.compiled_by is not None:
        compile_ = partialmethod(nn.Module.compile, backend=way.compiled_by)
        with patch.object(nn.Module, "compile", compile_):
            compile_blocks(options, parts, recipe)
    else:
        run_blocks(options, parts)
    session = quiet_session(recipe, world)
    state = build_state(session, parts)
    norms = NormStats(parts.model, parts.family.blocks(parts.model), world)
    rank, size = world.data_rank, world.data_size
    loader = Loader(recipe.data, batch_size=4, seed=recipe.seed, rank=rank, world_size=size)
    rows = []
    for own_batch in loader.batches(loader.end_after(_STEPS)):
        batch = drop_undecodable(own_batch, world)
        samples = compute_gradients(session, state, batch)
        facts = reduce_statistics(session, samples, batch, state, norms)
        seen = facts.statistics
        rows.append([seen.loss, seen.grad_norm, seen.weight_norm])
        with norms.track_update():
            apply_update(session, state, seen.grad_norm, facts.scale, batch.position)
    trained = ((name, p) for name, p in parts.model.named_parameters() if p.requires_grad)
    return {"": torch.tensor(rows), **{name: full(each.detach()) for name, each in trained}}


def _compared(found: Mapping[str, Tensor], alone: Mapping[str, Tensor]) -> dict[str, float]:
    """The largest deviations; of what is larger than 1, relative ones."""
    off = {n: (found[n] - each).abs() / each.abs().clamp(min=1) for n, each in alone.items()}
    by_step = off.pop("").amax(0).tolist()
    row = dict(zip(("loss", "gradient_norm", "weight_norm"), by_step, strict=True))
    return row | {"weights": max(float(each.max()) for each in off.values())}


def _main(folder: Path, kind: str, joined: World) -> None:
    ways = _ALL_WAYS[kind][joined.size]
    for model, trained in _CASES:
        if not any((model, trained) in way.cases for way in ways.values()):
            continue
        case = f"{model} {trained}"
        recipe = config.load(folder / f"{case}.toml")
        parts = assemble(recipe, captions_of(Loader(recipe.data, batch_size=4, seed=0)), None)
        for name, way in ways.items():
            if (model, trained) not in way.cases:
                continue
            parallel = ParallelSection(**way.section)
            shared = recipe.model_copy(update={"parallel": parallel})
            os.environ["LOCAL_WORLD_SIZE"] = str(way.of_node)
            world = joined if joined.mesh is None else arranged(joined, parallel)
            found = _train(parts, shared, way, world)
            if world.mesh is None:
                torch.save(found, folder / f"{case}.pt")
            elif world.is_first:
                cell = {"case": case, "ranks": world.size, "way": name}
                off = _compared(found, torch.load(folder / f"{case}.pt"))
                append_json(folder / f"{kind}.jsonl", cell | off)


if __name__ == "__main__":
    with join("cpu", ParallelSection()) as entered:
        _main(Path(sys.argv[1]), sys.argv[2], entered)
