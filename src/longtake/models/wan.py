"""Wan 2.1: diffusers' `WanTransformer3DModel` at any size."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from longtake.config import ModelSection
from longtake.errors import RecipeError
from longtake.models.codec import AutoencoderCodec, Codec
from longtake.models.family import Conditioning, LatentShape
from longtake.models.pretrained import check_arguments, load_pretrained
from longtake.models.text import TextEncoder, TransformersText

_PATCH = (1, 2, 2)


class Wan:
    """Text to video; conditioned on a transformers encoder's `prompt_embeds`.

    Wan's velocity has longtake's sign (noise - latents); its timesteps are 1000 sigma.
    """

    def check(self, section: ModelSection, shapes: Sequence[LatentShape]) -> None:
        """Latent height and width must divide into patches."""
        patch = tuple(section.config.get("patch_size", _PATCH))
        for shape in shapes:
            sizes = (shape.num_frames, shape.height, shape.width)
            if any(size % step for size, step in zip(sizes, patch, strict=True)):
                raise RecipeError(
                    f"data.buckets: latents of {shape.num_frames} frames, {shape.height} rows and "
                    f"{shape.width} columns do not divide into Wan's patches of {patch}. Choose a "
                    f"width and height that are multiples of {patch[1]} x the codec's compression."
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
        if section.pretrained is not None:
            model: nn.Module = load_pretrained(
                WanTransformer3DModel, section.pretrained, section.subfolder
            )
            return model.float()
        channels = shapes[0].channels
        fitted = {"in_channels": channels, "out_channels": channels, "text_dim": text.embed_dim}
        check_arguments("model.config", WanTransformer3DModel.__init__, section.config)
        built: nn.Module = WanTransformer3DModel(**(fitted | section.config))
        return built

    def blocks(self, model: nn.Module) -> Sequence[nn.Module]:
        """The transformer blocks."""
        blocks: Any = model.blocks
        return list(blocks)

    def predict_velocity(
        self, model: nn.Module, noisy_latents: Tensor, sigmas: Tensor, conditioning: Conditioning
    ) -> Tensor:
        """[B, C, F, H, W]."""
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
        """A `WanPipeline` folder."""
        from diffusers import FlowMatchEulerDiscreteScheduler, WanPipeline

        if not isinstance(codec, AutoencoderCodec) or not isinstance(text, TransformersText):
            raise RecipeError(
                "A WanPipeline needs an autoencoder and a transformers text encoder; this run has "
                f"{type(codec).__name__} and {type(text).__name__}. `longtake sample` samples it."
            )
        pipeline = WanPipeline(
            tokenizer=text.tokenizer,
            text_encoder=text.encoder,
            vae=codec.autoencoder,
            scheduler=FlowMatchEulerDiscreteScheduler(shift=shift),
            transformer=model,
        )
        pipeline.save_pretrained(folder)
