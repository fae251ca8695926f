"""Generated cases: any command on any input ends, says one sentence, and loses nothing.

LONGTAKE_FUZZ_CASES says how many, LONGTAKE_FUZZ_SEED from which seed. A case is repeated by its
name: LONGTAKE_FUZZ_SEED=7 pytest tests/fuzz -k events-12
"""

import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.fuzz.generators import SHARES, cases_of

_SEED = int(os.environ.get("LONGTAKE_FUZZ_SEED", "2"))
_NUM_CASES = int(os.environ.get("LONGTAKE_FUZZ_CASES", "120"))


@pytest.mark.parametrize(("name", "number"), cases_of(SHARES, _NUM_CASES))
def test_any_input_ends_in_order(
    name: str, number: int, place: Path, check: Callable[..., Any]
) -> None:
    chance = random.Random(f"{_SEED}/{name}/{number}")  # noqa: S311 - it is repeatable
    generate, _ = SHARES[name]
    check(**vars(generate(chance, place)), about=f"LONGTAKE_FUZZ_SEED={_SEED} {name}-{number}")
