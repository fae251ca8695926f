"""Measures that users bring: found, checked, asked, and told apart from rubbish."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from longtake.errors import DataError, RecipeError
from longtake.evaluation.measures.extra import load_extra, load_extras, measure_extra

_VIDEOS = [np.full((2, 4, 4, 3), level, np.uint8) for level in (0, 10, 20)]
_PROMPTS = ["a", "b", "c"]

Write = Callable[[str], str]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    """Writes somebody's measure to the folder where they are; gives its name in a preset."""
    monkeypatch.chdir(tmp_path)
    count = iter(range(10))

    def one(body: str) -> str:
        module = f"own_measure_{tmp_path.name}_{next(count)}"
        (tmp_path / f"{module}.py").write_text(f"class Own:\n    name = 'own'\n{body}")
        return f"{module}:Own"

    return one


def _call(returned: str) -> str:
    return f"    def __call__(self, videos, prompts, fps):\n        return {returned}\n"


@pytest.mark.parametrize(
    ("returned", "of_each", "of_set"),
    [
        ("[v.mean() / fps for v in videos]", [{"own": 0}, {"own": 5}, {"own": 10}], {}),
        ("[None, float('nan'), 3]", [{}, {}, {"own": 3}], {}),
        ("len(prompts)", [{}, {}, {}], {"own": 3}),
        ("float('inf')", [{}, {}, {}], {}),
        ("None", [{}, {}, {}], {}),
    ],
)
def test_a_measure_gives_a_number_for_each_video_or_one_for_all(
    write: Write, returned: str, of_each: list[dict[str, float]], of_set: dict[str, float]
) -> None:
    """What is not defined, or no finite number, is left out."""
    extras = load_extras([write(_call(returned))])
    assert measure_extra(extras, _VIDEOS, _PROMPTS, 2.0) == (of_each, of_set)


@pytest.mark.parametrize(
    ("returned", "said"),
    [
        ("[1, 2]", "gave 2 numbers for 3 videos"),
        ("['good', 1, 2]", "failed with ValueError: could not convert string to float: 'good'"),
        ("{}['x']", "failed with KeyError"),
    ],
)
def test_a_measure_that_fails_is_named(write: Write, returned: str, said: str) -> None:
    """No traceback of somebody's code, but which measure and why."""
    with pytest.raises(RecipeError, match="The measure own ") as caught:
        measure_extra([load_extra(write(_call(returned)))], _VIDEOS, _PROMPTS, 2.0)
    assert said in str(caught.value)


def test_an_error_of_ours_passes_through(write: Write) -> None:
    """A measure may say itself what is wrong."""
    body = "    def __call__(self, *given):\n        from longtake.errors import DataError\n"
    extra = load_extra(write(body + "        raise DataError('no such video')\n"))
    with pytest.raises(DataError, match=r"^no such video$"):
        measure_extra([extra], _VIDEOS, _PROMPTS, 2.0)


def test_what_is_no_measure_is_refused_with_what_it_lacks(write: Write) -> None:
    """A class without __call__, one that cannot be made, one that is not there, and no class."""
    with pytest.raises(RecipeError, match=r"has the name 'own' and no __call__\. Give it"):
        load_extra(write("    pass\n"))
    with pytest.raises(RecipeError, match=r"has the name 'a b' and a __call__"):
        load_extra(write("    name = 'a b'\n" + _call("1")))
    with pytest.raises(RecipeError, match=r"Own\(\) failed with TypeError: .* without arguments"):
        load_extra(write("    def __init__(self, weights): pass\n" + _call("1")))
    with pytest.raises(RecipeError, match=r"The measure .*has no class Won; there are: Own"):
        load_extra(write(_call("1")).replace("Own", "Won"))
    with pytest.raises(RecipeError, match=r"write it as package\.module:Class"):
        load_extra("clip_score")


def test_two_measures_of_one_name_are_refused(write: Write) -> None:
    """One would overwrite the other's numbers, or ours."""
    path = write(_call("1"))
    with pytest.raises(RecipeError, match="is called 'own', as another one is"):
        load_extras([path, path])
    with pytest.raises(RecipeError, match="is called 'motion', as another one is"):
        load_extras([write("    name = 'motion'\n" + _call("1"))])
