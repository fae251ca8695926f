"""Wan 2.1: diffusers' `WanTransformer3DModel` at any size."""

import math
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from longtake.config import ModelSection
from longtake.errors import RecipeError
from longtake.models.codec import AutoencoderCodec, Codec
from longtake.models.family import Conditioning, LatentShape
from longtake.models.pretrained import construct, load_pretrained, quiet, refuse_unused
from longtake.models.text import TextEncoder, TransformersText

_PATCH = (1, 2, 2)


class Wan:
    """Text to video; conditioned on a transformers encoder's `prompt_embeds`.

    Wan's velocity has longtake's sign (noise - latents); its timesteps are 1000 sigma.
    """

    def check(self, section: ModelSection, shapes: Sequence[LatentShape]) -> None:
        """Latent height and width must divide into patches."""
        patch = _patch_size(section)
        for shape in shapes:
            sizes = (shape.num_frames, shape.height, shape.width)
            if any(size % step for size, step in zip(sizes, patch, strict=True)):
                fits = [
                    max(1, round(size / step)) * step
                    for size, step in zip(sizes, patch, strict=True)
                ]
                raise RecipeError(
                    f"data.buckets: latents of {_words(sizes)} do not divide into Wan's patches of "
                    f"{_words(patch)}. The nearest latents that do are {_words(fits)}: multiply "
                    "height and width by the codec's compression to get the bucket's."
                )

    def build(
        self, section: ModelSection, shapes: Sequence[LatentShape], text: TextEncoder
    ) -> nn.Module:
        """A `WanTransformer3DModel`; channels and text width follow from codec and encoder."""
        from diffusers import WanTransformer3DModel

        if text.embed_dim is None:
            raise RecipeError(
                'text.kind = "words" gives token ids, but Wan is conditioned on an encoder\'s '
                'prompt_embeds. Set text.kind = "transformers".'
            )
        channels = shapes[0].channels
        fitted = {"in_channels": channels, "out_channels": channels, "text_dim": text.embed_dim}
        if section.pretrained is not None:
            refuse_unused("model", {"config": section.config}, "model.pretrained brings its own")
            model = load_pretrained(WanTransformer3DModel, section.pretrained, section.subfolder)
        else:
            values = fitted | section.config
            model = construct("model.config", WanTransformer3DModel, values)
        _check_fits(model, fitted)
        whole: nn.Module = model.float()
        return whole

    def blocks(self, model: nn.Module) -> Sequence[nn.Module]:
        """The transformer blocks."""
        blocks: Any = model.blocks
        return list(blocks)

    def num_tokens(self, model: nn.Module, shape: LatentShape) -> int:
        """One per patch."""
        config: Any = model.config
        patch: tuple[int, ...] = config.patch_size
        return math.prod(shape[1:]) // math.prod(patch)

    def predict_velocity(
        self, model: nn.Module, noisy_latents: Tensor, sigmas: Tensor, conditioning: Conditioning
    ) -> Tensor:
        """[B, C, F, H, W]."""
        with warnings.catch_warnings():
            # Under autocast Wan's norms take bf16 inputs and fp32 weights, for which torch has no
            # fused kernel. It says so at every launch; nobody can do anything about it.
            warnings.filterwarnings("ignore", "Mismatch dtype between input and weight")
            velocity: Tensor = model(
                hidden_states=noisy_latents,
                timestep=sigmas * 1000,
                encoder_hidden_states=conditioning["prompt_embeds"],
                return_dict=False,
            )[0]
        return velocity

    def export(
        self, model: nn.Module, codec: Codec, text: TextEncoder, shift: float, folder: Path
    ) -> None:
        """A `WanPipeline` folder; sample it with the recipe's `max_tokens`.

        The scheduler is the one that Wan's releases bring: its steps visit the sigmas of
        `build_sigmas`, where FlowMatchEulerDiscreteScheduler's own would shift twice.
        """
        from diffusers import UniPCMultistepScheduler, WanPipeline

        if not isinstance(codec, AutoencoderCodec) or not isinstance(text, TransformersText):
            raise RecipeError(
                "A WanPipeline needs an autoencoder and a transformers text encoder; this run has "
                f"{type(codec).__name__} and {type(text).__name__}. `longtake sample` samples it."
            )
        pipeline = WanPipeline(
            tokenizer=text.tokenizer,
            text_encoder=text.encoder,
            vae=codec.autoencoder,
            scheduler=UniPCMultistepScheduler(
                prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=shift
            ),
            transformer=model,
        )
        with quiet(model), quiet(text.encoder):
            pipeline.save_pretrained(folder)


def _patch_size(section: ModelSection) -> tuple[int, ...]:
    patch = section.config.get("patch_size", _PATCH)
    is_list = isinstance(patch, list | tuple) and len(patch) == len(_PATCH)
    if not is_list or not all(isinstance(step, int) and step > 0 for step in patch):
        raise RecipeError(
            f"model.config.patch_size = {patch!r}: expected frames, rows and columns, such as "
            f"{list(_PATCH)}."
        )
    return tuple(patch)


def _words(sizes: Sequence[int]) -> str:
    return f"{sizes[0]} frames of {sizes[2]}x{sizes[1]}"


def _check_fits(model: Any, fitted: dict[str, int]) -> None:
    """Refuse a transformer that takes other latents or captions than it will be given."""
    for name, expected in fitted.items():
        if model.config[name] != expected:
            raise RecipeError(
                f"The transformer's {name} is {model.config[name]}, but codec and text encoder "
                f"give {expected}. Use the codec and text encoder that belong to it."
            )
