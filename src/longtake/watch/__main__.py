"""python -P -m longtake.watch RUN: watch this node's part of a run, as `train` starts it."""

import argparse
import os
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from pydantic import ValidationError

from longtake.config import WatchSection
from longtake.process import SECTION_VARIABLE
from longtake.watch.post import Post, post_at
from longtake.watch.watcher import watch


def main(arguments: Sequence[str]) -> int:
    """Watch until it is over; returns the exit status."""
    try:
        watch(_post(arguments))
    except Exception:
        traceback.print_exc()
        return 1
    return 0


def _post(arguments: Sequence[str]) -> Post:
    parser = argparse.ArgumentParser(prog="python -m longtake.watch", description=__doc__)
    parser.add_argument("run", type=Path, help="a run directory")
    parser.add_argument("--by-hand", action="store_true", help="a person has started it")
    parser.add_argument("--section", type=_section, help="the recipe's `watch`, as JSON")
    parser.add_argument("--data", type=Path, action="append", help="a folder of data")
    parser.add_argument("--host", help="the name of this node, if it is played")
    parser.add_argument("--folder", type=Path, help="where its hearts are, if it is played")
    found = parser.parse_args(arguments)
    told = os.environ.pop(SECTION_VARIABLE, None)
    section = found.section or (None if told is None else _section(told))
    return post_at(
        found.run,
        section,
        found.data or (),
        host=found.host,
        folder=found.folder,
        by_hand=found.by_hand,
    )


def _section(text: str) -> WatchSection:
    try:
        return WatchSection.model_validate_json(text)
    except ValidationError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def leave(status: int) -> NoReturn:
    """End at once: a thread that waits for a disk that hangs would be waited for."""
    os._exit(status)


if __name__ == "__main__":
    leave(main(sys.argv[1:]))
