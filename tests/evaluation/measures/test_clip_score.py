"""CLIP score, by a tiny model with random weights that is saved as a real one is."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import (
    CLIPConfig,
    CLIPImageProcessor,
    CLIPModel,
    CLIPProcessor,
    CLIPTokenizer,
)

from longtake.errors import ModelError, RecipeError
from longtake.evaluation.measures.clip_score import VARIABLE, ClipScore
from longtake.evaluation.measures.extra import load_extra

_SMALL = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
}


@pytest.fixture
def clip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder as a download would leave it, to which the environment points."""
    letters = [f"{letter}{end}" for letter in "abcdehlqrsu" for end in ("", "</w>")]
    known = [*letters, "<|startoftext|>", "<|endoftext|>"]
    words = {word: number for number, word in enumerate(known)}
    (tmp_path / "vocab.json").write_text(json.dumps(words))
    (tmp_path / "merges.txt").write_text("#version: 0.2\n")
    tokenizer = CLIPTokenizer(str(tmp_path / "vocab.json"), str(tmp_path / "merges.txt"))
    size = {"height": 16, "width": 16}
    images = CLIPImageProcessor(size={"shortest_edge": 16}, crop_size=size)
    CLIPProcessor(images, tokenizer).save_pretrained(tmp_path)
    text = {"vocab_size": len(words), "max_position_embeddings": 16}
    text |= {"bos_token_id": len(words) - 2, "eos_token_id": len(words) - 1}
    torch.manual_seed(0)
    CLIPModel(
        CLIPConfig(
            text_config=_SMALL | text,
            vision_config=_SMALL | {"image_size": 16, "patch_size": 8},
            projection_dim=8,
        )
    ).save_pretrained(tmp_path)
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    return tmp_path


def test_the_score_is_the_models_own_cosine(clip: Path) -> None:
    """What the model's logits say without its temperature; of several frames the mean."""
    generator = np.random.default_rng(0)
    video = generator.integers(0, 256, (4, 24, 32, 3), dtype=np.uint8)
    score = load_extra("longtake.evaluation.measures.clip_score:ClipScore")
    assert score.name == "clip_score"
    singles = score([frame[None] for frame in video], ["a red square"] * 4, 8.0)
    model, processor = CLIPModel.from_pretrained(clip), CLIPProcessor.from_pretrained(clip)
    given = processor(text=["a red square"], images=list(video), return_tensors="pt")
    with torch.no_grad():
        logits = model(**given).logits_per_image[:, 0] / model.logit_scale.exp()
    assert singles == pytest.approx((100 * logits.clamp(min=0)).tolist(), abs=1e-3)
    whole = score([video], ["a red square"], 8.0)
    assert whole == pytest.approx([100 * max(0.0, float(logits.mean()))], abs=1e-3)


def test_what_is_missing_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No variable; a folder without a model."""
    monkeypatch.delenv(VARIABLE, raising=False)
    with pytest.raises(RecipeError, match=r"clip_score needs a CLIP model .* LONGTAKE_CLIP="):
        ClipScore()
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    with pytest.raises(
        ModelError, match=r"no CLIP model can be loaded .*[^.]\. Expected .*hf download"
    ):
        ClipScore()
