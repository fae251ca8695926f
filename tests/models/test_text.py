"""What a text encoder promises: the same caption means the same, whatever stands beside it."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.build import LateCopies
from tests.models.tiny import CLIP, T5

from longtake.config import PooledSection, TextSection
from longtake.errors import DataError, RecipeError
from longtake.models.flux import Flux
from longtake.models.text import (
    LENGTH_STEP,
    MAX_WORDS,
    TextEncoder,
    TransformersText,
    WordIds,
    build_text,
    outline_text,
    place_text,
)
from longtake.models.wan import Wan

_CAPTIONS = ["a red ball rolls left", "A blue ball rolls right.", "a red square, turning"]


def _words(captions: list[str] = _CAPTIONS, made: Path | None = None, **keys: Any) -> WordIds:
    text = build_text(TextSection(**{"max_tokens": 8} | keys), Wan(), captions, made)
    assert isinstance(text, WordIds)
    return text


def _section(**config: Any) -> TextSection:
    return TextSection(kind="transformers", config=T5 | config, max_tokens=8)


def _two_sections(**pooled: Any) -> TextSection:
    second = PooledSection.model_validate({"config": CLIP, "max_tokens": 7} | pooled)
    return _section().model_copy(update={"pooled": second})


def _encoder(section: TextSection | None = None) -> TransformersText:
    torch.manual_seed(0)
    family = Flux() if section is not None and section.pooled else Wan()
    text = build_text(section or _section(), family, _CAPTIONS, None)
    assert isinstance(text, TransformersText)
    return text


def test_ids_depend_on_the_captions_alone() -> None:
    """Neither the catalog's order nor ties in frequency change the vocabulary."""
    captions = [*_CAPTIONS, "q w e r t z u i o p", "every word here stands once"]
    expected = _words(captions).encode(captions)["token_ids"]
    for seed in range(5):
        shuffled = random.Random(seed).sample(captions, len(captions))  # noqa: S311 - a shuffle
        assert torch.equal(_words(shuffled).encode(captions)["token_ids"], expected)


def test_ids_are_padded_with_zero_and_cut() -> None:
    """[B, T] int64: zeros follow a short caption, and a long one ends at max_tokens."""
    ids = _words(max_tokens=4).encode(["red ball", "a red ball rolls left"])["token_ids"]
    assert (ids.shape, ids.dtype) == ((2, 4), torch.int64)
    assert ids[0, 2:].tolist() == [0, 0]
    assert (ids[0, :2] > 0).all()
    assert (ids[1] > 0).all()


def test_the_empty_caption_is_padding_and_neither_case_nor_a_full_stop_makes_a_word() -> None:
    ids = _words().encode(["A Red BALL.", "a red ball", ""])["token_ids"]
    assert torch.equal(ids[0, :3], ids[1, :3])
    assert not ids[2].any()


def test_unknown_words_are_found_as_they_were_written() -> None:
    """Words of no caption are returned, in the order and spelling of the caption."""
    assert _words().unknown_words("a Grün ball rolls ﬁnely") == ["Grün", "ﬁnely"]
    assert _words().unknown_words("a red ball") == []
    assert _encoder().unknown_words("a Grün ball") == ["Grün"]


def test_unknown_words_share_one_id_and_the_vocabulary_has_no_more_ids_than_its_size() -> None:
    text = _words()
    ids = text.encode(["green", "purple"])["token_ids"][:, 0]
    assert ids[0] == ids[1] > 0
    assert text.encode(_CAPTIONS)["token_ids"].max() == text.vocabulary_size - 1


def test_the_most_frequent_words_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("longtake.models.text.MAX_WORDS", 2)
    text = _words(["x x x y y z"])
    assert text.unknown_words("x y z") == ["z"]


def test_saved_words_keep_their_ids(tmp_path: Path) -> None:
    """A resumed run has its own vocabulary, even where the catalog has grown."""
    text = _words()
    text.save(tmp_path)
    again = _words(["other words altogether"], tmp_path)
    assert torch.equal(again.encode(_CAPTIONS)["token_ids"], text.encode(_CAPTIONS)["token_ids"])
    assert again.vocabulary_size == text.vocabulary_size


@pytest.mark.parametrize("captions", [[], ["", " "]])
@pytest.mark.parametrize("section", [TextSection(), _section()])
def test_a_catalog_without_words_is_refused(section: TextSection, captions: list[str]) -> None:
    with pytest.raises(DataError, match="hold no words"):
        build_text(section, Wan(), captions, None)


def test_padding_that_is_not_computed_changes_nothing() -> None:
    """Captions of one, two and three times the step, of 96 tokens that would be computed."""
    torch.manual_seed(0)
    section = _section().model_copy(update={"max_tokens": 3 * LENGTH_STEP})
    captions = [" ".join(["red", "ball", "rolls"] * count) for count in (1, 13, 9, 40, 3)]
    text = build_text(section, Wan(), captions, None)
    assert isinstance(text, TransformersText)
    widths = list[int]()
    text.encoder.register_forward_pre_hook(lambda _, args: widths.append(args[0].shape[1]))
    found = text.encode(captions)["prompt_embeds"]
    assert sorted(widths) == [LENGTH_STEP, 2 * LENGTH_STEP, 3 * LENGTH_STEP]
    tokens = text.tokenizer(
        captions,
        padding="max_length",
        max_length=3 * LENGTH_STEP,
        truncation=True,
        return_tensors="pt",
    )
    with torch.no_grad():
        whole = text.encoder(tokens.input_ids, tokens.attention_mask).last_hidden_state
    wanted = whole * tokens.attention_mask.unsqueeze(-1)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "caption",
    [
        "a red ball",
        "",
        "a  red\nball &amp; more ",
        "it\u2019s \u201cred\u201d",
        "a red ball rolls left " * 4,
    ],
)
def test_embeddings_are_those_of_wans_pipeline(caption: str) -> None:
    """Short, empty, unclean or too long: training sees what WanPipeline will give."""
    from diffusers import WanPipeline

    text = _encoder()
    pipeline = WanPipeline(text.tokenizer, text.encoder, None, None, None)
    expected = pipeline._get_t5_prompt_embeds(caption, max_sequence_length=8, device="cpu")
    assert torch.equal(text.encode([caption])["prompt_embeds"], expected)


def test_a_pretrained_encoder_is_kept_in_bf16_unless_the_recipe_asks(tmp_path: Path) -> None:
    """One of random weights in fp32; what comes out is fp32 in any case.

    A recipe names the repository once, for both encoders; nothing pretrained is copied.
    """
    text = _encoder(_two_sections())
    text.save(tmp_path)
    pooled = PooledSection(max_tokens=7)
    section = TextSection(
        kind="transformers", pretrained=str(tmp_path), max_tokens=8, pooled=pooled
    )
    exact = section.model_copy(update={"dtype": "fp32"})
    for asked, dtype in ((section, torch.bfloat16), (exact, torch.float32)):
        loaded = build_text(asked, Flux(), [], None)
        outlined = outline_text(asked, Flux())
        for module in (*loaded.modules(), *outlined.modules()):
            assert {p.dtype for p in module.parameters()} == {dtype}
        for name, expected in text.encode(_CAPTIONS).items():
            found = loaded.encode(_CAPTIONS)[name]
            assert found.dtype == torch.float32
            torch.testing.assert_close(found, expected, rtol=0.05, atol=0.05)
            assert torch.equal(found, expected) == (asked is exact)
        loaded.save(tmp_path / "copy")
        assert not (tmp_path / "copy").exists()
    assert {p.dtype for p in text.encoder.parameters()} == {torch.float32}


@pytest.mark.parametrize(
    ("section", "message"),
    [
        (_section(d_modle=16), r"text\.config\.d_modle is not an argument .* mean d_model\?"),
        (_section(d_model="16"), r"text\.config does not fit UMT5Config"),
        (TextSection(pretrained="somewhere/wan"), "would not be used"),
        (TextSection(config={"d_model": 16}), "would not be used"),
    ],
)
def test_wrong_sections_are_refused(section: TextSection, message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        build_text(section, Wan(), _CAPTIONS, None)


@pytest.mark.parametrize("caption", ["a red ball", "", "a  red\nball &amp; more ", "a red " * 9])
def test_two_encoders_embed_as_fluxs_pipeline(caption: str) -> None:
    """Short, empty, unclean or too long: words with their padding, and one vector for all."""
    from diffusers import FluxPipeline

    text = _encoder(_two_sections())
    pipeline = FluxPipeline(
        None,
        None,
        *(text.pipeline_parts()[name] for name in ("text_encoder", "tokenizer")),
        text.encoder,
        text.tokenizer,
        None,
    )
    with torch.no_grad():
        embeds, pooled, _ = pipeline.encode_prompt(
            caption, device="cpu", max_sequence_length=text.max_tokens
        )
    encoded = text.encode([caption])
    assert encoded.keys() == {"prompt_embeds", "pooled_prompt_embeds"}
    assert torch.equal(encoded["prompt_embeds"], embeds)
    assert torch.equal(encoded["pooled_prompt_embeds"], pooled)
    assert {value.dtype for value in encoded.values()} == {torch.float32}


def test_the_pooled_vector_is_taken_where_the_caption_ends() -> None:
    """Words count, their order too, and what another caption in the batch says does not."""
    text = _encoder(_two_sections())
    captions = ["red ball", "ball red", "red ball rolls left", ""]
    together = text.encode(captions)["pooled_prompt_embeds"]
    assert together.shape == (4, 10)
    for row, caption in zip(together, captions, strict=True):
        torch.testing.assert_close(row, text.encode([caption])["pooled_prompt_embeds"][0])
    assert len({tuple(row.tolist()) for row in together}) == 4


def test_two_saved_encoders_come_back_as_a_pipeline_lays_them(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """FLUX counts the encoder of words second; a run goes on, silently, with those it made."""
    text = _encoder(_two_sections())
    text.save(tmp_path)
    folders = ["text_encoder", "text_encoder_2", "tokenizer", "tokenizer_2"]
    assert sorted(folder.name for folder in tmp_path.iterdir()) == folders
    torch.manual_seed(1)
    again = build_text(_two_sections(), Flux(), ["other words"], tmp_path)
    for name, expected in text.encode(_CAPTIONS).items():
        assert torch.equal(again.encode(_CAPTIONS)[name], expected)
    assert again.unknown_words("a Grün ball") == ["Grün"]
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("pooled", "message"),
    [
        ({"config": {"hiden_size": 8}}, r"text\.pooled\.config\.hiden_size .* mean hidden_size\?"),
        ({"config": {"hidden_size": "8"}}, r"text\.pooled\.config does not fit"),
        (
            {"config": CLIP | {"max_position_embeddings": 4}},
            r"text\.pooled\.max_tokens is 7, but CLIPTextModel reads 4 at most\. Set it to 4",
        ),
        (
            {"pretrained": "some/where"},
            r"text\.pooled\.config is set, but it would not be used: text\.pooled\.pretrained",
        ),
    ],
)
def test_a_wrong_second_section_is_refused(pooled: dict[str, Any], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        _encoder(_two_sections(**pooled))
    with pytest.raises(RecipeError, match=message):
        outline_text(_two_sections(**pooled), Flux())


def test_words_have_no_second_encoder() -> None:
    with pytest.raises(RecipeError, match=r"text\.pooled is set, but it would not be used"):
        build_text(TextSection(pooled=PooledSection()), Flux(), _CAPTIONS, None)


def test_layers_that_are_copied_one_ahead_encode_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """To the bit, also after the encoders have left the device and come back."""
    monkeypatch.setattr("longtake.models.streamed.CopyStream", LateCopies)
    section = _two_sections(config=CLIP | {"num_hidden_layers": 3})
    section = section.model_copy(update={"config": T5 | {"num_layers": 4}})
    text, device = _encoder(section), torch.device("cpu")
    whole, size = text.encode(_CAPTIONS), _weight_bytes(text)
    text.to(device, by_layer=True)
    assert _weight_bytes(text) < 0.7 * size  # the vocabularies', and norms
    for _ in range(2):
        found = text.encode(_CAPTIONS)
        assert all(torch.equal(found[name], whole[name]) for name in whole)
        text.to(device)


def _weight_bytes(text: TextEncoder) -> int:
    return sum(weight.nbytes for module in text.modules() for weight in module.parameters())


@pytest.mark.parametrize(("free_gib", "by_layer"), [(1.001, False), (1.0, True)])
def test_a_gpu_without_room_for_a_gib_beside_an_encoder_has_it_by_layer(
    monkeypatch: pytest.MonkeyPatch, free_gib: float, by_layer: bool
) -> None:
    text, calls = _encoder(), list[bool]()
    monkeypatch.setattr(text, "to", lambda _, *, by_layer: calls.append(by_layer))
    free = int(free_gib * 2**30) + _weight_bytes(text) - 1
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (free, 2**40))
    place_text(text, torch.device("cuda"))
    assert calls == [by_layer]


@pytest.mark.parametrize("text", [_words(), _encoder(), _encoder(_two_sections())])
def test_an_outline_tells_the_shapes_of_what_encoding_gives(text: TextEncoder) -> None:
    encoded, outline = text.encode(["a red ball"]), text.outline()
    assert {key: (value.shape, value.dtype) for key, value in encoded.items()} == {
        key: (value.shape, value.dtype) for key, value in outline.items()
    }
    assert {value.device.type for value in outline.values()} == {"meta"}


@pytest.mark.parametrize("section", [TextSection(max_tokens=8), _section(), _two_sections()])
def test_an_outlined_encoder_answers_as_the_real_one_will(section: TextSection) -> None:
    """All but its vocabulary, which is taken at its largest, and no weight has a value."""
    real = build_text(section, Flux(), _CAPTIONS, None)
    outline = outline_text(section, Flux())
    assert (outline.embed_dim, outline.pooled_dim) == (real.embed_dim, real.pooled_dim)
    assert outline.outline().keys() == real.outline().keys()
    assert outline.max_tokens == real.max_tokens
    assert outline.vocabulary_size == MAX_WORDS + 3 > real.vocabulary_size
    assert len(outline.modules()) == len(real.modules())
    weights = [weight for module in outline.modules() for weight in module.parameters()]
    assert {weight.device.type for weight in weights} <= {"meta"}
