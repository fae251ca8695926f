"""The factors that shift sigmas."""

from typing import Any

import pytest
import torch
from diffusers.pipelines.flux2.pipeline_flux2 import compute_empirical_mu
from hypothesis import given
from hypothesis import strategies as st

from longtake.flow.shift import ClipSize, MuLine, ShiftRule, flux2_mu, named_rule, opensora_shift
from longtake.flow.timesteps import shift_sigmas


def _half(shift: float) -> float:
    """Where sigma 0.5 goes."""
    return shift_sigmas(torch.tensor(0.5, dtype=torch.float64), shift).item()


def test_flux_shift(anchors: Any) -> None:
    line = MuLine()
    for tokens, expected in anchors["flux_mu"].items():
        assert line.mu(int(tokens)) == pytest.approx(expected, rel=1e-14)
    slope, intercept = anchors["flux_slope_icept"]
    assert line.mu(1001) - line.mu(1000) == pytest.approx(slope, rel=1e-9)
    assert line.mu(0) == pytest.approx(intercept, rel=1e-14)
    for tokens, expected in anchors["flux_sigma_t.5"].items():
        factor = named_rule("flux").factor(ClipSize(int(tokens), 1, 1, 1), 28)
        assert _half(factor) == pytest.approx(expected, rel=1e-14)


def test_opensora_shift(anchors: Any) -> None:
    """The ratio and where sigma 0.5 goes; Open-Sora's codec makes 5 latents of 17 frames."""
    for key, (shift, sigma) in anchors["opensora12"].items():
        height, width, num_frames = (int(part) for part in key.split("x"))
        num_latent_frames = 1 if num_frames == 1 else num_frames // 17 * 5
        found = opensora_shift(height, width, num_latent_frames)
        assert found == pytest.approx(shift, rel=1e-14)
        assert _half(found) == pytest.approx(sigma, rel=1e-14)
        size = ClipSize(1, height, width, num_latent_frames)
        assert named_rule("opensora").factor(size, 28) == found


@given(tokens=st.integers(1, 20_000), steps=st.integers(1, 250))
def test_flux2s_shift_is_the_pipelines(tokens: int, steps: int) -> None:
    assert flux2_mu(tokens, steps) == pytest.approx(compute_empirical_mu(tokens, steps), rel=1e-12)


def test_flux2s_shift_follows_the_steps_up_to_4300_tokens() -> None:
    """A factor follows neither, and FLUX.1's line the tokens alone."""
    factors = {
        by: [
            ShiftRule(by).factor(ClipSize(tokens, 512, 512, 1), steps)
            for tokens, steps in ((4300, 28), (4300, 50), (4301, 28), (4301, 50))
        ]
        for by in (3.0, MuLine(), "flux2")
    }
    assert factors[3.0] == [3.0] * 4
    few, many, *beyond = factors["flux2"]
    assert few > many > 2 * beyond[0]
    assert beyond[0] == beyond[1]
    line = factors[MuLine()]
    assert line[0] == line[1] < line[2] == line[3]


def test_in_training_a_rule_ends_at_the_tokens_that_it_was_made_for() -> None:
    """2048 x 2048 pixels have 16,384 tokens; a factor and Open-Sora's rule know no such end."""
    small, large = ClipSize(1024, 512, 512, 1), ClipSize(16_384, 2048, 2048, 1)
    for by, most in ((MuLine(), 4096), (MuLine(1024, 0.95, 8192, 2.05), 8192), ("flux2", 4096)):
        rule = ShiftRule(by)  # type: ignore[arg-type]
        assert rule.within_range(small) == small
        assert rule.within_range(large) == large._replace(num_tokens=most)
    assert ShiftRule(3.0).within_range(large) == large
    assert ShiftRule("opensora").within_range(large) == large
