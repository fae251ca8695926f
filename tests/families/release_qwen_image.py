"""Qwen-Image with random weights, in the folder layout of its release."""

import json
from pathlib import Path
from typing import Any

import diffusers
import transformers
from tests.families.row import Asked, Row, encoder_sizes
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from torch import Tensor

_WIDTH = 16  # of the language model
_SPECIAL = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
_TEXTS = (
    "system\nDescribe the image by detailing the color, shape, size, texture, quantity, text, "
    "spatial relationships of the objects and background:",
    "user\n",
    "assistant\n",
    "a red ball rolls left",
    "a blue square moving up",
)


def tokenizer(*texts: str) -> Any:
    """Qwen2's, with a token for each word of its prompt templates, of a few captions and of texts.

    The templates then have as many tokens before the caption as with the release's vocabulary,
    which is how many the pipelines drop.
    """
    empty = transformers.Qwen2Tokenizer()._tokenizer
    learnt = Tokenizer(models.BPE())
    learnt.normalizer, learnt.pre_tokenizer = empty.normalizer, empty.pre_tokenizer
    trainer = trainers.BpeTrainer(
        vocab_size=4000,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    learnt.train_from_iterator((*_TEXTS, *texts), trainer)
    found = json.loads(learnt.to_str())["model"]
    vocabulary = found["vocab"] | {t: len(found["vocab"]) + i for i, t in enumerate(_SPECIAL)}
    words = transformers.Qwen2Tokenizer(
        vocab=vocabulary, merges=[tuple(pair) for pair in found["merges"]]
    )
    words.add_special_tokens({"additional_special_tokens": list(_SPECIAL[1:])})
    return words


def language_config(words: Any) -> Any:
    """Of the text half of Qwen2.5-VL."""
    return transformers.Qwen2_5_VLTextConfig(
        vocab_size=len(words),
        **encoder_sizes(_WIDTH, layers=2),
        num_key_value_heads=1,
        rope_parameters={"rope_type": "default", "mrope_section": [2, 1, 1]},
        bos_token_id=words.eos_token_id,
        eos_token_id=words.eos_token_id,
    )


def language_model(words: Any) -> Any:
    """Qwen2.5-VL with its vision tower, which text alone does not use."""
    ids = words.convert_tokens_to_ids
    settings = transformers.Qwen2_5_VLConfig(
        text_config=language_config(words).to_dict(),
        vision_config={
            "depth": 1,
            "hidden_size": _WIDTH,
            "intermediate_size": 16,
            "num_heads": 2,
            "out_hidden_size": _WIDTH,
            "fullatt_block_indexes": [0],
        },
        image_token_id=ids("<|image_pad|>"),
        video_token_id=ids("<|video_pad|>"),
        vision_start_token_id=ids("<|vision_start|>"),
        vision_end_token_id=ids("<|vision_end|>"),
    )
    return transformers.Qwen2_5_VLForConditionalGeneration(settings)


def autoencoder() -> Any:
    mean = [((channel * 7) % 5 - 2) / 4 for channel in range(16)]
    return diffusers.AutoencoderKLQwenImage(
        base_dim=4,
        z_dim=16,
        num_res_blocks=1,
        latents_mean=mean,
        latents_std=[1.0 + value / 2 for value in mean],
    )


def scheduler() -> Any:
    """With constants of its own, so that nothing but this file can tell them."""
    return diffusers.FlowMatchEulerDiscreteScheduler(
        use_dynamic_shifting=True,
        base_image_seq_len=16,
        base_shift=0.5,
        max_image_seq_len=1024,
        max_shift=0.9,
        shift_terminal=0.02,
        time_shift_type="exponential",
    )


def transformer(**settings: Any) -> Any:
    return diffusers.QwenImageTransformer2DModel(
        **{
            "num_layers": 2,
            "attention_head_dim": 16,
            "num_attention_heads": 2,
            "joint_attention_dim": _WIDTH,
            "axes_dims_rope": (4, 6, 6),
            **settings,
        }
    )


def make(folder: Path, **settings: Any) -> None:
    """Write it; its transformer with these settings changed."""
    words = tokenizer()
    diffusers.QwenImagePipeline(
        scheduler=scheduler(),
        vae=autoencoder(),
        text_encoder=language_model(words),
        tokenizer=words,
        transformer=transformer(**settings),
    ).save_pretrained(folder)


def call(asked: Asked) -> dict[str, Any]:
    noise = asked.noise[:, :, 0]
    tokens = asked.pipeline._pack_latents(noise, 1, noise.shape[1], *noise.shape[-2:])
    given = {"prompt": asked.prompt, "latents": tokens, "height": asked.height}
    given |= {"width": asked.width, "true_cfg_scale": asked.guidance}
    return given | ({"negative_prompt": ""} if asked.guidance > 1 else {})


def unpack(asked: Asked, tokens: Tensor) -> Tensor:
    image: Tensor = asked.pipeline._unpack_latents(tokens, asked.height, asked.width, 8)
    return image


ROWS = (
    Row(
        "Qwen-Image",
        "qwen_image",
        make,
        call,
        (1, 48, 64),
        unpack,
        guidance=4.0,
        real={"transformer": {}, "text_encoder": {"text_config": {"hidden_size": 3584}}},
    ),
)
