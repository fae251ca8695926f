"""A frozen autoencoder of single images; the frames of a clip are encoded one by one."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from longtake.config import Bucket
from longtake.errors import RecipeError, SamplingError
from longtake.models.pretrained import defaults, quiet

ALONE = (1, 1, 1)
"""Latent frames, rows and columns of a token, where each pixel of a latent is one."""

_TILE = 512


class ImageCodec:
    """A frozen `AutoencoderKL` of diffusers, such as FLUX.1's.

    Latents are (mode - shift_factor) * scaling_factor, by the autoencoder's own two numbers, which
    FLUX's pipelines undo before they decode.
    """

    def __init__(self, autoencoder: nn.Module, is_pretrained: bool = False) -> None:
        self.autoencoder = autoencoder.eval().requires_grad_(False)
        self._is_pretrained = is_pretrained
        config: Any = autoencoder.config
        self.channels: int = config["latent_channels"]
        self._shift: float = config["shift_factor"] or 0.0
        self._scale: float = config["scaling_factor"]
        self._spatial = 2 ** (len(config["block_out_channels"]) - 1)
        # By itself it would begin at what it was trained on, such as 1024 pixels.
        autoencoder.tile_sample_min_size = _TILE  # type: ignore[assignment]
        autoencoder.tile_latent_min_size = _TILE // self._spatial

    def latent_shape(self, bucket: Bucket, patch: Sequence[int] = ALONE) -> tuple[int, int, int]:
        refuse_odd(bucket, nearest(bucket.num_frames, patch[0]), self._spatial, patch)
        return bucket.num_frames, bucket.height // self._spatial, bucket.width // self._spatial

    @torch.no_grad()
    def encode(self, videos: Tensor) -> Tensor:
        """Normalised latents."""
        images = videos.transpose(1, 2).flatten(0, 1).float() / 127.5 - 1  # [B F, 3, H, W]
        images = images.to(dtype_of(self.autoencoder))
        encoded: Any = self.autoencoder.encode(images)  # type: ignore[operator]
        latents: Tensor = (encoded.latent_dist.mode().float() - self._shift) * self._scale
        return _by_clip(latents, len(videos))

    @torch.no_grad()
    def decode(self, latents: Tensor, *, tiles: bool = False) -> Tensor:
        """Videos of normalised latents.

        Tiles are of 512 x 512 pixels, 128 of them blended, and decoded frame by frame.
        """
        raw = latents.transpose(1, 2).flatten(0, 1).float() / self._scale + self._shift
        with tiled(self.autoencoder, tiles):
            raw = raw.to(dtype_of(self.autoencoder))
            images: Tensor = self.autoencoder.decode(raw).sample  # type: ignore[operator]
        return _by_clip(to_uint8(images), len(latents))

    def modules(self) -> list[nn.Module]:
        return [self.autoencoder]

    def to(self, device: torch.device) -> None:
        self.autoencoder.to(device)

    def save(self, folder: Path) -> None:
        if not self._is_pretrained:
            with quiet(self.autoencoder):
                self.autoencoder.save_pretrained(folder / "vae")  # type: ignore[operator]


def complete_image_config(config: dict[str, Any]) -> dict[str, Any]:
    """The recipe's arguments of an `AutoencoderKL`, and those that follow from them.

    Random weights know no statistics of latents; and every width wants a block in each half.

    Raises:
        RecipeError: the widths are none.
    """
    from diffusers import AutoencoderKL

    known = defaults(AutoencoderKL.__init__) | config
    widths, groups = known["block_out_channels"], known["norm_num_groups"]
    is_list = isinstance(widths, list | tuple) and all(isinstance(w, int) for w in widths)
    if not is_list or not widths:
        raise RecipeError(
            f"codec.config.block_out_channels = {widths!r}: expected a width for each stage, such "
            "as [128, 256, 512, 512]."
        )
    if any(width % groups for width in widths):
        raise RecipeError(
            f"codec.config.block_out_channels {list(widths)} do not divide into norm_num_groups = "
            f"{groups}. Choose multiples of it, or fewer groups."
        )
    following = {
        "down_block_types": ["DownEncoderBlock2D"] * len(widths),
        "up_block_types": ["UpDecoderBlock2D"] * len(widths),
        "scaling_factor": 1.0,
        "shift_factor": 0.0,
        "use_quant_conv": False,
        "use_post_quant_conv": False,
    }
    return following | config


def refuse_odd(
    bucket: Bucket, num_frames: int, spatial: int, patch: Sequence[int], of_frames: str = ""
) -> None:
    """Refuse a bucket that codec and model together cannot divide.

    Raises:
        RecipeError: names the nearest that fits.
    """
    rows, columns = (spatial * step for step in patch[1:])
    height, width = nearest(bucket.height, rows), nearest(bucket.width, columns)
    fits = Bucket(num_frames=num_frames, height=height, width=width)
    if fits != bucket:
        who = "the codec wants" if tuple(patch) == ALONE else "codec and model want"
        sizes = "height and width divisible by"
        if rows != columns:
            sizes = f"height divisible by {rows} and width by"
        raise RecipeError(
            f"data.buckets: {bucket} cannot be encoded: {who} {sizes} {columns}{of_frames}. "
            f"The nearest that fits is {fits}."
        )


@contextmanager
def tiled(autoencoder: Any, wanted: bool) -> Iterator[None]:
    """Have one of diffusers' autoencoders work in tiles, if wanted, until the block ends."""
    if not wanted:
        yield
        return
    autoencoder.enable_tiling()
    autoencoder.enable_slicing()
    try:
        yield
    finally:
        autoencoder.disable_tiling()
        autoencoder.disable_slicing()


def nearest(size: int, step: int) -> int:
    return max(1, round(size / step)) * step


def dtype_of(module: nn.Module) -> torch.dtype:
    return next(module.parameters()).dtype


def to_uint8(pixels: Tensor) -> Tensor:
    """[-1, 1] to uint8 [0, 255], rounded and clamped.

    Raises:
        SamplingError: pixels are NaN or infinite, which would become black or white ones.
    """
    has_values = not isinstance(pixels, FakeTensor)  # as those of a plan have none
    if has_values and not pixels.isfinite().all():
        share = 1 - pixels.isfinite().double().mean().item()
        raise SamplingError(f"{share:.2%} of the decoded pixels are NaN or infinite.")
    return ((pixels.float() + 1) * 127.5).round().clamp(0, 255).to(torch.uint8)


def _by_clip(images: Tensor, num_clips: int) -> Tensor:
    """[B, C, F, H, W] from [B F, C, H, W]."""
    return images.view(num_clips, -1, *images.shape[1:]).transpose(1, 2)
