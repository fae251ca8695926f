"""Size and structure of the code, and how many files three operations run through.

    python -m benchmarks.structure --check      refuse more than tests/structure_limits.toml allows
    python -m benchmarks.structure --tighten    lower the limits to the current values
    python -m benchmarks.structure              measure, and write benchmarks/results/structure.md

Lines are those of files formatted by `ruff format`. The operations are a training step, the
diagnosis of a stall, and an evaluation; `sys.setprofile` in all processes and threads records which
files under src have functions that run meanwhile (benchmarks/tracing). Numbers of files and lines
are only reported. Denied words are counted in src, the documentation and benchmarks.
"""

import argparse
import ast
import json
import re
import statistics
import sys
import tempfile
import tomllib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import tomli_w
from tests.goldens.tree import Tree, checked_out, kept_in

_ROOT = Path(__file__).resolve().parents[1]
_RESULTS = _ROOT / "benchmarks" / "results" / "structure.md"
_LIMITS = Path("tests", "structure_limits.toml")
_DENIED = Path("tests", "denied_words.txt")
_TRACING = _ROOT / "benchmarks" / "tracing"
_COMMIT = _ROOT / "tests" / "goldens" / "COMMIT"

_GOALS = {
    "files in src": "180",
    "lines in src": "42,000",
    "docstrings, % of lines": "12",
    "imports, % of lines": "5",
    "public class names defined more than once": "0",
    "denied words": "0",
    "lines of tests": "35,000",
    "lines of README": "180",
}
_MOST_OF_FILES = 0.4
_ROUNDS = 3
_ENDING = 2  # of benchmarks/tracing
_STEP, _STALL, _EVALUATION = "a training step", "a stall's diagnosis", "an evaluation"


@dataclass(frozen=True)
class Structure:
    """Measures of a tree."""

    lines: Sequence[int]
    """Of each file in src."""
    docstring_lines: int
    import_lines: int
    class_names: Mapping[str, int]
    """How often each public class name is defined in src."""
    test_lines: int
    readme_lines: int
    words: Mapping[str, Mapping[str, int]]
    """How often each denied word stands in which file of src, the documentation and benchmarks."""

    @property
    def docstring_percent(self) -> float:
        """Share of all lines."""
        return 100 * self.docstring_lines / sum(self.lines)

    @property
    def import_percent(self) -> float:
        """Share of all lines."""
        return 100 * self.import_lines / sum(self.lines)

    @property
    def duplicates(self) -> list[str]:
        """Public class names that are defined more than once."""
        return sorted(name for name, count in self.class_names.items() if count > 1)

    @property
    def denied(self) -> dict[str, int]:
        """How often each denied word stands in all files, where it does."""
        counts = {word: sum(files.values()) for word, files in self.words.items()}
        return {word: count for word, count in counts.items() if count}


def measure(root: Path, denied: Mapping[str, Sequence[str]]) -> Structure:
    """Measure all files of a tree; `denied` is the result of `read_denied`."""
    package = root / "src" / "longtake"
    words: dict[str, dict[str, int]] = {word: {} for word in denied}
    lines, docstrings, imports = [], 0, 0
    names: Counter[str] = Counter()
    for path in sorted(package.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        nodes = list(ast.walk(ast.parse(text)))
        lines.append(len(text.splitlines()))
        docstrings += sum(map(_docstring_lines, nodes))
        imports += sum(
            _span(node) for node in nodes if isinstance(node, ast.Import | ast.ImportFrom)
        )
        names.update(
            node.name
            for node in nodes
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
        )
        place = path.relative_to(package).with_suffix("").as_posix()
        for word, count in _denied_at(place, [place.replace("/", " "), *_texts(nodes)], denied):
            words[word][f"{place}.py"] = count
    for path in _other_files(root):
        place = path.relative_to(root).with_suffix("").as_posix()
        text = path.read_text(encoding="utf-8")
        texts = list(_texts(ast.walk(ast.parse(text)))) if path.suffix == ".py" else [text]
        for word, count in _denied_at(place, texts, denied):
            words[word][str(path.relative_to(root))] = count
    tests = sum(_num_lines(path) for path in (root / "tests").rglob("*.py"))
    return Structure(
        lines, docstrings, imports, names, tests, _num_lines(root / "README.md"), words
    )


def _other_files(root: Path) -> Iterator[Path]:
    """Files besides src: the documentation, and the benchmarks with their results."""
    yield from (path for name in ("README.md", "CONTRIBUTING.md") if (path := root / name).exists())
    for folder in (root / "docs", root / "benchmarks"):
        yield from sorted(path for path in folder.rglob("*") if path.suffix in (".md", ".py"))


def _denied_at(
    place: str, texts: Sequence[str], denied: Mapping[str, Sequence[str]]
) -> Iterator[tuple[str, int]]:
    """Denied words that are not allowed in a file, and how often they stand there."""
    for word, count in _count_words(texts, denied).items():
        if not any(place == each or place.startswith(f"{each}/") for each in denied[word]):
            yield word, count


def _docstring_lines(node: ast.AST) -> int:
    holders = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    if not isinstance(node, holders) or ast.get_docstring(node, clean=False) is None:
        return 0
    return _span(node.body[0])


def _span(node: ast.stmt) -> int:
    return (node.end_lineno or node.lineno) - node.lineno + 1


def _num_lines(path: Path) -> int:
    return len(path.read_text(encoding="utf-8").splitlines())


def _texts(nodes: Iterable[ast.AST]) -> Iterator[str]:
    """All identifiers, and all strings, which are docstrings and messages."""
    for node in nodes:
        match node:
            case ast.Constant(value=str(text)):
                yield text
            case ast.Name(id=name) | ast.Attribute(attr=name) | ast.arg(arg=name):
                yield name
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                yield name
            case ast.ClassDef(name=name) | ast.keyword(arg=str(name)):
                yield name
            case ast.alias(name=name, asname=other):
                yield f"{name} {other or ''}"


_CAMEL = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")


def _count_words(texts: Sequence[str], denied: Mapping[str, Sequence[str]]) -> dict[str, int]:
    """How often each denied word is found, also as a part of a name."""
    plain = " \n ".join(_CAMEL.sub(" ", text).replace("_", " ") for text in texts).lower()
    found = Counter(re.sub(r"\s+", " ", each) for each in _pattern(denied).findall(plain))
    return {word: found[word] for word in denied if found[word]}


def _pattern(words: Mapping[str, Sequence[str]]) -> re.Pattern[str]:
    longest = sorted(words, key=len, reverse=True)
    alternatives = "|".join(each.replace(" ", r"\s+") for each in longest)
    return re.compile(rf"\b(?:{alternatives})\b")


def read_denied(root: Path) -> dict[str, list[str]]:
    """Denied words, and where each is allowed: paths without endings, from src/longtake or here."""
    text = (root / _DENIED).read_text(encoding="utf-8")
    lines = [line.partition("#")[0] for line in text.splitlines()]
    parts = [line.partition(":") for line in lines if line.strip()]
    return {word.strip(): allowed.split() for word, _, allowed in parts}


def check(found: Structure, limits: Mapping[str, Any]) -> list[str]:
    """Violations of the limits, a sentence each."""
    problems = []
    for name in ("docstring_percent", "import_percent"):
        if getattr(found, name) > limits[name]:
            measured = getattr(found, name)
            problems.append(f"{name} is {measured:.2f}; the limit is {limits[name]}.")
    known = limits["duplicate_class_names"]
    problems += [
        f"{found.class_names[name]} classes are called {name}; give one of them another name."
        for name in found.duplicates
        if name not in known
    ]
    for word, count in found.denied.items():
        if count > limits["denied_words"].get(word, 0):
            limit = limits["denied_words"].get(word, 0)
            files = ", ".join(f"{place} {n}" for place, n in sorted(found.words[word].items()))
            problems.append(
                f'"{word}" stands {count} times; the limit is {limit}. Use the word of the '
                f"field, or allow it for a file in tests/denied_words.txt: {files}"
            )
    return problems


def tightened(found: Structure, limits: Mapping[str, Any]) -> dict[str, Any]:
    """The limits, lowered to the current values; none is raised."""
    words = limits.get("denied_words", found.denied)
    names = limits.get("duplicate_class_names", found.duplicates)
    shares = {
        name: min(limits.get(name, 100.0), round(getattr(found, name) + 0.3, 1))
        for name in ("docstring_percent", "import_percent")
    }
    return {
        **shares,
        "duplicate_class_names": [name for name in names if name in found.duplicates],
        "denied_words": {
            word: min(words[word], found.denied[word]) for word in words if word in found.denied
        },
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
    return {
        "files in src": str(len(found.lines)),
        "lines in src": f"{sum(found.lines):,}",
        "lines of a file, median": f"{statistics.median(found.lines):g}",
        "docstrings, % of lines": f"{found.docstring_percent:.1f}",
        "imports, % of lines": f"{found.import_percent:.1f}",
        "public class names defined more than once": str(len(found.duplicates)),
        "denied words": f"{sum(found.denied.values()):,}",
        "lines of tests": f"{found.test_lines:,}",
        "lines of README": str(found.readme_lines),
        **{f"files that run in {path}": str(len(names)) for path, names in paths.items()},
    }


def _trace_commit(commit: str, root: Path) -> dict[str, list[str]]:
    """The trace of a commit, measured once."""
    path = kept_in() / f"structure-{commit}.json"
    if not path.exists():
        path.write_text(json.dumps(trace(root)), encoding="utf-8")
    found: dict[str, list[str]] = json.loads(path.read_text(encoding="utf-8"))
    return found


def _report(commit: str, before: Path) -> str:
    traces = {before: _trace_commit(commit, before), _ROOT: trace(_ROOT)}
    denied = read_denied(_ROOT)
    rows = {root: _rows(measure(root, denied), paths) for root, paths in traces.items()}
    goals = _GOALS | {
        f"files that run in {path}": f"{_MOST_OF_FILES * len(names):.0f}"
        for path, names in traces[before].items()
    }
    table = [
        f"| {name} | {value} | {rows[_ROOT][name]} | {goals.get(name, '')} |"
        for name, value in rows[before].items()
    ]
    listed = [
        f"- {path}: {', '.join(each.removesuffix('.py') for each in names)}"
        for path, names in traces[_ROOT].items()
    ]
    return "\n".join(
        [
            "# Size and structure of the code",
            "",
            f"`python -m benchmarks.structure --before {commit}`. A training step: the third of a "
            "tiny Wan with LoRA on one rank with one decoding process, without watcher and "
            "trackers. A stall's diagnosis: of the drill `hung-rank-asleep`, on two ranks, in each "
            f"of {_ROUNDS} drills. An evaluation: a server's second. Counted are files "
            "under src of which a function ran meanwhile, in any process or thread.",
            "",
            f"| | {commit} | now | goal, at most |",
            "|---|---|---|---|",
            *table,
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
    parser.add_argument("--tree", type=Path, default=_ROOT, help="what is checked [this tree]")
    parser.add_argument("--before", default=_COMMIT.read_text().strip()[:12])
    given = parser.parse_args()
    if not (given.tighten or given.check):
        with checked_out(given.before) as before:
            _RESULTS.write_text(_report(given.before, before), encoding="utf-8")
        return 0
    path = given.tree / _LIMITS
    limits = tomllib.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    found = measure(given.tree, read_denied(given.tree))
    if given.tighten:
        head = "# Of src; only ever lowered, by: python -m benchmarks.structure --tighten\n"
        path.write_text(head + tomli_w.dumps(tightened(found, limits)), encoding="utf-8")
        return 0
    problems = check(found, limits)
    for problem in problems:
        print(problem, file=sys.stderr)  # noqa: T201 - a program's result
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main())
