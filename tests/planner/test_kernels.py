"""Stand-ins for CUDA's kernels, against what torch says of them without a GPU."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.build import not_none
from tests.planner.build import make_tiny
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from longtake.planner.devices import device_named
from longtake.planner.kernels import as_on_cuda, cuda_workspace_bytes

_BF16 = torch.bfloat16
_HEADS = (2, 4, 96, 32)


def _saved(
    function: Callable[..., Tensor], *inputs: Tensor
) -> list[tuple[torch.Size, torch.dtype]]:
    """CachedFakeMode and types of what autograd keeps of a function."""
    kept: list[tuple[torch.Size, torch.dtype]] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append((tensor.shape, tensor.dtype))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        function(*inputs)
    return sorted(kept, key=str)


def _leaves(*shapes: tuple[int, ...], dtype: torch.dtype = _BF16) -> list[Tensor]:
    return [torch.ones(shape, dtype=dtype, requires_grad=True) for shape in shapes]


@contextmanager
def _fused_rms_norm() -> Iterator[None]:
    """Gives the CPU RMSNorm as one kernel; its derivative is torch's own, the one CUDA has."""

    def fused(x: Tensor, _: Any, weight: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
        rstd = (x.float().square().mean(-1, keepdim=True) + eps).rsqrt()
        return (x * rstd).to(x.dtype), rstd

    with torch.library._scoped_library("aten", "IMPL") as library:
        library.impl("_fused_rms_norm", fused, "CPU")
        yield


@pytest.mark.parametrize("dtype", [_BF16, torch.float32])
@pytest.mark.parametrize("has_weight", [True, False])
def test_rms_norm_keeps_what_torchs_derivative_keeps(dtype: torch.dtype, has_weight: bool) -> None:

    def norm(x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, (32,), weight if has_weight else None, 1e-6)

    with _fused_rms_norm():
        truth = _saved(norm, *_leaves(_HEADS, (32,), dtype=dtype))
    with FakeTensorMode(), as_on_cuda():
        mine = _saved(norm, *_leaves(_HEADS, (32,), dtype=dtype))
    assert mine == truth
    assert len(mine) == 2 + has_weight


def test_rms_norm_gives_gradients_of_the_right_shapes() -> None:
    with FakeTensorMode(), as_on_cuda():
        x, weight = _leaves(_HEADS, (32,))
        torch.autograd.backward(F.rms_norm(x, (32,), weight).sum())
        shapes = [not_none(each.grad).shape for each in (x, weight)]
        assert shapes == [x.shape, weight.shape]
        frozen = weight.detach()
        torch.autograd.backward(nn.functional.rms_norm(x, (32,), frozen).sum())
        assert frozen.grad is None


@pytest.mark.parametrize("is_masked", [True, False])
def test_attention_keeps_what_a_flash_kernel_keeps(is_masked: bool) -> None:

    def attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        mask = torch.zeros(96, 96, dtype=query.dtype) if is_masked else None
        return F.scaled_dot_product_attention(query, key, value, mask)

    truth = _saved(attention, *_leaves(_HEADS, _HEADS, _HEADS))
    with FakeTensorMode(), as_on_cuda():
        mine = _saved(attention, *_leaves(_HEADS, _HEADS, _HEADS))
    random_state = [each for each in mine if each[0] in ((), (2,))]
    kept = [each for each in mine if each not in random_state]
    as_given = [(shape, dtype) for shape, dtype in kept if shape != (2, 4, 96, 96)]
    assert as_given == [each for each in truth if each[0] != (96, 96)]
    assert sorted(as_given, key=str) == sorted(
        [(torch.Size(_HEADS), _BF16)] * 4 + [(torch.Size(_HEADS[:3]), torch.float32)], key=str
    )
    assert len(kept) == len(truth)  # a mask is kept, too, seen once for every head


@pytest.mark.parametrize(
    ("dtype", "channels", "mask", "expected"),
    [
        (_BF16, 128, None, "Flash"),
        (torch.float16, 256, None, "Flash"),
        (_BF16, 264, None, "Efficient"),
        (torch.float32, 64, None, "Efficient"),
        (_BF16, 64, "bool", "Efficient"),
        (_BF16, 64, "added", "Efficient"),
    ],
)
def test_takes_the_kernel_that_cuda_takes(
    dtype: torch.dtype, channels: int, mask: str | None, expected: str
) -> None:
    with FakeTensorMode(), as_on_cuda():
        query, key = _leaves((1, 2, 8, channels), (1, 2, 16, channels), dtype=dtype)
        masks = {
            None: None,
            "bool": torch.ones(8, 16, dtype=torch.bool),
            "added": torch.zeros(1, 1, 8, 16),
        }
        attended = F.scaled_dot_product_attention(query, key, key, masks[mask])
        torch.autograd.backward(attended.sum())
    assert expected in str(attended.grad_fn)
    assert attended.shape == query.shape
    assert not_none(query.grad).shape == query.shape


@pytest.mark.parametrize("is_masked", [True, False])
def test_heads_can_share_keys(is_masked: bool) -> None:
    with FakeTensorMode(), as_on_cuda():
        query, key, value = _leaves((1, 8, 64, 32), (1, 2, 64, 32), (1, 2, 64, 32))
        mask = torch.zeros(64, 64, dtype=_BF16) if is_masked else None

        def attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(query, key, value, mask, enable_gqa=True)

        saved = _saved(attention, query, key, value)
        torch.autograd.backward(attention(query, key, value).sum())
        assert not_none(key.grad).shape == key.shape
    assert saved.count((torch.Size((1, 2, 64, 32)), _BF16)) == (0 if is_masked else 2)


@pytest.mark.parametrize("fails", [False, True])
def test_torchs_functions_come_back(fails: bool) -> None:
    """They come back even if the body raises."""
    names = ("rms_norm", "layer_norm", "softmax", "scaled_dot_product_attention", "mse_loss")
    before = {name: getattr(F, name) for name in names}
    try:
        with as_on_cuda():
            assert all(getattr(F, name) is not before[name] for name in names)
            if fails:
                raise KeyError
    except KeyError:
        pass
    assert {name: getattr(F, name) for name in names} == before


class _Calls(TorchFunctionMode):
    """Collects which functions of torch are called with floating-point tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[Any, tuple[Any, Any]] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        result = func(*args, **kwargs)
        if isinstance(result, Tensor) and any(tensor.is_floating_point() for tensor in given):
            self.seen.setdefault((func, *(tensor.dtype for tensor in given)), (args, kwargs))
        return result


@contextmanager
def _cuda_autocast() -> Iterator[None]:
    """torch.autocast("cuda") switches itself off where there is no GPU; the switch works."""
    torch.set_autocast_enabled("cuda", True)
    torch.set_autocast_dtype("cuda", _BF16)
    try:
        yield
    finally:
        torch.set_autocast_enabled("cuda", False)


@pytest.mark.parametrize("family", ["flux_kontext", "wan"])
def test_autocast_chooses_the_types_that_cudas_chooses(family: str) -> None:
    """Every function that a model calls under autocast gives the type that torch gives on CUDA.

    On CUDA tensors without values torch's own autocast can be asked, as long as no gradient is
    wanted; indexing needs a real GPU.
    """
    step = make_tiny(family, precision="bf16", device=device_named("a6000"))
    mode, calls = step.tracer._fake, _Calls()

    def type_on(device: str, func: Any, args: Any, kwargs: Any) -> torch.dtype:
        def moved(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            return torch.empty(value.shape, dtype=value.dtype, device=device)

        result: Tensor = func(*tree_map(moved, args), **tree_map(moved, kwargs))
        return result.dtype

    with mode, torch.no_grad():
        examples = step.tracer.subject.make_inputs()
        with as_on_cuda(), torch.autocast("cpu", _BF16), calls:
            step.components.predict_velocity(
                examples.latents, examples.sigmas, examples.conditioning
            )
        compared = 0
        for (func, *_), (args, kwargs) in calls.seen.items():
            if func is Tensor.__getitem__:
                continue
            with as_on_cuda(), torch.autocast("cpu", _BF16):
                mine = type_on("cpu", func, args, kwargs)
            with _cuda_autocast():
                assert mine == type_on("cuda", func, args, kwargs), func
            compared += 1
    assert compared > 40


def test_norms_widen_under_autocast() -> None:
    """bf16 in, fp32 out, as on CUDA; without autocast they leave types alone."""
    with FakeTensorMode(), as_on_cuda():
        x = torch.ones(4, 8, dtype=_BF16)
        with torch.autocast("cpu", _BF16):
            assert F.layer_norm(x, (8,)).dtype == torch.float32
            assert F.rms_norm(x, (8,)).dtype == torch.float32
            assert nn.functional.softmax(x, dim=-1).dtype == torch.float32
            wide = torch.ones(1, 2, 8, 16)
            assert F.scaled_dot_product_attention(wide, wide, wide).dtype == _BF16
        assert F.layer_norm(x, (8,)).dtype == _BF16
        assert F.rms_norm(x, (8,)).dtype == _BF16


def test_flash_backward_takes_sums_and_copies() -> None:
    backward = torch.ops.aten._scaled_dot_product_flash_attention_backward.default
    query = torch.empty(2, 300, 4, 40, dtype=_BF16, device="meta").transpose(1, 2)
    sums = 4 * 2 * 4 * 384 * (64 + 1)
    assert cuda_workspace_bytes(backward, (query, query, query), ()) == sums
    gappy = torch.empty(2, 300, 4 * 40 + 8, dtype=_BF16, device="meta")[..., :160]
    gappy = gappy.view(2, 300, 4, 40).transpose(1, 2)
    assert cuda_workspace_bytes(backward, (gappy, query, query), ()) == sums + 2 * 300 * 160 * 2
    shared = query[:, :1]
    for_each_head = 2 * 2 * 300 * 160 * 2
    assert cuda_workspace_bytes(backward, (query, query, shared), ()) == sums + for_each_head
    forward = torch.ops.aten._scaled_dot_product_flash_attention.default
    assert cuda_workspace_bytes(forward, (query, query, query), ()) == 0
