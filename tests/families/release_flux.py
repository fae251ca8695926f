"""FLUX.1 and Kontext with random weights, in folders of the releases' layout."""

from functools import partial
from pathlib import Path
from typing import Any

import diffusers
import transformers
from tests.families.row import WIDTH, Asked, Row, encoder_sizes, t5, tokenizer
from torch import Tensor


def make(folder: Path, **transformer: Any) -> None:
    """FLUX.1; its transformer with these settings changed."""
    _write(folder, "FluxPipeline", transformer)


def make_kontext(folder: Path) -> None:
    _write(folder, "FluxKontextPipeline", {})


STAGES: dict[str, Any] = {
    "block_out_channels": (4,) * 4,
    "down_block_types": ("DownEncoderBlock2D",) * 4,
    "up_block_types": ("UpDecoderBlock2D",) * 4,
    "layers_per_block": 1,
    "norm_num_groups": 2,
}
"""Of the autoencoders of FLUX.1 and FLUX.2."""


def vae(latent_channels: int) -> Any:
    return diffusers.AutoencoderKL(
        **STAGES,
        latent_channels=latent_channels,
        scaling_factor=0.3611,
        shift_factor=0.1159,
        use_quant_conv=False,
        use_post_quant_conv=False,
    )


def _write(folder: Path, pipeline: str, transformer: dict[str, Any]) -> None:
    words, pooled = tokenizer(begins=False), tokenizer(begins=True)
    clip = transformers.CLIPTextConfig(
        vocab_size=len(pooled),
        **encoder_sizes(),
        max_position_embeddings=77,
        bos_token_id=3,
        eos_token_id=1,
        pad_token_id=0,
    )
    getattr(diffusers, pipeline)(
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(
            shift=3.0, use_dynamic_shifting=True, base_shift=0.5, max_shift=1.15
        ),
        vae=vae(latent_channels=16),
        text_encoder=transformers.CLIPTextModel(clip),
        tokenizer=pooled,
        text_encoder_2=t5("T5", len(words)),
        tokenizer_2=words,
        transformer=diffusers.FluxTransformer2DModel(
            **{
                "num_layers": 1,
                "num_single_layers": 2,
                "attention_head_dim": 16,
                "num_attention_heads": 2,
                "joint_attention_dim": WIDTH,
                "pooled_projection_dim": WIDTH,
                "guidance_embeds": True,
                "axes_dims_rope": (4, 6, 6),
                **transformer,
            }
        ),
    ).save_pretrained(folder)


def _call(asked: Asked) -> dict[str, Any]:
    noise = asked.noise[:, :, 0]
    tokens = asked.pipeline._pack_latents(noise, 1, noise.shape[1], *noise.shape[-2:])
    given = {"prompt": asked.prompt, "latents": tokens, "height": asked.height}
    return given | {"width": asked.width, "guidance_scale": asked.guidance}


def _call_kontext(asked: Asked) -> dict[str, Any]:
    area = asked.height * asked.width
    picture = {"image": asked.pictures["reference"], "max_area": area, "_auto_resize": False}
    return _call(asked) | picture


def _unpack(asked: Asked, tokens: Tensor) -> Tensor:
    image: Tensor = asked.pipeline._unpack_latents(tokens, asked.height, asked.width, 8)
    return image[:, :, None]


_REAL: dict[str, dict[str, Any]] = {
    "transformer": {"guidance_embeds": True},
    "text_encoder": {"hidden_size": 768},
    "text_encoder_2": {"d_model": 4096},
}
_ENCODERS = {"text": {"pooled": {}}, "flow": {"shift": "flux"}}
_row = partial(Row, bucket=(1, 48, 64), unpack=_unpack, keys=_ENCODERS, real=_REAL)
ROWS = (
    _row("FLUX.1", "flux", make, _call, guidance=3.5),
    _row(
        "FLUX.1 Kontext",
        "flux_kontext",
        make_kontext,
        _call_kontext,
        pictures=("reference",),
        task="edit by a reference",
        guidance=2.5,
    ),
)
