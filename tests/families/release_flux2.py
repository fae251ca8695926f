"""FLUX.2 dev and klein with random weights, in folders of the releases' layout."""

from functools import partial
from pathlib import Path
from typing import Any

import diffusers
import transformers
from tests.families.release_flux import STAGES
from tests.families.row import Asked, Row, encoder_sizes
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor

WIDTH = 8  # of a text encoder; prompt_embeds are three of its layers
_WORDS = (
    *("system", "user", "assistant", "think", "a", "red", "blue", "ball", "square"),
    *("is", "rolls", "left", "up", "fast", "You"),
)

# dev's messages have lists of parts as their content, klein's have text.
_TEMPLATE = (
    "{% for message in messages %}<s> {{ message['role'] }} "
    "{% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for part in message['content'] %}{{ part['text'] }}{% endfor %}{% endif %} </s> "
    "{% endfor %}{% if add_generation_prompt %}<s> assistant "
    "{% if not enable_thinking %}think {% endif %}{% endif %}"
)


def tokenizer() -> Any:
    """Words and letters; with a chat template. dev's is a processor, which needs torchvision."""
    special = ["<pad>", "</s>", "<unk>", "<s>"]
    letters = [chr(code) for code in range(ord("a"), ord("z") + 1)]
    known = {word: at for at, word in enumerate([*special, *dict.fromkeys([*_WORDS, *letters])])}
    words = Tokenizer(models.WordLevel(known, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=words,
        pad_token="<pad>",
        eos_token="</s>",
        unk_token="<unk>",
        bos_token="<s>",
        chat_template=_TEMPLATE,
        model_max_length=512,
        padding_side="right",
    )


def vae() -> Any:
    """Its statistics are not those of an untrained batch norm."""
    made = diffusers.AutoencoderKLFlux2(**STAGES, latent_channels=4)
    made.bn.running_mean.uniform_(-0.5, 0.5)
    made.bn.running_var.uniform_(0.5, 1.5)
    return made


def transformer(*, guidance: bool, **changed: Any) -> Any:
    """Its feed-forward is narrower than the release's.

    A plan counts a new tensor where autograd adds a gradient to another one in place; of the wide
    one in a single block that would be 2 % of so small a step.
    """
    sizes = {
        "in_channels": 16,
        "num_layers": 2,
        "mlp_ratio": 1.0,
        "num_single_layers": 2,
        "attention_head_dim": 16,
        "num_attention_heads": 2,
        "joint_attention_dim": 3 * WIDTH,
        "timestep_guidance_channels": 16,
        "axes_dims_rope": (4, 4, 4, 4),
        "guidance_embeds": guidance,
    }
    return diffusers.Flux2Transformer2DModel(**(sizes | changed))


def scheduler() -> Any:
    return diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=True)


def decoder(vocabulary_size: int, layers: int) -> dict[str, Any]:
    return {
        "vocab_size": vocabulary_size,
        **encoder_sizes(WIDTH, 8, layers),
        "num_key_value_heads": 1,
        "head_dim": 4,
    }


def dev() -> Any:
    words = tokenizer()
    sizes = encoder_sizes(8, 8, heads=1)
    vision = transformers.PixtralVisionConfig(**sizes, image_size=28, patch_size=14)
    text = transformers.MistralConfig(**decoder(len(words), layers=30))
    return diffusers.Flux2Pipeline(
        scheduler=scheduler(),
        vae=vae(),
        text_encoder=transformers.Mistral3ForConditionalGeneration(
            transformers.Mistral3Config(vision_config=vision, text_config=text)
        ),
        tokenizer=words,
        transformer=transformer(guidance=True),
    )


def klein(*, is_distilled: bool = False) -> Any:
    words = tokenizer()
    return diffusers.Flux2KleinPipeline(
        scheduler=scheduler(),
        vae=vae(),
        text_encoder=transformers.Qwen3ForCausalLM(
            transformers.Qwen3Config(**decoder(len(words), layers=27))
        ),
        tokenizer=words,
        transformer=transformer(guidance=False),
        is_distilled=is_distilled,
    )


def make_dev(folder: Path) -> None:
    dev().save_pretrained(folder)


def make_klein(folder: Path, *, is_distilled: bool = False) -> None:
    klein(is_distilled=is_distilled).save_pretrained(folder)


def _call(asked: Asked) -> dict[str, Any]:
    return {
        "prompt": asked.prompt,
        "image": list(asked.pictures.values()) or None,
        "latents": asked.noise[:, :, 0],
        "height": asked.height,
        "width": asked.width,
        "guidance_scale": asked.guidance,
        "max_sequence_length": LENGTH,
    }


def _unpack(asked: Asked, tokens: Tensor) -> Tensor:
    return tokens.mT.reshape(1, -1, 1, asked.height // 16, asked.width // 16)


LENGTH = 128
"""Tokens of a text: dev's system message alone has 40."""

_VAE = {"vae": {"latent_channels": 32}}
_DEV: dict[str, dict[str, Any]] = {
    "transformer": {},
    "text_encoder": {"text_config": {"hidden_size": 5120}},
    **_VAE,
}
_KLEIN_4B: dict[str, dict[str, Any]] = {
    "transformer": {
        "num_layers": 5,
        "num_single_layers": 20,
        "num_attention_heads": 24,
        "joint_attention_dim": 7680,
        "guidance_embeds": False,
    },
    "text_encoder": {"hidden_size": 2560},
    **_VAE,
}
_row = partial(
    Row,
    family="flux2",
    call=_call,
    bucket=(1, 64, 96),
    unpack=_unpack,
    keys={"text": {"max_tokens": LENGTH}},
    guidance=4.0,
)
ROWS = (
    _row("FLUX.2 dev", make=make_dev, real=_DEV),
    _row(
        "FLUX.2 dev, references",
        make=make_dev,
        pictures=("reference", "reference_2"),
        task="edit by several references",
        real=_DEV,
    ),
    _row("FLUX.2 klein", make=make_klein, real=_KLEIN_4B),
)
