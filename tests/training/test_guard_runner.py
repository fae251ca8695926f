"""What a report says about clips whose loss was NaN."""

from typing import Any

from longtake.training.guard_runner import _name_non_finite_clips


def _sample(step: int, clip: str, loss: float | str) -> dict[str, Any]:
    return {"step": step, "identity": clip * 32, "caption": f"clip {clip}", "loss": loss}


def test_a_clip_whose_loss_was_never_finite_is_named() -> None:
    samples = [_sample(3, "a", "nan"), _sample(3, "b", 1.0), _sample(5, "a", "inf")]
    said = _name_non_finite_clips(samples)
    assert "aaaaaaaaaaaa ('clip a', 2 times)" in said
    assert "bbb" not in said
    assert not _name_non_finite_clips([*samples, _sample(6, "a", 1.0)])
    of_the_model = [_sample(1, "b", 1.0), _sample(3, "a", "nan"), _sample(4, "a", "nan")]
    assert not _name_non_finite_clips(of_the_model)
