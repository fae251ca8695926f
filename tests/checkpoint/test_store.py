"""Checkpoints are saved while training goes on, are whole or do not exist, and load as they were.

Run by torchrun, this file is one of two ranks.
"""

import os
import resource
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tests.build import ALONE
from tests.checkpoint.runs import flip_a_bit, make_parts, need, save, truncate
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.tensor import DTensor

from longtake.checkpoint import files, store
from longtake.checkpoint.store import Saver, Staging, keep_saver, write
from longtake.config import CheckpointSection, ParallelSection
from longtake.errors import CheckpointError
from longtake.parallel.collectives import gather_objects, sum_over_ranks
from longtake.parallel.fsdp import apply_fsdp, full
from longtake.parallel.mesh import World, join
from longtake.run_dir import RunDirectory

_AVERAGE = "ema/main/__0_0.distcp"


def _garble_what_was_committed(path: Path) -> None:
    (path / "trainer.json").write_text('{"global_step": 2')
    files.commit(path, files.describe_files(path, ["trainer.json"]))


_Harms = dict[str, tuple[Callable[[Path], object], str]]
_SEEN_AT_A_GLANCE: _Harms = {
    "cut short": (lambda path: truncate(path / _AVERAGE), f"{_AVERAGE} has"),
    "lost": (lambda path: (path / _AVERAGE).unlink(), f"{_AVERAGE} is missing"),
    "uncommitted": (
        lambda path: (path / "COMMITTED").unlink(),
        "it has no COMMITTED: its save was interrupted",
    ),
    "garbled": (
        lambda path: (path / "COMMITTED").write_text('{"files": '),
        "COMMITTED cannot be read",
    ),
}
_SEEN_BY_READING: _Harms = {
    "other bytes": (
        lambda path: flip_a_bit(path / _AVERAGE),
        f"{_AVERAGE} has other bytes than were saved",
    ),
    "committed garbage": (_garble_what_was_committed, "trainer.json cannot be read"),
}


def test_what_was_saved_is_loaded(run: RunDirectory) -> None:
    loaded = make_parts()
    weight = loaded["model"]["weight"]
    path = run.checkpoint_path(20)
    store.load_parts(path, loaded)
    torch.testing.assert_close(loaded, make_parts(20.0), rtol=0, atol=0)
    assert loaded["model"]["weight"] is weight
    assert files.load_trainer(path, files.Trainer) == {"global_step": 20}


def test_a_file_is_whole_when_it_is_flushed_to_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flushed, fsync = dict[str, int](), os.fsync

    def flush(descriptor: int) -> None:
        name = Path(f"/proc/self/fd/{descriptor}").readlink().name
        flushed[name] = max(flushed.get(name, 0), os.fstat(descriptor).st_size)
        fsync(descriptor)

    monkeypatch.setattr("os.fsync", flush)
    run = RunDirectory(tmp_path)
    with keep_saver(run, ALONE, CheckpointSection(), start=0) as saver:
        saver.save(10, {"model": make_parts()["model"]}, {})
    path = run.checkpoint_path(10)
    sizes = {name: entry["bytes"] for name, entry in files.read_committed(path).items()}
    assert sizes["model/__0_0.distcp"] == flushed["__0_0.distcp"] > 2**14


def test_equal_hyperparameters_keep_their_types(tmp_path: Path) -> None:
    """Though they are serialised once."""
    run = RunDirectory(tmp_path)
    one: store.State = {"a": 1, "b": True, "c": 1.0, "d": "1", "e": None, "f": (1, 1.0), "g": [1]}
    saved = {"optimizer": {"x": dict(one), "y": dict(one), "z": {"a": 2, "f": (True, 1.0)}}}
    with keep_saver(run, ALONE, CheckpointSection(), start=0) as saver:
        saver.save(10, saved, {})
    path = run.checkpoint_path(10)
    loaded = {"optimizer": {name: dict.fromkeys(each) for name, each in saved["optimizer"].items()}}
    store.load_parts(path, loaded)
    assert repr(loaded) == repr(saved)


def test_saving_waits_for_no_cuda_stream(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is saved has been copied to the CPU before; training's stream has seconds of work."""
    waits: list[str] = []
    stream = SimpleNamespace(device_type="cuda", synchronize=lambda: waits.append("stream"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda _: nullcontext())
    write(run, 30, make_parts(30.0), {"global_step": 30}, ALONE)
    assert waits == []


@pytest.mark.parametrize("case", [*_SEEN_AT_A_GLANCE, *_SEEN_BY_READING])
def test_a_damaged_checkpoint_is_passed_over(run: RunDirectory, case: str) -> None:
    """The newest whole one is found, and what was wrong with the one after it."""
    path = run.checkpoint_path(20)
    harm, expected = (_SEEN_AT_A_GLANCE | _SEEN_BY_READING)[case]
    harm(path)
    found, ((passed, reason),) = store.latest_checkpoint(run, ALONE)
    assert found == run.checkpoint_path(10)
    assert passed == path
    assert reason.startswith(expected)
    if case in _SEEN_AT_A_GLANCE:
        assert files.newest_whole(run) == run.checkpoint_path(10)
        with pytest.raises(CheckpointError, match=r"step_00000020 .*earlier") as raised:
            store.load_parts(path, make_parts())
        assert "\n" not in str(raised.value)


def test_who_samples_has_no_need_of_the_optimizer(run: RunDirectory) -> None:
    """A copy without it is whole enough, but nothing to train on from."""
    path = run.checkpoint_path(20)
    shutil.rmtree(path / "optimizer")
    assert files.newest_whole(run) == run.checkpoint_path(10)
    assert files.newest_whole(run, "ema/main") == path
    assert files.newest_whole(run, "ema/other") is None
    assert files.load_trainer(path, files.Trainer) == {"global_step": 20}
    loaded = {"ema/main": {"weight": torch.zeros(64, 64)}}
    store.load_parts(path, loaded)
    assert torch.equal(loaded["ema/main"]["weight"], torch.full((64, 64), 21.0))
    damage = files.find_damage(path, checksums=False)
    assert damage is not None
    assert damage.startswith("optimizer/.metadata is missing")


def test_there_may_be_none(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    assert files.newest_whole(run) is None
    assert store.latest_checkpoint(run, ALONE) == (None, ())


def test_all_may_be_damaged(run: RunDirectory) -> None:
    for step in (10, 20):
        flip_a_bit(run.checkpoint_path(step) / _AVERAGE)
    found, damaged = store.latest_checkpoint(run, ALONE)
    assert found is None
    assert [run.step_of(path) for path, _ in damaged] == [20, 10]


def test_later_ones_can_be_left_out_of_account(run: RunDirectory) -> None:
    """A rollback goes to a step, or where that is damaged to one before it."""
    assert store.latest_checkpoint(run, ALONE, at_most=19) == (run.checkpoint_path(10), ())
    assert store.latest_checkpoint(run, ALONE, at_most=9) == (None, ())
    assert store.latest_checkpoint(run, ALONE, at_most=20).path == run.checkpoint_path(20)


def test_somebodys_copy_is_no_checkpoint_of_the_run(run: RunDirectory) -> None:
    for name in ("step_00000030.bak", "step_30", "step_x"):
        shutil.copytree(run.checkpoint_path(20), run.checkpoints_path / name)
    assert store.latest_checkpoint(run, ALONE) == (run.checkpoint_path(20), ())


@pytest.mark.parametrize("name", ["model/.metadata", "model/__0_0.distcp", "trainer.json"])
def test_garbled_bytes_are_an_error_that_names_the_file(run: RunDirectory, name: str) -> None:
    path = run.checkpoint_path(20)
    file = path / name
    file.write_bytes(b"\xff" * file.stat().st_size)

    def load() -> None:
        if name == "trainer.json":
            files.load_trainer(path, files.Trainer)
        store.load_parts(path, make_parts())

    with pytest.raises(CheckpointError, match=name.split("/")[0]) as raised:
        load()
    assert "earlier checkpoint" in str(raised.value)
    assert "\n" not in str(raised.value)


def test_parts_that_are_not_read_may_be_damaged(run: RunDirectory) -> None:
    flip_a_bit(run.checkpoint_path(20) / _AVERAGE)
    loaded = {"model": {"bias": torch.zeros(3)}}
    store.load_parts(run.checkpoint_path(20), loaded)
    assert loaded["model"]["bias"].tolist() == [20.0] * 3


@pytest.mark.parametrize(
    "weights",
    [{"weight": torch.zeros(64, 32), "bias": torch.zeros(3)}, {"another": torch.zeros(2)}],
    ids=["other shape", "other name"],
)
def test_another_models_state_is_refused(run: RunDirectory, weights: store.State) -> None:
    with pytest.raises(CheckpointError, match="recipe that the run was started with") as raised:
        store.load_parts(run.checkpoint_path(20), {"model": weights})
    assert "\n" not in str(raised.value)


def test_abandoned_steps_are_deleted(run: RunDirectory) -> None:
    """A run that went back would else find them in its way, also those that a server needs."""
    save(run, 30)
    need(run, 30)
    files.delete_after(run, 10)
    assert [path.name for path in run.checkpoints_path.iterdir()] == ["step_00000010"]
    assert store.latest_checkpoint(run, ALONE).path == run.checkpoint_path(10)


@contextmanager
def _full_disk() -> Iterator[None]:
    """No file may become longer than this: what is written fails as on a disk that is full."""
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8192, limit[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)


def _names(run: RunDirectory) -> list[str]:
    return sorted(path.name for path in run.checkpoints_path.iterdir())


@pytest.fixture
def saver(run: RunDirectory) -> Iterator[Saver]:
    """A saver of a launch that goes on from step 20."""
    saver = Saver(run, ALONE, CheckpointSection(), start=20)
    yield saver
    saver.close()


def test_training_may_change_the_state_at_once(run: RunDirectory, saver: Saver) -> None:
    parts = make_parts(30.0)
    for step in (30, 31):
        for tensor in (parts["model"]["weight"], parts["optimizer"]["state.weight.step"]):
            tensor.fill_(float(step))
        saver.save(step, parts, {"global_step": step})
        parts["model"]["weight"].zero_()
    saver.wait()
    for step in (30, 31):
        loaded = make_parts()
        store.load_parts(run.checkpoint_path(step), loaded)
        assert set(loaded["model"]["weight"].flatten().tolist()) == {float(step)}
        assert loaded["optimizer"]["state.weight.step"] == step


def test_it_says_what_became_whole(run: RunDirectory, saver: Saver) -> None:
    assert saver.finished() == []
    saver.save(30, make_parts(), {"global_step": 30})
    saver.save(40, make_parts(), {"global_step": 40})
    saver.wait()
    assert saver.finished() == [run.checkpoint_path(30), run.checkpoint_path(40)]
    assert saver.finished() == []
    assert not saver.failed
    assert saver.take_failure() is None


def test_what_is_under_way_is_finished_whatever_happens(run: RunDirectory) -> None:
    section = CheckpointSection()

    def train() -> None:
        with keep_saver(run, ALONE, section, start=20) as saver:
            saver.save(30, make_parts(), {"global_step": 30})
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train()
    assert store.latest_checkpoint(run, ALONE) == (run.checkpoint_path(30), ())


def test_a_full_disk_is_one_sentence_and_harms_nothing(run: RunDirectory, saver: Saver) -> None:
    with _full_disk():
        saver.save(30, make_parts(), {"global_step": 30})
        saver.wait()
    assert saver.finished() == []
    assert saver.failed
    message = str(saver.take_failure())
    assert f"The checkpoint of step 30 in {run.path} cannot be written" in message
    assert "File too large" in message
    assert "nothing is lost but the steps since step_00000020, which is whole" in message
    assert "make room" in message
    assert "\n" not in message
    assert saver.take_failure() is None
    assert _names(run) == ["step_00000010", "step_00000020"]
    assert saver.failures_in_a_row == 1
    saver.save(40, make_parts(), {"global_step": 40})
    saver.wait()
    assert saver.failures_in_a_row == 0
    assert store.latest_checkpoint(run, ALONE) == (run.checkpoint_path(40), ())


def test_a_link_to_nothing_in_place_of_a_checkpoint_is_named(
    run: RunDirectory, saver: Saver
) -> None:
    link = run.checkpoint_path(30)
    link.symlink_to("/no/such/disk")
    saver.save(30, make_parts(), {"global_step": 30})
    saver.wait()
    message = str(saver.take_failure())
    assert f"({link} is a symbolic link to /no/such/disk, which does not exist)" in message
    assert "restore what the link points to, or delete the link" in message
    assert "make room" not in message
    assert link.is_symlink()
    assert _names(run) == ["step_00000010", "step_00000020", "step_00000030"]


def test_the_first_save_may_fail(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    message = "there is no earlier one, so all steps so far are lost"
    with (
        pytest.raises(CheckpointError, match=message),
        _full_disk(),
        keep_saver(run, ALONE, CheckpointSection(), start=0) as saver,
    ):
        saver.save(10, make_parts(), {"global_step": 10})
    assert _names(run) == []


def test_a_save_that_was_killed_leaves_only_what_the_next_replaces(run: RunDirectory) -> None:
    """SIGKILL while it writes: the checkpoints before are whole, and its folder never was one."""
    paths = [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
    command = [sys.executable, __file__, str(run.path)]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "__0_0.distcp\n"
        process.kill()
    aside = run.checkpoints_path / ".step_00000030.partial"
    assert list(aside.rglob("*.distcp"))
    assert _names(run) == [aside.name, "step_00000010", "step_00000020"]
    assert store.latest_checkpoint(run, ALONE) == (run.checkpoint_path(20), ())
    save(run, 25)
    assert _names(run) == ["step_00000010", "step_00000020", "step_00000025"]


def test_a_save_after_an_interrupted_one_works(run: RunDirectory) -> None:
    aside = run.checkpoints_path / ".step_00000030.partial"
    shutil.copytree(run.checkpoint_path(20), aside)
    (aside / "model" / "stray").write_text("of the interrupted save")
    path = save(run, 30)
    assert store.latest_checkpoint(run, ALONE) == (path, ())
    assert "stray" not in (path / "COMMITTED").read_text()
    assert not aside.exists()


def test_only_what_is_needed_is_kept(run: RunDirectory) -> None:
    need(run, 10)
    for leftover in (".step_00000010.deleted", ".step_00000005.partial"):
        (run.checkpoints_path / leftover / "model").mkdir(parents=True)
    save(run, 30, keep=2)
    assert _names(run) == ["step_00000010", "step_00000020", "step_00000030"]
    save(run, 40, keep=1, reach=20)
    assert _names(run) == ["step_00000010", "step_00000020", "step_00000030", "step_00000040"]
    save(run, 50, keep=1)
    assert _names(run) == ["step_00000010", "step_00000050"]
    need(run)
    save(run, 60, keep=1)
    assert _names(run) == ["step_00000060"]


@pytest.mark.parametrize("harm", [truncate, flip_a_bit])
def test_damaged_ones_go_when_there_is_a_whole_one_again(
    run: RunDirectory, harm: Callable[[Path], None]
) -> None:
    """A launch that went on from before them neither counts nor keeps them."""
    harm(save(run, 30) / _AVERAGE)
    save(run, 25, start=20, keep=1)
    assert _names(run) == ["step_00000025"]
    harm(save(run, 40) / _AVERAGE)
    save(run, 50, start=25, keep=3)
    assert _names(run) == ["step_00000025", "step_00000050"]
    assert store.latest_checkpoint(run, ALONE) == (run.checkpoint_path(50), ())


def test_a_damaged_one_is_replaced_when_its_step_is_run_again(run: RunDirectory) -> None:
    """A run that went on from step 10 saves step 20 anew."""
    truncate(run.checkpoint_path(20) / _AVERAGE)
    save(run, 20, start=10)
    assert store.latest_checkpoint(run, ALONE) == (run.checkpoint_path(20), ())
    assert _names(run) == ["step_00000010", "step_00000020"]


def test_two_ranks_save_as_one(run_on_two_ranks: Callable[..., None], tmp_path: Path) -> None:
    run_on_two_ranks(__file__, str(tmp_path), "two")
    run = RunDirectory(tmp_path)
    path, damaged = store.latest_checkpoint(run, ALONE)
    assert path == run.checkpoint_path(20)
    assert damaged == ()
    assert len(list((path / "model").glob("__*.distcp"))) == 2
    network, expected = _network(), _network()
    with torch.no_grad():
        for parameter in expected.parameters():
            parameter.fill_(20)
    state = network.state_dict()
    store.load_parts(path, {"model": state})
    torch.testing.assert_close(state, expected.state_dict(), rtol=0, atol=0)


def _network() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 128), nn.Linear(128, 5))


def _save_as_one_of_two(folder: Path) -> None:
    with join("cpu", ParallelSection(strategy="shard")) as world:
        run, network = RunDirectory(folder), _network()
        apply_fsdp(network, list(network.children()), world)
        optimizer = torch.optim.AdamW(network.parameters(), lr=0.0, weight_decay=0.0)
        network(torch.ones(1, 64)).sum().backward()
        optimizer.step()
        with keep_saver(run, world, CheckpointSection(keep=1), start=0) as saver:
            for step in (10, 20):
                _fill(network, step)
                states = get_optimizer_state_dict(network, optimizer)
                saver.save(
                    step,
                    {"model": network.state_dict(), "optimizer": states},
                    {"global_step": step},
                )
                _fill(network, -1)
                for _ in range(100):  # training talks while it is saved
                    assert sum_over_ranks({"one": 1}, world) == {"one": 2}
            _check_that_all_learn_of_a_failure(saver, run, network, world)
        found = store.latest_checkpoint(run, world)
        assert found == (run.checkpoint_path(20), ())
        _check_that_it_comes_back(run.checkpoint_path(20), network, world)
        _check_that_all_learn_of_damage(run, network, world)


def _check_that_all_learn_of_a_failure(
    saver: Saver, run: RunDirectory, network: nn.Module, world: World
) -> None:
    """The disk of the second rank's node is full."""
    saver.wait()
    with nullcontext() if world.is_first else _full_disk():
        saver.save(30, {"model": network.state_dict()}, {"global_step": 30})
        saver.wait()
    assert saver.failed
    messages = gather_objects(str(saver.take_failure()), world)
    assert messages[0] == messages[1]
    assert "step 30" in messages[0]
    assert "since step_00000020, which is whole" in messages[0]
    gather_objects(None, world)
    assert _names(run) == ["step_00000020"]


def _check_that_it_comes_back(path: Path, network: nn.Module, world: World) -> None:
    state = network.state_dict()
    assert isinstance(state["0.weight"], DTensor)
    store.load_parts(path, {"model": state}, world)
    assert set(full(state["0.weight"]).flatten().tolist()) == {20.0}


def _check_that_all_learn_of_damage(run: RunDirectory, network: nn.Module, world: World) -> None:
    """Only the second rank reads the file that is damaged."""
    path = run.checkpoint_path(20)
    damaged = shutil.copytree(path, run.checkpoint_path(21)) if world.is_first else None
    if damaged is not None:
        flip_a_bit(damaged / "model" / "__1_0.distcp")
    gather_objects(None, world)
    reason = "model/__1_0.distcp has other bytes than were saved: its checksum (xxh3_64) differs"
    with pytest.raises(files.DamagedCheckpointError) as raised:
        store.load_parts(run.checkpoint_path(21), {"model": network.state_dict()}, world)
    assert raised.value.reason == reason
    found = store.latest_checkpoint(run, world)
    assert found == (path, ((run.checkpoint_path(21), reason),))
    unread = store.latest_checkpoint(run, world, checksums=False)
    assert unread == (run.checkpoint_path(21), ())
    gather_objects(None, world)
    if damaged is not None:
        shutil.rmtree(damaged)


def _fill(network: nn.Module, value: float) -> None:
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.fill_(value)


def _save_until_killed(folder: Path) -> None:
    """It stays where it flushes the first file of tensors to the disk, and names that."""

    def flush(descriptor: int) -> None:
        name = Path(f"/proc/self/fd/{descriptor}").readlink().name
        if name.endswith(".distcp"):
            sys.stdout.write(f"{name}\n")
            sys.stdout.flush()
            threading.Event().wait()

    os.fsync = flush  # type: ignore[assignment]
    with keep_saver(RunDirectory(folder), ALONE, CheckpointSection(), start=20) as saver:
        saver.save(30, make_parts(), {"global_step": 30})


def _state() -> dict[str, object]:
    weights = torch.arange(12.0).reshape(3, 4)
    return {
        "model": {
            "weight": nn.Parameter(weights),
            "transposed": weights.T,
            "scalar": weights[0, 0],
        },
        "optimizer": {"lr": 1e-3, "betas": (0.9, 0.99), "seen": [1, 2], "none": None},
    }


def test_a_copy_stays_what_it_was() -> None:
    state = _state()
    copied = Staging().copy(state)
    with torch.no_grad():
        state["model"]["weight"].zero_()  # type: ignore[index]
    state["optimizer"]["seen"].append(3)  # type: ignore[index]
    torch.testing.assert_close(copied, _state(), rtol=0, atol=0)


def test_the_room_is_used_again() -> None:
    staging, state = Staging(), {"weight": torch.zeros(5)}
    first: Tensor = staging.copy(state)["weight"]
    state["weight"].fill_(1)
    second: Tensor = staging.copy(state)["weight"]
    assert second.data_ptr() == first.data_ptr()
    assert second.tolist() == [1.0] * 5


def test_a_state_may_change_its_form() -> None:
    """Such as an optimizer's, which has no averages before its first step."""
    staging = Staging()
    staging.copy({"a": torch.zeros(2), "b": torch.zeros(2)})
    copied = staging.copy({"a": torch.ones(3, dtype=torch.float64), "c": torch.ones(1)})
    assert copied["a"].tolist() == [1.0] * 3
    assert copied["a"].dtype == torch.float64
    assert copied.keys() == {"a", "c"}


if __name__ == "__main__":
    if len(sys.argv) == 3:
        _save_as_one_of_two(Path(sys.argv[1]))
    else:
        _save_until_killed(Path(sys.argv[1]))
