"""HunyuanVideo 1.5 with random weights, in folders of the releases' layout."""

import inspect
from functools import partial
from pathlib import Path
from typing import Any

import diffusers
import transformers
from tests.families import release_qwen_image
from tests.families.row import Asked, Row, encoder_sizes

_WIDTH = 16  # of the encoders
_CHANNELS = 32  # of latents, as the pipeline of text assumes
_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def tokenizer() -> Any:
    """Qwen2's; before a caption it has as many tokens as the release's, which pipelines drop."""
    encode = diffusers.HunyuanVideo15Pipeline._get_mllm_prompt_embeds
    message = inspect.signature(encode).parameters["system_message"].default
    words = release_qwen_image.tokenizer(message, "a \u201cred\u201d circle, moving & it\u2019s")
    words.chat_template = _TEMPLATE
    return words


def language_model(words: Any) -> Any:
    return transformers.Qwen2_5_VLTextModel(release_qwen_image.language_config(words))


def glyph_encoder() -> Any:
    config = transformers.T5Config(
        vocab_size=384, d_model=8, d_kv=4, d_ff=16, num_layers=1, num_heads=2
    )
    return transformers.T5EncoderModel(config)


def vae() -> Any:
    return diffusers.AutoencoderKLHunyuanVideo15(
        latent_channels=_CHANNELS,
        block_out_channels=(8, 8, 16, 32, 64),
        layers_per_block=1,
    )


def _siglip() -> dict[str, Any]:
    sizes = encoder_sizes(_WIDTH, inner_width=16)
    vision = transformers.SiglipVisionConfig(**sizes, image_size=32, patch_size=8)
    return {
        "image_encoder": transformers.SiglipVisionModel(vision),
        "feature_extractor": transformers.SiglipImageProcessor(size={"height": 32, "width": 32}),
    }


def transformer(**settings: Any) -> Any:
    """Its target size is that of 48 x 80 pixels."""
    return diffusers.HunyuanVideo15Transformer3DModel(
        **{
            "num_attention_heads": 2,
            "attention_head_dim": 16,
            "num_layers": 2,
            "num_refiner_layers": 1,
            "text_embed_dim": _WIDTH,
            "text_embed_2_dim": 8,
            "image_embed_dim": _WIDTH,
            "rope_axes_dim": (4, 6, 6),
            "target_size": 64,
            **settings,
        }
    )


def _write(
    folder: Path, pipeline: str, task: str, parts: dict[str, Any], settings: dict[str, Any]
) -> None:
    words = tokenizer()
    getattr(diffusers, pipeline)(
        text_encoder=language_model(words),
        tokenizer=words,
        transformer=transformer(task_type=task, **settings),
        vae=vae(),
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(shift=5.0),
        text_encoder_2=glyph_encoder(),
        tokenizer_2=transformers.ByT5Tokenizer(),
        guider=diffusers.ClassifierFreeGuidance(guidance_scale=6.0),
        **parts,
    ).save_pretrained(folder)


def make(folder: Path, **settings: Any) -> None:
    """From text; its transformer with these settings changed."""
    _write(folder, "HunyuanVideo15Pipeline", "t2v", {}, settings)


def make_i2v(folder: Path, **settings: Any) -> None:
    """From a first frame and text."""
    _write(folder, "HunyuanVideo15ImageToVideoPipeline", "i2v", _siglip(), settings)


def _call(asked: Asked) -> dict[str, Any]:
    """The scale of guidance is the guider's."""
    asked.pipeline.guider = diffusers.ClassifierFreeGuidance(guidance_scale=asked.guidance)
    given = {"prompt": asked.prompt, "latents": asked.noise, "num_frames": asked.frames}
    if asked.pictures:
        return given | {"image": asked.pictures["first"]}
    return given | {"height": asked.height, "width": asked.width}


# Of the transformer they are the defaults of its class.
_REAL = {"text_encoder": {"hidden_size": 3584}, "text_encoder_2": {"d_model": 1472}}
_row = partial(
    Row,
    family="hunyuan_video15",
    call=_call,
    bucket=(5, 48, 80),
    keys={"text": {"max_tokens": 64}},
    guidance=6.0,
    refuses={"comfyui": "ComfyUI's name of the LoRA of HunyuanVideo 1.5's .* is not known"},
)
ROWS = (
    _row("HunyuanVideo 1.5 T2V", make=make, real={"transformer": {"task_type": "t2v"}, **_REAL}),
    _row(
        "HunyuanVideo 1.5 I2V",
        make=make_i2v,
        pictures=("first",),
        task="first frame",
        real={"transformer": {}, "image_encoder": {"hidden_size": 1152}, **_REAL},
    ),
)
