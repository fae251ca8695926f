"""Builds the optimizers that a recipe names, and assigns each trained parameter to one."""

import importlib.util
import logging
import math
import os
import re
import shutil
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor, Shard
from torch.optim import AdamW, Optimizer

from longtake.config import OptimizerSection, RateRule
from longtake.errors import RecipeError
from longtake.formatting import did_you_mean
from longtake.models.numerics import Precision
from longtake.models.trainable import matches_any
from longtake.optim.master_weights import MasterAdamW
from longtake.optim.muon import Muon
from longtake.optim.own import own_optimizer, refuse_own_optimizer
from longtake.optim.prodigy import Prodigy

EIGHT_BIT_BLOCK = 256
"""Number of elements of an 8-bit optimizer state that share a scale."""
_MIN_EIGHT_BIT_NUMBERS = 4096  # torchao keeps smaller states in fp32 as well
_EPS = 1e-8  # where the recipe sets none; it is also torch's default
_COMPILERS = ("g++", "c++", "clang++", "gcc", "cc", "clang")


def build_optimizers(
    model: nn.Module,
    blocks: Sequence[nn.Module],
    section: OptimizerSection,
    precision: Precision,
    replicas: ProcessGroup | None = None,
) -> list[Optimizer]:
    """Build the optimizers of a model; each trained parameter is in one of them.

    AdamW updates what no other takes. Muon takes the blocks' matrices, 8-bit AdamW the parameters
    that are large enough for it. Weights that are not fp32, or whose states are offloaded, are
    updated in fp32 copies. Ranks of `replicas` have the same whole parameters, and share work.

    Raises:
        RecipeError: an 8-bit optimizer is wanted, but torchao or a compiler is not installed; or a
            class of the user's own cannot be found, made, saved or resumed, or would round bf16
            weights; or one of `optimizer.rules` is for no weight.
    """
    chosen = choose_optimizers(model, blocks, section)
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    rate, betas, decay = section.learning_rate, section.betas, section.weight_decay
    eps = section.eps or _EPS
    optimizers: list[Optimizer] = []
    if section.offload or any(parameter.dtype != torch.float32 for parameter in chosen.adamw):
        optimizers.append(
            MasterAdamW(chosen.adamw, rate, betas, eps, decay, offload=section.offload)
        )
    elif chosen.adamw:
        # torch's default (foreach) holds one more copy of all trained parameters during a step.
        optimizers.append(AdamW(chosen.adamw, rate, betas, eps, decay, fused=True))
    if chosen.eight_bit:
        optimizers.append(_eight_bit_adamw(chosen.eight_bit, section))
    if chosen.own:
        refuse_own_optimizer(chosen.own, section)
        optimizers.append(own_optimizer(chosen.own, section))
    if chosen.muon:
        muon_rate = section.muon_learning_rate
        optimizers.append(
            Muon(chosen.muon, lr=muon_rate, weight_decay=decay, dtype=dtype, replicas=replicas)
        )
    if chosen.prodigy:
        optimizers.append(Prodigy(chosen.prodigy, rate, betas, decay, eps))
    rules = rules_of_weights(model, section)
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            # The schedule multiplies this rate at each step.
            group["base_lr"] = float(group["lr"])
        if rules:
            _divide_by_rate(optimizer, rules)
    return optimizers


def rules_of_weights(model: nn.Module, section: OptimizerSection) -> dict[nn.Parameter, RateRule]:
    """Return the first of `optimizer.rules` that matches a trained parameter, if any does.

    Raises:
        RecipeError: a rule is for no parameter.
    """
    found: dict[nn.Parameter, RateRule] = {}
    known = set[str]()
    for name, parameter in model.named_parameters() if section.rules else ():
        parts = name.split(".") if parameter.requires_grad else []
        # A rule for a layer or a block is one for all weights inside.
        within = [".".join(parts[:count]) for count in range(1, len(parts) + 1)]
        known.update(re.sub(r"\.\d+(?=\.|$)", ".*", each) for each in within)
        for rule in section.rules:
            if any(matches_any(each, rule.layers) for each in within):
                found[parameter] = rule
                break
    for place, rule in enumerate(section.rules):
        if rule not in found.values():
            wanted = rule.layers[0]
            ends = {".".join(each.split(".")[-wanted.count(".") - 1 :]) for each in known}
            raise RecipeError(
                f"optimizer.rules[{place}].layers: {', '.join(rule.layers)} match no trained "
                "weight, or only such as an earlier rule matches; "
                + did_you_mean(wanted, known if "*" in wanted else ends)
            )
    return found


def _divide_by_rate(optimizer: Optimizer, rules: Mapping[nn.Parameter, RateRule]) -> None:
    """Make a group of an optimizer's parameters for each factor of their learning rate."""
    (group,) = optimizer.param_groups
    by_factor: dict[float, list[nn.Parameter]] = {}
    for parameter in group["params"]:
        rule = rules.get(parameter)
        by_factor.setdefault(rule.factor if rule else 1.0, []).append(parameter)
    rate = group["base_lr"]
    # The group that is there keeps some of them: an empty one has nothing to save.
    (first, group["params"]), *others = by_factor.items()
    group["base_lr"] = rate * first
    for factor, parameters in others:
        optimizer.add_param_group({"params": parameters, "base_lr": rate * factor})


class ParametersByOptimizer(NamedTuple):
    adamw: list[nn.Parameter]
    eight_bit: list[nn.Parameter]
    muon: list[nn.Parameter]
    own: list[nn.Parameter]
    prodigy: list[nn.Parameter]


def choose_optimizers(
    model: nn.Module, blocks: Sequence[nn.Module], section: OptimizerSection
) -> ParametersByOptimizer:
    """Assign each trained parameter to an optimizer; parameters may be on the meta device."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    in_blocks = {id(parameter) for block in blocks for parameter in block.parameters()}
    chosen = ParametersByOptimizer([], [], [], [], [])
    for parameter in trained:
        if ":" in section.kind:
            chosen.own.append(parameter)
        elif section.kind == "muon" and id(parameter) in in_blocks and parameter.ndim == 2:
            chosen.muon.append(parameter)
        # By the sizes of all ranks' shards, since ranks must choose alike.
        elif section.kind == "adamw8bit" and has_eight_bit_state(parameter):
            chosen.eight_bit.append(parameter)
        elif section.kind == "prodigy":
            chosen.prodigy.append(parameter)
        else:
            chosen.adamw.append(parameter)
    return chosen


# --- AdamW with 8-bit states ------------------------------------------------------------------
# By torchao; after Dettmers et al., "8-bit Optimizers via Block-wise Quantization" (2022).


def refuse_missing_torchao(section: OptimizerSection) -> None:
    """Refuse an 8-bit optimizer that could not be built here; imports nothing.

    Raises:
        RecipeError: torchao is not installed, or there is no compiler for its update.
    """
    if section.kind != "adamw8bit":
        return
    if importlib.util.find_spec("torchao") is None:
        raise RecipeError(
            'optimizer.kind = "adamw8bit" needs torchao, which is not installed. Install it with: '
            'pip install "longtake[eightbit]" (or: pip install torchao). Without it, '
            "--set optimizer.kind=adamw --set optimizer.offload=true also keeps the optimizer's "
            "states out of the GPU's memory."
        )
    if not has_cpp_compiler():
        raise RecipeError(
            'optimizer.kind = "adamw8bit" compiles its update when it first runs, and there is no '
            "C++ compiler here. Install g++ (or set CXX), or take --set optimizer.kind=adamw."
        )


def has_cpp_compiler() -> bool:
    named = [os.environ.get(name, "") for name in ("CXX", "CC")]
    return any(shutil.which(compiler) for compiler in (*named, *_COMPILERS) if compiler)


def has_eight_bit_state(parameter: Tensor) -> bool:
    """Return True if a parameter's optimizer states can be kept in 8 bits, on every rank."""
    sizes = [parameter.numel()]
    if isinstance(parameter, DTensor):
        # FSDP2 cuts the rows into equal parts, the last of which may be smaller.
        mesh, placements = parameter.device_mesh, parameter.placements
        sharded = [mesh.size(dim) for dim, at in enumerate(placements) if isinstance(at, Shard)]
        num_parts, (rows, *columns) = math.prod(sharded), parameter.shape
        share = math.ceil(rows / num_parts)
        parts = [min(share, max(0, rows - share * number)) for number in range(num_parts)]
        sizes = [part * math.prod(columns) for part in parts]
    return all(size >= _MIN_EIGHT_BIT_NUMBERS and size % EIGHT_BIT_BLOCK == 0 for size in sizes)


def _eight_bit_adamw(parameters: Sequence[Tensor], section: OptimizerSection) -> Optimizer:
    """Build torchao's AdamW for parameters that have 8-bit states.

    bf16 weights have no fp32 copies: an update is rounded up or down at random, so that small ones
    are not lost on average. The seed follows from the step alone: a resumed run rounds alike.
    """
    refuse_missing_torchao(section)
    return _seeded_class()(
        parameters,
        lr=section.learning_rate,
        betas=section.betas,
        eps=section.eps or _EPS,
        weight_decay=section.weight_decay,
        block_size=EIGHT_BIT_BLOCK,
        bf16_stochastic_round=True,
    )


def gpus_of(parameters: Iterable[Tensor]) -> list[torch.device]:
    return list({each.device: None for each in parameters if each.device.type == "cuda"})


def _seeded_class() -> Callable[..., Optimizer]:
    logging.getLogger("torchao").setLevel(logging.ERROR)  # it logs which kernels are missing
    # torch warns that torchao's tensors have no stable name for a cache of compiled code.
    warnings.filterwarnings("ignore", ".*_stable_hash_for_caching", UserWarning)
    from torchao.optim import AdamW8bit

    class SeededAdamW8bit(AdamW8bit):  # type: ignore[misc]
        """torchao's AdamW8bit, but with rounding that is the same after an interruption."""

        @torch.no_grad()
        def step(self, closure: Callable[[], float] | None = None) -> Any:
            # The run's own random numbers do not change by the rounding's.
            parameters = [p for group in self.param_groups for p in group["params"]]
            with torch.random.fork_rng(devices=gpus_of(parameters)):
                steps = (int(self.state[p]["step"]) for p in parameters if p in self.state)
                torch.manual_seed(max(steps, default=0))
                return super().step(closure)

    return SeededAdamW8bit
