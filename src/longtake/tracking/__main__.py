"""python -P -m longtake.tracking RUN --as trainer: tell the trackers what a run does."""

import argparse
import os
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from pydantic import ValidationError

from longtake.config import TrackingSection
from longtake.run_dir import RunDirectory
from longtake.tracking.follower import follow
from longtake.tracking.shutdown import Shutdown


def main(arguments: Sequence[str]) -> int:
    """Follow until it is over; returns the exit status."""
    found = _parser().parse_args(arguments)
    run = RunDirectory(found.run)
    try:
        section = found.section or run.recipe().tracking
        with Shutdown(found.until_parent) as shutdown:
            follow(run, found.role, section, shutdown)
    except Exception:
        traceback.print_exc()
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m longtake.tracking", description=__doc__)
    parser.add_argument("run", type=Path, help="a run directory")
    parser.add_argument(
        "--as", dest="role", choices=("trainer", "evaluator"), required=True, help="for whom"
    )
    parser.add_argument(
        "--until-parent",
        type=int,
        metavar="PID",
        help="end after this process, or when it closes standard input",
    )
    parser.add_argument("--section", type=_section, help="the recipe's `tracking`, as JSON")
    return parser


def _section(text: str) -> TrackingSection:
    try:
        return TrackingSection.model_validate_json(text)
    except ValidationError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def leave(status: int) -> NoReturn:
    """End at once: a tracker's own threads would be waited for."""
    os._exit(status)


if __name__ == "__main__":
    leave(main(sys.argv[1:]))
