"""Qwen-Image: diffusers' `QwenImageTransformer2DModel`, called as its pipeline does."""

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from longtake.config import ModelSection
from longtake.errors import RecipeError
from longtake.models import base, codec, deferred_init, diffusers_family, flux, pretrained
from longtake.models.text import TextEncoder
from longtake.parallel.context_parallel import TokenSharing

_PATCH = 4  # latent pixels of one token, 2 x 2

VARIANTS = {
    "use_layer3d_rope": "Qwen-Image-Layered's",
    "use_additional_t_cond": "Qwen-Image-Layered's",
    "guidance_embeds": "distilled for guidance, which diffusers' own forward pass does not accept",
}
_EDITS = {"zero_cond_t": "Qwen-Image-Edit-2511's, which edits a picture (qwen_image_edit_plus)"}


class QwenImage(diffusers_family.DiffusersFamily):
    """Text to image; conditioned on `prompt_embeds`, whose padding is cut off or masked.

    Its velocity has longtake's sign (noise - latents), and its timestep is sigma.
    """

    frozen = pretrained.FrozenParts(
        codec=pretrained.PipelinePart(("AutoencoderKLQwenImage",), "vae"),
        text=pretrained.PipelinePart(
            ("Qwen2_5_VLForConditionalGeneration",), "text_encoder", "tokenizer"
        ),
        has_random_text=False,
    )
    label = "Qwen-Image"
    transformer_class, pipeline_class = "QwenImageTransformer2DModel", "QwenImagePipeline"
    codec_class = codec.AutoencoderCodec
    parts = "an AutoencoderKLQwenImage and a Qwen2.5-VL"
    untrained: ClassVar[tuple[str, ...]] = (  # what only the text of the last block is made of
        *(f"transformer_blocks.{{last}}.attn.{name}.*" for name in ("add_q_proj", "to_add_out")),
        "transformer_blocks.{last}.attn.norm_added_q.*",
        "transformer_blocks.{last}.txt_mlp.*",
    )
    makes_videos = False
    has_text_lengths = True
    channel_ratios: ClassVar[tuple[float, ...]] = (_PATCH,)
    template_tokens = 34 + 5
    """Around a caption: those that the pipeline drops, and those that end it."""
    other_models: ClassVar[Mapping[str, str]] = {**VARIANTS, **_EDITS}
    """By settings of the transformer's class, the models that have them and are none of this."""
    guidance_scale = 4.0
    num_inference_steps = 50

    def fitted_config(self, channels: int, text: TextEncoder) -> dict[str, int]:
        if text.embed_dim is None or text.pooled_dim is not None:
            raise RecipeError(
                f"{self.label} is conditioned on the prompt_embeds of one text encoder, a "
                'Qwen2.5-VL. Set text.kind = "transformers", and leave out text.pooled.'
            )
        return {
            "in_channels": channels * _PATCH,
            "out_channels": channels,
            "joint_attention_dim": text.embed_dim,
        }

    def check_config(self, config: Any) -> None:
        for name, means in self.other_models.items():
            if config.get(name):
                raise RecipeError(
                    f"The transformer's {name} is set: it is {means}. This family trains "
                    f"{self.label} without it."
                )

    def build(
        self,
        section: ModelSection,
        shapes: Sequence[base.LatentShape],
        text: TextEncoder,
        *,
        weights: deferred_init.Weights = True,
    ) -> nn.Module:
        model: Any = super().build(section, shapes, text, weights=weights)
        model.pos_embed = Positions(model.pos_embed)
        built: nn.Module = model
        return built

    def encode_text(
        self, pipeline: Any, captions: list[str], max_tokens: int, pictures: Mapping[str, Tensor]
    ) -> base.Conditioning:
        embeds, counts = pipeline.encode_prompt(captions, max_sequence_length=max_tokens)
        lengths = [embeds.shape[1]] * len(embeds) if counts is None else counts.sum(1).tolist()
        texts = [each[:length] for each, length in zip(embeds, lengths, strict=True)]
        return diffusers_family.pad_texts(texts, max_tokens)

    def call(
        self, model: Any, noisy_latents: Tensor, timesteps: Tensor, conditioning: base.Conditioning
    ) -> diffusers_family.TransformerCall:
        """The noisy tokens come first; then those of each reference."""
        height, width = noisy_latents.shape[-2:]
        prompt, counts = diffusers_family.cut_texts(
            conditioning["prompt_embeds"], conditioning["prompt_length"]
        )
        images = [noisy_latents, *self.pictures(conditioning)]
        tokens = [flux.pack(image.to(noisy_latents)) for image in images]
        inputs = {
            "hidden_states": torch.cat(tokens, dim=1),
            "timestep": timesteps,
            "encoder_hidden_states": prompt.to(noisy_latents.dtype),
            "encoder_hidden_states_mask": counts,
            "img_shapes": [[(1, *(size // 2 for size in each.shape[-2:])) for each in images]]
            * len(prompt),
        }
        num_noisy = tokens[0].shape[1]
        return diffusers_family.TransformerCall(
            inputs, lambda out: flux.unpack(out[:, :num_noisy], height, width)
        )

    def run_encoders(
        self, encoders: Mapping[str, nn.Module], max_tokens: Mapping[str, int]
    ) -> None:
        for folder, length in max_tokens.items():
            ids = torch.ones(1, length + self.template_tokens, dtype=torch.long)
            encoders[folder](ids, torch.ones_like(ids), output_hidden_states=True)

    def guided(self, conditional: Tensor, unconditional: Tensor, scale: float) -> Tensor:
        """Each token is as long as the conditional one."""
        tokens = flux.pack(super().guided(conditional, unconditional, scale))
        lengths = flux.pack(conditional).norm(dim=-1, keepdim=True)
        scaled = tokens * (lengths / tokens.norm(dim=-1, keepdim=True))
        return flux.unpack(scaled, *conditional.shape[-2:])

    def sequence_length(
        self, model: nn.Module, shape: base.LatentShape, conditioning: base.Conditioning
    ) -> int:
        pixels = sum(math.prod(each.shape[-2:]) for each in self.pictures(conditioning))
        text = conditioning["prompt_embeds"].shape[1]
        return text + self.num_tokens(model, shape) + pixels // _PATCH

    def share_tokens(self, model: nn.Module, sharing: TokenSharing) -> None:
        """Each rank has some of the text's tokens and some of the images'."""
        qwen: Any = model
        qwen.register_forward_pre_hook(partial(_cut_inputs, sharing), with_kwargs=True)
        qwen.pos_embed.register_forward_pre_hook(partial(_count_text, sharing), with_kwargs=True)
        qwen.pos_embed.register_forward_hook(partial(_cut_positions, sharing))
        for block in qwen.transformer_blocks:
            diffusers_family.share_attention(block.attn, sharing)
            if qwen.zero_cond_t:
                block.register_forward_pre_hook(partial(_cut_index, sharing), with_kwargs=True)
        qwen.proj_out.register_forward_hook(lambda _module, _args, part: sharing.gather(part, 1))


class Positions(nn.Module):
    """What `QwenEmbedRope` computes, without tables that are kept: a plan's have no values.

    Legend: N tokens, d width of a head.
    """

    def __init__(self, rope: Any) -> None:
        super().__init__()
        self.theta, self.widths = rope.theta, rope.axes_dim

    def forward(
        self, shapes: Any, max_txt_seq_len: int, device: torch.device
    ) -> tuple[Tensor, Tensor]:
        """Complex [N, d / 2] of the pictures' tokens, and of the text's, which lie behind them."""
        pictures, behind = [], 0
        for number, (frames, rows, columns) in enumerate(shapes[0]):
            starts = (number, -(rows - rows // 2), -(columns - columns // 2))
            axes = zip(starts, (frames, rows, columns), strict=True)
            each = (torch.arange(start, start + size, device=device) for start, size in axes)
            pictures.append(self._rotations(torch.cartesian_prod(*each)))
            behind = max(behind, rows // 2, columns // 2)
        text = torch.arange(behind, behind + max_txt_seq_len, device=device)
        return torch.cat(pictures), self._rotations(text[:, None].expand(-1, 3))

    def _rotations(self, places: Tensor) -> Tensor:
        angles = []
        for place, width in zip(places.unbind(1), self.widths, strict=True):
            exponents = torch.arange(0, width, 2, device=places.device).float().div(width)
            angles.append(torch.outer(place, 1.0 / torch.pow(self.theta, exponents)))
        angle = torch.cat(angles, dim=1)
        return torch.polar(torch.ones_like(angle), angle)


def _cut_inputs(
    sharing: TokenSharing, _model: nn.Module, args: Any, given: dict[str, Any]
) -> tuple[Any, dict[str, Any]]:
    names = ("encoder_hidden_states", "encoder_hidden_states_mask", "hidden_states")
    sharing.begin(given[names[0]].shape[1], given[names[2]].shape[1])
    cut = {name: sharing.cut(given[name], 1) for name in names if given[name] is not None}
    return args, given | cut


def _count_text(
    sharing: TokenSharing, _module: nn.Module, args: Any, given: dict[str, Any]
) -> tuple[Any, dict[str, Any]]:
    return args, given | {"max_txt_seq_len": sharing.total(0)}


def _cut_index(
    sharing: TokenSharing, _block: nn.Module, args: Any, given: dict[str, Any]
) -> tuple[Any, dict[str, Any]]:
    """Which of the images' tokens are references', [B, N]; positional where blocks are recomputed.

    It is no input of the transformer, which makes it of `img_shapes`.
    """
    name = "modulate_index"
    if name in given:
        return args, given | {name: sharing.cut(given[name], 1)}
    return (*args[:-1], sharing.cut(args[-1], 1)), given


def _cut_positions(
    sharing: TokenSharing, _module: nn.Module, _args: object, tables: tuple[Tensor, ...]
) -> tuple[Tensor, ...]:
    """The images' and the text's."""
    return tuple(sharing.cut(table, 0) for table in tables)
