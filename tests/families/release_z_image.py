"""Z-Image with random weights, in a folder of the release's layout."""

from pathlib import Path
from typing import Any

import diffusers
import torch
import transformers
from tests.families import release_flux, release_flux2
from tests.families.row import Asked, Row
from torch import Tensor

SIZES: dict[str, Any] = {
    "in_channels": 4,
    "dim": 32,
    "n_layers": 2,
    "n_refiner_layers": 1,
    "n_heads": 2,
    "n_kv_heads": 2,
    "cap_feat_dim": release_flux2.WIDTH,
    "axes_dims": [4, 6, 6],
    "axes_lens": [256, 32, 32],
}
"""Of the transformer."""


def transformer() -> Any:
    """Its tokens for padding are zero at random initialisation, which the release's are not."""
    made: Any = diffusers.ZImageTransformer2DModel(**SIZES)
    with torch.no_grad():
        made.x_pad_token.normal_()
        made.cap_pad_token.normal_()
    return made


def pipeline() -> Any:
    words = release_flux2.tokenizer()
    return diffusers.ZImagePipeline(
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0),
        vae=release_flux.vae(latent_channels=4),
        text_encoder=transformers.Qwen3Model(
            transformers.Qwen3Config(**release_flux2.decoder(len(words), layers=2))
        ),
        tokenizer=words,
        transformer=transformer(),
    )


def make(folder: Path) -> None:
    pipeline().save_pretrained(folder)


def _call(asked: Asked) -> dict[str, Any]:
    """The pipeline adds 1 to its guidance scale."""
    return {
        "prompt": asked.prompt,
        "latents": asked.noise[:, :, 0],
        "height": asked.height,
        "width": asked.width,
        "guidance_scale": asked.guidance - 1,
        "max_sequence_length": release_flux2.LENGTH,
    }


def _unpack(asked: Asked, latents: Tensor) -> Tensor:
    return latents[:, :, None]


ROWS = (
    Row(
        "Z-Image",
        "z_image",
        make,
        _call,
        (1, 64, 96),
        _unpack,
        keys={"text": {"max_tokens": release_flux2.LENGTH}},
        guidance=6.0,
        real={
            "transformer": {},
            "text_encoder": {"hidden_size": 2560},
            "vae": {"latent_channels": 16},
        },
        refuses={
            "context": "its captions are of unlike length in a batch",
            "nf4": "85 x 32 weights, and their number is not a multiple of 64",
        },
    ),
)
