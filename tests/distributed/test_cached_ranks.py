"""Two ranks fill one cache together, and train from it as they would without it."""

import hashlib
import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from longtake import config
from longtake.config import Recipe
from longtake.data.index import index
from longtake.fsio import read_json_lines
from longtake.process import num_cores
from longtake.run_dir import RunDirectory
from longtake.training.latent_cache import cache_ahead

_WAN = (
    "data.buckets=[{num_frames=5, height=32, width=32}]",
    "data.windows=2",
    "data.caption_dropout=0.3",
    "model.family=wan",
    "model.config={num_layers=1, num_attention_heads=2, attention_head_dim=12, ffn_dim=16}",
    "codec.kind=autoencoder",
    "codec.config={base_dim=4, z_dim=4, dim_mult=[1, 1], num_res_blocks=1, "
    "temperal_downsample=[true]}",
    "text.kind=transformers",
    "text.config={d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2}",
    "training.steps=6",
    "parallel.strategy=shard",
)


@pytest.fixture
def run_verb(on_two_processes: list[str], tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """Runs a verb of longtake with a recipe on two processes; gives what it prints as JSON."""

    def run(recipe: Recipe, *verb: str) -> dict[str, Any]:
        path = tmp_path / "recipe.toml"
        path.write_text(config.dump(recipe))
        command = [*on_two_processes, "-m", "longtake", *verb, str(path), "--json"]
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=600, check=False, env=os.environ
        )
        assert done.returncode == 0, done.stderr
        assert "Warning" not in done.stderr, done.stderr
        result: dict[str, Any] = json.loads(done.stdout)
        return result

    return run


def _curve(recipe: Recipe) -> list[list[float]]:
    rows = RunDirectory(recipe.out).metrics()
    return [[row["loss"] or 0.0, row["grad_norm"] or 0.0] for row in rows]


def _weights(recipe: Recipe) -> dict[str, Any]:
    file = recipe.out / "model.pt"
    dcp_to_torch_save(RunDirectory(recipe.out).checkpoint_path(6) / "model", file)
    loaded: dict[str, Any] = torch.load(file)
    return loaded


@pytest.mark.slow
def test_two_ranks_train_from_a_cache_as_from_pixels(
    small_recipe: Callable[..., Recipe],
    run_verb: Callable[..., dict[str, Any]],
    shapes_catalog: Path,
    tmp_path: Path,
) -> None:
    """Filled by both before the first step; one clip is damaged, and everything is the same."""
    clips = tmp_path / "clips"
    clips.mkdir()
    for clip in (shapes_catalog.parent / "clips").iterdir():
        (clips / clip.name).write_bytes(clip.read_bytes())

    catalog = tmp_path / "catalog.parquet"
    index([clips], captions=clips / "captions.jsonl", out=catalog, workers=0)
    damaged = sorted(clips.glob("*.mp4"))[7]
    damaged.write_bytes(damaged.read_bytes()[:300])
    changes = (*_WAN, f"data.catalog={catalog}", "training.batch_size=32", "training.steps=6")
    plain = small_recipe(*changes, f"out={tmp_path / 'plain'}")
    run_verb(plain, "train")
    cached = small_recipe(*changes, f"data.cache={tmp_path / 'cache'}")
    run_verb(cached, "train")
    assert len(_curve(plain)) == 6
    assert _curve(cached) == _curve(plain)
    torch.testing.assert_close(_weights(cached), _weights(plain), rtol=0, atol=0)
    rejected = [
        [
            (event["step"], event["rank"], event["identity"], event["reason"])
            for event in read_json_lines(RunDirectory(recipe.out).events_path)
            if event["event"] == "sample_rejected"
        ]
        for recipe in (plain, cached)
    ]
    assert len(rejected[0]) == 1
    assert rejected[0] == rejected[1]
    assert len(list((tmp_path / "cache").glob("latents/*/*.safetensors"))) == 63 * 2


@pytest.mark.slow
def test_two_ranks_fill_a_cache_ahead(
    small_recipe: Callable[..., Recipe],
    run_verb: Callable[..., dict[str, Any]],
    tmp_path: Path,
) -> None:
    """Each its share: together what one process makes, to the byte, and nothing twice.

    With as many threads as a rank has: sums of other numbers of threads are rounded otherwise.
    """
    alone = small_recipe(*_WAN, f"data.cache={tmp_path / 'alone'}")
    threads = torch.get_num_threads()
    torch.set_num_threads(max(1, num_cores() // 2))
    try:
        cache_ahead(alone, Console(quiet=True))
    finally:
        torch.set_num_threads(threads)
    together = small_recipe(*_WAN, f"data.cache={tmp_path / 'together'}")
    facts = run_verb(together, "data", "cache")
    assert facts["latents"] == {"present": 0, "computed": 128}
    files = [
        {
            path.relative_to(folder): hashlib.sha256(path.read_bytes()).hexdigest()
            for path in folder.glob("*/*/*.safetensors")
        }
        for folder in (tmp_path / "alone", tmp_path / "together")
    ]
    assert len(files[0]) == 128 + facts["prompts"]["computed"]
    assert files[0] == files[1]
