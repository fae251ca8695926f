"""What a plan says ranks send each other is what they send. Run by torchrun: one of four ranks."""

import json
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.build import MakeRecipe, block_names, quiet_session
from torch import Tensor
from torch.distributed.distributed_c10d import _resolve_process_group  # type: ignore[attr-defined]
from torch.utils._python_dispatch import TorchDispatchMode

from longtake import config
from longtake.config import ParallelSection, Recipe
from longtake.data.loader import Loader
from longtake.models.components import assemble
from longtake.models.numerics import Precision
from longtake.parallel.collectives import sum_over_ranks
from longtake.parallel.fsdp import local_shard
from longtake.parallel.mesh import World, arranged, join
from longtake.planner.activation_checkpointing import options_of
from longtake.planner.block_weights import module_bytes
from longtake.planner.devices import CPU
from longtake.planner.memory import MetaStep, _captions, outline_step, static_memory
from longtake.planner.mesh import traffic_of
from longtake.planner.plan import run_blocks
from longtake.training.build import build_state
from longtake.training.step import apply_update, compute_gradients

_MODEL = "model.config={hidden_size=48, num_blocks=3, num_heads=4}"
_ODD = "model.config={hidden_size=48, num_blocks=3, num_heads=3}"
_LORA = ("trainable.kind=lora", "trainable.rank=2")
_LAST = "trainable.targets=['blocks.2.attention.to_qkv']"
_CASES: Mapping[str, tuple[str, ...]] = {
    "replicate": (),
    "replicate, accumulating": ("training.micro_batch_size=1",),
    "shard": ("parallel.strategy=shard",),
    "shard, accumulating": ("parallel.strategy=shard", "training.micro_batch_size=1"),
    "shard, recomputing": ("parallel.strategy=shard", "recompute.policy=all"),
    "shard, LoRA": ("parallel.strategy=shard", *_LORA),
    "shard, the last blocks": ("parallel.strategy=shard", *_LORA, _LAST),
    "shard, bf16 weights": ("parallel.strategy=shard", "model.dtype=bf16"),
    "shard, gathered in bf16": (
        "parallel.strategy=shard",
        "parallel.param_dtype=bf16",
        "training.precision=bf16",
    ),
    "hybrid": ("parallel={strategy='hybrid', shard_size=2}", "training.micro_batch_size=1"),
    "hybrid of a node": ("parallel={strategy='hybrid'}",),
    "sequence": ("parallel={strategy='shard', context=2}",),
    "ring of 2 nodes, recomputing": ("parallel={context=4}", "recompute.policy=save-attention"),
    "ring, recomputing all": ("parallel={context=4}", "recompute.policy=all", _ODD),
}
_NONE = {"gathered": 0, "scattered": 0, "reduced": 0, "tokens": 0, "passed": 0}


def _recipe(make: MakeRecipe, case: str) -> Recipe:
    return make(_MODEL, "training.global_batch_size=8", *_CASES[case])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the ranks leave what they counted."""
    return tmp_path_factory.mktemp("counted")


def test_as_many_bytes_are_sent_as_are_planned(
    small_recipe: MakeRecipe, run_on_ranks: Callable[..., str], folder: Path
) -> None:
    for number, case in enumerate(_CASES):
        (folder / f"{number}.toml").write_text(config.dump(_recipe(small_recipe, case)))
    run_on_ranks(4, __file__, folder)
    counted = json.loads((folder / "counted.json").read_text())
    steps = [outline_step(config.load(folder / f"{n}.toml"), CPU, 4, 2) for n in range(len(_CASES))]
    sent = [each["sent"] for each in counted]
    planned = [_planned(step) for step in steps]
    assert dict(zip(_CASES, sent, strict=True)) == dict(zip(_CASES, planned, strict=True))
    for case, step, each in zip(_CASES, steps, counted, strict=True):
        # Each rank counts its steps, for every parameter.
        assert each["held"] == pytest.approx(_held(step), rel=0.05), case


def _held(step: MetaStep) -> dict[str, int]:
    fixed = static_memory(step)
    return {
        "weights": module_bytes(step.components.model) // step.num_shards,
        "gradients": fixed.gradients,
        "optimizer": fixed.optimizer.device,
        "ema": fixed.ema,
    }


def _planned(step: MetaStep) -> dict[str, int]:
    recipe = step.recipe
    options = options_of(recipe.recompute.chosen(), tuple(step.tracer.subject.blocks))
    traffic = traffic_of(step, step.tracer.trace(options))
    return {
        "gathered": traffic.forward + traffic.backward,
        "scattered": traffic.scattered,
        "reduced": traffic.reduced,
        "tokens": traffic.tokens,
        "passed": traffic.passed,
    }


class _Exchanges(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts what this rank sends to others in exchanges of tokens."""

    def __init__(self, found: Counter[str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._found = found

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops._c10d_functional.all_to_all_single.default:
            tensor, _, sent, group = args
            own = sent[dist.get_rank(_resolve_process_group(group))]
            what = "passed" if sent.count(0) == len(sent) - 1 else "tokens"  # to the next rank only
            self._found[what] += tensor.nbytes * (sum(sent) - own) // sum(sent)
        return func(*args, **(kwargs or {}))


@contextmanager
def _counted() -> Iterator[Counter[str]]:
    """Bytes that a ring would send for what FSDP2 asks torch for."""
    found: Counter[str] = Counter(_NONE)
    names = ("all_gather_single", "reduce_scatter_single", "all_reduce")
    gather, scatter, reduce = (getattr(dist, name) for name in names)

    def counted_gather(output_tensor: Tensor, input_tensor: Tensor, **how: Any) -> Any:
        found["gathered"] += output_tensor.nbytes - input_tensor.nbytes
        return gather(output_tensor, input_tensor, **how)

    def counted_scatter(output: Tensor, input: Tensor, **how: Any) -> Any:  # noqa: A002
        found["scattered"] += input.nbytes - output.nbytes
        return scatter(output, input, **how)

    def counted_reduce(tensor: Tensor, **how: Any) -> Any:
        size = dist.get_world_size(how["group"])
        found["reduced"] += 2 * tensor.nbytes * (size - 1) // size
        return reduce(tensor, **how)

    for name, stand_in in zip(
        names, (counted_gather, counted_scatter, counted_reduce), strict=True
    ):
        setattr(dist, name, stand_in)
    try:
        with _Exchanges(found):
            yield found
    finally:
        for name, real in zip(names, (gather, scatter, reduce), strict=True):
            setattr(dist, name, real)


def _count(recipe: Recipe, everyone: World) -> dict[str, dict[str, int]]:
    """What a step sends and what a rank holds after it."""
    section = recipe.parallel
    of_nodes = section.model_copy(update={"shard_size": section.shard_size or 2})  # GPUs of a node
    world = arranged(World(everyone.rank, 0, 4, everyone.device, None), of_nodes)
    parts = assemble(recipe, _captions(recipe), None)
    run_blocks(options_of(recipe.recompute.chosen(), block_names(parts)), parts)
    precision: Precision = "bf16" if recipe.training.precision == "bf16" else "fp32"
    session = quiet_session(recipe, world, precision)
    state = build_state(session, parts)
    loader = Loader(
        recipe.data,
        batch_size=recipe.training.global_batch_size,
        rank=world.data_rank,
        world_size=world.data_size,
    )
    (batch,) = loader.batches(1)
    with _counted() as sent:
        compute_gradients(session, state, batch)
    gradients = [p.grad for p in parts.model.parameters() if p.grad is not None]
    held = {"weights": _size(parts.model.parameters()), "gradients": _size(gradients)}
    apply_update(session, state, 1.0, 1.0, batch.position)
    states = [each for optimizer in state.optimizers for each in optimizer.state.values()]
    held["optimizer"] = _size(tensor for each in states for tensor in each.values())
    averages = [each for each in state.ema.states()["main"].values() if isinstance(each, Tensor)]
    held["ema"] = _size(averages)
    everyone_s = sum_over_ranks(held, world)  # parameters of a few rows lie with the first ranks
    return {"sent": dict(sent), "held": {what: int(each / 4) for what, each in everyone_s.items()}}


def _size(tensors: Iterable[Tensor]) -> int:
    return sum(local_shard(tensor).nbytes for tensor in tensors)


if __name__ == "__main__":
    os.environ["LOCAL_WORLD_SIZE"] = "2"  # of a node, as the plan has it
    folder_of_ranks = Path(sys.argv[1])
    with join("cpu", ParallelSection()) as joined:
        paths = sorted(folder_of_ranks.glob("*.toml"), key=lambda path: int(path.stem))
        counted = [_count(config.load(path), joined) for path in paths]
        if joined.is_first:
            (folder_of_ranks / "counted.json").write_text(json.dumps(counted))
