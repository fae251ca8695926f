"""What a person should know of a plan is said before it is trained."""

from collections.abc import Callable

import pytest

from longtake.config import DataSection
from longtake.data.catalog import Catalog
from longtake.data.plan import begin
from longtake.data.review import review
from longtake.errors import DataError

_CatalogOf = Callable[..., Catalog]
_Section = Callable[..., DataSection]


@pytest.fixture(scope="module")
def clips(catalog_of: _CatalogOf) -> Catalog:
    """Forty clips of 4 to 43 frames; the longer, the more nouns."""
    return catalog_of(
        range(40), num_frames=lambda n: 4 + n, attributes=lambda n: {"nouns": float(n)}
    )


def _reviewed(
    catalog: Catalog, data: DataSection, num_steps: int | None = None, batch_size: int = 4
) -> list[str]:
    return review(begin({"catalog": catalog}, data, batch_size, 0), data, num_steps)


_JUMP = [
    {"name": "easy", "epochs": 1, "where": ["nouns <= q50"]},
    {"name": "hard", "where": ["nouns > q50"]},
]


def test_a_plan_that_is_well_has_no_warnings(clips: Catalog, section: _Section) -> None:
    """Neither without stages nor with similar ones."""
    similar = [{"name": "a", "epochs": 1, "where": ["nouns > 2"]}, {"name": "b"}]
    assert _reviewed(clips, section()) == []
    assert _reviewed(clips, section(stages=similar), num_steps=100) == []


def test_stages_that_are_too_different_are_named(clips: Catalog, section: _Section) -> None:
    """By attribute, with both means and how far they are apart; the limit is the recipe's."""
    warnings = _reviewed(clips, section(stages=_JUMP))
    assert warnings == [
        "stage hard: mean num_frames goes from 13.5 to 33.5, 3.5 standard deviations",
        "stage hard: mean nouns goes from 9.5 to 29.5, 3.5 standard deviations",
    ]
    assert _reviewed(clips, section(stages=_JUMP, drift_limit=3.5)) == []


def test_stages_that_are_too_different_may_be_refused(clips: Catalog, section: _Section) -> None:
    """With the same words, the limit, and what to do."""
    data = section(stages=_JUMP, on_drift="refuse", drift_limit=2.0)
    with pytest.raises(DataError) as caught:
        _reviewed(clips, data)
    message = str(caught.value)
    assert "stage hard: mean nouns goes from 9.5 to 29.5, 3.5 standard deviations" in message
    assert "data.drift_limit = 2.0" in message
    near = section(stages=[_JUMP[0], {"name": "all"}], on_drift="refuse", drift_limit=2.0)
    assert _reviewed(clips, near) == []


def test_buckets_that_are_empty_or_smaller_than_a_batch_are_named(
    catalog_of: _CatalogOf, section: _Section
) -> None:
    """A clip may come twice in a batch then; nothing is dropped."""
    one, two, none = ({"num_frames": 4, "height": 16, "width": width} for width in (16, 32, 300))
    warnings = _reviewed(catalog_of(range(9)), section(buckets=[one, two, none]))
    assert warnings == [
        "stage all: no clip is for 4 frames of 300x16",
        "stage all: fewer clips than a batch of 4 are for 4 frames of 32x16 (3 clips): its batches "
        "reach over several epochs, and a clip may be in one batch twice",
    ]


def test_stages_that_would_not_be_reached_are_named(clips: Catalog, section: _Section) -> None:
    """With the step that they would begin at."""
    stages = [{"name": "a", "steps": 50}, {"name": "b"}]
    data = section(stages=stages)
    assert _reviewed(clips, data, num_steps=51) == []
    assert _reviewed(clips, data, num_steps=None) == []
    (warning,) = _reviewed(clips, data, num_steps=50)
    assert warning == "stage b would begin at step 50; training ends before"


def test_stages_that_end_before_the_training_are_an_error(
    clips: Catalog, section: _Section
) -> None:
    """Not at the step after the last: with every stage's length and what to set."""
    stages = [{"name": "a", "steps": 50}, {"name": "b", "epochs": 2}]
    data = section(stages=stages)
    end = begin({"catalog": clips}, data, 4, 0).end_step
    assert end == 50 + 20  # 26 and 14 clips, twice, by four
    assert _reviewed(clips, data, num_steps=end) == []
    message = (
        rf"end after step {end} \(a: 50, b: 20\), but training.steps is 71. Set training.steps"
    )
    with pytest.raises(DataError, match=message):
        _reviewed(clips, data, num_steps=end + 1)
