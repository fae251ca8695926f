"""What a model gets of the further inputs in `data.conditioning`.

    picture, video  `<name>_latents` [B, C, F', h, w]; not encoded: `<name>` [B, 3, F, H, W], -1..1
    mask            `<name>` [B, 1, F, H, W] and, averaged, `<name>_latents` [B, 1, F', h, w], 0..1
    numbers         `<name>` [B, F, width] or [B, width]

F is 1 for a picture, and F', h, w are the codec's for a clip of the same frames, rows and columns.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from longtake.config import Bucket, ConditioningSection
from longtake.models.base import Conditioning
from longtake.models.codec import Codec


def encode_videos(codec: Codec, videos: Tensor) -> Tensor:
    """Latents of videos, each encoded alone: convolutions round otherwise in other batches."""
    return torch.cat([codec.encode(videos[place : place + 1]) for place in range(len(videos))])


def condition_on(
    codec: Codec, name: str, section: ConditioningSection, given: Tensor
) -> Conditioning:
    """The model's tensors of one input, fp32.

    Args:
        codec: of the recipe.
        name: in `data.conditioning`.
        section: what the recipe says of it.
        given: [B, ...] as `longtake.data.conditioning.empty_conditioning`, on any device.
    """
    if section.kind == "numbers":
        return {name: given}
    if section.kind == "mask":
        mask = given.float() / 255
        return {name: mask, f"{name}_latents": on_latents(codec, mask)}
    if section.is_encoded:
        return {f"{name}_latents": encode_videos(codec, given)}
    return {name: given.float() / 127.5 - 1}


def loss_weights(codec: Codec, mask: Tensor, floor: float) -> Tensor:
    """[B, 1, F', h, w]: 1 where a mask [B, 1, F, H, W] uint8 is white, `floor` where black."""
    means = on_latents(codec, mask.float() / 255)
    return torch.lerp(torch.full_like(means, floor), torch.ones_like(means), means)


def on_latents(codec: Codec, mask: Tensor) -> Tensor:
    """[B, 1, F', h, w] mean of a mask [B, 1, F, H, W] over the pixels that each latent stands for.

    As causal autoencoders have it, the first latent frame stands for the first frame alone, and
    each other one for the same number of the others.
    """
    *_, frames, rows, columns = mask.shape
    shape = codec.latent_shape(Bucket(num_frames=frames, height=rows, width=columns))
    if shape[0] in (1, frames):
        return F.adaptive_avg_pool3d(mask, shape)
    first = F.adaptive_avg_pool3d(mask[:, :, :1], (1, *shape[1:]))
    others = F.adaptive_avg_pool3d(mask[:, :, 1:], (shape[0] - 1, *shape[1:]))
    return torch.cat([first, others], dim=2)


def outline_input(
    codec: Codec, name: str, section: ConditioningSection, bucket: Bucket
) -> Conditioning:
    """What `condition_on` gives for one sample of a bucket, on the meta device."""
    pixels = bucket.num_frames, bucket.height, bucket.width
    if section.kind == "numbers":
        assert section.width is not None
        rows = (bucket.num_frames,) if section.per_frame else ()
        return {name: torch.empty(1, *rows, section.width, device="meta")}
    if section.kind == "mask":
        latents = codec.latent_shape(bucket)
        shapes = {name: (1, 1, *pixels), f"{name}_latents": (1, 1, *latents)}
        return {each: torch.empty(shape, device="meta") for each, shape in shapes.items()}
    if section.kind == "picture":
        pixels = (1, *pixels[1:])
    if not section.is_encoded:
        return {name: torch.empty(1, 3, *pixels, device="meta")}
    frames, rows_, columns = codec.latent_shape(bucket)
    frames = 1 if section.kind == "picture" else frames
    return {
        f"{name}_latents": torch.empty(1, codec.channels, frames, rows_, columns, device="meta")
    }
