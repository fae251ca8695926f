"""Encodes pictures by a frozen autoencoder of FLUX or Z-Image layer by layer, in bands of rows.

These autoencoders normalise over all positions of a picture (group norm), so that no tile can run
through several layers alone. Instead each convolution runs band by band, between features of the
whole picture: first the statistics of a norm are summed over all bands, then each band is
normalised, activated and convolved. Latents are those of the whole picture up to rounding. Of the
four to five whole tensors that a layer otherwise has at a time, two are left.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from longtake.models.cuts import Reach, cuts

_AROUND = Reach(1, 1, 1)  # a convolution of 3 x 3
_HALVING = Reach(2, 0, 1)  # one with a stride of 2, which pads below and to the right
_Run = Callable[[Tensor], Tensor]


@torch.no_grad()
def encode_bands(autoencoder: Any, pictures: Tensor, band: int) -> Tensor:
    """Encode pictures one by one to the moments of the autoencoder's posterior.

    Args:
        autoencoder: an `AutoencoderKL` or `AutoencoderKLFlux2`.
        pictures: [B, 3, H, W] in [-1, 1], in the autoencoder's type.
        band: most rows of features in a band, without those around it that it reads.

    Returns:
        Moments [B, 2 C, H', W'], equal to those of the autoencoder's own `encode` up to rounding.
    """
    encoder, found = autoencoder.encoder, []
    for picture in torch.split(pictures, 1):
        features = _in_bands(encoder.conv_in, picture, band, _AROUND)
        for block in encoder.down_blocks:
            for resnet in block.resnets:
                features = _run_resnet(resnet, features, band)
            for downsampler in block.downsamplers or ():
                features = _in_bands(downsampler, features, band, _HALVING)
        features = encoder.mid_block(features)
        features = encoder.conv_out(encoder.conv_act(encoder.conv_norm_out(features)))
        quant = autoencoder.quant_conv
        found.append(features if quant is None else quant(features))
    return torch.cat(found)


def _run_resnet(resnet: Any, features: Tensor, band: int) -> Tensor:
    """Run a `ResnetBlock2D` without time embedding; `features` may be changed."""

    def convolved(convolution: nn.Module, norm: nn.GroupNorm, whole: Tensor) -> _Run:
        scale, shift = _fixed(norm, whole, band)

        def run(part: Tensor) -> Tensor:
            normed = torch.addcmul(shift, part.to(scale.dtype), scale).to(part.dtype)
            result: Tensor = convolution(resnet.nonlinearity(normed))
            return result

        return run

    inner = _in_bands(convolved(resnet.conv1, resnet.norm1, features), features, band, _AROUND)
    if resnet.conv_shortcut is not None:
        features = _in_bands(resnet.conv_shortcut, features, band, Reach(1, 0, 0))
    run = convolved(resnet.conv2, resnet.norm2, inner)
    # Bands of `inner` are read, so those of the shortcut can be added to where they are.
    for cut in cuts(inner.shape[2], band, _AROUND):
        features[:, :, cut.place] += run(inner[:, :, cut.read])[:, :, cut.kept]
    return features.div_(resnet.output_scale_factor)


def _fixed(norm: nn.GroupNorm, whole: Tensor, band: int) -> tuple[Tensor, Tensor]:
    """Return scale and shift [B, C, 1, 1] of a group norm's channels, for all of a picture.

    Means and variances of bands are joined as by Chan, Golub and LeVeque (1979).
    """
    groups, sizes, parts = norm.num_groups, list[int](), list[tuple[Tensor, Tensor]]()
    for rows in torch.split(whole, band, dim=2):
        values = rows.reshape(len(rows), groups, -1).float()
        parts.append(torch.var_mean(values, dim=2, correction=0))
        sizes.append(values.shape[2])
    shares = torch.tensor(sizes, device=whole.device, dtype=torch.float64)[:, None, None]
    shares /= shares.sum()
    variances, means = (torch.stack(each).double() for each in zip(*parts, strict=True))
    mean = (shares * means).sum(0)
    variance = (shares * (variances + (means - mean).square())).sum(0)
    deviation = (variance + norm.eps).sqrt()
    per_group = whole.shape[1] // groups
    mean, deviation = (each.repeat_interleave(per_group, 1) for each in (mean, deviation))
    scale = norm.weight.double() / deviation
    shift = norm.bias.double() - mean * scale
    return scale.float()[:, :, None, None], shift.float()[:, :, None, None]


def _in_bands(run: _Run, whole: Tensor, band: int, reach: Reach) -> Tensor:
    """Run a layer on bands of at most so many of its rows, and join what it makes of them."""
    made: Tensor | None = None
    for cut in cuts(whole.shape[2], band * reach.stride, reach):
        part = run(whole[:, :, cut.read])[:, :, cut.kept]
        if made is None:
            made = part.new_empty(*part.shape[:2], whole.shape[2] // reach.stride, part.shape[3])
        made[:, :, cut.place] = part
    assert made is not None
    return made
