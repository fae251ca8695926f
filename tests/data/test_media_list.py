"""Whatever order items come in, each is there once, sorted, with its file's other spans."""

import random
from contextlib import closing

import pytest

from longtake.data.clip import Item, Media
from longtake.data.media_list import MediaList
from longtake.errors import DataError

_ITEMS = [
    Item(Media("/b.mp4", span=(0.0, 1.5)), "b", {"nouns": 0.1}, {"pose": (1.0, 2.0)}),
    Item(Media("/b.mp4", span=(2.0, None))),
    Item(Media("/b.mp4")),
    Item(Media("/caf\udce9.mp4"), "not UTF-8"),
    Item(Media("/shard.tar", "x/1.png", 512, 77), "\0 \u6797", {}, {"mask": "/m.png"}),
    Item(Media("s3://bucket/é.mp4", num_bytes=5, stamp=-(2**63)), ""),
]


def test_items_come_back_sorted_and_whole() -> None:
    shuffled = random.Random(0).sample(_ITEMS * 2, 12)  # noqa: S311 - only an order
    with closing(MediaList()) as media:
        media.add(shuffled[:5])
        media.add(iter(shuffled[5:]))
        media.settle()
        assert list(media) == sorted(_ITEMS, key=lambda item: str(item.media))
        assert next([str(each.media) for each in items] for items in media.by_file()) == [
            "/b.mp4",
            "/b.mp4#t=0,1.5",
            "/b.mp4#t=2",
        ]
        assert (len(media), media.num_files, media.attribute_names) == (6, 4, {"nouns"})


def test_mentions_are_joined_and_only_one_caption_is_accepted() -> None:
    with closing(MediaList()) as media:
        media.add([Item(Media("/a.mp4"), None, {"x": 1.0, "y": 1.0}), Item(Media("/b.mp4"), "b")])
        media.add([Item(Media("/a.mp4"), "a", {"y": 2.0}, {"pose": "/p"}), Item(Media("/a.mp4"))])
        media.settle()
        joined = Item(Media("/a.mp4"), "a", {"x": 1.0, "y": 2.0}, {"pose": "/p"})
        assert list(media) == [joined, Item(Media("/b.mp4"), "b")]
    with closing(MediaList()) as media:
        media.add([Item(Media("/a.mp4"), "a"), Item(Media("/a.mp4"), "other")])
        with pytest.raises(DataError, match="two captions: 'a' and 'other'"):
            media.settle()


@pytest.mark.parametrize("every", [False, True])
def test_captions_are_given_to_all_or_to_those_without(every: bool) -> None:
    count = 10_000  # more than are in memory at once
    with closing(MediaList()) as media:
        media.add(
            Item(Media(f"/{number:05d}.mp4"), None if number % 2 else "known")
            for number in range(count)
        )
        media.settle()
        media.caption(lambda item: f"text of {item.path}", every=every)
        for number, item in enumerate(media):
            is_given = every or number % 2
            assert item.caption == (f"text of /{number:05d}.mp4" if is_given else "known")
