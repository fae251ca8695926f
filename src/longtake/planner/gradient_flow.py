"""Watches one forward and backward pass: which parameters gradients reach, and where they end.

autograd forgets: after a `detach()` or under `no_grad`, a tensor no longer knows what it was
computed from. `Provenance` records it, on real tensors and in torch's FakeTensorMode.
"""

import dataclasses
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakIdKeyDictionary

from longtake.models.numerics import in_backward

ParameterSet = int
"""A set of trainable parameters as the bits of an integer: bit i stands for the i-th name."""
SECOND_TIME = "Trying to backward through the graph a second time"
"""torch's message if a part of the autograd graph is traversed again."""

_HALF = (torch.bfloat16, torch.float16)
_DETACHES = (torch.Tensor.detach, torch.Tensor.detach_, torch.detach, torch.Tensor.data.__get__)  # type: ignore[attr-defined]
_DEMANDS = (torch.Tensor.requires_grad_, torch.Tensor.requires_grad.__set__)  # type: ignore[attr-defined]
_CASTS = ("to", "float", "type", "type_as", "_to_copy")


@dataclass(eq=False)
class RecomputeRegion:
    """One call of a checkpoint function, whose contents are recomputed in the backward pass."""

    reentrant: bool
    where: str  # name of the module whose code opened it
    carries_grad: bool  # true if a tensor argument carries gradient itself
    hidden: ParameterSet  # behind tensors with gradient in a dict, list or dataclass argument
    upstream: ParameterSet  # parameters behind all arguments
    by: str = ""  # class that recomputes, if it is not torch's
    inside: ParameterSet = 0  # parameters that are used in it
    blocks: list[str] = field(default_factory=list)  # names of the blocks that ran in it, in order


@dataclass
class ForwardPosition:
    """The modules and recompute regions that the forward pass has entered and not yet left."""

    blocks: Collection[str] = ()
    """Names of the model's blocks, around which an added module may be."""
    modules: list[tuple[str, bool]] = field(default_factory=lambda: [("model", True)])
    """Running modules, outermost first, each with whether gradients were enabled when it began."""
    regions: list[RecomputeRegion] = field(default_factory=list)  # open regions, outermost first

    @property
    def module(self) -> str:
        return self.modules[-1][0]

    @property
    def where(self) -> str:
        """Name of the innermost running module; if it was added, with the block that it wraps."""
        names = [name for name, _ in self.modules]
        after = next((name for name in reversed(names) if name in self.blocks), None)
        is_inside = after is None or f"{names[-1]}.".startswith(f"{after}.")
        return names[-1] if is_inside else f"{names[-1]} around {after}"

    @property
    def gradients_went_off(self) -> str:
        return next((name for name, enabled in reversed(self.modules) if enabled), "model")

    @property
    def is_frozen(self) -> bool:
        """True in a pass of the whole model without gradient, which an objective may make."""
        return len(self.modules) > 1 and not self.modules[1][1]

    @property
    def in_reentrant(self) -> bool:
        return any(region.reentrant for region in self.regions)


@dataclass(frozen=True)
class LostGradient:
    """A place in the forward pass where a tensor's connection to trainable parameters was cut."""

    where: str
    how: str  # `no_grad`, `detach`, or the name of a function without a derivative
    parameters: ParameterSet


@dataclass(frozen=True)
class GradientDemand:
    """A `requires_grad_` call on a tensor that is neither a parameter nor an input of the model."""

    where: str
    upstream: ParameterSet


class Provenance(TorchFunctionMode):
    """Records the trainable parameters behind each tensor, and the places where gradients end."""

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        inputs: Sequence[Tensor],
        position: ForwardPosition,
        half_base: bool,
    ) -> None:
        super().__init__()
        self._own = {id(parameter): 1 << bit for bit, parameter in enumerate(parameters.values())}
        self._inputs = inputs
        self._position = position
        self._half_base = half_base
        # Weak keys: a record must not keep tensors alive, which would change the traced memory.
        self._of: Any = WeakIdKeyDictionary()
        self._casts: Any = WeakIdKeyDictionary()
        self.used: ParameterSet = 0
        self.cuts: list[LostGradient] = []
        self.demands: list[GradientDemand] = []
        self.copies: dict[str, list[int]] = {}
        """Sizes in bytes of fp32 copies of 16-bit inputs to trainable fp32 weights, by module."""

    def of(self, values: Any) -> ParameterSet:
        """Return the parameters from which the tensors in a (nested) value were computed."""
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
        kwargs = kwargs or {}
        # Recomputation repeats the forward pass, which was recorded already.
        if in_backward() or self._position.is_frozen:
            return func(*args, **kwargs)
        is_demand = func in _DEMANDS and not args[0].requires_grad
        result = func(*args, **kwargs)
        if is_demand:
            tensor = args[0]
            known = isinstance(tensor, nn.Parameter) or any(tensor is one for one in self._inputs)
            if tensor.requires_grad and not known:
                self.demands.append(GradientDemand(self._position.where, self.of(tensor)))
        elif isinstance(result, Tensor | tuple | list) or func is torch.Tensor.__setitem__:
            self._record(func, [*args, *kwargs.values()], result)
        return result

    def _record(self, func: Callable[..., Any], given: list[Any], result: Any) -> None:
        name = getattr(func, "__name__", "")
        outputs = list(tensors_in(result if result is not None else given[0]))
        if not outputs or name.endswith("_like") or name.startswith("new_"):
            return  # no new tensor, or one with the shape of another and its own values
        is_cast = name in _CASTS and isinstance(given[0], Tensor) and given[0].dtype in _HALF
        if is_cast and outputs[0].dtype == torch.float32:
            self._casts[outputs[0]] = outputs[0].nbytes
        upstream = self.of(given)
        if not upstream:
            return
        own = [tensor for tensor in tensors_in(given) if id(tensor) in self._own]
        for parameter in own:
            bit = self._own[id(parameter)]
            self.used |= bit
            for region in self._position.regions:
                region.inside |= bit
        # A cast counts once, when an fp32 parameter first uses its result.
        if self._half_base and any(parameter.dtype == torch.float32 for parameter in own):
            for tensor in tensors_in(given):
                num_bytes = self._casts.pop(tensor, 0)
                if num_bytes:
                    self.copies.setdefault(self._position.module, []).append(num_bytes)
        self._record_cut(func, name, given, outputs)
        for tensor in outputs:
            self._of[tensor] = upstream

    def _record_cut(
        self, func: Callable[..., Any], name: str, given: list[Any], outputs: Sequence[Tensor]
    ) -> None:
        lost = self.of([tensor for tensor in tensors_in(given) if tensor.requires_grad])
        # Masks and other Boolean results never carry gradient.
        if not lost or any(out.requires_grad or out.dtype == torch.bool for out in outputs):
            return
        position = self._position
        if func in _DETACHES:
            self.cuts.append(LostGradient(position.where, "detach", lost))
        elif torch.is_grad_enabled():
            self.cuts.append(LostGradient(position.where, name, lost))
        # A reentrant region runs its forward pass under no_grad by design.
        elif not position.in_reentrant:
            self.cuts.append(LostGradient(position.gradients_went_off, "no_grad", lost))


class GradientWatch:
    """Gradient flow of one step's forward and backward pass, observed inside of `watching`."""

    def __init__(
        self, model: nn.Module, blocks: Mapping[str, nn.Module], inputs: Iterable[Tensor]
    ) -> None:
        parameters = dict(model.named_parameters())
        trainable = {name: value for name, value in parameters.items() if value.requires_grad}
        half_base = any(
            value.dtype in _HALF for value in parameters.values() if not value.requires_grad
        )
        self.blocks = dict(blocks)
        self.parameters = list(trainable)
        self.regions: list[RecomputeRegion] = []
        self.needing_gradient: set[str] = set()
        self.gone_twice = False
        self._reached: set[str] = set()
        self._position = ForwardPosition(blocks)
        self.provenance = Provenance(trainable, list(inputs), self._position, half_base)

    def backward(self, loss: Tensor) -> None:
        """Run the backward pass, unless the loss carries no gradient.

        `Tensor.backward` would switch function modes off, and with them the replacements of
        operations that recomputed blocks need; `torch.autograd.backward` does not. If a reentrant
        region makes torch traverse a part of the graph twice, `gone_twice` is set.
        """
        if not loss.requires_grad:
            return
        try:
            torch.autograd.backward(loss)
        except RuntimeError as error:
            self.gone_twice = SECOND_TIME in str(error) and any(
                region.reentrant for region in self.regions
            )
            if not self.gone_twice:
                raise

    def reached(self) -> list[str]:
        return [name for name in self.parameters if name in self._reached]

    def unreached(self) -> list[str]:
        return [name for name in self.parameters if name not in self._reached]

    def names(self, parameters: ParameterSet) -> list[str]:
        return [name for bit, name in enumerate(self.parameters) if parameters >> bit & 1]

    def register_hooks(self, model: nn.Module) -> Iterator[RemovableHandle]:
        """Register hooks that record gradients and running modules; yield their handles."""
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                hook: Any = parameter.register_post_accumulate_grad_hook
                yield hook(lambda _, name=name: self._reached.add(name))
        blocks = {id(block): name for name, block in self.blocks.items()}
        for name, module in model.named_modules():
            block = blocks.get(id(module))
            yield module.register_forward_pre_hook(
                partial(self._enter, block or name or "model", block)
            )
            # Recomputation leaves modules by an exception as soon as it has what it needs.
            yield module.register_forward_hook(partial(self._leave, block), always_call=True)

    def _enter(self, name: str, block: str | None, module: nn.Module, args: Any) -> None:
        if in_backward():
            return
        self._position.modules.append((name, torch.is_grad_enabled()))
        if block and self._position.regions:
            self._position.regions[-1].blocks.append(block)

    def _leave(self, block: str | None, module: nn.Module, args: Any, output: Any) -> None:
        if not in_backward():
            self._position.modules.pop()
        if block and any(tensor.requires_grad for tensor in tensors_in(output)):
            self.needing_gradient.add(block)

    @contextmanager
    def region(self, reentrant: bool, args: Iterable[Any], by: str = "") -> Iterator[None]:
        """Record the call of a checkpoint function (a recompute region) inside the context."""
        if in_backward() or not torch.is_grad_enabled():
            yield
            return
        direct = [value for value in args if isinstance(value, Tensor)]
        nested = tensors_in([value for value in args if not isinstance(value, Tensor)])
        region = RecomputeRegion(
            reentrant=reentrant,
            where=self._position.where,
            carries_grad=any(tensor.requires_grad for tensor in direct),
            hidden=self.provenance.of([tensor for tensor in nested if tensor.requires_grad]),
            upstream=self.provenance.of(list(args)),
            by=by,
        )
        self.regions.append(region)
        self._position.regions.append(region)
        try:
            yield
        finally:
            self._position.regions.remove(region)


@contextmanager
def watching(
    model: nn.Module, blocks: Mapping[str, nn.Module], inputs: Iterable[Tensor] = ()
) -> Iterator[GradientWatch]:
    """Record the gradient flow of the forward and backward pass that run in the context."""
    watch = GradientWatch(model, blocks, inputs)
    with ExitStack() as hooks:
        for handle in watch.register_hooks(model):
            hooks.callback(handle.remove)
        with checkpoint_is_quiet(), _regions_reported_to(watch), watch.provenance:
            yield watch


@contextmanager
def _regions_reported_to(watch: GradientWatch) -> Iterator[None]:
    """Report to `watch` each use of torch's two kinds of checkpointing, and others' reentrant ones.

    Their inner functions are replaced, because other modules have imported
    `torch.utils.checkpoint.checkpoint` itself. DeepSpeed, Megatron and others use their own
    autograd function, which is passed the function to recompute.
    """
    torch_checkpoint: Any = torch.utils.checkpoint
    function_class: Any = torch.autograd.Function
    # The classmethod object itself, to put it back later.
    own_apply = function_class.__dict__["apply"]
    plain = torch_checkpoint._checkpoint_without_reentrant_generator

    def watched_apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        apply = own_apply.__get__(None, cls)
        # An autograd function without a function to call recomputes nothing.
        if not any(callable(value) for value in args):
            return apply(*args, **kwargs)
        is_torchs = issubclass(cls, torch_checkpoint.CheckpointFunction)
        with watch.region(True, args, "" if is_torchs else f"{cls.__module__}.{cls.__qualname__}"):
            return apply(*args, **kwargs)

    def watched_plain(function: Any, *args: Any, **kwargs: Any) -> Iterator[None]:
        with watch.region(False, args):
            yield from plain(function, *args, **kwargs)

    function_class.apply = classmethod(watched_apply)
    torch_checkpoint._checkpoint_without_reentrant_generator = watched_plain
    try:
        yield
    finally:
        function_class.apply = own_apply
        torch_checkpoint._checkpoint_without_reentrant_generator = plain


@contextmanager
def checkpoint_is_quiet() -> Iterator[None]:
    """Silence torch's warnings about checkpoint calls, as a trap reports call and remedy."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "None of the inputs have requires_grad=True")
        warnings.filterwarnings("ignore", "torch.utils.checkpoint.*the use_reentrant parameter")
        yield


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield every tensor in nested lists, tuples, dicts and dataclasses."""
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
