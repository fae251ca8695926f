"""What is sorted on disk is the catalog that is made in memory."""

import random
from pathlib import Path
from typing import Any

import pytest
from tests.data.build import clip
from tests.data.catalogs import make_catalog

from longtake.data import catalog, catalog_writer
from longtake.data.catalog import Catalog, Duplicate, Rejection, Stamp, StoredCatalog
from longtake.data.catalog_writer import CatalogWriter
from longtake.data.clip import Clip, Media, Timing

_STAMP = Stamp(7, 2**62)


def _clips(with_spans: bool) -> list[Clip]:
    """300 clips; each third exists twice, the second time with a caption."""
    clips = []
    for number in range(300):
        fields: dict[str, Any] = {
            "attributes": {"nouns": float(number)} if number % 4 else {"\u6797": 0.1},
            "conditioning": {"pose": (0.5, float(number)), "mask": f"/m/{number}.png"},
            "keyframes": tuple(range(number % 5)),
        }
        if number % 7 == 0:
            fields |= {"num_frames": 3, "keyframes": (), "timing": Timing(0, 0, (0, 1, 2**40))}
        if with_spans and number % 5 == 0:
            span = (float(number), None if number % 2 else number + 1.5)
            fields |= {"media": Media("/film.mp4", span=span), "seek_pts": number}
        clips.append(clip(number, caption="" if number % 3 == 0 else f"clip {number}", **fields))
        if number % 3 == 0:
            fields["media"] = Media("/shard.tar", f"{number}.mp4", number, 9)
            clips.append(clip(number, **fields))
    return clips


@pytest.mark.parametrize("with_spans", [False, True])
def test_a_catalog_is_the_same_however_it_was_sorted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, with_spans: bool
) -> None:
    clips = _clips(with_spans)
    kept = {each.identity: each for each in clips}  # the second time with a caption
    others = [each for each in clips if kept[each.identity] is not each]
    rejected = [Rejection(f"/bad/{number}.mp4", "bad") for number in range(9)]
    duplicates = [Duplicate(each.path, each.identity) for each in others]
    duplicates.sort(key=lambda each: each.path)
    stamps = {each.path: _STAMP for each in clips} | {rejected[2].path: _STAMP}
    expected = make_catalog(kept.values(), rejected, duplicates, stamps)
    monkeypatch.setattr(catalog_writer, "_ROWS_IN_MEMORY", 13)
    monkeypatch.setattr(catalog, "ROWS_PER_GROUP", 50)
    writer = CatalogWriter()
    for each in random.Random(0).sample(clips, len(clips)):  # noqa: S311 - only an order
        writer.add(each, _STAMP)
    for rejection in rejected[::-1]:
        writer.reject(rejection, stamps.get(rejection.path))
    path = tmp_path / "catalog.parquet"
    written = writer.write(path)
    again = Catalog.load(path)
    assert again.table == expected.table
    assert again.set_aside == expected.set_aside
    assert again.fingerprint == expected.fingerprint
    assert (written.accepted, written.duplicates) == (300, 100)
    assert writer.rejected(2) == rejected[:2]
    stored = StoredCatalog(path)
    assert [each for some in stored.clips() for each in some.clips()] == list(expected.clips())
    assert list(stored.set_aside()) == expected.set_aside.to_pylist()
    assert stored.attribute_names == ("nouns", "\u6797")
