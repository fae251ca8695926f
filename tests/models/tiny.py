"""Sizes of the smallest models of diffusers and transformers that tests build, and a recipe."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from longtake import config
from longtake.config import PooledSection, Recipe, TextSection
from longtake.models.tubelet import TubeletTransformer

T5: dict[str, Any] = {"d_model": 12, "d_kv": 6, "d_ff": 12, "num_layers": 1, "num_heads": 2}
CLIP: dict[str, Any] = {
    "hidden_size": 10,
    "intermediate_size": 10,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
}
KL: dict[str, Any] = {
    "block_out_channels": [4, 4],
    "layers_per_block": 1,
    "latent_channels": 4,
    "norm_num_groups": 2,
}
"""An `AutoencoderKL`."""
FLUX: dict[str, Any] = {
    "num_attention_heads": 2,
    "attention_head_dim": 12,
    "axes_dims_rope": [4, 4, 4],
    "num_layers": 1,
    "num_single_layers": 1,
}
WAN: dict[str, Any] = {
    "num_attention_heads": 2,
    "attention_head_dim": 12,
    "ffn_dim": 16,
    "freq_dim": 8,
    "num_layers": 2,
}
KONTEXT: dict[str, Any] = {
    "out": "run",
    "data": {
        "catalog": "catalog.parquet",
        "buckets": [{"num_frames": 1, "height": 16, "width": 24}],
        "conditioning": {"reference": {"kind": "picture", "path": "../before/{stem}.png"}},
    },
    "model": {
        "family": "flux_kontext",
        "guidance": 2.5,
        "config": FLUX | {"guidance_embeds": True},
    },
    "codec": {"kind": "autoencoder", "config": KL},
    "text": {
        "kind": "transformers",
        "max_tokens": 8,
        "config": T5,
        "pooled": {"config": CLIP},
    },
    "training": {"steps": 1, "global_batch_size": 2},
}
"""A recipe of FLUX.1 Kontext with random weights."""
TEXT = TextSection(kind="transformers", config=T5, max_tokens=8)
TWO_TEXTS = TEXT.model_copy(update={"pooled": PooledSection(config=CLIP, max_tokens=9)})


def make_transformer(name: str, **sizes: Any) -> nn.Module:
    """Make a transformer of random weights for latents of 4 channels and texts of width 16."""
    import diffusers

    if name == "tubelet":
        grid = {"num_frames": 2, "height": 4, "width": 6, "channels": 4, "patch_size": (1, 2, 2)}
        more = {"vocabulary_size": 8, "hidden_size": 24, "num_blocks": 2, "num_heads": 2}
        tubelet = TubeletTransformer(**grid | more | sizes)  # type: ignore[arg-type]
        # It is zero at the start, which would keep gradients from all before it.
        nn.init.normal_(tubelet.tube_out.weight)
        return tubelet
    if name == "wan":
        channels = {"in_channels": 4, "out_channels": 4, "text_dim": 16}
        wan: nn.Module = diffusers.WanTransformer3DModel(**WAN | channels | sizes)
        return wan
    channels = {"in_channels": 16, "joint_attention_dim": 16, "pooled_projection_dim": 8}
    blocks = {"num_layers": 2, "num_single_layers": 2}
    flux: nn.Module = diffusers.FluxTransformer2DModel(**FLUX | channels | blocks | sizes)
    return flux


def make_recipe(
    family: str, bucket: tuple[int, int, int], release: Path | None = None, **sections: Any
) -> Recipe:
    """Make a recipe in fp32 on a CPU, whose parts are those of a release if there is one."""
    shape = dict(zip(("num_frames", "height", "width"), bucket, strict=True))
    values: dict[str, Any] = {
        "data": {"catalog": "none.parquet", "buckets": [shape]},
        "model": {"family": family},
        "training": {"steps": 1, "global_batch_size": 2, "device": "cpu", "precision": "fp32"},
    }
    if release is not None:
        values["model"]["pretrained"] = str(release)
        values["codec"] = {"kind": "autoencoder", "pretrained": str(release)}
        values["text"] = {"kind": "transformers", "pretrained": str(release), "dtype": "fp32"}
    for name, keys in sections.items():
        values[name] = values.get(name, {}) | keys
    out = "run" if release is None else str(release.parent / "run")
    return config.parse({"out": out, **values}, source="test")


def write_configs(folder: Path, files: Mapping[str, Any]) -> str:
    """Write the files of configuration of a release into a folder, and return its name."""
    for name, values in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(json.dumps(values))
    return str(folder)
