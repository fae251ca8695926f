"""Options of `longtake launch`: recipe, number of ranks and nodes, and rendezvous; torch-free.

Without torch a login node can submit a job, and a wrong option is refused at once.
"""

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

from longtake import config, errors
from longtake.run_dir import RunDirectory, beside
from longtake.trust import load_recipe

DEFAULT_PORT = 29400
"""Default port at which nodes meet (rendezvous), the same as torchrun's."""


@dataclass(frozen=True)
class LaunchOptions:
    """Options of `longtake launch`, on this node or as a Slurm job."""

    path: Path  # the recipe's file
    changes: tuple[str, ...]  # --set changes of the recipe, `key=value`
    recipe: config.Recipe  # the recipe with these changes
    processes: str = "auto"  # ranks per node: a number, or `auto` for one per GPU
    nodes: tuple[int, int] = (1, 1)  # fewest and most nodes
    endpoint: str = ""  # host:port of the rendezvous; empty: this node alone
    run_id: str = "longtake"  # distinguishes launches that share a rendezvous
    max_restarts: int = 3  # restarts of all ranks without a new checkpoint in between
    tee: bool = True  # show the output of rank 0 on the terminal
    trust: bool = False  # run code that a run's recipe names even if others began the run
    begin_from: str | None = None  # `train --from`
    weights_only: bool = False  # `train --weights-only`

    @property
    def run(self) -> RunDirectory:
        return RunDirectory(self.recipe.out)

    @property
    def is_elastic(self) -> bool:
        return self.nodes[0] < self.nodes[1]

    @property
    def begin_arguments(self) -> list[str]:
        """Return options to pass to `train` or `launch`, without --set changes."""
        parent = [] if self.begin_from is None else ["--from", self.begin_from]
        flags = {"--weights-only": self.weights_only, "--trust": self.trust}
        return [*parent, *(flag for flag, is_set in flags.items() if is_set)]

    @property
    def train_arguments(self) -> list[str]:
        changes = [part for change in self.changes for part in ("--set", change)]
        return ["train", str(self.path), *changes, *self.begin_arguments]


def load_for_all_ranks(
    path: Path, changes: tuple[str, ...], *, fresh: bool, is_alone: bool, trust: bool = False
) -> tuple[config.Recipe, tuple[str, ...]]:
    """Load the recipe, and return it with the --set changes by which every rank reads it alike.

    The changes include the folder that `fresh` chooses, so that restarts do not choose another.

    Args:
        path: the recipe's file.
        changes: --set changes of the user.
        fresh: train from scratch, in a new folder beside an existing run.
        is_alone: no other node takes part, so this process may choose that folder.
        trust: run code that a run's recipe names even if others began the run.

    Raises:
        LongtakeError: several nodes would each choose a folder, or the recipe cannot be read.
    """
    from longtake.data.auto_buckets import with_buckets  # which imports pyarrow and PyAV

    recipe = with_buckets(load_recipe(path, changes, trust=trust))
    if not fresh:
        return recipe, changes
    if not is_alone:
        raise errors.LongtakeError(
            "--fresh with several nodes: each node would choose a free folder by itself. Name one "
            f"folder for all of them: --set {shlex.quote(f'out={recipe.out}-2')}."
        )
    changes = (*changes, f"out={beside(recipe.out)}")
    return config.load(path, changes), changes


def parse_nodes(text: str) -> tuple[int, int]:
    """Parse the value of --nodes, a number or range: `4` is (4, 4), `2:4` is (2, 4).

    Raises:
        LongtakeError: the text has another format.
    """
    found = re.fullmatch(r"(\d{1,9})(?::(\d{1,9}))?", text)
    low, high = (int(found[1]), int(found[2] or found[1])) if found else (0, 0)
    if not 1 <= low <= high:
        raise errors.LongtakeError(
            f"--nnodes {text}: expected a number of nodes, such as 4, or the fewest and the most, "
            "such as 2:4."
        )
    return low, high


def parse_endpoint(text: str | None, nodes: tuple[int, int]) -> str:
    """Parse the address where nodes meet to `host:port`, with the default port if it has none.

    Returns:
        The endpoint; empty for a single node without one.

    Raises:
        LongtakeError: several nodes have no endpoint, or the text is not HOST:PORT.
    """
    if text is None:
        if nodes == (1, 1):
            return ""
        raise errors.LongtakeError(
            "Several nodes need an address to meet: --rdzv-endpoint HOST:PORT, the same on all of "
            f"them, where HOST is one of them (port {DEFAULT_PORT} if you have no other)."
        )
    host, _, port = text.rpartition(":") if ":" in text else (text, "", str(DEFAULT_PORT))
    if not host or not re.fullmatch(r"[0-9]{1,5}", port) or not 0 < int(port) < 2**16:
        raise errors.LongtakeError(
            f"--rdzv-endpoint {text}: expected HOST:PORT, such as node1:{DEFAULT_PORT}."
        )
    return f"{host}:{port}"


def parse_processes(text: str) -> str:
    if text != "auto" and not re.fullmatch("[1-9][0-9]{0,5}", text):
        raise errors.LongtakeError(
            f"--nproc-per-node {text}: expected a number of processes, or auto."
        )
    return text
