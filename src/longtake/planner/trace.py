"""Traces one training step on tensors without values, to predict its memory and time.

The model's own code runs forward and backward, with autograd unchanged, so that all it saves, frees
or recomputes is seen. Results have shapes but no memory; a storage lives exactly as long as it
would in a real run.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor, nn

from longtake.errors import CannotBePlannedError
from longtake.models.streamed import NUM_BUFFERS
from longtake.parallel.attention_trial import AttentionCase, case_of
from longtake.planner import activation_checkpointing, kernels
from longtake.planner.activation_offload import ActivationOffload
from longtake.planner.block_weights import Floats, blocks_with, link_seconds
from longtake.planner.devices import DeviceBudget, Target
from longtake.planner.fake_tensors import CachedFakeMode
from longtake.planner.gradient_flow import GradientWatch, checkpoint_is_quiet, watching
from longtake.planner.record import KEEP, BlockWeights, Options
from longtake.planner.repeats import Composition, Run, UnlikeError, find_runs, kinds_of
from longtake.planner.tracker import MemoryTracker, Span, StepSection, tensors

_aten = torch.ops.aten


@dataclass
class Subject:
    """A training step that can be traced: the model, its inputs and its loss."""

    model: nn.Module  # on the meta device; a tracer makes its tensors fake
    blocks: Mapping[str, nn.Module]  # by name in the model, in running order
    call_blocks_by: Callable[
        [activation_checkpointing.BlockCall], None
    ]  # makes the model run its blocks by a function
    make_inputs: Callable[[], Any]  # creates tensors of the right shapes, held until the step ends
    loss: Callable[[Any], Tensor]  # computes the loss from the inputs, as training does
    is_accumulating: bool = False  # true if an earlier micro-batch has left gradients
    updates: int | None = None
    """Most temporary bytes of a weight's update, if the backward pass makes the updates and frees
    the gradients (`optimizer.fused_backward`); None: gradients stay."""
    compiles: bool = False
    """True if blocks are compiled, so that a block returns all of its gradients at its end."""
    num_shards: int = 1
    """Number of ranks that share one copy of the model. A block's gradients are reduce-scattered
    over them after its backward pass, unless they accumulate."""
    weights: Sequence[BlockWeights] = ("keep",)
    """Treatments that a plan may choose for the frozen weights of blocks; named recompute policies
    use the first."""
    quantize_gain: float = 0.0
    """Share of a block's time that fewer bits must save to be chosen (`model.quantize_gain`)."""
    offloads: bool = False  # true if activations may be offloaded to host memory
    host_bytes: int | None = None  # limit of that memory; None: no limit
    networks: Sequence[nn.Module] = ()  # frozen networks of the objective, on the device
    gathers_in_bf16: bool = False
    """True if FSDP2 gathers fp32 weights as bf16 copies, which autocast need not cast."""


@dataclass(frozen=True)
class BlockTrace:
    """Memory and time of one block's forward and backward pass, and its activations on the host."""

    forward: Span
    backward: Span | None
    """The block's backward pass: from the gradient of its output to that of the block before; None
    if it gets no gradient."""
    offloaded_bytes: int = 0  # activations that are offloaded to host memory
    pinned_bytes: int = 0  # host memory that these take when pinned


@dataclass(frozen=True)
class StepTrace:
    """Memory and time of one training step under one recompute policy; bytes include weights."""

    weight_bytes: int
    input_bytes: int
    blocks: Mapping[str, BlockTrace]
    forward_end_bytes: int  # at the start of the backward pass, when the loss is known
    peak_bytes: int
    end_bytes: int  # after the backward pass: weights, inputs and gradients
    front_peak_bytes: int  # peak before the first block
    loss_span: Span  # from the end of the last block's forward pass to the first backward pass
    seconds: float  # with `link_seconds`
    sent_bytes: int = 0  # sent to ranks that share a clip's tokens, all-to-all
    ring_bytes: int = 0  # sent around a ring while attention is computed
    attention_seconds: float = 0.0  # included in `seconds`
    host_bytes: int = 0  # streamed weights and offloaded activations in host memory
    link_seconds: float = 0.0  # waits for copies from and to the host


@dataclass(frozen=True)
class InferenceTrace:
    """Predicted memory and time of modules that run without gradients."""

    weight_bytes: int
    peak_bytes: int  # with weights, without workspaces of convolutions
    seconds: float
    how: str = ""
    """How the modules run: for `sampling`, presets and videos at a time; for `model`, "weights
    streamed"; for `encode`, its tiles; for `decode`, "in tiles"; for `text`, "layer by layer"."""

    @property
    def activation_bytes(self) -> int:
        return self.peak_bytes - self.weight_bytes


class Tracer:
    """Traces a training step once for each choice of how its blocks run."""

    def __init__(self, subject: Subject, device: DeviceBudget) -> None:
        self.subject = subject
        self.device = device
        self.attentions: dict[AttentionCase, None] = {}
        """Distinct attention calls (shapes and types) that `watch_gradients` has seen."""
        self._fake = CachedFakeMode()
        self._kinds = kinds_of(subject.model, subject.blocks)
        with self._fake:
            for module in (subject.model, *subject.networks):
                make_fake(module)
        self._trained = [each for each in subject.model.parameters() if each.requires_grad]

    def trace(self, options: Options, *, composes: bool = True) -> StepTrace:
        """Trace the step's memory and time, with each block run by its option.

        With `composes`, of many equal blocks only a few run; the result is the same.
        """
        blocks = self.subject.blocks
        weights = [options.get(name, KEEP).weights for name in blocks]
        with (
            blocks_with(weights, list(blocks.values()), self._fake) as streamed,
            self._fake,
            checkpoint_is_quiet(),
        ):
            sizes = np.array([float(streamed.get(block, 0)) for block in blocks.values()])
            if composes and (runs := self._runs(options)):
                with suppress(UnlikeError), self._gradients_dropped():
                    return self._trace(options, sizes, runs)
            # Gradients of the last trace would be counted in the next one.
            with self._gradients_dropped():
                return self._trace(options, sizes, [])

    def _runs(self, options: Options) -> list[Run]:
        names = list(self.subject.blocks)
        kinds = [(self._kinds[name], options.get(name, KEEP)) for name in names]
        return find_runs(names, kinds)

    def watch_gradients(self) -> GradientWatch:
        """Run the step with all activations kept, and record where gradients do not arrive."""
        subject = self.subject
        subject.call_blocks_by(activation_checkpointing.caller({}))
        observed = self._fake.observed_by(self._note_attention)
        with observed, self._gradients_dropped(), _kernels_of(self.device.target):
            inputs = subject.make_inputs()
            leaves: list[Any] = torch.utils._pytree.tree_leaves(
                vars(inputs) if hasattr(inputs, "__dict__") else inputs
            )
            with watching(subject.model, subject.blocks, tensors(leaves)) as watch:
                watch.backward(subject.loss(inputs))
        return watch

    @contextmanager
    def evaluating(self) -> Iterator[CachedFakeMode]:
        """Lend the model in evaluation mode, and its fake mode, for traces without gradients."""
        model, mode = self.subject.model, self._fake
        self.subject.call_blocks_by(activation_checkpointing.caller({}))
        model.eval()
        before, mode.allow_non_fake_inputs = mode.allow_non_fake_inputs, True
        try:
            yield mode
        finally:
            mode.allow_non_fake_inputs = before
            model.train()

    def _note_attention(self, func: Any, args: Sequence[Any], kwargs: Any, result: Any) -> None:
        masked = _aten._scaled_dot_product_efficient_attention.default
        if func in (masked, _aten._scaled_dot_product_flash_attention.default):
            mask, last = (args[3], args[6:7]) if func is masked else (None, args[4:5])
            is_causal = any(last)  # torch leaves arguments out that have their default
            query, key, value = args[:3]
            self.attentions[case_of(query, key, value, mask, is_causal=is_causal)] = None

    @contextmanager
    def _gradients_dropped(self) -> Iterator[None]:
        try:
            yield
        finally:
            for parameter in self._trained:
                parameter.grad = None

    def _trace(self, options: Options, streamed: Floats, runs: Sequence[Run]) -> StepTrace:
        """Trace the step, without some blocks of the runs.

        `streamed` are the bytes [blocks] of weights that stay in host memory.
        """
        subject, tracker = self.subject, MemoryTracker(self.device)
        for module in (subject.model, *subject.networks):
            tracker.count_module(module)
        tracker.hold_streamed(streamed)
        weight_bytes = tracker.current_bytes
        if subject.gathers_in_bf16:
            tracker.ignore_casts_of(subject.model.parameters())
        reducer, offloaded = _GradientReducer(subject, tracker), dict[str, tuple[int, int]]()
        composition = Composition(runs, tracker)
        if subject.is_accumulating:
            # Gradients of the micro-batches before.
            for parameter in self._trained:
                parameter.grad = torch.empty_like(parameter, dtype=parameter.grad_dtype)
                tracker.count(parameter.grad)
        begun_at = tracker.begin()
        subject.call_blocks_by(self._call(options, tracker, reducer, offloaded, composition))
        observed = self._fake.observed_by(tracker.observe)
        with _kernels_of(self.device.target), reducer.hooked(), observed:
            inputs = subject.make_inputs()
            input_bytes = tracker.current_bytes - begun_at
            tracker.mark("inputs")
            loss = subject.loss(inputs)
            tracker.mark("loss")
            if loss.requires_grad:
                torch.autograd.backward((loss,))
                # The last block's gradients, after which no other block begins its backward pass.
                reducer.reduce()
            del loss
            tracker.mark("end")
        nothing = 0, 0  # of a block that the model did not call, which is refused
        of_blocks = {
            name: offloaded.get(composition.equal_to(name), nothing) for name in subject.blocks
        }
        trace = _step_trace(composition.finish(), weight_bytes, input_bytes, subject, of_blocks)
        # A step also waits for copies from and to the host.
        blocks = list(trace.blocks.values())
        waits = link_seconds(
            np.array([block.forward.seconds for block in blocks]),
            np.array([block.backward.seconds if block.backward else 0.0 for block in blocks]),
            streamed,
            np.array([float(block.offloaded_bytes) for block in blocks]),
            self.device.link,
        )
        host_bytes = int(streamed.sum()) + sum(block.pinned_bytes for block in blocks)
        return replace(
            trace, host_bytes=host_bytes, link_seconds=waits, seconds=trace.seconds + waits
        )

    def _call(
        self,
        options: Options,
        tracker: "MemoryTracker",
        reducer: "_GradientReducer",
        offloaded: dict[str, tuple[int, int]],
        composition: Composition,
    ) -> activation_checkpointing.BlockCall:
        names = {block: name for name, block in self.subject.blocks.items()}
        on_cpu = self.device.target == "cpu"
        offload = ActivationOffload() if on_cpu else _FakeOffload()

        def backward_begins(name: str) -> None:
            reducer.reduce()  # of the next block, whose backward pass has just ended
            tracker.mark(f"backward {name}")
            composition.backward_begins(name)

        def call(block: nn.Module, *args: Any) -> Any:
            name = names[block]
            if (left_out := composition.leave_out(name, args)) is not None:
                return left_out[0]
            activations = options.get(name, KEEP).activations
            tracker.mark(f"before {name}")
            composition.begins(name, args)

            def run(block: nn.Module, *args: Any) -> Any:
                called: tuple[Any, ...] = (block, *args)
                if activations in activation_checkpointing.RECOMPUTED and on_cpu:
                    called = (*kernels.with_random_state(block), *args)
                output = activation_checkpointing.run_block(activations, *called)
                # The gradient of a block's output is there: the block's backward pass begins.
                for tensor in tensors(output):
                    if tensor.requires_grad:
                        tensor.register_hook(lambda _: backward_begins(name))  # type: ignore[no-untyped-call]
                return output

            output = offload.call(
                run, block, *args, offloads=activations in activation_checkpointing.OFFLOADED
            )
            composition.ends(name, output)
            tracker.mark(f"after {name}")
            offloaded[name] = offload.last_bytes(on_cpu=on_cpu)
            return output

        return call


def trace_inference(
    mode: CachedFakeMode,
    modules: Sequence[nn.Module],
    run: Callable[[], object],
    device: DeviceBudget,
    streamed: Mapping[nn.Module, int] | None = None,
) -> InferenceTrace:
    """Trace memory and time of modules that run without gradients.

    Args:
        mode: fake mode of the modules' tensors.
        modules: modules whose weights are on the device.
        run: uses the modules.
        device: device that is planned for.
        streamed: bytes of weights in host memory by block. Each block's are copied while the
            streamed block before it computes; the first block's during the last of the pass before.
    """
    tracker, streamed = MemoryTracker(device), streamed or {}
    for module in modules:
        tracker.count_module(module)
    if streamed:
        tracker.hold_streamed(np.array(list(streamed.values()), dtype=np.float64))
    weight_bytes = tracker.begin()
    with ExitStack() as ended:
        for block, size in streamed.items():
            hook = block.register_forward_pre_hook(lambda *_, size=size: tracker.mark(f"{size}"))
            ended.callback(hook.remove)
        with torch.no_grad(), _kernels_of(device.target), mode.observed_by(tracker.observe):
            run()
    tracker.mark("end")
    spans = [mark.span for mark in tracker.marks]
    # The buffers hold two blocks from the beginning; if there are no more, nothing is copied.
    copied = tracker.marks[2:-1] if len(streamed) > NUM_BUFFERS else []
    waits = [int(mark.name) / device.link - mark.span.seconds for mark in copied]
    return InferenceTrace(
        weight_bytes,
        max(span.peak_bytes for span in spans),
        sum(span.seconds for span in spans) + sum(max(0.0, each) for each in waits),
    )


def make_fake(model: nn.Module) -> None:
    """Replace a module's parameters and buffers by fake tensors on the CPU, inside a fake mode."""
    made: dict[int, Tensor] = {}

    def fake(tensor: Tensor) -> Tensor:
        # Tied weights stay tied, so that they are counted once.
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


class _HostCopy(NamedTuple):
    """Stands for an offloaded fake tensor's copy in host memory: its size, without memory."""

    nbytes: int
    shape: torch.Size
    dtype: torch.dtype


class _FakeOffload(ActivationOffload):
    """An offload of activations that copies nothing, and counts the bytes that a GPU would copy."""

    def to_host(self, tensor: Tensor) -> _HostCopy:
        return _HostCopy(tensor.nbytes, tensor.shape, tensor.dtype)

    def to_device(self, copy: _HostCopy, device: torch.device) -> Tensor:
        return torch.empty(copy.shape, dtype=copy.dtype, device=device)


class _GradientReducer:
    """Reduces the gradients of a sharded model as FSDP2 does, unless they accumulate.

    A block's gradients stay until its backward pass ends, in the type in which its weights were
    gathered. They are then copied to the input of a reduce-scatter, in fp32, which is freed at the
    next one; this rank's shard remains.

    Gradients that the backward pass applies to the weights are freed at once, or, in a compiled
    block, when its backward pass ends.
    """

    def __init__(self, subject: Subject, tracker: MemoryTracker) -> None:
        self._subject, self._tracker = subject, tracker
        is_reduced = subject.num_shards > 1 and not subject.is_accumulating
        self._is_active = is_reduced or subject.updates is not None
        self._whole: list[Tensor] = []
        self._shards: list[Tensor] = []
        self._input: Tensor | None = None

    @contextmanager
    def hooked(self) -> Iterator[None]:
        """Take each gradient from its parameter once it is accumulated, inside the context."""
        parameters = self._subject.model.parameters() if self._is_active else ()
        hooks = [
            parameter.register_post_accumulate_grad_hook(self._take)  # type: ignore[no-untyped-call]
            for parameter in parameters
            if parameter.requires_grad
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _take(self, parameter: Tensor) -> None:
        gradient, parameter.grad = parameter.grad, None
        assert gradient is not None
        if (update_bytes := self._subject.updates) is not None:
            self._tracker.hold(update_bytes)
            self._tracker.hold(-update_bytes)
            if not self._subject.compiles:
                return
        if self._subject.gathers_in_bf16 and gradient.dtype == torch.float32:
            shape = gradient.shape
            del gradient
            # bf16 until it is reduced, like the gathered weight.
            gradient = torch.empty(shape, dtype=torch.bfloat16)
        self._whole.append(gradient)

    def reduce(self) -> None:
        """Reduce-scatter the gradients taken from a block's parameters, as FSDP2 would."""
        if not self._whole:
            return
        if self._subject.updates is not None:
            self._whole.clear()
            return
        sizes = [gradient.numel() for gradient in self._whole]
        # The input before is freed first, as in FSDP2.
        self._input = None
        self._input = torch.empty(sum(sizes), dtype=torch.float32)
        self._whole.clear()
        shard = -(-sum(sizes) // self._subject.num_shards)
        self._shards.append(torch.empty(shard, dtype=torch.float32))


def _kernels_of(target: Target) -> AbstractContextManager[None]:
    return kernels.as_on_cuda() if target == "cuda" else nullcontext()


def _step_trace(
    marks: Sequence[StepSection],
    weight_bytes: int,
    input_bytes: int,
    subject: Subject,
    offloaded: Mapping[str, tuple[int, int]],
) -> StepTrace:
    """Compute a step's trace from the tracker's marks, each of which ends a section of the step."""
    spans = [(mark.name, mark.span) for mark in marks]
    # Reversed, so that the first mark of each name counts.
    ends = {name: index for index, (name, _) in reversed(list(enumerate(spans)))}
    # A block's bytes are read at the next one, so all have to run once each, in order.
    ran = [name.removeprefix("before ") for name, _ in spans if name.startswith("before ")]
    if ran != list(subject.blocks):
        odd = next((name for name in subject.blocks if ran.count(name) != 1), ran[0])
        raise CannotBePlannedError(
            f"The model cannot be planned: its blocks do not run once each in their order; {odd} "
            f'runs {ran.count(odd)} times. To train it unplanned, set recompute.policy = "none" '
            "and leave recompute.memory out."
        )
    loss_at, first_block = ends["loss"], ends[f"before {next(iter(subject.blocks))}"] + 1
    return StepTrace(
        weight_bytes=weight_bytes,
        input_bytes=input_bytes,
        blocks={name: _block_trace(name, spans, ends, offloaded[name]) for name in subject.blocks},
        forward_end_bytes=spans[loss_at][1].end_bytes,
        peak_bytes=max(span.peak_bytes for _, span in spans),
        end_bytes=spans[-1][1].end_bytes,
        front_peak_bytes=_joined([span for _, span in spans[:first_block]]).peak_bytes,
        loss_span=_joined([span for _, span in spans[loss_at : loss_at + 2]]),
        seconds=sum(span.seconds for _, span in spans),
        sent_bytes=sum(mark.sent_bytes for mark in marks),
        ring_bytes=sum(mark.ring_bytes for mark in marks),
        attention_seconds=sum(each for mark in marks for each in mark.attention),
    )


def _block_trace(
    name: str,
    spans: Sequence[tuple[str, Span]],
    ends: Mapping[str, int],
    host: tuple[int, int],
) -> BlockTrace:
    forward = spans[ends[f"after {name}"]][1]
    begun = ends.get(f"backward {name}")
    if begun is None:
        return BlockTrace(forward, None, *host)
    after = begun + 1
    while spans[after][0] == f"backward {name}":  # a block with two outputs is marked twice
        after += 1
    backward = _joined([span for _, span in spans[begun + 1 : after + 1]])
    return BlockTrace(forward, backward, *host)


def _joined(spans: Sequence[Span]) -> Span:
    return Span(
        spans[0].begin_bytes,
        spans[-1].end_bytes,
        max(span.peak_bytes for span in spans),
        sum(span.seconds for span in spans),
    )
