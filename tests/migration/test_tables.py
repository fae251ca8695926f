"""The tables of other trainers' settings fit the recipe, the converters and the models."""

from fnmatch import fnmatchcase

import diffusers
import pytest
import torch
from torch import nn

from longtake.config.sampling import PresetSection
from longtake.migration import convert, sources, tables
from longtake.migration.draft import recipe_order
from longtake.models import base, recognition

_KEYS = {*recipe_order(), "data.catalogs", "data.conditioning"}


@pytest.mark.parametrize("name", tables.TOOLS)
def test_each_row_names_a_key_and_a_converter(name: str) -> None:
    tool = tables.tool(name)
    preset = {*PresetSection.model_fields, "prompt"}
    for part, keys in ((tool.run, _KEYS), (tool.clips, _KEYS), (tool.samples, preset)):
        for key, row in part.items():
            assert row.to in keys or (not row.to and (row.note or row.ignored)), key
            assert callable(getattr(convert, row.how)), key
            assert not row.shared or row.shared in tables.shared(), key
    assert all(key in _KEYS or key.startswith("fact.") for key in tool.defaults)
    assert all(callable(getattr(sources, reader)) for reader in tool.marks)


@pytest.mark.parametrize("name", tables.TOOLS)
def test_each_model_is_a_family_here_and_each_release_is_known(name: str) -> None:
    tool = tables.tool(name)
    known = {each for kind in recognition.KINDS for each in kind.releases}
    assert {each for families in tool.families.values() for each in families} <= set(base.FAMILIES)
    assert {each.partition("@")[0] for each in tool.releases.values()} <= known
    assert set(tool.scripts.values()) <= set(tool.families)


def test_the_layers_of_each_family_are_in_its_transformer() -> None:
    """`plain` are all but those that modulate."""
    counts = {"num_layers": 1, "num_single_layers": 1, "n_layers": 1, "n_refiner_layers": 1}
    for kind in ("all", "plain"):
        for family, patterns in tables.shared()["layers"][kind].items():
            of_family = next(each for each in recognition.KINDS if each.family == family)
            cls = getattr(diffusers, of_family.transformer)
            taken = cls.__init__.__wrapped__.__code__.co_varnames
            with torch.device("meta"):
                model = cls(**{key: value for key, value in counts.items() if key in taken})
            names = [name for name, part in model.named_modules() if isinstance(part, nn.Linear)]
            found = {p: [name for name in names if fnmatchcase(name, p)] for p in patterns}
            assert all(found.values()), (family, found)
            modulating = [n for each in found.values() for n in each if ".norm" in n or "mod" in n]
            assert kind == "all" or not modulating, modulating
