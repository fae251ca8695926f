"""The cost of supervised decode workers, compared with a bare PyAV loop that does the same work.

    python benchmarks/data_decoding.py VIDEOS... [--windows 40] [--rounds 3] [--reads 10000]

VIDEOS are files and folders of files. From each that can be decoded the same windows of 16 frames
are read in two ways, alternately: by the pool, and by processes that each run a bare loop, tuned as
far as PyAV allows (seeks to the keyframe, skips frames that no other refers to, one thread, one
conversion directly to the target size, no result sent to another process). Then one worker reads
many windows, and its memory and open files are measured. Writes
benchmarks/results/data_decoding.md.
"""

import argparse
import multiprocessing
import os
import platform
import random
import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import wait as all_done
from pathlib import Path

import av
import numpy as np
import psutil
from av.video.reformatter import Interpolation, VideoReformatter
from numpy.typing import NDArray

from longtake.data.clip import Media
from longtake.data.decode import Probe, probe
from longtake.data.decode_worker import DecodePool
from longtake.data.window import Window, read_window
from longtake.errors import ClipError

_RESULTS = Path(__file__).parent / "results" / "data_decoding.md"
_NUM_FRAMES, _SHORT_SIDE = 16, 256
_ENDURED_FRAMES, _ENDURED_STARTS = 4, 8  # what might leak is opened and closed just the same
_Run = Callable[[Sequence[Window], int], tuple[float, float]]
_SKIPPING = ("h264", "mpeg1video", "mpeg2video", "mpeg4", "vp8", "vp9")


def main() -> None:
    """Measure throughput, then memory; print and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("videos", type=Path, nargs="+")
    parser.add_argument("--windows", type=int, default=40, help="per clip and round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--reads", type=int, default=10_000)
    asked = parser.parse_args()
    clips = clips_of(asked.videos)
    lines = _throughput(clips, asked.windows, asked.rounds) + _endurance(clips, asked.reads)
    _RESULTS.write_text("\n".join(lines) + "\n", encoding="utf-8")
    print("\n".join(lines))  # noqa: T201


def clips_of(paths: Sequence[Path]) -> list[tuple[Media, Probe]]:
    found = []
    for path in paths:
        for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
            try:
                probed = probe(Media(str(file.absolute())))
            except ClipError:
                continue
            if probed.num_frames >= _NUM_FRAMES and probed.timing:
                found.append((Media(str(file.absolute())), probed))
    return found


def random_window(
    media: Media,
    clip: Probe,
    chance: random.Random,
    num_frames: int = _NUM_FRAMES,
    starts: int | None = None,
) -> Window:
    """A random window; short side scaled to 256, long side cropped to a multiple of 16."""
    assert clip.timing
    start = chance.randrange(starts or clip.num_frames - num_frames + 1)
    keyframe = max((key for key in clip.keyframes if key <= start), default=None)
    scale = _SHORT_SIDE / min(clip.height, clip.width)
    height, width = round(clip.height * scale), round(clip.width * scale)
    return Window(
        identity=clip.identity,
        media=media,
        kind="video",
        stream_index=clip.stream_index,
        rotation=clip.rotation,
        source_height=clip.height,
        source_width=clip.width,
        start=start,
        num_frames=num_frames,
        stride=1,
        timestamps=tuple(clip.timing.of(start + number) for number in range(num_frames)),
        seek_to=None if keyframe is None else clip.timing.of(keyframe),
        scaled_height=height,
        scaled_width=width,
        top=0,
        left=0,
        height=height // 16 * 16,
        width=width // 16 * 16,
        is_flipped=False,
    )


def _bare(window: Window) -> None:
    """A minimal loop that decodes the pixels."""
    reformatter, frames = VideoReformatter(), []
    with av.open(window.media.path) as container:
        stream = container.streams[window.stream_index]
        assert isinstance(stream, av.VideoStream)
        codec = stream.codec_context
        codec.thread_count = 1
        if window.seek_to is not None:
            container.seek(window.seek_to, stream=stream)
        can_skip = codec.codec.canonical_name in _SKIPPING
        is_turned = window.rotation in (90, 270)
        width, height = window.scaled_width, window.scaled_height
        for packet in container.demux(stream):
            if can_skip:
                is_early = packet.pts is not None and packet.pts < window.timestamps[0]
                codec.skip_frame = "NONREF" if is_early else "DEFAULT"
            for frame in packet.decode():
                if frame.pts is not None and frame.pts >= window.timestamps[0]:
                    picture = reformatter.reformat(
                        frame,
                        height if is_turned else width,
                        width if is_turned else height,
                        format="rgb24",
                        interpolation=Interpolation.BICUBIC,
                        threads=1,
                    )
                    frames.append(picture.to_ndarray())
                if len(frames) == window.num_frames:
                    return


def _bare_process(windows: Sequence[Window], start: object, report: object) -> None:
    """Read all windows once `start` is set; report the CPU seconds."""
    assert hasattr(start, "wait")
    assert hasattr(report, "put")
    _bare(windows[0])
    start.wait()
    before = time.process_time()
    for window in windows:
        _bare(window)
    report.put(time.process_time() - before)


def _run_bare(windows: Sequence[Window], processes: int) -> tuple[float, float]:
    """Wall and CPU seconds, without the start."""
    context = multiprocessing.get_context("spawn")
    start, report = context.Barrier(processes + 1), context.SimpleQueue()
    started = [
        context.Process(target=_bare_process, args=(windows[number::processes], start, report))
        for number in range(processes)
    ]
    for process in started:
        process.start()
    start.wait()
    begun = time.perf_counter()
    cpu = sum(report.get() for _ in started)
    wall = time.perf_counter() - begun
    for process in started:
        process.join()
    return wall, cpu


def _run_pool(windows: Sequence[Window], processes: int) -> tuple[float, float]:
    """Wall and CPU seconds of all processes, including this one, without the start."""
    with DecodePool(processes) as pool:
        all_done([pool.submit(windows[0]) for _ in range(4 * processes)])
        before, begun = cpu_seconds(pool), time.perf_counter()
        read_all(pool, windows)
        return time.perf_counter() - begun, cpu_seconds(pool) - before


def read_all(pool: DecodePool, windows: Sequence[Window]) -> None:
    """Read as a training run does: some windows ahead, each freed after its use."""
    ahead: deque[Future[NDArray[np.uint8]]] = deque()
    for window in windows:
        ahead.append(pool.submit(window))
        if len(ahead) > 8:
            ahead.popleft().result()
    for future in ahead:
        future.result()


def cpu_seconds(pool: DecodePool) -> float:
    times = [psutil.Process(pid).cpu_times() for pid in (os.getpid(), *pool.decoding())]
    return float(sum(each.user + each.system for each in times))


def _throughput(clips: Sequence[tuple[Media, Probe]], count: int, rounds: int) -> list[str]:
    lines = [
        "# Decoding in supervised processes",
        "",
        f"`python benchmarks/data_decoding.py`, {platform.machine()}, {os.cpu_count()} cores, PyAV "
        f"{av.__version__}. Windows of {_NUM_FRAMES} frames at random places, the short side "
        f"{_SHORT_SIDE}; medians of {rounds} rounds. Ratios are pool to bare loop: above 1, the "
        "pool is faster.",
        "",
        "| clip | bare loop, per CPU-second | pool | ratio | wall, 1 process | wall, 2 processes |"
        " pool, 2 workers to 1 | bare, 2 to 1 |",
        "|---|---|---|---|---|---|---|---|",
    ]
    chance = random.Random(0)  # noqa: S311 - where windows begin
    mixed = []
    for media, clip in clips:
        windows = [random_window(media, clip, chance) for _ in range(count)]
        mixed += windows[: max(1, count // 4)]
        lines.append(_row(Path(media.path).name, windows, rounds))
        print(lines[-1], flush=True)  # noqa: T201
    if len(clips) > 1:
        chance.shuffle(mixed)
        lines.append(_row("all of them, mixed", mixed, rounds))
    return lines


def _row(name: str, windows: Sequence[Window], rounds: int) -> str:
    runs: tuple[_Run, _Run] = (_run_bare, _run_pool)
    ways: dict[tuple[_Run, int], list[tuple[float, float]]]
    ways = {(run, processes): [] for processes in (1, 2) for run in runs}
    for _ in range(rounds):
        for (run, processes), measured in ways.items():
            measured.append(run(windows, processes))
    wall = {way: statistics.median(each[0] for each in some) for way, some in ways.items()}
    cpu = {way: statistics.median(each[1] for each in some) for way, some in ways.items()}
    bare, pool = len(windows) / cpu[_run_bare, 1], len(windows) / cpu[_run_pool, 1]
    return (
        f"| {name} | {bare:.1f} | {pool:.1f} | {pool / bare:.2f} "
        f"| {wall[_run_bare, 1] / wall[_run_pool, 1]:.2f} "
        f"| {wall[_run_bare, 2] / wall[_run_pool, 2]:.2f} "
        f"| {wall[_run_pool, 1] / wall[_run_pool, 2]:.2f} "
        f"| {wall[_run_bare, 1] / wall[_run_bare, 2]:.2f} |"
    )


def _endurance(clips: Sequence[tuple[Media, Probe]], reads: int) -> list[str]:
    """Memory and open files of one worker, after a tenth of the reads and at the end."""
    chance = random.Random(1)  # noqa: S311 - which clip comes when
    windows = [
        random_window(*chance.choice(clips), chance, _ENDURED_FRAMES, _ENDURED_STARTS)
        for _ in range(reads)
    ]
    with DecodePool(1) as pool:
        read_all(pool, windows[: reads // 10])
        (worker,) = map(psutil.Process, pool.decoding())
        us = psutil.Process()
        before, files = worker.memory_info().rss, (worker.num_fds(), us.num_fds())
        read_all(pool, windows[reads // 10 :])
        after, files_after = worker.memory_info().rss, (worker.num_fds(), us.num_fds())
        incidents = pool.incidents()
    assert not incidents, incidents
    _check(windows[:20])
    resident = f"{before / 2**20:.1f} MiB after a tenth of them, {after / 2**20:.1f} MiB at the end"
    in_parent = f"in the parent {files[1]} and {files_after[1]}"
    return [
        "",
        f"One worker, {reads} windows of {_ENDURED_FRAMES} frames of {len(clips)} clips: resident "
        f"memory {resident}; open files {files[0]} and {files_after[0]} ({in_parent}).",
    ]


def _check(windows: Sequence[Window]) -> None:
    with DecodePool(1) as pool:
        for window in windows:
            assert (pool.submit(window).result() == read_window(window)).all()


if __name__ == "__main__":
    main()
