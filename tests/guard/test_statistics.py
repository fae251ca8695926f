"""A step's numbers, there and back through JSON."""

import json
import math
from collections.abc import Callable
from dataclasses import replace

from longtake.guard.statistics import Statistics

Healthy = Callable[..., list[Statistics]]


def test_numbers_that_are_none_pass_through_json_that_is_valid_everywhere(healthy: Healthy) -> None:
    """NaN and infinity, which JSON does not know, come back as what they were."""
    [step] = healthy(1)
    lost = replace(
        step,
        edge="stage two begins",
        loss=math.inf,
        grad_norm=-math.inf,
        loss_by_sigma=(math.nan, 0.5, 0.25, 1.0),
        group_grad_norms={"attention": math.nan, "mlp": 0.5},
    )
    back = Statistics.from_dict(json.loads(json.dumps(lost.as_dict(), allow_nan=False)))
    assert repr(back) == repr(lost)  # by what is written, as NaN is not equal to itself


def test_a_text_that_looks_like_a_number_stays_a_text(healthy: Healthy) -> None:
    """A stage may be called "nan" or "1"."""
    step = replace(healthy(1)[0], stage="nan", bucket="1", edge="inf")
    assert Statistics.from_dict(step.as_dict()) == step


def test_rounding_keeps_what_fp32_can_tell_apart(healthy: Healthy) -> None:
    """Rounded numbers are within fp32's own error, and rounding them again changes nothing."""
    step = healthy(1)[0]
    rounded = step.rounded()
    assert math.isclose(rounded.loss, step.loss, rel_tol=2**-24)
    assert rounded.rounded() == rounded
    assert (rounded.step, rounded.stage, rounded.edge) == (step.step, step.stage, step.edge)
