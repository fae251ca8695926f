"""A checkpoint is whole or it does not exist; whatever is damaged is named."""

import json
import resource
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from longtake.checkpoint import store
from longtake.errors import CheckpointError
from longtake.parallel.mesh import World
from longtake.run_dir import RunDirectory

_ALONE = World(0, 0, 1, torch.device("cpu"), None)


def _parts(value: float = 0.0) -> dict[str, store.State]:
    return {
        "model": {"weight": torch.full((64, 64), value), "bias": torch.full((3,), value)},
        "ema": {"weight": torch.full((64, 64), value + 1)},
        "optimizer": {"state.weight.step": torch.tensor(value)},
    }


def _save(run: RunDirectory, step: int) -> Path:
    return store.save(run, step, _parts(float(step)), {"global_step": step}, _ALONE)


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    """A run directory with checkpoints of the steps 10 and 20."""
    run = RunDirectory(tmp_path / "run")
    for step in (10, 20):
        _save(run, step)
    return run


def _data_file(path: Path) -> Path:
    return next((path / "ema").glob("*.distcp"))


def _load(path: Path) -> None:
    store.load_parts(path, _parts())


def _truncate(path: Path) -> None:
    file = _data_file(path)
    file.write_bytes(file.read_bytes()[:-1])


def _lose_a_file(path: Path) -> None:
    _data_file(path).unlink()


def _uncommit(path: Path) -> None:
    (path / "COMMITTED").unlink()


def _garble_the_commitment(path: Path) -> None:
    (path / "COMMITTED").write_text('{"files": ')


_DAMAGES = [_truncate, _lose_a_file, _uncommit, _garble_the_commitment]


def test_what_was_saved_is_loaded(run: RunDirectory) -> None:
    """Every tensor comes back to the bit, into the tensors that were given."""
    loaded = _parts()
    weight = loaded["model"]["weight"]
    path = run.checkpoint_path(20)
    store.load_parts(path, loaded)
    torch.testing.assert_close(loaded, _parts(20.0), rtol=0, atol=0)
    assert loaded["model"]["weight"] is weight
    assert store.load_trainer(path) == {"global_step": 20}


def test_one_part_can_be_loaded_without_the_others(run: RunDirectory) -> None:
    """A sampler reads the averages and nothing else."""
    loaded = {"ema": {"weight": torch.zeros(64, 64)}}
    store.load_parts(run.checkpoint_path(10), loaded)
    assert torch.equal(loaded["ema"]["weight"], torch.full((64, 64), 11.0))


@pytest.mark.parametrize("damage", _DAMAGES)
def test_a_damaged_checkpoint_is_passed_over(
    run: RunDirectory, damage: Callable[[Path], None]
) -> None:
    """The newest whole one is used; reading the damaged one says in a sentence what is wrong."""
    path = run.checkpoint_path(20)
    damage(path)
    assert store.newest(run) == run.checkpoint_path(10)
    assert store.passed_over(run, 10) == [path]
    for read in (store.verify, store.load_trainer, _load):
        with pytest.raises(CheckpointError, match=r"step_00000020 .*earlier") as raised:
            read(path)
        assert "\n" not in str(raised.value)


def test_there_may_be_none(tmp_path: Path) -> None:
    """A run that was never saved has no newest checkpoint."""
    run = RunDirectory(tmp_path)
    assert store.newest(run) is None
    assert store.passed_over(run, 0) == []


@pytest.mark.parametrize("name", ["model/.metadata", "model/__0_0.distcp", "trainer.json"])
def test_garbled_bytes_are_an_error_that_names_the_file(run: RunDirectory, name: str) -> None:
    """Where sizes are right but bytes are not, loading fails with what to do instead."""
    path = run.checkpoint_path(20)
    file = path / name
    file.write_bytes(b"\xff" * file.stat().st_size)
    read = store.load_trainer if name == "trainer.json" else _load
    with pytest.raises(CheckpointError, match=name.split("/")[0]) as raised:
        read(path)
    assert "earlier checkpoint" in str(raised.value)
    assert "\n" not in str(raised.value)


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


def test_a_save_after_an_interrupted_one_works(run: RunDirectory) -> None:
    """What an interrupted save left behind is replaced, and then nothing is left of it."""
    aside = run.checkpoints_path / ".step_00000030.partial"
    shutil.copytree(run.checkpoint_path(20), aside)
    (aside / "model" / "stray").write_text("of the interrupted save")
    store.verify(_save(run, 30))
    committed = json.loads((run.checkpoint_path(30) / "COMMITTED").read_text())
    assert "model/stray" not in committed["files"]
    assert not aside.exists()


def test_a_damaged_checkpoint_is_replaced_when_its_step_is_run_again(run: RunDirectory) -> None:
    """A run that went on from step 10 saves step 20 anew."""
    _truncate(run.checkpoint_path(20))
    _save(run, 20)
    assert store.newest(run) == run.checkpoint_path(20)
    assert sorted(path.name for path in run.checkpoints_path.iterdir()) == [
        "step_00000010",
        "step_00000020",
    ]


def test_only_the_newest_are_kept(run: RunDirectory) -> None:
    """Older ones are deleted, and with them what interrupted saves and deletions left."""
    _save(run, 30)
    for leftover in (".step_00000010.deleted", ".step_00000005.partial"):
        (run.checkpoints_path / leftover / "model").mkdir(parents=True)
    store.keep_newest(run, 2)
    names = sorted(path.name for path in run.checkpoints_path.iterdir())
    assert names == ["step_00000020", "step_00000030"]


def test_damaged_ones_do_not_count_as_kept(run: RunDirectory) -> None:
    """A run resumed before a damaged checkpoint keeps what it saves, not the damaged one."""
    _save(run, 30)
    _truncate(run.checkpoint_path(30))
    _save(run, 25)
    store.keep_newest(run, 1)
    assert [path.name for path in run.checkpoints_path.iterdir()] == ["step_00000025"]
    assert store.newest(run) == run.checkpoint_path(25)


def test_a_full_disk_is_one_sentence_and_harms_nothing(run: RunDirectory) -> None:
    """A save that cannot be written says so; the older checkpoints stay whole."""
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8192, limit[1]))
    try:
        with pytest.raises(CheckpointError, match=r"step 30 .* cannot be written") as raised:
            _save(run, 30)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert "\n" not in str(raised.value)
    assert store.newest(run) == run.checkpoint_path(20)
    _save(run, 30)
