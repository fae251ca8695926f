"""What is to be launched: a recipe, on how many processes of how many nodes, which meet where."""

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

from longtake import config
from longtake.config import Recipe
from longtake.errors import LongtakeError
from longtake.run_dir import RunDirectory, beside
from longtake.trust import load_recipe

DEFAULT_PORT = 29400
"""Where nodes meet, if nobody says: as torchrun's."""


@dataclass(frozen=True)
class Order:
    """A launch on this node.

    Attributes:
        path: the recipe's file.
        changes: to it, `key=value`.
        recipe: as read.
        processes: on this node.
        nodes: how many there must be at least, and may be at most.
        endpoint: host:port where they meet; empty: this node is alone.
        run_id: by which launches are told apart that meet at the same place.
        max_restarts: how often all ranks are started again without a new checkpoint in between.
        tee: whether rank 0 is heard on the terminal.
        trust: whether code that a kept recipe names may be run, whoever began its run.
    """

    path: Path
    changes: tuple[str, ...]
    recipe: Recipe
    processes: int
    nodes: tuple[int, int] = (1, 1)
    endpoint: str = ""
    run_id: str = "longtake"
    max_restarts: int = 3
    tee: bool = True
    trust: bool = False

    @property
    def run(self) -> RunDirectory:
        return RunDirectory(self.recipe.out)

    @property
    def is_elastic(self) -> bool:
        return self.nodes[0] < self.nodes[1]

    @property
    def arguments(self) -> list[str]:
        """Those of `longtake train`."""
        options = [part for change in self.changes for part in ("--set", change)]
        return ["train", str(self.path), *options, *(["--trust"] if self.trust else [])]


def read_recipe(
    path: Path, changes: tuple[str, ...], *, fresh: bool, is_alone: bool, trust: bool = False
) -> tuple[Recipe, tuple[str, ...]]:
    """The recipe, and the changes by which each rank comes to the same, after a restart as well.

    Args:
        path: of the recipe.
        changes: the user's.
        fresh: begin anew, in a folder beside the run that is there.
        is_alone: whether only this process reads it.
        trust: whether code that a kept recipe names may be run, whoever began its run.

    Raises:
        LongtakeError: nodes would each choose a folder; or the recipe cannot be read.
    """
    recipe = load_recipe(path, changes, trust=trust)
    if not fresh:
        return recipe, changes
    if not is_alone:
        raise LongtakeError(
            "--fresh with several nodes: each would look for a free folder by itself. Name one for "
            f"all of them with --set {shlex.quote(f'out={recipe.out}-2')}."
        )
    changes = (*changes, f"out={beside(recipe.out)}")
    return config.load(path, changes), changes


def parse_nodes(text: str) -> tuple[int, int]:
    """`4` is (4, 4), and `2:4` is (2, 4).

    Raises:
        LongtakeError: it is neither.
    """
    found = re.fullmatch(r"(\d{1,9})(?::(\d{1,9}))?", text)
    low, high = (int(found[1]), int(found[2] or found[1])) if found else (0, 0)
    if not 1 <= low <= high:
        raise LongtakeError(
            f"--nnodes {text}: expected how many nodes there are, such as 4, or at least and at "
            "most, such as 2:4."
        )
    return low, high


def parse_endpoint(text: str | None, nodes: tuple[int, int]) -> str:
    """`host:port`, with a port; empty for a node that is alone.

    Raises:
        LongtakeError: several nodes need one; or it is none.
    """
    if text is None:
        if nodes == (1, 1):
            return ""
        raise LongtakeError(
            "Several nodes need a place to meet: --rdzv-endpoint HOST:PORT, the same on all of "
            f"them, where HOST is one of them (say {DEFAULT_PORT} for the port)."
        )
    host, _, port = text.rpartition(":") if ":" in text else (text, "", str(DEFAULT_PORT))
    if not host or not re.fullmatch(r"[0-9]{1,5}", port) or not 0 < int(port) < 2**16:
        raise LongtakeError(
            f"--rdzv-endpoint {text}: expected HOST:PORT, such as node1:{DEFAULT_PORT}."
        )
    return f"{host}:{port}"


def count_processes(text: str) -> int:
    """`8` is 8, and `auto` one for each card, or one on a machine that has none.

    Raises:
        LongtakeError: it is neither.
    """
    if text == "auto":
        import torch  # here, so that a wrong recipe need not wait for it

        return max(1, torch.cuda.device_count())
    return int(refuse_other_count(text))


def refuse_other_count(text: str) -> str:
    """`8` or `auto`, as it is.

    Raises:
        LongtakeError: it is neither.
    """
    if text != "auto" and not re.fullmatch("[1-9][0-9]{0,5}", text):
        raise LongtakeError(f"--nproc-per-node {text}: expected a number of processes, or auto.")
    return text
