"""From pixels to latents and back; frozen while the transformer trains."""

from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from longtake.config import Bucket, CodecSection
from longtake.errors import ModelError, RecipeError
from longtake.models.pretrained import diffusers_class, load_pretrained


class Codec(Protocol):
    """Encodes clips [B, 3, F, H, W] uint8 to latents [B, C, F', H', W'] fp32 and decodes them."""

    channels: int
    """C of the latents."""

    def latent_shape(self, bucket: Bucket) -> tuple[int, int, int]:
        """(F', H', W') of a bucket's latents.

        Raises:
            RecipeError: the codec cannot divide the bucket; names the nearest that it can.
        """
        ...

    def encode(self, videos: Tensor) -> Tensor:
        """Latents of videos, normalised so that the transformer sees unit scale."""
        ...

    def decode(self, latents: Tensor) -> Tensor:
        """Videos, uint8, of latents."""
        ...

    def to(self, device: torch.device) -> None:
        """Move to a device."""
        ...

    def save(self, folder: Path) -> None:
        """Write what `build` cannot make again from the recipe."""
        ...


class PixelCodec:
    """Latents are the pixels themselves, scaled to [-1, 1]."""

    channels = 3

    def latent_shape(self, bucket: Bucket) -> tuple[int, int, int]:
        """The bucket's own shape."""
        return bucket.num_frames, bucket.height, bucket.width

    def encode(self, videos: Tensor) -> Tensor:
        """uint8 [0, 255] to fp32 [-1, 1]."""
        return videos.float() / 127.5 - 1

    def decode(self, latents: Tensor) -> Tensor:
        """fp32 [-1, 1] to uint8 [0, 255]; what lies outside is clamped."""
        return to_uint8(latents)

    def to(self, device: torch.device) -> None:
        """There is nothing to move."""

    def save(self, folder: Path) -> None:
        """There is nothing to save."""


class AutoencoderCodec:
    """A frozen video autoencoder of diffusers, such as `AutoencoderKLWan`.

    Latents are the posterior's mode, normalised per channel by the autoencoder's own
    `latents_mean` and `latents_std`, or by its `shift_factor` and `scaling_factor`, as its
    pipeline does.
    """

    def __init__(self, autoencoder: nn.Module) -> None:
        self.autoencoder = autoencoder.eval().requires_grad_(False)
        config: Any = autoencoder.config
        self.channels: int = config.get("z_dim") or config["latent_channels"]
        self._mean, self._std = _normalisation(config, self.channels)
        self._temporal, self._spatial = _compression(config)

    def latent_shape(self, bucket: Bucket) -> tuple[int, int, int]:
        """F' = (F - 1) / temporal + 1, as causal video autoencoders have it; H / s, W / s."""
        fits = Bucket(
            num_frames=_nearest(bucket.num_frames, self._temporal, offset=1),
            height=_nearest(bucket.height, self._spatial),
            width=_nearest(bucket.width, self._spatial),
        )
        if fits != bucket:
            raise RecipeError(
                f"data.buckets: {bucket} cannot be encoded: the codec wants height and width "
                f"divisible by {self._spatial} and {self._temporal} n + 1 frames. "
                f"The nearest that fits is {fits}."
            )
        frames = (bucket.num_frames - 1) // self._temporal + 1
        return frames, bucket.height // self._spatial, bucket.width // self._spatial

    @torch.no_grad()
    def encode(self, videos: Tensor) -> Tensor:
        """Normalised latents."""
        encoded: Any = self.autoencoder.encode(videos.float() / 127.5 - 1)  # type: ignore[operator]
        latents: Tensor = encoded.latent_dist.mode()
        return (latents - self._mean.to(latents)) / self._std.to(latents)

    @torch.no_grad()
    def decode(self, latents: Tensor) -> Tensor:
        """Videos of normalised latents."""
        raw = latents.float() * self._std.to(latents) + self._mean.to(latents)
        decoded: Tensor = self.autoencoder.decode(raw).sample  # type: ignore[operator]
        return to_uint8(decoded)

    def to(self, device: torch.device) -> None:
        """Move the autoencoder to a device."""
        self.autoencoder.to(device)

    def save(self, folder: Path) -> None:
        """Write the autoencoder in diffusers' layout."""
        self.autoencoder.save_pretrained(folder / "vae")  # type: ignore[operator]


def build_codec(section: CodecSection, made: Path | None = None) -> Codec:
    """The recipe's codec on the CPU.

    Args:
        section: of the recipe.
        made: the folder where a run keeps frozen parts that it made itself, once it did.

    Raises:
        ModelError: the weights or the class cannot be loaded.
        RecipeError: the class does not take the recipe's arguments.
    """
    if section.kind == "pixels":
        return PixelCodec()
    autoencoder_class = diffusers_class("codec.class_name", section.class_name)
    if section.pretrained is not None:
        where, subfolder = section.pretrained, section.subfolder
        return AutoencoderCodec(load_pretrained(autoencoder_class, where, subfolder))
    if made is not None and (made / "vae").is_dir():
        return AutoencoderCodec(load_pretrained(autoencoder_class, str(made), "vae"))
    try:
        return AutoencoderCodec(autoencoder_class(**section.config))
    except (TypeError, ValueError) as error:
        raise RecipeError(f"codec.config does not fit {section.class_name}: {error}.") from error


def to_uint8(pixels: Tensor) -> Tensor:
    """[-1, 1] to uint8 [0, 255], rounded and clamped."""
    return ((pixels.float() + 1) * 127.5).round().clamp(0, 255).to(torch.uint8)


def _normalisation(config: Any, channels: int) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of raw latents, each [1, C, 1, 1, 1]."""
    mean, std = config.get("latents_mean"), config.get("latents_std")
    if mean is None or std is None:
        mean = [config.get("shift_factor") or 0.0] * channels
        std = [1 / (config.get("scaling_factor") or 1.0)] * channels
    if len(mean) < channels or len(std) < channels:
        raise ModelError(
            f"The codec has {channels} latent channels, but latents_mean and latents_std give "
            f"{len(mean)} and {len(std)} values. Give one of each per channel in codec.config."
        )
    shape = (1, channels, 1, 1, 1)
    return torch.tensor(mean[:channels]).view(shape), torch.tensor(std[:channels]).view(shape)


def _compression(config: Any) -> tuple[int, int]:
    """How many frames and how many rows one latent frame and row stand for."""
    if "temperal_downsample" in config:  # diffusers' own spelling
        halvings = sum(config["temperal_downsample"])
        patch = config.get("patch_size") or 1
        return 2**halvings, patch * 2 ** (len(config["dim_mult"]) - 1)
    raise ModelError(
        f"codec.class_name {config.get('_class_name')} is not a causal video autoencoder that "
        "longtake knows. Use AutoencoderKLWan."
    )


def _nearest(size: int, divisor: int, offset: int = 0) -> int:
    """The multiple of `divisor`, plus offset, that lies nearest to size; at least one divisor."""
    steps = round((size - offset) / divisor)
    return max(steps, 0 if offset else 1) * divisor + offset
