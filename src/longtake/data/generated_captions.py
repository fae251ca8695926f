"""Captions that a model writes for the clips of a catalog (`longtake data caption`).

Worker processes decode clips ahead; the model runs in this process. Captions are kept beside the
catalog until it is written, so that an interrupted command resumes.
"""

import glob
import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from longtake import errors, formatting, fsio, process
from longtake.data import buckets, decode_worker, window
from longtake.data.catalog import CAPTIONED, Catalog, Rejection
from longtake.data.clip import Clip
from longtake.data.tasks import ALL_CORES, Work

OF_CAPTIONS = ("nouns", "length")  # scores that depend on the caption

_SILENCE_SECONDS = 600.0  # decoding a whole clip reports no progress
_AHEAD = 2  # clips of each worker that are decoded ahead, in addition to the next batch


class Captioner(Protocol):
    """Interface of a user's class that captions clips; see docs/guides/fine-tuning-data.md."""

    def captions(self, frames: Sequence[NDArray[np.uint8]], clips: Sequence[Clip]) -> Sequence[str]:
        """Return one caption for each clip, in order, each one line of text.

        Args:
            frames: for each clip [F, H, W, 3] RGB, evenly spaced; F is 1 for an image.
            clips: the clips' records, such as path, size and scores.
        """


@dataclass(frozen=True)
class FrameChoice:
    """Number and size of a clip's frames that the captioning model gets."""

    num_frames: int = 8  # upper limit
    side: int = 512  # upper limit of the longer side, in pixels


@dataclass(frozen=True)
class Captioned:
    """Result of `caption`: a catalog with captions that a model wrote."""

    catalog: Catalog
    num_written: int
    failed: tuple[Rejection, ...]  # clips without a new caption, with the reason

    def save(self, out: Path) -> None:
        """Write the catalog; remove the captions that interrupted calls kept in files beside it."""
        self.catalog.save(out)
        for path in out.parent.glob(f"{glob.escape(_journal_name(out, ''))}*"):
            path.unlink(missing_ok=True)


def caption(
    clips: Catalog,
    captioner: Captioner,
    *,
    out: Path,
    name: str,
    options: Mapping[str, object],
    every: bool = False,
    fresh: bool = False,
    batch_size: int = 1,
    choice: FrameChoice = FrameChoice(),
    work: Work = ALL_CORES,
) -> Captioned:
    """Write captions for the clips that have none; a clip that fails keeps its old one.

    Captions are kept beside `out` until it is written (`Captioned.save`). An interrupted call
    resumes if its captioner's `name`, `options` and `choice` of frames are the same.

    Args:
        clips: a catalog; it is not changed.
        captioner: writes the captions.
        out: the catalog that will be written.
        name: name of the captioner's class, as package.module:Class.
        options: arguments that the captioner was made with.
        every: also replace existing captions.
        fresh: ignore the results of an interrupted call.
        batch_size: number of clips for each call of the captioner.
        choice: number and size of the frames of each clip.
        work: number of decoding processes of this machine, and the memory for decoding one clip.

    Raises:
        DataError: the captioner raised an error, or did not return one text for each clip, or no
            worker can be started.
    """
    header = {"captioner": name, "options": json.dumps(dict(options), sort_keys=True)}
    header |= {"frames": str(choice.num_frames), "side": str(choice.side)}
    digest = hashlib.blake2b(json.dumps(header).encode(), digest_size=4).hexdigest()
    path = out.with_name(_journal_name(out, digest))  # one for each choice: none replaces another
    journal = fsio.Journal(path, dict[str, str], header=header)
    if fresh:
        journal.remove()
    # Checked again: the file may have been edited, or written by an older version.
    found = {each.get("identity", ""): each.get("caption", "") for each in journal.read()}
    known = {identity: text for identity, text in found.items() if not _problem(text)}
    before, failed = clips.captions(), list[Rejection]()
    # By identity instead of row: clips may be added to the catalog before a command is repeated.
    identities = [identity.hex() for identity in clips.identities.to_pylist()]
    wanted = [row for row, text in enumerate(before) if every or not text]
    written = {row: known[identities[row]] for row in wanted if identities[row] in known}
    if rows := [row for row in wanted if row not in written]:
        # No more workers than clips: starting one takes seconds.
        count = min(work.workers or process.num_cores(), len(rows))
        with (
            journal,
            decode_worker.DecodePool(
                count, _SILENCE_SECONDS, memory_gib=work.limits.memory_gib
            ) as pool,
        ):
            ahead = batch_size + _AHEAD * count
            decoded = _decoded(clips, rows, choice, pool, ahead, failed)
            while batch := tuple(islice(decoded, batch_size)):
                texts = _ask(captioner, name, batch)
                for each, text in zip(batch, texts, strict=True):
                    if problem := _problem(text):
                        failed.append(Rejection(each.clip.path, f"its caption {problem}"))
                    else:
                        written[each.row] = text
                        journal.add({"identity": each.clip.identity, "caption": text})
                work.progress(len(written) + len(failed), len(wanted))
    return Captioned(_captioned(clips, before, written), len(written), tuple(failed))


def _journal_name(out: Path, digest: str) -> str:
    return f".{out.name}.captions.journal-{digest}"


@dataclass(frozen=True)
class _Decoded:
    row: int
    clip: Clip
    frames: NDArray[np.uint8] = field(repr=False)  # [F, H, W, 3]


def _decoded(
    clips: Catalog,
    rows: Iterable[int],
    choice: FrameChoice,
    pool: decode_worker.DecodePool,
    ahead: int,
    failed: list[Rejection],
) -> Iterator[_Decoded]:
    """Decode clips in the order of `rows` and yield them, `ahead` clips in advance.

    A clip that cannot be decoded is added to `failed` instead.
    """
    left, waiting = iter(rows), list[tuple[int, Clip, Any]]()
    while True:
        for row in islice(left, ahead - len(waiting)):
            clip = clips.clip(row)
            waiting.append((row, clip, pool.submit(chosen_frames(clip, choice))))
        if not waiting:
            return
        row, clip, future = waiting.pop(0)
        try:
            # Captioners expect pictures [H, W, 3], as Pillow and processors of models do.
            frames = np.ascontiguousarray(future.result().transpose(1, 2, 3, 0))
        except errors.ClipError as error:
            failed.append(Rejection(str(error.path), error.reason))
        else:
            yield _Decoded(row, clip, frames)


def chosen_frames(clip: Clip, choice: FrameChoice) -> window.Window:
    """Return a window of evenly spaced frames of a clip, uncut, scaled down to `choice.side`."""
    count = min(choice.num_frames, clip.num_frames)
    # The middle of each part, so that a cut at the ends has little influence.
    frames = tuple((2 * number + 1) * clip.num_frames // (2 * count) for number in range(count))
    scale = min(1.0, choice.side / max(clip.height, clip.width))
    height, width = (max(1, round(side * scale)) for side in (clip.height, clip.width))
    return buckets.window_of(clip, frames, window.Crop(height, width, 0, 0), height, width)


def _ask(captioner: Captioner, name: str, batch: Sequence[_Decoded]) -> list[str]:
    """Call the user's captioner for a batch of clips, and return its captions, stripped."""
    first = batch[0].clip
    where = f"for {first.path} ({first.identity})"
    if len(batch) > 1:
        where = f"for {len(batch)} clips, the first of them {first.path} ({first.identity})"
    texts: Any
    try:
        texts = captioner.captions([each.frames for each in batch], [each.clip for each in batch])
    except Exception as error:  # a user's class can fail in any way
        raise errors.DataError(
            f"{name} raised {type(error).__name__} {where}: {error}. Correct it, or with too "
            "little memory lower --batch-size; the same command resumes from what is finished."
        ) from error
    if isinstance(texts, str) or not isinstance(texts, Sequence) or len(texts) != len(batch):
        raise errors.DataError(
            f"{name} returned {texts!r:.200} {where}; expected a list of {len(batch)} captions."
        )
    stripped = []
    for each, text in zip(batch, texts, strict=True):
        if not isinstance(text, str):
            raise errors.DataError(
                f"{name} returned {text!r:.80} as the caption of {each.clip.path} "
                f"({each.clip.identity}); expected a str."
            )
        stripped.append(text.strip())
    return stripped


def _problem(text: str) -> str:
    """Return the reason why a text cannot be a caption, or "" if it can."""
    if not text.strip():
        return "is empty"
    if (shown := formatting.printable(text)) != text:
        return f"has control characters; expected one line of text: {shown:.200}"
    return ""


def _captioned(clips: Catalog, before: Sequence[str], written: Mapping[int, str]) -> Catalog:
    """Return the catalog with the captions that a model wrote, by row.

    Scores of clips whose caption has changed are dropped.
    """
    texts = [written.get(row, text) for row, text in enumerate(before)]
    place = clips.table.column_names.index("caption")
    table = clips.table.set_column(place, "caption", pa.array(texts, pa.string()))
    found = Catalog(table, clips.set_aside)
    is_changed = np.array([new != old for new, old in zip(texts, before, strict=True)], bool)
    # Captions that a model wrote in earlier calls keep their mark.
    by_model = np.zeros(len(clips))
    if CAPTIONED in clips.attribute_names:
        by_model = np.nan_to_num(clips.column(CAPTIONED))
    by_model[list(written)] = 1
    # Scores of the old text would be wrong for the new one.
    for name in set(OF_CAPTIONS) & set(clips.attribute_names):
        found = found.with_attribute(name, np.where(is_changed, np.nan, clips.column(name)))
    return found.with_attribute(CAPTIONED, by_model) if len(written) else found


def write_lines(clips: Catalog, path: Path) -> None:
    """Write all captions as JSON lines that `index` reads, so that a user can correct them.

    Raises:
        DataError: the file cannot be written.
    """
    lines = (
        json.dumps({"video": clip.path, "caption": clip.caption}, ensure_ascii=False)
        for clip in clips.clips()
        if clip.caption
    )
    try:
        with fsio.atomic_write(path) as aside:
            aside.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    except OSError as error:
        raise errors.DataError(
            f"{path} cannot be written: {error.strerror or error}. Name another file."
        ) from error
