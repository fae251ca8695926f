"""How long it takes to find one hanging process among 170,000.

    python benchmarks/stacks_at_scale.py [--ranks 10000] [--workers 16] [--rounds 3]

Writes the dumps that the watchers of 1,250 nodes of 8 ranks would write into a run directory (1
GB): all ranks but one wait in an all-reduce, that one waits for data, and one of its decode workers
is frozen. Then reads and groups them, and makes the watcher's diagnosis. Writes
benchmarks/results/stacks_at_scale.md. Two minutes on one CPU core, and 4 GB of memory.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast

from longtake.fsio import read_json
from longtake.monitor.asked import RunDumps
from longtake.monitor.diagnosis import diagnose
from longtake.monitor.dumps import StackInterner, group_processes, traces
from longtake.node_dir import DumpRequest, NodeDump, ProcessDump
from longtake.stacks import Stack

_RESULTS = Path(__file__).parent / "results" / "stacks_at_scale.md"
_RANKS_PER_NODE = 8
_PACKAGES = "/opt/venv/lib/python3.11/site-packages/"
_PYTHON = "/usr/lib/python3.11/"
_OURS = f"{_PACKAGES}longtake/"
_RUNPY = (("_run_code", "<frozen runpy>", 88), ("_run_module_as_main", "<frozen runpy>", 198))
_THREAD = (
    ("Thread.run", f"{_PYTHON}threading.py", 982),
    ("Thread._bootstrap_inner", f"{_PYTHON}threading.py", 1045),
    ("Thread._bootstrap", f"{_PYTHON}threading.py", 1002),
)
_TRAIN: Stack = (
    ("train_steps", f"{_OURS}training/loop.py", 77),
    ("_train_with_rollbacks", f"{_OURS}training/train.py", 169),
    ("_train", f"{_OURS}training/train.py", 137),
    ("train", f"{_OURS}training/train.py", 94),
    ("train", f"{_OURS}cli/app.py", 120),
    ("get_callback.<locals>.wrapper", f"{_PACKAGES}typer/main.py", 1445),
    ("Context.invoke", f"{_PACKAGES}typer/_click/core.py", 490),
    ("Command.invoke", f"{_PACKAGES}typer/_click/core.py", 748),
    ("TyperGroup.invoke", f"{_PACKAGES}typer/core.py", 1227),
    ("_main", f"{_PACKAGES}typer/core.py", 332),
    ("Typer.__call__", f"{_PACKAGES}typer/main.py", 1126),
    ("main", f"{_OURS}cli/app.py", 55),
    ("<module>", f"{_OURS}__main__.py", 6),
    *_RUNPY,
)
_FSDP = f"{_PACKAGES}torch/distributed/fsdp/_fully_shard/"
_IN_ALL_REDUCE: Stack = (
    ("all_reduce", f"{_PACKAGES}torch/distributed/distributed_c10d.py", 3252),
    ("_exception_logger.<locals>.wrapper", f"{_PACKAGES}torch/distributed/c10d_logger.py", 83),
    ("foreach_reduce", f"{_FSDP}_fsdp_collectives.py", 658),
    ("context_decorator.<locals>.decorate_context", f"{_PACKAGES}torch/utils/_contextlib.py", 124),
    ("FSDPParamGroup.post_backward", f"{_FSDP}_fsdp_param_group.py", 688),
    ("DisableContext.__call__.<locals>._fn", f"{_PACKAGES}torch/_dynamo/eval_frame.py", 1446),
    ("RegisterPostBackwardFunction.backward", f"{_FSDP}_fsdp_param_group.py", 1126),
    ("BackwardCFunction.apply", f"{_PACKAGES}torch/autograd/function.py", 325),
    ("_engine_run_backward", f"{_PACKAGES}torch/autograd/graph.py", 979),
    ("backward", f"{_PACKAGES}torch/autograd/__init__.py", 395),
    ("Tensor.backward", f"{_PACKAGES}torch/_tensor.py", 623),
    ("compute_gradients", f"{_OURS}training/loop.py", 76),
    *_TRAIN,
)
_AT_DATA: Stack = (
    ("Condition.wait", f"{_PYTHON}threading.py", 327),
    ("Future.result", f"{_PYTHON}concurrent/futures/_base.py", 451),
    ("PixelBuffer.wait", f"{_OURS}data/decoding_source.py", 110),
    ("BatchAssembler._wait", f"{_OURS}data/assembler.py", 185),
    ("BatchAssembler.assemble", f"{_OURS}data/assembler.py", 105),
    ("Loader.batches", f"{_OURS}data/loader.py", 295),
    *_TRAIN,
)
_POOL: Stack = (
    ("_PollLikeSelector.select", f"{_PYTHON}selectors.py", 415),
    ("wait", f"{_PYTHON}multiprocessing/connection.py", 947),
    ("WorkerPool._wait", f"{_OURS}data/workers.py", 280),
    ("WorkerPool._supervise", f"{_OURS}data/workers.py", 236),
    *_THREAD,
)
_WRITER: Stack = (
    ("Condition.wait", f"{_PYTHON}threading.py", 331),
    ("Queue.get", f"{_PYTHON}queue.py", 180),
    ("_AsyncWriterThread.run", f"{_PACKAGES}tensorboard/summary/writer/event_file_writer.py", 244),
    *_THREAD[1:],
)
_WORKER: Stack = (("main", f"{_OURS}data/decode_worker.py", 60), *_RUNPY)
_IDLE: Stack = (
    ("TcpConnection._recv", f"{_PYTHON}multiprocessing/connection.py", 395),
    ("TcpConnection._recv_bytes", f"{_PYTHON}multiprocessing/connection.py", 430),
    ("_ConnectionBase.recv", f"{_PYTHON}multiprocessing/connection.py", 250),
    *_WORKER,
)
_DECODING: Stack = (
    ("read", f"{_OURS}data/window.py", 61),
    ("_answer", f"{_OURS}data/decode_worker.py", 71),
    *_WORKER,
)
_FROZEN: Stack = (("_frames", f"{_OURS}data/decode.py", 88), *_DECODING)


def main() -> None:
    """Write, read, group and diagnose; print the seconds of each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=10_000)
    parser.add_argument("--workers", type=int, default=16, help="of each rank")
    parser.add_argument("--rounds", type=int, default=3)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as aside:
        files = list(_written(Path(aside), asked.ranks, asked.workers, asked.rounds))
        num_bytes = sum(file.stat().st_size for file in files)
        lines = [
            "# Where 10,000 ranks are",
            "",
            f"`python benchmarks/stacks_at_scale.py --ranks {asked.ranks} --workers "
            f"{asked.workers} --rounds {asked.rounds}`: {asked.ranks * (1 + asked.workers):,} "
            f"processes of {len(files):,} nodes, {asked.rounds} rounds, {num_bytes / 1e9:.2f} GB "
            "of JSON; processor seconds of one core.",
            "",
            "| what | seconds |",
            "|---|---|",
            *_measured(files, asked.ranks, asked.rounds),
        ]
    _RESULTS.write_text("\n".join(lines) + "\n", encoding="utf-8")
    print("\n".join(lines))  # noqa: T201


def _measured(files: Sequence[Path], ranks: int, rounds: int) -> Iterator[str]:
    begun = time.process_time()
    groups = group_processes(RunDumps(files=tuple(files)).dumps())["groups"]
    seconds = time.process_time() - begun
    yield f"| read and grouped, as by `longtake stacks` ({len(groups)} groups) | {seconds:.1f} |"
    reader, begun = _Reader(files), time.process_time()
    still = sum(not each.has_moved for dump in reader.dumps() for each in traces([dump]))
    seconds = time.process_time() - begun - reader.seconds
    yield f"| of it reading one file of each node | {reader.seconds:.1f} |"
    yield f"| comparing all {rounds} rounds ({still:,} processes have not moved) | {seconds:.1f} |"
    yield from _diagnosed(files, ranks)


def _diagnosed(files: Sequence[Path], ranks: int) -> Iterator[str]:
    reader = _Reader(files)
    interner = StackInterner()
    dumps = [interner.intern(dump) for dump in reader.dumps()]
    alarm = {**_heartbeat("rank", _frozen_rank(ranks), 7, "data", 9.0), "host": "", "limit": 6.0}
    request = {"token": "x", "time": "", "by": "", "reason": "stall", "stall": alarm}
    begun = time.process_time()
    diagnosis = diagnose(cast("DumpRequest", request), dumps, [], {})
    seconds = time.process_time() - begun
    yield f"| the diagnosis, all processes and rounds | {seconds:.1f} |"
    yield ""
    yield f"The diagnosis: {diagnosis.sentence}"


class _Reader:
    """Reads the nodes' files one by one, and sums the seconds."""

    def __init__(self, files: Sequence[Path]) -> None:
        self.seconds = 0.0
        self._files = files

    def dumps(self) -> Iterator[NodeDump]:
        for file in self._files:
            begun = time.process_time()
            dump = cast("NodeDump", read_json(file))
            self.seconds += time.process_time() - begun
            yield dump


def _frozen_rank(ranks: int) -> int:
    return ranks * 7 // 9


def _written(folder: Path, ranks: int, workers: int, rounds: int) -> Iterator[Path]:
    for node in range(-(-ranks // _RANKS_PER_NODE)):
        mine = range(node * _RANKS_PER_NODE, min(ranks, (node + 1) * _RANKS_PER_NODE))
        dump: NodeDump = {
            "token": "x",
            "time": "",
            "host": f"gpu{node:04d}",
            "reason": "stall",
            "launch": "abcdefgh",
            "rounds": [
                {
                    "seconds": 1.5 * number,
                    "processes": [
                        each for rank in mine for each in _of_rank(rank, ranks, workers, number)
                    ],
                }
                for number in range(rounds)
            ],
            "missing": [],
        }
        file = folder / f"{dump['host']}.json"
        file.write_text(json.dumps(dump))
        yield file


def _of_rank(rank: int, ranks: int, workers: int, number: int) -> Iterator[ProcessDump]:
    pid = 1000 + rank % _RANKS_PER_NODE * (workers + 1)
    waits = 9.0 + 1.5 * number
    is_frozen = rank == _frozen_rank(ranks)
    main_thread = _thread("MainThread", _AT_DATA if is_frozen else _IN_ALL_REDUCE)
    threads = [main_thread, _thread("decoding", _POOL), _thread("Thread-1", _WRITER)]
    heartbeat = _heartbeat("rank", rank, pid, "data" if is_frozen else "backward", waits)
    yield _process(pid, "rank", rank, threads, heartbeat)
    for worker in range(1, workers + 1):
        if is_frozen and worker == 1:
            stack, heartbeat = (
                _FROZEN,
                _heartbeat("decode", rank, pid + 1, "decode", waits + 1, "bad.mp4"),
            )
        elif worker == 2:  # is at work, at another line in each round
            line = (rank + 7 * number) % 40
            stack = (("_frames", f"{_OURS}data/decode.py", 60 + line), *_DECODING)
            clip = f"clip_{rank}_{number}.mp4"
            heartbeat = _heartbeat("decode", rank, pid + worker, "decode", 0.1, clip)
        else:
            stack, heartbeat = _IDLE, _heartbeat("decode", rank, pid + worker, "idle", waits)
        yield _process(pid + worker, "decode", rank, [_thread("MainThread", stack)], heartbeat)


def _process(
    pid: int, role: Any, rank: int, threads: list[dict[str, Any]], heartbeat: dict[str, Any]
) -> ProcessDump:
    return {
        "pid": pid,
        "ppid": 1,
        "role": role,
        "rank": rank,
        "command": f"/opt/venv/bin/python -P -m longtake.data.decode_worker /dev/shm {rank} {pid}",
        "state": "S",
        "cpu_seconds": 100.0,
        "method": "py-spy --nonblocking",
        "threads": threads,
        "raw": "",
        "heartbeat": heartbeat,
    }


def _thread(name: str, stack: Stack) -> dict[str, Any]:
    frames = [{"function": call[0], "file": call[1], "line": call[2]} for call in stack]
    return {"name": name, "is_active": False, "has_gil": False, "frames": frames}


def _heartbeat(
    role: str, rank: int, pid: int, phase: str, seconds: float, clip: str = ""
) -> dict[str, Any]:
    return {
        "role": role,
        "pid": pid,
        "rank": rank,
        "local_rank": rank % _RANKS_PER_NODE,
        "world_size": 10_000,
        "launch": "abcdefgh" if role == "rank" else "",
        "step": 812,
        "steps_done": 812,
        "phase": phase,
        "seconds": seconds,
        "detail": clip or "81 frames of 480x832",
        "path_of_clip": f"/data/clips/{clip}" if clip else "",
        "is_settled": True,
    }


if __name__ == "__main__":
    main()
