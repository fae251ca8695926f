"""`benchmarks/structure.py --check`, which `make check` runs on this tree: what it refuses."""

import ast
import re
import tomllib
from collections import Counter
from pathlib import Path

import pytest
from benchmarks.structure import check, measure

_ROOT = Path(__file__).resolve().parents[1]
_LIMITS = """
import_lines = 20
[code_lines]
src = 520
core = 12
tests = 5
web = 2
cli = 500
fine = 10
[counts]
"functions over 60 lines" = 0
"""
_RESULTS = "| code lines of src | 9 | {lines} | 8 |\n"
_FINE = '''"""Reads clips."""

import json


class Place:
    """A place of clips."""

    # Clips are texts.
    def load(self, text: str) -> object:
        return json.loads(text)
'''


def _problems(root: Path) -> str:
    limits = tomllib.loads((root / "tests" / "structure_limits.toml").read_text())
    results = (root / "benchmarks" / "results" / "structure.md").read_text()
    return "\n".join(check(measure(root), limits, results))


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A tree that is not refused."""
    for folder in ("src/longtake/cli", "src/longtake/board", "tests", "benchmarks/results"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "src" / "longtake" / "fine.py").write_text(_FINE)
    (tmp_path / "src" / "longtake" / "cli" / "a.py").write_text("x = 1\n" * 500)
    (tmp_path / "README.md").write_text("# A project\n")
    (tmp_path / "tests" / "structure_limits.toml").write_text(_LIMITS)
    (tmp_path / "benchmarks" / "results" / "structure.md").write_text(_RESULTS.format(lines=503))
    return tmp_path


_ASSIGNED = re.compile(r"^(_?[A-Z][A-Z0-9_, ]*)(?::[^=\n]*)? = ", re.MULTILINE)


def _constants(path: Path) -> Counter[str]:
    """Count the assignments of each name in capitals at the top level of a module."""
    text = path.read_text(encoding="utf-8")
    names = [name for found in _ASSIGNED.findall(text) for name in re.split(r"[, ]+", found)]
    if len(names) == len(set(names)):
        return Counter(names)
    # Some of the lines may belong to a text.
    targets: list[ast.expr] = []
    for each in ast.parse(text).body:
        if isinstance(each, ast.Assign):
            targets += each.targets
        elif isinstance(each, ast.AnnAssign):
            targets.append(each.target)
    nodes = (node for each in targets for node in ast.walk(each) if isinstance(node, ast.Name))
    return Counter(node.id for node in nodes if node.id.isupper())


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
    assert _problems(tree) == ""


def _long_function(name: str, lines: int) -> str:
    comments = "    # Comments do not count.\n" * 9
    docstring = '    """A' + "\n" * (lines - 3) + '    """\n'
    return f"def {name}() -> None:\n{docstring}{comments}    print()\n"


_ADDED = "src/longtake/fine.py"


@pytest.mark.parametrize(
    ("name", "text", "problem"),
    [
        (_ADDED, "y = 1\n" * 7, ""),
        (_ADDED, "# a comment, a blank line or a docstring is free\n\n" * 100, ""),
        (_ADDED, "y = 1\n" * 8, "fine has 11 code lines; its ceiling is 10."),
        ("src/longtake/cli/a.py", "y = 1\n", "cli has 501 code lines; its ceiling is 500."),
        ("src/longtake/new.py", "y = 1\n", "new has 1 code lines and no ceiling in "),
        ("tests/test_a.py", "y = 1\n" * 6, "tests has 6 code lines; its ceiling is 5."),
        ("src/longtake/board/a.js", "let y = 1;\n" * 3, "web has 3 code lines; its ceiling is 2."),
        ("src/longtake/board/a.min.js", "let y = 1;\n" * 3, ""),
        (_ADDED, "class Other: ...\n", ""),
        (_ADDED, "class Place: ...\n", "Several classes are called Place"),
        (_ADDED, "class _Place: ...\n", ""),
        (_ADDED, "import a\n" * 200, "Imports are "),
        (_ADDED, _long_function("f", 60), ""),
        (_ADDED, _long_function("f", 61), "functions over 60 lines: 1; the limit is 0: fine.f"),
        (_ADDED, "# long\n" * 690, "modules over 700 lines: 1; the limit is 0: fine 701"),
        (_ADDED, "def _f(): ...\n_f()\n_f()\n", ""),
        (_ADDED, "def _f(): ...\n_f()\n", "referred to once: 1; the limit is 0: fine._f"),
        ("src/longtake/board/a.py", "", ""),
    ],
)
def test_what_is_worse_is_refused(tree: Path, name: str, text: str, problem: str) -> None:
    path = tree / name
    path.write_text(path.read_text() + text if path.exists() else text)
    limits = tree / "tests" / "structure_limits.toml"
    if name.startswith("src/longtake/board"):
        limits.write_text(limits.read_text().replace("cli = 500", "cli = 500\nboard = 0"))
    problems = _problems(tree)
    assert problem in problems
    assert bool(problems) == bool(problem)


def test_modules_that_import_each_other_are_refused(tree: Path) -> None:
    """An import in a function or for type checkers alone counts."""
    package = tree / "src" / "longtake"
    with (package / "fine.py").open("a") as file:
        file.write("def f() -> None:\n    from longtake.cli import a\n")
    with (package / "cli" / "a.py").open("a") as file:
        file.write("if TYPE_CHECKING:\n    import longtake.fine\n")
    limits = tree / "tests" / "structure_limits.toml"
    limits.write_text(limits.read_text().replace("cli = 500", "cli = 501"))
    assert _problems(tree) == "import cycles: 1; the limit is 0: cli.a <-> fine"


def test_a_table_of_results_that_is_out_of_date_is_refused(tree: Path) -> None:
    (tree / "benchmarks" / "results" / "structure.md").write_text(_RESULTS.format(lines=560))
    assert "says 560 code lines of src, which has 503" in _problems(tree)
