"""Runs that are resumed on other data, ranks and workers: no clip is repeated, none is missing.

Here loaders run with a decoder that answers at once, so that many cases fit into seconds; in
test_loader.py some of them run with real files and processes, and in test_course.py all of them
without a loader.
"""

import json
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from longtake.config import DataSection
from longtake.data.catalog import Catalog
from longtake.data.loader import Loader
from longtake.data.window import Window
from longtake.errors import DataChangedError

_CHANGES = ("same", "grown", "shrunk", "halved", "one removed", "one re-encoded", "swapped")
_MOMENTS = ("mid-epoch", "last batch of an epoch", "second resume in a row")
_POLICIES = ("finish", "merge", "restart")
_WORLDS, _WORKERS = (1, 2, 4), (0, 2, 3)
_NUM_EPOCHS = 3


class _Instant:
    """In the place of `longtake.data.decode_worker.DecodePool`: black windows, at once."""

    def __init__(self, *_: object, **__: object) -> None:
        pass

    def close(self) -> None:
        pass

    def submit(self, window: Window, out: NDArray[np.uint8]) -> Future[NDArray[np.uint8]]:
        assert out.shape == window.shape
        out[...] = 0
        future: Future[NDArray[np.uint8]] = Future()
        future.set_result(out)
        return future

    def incidents(self) -> list[Any]:
        return []


@pytest.fixture(scope="module", autouse=True)
def _at_once() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("longtake.data.loader.DecodePool", _Instant)
        yield


@pytest.fixture(scope="module")
def folder(changed_catalogs: dict[str, Catalog], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A catalog file for each change; what runs keep goes below it, too."""
    path = tmp_path_factory.mktemp("catalogs")
    for name, catalog in changed_catalogs.items():
        catalog.save(path / f"{name}.parquet")
    return path


class _Run:
    """A run whose ranks and workers may be others at each launch."""

    def __init__(self, folder: Path, section: Callable[..., DataSection], oracle: Any) -> None:
        self.folder = folder
        self.section = section
        self.oracle = oracle
        self.state: dict[str, Any] | None = None

    def launch(
        self, change: str, world_size: int, workers: int, policy: str, steps: int | None
    ) -> None:
        """Train on so many steps, or to the end, from the last launch's state."""
        loaders = [
            self._loader(change, rank, world_size, workers, policy) for rank in range(world_size)
        ]
        loaders[0].keep_catalogs()
        end = None if steps is None else loaders[0].step + steps
        for shares in zip(*(loader.batches(end) for loader in loaders), strict=True):
            assert len({(share.step, share.epoch, share.bucket) for share in shares}) == 1
            for share in shares:
                for identity, epoch, weight in zip(
                    share.identities, share.epochs, share.weights.tolist(), strict=True
                ):
                    if weight:
                        self.oracle.consume(epoch, identity)
        states = [json.dumps(loader.state_dict()) for loader in loaders]
        assert len(set(states)) == 1
        self.state = json.loads(states[0])

    def _loader(self, change: str, rank: int, world_size: int, workers: int, policy: str) -> Loader:
        data = self.section(
            catalog=self.folder / f"{change}.parquet",
            stages=[{"name": "only", "epochs": _NUM_EPOCHS}],
            workers=workers,
            prefetch_batches=1 + workers,
            on_change=policy,
        )
        kept = self.folder / "kept"
        loader = Loader(data, batch_size=4, rank=rank, world_size=world_size, kept=kept)
        if self.state is not None:
            loader.load_state_dict(self.state)
        return loader


_Pair = tuple[int, int]


def _check(
    run: _Run,
    catalogs: dict[str, Catalog],
    cell: tuple[str, str, str],
    worlds: _Pair,
    workers: _Pair,
) -> None:
    change, moment, policy = cell
    epoch_end = run._loader("same", 0, 1, 0, policy).course.plan.stages[0].streams[0]
    steps = epoch_end.parts[0].leg.epoch_start(1) if moment == "last batch of an epoch" else 5
    run.launch("same", worlds[0], workers[0], "refuse", steps)
    assert run.state is not None
    counted = run.state["epoch"]
    if moment == "last batch of an epoch":
        assert (counted, run.state["step_in_epoch"]) == (1, 0)
    if change != "same":
        with pytest.raises(DataChangedError, match=r"--set data\.on_change=merge"):
            run.launch(change, worlds[1], workers[1], "refuse", None)
        identities = {clip.identity for clip in catalogs[change].clips()}
        run.oracle.change(policy, identities, counted)
    if moment == "second resume in a row":
        run.launch(change, worlds[1], workers[1], policy, 3)
        run.launch(change, worlds[0], workers[0], "refuse", 0)
    run.launch(change, worlds[1], workers[1], policy, None)
    assert run.state["stage"] is None
    run.oracle.check()


@pytest.mark.parametrize("moment", _MOMENTS)
@pytest.mark.parametrize("change", _CHANGES)
def test_every_change_at_every_moment(
    folder: Path,
    section: Callable[..., DataSection],
    changed_catalogs: dict[str, Catalog],
    oracle_of: Callable[[Catalog, int], Any],
    change: str,
    moment: str,
) -> None:
    """Refused, or exact; every pair of ranks and of workers and every policy has its turn."""
    turn = _CHANGES.index(change) + 3 * _MOMENTS.index(moment)
    run = _Run(folder, section, oracle_of(changed_catalogs["same"], _NUM_EPOCHS))
    worlds = (_WORLDS[turn % 3], _WORLDS[turn // 3 % 3])
    workers = (_WORKERS[turn // 2 % 3], _WORKERS[(turn + 1) % 3])
    cell = (change, moment, _POLICIES[turn % 3])
    _check(run, changed_catalogs, cell, worlds, workers)


@settings(max_examples=25, deadline=None)
@given(
    cell=st.tuples(
        st.sampled_from(_CHANGES), st.sampled_from(_MOMENTS), st.sampled_from(_POLICIES)
    ),
    worlds=st.tuples(st.sampled_from(_WORLDS), st.sampled_from(_WORLDS)),
    workers=st.tuples(st.sampled_from(_WORKERS), st.sampled_from(_WORKERS)),
)
def test_any_case_is_exact(
    folder: Path,
    section: Callable[..., DataSection],
    changed_catalogs: dict[str, Catalog],
    oracle_of: Callable[[Catalog, int], Any],
    cell: tuple[str, str, str],
    worlds: _Pair,
    workers: _Pair,
) -> None:
    """Any change, moment, policy, ranks and workers, before and after."""
    run = _Run(folder, section, oracle_of(changed_catalogs["same"], _NUM_EPOCHS))
    _check(run, changed_catalogs, cell, worlds, workers)
