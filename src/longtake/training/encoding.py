"""What goes through codec and text encoder, one sample after the other.

Convolutions and matrix products round otherwise in batches of other sizes. Encoded alone, a
sample's latents depend neither on what stands beside it nor on whether they come from a cache. Of
what takes time (an autoencoder, a large encoder) one sample keeps a card busy.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from longtake.models.codec import Codec
from longtake.models.text import TextEncoder


def encode_videos(codec: Codec, videos: Tensor) -> Tensor:
    """Latents [B, C, F', H', W'] of videos [B, 3, F, H, W] uint8."""
    return torch.cat([codec.encode(videos[place : place + 1]) for place in range(len(videos))])


def encode_captions(text: TextEncoder, captions: Sequence[str]) -> dict[str, Tensor]:
    """What a model is told of captions: named tensors, each [B, ...]."""
    each = [text.encode([caption]) for caption in captions]
    return {name: torch.cat([told[name] for told in each]) for name in each[0]}
