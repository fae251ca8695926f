"""Tiny releases, each made once and only if a test asks for it."""

from collections.abc import Callable, Iterator

import pytest
from tests.families.row import Row
from tests.families.rows import ONE_OF_EACH, ROWS
from tests.families.tiny import Tiny


@pytest.fixture(scope="session")
def tiny_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Row], Tiny]:
    """The tiny release of a row."""
    made: dict[str, Tiny] = {}

    def find(row: Row) -> Tiny:
        if row.kind not in made:
            made[row.kind] = Tiny(row, tmp_path_factory.mktemp("release"))
        return made[row.kind]

    return find


_PARAMETERS = [
    pytest.param(row, id=row.kind, marks=[] if row in ONE_OF_EACH else [pytest.mark.drill])
    for row in ROWS
]


@pytest.fixture(scope="module", params=_PARAMETERS)
def tiny(request: pytest.FixtureRequest, tiny_of: Callable[[Row], Tiny]) -> Iterator[Tiny]:
    """The tiny release of each row, one after the other."""
    with request.param.within():
        yield tiny_of(request.param)
