"""Pictures as FLUX's tokens.

Legend: B batch, C latent channels, H and W latent rows and columns, N tokens of a picture.
"""

import torch
from torch import Tensor

PACK = 2
"""Latent rows and columns of one token."""


def pack(latents: Tensor) -> Tensor:
    """Tokens [B, N, 4 C] of latents [B, C, 1, H, W]: each holds 2 x 2 latent pixels."""
    num_samples, channels, _, height, width = latents.shape
    rows, columns = height // PACK, width // PACK
    parts = latents.reshape(num_samples, channels, rows, PACK, columns, PACK)
    return parts.permute(0, 2, 4, 1, 3, 5).reshape(num_samples, rows * columns, -1)


def unpack(tokens: Tensor, height: int, width: int) -> Tensor:
    """Latents [B, C, 1, H, W] of tokens [B, N, 4 C]."""
    rows, columns = height // PACK, width // PACK
    parts = tokens.reshape(len(tokens), rows, columns, -1, PACK, PACK)
    return parts.permute(0, 3, 1, 4, 2, 5).reshape(len(tokens), -1, 1, height, width)


def picture_ids(latents: Tensor, number: int) -> Tensor:
    """[N, 3] fp32: for each token of a picture the picture's number, its row and its column."""
    *_, height, width = latents.shape
    rows, columns = (
        torch.arange(size // PACK, dtype=torch.float32, device=latents.device)
        for size in (height, width)
    )
    return torch.cartesian_prod(rows.new_full((1,), number), rows, columns)
