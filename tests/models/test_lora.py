"""LoRA goes to the layers that are meant, and keeps no more than it needs."""

import pytest
import torch
from torch import Tensor, nn

from longtake.config import TrainableSection
from longtake.errors import RecipeError
from longtake.models.trainable import add_lora, find_targets, lora_state, merge

_SECTION = TrainableSection(kind="lora", rank=4)


class _Attention(nn.Module):
    """Three layers that read the same tokens."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.to_q = nn.Linear(width, width)
        self.to_k = nn.Linear(width, width)
        self.to_v = nn.Linear(width, width)
        self.norm_q = nn.LayerNorm(width)
        self.to_out = nn.ModuleList([nn.Linear(width, width), nn.Identity()])

    def forward(self, tokens: Tensor) -> Tensor:
        read: Tensor = self.to_q(tokens) + self.to_k(tokens) + self.to_v(tokens)
        return read


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn = _Attention()
        self.proj_out = nn.Linear(8, 8)


class _Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([_Block(), _Block()])
        self.single_blocks = nn.ModuleList([_Block()])
        self.proj_out = nn.Linear(8, 8)


@pytest.mark.parametrize(
    ("targets", "names"),
    [
        (["to_q"], ["blocks.0.attn.to_q", "blocks.1.attn.to_q", "single_blocks.0.attn.to_q"]),
        (["blocks.1.attn.to_k"], ["blocks.1.attn.to_k", "single_blocks.1.attn.to_k"][:1]),
        (["1.attn.to_out.0"], ["blocks.1.attn.to_out.0"]),
        (["blocks.*.to_v"], ["blocks.0.attn.to_v", "blocks.1.attn.to_v"]),
        (["single_*.to_k", "*.0.attn.to_k"], ["blocks.0.attn.to_k", "single_blocks.0.attn.to_k"]),
        (["proj_*"], ["proj_out"]),
        (["*.proj_out"], ["blocks.0.proj_out", "blocks.1.proj_out", "single_blocks.0.proj_out"]),
    ],
)
def test_targets_are_last_parts_of_names_or_patterns_of_whole_names(
    targets: list[str], names: list[str]
) -> None:
    """Only linear layers count; what two targets mean gets one update, and nothing else does."""
    network = _Network()
    assert find_targets(network, targets) == names
    add_lora(network, targets, _SECTION, torch.float32)
    trained = [name for name, each in network.named_parameters() if each.requires_grad]
    assert trained == [f"{name}.lora_{side}.default.weight" for name in names for side in "AB"]


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("to_qq", r"'to_qq' matches no linear layer of the model; did you mean to_q\?"),
        ("attn.to_o", r"'attn\.to_o' matches .* did you mean attn\.to_"),
        ("blocks.*.to_x", r"did you mean \S*blocks\.\*\.attn\.to_"),
        ("attn", r"'attn' .* has such layers inside: write '\*attn\.\*' for all"),
        ("norm_q", r"'norm_q' matches no linear layer of the model; did you mean to_q\?"),
        ("zzz", r"'zzz' .* there are: proj_out, to_k, to_q, to_v\."),
    ],
)
def test_a_target_that_matches_nothing_is_named(target: str, message: str) -> None:
    """With the nearest that exist; one good target does not excuse a bad one."""
    with pytest.raises(RecipeError, match=rf"^trainable\.targets: .*{message}"):
        add_lora(_Network(), ["to_k", target], _SECTION, torch.float32)


@pytest.mark.parametrize(
    ("weights", "tokens", "autocast"),
    [
        (torch.float32, torch.float32, False),
        (torch.bfloat16, torch.bfloat16, False),
        (torch.float32, torch.bfloat16, True),
    ],
)
def test_the_input_is_kept_once_for_all_layers_that_read_it(
    weights: torch.dtype, tokens: torch.dtype, autocast: bool
) -> None:
    """No converted copy for each layer, also not where autocast computes in another dtype."""
    model = _Attention(32).to(weights)
    add_lora(model, ["to_q", "to_k", "to_v"], _SECTION, weights)
    kept: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    given = torch.randn(1, 512, 32, dtype=tokens)
    with (
        torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor),
        torch.autocast("cpu", torch.bfloat16, enabled=autocast),
    ):
        out = model(given)
    assert out.dtype == tokens
    assert [size for size in kept.values() if size >= given.nbytes] == [given.nbytes]


def test_what_is_saved_for_others_has_the_scale_in_it() -> None:
    """B A as it is saved, without an alpha, is exactly what merging adds to the weight."""
    model = _Attention()
    add_lora(model, ["to_q"], TrainableSection(kind="lora", rank=2, alpha=8.0), torch.float32)
    nn.init.normal_(model.to_q.lora_B["default"].weight)  # type: ignore[union-attr,index]
    before, state = model.to_q.weight.detach().clone(), lora_state(model)
    assert list(state) == ["to_q.lora_A.weight", "to_q.lora_B.weight"]
    merge(model)
    assert isinstance(model.to_q, nn.Linear)
    update = state["to_q.lora_B.weight"] @ state["to_q.lora_A.weight"]
    torch.testing.assert_close(model.to_q.weight, before + update)
    assert lora_state(model) == {}
    assert "to_q.weight" in model.state_dict()
