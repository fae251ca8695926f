"""The mode that remembers results: what it says is what torch's FakeTensorMode says."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.planner.build import make_tiny, make_toy
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from longtake.planner import trace
from longtake.planner.activation_checkpointing import ACTIVATIONS
from longtake.planner.devices import CPU, device_named
from longtake.planner.fake_tensors import CachedFakeMode, Observer
from longtake.planner.record import BlockOption
from longtake.planner.trace import Tracer

_aten = torch.ops.aten


class _Reporting(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, observer: Observer) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._observer = observer

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self._observer(func, args, kwargs or {}, result)
        return result


class _TorchsOwn(FakeTensorMode):  # type: ignore[no-untyped-call]
    """torch's mode with its own cache, observed by a second mode."""

    def observed_by(self, observer: Observer) -> _Reporting:
        return _Reporting(observer)


@pytest.fixture(scope="module", params=["toy", "flux_kontext lora", "wan full"])
def tracers(request: pytest.FixtureRequest) -> tuple[Tracer, Tracer]:
    """Two tracers of one model: the project's, and one on torch's own mode."""

    def make() -> Tracer:
        if request.param == "toy":
            return Tracer(make_toy(num_blocks=5, trained="blocks.1", dropout=0.1), CPU)
        family, kind = request.param.split()
        return make_tiny(family, kind, "bf16", device_named("a6000")).tracer

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trace, "CachedFakeMode", _TorchsOwn)
        reference = make()
    return make(), reference


@given(data=st.data())
@settings(
    max_examples=3, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_any_mixture_is_traced_as_without_memory(
    tracers: tuple[Tracer, Tracer], data: st.DataObject
) -> None:
    tracer, reference = tracers
    names = list(tracer.subject.blocks)
    options = {
        name: BlockOption(data.draw(st.sampled_from(ACTIVATIONS), label=name)) for name in names
    }
    assert tracer.trace(options) == reference.trace(options)


_CALLS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "new": lambda a, b: a @ b,
    "in place": lambda a, b: a.add_(b),
    "in place by itself": lambda a, b: a.mul_(a),
    "view": lambda a, b: a[1:, 2],
    "several views": lambda a, b: a.unbind(1),
    "another type": lambda a, b: a.to(torch.bfloat16),
    "integers": lambda a, b: torch.full((2,), 1),
    "floats": lambda a, b: torch.full((2,), 1.0),
    "bools": lambda a, b: torch.full((2,), True),
    "of a list": lambda a, b: torch.cat([a, b]),
    "maximum and its place": lambda a, b: a.max(0),
    "a named tuple": lambda a, b: torch.native_layer_norm(a, [8], None, None, 1e-5),
    "shape changed in place": lambda a, b: a.unsqueeze_(0),
    "fresh or shared": lambda a, b: _aten._unsafe_view(a, [64]),
    "attention": lambda a, b: _aten._scaled_dot_product_flash_attention(
        *[a.view(1, 2, 4, 8).bfloat16()] * 3
    ),
}


@pytest.mark.parametrize("call", _CALLS.values(), ids=_CALLS)
def test_results_are_torchs(call: Callable[[Tensor, Tensor], Any]) -> None:
    with FakeTensorMode():
        expected = _facts(call)
    FakeTensorMode.cache_clear()  # a named tuple is a plain one when it comes from there
    with CachedFakeMode():
        for other in _CALLS.values():
            other(torch.empty(8, 8), torch.empty(8, 8))
        assert [_facts(call) for _ in range(2)] == [expected] * 2


def test_errors_come_every_time() -> None:
    with CachedFakeMode():
        for _ in range(2):
            tensor = torch.empty(3, 4)
            with pytest.raises(RuntimeError, match="must have same reduction dim"):
                tensor @ tensor
            with pytest.raises(DataDependentOutputException):
                tensor.sum().item()


def _facts(call: Callable[[Tensor, Tensor], Any]) -> list[Any]:
    """Facts about results, and the arguments that each shares its storage with."""
    given = torch.empty(8, 8), torch.empty(8, 8)
    result = call(*given)
    results: Sequence[Any] = result if isinstance(result, tuple | list) else [result]
    return [
        type(result),
        *(_of(each, given) if isinstance(each, Tensor) else each for each in results),
    ]


def _of(tensor: Tensor, given: Sequence[Tensor]) -> tuple[Any, ...]:
    storage = tensor.untyped_storage()
    return (
        tensor.shape,
        tensor.stride(),
        tensor.storage_offset(),
        tensor.dtype,
        tensor.device,
        storage.nbytes(),
        [each is tensor for each in given],
        [each.untyped_storage()._cdata == storage._cdata for each in given],
    )


def test_a_remembered_result_is_what_torch_makes() -> None:
    with CachedFakeMode() as mode:
        given = torch.empty(4, 6, dtype=torch.bfloat16)
        made, remembered = (given.t() @ given for _ in range(2))
    assert {**vars(remembered)} == {**vars(made)}
    assert remembered.fake_mode is mode  # type: ignore[attr-defined]
    keys = [str(torch._C._dispatch_keys(each)) for each in (made, remembered)]
    assert keys[0] == keys[1]
    with pytest.raises(RuntimeError):
        remembered.data_ptr()
