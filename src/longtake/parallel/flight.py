"""Lets torch's flight recorder write down the last collectives of NCCL when it is asked to.

It costs a few hundred bytes and about a microsecond a collective, so it is always on. Whoever
watches a run reads the dumps: they tell who never joined a collective from who joined and stalled.
"""

from pathlib import Path

from longtake.node_dir import FLIGHT_FILE_PREFIX, FLIGHT_PIPE_PREFIX

_BUFFER_SIZE = 2000
"""Collectives that are kept: some steps of a large model."""


def environment(folder: Path) -> dict[str, str]:
    """What has to be in the environment before the process group is made.

    Variables of torch 2.13 and, for those that were renamed, of torch before 2.9; what the user
    has set should be left as it is.

    Args:
        folder: the heartbeat folder (`heartbeat.heartbeat_dir`), which must exist; rank r gets the
            pipe fr_pipe_rank_<r>.pipe and the dump fr_dump_rank_<r> in it.
    """
    dump, pipe = folder / FLIGHT_FILE_PREFIX, folder / FLIGHT_PIPE_PREFIX
    return {
        "TORCH_FR_BUFFER_SIZE": str(_BUFFER_SIZE),
        "TORCH_NCCL_TRACE_BUFFER_SIZE": str(_BUFFER_SIZE),
        "TORCH_FR_DUMP_TEMP_FILE": str(dump),
        "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": str(dump),
        "TORCH_NCCL_DEBUG_INFO_PIPE_FILE": str(pipe),
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
        "TORCH_NCCL_ENABLE_MONITORING": "1",
    }
