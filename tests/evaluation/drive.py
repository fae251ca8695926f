"""What an evaluation server does with a source, typed on another host.

    python drive.py SOURCE MIRROR look            # runs and their steps there
    python drive.py SOURCE MIRROR pull STEP ...   # steps that came
    python drive.py SOURCE MIRROR push            # the same as look

Says what came of it as one line of JSON; an error as {"error": ...}.
"""

import json
import sys
from contextlib import closing
from pathlib import Path

from longtake.errors import RunError
from longtake.evaluation.mirror import Mirror, open_mirror


def main(text: str, into: str, verb: str, *steps: str) -> object:
    try:
        with closing(open_mirror(text, Path(into), "vm-1")) as source:
            return act(source, verb, [int(step) for step in steps])
    except RunError as error:
        return {"error": str(error)}


def act(source: Mirror, verb: str, steps: list[int]) -> object:
    runs = source.look()
    if verb == "pull":
        return [[each.step, each.bytes] for run in runs for each in source.pull(run, steps)]
    if verb == "push":
        for run in runs:
            source.push(run)
    return {run.name: run.index.checkpoint_steps() for run in runs}


if __name__ == "__main__":
    print(json.dumps(main(*sys.argv[1:])))  # noqa: T201 - whoever started it reads it
