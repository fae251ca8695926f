"""What is known about a step before its update is made; the same numbers on every rank."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Self

GROUPS = ("embedding", "attention", "mlp", "added", "other")
"""Parts of a model whose trained weights are measured apart."""

_DIGITS = 8
"""Of floats that are remembered: as many as fp32 has, and half the bytes in checkpoints."""


@dataclass(frozen=True)
class Statistics:
    """Numbers of one step, reduced over all ranks; any of the floats may be NaN or infinite."""

    step: int
    """Steps done before this one."""
    batch: int
    """Number of its batch in the run's data."""
    stage: str
    """The stage that the batch is of."""
    edge: str | None
    """What begins with this batch, for people: "epoch 3 of stage all begins"."""
    bucket: str
    """The shape of its clips, for people."""
    loss: float
    """Mean over the samples."""
    num_samples: int
    """Samples that the loss is the mean of."""
    loss_by_sigma: tuple[float, float, float, float]
    """Mean loss at sigmas in [0, 1/4), [1/4, 1/2), [1/2, 3/4) and [3/4, 1]; NaN: no sample."""
    grad_norm: float
    """Of the mean loss's gradient before clipping."""
    nonfinite_share: float
    """Of the gradient's numbers, those that are none."""
    weight_norm: float
    """Of the trained weights that the step began with."""
    update_ratio: float
    """Norm of the update before this step over that of the weights; 0 where there was none."""
    learning_rate_factor: float
    """The schedule's factor of that update."""
    group_grad_norms: dict[str, float] = field(default_factory=dict)
    """`grad_norm` of each of `GROUPS` that has trained weights."""
    group_weight_norms: dict[str, float] = field(default_factory=dict)
    """`weight_norm` of each."""
    group_update_ratios: dict[str, float] = field(default_factory=dict)
    """`update_ratio` of each."""

    def as_dict(self) -> dict[str, Any]:
        """For JSON, which knows no NaN and no infinity: those are "nan", "inf" and "-inf"."""
        return {each.name: _for_json(getattr(self, each.name)) for each in fields(self)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """The statistics that `as_dict` was made of."""
        texts = ("stage", "edge", "bucket")
        return cls(**{k: v if k in texts else _from_json(v) for k, v in values.items()})

    def rounded(self) -> Self:
        """With as many digits of each float as are worth remembering."""
        return type(self)(
            **{each.name: _rounded(getattr(self, each.name)) for each in fields(self)}
        )


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.{_DIGITS}g}")
    if isinstance(value, tuple):
        return tuple(map(_rounded, value))
    if isinstance(value, dict):
        return {name: _rounded(each) for name, each in value.items()}
    return value


def _for_json(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, tuple):
        return list(map(_for_json, value))
    if isinstance(value, dict):
        return {name: _for_json(each) for name, each in value.items()}
    return value


def _from_json(value: Any) -> Any:
    if isinstance(value, str):
        return float(value)
    if isinstance(value, list):
        return tuple(map(_from_json, value))
    if isinstance(value, dict):
        return {name: _from_json(each) for name, each in value.items()}
    return value
