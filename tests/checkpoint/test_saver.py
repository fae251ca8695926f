"""Training goes on while a checkpoint is saved; it is whole, or nothing is left of it.

Run by torchrun, this file is one of two ranks.
"""

import os
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.tensor import DTensor

from longtake.checkpoint import store
from longtake.checkpoint.saver import Saver, keep_saver
from longtake.config import CheckpointSection, ParallelSection
from longtake.errors import CheckpointError
from longtake.evaluation_dir import ServerDirectory
from longtake.parallel.collectives import gather_objects, sum_over_ranks, wait_for_all
from longtake.parallel.fsdp import apply_fsdp, full
from longtake.parallel.mesh import World, join
from longtake.run_dir import RunDirectory

MakeParts = Callable[..., dict[str, store.State]]
Save = Callable[..., Path]


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
def saver(run: RunDirectory, alone: World) -> Iterator[Saver]:
    """A saver of a launch that goes on from step 20."""
    saver = Saver(run, alone, CheckpointSection(), start=20)
    yield saver
    saver.close()


def test_training_may_change_the_state_at_once(
    run: RunDirectory, saver: Saver, make_parts: MakeParts
) -> None:
    """What is saved is the state when it was given, twice in a row."""
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


def test_it_says_what_became_whole(run: RunDirectory, saver: Saver, make_parts: MakeParts) -> None:
    """Each checkpoint once, when it is; nothing has failed."""
    assert saver.finished() == []
    saver.save(30, make_parts(), {"global_step": 30})
    saver.save(40, make_parts(), {"global_step": 40})
    saver.wait()
    assert saver.finished() == [run.checkpoint_path(30), run.checkpoint_path(40)]
    assert saver.finished() == []
    assert not saver.failed
    assert saver.take_failure() is None


def test_it_can_be_waited_for(run: RunDirectory, alone: World, make_parts: MakeParts) -> None:
    """Without a background the checkpoint is whole when training goes on."""
    with keep_saver(run, alone, CheckpointSection(background=False), start=20) as saver:
        saver.save(30, make_parts(30.0), {"global_step": 30})
        assert saver.finished() == [run.checkpoint_path(30)]
        assert store.newest_on_all(run, alone) == (run.checkpoint_path(30), ())


def test_what_is_under_way_is_finished_whatever_happens(
    run: RunDirectory, alone: World, make_parts: MakeParts
) -> None:
    """An error in training, or a Ctrl-C, costs no checkpoint."""
    section = CheckpointSection()

    def train() -> None:
        with keep_saver(run, alone, section, start=20) as saver:
            saver.save(30, make_parts(), {"global_step": 30})
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train()
    assert store.newest_on_all(run, alone) == (run.checkpoint_path(30), ())


def test_a_full_disk_is_one_sentence_and_harms_nothing(
    run: RunDirectory, saver: Saver, alone: World, make_parts: MakeParts
) -> None:
    """It says what was lost and what to do; nothing is left in the way of the next save."""
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
    saver.save(40, make_parts(), {"global_step": 40})
    saver.wait()
    assert store.newest_on_all(run, alone) == (run.checkpoint_path(40), ())


def test_a_link_to_nothing_in_place_of_a_checkpoint_is_named(
    run: RunDirectory, saver: Saver, make_parts: MakeParts
) -> None:
    """A disk that is not mounted is no full disk; the link stays as it is."""
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


def test_the_first_save_may_fail(tmp_path: Path, alone: World, make_parts: MakeParts) -> None:
    """Then there is nothing to go back to, and it says so."""
    run = RunDirectory(tmp_path)
    message = "there is no earlier one, so all steps so far are lost"
    with (
        pytest.raises(CheckpointError, match=message),
        _full_disk(),
        keep_saver(run, alone, CheckpointSection(), start=0) as saver,
    ):
        saver.save(10, make_parts(), {"global_step": 10})
    assert _names(run) == []


def test_a_save_that_was_killed_leaves_only_what_the_next_replaces(
    run: RunDirectory, alone: World, save: Save
) -> None:
    """SIGKILL while it writes: the checkpoints before are whole, and its folder never was one."""
    process = subprocess.Popen([sys.executable, __file__, str(run.path)])
    aside, deadline = run.checkpoints_path / ".step_00000030.partial", time.monotonic() + 60
    while not list(aside.rglob("*.distcp")):
        assert time.monotonic() < deadline
        time.sleep(0.001)
    process.kill()
    process.wait()
    assert _names(run) == [aside.name, "step_00000010", "step_00000020"]
    assert store.newest_on_all(run, alone) == (run.checkpoint_path(20), ())
    save(run, 25)
    assert _names(run) == ["step_00000010", "step_00000020", "step_00000025"]


def test_a_save_after_an_interrupted_one_works(run: RunDirectory, alone: World, save: Save) -> None:
    """What an interrupted save of the same step has left is not taken for the new one's."""
    aside = run.checkpoints_path / ".step_00000030.partial"
    shutil.copytree(run.checkpoint_path(20), aside)
    (aside / "model" / "stray").write_text("of the interrupted save")
    path = save(run, 30)
    assert store.newest_on_all(run, alone) == (path, ())
    assert "stray" not in (path / "COMMITTED").read_text()
    assert not aside.exists()


def test_only_what_is_needed_is_kept(run: RunDirectory, save: Save) -> None:
    """The newest, those that a server needs, a place to go back to; no leftovers."""
    heartbeat = {"server": "evaluator", "time": "2026-01-01", "needs": [10]}
    ServerDirectory(run, "evaluator").write_heartbeat(heartbeat)
    for leftover in (".step_00000010.deleted", ".step_00000005.partial"):
        (run.checkpoints_path / leftover / "model").mkdir(parents=True)
    save(run, 30, keep=2)
    assert _names(run) == ["step_00000010", "step_00000020", "step_00000030"]
    save(run, 40, keep=1, reach=20)
    assert _names(run) == ["step_00000010", "step_00000020", "step_00000030", "step_00000040"]
    save(run, 50, keep=1)
    assert _names(run) == ["step_00000010", "step_00000050"]


def _truncate(path: Path) -> None:
    os.truncate(path / "model" / "__0_0.distcp", 100)


def _flip_a_bit(path: Path) -> None:
    with (path / "model" / "__0_0.distcp").open("r+b") as file:
        file.write(b"\xff")


@pytest.mark.parametrize("harm", [_truncate, _flip_a_bit])
def test_damaged_ones_go_when_there_is_a_whole_one_again(
    run: RunDirectory, alone: World, save: Save, harm: Callable[[Path], None]
) -> None:
    """A launch that went on from before them neither counts nor keeps them."""
    harm(save(run, 30))
    save(run, 25, start=20, keep=1)
    assert _names(run) == ["step_00000025"]
    harm(save(run, 40))
    save(run, 50, start=25, keep=3)
    assert _names(run) == ["step_00000025", "step_00000050"]
    assert store.newest_on_all(run, alone) == (run.checkpoint_path(50), ())


def test_a_damaged_one_is_replaced_when_its_step_is_run_again(
    run: RunDirectory, alone: World, save: Save
) -> None:
    """A run that went on from step 10 saves step 20 anew."""
    _truncate(run.checkpoint_path(20))
    save(run, 20, start=10)
    assert store.newest_on_all(run, alone) == (run.checkpoint_path(20), ())
    assert _names(run) == ["step_00000010", "step_00000020"]


def test_two_ranks_save_as_one(
    run_on_two_ranks: Callable[..., None], tmp_path: Path, alone: World
) -> None:
    """Shards of both, checksums of both; and one process can read what they have saved."""
    run_on_two_ranks(__file__, str(tmp_path), "two")
    run = RunDirectory(tmp_path)
    path, passed_over = store.newest_on_all(run, alone)
    assert path == run.checkpoint_path(20)
    assert passed_over == ()
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
        found = store.newest_on_all(run, world)
        assert found == (run.checkpoint_path(20), ())
        _check_that_it_comes_back(run.checkpoint_path(20), network, world)


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
    wait_for_all(world)
    assert _names(run) == ["step_00000020"]


def _check_that_it_comes_back(path: Path, network: nn.Module, world: World) -> None:
    state = network.state_dict()
    assert isinstance(state["0.weight"], DTensor)
    store.load_parts(path, {"model": state}, world, is_verified=True)
    assert set(full(state["0.weight"]).flatten().tolist()) == {20.0}


def _fill(network: nn.Module, value: float) -> None:
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.fill_(value)


def _save_until_killed(folder: Path) -> None:
    """Eight parts of 64 MB: there is time to kill it."""
    alone = World(0, 0, 1, torch.device("cpu"), None)
    parts = {f"part{number}": {"weight": torch.zeros(2**24)} for number in range(8)}
    with keep_saver(RunDirectory(folder), alone, CheckpointSection(), start=20) as saver:
        saver.save(30, parts, {"global_step": 30})


if __name__ == "__main__":
    if len(sys.argv) == 3:
        _save_as_one_of_two(Path(sys.argv[1]))
    else:
        _save_until_killed(Path(sys.argv[1]))
