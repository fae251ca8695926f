"""From pixels to latents and back; frozen while the transformer trains."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from longtake.config import Bucket, CodecSection
from longtake.errors import RecipeError
from longtake.models.architecture import DTYPES, keep_weights_in, on_meta
from longtake.models.image_codec import (
    ALONE,
    ImageCodec,
    complete_image_config,
    dtype_of,
    refuse_odd,
    tiled,
    to_uint8,
)
from longtake.models.pretrained import (
    construct,
    defaults,
    diffusers_class,
    load_pretrained,
    quiet,
    refuse_unused,
)

_CHUNK = 4
"""diffusers' causal autoencoders encode the first frame, then pieces of four, and drop what is left
over without a word, whatever their compression."""


class Codec(Protocol):
    """Encodes clips [B, 3, F, H, W] uint8 to latents [B, C, F', H', W'] fp32 and decodes them."""

    channels: int
    """C of the latents."""

    def latent_shape(self, bucket: Bucket, patch: Sequence[int] = ALONE) -> tuple[int, int, int]:
        """(F', H', W') of a bucket's latents.

        Args:
            bucket: in pixels.
            patch: latent frames, rows and columns that the model makes one token of.

        Raises:
            RecipeError: codec or model cannot divide the bucket; names the nearest that both can.
        """
        ...

    def encode(self, videos: Tensor) -> Tensor:
        """Latents of videos, normalised so that the transformer sees unit scale."""
        ...

    def decode(self, latents: Tensor, *, tiles: bool = False) -> Tensor:
        """Videos, uint8, of latents.

        In `tiles`, where the codec has any: pieces that overlap are decoded one after another and
        blended, which takes less memory; seams may show.

        Raises:
            SamplingError: decoded pixels are NaN or infinite.
        """
        ...

    def modules(self) -> list[nn.Module]:
        """The frozen modules, which take memory; none where latents are the pixels."""
        ...

    def to(self, device: torch.device) -> None:
        """Move to a device."""
        ...

    def save(self, folder: Path) -> None:
        """Write what `build_codec` cannot make again from the recipe."""
        ...


class PixelCodec:
    """Latents are the pixels themselves, scaled to [-1, 1]."""

    channels = 3

    def latent_shape(self, bucket: Bucket, patch: Sequence[int] = ALONE) -> tuple[int, int, int]:
        """The bucket's own shape; the model says itself what it cannot divide."""
        return bucket.num_frames, bucket.height, bucket.width

    def encode(self, videos: Tensor) -> Tensor:
        """uint8 [0, 255] to fp32 [-1, 1]."""
        return videos.float() / 127.5 - 1

    def decode(self, latents: Tensor, *, tiles: bool = False) -> Tensor:
        """fp32 [-1, 1] to uint8 [0, 255]; what lies outside is clamped."""
        return to_uint8(latents)

    def modules(self) -> list[nn.Module]:
        """None."""
        return []

    def to(self, device: torch.device) -> None:
        """There is nothing to move."""

    def save(self, folder: Path) -> None:
        """There is nothing to save."""


class AutoencoderCodec:
    """A frozen causal video autoencoder of diffusers, such as `AutoencoderKLWan`.

    Latents are the posterior's mode, normalised per channel by the autoencoder's own
    `latents_mean` and `latents_std`: (mode - mean) / std, which `WanPipeline` undoes before it
    decodes.

    Raises:
        RecipeError: its configuration contradicts itself.
    """

    def __init__(self, autoencoder: nn.Module, is_pretrained: bool = False) -> None:
        self.autoencoder = autoencoder.eval().requires_grad_(False)
        self._is_pretrained = is_pretrained
        config: Any = autoencoder.config
        self.channels: int = config["z_dim"]
        self._mean = _per_channel(config, "latents_mean")
        self._std = _per_channel(config, "latents_std")
        self._temporal, self._spatial = _compression(config)

    def latent_shape(self, bucket: Bucket, patch: Sequence[int] = ALONE) -> tuple[int, int, int]:
        """F' = (F - 1) / temporal + 1, as causal video autoencoders have it; H / s, W / s."""
        num_frames = self._nearest_frames(bucket.num_frames, patch[0])
        refuse_odd(bucket, num_frames, self._spatial, patch, f" and {_CHUNK} n + 1 frames")
        frames = self._latent_frames(bucket.num_frames)
        return frames, bucket.height // self._spatial, bucket.width // self._spatial

    def _latent_frames(self, num_frames: int) -> int:
        return (num_frames - 1) // self._temporal + 1

    def _nearest_frames(self, num_frames: int, patch: int) -> int:
        known = range(1, num_frames + _CHUNK * (patch + 1), _CHUNK)
        whole = [number for number in known if self._latent_frames(number) % patch == 0]
        return min(whole or known, key=lambda number: abs(number - num_frames))

    @torch.no_grad()
    def encode(self, videos: Tensor) -> Tensor:
        """Normalised latents."""
        pixels = (videos.float() / 127.5 - 1).to(dtype_of(self.autoencoder))
        encoded: Any = self.autoencoder.encode(pixels)  # type: ignore[operator]
        latents: Tensor = encoded.latent_dist.mode().float()
        return (latents - self._mean.to(latents)) / self._std.to(latents)

    @torch.no_grad()
    def decode(self, latents: Tensor, *, tiles: bool = False) -> Tensor:
        """Videos of normalised latents.

        Tiles are of 256 x 256 pixels, as in diffusers, 64 of them blended.
        """
        raw = latents.float() * self._std.to(latents) + self._mean.to(latents)
        with tiled(self.autoencoder, tiles):
            raw = raw.to(dtype_of(self.autoencoder))
            decoded: Tensor = self.autoencoder.decode(raw).sample  # type: ignore[operator]
        return to_uint8(decoded)

    def modules(self) -> list[nn.Module]:
        return [self.autoencoder]

    def to(self, device: torch.device) -> None:
        self.autoencoder.to(device)

    def save(self, folder: Path) -> None:
        if not self._is_pretrained:
            with quiet(self.autoencoder):
                self.autoencoder.save_pretrained(folder / "vae")  # type: ignore[operator]


def build_codec(section: CodecSection, made: Path | None = None) -> Codec:
    """The recipe's codec on the CPU.

    Args:
        section: of the recipe.
        made: the folder where a run keeps frozen parts that it made itself, once it did.

    Raises:
        ModelError: the weights cannot be loaded.
        RecipeError: there is no such class, or it does not take the recipe's arguments.
    """
    codec_class = _check(section)
    if codec_class is None:
        return PixelCodec()
    found = diffusers_class("codec.class_name", section.class_name)
    if section.pretrained is not None:
        loaded = load_pretrained(
            found, section.pretrained, section.subfolder, torch_dtype=DTYPES[section.dtype]
        )
        return codec_class(loaded, is_pretrained=True)
    if made is not None and (made / "vae").is_dir():
        dtype = DTYPES[section.dtype]
        return codec_class(load_pretrained(found, str(made), "vae", torch_dtype=dtype))
    return codec_class(_random(found, section))


def outline_codec(section: CodecSection) -> Codec:
    """The same without weights, on the meta device: it knows shapes, but cannot encode.

    Raises:
        ModelError: a pretrained one's configuration cannot be found.
        RecipeError: there is no such class, or it does not take the recipe's arguments.
    """
    codec_class = _check(section)
    if codec_class is None:
        return PixelCodec()
    found = diffusers_class("codec.class_name", section.class_name)
    if section.pretrained is not None:
        outline = on_meta(found, section.pretrained, section.subfolder)
        keep_weights_in(outline, DTYPES[section.dtype])
        return codec_class(outline, is_pretrained=True)
    with torch.device("meta"):
        return codec_class(_random(found, section))


def _check(section: CodecSection) -> type[AutoencoderCodec | ImageCodec] | None:
    """What wraps the section's autoencoder, whose keys fit together; None for pixels."""
    given: dict[str, object] = {"pretrained": section.pretrained, "config": section.config}
    if section.kind == "pixels":
        refuse_unused("codec", given, 'codec.kind is "pixels"')
        return None
    if section.pretrained is not None:
        refuse_unused("codec", {"config": section.config}, "codec.pretrained brings its own")
    found = diffusers_class("codec.class_name", section.class_name)
    if section.class_name == "AutoencoderKL":
        return ImageCodec
    if {"z_dim", "dim_mult", "temperal_downsample", "latents_mean"} <= set(
        defaults(found.__init__)
    ):
        return AutoencoderCodec
    raise RecipeError(
        f"codec.class_name: {section.class_name} is neither an autoencoder of images nor a causal "
        "one of videos that longtake knows. Use AutoencoderKL or AutoencoderKLWan."
    )


def _random(autoencoder_class: Any, section: CodecSection) -> Any:
    """An autoencoder with random weights."""
    config = section.config
    is_of_images = autoencoder_class.__name__ == "AutoencoderKL"
    values = (
        complete_image_config(config) if is_of_images else _completed(autoencoder_class, config)
    )
    made = construct("codec.config", autoencoder_class, values)
    keep_weights_in(made, DTYPES[section.dtype])
    return made


def _completed(autoencoder_class: Any, config: dict[str, Any]) -> dict[str, Any]:
    """The recipe's arguments, and those that follow from them.

    Random weights know no statistics of latents, and a pipeline reads the compression from the
    config, where the class's defaults describe the released Wan 2.1 alone.
    """
    known = defaults(autoencoder_class.__init__)
    sizes = known | config
    try:
        temporal, spatial = _compression(sizes)
        channels = int(sizes["z_dim"])
    except (TypeError, ValueError) as error:
        raise RecipeError(
            f"codec.config does not fit {autoencoder_class.__name__}: {error}."
        ) from error
    following = {
        "latents_mean": [0.0] * channels,
        "latents_std": [1.0] * channels,
        "scale_factor_temporal": temporal,
        "scale_factor_spatial": spatial,
    }
    return {name: value for name, value in following.items() if name in known} | config


def _per_channel(config: Any, name: str) -> Tensor:
    """A list of the config as [1, C, 1, 1, 1]."""
    values, channels = config[name], config["z_dim"]
    if len(values) != channels:
        raise RecipeError(
            f"codec.config: z_dim is {channels}, but {name} has {len(values)} values. Give one per "
            "latent channel."
        )
    return torch.tensor(values, dtype=torch.float32).view(1, channels, 1, 1, 1)


def _compression(config: Any) -> tuple[int, int]:
    """How many frames and how many rows one latent frame and row stand for."""
    halvings, levels = config["temperal_downsample"], config["dim_mult"]  # diffusers' spelling
    temporal = 2 ** sum(halvings)
    if len(halvings) != len(levels) - 1 or temporal > _CHUNK:
        raise RecipeError(
            f"codec.config: temperal_downsample {list(halvings)} does not fit dim_mult "
            f"{list(levels)}: expected {len(levels) - 1} values, one less than dim_mult has, and "
            f"at most two of them true, because time is encoded in pieces of {_CHUNK} frames."
        )
    return temporal, (config.get("patch_size") or 1) * 2 ** len(halvings)
