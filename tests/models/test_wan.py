"""Wan: diffusers' own transformer in longtake's words, and the names of Wan's own release."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.models.tiny import TEXT, WAN
from torch import Tensor

from longtake.config import ModelSection, TextSection
from longtake.errors import RecipeError
from longtake.models.base import LatentShape
from longtake.models.text import TextEncoder, build_text
from longtake.models.wan import Wan, original_name

_CAPTIONS = ["a red ball rolls left", "a blue square"]
_SHAPE = LatentShape(channels=4, num_frames=2, height=4, width=6)


def _text(section: TextSection = TEXT) -> TextEncoder:
    return build_text(section, Wan(), _CAPTIONS, None)


def _model(text: TextEncoder | None = None, **config: Any) -> Any:
    torch.manual_seed(0)
    section = ModelSection(family="wan", config=WAN | config)
    return Wan().build(section, [_SHAPE], text or _text())


def _inputs() -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    noisy = torch.randn(2, *_SHAPE, generator=generator)
    embeds = torch.randn(2, 8, 12, generator=generator)
    return noisy, torch.tensor([0.25, 0.9]), {"prompt_embeds": embeds}


def test_a_model_of_random_weights_is_in_fp32() -> None:
    assert {parameter.dtype for parameter in _model().parameters()} == {torch.float32}


def test_latents_that_divide_are_accepted() -> None:
    """Also in patches given as TOML's list, with which the model then works."""
    section = ModelSection(family="wan", config=WAN | {"patch_size": [2, 2, 2]})
    Wan().check(section, [_SHAPE])
    noisy, sigmas, conditioning = _inputs()
    model = _model(patch_size=[2, 2, 2])
    assert Wan().predict_velocity(model, noisy, sigmas, conditioning).shape == noisy.shape


def test_word_ids_are_refused() -> None:
    with pytest.raises(RecipeError, match=r'Set text\.kind = "transformers"'):
        _model(_text(TextSection()))


def test_pretrained_weights_are_loaded_and_must_fit(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """They come from shards, in fp32 and silently; a codec of other channels is refused."""
    model = _model()
    model.bfloat16().save_pretrained(tmp_path / "transformer", max_shard_size="10KB")
    assert len(list((tmp_path / "transformer").glob("*.safetensors"))) > 1
    section = ModelSection(family="wan", pretrained=str(tmp_path))
    capfd.readouterr()
    loaded = Wan().build(section, [_SHAPE], _text())
    assert capfd.readouterr() == ("", "")
    for name, weight in loaded.state_dict().items():
        assert weight.dtype == torch.float32
        assert torch.equal(weight, model.state_dict()[name].float())
    with pytest.raises(RecipeError, match=r"in_channels is 4, but .* give 16"):
        Wan().build(section, [_SHAPE._replace(channels=16)], _text())
    both = ModelSection(family="wan", pretrained=str(tmp_path), config={"num_layers": 1})
    with pytest.raises(RecipeError, match=r"model\.config is set, but it would not be used"):
        Wan().build(both, [_SHAPE], _text())


def test_bf16_says_nothing_and_stays_close() -> None:
    """Under autocast the velocity follows fp32's, and torch's remark on kernels is kept away."""
    model, (noisy, sigmas, conditioning) = _model().eval(), _inputs()
    with torch.no_grad():
        exact = Wan().predict_velocity(model, noisy, sigmas, conditioning)
        with torch.autocast("cpu", torch.bfloat16):
            rounded = Wan().predict_velocity(model, noisy, sigmas, conditioning)
    torch.testing.assert_close(rounded.float(), exact, atol=0.05, rtol=0.05)


def test_tokens_are_counted_as_the_model_makes_them() -> None:
    model, (noisy, sigmas, conditioning) = _model(), _inputs()
    seen: list[int] = []
    model.blocks[0].register_forward_pre_hook(lambda _, args: seen.append(args[0].shape[1]))
    Wan().predict_velocity(model, noisy, sigmas, conditioning)
    assert seen == [Wan().block.num_tokens(model, _SHAPE)]


def test_diffusers_turns_every_name_back() -> None:
    """Of a model that also looks at pictures, with blocks of two digits; none stays diffusers'."""
    from diffusers import WanTransformer3DModel
    from diffusers.loaders.single_file_utils import convert_wan_transformer_to_diffusers

    with torch.device("meta"):
        sizes = WAN | {"num_layers": 11, "image_dim": 6, "added_kv_proj_dim": 24}
        model: Any = WanTransformer3DModel(**sizes)
    names = list(model.state_dict())
    originals = [original_name(name) for name in names]
    back = convert_wan_transformer_to_diffusers({each: torch.empty(0) for each in originals})
    assert list(back) == names
    unchanged = {name for name in names if original_name(name) == name}
    assert unchanged == {"patch_embedding.weight", "patch_embedding.bias"}


def test_only_whole_parts_of_a_name_are_meant() -> None:
    """What has another name's letters in it stays; LoRA's own part does, too."""
    assert original_name("blocks.1.attn1.to_q.lora_A.weight") == (
        "blocks.1.self_attn.q.lora_A.weight"
    )
    assert original_name("blocks.1.norm22.weight") == "blocks.1.norm22.weight"
    assert original_name("my_proj_out.weight") == "my_proj_out.weight"
