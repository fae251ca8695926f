"""Qwen-Image and Edit: what releases must be, what is not trained, modules, and shared tokens."""

import copy
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from threading import Barrier
from typing import Any

import pytest
import torch
from PIL import Image
from tests.families import release_qwen_image, release_qwen_image_edit
from torch import Tensor, nn

from longtake.config import Bucket, ModelSection, TextSection, TrainableSection
from longtake.errors import LongtakeError, ModelError
from longtake.models import added_module
from longtake.models.added_module import Attend
from longtake.models.base import AttentionInputs, LatentShape, family
from longtake.models.diffusers_family import cut_texts
from longtake.models.qwen_image import Positions, QwenImage
from longtake.models.qwen_image_edit import QwenImageEdit
from longtake.models.text import build_text, outline_text
from longtake.models.trainable import make_trainable
from longtake.parallel.context_parallel import Ranks, TokenSharing

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


def _model(name: str) -> tuple[Any, QwenImage]:
    torch.manual_seed(0)
    chosen = family(name)
    assert isinstance(chosen, QwenImage)
    model = release_qwen_image.transformer(zero_cond_t=name == "qwen_image_edit_plus")
    model.pos_embed = Positions(model.pos_embed)
    return model, chosen


def _inputs(size: tuple[int, int] = (6, 8)) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Of captions of 3 and 5 tokens."""
    generator = torch.Generator().manual_seed(1)
    given = {
        "prompt_embeds": torch.randn(2, 6, 16, generator=generator),
        "prompt_length": torch.tensor([3, 5]),
        "reference_latents": torch.randn(2, 16, 1, *size, generator=generator),
    }
    return torch.randn(2, *_SHAPE, generator=generator), torch.tensor([0.3, 0.8]), given


class LooksBack(nn.Module):
    """Attends to one key of its own, and forgets the mask."""

    def around_attention(self, block: str, attend: Attend, inputs: AttentionInputs) -> Tensor:
        key, value = inputs.key[:, :, :1], inputs.value[:, :, :1]
        return attend(replace(inputs, key=key, value=value))


def test_a_module_with_keys_of_its_own_must_replace_the_mask() -> None:
    model, chosen = _model("qwen_image")
    noisy, sigmas, given = _inputs()
    blocks = added_module.block_names(model, chosen, ("*",))
    added_module.attach(model, {"own": LooksBack()}, chosen, {"own": blocks}, torch.float32)
    added_module.condition(model, noisy, sigmas, given)
    with pytest.raises(ModelError, match=r"1 keys around attn of block .*, but its mask is of 17"):
        chosen.predict_velocity(model, noisy, sigmas, given)


class _AmongThreads(TokenSharing):
    """Ranks that are threads of this process."""

    def __init__(self, rank: int, barrier: Barrier, sent: list[Any]) -> None:
        super().__init__(rank, len(sent), len(sent))
        self._barrier, self._sent = barrier, sent

    def _exchange(
        self, tensor: Tensor, sent: list[int], received: list[int], among: Ranks
    ) -> Tensor:
        self._barrier.wait(60)
        self._sent[self.rank] = torch.split(tensor, sent)
        self._barrier.wait(60)
        return torch.cat([each[self.rank] for each in self._sent])


@torch.no_grad()
def test_ranks_share_recomputed_blocks_that_tell_references_from_noisy_tokens() -> None:
    """These are called by positional arguments."""
    (model, chosen), (noisy, sigmas, given) = _model("qwen_image_edit_plus"), _inputs((4, 10))
    expected = chosen.predict_velocity(model, noisy, sigmas, given)
    barrier, sent = Barrier(2), list[Any]([None, None])
    models = [copy.deepcopy(model) for _ in sent]

    def predicted(rank: int) -> Tensor:
        own = models[rank]
        chosen.block.share_tokens(own, _AmongThreads(rank, barrier, sent))
        chosen.block.call_by(own, lambda block, *inputs: block(*inputs))
        with torch.enable_grad():
            return chosen.predict_velocity(own, noisy, sigmas, given).detach()

    with ThreadPoolExecutor(2) as threads:
        for found in threads.map(predicted, range(2)):
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


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


_AREA = 1024 * 1024


@pytest.mark.parametrize("size", [(1024, 1024), (512, 512), (768, 1344), (1664, 928), (48, 96)])
def test_a_reference_is_as_large_as_the_pipelines_make_it(size: tuple[int, int]) -> None:
    bucket = Bucket(num_frames=1, height=size[0], width=size[1])
    height, width = QwenImageEdit().inputs.size(bucket)
    assert height % 32 == width % 32 == 0
    assert height * width == pytest.approx(_AREA, rel=0.05)
    assert height / width == pytest.approx(size[0] / size[1], rel=0.05)


def test_pictures_are_read_by_rows_and_columns(tmp_path: Path) -> None:
    """The pipeline of diffusers forgets to say which tokens are pictures': its texts are others."""
    torch.manual_seed(0)
    release_qwen_image_edit.make_edit(tmp_path)
    section = TextSection(kind="transformers", pretrained=str(tmp_path), dtype="fp32")
    text = build_text(section, QwenImageEdit(), (), None)
    generator = torch.Generator().manual_seed(0)
    picture = torch.randint(0, 256, (1, 3, 1, 64, 64), generator=generator, dtype=torch.uint8)
    image = Image.fromarray(picture[0, :, 0].permute(1, 2, 0).numpy())
    with release_qwen_image_edit.smaller_references():
        encoded = text.encode(["a red ball"], {"reference": picture})
    length = int(encoded["prompt_length"])
    for is_mended in (True, False):
        pipeline = release_qwen_image_edit.load(tmp_path, is_mended=is_mended)
        with torch.no_grad():
            expected, _ = pipeline.encode_prompt("a red ball", [image])
        assert expected.shape[1] == length
        found = encoded["prompt_embeds"][:, :length]
        assert torch.allclose(found, expected, atol=1e-5) == is_mended
