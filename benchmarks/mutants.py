"""Small defects inserted into the code one at a time, and which of them `make test` notices.

    python -m benchmarks.mutants pick TREE NAME [--seed N]   choose 120 in a worktree's code
    python -m benchmarks.mutants run TREE NAME    try them there; several may run at once
    python -m benchmarks.mutants report           the shares by package: benchmarks/results

A mutant is a changed comparison, constant or call in a statement of a function, chosen by a seed.
TREE is a worktree that the script may change: every mutant is written into it, and an environment
variable of the process selects the active one. All tests of `make test` run once without mutants
and record which mutants they reach. Then, for each mutant, the tests that reach it run until one
fails, those of its own package and the shortest first; a test that does not reach a mutant cannot
notice it. Of the tests that reach one mutant, those run whose durations add up to 90 seconds: a
survivor's line says how many they were, and the share of noticed mutants is at least the one
reported. Outcomes are stored as they come, so that a run can be interrupted.

A mutant that no test can notice, because the program behaves the same, is equivalent: somebody who
has read the code writes its number and the reason under "equivalent" of the set. The share is of
the others, survivors and those that no test reaches included. The number of one that a test
notices which was written because of it, tried by hand, is written with the test under "since". Of
one whose code is no longer there, "gone" says why.
"""

import argparse
import ast
import contextlib
import copy
import fcntl
import importlib
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import time
import traceback
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

_ROOT = Path(__file__).resolve().parents[1]
_DATA = _ROOT / "benchmarks" / "results" / "mutants.json"
_TABLE = _DATA.with_suffix(".md")
_COUNT = 120
_LEAST_PER_PACKAGE = 3
_LIMIT_SECONDS = 300
_SLOW_TEST_SECONDS = 0.5
_MOST_SECONDS = 90
"""Of tests for one mutant, by their durations in the run that recorded what is reached."""
_ACTIVE, _REACHED = "LONGTAKE_MUTANT", "LONGTAKE_MUTANTS_REACHED"
_PACKAGE = "longtake"

_SWITCH = """

import builtins as _builtins
import os as _os

_reached = set()
_active = int(_os.environ.get("LONGTAKE_MUTANT", "-1"))


def _is_mutant(number):
    if (folder := _os.environ.get("LONGTAKE_MUTANTS_REACHED")) is not None:
        key = (number, _os.environ.get("PYTEST_CURRENT_TEST", ""))
        if key not in _reached:
            _reached.add(key)
            try:
                with open(f"{folder}/{number}", "a") as file:
                    file.write(key[1] + chr(10))
            except OSError:  # a test takes away the disk's room or permissions
                pass
    return number == _active


_builtins.__is_mutant__ = _is_mutant
"""

_PLUGIN = """
import json, os

def pytest_runtest_logreport(report):
    if "PYTEST_XDIST_WORKER" not in os.environ:
        with open(os.environ["LONGTAKE_MUTANTS_TESTS"], "a") as file:
            seen = [report.nodeid, report.when, report.outcome, report.duration]
            file.write(json.dumps(seen) + chr(10))
"""

_SWAPPED: Mapping[type[ast.cmpop], ast.cmpop] = {
    ast.Lt: ast.LtE(),
    ast.LtE: ast.Lt(),
    ast.Gt: ast.GtE(),
    ast.GtE: ast.Gt(),
    ast.Eq: ast.NotEq(),
    ast.NotEq: ast.Eq(),
    ast.Is: ast.IsNot(),
    ast.IsNot: ast.Is(),
    ast.In: ast.NotIn(),
    ast.NotIn: ast.In(),
}
_HEADS = {
    ast.If: ("test",),
    ast.While: ("test",),
    ast.For: ("target", "iter"),
    ast.With: ("items",),
    ast.Match: ("subject",),
}


@dataclass(frozen=True)
class Mutant:
    """A change to one expression."""

    package: str
    function: str
    """Qualified name; empty at the top of a module."""
    statement: str
    """Its source as ast.unparse gives it; of a compound statement its head."""
    kind: str
    place: int
    """Which expression of this kind in the statement."""
    changed: str
    """What stands there instead."""
    path: str
    """Relative to src/longtake."""


@dataclass(frozen=True)
class Site:
    """Where a mutant can be put into a tree."""

    mutant: Mutant
    start: tuple[int, int]
    """Line from 0 and byte in it."""
    end: tuple[int, int]


def main() -> None:
    """Run the requested command."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    verbs = parser.add_subparsers(dest="verb", required=True)
    for verb in ("pick", "run"):
        options = verbs.add_parser(verb)
        options.add_argument("tree", type=Path)
        options.add_argument("name", help="of the set of mutants: before, after, later")
        if verb == "pick":
            options.add_argument("--seed", type=int, default=33)
    options.add_argument("--workers", default="3", help="of the run that records what is reached")
    options.add_argument(
        "--part", type=int, default=0, help="try every second mutant, from this one"
    )
    options.add_argument("--parts", type=int, default=1)
    verbs.add_parser("report")
    asked = parser.parse_args()
    if asked.verb == "pick":
        commit = subprocess.run(
            ["git", "rev-parse", "--short=12", "HEAD"],  # noqa: S607
            cwd=asked.tree,
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
        chosen = [asdict(each) for each in pick(asked.tree, asked.seed)]
        data = _load()
        data[asked.name] = {"commit": commit, "most_seconds": _MOST_SECONDS, "mutants": chosen}
        data[asked.name] |= {"outcomes": {}, "equivalent": {}, "since": {}}
        _save(data)
    elif asked.verb == "run":
        mutants = [Mutant(**each) for each in _load()[asked.name]["mutants"]]
        tree = asked.tree.resolve()
        prepare(tree, mutants, asked.workers)
        try_all(tree, asked.name, range(asked.part, len(mutants), asked.parts))
    else:
        _TABLE.write_text(report(_load()))


def pick(tree: Path, seed: int) -> list[Mutant]:
    """Choose mutants, for each package in proportion to its sites, with a minimum; repeatable."""
    packages: dict[str, list[Site]] = defaultdict(list)
    for site in sites_in(tree):
        packages[site.mutant.package].append(site)
    total = sum(map(len, packages.values()))
    rest = _COUNT - _LEAST_PER_PACKAGE * len(packages)
    generator = random.Random(seed)  # noqa: S311
    mutants: list[Mutant] = []
    for _, sites in sorted(packages.items()):
        wanted = _LEAST_PER_PACKAGE + round(rest * len(sites) / total)
        mutants += _of_all_kinds(sites, wanted, generator)
    return mutants


def _of_all_kinds(sites: list[Site], wanted: int, generator: random.Random) -> Iterator[Mutant]:
    """Alternate kinds; at most one per statement, and none that occurs twice."""
    kinds: dict[str, list[Site]] = defaultdict(list)
    names = Counter(site.mutant for site in sites)
    for site in generator.sample(sites, len(sites)):
        if names[site.mutant] == 1:
            kinds[site.mutant.kind].append(site)
    taken: set[tuple[str, str, str]] = set()
    while len(taken) < wanted and any(kinds.values()):
        for waiting in kinds.values():
            while waiting and len(taken) < wanted:
                site = waiting.pop()
                where = (site.mutant.path, site.mutant.function, site.mutant.statement)
                if where not in taken:
                    taken.add(where)
                    yield site.mutant
                    break


def sites_in(tree: Path) -> Iterator[Site]:
    """Every place for a mutant in src."""
    source = tree / "src" / "longtake"
    for path in sorted(source.rglob("*.py")):
        if path.name == "__main__.py":
            continue
        relative = path.relative_to(source)
        package = relative.parts[0] if len(relative.parts) > 1 else "(modules)"
        for function, statement in _statements(ast.parse(path.read_text()).body, ""):
            yield from _sites_of(statement, function, package, str(relative))


def _statements(body: Iterable[ast.stmt], function: str) -> Iterator[tuple[str, ast.stmt]]:
    for statement in body:
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield from _statements(statement.body, f"{function}.{statement.name}".lstrip("."))
            continue
        if isinstance(statement, ast.If) and "TYPE_CHECKING" in ast.unparse(statement.test):
            continue
        yield function, statement
        for name in ("body", "orelse", "finalbody"):
            yield from _statements(getattr(statement, name, ()), function)
        for part in (*getattr(statement, "handlers", ()), *getattr(statement, "cases", ())):
            yield from _statements(part.body, function)


def _sites_of(statement: ast.stmt, function: str, package: str, path: str) -> Iterator[Site]:
    if isinstance(statement, ast.Raise | ast.Assert | ast.Import | ast.ImportFrom | ast.Try):
        return
    heads = [getattr(statement, name) for name in _HEADS.get(type(statement), ())]
    source = ", ".join(
        ast.unparse(part)
        for head in heads or [statement]
        for part in (head if isinstance(head, list) else [head])
    )
    places: Counter[str] = Counter()
    for part in heads or [statement]:
        for node in _expressions(part, statement):
            if (change := _change(node, statement)) is None:
                continue
            kind, changed = change
            mutant = Mutant(package, function, source, kind, places[kind], changed, path)
            places[kind] += 1
            start = (node.lineno - 1, node.col_offset)
            assert node.end_lineno is not None
            assert node.end_col_offset is not None
            yield Site(mutant, start, (node.end_lineno - 1, node.end_col_offset))


def _expressions(part: Any, statement: ast.stmt) -> Iterator[ast.expr]:
    """Expressions that may be replaced: not in annotations, patterns and f-strings."""
    if isinstance(part, list):
        for each in part:
            yield from _expressions(each, statement)
        return
    if isinstance(part, ast.JoinedStr | ast.NamedExpr | ast.Lambda):
        return
    if isinstance(part, ast.expr):
        yield part
    for name, value in ast.iter_fields(part):
        if name not in {"annotation", "returns", "target", "targets"}:
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    yield from _expressions(child, statement)


def _change(node: ast.expr, statement: ast.stmt) -> tuple[str, str] | None:
    """Kind and source of an expression's replacement."""
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        if any(isinstance(each, ast.NamedExpr | ast.JoinedStr) for each in ast.walk(node)):
            return None
        other = copy.deepcopy(node)
        other.ops = [_SWAPPED[type(node.ops[0])]]
        return "comparison", ast.unparse(other)
    if isinstance(node, ast.Call) and isinstance(statement, ast.Expr) and node is statement.value:
        return "call", "None"
    if isinstance(node, ast.Constant):
        if isinstance(node.value, bool):
            return "constant", repr(not node.value)
        if isinstance(node.value, int):
            return "constant", repr(node.value + 1)
        if isinstance(node.value, float):
            return "constant", repr(2 * node.value or 1.0)
    return None


def prepare(tree: Path, mutants: Sequence[Mutant], workers: str) -> None:
    """Write the mutants into a tree and record which tests reach them, unless that was done."""
    folder = tree / ".mutants"
    if not folder.exists():
        sites = {site.mutant: site for site in sites_in(tree)}
        (folder / "reached").mkdir(parents=True)
        _instrument(tree, {number: sites[each] for number, each in enumerate(mutants)})
    if not (folder / "reach_done").exists():
        _reach(tree, workers)


def try_all(tree: Path, name: str, numbers: Iterable[int]) -> None:
    """Try the mutants that were not tried yet."""
    mutants = [Mutant(**each) for each in _load()[name]["mutants"]]
    tests = _Tests(tree)
    os.environ["PYTHONPATH"] = f"{tree / 'src'}{os.pathsep}{tree / '.mutants'}"
    sys.path[:0] = [str(tree), str(tree / "src")]
    _import_all(tree)
    for number in numbers:
        if str(number) in _load()[name]["outcomes"]:
            continue
        outcome = tests.try_one(number, mutants[number].path)
        print(f"{number}: {outcome}", flush=True)  # noqa: T201
        with (tree / ".mutants" / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            data = _load()
            data[name]["outcomes"][str(number)] = outcome
            _save(data)


def _instrument(tree: Path, found: Mapping[int, Site]) -> None:
    """Write all mutants into a tree, each with a switch; line numbers do not change."""
    source = tree / "src" / "longtake"
    files: dict[str, list[tuple[Site, int]]] = defaultdict(list)
    for number, site in found.items():
        files[site.mutant.path].append((site, number))
    for path, sites in files.items():
        lines = (source / path).read_bytes().split(b"\n")
        starts = [0]
        for line in lines:
            starts.append(starts[-1] + len(line) + 1)
        text = b"\n".join(lines)
        for site, number in sorted(sites, key=lambda each: each[0].start, reverse=True):
            start, end = (starts[line] + byte for line, byte in (site.start, site.end))
            switch = f"({site.mutant.changed} if __is_mutant__({number}) else ".encode()
            text = text[:start] + switch + text[start:end] + b")" + text[end:]
        (source / path).write_bytes(text)
    with (source / "__init__.py").open("a") as file:
        file.write(_SWITCH)


def _reach(tree: Path, workers: str) -> None:
    """Run the tests of `make test` once; note which mutants they reach and how long they take."""
    folder = tree / ".mutants"
    (folder / "tests").unlink(missing_ok=True)
    (folder / "note_durations.py").write_text(_PLUGIN)
    command = [sys.executable, "-m", "pytest", "-q", "-n", workers, "--dist", "loadfile"]
    command += ["--no-loadscope-reorder", "-m", "not drill", "-p", "note_durations"]
    path = f"{tree / 'src'}{os.pathsep}{folder}"
    noted = {_REACHED: str(folder / "reached"), "LONGTAKE_MUTANTS_TESTS": str(folder / "tests")}
    variables = os.environ | noted | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    subprocess.run(command, cwd=tree, check=False, env=variables)  # noqa: S603
    (folder / "reach_done").touch()


class _Tests:
    """The tests of a tree, their durations, and runs of some of them."""

    def __init__(self, tree: Path) -> None:
        self._tree = tree
        self._seconds: Counter[str] = Counter()
        bad = set()
        for line in (tree / ".mutants" / "tests").read_text().splitlines():
            test, _, outcome, seconds = json.loads(line)
            self._seconds[test] += seconds
            if outcome != "passed":
                bad.add(test)
        for test in bad:
            del self._seconds[test]

    def try_one(self, number: int, path: str) -> str:
        """How a mutant ends: killed, hung, survived or unreached."""
        reaching = self._tests_for(number, path)
        if not reaching:
            return "unreached"
        tests = self._affordable(reaching)
        outcome = self._run(number, tests)
        if outcome.startswith("killed by") and not self._is_certain(outcome):
            failed = outcome.removeprefix("killed by ")
            if self._run(-1, [failed]) != "survived":  # it fails without the mutant too: load
                outcome = self._run(number, [each for each in tests if each != failed])
        if outcome == "survived" and len(tests) < len(reaching):
            return f"survived {len(tests)} of the {len(reaching)} tests that reach it"
        return outcome

    def _affordable(self, tests: Sequence[str]) -> list[str]:
        """The first of them, at least one, whose durations stay within the limit."""
        sums = itertools.accumulate(self._seconds[each] for each in tests)
        enough = sum(total <= _MOST_SECONDS for total in sums)
        return list(tests[: max(1, enough)])

    def _is_certain(self, outcome: str) -> bool:
        return self._seconds[outcome.removeprefix("killed by ")] < _SLOW_TEST_SECONDS

    def _tests_for(self, number: int, path: str) -> list[str]:
        own = {Path(path).parts[0].removesuffix(".py"), f"test_{Path(path).name}"}
        reaching, files = self._reaching(number)
        # When a module is imported: any test of its package may notice it, besides those that
        # import it themselves, in a process of their own.
        if "" in reaching:
            others = {each.partition("::")[0] for each in self._seconds}
            files |= {each for each in others if own & set(Path(each).parts)}
        candidates = [
            test for test in self._seconds if test in reaching or test.partition("::")[0] in files
        ]
        candidates.sort(
            key=lambda test: (
                not own & set(Path(test.partition("::")[0]).parts),
                self._seconds[test],
            )
        )
        return candidates

    def _reaching(self, number: int) -> tuple[set[str], set[str]]:
        """Tests that reach a mutant, and files of tests whose fixtures do."""
        path = self._tree / ".mutants" / "reached" / str(number)
        lines = path.read_text().splitlines() if path.exists() else []
        tests = {line.rpartition(" (")[0] for line in lines}
        files = {line.partition("::")[0] for line in lines if line.endswith(" (setup)")}
        return tests, files

    def _run(self, number: int, tests: Sequence[str]) -> str:
        log = self._tree / ".mutants" / f"log_{os.getpid()}"
        log.unlink(missing_ok=True)
        if (child := os.fork()) == 0:
            on_import = "" in self._reaching(number)[0]
            _be_pytest(self._tree, number, tests, log, on_import=on_import)
        deadline = time.monotonic() + _LIMIT_SECONDS + 3 * sum(self._seconds[t] for t in tests)
        while time.monotonic() < deadline:
            ended, status = os.waitpid(child, os.WNOHANG)
            if ended:
                _kill_all(child, is_gone=True)
                return self._outcome(os.waitstatus_to_exitcode(status), log)
            time.sleep(0.05)
        _kill_all(child, is_gone=False)
        os.waitpid(child, 0)
        return "hung"

    def _outcome(self, code: int, log: Path) -> str:
        if code == 0:
            return "survived"
        lines = log.read_text(errors="replace").splitlines()
        for line in lines:
            # Of pytest's summary: a log that a test prints has lines that begin so, too.
            if line.startswith(("FAILED tests/", "ERROR tests/")):
                return f"killed by {line.split(' ', 1)[1].partition(' - ')[0]}"
        return f"killed with exit code {code}"


def _be_pytest(
    tree: Path, number: int, tests: Sequence[str], log: Path, *, on_import: bool
) -> None:
    """In a forked process, run these tests with one mutant active; does not return."""
    os.setsid()
    with log.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.chdir(tree)
    _activate(number, on_import=on_import)
    options = ["-x", "-q", "-rfE", "--tb=line", "-p", "no:cacheprovider", "-p", "no:xdist"]
    options += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]
    code = 1
    try:
        code = int(pytest.main([*options, *tests]))
    except BaseException:
        traceback.print_exc()
        raise
    finally:
        sys.stdout.flush()
        os._exit(code)


def _kill_all(child: int, *, is_gone: bool) -> None:
    """End a forked process and its descendants, also in sessions of their own."""
    started = []
    if not is_gone:
        started = psutil.Process(child).children(recursive=True)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    for each in started:
        with contextlib.suppress(psutil.NoSuchProcess):
            each.kill()


def _import_all(tree: Path) -> None:
    """Import the code and its dependencies once, for all forked processes."""
    diffusers, transformers = map(importlib.import_module, ("diffusers", "transformers"))
    for name in ("AutoencoderKLWan", "WanTransformer3DModel", "FluxTransformer2DModel"):
        getattr(diffusers, name)
    for name in ("UMT5EncoderModel", "T5EncoderModel", "CLIPTextModel", "PreTrainedTokenizerFast"):
        getattr(transformers, name)
    for name in ("torch._dynamo", "scipy.optimize", "peft"):
        importlib.import_module(name)
    source = tree / "src"
    for path in sorted((source / "longtake").rglob("*.py")):
        if not path.stem.startswith("__"):
            with contextlib.suppress(ImportError):  # of optional packages
                importlib.import_module(".".join(path.relative_to(source).with_suffix("").parts))


def _activate(number: int, *, on_import: bool) -> None:
    """Activate a mutant in this process and in its children."""
    os.environ[_ACTIVE] = str(number)
    os.environ.pop(_REACHED, None)
    if on_import:
        for name in [name for name in sys.modules if name.partition(".")[0] == _PACKAGE]:
            del sys.modules[name]
    else:
        vars(sys.modules[_PACKAGE])["_active"] = number


def report(data: Mapping[str, Any]) -> str:
    """Per package, how many mutants there were and how many were noticed, in each set."""
    lines = [
        "# Mutants that `make test` notices",
        "",
        "`python -m benchmarks.mutants`. Share: of all mutants but those that are equivalent.",
        "",
        "| package |" + "".join(f" {name}: mutants | killed | share, % |" for name in data),
        "|---|" + "---|---|---|" * len(data),
    ]
    packages = sorted({each["package"] for chosen in data.values() for each in chosen["mutants"]})
    for package in [*packages, "all"]:
        row = [_counted(chosen, package) for chosen in data.values()]
        lines.append(f"| {package} | " + " | ".join(row) + " |")
    lines += ["", "Killed in the trial; tests that were written because of a survivor are below."]
    for name, chosen in data.items():
        tried = f"{len(chosen['outcomes'])} of {len(chosen['mutants'])} were tried"
        limit = f"by tests that take {chosen['most_seconds']} s at most"
        lines += ["", f"Not noticed in {name} ({chosen['commit']}; {tried}, {limit}):", ""]
        for number, outcome in sorted(chosen["outcomes"].items(), key=lambda each: int(each[0])):
            if outcome.startswith(("killed", "hung")):
                continue
            mutant = chosen["mutants"][int(number)]
            if (reason := chosen["equivalent"].get(number)) is not None:
                outcome = f"equivalent. {reason}"
            elif (test := chosen.get("since", {}).get(number)) is not None:
                outcome += f"; noticed since by {test}"
            elif (reason := chosen.get("gone", {}).get(number)) is not None:
                outcome += f"; gone since: {reason}"
            lines.append(
                f"- {mutant['path']} {mutant['function']}: `{mutant['statement'][:90]}` with "
                f"`{mutant['changed']}`: {outcome}"
            )
    return "\n".join([*lines, ""])


def _counted(chosen: Mapping[str, Any], package: str) -> str:
    outcomes, mutants = chosen["outcomes"], chosen["mutants"]
    tried = [
        end
        for number, end in outcomes.items()
        if package in (mutants[int(number)]["package"], "all")
        and number not in chosen["equivalent"]
    ]
    killed = sum(end.startswith(("killed", "hung")) for end in tried)
    share = f"{100 * killed / len(tried):.0f}" if tried else "-"
    return f"{len(tried)} | {killed} | {share}"


def _load() -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(_DATA.read_text()) if _DATA.exists() else {}
    return loaded


def _save(data: Mapping[str, Any]) -> None:
    _DATA.write_text(json.dumps(data, indent=1) + "\n")


if __name__ == "__main__":
    main()
