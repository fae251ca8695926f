"""Captions by tiny random models of transformers, as they are saved in folders."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    BlipConfig,
    BlipForConditionalGeneration,
    BlipImageProcessor,
    BlipProcessor,
    CLIPImageProcessor,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
    PreTrainedTokenizerFast,
)

from longtake.errors import ModelError
from longtake.models.caption_writer import TransformersCaptioner
from longtake.models.pretrained import quiet

_WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "<image>", "user", ":", "describe", "a", "red"]
_WORDS += ["blue", "square", "moves", "left", "right"]
_SMALL = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
}
_TEXT = {"vocab_size": len(_WORDS), "bos_token_id": 2, "eos_token_id": 3, "pad_token_id": 0}
_PICTURES = {**_SMALL, "image_size": 16, "patch_size": 8}
_TEMPLATE = (
    "{% for message in messages %}user : {% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<image> {% else %}{{ part['text'] }} {% endif %}"
    "{% endfor %}{% endfor %}"
)


def _tokenizer(*special: str) -> Any:
    words = {word: number for number, word in enumerate(_WORDS)}
    whole = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    whole.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=whole,
        pad_token="[PAD]",
        unk_token="[UNK]",
        bos_token="[CLS]",
        eos_token="[SEP]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        additional_special_tokens=list(special),
    )


def _save(folder: Path, build: Callable[[], Any], processor: Any) -> Path:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = build()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim > 1:
                weight.mul_(12)  # so that other pictures give other words
    with quiet(model):
        model.save_pretrained(folder)
    processor.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def blip(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that captions one picture."""
    text = {**_SMALL, **_TEXT, "sep_token_id": 3, "encoder_hidden_size": 16, "is_decoder": True}
    config = BlipConfig(text_config=text, vision_config=_PICTURES, projection_dim=8)
    pictures = BlipImageProcessor(size={"height": 16, "width": 16})
    return _save(
        tmp_path_factory.mktemp("blip"),
        lambda: BlipForConditionalGeneration(config),
        BlipProcessor(pictures, _tokenizer()),
    )


@pytest.fixture(scope="module")
def llava(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A chat model that may be shown several pictures."""
    config = LlavaConfig(
        text_config={**_SMALL, **_TEXT, "model_type": "llama", "num_key_value_heads": 2},
        vision_config={**_PICTURES, "model_type": "clip_vision_model"},
        image_token_index=4,
    )
    pictures = CLIPImageProcessor(size={"shortest_edge": 16}, crop_size={"height": 16, "width": 16})
    processor = LlavaProcessor(
        pictures,
        _tokenizer("<image>"),
        patch_size=8,
        vision_feature_select_strategy="default",
        chat_template=_TEMPLATE,
        num_additional_image_tokens=1,
    )
    return _save(
        tmp_path_factory.mktemp("llava"), lambda: LlavaForConditionalGeneration(config), processor
    )


def _clip(*colours: tuple[int, int, int]) -> Any:
    """A frame of 20 x 30 of each colour."""
    return np.stack([np.full((20, 30, 3), colour, np.uint8) for colour in colours])


_RED, _BLUE = (255, 0, 0), (0, 0, 255)


def test_a_model_for_pictures_captions_the_middle_frame(blip: Path) -> None:
    found = TransformersCaptioner(str(blip), max_new_tokens=6, device="cpu").captions(
        [_clip(_RED, _BLUE, _RED), _clip(_BLUE)], [None, None]
    )
    model = BlipForConditionalGeneration.from_pretrained(blip)
    processor = BlipProcessor.from_pretrained(blip)
    pixels = processor(images=Image.fromarray(_clip(_BLUE)[0]), return_tensors="pt")
    (wanted,) = processor.batch_decode(
        model.generate(**pixels, max_new_tokens=6), skip_special_tokens=True
    )
    assert found == [wanted, wanted]
    assert len(wanted.split()) >= 3


def test_a_chat_model_sees_all_frames_and_a_batch_changes_nothing(llava: Path) -> None:
    captioner = TransformersCaptioner(
        str(llava), prompt="describe a", max_new_tokens=5, device="cpu"
    )
    clips = [_clip(_RED, _RED, _BLUE), _clip(_BLUE), _clip(*[_BLUE] * 8), _clip(_RED, _RED, _RED)]
    together = captioner.captions(clips, [None] * 4)
    assert together == [captioner.captions([clip], [None])[0] for clip in clips]
    assert len(set(together)) == 4
    assert all(len(text.split()) <= 5 for text in together)  # without the question


def test_an_answer_is_one_line_of_single_spaces(
    blip: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    captioner = TransformersCaptioner(str(blip), device="cpu")
    monkeypatch.setattr(captioner._processor, "batch_decode", lambda *_, **__: [" a\n\n b\t c "])
    assert captioner.captions([_clip(_RED)], [None]) == ["a b c"]


def _without_weights(folder: Path) -> None:
    weights = folder / "model.safetensors"
    torch.save(load_file(weights), folder / "pytorch_model.bin")
    weights.unlink()


def _with_code(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "mine", "auto_map": {"AutoConfig": "own.Mine"}}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "own.py").write_text("raise SystemExit('this was run')")


def _with_a_tensor_less(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    del weights["vision_model.embeddings.class_embedding"]
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_without_weights, r"has no weights in safetensors, and others are not read"),
        (_with_code, r"No captioner can be loaded from .*code beside the weights is not run"),
        (_with_a_tensor_less, r"leave 1 tensors without values, such as vision_model\.embeddings"),
        (lambda folder: (folder / "config.json").unlink(), r"is no folder with a config\.json"),
    ],
)
def test_a_folder_that_is_no_model_is_refused(
    blip: Path, tmp_path: Path, damage: Callable[[Path], None], message: str
) -> None:
    folder = shutil.copytree(blip, tmp_path / "copy")
    damage(folder)
    with pytest.raises(ModelError, match=message):
        TransformersCaptioner(str(folder), device="cpu")
