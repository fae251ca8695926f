"""Who holds up a collective, by real and by made-up flight recorders."""

import os
import pickle
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.monitor.build import make_collective

from longtake.monitor import flight_recorder as flight
from longtake.monitor.flight_recorder import FlightRecorderError, remove_all_files, remove_files
from longtake.node_dir import FLIGHT_FILE_PREFIX, FLIGHT_PIPE_PREFIX
from longtake.parallel.mesh import recorder_environment


def _roots(dumps: dict[int, dict[str, Any]]) -> tuple[int, ...]:
    return tuple(sorted({rank for each in flight.analyse(dumps) for rank in each.causes}))


@pytest.mark.parametrize(
    ("trace", "truth", "reference"),
    [("gpu_error_1st", (12, 14), {12}), ("lock_gil_1st", (9, 14), {9, 14})],
)
def test_real_dumps_name_the_ranks_that_were_made_to_fail(
    material: Path, trace: str, truth: tuple[int, ...], reference: set[int]
) -> None:
    folder = material / "traces" / "fr" / trace
    dumps = {rank: flight.read_file(folder / f"_dump_{rank}") for rank in range(16)}
    assert _roots(dumps) == truth
    blamed = [each for each in flight.analyse(dumps) if each.causes]
    assert {rank for each in blamed for rank in each.causes} == set(truth)
    assert {rank for each in blamed for rank in each.missing_ranks} == reference
    assert blamed[0].description == "EXPERT_MODEL_PARALLEL_GROUP"
    assert blamed[0].op == "nccl:all_to_all"


class _Opens:
    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.system, ("true",)


def test_a_pickle_that_imports_anything_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "rank_0"
    path.write_bytes(pickle.dumps({"entries": [_Opens()]}))
    with pytest.raises(FlightRecorderError, match=r"rank_0 .* it wants posix\.system"):
        flight.read_file(path)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"no pickle",
        pickle.dumps([1]),
        pickle.dumps({"entries": [{"pg_id": 1}]}),
        b"\x80\x04\x95",
    ],
)
def test_what_is_no_dump_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "rank_0").write_bytes(content)
    (tmp_path / "rank_1").write_bytes(pickle.dumps({"entries": []}))
    with pytest.raises(FlightRecorderError, match="rank_0"):
        flight.read_file(tmp_path / "rank_0")
    dumps, troubles = flight.read_folders([tmp_path, tmp_path / "absent"])
    assert list(dumps) == [1]
    assert len(troubles) == 1


def test_asking_passes_over_pipes_that_nobody_reads(tmp_path: Path) -> None:
    prefix = recorder_environment(tmp_path)["TORCH_NCCL_DEBUG_INFO_PIPE_FILE"]
    for rank in (1, 2, 3):
        os.mkfifo(f"{prefix}{rank}.pipe")
    reads = [os.open(f"{prefix}{rank}.pipe", os.O_RDONLY | os.O_NONBLOCK) for rank in (1, 3)]
    full = os.open(f"{prefix}3.pipe", os.O_WRONLY | os.O_NONBLOCK)
    with suppress(BlockingIOError):
        while True:
            os.write(full, bytes(2**16))
    assert flight.request_files(tmp_path, range(4)) == [1]
    assert os.read(reads[0], 9) == b"1"
    for descriptor in (*reads, full):
        os.close(descriptor)


def test_only_dumps_written_since_are_collected(tmp_path: Path) -> None:
    """A dump of an earlier stall is left where it is, whatever the clocks say."""
    written = [
        Path(f"{recorder_environment(tmp_path)['TORCH_FR_DUMP_TEMP_FILE']}{rank}")
        for rank in (0, 1)
    ]
    assert written[0].name == f"{FLIGHT_FILE_PREFIX}0"
    for path, moment in zip(written, (1000, 2000), strict=True):
        path.write_bytes(path.name.encode())
        os.utime(path, (moment, moment))
    target = tmp_path / "token.fr"
    before = flight.file_versions(tmp_path, range(3))
    assert flight.copy_files(tmp_path, range(3), target, before) == []
    assert not target.exists()
    os.utime(written[1], (1500, 1500))  # the clock was set back meanwhile
    assert flight.copy_files(tmp_path, range(3), target, before) == [1]
    again = tmp_path / "again"
    again.write_bytes(b"")
    os.utime(again, (1000, 1000))
    again.rename(written[0])  # another file, within the clock's resolution
    assert flight.copy_files(tmp_path, range(3), tmp_path / "more", before) == [0, 1]
    assert [path.name for path in target.iterdir()] == ["rank_1"]
    written[0].unlink()
    written[0].symlink_to(written[1])  # a link could give any file of the user away
    assert flight.copy_files(tmp_path, [0], tmp_path / "linked", {}) == []


def test_what_dead_ranks_have_left_is_taken_away(tmp_path: Path) -> None:
    for rank in (0, 1, 12):
        (tmp_path / f"{FLIGHT_FILE_PREFIX}{rank}").touch()
        os.mkfifo(tmp_path / f"{FLIGHT_PIPE_PREFIX}{rank}.pipe")
    (tmp_path / f"{FLIGHT_FILE_PREFIX}3.pickle").touch()
    (tmp_path / "watcher.lock").touch()
    pipe = os.open(tmp_path / f"{FLIGHT_PIPE_PREFIX}1.pipe", os.O_RDONLY | os.O_NONBLOCK)
    remove_files(tmp_path, [0, 1])
    living = {f"{FLIGHT_FILE_PREFIX}1", f"{FLIGHT_PIPE_PREFIX}1.pipe"}
    others = {f"{FLIGHT_FILE_PREFIX}3.pickle", "watcher.lock"}
    twelve = {f"{FLIGHT_FILE_PREFIX}12", f"{FLIGHT_PIPE_PREFIX}12.pipe"}
    assert {path.name for path in tmp_path.iterdir()} == living | others | twelve
    remove_all_files(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == living | others
    os.close(pipe)
    remove_all_files(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == others


# A run of made-up ranks: a program is a list of collectives, each of a group. A rank enqueues its
# collectives ahead of its GPU, which does them in order, each when all members have come to it.


def _dumps(
    program: list[int], groups: list[tuple[int, ...]], ends: dict[int, int], ahead: int
) -> tuple[dict[int, dict[str, Any]], set[int]]:
    ranks = sorted({rank for group in groups for rank in group})
    mine = {
        rank: [at for at, group in enumerate(program) if rank in groups[group]] for rank in ranks
    }
    enqueued, done = dict.fromkeys(ranks, 0), dict.fromkeys(ranks, 0)
    moved = True
    while moved:
        moved = False
        for rank in ranks:
            most = min(len(mine[rank]), done[rank] + ahead, ends.get(rank, len(program)))
            moved |= enqueued[rank] < most
            enqueued[rank] = max(enqueued[rank], most)
        for at, group in enumerate(program):
            members = groups[group]
            at_it = [r for r in members if mine[r][done[r] : done[r] + 1] == [at]]
            if len(at_it) == len(members) and all(enqueued[r] > done[r] for r in members):
                for rank in members:
                    done[rank] += 1
                moved = True
    stopped = {r for r, end in ends.items() if enqueued[r] == end < len(mine[r]) and done[r] == end}
    return {
        rank: _dump(rank, mine[rank], program, groups, done[rank], enqueued[rank]) for rank in ranks
    }, stopped


def _dump(
    rank: int,
    mine: list[int],
    program: list[int],
    groups: list[tuple[int, ...]],
    done: int,
    last: int,
) -> dict[str, Any]:
    counts = [program[: at + 1].count(program[at]) for at in mine]
    own = [number for number, group in enumerate(groups) if rank in group]
    entries = [
        make_collective(
            record_id=place,
            pg_id=own.index(program[mine[place]]),
            process_group=(str(program[mine[place]]), ""),
            collective_seq_id=counts[place],
        )
        for place in range(done, last)
    ]
    status = {}
    for number, group in enumerate(own):
        seen = [
            count for at, count in zip(mine[:last], counts, strict=False) if program[at] == group
        ]
        status[str(number)] = {"last_enqueued_collective": max(seen, default=0)}
    config = {
        str(group): {"name": str(group), "desc": "", "ranks": str(list(groups[group]))}
        for group in own
    }
    return {"pg_config": config, "pg_status": status, "entries": entries}


@st.composite
def _runs(draw: st.DrawFn) -> tuple[list[int], list[tuple[int, ...]], dict[int, int], int]:
    size = draw(st.integers(2, 8))
    some = st.sets(st.integers(0, size - 1), min_size=2)
    groups = [
        tuple(range(size)),
        *(tuple(sorted(draw(some))) for _ in range(draw(st.integers(0, 4)))),
    ]
    program = draw(st.lists(st.integers(0, len(groups) - 1), min_size=1, max_size=25))
    ends = draw(st.dictionaries(st.integers(0, size - 1), st.integers(0, 10), max_size=3))
    return [*program, 0], groups, ends, draw(st.integers(1, 6))


@settings(max_examples=200, deadline=None)
@given(_runs())
def test_roots_are_the_ranks_that_stopped(
    run: tuple[list[int], list[tuple[int, ...]], dict[int, int], int],
) -> None:
    """Over random groups, programs and stops: of those that others wait for, exactly these."""
    dumps, stopped = _dumps(*run)
    found = set(_roots(dumps))
    assert found <= stopped
    if stopped and any(dump["entries"] for dump in dumps.values()):
        assert found
    for each in flight.analyse(dumps):
        assert set(each.missing_ranks).isdisjoint(each.stalled_ranks)
        assert stopped & set(each.missing_ranks) <= found


def test_all_at_the_same_collective_is_nobody_s_fault() -> None:
    dumps, _ = _dumps([0, 0], [(0, 1, 2, 3)], {}, 1)
    assert flight.analyse(dumps) == []
    for rank in dumps:
        dumps[rank] = _dump(rank, [0, 1], [0, 0], [(0, 1, 2, 3)], 0, 1)
    assert _roots(dumps) == ()
    (only,) = flight.analyse(dumps)
    assert only.stalled_ranks == (0, 1, 2, 3)
    assert only.missing_ranks == only.causes == ()


def test_a_rank_that_alone_has_not_finished_is_a_root() -> None:
    dumps = {rank: _dump(rank, [0], [0], [(0, 1, 2)], int(rank != 1), 1) for rank in range(3)}
    assert _roots(dumps) == (1,)


def test_a_rank_without_a_dump_has_never_joined_as_far_as_one_knows() -> None:
    dumps, _ = _dumps([0, 0], [(0, 1, 2)], {1: 1}, 2)
    del dumps[1]
    assert _roots(dumps) == (1,)


_PROGRAM = """
import os, pickle, sys, time
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _dump_fr_trace
store = dist.FileStore("store", 2)
dist.init_process_group("gloo", store=store, rank=int(os.environ["RANK"]), world_size=2)
group = dist.new_group([0, 1], group_desc="mine")
dist.all_reduce(torch.ones(3))
dist.all_reduce(torch.ones(4), group=group)
if os.environ["RANK"] == "0":
    work = dist.all_reduce(torch.ones(5), group=group, async_op=True)
def is_noted():
    entries = pickle.loads(_dump_fr_trace())["entries"]
    return [each["retired"] for each in entries[:2]] == [True, True]
while not is_noted():
    time.sleep(0.01)
open("aside_" + sys.argv[1], "wb").write(_dump_fr_trace())
os.rename("aside_" + sys.argv[1], sys.argv[1])
while not (os.path.exists("rank_0") and os.path.exists("rank_1")):
    time.sleep(0.05)
os._exit(0)
"""


@pytest.mark.slow
def test_torch_s_own_recorder_is_understood(tmp_path: Path) -> None:
    size = recorder_environment(tmp_path)["TORCH_FR_BUFFER_SIZE"]
    started = [
        subprocess.Popen(
            [sys.executable, "-c", _PROGRAM, f"rank_{rank}"],
            env=os.environ
            | {"TORCH_FR_BUFFER_SIZE": size, "RANK": str(rank), "OMP_NUM_THREADS": "1"},
            cwd=tmp_path,
        )
        for rank in range(2)
    ]
    try:
        assert [each.wait(240) for each in started] == [0, 0]
    finally:
        for each in started:
            each.kill()
    dumps, troubles = flight.read_folders([tmp_path])
    assert not troubles
    assert _roots(dumps) == (1,)
    (found,) = flight.analyse(dumps)
    assert (found.description, found.op) == ("mine", "gloo:all_reduce")
    assert (found.missing_ranks, found.stalled_ranks) == ((1,), (0,))
