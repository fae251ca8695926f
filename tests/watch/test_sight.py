"""What is left of the dead, and when it is taken away."""

import os
from typing import Any

from longtake.heartbeat import read_all
from longtake.node_dir import FLIGHT_FILE_PREFIX, FLIGHT_PIPE_PREFIX
from longtake.watch.sight import remove


def test_a_dead_rank_s_flight_recorder_goes_with_its_record(stage: Any) -> None:
    """But not while another record of that rank is there: the files may be its own."""
    first = stage.rank("sleeps", launch="one")
    dump = stage.folder() / f"{FLIGHT_FILE_PREFIX}0"
    pipe = stage.folder() / f"{FLIGHT_PIPE_PREFIX}0.pipe"
    dump.touch()
    os.mkfifo(pipe)
    stage.end(first)
    second = stage.rank("sleeps", launch="two")
    dead = [pulse for pulse in read_all(stage.folder()) if pulse.pid == first]
    remove(dead)
    assert [pulse.pid for pulse in read_all(stage.folder())] == [second]
    assert dump.exists()
    assert pipe.exists()
    stage.end(second)
    remove(read_all(stage.folder()))
    assert list(stage.folder().iterdir()) == []
