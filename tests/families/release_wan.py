"""Wan with random weights, in folders of the releases' layout."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import diffusers
import transformers
from tests.families.row import WIDTH, Asked, Row, encoder_sizes, t5, tokenizer


def make(folder: Path) -> None:
    """Wan 2.1 T2V."""
    _write(folder, "WanPipeline", {})


def make_i2v(folder: Path) -> None:
    """A fine-tuned Wan from a first frame, without CLIP."""
    _write(folder, "WanImageToVideoPipeline", {"in_channels": 36, "out_channels": 16})


def make_i2v_clip(folder: Path) -> None:
    """Wan 2.1 I2V."""
    sizes = {"in_channels": 36, "out_channels": 16, "image_dim": WIDTH, "added_kv_proj_dim": 24}
    _write(folder, "WanImageToVideoPipeline", sizes, **_clip())


def make_flf2v(folder: Path) -> None:
    """Wan 2.1 FLF2V."""
    sizes = {"in_channels": 36, "out_channels": 16, "image_dim": WIDTH, "added_kv_proj_dim": 24}
    pictures = {"pos_embed_seq_len": 2 * 257}
    _write(folder, "WanImageToVideoPipeline", sizes | pictures, **_clip())


def make_ti2v(folder: Path, pipeline: str = "WanImageToVideoPipeline") -> None:
    """Wan 2.2 TI2V-5B, with its own autoencoder of 48 channels."""
    vae = diffusers.AutoencoderKLWan(
        base_dim=4,
        decoder_base_dim=4,
        z_dim=48,
        dim_mult=[1, 1, 1, 1],
        num_res_blocks=1,
        is_residual=True,
        in_channels=12,
        out_channels=12,
        patch_size=2,
        scale_factor_spatial=16,
        latents_mean=[0.1] * 48,
        latents_std=[0.9] * 48,
    )
    channels = {"in_channels": 48, "out_channels": 48}
    _write(folder, pipeline, channels, vae=vae, expand_timesteps=True)


def make_a14b(folder: Path) -> None:
    """Wan 2.2 A14B T2V: two transformers, each for a part of the noise levels."""
    _write(folder, "WanPipeline", {}, transformer_2=_transformer(), boundary_ratio=0.875)


def make_a14b_i2v(folder: Path) -> None:
    """Wan 2.2 A14B I2V: two transformers without CLIP."""
    sizes = {"in_channels": 36, "out_channels": 16}
    second = {"transformer_2": _transformer(**sizes), "boundary_ratio": 0.9}
    _write(folder, "WanImageToVideoPipeline", sizes, **second)


def _clip() -> dict[str, Any]:
    """257 tokens of a picture, as the release has them."""
    sizes = encoder_sizes(layers=2)
    vision = transformers.CLIPVisionConfig(**sizes, image_size=32, patch_size=2)
    size = {"height": 32, "width": 32}
    processor = transformers.CLIPImageProcessor(size={"shortest_edge": 32}, crop_size=size)
    encoder = transformers.CLIPVisionModel(vision)
    return {"image_encoder": encoder, "image_processor": processor}


def _write(folder: Path, pipeline: str, sizes: dict[str, Any], **parts: Any) -> None:
    words = tokenizer(begins=False)
    vae = diffusers.AutoencoderKLWan(base_dim=4, z_dim=16, dim_mult=[1, 1, 1, 1], num_res_blocks=1)
    given = {"vae": vae, **parts}
    getattr(diffusers, pipeline)(
        tokenizer=words,
        text_encoder=t5("UMT5", len(words)),
        scheduler=diffusers.UniPCMultistepScheduler(
            prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0
        ),
        transformer=_transformer(**sizes),
        **given,
    ).save_pretrained(folder)


def _transformer(**sizes: Any) -> Any:
    return diffusers.WanTransformer3DModel(
        num_attention_heads=2,
        attention_head_dim=12,
        text_dim=WIDTH,
        freq_dim=16,
        ffn_dim=32,
        num_layers=2,
        **sizes,
    )


def _call(asked: Asked) -> dict[str, Any]:
    size = {"num_frames": asked.frames, "height": asked.height, "width": asked.width}
    given = {"prompt": asked.prompt, "latents": asked.noise, "guidance_scale": asked.guidance}
    return size | given


def _call_from_frames(asked: Asked) -> dict[str, Any]:
    given = {"image": asked.pictures["first"], "last_image": asked.pictures.get("last")}
    return _call(asked) | given


def _by_experts(call: Callable[[Asked], dict[str, Any]]) -> Callable[[Asked], dict[str, Any]]:
    return lambda asked: call(asked) | {"guidance_scale_2": _GUIDANCE_2}


_KEYS = {"flow": {"shift": 3.0}}
_GUIDANCE_2 = 3.0
_FRAMES = (5, 32, 32)
# diffusers' defaults are 14B's, of which A14B's transformers are two; the others as
# scripts/convert_wan_to_diffusers.py of diffusers has them.
_TEXT = {"text_encoder": {"d_model": 4096}}
_I2V = {"in_channels": 36, "out_channels": 16}
_CLIP = {**_I2V, "image_dim": 1280, "added_kv_proj_dim": 5120}
_5B = {
    "num_attention_heads": 24,
    "num_layers": 30,
    "ffn_dim": 14336,
    "in_channels": 48,
    "out_channels": 48,
}
_row = partial(Row, family="wan", call=_call, bucket=_FRAMES, solver="unipc", keys=_KEYS)
_from_frame = partial(_row, call=_call_from_frames, pictures=("first",), task="first frame")
ROWS = (
    _row("Wan 2.1 T2V", make=make, real={"transformer": {}, **_TEXT}),
    _from_frame(
        "Wan 2.1 I2V",
        make=make_i2v_clip,
        real={"transformer": _CLIP, "image_encoder": {"hidden_size": 1280}, **_TEXT},
    ),
    _from_frame(
        "Wan 2.1 FLF2V",
        make=make_flf2v,
        pictures=("first", "last"),
        task="first and last frame",
        real={
            "transformer": {**_CLIP, "pos_embed_seq_len": 514},
            "image_encoder": {"hidden_size": 1280},
            **_TEXT,
        },
    ),
    _from_frame("Wan I2V without CLIP", make=make_i2v, real={"transformer": _I2V, **_TEXT}),
    _from_frame(
        "Wan 2.2 TI2V-5B",
        make=make_ti2v,
        bucket=(5, 64, 64),
        real={"transformer": _5B, **_TEXT},
        returns_latents=True,
    ),
    _row(
        "Wan 2.2 A14B T2V",
        make=make_a14b,
        call=_by_experts(_call),
        keys=_KEYS | {"model": {"expert": "high"}},
        guidance_2=_GUIDANCE_2,
        real={"transformer": {}, "transformer_2": {}, **_TEXT},
    ),
    _from_frame(
        "Wan 2.2 A14B I2V",
        make=make_a14b_i2v,
        call=_by_experts(_call_from_frames),
        keys=_KEYS | {"model": {"expert": "low"}},
        guidance_2=_GUIDANCE_2,
        real={"transformer": _I2V, "transformer_2": _I2V, **_TEXT},
    ),
)
