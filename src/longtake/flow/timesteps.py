"""Distributions of sigmas in training, and the sigmas visited in sampling.

A distribution is its quantile function: an increasing map of a uniform number in [0, 1) to a sigma,
so that ranks that agree on the numbers agree on the sigmas.
"""

import math
from functools import lru_cache
from typing import Literal, get_args

import torch
from torch import Tensor

from longtake.errors import RecipeError

# sigma = 1 is pure noise. A logit-normal mean above 0 and a shift above 1 both mean more noise. SD3
# (arXiv:2403.03206, sections 3.1 and 5.3.2), Flux and diffusers run time in the same direction, so
# their formulas and constants appear unchanged, as does Open-Sora's shift, though its velocity has
# the opposite sign. flow_matching runs time the other way: its t is 1 - sigma.

SigmaKind = Literal["uniform", "logit_normal", "mode", "cosmap"]

_BISECTIONS = 53  # as many bits as a float64 has
_MIN_SHARE = 1e-6
_QUANTILE_RANGE = 1 / (1 + math.exp(7.5)), 1 / (1 + math.exp(-9))
"""Sigmas whose logarithms of the signal-to-noise ratio are 15 and -18."""
MODE_SCALE_MIN = -1.0
MODE_SCALE_MAX = 2 / (math.pi - 2)
"""Largest `scale` of the distribution `mode`; beyond it `mode` is not monotone."""


def sample_sigmas(
    uniform: Tensor,
    kind: SigmaKind,
    *,
    mean: float = 0.0,
    std: float = 1.0,
    scale: float = 1.29,
    shift: float = 1.0,
    sigma_range: tuple[float, float] = (0.0, 1.0),
    uniform_share: float = 0.0,
) -> Tensor:
    """Map uniform numbers in [0, 1) to sigmas in [0, 1], of the same shape and dtype.

    Args:
        uniform: fp32 or wider.
        kind: the distribution.
        mean: mean of `logit_normal`; above 0 means more noise.
        std: standard deviation of `logit_normal`.
        scale: scale of `mode`; above 0 samples more in the middle, below 0 at the ends.
        shift: applied last; above 1 means more noise, 1 changes nothing.
        sigma_range: lowest and highest sigma after the shift. The distribution is restricted to it:
            inside, sigmas are as likely relative to each other as without it.
        uniform_share: uniform share of `logit_normal`; above 0 it is `stretched_logit_normal`.

    Raises:
        RecipeError: the kind is unknown, or a number is out of range.
    """
    distribution = (kind, mean, std, scale, shift, uniform_share)
    if sigma_range == (0.0, 1.0):
        return _quantile(uniform, *distribution)
    below, within = range_share(*distribution[:5], sigma_range, uniform_share)
    # In float64, because a narrow range leaves fp32 few different numbers.
    restricted = _quantile(below + within * uniform.double(), *distribution)
    return restricted.clamp(*sigma_range).to(uniform.dtype)


@lru_cache
def range_share(
    kind: SigmaKind,
    mean: float,
    std: float,
    scale: float,
    shift: float,
    sigma_range: tuple[float, float],
    uniform_share: float = 0.0,
) -> tuple[float, float]:
    """Return the shares of a distribution of sigmas that are below a range and within it.

    Raises:
        RecipeError: less than a millionth lies in it.
    """
    wanted = torch.tensor(sigma_range, dtype=torch.float64)
    low, high = torch.zeros_like(wanted), torch.ones_like(wanted)
    # Quantile functions rise, so bisection inverts them; each step halves the interval.
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        is_below = _quantile(middle, kind, mean, std, scale, shift, uniform_share) < wanted
        low, high = torch.where(is_below, middle, low), torch.where(is_below, high, middle)
    # At 0 and 1 bisection would leave a rounding error.
    first, last = torch.where(wanted >= 1, 1.0, torch.where(wanted <= 0, 0.0, low)).tolist()
    if last - first < _MIN_SHARE:
        raise RecipeError(
            f"flow.sigma_range is [{sigma_range[0]:g}, {sigma_range[1]:g}], in which less than a "
            f"millionth of the sigmas of {kind} with shift {shift:.4g} lie. Widen it, or choose "
            "another flow.timestep_sampling or flow.shift."
        )
    return first, last - first


def _quantile(
    uniform: Tensor,
    kind: SigmaKind,
    mean: float,
    std: float,
    scale: float,
    shift: float,
    uniform_share: float,
) -> Tensor:
    if uniform_share and kind == "logit_normal":
        # A shift of a logit-normal number adds its logarithm to the mean. The trainer stretches
        # after it.
        return stretched_logit_normal(uniform, mean + math.log(shift), std, uniform_share)
    match kind:
        case "uniform":
            sigmas = uniform
        case "logit_normal":
            sigmas = logit_normal(uniform, mean, std)
        case "mode":
            sigmas = mode(uniform, scale)
        case "cosmap":
            sigmas = cosmap(uniform)
        case _:
            raise RecipeError(
                f"{kind!r} is no distribution of sigmas. "
                f"Choose one of: {', '.join(get_args(SigmaKind))}."
            )
    return shift_sigmas(sigmas, shift)


def logit_normal(uniform: Tensor, mean: float = 0.0, std: float = 1.0) -> Tensor:
    """Map uniform numbers by the logit-normal quantile, sigmoid(mean + std * normal quantile).

    Source: SD3, section 3.1.
    """
    if not std > 0:
        raise RecipeError(f"A logit-normal standard deviation of {std} is not above 0. Try 1.0.")
    return torch.sigmoid(mean + std * torch.special.ndtri(uniform))


def stretched_logit_normal(
    uniform: Tensor, mean: float, std: float, uniform_share: float
) -> Tensor:
    """Sample LTX-2's training distribution: a stretched logit-normal with a uniform share.

    sigma = |(x - a) / (b - a)|, at most 1, where x is logit-normal and a and b are its quantiles of
    0.5 % and 99.9 %; `uniform_share` of the sigmas are uniform. So low sigmas are trained however
    large the mean. Source: `ShiftedLogitNormalTimestepSampler` in Lightricks/LTX-2,
    packages/ltx-trainer/src/ltx_trainer/timestep_samplers.py, with a share of 0.1; it folds at
    0.001 instead of 0, and draws where this inverts the share of sigmas below one.
    """
    levels = torch.tensor([0.005, 0.999], dtype=torch.float64)
    first, last = logit_normal(levels, mean, std)

    def share_below(stretched: Tensor) -> Tensor:
        sigmas = (first + stretched * (last - first)).clamp(0, 1)
        return torch.special.ndtr((torch.logit(sigmas) - mean) / std)

    wanted = uniform.double()
    low, high = torch.zeros_like(wanted), torch.ones_like(wanted)
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        # The absolute value folds sigmas below 0 over: both signs count.
        folded = share_below(middle) - share_below(-middle)
        is_below = (1 - uniform_share) * folded + uniform_share * middle < wanted
        low, high = torch.where(is_below, middle, low), torch.where(is_below, high, middle)
    return low.to(uniform.dtype)


def mode(uniform: Tensor, scale: float = 1.29) -> Tensor:
    """Map uniform numbers to SD3's heavy-tailed distribution, whose mode at 1/2 `scale` sharpens.

    Source: SD3, section 3.1, which writes f(u) = 1 - u - scale * (cos(pi u / 2)^2 - 1 + u). That
    falls from 1 to 0; this is f(1 - u), which has the same distribution and rises.
    """
    if not MODE_SCALE_MIN <= scale <= MODE_SCALE_MAX:
        raise RecipeError(
            f"A mode scale of {scale} folds the distribution over itself. "
            f"Choose one from {MODE_SCALE_MIN} to {MODE_SCALE_MAX:.6f}; SD3 uses 1.29."
        )
    return uniform - scale * (torch.sin(0.5 * math.pi * uniform).square() - uniform)


def cosmap(uniform: Tensor) -> Tensor:
    """Map uniform numbers to sigmas with the cosine schedule's signal-to-noise ratio.

    Source: SD3, section 3.1, 1 - 1 / (tan(pi u / 2) + 1), here without the pole at u = 1.
    """
    angle = 0.5 * math.pi * uniform
    return torch.sin(angle) / (torch.sin(angle) + torch.cos(angle))


def shift_sigmas(sigmas: Tensor, shift: float) -> Tensor:
    """Shift sigmas to shift * sigma / (1 + (shift - 1) * sigma); 0 and 1 stay.

    Shifting by a and then by b is shifting by a * b. Source: SD3, section 5.3.2, equation 23.
    """
    if not (shift > 0 and math.isfinite(shift)):
        raise RecipeError(f"A shift of {shift} is not a number above 0. 1 changes nothing.")
    shifted = shift * sigmas
    # The same denominator as above, but it rounds so that 0 and 1, and any sigma for shift 1, stay.
    return shifted / (shifted + (1 - sigmas))


def build_sigmas(
    num_steps: int, shift: float = 1.0, terminal: float = 0.0, logit_std: float | None = None
) -> list[float]:
    """Return the num_steps + 1 sigmas that sampling visits, from 1 down to 0.

    They are evenly spaced and then shifted once, as the Flux pipeline does; with `logit_std` they
    are, before the shift, evenly spaced quantiles of that logit-normal distribution, and those
    above 0 stay within `_QUANTILE_RANGE`, as Ideogram 4's pipeline has it. A `terminal` above 0
    then stretches them so that it is the last one above 0 (one step stays at 1). diffusers'
    FlowMatchEulerDiscreteScheduler, left to choose its own grid, differs in two ways: the last step
    starts at 0.001 instead of 1 / num_steps, and a fixed shift is applied twice, to the smallest
    sigma when the scheduler is built and to the whole grid when the steps are set.

    Raises:
        RecipeError: there are no steps, or the shift is not above 0.
    """
    if num_steps < 1:
        raise RecipeError(f"Sampling in {num_steps} steps is not possible; 1 is the least.")
    even = torch.linspace(1, 0, num_steps + 1, dtype=torch.float64)
    if logit_std is None:
        sigmas = shift_sigmas(even, shift)
    else:
        sigmas = shift_sigmas(logit_normal(even, std=logit_std), shift)
        sigmas[:-1] = sigmas[:-1].clamp(*_QUANTILE_RANGE)
    if terminal and num_steps > 1:
        sigmas[:-1] = 1 - (1 - sigmas[:-1]) * ((1 - terminal) / (1 - sigmas[-2]))
    return [float(sigma) for sigma in sigmas]
