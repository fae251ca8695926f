"""The table of trackers."""

from importlib import import_module

import pytest

from longtake.config import TrackingSection
from longtake.errors import RecipeError
from longtake.tracking.tracker import TRACKERS, refuse_missing_packages, wanted_trackers

_BOTH = TrackingSection(wandb="offline")


def test_a_row_is_a_module_a_class_and_a_key_of_the_recipe() -> None:
    for key, row in TRACKERS.items():
        assert key in TrackingSection.model_fields
        module = import_module(f"longtake.tracking.{key}")
        wanted = {"open", "write", "flush", "close"}
        assert wanted <= vars(getattr(module, row.class_name)).keys()


def test_the_recipe_switches_trackers_on() -> None:
    assert wanted_trackers(_BOTH) == ["tensorboard", "wandb"]
    assert wanted_trackers(TrackingSection()) == ["tensorboard"]
    assert wanted_trackers(TrackingSection(tensorboard=False)) == []


@pytest.mark.parametrize(
    ("section", "message"),
    [
        (
            TrackingSection(tensorboard=False, wandb="online"),
            r'tracking.wandb = "online", and W&B is not installed.*longtake\[wandb\].*'
            "--set tracking.wandb=off",
        ),
        (TrackingSection(), "tracking.tensorboard = true, .*--set tracking.tensorboard=false"),
    ],
)
def test_a_missing_package_is_refused(
    section: TrackingSection, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With what to do, before the first step."""
    refuse_missing_packages(_BOTH)
    monkeypatch.setattr("longtake.tracking.tracker.find_spec", lambda name: None)
    with pytest.raises(RecipeError, match=message):
        refuse_missing_packages(section)
    refuse_missing_packages(TrackingSection(tensorboard=False))
