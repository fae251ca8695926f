"""What a rank is given to train on in one step."""

from dataclasses import dataclass, field

from torch import Tensor

from longtake.config import Bucket


def num_places(batch_size: int, data_size: int) -> int:
    """Places of each data rank: enough for all clips of a batch.

    All ranks pass through the model equally often, as collectives want it. Where a batch does not
    divide, stand-ins of weight 0 fill the places beyond it.
    """
    return -(-batch_size // data_size)


@dataclass(frozen=True)
class Batch:
    """One rank's share of a global batch. Shapes: B local batch, F frames, H height, W width."""

    step: int
    stage: str
    source: str
    """The catalog that its clips are of, by its name in the recipe."""
    epoch: int
    begins_epoch: bool
    """Whether this is the first step that is counted in the epoch."""
    bucket: Bucket
    """The shape of its clips."""
    videos: Tensor
    """[B, 3, F, H, W] uint8; F = 0 where latents are there instead."""
    captions: tuple[str, ...]
    """[B]"""
    seeds: tuple[int, ...]
    """[B] seeds of all that is random about a sample (noise, sigma, caption dropout), made from
    the run's seed, the sample's stage and epoch and the clip's identity: the same on any world
    size."""
    identities: tuple[str, ...]
    """[B]"""
    epochs: tuple[int, ...]
    """[B] each sample's own epoch."""
    weights: Tensor
    """[B] float32: 1, or 0 for a stand-in, which fills the place of a clip that could not be
    decoded, or a place of a smaller last batch."""
    rejected: tuple[tuple[str, int], ...]
    """(identity, epoch) of each clip of this share that could not be decoded."""
    references: dict[str, Tensor] = field(default_factory=dict)
    """Further pictures of each clip by name, [B, 3, 1, H, W] uint8; none where latents are there
    instead."""
    latents: Tensor | None = None
    """[B, C, F', H', W'] from a cache."""
    conditioning: dict[str, Tensor] = field(default_factory=dict)
    """With `latents`: what the model is told, [B, ...]: embeddings of the captions, and
    `<name>_latents` of further pictures."""
    no_caption: dict[str, Tensor] = field(default_factory=dict)
    """With `latents`: embeddings of no caption, [1, ...]."""
