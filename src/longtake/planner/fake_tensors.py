"""A FakeTensorMode with a faster cache, and context parallelism on fake tensors.

A transformer calls the same operations with the same shapes in every block and every trace. torch
computes each result again, or looks it up by a key that takes longer to build than a small
operation takes. `CachedFakeMode` has a cheaper key, and creates the result itself.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from longtake.parallel.context_parallel import Ranks, TokenSharing

Observer = Callable[[Any, Sequence[Any], dict[str, Any], Any], None]
"""A function that is called with each operation of a fake mode, its args, kwargs and result."""

_DEVICE_OF = torch.ops.prim.device.default
_PURE = ("aten", "prims", "longtake")
"""Namespaces of torch operations whose results' shapes depend on the arguments' shapes only."""
_PLAIN = (
    int,
    float,
    bool,
    str,
    type(None),
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
)
"""Types of an operation's arguments and results, other than tensors, that are part of cache
keys."""


@dataclass(frozen=True, slots=True)
class _Layout:
    """The placement of a tensor's elements in its storage."""

    shape: torch.Size
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    device: torch.device


@dataclass(frozen=True, slots=True)
class _Output:
    """One output of a cached operation: a new tensor, an argument, its view, or a plain value."""

    source: int | None = None  # index of the given tensor that it is, or whose storage it shares
    layout: _Layout | None = None  # None: a given tensor, or a plain value
    value: object = None


class CachedFakeMode(FakeTensorMode):  # type: ignore[no-untyped-call]
    """A FakeTensorMode that caches operations' results, and reports operations to an observer.

    The observer spares a second dispatch mode, which would be slow.
    """

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._known: dict[Any, tuple[type | None, list[_Output]]] = {}
        self._observer: Observer | None = None
        self._attributes: dict[torch.device, dict[str, Any]] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled here, and torch's check is costly

    @contextmanager
    def observed_by(self, observer: Observer) -> Iterator[None]:
        """Call an observer for every operation inside the context."""
        before, self._observer = self._observer, observer
        try:
            with self:
                yield
        finally:
            self._observer = before

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _DEVICE_OF:  # autograd asks for it twice per operation
            return args[0].device
        kwargs = kwargs or {}
        observer, self._observer = self._observer, None  # parts of this operation are not reported
        try:
            result = self._result(func, types, args, kwargs)
        finally:
            self._observer = observer
        if observer is not None:
            observer(func, args, kwargs, result)
        return result

    def _result(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        given: list[FakeTensor] = []
        # Operations without a dtype argument follow the default dtype.
        parts: list[Any] = [func, torch.get_default_dtype(), *kwargs]
        if not (_describe(args, parts, given) and _describe(kwargs.values(), parts, given)):
            # Anything unknown in the arguments: torch computes the result.
            return super().__torch_dispatch__(func, types, args, kwargs)
        key = tuple(parts)
        if key not in self._known:
            result: Any = super().__torch_dispatch__(func, types, args, kwargs)
            kind: type | None = None
            if isinstance(result, tuple | list):
                kind = tuple if isinstance(result, tuple) else list  # a named tuple as well
            outputs = _outputs(result if kind else [result], given)
            # An operation that changes a shape in place also changes the given tensor.
            is_pure = func.namespace in _PURE and torch.Tag.inplace_view not in func.tags
            if outputs is not None and is_pure:
                self._known[key] = kind, outputs
            return result
        container, outputs = self._known[key]
        if container is None:
            return self._make(outputs[0], given)
        return container([self._make(output, given) for output in outputs])

    def _make(self, output: _Output, given: Sequence[FakeTensor]) -> Any:
        layout, source = output.layout, output.source
        if layout is None:
            return output.value if source is None else given[source]
        shape, stride, dtype = layout.shape, layout.stride, layout.dtype
        if source is None:
            tensor = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
        else:
            # A view must share the storage, since tracers count storages.
            tensor = torch.empty(0, dtype=dtype, device="meta")
            tensor.set_(given[source].untyped_storage(), layout.offset, shape, stride)
        return self._fake(tensor, layout.device)

    def _fake(self, tensor: Tensor, device: torch.device) -> FakeTensor:
        """Return a fake tensor of a meta tensor, as `FakeTensor(self, tensor, device)` is.

        torch's constructor takes a third of a trace's time, mostly for attributes that are equal in
        all fake tensors of a device; they are copied from one that it has made.
        """
        if device not in self._attributes:
            made = dict(vars(FakeTensor(self, tensor, device)))
            del made["fake_mode"]  # which is this one, and must not hold itself
            self._attributes[device] = made
        fake: FakeTensor = Tensor._make_subclass(
            FakeTensor, tensor, False, dispatch_device=True, device_for_backend_keys=device
        )
        torch._C._set_throw_on_mutable_data_ptr(fake)
        vars(fake).update(self._attributes[device], fake_mode=self)
        return fake


def empty_like(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Create tensors of the same shapes and types in a fake mode, so that they take no memory."""
    return {name: torch.empty(x.shape, dtype=x.dtype) for name, x in tensors.items()}


def _describe(values: Iterable[Any], parts: list[Any], given: list[FakeTensor]) -> bool:
    """Add all facts of an operation's arguments on which its result's shape depends to a cache key.

    Returns false if these facts cannot be told.
    """
    for value in values:
        kind = type(value)
        if kind is FakeTensor:
            if not _is_simple(value):
                return False
            given.append(value)
            parts += (
                value.dtype,
                value.shape,
                value.stride(),
                value.storage_offset(),
                value.fake_device,
            )
        elif kind in _PLAIN:
            parts += (kind, value)  # with the type, as 1, 1.0 and True are equal
        elif kind is list or kind is tuple:
            parts += (kind, len(value))
            if not _describe(value, parts, given):
                return False
        else:
            return False
    return True


def _is_simple(tensor: FakeTensor) -> bool:
    has_values = tensor.constant is not None
    return not (has_values or tensor.is_conj() or tensor.is_neg() or tensor.is_sparse)


def _outputs(results: Iterable[Any], given: Sequence[FakeTensor]) -> list[_Output] | None:
    """Describe an operation's outputs for the cache, which makes them again; None if it cannot."""
    outputs, new = [], set[int]()
    for result in results:
        if type(result) in _PLAIN:
            outputs.append(_Output(value=result))
            continue
        if type(result) is not FakeTensor or not _is_simple(result):
            return None
        storage = result.untyped_storage()
        sources = [
            index
            for index, tensor in enumerate(given)
            if tensor.untyped_storage()._cdata == storage._cdata
        ]
        if len(sources) > 1 or storage._cdata in new:
            return None  # two tensors share it, which may be chance
        source = sources[0] if sources else None
        if source is not None and given[source] is result:
            outputs.append(_Output(source))
            continue
        offset = int(result.storage_offset())
        layout = _Layout(result.shape, result.stride(), offset, result.dtype, result.fake_device)
        if source is None:
            new.add(storage._cdata)
            alone = torch.empty_strided(
                layout.shape, layout.stride, dtype=layout.dtype, device="meta"
            )
            # A storage that is larger than its tensor, or begins before it, cannot be described.
            if offset or alone.untyped_storage().nbytes() != storage.nbytes():
                return None
        outputs.append(_Output(source, layout))
    return outputs


class FakeTokenSharing(TokenSharing):
    """The first of the context-parallel ranks, simulated in one process without the others.

    It has the most tokens if they do not divide evenly. Received tensors have a shape and no
    values; the sending is a custom operation that a trace sees.
    """

    def __init__(self, size: int, heads_size: int) -> None:
        super().__init__(0, size, heads_size)

    def _exchange(
        self, tensor: Tensor, sent: list[int], received: list[int], among: Ranks
    ) -> Tensor:
        return _exchanged(tensor.contiguous(), sent, received, among)

    def _begin_exchange(
        self, tensor: Tensor, sent: list[int], received: list[int]
    ) -> Callable[[], Tensor]:
        arrived: Tensor = _exchanged(tensor, sent, received, "ring")
        return lambda: arrived


def sent_bytes(operation: Any, args: Sequence[Any]) -> tuple[int, int]:
    """Return the bytes that the first context-parallel rank sends all-to-all, and in a ring."""
    if operation is not torch.ops.longtake.exchange.default:
        return 0, 0
    tensor, sent, _, among = args
    num_bytes = int(tensor.nbytes * (sum(sent) - sent[0]) // sum(sent))
    return (0, num_bytes) if among == "ring" else (num_bytes, 0)


@torch.library.custom_op("longtake::exchange", mutates_args=())
def _exchanged(tensor: Tensor, sent: Sequence[int], received: Sequence[int], among: str) -> Tensor:
    raise NotImplementedError("this operation has shapes, but computes nothing")


@_exchanged.register_fake
def _exchanged_shape(
    tensor: Tensor, sent: Sequence[int], received: Sequence[int], among: str
) -> Tensor:
    return tensor.new_empty(sum(received), *tensor.shape[1:])


def _keep_counts(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, ctx.sent, ctx.received, ctx.among = inputs


def _exchange_gradient(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
    sent, received = ctx.received, ctx.sent
    return _exchanged(gradient.contiguous(), sent, received, ctx.among), None, None, None


_exchanged.register_autograd(_exchange_gradient, setup_context=_keep_counts)
