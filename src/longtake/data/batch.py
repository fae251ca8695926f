"""One rank's share of a batch."""

from dataclasses import dataclass, field

from torch import Tensor

from longtake.config import Bucket
from longtake.data.ledger import StepSamples
from longtake.data.stages import StagePosition
from longtake.data.stores import NOTHING, Fetched


def num_places(batch_size: int, data_size: int) -> int:
    """Samples of a batch on each data-parallel rank."""
    return -(-batch_size // data_size)


@dataclass(frozen=True)
class Batch:
    """One rank's share of a global batch. Shapes: B local batch, F frames, H height, W width."""

    step: int
    stage: str
    source: str  # the name of its catalog in the recipe
    epoch: int
    begins_epoch: bool  # whether this is the first step that is counted in the epoch
    bucket: Bucket
    videos: Tensor  # [B, 3, F, H, W] uint8; F = 0 with `latents`
    captions: tuple[str, ...]  # [B]
    # [B] seeds of noise, sigma and caption dropout, from the run's seed, the sample's stage and
    # epoch and the clip's identity: the same on any world size
    seeds: tuple[int, ...]
    identities: tuple[str, ...]  # [B]
    epochs: tuple[int, ...]  # [B] each sample's own epoch
    weights: Tensor  # [B] float32: 1, or 0 for a filler (clip not decodable, smaller last batch)
    rejected: tuple[tuple[str, int], ...]  # (identity, epoch) of clips that were not decodable
    global_size: int  # samples of the batch over all ranks, unless it is a bucket's last
    position: StagePosition  # in the curriculum, for learning rate and EMA; `stage` has the clips
    position_before: StagePosition  # of the update before; of the first, its own
    # By names in `data.conditioning`, as `empty_conditioning`: pixels uint8, numbers float32.
    # With `latents` only what the codec does not encode
    inputs: dict[str, Tensor] = field(default_factory=dict)
    latents: Tensor | None = None  # [B, C, F', H', W'] from a cache
    # With `latents`: [B, ...] prompt embeddings, and `<name>_latents` of what the codec encodes
    conditioning: dict[str, Tensor] = field(default_factory=dict)
    # embeddings [1, ...], or of each sample, with its pictures, [B, ...]
    no_caption: dict[str, Tensor] = field(default_factory=dict)
    fetched: Fetched = NOTHING  # by this process from stores, since the batch before

    @property
    def consumed(self) -> StepSamples:
        """What the ledger records of the batch."""
        samples = zip(self.identities, self.epochs, self.weights.tolist(), strict=True)
        trained = [(identity, epoch) for identity, epoch, weight in samples if weight]
        return StepSamples(self.step, f"{self.stage}/{self.source}", trained, self.rejected)
