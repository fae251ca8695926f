"""Codecs between pixels and latents; their weights stay frozen while the transformer trains."""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from longtake.config import Bucket, CodecSection
from longtake.errors import RecipeError, SamplingError
from longtake.fsio import Count, read_record, write_json
from longtake.models import deferred_init, numerics, pretrained, releases
from longtake.models.audio import AudioCodec, build_audio_codec
from longtake.models.tiled_encoding import can_tile, encode_tiles

NO_PATCH = (1, 1, 1)
"""Patch (latent frames, rows, columns) of a transformer whose tokens are single latent pixels."""

_CHUNK = 4
"""Number of frames per piece in which the causal autoencoders of Wan and Qwen-Image encode a clip
after its first frame. They drop a shorter rest silently, whatever their compression."""

_FOLDER = "vae"  # of the autoencoder in a pipeline
_TILE = "encode_tile.json"  # pixels of the tiles that a run chose, among its frozen parts
_IMAGE_TILE = 512  # pixels; diffusers' default is the size of training images, such as 1024
_IMAGENET = torch.tensor([[0.485, 0.456, 0.406], [0.229, 0.224, 0.225]]).view(2, 1, 3, 1, 1, 1)
"""Means and standard deviations [1, 3, 1, 1, 1] of the channels of pixels in [0, 1]."""


class Codec(Protocol):
    """Interface of codecs between clips [B, 3, F, H, W] uint8 and latents [B, C, F', H', W'].

    Latents are in fp32.
    """

    channels: int
    """Number of latent channels C."""

    shortest: int
    """Least number of frames of a clip."""

    chunk: int
    """Step of the clips' frame numbers: `shortest` + n * `chunk` frames."""

    encode_tile: int
    """Pixels of the tiles in which clips are encoded; 0: as a whole."""

    can_tile: bool
    """Whether `encode_tile` may be more than 0."""

    audio: AudioCodec | None
    """Codec of the sound of clips; None if the model gets none."""

    def latent_shape(self, bucket: Bucket, patch: Sequence[int] = NO_PATCH) -> tuple[int, int, int]:
        """Return the shape (F', H', W') of the latents of a clip.

        Args:
            bucket: shape of clips in pixels.
            patch: latent frames, rows and columns of one token of the model.

        Raises:
            RecipeError: codec or model cannot divide the bucket; names the nearest that both can.
        """

    def encode(self, videos: Tensor) -> Tensor:
        """Encode videos to latents, normalised as the transformer was trained."""

    def decode(self, latents: Tensor, *, tiles: bool = False) -> Tensor:
        """Decode latents to uint8 videos.

        With `tiles`, where the codec has them, overlapping pieces are decoded one after another and
        blended: less memory, but seams may show.

        Raises:
            SamplingError: decoded pixels are NaN or infinite.
        """

    def modules(self) -> list[nn.Module]:
        """Return the codec's frozen modules, which take memory; none if latents are pixels."""

    def to(self, device: torch.device) -> None:
        """Move the codec's modules to a device."""

    def save(self, folder: Path) -> None:
        """Save the codec's weights to a folder, unless they are pretrained."""


class PixelCodec:
    """Codec whose latents are the pixels themselves, scaled to [-1, 1]."""

    channels = 3
    shortest = chunk = 1
    encode_tile = 0
    can_tile = False
    audio: AudioCodec | None = None

    def latent_shape(self, bucket: Bucket, patch: Sequence[int] = NO_PATCH) -> tuple[int, int, int]:
        return bucket.num_frames, bucket.height, bucket.width

    def encode(self, videos: Tensor) -> Tensor:
        return _to_unit_range(videos)

    def decode(self, latents: Tensor, *, tiles: bool = False) -> Tensor:
        return _to_uint8(latents)

    def modules(self) -> list[nn.Module]:
        return []

    def to(self, device: torch.device) -> None:
        pass

    def save(self, folder: Path) -> None:
        pass


class _Autoencoder:
    """Base class of codecs that wrap a frozen autoencoder of diffusers."""

    audio: AudioCodec | None = None
    shortest = 1

    def __init__(self, autoencoder: nn.Module, is_pretrained: bool = False) -> None:
        self.autoencoder = autoencoder.eval().requires_grad_(False)
        self._is_pretrained = is_pretrained
        self.encode_tile = 0
        self.can_tile = can_tile(autoencoder)

    def modules(self) -> list[nn.Module]:
        return [self.autoencoder, *(self.audio.parts if self.audio else ())]

    def to(self, device: torch.device) -> None:
        for module in self.modules():
            module.to(device)
        if device.type == "cuda":
            use_channels_last(self.autoencoder)

    def save(self, folder: Path) -> None:
        # Pretrained weights are loaded again from where the recipe names them.
        if not self._is_pretrained:
            with pretrained.quiet(self.autoencoder):
                self.autoencoder.save_pretrained(folder / _FOLDER)  # type: ignore[operator]

    def _mode(self, pixels: Tensor) -> Tensor:
        """Encode pixels in [-1, 1] to the mode of the autoencoder's posterior, in fp32."""
        pixels = pixels.to(next(self.autoencoder.parameters()).dtype)
        if self.encode_tile:
            moments = encode_tiles(self.autoencoder, pixels, self.encode_tile)
            return moments.chunk(2, dim=1)[0].float()
        encoded: Any = self.autoencoder.encode(pixels)  # type: ignore[operator]
        # Not a sample of the posterior: a clip's latents are then equal in every epoch and in a
        # cache.
        return encoded.latent_dist.mode().float()

    def _decoded(self, raw: Tensor, *, tiles: bool) -> Tensor:
        """Decode latents in the autoencoder's own scale to uint8 pixels."""
        autoencoder: Any = self.autoencoder
        raw = raw.to(next(autoencoder.parameters()).dtype)
        # diffusers keeps both settings on the autoencoder. Left on, they would also cut the
        # encoding of later clips into tiles.
        with ExitStack() as settings:
            if tiles:
                autoencoder.enable_tiling()
                autoencoder.enable_slicing()
                settings.callback(autoencoder.disable_slicing)
                settings.callback(autoencoder.disable_tiling)
            decoded: Tensor = autoencoder.decode(raw).sample
        return _to_uint8(decoded)


def encode_videos(codec: Codec, videos: Tensor) -> Tensor:
    """Encode videos one by one, because convolutions round differently in other batch sizes.

    Videos on the meta device (a plan's) give latents that have a shape but no values.
    """
    if videos.is_meta:
        frames, height, width = videos.shape[2:]
        shape = codec.latent_shape(Bucket(num_frames=frames, height=height, width=width))
        return torch.empty(len(videos), codec.channels, *shape, device="meta")
    return torch.cat([codec.encode(videos[place : place + 1]) for place in range(len(videos))])


def use_channels_last(module: nn.Module) -> None:
    """Lay out convolution weights channels-last, as cuDNN's fastest kernels need them."""
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    for parameter in module.parameters():
        if parameter.dim() in formats:
            layout = formats[parameter.dim()]
            parameter.data = parameter.data.contiguous(memory_format=layout)


class AutoencoderCodec(_Autoencoder):
    """Codec with a frozen causal video autoencoder of diffusers, such as `AutoencoderKLWan`.

    Latents are (mode - latents_mean) / latents_std per channel, which pipelines undo before they
    decode. Tiles are of 256 x 256 pixels, diffusers' default, 64 of them blended.
    """

    chunk = _CHUNK

    def __init__(self, autoencoder: Any, is_pretrained: bool = False) -> None:
        super().__init__(autoencoder, is_pretrained)
        self.channels: int = autoencoder.config["z_dim"]
        self._mean = _per_channel(autoencoder.config, "latents_mean")
        self._std = _per_channel(autoencoder.config, "latents_std")
        self._temporal, self._spatial = _compression(autoencoder.config)

    @staticmethod
    def complete_config(
        known: Mapping[str, Any], config: dict[str, Any], name: str
    ) -> dict[str, Any]:
        """Complete the recipe's arguments of the autoencoder with those that follow from them.

        Random weights have no statistics of latents, and a pipeline reads the compression from the
        config, where the class's defaults describe the released Wan 2.1 alone.
        """
        sizes = {**known, **config}
        try:
            temporal, spatial = _compression(sizes)
            channels = int(sizes["z_dim"])
        except (TypeError, ValueError) as error:
            raise RecipeError(f"codec.config does not fit {name}: {error}.") from error
        following = {
            "latents_mean": [0.0] * channels,
            "latents_std": [1.0] * channels,
            "scale_factor_temporal": temporal,
            "scale_factor_spatial": spatial,
        }
        return {name: value for name, value in following.items() if name in known} | config

    def latent_shape(self, bucket: Bucket, patch: Sequence[int] = NO_PATCH) -> tuple[int, int, int]:
        """Return the latents' shape (F', H', W'), with F' = (F - 1) / temporal + 1 (causal)."""
        # Candidates go one patch beyond the bucket, so that the error can name the nearest fit.
        end, rest = bucket.num_frames + self.chunk * (patch[0] + 1), self.shortest % self.chunk
        known = range(self.shortest, end, self.chunk)
        whole = [number for number in known if self._latent_frames(number) % patch[0] == 0]
        num_frames = min(whole or known, key=lambda number: abs(number - bucket.num_frames))
        of_frames = f" and {self.chunk} n + {rest} frames" if self.chunk > 1 else ""
        _refuse_odd(bucket, num_frames, self._spatial, patch, of_frames)
        frames = self._latent_frames(bucket.num_frames)
        return frames, bucket.height // self._spatial, bucket.width // self._spatial

    def _latent_frames(self, num_frames: int) -> int:
        return (num_frames - 1) // self._temporal + 1

    def _statistics(self, like: Tensor) -> tuple[Tensor, Tensor]:
        """Return the mean and standard deviation of latents [1, C, 1, 1, 1], in `like`'s dtype."""
        return self._mean.to(like), self._std.to(like)

    @torch.no_grad()
    def encode(self, videos: Tensor) -> Tensor:
        latents = self._mode(_to_unit_range(videos))
        mean, deviation = self._statistics(latents)
        return (latents - mean) / deviation

    @torch.no_grad()
    def decode(self, latents: Tensor, *, tiles: bool = False) -> Tensor:
        latents = latents.float()
        mean, deviation = self._statistics(latents)
        return self._decoded(latents * deviation + mean, tiles=tiles)


class LTX2Codec(AutoencoderCodec):
    """Codec with a frozen `AutoencoderKLLTX2Video` of diffusers.

    Latents are (mode - latents_mean) * scaling_factor / latents_std per channel, whose statistics
    are buffers. Tiles are of 512 x 512 pixels, diffusers' default, 64 of them blended.
    """

    def __init__(self, autoencoder: Any, is_pretrained: bool = False) -> None:
        # Past AutoencoderCodec's constructor, which reads config keys that only Wan's class has.
        _Autoencoder.__init__(self, autoencoder, is_pretrained)
        if autoencoder.config["timestep_conditioning"]:
            raise RecipeError(
                "The AutoencoderKLLTX2Video has timestep_conditioning: it decodes noisy latents, "
                "which longtake does not. Name a release whose autoencoder has none, such as "
                "Lightricks/LTX-2."
            )
        self.channels = autoencoder.config["latent_channels"]
        self._temporal, self._spatial = _ltx2_compression(autoencoder.config)
        self.chunk = self._temporal

    @staticmethod
    def complete_config(
        known: Mapping[str, Any], config: dict[str, Any], name: str
    ) -> dict[str, Any]:
        """Complete the autoencoder's arguments with its compression, which diffusers gets wrong."""
        temporal, spatial = _ltx2_compression({**known, **config})
        return {
            "temporal_compression_ratio": temporal,
            "spatial_compression_ratio": spatial,
        } | config

    def _statistics(self, like: Tensor) -> tuple[Tensor, Tensor]:
        autoencoder: Any = self.autoencoder
        both = torch.stack([autoencoder.latents_mean, autoencoder.latents_std]).to(like)
        mean, deviation = both[:, None, :, None, None, None]
        return mean, deviation / autoencoder.config["scaling_factor"]


class ScaledVideoCodec(AutoencoderCodec):
    """Codec with a frozen `AutoencoderKLHunyuanVideo15`; latents are mode * scaling_factor."""

    def __init__(self, autoencoder: Any, is_pretrained: bool = False) -> None:
        # Past AutoencoderCodec's constructor, which reads config keys that only Wan's class has.
        _Autoencoder.__init__(self, autoencoder, is_pretrained)
        self.channels = autoencoder.config["latent_channels"]
        self._temporal = autoencoder.config["temporal_compression_ratio"]
        self._spatial = autoencoder.config["spatial_compression_ratio"]
        self.chunk = self._temporal

    @staticmethod
    def complete_config(
        known: Mapping[str, Any], config: dict[str, Any], name: str
    ) -> dict[str, Any]:
        # The class's default is the scale of the released weights, which random ones do not have.
        return {"scaling_factor": 1.0, **config}

    def _statistics(self, like: Tensor) -> tuple[Tensor, Tensor]:
        config: Any = self.autoencoder.config
        return like.new_zeros(()), like.new_full((), 1 / config["scaling_factor"])


class RgbaCodec(AutoencoderCodec):
    """Codec that encodes opaque frames one by one by a frozen `AutoencoderKLQwenImage21`.

    Its pixels have a fourth channel, of opacity. Decoded ones are shown on white, as the pipeline
    shows them to its text encoder. Tiles are of 256 x 256 pixels, diffusers' default.
    """

    chunk = 1

    def __init__(self, autoencoder: Any, is_pretrained: bool = False) -> None:
        # Past AutoencoderCodec's constructor, which reads the compression of time.
        _Autoencoder.__init__(self, autoencoder, is_pretrained)
        config = autoencoder.config
        self.channels = config["z_dim"]
        self._mean, self._std = (_per_channel(config, f"latents_{n}") for n in ("mean", "std"))
        # Each stage but the last halves rows and columns.
        self._spatial = (config.get("patch_size") or 1) * 2 ** (len(config["dim_mult"]) - 1)
        self._temporal = 1

    @staticmethod
    def complete_config(
        known: Mapping[str, Any], config: dict[str, Any], name: str
    ) -> dict[str, Any]:
        """Complete the autoencoder's arguments with statistics of latents, which it has none of."""
        channels = {**known, **config}["z_dim"]
        return {"latents_mean": [0.0] * channels, "latents_std": [1.0] * channels} | config

    def encode(self, videos: Tensor) -> Tensor:
        pixels = _to_unit_range(videos).transpose(1, 2).flatten(0, 1)[:, :, None]
        latents = super().encode(F.pad(pixels, (0, 0, 0, 0, 0, 0, 0, 1), value=1.0))
        return _by_clip(latents[:, :, 0], len(videos))

    def decode(self, latents: Tensor, *, tiles: bool = False) -> Tensor:
        frames = latents.transpose(1, 2).flatten(0, 1)[:, :, None]
        decoded = super().decode(frames, tiles=tiles)[:, :, 0]
        colours, opacity = decoded[:, :3].float(), decoded[:, 3:].float() / 255
        shown = (colours * opacity + 255 * (1 - opacity)).round().to(torch.uint8)
        return _by_clip(shown, len(latents))


class MiniMaxH3Codec(AutoencoderCodec):
    """Codec with a frozen `AutoencoderKLMiniMaxH3`: 17 n + 5 frames become 5 n + 2 latent frames.

    Pixels have ImageNet's statistics; latents are (mode - latents_mean) / latents_std per channel.
    The autoencoder has tiles of its own, as released: without them its results are others.
    """

    def __init__(self, autoencoder: Any, is_pretrained: bool = False) -> None:
        # Past AutoencoderCodec's constructor, which reads config keys that only Wan's class has.
        _Autoencoder.__init__(self, autoencoder, is_pretrained)
        config, number = autoencoder.config, "latent_channels"
        self.channels, self.chunk = config[number], config["clip_length"]
        self._mean, self._std = (
            _per_channel(config, f"latents_{n}", number) for n in ("mean", "std")
        )
        self._spatial = autoencoder.spatial_compression_ratio
        # Frames are encoded in chunks, the last of which is filled up; latents of it are dropped.
        # What is encoded of one chunk alone cannot be decoded.
        self._of_chunk = autoencoder.tokens_chunk_size
        self.shortest = self.chunk + self._of_chunk
        self._dropped = config["token_drop"]

    @staticmethod
    def complete_config(
        known: Mapping[str, Any], config: dict[str, Any], name: str
    ) -> dict[str, Any]:
        channels = {**known, **config}["latent_channels"]
        return {"latents_mean": [0.0] * channels, "latents_std": [1.0] * channels} | config

    def _latent_frames(self, num_frames: int) -> int:
        return -(-num_frames // self.chunk) * self._of_chunk - self._dropped

    def encode(self, videos: Tensor) -> Tensor:
        mean, deviation = _IMAGENET.to(videos.device)
        return super().encode(((_to_unit_range(videos) + 1) / 2 - mean) / deviation)

    def _decoded(self, raw: Tensor, *, tiles: bool) -> Tensor:
        autoencoder: Any = self.autoencoder
        mean, deviation = _IMAGENET.to(raw.device)
        return _to_uint8((autoencoder.decode(raw).sample.float() * deviation + mean) * 2 - 1)


class ImageCodec(_Autoencoder):
    """Codec that encodes frames one by one by a frozen `AutoencoderKL`, such as FLUX.1's.

    Latents are (mode - shift_factor) * scaling_factor, which FLUX's pipelines undo before they
    decode. Tiles are of 512 x 512 pixels, 128 of them blended.
    """

    def __init__(self, autoencoder: Any, is_pretrained: bool = False) -> None:
        super().__init__(autoencoder, is_pretrained)
        self.chunk = 1
        self.channels: int = autoencoder.config["latent_channels"]
        # The class's default is None: older autoencoders have no shift.
        self._shift: float = autoencoder.config.get("shift_factor") or 0.0
        self._scale: float = autoencoder.config.get("scaling_factor") or 1.0
        # Each stage but the last halves rows and columns.
        self._spatial = 2 ** (len(autoencoder.config["block_out_channels"]) - 1)
        autoencoder.tile_sample_min_size = _IMAGE_TILE
        autoencoder.tile_latent_min_size = _IMAGE_TILE // self._spatial

    @staticmethod
    def complete_config(
        known: Mapping[str, Any], config: dict[str, Any], name: str
    ) -> dict[str, Any]:
        """Complete the recipe's arguments of the autoencoder with those that follow from them."""
        sizes = {**known, **config}
        widths, groups = sizes["block_out_channels"], sizes["norm_num_groups"]
        is_list = isinstance(widths, list | tuple) and all(isinstance(w, int) for w in widths)
        if not is_list or not widths:
            raise RecipeError(
                f"codec.config.block_out_channels = {widths!r}: expected a width for each stage, "
                "such as [128, 256, 512, 512]."
            )
        if any(width % groups for width in widths):
            raise RecipeError(
                f"codec.config.block_out_channels {list(widths)} do not divide into "
                f"norm_num_groups = {groups}. Choose multiples of it, or fewer groups."
            )
        following = {
            "down_block_types": ["DownEncoderBlock2D"] * len(widths),
            "up_block_types": ["UpDecoderBlock2D"] * len(widths),
            "scaling_factor": 1.0,
            "shift_factor": 0.0,
            # As in FLUX.1's: no 1 x 1 convolutions around the latents, unlike in older
            # autoencoders.
            "use_quant_conv": False,
            "use_post_quant_conv": False,
        }
        return {name: value for name, value in following.items() if name in known} | config

    def latent_shape(self, bucket: Bucket, patch: Sequence[int] = NO_PATCH) -> tuple[int, int, int]:
        _refuse_odd(bucket, _nearest(bucket.num_frames, patch[0]), self._spatial, patch)
        return bucket.num_frames, bucket.height // self._spatial, bucket.width // self._spatial

    @torch.no_grad()
    def encode(self, videos: Tensor) -> Tensor:
        mode = self._mode(_to_unit_range(videos.transpose(1, 2).flatten(0, 1)))  # [B F, C, H', W']
        return _by_clip(self._normalized(mode), len(videos))

    @torch.no_grad()
    def decode(self, latents: Tensor, *, tiles: bool = False) -> Tensor:
        frames = latents.transpose(1, 2).flatten(0, 1)
        decoded = self._decoded(self._denormalized(frames.float()), tiles=tiles)
        return _by_clip(decoded, len(latents))

    def _normalized(self, mode: Tensor) -> Tensor:
        return (mode - self._shift) * self._scale

    def _denormalized(self, latents: Tensor) -> Tensor:
        return latents / self._scale + self._shift


class PatchedImageCodec(ImageCodec):
    """Codec that encodes frames one by one by a frozen `AutoencoderKLFlux2` of diffusers.

    A latent pixel is 2 x 2 of the mode's, their channels in the order channel, row, column. Latents
    are normalised by the running statistics of the autoencoder's batch norm, which are buffers.
    """

    def __init__(self, autoencoder: Any, is_pretrained: bool = False) -> None:
        super().__init__(autoencoder, is_pretrained)
        rows, columns = autoencoder.config["patch_size"]
        if rows != columns:
            raise RecipeError(
                f"codec.config.patch_size is {[rows, columns]}: expected as many rows as columns, "
                "such as [2, 2]."
            )
        self._patch: int = rows
        # A patch of pixels of the mode becomes the channels of one latent pixel.
        self.channels *= rows * columns
        self._spatial *= rows
        self._epsilon: float = autoencoder.config["batch_norm_eps"]

    def _statistics(self, like: Tensor) -> tuple[Tensor, Tensor]:
        """Return mean and standard deviation [C, 1, 1] of the patched latents."""
        # Read at each call, because buffers move between devices with the autoencoder.
        norm: Any = self.autoencoder.bn
        statistics = torch.stack([norm.running_mean, norm.running_var]).to(like)
        mean, variance = statistics[:, :, None, None]
        return mean, (variance + self._epsilon).sqrt()

    def _normalized(self, mode: Tensor) -> Tensor:
        patched = F.pixel_unshuffle(mode, self._patch)
        mean, deviation = self._statistics(patched)
        return (patched - mean) / deviation

    def _denormalized(self, latents: Tensor) -> Tensor:
        mean, deviation = self._statistics(latents)
        return F.pixel_shuffle(latents * deviation + mean, self._patch)


_CODECS: dict[str, Any] = {
    "AutoencoderKL": ImageCodec,
    "AutoencoderKLFlux2": PatchedImageCodec,
    "AutoencoderKLLTX2Video": LTX2Codec,
    "AutoencoderKLMiniMaxH3": MiniMaxH3Codec,
    "AutoencoderKLQwenImage21": RgbaCodec,
    "AutoencoderKLHunyuanVideo15": ScaledVideoCodec,
}
"""Codec classes by the class of the diffusers autoencoder; any other is wrapped as Wan's."""


def build_codec(
    section: CodecSection, part: pretrained.PipelinePart, made: Path | None = None
) -> Codec:
    """Build the recipe's codec on the CPU.

    Args:
        section: the recipe's codec section.
        part: the family's codec.
        made: the folder of frozen parts that the run made when it began; None when it begins.

    Raises:
        ModelError: the weights cannot be loaded, or are of a class that the family cannot use.
        RecipeError: the class does not take the recipe's arguments.
    """
    return _build(section, part, made, outlined=False)


def outline_codec(section: CodecSection, part: pretrained.PipelinePart) -> Codec:
    """Outline the recipe's codec on the meta device: it has shapes, but cannot encode."""
    return _build(section, part, None, outlined=True)


def _build(
    section: CodecSection, part: pretrained.PipelinePart, made: Path | None, *, outlined: bool
) -> Codec:
    where, dtype = section.pretrained, numerics.DTYPES[section.dtype]
    tile = kept_tile(section, made)
    if section.kind == "pixels":
        unused = {"pretrained": where, "config": section.config, "encode_tile": tile}
        pretrained.refuse_unused("codec", unused, 'codec.kind is "pixels"')
        return PixelCodec()
    if where is not None:
        unused = {"config": section.config}
        pretrained.refuse_unused("codec", unused, "codec.pretrained brings its own")
        part = releases.find_part(where, part)
    import diffusers  # takes seconds, which a codec of pixels does not need

    autoencoder_class = getattr(diffusers, part.class_name)
    codec_class = part.codec_class or _CODECS.get(part.class_name, AutoencoderCodec)
    # A run's own random weights are read again, because another version may draw others.
    source = (
        str(made) if where is None and made is not None and (made / _FOLDER).is_dir() else where
    )
    if source is not None and outlined:
        autoencoder = deferred_init.on_meta(autoencoder_class, source, part.folder)
    elif source is not None:
        autoencoder = pretrained.load_pretrained(
            autoencoder_class, source, part.folder, torch_dtype=dtype
        )
    else:
        known = pretrained.defaults(autoencoder_class.__init__)
        values = codec_class.complete_config(known, section.config, part.class_name)
        with torch.device("meta" if outlined else "cpu"):
            autoencoder = pretrained.construct("codec.config", autoencoder_class, values)
    numerics.keep_weights_in(autoencoder, dtype)
    codec: Codec = codec_class(autoencoder, where is not None)
    if tile and not codec.can_tile:
        raise RecipeError(
            f"codec.encode_tile is {tile}, but this {part.class_name} encodes whole clips only. "
            'Leave codec.encode_tile out, or set it to "auto" or 0.'
        )
    if part.audio:
        codec.audio = build_audio_codec(part.audio, where, outlined=outlined)
    codec.encode_tile = tile
    return codec


def kept_tile(section: CodecSection, made: Path | None) -> int:
    """Return the pixels of the tiles in which a run encodes clips; 0: as a whole.

    For `codec.encode_tile` = "auto" these are what the run chose when it began.

    Args:
        section: the recipe's codec section.
        made: the folder of frozen parts that the run made when it began; None when it begins.
    """
    if section.encode_tile != "auto":
        return section.encode_tile
    kept = None if made is None else read_record(made / _TILE, dict[str, Count])
    return (kept or {}).get("pixels", 0)


def keep_tile(tile: int, made: Path) -> None:
    """Save the tiles that a run chose for `codec.encode_tile` = "auto", for `kept_tile`."""
    if not tile:  # as in runs from before there were tiles
        (made / _TILE).unlink(missing_ok=True)
        return
    made.mkdir(parents=True, exist_ok=True)
    write_json(made / _TILE, {"pixels": tile})


def _per_channel(config: Any, name: str, number: str = "z_dim") -> Tensor:
    """Return a config's list of one number per latent channel as a tensor [1, C, 1, 1, 1].

    `number` is the config's name of their number.
    """
    values, channels = config[name], config[number]
    if len(values) != channels:
        raise RecipeError(
            f"codec.config: {number} is {channels}, but {name} has {len(values)} values. Give one "
            "per latent channel."
        )
    return torch.tensor(values, dtype=torch.float32).view(1, channels, 1, 1, 1)


def _compression(config: Any) -> tuple[int, int]:
    """Return the compression of Wan's autoencoder: frames and rows that one latent stands for."""
    halvings, levels = config["temperal_downsample"], config["dim_mult"]  # diffusers' spelling
    temporal = 2 ** sum(halvings)
    if len(halvings) != len(levels) - 1 or temporal > _CHUNK:
        raise RecipeError(
            f"codec.config: temperal_downsample {list(halvings)} does not fit dim_mult "
            f"{list(levels)}: expected {len(levels) - 1} values, one less than dim_mult has, and "
            f"at most two of them true, because time is encoded in pieces of {_CHUNK} frames."
        )
    # Every level but one halves rows and columns; those marked true halve the frames, too.
    return temporal, (config.get("patch_size") or 1) * 2 ** len(halvings)


def _ltx2_compression(config: Any) -> tuple[int, int]:
    """Return the compression of LTX-2's autoencoder: frames and rows that one latent stands for."""
    kinds, scales = config["downsample_type"], config["spatio_temporal_scaling"]
    halves = [scales] * len(kinds) if isinstance(scales, bool) else list(scales)
    used = [kind for kind, halved in zip(kinds, halves, strict=False) if halved]
    frames, rows = (
        sum(kind in (name, "spatiotemporal", "conv") for kind in used)
        for name in ("temporal", "spatial")
    )
    return config["patch_size_t"] * 2**frames, config["patch_size"] * 2**rows


def _refuse_odd(
    bucket: Bucket, num_frames: int, spatial: int, patch: Sequence[int], of_frames: str = ""
) -> None:
    """Refuse a clip shape that codec and model cannot divide; name the nearest that fits."""
    rows, columns = (spatial * step for step in patch[1:])
    height, width = _nearest(bucket.height, rows), _nearest(bucket.width, columns)
    nearest = {"num_frames": num_frames, "height": height, "width": width}
    fits = bucket.model_copy(update=nearest)
    if fits != bucket:
        who = "the codec wants" if tuple(patch) == NO_PATCH else "codec and model want"
        sizes = "height and width divisible by"
        if rows != columns:
            sizes = f"height divisible by {rows} and width by"
        raise RecipeError(
            f"data.buckets: {bucket} cannot be encoded: {who} {sizes} {columns}{of_frames}. "
            f"The nearest that fits is {fits}."
        )


def _nearest(size: int, step: int) -> int:
    return max(1, round(size / step)) * step


def _to_unit_range(videos: Tensor) -> Tensor:
    if videos.is_floating_point():  # already in [-1, 1]
        return videos
    return videos.float() / 127.5 - 1


def _to_uint8(pixels: Tensor) -> Tensor:
    """Convert pixels from [-1, 1] to uint8 [0, 255], rounded and clamped."""
    has_values = not isinstance(pixels, FakeTensor)  # the fake tensors of a plan have no values
    if has_values and not pixels.isfinite().all():  # uint8 would hide them as black or white
        share = 1 - pixels.isfinite().double().mean().item()
        raise SamplingError(f"{share:.2%} of the decoded pixels are NaN or infinite.")
    return ((pixels.float() + 1) * 127.5).round().clamp(0, 255).to(torch.uint8)


def _by_clip(images: Tensor, num_clips: int) -> Tensor:
    return images.view(num_clips, -1, *images.shape[1:]).transpose(1, 2)
