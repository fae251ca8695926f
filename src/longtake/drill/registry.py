"""The faults by name, in the order in which they are drilled."""

import difflib
from collections.abc import Sequence

from longtake.drill.fault import Fault
from longtake.drill.faults import (
    bit_rot_in_checkpoint,
    brightness_drift,
    checkpoint_deleted_under_evaluator,
    clock_slew,
    clock_step_back,
    corrupt_clip,
    cut_link,
    data_grown,
    data_shrunk,
    data_swapped,
    dead_watcher,
    decoder_hang,
    disk_full_while_saving,
    evaluator_killed_while_sampling,
    frozen_loader_worker,
    full_run_disk,
    half_synced_checkpoint,
    hung_rank,
    kill,
    kill_node,
    kill_rank,
    kill_while_saving,
    killed_loader_worker,
    lose_node_and_shrink,
    loss_spike,
    nan_gradient,
    nan_on_one_rank,
    one_clip_removed,
    processes_changed,
    requeue_on_time_limit,
    slow_divergence,
    slow_link,
    slow_rank,
    tracker_down,
    truncated_checkpoint,
    two_evaluators,
    weight_norm_step_at_epoch_end,
    world_2_1_2,
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
    killed_loader_worker.FAULT,
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
HANG_FAULTS = (
    frozen_loader_worker.IN_C,
    frozen_loader_worker.HOLDING_GIL,
    frozen_loader_worker.STOPPED,
    hung_rank.ASLEEP,
    hung_rank.HOLDING_GIL,
    hung_rank.STOPPED,
    hung_rank.IN_COLLECTIVE,
    hung_rank.KILLED,
)
NODE_FAULTS = (
    slow_rank.BY_10,
    slow_rank.BY_30,
    clock_step_back.FAULT,
    clock_slew.FAULT,
    full_run_disk.FAULT,
    dead_watcher.FAULT,
)
EVALUATION_FAULTS = (
    evaluator_killed_while_sampling.FAULT,
    checkpoint_deleted_under_evaluator.FAULT,
    two_evaluators.FAULT,
    half_synced_checkpoint.FAULT,
    brightness_drift.FAULT,
    tracker_down.FAULT,
)
CLUSTER_FAULTS = (
    kill_rank.FAULT,
    world_2_1_2.FAULT,
    kill_node.FAULT,
    lose_node_and_shrink.FAULT,
    slow_link.FAULT,
    cut_link.FAULT,
    requeue_on_time_limit.FAULT,
)
_GROUPS = (
    DATA_FAULTS,
    SAVING_FAULTS,
    NUMBER_FAULTS,
    HANG_FAULTS,
    NODE_FAULTS,
    EVALUATION_FAULTS,
    CLUSTER_FAULTS,
)
FAULTS = {fault.name: fault for group in _GROUPS for fault in group}
FAMILIES = ("frozen-loader-worker", "hung-rank", "slow-rank")
"""Names of faults that come in several ways, each `FAMILY-…`."""


def find_faults(names: Sequence[str]) -> list[Fault]:
    """The faults of these names, each once; all of them for `all`, and if none is named.

    Args:
        names: of faults, or of families, which stand for all of theirs.

    Raises:
        LongtakeError: there is no fault of a name; says which is near.
    """
    wanted: list[str] = []
    for name in names or [_ALL]:
        found = _named(name)
        if not found:
            nearest = difflib.get_close_matches(name, (*FAULTS, *FAMILIES), n=1)
            hint = f"did you mean {nearest[0]}?" if nearest else "no name is near."
            raise LongtakeError(
                f"There is no fault {name!r} to drill; {hint} There are: {', '.join(FAULTS)}."
            )
        wanted += found
    names_in_order = FAULTS if _ALL in names else dict.fromkeys(wanted)
    return [FAULTS[name] for name in names_in_order]


def _named(name: str) -> list[str]:
    """The faults that a name stands for; none if it is no name."""
    if name == _ALL:
        return list(FAULTS)
    if name in FAMILIES:
        return [each for each in FAULTS if each.startswith(f"{name}-")]
    return [name] if name in FAULTS else []
