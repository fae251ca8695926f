"""Encodes clips by a frozen autoencoder in tiles of rows and columns, and chunks of frames.

The autoencoder's own layers run, each on a part of its usual input, and their results are those of
the whole clip up to rounding:

- In space, `conv_in` and the down blocks run on one tile after another. A tile is read with as many
  rows and columns around it as its results depend on; at the picture's edge it ends there, so that
  the layers pad as they always do. Norms are per position here, so tiles do not differ in them.
- In time, a causal convolution needs only the last frames of its input before a chunk. They are
  kept from chunk to chunk, and nothing is computed twice.
- The middle block and the head, whose attention looks at all rows and columns, run on the joined
  features of all tiles. HunyuanVideo 1.5 attends to all earlier frames as well; its mask has the
  square of all positions, so the attention is computed frame by frame without one.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from longtake.models.banded_encoding import encode_bands
from longtake.models.cuts import Reach, cuts

_Step = tuple[int, int, int]
"""Kernel size, stride, and rows of padding above, of one layer that moves in rows and columns."""
_Kept = dict[nn.Module, Tensor]
"""The last frames of each causal convolution's input, by the convolution."""
_Layer = Callable[[Any, Tensor, _Kept], Tensor]
"""A function that runs one layer on a chunk of frames, with the frames that were kept before."""


class Halves(Protocol):
    """An autoencoder's encoder in two halves: layers that can run in tiles, and the rest."""

    reach: Reach
    chunk: int
    """Number of frames of each chunk after the first, which is one frame."""

    def patched(self, pixels: Tensor) -> Tensor:
        """Return what the first layer takes of pixels [B, 3, F, H, W] in [-1, 1]."""

    def begin(self) -> Callable[[Tensor], Tensor]:
        """Return a function from one chunk after another of a tile's frames to its features."""

    def end(self, chunks: Sequence[Tensor]) -> Tensor:
        """Return the moments [B, 2 C, F', H', W'] of the features of all chunks."""


def can_tile(autoencoder: nn.Module) -> bool:
    """Return whether `encode_tiles` knows the autoencoder's class and settings."""
    name = type(autoencoder).__name__
    if name == "AutoencoderKLLTX2Video":
        return _Ltx2.can_chunk(autoencoder)
    return name in (*_HALVES, *_OF_PICTURES)


def halves_of(autoencoder: nn.Module) -> Halves:
    """Return the halves of an autoencoder's encoder, if `can_tile`."""
    return _HALVES[type(autoencoder).__name__](autoencoder)


@torch.no_grad()
def encode_tiles(autoencoder: nn.Module, pixels: Tensor, tile: int) -> Tensor:
    """Encode pixels to the moments of the autoencoder's posterior.

    Args:
        autoencoder: an autoencoder for which `can_tile`.
        pixels: [B, 3, F, H, W] in [-1, 1], in the autoencoder's type; of an autoencoder of pictures
            [B, 3, H, W].
        tile: most pixels of a tile in a row and in a column, without those around it that it reads;
            of a picture's band in a column.

    Returns:
        Moments [B, 2 C, F', H', W'], equal to those of the autoencoder's own `encode` up to
        rounding; of pictures [B, 2 C, H', W'].
    """
    if type(autoencoder).__name__ in _OF_PICTURES:
        return encode_bands(autoencoder, pixels, tile)
    halves = halves_of(autoencoder)
    height = pixels.shape[-2]
    pixels = halves.patched(pixels)
    scale = height // pixels.shape[-2]  # pixels of a patch
    starts = range(1, pixels.shape[2], halves.chunk)
    chunks = [slice(0, 1), *(slice(start, start + halves.chunk) for start in starts)]
    features: list[Tensor] = []
    rows, columns = (
        list(cuts(size, max(1, tile // scale), halves.reach)) for size in pixels.shape[-2:]
    )
    for row in rows:
        for column in columns:
            tile_pixels = pixels[..., row.read, column.read]
            run = halves.begin()
            for number, frames in enumerate(chunks):
                found = run(tile_pixels[:, :, frames])
                if number == len(features):  # the first tile
                    size = rows[-1].place.stop, columns[-1].place.stop
                    features.append(found.new_empty(*found.shape[:3], *size))
                features[number][..., row.place, column.place] = found[..., row.kept, column.kept]
                del found  # before the next chunk takes its memory
            del run  # and the frames that it keeps, before the next tile
    return halves.end(features)


def _reach(steps: Sequence[_Step]) -> Reach:
    """Return on which pixels a row of features depends, after layers in their running order."""
    first = last = 0  # pixels that the first row of features needs
    stride = 1
    for kernel, step, above in reversed(steps):
        first, last = first * step - above, last * step - above + kernel - 1
        stride *= step
    return Reach(stride, max(0, -first), max(0, last - (stride - 1)))


def _steps(module: nn.Module) -> list[_Step]:
    """List the convolutions of a module with what they need in space, in their running order."""
    steps, padded = [], 0
    for layer in module.modules():
        if isinstance(layer, nn.ZeroPad2d):  # of the next convolution
            padded = layer.padding[2]
        elif isinstance(layer, nn.Conv2d | nn.Conv3d):
            kernel, stride = max(layer.kernel_size[-2:]), layer.stride[-1]
            # Without a stride a convolution keeps the size, whoever pads for it.
            own = int(layer.padding[-1])
            steps.append((kernel, stride, kernel // 2 if stride == 1 else own + padded))
            padded = 0
    return steps


class _Wan:
    """Halves of Wan's and Qwen-Image's encoders, whose layers keep frames between chunks."""

    chunk = 4  # of diffusers' own `encode`

    def __init__(self, autoencoder: Any) -> None:
        self._autoencoder, self._encoder = autoencoder, autoencoder.encoder
        encoder = self._encoder
        self.reach = _reach([step for each in (encoder.conv_in, *encoder.down_blocks)
                             for step in _steps(each)])  # fmt: skip

    def patched(self, pixels: Tensor) -> Tensor:
        size = self._autoencoder.config.get("patch_size")
        if size is None:
            return pixels
        from diffusers.models.autoencoders.autoencoder_kl_wan import patchify

        patched: Tensor = patchify(pixels, size)
        return patched

    def _kept(self) -> list[Any]:
        # As many as all convolutions of both halves, of which one half uses a part.
        return [None] * len(list(self._encoder.modules()))

    def begin(self) -> Callable[[Tensor], Tensor]:
        kept = self._kept()

        def run(frames: Tensor) -> Tensor:
            place = [0]
            features = _convolve_cached(self._encoder.conv_in, frames, kept, place)
            for layer in self._encoder.down_blocks:
                features = layer(features, feat_cache=kept, feat_idx=place)
            return features

        return run

    def end(self, chunks: Sequence[Tensor]) -> Tensor:
        encoder, kept, parts = self._encoder, self._kept(), []
        for chunk in chunks:
            place = [0]
            features = encoder.mid_block(chunk, feat_cache=kept, feat_idx=place)
            features = encoder.nonlinearity(encoder.norm_out(features))
            parts.append(_convolve_cached(encoder.conv_out, features, kept, place))
        moments: Tensor = self._autoencoder.quant_conv(torch.cat(parts, dim=2))
        return moments


def _convolve_cached(
    convolution: nn.Module, frames: Tensor, kept: list[Any], place: list[int]
) -> Tensor:
    """Convolve a chunk as diffusers' encoders do it with their first and last convolution."""
    before = kept[place[0]]
    last = frames[:, :, -2:].clone()
    if before is not None and last.shape[2] < 2:
        last = torch.cat([before[:, :, -1:], last], dim=2)
    result: Tensor = convolution(frames, before)
    kept[place[0]] = last
    place[0] += 1
    return result


class _Hunyuan:
    """Halves of HunyuanVideo 1.5's encoder, which repeats the first frame before it."""

    def __init__(self, autoencoder: Any) -> None:
        self._encoder = autoencoder.encoder
        self.chunk: int = autoencoder.config["temporal_compression_ratio"]
        steps = _steps(self._encoder.conv_in)
        for block in self._encoder.down_blocks:
            steps += _steps(block.resnets)
            for downsampler in block.downsamplers or ():
                steps += [*_steps(downsampler), (2, 2, 0)]  # 2 x 2 positions become channels
        self.reach = _reach(steps)

    def patched(self, pixels: Tensor) -> Tensor:
        return pixels

    def begin(self) -> Callable[[Tensor], Tensor]:
        return _downward(self._encoder, _convolve_padded, _hunyuan_downsample)

    def end(self, chunks: Sequence[Tensor]) -> Tensor:
        encoder, middle = self._encoder, self._encoder.mid_block
        features = middle.resnets[0](torch.cat(list(chunks), dim=2))
        for attention, resnet in zip(middle.attentions, middle.resnets[1:], strict=True):
            if attention is not None:
                features = attend_by_frames(attention, features)
            features = resnet(features)
        shortcut = features.unflatten(1, (-1, encoder.group_size)).mean(dim=2)
        moments: Tensor = encoder.conv_out(encoder.conv_act(encoder.norm_out(features)))
        return moments.add_(shortcut)


def _convolve_padded(convolution: Any, frames: Tensor, kept: _Kept) -> Tensor:
    """Convolve a chunk after the frames that were kept of the one before it."""
    left, right, above, below, num_before, _ = convolution.time_causal_padding
    whole = _after_kept(convolution, frames, num_before, kept)
    padding = (left, right, above, below, 0, 0)
    result: Tensor = convolution.conv(F.pad(whole, padding, mode=convolution.pad_mode))
    return result


def _after_kept(convolution: nn.Module, frames: Tensor, num_before: int, kept: _Kept) -> Tensor:
    """Return a chunk with the `num_before` frames before it; of the first, its first frame again.

    The last `num_before` frames are kept for the next chunk.
    """
    before = kept.get(convolution)
    if before is None:
        before = frames[:, :, :1].expand(-1, -1, num_before, -1, -1)
    last = torch.cat([before, frames[:, :, -num_before:]], dim=2)[:, :, -num_before:]
    kept[convolution] = last.clone()  # a view would hold the memory of all
    return torch.cat([before, frames], dim=2)


def _downward(encoder: Any, convolve: _Layer, downsample: _Layer) -> Callable[[Tensor], Tensor]:
    """Return a function from one chunk of frames after another to features of the down blocks."""
    kept: _Kept = {}

    def run(frames: Tensor) -> Tensor:
        features = convolve(encoder.conv_in, frames, kept)
        for block in encoder.down_blocks:
            for resnet in block.resnets:
                features = _run_resnet(resnet, features, kept, convolve)
            for downsampler in block.downsamplers or ():
                features = downsample(downsampler, features, kept)
        return features

    return run


def _run_resnet(block: Any, frames: Tensor, kept: _Kept, convolve: _Layer) -> Tensor:
    inner = convolve(block.conv1, block.nonlinearity(block.norm1(frames)), kept)
    inner = convolve(block.conv2, block.nonlinearity(block.norm2(inner)), kept)
    return inner + (frames if block.conv_shortcut is None else block.conv_shortcut(frames))


def _hunyuan_downsample(block: Any, frames: Tensor, kept: _Kept) -> Tensor:
    is_first = block.conv not in kept
    halves_time = block.add_temporal_downsample
    # The first chunk is one frame, which has no other to be merged with.
    merged = 2 if halves_time and not is_first else 1
    rearrange = block._dcae_downsample_rearrange
    inner = rearrange(_convolve_padded(block.conv, frames, kept), r1=merged)
    if halves_time and is_first:
        inner = torch.cat([inner, inner], dim=1)
    shortcut = rearrange(frames, r1=merged).unflatten(1, (inner.shape[1], -1)).mean(dim=2)
    return inner + shortcut


def attend_by_frames(block: Any, features: Tensor) -> Tensor:
    """Compute HunyuanVideo 1.5's attention, in which a frame attends to itself and earlier ones.

    Args:
        block: a `HunyuanVideo15AttnBlock`.
        features: [B, C, F, H, W].
    """
    num_frames, *size = features.shape[2:]
    normed = block.norm(features)
    query, key, value = (
        to(normed).flatten(2).transpose(1, 2).unsqueeze(1).contiguous()  # [B, 1, F H W, C]
        for to in (block.to_q, block.to_k, block.to_v)
    )
    del normed
    positions = size[0] * size[1]
    attended = torch.empty_like(query)
    for frame in range(num_frames):
        start, end = frame * positions, (frame + 1) * positions
        attended[:, :, start:end] = F.scaled_dot_product_attention(
            query[:, :, start:end], key[:, :, :end], value[:, :, :end]
        )
    result: Tensor = block.proj_out(attended.squeeze(1).transpose(1, 2).reshape(features.shape))
    return result + features


class _Ltx2:
    """Halves of LTX-2's encoder, which repeats the first frame before it."""

    def __init__(self, autoencoder: Any) -> None:
        self._encoder = autoencoder.encoder
        self.chunk = 1
        steps = _steps(self._encoder.conv_in)
        for block in self._encoder.down_blocks:
            steps += _steps(block.resnets)
            for downsampler in block.downsamplers or ():
                num_frames, rows, _ = downsampler.stride
                steps += [*_steps(downsampler), (rows, rows, 0)]
                self.chunk *= num_frames
        self.reach = _reach(steps)

    @staticmethod
    def can_chunk(autoencoder: Any) -> bool:
        """Return whether frames depend on earlier ones only, and are halved in pairs."""
        config, encoder = autoencoder.config, autoencoder.encoder
        kinds = {"spatial", "temporal", "spatiotemporal"}
        return (
            encoder.is_causal and encoder.patch_size_t == 1 and kinds >= {*config.downsample_type}
        )

    def patched(self, pixels: Tensor) -> Tensor:
        size = self._encoder.patch_size
        return _merged(pixels, (1, size, size), order=(0, 1, 3, 7, 5, 2, 4, 6))

    def begin(self) -> Callable[[Tensor], Tensor]:
        return _downward(self._encoder, _convolve_own, _ltx2_downsample)

    def end(self, chunks: Sequence[Tensor]) -> Tensor:
        encoder = self._encoder
        features = encoder.mid_block(torch.cat(list(chunks), dim=2), causal=True)
        moments = encoder.conv_out(encoder.conv_act(encoder.norm_out(features)), causal=True)
        # One variance for all channels.
        return torch.cat([moments, moments[:, -1:].expand(-1, moments.shape[1] - 2, -1, -1, -1)], 1)


def _convolve_own(convolution: Any, frames: Tensor, kept: _Kept) -> Tensor:
    """Convolve a chunk after the frames that were kept, by a convolution that pads in space."""
    return convolution.conv(_after_kept(convolution, frames, convolution.kernel_size[0] - 1, kept))


def _ltx2_downsample(block: Any, frames: Tensor, kept: _Kept) -> Tensor:
    if block.conv not in kept:  # the first frame, which is repeated to be merged
        frames = torch.cat([frames[:, :, : block.stride[0] - 1], frames], dim=2)
    merged: Any = _merged(frames, block.stride)
    shortcut = merged.unflatten(1, (-1, block.group_size)).mean(dim=2)
    return _merged(_convolve_own(block.conv, frames, kept), block.stride) + shortcut


def _merged(
    frames: Any, stride: Sequence[int], order: Sequence[int] = (0, 1, 3, 5, 7, 2, 4, 6)
) -> Tensor:
    """Make channels of the frames, rows and columns of each stride, in this order."""
    for dim in (4, 3, 2):
        frames = frames.unflatten(dim, (-1, stride[dim - 2]))
    return frames.permute(*order).flatten(1, 4)


_HALVES: dict[str, Callable[[Any], Halves]] = {
    "AutoencoderKLWan": _Wan,
    "AutoencoderKLQwenImage": _Wan,
    "AutoencoderKLQwenImage21": _Wan,
    "AutoencoderKLHunyuanVideo15": _Hunyuan,
    "AutoencoderKLLTX2Video": _Ltx2,
}
_OF_PICTURES = ("AutoencoderKL", "AutoencoderKLFlux2")
"""Autoencoders whose group norms join all positions of a picture."""
