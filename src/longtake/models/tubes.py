"""Clips cut into tubes of some frames, rows and columns, and put together again.

Legend: B clips, C channels, F frames, H height, W width, N tubes, D width of a token.
"""

import math

import torch
from torch import Tensor

from longtake.errors import ModelError


def grid_of(
    clip_shape: tuple[int, int, int, int], patch_size: tuple[int, int, int]
) -> tuple[int, int, int]:
    """Return how many tubes stand along frames, height and width."""
    _, num_frames, height, width = clip_shape
    extents = (num_frames, height, width)
    for name, extent, patch in zip(("frames", "height", "width"), extents, patch_size, strict=True):
        if extent < 1 or patch < 1 or extent % patch:
            raise ModelError(
                f"clips of {num_frames} frames of {height}x{width} do not divide into tubes of "
                f"{' x '.join(map(str, patch_size))} (frames, height, width): {name} {extent} is "
                f"not a multiple of {patch}. Choose another patch_size or clip size."
            )
    return num_frames // patch_size[0], height // patch_size[1], width // patch_size[2]


def sine_positions(grid: tuple[int, int, int], hidden_size: int) -> Tensor:
    """Return [N, D]: a third of the width each for frame, row and column, as sines and cosines."""
    sixth = hidden_size // 6
    frequencies = 32.0 ** -(torch.arange(sixth) / sixth)
    axes = torch.meshgrid(*[torch.arange(extent).float() for extent in grid], indexing="ij")
    angles = [axis.reshape(-1, 1) * frequencies for axis in axes]
    return torch.cat([wave for angle in angles for wave in (angle.sin(), angle.cos())], dim=-1)


def to_tubes(clips: Tensor, patch_size: tuple[int, int, int]) -> Tensor:
    """Return [B, N, tube values] from [B, C, F, H, W]."""
    num_clips, channels, num_frames, height, _ = clips.shape
    frames, rows, columns = patch_size
    parts = clips.reshape(
        num_clips, channels, num_frames // frames, frames, height // rows, rows, -1, columns
    )
    return parts.permute(0, 2, 4, 6, 1, 3, 5, 7).reshape(
        num_clips, -1, channels * math.prod(patch_size)
    )


def from_tubes(
    tubes: Tensor, patch_size: tuple[int, int, int], clip_shape: tuple[int, int, int, int]
) -> Tensor:
    """Return [B, C, F, H, W] from [B, N, tube values]."""
    channels, num_frames, height, width = clip_shape
    frames, rows, columns = patch_size
    parts = tubes.reshape(
        -1, num_frames // frames, height // rows, width // columns, channels, *patch_size
    )
    return parts.permute(0, 4, 1, 5, 2, 6, 3, 7).reshape(-1, *clip_shape)
