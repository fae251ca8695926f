"""A checked-out tree of longtake, driven by its command line alone, under the tree's own names."""

import json
import os
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

_ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
_ENVIRONMENT = {
    **_ONE_THREAD,  # sums are rounded otherwise by another number of threads
    "CUDA_VISIBLE_DEVICES": "",
    "HF_HUB_OFFLINE": "1",
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
}
_LIMIT_SECONDS, _LOOK_SECONDS = 3 * 3600.0, 0.005


@dataclass(frozen=True)
class Result:
    """The end of a command."""

    exit_code: int
    out: str
    err: str


@dataclass(frozen=True)
class Tree:
    """A checked-out tree.

    Args:
        root: of the tree.
        work: an empty folder for what its runs write.
        renamed: the tree's renamed.toml, by table; empty for a tree from before it.
        environment: variables that its processes have besides; PYTHONPATH comes first.
    """

    root: Path
    work: Path
    renamed: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def at(cls, root: Path, work: Path) -> "Tree":
        """The tree in a folder, with the names that it says it has."""
        work.mkdir(parents=True)
        path = root / "tests" / "goldens" / "renamed.toml"
        tree = cls(root, work, tomllib.loads(path.read_text()) if path.exists() else {})
        code = "import longtake; print(longtake.__file__)"
        found = subprocess.run(
            [sys.executable, "-c", code], env=tree._environment(), capture_output=True, check=True
        )
        if not Path(found.stdout.decode().strip()).is_relative_to(root):
            raise SystemExit(f"{found.stdout.decode().strip()} is imported, and not {root}")
        return tree

    def name(self, table: str, old: str) -> str:
        """The tree's name of something; "" if the tree has no such thing any more."""
        return self.renamed.get(table, {}).get(old, old)

    def old_names(self, table: str) -> dict[str, str]:
        """The scenarios' names by the tree's."""
        return {new: old for old, new in self.renamed.get(table, {}).items() if new}

    def recipe(self, path: Path, values: Mapping[str, Any]) -> Path:
        """Write a recipe of dotted keys, as the tree calls them."""
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = [
            f"{name} = {_toml(value)}"
            for key, value in values.items()
            if (name := self.name("keys", key))
        ]
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
        return path

    def start(self, verb: str, *arguments: str, cwd: Path | None = None) -> "Started":
        """Start `longtake VERB ARGUMENTS` in a session of its own."""
        command = [sys.executable, "-P", "-m", "longtake", *self.name("verbs", verb).split()]
        command += [self._option(verb, each) for each in arguments]
        return Started(command, cwd or self.work, self._environment())

    def _option(self, verb: str, argument: str) -> str:
        is_option = argument.startswith("--")
        return self.name("verbs", f"{verb} {argument}").split()[-1] if is_option else argument

    def run(self, verb: str, *arguments: str, cwd: Path | None = None) -> Result:
        """Run `longtake VERB ARGUMENTS` to its end."""
        return self.start(verb, *arguments, cwd=cwd).finish()

    def run_ok(self, verb: str, *arguments: str, cwd: Path | None = None) -> Result:
        """Run a command that has to end with exit code 0."""
        result = self.run(verb, *arguments, cwd=cwd)
        if result.exit_code != 0:
            told = f"{verb} {' '.join(arguments)}: exit code {result.exit_code}\n{result.err}"
            raise SystemExit(f"{self.root}: {told}")
        return result

    def json(self, verb: str, *arguments: str, cwd: Path | None = None) -> Any:
        """Return the JSON that a command prints, whatever its exit code."""
        result = self.run(verb, *arguments, "--json", cwd=cwd)
        try:
            return json.loads(result.out)
        except ValueError:
            told = f"{verb} {' '.join(arguments)} printed no JSON: exit code {result.exit_code}"
            raise SystemExit(f"{self.root}: {told}\n{result.err}") from None

    def _environment(self) -> dict[str, str]:
        dropped = ("LONGTAKE_", "RANK", "WORLD_SIZE", "LOCAL_RANK", "PYTHON")
        kept = {name: each for name, each in os.environ.items() if not name.startswith(dropped)}
        paths = [self.environment.get("PYTHONPATH", ""), str(self.root / "src")]
        path = {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
        return kept | _ENVIRONMENT | dict(self.environment) | path


@contextmanager
def checked_out(commit: str) -> Iterator[Path]:
    """A folder with a commit's tree; a git worktree, for as long as the block lasts."""
    with tempfile.TemporaryDirectory(prefix="commit-") as folder:
        root = Path(folder, "tree")
        git("worktree", "add", "--detach", str(root), commit)
        try:
            yield root
        finally:
            git("worktree", "remove", "--force", str(root))


def git(*arguments: str) -> str:
    """Return the output of git in this clone."""
    here = Path(__file__).parent
    done = subprocess.run(
        ["git", *arguments], cwd=here, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(f"git {' '.join(arguments)}: {done.stderr.strip()}")
    return done.stdout.strip()


def kept_in() -> Path:
    """The folder in which results of commits are kept: one for all working trees of a clone."""
    shared = Path(git("rev-parse", "--path-format=absolute", "--git-common-dir"))
    folder = shared.parent / ".goldens"
    folder.mkdir(exist_ok=True)
    (folder / ".gitignore").write_text("*\n", encoding="utf-8")
    return folder


class Started:
    """A command that runs.

    Args:
        command: with its arguments.
        cwd: the folder it runs in.
        environment: all of it.
    """

    def __init__(self, command: Sequence[str], cwd: Path, environment: Mapping[str, str]) -> None:
        self._process = subprocess.Popen(
            command,
            cwd=cwd,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def finish(self) -> Result:
        """Wait for its end."""
        try:
            out, err = self._process.communicate(timeout=_LIMIT_SECONDS)
        except BaseException:
            self.kill()
            raise
        return Result(self._process.returncode, out, err)

    def kill_when(self, is_time: Callable[[], bool]) -> bool:
        """Kill it and all that it started, as `kill -9` does, when it is time.

        Returns:
            Whether it had not ended by itself before.
        """
        while self._process.poll() is None:
            if is_time():
                self.kill()
                return True
            time.sleep(_LOOK_SECONDS)
        return False

    def kill(self) -> None:
        """Kill it and all processes below it."""
        with suppress(psutil.NoSuchProcess):
            started = psutil.Process(self._process.pid)
            for each in (started, *started.children(recursive=True)):
                with suppress(psutil.NoSuchProcess):
                    each.kill()
        self._process.communicate()


def _toml(value: object) -> str:
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{key} = {_toml(each)}" for key, each in value.items()) + " }"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_toml, value))}]"
    return str(value) if isinstance(value, Path) else json.dumps(value)
