"""Size and structure of the code, and how many files three operations run through.

    python -m benchmarks.structure --check      refuse more than tests/structure_limits.toml allows
    python -m benchmarks.structure --tighten    lower the limits to the current values
    python -m benchmarks.structure              measure, and write benchmarks/results/structure.md
    python -m benchmarks.structure --trace      trace the three operations first (some minutes)

Code lines are lines without docstrings, comments, imports and blank lines, of files formatted by
`ruff format`: a comment that helps costs nothing. The operations are a training step, the diagnosis
of a stall, and an evaluation; `sys.setprofile` in all processes and threads records which files
under src have functions that run meanwhile (benchmarks/tracing).
"""

import argparse
import ast
import json
import math
import re
import statistics
import sys
import tempfile
import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import tomli_w
from tests.goldens.tree import Tree, checked_out

_ROOT = Path(__file__).resolve().parents[1]
_RESULTS = _ROOT / "benchmarks" / "results" / "structure.md"
_TRACES = _RESULTS.with_suffix(".json")
_LIMITS = Path("tests", "structure_limits.toml")
_TRACING = _ROOT / "benchmarks" / "tracing"
_COMMIT = _ROOT / "tests" / "goldens" / "COMMIT"

CORE = (
    *("config", "models", "data", "flow", "optim", "parallel", "planner", "training"),
    *("checkpoint", "guard", "sampling"),
)
"""Packages of the first ring; the modules at the top of longtake, which they import, belong to it.

Who wants to change how a model trains needs these and nothing else.
"""
_LONG_MODULE, _LONG_FUNCTION = 700, 60
_LONG_FILES = 40
_WIDE_CLASSES = ("Family", "Loader")
_GOALS = {
    "code lines of src": "52,800",
    "code lines of core": "31,100",
    "lines of tests": "66,000",
    "lines of README": "180",
    "comment lines, % of lines": "3 to 6",
    "modules over 700 lines": "0",
    "functions over 60 lines": "4",
    "private functions that are referred to once": "950",
    "methods of Family": "16",
    "methods of Loader": "14",
    "import cycles": "0",
    "public class names that are defined more than once": "0",
    "imports, % of lines": "5",
    "files that run in a training step": "49",
    "files that run in a stall's diagnosis": "22",
    "files that run in an evaluation": "37",
}
_STALE_PERCENT = 3.0
_TIGHTENED, _NEW = 1.01, 1.03  # a lowered ceiling over the value, and that of a new package
_ROUNDS = 3
_ENDING = 2  # of benchmarks/tracing
_STEP, _STALL, _EVALUATION = "a training step", "a stall's diagnosis", "an evaluation"

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Module:
    """A file of Python."""

    name: str
    """Dotted; "planner.memory" in src, and a path elsewhere."""
    text: str

    @cached_property
    def nodes(self) -> list[ast.AST]:
        """All nodes of the syntax tree."""
        return list(ast.walk(ast.parse(self.text)))

    @property
    def package(self) -> str:
        """The folder or module at the top to which it belongs."""
        return self.name.partition(".")[0]

    @property
    def num_lines(self) -> int:
        """Number of lines, with everything."""
        return len(self.text.splitlines())

    @cached_property
    def import_lines(self) -> set[int]:
        """Numbers of the lines of imports."""
        kinds = ast.Import | ast.ImportFrom
        return {line for node in self.nodes if isinstance(node, kinds) for line in _span(node)}

    @cached_property
    def docstring_lines(self) -> set[int]:
        """Numbers of the lines of strings that stand alone."""
        return {
            line
            for node in self.nodes
            if isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
            for line in _span(node)
        }

    @cached_property
    def comment_lines(self) -> set[int]:
        """Numbers of the lines that have a comment and nothing else."""
        texts = enumerate(self.text.splitlines(), 1)
        lines = {number for number, text in texts if text.lstrip().startswith("#")}
        return lines - self.docstring_lines

    @cached_property
    def code_lines(self) -> set[int]:
        """Numbers of the lines that are none of the above, nor blank."""
        texts = enumerate(self.text.splitlines(), 1)
        lines = {number for number, text in texts if text.strip()}
        return lines - self.import_lines - self.docstring_lines - self.comment_lines

    @cached_property
    def functions(self) -> list[Function]:
        """All functions and methods."""
        return [node for node in self.nodes if isinstance(node, Function)]

    @property
    def long_functions(self) -> list[str]:
        """Functions that one cannot read at once; comments and verbs' signatures do not count."""
        found = []
        for each in self.functions:
            lines = set(_span(each)) - self.comment_lines
            if self.package == "cli":
                lines -= set(range(each.lineno, each.body[0].lineno))
            if len(lines) > _LONG_FUNCTION:
                found.append(f"{self.name}.{each.name}")
        return found

    @property
    def once_used(self) -> list[str]:
        """Private functions and methods that this module refers to once."""
        names: Counter[str] = Counter()
        for node in self.nodes:
            match node:
                case ast.Name(id=name) | ast.Attribute(attr=name) | ast.alias(name=name):
                    names[name] += 1
        private = (each.name for each in self.functions if re.match(r"_[^_]", each.name))
        return [f"{self.name}.{name}" for name in private if names[name] == 1]

    @property
    def public_classes(self) -> list[str]:
        """Names of public classes, nested ones too."""
        classes = (node.name for node in self.nodes if isinstance(node, ast.ClassDef))
        return [name for name in classes if not name.startswith("_")]


@dataclass(frozen=True)
class Structure:
    """Measures of a tree."""

    modules: Sequence[Module]
    """All of src/longtake."""
    tests: Sequence[Module]
    web_lines: int
    """Lines that are not blank of JavaScript, HTML and CSS; without the libraries of others."""
    readme_lines: int

    @property
    def code_lines(self) -> dict[str, int]:
        """Code lines of each package, of src, of core, of tests, and of the web."""
        packages: Counter[str] = Counter()
        for each in self.modules:
            packages[each.package] += len(each.code_lines)
        has_folder = {each.package for each in self.modules if "." in each.name}
        core = {name for name in packages if name in CORE or name not in has_folder}
        return {
            "src": sum(packages.values()),
            "core": sum(packages[name] for name in core),
            "tests": sum(len(each.code_lines) for each in self.tests),
            "web": self.web_lines,
            **dict(sorted(packages.items())),
        }

    @property
    def num_lines(self) -> int:
        """Lines of src, with everything."""
        return sum(each.num_lines for each in self.modules)

    @property
    def num_import_lines(self) -> int:
        """Number of lines of imports."""
        return sum(len(each.import_lines) for each in self.modules)

    @property
    def comment_percent(self) -> float:
        """Share of all lines that are comments, without those behind code."""
        return 100 * sum(len(each.comment_lines) for each in self.modules) / self.num_lines

    @property
    def duplicate_class_names(self) -> list[str]:
        """Public class names that are defined more than once."""
        names = Counter(name for each in self.modules for name in each.public_classes)
        return sorted(name for name, count in names.items() if count > 1)

    @property
    def counts(self) -> dict[str, list[str]]:
        """For each measure of structure, what it counts."""
        return {
            "modules over 700 lines": [
                f"{each.name} {each.num_lines}"
                for each in self.modules
                if each.num_lines > _LONG_MODULE
            ],
            "functions over 60 lines": [
                name for each in self.modules for name in each.long_functions
            ],
            "private functions that are referred to once": [
                name for each in self.modules for name in each.once_used
            ],
            **{f"methods of {name}": self._methods_of(name) for name in _WIDE_CLASSES},
            "import cycles": [" <-> ".join(cycle) for cycle in self._import_cycles()],
        }

    def _methods_of(self, name: str) -> list[str]:
        """Methods and properties of a class and of its bases in src."""
        for module in self.modules:
            for node in module.nodes:
                if isinstance(node, ast.ClassDef) and node.name == name:
                    own = [each.name for each in node.body if isinstance(each, Function)]
                    bases = [each.id for each in node.bases if isinstance(each, ast.Name)]
                    return own + [method for base in bases for method in self._methods_of(base)]
        return []

    def _import_cycles(self) -> list[list[str]]:
        """Groups of modules that import each other, directly or not, in functions too."""
        names = {each.name for each in self.modules}
        imports = {each.name: _imported(each) & names - {each.name} for each in self.modules}
        reached = {name: _closure(name, imports) for name in names}
        groups = {
            tuple(sorted({name, *(other for other in reached[name] if name in reached[other])}))
            for name in names
        }
        return [list(group) for group in sorted(groups) if len(group) > 1]


def _span(node: ast.stmt) -> range:
    return range(node.lineno, (node.end_lineno or node.lineno) + 1)


def _imported(module: Module) -> set[str]:
    """Names of modules of longtake, and of what may be one, that a module imports."""
    names = set()
    for node in module.nodes:
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("longtake"):
            parent = (node.module or "").removeprefix("longtake").removeprefix(".")
            names.add(parent)
            names.update(f"{parent}.{alias.name}".removeprefix(".") for alias in node.names)
        elif isinstance(node, ast.Import):
            names.update(alias.name.removeprefix("longtake.") for alias in node.names)
    return names


def _closure(name: str, imports: Mapping[str, set[str]]) -> set[str]:
    reached: set[str] = set()
    waiting = [name]
    while waiting:
        waiting += (new := imports[waiting.pop()] - reached)
        reached |= new
    return reached


def measure(root: Path) -> Structure:
    """Measure all files of a tree."""
    package = root / "src" / "longtake"
    web = (path for end in ("js", "html", "css") for path in package.rglob(f"*.{end}"))
    own = (path for path in web if ".min." not in path.name)
    return Structure(
        [
            Module(".".join(path.relative_to(package).with_suffix("").parts), path.read_text())
            for path in sorted(package.rglob("*.py"))
        ],
        [Module(str(path), path.read_text()) for path in sorted((root / "tests").rglob("*.py"))],
        sum(bool(line.strip()) for path in own for line in path.read_text().splitlines()),
        len((root / "README.md").read_text().splitlines()),
    )


def check(found: Structure, limits: Mapping[str, Any], results: str) -> list[str]:
    """Violations of the limits, a sentence each.

    Args:
        found: the tree.
        limits: tests/structure_limits.toml.
        results: benchmarks/results/structure.md.
    """
    problems = []
    ceilings = limits["code_lines"]
    for name, lines in found.code_lines.items():
        if name not in ceilings:
            problems.append(f"{name} has {lines:,} code lines and no ceiling in {_LIMITS}.")
        elif lines > ceilings[name]:
            problems.append(
                f"{name} has {lines:,} code lines; its ceiling is {ceilings[name]:,}. Look for "
                f"what can go. A move of code moves the ceiling in {_LIMITS} with it; a rise needs "
                "a decision that says what the lines buy (docs/decisions)."
            )
    for name, places in found.counts.items():
        if len(places) > limits["counts"].get(name, 0):
            problems.append(
                f"{name}: {len(places)}; the limit is {limits['counts'].get(name, 0)}: "
                f"{', '.join(places[:20])}{', ...' * (len(places) > 20)}"
            )
    if found.num_import_lines > limits["import_lines"]:
        measured, limit = found.num_import_lines, limits["import_lines"]
        problems.append(f"Imports are {measured:,} lines of src; the limit is {limit:,}.")
    problems += [
        f"Several classes are called {name}; give one of them another name."
        for name in found.duplicate_class_names
    ]
    known = re.search(r"^\| code lines of src \|.*\| ([\d,]+) \|[^|]*\|$", results, re.MULTILINE)
    lines = found.code_lines["src"]
    reported = int(known[1].replace(",", "")) if known else 0
    if abs(lines - reported) > _STALE_PERCENT / 100 * lines:
        problems.append(
            f"benchmarks/results/structure.md says {reported:,} code lines of src, which has "
            f"{lines:,}. Measure again: python -m benchmarks.structure"
        )
    return problems


def tightened(found: Structure, limits: Mapping[str, Any]) -> dict[str, Any]:
    """The limits, lowered to the current values; none is raised, and packages that went go."""
    ceilings, counts = limits.get("code_lines", {}), limits.get("counts", {})
    num_imports = math.ceil(found.num_import_lines * _TIGHTENED)
    return {
        "import_lines": min(limits.get("import_lines", num_imports), num_imports),
        "counts": {
            name: min(counts.get(name, len(places)), len(places))
            for name, places in found.counts.items()
        },
        "code_lines": {
            name: min(ceilings[name], math.ceil(lines * _TIGHTENED))
            if name in ceilings
            else math.ceil(lines * _NEW)
            for name, lines in found.code_lines.items()
        },
        "core_seconds": limits.get(
            "core_seconds", {}
        ),  # of folders of tests: tests/core_seconds.py
    }


def trace(root: Path) -> dict[str, list[str]]:
    """Files whose functions run in each operation."""
    from tests.goldens.material import write_clips  # which takes longer to import than a check does
    from tests.goldens.scenarios import TINY_WAN_LORA

    with tempfile.TemporaryDirectory(prefix="structure-") as name:
        work = Path(name)
        write_clips(work / "clips")
        tree = Tree.at(root, work / "tree")
        catalog = tree.work / "catalog.parquet"
        captions = str(work / "clips" / "captions.jsonl")
        tree.run_ok(
            "data index", str(work / "clips"), "--captions", captions, "--out", str(catalog)
        )
        recipe = TINY_WAN_LORA | {"data.catalog": str(catalog)}
        return {
            _STEP: _trace_step(tree, recipe),
            _STALL: _trace_stall(tree),
            _EVALUATION: _trace_evaluation(tree, recipe),
        }


def _trace_step(tree: Tree, recipe: dict[str, Any]) -> list[str]:
    """From the end of the second update to the end of the third."""
    path = tree.work / "step" / "recipe.toml"
    # More steps than batches are decoded ahead, so that some are decoded meanwhile.
    folder = tree.recipe(path, {**recipe, "training.steps": 12}).parent
    with _traced(tree, update=(2, 3)) as (traced, found):
        traced.run_ok("train", "recipe.toml", cwd=folder)
    return found


def _trace_stall(tree: Tree) -> list[str]:
    """From a second before dumps are requested until a second after the diagnosis is written.

    Files that ran in all of several rounds: at times a watcher also checks the node's health.
    """
    paths = (r"/requests/[^/]+\.json$", r"/stalls/[^/]+\.json$")
    window = {"path": paths, "lead_seconds": 1.0, "tail_seconds": 1.0}
    rounds = []
    for _ in range(_ROUNDS):
        with _traced(tree, first=False, **window) as (traced, found):
            traced.run("drill", tree.name("drills", "hung-rank-asleep"))
        rounds.append(set(found))
    return sorted(set.intersection(*rounds))


def _trace_evaluation(tree: Tree, recipe: dict[str, Any]) -> list[str]:
    """From the end of a server's first evaluation to the end of its second."""
    preset = {"prompts": ["a red square"], "num_inference_steps": 2}
    more = {
        "training.steps": 3,
        "checkpoint.every": 1,
        "evaluation.presets.tiny": preset,
        "tracking.tensorboard": True,
    }
    path = tree.work / "evaluation" / "recipe.toml"
    folder = tree.recipe(path, {**recipe, **more}).parent
    tree.run_ok("train", "recipe.toml", cwd=folder)
    published = r"/evaluations/tiny/step_\d+$"
    with _traced(tree, path=(published, published)) as (traced, found):
        traced.run_ok("evaluate", "run", "--device", "cpu", cwd=folder)
    return found


@contextmanager
def _traced(tree: Tree, *, first: bool = True, **window: Any) -> Iterator[tuple[Tree, list[str]]]:
    """A tree whose processes are traced, and the recorded names when the block ends.

    Args:
        tree: of which the same is traced.
        first: whether the process that is started counts itself, beside those that it starts.
        window: as _Tracer takes it.
    """
    found: list[str] = []
    with tempfile.TemporaryDirectory(prefix="trace-") as folder:
        Path(folder, "window").write_bytes(b"\0")
        options = {"source": str(tree.root / "src" / "longtake"), "folder": folder, **window}
        more = {"PYTHONPATH": str(_TRACING), "STRUCTURE_TRACE": json.dumps(options)}
        more |= {} if first else {"STRUCTURE_SKIPS_FIRST": "1"}
        yield replace(tree, environment=more), found
        if Path(folder, "window").read_bytes()[0] < _ENDING:
            raise SystemExit(f"{window}: it did not happen, or did not end")
        files = Path(folder).glob("names_*")
        found += sorted({name for each in files for name in each.read_text().splitlines()})


def _rows(found: Structure, paths: Mapping[str, Sequence[str]]) -> dict[str, str]:
    lines = [each.num_lines for each in found.modules]
    codes = found.code_lines
    return {
        "code lines of src": f"{codes['src']:,}",
        "code lines of core": f"{codes['core']:,}",
        "lines of src, with everything": f"{found.num_lines:,}",
        "files in src": str(len(lines)),
        "lines of a file, median": f"{statistics.median(lines):g}",
        "comment lines, % of lines": f"{found.comment_percent:.1f}",
        "imports, % of lines": f"{100 * found.num_import_lines / found.num_lines:.1f}",
        "lines of JavaScript, HTML and CSS": f"{codes['web']:,}",
        **{name: f"{len(places):,}" for name, places in found.counts.items()},
        "public class names that are defined more than once": str(len(found.duplicate_class_names)),
        "code lines of tests": f"{codes['tests']:,}",
        "lines of tests": f"{sum(each.num_lines for each in found.tests):,}",
        "lines of README": str(found.readme_lines),
        **{f"files that run in {path}": str(len(names)) for path, names in paths.items()},
    }


def _report(commit: str, before: Path, traces: Mapping[str, Mapping[str, Sequence[str]]]) -> str:
    """The table.

    Args:
        commit: with which this tree is compared.
        before: where that is checked out.
        traces: files that run in each operation, at the commit and "now".
    """
    found = {root: measure(root) for root in (before, _ROOT)}
    files = {before: traces.get(commit, {}), _ROOT: traces.get("now", {})}
    rows = {root: _rows(found[root], files[root]) for root in found}
    table = [
        f"| {name} | {value} | {rows[_ROOT][name]} | {_GOALS.get(name, '')} |"
        for name, value in rows[before].items()
    ]
    codes = {root: found[root].code_lines for root in found}
    named = [name for name in codes[before] | codes[_ROOT] if name not in ("src", "core")]
    packages = [
        f"| {name} | {codes[before].get(name, 0):,} | {codes[_ROOT].get(name, 0):,} |"
        for name in named
    ]
    listed = [
        f"- {path}: {', '.join(each.removesuffix('.py') for each in names)}"
        for path, names in files[_ROOT].items()
    ]
    return "\n".join(
        [
            "# Size and structure of the code",
            "",
            f"`python -m benchmarks.structure --before {commit}`. Code lines are lines without "
            "docstrings, comments, imports and blank lines. Core are the packages that training "
            "needs (CONTRIBUTING). A training step: the third of a tiny Wan with LoRA on one rank "
            "with one decoding process, without watcher and trackers. A stall's diagnosis: of the "
            f"drill `hung-rank-asleep`, on two ranks, in each of {_ROUNDS} drills. An evaluation: "
            "a server's second. Counted are files under src of which a function ran meanwhile, in "
            "any process or thread (`--trace` measures them again).",
            "",
            f"| | {commit} | now | goal, at most |",
            "|---|---|---|---|",
            *table,
            "",
            "Code lines of each package, of tests, and of JavaScript, HTML and CSS (web):",
            "",
            f"| | {commit} | now |",
            "|---|---|---|",
            *packages,
            "",
            "Files that run now:",
            "",
            *listed,
            "",
        ]
    )


def main() -> int:
    """Check, tighten, or measure and write the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.structure")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--tighten", action="store_true")
    parser.add_argument("--trace", action="store_true")
    parser.add_argument("--tree", type=Path, default=_ROOT, help="what is checked [this tree]")
    parser.add_argument("--before", default=_COMMIT.read_text().strip()[:12])
    given = parser.parse_args()
    if not (given.tighten or given.check):
        traces = json.loads(_TRACES.read_text(encoding="utf-8")) if _TRACES.exists() else {}
        with checked_out(given.before) as before:
            if given.trace:
                traces = {"now": trace(_ROOT), given.before: traces.get(given.before)}
                traces[given.before] = traces[given.before] or trace(before)
                _TRACES.write_text(json.dumps(traces, indent=1) + "\n", encoding="utf-8")
            _RESULTS.write_text(_report(given.before, before, traces), encoding="utf-8")
        return 0
    path = given.tree / _LIMITS
    limits = tomllib.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    found = measure(given.tree)
    if given.tighten:
        head = (
            "# Ceilings that `make check` enforces. They are lowered by\n"
            "# `python -m benchmarks.structure --tighten`; a rise needs a decision. core_seconds:\n"
            "# of each folder of tests in `make test`, on quiet cores; more is only reported.\n"
        )
        path.write_text(head + tomli_w.dumps(tightened(found, limits)), encoding="utf-8")
        return 0
    results = given.tree / _RESULTS.relative_to(_ROOT)
    problems = check(found, limits, results.read_text(encoding="utf-8"))
    for problem in problems:
        print(problem, file=sys.stderr)  # noqa: T201 - a program's result
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main())
