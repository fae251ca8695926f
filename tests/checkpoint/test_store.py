"""A checkpoint is whole or it does not exist; whatever is damaged is named."""

import json
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from longtake.checkpoint import manifest, store
from longtake.checkpoint.writing import Company, write
from longtake.errors import CheckpointError
from longtake.evaluation_dir import ServerDirectory
from longtake.parallel.mesh import World
from longtake.run_dir import RunDirectory

MakeParts = Callable[..., dict[str, store.State]]
Save = Callable[..., Path]


def _data_file(path: Path) -> Path:
    return path / "ema" / "main" / "__0_0.distcp"


def _truncate(path: Path) -> None:
    file = _data_file(path)
    file.write_bytes(file.read_bytes()[:-1])


def _lose_a_file(path: Path) -> None:
    _data_file(path).unlink()


def _uncommit(path: Path) -> None:
    (path / "COMMITTED").unlink()


def _garble_the_commitment(path: Path) -> None:
    (path / "COMMITTED").write_text('{"files": ')


def _flip_a_bit(path: Path) -> None:
    content = bytearray(_data_file(path).read_bytes())
    content[-1] ^= 1
    _data_file(path).write_bytes(content)


def _garble_what_was_committed(path: Path) -> None:
    (path / "trainer.json").write_text('{"global_step": 2')
    manifest.commit(path, manifest.describe(path, ["trainer.json"]))


_SEEN_AT_A_GLANCE: dict[Callable[[Path], None], str] = {
    _truncate: "ema/main/__0_0.distcp has",
    _lose_a_file: "ema/main/__0_0.distcp is missing",
    _uncommit: "it has no COMMITTED",
    _garble_the_commitment: "COMMITTED cannot be read",
}
_SEEN_BY_READING: dict[Callable[[Path], None], str] = {
    _flip_a_bit: "ema/main/__0_0.distcp has other bytes than were saved",
    _garble_what_was_committed: "trainer.json cannot be read",
}


def test_what_was_saved_is_loaded(run: RunDirectory, make_parts: MakeParts) -> None:
    """Everything comes back to the bit, tensors into those that were given."""
    loaded = make_parts()
    weight = loaded["model"]["weight"]
    path = run.checkpoint_path(20)
    store.load_parts(path, loaded)
    torch.testing.assert_close(loaded, make_parts(20.0), rtol=0, atol=0)
    assert loaded["model"]["weight"] is weight
    assert store.load_trainer(path, store.Trainer) == {"global_step": 20}


def test_saving_waits_for_no_cuda_stream(
    run: RunDirectory, alone: World, make_parts: MakeParts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is saved has been copied to the CPU before; training's stream has seconds of work."""
    waits: list[str] = []
    stream = SimpleNamespace(device_type="cuda", synchronize=lambda: waits.append("stream"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda _: nullcontext())
    write(run, 30, make_parts(30.0), {"global_step": 30}, Company(alone, None))
    assert waits == []


def test_one_part_can_be_loaded_without_the_others(run: RunDirectory) -> None:
    """A sampler reads the averages and nothing else."""
    loaded = {"ema/main": {"weight": torch.zeros(64, 64)}}
    store.load_parts(run.checkpoint_path(10), loaded)
    assert torch.equal(loaded["ema/main"]["weight"], torch.full((64, 64), 11.0))


@pytest.mark.parametrize("harm", [*_SEEN_AT_A_GLANCE, *_SEEN_BY_READING])
def test_a_damaged_checkpoint_is_passed_over(
    run: RunDirectory, alone: World, harm: Callable[[Path], None]
) -> None:
    """The newest whole one is found, and what was wrong with the one after it."""
    path = run.checkpoint_path(20)
    harm(path)
    found, ((damaged, reason),) = store.newest_on_all(run, alone)
    assert found == run.checkpoint_path(10)
    assert damaged == path
    assert reason.startswith((_SEEN_AT_A_GLANCE | _SEEN_BY_READING)[harm])


@pytest.mark.parametrize("harm", _SEEN_AT_A_GLANCE)
def test_what_is_seen_at_a_glance_is_refused(
    run: RunDirectory, make_parts: MakeParts, harm: Callable[[Path], None]
) -> None:
    """Whoever reads it is told in a sentence what is wrong, and looks for another."""
    path = run.checkpoint_path(20)
    harm(path)
    assert store.newest(run) == run.checkpoint_path(10)
    for read in (store.verify, lambda path: store.load_parts(path, make_parts())):
        with pytest.raises(CheckpointError, match=r"step_00000020 .*earlier") as raised:
            read(path)
        assert "\n" not in str(raised.value)


def test_who_samples_has_no_need_of_the_optimizer(run: RunDirectory) -> None:
    """A copy without it is whole enough, but nothing to train on from."""
    path = run.checkpoint_path(20)
    shutil.rmtree(path / "optimizer")
    assert store.newest(run) == run.checkpoint_path(10)
    assert store.newest(run, "ema/main") == path
    assert store.newest(run, "ema/other") is None
    assert store.load_trainer(path, store.Trainer) == {"global_step": 20}
    loaded = {"ema/main": {"weight": torch.zeros(64, 64)}}
    store.load_parts(path, loaded)
    assert torch.equal(loaded["ema/main"]["weight"], torch.full((64, 64), 21.0))
    with pytest.raises(CheckpointError, match=r"optimizer/\.metadata is missing"):
        store.verify(path)


def test_there_may_be_none(tmp_path: Path, alone: World) -> None:
    """A run that was never saved has no newest checkpoint."""
    run = RunDirectory(tmp_path)
    assert store.newest(run) is None
    assert store.newest_on_all(run, alone) == (None, ())


def test_all_may_be_damaged(run: RunDirectory, alone: World) -> None:
    """Then there is nothing to go on from, and all are told of, the newest first."""
    for step in (10, 20):
        _flip_a_bit(run.checkpoint_path(step))
    found, passed_over = store.newest_on_all(run, alone)
    assert found is None
    assert [run.step_of(path) for path, _ in passed_over] == [20, 10]


def test_later_ones_can_be_left_out_of_account(run: RunDirectory, alone: World) -> None:
    """A rollback goes to a step, or where that is damaged to one before it."""
    assert store.newest_on_all(run, alone, at_most=19) == (run.checkpoint_path(10), ())
    assert store.newest_on_all(run, alone, at_most=9) == (None, ())
    assert store.newest_on_all(run, alone, at_most=20).path == run.checkpoint_path(20)


def test_somebodys_copy_is_no_checkpoint_of_the_run(run: RunDirectory, alone: World) -> None:
    """Whatever it is called."""
    for name in ("step_00000030.bak", "step_30", "step_x"):
        shutil.copytree(run.checkpoint_path(20), run.checkpoints_path / name)
    assert store.newest_on_all(run, alone) == (run.checkpoint_path(20), ())


@pytest.mark.parametrize("name", ["model/.metadata", "model/__0_0.distcp", "trainer.json"])
@pytest.mark.parametrize("is_verified", [False, True])
def test_garbled_bytes_are_an_error_that_names_the_file(
    run: RunDirectory, make_parts: MakeParts, name: str, is_verified: bool
) -> None:
    """Also where they were not compared before, loading fails with what to do instead."""
    path = run.checkpoint_path(20)
    file = path / name
    file.write_bytes(b"\xff" * file.stat().st_size)

    def load() -> None:
        if name == "trainer.json":
            store.load_trainer(path, store.Trainer)
        store.load_parts(path, make_parts(), is_verified=is_verified)

    with pytest.raises(CheckpointError, match=name.split("/")[0]) as raised:
        load()
    assert "earlier checkpoint" in str(raised.value)
    assert "\n" not in str(raised.value)


def test_parts_that_are_not_read_may_be_damaged(run: RunDirectory) -> None:
    """A sampler does not wait for the checksums of what it does not load."""
    _flip_a_bit(run.checkpoint_path(20))
    loaded = {"model": {"bias": torch.zeros(3)}}
    store.load_parts(run.checkpoint_path(20), loaded)
    assert loaded["model"]["bias"].tolist() == [20.0] * 3


@pytest.mark.parametrize(
    "weights",
    [{"weight": torch.zeros(64, 32), "bias": torch.zeros(3)}, {"another": torch.zeros(2)}],
    ids=["other shape", "other name"],
)
def test_another_models_state_is_refused(run: RunDirectory, weights: store.State) -> None:
    """A tensor of another name or shape is an error, not a silent rest."""
    with pytest.raises(CheckpointError, match="recipe that the run was started with") as raised:
        store.load_parts(run.checkpoint_path(20), {"model": weights})
    assert "\n" not in str(raised.value)


def test_abandoned_steps_are_deleted(run: RunDirectory, save: Save, alone: World) -> None:
    """A run that went back would else find them in its way, also those that a server needs."""
    save(run, 30)
    heartbeat = {"server": "evaluator", "time": "2026-01-01", "needs": [30]}
    ServerDirectory(run, "evaluator").write_heartbeat(heartbeat)
    store.abandon(run, 10)
    assert [path.name for path in run.checkpoints_path.iterdir()] == ["step_00000010"]
    assert store.newest_on_all(run, alone).path == run.checkpoint_path(10)


def test_a_checkpoint_says_what_is_in_it(run: RunDirectory) -> None:
    """Model, averages and optimizer lie apart, so that one can be left behind."""
    files = json.loads((run.checkpoint_path(20) / "COMMITTED").read_text())["files"]
    parts = {name.rpartition("/")[0] for name in files}
    assert parts == {"model", "ema/main", "optimizer", ""}
