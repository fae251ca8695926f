"""A coming stage is compared with the present one, as the two are mixed from their catalogs."""

from collections.abc import Callable

import numpy as np
import pytest

from longtake.config import DataSection
from longtake.data.catalog import Catalog
from longtake.data.drift import Drift, drifts
from longtake.data.plan import begin

_CatalogOf = Callable[..., Catalog]
_Section = Callable[..., DataSection]


@pytest.fixture(scope="module")
def clips(catalog_of: _CatalogOf) -> Catalog:
    """Forty clips of 4 to 43 frames; the longer, the more nouns; every fifth has no score."""
    return catalog_of(
        range(40),
        num_frames=lambda n: 4 + n,
        attributes=lambda n: {"nouns": float("nan") if n % 5 == 0 else float(n)},
    )


def _drifts(catalogs: dict[str, Catalog], data: DataSection) -> dict[str, Drift]:
    return {drift.attribute: drift for drift in drifts(begin(catalogs, data, 4, 0))}


def test_drift_is_measured_in_standard_deviations(clips: Catalog, section: _Section) -> None:
    """By attribute, of what is known; what is always the same does not drift."""
    stages = [
        {"name": "a", "where": ["num_frames < 12"], "epochs": 1},
        {"name": "b", "where": ["num_frames >= 12"]},
    ]
    found = _drifts({"catalog": clips}, section(stages=stages))
    frames, nouns = found["num_frames"], found["nouns"]
    assert (frames.before, frames.after) == (7.5, 27.5)
    assert frames.distance == pytest.approx(20 / np.std(np.arange(4, 12)))
    assert nouns.before == pytest.approx(np.mean([1, 2, 3, 4, 6, 7]))
    assert {drift.stage for drift in found.values()} == {"b"}
    assert found["fps"].distance == 0


def test_a_constant_that_moves_is_an_infinite_drift(
    catalog_of: _CatalogOf, section: _Section
) -> None:
    """There is no scale to measure it by, but it must not pass for nothing."""
    clips = catalog_of(range(6), fps=lambda n: 8.0 if n < 3 else 16.0)
    stages = [
        {"name": "a", "where": ["fps < 10"], "epochs": 1},
        {"name": "b", "where": ["fps > 10"]},
    ]
    drift = _drifts({"catalog": clips}, section(stages=stages))["fps"]
    assert drift.distance == np.inf
    assert str(drift).endswith("goes from 8 to 16, and it was the same for all clips before")


def test_a_stage_of_other_catalogs_is_compared_too(
    catalog_of: _CatalogOf, section: _Section
) -> None:
    """Each catalog counts as much as its share of the batches, however many clips it has."""
    short = catalog_of(range(30), num_frames=lambda n: 10)
    long = catalog_of(range(100, 110), num_frames=lambda n: 20)
    stages = [
        {"name": "a", "steps": 5, "weights": {"long": 0}},
        {"name": "b", "steps": 5, "weights": {"short": 3, "long": 1}},
        {"name": "c", "steps": 5, "weights": {"short": 0}},
    ]
    data = section(catalogs={"short": "s.parquet", "long": "l.parquet"}, stages=stages)
    plan = begin({"short": short, "long": long}, data, 4, 0)
    b, c = (drift for drift in drifts(plan) if drift.attribute == "num_frames")
    assert (b.stage, b.before, b.after, b.distance) == ("b", 10, 12.5, np.inf)
    assert (c.stage, c.before, c.after) == ("c", 12.5, 20)
    assert c.distance == pytest.approx(7.5 / np.std([10, 10, 10, 20]))
