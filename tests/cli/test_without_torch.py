"""What runs without torch: a verb's help, readers of a run, the watcher and decoding processes.

The watcher has to run when CUDA fails, and a help text has to open at once.
"""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import urlopen

import psutil
from tests.data.build import section

from longtake.board.pages import PAGES
from longtake.data.buckets import sample_window
from longtake.data.catalog import Catalog
from longtake.data.decode_worker import DecodePool

_SOURCE = Path(__file__).resolve().parents[2] / "src"
_HEAVY = ("torch.", "diffusers.", "transformers.", "peft.", "torchao.")
# Modules and packages that may import those when they are imported; no other does, be it through
# one of these. cli, and others that call them, import them inside functions.
_MAY_IMPORT_TORCH = (
    "checkpoint.store.",
    "cluster.checks_network.",
    "cluster.checks_node.",
    "cluster.launcher.",
    "cluster.preflight.",
    "cluster.rendezvous.",
    "data.assembler.",
    "data.batch.",
    "data.cache.",
    "data.cache_fill.",
    "data.decoding_source.",
    "data.packs.",
    "data.loader.",
    "demo.report.",
    "demo.run.",
    "evaluation.evaluator.",
    "evaluation.export.",
    "evaluation.push.",
    "evaluation.extra_measures.",
    "evaluation.held_out.",
    "faults.",
    "flow.",
    "models.",
    "optim.",
    "parallel.",
    "planner.",
    "recompute.",
    "sampling.checkpoints.",
    "sampling.guidance.",
    "sampling.memory_strategy.",
    "sampling.other_expert.",
    "sampling.sampler.",
    "training.",
)
# Of those packages, modules that may not.
_MAY_NOT = (
    "faults.registry",
    "models.caption_tokens",
    "models.pretrained",
    "models.release_checks",
    "models.release_scheduler",
    "models.releases",
    "planner.record",
    "planner.words",
)
_SECONDS = 60.0


def test_only_these_modules_import_torch() -> None:
    imports = {name: set(_imports(path)) for name, path in _modules().items()}
    heavy = {name for name, found in imports.items() if found & set(_HEAVY)}
    via: dict[str, str] = {}
    while more := {
        name: next(iter(found & heavy))
        for name, found in imports.items()
        if name not in heavy and found & heavy
    }:
        via |= more
        heavy |= more.keys()
    wrong = {
        name: _chain(name, via)
        for name in sorted(heavy)
        if name in _MAY_NOT or not f"{name}.".startswith(_MAY_IMPORT_TORCH)
    }
    assert wrong == {}


def test_a_verbs_help_imports_nothing_heavy() -> None:
    """What a verb needs is imported by the verb, so that help is there at once."""
    code = """
import sys, typer.main
from longtake import cli
from longtake.cli.app import app
def calls(command, name=()):
    yield [*name, "--help"]
    for each in getattr(command, "commands", {}).items():
        yield from calls(each[1], (*name, each[0]))
for arguments in calls(typer.main.get_command(app)):
    sys.argv = ["longtake", *arguments]
    try:
        cli.main()
    except SystemExit as end:
        assert not end.code, arguments
    found = {"torch", "diffusers", "transformers", "av", "pyarrow", "numpy"}
    assert not found & set(sys.modules), (arguments, found & set(sys.modules))
"""
    said = _run_python(code)
    assert said.count("Usage: longtake") > 15


def test_looking_at_a_run_imports_no_torch(place: Path) -> None:
    """A run can be looked at where nothing can train."""
    code = """
import sys
from longtake import cli
try:
    cli.main()
except SystemExit as end:
    assert not end.code
assert not {"torch", "diffusers", "transformers"} & set(sys.modules)
"""
    for options, said in (((), "sample"), (("--around", "2"), "The clips of step 2")):
        assert said in _run_python(code, "show", str(place / "run"), *options)


def test_a_board_loads_no_torch(place: Path) -> None:
    command = [sys.executable, "-m", "longtake", "board", str(place), "--port", "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as board:
        try:
            assert board.stderr is not None
            found = re.search(r"http://\S+", board.stderr.readline())
            assert found is not None
            for path in ("", *(f"run/{page}/run" for page in PAGES), "series/run"):
                with suppress(HTTPError), urlopen(f"{found[0]}{path}", timeout=_SECONDS) as answer:  # noqa: S310 - our own
                    assert answer.read()
            assert "libtorch" not in _loaded(board.pid)
        finally:
            board.terminate()


def test_a_decoding_process_loads_no_torch(shapes_catalog: Path) -> None:
    """It starts in a fraction of a second, and there are many of them."""
    data = section()
    window = sample_window(Catalog.load(shapes_catalog).clip(0), data.buckets[0], data, seed=0)
    before = {child.pid for child in psutil.Process().children()}
    with DecodePool(1) as pool:
        pool.submit(window).result(_SECONDS)
        started = [child.pid for child in psutil.Process().children() if child.pid not in before]
        assert started
        for pid in started:
            assert "libav" in _loaded(pid)
            assert "libtorch" not in _loaded(pid)


def _modules() -> dict[str, Path]:
    """All modules of src by their names below longtake."""
    found = {}
    for path in (_SOURCE / "longtake").rglob("*.py"):
        parts = path.relative_to(_SOURCE / "longtake").with_suffix("").parts
        found[".".join(part for part in parts if part != "__init__")] = path
    return found


def _imports(path: Path) -> Iterator[str]:
    """What is imported with a module: ours by their names below longtake, and others' roots."""
    package = path.relative_to(_SOURCE / "longtake").parent.parts
    for end in range(len(package) + (path.name != "__init__.py")):
        yield ".".join(package[:end])
    for node in _run_at_import(ast.parse(path.read_text(encoding="utf-8")).body):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        else:
            continue
        for name in names:
            parts = name.split(".")
            if parts[0] == "longtake":
                yield from (".".join(parts[1:end]) for end in range(1, len(parts) + 1))
            else:
                yield f"{parts[0]}."


def _run_at_import(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements outside of functions, and of what only type checkers read."""
    for node in body:
        yield node
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            yield from _run_at_import(node.orelse)
            continue
        for name in ("body", "orelse", "finalbody"):
            yield from _run_at_import(getattr(node, name, []))
        for handler in getattr(node, "handlers", []):
            yield from _run_at_import(handler.body)


def _chain(name: str, via: dict[str, str]) -> str:
    return f"{name} -> {_chain(via[name], via)}" if name in via else f"{name} -> torch"


def _run_python(code: str, *arguments: str) -> str:
    command = [sys.executable, "-c", code, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


def _loaded(pid: int) -> str:
    """Names of the files that a process has mapped."""
    return Path(f"/proc/{pid}/maps").read_text()
