"""Fixtures that tests of more than one package need."""

import gc
import json
import os
import re
import runpy
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import IO, TYPE_CHECKING, Any

import pytest
from rich.console import Console
from tests import allowed_skips, core_seconds, determinism
from tests.cluster import hosts
from tests.data.catalogs import make_catalog
from tests.warm import Forked

import longtake
from longtake import cli, config, process, stacks
from longtake.config import Recipe
from longtake.data.catalog import Catalog
from longtake.data.index import index
from longtake.demo.shapes import write_clips
from longtake.fsio import now, write_json
from longtake.monitor import dumps
from longtake.run_dir import RunDirectory

if TYPE_CHECKING:
    from tests.build import Recipes

# Collecting imports and makes millions of objects that stay: none is garbage.
gc.disable()
# Also where an environment says to keep no bytecode, as containers do: otherwise each of three
# processes rewrites the assertions of all tests anew. Tests themselves run as the environment says.
_keeps_no_bytecode = sys.dont_write_bytecode
sys.dont_write_bytecode = False

# Suggested commands are then `longtake ...`, however pytest was started.
os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
# Tests replace parts of the planner, which no cached plan would notice.
os.environ["LONGTAKE_PLAN_CACHE"] = "off"

_RESTARTS = "--max-restarts"
_ROOT = Path(__file__).resolve().parents[1]
_NOBODY = 65534
_MATERIAL_VARIABLE = "LONGTAKE_TEST_MATERIAL"


def pytest_configure(config: pytest.Config) -> None:
    """Refuse another checkout's code and skips that are not listed; restore the usual Ctrl-C.

    nohup, and shells that start pytest in the background, have it ignore SIGINT, and an ignored
    signal stays so in every process that is started.
    """
    imported = Path(longtake.__file__).resolve().parent
    if imported != _ROOT / "src" / "longtake":
        raise pytest.UsageError(
            f"These tests are of {_ROOT}, and Python imports longtake from {imported}. Make a "
            f"virtual environment in {_ROOT} (make check), or set PYTHONPATH={_ROOT / 'src'}."
        )
    config.pluginmanager.register(allowed_skips)
    config.pluginmanager.register(core_seconds.CoreSeconds())
    config.pluginmanager.register(determinism)
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with the most slow tests first, so that none is begun when all others have ended."""
    slow = Counter(item.path for item in items if item.get_closest_marker("slow"))
    items.sort(key=lambda item: -slow[item.path])


def pytest_collection_finish() -> None:
    """Collect garbage from now on, but never look again at what was imported."""
    sys.dont_write_bytecode = _keeps_no_bytecode
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="session")
def material() -> Path:
    """The folder of real clips, damaged clips and exact numbers; skips where none is named."""
    if not (named := os.environ.get(_MATERIAL_VARIABLE)):
        pytest.skip(f"{_MATERIAL_VARIABLE} does not name a folder of real clips")
    folder = Path(named).resolve()
    assert (folder / "MATERIAL.md").is_file(), f"{_MATERIAL_VARIABLE}={named} holds no MATERIAL.md"
    return folder


@pytest.fixture(scope="session")
def anchors() -> dict[str, Any]:
    """Exact numbers of others, whose sources are in anchors.json."""
    named = json.loads(Path(__file__).with_name("anchors.json").read_text())
    return {name: anchor["values"] for name, anchor in named.items()}


@pytest.fixture(scope="session")
def shapes_catalog(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A catalog of 64 clips (8 frames of 32 x 32, captioned); copy its folder to change a clip."""
    folder = tmp_path_factory.mktemp("shapes")
    captions = write_clips(folder / "clips", num_clips=64, seed=0)
    out = folder / "catalog.parquet"
    index([folder / "clips"], captions=captions, out=out)
    return out


_SMALL_RECIPE = """
[data]
buckets = [{ num_frames = 8, height = 32, width = 32 }]
workers = 0
[model]
family = "tubelet"
config = { hidden_size = 48, num_blocks = 2 }
[text]
max_tokens = 6
[flow]
logit_mean = 2.0
[optimizer]
learning_rate = 3e-3
warmup_steps = 4
[training]
steps = 12
global_batch_size = 4
device = "cpu"
precision = "fp32"
[ema]
decay = 0.9
[checkpoint]
every = 6
[watch]
enabled = false
[tracking]
tensorboard = false
"""


@pytest.fixture(scope="session")
def namespaces() -> ModuleType:
    """The module that makes hosts, with ssh between them; skips where it cannot."""
    if reason := hosts.why_not(with_ssh=True):
        pytest.skip(reason)
    return hosts


@pytest.fixture
def add_scores() -> Callable[..., Path]:
    """Writes a scores.json: `add_scores(run, "demo", 100, alarms=[])`; gives its folder."""

    def add(run: RunDirectory, preset: str, step: int, **changes: Any) -> Path:
        folder = run.evaluation_path(preset, step)
        folder.mkdir(parents=True)
        texts = {"preset": preset, "key": "0a1b2c3d", "weights": "model", "time": now()}
        tables = {"settings": {"fps": 8.0}, "measures": {"brightness": 100.0}, "seconds": {}}
        scores = {**texts, **tables, "step": step, "server": "vm-1", "videos": [], "alarms": []}
        write_json(folder / "scores.json", scores | changes)
        return folder

    return add


@pytest.fixture(scope="module")
def small_recipe_in(shapes_catalog: Path) -> "Callable[[Path], Recipes]":
    """Makes what `small_recipe` is, for a folder: for runs that several tests look at."""
    from tests.build import Recipes

    def make(folder: Path) -> Recipes:
        path = folder / "small.toml"
        path.write_text(_SMALL_RECIPE)
        return Recipes(path, shapes_catalog)

    return make


@pytest.fixture
def small_recipe(small_recipe_in: "Callable[[Path], Recipes]", tmp_path: Path) -> "Recipes":
    """Recipes of runs of a second, in tmp_path: see `Recipes`."""
    return small_recipe_in(tmp_path)


@pytest.fixture
def call_longtake(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Calls a verb as the shell does, in this process; it must succeed."""

    def call(*arguments: object) -> None:
        monkeypatch.setattr(sys, "argv", ["longtake", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        assert not ended.value.code

    return call


@pytest.fixture
def few_words(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan takes a vocabulary at its largest: here as large as that of the small catalogs."""
    monkeypatch.setattr("longtake.models.text.MAX_WORDS", 24)


@pytest.fixture
def another_user() -> Iterator[Path]:
    """A folder whose permissions hold for this process: as root, it is nobody for the test."""
    is_root = os.geteuid() == 0
    with tempfile.TemporaryDirectory() as name:
        if is_root:
            os.chown(name, _NOBODY, _NOBODY)
            os.seteuid(_NOBODY)
        try:
            yield Path(name)
        finally:
            if is_root:
                os.seteuid(0)
            for folder, folders, _ in os.walk(name):
                for each in folders:
                    Path(folder, each).chmod(0o700)


@pytest.fixture(scope="session")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of pictures that examples/make_pairs.py draws; few.parquet lists 16 of them."""
    folder = tmp_path_factory.mktemp("pairs")
    runpy.run_path(str(_ROOT / "examples" / "make_pairs.py"))["main"](folder)
    clips = list(Catalog.load(folder / "catalog.parquet").clips())
    make_catalog(clips[:16]).save(folder / "few.parquet")
    return folder


@pytest.fixture
def tiny_flux(
    pairs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Recipe]:
    """Makes recipes of the example of a tiny FLUX Kontext with LoRA and an added module.

    Two pictures a step, 4 steps, in tmp_path/run, at the repository's root, where it finds its
    module; all tests share its cache.
    """
    monkeypatch.chdir(_ROOT)
    always = (
        f"out={tmp_path / 'run'}",
        f"data.catalog={pairs / 'few.parquet'}",
        f"data.cache={pairs / 'cache'}",
        "data.workers=0",
        "training.steps=4",
        "training.global_batch_size=2",
        "recompute={}",
    )
    path = _ROOT / "examples" / "tiny_flux_module.toml"
    return lambda *changes: config.load(path, (*always, *changes))


_OWN_MODULE = """
from dataclasses import replace

from torch import nn, ones
from torch.utils.checkpoint import checkpoint


class Adapter(nn.Module):
    def __init__(self, width, blocks, latent_channels):
        super().__init__()
        self.style = nn.Parameter(ones(width))
        self.first = nn.Linear(width, width)
        self.second = nn.Linear(width, width)

    def prepare(self, conditioning):
        return {{"style": self.style.tanh()}}

    def change(self, given):
        return given["tokens"] + self.second(self.first(given["tokens"]).tanh()) * given["style"]

    def around(self, block, call, inputs):
        after = call(inputs)
        tokens, prepared = after.tokens, inputs.prepared
        given = {{"tokens": tokens, **prepared}}
        return replace(after, tokens={returned})
"""


@pytest.fixture
def own_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], str]:
    """Writes somebody's module to the folder where they are; gives its name in a recipe.

    `own_module("self.change(given)")`: these are the tokens that it returns after each block.
    """
    monkeypatch.chdir(tmp_path)

    def write(returned: str) -> str:
        sys.modules.pop("my_adapter", None)
        (tmp_path / "my_adapter.py").write_text(_OWN_MODULE.format(returned=returned))
        return "my_adapter:Adapter"

    return write


@pytest.fixture
def patient_dumps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dumps of this process wait for py-spy, and for processes that write themselves, for long.

    By which method a stack is read then does not depend on the machine's load.
    """
    for name in ("_NATIVE_SECONDS", "_OTHER_SECONDS", "_SIGNAL_SECONDS"):
        monkeypatch.setattr(stacks, name, 120.0)
    monkeypatch.setattr(dumps, "_NATIVE_SECONDS", {"stall": 120.0, "asked": 120.0})


@pytest.fixture(scope="session")
def warm() -> Iterator[list[str]]:
    """A command that starts processes which have imported everything: see warm.py.

    How many is appended, and a Python file, or -m and a module.
    """
    with tempfile.TemporaryDirectory(prefix="longtake-") as folder:
        socket = Path(folder) / "socket"
        command = [sys.executable, "-P", str(Path(__file__).with_name("warm.py"))]
        one_thread = os.environ | {"OMP_NUM_THREADS": "1"}
        served = [*command, "serve", str(socket)]
        with subprocess.Popen(served, stdin=subprocess.PIPE, cwd=folder, env=one_thread) as server:
            while not socket.exists():
                assert server.poll() is None
                time.sleep(0.01)
            yield [*command, "run", str(socket)]


@pytest.fixture
def torchrun() -> list[str]:
    """A command to which a Python file, or -m and a module, is appended; for two processes."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    return [*command, "--nproc-per-node", "2"]


@pytest.fixture(scope="session")
def start_warm(warm: list[str]) -> Callable[..., Any]:
    """Does what `process.start` does, by processes that have imported everything.

    What torchrun would start again, and what begins in another namespace, it starts as it is.
    """
    *_, socket = warm

    def start(
        command: Sequence[str], log: IO[bytes], folder: Path | None = None, **changes: str
    ) -> Any:
        restarts = command[command.index(_RESTARTS) + 1 :] if _RESTARTS in command else ["0"]
        if command[0] != sys.executable or restarts[0] != "0":
            return process.start(command, log, folder, **changes)
        where, log_file = str(folder or Path.cwd()), log.fileno()
        return Forked(socket, command, where, process.environment(**changes), log_file)

    return start


@pytest.fixture
def on_processes(warm: list[str]) -> Callable[[int], list[str]]:
    """A command to which a Python file, or -m and a module, is appended; for so many processes."""
    return lambda count: [*warm, str(count)]


@pytest.fixture
def on_two_processes(warm: list[str]) -> list[str]:
    """A command to which a file or module is appended, for two processes; faster than torchrun."""
    return [*warm, "2"]


@pytest.fixture(scope="session")
def run_on_ranks(warm: list[str]) -> Callable[..., str]:
    """Runs a Python file, or -m and a module, as a number of ranks, and returns their stdout.

    `run_on_ranks(4, __file__, tmp_path)`; `folder=` is where they work. Failures show stderr.
    """

    def run(count: int, *program: object, folder: Path | None = None) -> str:
        ended = subprocess.run(
            [*warm, str(count), *map(str, program)],
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )
        assert ended.returncode == 0, ended.stderr
        assert not re.search("Traceback|Warning", ended.stderr), ended.stderr
        return ended.stdout

    return run


@pytest.fixture
def run_on_two_ranks(run_on_ranks: Callable[..., str]) -> Callable[..., str]:
    """Runs a Python file as two ranks in its folder."""
    return lambda file, *arguments: run_on_ranks(2, file, *arguments, folder=Path(file).parent)


@pytest.fixture(scope="session")
def tiny_recipe(shapes_catalog: Path, tmp_path_factory: pytest.TempPathFactory) -> Recipe:
    """Six steps of a tubelet in fp32, each of them saved, with two averages that lag behind."""
    values = {
        "out": str(tmp_path_factory.mktemp("runs") / "tiny"),
        "data": {
            "catalog": str(shapes_catalog),
            "buckets": [{"num_frames": 8, "height": 32, "width": 32}],
        },
        "model": {
            "family": "tubelet",
            "config": {"hidden_size": 48, "num_heads": 2, "num_blocks": 2},
        },
        "text": {"max_tokens": 6},
        "optimizer": {"learning_rate": 1e-2, "warmup_steps": 0, "schedule": "constant"},
        "training": {"steps": 6, "global_batch_size": 8, "precision": "fp32", "device": "cpu"},
        "ema": {"profiles": [{"name": "fixed", "decay": 0.8}, {"name": "power", "sigma_rel": 0.1}]},
        "checkpoint": {"every": 1, "keep": 10},
        "sampling": {"num_inference_steps": 4, "guidance_scale": 3.0, "shift": 3.0, "fps": 8.0},
    }
    return config.parse(values, source="tiny_recipe")


@pytest.fixture(scope="session")
def tiny_run(tiny_recipe: Recipe) -> Path:
    """The run directory of `tiny_recipe`, trained to its end; copy it to change it."""
    from longtake.training.train import train

    train(tiny_recipe, Console(quiet=True))
    return tiny_recipe.out


@pytest.fixture
def without_onednn() -> Iterator[None]:
    """Its scratchpads depend on the processor."""
    import torch

    before = torch.backends.mkldnn.set_flags(_enabled=False)  # type: ignore[no-untyped-call]
    yield
    torch.backends.mkldnn.set_flags(_enabled=before[0])  # type: ignore[no-untyped-call]
