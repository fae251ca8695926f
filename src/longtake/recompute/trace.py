"""Runs one training step on tensors without values, and writes down what memory it would take.

The model's own code is run, forward and backward, with autograd as it is: whatever it keeps, frees
or computes again is seen, whoever wrote the model. FakeTensorMode gives each operation's result its
shape and no memory; a storage lives exactly as long as it would in a real run.
"""

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from longtake.errors import CannotBePlannedError
from longtake.recompute import kernels, kernels_cpu
from longtake.recompute.apply import BlockCall, Option, caller, run_block
from longtake.recompute.cost import seconds, tensors
from longtake.recompute.devices import Device, Target
from longtake.recompute.exchange import sent_bytes
from longtake.recompute.shapes import Shapes
from longtake.recompute.watch import Watch

_CAST = torch.ops.aten._to_copy.default
CUDA_ROUNDS_TO = 512
"""Bytes of which CUDA's caching allocator hands out multiples, and counts them."""


@dataclass
class Subject:
    """A training step to be traced."""

    model: nn.Module
    """On the meta device; its parameters are exchanged for fake ones once and for all."""
    blocks: Mapping[str, nn.Module]
    """Its blocks by their names in the model, in the order in which they run."""
    call_blocks_by: Callable[[BlockCall], None]
    """Makes the model run its blocks by a call of ours."""
    make_inputs: Callable[[], Any]
    """All that a step is given, of the right shapes; held until the step is over."""
    loss: Callable[[Any], Tensor]
    """The loss of inputs, as training computes it."""
    is_accumulating: bool = False
    """Whether gradients of an earlier micro-batch are there already."""
    num_shards: int = 1
    """Ranks that hold one copy of the model: each block's gradients are reduce-scattered over them
    after its backward pass, unless they accumulate."""
    gathers_in_bf16: bool = False
    """Whether weights kept in fp32 come as bf16 from other ranks, so that autocast copies none."""


@dataclass(frozen=True)
class Span:
    """A part of a step: bytes allocated when it begins, the most within it, and how long it is."""

    begin_bytes: int
    end_bytes: int
    peak_bytes: int
    seconds: float


@dataclass(frozen=True)
class BlockTrace:
    """What happened around one block."""

    forward: Span
    backward: Span | None
    """From when the gradient of its output is there until that of the block before it is; None
    where no gradient passes."""


@dataclass(frozen=True)
class StepTrace:
    """One step under one policy. Bytes count everything, weights included."""

    weight_bytes: int
    input_bytes: int
    blocks: Mapping[str, BlockTrace]
    forward_end_bytes: int
    """When the loss is known and the backward pass begins."""
    peak_bytes: int
    end_bytes: int
    """Weights, inputs and gradients."""
    front_peak_bytes: int
    """The most before the first block."""
    turn: Span
    """From the end of the last block's forward pass to the begin of the first backward."""
    seconds: float
    reached: tuple[str, ...]
    """Trainable parameters that got a gradient."""
    unreached: tuple[str, ...]
    """Trainable parameters that got none."""
    sent_bytes: int = 0
    """To other ranks, where they share the tokens of a clip."""


class Tracer:
    """Traces a subject under one policy after another."""

    def __init__(self, subject: Subject, device: Device) -> None:
        self.subject = subject
        self.device = device
        self._fake = Shapes()
        with self._fake:
            exchange(subject.model)

    def trace(
        self,
        options: Mapping[str, Option],
    ) -> StepTrace:
        """What a step takes where each block is run as it is told; unnamed blocks are kept."""
        with self._fake, self._gradients_dropped():
            return self._trace(options)

    def watch(self) -> Watch:
        """One step with every block kept, watched for gradients that do not arrive."""
        subject = self.subject
        subject.call_blocks_by(caller({}))
        with self._fake, self._gradients_dropped(), _kernels_of(self.device.target):
            inputs = subject.make_inputs()
            with Watch(subject.model, subject.blocks, _flat(inputs)) as watch:
                watch.backward(subject.loss(inputs))
        return watch

    @contextmanager
    def _gradients_dropped(self) -> Iterator[None]:
        try:
            yield
        finally:
            for parameter in self.subject.model.parameters():
                parameter.grad = None

    def _trace(self, options: Mapping[str, Option]) -> StepTrace:
        subject, tape = self.subject, Tape(self.device)
        for tensor in (*subject.model.parameters(), *subject.model.buffers()):
            tape.count(tensor)
        weight_bytes = tape.current_bytes
        if subject.gathers_in_bf16:
            tape.ignore_casts_of(subject.model.parameters())
        reducer = _Reducer(subject)
        if subject.is_accumulating:
            _give_gradients(subject.model, tape)
        begun_at = tape.current_bytes
        subject.call_blocks_by(self._call(options, tape, reducer))
        with _kernels_of(self.device.target), reducer.hooked(), self._fake.observed_by(tape.note):
            inputs = subject.make_inputs()
            input_bytes = tape.current_bytes - begun_at
            tape.mark("inputs")
            loss = subject.loss(inputs)
            tape.mark("loss")
            if loss.requires_grad:
                torch.autograd.backward((loss,))
                reducer.reduce()
            del loss
            tape.mark("end")
        return _read(tape, weight_bytes, input_bytes, subject, reducer)

    def _call(self, options: Mapping[str, Option], tape: "Tape", reducer: "_Reducer") -> BlockCall:
        names = {block: name for name, block in self.subject.blocks.items()}
        on_cpu = self.device.target == "cpu"

        def backward_begins(name: str) -> None:
            reducer.reduce()  # of the block after it, whose backward pass has ended here
            tape.mark(f"backward {name}")

        def call(block: nn.Module, *args: Any) -> Any:
            name = names[block]
            option = options.get(name, "keep")
            tape.mark(f"before {name}")
            if option != "keep" and on_cpu:
                output = run_block(option, *kernels_cpu.with_random_state(block), *args)
            else:
                output = run_block(option, block, *args)
            tape.mark(f"after {name}")
            for tensor in tensors(output):
                if tensor.requires_grad:
                    tensor.register_hook(lambda _: backward_begins(name))  # type: ignore[no-untyped-call]
            return output

        return call


class Tape:
    """Follows every storage from its making to its end, and the time that operations take."""

    def __init__(self, device: Device) -> None:
        self.current_bytes = 0
        self.marks: list[tuple[str, Span]] = []
        """What was marked, and the span that ends there."""
        self._device = device
        self._step = CUDA_ROUNDS_TO if device.target == "cuda" else 1
        self._workspace = (kernels if device.target == "cuda" else kernels_cpu).workspace_bytes
        self._sizes: dict[int, tuple[int, Any]] = {}
        self._begin_bytes = self._peak_bytes = 0
        self._seconds = 0.0
        self.sent_bytes = 0
        self._uncast: set[int] = set()

    def ignore_casts_of(self, weights: Iterable[Tensor]) -> None:
        self._uncast = {weight.untyped_storage()._cdata for weight in weights}

    def count(self, tensor: Tensor) -> None:
        """Count a tensor's storage, once, until nobody holds it any more."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._sizes:
            size = -(-storage.nbytes() // self._step) * self._step
            gone = weakref.ref(storage, lambda _: self._forget(key))
            self._sizes[key] = size, gone
            self.current_bytes += size
            self._peak_bytes = max(self._peak_bytes, self.current_bytes)

    def mark(self, what: str) -> None:
        """End a span here and begin the next."""
        span = Span(self._begin_bytes, self.current_bytes, self._peak_bytes, self._seconds)
        self.marks.append((what, span))
        self._begin_bytes = self._peak_bytes = self.current_bytes
        self._seconds = 0.0

    def note(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any], result: Any) -> None:
        """Count what an operation has made."""
        if func is _CAST and args[0].untyped_storage()._cdata in self._uncast:
            self._seconds += seconds(func, args, kwargs, result, self._device)
            return
        made = tensors(result)
        before = self.current_bytes
        for tensor in made:
            self.count(tensor)
        if func.is_view:
            return
        self.sent_bytes += sent_bytes(func, args)
        extra = self._workspace(func, args, made)
        self._peak_bytes = max(self._peak_bytes, self.current_bytes + extra)
        if self.current_bytes > before or func._schema.is_mutable:
            self._seconds += seconds(func, args, kwargs, result, self._device)

    def _forget(self, key: int) -> None:
        size, _ = self._sizes.pop(key)
        self.current_bytes -= size


class _Reducer:
    """What FSDP2 does with gradients of a sharded model that do not accumulate.

    Those of a block are there until its backward pass ends, in the type in which its weights were
    gathered. Then they are copied into the input of the reduce-scatter, in fp32, which is let go
    of at the next one; the share of this rank remains.
    """

    def __init__(self, subject: Subject) -> None:
        self._subject = subject
        self._is_active = subject.num_shards > 1 and not subject.is_accumulating
        self._whole: list[Tensor] = []
        self._shares: list[Tensor] = []
        self._input: Tensor | None = None
        self.reached: set[Tensor] = set()
        """Parameters whose gradient was reduced."""

    @contextmanager
    def hooked(self) -> Iterator[None]:
        """Takes gradients from parameters as they come."""
        trained = [p for p in self._subject.model.parameters() if p.requires_grad]
        hooks = [
            parameter.register_post_accumulate_grad_hook(self._take)  # type: ignore[no-untyped-call]
            for parameter in (trained if self._is_active else [])
        ]
        yield
        for hook in hooks:
            hook.remove()

    def _take(self, parameter: Tensor) -> None:
        gradient, parameter.grad = parameter.grad, None
        assert gradient is not None
        self.reached.add(parameter)
        if self._subject.gathers_in_bf16 and gradient.dtype == torch.float32:
            shape = gradient.shape
            del gradient
            gradient = torch.empty(shape, dtype=torch.bfloat16)
        self._whole.append(gradient)

    def reduce(self) -> None:
        """Reduce-scatter what has come."""
        if not self._whole:
            return
        sizes = [gradient.numel() for gradient in self._whole]
        self._input = None
        self._input = torch.empty(sum(sizes), dtype=torch.float32)
        self._whole.clear()
        share = -(-sum(sizes) // self._subject.num_shards)
        self._shares.append(torch.empty(share, dtype=torch.float32))


@dataclass(frozen=True)
class Work:
    """What modules take that compute without gradients."""

    weight_bytes: int
    peak_bytes: int
    """The most, weights included."""
    seconds: float


def trace_work(
    shapes: Shapes, modules: Sequence[nn.Module], work: Callable[[], object], device: Device
) -> Work:
    """Run work of modules, whose tensors are fake ones already, without gradients."""
    tape = Tape(device)
    for module in modules:
        for tensor in (*module.parameters(), *module.buffers()):
            tape.count(tensor)
    weight_bytes = tape.current_bytes
    with torch.no_grad(), _kernels_of(device.target), shapes.observed_by(tape.note):
        work()
    tape.mark("end")
    ((_, span),) = tape.marks
    return Work(weight_bytes, span.peak_bytes, span.seconds)


def exchange(model: nn.Module) -> None:
    """Put fake tensors on the CPU in the place of a model's parameters and buffers."""
    made: dict[int, Tensor] = {}

    def fake(tensor: Tensor) -> Tensor:
        if id(tensor) not in made:
            made[id(tensor)] = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
            if isinstance(tensor, nn.Parameter):
                made[id(tensor)] = nn.Parameter(made[id(tensor)], tensor.requires_grad)
                made[id(tensor)].grad_dtype = tensor.grad_dtype
        return made[id(tensor)]

    for module in model.modules():
        for held in (cast("dict[str, Tensor | None]", module._parameters), module._buffers):
            for name, tensor in held.items():
                if tensor is not None:
                    held[name] = fake(tensor)


def _give_gradients(model: nn.Module, tape: Tape) -> None:
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.empty_like(parameter, dtype=parameter.grad_dtype)
            tape.count(parameter.grad)


@contextmanager
def _kernels_of(target: Target) -> Iterator[None]:
    with kernels.as_on_cuda() if target == "cuda" else nullcontext():
        yield


def _flat(inputs: Any) -> list[Tensor]:
    leaves: list[Any] = torch.utils._pytree.tree_leaves(
        vars(inputs) if hasattr(inputs, "__dict__") else inputs
    )
    return [leaf for leaf in leaves if isinstance(leaf, Tensor)]


def _read(
    tape: Tape, weight_bytes: int, input_bytes: int, subject: Subject, reducer: _Reducer
) -> StepTrace:
    """Make sense of the marks, each of which closes the span before it."""
    spans = tape.marks
    ends = {what: place for place, (what, _) in reversed(list(enumerate(spans)))}
    _refuse_other_order([what for what, _ in spans], subject)
    loss_at, first_block = ends["loss"], ends[f"before {next(iter(subject.blocks))}"] + 1
    trained = [
        (name, parameter)
        for name, parameter in subject.model.named_parameters()
        if parameter.requires_grad
    ]
    reached = {p for _, p in trained if p.grad is not None} | reducer.reached
    return StepTrace(
        weight_bytes=weight_bytes,
        input_bytes=input_bytes,
        blocks={name: _of_block(name, spans, ends) for name in subject.blocks},
        forward_end_bytes=spans[loss_at][1].end_bytes,
        peak_bytes=max(span.peak_bytes for _, span in spans),
        end_bytes=spans[-1][1].end_bytes,
        front_peak_bytes=_joined([span for _, span in spans[:first_block]]).peak_bytes,
        turn=_joined([span for _, span in spans[loss_at : loss_at + 2]]),
        seconds=sum(span.seconds for _, span in spans),
        reached=tuple(name for name, parameter in trained if parameter in reached),
        unreached=tuple(name for name, parameter in trained if parameter not in reached),
        sent_bytes=tape.sent_bytes,
    )


def _refuse_other_order(marks: Sequence[str], subject: Subject) -> None:
    """What a block saves is read off what is there when the next one begins."""
    ran = [mark.removeprefix("before ") for mark in marks if mark.startswith("before ")]
    if ran != list(subject.blocks):
        odd = next((name for name in subject.blocks if ran.count(name) != 1), ran[0])
        raise CannotBePlannedError(
            f"The model cannot be planned: its blocks do not run once each in their order; {odd} "
            f"runs {ran.count(odd)} times. Set recompute.policy and leave recompute.memory out."
        )


def _of_block(name: str, spans: Sequence[tuple[str, Span]], ends: Mapping[str, int]) -> BlockTrace:
    forward = spans[ends[f"after {name}"]][1]
    begun = ends.get(f"backward {name}")
    if begun is None:
        return BlockTrace(forward, None)
    after = begun + 1
    while spans[after][0] == f"backward {name}":  # a block with two outputs is marked twice
        after += 1
    return BlockTrace(forward, _joined([span for _, span in spans[begun + 1 : after + 1]]))


def _joined(spans: Sequence[Span]) -> Span:
    return Span(
        spans[0].begin_bytes,
        spans[-1].end_bytes,
        max(span.peak_bytes for span in spans),
        sum(span.seconds for span in spans),
    )
