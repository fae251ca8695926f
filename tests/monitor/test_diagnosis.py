"""The cause of a stall, from dumps as nodes write them; and how a diagnosis reads."""

import json
import pickle
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
from tests.monitor.build import (
    make_collective,
    make_diagnosis,
    make_dump,
    make_process,
    make_thread,
)

import longtake
from longtake.fsio import parse_record
from longtake.monitor.diagnosis import diagnose
from longtake.monitor.flight_recorder import read_folders
from longtake.monitor.stall_record import MissingIn, StallDiagnosis, Suspect, WaitingRanks
from longtake.monitor.stall_sentence import describe
from longtake.monitor.stall_snapshot import StallSnapshot, Wait, classify_wait
from longtake.node_dir import DumpRequest, NodeDump, ProcessDump
from longtake.node_events import NodeEvent
from longtake.stacks import is_library_file, short_file, user_frame

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

_WAITS = make_process(10, 0, _COLLECTIVE, "forward")
_HUNG = make_process(11, 1, _SLEEP, "backward")

_REQUEST: DumpRequest = {
    "token": "t",
    "time": "",
    "by": "gpu07",
    "reason": "stall",
    "rounds": 3,
    "native": False,
}


def _still(*processes: ProcessDump, host: str = "gpu07", missing: Any = ()) -> NodeDump:
    return make_dump(processes, processes, processes, host=host, missing=missing)


def _starve(_: int) -> ProcessDump:
    return make_process(10, 0, _DATA, "data", world=1)


def _over_time(*processes: Callable[[int], ProcessDump]) -> NodeDump:
    """A dump of processes that are made anew in each of three rounds."""
    return make_dump(*([process(at) for process in processes] for at in range(3)))


def _worker(pid: int, rank: int, phase: str = "decode", **changes: Any) -> ProcessDump:
    return make_process(pid, rank, _READ, phase, role="decode", **changes)


def _judge(
    *dumps: NodeDump,
    alarm: ProcessDump | None = None,
    silent: Sequence[str] = (),
    flights: dict[str, Path] | None = None,
) -> StallDiagnosis:
    request = _REQUEST.copy()
    if alarm and alarm["heartbeat"]:
        request["stall"] = cast("Any", {**alarm["heartbeat"], "host": "gpu07", "limit": 6.0})
    recorders, _ = read_folders((flights or {}).values())
    diagnosis = diagnose(request, dumps, silent, recorders, "gpu07")
    written = json.dumps(diagnosis.as_dict()).encode()
    assert parse_record(written, StallDiagnosis, Path("t.json")) == diagnosis
    return diagnosis


def test_a_frozen_decoding_process_is_named_and_not_the_ranks_that_wait_for_it() -> None:
    """Rank 1 waits for data and rank 0 for rank 1; the worker at its clip longest is to blame."""
    starved = make_process(11, 1, _DATA, "data")
    dump = _still(
        make_process(10, 0, _COLLECTIVE, "forward"),
        starved,
        _worker(20, 1, seconds=0.4, clip="fresh"),
        _worker(21, 1, seconds=13.996, clip="frozen"),
        _worker(22, 0, seconds=90.0, clip="of-rank-0"),
        _worker(23, 1, "idle", seconds=99.0),
    )
    verdict = _judge(dump, alarm=starved)
    assert verdict.kind == "stuck"
    (suspect,) = verdict.suspects
    assert (suspect.pid, suspect.role, suspect.rank) == (21, "decode", 1)
    assert (suspect.function, suspect.line, suspect.clip) == ("read", 88, "frozen")
    assert suspect.clip_path == "clips/frozen.mp4"
    assert suspect.seconds <= 13.996  # more than in its heartbeat would mean that it has moved on
    assert {each.doing: each.ranks for each in verdict.waiting} == {
        "a collective": (0,),
        "data": (1,),
    }
    assert (verdict.seconds, verdict.limit, verdict.step) == (12.0, 6.0, 103)
    assert verdict.sentence.startswith("gpu07: decode worker 21 of rank 1 has been in read")


@pytest.mark.parametrize(
    ("state", "given", "words"),
    [
        ("T", "", "decode worker 21 of rank 1 is stopped (state T: by a signal); it has been in"),
        ("D", "", "decode worker 21 of rank 1 waits for a device that does not answer (state D:"),
        ("S", "c/7.mp4", "for 14 s, before clip c/7.mp4, which it was given, and has not moved in"),
    ],
)
def test_an_idle_decoding_process_that_holds_its_rank_up_is_named(
    state: str, given: str, words: str
) -> None:
    """It says that it is idle until it has read its next item from the pipe."""
    starved = make_process(11, 1, _DATA, "data")
    held_up = _worker(21, 1, "idle", seconds=14.0, state=state, given=given)
    others = [
        make_process(10, 0, _COLLECTIVE, "forward"),
        _worker(20, 0, "idle", state="T"),  # whose rank has its data
        _worker(22, 1, "idle"),
    ]
    verdict = _judge(_still(starved, held_up, *others), alarm=starved)
    assert [each.pid for each in verdict.suspects] == [21]
    assert verdict.suspects[0].clip == ""  # it has not begun with one
    assert words in verdict.sentence


def test_a_decoding_process_that_gave_the_alarm_is_named_before_anyone_starves() -> None:
    frozen = _worker(21, 1, seconds=14.0, clip="frozen")
    moving = [
        [
            make_process(10 + rank, rank, [("f", "/m.py", at), *_BASE], "forward", done=at)
            for rank in (0, 1)
        ]
        for at in (1, 2, 3)
    ]
    verdict = _judge(make_dump(*[[*each, frozen] for each in moving]), alarm=frozen)
    assert [each.pid for each in verdict.suspects] == [21]
    assert verdict.kind == "stuck"


def test_a_decoding_process_that_moves_is_slow() -> None:
    def worker(at: int) -> ProcessDump:
        calls = [("f", "/m.py", at)]
        return make_process(21, 0, calls, "decode", role="decode", cpu=1.5 * at, clip="c")

    verdict = _judge(_over_time(_starve, worker))
    assert (verdict.kind, verdict.suspects[0].pid) == ("slow", 21)
    assert verdict.suspects[0].cpu_share == pytest.approx(1.0)
    assert "slow and not stuck" in verdict.sentence


def test_a_stopped_process_is_named_before_all_others() -> None:
    for role in ("rank", "decode"):
        dump = _still(
            make_process(10, 0, _SLEEP, "forward"),
            make_process(11, 1, _COLLECTIVE, "collective", state="T" if role == "rank" else "S"),
            _worker(12, 1, state="t", clip="c"),
        )
        first = _judge(dump).suspects[0]
        assert (first.role, first.rank) == (role, 1)


def test_a_rank_that_waits_for_a_disk_in_all_rounds_is_named() -> None:
    """State D once is nothing; in every round, without moving, it is a device that hangs."""
    waits, disk = make_process(10, 0, _COLLECTIVE, "collective"), [("f", "/m.py", 1), *_BASE]
    kept = make_process(11, 1, disk, "optimizer", state="D")
    verdict = _judge(_still(waits, kept))
    assert verdict.suspects[0].state == "D"
    assert "waits for a device that does not answer" in verdict.sentence


def test_a_rank_that_sleeps_never_joined() -> None:
    first = _still(
        *(make_process(rank, rank, _COLLECTIVE, "forward", world=8) for rank in range(4))
    )
    others = [make_process(rank, rank, _COLLECTIVE, "forward", world=8) for rank in (4, 5, 7)]
    asleep = make_process(6, 6, _SLEEP, "forward", world=8)
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
    def compute(at: int) -> ProcessDump:
        return make_process(11, 1, [("f", "/m.py", at), *_BASE], "forward", cpu=1.4 * at)

    verdict = _judge(_over_time(lambda _: make_process(10, 0, _COLLECTIVE, "collective"), compute))
    assert (verdict.kind, verdict.suspects[0].rank) == ("slow", 1)


def test_in_a_collective_of_its_own_it_is_the_rank_that_is_behind() -> None:
    """Of two that both wait in collectives; the line is that of the caller, not the library's."""
    extra = [_C10D, ("in_collective", "/src/longtake/faults/faulty_processes.py", 80), *_BASE]
    for phase, done in (("forward", 3), ("collective", 2)):
        behind = make_process(11, 1, extra, phase, done=done)
        verdict = _judge(_still(make_process(10, 0, _COLLECTIVE, "collective"), behind))
        (suspect,) = verdict.suspects
        assert (suspect.rank, suspect.function, suspect.line) == (1, "in_collective", 80)
        assert suspect.within == "all_reduce (torch/distributed/distributed_c10d.py:3245)"
        assert verdict.waiting[0].ranks == (0,)
        assert verdict.kind == "stuck"


def test_in_a_collective_of_its_own_the_few_are_named_where_most_agree() -> None:
    most = [make_process(rank, rank, _COLLECTIVE, "forward", world=4) for rank in (0, 1, 3)]
    ahead = make_process(2, 2, _COLLECTIVE, "collective", world=4)
    assert [each.rank for each in _judge(_still(*most, ahead)).suspects] == [2]


def test_all_at_the_same_place_is_the_link() -> None:
    verdict = _judge(
        _still(*(make_process(rank, rank, _COLLECTIVE, "collective") for rank in (0, 1)))
    )
    assert (verdict.kind, verdict.suspects) == ("link", ())
    assert "All 2 ranks are in sum_over_ranks" in verdict.sentence


def test_the_saver_s_thread_says_where_a_checkpoint_hangs() -> None:
    waits = [*_FUTURE, ("wait", "/src/longtake/checkpoint/store.py", 121), *_BASE]
    write = [("fsync", "/src/longtake/checkpoint/store.py", 150)]
    joined = [_C10D, ("all_ranks", "/src/longtake/checkpoint/store.py", 52)]
    dump = _still(
        make_process(10, 0, waits, "checkpoint", threads=[make_thread("checkpoint_0", joined)]),
        make_process(11, 1, waits, "checkpoint", threads=[make_thread("checkpoint_0", write)]),
    )
    verdict = _judge(dump)
    (suspect,) = verdict.suspects
    assert (suspect.rank, suspect.thread, suspect.line) == (1, "checkpoint_0", 150)
    assert "thread checkpoint_0 of rank 1" in verdict.sentence


def test_a_rank_that_is_gone_is_lost() -> None:
    verdict = _judge(_still(_WAITS, missing=[_HUNG["heartbeat"]]))
    assert (verdict.kind, verdict.suspects[0].pid, verdict.suspects[0].state) == ("lost", 11, "")
    assert "rank 1 (process 11) is gone" in verdict.sentence
    assert _judge(make_dump([_WAITS, _HUNG], [_WAITS], [_WAITS])).suspects[0].pid == 11


def test_a_node_that_does_not_answer_is_lost_if_its_ranks_are_missing() -> None:
    """And only then: a node whose ranks all others have heard of is not to blame."""
    ranks = [make_process(rank, rank, _COLLECTIVE, "forward", world=4) for rank in (0, 1)]
    verdict = _judge(_still(*ranks), silent=["gpu09"])
    assert (verdict.kind, verdict.suspects[0].host) == ("lost", "gpu09")
    assert "no sign of ranks 2-3" in verdict.sentence
    assert _judge(_still(*ranks)).kind == "lost"
    assert _judge(silent=["gpu09"]).kind == "lost"
    two = [make_process(rank, rank, _COLLECTIVE, "forward") for rank in (0, 1)]
    assert _judge(_still(*two), silent=["gpu09"]).kind == "link"


def test_a_process_alone_is_where_it_is() -> None:
    assert _judge(_still(make_process(10, 0, _SLEEP, "forward", world=1))).suspects[0].line == 52
    unread = _judge(_still(make_process(10, 0, [], "forward", world=1)))
    assert (unread.kind, unread.suspects[0].function) == ("stuck", "")
    assert unread.sentence


def test_one_that_burns_a_core_in_c_is_stuck_there() -> None:
    calls = [("av_read_frame", "/usr/lib/libavformat.so.60", 0), *_READ]

    def worker(at: int) -> ProcessDump:
        facts: dict[str, Any] = {"role": "decode", "clip": "c", "has_gil": True}
        return make_process(21, 0, calls, "decode", cpu=1.5 * at, **facts)

    verdict = _judge(_over_time(_starve, worker))
    native = "av_read_frame (libavformat.so.60)"
    assert (verdict.kind, verdict.suspects[0].native) == ("stuck", native)
    assert f"uses a full core: it is busy in C (in {native})" in verdict.sentence
    assert "holds the GIL" in verdict.sentence


def test_ranks_at_the_same_line_of_which_one_is_elsewhere() -> None:
    """Python does not show a wait for the GPU; where most ranks stand, they are taken to wait."""
    gpu = [("compute_gradients", "/src/longtake/training/loop.py", 78), *_BASE]
    ranks = [make_process(rank, rank, gpu, "backward", world=4) for rank in range(3)]
    verdict = _judge(_still(*ranks, make_process(3, 3, _SLEEP, "forward", world=4)))
    assert [each.rank for each in verdict.suspects] == [3]
    assert verdict.waiting[0].doing == "the device"
    assert _judge(_still(*ranks, make_process(3, 3, gpu, "backward", world=4))).kind == "link"


def test_the_flight_recorder_names_a_rank_that_looks_like_all_others(tmp_path: Path) -> None:
    group = ("0", "default_pg")
    entry = make_collective(record_id=1, process_group=group, collective_seq_id=7, state="started")
    for rank in range(3):
        entries = [] if rank == 2 else [entry]
        (tmp_path / f"rank_{rank}").write_bytes(pickle.dumps({"entries": entries}))
    (tmp_path / "rank_9").write_bytes(b"damaged")
    gpu = [("compute_gradients", "/src/longtake/training/loop.py", 78), *_BASE]
    dump = _still(*(make_process(rank, rank, gpu, "backward", world=3) for rank in range(3)))
    verdict = _judge(dump, flights={"gpu07": tmp_path, "gpu08": tmp_path / "none"})
    assert [each.rank for each in verdict.suspects] == [2]
    assert (verdict.missing_in[0].op, verdict.missing_in[0].ranks) == ("nccl:all_reduce", (2,))
    assert "rank 2 never joined nccl:all_reduce of default_pg" in verdict.sentence


def test_nothing_at_all_is_unknown() -> None:
    assert _judge().kind == "unknown"
    assert _judge(make_dump()).kind == "unknown"


def test_a_large_run_is_judged_in_seconds() -> None:
    dumps = []
    for host in range(250):
        processes = []
        for rank in range(8 * host, 8 * host + 8):
            calls = _DATA if rank == 1234 else _COLLECTIVE
            phase = "data" if rank == 1234 else "forward"
            processes.append(make_process(rank, rank, calls, phase, world=2000))
            processes += [
                make_process(10**5 + 16 * rank + n, rank, _READ, "decode", role="decode", seconds=n)
                for n in range(16)
            ]
        dumps.append(_still(*processes, host=f"gpu{host}"))
    begun = time.process_time()
    verdict = _judge(*dumps)
    assert time.process_time() - begun < 20
    assert verdict.suspects[0].pid == 10**5 + 16 * 1234 + 15
    assert verdict.waiting[0].host_count == 250


def _with(process: ProcessDump, **heartbeat: Any) -> ProcessDump:
    assert process["heartbeat"] is not None
    return {**process, "heartbeat": {**process["heartbeat"], **heartbeat}}


def test_an_alarm_that_is_over_is_no_stall() -> None:
    """By the last round of the alarmed process's node; the others may still wait for it."""
    assert _judge(_still(_WAITS, _HUNG), alarm=_HUNG).kind == "stuck"
    later: tuple[dict[str, Any], ...] = ({"phase": "optimizer"}, {"step": 104}, {"seconds": 0.2})
    for changes in (*later, {"phase": "ended"}):
        after = _with(_HUNG, **changes)
        found = _judge(make_dump([_WAITS, _HUNG], [_WAITS, after]), alarm=_HUNG)
        assert (found.kind, found.suspects) == ("cleared", ())
        assert "moved on" in found.sentence
    assert _judge(make_dump([_WAITS, _HUNG], [_WAITS]), alarm=_HUNG).kind == "cleared"


def test_an_alarm_of_a_process_that_died_holds_for_ranks_only() -> None:
    """A decode worker was replaced by its pool; without a dump of its node nothing is known."""
    for alarm, kind in ((_HUNG, "lost"), (_worker(21, 1, clip="c"), "cleared")):
        dump = make_dump([_WAITS, alarm], [_WAITS], missing=[alarm["heartbeat"]])
        assert _judge(dump, alarm=alarm).kind == kind
    assert _judge(_still(_WAITS, host="gpu08"), alarm=_HUNG, silent=["gpu07"]).kind == "lost"


def test_a_decode_worker_s_alarm_has_the_runs_step() -> None:
    """Itself it counts windows; at another clip it has moved on."""
    waits = make_process(10, 0, _DATA, "data", world=1)
    worker = _worker(21, 0, seconds=14.0, clip="c")
    alarm = _with(worker, step=7)
    assert _judge(_still(waits, worker), alarm=alarm).kind == "stuck"
    assert _judge(_still(waits, _with(worker, detail="d")), alarm=alarm).kind == "cleared"


_OWN = ("forward", "/home/me/project/model.py", 12)
_STEP = ("compute_gradients", f"{_SITE}/longtake/training/loop.py", 73)
_RESULT = ("result", f"{_LIB}/concurrent/futures/_base.py", 451)
_QUALIFIED = ("Condition.wait", f"{_LIB}/threading.py", 327)
_WAIT = ("wait", f"{_LIB}/threading.py", 327)


def _in(file: str) -> tuple[str, str, int]:
    return ("wait", file, 1)


@pytest.mark.parametrize(
    ("calls", "phase", "expected"),
    [
        ([_C10D, _OWN, _STEP], "forward", "collective"),
        ([_in(f"{_SITE}/torch/distributed/fsdp/_p.py"), _STEP], "x", "collective"),
        ([_in("/src/longtake/parallel/collectives.py"), _STEP], "x", "collective"),
        ([_in(f"{_SITE}/torch/distributed/rendezvous.py"), _STEP], "x", "collective"),
        ([_OWN, _C10D, _STEP], "forward", "nothing"),
        ([_OWN, _STEP], "collective", "nothing"),
        ([_WAIT, _RESULT, _in("/src/longtake/data/decoding.py"), _STEP], "data", "data"),
        ([_WAIT, _RESULT, _OWN], "forward", "lock"),
        ([_QUALIFIED, _in("/src/longtake/data/d.py"), _STEP], "data", "data"),
        ([_WAIT, _in("/src/longtake/checkpoint/store.py")], "optimizer", "checkpoint"),
        ([_in(f"{_SITE}/torch/distributed/checkpoint/filesystem.py")], "x", "nothing"),
        ([("synchronize", f"{_SITE}/torch/cuda/__init__.py", 1), _STEP], "forward", "device"),
        ([_in(f"{_SITE}/torch/nn/modules/linear.py"), _OWN], "forward", "nothing"),
        ([], "collective", "collective"),
        ([], "data", "data"),
        ([], "backward", "nothing"),
    ],
)
def test_calls_tell_what_is_waited_for(
    calls: list[tuple[str, str, int]], phase: str, expected: Wait
) -> None:
    """What lies below the innermost call that is no library's decides; without calls, the phase."""
    assert classify_wait(tuple(calls), phase) == expected


def test_the_driver_s_calls_tell_a_wait_for_the_device() -> None:
    """Python does not show that `.item()` waits for a GPU; C's calls do, where they were read."""
    native = (("cuStreamSynchronize", "libcuda.so.1", 0),)
    assert classify_wait((_OWN, _STEP), "forward", native) == "device"
    assert classify_wait((_OWN, _STEP), "forward", (("read", "libc.so.6", 0),)) == "nothing"


def test_the_line_to_look_at_is_that_of_whoever_called_a_library() -> None:
    """Of a sleep, a lock or a collective, the caller's; a library without a caller has its own."""
    assert user_frame((_WAIT, _RESULT, _C10D, _OWN, _STEP)) == _OWN
    assert user_frame((_C10D, _STEP)) == _STEP
    assert user_frame((_WAIT, _RESULT)) is None


@pytest.mark.parametrize(
    ("file", "machinery", "short"),
    [
        (f"{_SITE}/torch/nn/modules/linear.py", True, "torch/nn/modules/linear.py"),
        (f"{_SITE}/torchvision/ops.py", False, "torchvision/ops.py"),
        (f"{_SITE}/longtake/data/decode.py", False, "longtake/data/decode.py"),
        ("/src/longtake/data/decode.py", False, "longtake/data/decode.py"),
        ("/home/me/.pyenv/versions/3.11.7/lib/python3.11/threading.py", True, "threading.py"),
        ("/usr/lib/python3/dist-packages/numpy/core.py", True, "numpy/core.py"),
        ("<frozen runpy>", True, "<frozen runpy>"),
        ("<string>", False, "<string>"),
        ("/home/me/python3.11/train.py", False, "/home/me/python3.11/train.py"),
    ],
)
def test_files_of_libraries_are_known_by_where_they_lie(
    file: str, machinery: bool, short: str
) -> None:
    assert is_library_file(file) is machinery
    assert short_file(file) == short


def test_a_line_of_training_that_reads_values_waits_for_the_device() -> None:
    module = Path(longtake.__file__).parent / "training" / "statistics.py"
    lines = module.read_text().splitlines()
    (reads,) = (number for number, line in enumerate(lines, 1) if "cat(sums).tolist()" in line)
    other = next(number for number, line in enumerate(lines, 1) if line.startswith("import "))
    file = "/elsewhere/site-packages/longtake/training/statistics.py"
    assert classify_wait((("compute_gradients", file, reads),), "backward") == "device"
    assert classify_wait((("compute_gradients", file, other),), "backward") == "nothing"
    native = (("read", "libc.so.6", 0),)
    assert classify_wait((("compute_gradients", file, reads),), "backward", native) == "nothing"


_SNAPSHOT = StallSnapshot(ranks=[], decoding={}, lost=[], rounds=3, world_size=0)
_WORKER = Suspect(
    host="gpu07",
    pid=4121,
    role="decode",
    rank=3,
    function="read",
    file="/opt/lib/python3.11/site-packages/longtake/data/decode.py",
    line=88,
    doing="decode",
    seconds=12.2,
    clip="a-clip",
    clip_path="clips/a.mp4",
    state="S",
)
_RANK = replace(
    _WORKER, role="rank", clip="", clip_path="", doing="backward", step=120, seconds=250.0
)


def _sentence(
    *suspects: Suspect,
    waiting: tuple[WaitingRanks, ...] = (),
    missing: tuple[MissingIn, ...] = (),
    silent: tuple[str, ...] = (),
) -> str:
    diagnosis = make_diagnosis(*suspects, waiting=waiting, missing_in=missing, silent_nodes=silent)
    return describe(diagnosis, _SNAPSHOT)


def test_a_worker_s_sentence_names_all_that_is_known() -> None:
    waiting = WaitingRanks("data", (3,), 1), WaitingRanks("a collective", (0, 1, 2, 4), 2)
    assert _sentence(_WORKER, waiting=waiting) == (
        "gpu07: decode worker 4121 of rank 3 has been in read (longtake/data/decode.py:88) for "
        "12 s, on clip clips/a.mp4, and has not moved in 3 rounds; it uses no processor time. "
        "Rank 3 only waits for data, and ranks 0-2, 4 for a collective."
    )


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, "has been in read (longtake/data/decode.py:88) for 4 min 10 s, in the backward pass"),
        (
            {"thread": "checkpoint_0"},
            "gpu07: thread checkpoint_0 of rank 3 (process 4121) has been",
        ),
        ({"doing": "checkpoint"}, "s, at the checkpoint after step 120, and has not moved in 3 r"),
        ({"cpu_share": 0.25}, "and has not moved in 3 rounds; it uses 0.25 of a core."),
        ({"state": "T"}, "rank 3 (process 4121) is stopped (state T: by a signal); it has been in"),
        ({"function": ""}, "has been in the backward pass of step 120 for 4 min 10 s, and has not"),
        (
            {"state": "", "doing": "forward"},
            "is gone: 4 min 10 s ago it was in the forward pass of",
        ),
        (
            {"moved": True, "cpu_share": 1.02},
            "not stuck: it has moved in 3 rounds, and uses a full",
        ),
        (
            {"within": "all_reduce (torch/x.py:1)"},
            ", and there in all_reduce (torch/x.py:1), for 4",
        ),
        ({"waits_in": "collective"}, "; none of the others has joined that collective."),
    ],
)
def test_each_kind_of_culprit_has_its_words(changes: dict[str, Any], words: str) -> None:
    sentence = _sentence(replace(_RANK, **changes))
    assert words in sentence
    assert sentence.startswith("gpu07: ")
    assert sentence.count("rank 3 (process 4121)") == 1


def test_a_node_that_is_silent_is_named() -> None:
    assert _sentence(Suspect("gpu09", 0, "node", None)) == "gpu09 gives no answer."


def test_a_store_that_workers_wait_for_is_named_before_them() -> None:
    """Whatever line they wait in; a worker that a signal stopped is named itself."""
    path = "s3://films/a.mp4 (waiting for its store: s3://films has given nothing for 7 s: refused)"
    one = replace(_WORKER, clip_path=path)
    others = [replace(one, host=f"gpu0{number}") for number in range(5)]
    assert _sentence(one, others[2], _RANK).startswith(
        "The store s3://films has given nothing for 7 s: refused. gpu07: decode worker 4121 of "
        "rank 3 has been waiting for it for 12 s, for clip s3://films/a.mp4, and so has 1 other "
        "worker on gpu02: training continues when the store answers. Also: gpu07: rank 3"
    )
    said = _sentence(one, *others)
    assert "so have 5 other workers on gpu00, gpu01, gpu02 and 2 more nodes: training" in said
    assert "Also" not in said
    assert _sentence(replace(one, state="T")).startswith("gpu07: decode worker 4121 of rank 3 is s")


def test_what_happened_to_clocks_and_links_before_is_named() -> None:
    dump = _still(make_process(10, 0, _COLLECTIVE, "forward"), make_process(11, 1, _SLEEP, "data"))
    step = NodeEvent("gpu03", "clock_stepped", "", "the clock was set back by 2.500 s", 14.0, True)
    found = diagnose(_REQUEST, [dump], [], {}, events=[step])
    said = "gpu03: the clock was set back by 2.500 s, 14 s ago"
    assert found.node_events == (said,)
    assert found.sentence.startswith("gpu07: rank 1 (process 11)")
    assert found.sentence.endswith(f" Recent events of nodes: {said}.")


def test_further_suspects_and_the_flight_recorder_follow() -> None:
    more = [replace(_RANK, rank=rank, pid=rank) for rank in range(6)]
    missing = MissingIn("mine", "nccl:all_reduce", (1, 2)), MissingIn("x", "op", (4,), True)
    said = _sentence(_WORKER, *more, missing=missing, silent=("gpu09",))
    assert "Also: gpu07: rank 0 (process 0) in read" in said
    assert "; 3 more." in said
    assert "No answer came from gpu09." in said
    assert "By the flight recorder ranks 1-2 never joined nccl:all_reduce of mine." in said
    assert "By the flight recorder rank 4 joined and has not finished op of x." in said
