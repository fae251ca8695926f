"""How fast `longtake board` answers for a very long run, and what it costs a running training.

    python -m benchmarks.board [--steps 1000000] [--rounds 7] [--windows 24] [--folder FOLDER]

Writes a run of that many steps with 200 checkpoints, 24 prompts sampled from each, and health
records of 125 nodes with 8 ranks each; serves it with `longtake board`, and measures from outside:
the start, the cold index, each page with the index warm, the server's memory, how soon a new step
is sent and drawn, and how much longer the steps of a training take while a page of it is open. The
page is drawn by Chromium where Playwright and Chromium are there. Needs about 1.5 GB below
`--folder`. Writes benchmarks/results/board.md.
"""

import argparse
import http.client
import json
import os
import platform
import re
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import psutil
from benchmarks.show_metrics import _append, _make_run

from longtake.board.pages import PAGES
from longtake.checkpoint.files import commit, describe_files
from longtake.demo.shapes import write_clips
from longtake.evaluation_dir import EvaluationDirectory, ServerDirectory
from longtake.fsio import append_json, now, write_json
from longtake.inspection.series import SERIES
from longtake.node_dir import NodeDirectory
from longtake.process import program
from longtake.run_dir import RunDirectory

_RESULTS = Path(__file__).parent / "results" / "board.md"
_CHECKPOINTS, _PROMPTS, _NODES, _RANKS_PER_NODE, _HEALTH_LINES = 200, 24, 125, 8, 300
_LIVE_STEPS, _NEW_STEPS, _WINDOW_SECONDS = 2000, 8, 5.0
_CHROMIUM = ("chromium", "chromium-browser", "google-chrome")
_FLAGS = ("--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking")
_RECIPE = """\
out = "{out}"
[data]
catalog = "{catalog}"
buckets = [{{ num_frames = 8, height = 32, width = 32 }}]
workers = 0
[model]
family = "tubelet"
config = {{ hidden_size = 96, num_heads = 4, num_blocks = 4 }}
[training]
steps = 1000000
global_batch_size = 4
device = "cpu"
precision = "fp32"
[checkpoint]
every = 100000
[tracking]
tensorboard = false
"""
_WRITTEN = """
import sys
from pathlib import Path
from benchmarks.show_metrics import _make_run
_make_run(Path(sys.argv[1]), int(sys.argv[2]))
"""


def main() -> None:
    """Write the runs, measure, print and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=7, help="how often each page is asked for")
    parser.add_argument("--windows", type=int, default=24, help="of 5 s, half of them with a page")
    parser.add_argument("--folder", type=Path, help="where the runs are written", default=None)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=asked.folder) as text:
        folder = Path(text)
        os.environ["XDG_CACHE_HOME"] = str(folder / "cache")
        _write_runs(folder / "runs", asked.steps)
        rows = [*_answers(folder / "runs", asked.steps, asked.rounds)]
        rows += _new_steps(folder / "runs")
        costs = [*_costs(folder, asked.windows)]
    report = _report(asked, rows, costs)
    _RESULTS.write_text(report)
    print(report)  # noqa: T201 - a script


# --- The runs ---------------------------------------------------------------------------------


def _write_runs(folder: Path, steps: int) -> None:
    folder.mkdir()
    # In a process of its own: this one stays small.
    command = [sys.executable, "-c", _WRITTEN, str(folder / "long"), str(steps)]
    subprocess.run(command, check=True)  # noqa: S603 - our own
    run = RunDirectory(folder / "long")
    every = max(1, steps // _CHECKPOINTS)
    saved = range(every, every * _CHECKPOINTS + 1, every)
    for step in saved:
        path = run.checkpoint_path(step)
        path.mkdir(parents=True)
        write_json(path / "trainer.json", {"global_step": step})
        commit(path, describe_files(path, ["trainer.json"]))
        run.append_event("checkpoint", step=step, path=f"checkpoints/{path.name}")
    _write_samples(run, saved)
    for number in range(_NODES):
        _write_node(run, number, steps)
    _make_run(folder / "live", _LIVE_STEPS)


def _write_samples(run: RunDirectory, saved: Sequence[int]) -> None:
    directory = EvaluationDirectory(run)
    preset = {"name": "large", "num_frames": 8, "height": 32, "width": 32, "fps": 8.0}
    names = ("brightness", "contrast", "saturation", "sharpness", "flicker", "motion", "adherence")
    directory.preset_path("large").parent.mkdir(parents=True)
    prompts = [f"a red circle of size {number}" for number in range(_PROMPTS)]
    write_json(directory.preset_path("large"), {**preset, "prompts": prompts, "seeds": [0]})
    written = run.path / "written"
    write_clips(written, num_clips=1, seed=0)
    clip = next(written.glob("*.mp4")).read_bytes()
    shutil.rmtree(written)
    for place, step in enumerate(saved):
        result = directory.result_path("large", step)
        result.mkdir()
        measures = dict.fromkeys(names, 1.0 + 0.001 * place)
        videos = []
        for number, prompt in enumerate(prompts):
            file = f"{number:02d}_s0.mp4"
            (result / file).write_bytes(clip)
            videos.append({"file": file, "prompt": prompt, "seed": 0, "measures": measures})
        scores = {
            "preset": "large",
            "step": step,
            "key": "8ca45db6",
            "weights": "ema/main",
            "time": now(),
            "server": "server-1",
            "settings": preset,
            "videos": videos,
            "measures": measures,
            "alarms": [],
            "seconds": {"sample": 9.0, "measure": 1.0},
        }
        write_json(result / "scores.json", scores)
        server = ServerDirectory(run, "server-1")
        server.append_event("evaluation_finished", preset="large", step=step)


def _write_node(run: RunDirectory, number: int, steps: int) -> None:
    host = f"node{number:03d}"
    node = NodeDirectory(run, host)
    node.append_event("watcher_started", pid=4000)
    ranks = [
        {
            "pid": 5000 + local,
            "role": "rank",
            "rank": number * _RANKS_PER_NODE + local,
            "local_rank": local,
            "world_size": _NODES * _RANKS_PER_NODE,
            "launch": "73e88faa",
            "phase": "forward",
            "step": steps,
            "alive": True,
            "limit": 300.0,
            "seconds": 0.1,
        }
        for local in range(_RANKS_PER_NODE)
    ]
    health = _health(number, 0)
    heartbeat = {
        "host": host,
        "pid": 4000,
        "beat": 9,
        "launch": "73e88faa",
        "ranks": ranks,
        "workers": [],
        "health": health,
        "addresses": [],
        "stalls": 0,
        "stall": "",
        "watch_seconds_late": 0.0,
        "by_hand": False,
        "ended": False,
        "time": now(),
    }
    node.write_heartbeat(heartbeat)
    for line in range(_HEALTH_LINES):
        append_json(node.health_path, {"time": now(), **_health(number, line)})


def _health(number: int, line: int) -> dict[str, float]:
    wave = 0.01 * ((7 * number + 3 * line) % 10)
    found = {
        "load_average": 4.0 + wave,
        "disk_free_bytes:run": 9e11,
        "disk_write_seconds:run": wave,
    }
    for device in range(_RANKS_PER_NODE):
        found |= {
            f"gpu_power_watts:{device}": 650.0 + wave,
            f"gpu_temperature_celsius:{device}": 61.0 + wave,
            f"gpu_sm_clock_mhz:{device}": 1700.0 - wave,
            f"gpu_utilisation_share:{device}": 0.99,
            f"step_work_seconds:{device}": 0.5 + 0.01 * wave,
            f"link_speed_bits_per_second:mlx5_{device}": 4e11,
        }
    return found


# --- The server -------------------------------------------------------------------------------


@dataclass
class _Server:
    """A `longtake board`, and a connection to it."""

    port: int
    pid: int
    started_seconds: float
    connection: http.client.HTTPConnection

    def get(self, path: str) -> tuple[float, bytes]:
        """Seconds until the whole answer was there, and the answer."""
        begun = time.perf_counter()
        status = 202  # while metrics.jsonl is being read
        while status == 202:
            self.connection.request("GET", path)
            answer = self.connection.getresponse()
            status, body = answer.status, answer.read()
        assert answer.status == 200, (path, answer.status, body[:500])
        return time.perf_counter() - begun, body

    def megabytes(self, name: str) -> float:
        """`VmRSS`: resident now. `VmHWM`: the most so far."""
        status = Path(f"/proc/{self.pid}/status").read_text()
        found = re.search(rf"{name}:\s+(\d+) kB", status)
        assert found is not None
        return int(found[1]) * 1024 / 1e6

    def cpu_seconds(self) -> float:
        times = psutil.Process(self.pid).cpu_times()
        return float(times.user + times.system)


@contextmanager
def _serving(folder: Path, cores: Sequence[int] = ()) -> Iterator[_Server]:
    """A board of a folder, which has answered its first request for a page."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = program("longtake", "board", str(folder), "--port", str(port))
    begun = time.perf_counter()
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as process:  # noqa: S603 - our own
        if cores:
            os.sched_setaffinity(process.pid, cores)
        try:
            connection = _connected(port)
            server = _Server(port, process.pid, 0.0, connection)
            server.get("/compare")
            server.started_seconds = time.perf_counter() - begun
            yield server
        finally:
            process.terminate()
            process.wait(30)


def _connected(port: int) -> http.client.HTTPConnection:
    until = time.monotonic() + 60.0
    while True:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
        try:
            connection.connect()
        except OSError:
            assert time.monotonic() < until
            time.sleep(0.01)
        else:
            return connection


@dataclass
class _Row:
    """One line of the table."""

    what: str
    values: list[float]
    target: str = ""
    unit: str = "ms"


def _answers(folder: Path, steps: int, rounds: int) -> Iterator[_Row]:
    series = f"/series/long?names={','.join(SERIES)}&pixels=1000"
    pages = {
        "all runs": "/",
        **{f"page {title} of the run": f"/run/{name}/long" for name, title in PAGES.items()},
        "two runs over each other": "/compare?run=long&run=live",
        "all series over all steps": series,
        "all series over 2,000 steps": f"{series}&first={steps // 2}&last={steps // 2 + 2000}",
    }
    found: dict[str, list[float]] = {}
    for _ in range(min(rounds, 5)):
        for kept in Path(os.environ["XDG_CACHE_HOME"]).rglob("*.rows"):
            kept.unlink()
        with _serving(folder) as server:
            used = server.cpu_seconds()
            seconds, _ = server.get("/run/overview/long")
            found.setdefault("cold", []).append(steps / seconds)
            used = server.cpu_seconds() - used
            found.setdefault("cold CPU", []).append(steps / used)
            found.setdefault("cold HWM", []).append(server.megabytes("VmHWM"))
            pages = {name: path for name, path in pages.items() if _is_there(server, path)}
    for _ in range(rounds):
        with _serving(folder) as server:
            found.setdefault("start", []).append(1e3 * server.started_seconds)
            for name, path in pages.items():
                found.setdefault(f"{name}, first time", []).append(1e3 * server.get(path)[0])
                again = [1e3 * server.get(path)[0] for _ in range(3)]
                found.setdefault(f"{name}, again", []).append(statistics.median(again))
            found.setdefault("RSS", []).append(server.megabytes("VmRSS"))
            found.setdefault("HWM", []).append(server.megabytes("VmHWM"))
    yield _Row("from the command to the first answer", found["start"], "< 2,000")
    cold = "page Run, nothing in the cache: lines of metrics a second"
    yield _Row(cold, found["cold"], ">= 120,000", "lines/s")
    yield _Row("the same in a second of one core", found["cold CPU"], "", "lines/s")
    for name in pages:
        target = "< 300" if name == "all runs" else "< 1,000"
        yield _Row(f"{name}, first time", found[f"{name}, first time"], target)
        yield _Row(f"{name}, again", found[f"{name}, again"], target)
    yield _Row("memory of the server after all pages", found["RSS"], "< 300", "MB")
    yield _Row("the most until then", found["HWM"], "", "MB")
    yield _Row("the most with nothing in the cache", found["cold HWM"], "", "MB")


def _is_there(server: _Server, path: str) -> bool:
    """Whether there is such a page yet."""
    server.connection.request("GET", path)
    answer = server.connection.getresponse()
    answer.read()
    return answer.status == 200


# --- What is new ------------------------------------------------------------------------------


@dataclass
class _Client:
    """What an open page asks for: the stream of a run, and its series after each new step."""

    port: int
    run: str
    is_open: threading.Event = field(default_factory=threading.Event)
    ends: threading.Event = field(default_factory=threading.Event)
    heard: dict[int, float] = field(default_factory=dict)
    """When each number of steps was sent."""

    def listen(self, *, fetches: bool) -> None:
        """Until `ends`; while `is_open` is not set, there is no connection."""
        path = f"/series/{self.run}?names=loss,loss_smoothed,grad_norm,weight_norm,learning_rate"
        while not self.ends.is_set():
            if not self.is_open.wait(0.2):
                continue
            stream = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
            stream.request("GET", f"/live/{self.run}")
            lines = stream.getresponse()
            fetching = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
            while self.is_open.is_set() and not self.ends.is_set():
                line = lines.readline()
                if line.startswith(b"data: "):
                    steps = json.loads(line[6:])["steps"]
                    if steps not in self.heard and fetches:
                        fetching.request("GET", path, headers={"accept-encoding": "gzip"})
                        fetching.getresponse().read()
                    self.heard.setdefault(steps, time.perf_counter())
            stream.close()
            fetching.close()


def _new_steps(folder: Path) -> Iterator[_Row]:
    """How long after a line was appended it is sent, and drawn."""
    run = RunDirectory(folder / "live")
    with _serving(folder) as server:
        server.get("/run/overview/live")
        client = _Client(server.port, "live")
        client.is_open.set()
        thread = threading.Thread(target=client.listen, kwargs={"fetches": False}, daemon=True)
        thread.start()
        while not client.heard:
            time.sleep(0.01)
        with _drawing(f"http://127.0.0.1:{server.port}/run/overview/live") as is_drawn:
            sent, drawn = [], []
            for _ in range(_NEW_STEPS):
                step = max(client.heard) + 1
                time.sleep(0.3)
                begun = time.perf_counter()
                _append(run, 1)
                if is_drawn is not None:
                    is_drawn(step)
                    drawn.append(1e3 * (time.perf_counter() - begun))
                while step not in client.heard:
                    time.sleep(0.005)
                sent.append(1e3 * (client.heard[step] - begun))
        client.ends.set()
        thread.join(30)
    yield _Row("a new step is sent by the stream of the run", sent, "< 3,000")
    if drawn:
        yield _Row("a new step is drawn by Chromium", drawn, "< 3,000")


@contextmanager
def _drawing(url: str) -> Iterator[Callable[[int], object] | None]:
    """Waits until the page in Chromium has drawn a step; None: there is no Chromium."""
    program_path = next(filter(None, map(shutil.which, _CHROMIUM)), None)
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        program_path = None
    if program_path is None:
        yield None
        return
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program_path, args=list(_FLAGS))
        page = browser.new_page()
        page.goto(url)
        page.wait_for_selector("#charts[data-drawn]")
        yield lambda step: page.wait_for_selector(f"#charts[data-drawn='{step}']")
        browser.close()


# --- What it costs a training -----------------------------------------------------------------


@dataclass(frozen=True)
class _Cost:
    """Steps of a training with a page open and without."""

    where: str
    step_ms: float
    ratios: list[float]
    """Medians of the steps of a window with the page open, over those of the windows around it."""
    board_cores: float
    """CPU seconds of the board a second, while the page was open."""


def _costs(folder: Path, windows: int) -> Iterator[_Cost]:
    clips = folder / "clips"
    write_clips(clips, num_clips=8, seed=0)
    catalog = folder / "catalog.parquet"
    index = program("longtake", "data", "index", str(clips), "--out", str(catalog))
    captions = ["--captions", str(clips / "captions.jsonl")]
    subprocess.run([*index, *captions], check=True, stderr=subprocess.DEVNULL)  # noqa: S603
    cores = sorted(os.sched_getaffinity(0))
    places: list[tuple[str, Sequence[int], Sequence[int]]] = [("unpinned", (), ())]
    if len(cores) > 1:
        places.insert(0, ("a core each", cores[:1], cores[1:2]))
    for number, (where, trains_on, serves_on) in enumerate(places):
        runs = folder / f"trained_{number}"
        runs.mkdir()
        recipe = runs / "recipe.toml"
        recipe.write_text(_RECIPE.format(out=runs / "run", catalog=catalog))
        yield _cost(where, recipe, windows, trains_on, serves_on)


def _cost(
    where: str, recipe: Path, windows: int, trains_on: Sequence[int], serves_on: Sequence[int]
) -> _Cost:
    """Train, and open and close a page of the run every few seconds."""
    run = RunDirectory(recipe.parent / "run")
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = program("longtake", "train", str(recipe))
    pinned = [*(["taskset", "-c", str(trains_on[0])] if trains_on else []), *command]
    nothing = subprocess.DEVNULL
    with subprocess.Popen(  # noqa: S603 - our own
        pinned, env=environment, stdout=nothing, stderr=nothing
    ) as training:
        try:
            while not run.metrics_path.exists():
                assert training.poll() is None
                time.sleep(0.1)
            time.sleep(10.0)  # libraries warm up
            with _serving(recipe.parent, serves_on) as server:
                return _opened_and_closed(where, run, server, windows)
        finally:
            training.terminate()
            training.wait(120)


def _opened_and_closed(where: str, run: RunDirectory, server: _Server, windows: int) -> _Cost:
    client = _Client(server.port, "run")
    thread = threading.Thread(target=client.listen, kwargs={"fetches": True}, daemon=True)
    thread.start()
    server.get("/run/overview/run")
    spans, cpu_seconds = [], 0.0
    for number in range(windows):
        if number % 2:
            client.is_open.set()
        time.sleep(0.5)  # until the stream is connected, or closed
        begun, used = time.time(), server.cpu_seconds()
        time.sleep(_WINDOW_SECONDS)
        spans.append((begun, time.time()))
        if number % 2:
            cpu_seconds += server.cpu_seconds() - used
            client.is_open.clear()
            time.sleep(1.5)
    client.ends.set()
    thread.join(30)
    rows = [(each["time"], each["step_seconds"]) for each in run.metric_lines()]
    medians = [
        statistics.median(seconds for at, seconds in rows if begun < at < ended)
        for begun, ended in spans
    ]
    ratios = [
        medians[place] / statistics.fmean((medians[place - 1], medians[place + 1]))
        for place in range(1, windows - 1, 2)
    ]
    opened = sum(ended - begun for begun, ended in spans[1::2])
    return _Cost(where, 1e3 * statistics.median(medians), ratios, cpu_seconds / opened)


# --- The table --------------------------------------------------------------------------------


def _report(asked: argparse.Namespace, rows: Sequence[_Row], costs: Sequence[_Cost]) -> str:
    load = os.getloadavg()[0]
    busy = f" The load average was {load:.1f}." if load > (os.cpu_count() or 1) else ""
    table = "\n".join(
        f"| {each.what} | {each.unit} | {statistics.median(each.values):,.0f} "
        f"| {min(each.values):,.0f} to {max(each.values):,.0f} | {each.target} |"
        for each in rows
    )
    trained = "\n".join(
        f"| {each.where} | {each.step_ms:.1f} "
        f"| {100 * (statistics.median(each.ratios) - 1):+.2f} % "
        f"| {_quartiles(each.ratios)} | {100 * each.board_cores:.2f} % |"
        for each in costs
    )
    ranks = _NODES * _RANKS_PER_NODE
    return f"""# The board, on a very long run

`python -m benchmarks.board --steps {asked.steps} --rounds {asked.rounds} --windows \
{asked.windows}`: {asked.steps:,} steps, {_CHECKPOINTS} checkpoints, {_PROMPTS} prompts sampled \
from each, {ranks:,} ranks on {_NODES} nodes with {_HEALTH_LINES} lines of health each; on \
{os.cpu_count()} cores of {platform.machine()}. Each round starts a new server with the index in \
the cache, except where nothing is in it; files are in the page cache.{busy}

| | | median | least to most | target |
|---|---|---|---|---|
{table}

A training in steps of some milliseconds on one thread, with a page of it opened and closed every \
{_WINDOW_SECONDS:.0f} s: the stream of new steps is read, and all series of the page are fetched \
after each. Steps of a window with the page open are compared with those of the windows before and \
after it.

| training and board | median step (ms) | page open | quartiles | the board's share of a core |
|---|---|---|---|---|
{trained}
"""


def _quartiles(ratios: Sequence[float]) -> str:
    low, _, high = statistics.quantiles(ratios, n=4)
    return f"{100 * (low - 1):+.2f} to {100 * (high - 1):+.2f} %"


if __name__ == "__main__":
    main()
