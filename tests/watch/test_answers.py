"""How the answers of many nodes are read."""

import threading
from pathlib import Path
from typing import Any

import pytest

from longtake.node_dir import NodeDirectory, NodeDump, read_dump
from longtake.run_dir import RunDirectory
from longtake.watch.answers import Shelf, read_answers
from longtake.watch.disk import Disk


def _dump(host: str, line: int = 1, native: str = "") -> NodeDump:
    frames = [{"function": "f", "file": "decode.py", "line": line}]
    if native:
        frames.insert(0, {"function": native, "file": "libc.so.6", "line": 0})
    process: Any = {
        "pid": 1,
        "ppid": 0,
        "role": "rank",
        "rank": 0,
        "command": "python",
        "state": "S",
        "cpu_seconds": 0.0,
        "method": "py-spy",
        "threads": [{"name": "MainThread", "frames": frames}],
        "raw": "",
        "heart": None,
    }
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


def test_what_is_read_when_time_is_up_is_judged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
    is_over = threading.Event()

    def read(path: Path) -> NodeDump | None:  # a disk that does not answer for one file
        if path == nodes[1].dump_path("t"):
            is_over.wait(30)
        return read_dump(path)

    monkeypatch.setattr("longtake.watch.answers.read_dump", read)
    try:
        dumps, unread = read_answers(disk, run, "t", seconds=0.3)
        again = read_answers(disk, run, "t")
    finally:
        is_over.set()
        disk.close(5.0)
    assert ([dump["host"] for dump in dumps], unread) == (["gpu1"], ["gpu2", "gpu3"])
    assert again == ([], [])  # the disk was silent still


def test_an_answer_that_is_no_dump_is_left_out(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    nodes = [NodeDirectory(run, f"gpu{number}") for number in range(1, 5)]
    for node in nodes:
        node.write_dump(_dump(node.host))
    nodes[0].dump_path("t").write_text('{"rounds": []}')
    nodes[1].dump_path("t").write_text("[]")
    text = nodes[2].dump_path("t").read_text()
    nodes[2].dump_path("t").write_text(text.replace('"line":1', '"line":"one"'))
    disk = Disk(nodes[0])
    dumps, unread = read_answers(disk, run, "t")
    disk.close(5.0)
    assert ([dump["host"] for dump in dumps], unread) == (["gpu4"], [])
