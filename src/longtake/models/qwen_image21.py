"""Qwen-Image 2.1: diffusers' `QwenImage21Transformer2DModel`, called as its pipeline does.

Legend: B batch, T tokens of a text, N of the image, S both, D width, H heads, d width of a head.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from longtake.config import ModelSection
from longtake.errors import ModelError, RecipeError
from longtake.models import base, codec, diffusers_family, pretrained, qwen_image, qwen_image_edit
from longtake.models.base import LatentShape
from longtake.models.diffusers_family import DiffusersBlocks
from longtake.models.text import TextEncoder
from longtake.parallel.context_parallel import TokenSharing

_SIDE = 2  # rows and columns of tokens that share a place of the text encoder
_REFERENCES = ("reference", *qwen_image_edit.MORE_REFERENCES)


@dataclass(frozen=True)
class QwenText21(qwen_image_edit.EditText):
    """How Qwen-Image 2.1 encodes text: a Qwen3-VL's last layer before its norm, caption by caption.

    A text has the tokens around the caption too, apart from the system message, and before them
    places of the pictures, which `prompt_places` marks [B, T] for the transformer.
    """

    def encode(
        self, pipeline: Any, captions: list[str], max_tokens: int, pictures: Mapping[str, Tensor]
    ) -> base.Conditioning:
        sizes = [(each.shape[-2], each.shape[-1]) for each in pictures.values()]
        longest = max_tokens + self.picture_tokens(pipeline.processor, sizes)
        texts, places = [], []
        for row, caption in enumerate(captions):
            seen = [self.resized(each[row]) for each in pictures.values()]
            embeds, _, marks = pipeline.encode_prompt(caption, seen or None)
            texts.append(embeds[0, :longest])
            places.append(F.pad(marks[0, :longest], (0, max(0, longest - marks.shape[1]))))
        return diffusers_family.pad_texts(texts, longest) | {"prompt_places": torch.stack(places)}

    def outline(self, encoders: Mapping[str, nn.Module], max_tokens: int) -> base.Conditioning:
        places = torch.empty(1, max_tokens, dtype=torch.bool, device="meta")
        return super().outline(encoders, max_tokens) | {"prompt_places": places}

    def load_processor(self, where: str, subfolder: str) -> Any:
        return qwen_image_edit.load_processor("Qwen3VLProcessor", where, subfolder)


class _Picture(NamedTuple):
    """A reference picture in the sequence."""

    start: int  # of its places in the text
    tokens: Tensor  # [B, N, C]
    size: tuple[int, int]  # rows and columns of tokens

    @property
    def num_places(self) -> int:
        return self.tokens.shape[1] // _SIDE**2


class _Segment(NamedTuple):
    """A part of the sequence before the image: of the text, or a picture."""

    start: int
    end: int
    is_text: bool


class _Attention:
    """Attention processor: text attends to earlier tokens, a picture also to all of its own.

    The image, which is last, attends to all tokens.

    Each sample has rotations of its own, because its image comes behind its own text. diffusers'
    processor has one table for a batch, in which padding moves the images of shorter texts.
    """

    def __init__(self, sharing: TokenSharing | None = None) -> None:
        self._sharing = sharing

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        attention_mask: Tensor | None,
        rotary_emb: Tensor,
        segments: Sequence[_Segment],
        **_without_effect: Any,
    ) -> Tensor:
        """Attend with a mask [B, 1, 1, S] of the image's keys."""
        query, key, value = (
            to(hidden_states).reshape(*hidden_states.shape[:2], attn.heads, -1)
            for to in (attn.to_q, attn.to_k, attn.to_v)
        )
        query, key = (
            _rotated(norm(each), rotary_emb).to(value.dtype)
            for norm, each in ((attn.norm_q, query), (attn.norm_k, key))
        )
        heads = [each.transpose(1, 2) for each in (query, key, value)]
        if self._sharing is None:
            mixed = _attend(heads, attention_mask, segments)
        else:
            # Tokens of all ranks, for this rank's heads.
            heads = list(self._sharing.to_heads(torch.stack(heads)).unbind())
            mixed = self._sharing.to_tokens(_attend(heads, attention_mask, segments)[None])[0]
        joined: Tensor = attn.to_out[0](mixed.transpose(1, 2).flatten(2).to(value.dtype))
        return joined


def _rotated(heads: Tensor, rotations: Tensor) -> Tensor:
    """Rotate heads [B, S, H, d] by complex numbers [B, S, 1, d / 2], in fp32."""
    pairs = torch.view_as_complex(heads.float().reshape(*heads.shape[:3], -1, 2))
    return torch.view_as_real(pairs * rotations).flatten(3)


def _attend(heads: Sequence[Tensor], mask: Tensor | None, segments: Sequence[_Segment]) -> Tensor:
    """Return attention's output, for queries, keys and values [B, H, S, d]."""
    query, key, value = heads
    mixed = []
    for start, end, is_text in segments:
        part = (query[:, :, start:end], key[:, :, :end], value[:, :, :end])
        # Padding is behind a text, so that none of its tokens attends to it.
        earlier = None
        if is_text and start:
            earlier = query.new_ones(end - start, end, dtype=torch.bool).tril(start)
        causal = is_text and not start
        mixed.append(F.scaled_dot_product_attention(*part, attn_mask=earlier, is_causal=causal))
    image = query[:, :, segments[-1].end :]
    mixed.append(F.scaled_dot_product_attention(image, key, value, attn_mask=mask))
    return torch.cat(mixed, dim=2)


class _Positions(qwen_image.Positions):
    """Replacement of `QwenImage21Rope`, which reads the values of a mask."""

    def __call__(
        self,
        lengths: Tensor,
        num_text: int,
        pictures: Sequence[_Picture],
        size: tuple[int, int],
    ) -> Tensor:
        """Return rotations [B, S, 1, d / 2] for texts of these lengths [B] before an image.

        A text's tokens count on all three axes. A picture's stand at the number that is reached on
        the first, and on rows and columns that are centred on 0; after them the text counts on by
        the longer side.
        """
        count, device = len(lengths), lengths.device
        places, reached, done = [], 0, 0
        for each in pictures:
            end = reached + each.start - done
            places += [_counted(reached, end, device), _grid(each.size, device)]
            places[-1][:, 0] = end
            reached, done = end + max(each.size), each.start + each.num_places
        end = reached + num_text - done
        places.append(_counted(reached, end, device))
        prefix = torch.cat(places)[None].expand(count, -1, -1)
        image = _grid(size, device)[None].repeat(count, 1, 1)
        # Padding does not count: each sample's image stands behind its own text.
        image[:, :, 0] = (end - num_text + lengths)[:, None]
        joint = torch.cat([prefix, image], dim=1)
        rotations = self._rotations(joint.flatten(0, 1))
        return rotations.reshape(count, joint.shape[1], 1, -1)


def _counted(first: int, end: int, device: torch.device) -> Tensor:
    return torch.arange(first, end, device=device)[:, None].expand(-1, 3)


def _grid(size: tuple[int, int], device: torch.device) -> Tensor:
    """Return places [N, 3] of an image's tokens, of which the first axis is 0."""
    rows, columns = (torch.arange(-(n - n // 2), n // 2, device=device) for n in size)
    return torch.cartesian_prod(rows.new_zeros(1), rows, columns)


def _forward(
    model: Any,
    sharing: TokenSharing | None,
    *,
    hidden_states: Tensor,
    encoder_hidden_states: Tensor,
    timestep: Tensor,
    lengths: Tensor,
    known: Tensor | None,
    pictures: Sequence[_Picture],
    size: tuple[int, int],
    return_dict: bool = False,
) -> tuple[Tensor]:
    """Compute the transformer's forward pass for texts of unlike length before an image.

    diffusers' `forward` reads the values of a mask that mixes text and images, which a plan does
    not have. `known` is bool [B, T]; None: nothing is padding.
    """
    num_text, num_image = encoder_hidden_states.shape[1], hidden_states.shape[1]
    rope = model.pos_embed(lengths, num_text, pictures, size)
    text, parts, segments, done = model.txt_in(encoder_hidden_states), list[Tensor](), [], 0
    for each in pictures:
        parts += [text[:, done : each.start], model.img_in(each.tokens)]
        done = each.start + each.num_places
    parts.append(text[:, done:])
    ends = list(accumulate(part.shape[1] for part in parts))
    for number, (start, end) in enumerate(pairwise([0, *ends])):
        segments.append(_Segment(start, end, is_text=number % 2 == 0))
    prefix = ends[-1]
    tokens = torch.cat([*parts, model.img_in(hidden_states)], dim=1)
    # A further row: text and pictures have the time 0.
    temb = model.time_text_embed(torch.cat([timestep, timestep.new_zeros(1)]), tokens)
    modulation = model.modulation(temb)
    is_image = torch.arange(tokens.shape[1], device=tokens.device) >= prefix
    mask = None
    if known is not None:  # the places of padding are those of the last part of the text
        whole = (known.new_ones(len(known), n) for n in (prefix - num_text + done, num_image))
        before, image = whole
        mask = torch.cat([before, known[:, done:], image], dim=1)[:, None, None]
    if sharing is not None:
        sharing.begin(tokens.shape[1])
        tokens, rope = sharing.cut(tokens, 1), sharing.cut(rope, 1)
        is_image = sharing.cut(is_image, 0)
    for block in model.transformer_blocks:
        # By position, as recomputation calls it; without a cache of keys and values.
        given = (tokens, modulation, rope, mask, is_image, None, None, None, segments)
        tokens = diffusers_family.run_block(model, block, *given)
    velocity = model.proj_out(model.norm_out(tokens, temb, is_image))
    if sharing is not None:
        velocity = sharing.gather(velocity, 1)
    return (velocity[:, prefix:],)


def _share_tokens(model: Any, sharing: TokenSharing) -> None:
    """Split text and image, as one row of tokens, between ranks (context parallelism)."""
    if sharing.ring_size > 1:
        raise ModelError(
            f"Qwen-Image 2.1's text attends to earlier tokens alone, which a ring of ranks does "
            f"not; its {sharing.size} ranks would need one. Set a parallel.context that divides "
            "the model's heads and the GPUs of a node."
        )
    model.forward = partial(_forward, model, sharing)
    for block in model.transformer_blocks:
        block.attn.set_processor(_Attention(sharing))


class QwenImage21(diffusers_family.DiffusersFamily):
    """Family from a text and any reference images to an image.

    It is conditioned on `prompt_embeds` with their `prompt_length`, in which `prompt_places` marks
    the pictures. Its velocity has longtake's sign (noise - latents), and its timestep is sigma.
    """

    frozen = pretrained.FrozenParts(
        codec=pretrained.PipelinePart(("AutoencoderKLQwenImage21",), "vae"),
        text=pretrained.PipelinePart(
            ("Qwen3VLForConditionalGeneration",), "text_encoder", "processor"
        ),
        processor=pretrained.PipelinePart(("Qwen3VLProcessor",), "processor"),
        has_random_text=False,
    )
    label = "Qwen-Image 2.1"
    transformer_class, pipeline_class = "QwenImage21Transformer2DModel", "QwenImage21Pipeline"
    codec_class = codec.RgbaCodec
    parts = "an AutoencoderKLQwenImage21 and a Qwen3-VL"
    text = QwenText21(
        pictures=_REFERENCES,
        frame_tokens=8,
        has_lengths=True,
        template_tokens=16,  # at most, of the system message, which the pipeline counts
        arguments={"output_hidden_states": True},
    )
    inputs = qwen_image_edit.EditInputs(optional=_REFERENCES)
    block = DiffusersBlocks(
        joins_text=True,
        patch_size=(1, 1, 1),
        arguments={"tokens": "hidden_states", "temb": "modulation", "rope": "rotary_emb"},
        outputs=("tokens",),
        attentions=("attn",),  # of the first part of the sequence; further ones are numbered
        share=_share_tokens,
    )
    makes_videos = False
    guidance_scale = 1.0  # the pipeline's: the release is sampled without a second pass
    num_inference_steps = 40

    def fitted_config(self, channels: int, text: TextEncoder) -> dict[str, int]:
        width = self.single_embed_dim(text)
        return {"in_channels": channels, "out_channels": channels, "context_in_dim": width}

    def check_config(self, config: Any) -> None:
        if config.patch_size != 1 or not config.causal_condition:
            raise RecipeError(
                f"model.config: patch_size {config.patch_size} and causal_condition "
                f"{config.causal_condition}, but {self.label} has 1 and true: a token is one "
                "latent pixel, and its text has the time 0. Leave them out."
            )

    def patch(self, section: ModelSection) -> tuple[int, ...]:
        # The pipeline makes images of whole places only.
        return (1, _SIDE, _SIDE)

    def adapt(
        self, model: Any, section: ModelSection, shapes: Sequence[LatentShape], text: TextEncoder
    ) -> None:
        model.pos_embed = _Positions(model.pos_embed)
        for block in model.transformer_blocks:
            block.attn.set_processor(_Attention())
        model.forward = partial(_forward, model, None)

    def call(
        self, model: Any, noisy_latents: Tensor, timesteps: Tensor, conditioning: base.Conditioning
    ) -> diffusers_family.TransformerCall:
        """Prepare a call with the tokens of text, of pictures in their places, and of the image."""
        height, width = noisy_latents.shape[-2:]
        lengths = conditioning["prompt_length"]
        prompt, known = diffusers_family.cut_texts(conditioning["prompt_embeds"], lengths)
        places, pictures, start = conditioning["prompt_places"], list[_Picture](), 0
        has_values = not (isinstance(places, FakeTensor) or places.is_meta)
        # All samples of a batch share the places: pictures are before the caption. A plan takes one
        # token to stand before each.
        is_place = places[0].bool().tolist() if has_values else None
        for latents in self.inputs.pictures(conditioning):
            tokens = latents.to(noisy_latents).flatten(2).mT
            start = start + 1 if is_place is None else is_place.index(True, start)
            pictures.append(_Picture(start, tokens, (latents.shape[-2], latents.shape[-1])))
            start += pictures[-1].num_places
        inputs = {
            "hidden_states": noisy_latents.flatten(2).mT,
            "encoder_hidden_states": prompt.to(noisy_latents.dtype),
            "timestep": timesteps,
            "lengths": lengths,
            "known": known,
            "pictures": pictures,
            "size": (height, width),
        }
        return diffusers_family.TransformerCall(
            inputs, lambda out: out.mT.unflatten(2, (1, height, width))
        )

    def sequence_length(
        self, model: nn.Module, shape: LatentShape, conditioning: base.Conditioning
    ) -> int:
        pixels = sum(math.prod(each.shape[-2:]) for each in self.inputs.pictures(conditioning))
        # Places of pictures in the text stand for tokens, which are counted.
        return super().sequence_length(model, shape, conditioning) - pixels // _SIDE**2

    def comfyui_name(self, name: str, *, is_lora: bool) -> str:
        if is_lora:
            return f"transformer.{name}"
        raise RecipeError(
            f"ComfyUI's file of a whole {self.label} joins layers that are apart here, such as "
            f"{name}; it reads LoRA under diffusers' names. Train LoRA, name such a file of "
            "this model by --like, or export with --format diffusers."
        )
