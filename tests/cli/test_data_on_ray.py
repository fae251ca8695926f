"""The verbs of `longtake data` on a real Ray of two workers: the same, byte for byte."""

import fcntl
import json
import logging
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from itertools import islice
from pathlib import Path
from types import ModuleType

import psutil
import pyarrow.parquet as pq
import pytest
from tests.build import TINY_WAN, MakeRecipe, cache_entries, wait_until
from tests.cli.conftest import Call

from longtake import config
from longtake.data import cache_fill, tasks
from longtake.data.catalog import Catalog
from longtake.data.clip import Item, Media
from longtake.data.decode import Probe, ProbeTask
from longtake.data.scores import MotionScore
from longtake.errors import ClipError, DataError

pytestmark = [pytest.mark.drill, pytest.mark.slow]


_COLOURS = ("red", "blue")
_OWN = """
import os
import time
from longtake.errors import ClipError

def slow(clip):
    time.sleep(0.05)
    return clip.num_frames + len(clip.caption) / 7

def picky(clip):
    if "red" in clip.caption:
        raise ClipError(clip.path, "too red")
    if "blue" in clip.caption:
        os._exit(1)
    return len(clip.caption)
"""


@pytest.fixture(scope="module")
def ray(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModuleType]:
    """Ray on this machine with two cores, connected; all verbs find it."""
    token = tmp_path_factory.mktemp("ray") / "token"
    token.write_text(secrets.token_hex(32))  # else it leaves one in the home folder
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_AUTH_MODE", "token")
        patch.setenv("RAY_AUTH_TOKEN_PATH", str(token))
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        patch.delenv("RAY_ADDRESS", raising=False)
        module = pytest.importorskip(
            "ray", reason="Ray is not installed: pip install 'longtake[ray]'"
        )
        started = module.init(
            "local",
            num_cpus=2,
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.CRITICAL,
            object_store_memory=100 * 2**20,
        )
        patch.setenv("RAY_ADDRESS", started.address_info["gcs_address"])
        yield module
        module.shutdown()


@pytest.fixture(scope="module")
def clips(shapes_catalog: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of 64 captioned clips and one more that is cut off."""
    folder = tmp_path_factory.mktemp("clips") / "clips"
    shutil.copytree(shapes_catalog.parent / "clips", folder)
    whole = min(folder.glob("*.mp4"))
    (folder / "cut.mp4").write_bytes(whole.read_bytes()[:400])
    return folder


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A module of functions of one's own, where one works."""
    (tmp_path / "own_scores.py").write_text(_OWN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "own_scores", raising=False)


def _contents(folder: Path) -> dict[str, bytes]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


@pytest.mark.usefixtures("ray", "own")
def test_catalogs_are_the_same_whatever_made_them(clips: Path, tmp_path: Path, call: Call) -> None:
    said: dict[str, list[object]] = {"here": [], "far": []}
    for name, on in (("here", ()), ("far", ("--on", "ray"))):
        out = tmp_path / name / "catalog.parquet"
        scores = ("nouns", "motion", "own_scores:slow")
        verbs = [("index", clips, "--out", out), *(("score", out, "--by", by) for by in scores)]
        for verb in verbs:
            code, answer, error = call("data", *verb, *on, "--json")
            assert code == 0, error
            assert error == ""
            said[name].append(json.loads(answer) | {"catalog": ""})
    assert said["far"] == said["here"]
    assert _contents(tmp_path / "far") == _contents(tmp_path / "here")
    assert list(_contents(tmp_path / "far")) == ["catalog.parquet"]


@pytest.mark.usefixtures("ray")
def test_entries_of_a_cache_are_the_same_whatever_made_them(
    small_recipe: MakeRecipe, tmp_path: Path, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And none is made twice; each share of the work is a pack."""
    monkeypatch.setattr(cache_fill, "_NUM_SHARES", 4)
    said = {}
    for name, on in (("here", ()), ("far", ("--on", "ray"))):
        recipe = small_recipe(*TINY_WAN, "data.windows=1", f"data.cache={tmp_path / name}")
        path = tmp_path / f"{name}.toml"
        path.write_text(config.dump(recipe))
        code, answer, error = call("data", "cache", path, *on, "--json")
        assert code == 0, error
        said[name] = {kind: json.loads(answer)[kind] for kind in ("latents", "prompts", "failed")}
    assert said["far"] == said["here"]
    assert cache_entries(tmp_path / "far") == cache_entries(tmp_path / "here")
    assert len(list((tmp_path / "far" / "latents").iterdir())) == 4


@pytest.mark.usefixtures("ray", "own")
def test_what_cannot_be_scored_far_away_is_said(catalog: Path, call: Call) -> None:
    texts = Catalog.load(catalog).captions()
    reds, blues = (sum(word in text for text in texts) for word in _COLOURS)
    score = ("data", "score", catalog, "--on", "ray", "--json", "--by")
    code, answer, _ = call(*score, "own_scores:picky")
    failed = [each["reason"] for each in json.loads(answer)["failed"]]
    assert code == 0
    assert failed.count("too red") == reds > 0
    assert failed.count("the scoring process ended with exit status 1") == blues > 0
    assert len(failed) == reds + blues
    code, _, error = call(*score, "own_scores:no_such")
    assert code == 2
    assert "has no function 'no_such'" in error


def _workers() -> list[psutil.Process]:
    """Worker processes of Ray workers."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):  # it has just ended
            if "longtake.data.decode_worker" in process.cmdline():
                is_far = "ray::" in " ".join(process.parent().cmdline())
                found += [process] if is_far else []
    return found


def test_a_clip_that_hangs_its_decoder_costs_itself(ray: ModuleType, shapes_catalog: Path) -> None:
    items = [Item(clip.media) for clip in islice(Catalog.load(shapes_catalog).clips(), 4)]
    task = ProbeTask(silence_seconds=1.5)
    outcomes = (each for _, each in tasks.run_tasks(task, items, tasks.Work(on="ray", workers=1)))
    first = next(outcomes)
    (worker,) = _workers()
    worker.send_signal(signal.SIGSTOP)
    second, *others = outcomes
    found, is_lasting = zip(first, second, *others, strict=True)
    assert isinstance(found[1], ClipError)
    assert found[1].reason.startswith("decoding made no progress for 1.5 s")
    assert is_lasting == (True, False, True, True)
    assert all(isinstance(each, Probe) for each in (found[0], *found[2:]))
    worker.wait(20)


def test_the_items_of_a_lost_worker_are_done_by_another(
    ray: ModuleType, shapes_catalog: Path
) -> None:
    items = [Item(clip.media) for clip in islice(Catalog.load(shapes_catalog).clips(), 4)]
    outcomes = tasks.run_tasks(ProbeTask(), items, tasks.Work(on="ray", workers=1))
    next(outcomes)
    (worker,) = _workers()
    worker.parent().kill()
    assert all(isinstance(found, Probe) for _, (found, _) in outcomes)
    worker.wait(20)


def test_a_file_that_only_this_machine_sees_is_named(ray: ModuleType, shapes_catalog: Path) -> None:
    clip = Catalog.load(shapes_catalog).clip(0)
    # This process's own view of its memory: there is none of that name in another process.
    first = os.memfd_create("clip")
    descriptor = fcntl.fcntl(first, fcntl.F_DUPFD_CLOEXEC, 900)  # which no Ray worker has
    os.close(first)
    os.write(descriptor, Path(clip.path).read_bytes())
    path = f"/proc/self/fd/{descriptor}"
    items = [Item(Media(path))]
    with pytest.raises(DataError) as caught:
        list(tasks.run_tasks(ProbeTask(), items, tasks.Work(on="ray", workers=1)))
    os.close(descriptor)
    here = socket.gethostname()
    assert f"{path} is there on {here}, but not on {here}. Put it on a disk" in str(caught.value)


def test_another_version_is_refused(
    ray: ModuleType, shapes_catalog: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before a clip is looked at, by what is installed on the worker."""
    clip = Catalog.load(shapes_catalog).clip(0)
    monkeypatch.setattr(tasks, "package_versions", lambda: {"av": "1.0"})
    with pytest.raises(
        DataError, match=r"would not do the same work: av is \d.* there and 1\.0 here"
    ):
        list(tasks.run_tasks(MotionScore(), [clip], tasks.Work(on="ray", workers=1)))


@pytest.mark.usefixtures("ray", "own")
def test_work_goes_on_after_its_driver_was_killed(
    catalog: Path, tmp_path: Path, call: Call
) -> None:
    far = tmp_path / "far.parquet"
    shutil.copyfile(catalog, far)
    score = ("data", "score", "--by", "own_scores:slow")
    assert call(*score, catalog)[0] == 0
    command = [sys.executable, "-m", "longtake", *score, str(far), "--on", "ray"]
    journal = tmp_path / ".far.parquet.slow.journal.jsonl"
    with subprocess.Popen(command, stderr=subprocess.PIPE) as process:
        wait_until(
            lambda: process.poll() or (journal.exists() and journal.read_text().count("\n") >= 5)
        )
        assert process.poll() is None, process.communicate()
        process.kill()
    done = journal.read_text().count("\n") - 1
    assert 4 <= done < 64
    assert "attributes.slow" not in pq.read_schema(far).names
    assert call(*score, far, "--on", "ray")[0] == 0
    assert far.read_bytes() == catalog.read_bytes()
    assert not journal.exists()


def test_a_cluster_is_reached_through_its_client_server(
    ray: ModuleType, clips: Path, tmp_path: Path, call: Call
) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    address = os.environ["RAY_ADDRESS"]
    serve = [sys.executable, "-m", "ray.util.client.server", "--mode", "legacy"]
    serve += ["--address", address, "--host", "127.0.0.1", "--port", str(port)]
    here, far = tmp_path / "here.parquet", tmp_path / "far.parquet"
    assert call("data", "index", clips, "--out", here)[0] == 0
    index = [sys.executable, "-m", "longtake", "data", "index", str(clips), "--out", str(far)]
    with subprocess.Popen(serve, stderr=subprocess.DEVNULL) as server:
        try:
            wait_until(lambda: _listens(port), 60.0)
            ended = subprocess.run(
                [*index, "--on", f"ray://127.0.0.1:{port}"],
                capture_output=True,
                text=True,
                check=False,
                timeout=120,
            )
        finally:
            server.kill()
    assert ended.returncode == 0, ended.stderr
    assert far.read_bytes() == here.read_bytes()


def _listens(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), 1).close()
    except OSError:
        return False
    return True


_LISTENING = """
import psutil
from longtake.data.tasks import connected
with connected("ray") as ray:
    ray.get(ray.remote(lambda: 1).remote())
    top = psutil.Process()
    for process in (top, *top.children(recursive=True)):
        for connection in process.net_connections("inet"):
            if connection.status == psutil.CONN_LISTEN:
                print("listens", connection.laddr.ip)
"""


def test_a_ray_that_is_started_here_listens_on_this_machine_only() -> None:
    """Whoever reaches a Ray runs code."""
    environment = {key: each for key, each in os.environ.items() if not key.startswith("RAY_")}
    command = [sys.executable, "-P", "-c", _LISTENING]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, check=True, timeout=200
    )
    found = {line.split()[1] for line in done.stdout.splitlines() if line.startswith("listens")}
    assert found
    assert {each.removeprefix("::ffff:") for each in found} == {"127.0.0.1"}
