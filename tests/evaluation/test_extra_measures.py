"""Measures that presets name: any class, the CLIP score and the Frechet distance."""

import json
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers import CLIPConfig, CLIPImageProcessor, CLIPModel, CLIPProcessor, CLIPTokenizer

from longtake.errors import DataError, ModelError, RecipeError
from longtake.evaluation.extra_measures import (
    EXTRACTOR,
    REAL,
    VARIABLE,
    ClipScore,
    Extractor,
    Features,
    FrechetDistance,
    frechet_distance,
    load_extra,
    load_extras,
    measure_extra,
)

_VIDEOS = [np.full((2, 4, 4, 3), level, np.uint8) for level in (0, 10, 20)]


_PROMPTS = ["a", "b", "c"]


Write = Callable[[str], str]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    monkeypatch.chdir(tmp_path)
    count = iter(range(10))

    def one(body: str) -> str:
        module = f"own_measure_{tmp_path.name}_{next(count)}"
        (tmp_path / f"{module}.py").write_text(f"class Own:\n    name = 'own'\n{body}")
        return f"{module}:Own"

    return one


def _call(returned: str) -> str:
    return f"    def __call__(self, videos, prompts, fps):\n        return {returned}\n"


@pytest.mark.parametrize(
    ("returned", "of_each", "of_set"),
    [
        ("[v.mean() / fps for v in videos]", [{"own": 0}, {"own": 5}, {"own": 10}], {}),
        ("[None, float('nan'), 3]", [{}, {}, {"own": 3}], {}),
        ("len(prompts)", [{}, {}, {}], {"own": 3}),
        ("videos[1].max().reshape(())", [{}, {}, {}], {"own": 10}),
        ("float('inf')", [{}, {}, {}], {}),
        ("None", [{}, {}, {}], {}),
    ],
)
def test_a_measure_gives_a_number_for_each_video_or_one_for_all(
    write: Write, returned: str, of_each: list[dict[str, float]], of_set: dict[str, float]
) -> None:
    extra = load_extra(write(_call(returned)))
    assert measure_extra(extra, _VIDEOS, _PROMPTS, 2.0) == (of_each, of_set)


@pytest.mark.parametrize(
    ("returned", "said"),
    [
        ("[1, 2]", "gave 2 numbers for 3 videos"),
        ("['good', 1, 2]", "failed with ValueError: could not convert string to float: 'good'"),
        ("{}['x']", "failed with KeyError"),
    ],
)
def test_a_measure_that_fails_is_named(write: Write, returned: str, said: str) -> None:
    with pytest.raises(RecipeError, match="The measure own ") as caught:
        measure_extra(load_extra(write(_call(returned))), _VIDEOS, _PROMPTS, 2.0)
    assert said in str(caught.value)


def test_an_error_of_ours_passes_through(write: Write) -> None:
    body = "    def __call__(self, *given):\n        from longtake.errors import DataError\n"
    extra = load_extra(write(body + "        raise DataError('no such video')\n"))
    with pytest.raises(DataError, match=r"^no such video$"):
        measure_extra(extra, _VIDEOS, _PROMPTS, 2.0)


def test_what_is_no_measure_is_refused_with_what_it_lacks(write: Write) -> None:
    with pytest.raises(RecipeError, match=r"has the name 'own' and no __call__\. Give it"):
        load_extra(write("    pass\n"))
    with pytest.raises(RecipeError, match=r"has the name 'a b' and a __call__"):
        load_extra(write("    name = 'a b'\n" + _call("1")))
    with pytest.raises(RecipeError, match=r"Own\(\) failed with TypeError: .* without arguments"):
        load_extra(write("    def __init__(self, weights): pass\n" + _call("1")))
    with pytest.raises(RecipeError, match=r"The measure .*has no class Won; there are: Own"):
        load_extra(write(_call("1")).replace("Own", "Won"))
    with pytest.raises(RecipeError, match=r"write it as package\.module:Class"):
        load_extra("clip_score")


def test_two_measures_of_one_name_are_refused(write: Write) -> None:
    path = write(_call("1"))
    with pytest.raises(RecipeError, match="is called 'own', as another one is"):
        load_extras([path, path])
    with pytest.raises(RecipeError, match="is called 'motion', as another one is"):
        load_extras([write("    name = 'motion'\n" + _call("1"))])


_SMALL = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
}


@pytest.fixture
def clip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
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
    generator = np.random.default_rng(0)
    video = generator.integers(0, 256, (4, 24, 32, 3), dtype=np.uint8)
    score = load_extra("longtake.evaluation.extra_measures:ClipScore")
    assert score.name == "clip_score"
    singles = score([frame[None] for frame in video], ["a red square"] * 4, 8.0)
    model, processor = CLIPModel.from_pretrained(clip), CLIPProcessor.from_pretrained(clip)
    given = processor(text=["a red square"], images=list(video), return_tensors="pt")
    with torch.no_grad():
        logits = model(**given).logits_per_image[:, 0] / model.logit_scale.exp()
    assert singles == pytest.approx((100 * logits.clamp(min=0)).tolist(), abs=1e-3)
    whole = score([video], ["a red square"], 8.0)
    assert whole == pytest.approx([100 * max(0.0, float(logits.mean()))], abs=1e-3)


def test_a_missing_clip_model_is_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    with pytest.raises(RecipeError, match=r"clip_score needs a CLIP model .* LONGTAKE_CLIP="):
        ClipScore()
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    with pytest.raises(
        ModelError, match=r"no CLIP model can be loaded .*[^.]\. Expected .*hf download"
    ):
        ClipScore()


class Means(nn.Module):
    def forward(self, videos: Tensor) -> Tensor:
        """[B, 3] of [B, 3, F, H, W]."""
        return videos.mean(dim=[2, 3, 4])


def _normal(means: Features, deviations: Features) -> Features:
    count = len(means)
    corners = np.concatenate([np.eye(count), -np.eye(count)])
    features: Features = means + corners * deviations * np.sqrt((2 * count - 1) / 2)
    return features


@settings(max_examples=40, deadline=None)
@given(
    pairs=st.lists(
        st.tuples(*[st.floats(-5, 5)] * 2, *[st.floats(0.01, 5)] * 2), min_size=1, max_size=5
    )
)
def test_of_independent_features_it_is_the_closed_form(
    pairs: list[tuple[float, float, float, float]],
) -> None:
    one_mean, other_mean, one_std, other_std = np.array(pairs).T
    found = frechet_distance(_normal(one_mean, one_std), _normal(other_mean, other_std))
    closed = ((one_mean - other_mean) ** 2 + (one_std - other_std) ** 2).sum()
    assert found == pytest.approx(closed, rel=1e-6, abs=1e-6)


def test_it_is_symmetric_zero_for_the_same_and_does_not_depend_on_the_axes() -> None:
    generator = np.random.default_rng(0)
    one, other = generator.normal(size=(5, 8)), generator.normal(size=(7, 8)) + 1
    turned, _ = np.linalg.qr(generator.normal(size=(8, 8)))
    found = frechet_distance(one, other)
    assert frechet_distance(other, one) == pytest.approx(found)
    assert frechet_distance(one @ turned, other @ turned) == pytest.approx(found)
    assert frechet_distance(one, one) == pytest.approx(0, abs=1e-6)


def test_features_of_a_users_network_are_compared_with_real_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    network, real = tmp_path / "means.ts", tmp_path / "real.npy"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        torch.jit.trace(Means(), torch.zeros(1, 3, 2, 4, 4)).save(network)  # type: ignore[no-untyped-call]
    videos = [np.full((2, 4, 4, 3), level, np.uint8) for level in (0, 51, 102)]
    features = Extractor(str(network))(videos)
    assert features == pytest.approx(np.array([[0.0] * 3, [0.2] * 3, [0.4] * 3]))
    np.save(real, features + np.array([0.5, 0, 0]))
    monkeypatch.setenv(EXTRACTOR, str(network))
    monkeypatch.setenv(REAL, str(real))
    (extra,) = load_extras(["longtake.evaluation.extra_measures:FrechetDistance"])
    of_each, of_set = measure_extra(extra, videos, ["a"] * 3, 8.0)
    assert of_each == [{}] * 3
    assert of_set == {"frechet_distance": pytest.approx(0.25)}
    assert measure_extra(extra, videos[:1], ["a"], 8.0) == ([{}], {})
    np.save(real, features[:, :2])
    with pytest.raises(ModelError, match=r"makes 3 features of a video, and .* has 2 of each"):
        FrechetDistance()(videos, ["a"] * 3, 8.0)


def test_missing_features_are_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(EXTRACTOR, raising=False)
    with pytest.raises(RecipeError, match="needs a network that makes features of videos"):
        FrechetDistance()
    monkeypatch.setenv(EXTRACTOR, str(tmp_path / "none.ts"))
    with pytest.raises(ModelError, match="there is no such file"):
        FrechetDistance()
    (tmp_path / "none.ts").write_text("text")
    with pytest.raises(ModelError, match="is no TorchScript file"):
        FrechetDistance()
    monkeypatch.setenv(EXTRACTOR, "torch.nn:Identity")
    monkeypatch.setenv(REAL, str(tmp_path / "none.npy"))
    with pytest.raises(ModelError, match=r"cannot be read: .* Make them with numpy\.save"):
        FrechetDistance()
    np.save(tmp_path / "none.npy", np.zeros(3))
    with pytest.raises(ModelError, match=r"has the shape \[3\]; expected \[N, D\]"):
        FrechetDistance()
