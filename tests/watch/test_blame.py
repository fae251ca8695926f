"""Who is to blame for a stall, by dumps as nodes write them."""

import json
import pickle
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, cast

import pytest

from longtake.node_dir import NodeDump, ProcessDump, Request
from longtake.watch.blame import judge
from longtake.watch.verdict import Verdict

_SITE = "/opt/env/lib/python3.11/site-packages"
_LIB = "/usr/lib/python3.11"
_BASE = [("train_steps", "/src/longtake/training/loop.py", 77), ("main", "/src/longtake/cli.py", 9)]
_SUM = ("sum_over_ranks", "/src/longtake/parallel/collectives.py", 23)
_C10D = ("all_reduce", f"{_SITE}/torch/distributed/distributed_c10d.py", 3245)
_COLLECTIVE = [_C10D, _SUM, *_BASE]
_SLEEP = [("asleep", "/src/longtake/faults/faulty_processes.py", 52), *_BASE]
_FUTURE = [
    ("wait", f"{_LIB}/threading.py", 327),
    ("result", f"{_LIB}/concurrent/futures/_base.py", 451),
]
_DATA = [*_FUTURE, ("wait", "/src/longtake/data/decoding.py", 120), *_BASE]
_READ = [("read", "/src/longtake/data/decode.py", 88), ("main", "/src/longtake/data/worker.py", 50)]

Calls = Sequence[tuple[str, str, int]]


def _thread(name: str, calls: Calls, *, has_gil: bool = False) -> dict[str, Any]:
    frames = [{"function": name, "file": file, "line": line} for name, file, line in calls]
    return {"name": name, "is_active": False, "has_gil": has_gil, "frames": frames}


def _process(
    pid: int,
    rank: int,
    calls: Calls,
    phase: str,
    *,
    role: Literal["rank", "decode"] = "rank",
    seconds: float = 12.0,
    done: int = 3,
    state: str = "S",
    cpu: float = 0.0,
    world: int = 2,
    clip: str = "",
    threads: Sequence[dict[str, Any]] = (),
    has_gil: bool = False,
) -> ProcessDump:
    return {
        "pid": pid,
        "ppid": 1,
        "role": role,
        "rank": rank,
        "command": "python",
        "state": state,
        "cpu_seconds": cpu,
        "method": "py-spy --nonblocking",
        "threads": [_thread("MainThread", calls, has_gil=has_gil), *threads] if calls else [],
        "raw": "",
        "heart": {
            "role": role,
            "pid": pid,
            "rank": rank,
            "local_rank": rank,
            "world_size": world,
            "launch": "abcdefgh",
            "step": done + 100,
            "steps_done": done,
            "phase": phase,
            "seconds": seconds,
            "detail": clip,
            "path_of_clip": f"clips/{clip}.mp4" if clip else "",
            "is_settled": True,
        },
    }


def _node(*rounds: Sequence[ProcessDump], host: str = "gpu07", missing: Any = ()) -> NodeDump:
    """What each heart says of its age is as of the last round."""
    return {
        "token": "t",
        "time": "",
        "host": host,
        "reason": "stall",
        "launch": "abcdefgh",
        "rounds": [
            {
                "seconds": 1.5 * number,
                "processes": [_earlier(each, 1.5 * (len(rounds) - 1 - number)) for each in round_],
            }
            for number, round_ in enumerate(rounds)
        ],
        "missing": list(missing),
    }


def _still(*processes: ProcessDump, host: str = "gpu07", missing: Any = ()) -> NodeDump:
    """Three rounds in which nothing changes."""
    return _node(processes, processes, processes, host=host, missing=missing)


def _earlier(process: ProcessDump, seconds: float) -> ProcessDump:
    heart = process["heart"] and {
        **process["heart"],
        "seconds": max(0.0, process["heart"]["seconds"] - seconds),
    }
    return {**process, "heart": heart}


def _judge(
    *dumps: NodeDump,
    alarm: ProcessDump | None = None,
    silent: Sequence[str] = (),
    flights: dict[str, Path] | None = None,
) -> Verdict:
    request: Request = {
        "token": "t",
        "time": "",
        "by": "gpu07",
        "reason": "stall",
        "rounds": 3,
        "native": False,
    }
    if alarm and alarm["heart"]:
        request["stall"] = cast("Any", {**alarm["heart"], "host": "gpu07", "limit": 6.0})
    verdict = judge("t", request, dumps, silent, flights or {})
    assert Verdict.from_dict(json.loads(json.dumps(verdict.as_dict()))) == verdict
    return verdict


def test_a_frozen_decoding_process_is_named_and_not_the_ranks_that_wait_for_it() -> None:
    """Rank 1 waits for data and rank 0 for rank 1; the worker at its clip longest is to blame."""
    starved = _process(11, 1, _DATA, "data")
    dump = _still(
        _process(10, 0, _COLLECTIVE, "forward"),
        starved,
        _process(20, 1, _READ, "decode", role="decode", seconds=0.4, clip="fresh"),
        _process(21, 1, _READ, "decode", role="decode", seconds=14.0, clip="frozen"),
        _process(22, 0, _READ, "decode", role="decode", seconds=90.0, clip="of-rank-0"),
        _process(23, 1, _READ, "idle", role="decode", seconds=99.0),
    )
    verdict = _judge(dump, alarm=starved)
    assert verdict.kind == "stuck"
    (suspect,) = verdict.suspects
    assert (suspect.pid, suspect.role, suspect.rank) == (21, "decode", 1)
    assert (suspect.function, suspect.line, suspect.clip) == ("read", 88, "frozen")
    assert suspect.clip_path == "clips/frozen.mp4"
    assert {each.doing: each.ranks for each in verdict.waiting} == {
        "a collective": (0,),
        "data": (1,),
    }
    assert (verdict.seconds, verdict.limit, verdict.step) == (12.0, 6.0, 103)
    assert verdict.sentence.startswith("gpu07: decoding process 21 of rank 1 has been in read")


def test_a_decoding_process_that_gave_the_alarm_is_named_before_anyone_starves() -> None:
    """Ranks that still train on what was decoded ahead are none of it."""
    frozen = _process(21, 1, _READ, "decode", role="decode", seconds=14.0, clip="frozen")
    moving = [
        [
            _process(10 + rank, rank, [("f", "/m.py", at), *_BASE], "forward", done=at)
            for rank in (0, 1)
        ]
        for at in (1, 2, 3)
    ]
    verdict = _judge(_node(*[[*each, frozen] for each in moving]), alarm=frozen)
    assert [each.pid for each in verdict.suspects] == [21]
    assert verdict.kind == "stuck"


def test_a_decoding_process_that_moves_is_slow() -> None:
    """It is named all the same, as the one that is waited for."""
    rounds = [
        [
            _process(10, 0, _DATA, "data", world=1),
            _process(21, 0, [("f", "/m.py", at)], "decode", role="decode", cpu=1.5 * at, clip="c"),
        ]
        for at in range(3)
    ]
    verdict = _judge(_node(*rounds))
    assert (verdict.kind, verdict.suspects[0].pid) == ("slow", 21)
    assert verdict.suspects[0].cpu_share == pytest.approx(1.0)
    assert "slow and not stuck" in verdict.sentence


def test_a_stopped_process_is_named_before_all_others() -> None:
    """Also where its stack looks like that of a rank that waits."""
    for role in ("rank", "decode"):
        dump = _still(
            _process(10, 0, _SLEEP, "forward"),
            _process(11, 1, _COLLECTIVE, "collective", state="T" if role == "rank" else "S"),
            _process(12, 1, _READ, "decode", role="decode", state="t", clip="c"),
        )
        first = _judge(dump).suspects[0]
        assert (first.role, first.rank) == (role, 1)


def test_a_rank_that_waits_for_a_disk_in_all_rounds_is_named() -> None:
    """State D once is nothing; in every round, without moving, it is a device that hangs."""
    waits, disk = _process(10, 0, _COLLECTIVE, "collective"), [("f", "/m.py", 1), *_BASE]
    kept = _process(11, 1, disk, "optimizer", state="D")
    verdict = _judge(_still(waits, kept))
    assert verdict.suspects[0].state == "D"
    assert "waits for a device that does not answer" in verdict.sentence


def test_a_rank_that_sleeps_never_joined() -> None:
    """Of two nodes, the rank that waits for nothing, at the line where it does."""
    first = _still(*(_process(rank, rank, _COLLECTIVE, "forward", world=8) for rank in range(4)))
    others = [_process(rank, rank, _COLLECTIVE, "forward", world=8) for rank in (4, 5, 7)]
    asleep = _process(6, 6, _SLEEP, "forward", world=8)
    verdict = _judge(first, _still(*others, asleep, host="gpu08"))
    assert verdict.kind == "stuck"
    (suspect,) = verdict.suspects
    assert (suspect.host, suspect.rank, suspect.function) == ("gpu08", 6, "asleep")
    assert (suspect.file, suspect.line) == ("/src/longtake/faults/faulty_processes.py", 52)
    assert [(each.ranks, each.host_count) for each in verdict.waiting] == [
        ((0, 1, 2, 3, 4, 5, 7), 2)
    ]
    assert "Ranks 0-5, 7 only wait for a collective." in verdict.sentence


def test_a_rank_that_computes_is_slow() -> None:
    """Its calls change between the rounds."""
    rounds = [
        [
            _process(10, 0, _COLLECTIVE, "collective"),
            _process(11, 1, [("f", "/m.py", at), *_BASE], "forward", cpu=1.4 * at),
        ]
        for at in range(3)
    ]
    verdict = _judge(_node(*rounds))
    assert (verdict.kind, verdict.suspects[0].rank) == ("slow", 1)


def test_in_a_collective_of_its_own_it_is_the_rank_that_is_behind() -> None:
    """Of two that both wait in collectives; the line is that of the caller, not the library's."""
    extra = [_C10D, ("in_collective", "/src/longtake/faults/faulty_processes.py", 80), *_BASE]
    for phase, done in (("forward", 3), ("collective", 2)):
        behind = _process(11, 1, extra, phase, done=done)
        verdict = _judge(_still(_process(10, 0, _COLLECTIVE, "collective"), behind))
        (suspect,) = verdict.suspects
        assert (suspect.rank, suspect.function, suspect.line) == (1, "in_collective", 80)
        assert suspect.within == "all_reduce (torch/distributed/distributed_c10d.py:3245)"
        assert verdict.waiting[0].ranks == (0,)
        assert verdict.kind == "stuck"


def test_in_a_collective_of_its_own_the_few_are_named_where_most_agree() -> None:
    """A rank that left out a collective is ahead, and to blame all the same."""
    most = [_process(rank, rank, _COLLECTIVE, "forward", world=4) for rank in (0, 1, 3)]
    ahead = _process(2, 2, _COLLECTIVE, "collective", world=4)
    assert [each.rank for each in _judge(_still(*most, ahead)).suspects] == [2]


def test_all_at_the_same_place_is_the_link() -> None:
    """No rank is to blame, and the sentence says where to look."""
    verdict = _judge(_still(*(_process(rank, rank, _COLLECTIVE, "collective") for rank in (0, 1))))
    assert (verdict.kind, verdict.suspects) == ("link", ())
    assert "All 2 ranks are in sum_over_ranks" in verdict.sentence


def test_the_saver_s_thread_says_where_a_checkpoint_hangs() -> None:
    """The rank whose thread waits for no other rank, with that thread's line."""
    waits = [*_FUTURE, ("wait", "/src/longtake/checkpoint/saver.py", 121), *_BASE]
    write = [("fsync", "/src/longtake/checkpoint/writing.py", 150)]
    joined = [_C10D, ("_gathered", "/src/longtake/checkpoint/writing.py", 52)]
    dump = _still(
        _process(10, 0, waits, "checkpoint", threads=[_thread("checkpoint_0", joined)]),
        _process(11, 1, waits, "checkpoint", threads=[_thread("checkpoint_0", write)]),
    )
    verdict = _judge(dump)
    (suspect,) = verdict.suspects
    assert (suspect.rank, suspect.thread, suspect.line) == (1, "checkpoint_0", 150)
    assert "thread checkpoint_0 of rank 1" in verdict.sentence


def test_a_rank_that_is_gone_is_lost() -> None:
    """Whether only its record is left, or it went while the rounds were read."""
    waits, gone = _process(10, 0, _COLLECTIVE, "forward"), _process(11, 1, _SLEEP, "backward")
    verdict = _judge(_still(waits, missing=[gone["heart"]]))
    assert (verdict.kind, verdict.suspects[0].pid, verdict.suspects[0].state) == ("lost", 11, "")
    assert "rank 1 (process 11) is gone" in verdict.sentence
    assert _judge(_node([waits, gone], [waits], [waits])).suspects[0].pid == 11


def test_a_node_that_does_not_answer_is_lost_if_its_ranks_are_missing() -> None:
    """And only then: a node whose ranks all others have heard of is not to blame."""
    ranks = [_process(rank, rank, _COLLECTIVE, "forward", world=4) for rank in (0, 1)]
    verdict = _judge(_still(*ranks), silent=["gpu09"])
    assert (verdict.kind, verdict.suspects[0].host) == ("lost", "gpu09")
    assert "no sign of ranks 2-3" in verdict.sentence
    assert _judge(_still(*ranks)).kind == "lost"
    assert _judge(silent=["gpu09"]).kind == "lost"
    two = [_process(rank, rank, _COLLECTIVE, "forward") for rank in (0, 1)]
    assert _judge(_still(*two), silent=["gpu09"]).kind == "link"


def test_a_process_alone_is_where_it_is() -> None:
    """With nobody to wait for, whatever it does is what hangs; also if no calls could be read."""
    assert _judge(_still(_process(10, 0, _SLEEP, "forward", world=1))).suspects[0].line == 52
    unread = _judge(_still(_process(10, 0, [], "forward", world=1)))
    assert (unread.kind, unread.suspects[0].function) == ("stuck", "")
    assert unread.sentence


def test_one_that_burns_a_core_in_c_is_stuck_there() -> None:
    """The calls of C tell where, if they were read; that it holds Python's lock is said."""
    calls = [("av_read_frame", "/usr/lib/libavformat.so.60", 0), *_READ]
    rounds = [
        [
            _process(10, 0, _DATA, "data", world=1),
            _process(21, 0, calls, "decode", role="decode", cpu=1.5 * at, clip="c", has_gil=True),
        ]
        for at in range(3)
    ]
    verdict = _judge(_node(*rounds))
    assert (verdict.kind, verdict.suspects[0].native) == (
        "stuck",
        "av_read_frame (libavformat.so.60)",
    )
    assert (
        "uses a full core: it is busy in C (in av_read_frame (libavformat.so.60))"
        in verdict.sentence
    )
    assert "holds Python's lock" in verdict.sentence


def test_ranks_at_the_same_line_of_which_one_is_elsewhere() -> None:
    """Python does not show a wait for the card; where most ranks stand, they are taken to wait."""
    card = [("compute_gradients", "/src/longtake/training/step.py", 78), *_BASE]
    ranks = [_process(rank, rank, card, "backward", world=4) for rank in range(3)]
    verdict = _judge(_still(*ranks, _process(3, 3, _SLEEP, "forward", world=4)))
    assert [each.rank for each in verdict.suspects] == [3]
    assert verdict.waiting[0].doing == "the device"
    assert _judge(_still(*ranks, _process(3, 3, card, "backward", world=4))).kind == "link"


def test_the_flight_recorder_names_a_rank_that_looks_like_all_others(tmp_path: Path) -> None:
    """Its process stands where the others do, but it never joined."""
    entry = {
        "record_id": 1,
        "pg_id": 0,
        "process_group": ("0", "default_pg"),
        "collective_seq_id": 7,
        "profiling_name": "nccl:all_reduce",
        "input_sizes": [[3]],
        "state": "started",
        "retired": False,
        "is_p2p": False,
    }
    for rank in range(3):
        entries = [] if rank == 2 else [entry]
        (tmp_path / f"rank_{rank}").write_bytes(pickle.dumps({"entries": entries}))
    (tmp_path / "rank_9").write_bytes(b"damaged")
    card = [("compute_gradients", "/src/longtake/training/step.py", 78), *_BASE]
    dump = _still(*(_process(rank, rank, card, "backward", world=3) for rank in range(3)))
    verdict = _judge(dump, flights={"gpu07": tmp_path, "gpu08": tmp_path / "none"})
    assert [each.rank for each in verdict.suspects] == [2]
    assert (verdict.missing_in[0].op, verdict.missing_in[0].ranks) == ("nccl:all_reduce", (2,))
    assert "rank 2 never joined nccl:all_reduce of default_pg" in verdict.sentence


def test_nothing_at_all_is_unknown() -> None:
    """A verdict is passed whatever there is."""
    assert _judge().kind == "unknown"
    assert _judge(_node()).kind == "unknown"


def test_a_large_run_is_judged_in_seconds() -> None:
    """2,000 ranks with 16 decoding processes each, all of which wait for one: it is found."""
    dumps = []
    for host in range(250):
        processes = []
        for rank in range(8 * host, 8 * host + 8):
            calls = _DATA if rank == 1234 else _COLLECTIVE
            phase = "data" if rank == 1234 else "forward"
            processes.append(_process(rank, rank, calls, phase, world=2000))
            processes += [
                _process(10**5 + 16 * rank + n, rank, _READ, "decode", role="decode", seconds=n)
                for n in range(16)
            ]
        dumps.append(_still(*processes, host=f"gpu{host}"))
    begun = time.process_time()
    verdict = _judge(*dumps)
    assert time.process_time() - begun < 20
    assert verdict.suspects[0].pid == 10**5 + 16 * 1234 + 15
    assert verdict.waiting[0].host_count == 250
