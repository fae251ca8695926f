"""Weights that come after a model was built: the same as if they come with it, in less memory."""

from collections.abc import Callable
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
import torch
from diffusers import WanTransformer3DModel
from torch import nn

from longtake import config
from longtake.config import Recipe
from longtake.errors import ModelError
from longtake.models.build import Components, Source, assemble, source_of
from longtake.models.deferred_init import (
    can_be_filled,
    deferred_parameters,
    files_in,
    parameters_on_meta,
)
from longtake.models.numerics import keep_weights_in

_CPU = torch.device("cpu")
_SIZE = {
    "num_attention_heads": 2,
    "attention_head_dim": 12,
    "ffn_dim": 16,
    "freq_dim": 8,
    "num_layers": 2,
    "text_dim": 16,
    "in_channels": 4,
    "out_channels": 4,
}

_CODEC = {"z_dim": 4, "latents_mean": [0.0] * 4, "latents_std": [1.0] * 4}
_ENCODER = {
    "vocab_size": 256,
    "d_model": 16,
    "d_kv": 8,
    "d_ff": 16,
    "num_layers": 1,
    "num_heads": 2,
}


def _saved(folder: Path, dtype: torch.dtype = torch.float32, **how: Any) -> Path:
    torch.manual_seed(7)
    model: Any = WanTransformer3DModel(**_SIZE)
    keep_weights_in(model, dtype)
    model.save_pretrained(folder / "transformer", **how)
    return folder


def _recipe(**sections: Any) -> Recipe:
    """Cached latents, so that neither codec nor text encoder is built with weights."""
    values: dict[str, Any] = {
        "out": "run",
        "data": {"catalog": "c.parquet", "buckets": [{"num_frames": 5, "height": 16, "width": 16}]},
        "model": {"family": "wan"},
        "codec": {"kind": "autoencoder", "class_name": "AutoencoderKLWan", "config": _CODEC},
        "text": {"kind": "transformers", "class_name": "UMT5EncoderModel", "config": _ENCODER},
        "training": {"steps": 1, "batch_size": 1},
    }
    return config.parse(values | sections, "test")


def _assembled(recipe: Recipe, weights: Source = "here") -> Components:
    return assemble(recipe, ["a red ball"], None, frozen_parts=False, weights=weights)


def _values(model: nn.Module) -> dict[str, torch.Tensor]:
    return dict(model.state_dict()) | dict(model.named_buffers())


def _filled(parts: Components) -> nn.Module:
    parts.unfilled.give_memory(parts.model, _CPU)
    parts.unfilled.fill()
    return parts.model


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("how", [{}, {"max_shard_size": "10KB"}], ids=["a file", "many files"])
@pytest.mark.parametrize("trainable", [{}, {"kind": "lora", "rank": 2}], ids=["all", "lora"])
def test_what_is_read_later_is_what_is_loaded_at_once(
    tmp_path: Path,
    stored: torch.dtype,
    dtype: str,
    how: dict[str, Any],
    trainable: dict[str, Any],
) -> None:
    """Bit by bit, in the same dtypes, with what is new from the seed and with the same buffers."""
    model = {"family": "wan", "pretrained": str(_saved(tmp_path, stored, **how)), "dtype": dtype}
    recipe = _recipe(model=model, trainable=trainable)
    at_once, later = _assembled(recipe), _assembled(recipe, "files")
    assert {each.stored for each in later.unfilled.parameters} == set(
        WanTransformer3DModel(**_SIZE).state_dict()
    )
    assert all(each.parameter.is_meta for each in later.unfilled.parameters)
    expected, found = _values(at_once.model), _values(_filled(later))
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].dtype == value.dtype
        assert torch.equal(found[name], value), name
    wants = {name for name, each in later.model.named_parameters() if each.requires_grad}
    assert wants == {name for name, each in at_once.model.named_parameters() if each.requires_grad}
    assert dict(later.model.config) == dict(at_once.model.config)  # type: ignore[arg-type]


def test_weights_in_other_files_are_loaded_at_once(tmp_path: Path) -> None:
    """Nothing is missing then; whoever reads them knows more formats."""
    where = _saved(tmp_path, safe_serialization=False)
    assert files_in(where / "transformer") is None
    parts = _assembled(_recipe(model={"family": "wan", "pretrained": str(where)}), "files")
    assert not parts.unfilled.parameters
    assert not any(parameter.is_meta for parameter in parts.model.parameters())


def test_files_that_lack_a_tensor_are_left_to_who_says_so(tmp_path: Path) -> None:
    """They do not fill the model: the error is that of loading it whole."""
    from safetensors.torch import load_file, save_file

    file = _saved(tmp_path) / "transformer" / "diffusion_pytorch_model.safetensors"
    tensors = load_file(file)
    del tensors["proj_out.weight"]
    save_file(tensors, file, {"format": "pt"})
    recipe = _recipe(model={"family": "wan", "pretrained": str(tmp_path)})
    with pytest.raises(ModelError, match="leave 1 tensors of WanTransformer3DModel"):
        _assembled(recipe, "files")


def test_a_file_that_is_cut_off_is_told(tmp_path: Path) -> None:
    """It was whole when the model was built, and is not when its weights are read."""
    folder = _saved(tmp_path)
    parts = _assembled(_recipe(model={"family": "wan", "pretrained": str(folder)}), "files")
    parts.unfilled.give_memory(parts.model, _CPU)
    file = folder / "transformer" / "diffusion_pytorch_model.safetensors"
    file.write_bytes(file.read_bytes()[:1000])
    with pytest.raises(ModelError, match=r"cannot be read: .* Download or copy it again"):
        parts.unfilled.fill()


def test_where_a_training_takes_its_weights_from() -> None:
    """What is trained whole is in the checkpoint; a frozen base is not, and new weights nowhere."""
    lora = {"kind": "lora"}
    there = {"family": "wan", "pretrained": "somewhere"}
    assert source_of(_recipe(), resumed=False) == "here"
    assert source_of(_recipe(), resumed=True) == "checkpoint"
    assert source_of(_recipe(trainable=lora), resumed=True) == "here"
    assert source_of(_recipe(model=there), resumed=False) == "files"
    assert source_of(_recipe(model=there), resumed=True) == "checkpoint"
    assert source_of(_recipe(model=there, trainable=lora), resumed=True) == "files"


class _Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)
        self.second.weight = self.first.weight
        self.register_buffer("table", torch.arange(4.0), persistent=False)


def test_buffers_are_real_and_tied_weights_are_not_filled_later() -> None:
    """Two names of one tensor would become two tensors."""
    with parameters_on_meta():
        model = _Tied()
    assert torch.equal(model.get_buffer("table"), torch.arange(4.0))
    assert model.first.weight.is_meta
    assert not can_be_filled(deferred_parameters(model), model, None)
    assert not nn.Linear(2, 2).weight.is_meta


_ON_TWO_RANKS = """
    import os, resource, sys
    from pathlib import Path

    import torch
    import torch.distributed as dist
    from diffusers import WanTransformer3DModel
    from longtake import config
    from longtake.config import ParallelSection
    from longtake.models.build import assemble
    from longtake.parallel.mesh import join
    from longtake.run_dir import RunDirectory
    from longtake.training.build import build_state
    from longtake.training.session import Session
    from rich.console import Console

    def resident():
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")

    folder = Path(sys.argv[1])
    recipe = config.load(folder / "recipe.toml")
    with join("cpu", ParallelSection(strategy="shard"), None) as world:
        before = resident()
        parts = assemble(recipe, ["x"], None, frozen_parts=False, weights="files")
        size = sum(each.parameter.nbytes for each in parts.unfilled.parameters)
        run = RunDirectory(recipe.out)
        build_state(Session(recipe, run, world, Console(quiet=True), "fp32"), parts)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        (folder / f"grown_{world.rank}").write_text(f"{(peak - before) / size}")
        there = WanTransformer3DModel.from_pretrained(folder / "transformer").state_dict()
        for name, value in parts.model.state_dict().items():
            plain = name.replace(".base_layer.", ".")
            if plain in there:
                assert torch.equal(value.full_tensor(), there[plain]), name
        dist.barrier()
"""


def test_each_rank_reads_its_share(tmp_path: Path, run_on_two_ranks: Callable[..., None]) -> None:
    """Of a model that two ranks share, neither ever has all of it in memory."""
    large = {"ffn_dim": 16384, "num_layers": 6, "num_attention_heads": 16, "attention_head_dim": 32}
    torch.manual_seed(0)
    model: Any = WanTransformer3DModel(**(_SIZE | large))
    model.save_pretrained(tmp_path / "transformer")
    del model
    there = {"family": "wan", "pretrained": str(tmp_path)}
    recipe = _recipe(model=there, trainable={"kind": "lora", "rank": 1}, ema={"decay": 0.0})
    (tmp_path / "recipe.toml").write_text(config.dump(recipe))
    (tmp_path / "ranks.py").write_text(dedent(_ON_TWO_RANKS))
    run_on_two_ranks(str(tmp_path / "ranks.py"), str(tmp_path))
    grown = [float((tmp_path / f"grown_{rank}").read_text()) for rank in range(2)]
    assert all(0.3 < each < 0.75 for each in grown), grown
