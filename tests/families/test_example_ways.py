"""The recipes in examples/ways train on tiny releases, and end alike if they are resumed.

A recipe's releases, clips and files are replaced by tiny ones of the same names; what it does with
them is not changed.
"""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from tests.build import assert_saved_alike, forget_after, rows
from tests.families.originals import ORIGINAL
from tests.families.row import Row
from tests.families.rows import ROWS, transformer_class
from tests.families.tiny import NUM_CLIPS, Tiny, write_clips

from longtake import config
from longtake.data.index import index
from longtake.data.tasks import HERE
from longtake.run_dir import RunDirectory

_ROOT = Path(__file__).resolve().parents[2]
_WAYS = sorted((_ROOT / "examples" / "ways").glob("*.toml"))
_RELEASES = {"wan": "Wan 2.1 T2V", "z_image": "Z-Image", "ltx2": "LTX-2.3 with sound"}
_OTHER = 9  # seed of clips unlike those of the catalogs
_FEATURES = 2  # of 4 numbers, for each clip

_TINY: dict[str, dict[str, Any]] = {
    "model": {"dtype": "fp32"},
    "training": {"global_batch_size": 2, "device": "cpu", "precision": "fp32"},
    "data": {"workers": 0},
    "watch": {"enabled": False},
    "tracking": {"tensorboard": False},
}


def _tiny_recipe(path: Path, tiny: Tiny, out: str) -> config.Recipe:
    """The recipe of a file, with three steps or one epoch, of a tiny release."""
    loaded = config.load(path)
    values: dict[str, Any] = loaded.model_dump(mode="json", exclude_unset=True)
    for section, changes in _TINY.items():
        values[section] = {**values.get(section, {}), **changes}
    values["out"] = out
    values["data"].pop("min_size", None)  # of pixels, more than tiny clips have
    if loaded.optimizer.warmup_ratio is None:
        values["optimizer"]["warmup_steps"] = 0
    frames, height, width = tiny.row.bucket
    values["data"]["buckets"] = [{"num_frames": frames, "height": height, "width": width}]
    values["text"] |= {"max_tokens": tiny.row.keys.get("text", {}).get("max_tokens", 16)}
    for section in ("model", "codec", "text"):
        if Path(values[section].get("pretrained", "")).suffix != ".safetensors":
            values[section]["pretrained"] = str(tiny.folder / "release")
    if loaded.model.config_from is not None:
        values["model"]["config_from"] = str(tiny.folder / "release")
    if loaded.model.pretrained is None:
        del values["model"]["pretrained"]
        values["model"]["config"] = {
            "num_layers": 5,
            "num_attention_heads": 2,
            "attention_head_dim": 12,
            "ffn_dim": 16,
        }
        values["data"]["conditioning"]["features"]["width"] = 4 * _FEATURES
        values["trainable"]["modules"]["align"]["options"] = {"feature_width": 4, "hidden_size": 8}
    if "epochs" in values["training"]:
        values["training"]["epochs"] = 1
        values["checkpoint"] |= {"every_epochs": None, "every": 2}
        values["sampling"] |= {"every_epochs": 1}
    else:
        values["training"]["steps"] = 3
        values["checkpoint"]["every"] = 2
    if "num_inference_steps" in values.get("sampling", {}):
        values["sampling"]["num_inference_steps"] = 1
    return config.parse(values, source=path.name)


def _write_files(path: Path, loaded: config.Recipe, tiny: Tiny) -> None:
    """Write what a recipe names into the current folder: clips, further inputs, weights."""
    fps = loaded.data.fps or 16.0
    for seed, (name, catalog) in enumerate(loaded.data.sources().items()):
        folder = Path(re.sub(r"^catalog$", "clips", name))
        lines = "--caption-lines" in path.read_text()
        further = "a circle" if lines else ""
        write_clips(folder, tiny.row, fps, seed=seed, alpha=True, further_caption=further)
        index([folder], captions=None, out=Path(catalog), work=HERE, by_line=lines)
    for name, section in loaded.data.conditioning.items():
        if section.kind == "video":
            write_clips(Path(name), tiny.row, fps, seed=_OTHER)
        elif section.kind == "numbers":
            Path(name).mkdir()
            for number in range(NUM_CLIPS):
                values = np.random.default_rng(number).standard_normal(4 * _FEATURES)
                np.save(Path(name, f"{number}.npy"), values.astype(np.float32))
    for file in (loaded.model.training_adapter, loaded.sampling.adapter):
        if file is not None:
            _write_lora(Path(file), tiny)
    if loaded.model.config_from is not None and loaded.model.pretrained is not None:
        weights = ORIGINAL[transformer_class(tiny.row)](tiny.sampler.components.model.state_dict())
        _save(Path(loaded.model.pretrained), weights)


def _write_lora(file: Path, tiny: Tiny) -> None:
    random, weights = torch.Generator().manual_seed(0), {}
    for name, layer in tiny.sampler.components.model.named_modules():
        if isinstance(layer, torch.nn.Linear) and name.endswith("to_q"):
            down, up = (2, layer.in_features), (layer.out_features, 2)
            for part, shape in (("lora_A", down), ("lora_B", up)):
                values = torch.randn(shape, generator=random) * 0.1
                weights[f"transformer.{name}.{part}.weight"] = values
    _save(file, weights)


def _save(file: Path, weights: dict[str, torch.Tensor]) -> None:
    file.parent.mkdir(exist_ok=True)
    save_file({name: each.contiguous() for name, each in weights.items()}, file)


@pytest.mark.drill
@pytest.mark.parametrize("path", _WAYS, ids=lambda path: path.stem)
def test_a_recipe_trains_and_is_resumed_bitwise(
    path: Path,
    tiny_of: Callable[[Row], Tiny],
    call_longtake: Callable[..., None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    loaded = config.load(path)
    kind = _RELEASES[loaded.model.family]
    tiny = tiny_of(next(row for row in ROWS if row.kind == kind))
    with tiny.row.within():
        _write_files(path, loaded, tiny)
        whole, resumed = (_tiny_recipe(path, tiny, out) for out in ("whole", "resumed"))
        for recipe in (whole, resumed):
            Path(f"{recipe.out}.toml").write_text(config.dump(recipe))
            call_longtake("train", f"{recipe.out}.toml")
        last = max(RunDirectory(whole.out).checkpoint_steps())
        norms = rows(whole, "grad_norm")
        assert last >= 3
        assert len(set(map(tuple, norms))) == last
        assert min(norms) > [0]
        forget_after(resumed, 2)
        call_longtake("train", "resumed.toml")
        assert_saved_alike(resumed, whole, last)


@pytest.mark.parametrize("path", _WAYS, ids=lambda path: path.stem)
def test_a_recipe_says_how_to_run_it(path: Path) -> None:
    recipe, opening = config.load(path), path.read_text().partition("\nout = ")[0]
    assert all(line.startswith("#") for line in opening.splitlines())
    assert f"longtake train examples/ways/{path.name}" in opening
    assert recipe.out.name == path.stem
    for catalog in recipe.data.sources().values():
        assert f"--out {catalog}" in opening
