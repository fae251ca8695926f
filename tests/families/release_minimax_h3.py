"""MiniMax H3 with random weights, in a folder of its release's layout.

Two things of its pipeline are not as diffusers has them here: it makes clips of less than five
seconds, and has no processor of pictures, which a text does not use.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import diffusers
import pytest
import transformers
from tests.families import modular, release_krea2, release_qwen_image
from tests.families.row import Asked, Row
from torch import Tensor

_WIDTH = 8  # of the text encoder
_LENGTH = 48
_CHANNELS, _SOUND = 24, 32  # of latents, as its pipeline assumes without autoencoders
CODEC: dict[str, Any] = {
    "latent_channels": _CHANNELS,
    "block_out_channels": (8, 8, 8, 8, 8, 8),
    "layers_per_block": 1,
    "norm_num_groups": 4,
    "decoder_num_layers": 1,
    "decoder_num_attention_heads": 2,
    "decoder_attention_head_dim": 8,
}


def autoencoder() -> Any:
    mean = [((channel * 7) % 5 - 2) / 4 for channel in range(_CHANNELS)]
    return diffusers.AutoencoderKLMiniMaxH3(
        **CODEC, latents_mean=mean, latents_std=[1.0 + value / 2 for value in mean]
    )


def sound_autoencoder() -> Any:
    return diffusers.AutoencoderKLMiniMaxH3Audio(
        encoder_dim=2,
        latent_dim=_SOUND,
        latent_channels=_SOUND,
        num_attention_heads=1,
        decoder_dim=128,
        resblock_kernel_sizes=(3,),
        resblock_dilation_sizes=((1,),),
        latents_mean=[number / 32 - 0.5 for number in range(_SOUND)],
        latents_std=[number / 32 + 0.5 for number in range(_SOUND)],
    )


def transformer(**settings: Any) -> Any:
    return diffusers.MiniMaxH3Transformer3DModel(
        **{
            "num_attention_heads": 2,
            "attention_head_dim": 16,
            "hidden_size": 24,
            "num_layers": 2,
            "num_refiner_layers": 1,
            "ffn_dim": 32,
            "in_channels": _CHANNELS,
            "audio_in_channels": _SOUND,
            "text_dim": _WIDTH,
            "freq_dim": 16,
            "time_embed_hidden_dim": 16,
            "time_embed_dim": 8,
            "rope_freq_dim": 2,
            **settings,
        }
    )


def parts() -> dict[str, Any]:
    """Of a release; its schedulers have shifts of their own, which nothing but their files tell."""
    words = release_qwen_image.tokenizer()
    language = release_krea2.language_config(words, _WIDTH, layers=52)
    return {
        "transformer": transformer(),
        "vae": autoencoder(),
        "audio_vae": sound_autoencoder(),
        "text_encoder": transformers.Qwen3VLForConditionalGeneration(language),
        "tokenizer": words,
        "scheduler": diffusers.MiniMaxH3Scheduler(shift=7.0),
        "audio_scheduler": diffusers.MiniMaxH3Scheduler(shift=2.0),
    }


def make(folder: Path) -> None:
    modular.save(folder, diffusers.MiniMaxH3ModularPipeline, **parts())


def load(folder: Path) -> Any:
    words = transformers.AutoTokenizer.from_pretrained(folder / "tokenizer")
    return modular.load(folder, ("decode",), "t2va", processor=_Processor(), tokenizer=words)


class _Processor:
    def create_mm_token_type_ids(self, ids: list[list[int]]) -> list[list[int]]:
        return [[0] * len(each) for each in ids]


@contextmanager
def short_clips() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(diffusers.MiniMaxH3ModularPipeline, "min_duration", 0.0)
        yield


def _call(asked: Asked) -> dict[str, Any]:
    assert asked.sound is not None
    return {
        "prompt": asked.prompt,
        "latents": asked.noise,
        "audio_latents": asked.sound.mT.reshape(2, _SOUND, -1),
        "num_frames": asked.frames,
        "height": asked.height,
        "width": asked.width,
    }


def _unpack(asked: Asked, rows: Tensor) -> Tensor:
    """Rows of a frame after the other, each of 2 x 2 latent pixels."""
    frames, height, width = asked.noise.shape[2:]
    parts = rows.reshape(frames, height // 2, width // 2, -1, 2, 2)
    return parts.permute(3, 0, 1, 4, 2, 5).reshape(asked.noise.shape)


def _unpack_sound(asked: Asked, rows: Tensor) -> Tensor:
    """Rows of the left channel, then of the right."""
    return rows.reshape(2, -1, _SOUND).transpose(0, 1).flatten(1)[None]


ROWS = (
    Row(
        "MiniMax H3",
        "minimax_h3",
        make,
        _call,
        bucket=(22, 64, 96),
        unpack=_unpack,
        unpack_sound=_unpack_sound,
        sound_scheduler=lambda pipeline: pipeline.audio_scheduler,
        sigma=lambda time: 1 - time,
        negates=True,
        further_sigmas=1,
        keys={
            "model": {"audio": "train"},
            "data": {"fps": 24.0},
            "text": {"max_tokens": _LENGTH},
        },
        guidance=1.0,
        load=load,
        within=short_clips,
        real={
            "transformer": {},
            "text_encoder": {"text_config": {"hidden_size": 5120}},
        },
    ),
)
