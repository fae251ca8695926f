"""Which trainable parameters a tensor was computed from, whether or not a gradient finds the way.

autograd forgets: behind a `detach()` or under `no_grad` a tensor does not know any more where it
came from. What trains silently nothing can only be explained by someone who does.
"""

import dataclasses
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

Parameters = int
"""A set of trainable parameters: bit i stands for the i-th name."""

HALF = (torch.bfloat16, torch.float16)
_DETACHES = (torch.Tensor.detach, torch.Tensor.detach_, torch.detach, torch.Tensor.data.__get__)  # type: ignore[attr-defined]
_DEMANDS = (torch.Tensor.requires_grad_, torch.Tensor.requires_grad.__set__)  # type: ignore[attr-defined]
_CASTS = ("to", "float", "type", "type_as", "_to_copy")


@dataclass(eq=False)
class Region:
    """One call of `torch.utils.checkpoint`: what runs in it is computed again in the backward."""

    reentrant: bool
    where: str
    """The module whose code opened it."""
    carries_grad: bool
    """Whether a tensor that is itself an argument carries gradient."""
    hidden: Parameters
    """Upstream of tensors that carry gradient inside a dict, list or dataclass argument."""
    upstream: Parameters
    """Upstream of all arguments."""
    inside: Parameters = 0
    """Used in it."""
    blocks: list[str] = field(default_factory=list)
    """That ran in it, in order."""


@dataclass
class Place:
    """Where the forward pass is: in which modules, in which regions."""

    blocks: Collection[str] = ()
    """Names of modules that others may be called after, by a hook, as if inside."""
    modules: list[tuple[str, bool]] = field(default_factory=lambda: [("model", True)])
    """Name of each module that is running, outermost first, and whether gradients were on when it
    began."""
    regions: list[Region] = field(default_factory=list)
    """Those that are open, outermost first."""

    @property
    def module(self) -> str:
        """The innermost module."""
        return self.modules[-1][0]

    @property
    def where(self) -> str:
        """The innermost module, and the block after which it was called where it is no part of it.

        An added module is called after many blocks.
        """
        names = [name for name, _ in self.modules]
        after = next((name for name in reversed(names) if name in self.blocks), None)
        is_inside = after is None or f"{names[-1]}.".startswith(f"{after}.")
        return names[-1] if is_inside else f"{names[-1]} after {after}"

    @property
    def gradients_went_off(self) -> str:
        """The module whose own code turned gradients off."""
        return next((name for name, enabled in reversed(self.modules) if enabled), "model")

    @property
    def in_reentrant(self) -> bool:
        """Whether gradients are off only because a reentrant region computes again later."""
        return any(region.reentrant for region in self.regions)


@dataclass(frozen=True)
class Cut:
    """A place at which gradient that a tensor carried was lost."""

    where: str
    how: str
    """`no_grad`, `detach`, or the function that has no derivative."""
    parameters: Parameters


@dataclass(frozen=True)
class Demand:
    """A `requires_grad_` on a tensor that is neither a parameter nor an input of the model."""

    where: str
    upstream: Parameters


@dataclass
class Copies:
    """fp32 copies of 16-bit tensors that trainable fp32 weights made necessary."""

    count: int = 0
    num_bytes: int = 0


class Upstream(TorchFunctionMode):
    """Follows a forward pass, and notes where gradient is lost or demanded.

    Args:
        parameters: the trainable ones, by name.
        inputs: of the model, which may be asked for gradients.
        place: kept up to date by whoever knows when a module begins and ends.
        half_base: whether frozen weights are in 16 bits.

    Attributes:
        used: parameters that some operation took.
        cuts: in the order in which they happened.
        demands: likewise.
        copies: by module.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        inputs: Sequence[Tensor],
        place: Place,
        half_base: bool,
    ) -> None:
        super().__init__()
        self._own = {id(parameter): 1 << bit for bit, parameter in enumerate(parameters.values())}
        self._inputs = list(inputs)
        self._place = place
        self._half_base = half_base
        self._of: Any = WeakIdKeyDictionary()
        self._casts: Any = WeakIdKeyDictionary()
        self.used: Parameters = 0
        self.cuts: list[Cut] = []
        self.demands: list[Demand] = []
        self.copies: dict[str, Copies] = {}

    def of(self, values: Any) -> Parameters:
        """What the tensors in a value, which may be nested, were computed from."""
        found = 0
        for tensor in tensors_in(values):
            found |= self._of.get(tensor, 0) | self._own.get(id(tensor), 0)
        return found

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Do what was asked for, and note it."""
        kwargs = kwargs or {}
        if in_backward():
            return func(*args, **kwargs)
        is_demand = func in _DEMANDS and not args[0].requires_grad
        result = func(*args, **kwargs)
        if is_demand:
            self._note_demand(args[0])
        elif isinstance(result, Tensor | tuple | list) or func is torch.Tensor.__setitem__:
            self._note(func, [*args, *kwargs.values()], result)
        return result

    def _note(self, func: Callable[..., Any], given: list[Any], result: Any) -> None:
        name = getattr(func, "__name__", "")
        outputs = list(tensors_in(result if result is not None else given[0]))
        if not outputs or name.endswith("_like") or name.startswith("new_"):
            return  # no tensor is made, or one of the same shape and other values
        self._note_cast(name, given, outputs)
        upstream = self.of(given)
        if upstream:
            self._note_use(
                [tensor for tensor in tensors_in(given) if id(tensor) in self._own], given
            )
            self._note_cut(func, name, given, outputs)
            for tensor in outputs:
                self._of[tensor] = upstream

    def _note_use(self, own: Sequence[Tensor], given: list[Any]) -> None:
        for parameter in own:
            bit = self._own[id(parameter)]
            self.used |= bit
            for region in self._place.regions:
                region.inside |= bit
        if self._half_base and any(parameter.dtype == torch.float32 for parameter in own):
            for tensor in tensors_in(given):
                num_bytes = self._casts.pop(tensor, 0)
                if num_bytes:
                    copies = self.copies.setdefault(self._place.module, Copies())
                    copies.count += 1
                    copies.num_bytes += num_bytes

    def _note_cut(
        self, func: Callable[..., Any], name: str, given: list[Any], outputs: Sequence[Tensor]
    ) -> None:
        lost = self.of([tensor for tensor in tensors_in(given) if tensor.requires_grad])
        if not lost or any(out.requires_grad or out.dtype == torch.bool for out in outputs):
            return
        if func in _DETACHES:
            self.cuts.append(Cut(self._place.where, "detach", lost))
        elif torch.is_grad_enabled():
            self.cuts.append(Cut(self._place.where, name, lost))
        elif not self._place.in_reentrant:
            self.cuts.append(Cut(self._place.gradients_went_off, "no_grad", lost))

    def _note_cast(self, name: str, given: list[Any], outputs: Sequence[Tensor]) -> None:
        is_cast = name in _CASTS and isinstance(given[0], Tensor) and given[0].dtype in HALF
        if is_cast and outputs[0].dtype == torch.float32:
            self._casts[outputs[0]] = outputs[0].nbytes

    def _note_demand(self, tensor: Tensor) -> None:
        known = isinstance(tensor, nn.Parameter) or any(tensor is one for one in self._inputs)
        if tensor.requires_grad and not known:
            self.demands.append(Demand(self._place.where, self.of(tensor)))


def in_backward() -> bool:
    """Whether autograd is at work, which calls modules again where they are recomputed."""
    return bool(torch._C._current_graph_task_id() != -1)


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Every tensor in lists, tuples, dicts and dataclasses, however deep."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors_in(item)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        yield from tensors_in(list(vars(value).values()))
