"""A user's own optimizer class: built by the recipe's keys, and tried before training."""

import inspect
import io
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from longtake.config import OptimizerSection
from longtake.errors import RecipeError
from longtake.models.pretrained import construct, defaults
from longtake.trust import import_class


def own_optimizer(parameters: Sequence[nn.Parameter], section: OptimizerSection) -> Optimizer:
    """Build an optimizer of the class that `optimizer.kind` names.

    Raises:
        RecipeError: the class cannot be found or constructed, its step cannot be called as
            `step(closure=None)`, as `torch.distributed.checkpoint` calls it, or checkpoints could
            not hold its settings.
    """
    key = f"optimizer.kind {section.kind!r}"
    found = import_class(section.kind, "optimizer.kind")
    if not issubclass(found, Optimizer):
        raise RecipeError(f"{key} is not a torch.optim.Optimizer. Make it a subclass.")
    try:
        inspect.signature(found.step).bind(None, closure=None)
    except TypeError as error:
        raise RecipeError(
            f"{key}: its step{inspect.signature(found.step)} cannot be called as "
            "step(closure=None), which resuming does. Define it as step(self, closure=None)."
        ) from error
    # The first argument of the constructor takes the weights, whatever its name.
    taken = defaults(found.__init__)
    given: dict[str, Any] = {next(iter(taken), "params"): parameters, "lr": section.learning_rate}
    for name in ("betas", "weight_decay", "eps"):
        value = getattr(section, name)
        if name in taken and value is not None:
            given[name] = value
        # The recipe that a run keeps sets every key, so a key that is set is known by its value.
        elif value != OptimizerSection.model_fields[name].default:
            raise RecipeError(f"{key} takes no {name}: remove optimizer.{name}.")
    if twice := given.keys() & section.options.keys():
        raise RecipeError(
            f"optimizer.options.{min(twice)} is set by the recipe's other keys. Remove it."
        )
    made: Optimizer = construct("optimizer.options", found, given | section.options)
    for group in made.param_groups:
        if "lr" not in group:
            raise RecipeError(
                f'{key} has no "lr" in its param_groups, where the schedule sets it. Give it to '
                "Optimizer.__init__ among the defaults."
            )
        for name, value in group.items():
            if name != "params" and not _is_loaded_again(value):
                raise RecipeError(
                    f"{key} has {name} = {value!r} in its param_groups, which a checkpoint cannot "
                    "hold. Keep numbers, texts and tensors there, and all else as attributes."
                )
    return made


def _is_loaded_again(value: Any) -> bool:
    """Return True if a checkpoint can hold a setting of an optimizer.

    A checkpoint's reader runs no code.
    """
    file = io.BytesIO()
    try:
        torch.save(value, file)
        file.seek(0)
        torch.load(file, weights_only=True)
    except Exception:  # what pickling raises depends on the value
        return False
    return True


def refuse_own_optimizer(parameters: Sequence[Tensor], section: OptimizerSection) -> None:
    """Try an optimizer of the user's own on small weights; do nothing for any other kind.

    It makes three steps on the CPU, the last one with a learning rate of 0 as loading does. Weights
    have at most 4 numbers in each dimension. Where a step fails on them, its state is not judged.

    Args:
        parameters: parameters that it would train; they may be on the meta device.
        section: the recipe's optimizer section.

    Raises:
        RecipeError: it cannot be made; bf16 weights would lose small updates; or checkpoints could
            not hold or restore its state.
    """
    if ":" not in section.kind:
        return
    key = f"optimizer.kind {section.kind!r}"
    rounded = next((each.dtype for each in parameters if each.dtype != torch.float32), None)
    if rounded is not None:
        raise RecipeError(
            f"{key}: weights are {str(rounded).removeprefix('torch.')}, in which small updates are "
            'rounded away. Set trainable.dtype = "fp32" for LoRA and modules, or model.dtype = '
            '"fp32".'
        )
    with torch.device("cpu"), torch.random.fork_rng(devices=[]):
        # Small copies are enough: states are judged by their names, types and changes of shape.
        shapes = [[min(size, 4) for size in each.shape] for each in parameters]
        weights = [nn.Parameter(torch.zeros(shape)) for shape in shapes]
        optimizer, states = own_optimizer(weights, section), list[dict[str, str]]()
        # The third step is like that of loading a checkpoint, whose learning rate is 0.
        for is_last in (False, False, True):
            for group in optimizer.param_groups if is_last else ():
                group["lr"] = 0.0
            try:
                _step(optimizer, weights)
            except ZeroDivisionError as error:
                if not is_last:
                    return
                raise RecipeError(
                    f"{key}: a step with lr = 0 divides by it, and resuming makes such a step."
                ) from error
            except Exception:  # the user's own class
                return
            states.append(_describe_states(key, optimizer, weights))
    first, last = states[0], states[-1]
    for name in first | last:
        if first.get(name) != last.get(name):
            raise RecipeError(
                f"{key}: its state {name} is {first.get(name, 'missing')} after one step and "
                f"{last.get(name, 'missing')} after three. What a resumed run loads is made by one "
                "step: make all state then, in its final shape."
            )


def own_states(parameters: Sequence[Tensor], section: OptimizerSection) -> list[Tensor] | None:
    """Return the state tensors of the user's own optimizer, on the meta device.

    Returns:
        The tensors, or None if the optimizer's step reads values or fails without them.

    Raises:
        RecipeError: the optimizer cannot be constructed.
    """
    with torch.device("meta"), torch.random.fork_rng(devices=[]):
        weights = [nn.Parameter(torch.zeros(each.shape)) for each in parameters]
        optimizer = own_optimizer(weights, section)
        try:
            _step(optimizer, weights)
        except Exception:  # the user's own class
            return None
    leaves = torch.utils._pytree.tree_leaves(list(optimizer.state.values()))
    return [leaf for leaf in leaves if isinstance(leaf, Tensor)]


def _step(optimizer: Optimizer, weights: Sequence[nn.Parameter]) -> None:
    for weight in weights:
        weight.grad = torch.ones(weight.shape)
    optimizer.step(closure=None)


def _describe_states(
    key: str, optimizer: Optimizer, weights: Sequence[nn.Parameter]
) -> dict[str, str]:
    """Describe an optimizer's states by their places; RecipeError if one cannot be saved."""
    places = {id(weight): f"of weight {number}" for number, weight in enumerate(weights)}
    states = dict[str, str]()
    for owner, state in optimizer.state.items():
        if id(owner) not in places:
            raise RecipeError(
                f"{key} keeps state[{owner!r}], which belongs to no weight, so a checkpoint cannot "
                "hold it. Keep it in self.state[weight], or as a number in self.param_groups."
            )
        # Only dicts are nested; a list or tuple is one value, which a checkpoint cannot hold.
        paths = torch.utils._pytree.tree_flatten_with_path(
            state, is_leaf=lambda value: not isinstance(value, dict)
        )[0]
        for path, value in paths:
            name = f"{torch.utils._pytree.keystr(path)} {places[id(owner)]}"
            if not isinstance(value, Tensor | int | float):
                raise RecipeError(
                    f"{key} keeps {name} as {type(value).__name__}, which a checkpoint cannot "
                    "hold. Keep tensors and numbers in self.state[weight]."
                )
            shape = f"{value.dtype} {list(value.shape)}" if isinstance(value, Tensor) else ""
            states[name] = shape or "a number"
    return states
