"""Qwen-Image: what its releases must be, and what of a model is not trained."""

from pathlib import Path

import pytest
import torch
from tests.families import release_qwen_image

from longtake.config import ModelSection, TextSection, TrainableSection
from longtake.errors import LongtakeError
from longtake.models.base import LatentShape
from longtake.models.diffusers_family import cut_texts
from longtake.models.qwen_image import QwenImage
from longtake.models.text import outline_text
from longtake.models.trainable import make_trainable

_SHAPE = LatentShape(16, 1, 6, 8)


def test_what_only_the_text_of_the_last_block_is_made_of_is_not_trained(tmp_path: Path) -> None:
    """Also if it is named: LoRA there would get no gradient."""
    release_qwen_image.make(tmp_path)
    family, section = QwenImage(), ModelSection(family="qwen_image", pretrained=str(tmp_path))
    text = outline_text(TextSection(kind="transformers", pretrained=str(tmp_path)), family)
    targets = ("to_q", "add_q_proj", "to_add_out")
    for trainable in (TrainableSection(), TrainableSection(kind="lora", targets=targets)):
        model = family.build(section, [_SHAPE], text)
        make_trainable(model, family, trainable, 16)
        given = {"prompt_embeds": torch.randn(2, 6, 16), "prompt_length": torch.tensor([3, 5])}
        for name, weight in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.ones_(weight)
        velocity = family.predict_velocity(model, torch.randn(2, *_SHAPE), torch.ones(2), given)
        velocity.square().sum().backward()  # type: ignore[no-untyped-call]
        trained = {name: each for name, each in model.named_parameters() if each.requires_grad}
        assert any("blocks.0.attn.to_add_out" in name for name in trained)
        assert not [
            name for name, each in trained.items() if each.grad is None or not each.grad.any()
        ]


def test_texts_are_cut_where_the_longest_ends() -> None:
    padded = torch.ones(2, 6, 3)
    cut, counts = cut_texts(padded, torch.tensor([4, 4]))
    assert (cut.shape, counts) == ((2, 4, 3), None)
    cut, counts = cut_texts(padded, torch.tensor([1, 2]))
    assert counts is not None
    assert (cut.shape, counts.tolist()) == ((2, 2, 3), [[True, False], [True, True]])
    cut, counts = cut_texts(padded.to("meta"), torch.empty(2, device="meta"))
    assert counts is not None
    assert cut.shape == (2, 6, 3)


@pytest.mark.parametrize("name", ["use_layer3d_rope", "use_additional_t_cond", "zero_cond_t"])
def test_other_models_of_its_class_are_refused_by_name(name: str, tmp_path: Path) -> None:
    release_qwen_image.transformer(**{name: True}).save_pretrained(tmp_path / "transformer")
    release_qwen_image.language_model(release_qwen_image.tokenizer()).save_pretrained(
        tmp_path / "text_encoder"
    )
    section = ModelSection(family="qwen_image", pretrained=str(tmp_path))
    text = outline_text(TextSection(kind="transformers", pretrained=str(tmp_path)), QwenImage())
    with pytest.raises(LongtakeError, match=rf"{name} is set: it is .*Qwen-Image-(Layered|Edit)"):
        QwenImage().build(section, [_SHAPE], text, weights=False)
