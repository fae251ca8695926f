"""Captions by a model: which clips and frames it sees, what is refused, how it resumes."""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image
from tests.data.build import (
    Oracle,
    PlannedRun,
    identities_of,
    indexed,
    pictures_of,
    shape,
    write_greys,
)
from tests.data.catalogs import make_catalog

from longtake.data.catalog import CAPTIONED, Catalog
from longtake.data.clip import Clip
from longtake.data.encode import write_video
from longtake.data.generated_captions import Captioned, FrameChoice, caption, write_lines
from longtake.data.index import index
from longtake.data.scores import score
from longtake.data.tasks import Work
from longtake.errors import DataError

Frames = NDArray[np.uint8]


class _Seen:
    """Answers by `answer`, and keeps what it was given."""

    def __init__(self, answer: Callable[[Clip], Any] = lambda clip: f"new {clip.identity}") -> None:
        self.answer = answer
        self.batches: list[list[tuple[Frames, Clip]]] = []

    def captions(self, frames: Sequence[Frames], clips: Sequence[Clip]) -> list[Any]:
        self.batches.append(list(zip(frames, clips, strict=True)))
        return [self.answer(clip) for clip in clips]

    @property
    def clips(self) -> list[str]:
        return [clip.identity for batch in self.batches for _, clip in batch]


@pytest.fixture
def half(stills: Path) -> Catalog:
    """26 pictures, of which 13 have a caption."""
    clips = list(Catalog.load(stills).clips())
    return make_catalog(
        [*clips[:13], *(replace(clip, caption="", attributes={}) for clip in clips[13:])]
    )


_ALONE = Work(workers=1)


def _caption(
    clips: Catalog, captioner: Any, out: Path, work: Work = _ALONE, **options: Any
) -> Captioned:
    named = {"name": "mine:Captioner", "options": {}}
    return caption(clips, captioner, out=out, work=work, **(named | options))


def _by_name(clips: Catalog) -> dict[str, str]:
    return {Path(clip.path).name: clip.caption for clip in clips.clips()}


def test_a_captioner_sees_evenly_spaced_frames_of_whole_clips(tmp_path: Path) -> None:
    (folder := tmp_path / "clips").mkdir()
    rng = np.random.default_rng(0)
    for name, count in (("short", 3), ("long", 20)):
        pictures = rng.integers(0, 255, (count, 32, 48, 3), dtype=np.uint8)
        write_video(folder / f"{name}.mp4", pictures, 8)
    Image.fromarray(rng.integers(0, 255, (40, 20, 3), dtype=np.uint8)).save(folder / "still.png")
    clips, seen, small = indexed(tmp_path / "c.parquet", folder), _Seen(), _Seen()
    _caption(clips, seen, tmp_path / "out.parquet", choice=FrameChoice(num_frames=4))
    found = {Path(clip.path).name: frames for ((frames, clip),) in seen.batches}
    assert [len(found[name]) for name in ("short.mp4", "long.mp4", "still.png")] == [3, 4, 1]
    for name, which in (("short.mp4", [0, 1, 2]), ("long.mp4", [2, 7, 12, 17])):
        wanted = pictures_of(str(folder / name))[which].astype(int)
        assert np.abs(found[name] - wanted).max() <= 2  # another conversion of YUV
    np.testing.assert_array_equal(found["still.png"][0], np.array(Image.open(folder / "still.png")))
    _caption(clips, small, tmp_path / "small.parquet", choice=FrameChoice(2, side=16))
    shapes = {Path(clip.path).stem: frames.shape for ((frames, clip),) in small.batches}
    video = (2, 11, 16, 3)
    assert shapes == {"short": video, "long": video, "still": (1, 16, 8, 3)}


@pytest.mark.parametrize(("every", "batch_size"), [(False, 1), (False, 5), (True, 8)])
def test_clips_without_a_caption_or_all_are_captioned(
    half: Catalog, tmp_path: Path, every: bool, batch_size: int
) -> None:
    scored, seen, told = score(half, "length").catalog, _Seen(), list[tuple[int, int]]()
    how: dict[str, Any] = {"every": every, "batch_size": batch_size}
    how["work"] = replace(_ALONE, progress=lambda *counts: told.append(counts))
    done = _caption(scored, seen, tmp_path / "c.parquet", **how)
    rows = range(26) if every else range(13, 26)
    assert seen.clips == [half.clip(row).identity for row in rows]
    sizes = [len(batch) for batch in seen.batches]
    assert sizes[:-1] == [batch_size] * (len(sizes) - 1)
    assert told[-1] == (len(rows), len(rows))
    done.catalog.save(tmp_path / "c.parquet")
    found = Catalog.load(tmp_path / "c.parquet")
    names = [f"new {clip.identity}" for clip in half.clips()]
    assert found.captions() == (names if every else [*half.captions()[:13], *names[13:]])
    assert found.column(CAPTIONED).tolist() == [float(row in rows) for row in range(26)]
    lengths = found.column("length")  # those of other captions would be wrong
    assert np.isnan(lengths[list(rows)]).all()
    assert not np.isnan(np.delete(lengths, list(rows))).any()
    assert (done.num_written, done.failed) == (len(rows), ())


def test_clips_that_get_their_first_caption_join_the_epoch(half: Catalog, tmp_path: Path) -> None:
    after = _caption(half, _Seen(), tmp_path / "c.parquet").catalog
    stills = [shape(num_frames=1)]
    run = PlannedRun(tmp_path, half, buckets=stills, stages=[{"name": "only", "epochs": 2}])
    captioned = {clip.identity for clip in half.clips() if clip.caption}
    run.oracle = Oracle({0: captioned, 1: captioned})
    run.train(2)
    plans = run.resume(after)
    assert "13 with another caption" in plans.changes
    run.oracle.change("merge", identities_of(after), counted=0)
    run.train()
    run.oracle.check()


def test_a_clip_or_caption_that_is_no_good_is_named_and_the_rest_captioned(
    half: Catalog, tmp_path: Path
) -> None:
    bad = ["", " \n ", "two\nlines", "\x1b[31mred", "\u202ereversed", "half \ud800"]
    clips = list(half.clips())
    gone = replace(clips[-1], media=replace(clips[-1].media, path=str(tmp_path / "gone.png")))
    answers = {clip.identity: text for clip, text in zip(clips[13:], bad, strict=False)}
    seen = _Seen(lambda clip: answers.get(clip.identity, "  a good one\n"))
    done = _caption(make_catalog([*clips[:-1], gone]), seen, tmp_path / "c.parquet", batch_size=4)
    assert [each.path for each in done.failed] == [
        *(clip.path for clip in clips[13:19]),
        gone.path,
    ]
    reasons = [each.reason for each in done.failed]
    assert reasons[:2] == ["its caption is empty"] * 2
    assert all("its caption has control characters" in each for each in reasons[2:6])
    assert r"two\nlines" in reasons[2]
    assert "No such file" in reasons[6]
    wanted = [*half.captions()[:13], *[""] * 6, *["a good one"] * 6, ""]
    assert done.catalog.captions() == wanted


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (lambda _: None, r"mine:Captioner returned None as the caption of PATH .*expected a str"),
        (lambda clip: 1 / 0, r"mine:Captioner raised ZeroDivisionError for PATH .*division"),
        ("one text", r"mine:Captioner returned 'one text' for PATH .*expected a list of 1 capt"),
        (["one", "more"], r"mine:Captioner returned \['one', 'more'\] for PATH .*list of 1 capt"),
    ],
)
def test_a_captioner_that_is_wrong_ends_the_work_with_the_clips_name(
    half: Catalog, tmp_path: Path, answer: Any, message: str
) -> None:
    captioner = _Seen(answer)
    if not callable(answer):
        captioner.captions = lambda frames, clips: answer  # type: ignore[method-assign]
    with pytest.raises(DataError, match=message.replace("PATH", half.clip(13).path)):
        _caption(half, captioner, tmp_path / "c.parquet")


def test_what_was_captioned_before_an_error_is_not_captioned_again(
    half: Catalog, tmp_path: Path
) -> None:
    out = tmp_path / "c.parquet"
    stop = half.clip(20).identity

    def fails(clip: Clip) -> str:
        if clip.identity == stop:
            raise KeyError("stopped")
        return f"first {clip.identity}"

    with pytest.raises(DataError, match="KeyError"):
        _caption(half, _Seen(fails), out)
    assert not out.exists()
    (journal,) = tmp_path.glob(".c.parquet*")
    kept = journal.read_bytes()
    wrong = {"identity": half.clip(22).identity, "caption": "\x1b[31mred"}
    journal.write_bytes(b"\n".join([kept, json.dumps(wrong).encode(), b'{"caption": 3}', b"\xff"]))
    for change in ({"options": {"prompt": "x"}}, {"name": "a:B"}, {"choice": FrameChoice(4)}):
        other = _Seen()
        _caption(half, other, out, **change)
        assert len(other.clips) == 13
    again = _Seen(lambda _: "again")
    done = _caption(half, again, out, batch_size=3)
    assert again.clips == [half.clip(row).identity for row in range(20, 26)]
    texts = [f"first {half.clip(row).identity}" for row in range(13, 20)]
    assert done.catalog.captions()[13:] == [*texts, *["again"] * 6]
    anew = _Seen()
    _caption(half, anew, out, fresh=True)
    assert len(anew.clips) == 13
    done.save(out)
    assert list(tmp_path.glob(".c.parquet*")) == []


def test_indexing_again_keeps_a_models_captions_unless_the_sources_have_one(
    tmp_path: Path,
) -> None:
    folder, out = tmp_path / "clips", tmp_path / "c.parquet"
    folder.mkdir()
    for number in range(4):
        write_greys(folder, {str(number): None}, grey=60 * number)
    (folder / "0.txt").write_text("by hand")
    done = _caption(indexed(out, folder), _Seen(lambda clip: Path(clip.path).stem), out)
    done.catalog.save(out)
    write_lines(done.catalog, tmp_path / "all.jsonl")
    (folder / "1.txt").write_text("corrected")
    (folder / "0.txt").unlink()
    write_greys(folder, {"new": None}, grey=9)
    index([folder], captions=None, out=out)
    wanted = {"0.png": "", "1.png": "corrected", "2.png": "2", "3.png": "3", "new.png": ""}
    assert _by_name(Catalog.load(out)) == wanted
    lines = [json.loads(line) for line in (tmp_path / "all.jsonl").read_text().splitlines()]
    captions = {Path(line["video"]).stem: line["caption"] for line in lines}
    assert captions == {"0": "by hand", "1": "1", "2": "2", "3": "3"}
    index([folder], captions=tmp_path / "all.jsonl", out=tmp_path / "other.parquet")
    other = _by_name(Catalog.load(tmp_path / "other.parquet"))
    assert (other["0.png"], other["1.png"]) == ("by hand", "1")
