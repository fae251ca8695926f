"""Qwen-Image: diffusers' `QwenImageTransformer2DModel`, called as its pipeline does."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from longtake.config import ModelSection
from longtake.errors import RecipeError
from longtake.models import base, codec, diffusers_family, flux, pretrained
from longtake.models.base import LatentShape
from longtake.models.diffusers_family import DiffusersBlocks
from longtake.models.text import TextEncoder
from longtake.models.text_contract import TextContract
from longtake.parallel.context_parallel import TokenSharing

_PATCH = 4  # latent pixels of one token, 2 x 2

VARIANTS = {
    "use_layer3d_rope": "Qwen-Image-Layered's",
    "use_additional_t_cond": "Qwen-Image-Layered's",
    "guidance_embeds": "distilled for guidance, which diffusers' own forward pass does not accept",
}
_EDITS = {"zero_cond_t": "Qwen-Image-Edit-2511's, which edits a picture (qwen_image_edit_plus)"}


class QwenText(TextContract):
    """How Qwen-Image encodes text: a Qwen2.5-VL's embeddings of a templated caption, unpadded."""

    def encode(
        self, pipeline: Any, captions: list[str], max_tokens: int, pictures: Mapping[str, Tensor]
    ) -> base.Conditioning:
        embeds, counts = pipeline.encode_prompt(captions, max_sequence_length=max_tokens)
        # diffusers returns no mask where no text of the batch has padding.
        lengths = [embeds.shape[1]] * len(embeds) if counts is None else counts.sum(1).tolist()
        texts = [text[:length] for text, length in zip(embeds, lengths, strict=True)]
        return diffusers_family.pad_texts(texts, max_tokens)


def _share_tokens(model: Any, sharing: TokenSharing) -> None:
    """Split each sample's text tokens and image tokens between ranks (context parallelism)."""

    def count_text(_: nn.Module, args: Any, inputs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        # Positions are computed for the whole text, of which a rank has only a part.
        return args, inputs | {"max_txt_seq_len": sharing.total(0)}

    def cut_index(_: nn.Module, args: Any, inputs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        # `modulate_index` [B, N] marks the references among the image tokens. The transformer
        # makes it from `img_shapes`, and passes it by position where blocks are recomputed.
        name = "modulate_index"
        if name in inputs:
            return args, inputs | {name: sharing.cut(inputs[name], 1)}
        return (*args[:-1], sharing.cut(args[-1], 1)), inputs

    lengths = ("encoder_hidden_states", "hidden_states")
    dims = dict.fromkeys((*lengths, "encoder_hidden_states_mask"), 1)
    diffusers_family.share_inputs(model, sharing, dims, lengths)
    model.pos_embed.register_forward_pre_hook(count_text, with_kwargs=True)
    diffusers_family.cut_outputs(model.pos_embed, sharing, 0)  # the images' and the text's
    for block in model.transformer_blocks:
        diffusers_family.share_attention(block.attn, sharing)
        if model.zero_cond_t:
            block.register_forward_pre_hook(cut_index, with_kwargs=True)


class QwenImage(diffusers_family.DiffusersFamily):
    """Text-to-image family; conditioned on `prompt_embeds`, whose padding is cut off or masked.

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
    text = QwenText(
        has_lengths=True,
        template_tokens=34 + 5,  # those that the pipeline drops, and those that end a caption
        arguments={"output_hidden_states": True},
    )
    block = DiffusersBlocks(
        joins_text=True,
        untrained=(  # what only the text of the last block is made of
            "transformer_blocks.{last}.attn.add_q_proj.*",
            "transformer_blocks.{last}.attn.to_add_out.*",
            "transformer_blocks.{last}.attn.norm_added_q.*",
            "transformer_blocks.{last}.txt_mlp.*",
        ),
        share=_share_tokens,
    )
    makes_videos = False
    channel_ratios: ClassVar[tuple[float, ...]] = (_PATCH,)
    other_models: ClassVar[Mapping[str, str]] = {**VARIANTS, **_EDITS}
    """Descriptions of other models that have Qwen-Image's class, by the config setting that marks
    them."""
    guidance_scale = 4.0
    num_inference_steps = 50

    def fitted_config(self, channels: int, text: TextEncoder) -> dict[str, int]:
        width = self.single_embed_dim(text)
        sizes = {"in_channels": channels * _PATCH, "out_channels": channels}
        return sizes | {"joint_attention_dim": width}

    def check_config(self, config: Any) -> None:
        for name, means in self.other_models.items():
            if config.get(name):
                raise RecipeError(
                    f"The transformer's {name} is set: it is {means}. This family trains "
                    f"{self.label} without it."
                )

    def adapt(
        self, model: Any, section: ModelSection, shapes: Sequence[LatentShape], text: TextEncoder
    ) -> None:
        model.pos_embed = Positions(model.pos_embed)

    def call(
        self, model: Any, noisy_latents: Tensor, timesteps: Tensor, conditioning: base.Conditioning
    ) -> diffusers_family.TransformerCall:
        """Prepare a call of Qwen-Image with the noisy image's tokens, then each reference's."""
        height, width = noisy_latents.shape[-2:]
        prompt, counts = diffusers_family.cut_texts(
            conditioning["prompt_embeds"], conditioning["prompt_length"]
        )
        images = [noisy_latents, *self.inputs.pictures(conditioning)]
        # Packed one by one: references may have other sizes than the noisy image.
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

    def guided(self, conditional: Tensor, unconditional: Tensor, scale: float) -> Tensor:
        """Rescale each token of guided velocities to its conditional norm, as the pipeline."""
        tokens = flux.pack(super().guided(conditional, unconditional, scale))
        lengths = flux.pack(conditional).norm(dim=-1, keepdim=True)
        scaled = tokens * (lengths / tokens.norm(dim=-1, keepdim=True))
        return flux.unpack(scaled, *conditional.shape[-2:])


class Positions(nn.Module):
    """Replacement of `QwenEmbedRope` that caches no tables: a plan's have no values.

    Legend: N tokens, d width of a head.
    """

    def __init__(self, rope: Any) -> None:
        super().__init__()
        self.theta, self.widths = rope.theta, rope.axes_dim

    def forward(
        self, shapes: Any, max_txt_seq_len: int, device: torch.device
    ) -> tuple[Tensor, Tensor]:
        """Return complex rotations [N, d / 2] of the image tokens' and text tokens' positions."""
        pictures, behind = [], 0
        for number, (frames, rows, columns) in enumerate(shapes[0]):
            # Rows and columns are centred on 0; the first axis is the number of the image.
            starts = (number, -(rows - rows // 2), -(columns - columns // 2))
            axes = zip(starts, (frames, rows, columns), strict=True)
            each = (torch.arange(start, start + size, device=device) for start, size in axes)
            pictures.append(self._rotations(torch.cartesian_prod(*each)))
            behind = max(behind, rows // 2, columns // 2)
        # As in the class that this one replaces: the text follows the largest image on all three
        # axes.
        text = torch.arange(behind, behind + max_txt_seq_len, device=device)
        return torch.cat(pictures), self._rotations(text[:, None].expand(-1, 3))

    def _rotations(self, places: Tensor) -> Tensor:
        angles = []
        for place, width in zip(places.unbind(1), self.widths, strict=True):
            exponents = torch.arange(0, width, 2, device=places.device).float().div(width)
            angles.append(torch.outer(place, 1.0 / torch.pow(self.theta, exponents)))
        angle = torch.cat(angles, dim=1)
        return torch.polar(torch.ones_like(angle), angle)
