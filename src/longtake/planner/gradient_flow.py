"""Watches one forward and backward pass: what gradient reaches, what keeps it from the rest, fixes.

autograd forgets: behind a `detach()` or under `no_grad` a tensor no longer knows what it was
computed from. `Provenance` remembers it, on real tensors and inside torch's FakeTensorMode.
"""

import dataclasses
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import reduce
from operator import or_
from types import TracebackType
from typing import Any, Self

import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakIdKeyDictionary

from longtake.formatting import format_size
from longtake.models.numerics import in_backward

ParameterSet = int
"""A set of trainable parameters: bit i stands for the i-th name."""
SECOND_TIME = "Trying to backward through the graph a second time"
"""torch's message where a part of the graph is traversed again."""

_HALF = (torch.bfloat16, torch.float16)
_DETACHES = (torch.Tensor.detach, torch.Tensor.detach_, torch.detach, torch.Tensor.data.__get__)  # type: ignore[attr-defined]
_DEMANDS = (torch.Tensor.requires_grad_, torch.Tensor.requires_grad.__set__)  # type: ignore[attr-defined]
_CASTS = ("to", "float", "type", "type_as", "_to_copy")


@dataclass(eq=False)
class RecomputeRegion:
    """One call of a checkpoint function: what runs in it is recomputed in the backward pass."""

    reentrant: bool
    where: str  # the module whose code opened it
    carries_grad: bool  # whether a tensor that is itself an argument carries gradient
    hidden: ParameterSet  # upstream of tensors with gradient in a dict, list or dataclass argument
    upstream: ParameterSet  # upstream of all arguments
    by: str = ""  # the class that recomputes, where it is not torch's
    inside: ParameterSet = 0  # used in it
    blocks: list[str] = field(default_factory=list)  # that ran in it, in order


@dataclass
class ForwardPosition:
    """Where the forward pass is: in which modules, in which regions."""

    blocks: Collection[str] = ()
    """Names of modules whose forward may run within an added module."""
    modules: list[tuple[str, bool]] = field(default_factory=lambda: [("model", True)])
    """Each running module, outermost first, and whether gradients were on when it began."""
    regions: list[RecomputeRegion] = field(default_factory=list)  # open ones, outermost first

    @property
    def module(self) -> str:
        return self.modules[-1][0]

    @property
    def where(self) -> str:
        """The innermost module; for an added module around a block, with that block."""
        names = [name for name, _ in self.modules]
        after = next((name for name in reversed(names) if name in self.blocks), None)
        is_inside = after is None or f"{names[-1]}.".startswith(f"{after}.")
        return names[-1] if is_inside else f"{names[-1]} around {after}"

    @property
    def gradients_went_off(self) -> str:
        return next((name for name, enabled in reversed(self.modules) if enabled), "model")

    @property
    def in_reentrant(self) -> bool:
        return any(region.reentrant for region in self.regions)


@dataclass(frozen=True)
class LostGradient:
    """A place where gradient that a tensor carried was lost."""

    where: str
    how: str  # `no_grad`, `detach`, or the function that has no derivative
    parameters: ParameterSet


@dataclass(frozen=True)
class GradientDemand:
    """A `requires_grad_` on a tensor that is neither a parameter nor an input of the model."""

    where: str
    upstream: ParameterSet


@dataclass
class Fp32Copies:
    """fp32 copies of 16-bit tensors that trainable fp32 weights made necessary."""

    count: int = 0
    num_bytes: int = 0


class Provenance(TorchFunctionMode):
    """Records which parameters each tensor was computed from, and where gradient is lost."""

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        inputs: Sequence[Tensor],
        position: ForwardPosition,
        half_base: bool,
    ) -> None:
        super().__init__()
        self._own = {id(parameter): 1 << bit for bit, parameter in enumerate(parameters.values())}
        self._inputs = list(inputs)
        self._position = position
        self._half_base = half_base
        self._of: Any = WeakIdKeyDictionary()
        self._casts: Any = WeakIdKeyDictionary()
        self.used: ParameterSet = 0
        self.cuts: list[LostGradient] = []
        self.demands: list[GradientDemand] = []
        self.copies: dict[str, Fp32Copies] = {}

    def of(self, values: Any) -> ParameterSet:
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
        kwargs = kwargs or {}
        if in_backward():
            return func(*args, **kwargs)
        is_demand = func in _DEMANDS and not args[0].requires_grad
        result = func(*args, **kwargs)
        if is_demand:
            self._record_demand(args[0])
        elif isinstance(result, Tensor | tuple | list) or func is torch.Tensor.__setitem__:
            self._record(func, [*args, *kwargs.values()], result)
        return result

    def _record(self, func: Callable[..., Any], given: list[Any], result: Any) -> None:
        name = getattr(func, "__name__", "")
        outputs = list(tensors_in(result if result is not None else given[0]))
        if not outputs or name.endswith("_like") or name.startswith("new_"):
            return  # no tensor is made, or one of the same shape and other values
        is_cast = name in _CASTS and isinstance(given[0], Tensor) and given[0].dtype in _HALF
        if is_cast and outputs[0].dtype == torch.float32:
            self._casts[outputs[0]] = outputs[0].nbytes
        upstream = self.of(given)
        if upstream:
            own = [tensor for tensor in tensors_in(given) if id(tensor) in self._own]
            self._record_use(own, given)
            self._record_cut(func, name, given, outputs)
            for tensor in outputs:
                self._of[tensor] = upstream

    def _record_use(self, own: Sequence[Tensor], given: list[Any]) -> None:
        for parameter in own:
            bit = self._own[id(parameter)]
            self.used |= bit
            for region in self._position.regions:
                region.inside |= bit
        if self._half_base and any(parameter.dtype == torch.float32 for parameter in own):
            for tensor in tensors_in(given):
                num_bytes = self._casts.pop(tensor, 0)
                if num_bytes:
                    copies = self.copies.setdefault(self._position.module, Fp32Copies())
                    copies.count += 1
                    copies.num_bytes += num_bytes

    def _record_cut(
        self, func: Callable[..., Any], name: str, given: list[Any], outputs: Sequence[Tensor]
    ) -> None:
        lost = self.of([tensor for tensor in tensors_in(given) if tensor.requires_grad])
        if not lost or any(out.requires_grad or out.dtype == torch.bool for out in outputs):
            return
        position = self._position
        if func in _DETACHES:
            self.cuts.append(LostGradient(position.where, "detach", lost))
        elif torch.is_grad_enabled():
            self.cuts.append(LostGradient(position.where, name, lost))
        elif not position.in_reentrant:
            self.cuts.append(LostGradient(position.gradients_went_off, "no_grad", lost))

    def _record_demand(self, tensor: Tensor) -> None:
        known = isinstance(tensor, nn.Parameter) or any(tensor is one for one in self._inputs)
        if tensor.requires_grad and not known:
            self.demands.append(GradientDemand(self._position.where, self.of(tensor)))


class GradientWatch:
    """A context manager around the forward and backward pass of one step."""

    def __init__(
        self, model: nn.Module, blocks: Mapping[str, nn.Module], inputs: Iterable[Tensor] = ()
    ) -> None:
        self._model = model
        self._inputs = list(inputs)
        self._reached: set[str] = set()
        self._position = ForwardPosition(blocks)
        self._open = ExitStack()
        self.blocks = dict(blocks)
        self.parameters: list[str] = []
        self.regions: list[RecomputeRegion] = []
        self.needing_gradient: set[str] = set()
        self.gone_twice = False
        self.provenance = Provenance({}, [], self._position, half_base=False)

    def __enter__(self) -> Self:
        parameters = dict(self._model.named_parameters())
        trainable = {name: value for name, value in parameters.items() if value.requires_grad}
        half_base = any(
            value.dtype in _HALF for value in parameters.values() if not value.requires_grad
        )
        self.parameters = list(trainable)
        self.provenance = Provenance(trainable, self._inputs, self._position, half_base)
        with ExitStack() as opening:
            for handle in (*self._hook_parameters(trainable), *self._hook_modules()):
                opening.callback(handle.remove)
            opening.enter_context(checkpoint_is_quiet())
            opening.enter_context(_regions_reported_to(self))
            opening.enter_context(self.provenance)
            self._open = opening.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._open.close()

    def backward(self, loss: Tensor) -> None:
        """The backward pass, or none where the loss carries no gradient at all.

        `Tensor.backward` would switch off every function mode, and with it what stands in for an
        operation when blocks are recomputed; `torch.autograd.backward` does not. Where a reentrant
        region makes torch traverse something twice, `gone_twice` is set.
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

    def _hook_parameters(self, trainable: Mapping[str, nn.Parameter]) -> Iterator[RemovableHandle]:
        def recording(name: str) -> Callable[[Tensor], None]:
            return lambda _: self._reached.add(name)

        for name, parameter in trainable.items():
            hook: Any = parameter.register_post_accumulate_grad_hook
            yield hook(recording(name))

    def _hook_modules(self) -> Iterator[RemovableHandle]:
        blocks = {id(block): name for name, block in self.blocks.items()}
        for name, module in self._model.named_modules():
            block = blocks.get(id(module))
            enter, leave = self._entering(block or name or "model", block), self._leaving(block)
            yield module.register_forward_pre_hook(enter)
            # Recompute leaves modules by an exception as soon as it has what it needs.
            yield module.register_forward_hook(leave, always_call=True)

    def _entering(self, name: str, block: str | None) -> Callable[..., None]:
        def enter(module: nn.Module, args: Any) -> None:
            if in_backward():
                return
            self._position.modules.append((name, torch.is_grad_enabled()))
            if block and self._position.regions:
                self._position.regions[-1].blocks.append(block)

        return enter

    def _leaving(self, block: str | None) -> Callable[..., None]:
        def leave(module: nn.Module, args: Any, output: Any) -> None:
            if not in_backward():
                self._position.modules.pop()
            if block and any(tensor.requires_grad for tensor in tensors_in(output)):
                self.needing_gradient.add(block)

        return leave

    @contextmanager
    def region(self, reentrant: bool, args: Iterable[Any], by: str = "") -> Iterator[None]:
        """Record a region that is open as long as the context is."""
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
def _regions_reported_to(watch: GradientWatch) -> Iterator[None]:
    """Report each use of torch's two ways to recompute, and of others' reentrant ones.

    They are replaced where they are looked up, because other modules have imported
    `torch.utils.checkpoint.checkpoint` itself. DeepSpeed, Megatron and others have an autograd
    function of their own, which is handed the function to recompute.
    """
    torch_checkpoint: Any = torch.utils.checkpoint
    function_class: Any = torch.autograd.Function
    own_apply = function_class.__dict__["apply"]
    plain = torch_checkpoint._checkpoint_without_reentrant_generator

    def watched_apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        apply = own_apply.__get__(None, cls)
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
    """Without torch's warnings of checkpoint calls: a trap says which call, and what to do."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "None of the inputs have requires_grad=True")
        warnings.filterwarnings("ignore", "torch.utils.checkpoint.*the use_reentrant parameter")
        yield


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


_NON_REENTRANT = (
    "Call torch.utils.checkpoint.checkpoint with use_reentrant=False, or drop the call and set "
    'recompute.policy = "all"'
)
_OR_DIRECTLY = "; or hand that tensor over as an argument of its own"
_MEANT_TO_TRAIN = "If they are meant to train, {}; if not, freeze them with requires_grad_(False)."

_NOTABLE_SHARE = 0.01
"""Of the peak without recompute: less is not worth a note."""


@dataclass(frozen=True)
class Trap:
    """Something that a step does and that cannot be intended."""

    block: str  # the module where it happens, or the first of several; "model" for all of it
    trap: str  # what happens, and why
    fix: str  # what to do
    stops: bool  # something that should be trained is not; otherwise it costs memory or time

    def __str__(self) -> str:
        return f"{self.block}: {self.trap}\n  Fix: {self.fix}"


def flow_traps(watch: GradientWatch) -> list[Trap]:
    """What kept gradient from trainable parameters in a watched step, and what wasted memory.

    Every parameter of `watch.unreached()` is accounted for by one of them at least.
    """
    unreached = _set(watch, watch.unreached())
    dead = [region for region in watch.regions if _is_dead(region, unreached)]
    found = [*_dead_regions(watch, dead, unreached), *_regions_of_everything(watch, dead)]
    found += [] if dead else _idle_regions(watch)
    if watch.gone_twice:  # all else follows from it
        return [*found, _gone_twice(watch)]
    found += _demands(watch, dead, unreached)
    unreached &= ~_union(region.inside | region.hidden for region in dead)
    unreached &= ~_union(demand.upstream for demand in watch.provenance.demands)
    return [*found, *_cut_off(watch, unreached), *_left_over(watch, unreached), *_copies(watch)]


def idle_recompute(options: Mapping[str, str], saved_bytes: Mapping[str, int]) -> list[Trap]:
    """Recompute of blocks before the first trainable parameter, where autograd keeps nothing."""
    idle = [name for name, option in options.items() if option != "keep" and saved_bytes[name] == 0]
    useful = {name: saved for name, saved in saved_bytes.items() if saved > 0}
    if not idle:
        return []
    trap = (
        f"Recomputing {_listed(idle)} saves 0 bytes: nothing trainable lies there or before, so no "
        "gradient passes and nothing is kept for one."
    )
    fix = "Leave recompute off there."
    if useful:
        fix = (
            f"Recompute what comes after the first trainable parameter: {_listed(useful)} "
            f"save{'s' if len(useful) == 1 else ''} {format_size(sum(useful.values()))}. Frozen "
            "blocks count there too, because gradient passes through them."
        )
    return [Trap(idle[0], trap, fix, stops=False)]


def costly_policies(peaks: Mapping[str, int]) -> list[Trap]:
    """One note on policies that need clearly more memory than no recompute at all."""
    usual = peaks.get("none")
    if usual is None:
        return []
    more = {
        name: peak - usual for name, peak in peaks.items() if peak - usual > _NOTABLE_SHARE * usual
    }
    if not more:
        return []
    listed = ", ".join(f'"{name}" by {format_size(extra)}' for name, extra in more.items())
    return [
        Trap(
            "model",
            f'Recompute can cost memory. Above the peak of recompute.policy = "none", '
            f"{format_size(usual)}, are: {listed}. They hold on to tensors that autograd by itself "
            "would not keep: where weights are frozen, a gradient needs few of them.",
            "If your policy is among them, take another: the plan's table shows which.",
            stops=False,
        )
    ]


def _is_dead(region: RecomputeRegion, unreached: ParameterSet) -> bool:
    return region.reentrant and not region.carries_grad and bool(region.inside & unreached)


def _dead_regions(
    watch: GradientWatch, dead: Sequence[RecomputeRegion], unreached: ParameterSet
) -> Iterator[Trap]:
    """One trap for all, because one dead region makes the next one dead."""
    if not dead:
        return
    first = dead[0]
    others = [_name(region) for region in dead if _name(region) != _name(first)]
    untrained = _union((region.inside | region.hidden) & unreached for region in dead)
    also = f", nor does anything in {_listed(others)}" if others else ""
    yield Trap(
        _name(first),
        f"{_opening(watch, first)}. So nothing in it gets a gradient{also}. Untrained: "
        f"{_parameters(watch, untrained)}.",
        f"{_NON_REENTRANT}{_OR_DIRECTLY if first.hidden else ''}.",
        stops=True,
    )


def _opening(watch: GradientWatch, region: RecomputeRegion) -> str:
    name, frozen = _name(region), _frozen_before(watch, region)
    kind = f"reentrant recompute region{f' of {region.by}' if region.by else ''}"
    if region.hidden:
        return (
            f"{name} runs in a {kind}, and what carries gradient is handed to "
            "it inside a dict, list or dataclass, where such a region does not look"
        )
    if _holds_everything(watch, region):
        return (
            f"One {kind} in {region.where} holds all blocks that train "
            f"({_listed(region.blocks)}), and no tensor that it is handed carries gradient"
        )
    if frozen:
        return (
            f"{_listed(frozen)} {'is' if len(frozen) == 1 else 'are'} frozen, so that no tensor "
            f"handed on to {name} carries gradient, and {name} runs in a {kind}"
        )
    because = "" if region.upstream else ": data and frozen layers give none"
    return f"{name} runs in a {kind}, and no tensor that it is handed carries gradient{because}"


def _frozen_before(watch: GradientWatch, region: RecomputeRegion) -> list[str]:
    """The blocks before a region, if there are any and nothing trainable lies before it."""
    if region.upstream or not region.blocks or region.blocks[0] not in watch.blocks:
        return []
    names = list(watch.blocks)
    return names[: names.index(region.blocks[0])]


def _regions_of_everything(watch: GradientWatch, dead: Sequence[RecomputeRegion]) -> Iterator[Trap]:
    for region in watch.regions:
        if region not in dead and _holds_everything(watch, region):
            yield Trap(
                region.where,
                f"One recompute region in {region.where} holds all blocks that train "
                f"({_listed(region.blocks)}). The backward pass computes all of it again at once "
                "and holds it at once: the peak is as high as without recompute, and a step takes "
                "one more forward pass.",
                'Recompute block by block: drop the call and set recompute.policy = "all".',
                stops=False,
            )


def _idle_regions(watch: GradientWatch) -> Iterator[Trap]:
    """One note on calls around parts that no gradient passes; it needs no recompute there."""
    idle = [
        _name(region)
        for region in watch.regions
        if not (region.carries_grad or region.hidden or region.upstream or region.inside)
    ]
    if idle:
        yield Trap(
            idle[0],
            f"The checkpoint call around {_listed(idle)} saves nothing: nothing trainable lies "
            "there or before, so no gradient passes and nothing is kept for one.",
            "Leave the call out there.",
            stops=False,
        )


def _holds_everything(watch: GradientWatch, region: RecomputeRegion) -> bool:
    trained = {name for name in map(_group_in(watch), watch.parameters) if name in watch.blocks}
    needing = trained | watch.needing_gradient
    return len(set(region.blocks)) > 1 and needing <= set(region.blocks)


def _gone_twice(watch: GradientWatch) -> Trap:
    """Such a region does not stop at captured tensors: it frees the graph that made them, too."""
    alive = [region for region in watch.regions if region.reentrant and region.carries_grad]
    names = [_name(region) for region in alive if region.hidden] or [_name(each) for each in alive]
    return Trap(
        names[0],
        f"Reentrant recompute of {_listed(names)} uses a tensor that carries gradient and is no "
        "argument of its own: it lies inside a dict, list or dataclass, or comes from outside. The "
        "backward pass goes through what made it more than once, where torch stops with "
        f'"{SECOND_TIME}".',
        f"{_NON_REENTRANT}{_OR_DIRECTLY}.",
        stops=True,
    )


def _demands(
    watch: GradientWatch, dead: Sequence[RecomputeRegion], unreached: ParameterSet
) -> Iterator[Trap]:
    demands = watch.provenance.demands
    says = (
        "requires_grad_ in {} is called on a tensor that is neither a parameter nor an input of "
        "the model."
    )
    harmful = [demand.where for demand in demands if demand.upstream & unreached]
    if harmful:
        untrained = _union(demand.upstream for demand in demands) & unreached
        yield Trap(
            harmful[0],
            f"{says.format(_listed(harmful))} torch's error goes away, but gradient ends at that "
            "tensor and never gets to what made it. Untrained: "
            f"{_parameters(watch, untrained)}.",
            f"Remove it, and mend what stopped gradient before: {_cause(watch, dead, untrained)}",
            stops=True,
        )
    idle = [demand.where for demand in demands if not demand.upstream]
    if idle:
        yield Trap(
            idle[0],
            f"{says.format(_listed(idle))} Nothing before it is trained, so nothing is lost; but "
            "frozen layers between it and the first trainable one now keep activations for a "
            "gradient that is not needed.",
            "Remove it. Only reentrant recompute needs it: use_reentrant=False.",
            stops=False,
        )


def _cause(watch: GradientWatch, dead: Sequence[RecomputeRegion], untrained: ParameterSet) -> str:
    for region in dead:
        if region.inside & untrained:
            return f"the reentrant region of {_name(region)} (use_reentrant=False)."
    for cut in watch.provenance.cuts:
        if cut.parameters & untrained:
            return f"the {_means(cut)} in {cut.where}."
    return "a detach(), torch.no_grad() or a reentrant region."


def _cut_off(watch: GradientWatch, unreached: ParameterSet) -> Iterator[Trap]:
    """One trap for each way in which gradient was lost."""
    by_means: dict[str, dict[str, ParameterSet]] = {}
    for cut in watch.provenance.cuts:
        lost = cut.parameters & unreached
        unreached &= ~lost
        if lost:
            places = by_means.setdefault(_means(cut), {})
            places[cut.where] = places.get(cut.where, 0) | lost
    for means, places in by_means.items():
        lost = sum(places.values())  # the sets have no parameter in common
        yield Trap(
            next(iter(places)),
            f"The {means} in {_listed(places)} lets no gradient through. Untrained: "
            f"{_parameters(watch, lost)}.",
            _MEANT_TO_TRAIN.format("take it out"),
            stops=True,
        )


def _means(cut: LostGradient) -> str:
    known = {"detach": "detach() (or .data)", "no_grad": "torch.no_grad()"}
    return known.get(cut.how, f"{cut.how}(), which has no derivative,")


def _left_over(watch: GradientWatch, unreached: ParameterSet) -> Iterator[Trap]:
    """What nothing cut off: either it is not used, or what it computes is not."""
    unreached &= ~_union(cut.parameters for cut in watch.provenance.cuts)
    reasons = {
        "the forward pass does not use them": unreached & ~watch.provenance.used,
        "what they compute does not reach the loss": unreached & watch.provenance.used,
    }
    group_of = _group_in(watch)
    alive = {group_of(name) for name in watch.reached()}
    for reason, parameters in reasons.items():
        groups = dict.fromkeys(map(group_of, watch.names(parameters)))
        for is_whole in (True, False):
            chosen = [group for group in groups if (group not in alive) == is_whole]
            names = [name for name in watch.names(parameters) if group_of(name) in chosen]
            if names:
                yield _unused(watch, chosen, names, reason, is_whole)


def _unused(
    watch: GradientWatch, groups: Sequence[str], names: Sequence[str], reason: str, is_whole: bool
) -> Trap:
    if is_whole:
        trap = f"No parameter of {_listed(groups)} gets a gradient: {reason}. "
        fix = _MEANT_TO_TRAIN.format("use them, or what they compute, in the forward pass")
    else:
        trap = f"Some parameters of {_listed(groups)} get no gradient: {reason}. "
        fix = (
            "Some models are built so: a last block may drop one of its streams. Then nothing is "
            "lost but the optimizer's memory; freeze them to save that."
        )
    return Trap(
        groups[0], f"{trap}Untrained: {_parameters(watch, _set(watch, names))}.", fix, is_whole
    )


def _copies(watch: GradientWatch) -> Iterator[Trap]:
    """What PEFT does with fp32 weights on a base in 16 bits, and others after it."""
    copies: Mapping[str, Fp32Copies] = watch.provenance.copies
    if copies:
        groups = list(dict.fromkeys(map(_group_in(watch), copies)))
        count = sum(part.count for part in copies.values())
        num_bytes = sum(part.num_bytes for part in copies.values())
        yield Trap(
            groups[0],
            f"Trainable weights in {_listed(groups)} are fp32 on a 16-bit base: {count} of their "
            "layers copy their input to fp32 and keep the copy for the backward pass, "
            f"{format_size(num_bytes)} in all where nothing is recomputed.",
            'Set trainable.dtype = "model": longtake\'s optimizers do not lose updates that are '
            "too small for 16 bits.",
            stops=False,
        )


def _set(watch: GradientWatch, names: Iterable[str]) -> ParameterSet:
    bits = {name: 1 << bit for bit, name in enumerate(watch.parameters)}
    return sum(bits[name] for name in names)


def _union(sets: Iterable[ParameterSet]) -> ParameterSet:
    return reduce(or_, sets, 0)


def _name(region: RecomputeRegion) -> str:
    return region.blocks[0] if len(set(region.blocks)) == 1 else region.where


def _group_in(watch: GradientWatch) -> Callable[[str], str]:
    """From a name to its block, or outside of blocks to the layer that it is of."""

    def group(name: str) -> str:
        inside = (block for block in watch.blocks if name.startswith(f"{block}."))
        return next(inside, name.rpartition(".")[0] or name)

    return group


def _parameters(watch: GradientWatch, parameters: ParameterSet) -> str:
    names = watch.names(parameters)
    count = f"{len(names)} trainable parameter{'s' if len(names) > 1 else ''}"
    return f"{count} ({_listed(names)})"


def _listed(names: Iterable[str], most: int = 3) -> str:
    """Names as in `a`, `a and b`, or `a, b, c and 24 more`."""
    names = list(dict.fromkeys(names))
    if len(names) == 1:
        return names[0]
    if len(names) <= most:
        return f"{', '.join(names[:-1])} and {names[-1]}"
    return f"{', '.join(names[:most])} and {len(names) - most} more"
