"""Watching a step of real architectures: it finds what is there and leaves all as it was."""

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from longtake.planner.gradient_flow import ForwardPosition, GradientWatch, Provenance, flow_traps

_LORA_TARGETS = ["to_q", "to_k", "to_v", "to_out.0"]


def _flux() -> Any:
    from diffusers import FluxTransformer2DModel

    return FluxTransformer2DModel(
        patch_size=1,
        in_channels=4,
        num_layers=2,
        num_single_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=8,
        pooled_projection_dim=8,
        guidance_embeds=True,
        axes_dims_rope=(4, 4, 8),
    )


def _flux_inputs(dtype: torch.dtype) -> dict[str, Any]:
    shapes = {"hidden_states": (6, 4), "encoder_hidden_states": (3, 8), "pooled_projections": (8,)}
    return {
        **{name: torch.randn(1, *shape, dtype=dtype) for name, shape in shapes.items()},
        "timestep": torch.rand(1, dtype=dtype),
        "guidance": torch.rand(1, dtype=dtype),
        "img_ids": torch.zeros(6, 3),
        "txt_ids": torch.zeros(3, 3),
    }


def _wan() -> Any:
    from diffusers import WanTransformer3DModel

    return WanTransformer3DModel(
        num_attention_heads=2,
        attention_head_dim=12,
        ffn_dim=16,
        freq_dim=8,
        num_layers=3,
        in_channels=4,
        out_channels=4,
        text_dim=8,
    )


def _wan_inputs(dtype: torch.dtype) -> dict[str, Any]:
    return {
        "hidden_states": torch.randn(1, 4, 2, 4, 4, dtype=dtype),
        "timestep": torch.rand(1),
        "encoder_hidden_states": torch.randn(1, 3, 8, dtype=dtype),
    }


_ARCHITECTURES: dict[str, tuple[Callable[[], Any], Callable[[torch.dtype], dict[str, Any]]]] = {
    "flux": (_flux, _flux_inputs),
    "wan": (_wan, _wan_inputs),
}


def _blocks(model: nn.Module) -> dict[str, nn.Module]:
    return {
        name: module
        for name, module in model.named_modules()
        if name.count(".") == 1 and name.split(".")[0].endswith("blocks")
    }


def _train(model: Any, what: str, dtype: torch.dtype) -> None:
    """All of it, LoRA, or a module that follows the second block."""
    if what == "full":
        return
    model.requires_grad_(False)
    if what == "lora":
        from peft import LoraConfig

        model.add_adapter(LoraConfig(r=2, target_modules=_LORA_TARGETS))
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.data = parameter.data.to(dtype)
        return
    width = model.config.num_attention_heads * model.config.attention_head_dim
    model.added_module = nn.Linear(width, width, dtype=dtype)

    def follow(block: nn.Module, args: Any, output: Any) -> Any:
        if isinstance(output, tuple):
            return output[0], output[1] + model.added_module(output[1])
        return output + model.added_module(output)

    list(_blocks(model).values())[1].register_forward_hook(follow)


def _recompute(model: Any, how: str) -> None:
    if how == "diffusers":
        model.enable_gradient_checkpointing()
    elif how != "none":
        model.enable_gradient_checkpointing(
            lambda block, *args: checkpoint(block, *args, use_reentrant=how == "reentrant")
        )


def _watched(model: nn.Module, inputs: Mapping[str, Any]) -> GradientWatch:
    with GradientWatch(model, _blocks(model), list(inputs.values())) as watch:
        watch.backward(_loss(model, inputs))
    return watch


def _loss(model: nn.Module, inputs: Mapping[str, Any]) -> Tensor:
    output: Tensor = model(**inputs, return_dict=False)[0]
    return output.float().square().mean()


def _make_fake(model: nn.Module) -> None:
    for module in model.modules():
        stores: list[dict[str, Any]] = [module._parameters, module._buffers]
        for held in stores:
            for name, tensor in held.items():
                if tensor is not None:
                    fake = torch.empty(tensor.shape, dtype=tensor.dtype)
                    trains = isinstance(tensor, nn.Parameter)
                    held[name] = nn.Parameter(fake, tensor.requires_grad) if trains else fake


@pytest.mark.parametrize("recompute", ["none", "diffusers"])
@pytest.mark.parametrize("what", ["full", "lora", "module"])
@pytest.mark.parametrize("architecture", ["flux", "wan"])
@pytest.mark.parametrize("kind", ["real", "fake"])
def test_no_trap_where_all_is_well(kind: str, architecture: str, what: str, recompute: str) -> None:
    build, make_inputs = _ARCHITECTURES[architecture]
    model = build().bfloat16()
    _train(model, what, torch.bfloat16)
    _recompute(model, recompute)
    with FakeTensorMode() if kind == "fake" else nullcontext():
        if kind == "fake":
            _make_fake(model)
        watch = _watched(model, make_inputs(torch.bfloat16))
    assert flow_traps(watch) == []
    assert watch.unreached() == []
    assert watch.reached() == watch.parameters != []


@pytest.mark.parametrize("architecture", ["flux", "wan"])
@pytest.mark.parametrize("kind", ["real", "fake"])
def test_lora_in_reentrant_regions_is_found(kind: str, architecture: str) -> None:
    build, make_inputs = _ARCHITECTURES[architecture]
    model = build()
    _train(model, "lora", torch.float32)
    _recompute(model, "reentrant")
    with FakeTensorMode() if kind == "fake" else nullcontext():
        if kind == "fake":
            _make_fake(model)
        watch = _watched(model, make_inputs(torch.float32))
    [trap] = flow_traps(watch)
    assert watch.reached() == []
    assert trap.stops
    assert trap.block == next(iter(watch.blocks))
    assert f"{len(watch.parameters)} trainable parameters" in trap.trap


def test_lora_in_fp32_on_a_bf16_base_is_found() -> None:
    model, inputs = _wan().bfloat16(), _wan_inputs(torch.bfloat16)
    _train(model, "lora", torch.float32)
    [trap] = flow_traps(_watched(model, inputs))
    video, text, width = 2 * 2 * 2, 3, 24
    tokens_per_block = 6 * video + 2 * text  # keys and values of cross-attention are the text's
    assert not trap.stops
    assert "24 of their layers" in trap.trap
    assert f"{3 * tokens_per_block * width * 4 / 2**10:.2f} KiB in all" in trap.trap


def test_gradients_are_the_same_to_the_bit() -> None:
    gradients = []
    for watching in (False, True):
        torch.manual_seed(0)
        model, inputs = _flux(), _flux_inputs(torch.float32)
        _recompute(model, "diffusers")
        with GradientWatch(model, _blocks(model)) if watching else nullcontext():
            _loss(model, inputs).backward()  # type: ignore[no-untyped-call]
        gradients.append([parameter.grad for parameter in model.parameters()])
    assert all(torch.equal(one, other) for one, other in zip(*gradients, strict=True))


def test_nothing_of_the_watch_is_left() -> None:
    model = _wan()
    before = torch.utils.checkpoint._checkpoint_without_reentrant_generator
    with pytest.raises(ZeroDivisionError), GradientWatch(model, _blocks(model)):
        raise ZeroDivisionError
    _watched(model, _wan_inputs(torch.float32))
    assert torch.utils.checkpoint._checkpoint_without_reentrant_generator is before
    assert "apply" not in vars(torch.utils.checkpoint.CheckpointFunction)
    for module in model.modules():
        assert not module._forward_pre_hooks
        assert not module._forward_hooks
    assert not any(parameter._post_accumulate_grad_hooks for parameter in model.parameters())


def test_a_gradient_of_an_earlier_step_does_not_count() -> None:
    model, inputs = _wan(), _wan_inputs(torch.float32)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    with GradientWatch(model, _blocks(model)) as watch:
        watch.backward(model.proj_out.weight.sum())
    assert watch.reached() == ["proj_out.weight"]
    assert _watched(model, inputs).unreached() == []


def test_a_module_that_fails_and_is_called_again() -> None:

    class Careful(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(nn.Linear(2, 2) for _ in range(2))

        def forward(self, tokens: Tensor) -> Tensor:
            with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
                self.blocks[0](torch.randn(3))
            return self.blocks[1](self.blocks[0](tokens).detach())  # type: ignore[no-any-return]

    model = Careful()
    with GradientWatch(
        model, {f"blocks.{index}": each for index, each in enumerate(model.blocks)}
    ) as watch:
        watch.backward(model(torch.randn(3, 2)).sum())
    [trap] = flow_traps(watch)
    assert trap.block == "model"
    assert trap.trap.startswith("The detach() (or .data) in model")


_A, _B = 1, 2


@pytest.fixture
def weights() -> tuple[nn.Parameter, nn.Parameter]:
    """Two trainable matrices: bits 0 and 1."""
    return nn.Parameter(torch.randn(3, 3)), nn.Parameter(torch.randn(3, 3))


def _upstream(weights: tuple[nn.Parameter, nn.Parameter]) -> Provenance:
    return Provenance({"a": weights[0], "b": weights[1]}, [], ForwardPosition(), half_base=False)


def _written_into(product: Tensor) -> Tensor:
    buffer = torch.zeros(4, 3)
    buffer[1:] = product.detach()
    return buffer


@torch.library.custom_op("longtake_tests::twice", mutates_args=())
def _twice(value: Tensor) -> Tensor:
    return 2 * value


class _Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, value: Tensor) -> Tensor:
        return 2 * value


def _doubled(value: Tensor) -> Tensor:
    doubled: Tensor = _Double.apply(value)  # type: ignore[no-untyped-call]
    return doubled


@pytest.mark.parametrize(
    "function",
    [
        lambda product: product.detach(),
        lambda product: product.data,
        lambda product: product.argmax(-1),
        lambda product: torch.stack([torch.zeros(3, 3), product]),
        lambda product: product.chunk(3)[1],
        lambda product: F.scaled_dot_product_attention(torch.ones(3, 3), torch.ones(3, 3), product),
        _written_into,
        _twice,
        _doubled,
    ],
)
def test_what_is_upstream(
    weights: tuple[nn.Parameter, nn.Parameter], function: Callable[[Tensor], Tensor]
) -> None:
    with _upstream(weights) as provenance, torch.no_grad():
        product = torch.ones(3, 3) @ weights[1]
        assert provenance.of(function(product)) == _B
        assert provenance.of(function(product + weights[0])) == _A | _B
        assert provenance.of(torch.ones(3, 3) @ torch.ones(3, 3)) == 0


def test_what_is_not_upstream(weights: tuple[nn.Parameter, nn.Parameter]) -> None:
    with _upstream(weights) as provenance:
        product = torch.ones(3, 3) @ weights[0]
        assert provenance.of(torch.zeros_like(product)) == 0
        assert provenance.of(product.new_ones(3)) == 0
        assert provenance.of(torch.zeros(product.shape)) == 0


def test_where_a_gradient_was_lost(weights: tuple[nn.Parameter, nn.Parameter]) -> None:
    with _upstream(weights) as provenance:
        product = (torch.ones(3, 3) @ weights[0]).detach() @ weights[1]
        mask = product > 0
        with torch.no_grad():
            product.exp().exp()
    assert [(cut.how, cut.parameters) for cut in provenance.cuts] == [
        ("detach", _A),
        ("no_grad", _A | _B),
    ]
    assert mask.dtype == torch.bool
