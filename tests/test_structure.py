"""`benchmarks/structure.py --check`: what it refuses, and that this tree is not refused."""

import ast
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

_ROOT = Path(__file__).resolve().parents[1]
_LIMITS = """
docstring_percent = 40.0
import_percent = 20.0
duplicate_class_names = ["Place"]
[denied_words]
crew = 1
"""
_FINE = '''"""Reads clips."""

import json


class Place:
    """A crew of readers."""

    def load(self, text: str) -> object:
        return json.loads(text)


class Other:
    number = 1
'''


def _check(root: Path) -> tuple[int, str]:
    command = [sys.executable, "-m", "benchmarks.structure", "--check", "--tree", str(root)]
    done = subprocess.run(command, cwd=_ROOT, capture_output=True, text=True, check=False)
    return done.returncode, done.stderr


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A tree that is not refused."""
    package = tmp_path / "src" / "longtake"
    package.mkdir(parents=True)
    (tmp_path / "tests").mkdir()
    (package / "a.py").write_text(_FINE)
    (package / "b.py").write_text("class Place:\n    number = 2\n" + "x = 1\n" * 10)
    (tmp_path / "README.md").write_text("# A project\n")
    (tmp_path / "tests" / "structure_limits.toml").write_text(_LIMITS)
    (tmp_path / "tests" / "denied_words.txt").write_text("crew\ngoes on\njudge: guard\n")
    return tmp_path


def test_this_tree_keeps_its_limits() -> None:
    assert _check(_ROOT) == (0, "")


def _constants(path: Path) -> Counter[str]:
    """How often each name in capitals is assigned at the top level of a module."""
    targets: list[ast.expr] = []
    for each in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(each, ast.Assign):
            targets += each.targets
        elif isinstance(each, ast.AnnAssign):
            targets.append(each.target)
    names = (name for each in targets for name in ast.walk(each) if isinstance(name, ast.Name))
    assigned = (name.id for name in names if isinstance(name.ctx, ast.Store))
    return Counter(name for name in assigned if name.isupper())


def test_no_constant_of_a_module_is_defined_twice() -> None:
    """The second silently replaces the first, also where the first is used."""
    paths = [
        path for name in ("src", "tests", "benchmarks") for path in (_ROOT / name).rglob("*.py")
    ]
    twice = [
        f"{path.relative_to(_ROOT)}: {name}"
        for path in paths
        for name, count in _constants(path).items()
        if count > 1
    ]
    assert not twice


def test_a_tree_within_its_limits_is_not_refused(tree: Path) -> None:
    assert _check(tree) == (0, "")


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("class Other:\n    number = 3\n", "2 classes are called Other"),
        ("class _Other:\n    number = 3\n", ""),
        ("def lead_crew() -> None: ...\n", '"crew" stands 2 times; the limit is 1.'),
        ("class CrewReport: ...\n", '"crew" stands 2 times'),
        ("crewed = 1\n", ""),
        ("# a comment on the crew\n", ""),
        ('raise ValueError(f"it goes\\n on {1}")\n', '"goes on" stands 1 times'),
        ("judge = 1\n", '"judge" stands 1 times; the limit is 0.'),
        ('"""Long.\n' + "a\n" * 20 + '"""\n', "docstring_percent is"),
        ("import a\n" * 20, "import_percent is"),
    ],
)
def test_what_is_worse_is_refused(tree: Path, text: str, problem: str) -> None:
    (tree / "src" / "longtake" / "c.py").write_text(text)
    code, said = _check(tree)
    assert (code, problem in said) == (int(bool(problem)), True)
    assert bool(said) == bool(problem)


def test_a_word_is_allowed_where_the_list_says_so(tree: Path) -> None:
    (tree / "src" / "longtake" / "guard").mkdir()
    (tree / "src" / "longtake" / "guard" / "detectors.py").write_text("def judge() -> None: ...\n")
    assert _check(tree) == (0, "")


@pytest.mark.parametrize("name", ["README.md", "docs/a.md", "benchmarks/a.py", "docs/b/a.py"])
def test_denied_words_are_refused_in_documentation_and_benchmarks(tree: Path, name: str) -> None:
    path = tree / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text('"""It goes on."""\n')
    code, said = _check(tree)
    assert (code, f"{name} 1" in said) == (1, True)
    (tree / "tests" / "denied_words.txt").write_text(
        f"crew\ngoes on: {path.with_suffix('').relative_to(tree)}\n"
    )
    assert _check(tree) == (0, "")
