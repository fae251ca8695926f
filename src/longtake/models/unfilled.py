"""Models whose weights come later: built at once at any size, filled where each rank has its share.

A parameter without values stands on torch's meta device. Buffers are real from the beginning: they
hold what a constructor computes, such as tables of positions, and no file has them.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from longtake.models.stored import read_into, shapes_in

Weights = bool | Literal["later"]
"""Whether a model is built with weights; `later`: without, but ready to be filled."""


class Slot(NamedTuple):
    """A parameter that waits for its values."""

    module: nn.Module
    name: str
    stored: str
    """What it is called in the model as its family builds it, and in files of its weights."""

    @property
    def parameter(self) -> nn.Parameter:
        parameter = getattr(self.module, self.name)
        assert isinstance(parameter, nn.Parameter)
        return parameter


@dataclass(frozen=True)
class Unfilled:
    """All that a model lacks."""

    slots: Sequence[Slot] = ()
    files: Mapping[str, Path] | None = None
    """Where each lies, by its stored name; None: a checkpoint will fill them."""

    def give_memory(self, model: nn.Module, device: torch.device) -> None:
        """Put zeros on a device in the place of what is missing, of each rank's share alone."""
        if self.slots:
            host: Any = model
            host._apply(
                lambda each: torch.zeros_like(each, device=device) if each.is_meta else each
            )

    def fill(self) -> None:
        """Read from files what is missing, of each rank's share alone, in the dtype that it is in.

        Raises:
            ModelError: a file cannot be read.
        """
        if self.files is not None:
            read_into({slot.stored: slot.parameter for slot in self.slots}, self.files)


WHOLE = Unfilled()
"""Nothing is missing."""


def slots_of(model: nn.Module) -> list[Slot]:
    """The parameters of a model that have no values, as they are named now."""
    return [
        Slot(module, name, f"{prefix}.{name}" if prefix else name)
        for prefix, module in model.named_modules()
        for name, parameter in module.named_parameters(recurse=False)
        if parameter.is_meta
    ]


def can_be_filled(
    slots: Iterable[Slot], model: nn.Module, files: Mapping[str, Path] | None
) -> bool:
    """Whether each parameter has one place and, if files are to fill it, one of its shape there.

    Buffers that are saved would come from files too, which nothing here does.
    """
    shared = len(list(model.named_parameters(remove_duplicate=False)))
    if shared != len(list(model.parameters())):
        return False
    if files is None:
        return True
    buffers = {name for name, _ in model.named_buffers()}
    wanted = {slot.stored: tuple(slot.parameter.shape) for slot in slots}
    if buffers & model.state_dict().keys() or not wanted.keys() <= files.keys():
        return False
    return shapes_in(files, wanted) == wanted


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Build modules whose parameters take neither memory nor time, whatever a constructor does."""
    modules: Any = nn.Module
    register = modules.register_parameter
    known = WeakIdKeyDictionary()  # so that what is one parameter in two places stays one

    def leave_out(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        register(module, name, parameter)
        if parameter is not None and not parameter.is_meta:
            if parameter not in known:
                empty = nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad)
                known[parameter] = empty
            module._parameters[name] = known[parameter]

    modules.register_parameter = leave_out
    try:
        yield
    finally:
        modules.register_parameter = register


@contextmanager
def lent_memory(slots: Sequence[Slot]) -> Iterator[None]:
    """Let parameters stand on the CPU for a while, in memory that nobody has touched or may read.

    For whoever puts something beside them, on the device that they are on.
    """
    before: list[Tensor | None] = [slot.module._parameters[slot.name] for slot in slots]
    for slot in slots:
        like = slot.parameter
        lent = nn.Parameter(torch.empty_like(like, device="cpu"), like.requires_grad)
        slot.module._parameters[slot.name] = lent
    try:
        yield
    finally:
        for slot, parameter in zip(slots, before, strict=True):
            slot.module._parameters[slot.name] = parameter  # type: ignore[assignment]
