"""The examples are recipes, say how they are run, and can be planned without weights."""

import re
import socket
from pathlib import Path

import pytest

from longtake import config
from longtake.models.base import family
from longtake.models.pretrained import diffusers_class, transformers_class
from longtake.planner.devices import device_named
from longtake.planner.forecast import check_gradients
from longtake.planner.memory import outline_step

_ROOT = Path(__file__).resolve().parents[2]
_EXAMPLES = sorted((_ROOT / "examples").glob("*.toml"))
_ON_CARDS = [path for path in _EXAMPLES if path.stem.endswith("gb")]


def _name(path: Path) -> str:
    return path.name


def _opening(path: Path) -> str:
    opening = path.read_text().partition("\nout = ")[0]
    assert all(line.startswith("#") for line in opening.splitlines())
    return opening


@pytest.mark.parametrize("path", _EXAMPLES, ids=_name)
def test_an_example_is_a_recipe(path: Path) -> None:
    recipe = config.load(path)
    family(recipe.model.family)
    diffusers_class("codec.class_name", recipe.codec.class_name)
    transformers_class("text.class_name", recipe.text.class_name)
    for bucket in recipe.data.buckets:
        assert bucket.num_frames % 4 == 1
        assert (bucket.height % 16, bucket.width % 16) == (0, 0)


@pytest.mark.parametrize("path", _EXAMPLES, ids=_name)
def test_an_example_says_how_to_run_it(path: Path) -> None:
    recipe, opening = config.load(path), _opening(path)
    assert f"longtake train examples/{path.name}" in opening
    assert "Expected" in opening or "Predicted" in opening
    assert "@" not in opening
    if path.stem == "tiny_flux_module":
        assert "python examples/make_pairs.py pairs" in opening
        return
    assert re.search(f"longtake data index .* --out {recipe.data.catalog}$", opening, re.MULTILINE)
    assert f"longtake sample {recipe.out} " in opening
    assert f"longtake export {recipe.out} " in opening
    for name in recipe.data.references:
        assert f"--reference {name}=" in opening
        assert f"`{'before' if name == 'reference' else name}`" in opening


def test_there_is_one_for_each_card() -> None:
    assert [path.stem for path in _ON_CARDS] == [
        "flux_kontext_lora_48gb",
        "flux_kontext_module_48gb",
        "wan_14b_lora_80gb",
        "wan_1_3b_full_80gb",
        "wan_1_3b_lora_24gb",
    ]
    for path in _ON_CARDS:
        memory = config.load(path).recompute.memory
        assert memory is not None
        named = int(path.stem.rpartition("_")[2].removesuffix("gb"))
        assert 0.95 < config.memory_bytes(memory) / 2**30 / named <= 1


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the repository's root, without a network."""

    def refuse(*_: object) -> None:
        raise OSError("there is no network in this test")

    monkeypatch.chdir(_ROOT)
    monkeypatch.setattr(socket.socket, "connect", refuse)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("path", _ON_CARDS, ids=_name)
def test_an_example_is_planned_without_weights(path: Path) -> None:
    step = outline_step(config.load(path), device_named("h100"))
    gradients = check_gradients(step)
    trained = [name for name, p in step.components.model.named_parameters() if p.requires_grad]
    assert sorted(gradients.reached) == sorted(trained)
    assert len(trained) > 100
    assert not gradients.unreached
    assert not gradients.traps
    billions = sum(p.numel() for p in step.components.model.parameters()) / 1e9
    assert any(0 <= billions - size < 0.1 for size in (11.9, 14.3, 1.4))
