"""Compares what this working tree computes with what an earlier commit does, on this processor.

    python -m tests.goldens compare --only one-rank      after each commit: half a minute
    python -m tests.goldens compare                      all but the drills
    python -m tests.goldens compare --drill kill,loss-spike

The earlier commit is that in COMMIT. What it computes is kept in the main working tree's .goldens/,
by commit and processor, and is computed there when it is missing (`make` does only that). Numbers
are compared to the bit. Exit code 0: all is equal; 1: something differs; it is listed.
"""

import argparse
import fcntl
import hashlib
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

from tests.goldens import material, readers, scenarios
from tests.goldens.scenarios import PARTS, flat
from tests.goldens.tree import Tree, checked_out, git, kept_in

_HERE = Path(__file__).resolve().parent
_ROOT = _HERE.parents[1]
_SHOWN = 12
"""Differences that are listed of a part."""


class Goldens:
    """Results of a commit on this processor; computed when first asked for, and kept.

    Args:
        commit: whose they are.
        work: an empty folder for what has to be made.
    """

    def __init__(self, commit: str, work: Path) -> None:
        folder = kept_in() / f"{commit[:12]}-{_processor()}"
        self._commit, self._work = commit, work
        self._drills, self._folder = folder / "drills", folder / _definitions()
        self._open = ExitStack()
        self.clips = self._folder / "clips"
        with self._alone("clips"):
            if not self.clips.exists():
                aside = self._folder / f"clips.{os.getpid()}"
                material.write_clips(aside)
                aside.rename(self.clips)

    def part(self, name: str) -> Any:
        """Return the results of a part at the commit."""
        path = self._folder / f"{name}.json"
        with self._alone(name):
            if not path.exists():
                with _timed(f"{name} at {self._commit[:12]}"):
                    _write(path, PARTS[name](self._tree, self.clips))
        return json.loads(path.read_text(encoding="utf-8"))

    def drills(self, names: Sequence[str]) -> dict[str, str]:
        """Return the endings of drills at the commit; of all its drills, if none is named."""
        with self._alone("drills"):
            wanted = list(names) or scenarios.all_drills(self._tree)
            paths = {name: self._drills / f"{name}.json" for name in wanted}
            if missing := [name for name, path in paths.items() if not path.exists()]:
                self._drills.mkdir(exist_ok=True)
                with _timed(f"{len(missing)} drills at {self._commit[:12]}"):
                    for name, ending in scenarios.drill(self._tree, missing).items():
                        _write(paths[name], ending)
        return {name: json.loads(path.read_text()) for name, path in paths.items()}

    def close(self) -> None:
        """Remove the commit's working tree, if one was needed."""
        self._open.close()

    @cached_property
    def _tree(self) -> Tree:
        root = self._open.enter_context(checked_out(self._commit))
        return Tree.at(root, self._work / "golden")

    @contextmanager
    def _alone(self, name: str) -> Iterator[None]:
        """Other working trees may want the same at the same time."""
        self._folder.mkdir(parents=True, exist_ok=True)
        with (self._folder / f"{name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield


def main() -> int:
    """Make or compare; see above."""
    parser = argparse.ArgumentParser(prog="python -m tests.goldens")
    parser.add_argument("verb", choices=("make", "compare"))
    parser.add_argument("--only", help=f"parts, by comma: {','.join(PARTS)}")
    parser.add_argument("--drill", help="drills, by comma; or all: an hour")
    parser.add_argument("--commit", default=(_HERE / "COMMIT").read_text().strip())
    parser.add_argument("--tree", type=Path, default=_ROOT, help="what is compared [this tree]")
    parser.add_argument("--keep", type=Path, help="an empty folder to leave all runs in")
    given = parser.parse_args()
    parts = given.only.split(",") if given.only else [] if given.drill else list(PARTS)
    if unknown := [each for each in parts if each not in PARTS]:
        parser.error(f"--only {','.join(unknown)}: there are {', '.join(PARTS)}")
    drills = given.drill.split(",") if given.drill else []
    commit = git("rev-parse", "--verify", f"{given.commit}^{{commit}}")
    with tempfile.TemporaryDirectory(prefix="goldens-") as temporary:
        work = given.keep.resolve() if given.keep else Path(temporary)
        goldens = Goldens(commit, work)
        try:
            tree = Tree.at(given.tree.resolve(), work / "now") if given.verb == "compare" else None
            return int(_go(goldens, parts, drills, tree))
        finally:
            goldens.close()


def _go(goldens: Goldens, parts: Sequence[str], drills: Sequence[str], tree: Tree | None) -> bool:
    """Return whether anything differs."""
    differs = False
    for name in parts:
        golden = goldens.part(name)
        if tree is not None:
            with _timed(f"{name} of {tree.root}"):
                found = json.loads(json.dumps(PARTS[name](tree, goldens.clips)))
            differs |= _compare(name, golden, found)
    if drills:
        endings = goldens.drills([] if drills == ["all"] else drills)
        if tree is not None:
            there = {name: each for name, each in endings.items() if tree.name("drills", name)}
            with _timed(f"{len(there)} drills of {tree.root}"):
                differs |= _compare("drills", there, scenarios.drill(tree, list(there)))
    return differs


def _compare(name: str, golden: Any, found: Any) -> bool:
    """Say what differs; whether anything does."""
    before, now = dict(flat(golden)), dict(flat(found))
    paths = [*before, *(path for path in now if path not in before)]
    differing = [path for path in paths if before.get(path, ...) != now.get(path, ...)]
    if not differing:
        print(f"{name}: equal ({len(before)} values)")  # noqa: T201 - a program's result
        return False
    print(f"{name}: {len(differing)} of {len(before)} values differ")  # noqa: T201
    for path in differing[:_SHOWN]:
        values = (each.get(path, "(nothing)") for each in (before, now))
        print(f"  {path}: {' -> '.join(map(str, values))}")  # noqa: T201
    return True


def _write(path: Path, value: Any) -> None:
    aside = path.with_suffix(".partial")
    aside.write_text(json.dumps(value, indent=1), encoding="utf-8")
    aside.rename(path)


def _processor() -> str:
    """Name what decides the last bits: instructions and libraries."""
    import torch

    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    facts = [line for line in lines[: lines.index("")] if line.startswith(("model name", "flags"))]
    facts += [str(os.environ.get(name)) for name in ("ONEDNN_MAX_CPU_ISA", "ATEN_CPU_CAPABILITY")]
    instructions = torch.backends.cpu.get_cpu_capability().lower()
    return f"{instructions}-{_digest(*facts, torch.__version__)}"


def _definitions() -> str:
    """Digest the scenarios: goldens of other scenarios are of no use."""
    names = ("material", "scenarios")
    texts = [(_HERE / f"{name}.py").read_text(encoding="utf-8") for name in names]
    return _digest(*texts, str(readers.VERSION))


def _digest(*texts: str) -> str:
    return hashlib.sha256("\n".join(texts).encode()).hexdigest()[:8]


@contextmanager
def _timed(what: str) -> Iterator[None]:
    begun = time.monotonic()
    yield
    print(f"{what}: {time.monotonic() - begun:.0f} s", file=sys.stderr)  # noqa: T201


if __name__ == "__main__":
    sys.exit(main())
