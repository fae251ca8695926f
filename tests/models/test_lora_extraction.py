"""LoRA that is extracted from a model whose weights were all trained."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from longtake.config import ModelSection
from longtake.errors import ModelError, RecipeError
from longtake.models.lora_extraction import extract_lora, nearest_lora


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 6), nn.LayerNorm(6), nn.Linear(6, 3), nn.Linear(3, 3))


def _section(model: nn.Module, folder: Path) -> ModelSection:
    file = folder / "base.safetensors"
    save_file({name: value.contiguous() for name, value in model.state_dict().items()}, file)
    return ModelSection(family="wan", pretrained=str(file), config_from="a/release")


@pytest.mark.parametrize("size", [(24, 40), (40, 24)])
def test_a_change_of_low_rank_comes_back(size: tuple[int, int]) -> None:
    """A higher rank than that of the change, or than the layer has at all, is filled with zeros."""
    change = torch.randn(size[0], 3) @ torch.randn(3, size[1]) / 50
    for rank in (3, 5, 30):
        down, up, tail = nearest_lora(change, rank)
        assert (down.shape, up.shape) == ((rank, size[1]), (size[0], rank))
        assert (up @ down - change).norm() < 1e-5 * change.norm()
        assert tail < 1e-10 * change.square().sum()
        assert max(down.abs().max(), up.abs().max()) < 10 * change.norm()


def test_the_error_is_the_tail_of_the_singular_values(tmp_path: Path) -> None:
    model, layers = _model(), ["0", "2", "3"]
    section, state = _section(model, tmp_path), model.state_dict()
    changes = {
        name: torch.randn_like(state[name]) / 9 for name in ("0.weight", "2.weight", "1.bias")
    }
    for name, change in changes.items():
        state[name] += change
    lora = extract_lora(model, section, 2, layers)
    assert lora.errors.keys() == {"0", "2"}
    assert lora.left_out == ["1.bias"]
    left: list[Tensor] = [changes["1.bias"]]
    for layer, error in lora.errors.items():
        change, weights = changes[f"{layer}.weight"], lora.weights
        left.append(change - weights[f"{layer}.lora_B.weight"] @ weights[f"{layer}.lora_A.weight"])
        tail = torch.linalg.svdvals(change)[2:].norm()
        assert error == pytest.approx(float(tail / change.norm()), rel=1e-4)
        assert float(left[-1].norm()) == pytest.approx(float(tail), rel=1e-4)
    norms = [
        torch.cat([each.flatten() for each in part]).norm() for part in (left, [*changes.values()])
    ]
    assert lora.total_error == pytest.approx(float(norms[0] / norms[1]), rel=1e-4)


def test_what_has_no_base_or_no_change_is_refused(tmp_path: Path) -> None:
    model = _model()
    section = _section(model, tmp_path)
    with pytest.raises(RecipeError, match="No linear layer differs from"):
        extract_lora(model, section, 2, ["0"])
    larger = nn.Sequential(*model, nn.Linear(3, 3))
    with pytest.raises(ModelError, match=r"has no 4\.weight"):
        extract_lora(larger, section, 2, ["0", "4"])
