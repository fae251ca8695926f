"""The shift of a release's scheduler is read and written as diffusers' schedulers follow it."""

from typing import Any, Literal

import numpy as np
import pytest
from diffusers import FlowMatchEulerDiscreteScheduler
from diffusers.pipelines.flux.pipeline_flux import calculate_shift
from diffusers.pipelines.flux2.pipeline_flux2 import compute_empirical_mu
from hypothesis import given
from hypothesis import strategies as st

from longtake.errors import ModelError
from longtake.flow.shift import ClipSize, MuLine, ShiftRule
from longtake.flow.timesteps import build_sigmas
from longtake.models.release_scheduler import PipelineMu, scheduler_shift, shift_values


@given(
    values=st.fixed_dictionaries(
        {
            "use_dynamic_shifting": st.booleans(),
            "shift": st.floats(0.2, 20),
            "base_image_seq_len": st.integers(1, 1024),
            "base_shift": st.floats(0.1, 1.5),
            "max_image_seq_len": st.integers(1025, 8192),
            "max_shift": st.floats(0.5, 3),
            "shift_terminal": st.none() | st.floats(0.01, 0.3),
        }
    ),
    mu=st.sampled_from(["line", "flux2"]),
    tokens=st.integers(16, 10_000),
    steps=st.integers(2, 60),
)
def test_sampling_visits_the_sigmas_of_diffusers_scheduler(
    values: dict[str, Any], mu: Literal["line", "flux2"], tokens: int, steps: int
) -> None:
    """As pipelines set it: evenly spaced sigmas, mu of the tokens. Written and read it is equal."""
    scheduler = FlowMatchEulerDiscreteScheduler(**values)
    line = ("base_image_seq_len", "max_image_seq_len", "base_shift", "max_shift")
    at = (
        compute_empirical_mu(tokens, steps)
        if mu == "flux2"
        else calculate_shift(tokens, *(values[name] for name in line))
    )
    even = np.linspace(1, 1 / steps, steps)
    scheduler.set_timesteps(sigmas=even, mu=at if values["use_dynamic_shifting"] else None)
    rule = scheduler_shift(scheduler.config, mu, "somewhere")
    assert rule is not None
    factor = rule.factor(ClipSize(tokens, 1, 1, 1), steps)
    found = build_sigmas(steps, factor, rule.terminal)
    assert found == pytest.approx(scheduler.sigmas.tolist(), abs=2e-6)
    assert scheduler_shift(shift_values(rule, mu, factor), mu, "what was written") == rule


@pytest.mark.parametrize(
    ("shift", "mu", "expected"),
    [
        (ShiftRule(MuLine()), None, {"use_dynamic_shifting": False, "shift": 1.7}),
        (ShiftRule(MuLine()), "flux2", {"use_dynamic_shifting": False, "shift": 1.7}),
        (ShiftRule("flux2"), "line", {"use_dynamic_shifting": False, "flow_shift": 1.7}),
        (ShiftRule("opensora", 0.1), "line", {"flow_shift": 1.7, "shift_terminal": 0.1}),
    ],
)
def test_a_rule_that_a_pipeline_cannot_follow_is_written_as_a_number(
    shift: ShiftRule, mu: PipelineMu, expected: dict[str, Any]
) -> None:
    assert shift_values(shift, mu, 1.7).items() >= expected.items()


def test_a_scheduler_without_a_shift_states_none() -> None:
    for scheduler in (None, {}, {"shift": None}, {"shift": 0}, {"flow_shift": "3"}):
        assert scheduler_shift(scheduler, "line", "somewhere") is None


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"use_dynamic_shifting": True, "time_shift_type": "linear"}, 'time_shift_type = "linear"'),
        ({"shift": 3.0, "use_karras_sigmas": True}, "use_karras_sigmas"),
        ({"shift": 3.0, "shift_terminal": 1}, "'shift_terminal': 1"),
        ({"use_dynamic_shifting": True, "base_shift": "low"}, "'base_shift': 'low'"),
        ({"use_dynamic_shifting": True, "base_image_seq_len": 4096}, "'base_image_seq_len': 4096"),
    ],
)
def test_schedulers_by_which_longtake_does_not_sample_are_refused(
    values: dict[str, Any], named: str
) -> None:
    with pytest.raises(ModelError, match=f"somewhere: its scheduler_config.json has .*{named}"):
        scheduler_shift(values, "line", "somewhere")
