"""FLUX.1: diffusers' `FluxTransformer2DModel`, asked for images as FLUX's own pipelines ask it.

Legend: B batch, C latent channels, H and W latent rows and columns, N tokens of a picture, T text
tokens, D width of a token.
"""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from longtake.config import ModelSection, Shift
from longtake.errors import ModelError, RecipeError
from longtake.models.architecture import build_transformer, read_release
from longtake.models.codec import Codec
from longtake.models.defaults import Defaults, scheduler_shift
from longtake.models.family import Conditioning, LatentShape
from longtake.models.flux_tokens import PACK, pack, picture_ids, unpack
from longtake.models.image_codec import ImageCodec
from longtake.models.precision import mixed_norms
from longtake.models.pretrained import quiet
from longtake.models.shared_attention import share_attention
from longtake.models.text import PooledText, TextEncoder
from longtake.models.unfilled import Weights
from longtake.parallel.context_parallel import TokenSharing

_DYNAMIC_SHIFT: dict[str, Any] = {
    "shift": 3.0,
    "use_dynamic_shifting": True,
    "base_image_seq_len": 256,
    "base_shift": 0.5,
    "max_image_seq_len": 4096,
    "max_shift": 1.15,
}
"""Of FLUX.1-dev's scheduler_config.json; the same rule as `flow.timesteps.flux_mu`."""


class Flux:
    """Text to image; conditioned on `prompt_embeds` and `pooled_prompt_embeds`.

    FLUX's velocity has longtake's sign (noise - latents), and its timestep is sigma. The released
    FLUX.1-dev is distilled: it is told a guidance scale and needs no second pass.
    """

    references: tuple[str, ...] = ()
    lora_targets: tuple[str, ...] = ("to_q", "to_k", "to_v", "to_out.0")
    _pipeline = "FluxPipeline"
    _guidance_scale = 3.5

    def patch(self, section: ModelSection) -> tuple[int, ...]:
        """2 rows and columns."""
        return 1, PACK, PACK

    def check(self, section: ModelSection, shapes: Sequence[LatentShape]) -> None:
        """Single images, whose latents divide into tokens of 2 x 2."""
        for shape in shapes:
            if shape.num_frames != 1:
                raise RecipeError(
                    f"data.buckets: FLUX makes images, not videos, but a bucket has "
                    f"{shape.num_frames} frames. Set num_frames = 1."
                )
            if shape.height % PACK or shape.width % PACK:
                height, width = (_nearest_even(size) for size in (shape.height, shape.width))
                raise RecipeError(
                    f"data.buckets: latents of {shape.width}x{shape.height} do not divide into "
                    f"FLUX's tokens of {PACK}x{PACK}. The nearest latents that do are {width}x"
                    f"{height}: multiply height and width by the codec's compression to get the "
                    "bucket's."
                )

    def build(
        self,
        section: ModelSection,
        shapes: Sequence[LatentShape],
        text: TextEncoder,
        *,
        weights: Weights = True,
    ) -> nn.Module:
        """A `FluxTransformer2DModel`; its channels and widths follow from codec and encoders."""
        from diffusers import FluxTransformer2DModel

        if text.embed_dim is None or text.pooled_dim is None:
            raise RecipeError(
                "FLUX is conditioned on two text encoders, the second of which gives one vector "
                'for a whole caption. Set text.kind = "transformers" and add a section '
                "[text.pooled]."
            )
        fitted = {
            "in_channels": shapes[0].channels * PACK**2,
            "joint_attention_dim": text.embed_dim,
            "pooled_projection_dim": text.pooled_dim,
        }
        model = build_transformer(FluxTransformer2DModel, section, fitted, weights=weights)
        _check_config(model.config)
        return model

    def blocks(self, model: nn.Module) -> Sequence[nn.Module]:
        flux: Any = model
        return [*flux.transformer_blocks, *flux.single_transformer_blocks]

    def call_blocks_by(self, model: nn.Module, call: Callable[..., Any]) -> None:
        model.enable_gradient_checkpointing(call)  # type: ignore[operator]

    def share_tokens(self, model: nn.Module, sharing: TokenSharing) -> None:
        """The text's, and those of all pictures: each rank has some of both."""
        flux: Any = model
        flux.register_forward_pre_hook(partial(_cut_inputs, sharing), with_kwargs=True)
        for block in self.blocks(model):
            share_attention(block.attn, sharing)  # type: ignore[arg-type]
        flux.proj_out.register_forward_hook(lambda _module, _args, part: sharing.gather(part, 1))

    def num_heads(self, model: nn.Module) -> int:
        config: Any = model.config
        return int(config.num_attention_heads)

    def width(self, model: nn.Module) -> int:
        config: Any = model.config
        return int(config.num_attention_heads * config.attention_head_dim)

    def block_tokens(self, output: Any) -> Tensor:
        """The second of the two streams that every block returns; the first is the text's."""
        _, tokens = output
        return tokens  # type: ignore[no-any-return]

    def with_tokens(self, output: Any, tokens: Tensor) -> Any:
        text, _ = output
        return text, tokens

    def num_tokens(self, model: nn.Module, shape: LatentShape) -> int:
        """One for each 2 x 2 latent pixels; those of references do not count."""
        return (shape.height // PACK) * (shape.width // PACK)

    def sequence_length(
        self, model: nn.Module, shape: LatentShape, conditioning: Conditioning
    ) -> int:
        pictures = [shape[2:], *(conditioning[f"{n}_latents"].shape[-2:] for n in self.references)]
        num_text = conditioning["prompt_embeds"].shape[1]
        return num_text + sum((rows // PACK) * (columns // PACK) for rows, columns in pictures)

    def defaults(self, section: ModelSection) -> Defaults:
        """Those of FLUX.1-dev and Kontext, of FLUX.1-schnell, or of a model that is not distilled.

        Schnell has no guidance embedding and a scheduler with the static shift 1.
        """
        release = read_release(section)
        shift = scheduler_shift(release.scheduler, otherwise="flux")
        if release.config.get("guidance_embeds"):
            return Defaults(
                shift, self._guidance_scale, num_inference_steps=28, caption_dropout=0.0
            )
        if section.pretrained is None or shift == "flux":
            return Defaults(shift, guidance_scale=5.0, num_inference_steps=28)
        return Defaults(
            shift, guidance_scale=1.0, num_inference_steps=4, caption_dropout=0.0, max_tokens=256
        )

    def distils_guidance(self, model: nn.Module) -> bool:
        """FLUX.1-dev and Kontext do; FLUX.1-schnell does not."""
        config: Any = model.config
        return bool(config.guidance_embeds)

    def predict_velocity(
        self, model: nn.Module, noisy_latents: Tensor, sigmas: Tensor, conditioning: Conditioning
    ) -> Tensor:
        """[B, C, 1, H, W]."""
        flux: Any = model
        prompt = conditioning["prompt_embeds"].to(flux.dtype)
        tokens, ids = self._picture_tokens(noisy_latents.to(flux.dtype), conditioning)
        with mixed_norms():
            velocity: Tensor = flux(
                hidden_states=tokens,
                timestep=sigmas,
                guidance=self._guidance(model, conditioning),
                pooled_projections=conditioning["pooled_prompt_embeds"].to(flux.dtype),
                encoder_hidden_states=prompt,
                txt_ids=ids.new_zeros(prompt.shape[1], 3),
                img_ids=ids,
                return_dict=False,
            )[0]
        *_, height, width = noisy_latents.shape
        noisy = velocity[:, : (height // PACK) * (width // PACK)]
        return unpack(noisy, height, width)

    def export(
        self,
        model: nn.Module,
        codec: Codec,
        text: TextEncoder,
        shift: Shift,
        bucket_shift: float,
        folder: Path,
    ) -> None:
        """A `FluxPipeline` folder, whose scheduler visits the sigmas of `build_sigmas`.

        The rule `flux` is written as the dynamic shifting of the released scheduler. Call the
        pipeline with max_sequence_length = the recipe's `text.max_tokens`.
        """
        import diffusers

        if not isinstance(codec, ImageCodec) or not isinstance(text, PooledText):
            raise RecipeError(
                f"A {self._pipeline} needs an AutoencoderKL and two transformers text encoders; "
                f"this run has {type(codec).__name__} and {type(text).__name__}. "
                "`longtake sample` samples it."
            )
        # The pipeline spaces its sigmas evenly; shifted once, they are those of build_sigmas.
        options = _DYNAMIC_SHIFT if shift == "flux" else {"shift": bucket_shift}
        pipeline = getattr(diffusers, self._pipeline)(
            scheduler=diffusers.FlowMatchEulerDiscreteScheduler(**options),
            vae=codec.autoencoder,
            text_encoder=text.pooled_encoder,
            tokenizer=text.pooled_tokenizer,
            text_encoder_2=text.encoder,
            tokenizer_2=text.tokenizer,
            transformer=model,
        )
        with quiet(model), quiet(text.encoder):
            pipeline.save_pretrained(folder)

    def comfyui_name(self, name: str, *, is_lora: bool) -> str:
        return f"{'transformer.' if is_lora else ''}{name}"

    def _picture_tokens(
        self, noisy_latents: Tensor, conditioning: Conditioning
    ) -> tuple[Tensor, Tensor]:
        """The tokens of all pictures, [B, N, 4 C], the noisy one's first, and their ids [N, 3]."""
        return pack(noisy_latents), picture_ids(noisy_latents, number=0)

    def _guidance(self, model: nn.Module, conditioning: Conditioning) -> Tensor | None:
        if not self.distils_guidance(model):
            return None
        if "guidance" not in conditioning:
            raise ModelError(
                "This FLUX is distilled for guidance, but its conditioning names no guidance scale "
                f"(it has {', '.join(conditioning)}). Add guidance [B], such as 3.5."
            )
        return conditioning["guidance"]


class FluxKontext(Flux):
    """From a text and a reference picture to an image; also needs `reference_latents`.

    The reference's tokens follow the noisy ones; the first of the three coordinates of their ids
    is 1 where it is 0 for the noisy ones.
    """

    references: tuple[str, ...] = ("reference",)
    _pipeline = "FluxKontextPipeline"
    _guidance_scale = 2.5

    def _picture_tokens(
        self, noisy_latents: Tensor, conditioning: Conditioning
    ) -> tuple[Tensor, Tensor]:
        if "reference_latents" not in conditioning:
            raise ModelError(
                "FLUX Kontext looks at a reference picture, but its conditioning has no "
                f"reference_latents (it has {', '.join(conditioning)}). Name the pictures in "
                "data.references.reference, and when sampling with --reference reference=FILE."
            )
        reference = conditioning["reference_latents"].to(noisy_latents)
        tokens = torch.cat([pack(noisy_latents), pack(reference)], dim=1)
        ids = [picture_ids(noisy_latents, number=0), picture_ids(reference, number=1)]
        return tokens, torch.cat(ids)


def _cut_inputs(
    sharing: TokenSharing, _model: nn.Module, args: Any, given: dict[str, Any]
) -> tuple[Any, dict[str, Any]]:
    rows = {"encoder_hidden_states": 1, "txt_ids": 0, "hidden_states": 1, "img_ids": 0}
    sharing.begin(given["encoder_hidden_states"].shape[1], given["hidden_states"].shape[1])
    return args, given | {name: sharing.cut(given[name], dim) for name, dim in rows.items()}


def _nearest_even(size: int) -> int:
    return max(1, round(size / PACK)) * PACK


def _check_config(config: Any) -> None:
    """Refuse what diffusers takes, and then fails on at the first step."""
    axes, head = tuple(config.axes_dims_rope), config.attention_head_dim
    if sum(axes) != head:
        raise RecipeError(
            f"model.config.axes_dims_rope {list(axes)} adds up to {sum(axes)}, but "
            f"attention_head_dim is {head}. They must be equal; FLUX.1 has [16, 56, 56] and 128."
        )
    if config.out_channels not in (None, config.in_channels) or config.patch_size != 1:
        raise RecipeError(
            f"model.config: out_channels {config.out_channels} and patch_size {config.patch_size} "
            f"give another latent than the codec's. Leave them out."
        )
