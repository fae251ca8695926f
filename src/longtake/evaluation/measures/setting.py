"""What a further measure is told by the environment."""

import os

from longtake.errors import RecipeError


def setting(measure: str, variable: str, what: str) -> str:
    """The value of a variable.

    Args:
        measure: the measure that asks.
        variable: its name.
        what: what it has to hold.

    Raises:
        RecipeError: it is not set; says what to do.
    """
    value = os.environ.get(variable, "")
    if not value:
        raise RecipeError(
            f"The measure {measure} needs {what}. Say where with {variable}=…, in the environment "
            "of `longtake evaluate`, or leave the measure out of the preset."
        )
    return value
