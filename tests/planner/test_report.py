"""What a training does besides its steps counts for the exit code of `longtake plan`."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from tests.build import TINY_WAN, MakeRecipe

from longtake.config import Bucket
from longtake.planner.devices import DEVICES
from longtake.planner.encoding import TileChoice
from longtake.planner.mesh import links_of
from longtake.planner.phases import PhaseForecast
from longtake.planner.report import PlanReport, make_report

_GPU = DEVICES["h100"].with_own_memory()
_RAM = 2**35
_ALL = ("text", "encode", "step", "model", "decode", "sampling")


def _with_short_phases(
    *, cache: str | None, misses: bool = False, is_filled: bool = False, **given: Any
) -> Any:
    phases = [PhaseForecast(1, 2, 1.0, name=name, fits=False) for name in _ALL]
    phases[0] = replace(phases[0], ram_bytes=given.get("to_read", 0))
    in_training = given.get("in_training", False)
    recipe = SimpleNamespace(
        data=SimpleNamespace(cache=cache), sampling=SimpleNamespace(in_training=in_training)
    )
    step = SimpleNamespace(recipe=recipe, device=replace(_GPU, ram_bytes=_RAM))
    known = SimpleNamespace(step=step, misses=misses, gradients=SimpleNamespace(fatal=[]))
    fields: dict[str, Any] = dict.fromkeys(PlanReport.__dataclass_fields__)
    return PlanReport(**fields | {"phases": phases, "known": known, "is_filled": is_filled})


@pytest.mark.parametrize(
    ("how", "names"),
    [
        ({"cache": "cache"}, ["text", "encode", "step", "sampling"]),
        ({"cache": "cache", "is_filled": True}, ["step", "sampling"]),
        ({"cache": None}, ["step", "sampling"]),
        # The text encoder is read whole into RAM whenever training has it.
        ({"cache": None, "to_read": 2 * _RAM}, ["text", "step", "sampling"]),
        ({"cache": "cache", "is_filled": True, "to_read": 2 * _RAM}, ["step", "sampling"]),
        (
            {"cache": "cache", "is_filled": True, "to_read": 2 * _RAM, "in_training": True},
            ["text", "step", "sampling"],
        ),
        ({"cache": None, "misses": True}, []),  # the step is what is short
    ],
)
def test_phases_that_do_not_fit_are_short(how: dict[str, Any], names: list[str]) -> None:
    """The model and the codec alone are those of `longtake sample`, on whatever GPU."""
    report = _with_short_phases(**how)
    assert [each.name for each in report.short_phases] == names
    assert report.exit_code == 1
    fits = [replace(each, fits=each.name in names) for each in report.phases]
    assert replace(report, phases=fits).exit_code == (1 if how.get("misses") else 0)


@pytest.mark.usefixtures("few_words")
@pytest.mark.parametrize("cache", [True, False])
def test_the_shape_that_cannot_be_encoded_is_that_of_its_phase(
    small_recipe: MakeRecipe, cache: bool
) -> None:
    """Where encoders work in steps, it is beside the model."""
    recipe = small_recipe(*TINY_WAN, *(["data.cache=cache", "data.windows=1"] if cache else []))
    wide = Bucket(num_frames=5, height=704, width=1472)
    tile = TileChoice(128, wide, 2**37)
    report = make_report(recipe, _GPU, links_of(_GPU), begun=tile)
    name = "encode" if cache else "step"
    assert [(each.name, each.peak_bytes) for each in report.short_phases] == [(name, 2**37)]
    assert report.exit_code == 1
    assert make_report(recipe, _GPU, links_of(_GPU)).exit_code == 0


def test_a_node_needs_ram_for_the_text_encoders_of_all_its_ranks() -> None:
    report = _with_short_phases(cache="cache")
    step, known = report.known.step, report.known
    step.per_node, step.world_size, known.needed_host_bytes = 2, 4, 5 * 2**30
    assert report.needed_ram == 5 * 2**30
    text, *others = report.phases
    many = replace(report, phases=[replace(text, ram_bytes=4 * 2**30), *others])
    assert many.needed_ram == 8 * 2**30
    step.per_node = None
    assert many.needed_ram == 16 * 2**30
