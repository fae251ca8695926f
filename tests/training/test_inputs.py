"""A step waits for its device once. Run as a program, this file trains on a device of its own.

The device stands in for a GPU: its tensors hide tensors of the CPU, and every operation that would
make the host wait for a GPU is counted: reading a number, and each copy that is not `non_blocking`.
No device of torch itself counts them on a machine without a GPU: the meta device has no numbers to
read, and CPU tensors do not tell host from device.

It has a second stream. Every operation notes on which stream it is queued, and is a race if it uses
what the other stream makes without having waited for it, or without having kept its memory.
"""

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.build import ALONE, TINY_WAN, MakeRecipe, quiet_session, wait_until
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from longtake import config
from longtake.config import Recipe
from longtake.data.batch import Batch
from longtake.data.loader import Loader
from longtake.models.components import assemble
from longtake.models.text import NO_CAPTION
from longtake.parallel.mesh import World
from longtake.training.build import build_state
from longtake.training.inputs import InputQueue, encode_captions, prepare
from longtake.training.latent_cache import captions_of
from longtake.training.statistics import NormStats, reduce_statistics
from longtake.training.step import apply_update, compute_gradients, prepare_next

_NAME = "standin"
_aten = torch.ops.aten
_WAITING = (_aten._local_scalar_dense.default, _aten.equal.default, _aten.nonzero.default)
_waits: Counter[str] = Counter()
_streams: dict[str, Any] = {}  # "now", operations queued on each, and what each has waited for
_races: list[str] = []
_encoded: Counter[str] = Counter()  # convolutions without gradient, by stream


class _OnDevice(Tensor):
    """A tensor of the stand-in; its numbers are those of `_held`, on the CPU."""

    _held: Any
    _stream: str
    _place: int
    _is_kept: bool
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
        made._stream, made._place = _streams.get("now", "main"), _streams.get("queued", 0)
        made._is_kept = False  # by the other stream
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
    _note_races(func, [each for each in given if isinstance(each, _OnDevice)])
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


def _note_races(func: Any, given: list[_OnDevice]) -> None:
    if not _streams:
        return
    now = _streams["now"]
    _streams["queued"] += 1
    _encoded[now] += func is _aten.convolution.default and not torch.is_grad_enabled()
    for each in given:
        is_reached = each._place <= _streams["reached"][now]
        is_kept = each._is_kept or each._stream == "main"  # the encoders' weights stay
        if each._stream != now and not (is_reached and is_kept):
            _races.append(f"{func} on {now} of {tuple(each.shape)} from {each._stream}")


class _SideStream:
    """The stand-in's second stream."""

    def __init__(self) -> None:
        queued = _streams.get("queued", 0)
        _streams.update(now="main", queued=queued, reached={"main": -1, "side": queued})

    @contextmanager
    def running(self) -> Iterator[None]:
        _streams["now"] = "side"
        yield
        _streams["now"] = "main"

    def record(self) -> int:
        return int(_streams["queued"])

    def hand_over(self, done: int, tensors: Iterable[Any]) -> None:
        _streams["reached"]["main"] = max(_streams["reached"]["main"], done)
        for tensor in tensors:
            tensor._is_kept = True

    def pin(self, tensor: Tensor) -> Tensor:
        return tensor


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
    session = quiet_session(recipe, world)
    state = build_state(session, parts)
    norms = NormStats(parts.model, parts.family.blocks(parts.model), world)
    for batch in batches:
        _waits.clear()
        losses = compute_gradients(session, state, batch)
        state.inputs.draw_ahead(loader)
        facts = reduce_statistics(session, losses, batch, state, norms)
        with norms.track_update():
            apply_update(session, state, facts.statistics.grad_norm, facts.scale, batch.position)
        yield (
            [*losses.losses, facts.statistics.grad_norm, facts.statistics.weight_norm],
            dict(_waits),
        )


def _train_encoding(
    recipe: Recipe, device: torch.device, *, ahead: bool
) -> Iterator[tuple[list[float], dict[str, int]]]:
    """Losses of each step, and the convolutions of encoders that were queued in it, by stream.

    In the second step a clip of the next batch is quarantined after it was encoded.
    """
    loader = Loader(recipe.data, batch_size=recipe.training.global_batch_size, seed=recipe.seed)
    parts = assemble(recipe, captions_of(loader), None)
    torch.__future__.set_swap_module_params_on_conversion(True)
    parts.codec.to(device)
    parts.text.to(device)
    world = World(0, 0, 1, device, None)
    session = quiet_session(recipe, world)
    state = build_state(session, parts)
    queue: Any = state.inputs
    queue._side, queue.encodes_ahead = _SideStream() if ahead else None, ahead
    for number, batch in enumerate(loader.batches(5)):
        _encoded.clear()
        losses = compute_gradients(session, state, batch)
        if number < 4:
            following = wait_until(loader.decoded_next)  # by a thread
            prepare_next(session, state, loader)
        if number == 1:
            loader.quarantine.add({following.identities[0]: "another rank could not decode it"})
        apply_update(session, state, 1.0, 1.0, batch.position)
        yield [*losses.losses, *batch.weights.tolist()], dict(+_encoded)


@pytest.fixture(scope="module")
def on_standin(
    small_recipe_in: Callable[[Path], MakeRecipe], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    """What this file prints as a program."""
    folder = tmp_path_factory.mktemp("standin")
    recipe = small_recipe_in(folder)(
        *TINY_WAN, "trainable.kind=lora", "trainable.rank=2", "data.caption_dropout=0.5",
        "training.global_batch_size=4", "training.micro_batch_size=1",
    )  # fmt: skip
    path = folder / "recipe.toml"
    path.write_text(config.dump(recipe))
    # Not by the warm server, which has made a backward pass: then torch has counted devices.
    paths = [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]
    ended = subprocess.run(
        [sys.executable, __file__, str(path)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))},
        capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    found: dict[str, Any] = json.loads(ended.stdout)
    return found


def test_a_step_waits_once_and_no_micro_batch_does(on_standin: dict[str, Any]) -> None:
    """And it is the step of a CPU."""
    assert on_standin["waits"] == [1, 1, 1]


def test_encoders_work_one_micro_batch_ahead(on_standin: dict[str, Any]) -> None:
    """Without a race, with the losses of a run in line, also where another clip comes instead."""
    assert on_standin["ahead"] == on_standin["in_line"]
    assert on_standin["races"] == []
    encoded = on_standin["encoded"]
    assert {name for each in encoded for name in each} == {"side"}
    clip = encoded[-1]["side"] // 3  # of four, one was encoded in the step before
    assert [each["side"] / clip for each in encoded] == [5, 4, 5, 4, 3]


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
        size = recipe.training.micro_batch_size
        found, wanted = (list(each.micro_batches(batch, size)) for each in (queue, plain))
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
    standin = torch.device(_NAME)
    with _Device():  # type: ignore[no-untyped-call]
        steps = list(_train(recipe, standin))
        in_line = [losses for losses, _ in _train_encoding(recipe, standin, ahead=False)]
        ahead = list(_train_encoding(recipe, standin, ahead=True))
    for (numbers, _), wanted in zip(steps, on_cpu, strict=True):  # torch takes other kernels there
        assert numbers == pytest.approx(wanted, rel=1e-4)
    for _, waits in steps:
        assert +Counter(waits) == Counter(tolist=1)
    found = {
        "waits": [sum(waits.values()) for _, waits in steps],
        "in_line": in_line,
        "ahead": [losses for losses, _ in ahead],
        "encoded": [counts for _, counts in ahead],
        "races": _races,
    }
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    _main(Path(sys.argv[1]))
