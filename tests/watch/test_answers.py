"""How the answers of many nodes are read."""

import os
import threading
import time
from pathlib import Path
from typing import Any

from longtake.node_dir import NodeDirectory, NodeDump
from longtake.run_dir import RunDirectory
from longtake.watch.answers import Shelf, read_answers
from longtake.watch.disk import Disk


def _dump(host: str, line: int = 1, native: str = "") -> NodeDump:
    frames = [{"function": "f", "file": "decode.py", "line": line}]
    if native:
        frames.insert(0, {"function": native, "file": "libc.so.6", "line": 0})
    process: Any = {"pid": 1, "threads": [{"name": "MainThread", "frames": frames}]}
    return {
        "token": "t",
        "time": "",
        "host": host,
        "reason": "stall",
        "launch": "one",
        "rounds": [{"seconds": 0.0, "processes": [process]}],
        "missing": [],
    }


def _frames(dump: NodeDump) -> Any:
    return dump["rounds"][0]["processes"][0]["threads"][0]["frames"]


def test_identical_stacks_are_kept_once() -> None:
    """Those that differ in a line, or in the calls of C alone, are not taken for one another."""
    shelf = Shelf()
    first, same = shelf.put(_dump("a")), shelf.put(_dump("b"))
    assert _frames(first) is _frames(same)
    for other in (_dump("c", line=2), _dump("d", native="read"), _dump("e", native="futex")):
        before = [dict(frame) for frame in _frames(other)]
        assert _frames(shelf.put(other)) == before


def test_what_is_read_when_time_is_up_is_judged(tmp_path: Path) -> None:
    """A file that gives no answer costs the time that is left, and its node is named."""
    run = RunDirectory(tmp_path)
    nodes = [NodeDirectory(run, f"gpu{number}") for number in range(1, 5)]
    for node in nodes[:3]:
        node.write_dump(_dump(node.host))
    nodes[3].path.mkdir()  # it has not answered
    disk = Disk(nodes[0])
    dumps, unread = read_answers(disk, run, "t")
    assert ([dump["host"] for dump in dumps], unread) == (["gpu1", "gpu2", "gpu3"], [])
    assert _frames(dumps[0]) is _frames(dumps[2])
    stuck = nodes[1].dump_path("t")
    stuck.unlink()
    os.mkfifo(stuck)  # from which reading waits for ever
    begun = time.monotonic()
    try:
        dumps, unread = read_answers(disk, run, "t", seconds=0.3)
        again = read_answers(disk, run, "t")
        seconds = time.monotonic() - begun
    finally:
        thread = threading.Thread(target=stuck.write_text, args=("{}",), daemon=True)
        thread.start()
        thread.join(5.0)
        disk.close(5.0)
    assert seconds < 2.0
    assert ([dump["host"] for dump in dumps], unread) == (["gpu1"], ["gpu2", "gpu3"])
    assert again == ([], [])  # the disk was silent still
