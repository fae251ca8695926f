"""Finds the caption of every clip: in a JSONL that names the clips, or in a file beside each."""

import codecs
import json
import os
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from longtake.data.indexing.listing import PATH_COLUMNS
from longtake.errors import DataError
from longtake.fsio import read_regular

SIDECAR = "sidecar"

# What a line raises that is not as it should be.
_NO_CAPTION = (
    *(ValueError, LookupError, TypeError, AttributeError),
    *(RecursionError, StopIteration),
)


class _CaptionLine(NamedTuple):
    number: int
    video: str
    caption: str


def read_captions(
    captions: Path | None, folders: Sequence[Path], videos: Sequence[Path]
) -> tuple[dict[Path, str], list[str]]:
    """Return the caption of each video that has one, and the names that fit no video.

    Args:
        captions: JSONL with one `{"video": path, "caption": text}` per line, where a path is
            relative to the JSONL's folder or to one of `folders`, or else a file name that is
            there only once; instead of `video` it may say `image`, `path` or `file`. None:
            `captions.jsonl` in each folder, and `clip.txt` next to `clip.mp4` for videos that it
            does not name. `sidecar`: only `clip.txt` next to `clip.mp4`.
        folders: absolute paths of the folders that were searched.
        videos: absolute paths of the video files.

    Raises:
        DataError: a file cannot be read, a line is malformed, or a video has two captions.
    """
    texts: dict[Path, str] = {}
    unmatched: list[str] = []
    for table in _tables(captions, folders):
        found, left = _match(table, _read_jsonl(table), folders, videos)
        texts.update(found)
        unmatched.extend(left)
    if captions is None or is_sidecar(captions):
        texts = {video: _sidecar(video) for video in videos} | texts
    return texts, unmatched


def is_sidecar(captions: Path) -> bool:
    return str(captions) == SIDECAR


def _tables(captions: Path | None, folders: Sequence[Path]) -> list[Path]:
    if captions is not None:
        return [] if is_sidecar(captions) else [captions]
    named = dict.fromkeys(folder / "captions.jsonl" for folder in folders)
    return [table for table in named if table.is_file()]


def _match(
    table: Path, lines: Iterable[_CaptionLine], folders: Sequence[Path], videos: Sequence[Path]
) -> tuple[dict[Path, str], list[str]]:
    """Give each line its video: by path, or else by a file name that is there only once."""
    roots = [table.parent.resolve(), *folders]
    by_name: dict[str, list[Path]] = defaultdict(list)
    for video in videos:
        by_name[video.name].append(video)
    known = set(videos)
    exact: dict[Path, _CaptionLine] = {}
    inexact: list[_CaptionLine] = []
    for line in lines:
        places = [Path(os.path.normpath(root / line.video)) for root in roots]
        target = next((place for place in places if place in known), None)
        if target is None:
            inexact.append(line)
        else:
            _assign(exact, target, line, table)
    named: dict[Path, _CaptionLine] = {}
    unmatched = []
    for line in inexact:
        same_name = by_name.get(Path(line.video).name, [])
        if len(same_name) == 1 and same_name[0] not in exact:
            _assign(named, same_name[0], line, table)
        else:
            unmatched.append(line.video)
    return {video: line.caption for video, line in (exact | named).items()}, unmatched


def _assign(taken: dict[Path, _CaptionLine], video: Path, line: _CaptionLine, table: Path) -> None:
    first = taken.setdefault(video, line)
    if first.caption != line.caption:
        raise DataError(
            f"{table}, line {line.number}: {video} has another caption in line {first.number}. "
            "A clip has one caption; remove one of the two lines."
        )


def _read_jsonl(path: Path) -> list[_CaptionLine]:
    if path.suffix.lower() in (".csv", ".parquet"):
        raise DataError(
            f"--captions {path}: captions are read from JSON lines. A table of paths and captions "
            f"is given as a source: longtake data index {path} --out clips.parquet."
        )
    lines = []
    for number, line in enumerate(_read_text(path).split("\n"), start=1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
            key = next(name for name in PATH_COLUMNS if name in entry)
            video, caption = entry[key], entry["caption"].strip()
            f"{video}{caption}".encode()  # half of a surrogate pair is no text
            lines.append(_CaptionLine(number, os.fspath(video), caption))
        except _NO_CAPTION as error:
            if '"file_name"' in line:
                raise DataError(
                    f"{path}, line {number} has Hugging Face's keys: {line.strip()[:80]!r}. "
                    'Expected are "video" and "caption". Rename them: '
                    f"""sed 's/"file_name":/"video":/; s/"text":/"caption":/' {path} > """
                    f"{path.with_name('captions.jsonl')}"
                ) from error
            raise DataError(
                f"{path}, line {number} is no caption: {line.strip()[:80]!r}. Expected one object "
                'on each line: {"video": "clip.mp4", "caption": "what it shows"}.'
            ) from error
    return lines


def _sidecar(video: Path) -> str:
    path = video.with_suffix(".txt")
    try:
        return _read_text(path).strip() if path.is_file() else ""
    except OSError:  # a name that is too long with this ending
        return ""


def _read_text(path: Path) -> str:
    try:
        return read_regular(path).removeprefix(codecs.BOM_UTF8).decode()
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 text: {error}. Save it as UTF-8.") from error
    except OSError as error:
        raise DataError(f"The captions {path} cannot be read: {error.strerror}.") from error
