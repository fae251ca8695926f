"""HunyuanVideo 1.5: what its releases must be, what is not trained, and masks of its texts."""

import shutil
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from tests.families import release_hunyuan_video15 as release
from tests.models.tiny import make_recipe, write_configs
from torch import Tensor, nn

from longtake.config import Bucket, CodecSection, ModelSection, TextSection
from longtake.errors import LongtakeError, ModelError, RecipeError
from longtake.models.base import FAMILIES, Conditioning, LatentShape
from longtake.models.codec import build_codec
from longtake.models.hunyuan_video15 import HunyuanVideo15
from longtake.models.recognition import recognise
from longtake.models.text import TextEncoder, outline_text
from longtake.training.latent_cache import inputs_fingerprint, text_fingerprint

_FAMILY = HunyuanVideo15()
_SHAPE = LatentShape(32, 2, 3, 5)


@pytest.fixture(scope="module")
def released(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """From text, and in `i2v` from a first frame."""
    folder = tmp_path_factory.mktemp("releases")
    torch.manual_seed(0)
    release.make(folder / "t2v")
    release.make_i2v(folder / "i2v")
    return folder


def _section(folder: Path) -> ModelSection:
    return ModelSection(family="hunyuan_video15", pretrained=str(folder))


def _text(folder: Path, **keys: Any) -> TextEncoder:
    section = TextSection(kind="transformers", pretrained=str(folder), max_tokens=9, **keys)
    return outline_text(section, _FAMILY)


def _model(folder: Path, *, weights: bool = True) -> nn.Module:
    return _FAMILY.build(_section(folder), [_SHAPE], _text(folder), weights=weights)


def _told(texts: list[int], glyphs: list[int]) -> Conditioning:
    """Of captions with so many tokens."""
    random = torch.Generator().manual_seed(0)
    return {
        "prompt_embeds": torch.randn(len(texts), 9, 16, generator=random),
        "prompt_length": torch.tensor(texts),
        "glyph_embeds": torch.randn(len(texts), 7, 8, generator=random),
        "glyph_length": torch.tensor(glyphs),
        "first_latents": torch.randn(len(texts), 32, 1, 3, 5, generator=random),
        "first_embeds": torch.randn(len(texts), 4, 16, generator=random),
    }


def _velocity(model: nn.Module, told: Conditioning) -> Tensor:
    batch = len(told["prompt_length"])
    noisy = torch.randn(batch, *_SHAPE, generator=torch.Generator().manual_seed(1))
    return _FAMILY.predict_velocity(model, noisy, torch.linspace(0.2, 0.9, batch), told)


@pytest.mark.parametrize(
    ("texts", "glyphs", "mask"),
    [
        ([4, 4], [0, 0], None),
        ([4, 4], [2, 2], None),
        ([4, 3], [0, 0], [2, 1, 1, 30 + 4]),
        ([4, 4], [0, 5], [2, 1, 1, 30 + 4 + 5]),
    ],
)
def test_videos_are_attended_to_without_a_mask_or_with_one_of_keys(
    released: Path, texts: list[int], glyphs: list[int], mask: list[int] | None
) -> None:
    """The release's own is [B, 1, S, S], a GiB and more at the sizes that it is trained at."""
    model, attend, seen = _model(released / "t2v"), F.scaled_dot_product_attention, list[Any]()

    def watched(query: Tensor, key: Tensor, value: Tensor, **how: Any) -> Tensor:
        if key.shape[2] >= 30:  # of a block, not of the refiner of texts
            seen.append(how.get("attn_mask"))
        return attend(query, key, value, **how)

    with patch.object(F, "scaled_dot_product_attention", watched):
        _velocity(model, _told(texts, glyphs))
    assert [each if each is None else list(each.shape) for each in seen] == [mask, mask]


@pytest.mark.parametrize(("task", "is_embedded"), [("t2v", False), ("i2v", True)])
def test_what_changes_no_velocity_is_not_trained(
    released: Path, task: str, is_embedded: bool
) -> None:
    """All else gets a gradient, also in bf16, of which the timesteps are then."""
    model = _model(released / task).bfloat16()
    untrained = {*_FAMILY.block.untrained_parameters(model)}
    last, names = "transformer_blocks.1", {name for name, _ in model.named_parameters()}
    halves = [f"{last}.attn.{each}" for each in ("add_q_proj", "norm_added_q", "to_add_out")]
    halves += [f"{last}.ff_context", *([] if is_embedded else ["image_embedder"])]
    assert untrained == {name for name in names if name.startswith(tuple(halves))}
    _velocity(model, _told([4, 9], [5, 0])).square().sum().backward()  # type: ignore[no-untyped-call]
    without = {n for n, p in model.named_parameters() if p.grad is None or not p.grad.any()}
    assert without == untrained


def test_captions_without_quotes_leave_glyphs_without_a_gradient_but_defined(
    released: Path,
) -> None:
    model = _model(released / "t2v")
    _velocity(model, _told([4], [0])).square().sum().backward()  # type: ignore[no-untyped-call]
    glyphs = [p for name, p in model.named_parameters() if name.startswith("context_embedder_2.")]
    assert not any(each.grad is None or each.grad.any() for each in glyphs)


def test_guidance_is_that_of_the_guider(tmp_path: Path) -> None:
    """At 1, of a release that is distilled for guidance, no caption is dropped."""
    release.transformer(task_type="t2v").save_config(tmp_path / "transformer")
    assert _FAMILY.defaults(_section(tmp_path)).guidance_scale == 6.0
    plain: tuple[tuple[dict[str, Any], float, float], ...] = (
        ({"guidance_scale": 4.5}, 4.5, 0.1),
        ({"guidance_scale": 1.0}, 1.0, 0.0),
        ({"guidance_scale": 6.0, "enabled": False}, 1.0, 0.0),
    )
    for values, scale, dropout in plain:
        guider = {"_class_name": "ClassifierFreeGuidance", **values}
        write_configs(tmp_path, {"guider/guider_config.json": guider})
        found = _FAMILY.defaults(_section(tmp_path))
        assert (found.guidance_scale, found.caption_dropout) == (scale, dropout)
    others: tuple[tuple[dict[str, Any], str], ...] = (
        ({"_class_name": "AdaptiveProjectedGuidance"}, "has AdaptiveProjectedGuidance, by which"),
        ({"guidance_rescale": 0.7}, "has ClassifierFreeGuidance, guidance_rescale, by which"),
    )
    for values, said in others:
        write_configs(tmp_path, {"guider/guider_config.json": values})
        with pytest.raises(ModelError, match=said):
            _FAMILY.defaults(_section(tmp_path))


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"use_meanflow": True}, "use_meanflow is set: it is distilled to few steps"),
        ({"patch_size": 2}, "patch_size 2 and patch_size_t 1, but a token .* is one latent pixel"),
        ({"rope_axes_dim": (4, 4, 4)}, r"rope_axes_dim \[4, 4, 4\] does not add up to .*_dim 16"),
        ({"in_channels": 98}, r"variant of HunyuanVideo15.* \(in_channels 98, out_channels 32\)"),
    ],
)
def test_other_transformers_of_its_class_are_refused(
    released: Path, settings: dict[str, Any], said: str, tmp_path: Path
) -> None:
    release.transformer(**settings).save_config(tmp_path / "transformer")
    text = _text(released / "t2v")
    with pytest.raises(LongtakeError, match=said):
        _FAMILY.build(_section(tmp_path), [_SHAPE], text, weights=False)


def test_encoders_of_another_task_or_family_are_refused(released: Path, tmp_path: Path) -> None:
    for task, other, said in (
        ("t2v", "i2v", "from text alone, but text.pretrained has an image_encoder"),
        ("i2v", "t2v", "from a first frame, but text.pretrained has no image_encoder"),
    ):
        with pytest.raises(RecipeError, match=said):
            _FAMILY.build(
                _section(released / task), [_SHAPE], _text(released / other), weights=False
            )
    release.language_model(release.tokenizer()).save_pretrained(tmp_path / "text_encoder")
    index = {"text_encoder": ["transformers", "Qwen2_5_VLTextModel"]}
    write_configs(tmp_path, {"model_index.json": index})
    with pytest.raises(RecipeError, match="has no text_encoder_2, the ByT5 by which"):
        _FAMILY.build(_section(released / "t2v"), [_SHAPE], _text(tmp_path), weights=False)
    words = outline_text(TextSection(kind="words"), _FAMILY)
    with pytest.raises(RecipeError, match=r'text\.kind = "transformers", name the release'):
        _FAMILY.build(_section(released / "t2v"), [_SHAPE], words, weights=False)


@pytest.mark.parametrize(("target", "size"), [(640, (480, 848)), (960, (720, 1280))])
def test_a_release_is_recognised_with_the_size_of_its_pipeline(
    target: int, size: tuple[int, int], tmp_path: Path
) -> None:
    values = {"_class_name": "HunyuanVideo15Transformer3DModel", "target_size": target}
    model = values | {"task_type": "i2v"}
    for index, task in (
        ({"_class_name": "HunyuanVideo15Pipeline"}, "text"),
        ({"_class_name": "HunyuanVideo15ImageToVideoPipeline"}, "first frame"),
        ({}, "first frame"),
    ):
        write_configs(tmp_path, {"transformer/config.json": model, "model_index.json": index})
        kind = recognise(_section(tmp_path), FAMILIES)
        assert kind is not None
        assert (kind.task, kind.size, kind.fps) == (task, (121, *size), 24.0)
    write_configs(tmp_path, {"transformer/config.json": values | {"use_meanflow": True}})
    with pytest.raises(ModelError, match=r"1\.5 distilled to few steps by MeanFlow .*1\.5 of the"):
        recognise(_section(tmp_path), FAMILIES)


def test_cached_captions_are_those_of_both_encoders(released: Path, tmp_path: Path) -> None:
    """Pictures' encoders and captions' do not change each other's entries."""
    shutil.copytree(released / "i2v", tmp_path / "i2v")
    text = {"kind": "transformers", "pretrained": str(tmp_path / "i2v")}
    recipe = make_recipe("hunyuan_video15", (5, 48, 80), text=text)

    def found() -> list[str]:
        return [of(recipe, tmp_path) for of in (text_fingerprint, inputs_fingerprint)]

    texts, pictures = found()
    glyphs, siglip = release.glyph_encoder(), tmp_path / "i2v" / "image_encoder" / "config.json"
    glyphs.save_pretrained(tmp_path / "i2v" / "text_encoder_2")
    assert found()[0] != texts
    assert found()[1] == pictures
    texts = found()[0]
    siglip.write_text(siglip.read_text() + " ")
    assert found()[0] == texts
    assert found()[1] != pictures


def test_latents_have_the_scale_of_the_autoencoder(tmp_path: Path) -> None:
    """Random weights have none of their own."""
    release.vae().save_pretrained(tmp_path / "vae")
    made = build_codec(
        CodecSection(kind="autoencoder", pretrained=str(tmp_path)), _FAMILY.frozen.codec
    )
    assert made.latent_shape(Bucket(num_frames=9, height=48, width=80)) == (3, 3, 5)
    with pytest.raises(RecipeError, match=r"80x48 cannot .* and 4 n \+ 1 frames\. The nearest"):
        made.latent_shape(Bucket(num_frames=7, height=48, width=80))
    video = torch.randint(0, 256, (1, 3, 5, 16, 32), dtype=torch.uint8)
    autoencoder: Any = made.modules()[0]
    with torch.no_grad():
        mode = autoencoder.encode(video / 127.5 - 1).latent_dist.mode()
        decoded = autoencoder.decode(mode).sample
    torch.testing.assert_close(made.encode(video), 1.03682 * mode)
    pixels = ((decoded + 1) * 127.5).round().clamp(0, 255).to(torch.uint8)
    assert (made.decode(1.03682 * mode).int() - pixels.int()).abs().max() <= 1
    small = {"block_out_channels": [8, 8, 16, 32, 64], "layers_per_block": 1}
    drawn: Any = build_codec(
        CodecSection(kind="autoencoder", config=small), _FAMILY.frozen.codec
    ).modules()[0]
    assert drawn.config.scaling_factor == 1.0
