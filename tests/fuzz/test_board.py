"""The board of a damaged run: pages with what is readable, or a sentence; nothing is written.

Named damages and generated ones, as commands get them. One server outlives all of them.
"""

import json
import os
import random
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from http.client import HTTPConnection
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest
from tests.fuzz import damages as d
from tests.fuzz.generators import SHARES, cases_of
from tests.fuzz.mutations import DEEP, replace_with
from tests.fuzz.oracle import CANARY

from longtake.process import program

_SEED = int(os.environ.get("LONGTAKE_FUZZ_SEED", "2"))
_NUM_CASES = int(os.environ.get("LONGTAKE_FUZZ_CASES", "120")) // 6
_MANY_CASES = 160
_SECONDS = 60.0
_PAGES = ("overview", "samples", "data", "nodes", "plan")
_PATHS = (
    *("/", *(f"/run/{page}/run" for page in _PAGES)),
    *("/run/overview/run?log=evaluate.log", "/run/samples/run?preset=tiny&step=4"),
    *("/run/data/run?step=3", "/run/data/run?around=3", "/series/run", "/series/run?x=time"),
    *("/compare?run=run&run=whole", "/live/run", "/live"),
)
_UNSAFE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]|<script(?![ >])")
_OPENED = re.compile(r"<script(?P<options>[^>]*)>")


class _Board:
    """`longtake board` of a folder, and a run in it that is damaged anew for each case."""

    def __init__(self, folder: Path, process: "subprocess.Popen[str]", port: int) -> None:
        self.folder, self.process, self.port = folder, process, port

    def get(self, path: str) -> tuple[int, str, bytes]:
        """Return status, headers and body; of a stream, its first event."""
        with closing(HTTPConnection("127.0.0.1", self.port, timeout=_SECONDS)) as connection:
            connection.request("GET", path, headers={"Host": "localhost", "Connection": "close"})
            response = connection.getresponse()
            if path.startswith("/live"):
                lines = iter(response.readline, b"")
                body = b"".join(takewhile(lambda line: line != b"\n", lines))
            else:
                body = response.read()
        return response.status, str(response.headers).lower(), body


@pytest.fixture(scope="session")
def board(base: Path, _home: Path) -> Iterator[_Board]:
    folder = _home / "boards"
    folder.mkdir()
    shutil.copytree(base / "run", folder / "whole", symlinks=True)
    command = program("longtake", "board", str(folder), "--port", "0")
    environment = {**os.environ, "XDG_CACHE_HOME": str(_home / "cache")}
    with (
        (_home / "complaints").open("w+") as complaints,
        subprocess.Popen(command, stderr=complaints, text=True, env=environment) as process,
    ):
        while not (found := re.search(r"http://\S+:(\d+)/", _text(_home / "complaints"))):
            assert process.poll() is None
            time.sleep(0.05)
        yield _Board(folder, process, int(found[1]))
        process.terminate()
        process.wait(_SECONDS)


def _text(path: Path) -> str:
    return path.read_text(errors="replace")


def _complaints(board: _Board, place: Path) -> list[str]:
    """List the problems of the board of a place's run."""
    assert board.process.poll() is None, f"the board ended: {board.process.poll()}"
    run, found = board.folder / "run", list[str]()
    subprocess.run(["chmod", "-R", "u+rwX", str(place)], check=False, capture_output=True)
    (place / "run").rename(run)
    try:
        before = _state(board.folder)
        for path in _PATHS:
            found += [f"{path}: {each}" for each in _wrong_with(path, *board.get(path))]
        if _state(board.folder) != before:
            found.append("wrote in the folder of runs")
        found += [f"made {each}" for each in board.folder.rglob(CANARY)]
        found += [f"made {each}" for each in Path.cwd().glob(CANARY)]
    finally:
        run.rename(place / "run")
    return found


def _state(folder: Path) -> dict[str, tuple[int, int, int]]:
    found = ((str(path), path.lstat()) for path in folder.rglob("*"))
    return {name: (each.st_mode, each.st_size, each.st_mtime_ns) for name, each in found}


def _wrong_with(path: str, status: int, head: str, body: bytes) -> Iterator[str]:
    if status >= 500 or status not in (200, 400, 404):
        yield f"status {status}: {body[-400:]!r}"
    if "content-security-policy: default-src 'none'" not in head:
        yield "no policy"
    if "text/html" in head:
        text = body.decode()
        if status != 200 and '<p class="problem"' not in text:
            yield f"status {status} without a sentence"
        if found := _UNSAFE.search(text):
            yield f"has {text[max(0, found.start() - 60) : found.end() + 20]!r}"
        for script in _OPENED.finditer(text):
            options = script["options"]
            if "src=" not in options and 'type="application/json"' not in options:
                yield f"has {script[0]}"
    elif "event-stream" in head:
        json.loads(body.partition(b"data: ")[2].partition(b"\n")[0])
    else:
        json.loads(body, parse_constant=_refuse)


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


@pytest.fixture
def look(board: _Board, place: Path) -> Callable[[str], None]:
    def look(about: str) -> None:
        found = _complaints(board, place)
        assert not found, f"{about}\n" + "\n".join(found)

    return look


_SCORES = "run/evaluations/tiny/step_00000004/scores.json"
_RECORDS = (
    *("run/run.json", "run/recipe.toml", "run/metrics.jsonl", "run/events.jsonl"),
    *("run/rollbacks.jsonl", "run/guard/step_00000002_0.json", "run/plan.json", _SCORES),
    *("run/evaluations/tiny/preset.json", "run/nodes/node7/heartbeat.json"),
    *("run/nodes/node7/health.jsonl", "run/nodes/node7/events.jsonl"),
    *("run/nodes/node7/stacks/t_1.json", "run/ledger/launch_0000/launch.json"),
    *("run/ledger/launch_0000/rank_0000.bin", "run/catalogs/*.parquet", "run/requests/t_1.json"),
    *("run/evaluations/claims/tiny/*/0.json", f"{d.STEP}/COMMITTED", f"{d.STEP}/trainer.json"),
    *("run/lease/0.json", "run/evaluations/tiny/step_00000004/00_s0.mp4"),
)
_FOLDERS = (
    *("run/nodes", "run/nodes/node7", "run/nodes/node7/stacks", "run/evaluations"),
    *("run/evaluations/tiny", "run/evaluations/tiny/step_00000004", "run/ledger", "run/catalogs"),
    *("run/checkpoints", d.STEP, "run/guard", "run/lease", "run/components"),
)
_HOSTILE = "</script><script>alert(1)</script>\x1b]0;t\x07\x9b2J\u202e\u2028\0<img src=x onerror=a>"


def _some(items: Sequence[Any], count: int, about: str) -> Sequence[Any]:
    """All of them in a long run, else some that are chosen by the seed."""
    if _NUM_CASES > _MANY_CASES:
        return items
    return random.Random(f"{_SEED}/{about}").sample(items, count)  # noqa: S311 - it is repeatable


@pytest.mark.parametrize("name", _RECORDS)
def test_a_record_may_hold_anything(name: str, place: Path, look: Callable[[str], None]) -> None:
    for path in d.named(place, name)[:1]:
        whole = path.read_bytes() if path.is_file() else b""
        texts = (b"[]", b"{}", b"5", b"\xff\xfe\0", b"[" * DEEP, b'{"a":' * DEEP, whole[:50])
        for text in _some(texts, 2, name):
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(text)
            look(f"{path.name} is {text[:60]!r}")


@pytest.mark.parametrize("kind", ["pipe", "folder", "device", "loop", "dangling", "nothing"])
def test_anything_may_be_where_a_file_or_folder_was(
    kind: str, base: Path, place: Path, look: Callable[[str], None]
) -> None:
    for name in _some((*_RECORDS, *_FOLDERS), 8, kind):
        for path in d.named(place, name)[:1]:
            if path.exists():
                path.rename(place / "kept")
                replace_with(path, kind)
                look(f"{kind} at {name}")
                replace_with(path, "nothing")
                (place / "kept").rename(path)


@pytest.mark.parametrize("name", _RECORDS)
def test_every_text_in_a_record_is_escaped(
    name: str, place: Path, look: Callable[[str], None]
) -> None:
    for path in d.named(place, name)[:1]:
        if path.suffix in (".json", ".jsonl") and path.is_file():
            lines = path.read_text().splitlines() if path.suffix == ".jsonl" else [path.read_text()]
            for change in (_longer, _replaced):
                changed = (json.dumps(_with_texts(json.loads(line), change)) for line in lines)
                path.write_text("\n".join(changed) + "\n")
                look(f"{path.name}: {change.__name__}")
                path.write_text("\n".join(lines) + "\n")


def _longer(text: str) -> str:
    return text + _HOSTILE


def _replaced(_: str) -> str:
    return _HOSTILE


def _with_texts(value: Any, change: Callable[[str], str], key: str = "") -> Any:
    """All texts changed, but for those by which a record is known."""
    if isinstance(value, dict):
        return {name: _with_texts(each, change, name) for name, each in value.items()}
    if isinstance(value, list):
        return [_with_texts(each, change, key) for each in value]
    is_changed = isinstance(value, str) and key not in ("time", "event", "kind", "created")
    return change(value) if is_changed else value


def test_names_of_files_and_folders_are_escaped(place: Path, look: Callable[[str], None]) -> None:
    run, name = place / "run", "<script>alert(1)\x1b[2J\u202e"
    for folder in ("nodes/node7", "evaluations/tiny", "evaluations/servers/x", "components/x"):
        path = run / folder
        path.mkdir(parents=True, exist_ok=True)
        shutil.copytree(path, path.with_name(name))
        shutil.copytree(path, path.with_name(os.fsdecode(b"\xff\xfe")))
    for file in ("evaluations/tiny/step_00000004/00_s0.mp4", "nodes/node7/watcher.log"):
        (run / file).with_name(f"{name}.log").write_bytes(_HOSTILE.encode())
        (run / file).with_name(f"{name}.mp4").write_bytes(_HOSTILE.encode())
    (run / "evaluate.log").write_bytes(_HOSTILE.encode())
    look("names")


_OTHERS = {
    *("sources", "catalogs", "recipes_parsed", "recipes_trained", "arguments", "disks", "resume")
}
_OF_A_RUN = {name: each for name, each in SHARES.items() if name not in _OTHERS}


@pytest.mark.parametrize(("name", "number"), cases_of(_OF_A_RUN, _NUM_CASES))
def test_any_damage_leaves_pages(
    name: str, number: int, place: Path, look: Callable[[str], None]
) -> None:
    chance = random.Random(f"{_SEED}/board/{name}/{number}")  # noqa: S311 - it is repeatable
    generate, _ = SHARES[name]
    generate(chance, place)
    look(f"LONGTAKE_FUZZ_SEED={_SEED} {name}-{number}")
