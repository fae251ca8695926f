"""LTX-2 with random weights, in folders of the releases' layout."""

from functools import partial
from pathlib import Path
from typing import Any

import diffusers
import torch
import torch.nn.functional as F
import transformers
from diffusers.pipelines.ltx2.connectors import LTX2TextConnectors
from diffusers.pipelines.ltx2.vocoder import LTX2Vocoder
from tests.families.row import WIDTH, Asked, Row, encoder_sizes, tokenizer
from torch import Tensor

_LAYERS = 2  # of the language model
_REGISTERS = 8


def make(folder: Path, pipeline: str = "LTX2Pipeline", **settings: Any) -> None:
    """LTX-2; its transformer with these settings changed."""
    _write(folder, pipeline, {}, settings)


def make_i2v(folder: Path) -> None:
    make(folder, "LTX2ImageToVideoPipeline")


def make_23(folder: Path, audio_width: int = 16) -> None:
    """LTX-2.3, whose connectors make text of the width of each stream, and whose heads have gates.

    It has enough heads for the gates' weights to be quantised.
    """
    connectors = {
        "per_modality_projections": True,
        "video_hidden_dim": 32,
        "audio_hidden_dim": audio_width,
        "audio_connector_attention_head_dim": audio_width // 2,
        "video_connector_attention_head_dim": 16,
        "video_gated_attn": True,
        "audio_gated_attn": True,
        "proj_bias": True,
    }
    transformer = {
        "num_attention_heads": 4,
        "attention_head_dim": 8,
        "audio_num_attention_heads": 4,
        "audio_attention_head_dim": audio_width // 4,
        "audio_cross_attention_dim": audio_width,
        "cross_attn_mod": True,
        "audio_cross_attn_mod": True,
        "gated_attn": True,
        "audio_gated_attn": True,
        "use_prompt_embeddings": False,
        "perturbed_attn": True,
    }
    _write(folder, "LTX2Pipeline", connectors, transformer)


def language_model(words: Any) -> Any:
    """Gemma 3 with its vision tower, which text alone does not use."""
    settings = transformers.Gemma3Config(
        text_config={
            "vocab_size": len(words),
            **encoder_sizes(layers=_LAYERS),
            "num_key_value_heads": 1,
            "head_dim": 8,
            "query_pre_attn_scalar": 8,
            "layer_types": ["sliding_attention", "full_attention"],
        },
        vision_config={**encoder_sizes(8, 8, heads=1), "image_size": 16, "patch_size": 8},
        mm_tokens_per_image=4,
    )
    return transformers.Gemma3ForConditionalGeneration(settings)


CODEC = {
    "latent_channels": 8,
    "block_out_channels": (8, 8, 8, 8),
    "decoder_block_out_channels": (8, 16, 32),
    "layers_per_block": (1, 1, 1, 1, 1),
    "decoder_layers_per_block": (1, 1, 1, 1),
}
"""Arguments of the autoencoder, which compresses as the releases' does: 32 x 32 pixels, 8 frames,
other than its class says by default."""


def autoencoder(**settings: Any) -> Any:
    compression = {"spatial_compression_ratio": 32, "temporal_compression_ratio": 8}
    made = diffusers.AutoencoderKLLTX2Video(**{**CODEC, **compression, **settings})
    made.latents_mean.copy_(torch.arange(8) / 8 - 0.5)
    made.latents_std.copy_(torch.arange(8) / 8 + 0.5)
    return made


def transformer(**settings: Any) -> Any:
    return diffusers.LTX2VideoTransformer3DModel(
        **{
            "in_channels": 8,
            "out_channels": 8,
            "num_attention_heads": 2,
            "attention_head_dim": 16,
            "cross_attention_dim": 32,
            "audio_in_channels": 8,
            "audio_out_channels": 8,
            "audio_num_attention_heads": 2,
            "audio_attention_head_dim": 8,
            "audio_cross_attention_dim": 16,
            "num_layers": 2,
            "caption_channels": WIDTH,
            "rope_type": "split",
            **settings,
        }
    )


def _write(
    folder: Path, pipeline: str, connectors: dict[str, Any], settings: dict[str, Any]
) -> None:
    words = tokenizer()
    audio = diffusers.AutoencoderKLLTX2Audio(
        base_channels=8, ch_mult=(1, 1, 1), num_res_blocks=1, latent_channels=2, mel_bins=16
    )
    audio.latents_mean.copy_(torch.arange(8) / 8 - 0.5)
    audio.latents_std.copy_(torch.arange(8) / 8 + 0.5)
    getattr(diffusers, pipeline)(
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(
            use_dynamic_shifting=True,
            base_image_seq_len=4,
            base_shift=0.95,
            max_image_seq_len=64,
            max_shift=2.05,
            shift_terminal=0.1,
        ),
        vae=autoencoder(),
        audio_vae=audio,
        text_encoder=language_model(words),
        tokenizer=words,
        connectors=LTX2TextConnectors(
            **{
                "caption_channels": WIDTH,
                "text_proj_in_factor": _LAYERS + 1,
                "video_connector_num_attention_heads": 2,
                "video_connector_attention_head_dim": 8,
                "video_connector_num_layers": 1,
                "video_connector_num_learnable_registers": _REGISTERS,
                "audio_connector_num_attention_heads": 2,
                "audio_connector_attention_head_dim": 8,
                "audio_connector_num_layers": 1,
                "audio_connector_num_learnable_registers": _REGISTERS,
                "rope_type": "split",
                **connectors,
            }
        ),
        transformer=transformer(**settings),
        vocoder=LTX2Vocoder(
            in_channels=32,
            hidden_channels=8,
            upsample_kernel_sizes=[4, 4],
            upsample_factors=[2, 2],
            resnet_kernel_sizes=[3],
            resnet_dilations=[[1]],
        ),
    ).save_pretrained(folder)


def _isolate(_model: Any, args: Any, given: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    return args, given | {"isolate_modalities": True}


def _sound_scheduler(pipeline: Any) -> Any:
    """The copy that its call makes for the audio."""
    scheduler = pipeline.scheduler
    copied = type(scheduler).from_config(scheduler.config)
    scheduler.__deepcopy__ = lambda _: copied
    return copied


def _call(asked: Asked) -> dict[str, Any]:
    """Audio is denoised beside the video, isolated from it; guidance is that of the text alone."""
    asked.pipeline.transformer.register_forward_pre_hook(_isolate, with_kwargs=True)
    _sound_scheduler(asked.pipeline)  # its steps are not recorded
    return _arguments(asked)


def _call_with_sound(asked: Asked) -> dict[str, Any]:
    """Each attends to the other."""
    pipeline, vae = asked.pipeline, asked.pipeline.audio_vae
    assert asked.sound is not None
    raw = pipeline._denormalize_audio_latents(asked.sound, vae.latents_mean, vae.latents_std)
    bins = vae.config.mel_bins // vae.mel_compression_ratio
    latents = pipeline._unpack_audio_latents(raw, raw.shape[1], bins)
    return _arguments(asked) | {"audio_latents": latents}


def _arguments(asked: Asked) -> dict[str, Any]:
    return {
        "prompt": asked.prompt,
        "latents": _raw(asked, asked.noise),
        "num_frames": asked.frames,
        "height": asked.height,
        "width": asked.width,
        "frame_rate": 24.0,
        "guidance_scale": asked.guidance,
        "audio_guidance_scale": asked.guidance,
        "stg_scale": 0.0,
        "audio_stg_scale": 0.0,
        "modality_scale": 1.0,
        "audio_modality_scale": 1.0,
        "guidance_rescale": 0.0,
        "audio_guidance_rescale": 0.0,
        "max_sequence_length": 32,
        "return_dict": False,
        "generator": torch.Generator().manual_seed(0),
    }


def _call_from_frame(asked: Asked) -> dict[str, Any]:
    """The picture is not compressed as a video's frame first, which its pipeline does by default.

    Latents that it is given must begin with the picture's, which its own method makes here.
    """
    pipeline, image = asked.pipeline, asked.pictures["first"]
    size = asked.height, asked.width
    pixels = pipeline.video_processor.preprocess(image, *size)
    with torch.no_grad():
        tokens, _ = pipeline.prepare_latents(
            pixels, 1, 8, *size, asked.frames, 0.0, torch.float32, "cpu"
        )
    latents = pipeline._unpack_latents(tokens, *asked.noise.shape[2:])
    latents[:, :, 1:] = asked.noise[:, :, 1:]
    given = {"latents": _raw(asked, latents), "image": image, "image_crf": 0}
    return _call(asked) | given


def _raw(asked: Asked, latents: Tensor) -> Tensor:
    """In the scale of the autoencoder, as the pipeline takes them."""
    vae = asked.pipeline.vae
    statistics = vae.latents_mean, vae.latents_std, vae.config.scaling_factor
    raw: Tensor = asked.pipeline._denormalize_latents(latents, *statistics)
    return raw


def _unpack(asked: Asked, tokens: Tensor) -> Tensor:
    video: Tensor = asked.pipeline._unpack_latents(tokens, *asked.noise.shape[2:])
    return video


def _fill(asked: Asked, frames: Tensor) -> Tensor:
    """Its scheduler gets no given frame."""
    return F.pad(frames, (0, 0, 0, 0, 1, 0))


# As scripts/convert_ltx2_to_diffusers.py of diffusers has them; those of LTX-2's transformer are
# the defaults of its class, too, but for the rotary embeddings.
_PARTS: dict[str, dict[str, Any]] = {
    "vae": {"latent_channels": 128},
    "text_encoder": {"text_config": {"hidden_size": 3840}},
}
_REAL: dict[str, dict[str, Any]] = {
    "transformer": {"rope_type": "split"},
    "connectors": {
        "caption_channels": 3840,
        "video_connector_num_attention_heads": 30,
        "video_connector_attention_head_dim": 128,
        "video_connector_num_learnable_registers": 128,
    },
    **_PARTS,
}
_REAL_23: dict[str, dict[str, Any]] = {
    "transformer": {
        "rope_type": "split",
        "cross_attn_mod": True,
        "audio_cross_attn_mod": True,
        "gated_attn": True,
        "audio_gated_attn": True,
        "use_prompt_embeddings": False,
        "perturbed_attn": True,
    },
    "connectors": {
        **_REAL["connectors"],
        "video_connector_num_attention_heads": 32,
        "video_hidden_dim": 4096,
        "audio_hidden_dim": 2048,
    },
    **_PARTS,
}
_KEYS = {"model": {"audio": "off"}, "data": {"fps": 24.0}, "text": {"max_tokens": 32}}
_row = partial(
    Row,
    family="ltx2",
    call=_call,
    bucket=(17, 64, 96),
    unpack=_unpack,
    keys=_KEYS,
    guidance=3.0,
    real=_REAL,
)
ROWS = (
    _row("LTX-2", make=make),
    _row(
        "LTX-2, first frame",
        make=make_i2v,
        call=_call_from_frame,
        unpack=_fill,
        pictures=("first",),
        task="first frame",
        given_frames=1,
    ),
    _row("LTX-2.3", make=make_23, real=_REAL_23),
    _row(
        "LTX-2.3 with sound",
        make=partial(make_23, audio_width=32),
        call=_call_with_sound,
        sound_scheduler=_sound_scheduler,
        keys={**_KEYS, "model": {"audio": "train"}},
        real=_REAL_23 | {"audio_vae": {"latent_channels": 8, "mel_bins": 64}},
        refuses={"context": 'with model.audio = "train" video and audio attend'},
    ),
)
