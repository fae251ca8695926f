"""One rank's share of a batch, as the training loop gets it."""

from dataclasses import dataclass, field

from torch import Tensor

from longtake.config import Bucket
from longtake.data.ledger import StepSamples
from longtake.data.stages import StagePosition
from longtake.data.stores import NOTHING, Fetched


def num_places(batch_size: int, data_size: int) -> int:
    """Return the number of samples of a batch on each data-parallel rank, rounded up."""
    # Rounded up: the last rank's places may be more than its samples, and stand-ins take them.
    return -(-batch_size // data_size)


@dataclass(frozen=True)
class Batch:
    """One rank's share of a global batch. Shapes: B local batch, F frames, H height, W width.

    Rank r of R that have different clips has places r B to (r + 1) B - 1 of the batch, where B is
    the global size divided by R, rounded up. All ranks compute B samples: a place without a clip
    gets a stand-in, which has weight 0. It is a copy of the first clip of this rank's share that
    can be decoded, with its seed and caption; else another clip of the batch, or one of the same
    shape. If no clip of this shape can be decoded on any rank, a clip of another shape stands in
    everywhere and the step makes no update. A clip that cannot be decoded is listed in `rejected`
    and later batches have a stand-in for it; a run with more of them than
    `data.max_quarantined_clips` ends.
    """

    step: int
    stage: str
    source: str  # name of the catalog in the recipe
    epoch: int
    begins_epoch: bool  # True for the first step that is counted in the epoch
    bucket: Bucket
    videos: Tensor  # [B, 3, F, H, W] uint8; F = 0 with `latents`
    captions: tuple[str, ...]  # [B]
    # [B] seeds of noise, sigma and caption dropout, derived from the run's seed, the sample's
    # stage, catalog and epoch and the clip's identity: independent of the world size.
    seeds: tuple[int, ...]
    identities: tuple[str, ...]  # [B]
    epochs: tuple[int, ...]  # [B] epoch of each sample
    weights: Tensor  # [B] float32: 1, or 0 for a stand-in
    rejected: tuple[tuple[str, int], ...]  # (identity, epoch) of undecodable clips
    global_size: int  # samples of the batch over all ranks, unless it is a bucket's last
    # Position in the curriculum, for learning rate and EMA. In a ramp its stage can be another one
    # than that of the clips (`stage`).
    position: StagePosition
    position_before: StagePosition  # position of the previous update; equal for the first one
    # Further inputs by their names in `data.conditioning`, with the shapes of `empty_conditioning`:
    # pixels uint8, numbers float32. With `latents`, only those that the codec does not encode.
    inputs: dict[str, Tensor] = field(default_factory=dict)
    latents: Tensor | None = None  # [B, C, F', H', W'] from a cache
    # With `latents`: prompt embeddings [B, ...], and `<name>_latents` of inputs that the codec
    # encodes.
    conditioning: dict[str, Tensor] = field(default_factory=dict)
    # Embeddings of the empty caption [1, ...], or with each sample's pictures [B, ...].
    no_caption: dict[str, Tensor] = field(default_factory=dict)
    fetched: Fetched = NOTHING  # traffic of this process from stores since the previous batch

    @property
    def consumed(self) -> StepSamples:
        """Trained and rejected samples of the batch, as the ledger records them."""
        samples = zip(self.identities, self.epochs, self.weights.tolist(), strict=True)
        trained = [(identity, epoch) for identity, epoch, weight in samples if weight]
        return StepSamples(self.step, f"{self.stage}/{self.source}", trained, self.rejected)
