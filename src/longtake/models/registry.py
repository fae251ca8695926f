"""The families by name, imported only when one is asked for."""

import importlib
from typing import cast

from longtake.errors import RecipeError
from longtake.formatting import did_you_mean
from longtake.models.family import Family

FAMILIES = {
    "flux": "longtake.models.flux:Flux",
    "flux_kontext": "longtake.models.flux:FluxKontext",
    "tubelet": "longtake.models.tubelet:Tubelet",
    "wan": "longtake.models.wan:Wan",
}


def family(name: str) -> Family:
    """The family of that name.

    Raises:
        RecipeError: there is none; names the nearest.
    """
    if name not in FAMILIES:
        hint = did_you_mean(name, FAMILIES, otherwise="no name is near.")
        raise RecipeError(f"model.family {name!r} is unknown; {hint} Known: {', '.join(FAMILIES)}.")
    module, _, class_name = FAMILIES[name].partition(":")
    return cast("Family", getattr(importlib.import_module(module), class_name)())
