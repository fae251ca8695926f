"""A step waits for its device once. Run as a program, this file trains on a device of its own.

The device stands in for a GPU: its tensors hide tensors of the CPU, and every operation that would
make the host wait for a GPU is counted: reading a number, and each copy that is not `non_blocking`.
No device of torch itself counts them on a machine without a GPU: the meta device has no numbers to
read, and CPU tensors do not tell host from device.
"""

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from tests.build import ALONE, TINY_WAN, MakeRecipe
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from longtake import config
from longtake.config import Recipe
from longtake.data.loader import Batch, Loader
from longtake.models.build import assemble
from longtake.models.text import NO_CAPTION
from longtake.parallel.mesh import World
from longtake.run_dir import RunDirectory
from longtake.training.build import build_state
from longtake.training.inputs import InputQueue, encode_captions, prepare
from longtake.training.latent_cache import captions_of
from longtake.training.loop import apply_update, compute_gradients
from longtake.training.session import Session
from longtake.training.statistics import NormStats, local_facts, reduce_statistics

_ROOT = Path(__file__).resolve().parents[2]
_NAME = "standin"
_aten = torch.ops.aten
_WAITING = (_aten._local_scalar_dense.default, _aten.equal.default, _aten.nonzero.default)
_waits: Counter[str] = Counter()


class _OnDevice(Tensor):
    """A tensor of the stand-in; its numbers are those of `_held`, on the CPU."""

    _held: Any
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, inner: Tensor) -> "_OnDevice":
        made: _OnDevice = Tensor._make_wrapper_subclass(
            cls,
            inner.size(),
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=torch.device(_NAME, 0),
            requires_grad=inner.requires_grad,
        )
        made._held = inner
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return _run(func, args, kwargs or {})

    def tolist(self) -> Any:
        _waits["tolist"] += 1
        return self._held.tolist()


class _Device(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


def _run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Run an operation on the CPU's tensors; count it if a GPU would make the host wait."""
    given = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
    is_there = any(isinstance(each, _OnDevice) for each in given)
    wrappers = {id(each._held): each for each in given if isinstance(each, _OnDevice)}
    target = kwargs.get("device")
    goes_there = is_there
    if target is not None:
        goes_there = torch.device(target).type == _NAME
        kwargs = kwargs | {"device": torch.device("cpu")}
    if func is _aten._to_copy.default and goes_there != is_there:
        _waits["copy"] += not kwargs.get("non_blocking", False)
    if func is _aten.copy_.default and len({isinstance(each, _OnDevice) for each in given}) == 2:
        _waits["copy"] += not (len(args) > 2 and args[2])
    if func in _WAITING and is_there:
        _waits[str(func)] += 1
    inner = tree_map(lambda each: getattr(each, "_held", each), (args, kwargs))
    made = func(*inner[0], **inner[1])
    if not goes_there:
        return made

    def wrapped(each: Any) -> Any:
        if not isinstance(each, Tensor):
            return each
        return wrappers[id(each)] if id(each) in wrappers else _OnDevice(each)

    return tree_map(wrapped, made)


def _cached(batch: Batch, recipe: Recipe, parts: Any) -> Batch:
    """As a cache would give it."""
    return replace(
        batch,
        videos=batch.videos[:, :, :0],
        latents=prepare(batch, parts, recipe, ALONE.device).latents,
        conditioning=encode_captions(parts.text, batch.captions),
        no_caption=encode_captions(parts.text, [NO_CAPTION]),
    )


def _train(recipe: Recipe, device: torch.device) -> Iterator[tuple[list[float], dict[str, int]]]:
    """Losses and norms of each step, and what it waited for."""
    loader = Loader(recipe.data, batch_size=recipe.training.global_batch_size, seed=recipe.seed)
    parts = assemble(recipe, captions_of(loader), None)
    batches = [_cached(batch, recipe, parts) for batch in loader.batches(3)]
    world = World(0, 0, 1, device, None)
    session = Session(recipe, RunDirectory(recipe.out), world, Console(quiet=True), "fp32")
    state = build_state(session, parts)
    norms = NormStats(parts.model, parts.family.blocks(parts.model), world)
    local = local_facts(loader, stop=None, save_failed=False)
    for batch in batches:
        _waits.clear()
        losses = compute_gradients(session, state, batch)
        state.inputs.draw_ahead(loader)
        facts = reduce_statistics(session, losses, batch, state, norms, local)
        with norms.track_update():
            apply_update(session, state, facts.statistics.grad_norm, facts.scale)
        yield (
            [*losses.losses, facts.statistics.grad_norm, facts.statistics.weight_norm],
            dict(_waits),
        )


def test_a_step_waits_once_and_no_micro_batch_does(
    small_recipe: MakeRecipe, tmp_path: Path
) -> None:
    """And it is the step of a CPU."""
    recipe = small_recipe(
        *TINY_WAN, "trainable.kind=lora", "trainable.rank=2", "data.caption_dropout=0.5",
        "training.global_batch_size=4", "training.micro_batch_size=1",
    )  # fmt: skip
    path = tmp_path / "recipe.toml"
    path.write_text(config.dump(recipe))
    ended = subprocess.run(
        [sys.executable, __file__, str(path)], env=os.environ | {"PYTHONPATH": str(_ROOT)},
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.split() == ["1", "1", "1"]


def test_what_is_drawn_ahead_is_what_is_drawn_later(
    small_recipe: MakeRecipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the thread that prepares inputs for a GPU; here they stay on the CPU."""
    recipe = small_recipe("training.global_batch_size=4", "training.micro_batch_size=2")
    loader = Loader(recipe.data, batch_size=4, seed=recipe.seed)
    parts, meta = assemble(recipe, captions_of(loader), None), torch.device("meta")
    queue, plain = InputQueue(parts, recipe, meta), InputQueue(parts, recipe, ALONE.device)
    monkeypatch.setattr(queue, "_device", ALONE.device)
    for batch in loader.batches(3):
        found, wanted = list(queue.micro_batches(batch)), list(plain.micro_batches(batch))
        for one, other in zip(found, wanted, strict=True):
            assert torch.equal(one.examples.noise, other.examples.noise)
            assert torch.equal(one.examples.latents, other.examples.latents)
            assert one.sigmas == other.sigmas
            assert tuple(one.examples.sigmas.tolist()) == one.sigmas
        upcoming = loader.upcoming()
        queue.draw_ahead(loader)
        assert upcoming is None or upcoming.seeds
    assert queue._thread is not None
    assert plain._thread is None


def _main(path: Path) -> None:
    from torch.utils import backend_registration as backends

    class Backend(backends._DummyBackendModule):
        def get_amp_supported_dtype(self) -> list[torch.dtype]:
            return [torch.bfloat16]

    recipe = config.load(path)
    # Before the first backward pass, in which torch counts devices.
    backends._setup_privateuseone_for_python_backend(_NAME, backend_module=Backend())
    on_cpu = [numbers for numbers, _ in _train(recipe, torch.device("cpu"))]
    with _Device():  # type: ignore[no-untyped-call]
        steps = list(_train(recipe, torch.device(_NAME)))
    for (numbers, _), wanted in zip(steps, on_cpu, strict=True):  # torch takes other kernels there
        assert numbers == pytest.approx(wanted, rel=1e-4)
    for _, waits in steps:
        assert +Counter(waits) == Counter(tolist=1)
        sys.stdout.write(f"{sum(waits.values())}\n")


if __name__ == "__main__":
    _main(Path(sys.argv[1]))
