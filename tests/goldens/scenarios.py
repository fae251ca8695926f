"""What goldens are made of: each part runs some verbs of a tree and returns what came of them.

Names of recipe keys, verbs and fields are those of the commit in COMMIT.
"""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from tests.goldens.material import BAD_CAPTION, BAD_FRAMES
from tests.goldens.readers import read_cache, read_catalog, read_run
from tests.goldens.tree import Tree

Part = Callable[[Tree, Path], Any]
_Recipe = dict[str, Any]

_SHARED: _Recipe = {
    "seed": 7,
    "out": "run",
    "data.workers": 1,
    "data.caption_dropout": 0.2,
    "data.flip": 0.5,
    "training.steps": 12,
    "training.batch_size": 4,
    "training.device": "cpu",
    "training.precision": "fp32",
    "ema.decay": 0.9,
    "checkpoint.every": 4,
    "checkpoint.keep": 50,
    "watch.enabled": False,
    "tracking.tensorboard": False,
}
_WAN: _Recipe = {
    "data.buckets": [{"num_frames": 5, "height": 32, "width": 32}],
    "model.family": "wan",
    "model.config": {
        "num_layers": 2,
        "num_attention_heads": 4,
        "attention_head_dim": 12,
        "ffn_dim": 32,
    },
    "codec.kind": "autoencoder",
    "codec.config": {
        "base_dim": 4,
        "z_dim": 4,
        "dim_mult": [1, 1],
        "num_res_blocks": 1,
        "temperal_downsample": [True],
    },
    "text.kind": "transformers",
    "text.config": {"d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2},
    "text.max_tokens": 8,
    "trainable.kind": "lora",
    "trainable.rank": 4,
    "flow.shift": 3.0,
    "optimizer.learning_rate": 3e-3,
    "optimizer.warmup_steps": 3,
    "optimizer.weight_decay": 0.01,
}
_TUBELET: _Recipe = {
    "data.buckets": [{"num_frames": 8, "height": 32, "width": 32}],
    "model.family": "tubelet",
    "model.config": {"hidden_size": 48, "num_blocks": 2, "num_heads": 4},
    "text.max_tokens": 6,
    "flow.mean": 0.5,
    "optimizer.kind": "muon",
    "optimizer.learning_rate": 3e-3,
    "optimizer.warmup_steps": 3,
    "training.micro_batch_size": 2,
}
TINY_WAN_LORA: _Recipe = _SHARED | _WAN
_RUNS: Mapping[str, _Recipe] = {"wan_lora": TINY_WAN_LORA, "tubelet": _SHARED | _TUBELET}
_ON_TWO: Mapping[str, _Recipe] = {
    "wan_lora_sharded": _RUNS["wan_lora"] | {"parallel.strategy": "shard"},
    "tubelet_replicated": _RUNS["tubelet"] | {"training.micro_batch_size": 1},
}
_ON_FOUR: Mapping[str, _Recipe] = {
    "wan_lora_hybrid": _RUNS["wan_lora"]
    | {"parallel.strategy": "hybrid", "parallel.shard_size": 2},
    "tubelet_in_sequence_of_2": _RUNS["tubelet"]
    | {
        "training.micro_batch_size": 1,
        "parallel.sequence": 2,
    },
}
# Clips of the stage in the middle make the loss NaN: updates are left out, then the run goes back
# to before it and round its batches.
_ROLLED_BACK: _Recipe = _RUNS["tubelet"] | {
    "data.buckets": [{"num_frames": 8, "height": 32, "width": 32}],
    "data.caption_dropout": 0.0,
    "data.stages": [
        {"name": "good", "where": [f"num_frames < {BAD_FRAMES}"], "steps": 14},
        {"name": "bad", "where": [f"num_frames >= {BAD_FRAMES}"], "steps": 6},
        {"name": "good again", "where": [f"num_frames < {BAD_FRAMES}"]},
    ],
    "text.max_tokens": 12,
    "trainable.kind": "full",
    "trainable.module": "golden_module:Spoils",
    "training.steps": 40,
}
_MODULE = f"""
from dataclasses import replace

import torch
from torch import nn

NUM_WORDS = {len(BAD_CAPTION.split())}


class Spoils(nn.Module):
    def __init__(self, width, blocks, latent_channels):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(width))

    def prepare(self, conditioning):
        (ids,) = [each for each in conditioning.values() if not each.is_floating_point()]
        is_bad = (ids != 0).sum(1) >= NUM_WORDS
        return {{"factor": torch.where(is_bad, torch.nan, 1.0)[:, None, None]}}

    def forward(self, block, tokens, prepared):  # as in the commit of the goldens
        return tokens * self.scale * prepared["factor"]

    def around(self, block, call, inputs):
        after = call(inputs)
        return replace(after, tokens=self.forward(block, after.tokens, inputs.prepared))
"""
_PLANS = {
    "flux_kontext_lora_48gb": (),
    "flux_kontext_module_48gb": (),
    "real_clips": (),
    "tiny_flux_module": (),
    "video_1_1b_192_h100": ("--processes", "192", "--per-node", "8", "--device", "h100"),
    "wan_14b_lora_80gb": (),
    "wan_1_3b_full_80gb": (),
    "wan_1_3b_lora_24gb": ("--device", "rtx4090"),
}
_MEASURED = ("seconds",)
"""What a plan says of itself."""


def one_rank(tree: Tree, clips: Path) -> Any:
    """A tiny Wan with LoRA and a tiny tubelet model on one rank."""
    return _trained(tree, clips, "one", _RUNS, ranks=1)


def two_ranks(tree: Tree, clips: Path) -> Any:
    """Likewise on two ranks: sharded, and replicated."""
    return _trained(tree, clips, "two", _ON_TWO, ranks=2)


def four_ranks(tree: Tree, clips: Path) -> Any:
    """Likewise on four ranks: sharded in groups of two, and with shared tokens."""
    return _trained(tree, clips, "four", _ON_FOUR, ranks=4)


def killed(tree: Tree, clips: Path) -> Any:
    """Runs that are killed after their first checkpoint, and resumed."""
    runs = {name: recipe | {"training.steps": 40} for name, recipe in _RUNS.items()}
    return _each(partial(_kill_and_resume, tree, clips), runs)


def rollback(tree: Tree, clips: Path) -> Any:
    """A run that goes back to a checkpoint and round the batches that made its loss NaN."""
    folder = _recipe_in(tree, clips, "rollback", _ROLLED_BACK)
    (folder / "golden_module.py").write_text(_MODULE, encoding="utf-8")
    result = tree.run("train", "recipe.toml", cwd=folder)
    found = read_run(tree, folder / "run")
    if not found["rollbacks"]:
        raise SystemExit(f"{tree.root}: the run was to be rolled back, and was not\n{result.err}")
    return found | {"exit_code": result.exit_code}


def plans(tree: Tree, clips: Path) -> Any:
    """All numbers of the examples' plans."""
    return {name: _plan(tree, name, options) for name, options in _PLANS.items()}


def index(tree: Tree, clips: Path) -> Any:
    """Rows of a catalog."""
    return read_catalog(tree, _catalog(tree, clips))


def cache(tree: Tree, clips: Path) -> Any:
    """Tensors of a cache of latents and prompt embeddings."""
    recipe = _RUNS["wan_lora"] | {"data.cache": "cache", "data.windows": 2}
    folder = _recipe_in(tree, clips, "cache", recipe)
    tree.run_ok("data cache", "recipe.toml", cwd=folder)
    return read_cache(tree, folder / "cache")


def all_drills(tree: Tree) -> list[str]:
    """Names of the drills that the tree has."""
    names = tree.old_names("drills")
    listed = [each["fault"] for each in tree.json("drill", "--list")]
    return [names.get(name, name) for name in listed]


def drill(tree: Tree, names: Sequence[str]) -> dict[str, str]:
    """How drills end: `passed`, `failed` or `skipped`; those that the tree has not are left out."""
    there = {new: old for old in names if (new := tree.name("drills", old))}
    results = tree.json("drill", *there) if there else []
    return {there[each["fault"]]: _ending(each) for each in results}


def _ending(result: Mapping[str, Any]) -> str:
    return "skipped" if result["skipped"] else "passed" if result["passed"] else "failed"


PARTS: Mapping[str, Part] = {
    "one-rank": one_rank,
    "two-ranks": two_ranks,
    "four-ranks": four_ranks,
    "killed": killed,
    "rollback": rollback,
    "index": index,
    "cache": cache,
    "plans": plans,
}


def _catalog(tree: Tree, clips: Path) -> Path:
    """The tree's catalog of the clips, indexed once."""
    out = tree.work / "catalog.parquet"
    if not out.exists():
        captions = str(clips / "captions.jsonl")
        tree.run_ok("data index", str(clips), "--captions", captions, "--out", str(out))
    return out


def _recipe_in(tree: Tree, clips: Path, name: str, recipe: _Recipe) -> Path:
    """A new folder with a recipe."""
    catalog = {"data.catalog": str(_catalog(tree, clips))}
    return tree.recipe(tree.work / name / "recipe.toml", recipe | catalog).parent


def _trained(
    tree: Tree, clips: Path, prefix: str, recipes: Mapping[str, _Recipe], ranks: int
) -> Any:
    _catalog(tree, clips)

    def train(name: str, recipe: _Recipe) -> Any:
        folder = _recipe_in(tree, clips, f"{prefix}_{name}", recipe)
        if ranks == 1:
            tree.run_ok("train", "recipe.toml", cwd=folder)
        else:
            tree.run_ok("launch", "recipe.toml", "--nproc-per-node", str(ranks), cwd=folder)
        return read_run(tree, folder / "run")

    return _each(train, recipes, at_once=2 if ranks == 1 else 1)


def _kill_and_resume(tree: Tree, clips: Path, name: str, recipe: _Recipe) -> Any:
    folder = _recipe_in(tree, clips, f"killed_{name}", recipe)
    checkpoints = folder / "run" / tree.name("files", "checkpoints")
    committed = tree.name("files", "COMMITTED")
    started = tree.start("train", "recipe.toml", cwd=folder)
    if not started.kill_when(lambda: any(checkpoints.glob(f"step_*/{committed}"))):
        raise SystemExit(f"{tree.root}: {name} was to be killed, and has ended\n{started.finish()}")
    tree.run_ok("train", "recipe.toml", cwd=folder)
    return read_run(tree, folder / "run")


def _each(
    train: Callable[[str, _Recipe], Any], recipes: Mapping[str, _Recipe], at_once: int = 2
) -> dict[str, Any]:
    with ThreadPoolExecutor(at_once) as pool:
        results = pool.map(lambda item: train(*item), recipes.items())
        return dict(zip(recipes, results, strict=True))


def _plan(tree: Tree, name: str, options: tuple[str, ...]) -> dict[str, Any]:
    example = tree.name("examples", f"examples/{name}.toml")
    facts = tree.json("plan", example, *options, cwd=tree.root)
    names = tree.old_names("plan")
    numbers: dict[str, Any] = {}
    for path, value in flat(facts):
        is_number = isinstance(value, bool | int | float)
        if is_number and path not in _MEASURED:
            known = max((new for new in names if f"{path}.".startswith(f"{new}.")), default="")
            numbers[names[known] + path[len(known) :] if known else path] = value
    return numbers


def flat(value: Any, path: str = "") -> list[tuple[str, Any]]:
    """All leaves of nested dictionaries and lists, by dotted path."""
    if isinstance(value, dict):
        items = [(str(key), each) for key, each in value.items()]
    elif isinstance(value, list):
        items = [(str(number), each) for number, each in enumerate(value)]
    else:
        return [(path, value)]
    return [leaf for key, each in items for leaf in flat(each, f"{path}.{key}" if path else key)]
