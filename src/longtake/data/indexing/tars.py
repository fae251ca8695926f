"""Reads WebDataset tars in place: where each member's bytes lie, and what its sample says of it.

Members with the same key (the name up to the first dot of its last part) are one sample. Every
video and image of it is a clip, captioned by the sample's .txt, or by `caption` or `text` of its
.json, whose other numbers become attributes. Nothing is ever unpacked.
"""

import json
import tarfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from longtake.data.clip import Media
from longtake.data.indexing.item import Item, is_media
from longtake.data.indexing.listing import CAPTION_COLUMNS, MEASURED
from longtake.errors import ClipError

_END_BYTES = 2**20  # what a tar may be padded with after its last member


def read_tar(path: Path) -> list[Item]:
    """Return the media of a tar, in the order in which they lie.

    Raises:
        ClipError: it is no uncompressed tar, is cut short or damaged, or holds no media.
    """
    try:
        members = _members(path)
        texts, entries = _beside(path, members)
    except (OSError, tarfile.TarError, ValueError) as error:
        raise ClipError(path, f"not a readable tar: {error}") from error
    media = [member for member in members if is_media(member.name)]
    if not media:
        raise ClipError(path, f"no video or image among its {len(members)} members")
    return [_item(path, member, texts, entries) for member in media]


def _members(path: Path) -> list[tarfile.TarInfo]:
    with path.open("rb") as file, tarfile.open(fileobj=file, mode="r:") as tar:
        members = [member for member in tar if not _is_hidden(member.name)]
        end = tar.offset
        file.seek(end)
        padding = file.read(_END_BYTES)
    if not padding:
        raise ValueError("it ends without an end marker, so it is cut short")
    if padding.strip(b"\0"):
        raise ValueError(f"damaged at byte {end}, or several tars in one file")
    wanted = [member for member in members if _is_wanted(member.name)]
    for member in wanted:
        if not member.isreg() or member.issparse():
            raise ValueError(f"{member.name} is not a plain file")
    if len({member.name for member in wanted}) < len(wanted):
        raise ValueError("two members have the same name")
    return wanted


def _beside(
    path: Path, members: Iterable[tarfile.TarInfo]
) -> tuple[dict[str, str], dict[str, dict[str, Any]]]:
    """Return the contents of all .txt, and of all .json that are objects, by key."""
    texts, entries = {}, {}
    with path.open("rb") as file:
        for member in members:
            if is_media(member.name):
                continue
            file.seek(member.offset_data)
            text = file.read(member.size).decode("utf-8-sig")
            if member.name.endswith(".txt"):
                texts[_key(member.name)] = text.strip()
            elif isinstance(entry := json.loads(text), dict):
                entries[_key(member.name)] = entry
    return texts, entries


def _item(
    path: Path,
    member: tarfile.TarInfo,
    texts: Mapping[str, str],
    entries: Mapping[str, dict[str, Any]],
) -> Item:
    key = _key(member.name)
    entry = entries.get(key, {})
    captions = [texts.get(key), *(entry.get(name) for name in CAPTION_COLUMNS)]
    numbers = {
        name: float(value)
        for name, value in entry.items()
        if isinstance(value, int | float) and name not in MEASURED
    }
    return Item(
        Media(str(path), member.name, member.offset_data, member.size),
        next((text.strip() for text in captions if isinstance(text, str)), None),
        numbers,
    )


def _is_wanted(name: str) -> bool:
    return is_media(name) or name.endswith((".txt", ".json"))


def _is_hidden(name: str) -> bool:
    return any(part.startswith(".") for part in Path(name).parts)


def _key(name: str) -> str:
    folder, _, last = name.rpartition("/")
    return f"{folder}/{last.split('.')[0]}"
