"""Watches one forward and backward pass: what trains, and what stood in the way of the rest.

It works on real tensors and inside torch's FakeTensorMode alike, where the same code runs without
memory and without arithmetic.
"""

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from types import TracebackType
from typing import Any, Self

import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from longtake.recompute.upstream import (
    HALF,
    Parameters,
    Place,
    Region,
    Upstream,
    in_backward,
    tensors_in,
)

SECOND_TIME = "Trying to backward through the graph a second time"
"""What torch says where a part of the graph is gone through that has been already."""


class Watch:
    """A context manager around the forward and backward pass of one step.

    Args:
        model: whose parameters are looked up when the context is entered: make them fake before.
        blocks: by qualified name, in the order in which they run.
        inputs: tensors that the model is called with; gradients may be asked of them.

    Attributes:
        parameters: names of the trainable ones; bit i of a set of parameters is the i-th.
        upstream: what the forward pass was computed from, and where gradient was lost.
        regions: every one that was opened in the forward pass, in order.
        needing_gradient: blocks whose output carried gradient.
        gone_twice: whether torch gave up because of a reentrant region.
    """

    def __init__(
        self, model: nn.Module, blocks: Mapping[str, nn.Module], inputs: Iterable[Tensor] = ()
    ) -> None:
        self._model = model
        self._inputs = list(inputs)
        self._reached: set[str] = set()
        self._place = Place(blocks)
        self._open = ExitStack()
        self.blocks = dict(blocks)
        self.parameters: list[str] = []
        self.regions: list[Region] = []
        self.needing_gradient: set[str] = set()
        self.gone_twice = False
        self.upstream = Upstream({}, [], self._place, half_base=False)

    def __enter__(self) -> Self:
        parameters = dict(self._model.named_parameters())
        trainable = {name: value for name, value in parameters.items() if value.requires_grad}
        half_base = any(
            value.dtype in HALF for value in parameters.values() if not value.requires_grad
        )
        self.parameters = list(trainable)
        self.upstream = Upstream(trainable, self._inputs, self._place, half_base)
        with ExitStack() as opening:
            for handle in (*self._hook_parameters(trainable), *self._hook_modules()):
                opening.callback(handle.remove)
            opening.enter_context(_regions_reported_to(self))
            opening.enter_context(self.upstream)
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

        `Tensor.backward` would switch off every function mode that is on, and with it whatever
        stands in for an operation when blocks are recomputed; `torch.autograd.backward` does not.

        Where a reentrant region makes torch go through something twice, that is noted and no more.

        Raises:
            RuntimeError: torch's, where it cannot go through for another reason.
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

    def names(self, parameters: Parameters) -> list[str]:
        return [name for bit, name in enumerate(self.parameters) if parameters >> bit & 1]

    def _hook_parameters(self, trainable: Mapping[str, nn.Parameter]) -> Iterator[RemovableHandle]:
        def noting(name: str) -> Callable[[Tensor], None]:
            return lambda _: self._reached.add(name)

        for name, parameter in trainable.items():
            hook: Any = parameter.register_post_accumulate_grad_hook
            yield hook(noting(name))

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
            self._place.modules.append((name, torch.is_grad_enabled()))
            if block and self._place.regions:
                self._place.regions[-1].blocks.append(block)

        return enter

    def _leaving(self, block: str | None) -> Callable[..., None]:
        def leave(module: nn.Module, args: Any, output: Any) -> None:
            if not in_backward():
                self._place.modules.pop()
            if block and any(tensor.requires_grad for tensor in tensors_in(output)):
                self.needing_gradient.add(block)

        return leave

    @contextmanager
    def region(self, reentrant: bool, args: Iterable[Any]) -> Iterator[None]:
        """Note a region that is open as long as the context is."""
        if in_backward() or not torch.is_grad_enabled():
            yield
            return
        direct = [value for value in args if isinstance(value, Tensor)]
        nested = tensors_in([value for value in args if not isinstance(value, Tensor)])
        region = Region(
            reentrant=reentrant,
            where=self._place.where,
            carries_grad=any(tensor.requires_grad for tensor in direct),
            hidden=self.upstream.of([tensor for tensor in nested if tensor.requires_grad]),
            upstream=self.upstream.of(list(args)),
        )
        self.regions.append(region)
        self._place.regions.append(region)
        try:
            yield
        finally:
            self._place.regions.remove(region)


@contextmanager
def _regions_reported_to(watch: Watch) -> Iterator[None]:
    """Let torch's two ways to recompute say when they are used.

    They are replaced where `torch.utils.checkpoint.checkpoint` looks them up, because everybody
    has imported that function itself under a name of their own.
    """
    torch_checkpoint: Any = torch.utils.checkpoint
    reentrant = torch_checkpoint.CheckpointFunction.apply
    plain = torch_checkpoint._checkpoint_without_reentrant_generator

    def watched_reentrant(function: Any, preserve: bool, *args: Any) -> Any:
        with watch.region(True, args), warnings.catch_warnings():
            # The trap says which region this is about, and what to do.
            warnings.filterwarnings("ignore", "None of the inputs have requires_grad=True")
            return reentrant(function, preserve, *args)

    def watched_plain(function: Any, *args: Any, **kwargs: Any) -> Iterator[None]:
        with watch.region(False, args):
            yield from plain(function, *args, **kwargs)

    torch_checkpoint.CheckpointFunction.apply = staticmethod(watched_reentrant)
    torch_checkpoint._checkpoint_without_reentrant_generator = watched_plain
    try:
        yield
    finally:
        del torch_checkpoint.CheckpointFunction.apply  # the inherited one shows again
        torch_checkpoint._checkpoint_without_reentrant_generator = plain
