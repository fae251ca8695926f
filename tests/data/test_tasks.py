"""Tasks in processes of this machine and on Ray: results, losses, and what is said of a cluster."""

import pickle
import socket
import sys
from collections.abc import Generator
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import pytest
from tests.data.build import run_python

from longtake.data.catalog import Catalog
from longtake.data.scores import MotionScore, OwnScore
from longtake.data.tasks import (
    HERE,
    RAY_ATTEMPTS,
    ItemBatches,
    NodeSetup,
    NodeWorker,
    Work,
    _actor_class,
    connected,
    in_order,
    package_versions,
    run_tasks,
    version_differences,
)
from longtake.errors import ClipError, DataError


def test_what_a_task_has_loaded_is_not_sent() -> None:
    task = OwnScore("json:dumps", "")
    assert callable(task.function)
    assert task.__getstate__().keys() == {"by", "folder", "silence_seconds"}


def test_results_come_with_their_items_numbers(shapes: Catalog) -> None:
    clips = list(shapes.clips())[:6]
    here = list(in_order(run_tasks(MotionScore(), clips, HERE)))
    found = dict(run_tasks(MotionScore(), iter(clips), Work(workers=2)))
    assert [found[number] for number in range(6)] == here
    assert list(in_order(run_tasks(MotionScore(), [], Work(workers=2)))) == []


def test_what_a_task_raises_ends_the_work(shapes: Catalog, tmp_path: Path) -> None:
    results = run_tasks(OwnScore("json:none", str(tmp_path)), shapes.clips(), Work(workers=1))
    with pytest.raises(DataError, match="has no function 'none'"):
        next(results)


def test_results_are_put_in_order() -> None:
    taken: list[int] = []

    def results() -> Generator[tuple[int, str]]:
        for number in (1, 0, 3, 2):
            taken.append(number)
            yield number, "abcd"[number]

    ordered = in_order(results())
    assert [next(ordered), next(ordered)] == ["a", "b"]
    assert taken == [1, 0]
    assert list(ordered) == ["c", "d"]


def test_a_clips_error_is_the_same_in_another_process(shapes: Catalog, tmp_path: Path) -> None:
    clip = shapes.clip(0)
    gone = replace(clip, media=replace(clip.media, path=str(tmp_path / "gone.mp4")))
    (error,) = in_order(run_tasks(MotionScore(), [gone], Work(workers=1)))
    assert isinstance(error, ClipError)
    assert error.path == tmp_path / "gone.mp4"
    assert str(error) == str(MotionScore().do(gone, lambda: None))


def test_batches_grow_to_some_seconds_of_work() -> None:
    assert _sizes(ItemBatches(range(10_000)), 6, 0.5) == [1, 2, 4, 8, 16, 20]
    assert _sizes(ItemBatches(range(10_000)), 3, 60.0) == [1, 1, 1]
    assert _sizes(ItemBatches(range(10_000)), 12, 0.0)[-2:] == [1000, 1000]


def _sizes(batches: ItemBatches[int], count: int, seconds: float) -> list[int]:
    found = []
    for _ in range(count):
        found.append(len(batches.take()))
        batches.learn(seconds)
    return found


def test_what_comes_back_goes_out_alone_and_is_given_up_in_the_end() -> None:
    batches = ItemBatches("abc")
    batches.learn(1e-9)
    assert batches.ahead(1) == 1  # items are taken as they are needed
    first = batches.take()
    assert first == [(0, "a"), (1, "b")]
    assert batches.put_back(first) == []
    for _ in range(RAY_ATTEMPTS):
        while (again := batches.take()) != [(0, "a")]:
            batches.put_back(again)
        lost = batches.put_back(again)
    assert lost == [(0, "a")]


def test_without_ray_it_is_said_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(DataError, match=r"pip install 'longtake\[ray\]'"), connected("ray"):
        pass


@pytest.mark.parametrize("named", ["--on", "RAY_ADDRESS"])
def test_a_cluster_that_cannot_be_reached_is_named(
    named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("ray", reason="Ray is not installed: pip install 'longtake[ray]'")
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{nobody.getsockname()[1]}"  # bound, but nothing listens
        where = f"ray://{address}" if named == "--on" else "ray"
        monkeypatch.delenv("RAY_ADDRESS", raising=False)
        if named == "RAY_ADDRESS":
            monkeypatch.setenv("RAY_ADDRESS", address)
        with (
            pytest.raises(DataError, match=f"cluster at .*{address} cannot be reached: .*refused"),
            connected(where),
        ):
            pass


def test_versions_that_differ_are_named() -> None:
    here = {"longtake": "0.1.0", "av": "18.1.0", "numpy": "2.4.6"}
    said = version_differences("node7", {"longtake": "0.1.0", "av": "17.0.0"}, here)
    assert said.startswith(
        "node7 would not do the same work: av is 17.0.0 there and 18.1.0 here, "
        "numpy is not installed there and 2.4.6 here. Install the same"
    )


def test_a_node_without_longtake_says_so(tmp_path: Path) -> None:
    pickler = pytest.importorskip(
        "ray.cloudpickle", reason="Ray is not installed: pip install 'longtake[ray]'"
    )
    (tmp_path / "class.pickle").write_bytes(pickler.dumps(_actor_class()))
    code = (
        "import pickle, sys\n"
        "sys.modules['longtake'] = None\n"
        f"made = pickle.load(open({str(tmp_path / 'class.pickle')!r}, 'rb'))\n"
        "print(made().begin(b'', {})[1:])"
    )
    assert "'absent'" in run_python(code)


def test_a_folder_that_is_not_shared_is_named(tmp_path: Path) -> None:
    marker = tmp_path / ".sign"
    setup = pickle.dumps(NodeSetup(MotionScore(), [marker], Path.cwd()))
    with pytest.raises(DataError, match=f"{tmp_path} on .* is another folder than where this was"):
        NodeWorker(setup)
    marker.touch()
    NodeWorker(setup).close()


def test_versions_are_those_that_results_depend_on() -> None:
    found = package_versions()
    assert found["av"] == version("av")
    assert found["torch"] == version("torch").split("+")[0]
    assert {"longtake", "longtake's files", "Python", "numpy", "pillow", "HanTa"} <= set(found)
