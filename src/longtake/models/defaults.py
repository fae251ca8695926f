"""What recipe keys that are unset stand for, by family and by the pretrained model's own files."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from longtake.config import Shift

GUIDED_DROPOUT = 0.1
"""Share of dropped captions for a model that is sampled with classifier-free guidance."""


@dataclass(frozen=True)
class Defaults:
    """Values of recipe keys that are unset."""

    shift: Shift = 5.0  # of sampling
    guidance_scale: float = 5.0
    num_inference_steps: int = 30
    caption_dropout: float = GUIDED_DROPOUT
    max_tokens: int = 512  # of a pretrained text encoder


def scheduler_shift(scheduler: Mapping[str, Any] | None, otherwise: Shift) -> Shift:
    """The shift of a pipeline's scheduler_config.json.

    Dynamic shifting is FLUX's rule, `flux`: its released constants are those of `flux_mu`.
    """
    if scheduler is None:
        return otherwise
    if scheduler.get("use_dynamic_shifting"):
        return "flux"
    shift = scheduler.get("flow_shift", scheduler.get("shift"))
    return float(shift) if isinstance(shift, int | float) and shift > 0 else otherwise
