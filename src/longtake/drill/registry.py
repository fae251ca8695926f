"""The faults by name, in the order in which they are drilled."""

import difflib
from collections.abc import Sequence

from longtake.drill.fault import Fault
from longtake.drill.faults import (
    bit_rot_in_checkpoint,
    corrupt_clip,
    data_grown,
    data_shrunk,
    data_swapped,
    decoder_hang,
    disk_full_while_saving,
    kill,
    kill_while_saving,
    loss_spike,
    nan_gradient,
    nan_on_one_rank,
    one_clip_removed,
    processes_changed,
    slow_divergence,
    truncated_checkpoint,
    weight_norm_step_at_epoch_end,
    worker_killed,
)
from longtake.errors import LongtakeError

_ALL = "all"

DATA_FAULTS = (
    data_grown.FAULT,
    data_shrunk.FAULT,
    data_swapped.FAULT,
    one_clip_removed.FAULT,
    corrupt_clip.FAULT,
    decoder_hang.FAULT,
    worker_killed.FAULT,
    processes_changed.FAULT,
)
SAVING_FAULTS = (
    kill.FAULT,
    kill_while_saving.FAULT,
    truncated_checkpoint.FAULT,
    bit_rot_in_checkpoint.FAULT,
    disk_full_while_saving.FAULT,
)
NUMBER_FAULTS = (
    nan_gradient.FAULT,
    nan_on_one_rank.FAULT,
    loss_spike.FAULT,
    slow_divergence.FAULT,
    weight_norm_step_at_epoch_end.FAULT,
)
FAULTS = {fault.name: fault for fault in (*DATA_FAULTS, *SAVING_FAULTS, *NUMBER_FAULTS)}


def find_faults(names: Sequence[str]) -> list[Fault]:
    """The faults of these names, each once; all of them for `all`, and if none is named.

    Raises:
        LongtakeError: there is no fault of a name; says which is near.
    """
    for name in names:
        if name not in (*FAULTS, _ALL):
            nearest = difflib.get_close_matches(name, FAULTS, n=1)
            hint = f"did you mean {nearest[0]}?" if nearest else "no name is near."
            raise LongtakeError(
                f"There is no fault {name!r} to drill; {hint} There are: {', '.join(FAULTS)}."
            )
    wanted = FAULTS if _ALL in names else names or FAULTS
    return [FAULTS[name] for name in dict.fromkeys(wanted)]
