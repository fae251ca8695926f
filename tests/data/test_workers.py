"""Whatever happens to a worker process, a future gets its result or a reason."""

import gc
import importlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil
import pytest
from numpy.typing import NDArray
from tests.build import wait_until
from tests.data.build import clip, run_python

from longtake import stacks
from longtake.data.buckets import window_of
from longtake.data.clip import Media
from longtake.data.decode_worker import DecodePool
from longtake.data.encode import write_video
from longtake.data.window import Crop, Window, read_window
from longtake.data.workers import WorkerIncident, WorkerPool
from longtake.errors import ClipError, DataError
from longtake.heartbeat import Heartbeat, HeartbeatDir, page_path, read_heartbeat

_SECONDS = 240  # for what must not take long, on a machine that may be busy

Pixels = NDArray[np.uint8]


def _window_of(path: Path, num_frames: int = 4, size: int = 32) -> Window:
    one = clip(0, identity=path.stem, media=Media(str(path)), width=48, height=32)
    return window_of(one, range(num_frames), Crop(size, size, 0, 0), size, size)


@pytest.fixture(scope="module")
def windows(tmp_path_factory: pytest.TempPathFactory) -> list[Window]:
    """Six clips of noise, read in sizes that grow and shrink."""
    folder, made = tmp_path_factory.mktemp("clips"), []
    for number, size in enumerate((16, 64, 32, 256, 16, 48)):
        frames = np.random.default_rng(number).integers(0, 256, (8, 32, 48, 3), np.uint8)
        write_video(folder / f"{number}.mp4", frames, fps=8)
        made.append(_window_of(folder / f"{number}.mp4", 2 + number, size))
    return made


@pytest.fixture(scope="module")
def long(tmp_path_factory: pytest.TempPathFactory) -> Window:
    """A window that takes some tenths of a second."""
    path = tmp_path_factory.mktemp("long") / "long.mp4"
    frames = np.random.default_rng(0).integers(0, 256, (8, 32, 48, 3), np.uint8)
    write_video(path, np.tile(frames, (50, 1, 1, 1)), fps=8)
    return _window_of(path, 400, 128)


@pytest.fixture
def pipe(tmp_path: Path) -> Window:
    """A clip that nobody ever writes: to open it hangs."""
    os.mkfifo(tmp_path / "pipe.mp4")
    return _window_of(tmp_path / "pipe.mp4")


@pytest.fixture
def pool() -> Iterator[DecodePool]:
    """Two workers with five seconds for each window."""
    with DecodePool(2, sample_timeout_seconds=5.0) as pool:
        yield pool


def _results(futures: list[Future[Pixels]]) -> list[Pixels]:
    return [future.result(_SECONDS) for future in futures]


def _assert_read(pool: DecodePool, windows: list[Window]) -> None:
    found = _results([pool.submit(window) for window in windows])
    for pixels, window in zip(found, windows, strict=True):
        np.testing.assert_array_equal(pixels, read_window(window))


def _put_in_place_of(pipe: Window, window: Window) -> None:
    path = Path(pipe.media.path)
    aside = path.with_suffix(".aside")
    aside.write_bytes(Path(window.media.path).read_bytes())
    aside.replace(path)  # at no moment is there no file


def _await_busy(pool: DecodePool, but: int = 0) -> int:
    """The process id of a worker that decodes."""
    pid: int = wait_until(
        lambda: next((pid for pid, what in pool.decoding().items() if what and pid != but), 0)
    )
    return pid


def _await_all_busy(pool: DecodePool) -> None:
    wait_until(lambda: len(pool.decoding()) == 2 and all(pool.decoding().values()))


def _is_gone(pid: int) -> bool:
    return stacks.state_of(pid) in ("", "Z")


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_pixels_are_those_of_reading_here(windows: list[Window], workers: int) -> None:
    with DecodePool(workers) as pool:
        _assert_read(pool, windows * 3)
        first, second = _results([pool.submit(windows[0]), pool.submit(windows[0])])
        first[:] = 0
        np.testing.assert_array_equal(second, read_window(windows[0]))
        assert pool.incidents() == []


def test_windows_are_begun_in_order(windows: list[Window]) -> None:
    done: list[int] = []
    with DecodePool(1) as pool:
        futures = [pool.submit(window) for window in windows]
        for number, future in enumerate(futures):
            future.add_done_callback(lambda _, number=number: done.append(number))  # type: ignore[misc] # mypy cannot infer a lambda with a default
        _results(futures)
        _results([pool.submit(windows[0])])  # the last one's callback has run by then
    assert done == list(range(len(windows)))


@pytest.mark.parametrize("workers", [0, 1])
def test_a_damaged_clip_fails_as_it_does_here(windows: list[Window], workers: int) -> None:
    gone = replace(windows[0], media=Media("/nowhere/clip.mp4"))
    with pytest.raises(ClipError) as here:
        read_window(gone)
    with DecodePool(workers) as pool:
        with pytest.raises(ClipError) as there:
            pool.submit(gone).result(_SECONDS)
        assert there.value.args == here.value.args
        _assert_read(pool, windows[:1])
        assert pool.incidents() == []


def test_a_clip_that_fails_once_is_read(windows: list[Window], tmp_path: Path) -> None:
    data = Path(windows[0].media.path).read_bytes()
    late = tmp_path / "late.mp4"
    os.mkfifo(late)  # opening it waits; what is written is no video, and by then it is a file
    with DecodePool(1, sample_timeout_seconds=_SECONDS) as pool:
        future = pool.submit(replace(windows[0], media=Media(str(late))))
        with late.open("wb") as writer:
            late.unlink()
            late.write_bytes(data)
            writer.write(b"no video")
        np.testing.assert_array_equal(future.result(_SECONDS), read_window(windows[0]))
        assert pool.incidents() == []


def test_a_decoder_that_hangs_is_dumped_killed_and_replaced(
    pool: DecodePool, windows: list[Window], pipe: Window
) -> None:
    begun = time.monotonic()
    future = pool.submit(pipe)
    _assert_read(pool, windows)
    reason = r"decoding made no progress for 5 s, twice; last seen in .*\.py:"
    with pytest.raises(ClipError, match=reason):
        future.result(_SECONDS)
    incidents = pool.incidents()
    assert [incident.kind for incident in incidents] == ["stalled", "stalled"]
    assert len({incident.pid for incident in incidents}) == 2
    for incident in incidents:
        assert (incident.identity, incident.path) == ("pipe", str(pipe.media))
        assert 5 <= incident.seconds <= time.monotonic() - begun
        assert "in opened" in incident.stack.where
        assert _is_gone(incident.pid)
    assert pool.incidents() == []
    _assert_read(pool, windows)


def test_a_stopped_worker_is_found_by_the_deadline(
    pool: DecodePool, long: Window, windows: list[Window]
) -> None:
    futures = [pool.submit(long) for _ in range(3)]
    pid = _await_busy(pool)
    os.kill(pid, signal.SIGSTOP)
    for pixels in _results(futures):
        np.testing.assert_array_equal(pixels, read_window(long))
    (incident,) = pool.incidents()
    assert (incident.kind, incident.pid, incident.stack.state) == ("stalled", pid, "T")
    assert _is_gone(pid)
    _assert_read(pool, windows)


@pytest.mark.parametrize("name", ["SIGKILL", "SIGSEGV"])
def test_a_worker_that_dies_is_replaced(windows: list[Window], pipe: Window, name: str) -> None:
    with DecodePool(1, sample_timeout_seconds=_SECONDS) as pool:
        future = pool.submit(pipe)
        pid = _await_busy(pool)
        wait_until(lambda: "in opened" in stacks.dump_process(pid).where)
        _put_in_place_of(pipe, windows[0])
        os.kill(pid, signal.Signals[name])
        np.testing.assert_array_equal(future.result(_SECONDS), read_window(pipe))
        (incident,) = pool.incidents()
    assert (incident.kind, incident.pid, incident.identity) == ("died", pid, "pipe")
    assert f"was ended by {name}" in incident.reason
    assert ("out of memory" in incident.reason) == (name == "SIGKILL")
    assert ("in opened" in incident.stack.where) == (name == "SIGSEGV")


def test_a_sample_that_kills_twice_fails(pipe: Window) -> None:
    with DecodePool(2, sample_timeout_seconds=_SECONDS) as pool:
        future = pool.submit(pipe)
        first = _await_busy(pool)
        os.kill(first, signal.SIGKILL)
        os.kill(_await_busy(pool, but=first), signal.SIGKILL)
        with pytest.raises(ClipError, match=r"was ended by SIGKILL .*, twice"):
            future.result(_SECONDS)
        assert len(pool.incidents()) == 2


def test_what_a_stopped_worker_was_given_is_in_its_page(
    windows: list[Window], tmp_path: Path
) -> None:
    """It says itself that it is idle until it has read its next item."""
    with DecodePool(1, _SECONDS, heartbeats=HeartbeatDir(tmp_path, 3)) as pool:
        pool.submit(windows[0]).result(_SECONDS)
        (pid,) = pool.decoding()
        path = page_path(tmp_path, "decode", 3, pid)
        assert _page(path).given == ""
        wait_until(lambda: _page(path).phase == "idle")  # which it says after it has answered
        os.kill(pid, signal.SIGSTOP)
        waiting = pool.submit(windows[1])
        wait_until(lambda: _page(path).given == str(windows[1].media))
        assert _page(path).phase == "idle"
        os.kill(pid, signal.SIGCONT)
        waiting.result(_SECONDS)
        wait_until(lambda: _page(path).given == "")


def _page(path: Path) -> Heartbeat:
    page = read_heartbeat(path)
    assert page is not None
    return page


def test_an_idle_worker_that_dies_is_replaced(pool: DecodePool, windows: list[Window]) -> None:
    _assert_read(pool, windows)
    for pid in pool.decoding():
        os.kill(pid, signal.SIGKILL)
    incidents: list[WorkerIncident] = []
    while len(incidents) < 2:
        incidents += wait_until(pool.incidents)
    assert {(each.kind, each.identity) for each in incidents} == {("died", "")}
    _assert_read(pool, windows)


def test_interrupts_are_the_parents(pool: DecodePool, windows: list[Window]) -> None:
    _assert_read(pool, windows)
    for pid in pool.decoding():
        os.kill(pid, signal.SIGINT)
        os.kill(pid, signal.SIGTERM)
    _assert_read(pool, windows)
    assert pool.incidents() == []


def test_workers_that_cannot_start_are_an_error(
    windows: list[Window], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "av.py").write_text("raise ImportError('libav is not for this machine')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    before = set(psutil.Process().children())
    with DecodePool(2) as pool:
        reason = r"No decoding process.*ImportError: libav is not for.*data\.workers=0"
        with pytest.raises(DataError, match=reason):
            pool.submit(windows[0]).result(_SECONDS)
        with pytest.raises(DataError, match="No decoding process can be started"):
            pool.submit(windows[0])
    assert set(psutil.Process().children()) <= before


def test_what_was_cancelled_is_not_read(windows: list[Window], pipe: Window) -> None:
    with DecodePool(1, sample_timeout_seconds=_SECONDS) as pool:
        cancelled, wanted = pool.submit(pipe), pool.submit(windows[1])  # the worker still starts
        assert cancelled.cancel()
        np.testing.assert_array_equal(wanted.result(_SECONDS), read_window(windows[1]))
        with pytest.raises(CancelledError):
            cancelled.result(_SECONDS)
        assert pool.incidents() == []


def test_nothing_is_left_when_it_is_closed(windows: list[Window], pipe: Window) -> None:

    def open_files() -> set[tuple[str, str]]:
        found = set()
        for file in Path("/proc/self/fd").iterdir():
            with suppress(FileNotFoundError):  # the listing's own
                found.add((file.name, str(file.readlink())))
        return found

    gc.collect()  # what other tests have left is not closed meanwhile
    before, children = open_files(), set(psutil.Process().children())
    pool = DecodePool(2)
    _assert_read(pool, windows * 5)
    steady = open_files()
    _assert_read(pool, windows * 5)
    assert open_files() <= steady
    futures = [pool.submit(window) for window in (pipe, pipe, *windows)]
    _await_all_busy(pool)
    pool.close()
    pool.close()
    for future in futures:
        with pytest.raises(RuntimeError, match="the pool is closed"):
            future.result(_SECONDS)
    with pytest.raises(RuntimeError, match="the pool is closed"):
        pool.submit(windows[0])
    assert open_files() <= before
    assert set(psutil.Process().children()) <= children


_PROGRAM = """
import os, sys, time
from longtake.data.clip import Media
from longtake.data.decode_worker import DecodePool
from longtake.data.conditioning import ConditioningPixels
from longtake.data.window import Crop

whole = Crop(32, 32, 0, 0)
window = ConditioningPixels("picture", "x", Media(sys.argv[1]), 32, 48, whole, 32, 32, False)
print("main", os.getpid(), flush=True)
pool = DecodePool(2, sample_timeout_seconds=6.0)
futures = [pool.submit(window) for _ in range(2)]
while not (len(pool.decoding()) == 2 and all(pool.decoding().values())):
    time.sleep(0.005)
print(*pool.decoding(), flush=True)
while not (incidents := pool.incidents()):
    time.sleep(0.005)
print(incidents[0].seconds, flush=True)
pool.close()
"""


def _start_program(tmp_path: Path, window: Window) -> tuple[subprocess.Popen[str], list[int]]:
    program = tmp_path / "program.py"
    program.write_text(_PROGRAM)
    command = [sys.executable, str(program), window.media.path]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout
    assert process.stdout.readline() == f"main {process.pid}\n"
    return process, [int(pid) for pid in process.stdout.readline().split()]


def test_no_worker_outlives_its_parent(tmp_path: Path, pipe: Window) -> None:
    process, workers = _start_program(tmp_path, pipe)
    os.kill(workers[0], signal.SIGSTOP)
    process.kill()
    process.communicate()
    wait_until(lambda: all(_is_gone(pid) for pid in workers))


def test_the_time_in_which_the_program_was_stopped_does_not_count(
    tmp_path: Path, pipe: Window
) -> None:
    process, workers = _start_program(tmp_path, pipe)
    for pid in (*workers, process.pid):
        os.kill(pid, signal.SIGSTOP)
    time.sleep(5)
    for pid in (process.pid, *workers):
        os.kill(pid, signal.SIGCONT)
    said, _ = process.communicate(timeout=_SECONDS)
    assert float(said) > 6 + 5 - 1  # it looks at the clock once a second
    assert process.returncode == 0


_TASKS = """
import os, time
from longtake.data.workers import Task
from longtake.errors import ClipError, DataError

class Odd(Task):
    doing = "counting"
    silence_seconds = 3.0

    def do(self, item, progress):
        if item == "slow":
            end = time.monotonic() + 7
            while time.monotonic() < end:
                time.sleep(0.1)
                progress()
        if item == "clip":
            raise ClipError("a.mp4", "is cut off")
        if item == "data":
            raise DataError("no item can be counted")
        if item == "bug":
            raise ValueError("three")
        if item == "exit":
            raise SystemExit("cannot go on")
        return f"{item} by {os.getpid()}"

    def lost(self, item, reason):
        if item == "exit":
            raise DataError(reason)
        return reason
"""


@pytest.fixture
def counting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[WorkerPool[str, str]]:
    """One process of a task that does what its items say."""
    (tmp_path / "odd_tasks.py").write_text(_TASKS)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "odd_tasks", raising=False)
    with WorkerPool(importlib.import_module("odd_tasks").Odd(), 1) as pool:
        yield pool


def test_progress_keeps_a_slow_item_alive(counting: WorkerPool[str, str]) -> None:
    assert counting.submit("slow").result(_SECONDS).startswith("slow by ")
    assert counting.incidents() == []


def test_an_items_own_error_is_its_result_and_an_error_of_all_is_raised(
    counting: WorkerPool[str, str],
) -> None:
    before = counting.submit("one").result(_SECONDS)
    assert counting.submit("clip").result(_SECONDS) == "is cut off"
    assert counting.submit("bug").result(_SECONDS) == "counting raised ValueError: three"
    with pytest.raises(DataError, match=r"^no item can be counted$"):
        counting.submit("data").result(_SECONDS)
    assert counting.submit("one").result(_SECONDS) == before
    assert counting.incidents() == []


def test_what_lost_raises_is_raised(counting: WorkerPool[str, str]) -> None:
    reason = r"^the counting process ended with exit status 1 \(cannot go on\)$"
    with pytest.raises(DataError, match=reason):
        counting.submit("exit").result(_SECONDS)
    assert counting.submit("one").result(_SECONDS)


def test_a_worker_started_by_hand_says_what_it_is() -> None:
    command = [sys.executable, "-m", "longtake.data.decode_worker"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_SECONDS)
    assert (ended.returncode, ended.stdout) == (1, "")
    assert ended.stderr == "This is a part of longtake's worker pool, which starts it itself.\n"


def test_a_worker_imports_neither_torch_nor_pyarrow() -> None:
    """There are many workers, and each would take their memory and seconds to start."""
    program = "import sys, longtake.data.decode_worker; print(*sys.modules)"
    assert {"torch", "pyarrow", "ray"}.isdisjoint(run_python(program).split())
