"""A pytest plugin: what is random in a test is the same in each run of it.

Examples of hypothesis depend on the test alone, not on the modules that other tests of the process
have imported. Generators begin anew for each test, and for each fixture that tests share.
"""

import random
import sys
import zlib
from collections.abc import Generator
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.internal.conjecture import providers


def pytest_configure() -> None:
    """Choose hypothesis's profile; --hypothesis-profile=default has it try other examples."""
    # It draws constants from the source of imported modules, which are others in each process.
    vars(providers).update(is_local_module_file=lambda path: False)
    settings.register_profile(
        "longtake",
        derandomize=True,
        database=None,
        deadline=None,
        print_blob=True,
        suppress_health_check=[HealthCheck.too_slow],
    )
    settings.load_profile("longtake")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Seed before each test's own fixtures."""
    _seed(0)


@pytest.hookimpl(hookwrapper=True)
def pytest_fixture_setup(fixturedef: pytest.FixtureDef[Any]) -> Generator[None]:
    """A shared fixture draws the same, whichever test is its first, and changes no draw of that."""
    if fixturedef.scope == "function":
        yield
        return
    states = random.getstate(), np.random.get_state()
    torch = sys.modules.get("torch")
    of_torch = torch.get_rng_state() if torch else None
    _seed(zlib.crc32(fixturedef.argname.encode()))
    yield
    random.setstate(states[0])
    np.random.set_state(states[1])
    if torch := sys.modules.get("torch"):
        if of_torch is None:
            torch.manual_seed(0)
        else:
            torch.set_rng_state(of_torch)


def _seed(number: int) -> None:
    random.seed(number)
    np.random.seed(number)
    if torch := sys.modules.get("torch"):
        torch.manual_seed(number)
