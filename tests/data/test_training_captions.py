"""What a sample's caption becomes: trigger word, prefix, shuffled tags."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from tests.data.build import clip, section, shape
from tests.data.catalogs import make_catalog

from longtake.data.clip import join_captions
from longtake.data.loader import Loader
from longtake.data.training_captions import all_captions, caption_variants, sample_caption

_TAGS = "1girl, red hair, hat, rain, street"


def _text(caption: str, how: dict[str, Any], seed: int = 0, trigger: str = "") -> str:
    data = section(trigger=trigger, captions={"catalog": how})
    return sample_caption(caption, "catalog", data, seed)


@pytest.mark.parametrize(
    ("caption", "trigger", "how", "wanted"),
    [
        ("a dog runs", "", {}, "a dog runs"),
        ("a dog runs", "sks", {}, "sks, a dog runs"),
        ("a sks dog runs", "sks", {}, "a sks dog runs"),
        ("asks for it", "sks", {}, "sks, asks for it"),
        ("a [trigger] dog, [trigger]", "sks", {}, "a sks dog, sks"),
        ("a [trigger] dog", "", {}, "a [trigger] dog"),
        ("a dog", "sks", {"prefixes": ["a photo of"]}, "sks, a photo of a dog"),
        ("dog", "sks", {"prefixes": ["a [trigger]"]}, "a sks dog"),
        ("a dog", "sks", {"trigger": "xyz"}, "xyz, a dog"),
        ("a dog", "sks", {"trigger": ""}, "a dog"),
        ("", "sks", {"prefixes": ["a photo of"]}, ""),
        ("a,b , c,,", "", {"shuffle_tags": True, "keep_tags": 3}, "a, b, c"),
    ],
)
def test_the_text_of_a_sample(caption: str, trigger: str, how: dict[str, Any], wanted: str) -> None:
    assert _text(caption, how, trigger=trigger) == wanted


def test_tags_are_shuffled_by_the_seed_and_the_first_stay() -> None:
    orders = Counter(
        _text(_TAGS, {"shuffle_tags": True, "keep_tags": 2}, seed) for seed in range(600)
    )
    assert len(orders) == 6  # all orders of the three free tags
    assert min(orders.values()) > 60
    for text in orders:
        assert text.startswith("1girl, red hair, ")
        assert sorted(text.split(", ")) == sorted(_TAGS.split(", "))


def test_prefixes_are_equally_likely_and_all_variants_are_known() -> None:
    prefixes = ["a photo of", "a picture of", ""]
    found = Counter(_text("a dog", {"prefixes": prefixes}, seed, "sks") for seed in range(600))
    assert min(found.values()) > 150
    data = section(trigger="sks", captions={"catalog": {"prefixes": prefixes}})
    assert set(caption_variants(["a dog"], "catalog", data)) == set(found)


def test_of_several_captions_each_is_as_likely_and_all_variants_are_known() -> None:
    """Whatever the prefix is; one that is there twice counts once, and an empty one not at all."""
    caption = join_captions([" a dog", "it runs\n", "", "a dog", "outside"])
    how = {"prefixes": ["see:", ""]}
    found = Counter(_text(caption, how, seed, "sks") for seed in range(1200))
    assert len(found) == 6
    assert min(found.values()) > 150
    data = section(trigger="sks", captions={"catalog": how})
    assert set(caption_variants([caption], "catalog", data)) == set(found)
    plain = section()
    assert list(caption_variants([caption, ""], "catalog", plain)) == [
        *("a dog", "it runs", "outside"),
        "",
    ]


def test_another_catalog_keeps_its_captions() -> None:
    catalogs = {name: make_catalog([clip(0, caption="x")]) for name in ("a", "b")}
    data = section(
        catalogs={name: f"{name}.parquet" for name in catalogs},
        captions={"a": {"prefixes": ["1", "2"]}},
    )
    assert all_captions(catalogs, data) == ["1 x", "2 x", "x"]


def test_batches_have_the_texts_in_every_epoch_and_after_a_resume(stills: Path) -> None:
    data = section(
        catalog=stills,
        buckets=[shape(num_frames=1)],
        workers=0,
        trigger="sks",
        captions={"catalog": {"prefixes": ["one", "two"]}},
    )
    loader = Loader(data, batch_size=13)
    texts = []
    for batch in loader.batches(8):
        if batch.step == 5:
            state = loader.state_dict()
        texts.append(dict(zip(batch.identities, batch.captions, strict=True)))
    assert all(text.startswith(("sks, one p", "sks, two p")) for text in texts[0].values())
    epochs = [texts[first] | texts[first + 1] for first in range(0, 8, 2)]
    for identity in epochs[0]:
        ends = {epoch[identity].partition("picture")[2] for epoch in epochs}
        assert len(ends) == 1
    assert any(epochs[0][identity] != epochs[1][identity] for identity in epochs[0])
    again = Loader(data, batch_size=13)
    again.load_state_dict(state)
    for step, batch in enumerate(again.batches(8), start=again.step):
        assert dict(zip(batch.identities, batch.captions, strict=True)) == texts[step]
