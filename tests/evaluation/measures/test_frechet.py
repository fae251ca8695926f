"""The Frechet distance against its closed form, and with features of a user's network."""

import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from longtake.errors import ModelError, RecipeError
from longtake.evaluation.measures.extra import load_extras, measure_extra
from longtake.evaluation.measures.frechet import (
    EXTRACTOR,
    REAL,
    Extractor,
    Features,
    FrechetDistance,
    frechet_distance,
)


class Means(nn.Module):
    """Mean of each colour: three features."""

    def forward(self, videos: Tensor) -> Tensor:
        """[B, 3] of [B, 3, F, H, W]."""
        return videos.mean(dim=[2, 3, 4])


def _normal(means: Features, deviations: Features) -> Features:
    """Features whose mean and (diagonal) covariance are exactly these."""
    count = len(means)
    corners = np.concatenate([np.eye(count), -np.eye(count)])
    features: Features = means + corners * deviations * np.sqrt((2 * count - 1) / 2)
    return features


@settings(max_examples=40, deadline=None)
@given(
    pairs=st.lists(
        st.tuples(*[st.floats(-5, 5)] * 2, *[st.floats(0.01, 5)] * 2), min_size=1, max_size=5
    )
)
def test_of_independent_features_it_is_the_closed_form(
    pairs: list[tuple[float, float, float, float]],
) -> None:
    """Sum of (m1 - m2)^2 + (s1 - s2)^2: means and standard deviations."""
    one_mean, other_mean, one_std, other_std = np.array(pairs).T
    found = frechet_distance(_normal(one_mean, one_std), _normal(other_mean, other_std))
    closed = ((one_mean - other_mean) ** 2 + (one_std - other_std) ** 2).sum()
    assert found == pytest.approx(closed, rel=1e-6, abs=1e-6)


def test_it_is_symmetric_zero_for_the_same_and_does_not_depend_on_the_axes() -> None:
    """Also where there are fewer videos than features, whose covariance has no full rank."""
    generator = np.random.default_rng(0)
    one, other = generator.normal(size=(5, 8)), generator.normal(size=(7, 8)) + 1
    turned, _ = np.linalg.qr(generator.normal(size=(8, 8)))
    found = frechet_distance(one, other)
    assert frechet_distance(other, one) == pytest.approx(found)
    assert frechet_distance(one @ turned, other @ turned) == pytest.approx(found)
    assert frechet_distance(one, one) == pytest.approx(0, abs=1e-6)


def test_features_of_a_users_network_are_compared_with_real_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TorchScript, and a file of real features that was made by the same network."""
    network, real = tmp_path / "means.ts", tmp_path / "real.npy"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        torch.jit.trace(Means(), torch.zeros(1, 3, 2, 4, 4)).save(network)  # type: ignore[no-untyped-call]
    videos = [np.full((2, 4, 4, 3), level, np.uint8) for level in (0, 51, 102)]
    features = Extractor(str(network))(videos)
    assert features == pytest.approx(np.array([[0.0] * 3, [0.2] * 3, [0.4] * 3]))
    np.save(real, features + np.array([0.5, 0, 0]))
    monkeypatch.setenv(EXTRACTOR, str(network))
    monkeypatch.setenv(REAL, str(real))
    extras = load_extras(["longtake.evaluation.measures.frechet:FrechetDistance"])
    of_each, of_set = measure_extra(extras, videos, ["a"] * 3, 8.0)
    assert of_each == [{}] * 3
    assert of_set == {"frechet_distance": pytest.approx(0.25)}
    assert measure_extra(extras, videos[:1], ["a"], 8.0) == ([{}], {})
    np.save(real, features[:, :2])
    with pytest.raises(ModelError, match=r"makes 3 features of a video, and .* has 2 of each"):
        FrechetDistance()(videos, ["a"] * 3, 8.0)


def test_what_is_missing_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which variable, what it should hold, how to make it."""
    monkeypatch.delenv(EXTRACTOR, raising=False)
    with pytest.raises(RecipeError, match="needs a network that makes features of videos"):
        FrechetDistance()
    monkeypatch.setenv(EXTRACTOR, str(tmp_path / "none.ts"))
    with pytest.raises(ModelError, match="there is no such file"):
        FrechetDistance()
    (tmp_path / "none.ts").write_text("text")
    with pytest.raises(ModelError, match="is no TorchScript file"):
        FrechetDistance()
    monkeypatch.setenv(EXTRACTOR, "torch.nn:Identity")
    monkeypatch.setenv(REAL, str(tmp_path / "none.npy"))
    with pytest.raises(ModelError, match=r"cannot be read: .* Make them with numpy\.save"):
        FrechetDistance()
    np.save(tmp_path / "none.npy", np.zeros(3))
    with pytest.raises(ModelError, match=r"has the shape \[3\]; expected \[N, D\]"):
        FrechetDistance()
