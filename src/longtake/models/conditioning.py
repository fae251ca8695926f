"""Conditioning tensors that a model gets for the inputs in `data.conditioning`.

    picture, video  `<name>_latents` [B, C, F', h, w], or what the family makes of it;
                    not encoded: `<name>` [B, 3, F, H, W], -1..1
    mask            `<name>` [B, 1, F, H, W] and, averaged, `<name>_latents` [B, 1, F', h, w], 0..1
    numbers         `<name>` [B, F, width] or [B, width]

F is 1 for a picture, and of a clip's first frames their number. F', h, w are the codec's for a clip
of the same frames, rows and columns.
"""

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from longtake.config import Bucket, ConditioningSection, Recipe
from longtake.models.base import Conditioning, Family, family_of
from longtake.models.codec import Codec
from longtake.models.components import Components
from longtake.models.pretrained import PipelinePart
from longtake.models.releases import has_part


def encode_inputs(
    parts: Components, recipe: Recipe, given: Mapping[str, Tensor], bucket: Bucket
) -> tuple[Conditioning, Tensor | None]:
    """Encode the clips' `data.conditioning` inputs for the model and the objective.

    Returns loss weights too, if one of them is a mask of the loss.
    """
    sections, flow = recipe.step_inputs(), recipe.flow
    wanted = {name: each for name, each in given.items() if name in sections}
    conditioning = condition_on(parts, sections, wanted, bucket)
    if flow.loss_mask is None:
        return conditioning, None
    return conditioning, loss_weights(parts.codec, given[flow.loss_mask], flow.loss_mask_floor)


def encoded_together(chosen: Family, recipe: Recipe) -> tuple[str, ...]:
    """Return the names of inputs that the family encodes jointly, not each by itself; often ()."""
    taken = chosen.inputs.names(recipe.model)[1] if chosen.inputs.encodes_together else ()
    encoded = tuple(name for name, each in recipe.step_inputs().items() if each.is_encoded)
    return encoded if any(name in taken for name in encoded) else ()


def text_reads_pictures(recipe: Recipe) -> bool:
    """Return true if a text encoder reads pictures, either alone or together with captions."""
    chosen = family_of(recipe.model)
    alone = encoded_together(chosen, recipe) and further_encoders(recipe, of_captions=False)
    return bool(alone or chosen.text.seen_pictures(recipe.model_inputs()))


def further_encoders(recipe: Recipe, *, of_captions: bool) -> list[PipelinePart]:
    """Return the encoders of a model release beyond its first text encoder.

    They are those that read captions, or those that read pictures.
    """
    where, parts = recipe.text.pretrained, family_of(recipe.model).frozen.further
    wanted = [each for each in parts if each.reads_captions == of_captions]
    return [] if where is None else [each for each in wanted if has_part(where, each)]


def condition_on(
    parts: Components,
    sections: Mapping[str, ConditioningSection],
    given: Mapping[str, Tensor],
    bucket: Bucket,
) -> Conditioning:
    """Convert `data.conditioning` inputs to the tensors that the model takes, in fp32.

    Args:
        parts: components of the recipe.
        sections: the recipe's sections of the inputs, by name.
        given: inputs [B, ...] as `longtake.data.conditioning.empty_conditioning`, on any device.
        bucket: size of the clips.
    """
    encoded = {name: each for name, each in given.items() if sections[name].is_encoded}
    conditioning: Conditioning = {}
    for name, each in given.items():
        if sections[name].kind == "numbers":
            conditioning[name] = each
        elif sections[name].kind == "mask":
            conditioning[name] = each.float() / 255
            conditioning[f"{name}_latents"] = on_latents(parts.codec, conditioning[name])
        elif name not in encoded:
            conditioning[name] = each.float() / 127.5 - 1
    if encoded:
        # Encoded inputs go to the family together, because it may combine several of them.
        conditioning |= parts.family.inputs.encode(parts.codec, parts.text, encoded, bucket)
    return conditioning


def loss_weights(codec: Codec, mask: Tensor, floor: float) -> Tensor:
    """Return loss weights [B, 1, F', h, w] of a uint8 mask: 1 where white, `floor` where black."""
    means = on_latents(codec, mask.float() / 255)
    return torch.lerp(torch.full_like(means, floor), torch.ones_like(means), means)


def on_latents(codec: Codec, mask: Tensor) -> Tensor:
    """Average a mask [B, 1, F, H, W] over the pixels of each latent: [B, 1, F', h, w].

    As causal autoencoders have it, the first latent frame stands for the first frame alone, and
    each other one for the same number of the others.
    """
    *_, frames, rows, columns = mask.shape
    shape = codec.latent_shape(Bucket(num_frames=frames, height=rows, width=columns))
    # With one latent frame, or one for each frame, the first frame does not stand apart.
    if shape[0] in (1, frames):
        return F.adaptive_avg_pool3d(mask, shape)
    first = F.adaptive_avg_pool3d(mask[:, :, :1], (1, *shape[1:]))
    others = F.adaptive_avg_pool3d(mask[:, :, 1:], (shape[0] - 1, *shape[1:]))
    return torch.cat([first, others], dim=2)


def outline_inputs(
    parts: Components, sections: Mapping[str, ConditioningSection], bucket: Bucket
) -> Conditioning:
    """Outline the conditioning tensors of one sample: shapes on the meta device, no values."""
    inputs = dict[str, Tensor]()
    for name, section in sections.items():
        frames = section.num_frames(bucket)
        if section.kind == "numbers":
            assert section.width is not None
            shape = (1, *([frames] if section.per_frame else []), section.width)
            inputs[name] = torch.empty(shape, device="meta")
            continue
        is_mask = section.kind == "mask"
        frames, channels = (bucket.num_frames, 1) if is_mask else (frames, 3)
        shape = (1, channels, frames, bucket.height, bucket.width)
        inputs[name] = torch.empty(shape, dtype=torch.uint8, device="meta")
    return condition_on(parts, sections, inputs, bucket)


def training_conditioning(
    parts: Components, recipe: Recipe, conditioning: Conditioning
) -> Conditioning:
    if fps := fps_of(conditioning, parts.family, recipe):
        conditioning = conditioning | fps
    if not parts.family.distils_guidance(parts.model):
        return conditioning
    return conditioning | guidance_of(conditioning, recipe.model.guidance)


def guidance_of(conditioning: Conditioning, scale: float) -> Conditioning:
    # Any tensor of the batch gives its size and device.
    like = next(iter(conditioning.values()))
    return {"guidance": torch.full((len(like),), scale, device=like.device)}


def fps_of(conditioning: Conditioning, chosen: Family, recipe: Recipe) -> Conditioning:
    """Return the conditioning `fps` [B], if the model takes frames per second; else {}."""
    if not chosen.inputs.takes_fps or recipe.data.fps is None:
        return {}
    # A stride leaves out frames, so the clip that the model sees has a lower rate.
    like, fps = next(iter(conditioning.values())), recipe.data.fps / recipe.data.frame_stride
    return {"fps": torch.full((len(like),), fps, device=like.device)}


def without_text(conditioning: Conditioning) -> Conditioning:
    """Return conditioning for the same samples without a token of text, for the image alone."""
    lengths = torch.zeros_like(conditioning["prompt_length"])
    none = conditioning["prompt_embeds"][:, :0]
    return conditioning | {"prompt_embeds": none, "prompt_length": lengths}


def outline_conditioning(
    parts: Components, recipe: Recipe, bucket: Bucket, batch_size: int = 1
) -> Conditioning:
    """Outline a model's conditioning in training: shapes on the meta device, no values."""
    one = parts.text.outline(picture_sizes(parts.family, recipe, bucket))
    one |= outline_inputs(parts, recipe.step_inputs(), bucket)
    return training_conditioning(parts, recipe, _of_size(one, batch_size))


def outline_no_caption(
    parts: Components, recipe: Recipe, bucket: Bucket, batch_size: int
) -> Conditioning:
    """Outline the embeddings of the empty caption [1, ...]; with pictures in them [B, ...]."""
    pictures = picture_sizes(parts.family, recipe, bucket)
    return _of_size(parts.text.outline(pictures), batch_size if pictures else 1)


def _of_size(one: Conditioning, batch_size: int) -> Conditioning:
    return {key: value.new_empty(batch_size, *value.shape[1:]) for key, value in one.items()}


def picture_sizes(chosen: Family, recipe: Recipe, bucket: Bucket) -> list[tuple[int, int]]:
    """Return height and width of each picture that is encoded together with a caption."""
    sizes = dict.fromkeys(recipe.model_inputs(), (bucket.height, bucket.width))
    return list(chosen.text.seen_pictures(sizes).values())
