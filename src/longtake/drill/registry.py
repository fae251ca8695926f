"""The faults by name, in the order in which they are drilled."""

import difflib
from collections.abc import Sequence

from longtake.drill.fault import Fault
from longtake.drill.faults import (
    corrupt_clip,
    data_grown,
    data_shrunk,
    data_swapped,
    decoder_hang,
    one_clip_removed,
    processes_changed,
    worker_killed,
)
from longtake.errors import LongtakeError

FAULTS = {
    module.FAULT.name: module.FAULT
    for module in (
        data_grown,
        data_shrunk,
        data_swapped,
        one_clip_removed,
        corrupt_clip,
        decoder_hang,
        worker_killed,
        processes_changed,
    )
}


def find_faults(names: Sequence[str]) -> list[Fault]:
    """The faults of these names, each once; all of them if none is named.

    Raises:
        LongtakeError: there is no fault of a name; says which is near.
    """
    for name in names:
        if name not in FAULTS:
            nearest = difflib.get_close_matches(name, FAULTS, n=1)
            hint = f"did you mean {nearest[0]}?" if nearest else "no name is near."
            raise LongtakeError(
                f"There is no fault {name!r} to drill; {hint} There are: {', '.join(FAULTS)}."
            )
    return [FAULTS[name] for name in dict.fromkeys(names or FAULTS)]
