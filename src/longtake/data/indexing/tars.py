"""Reads WebDataset tars in place: where each member's bytes lie, and what its sample says of it.

Members with the same key (the name up to the first dot of its last part) are one sample. Every
video and image of it is a clip, captioned by the sample's .txt, or by `caption` or `text` of its
.json, whose other finite numbers become attributes. Nothing is ever unpacked.
"""

import codecs
import tarfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Self

from pydantic import TypeAdapter

from longtake.data.clip import Media
from longtake.data.indexing.item import Item, is_media
from longtake.data.indexing.listing import CAPTION_COLUMNS, MAX_ATTRIBUTES, MEASURED, score_of
from longtake.errors import ClipError, RecordError
from longtake.fsio import open_regular, parse_record

_MAX_TEXT_BYTES = 2**20  # of a caption, a .json, or a header that names a member
_ANY = TypeAdapter[Any](Any)
_END_BYTES = 2**20  # what a tar may be padded with after its last member


def read_tar(path: Path) -> list[Item]:
    """Return the media of a tar, in the order in which they lie.

    Raises:
        ClipError: it is no uncompressed tar, is cut short or damaged, or holds no media.
    """
    try:
        members = _members(path)
        texts, entries = _beside(path, members)
    except RecordError as error:
        reason = f"{error.path}: {error.reason}"
        raise ClipError(path, f"not a readable tar: {reason}") from error
    except RecursionError as error:
        raise ClipError(path, "not a readable tar: too many headers for one member") from error
    except (OSError, tarfile.TarError, LookupError, ValueError) as error:
        said = getattr(error, "strerror", None) or error
        raise ClipError(path, f"not a readable tar: {said}") from error
    media = [member for member in members if is_media(member.name)]
    if not media:
        raise ClipError(path, f"no video or image among its {len(members)} members")
    items = [_item(path, member, texts, entries) for member in media]
    names = {name for item in items for name in item.attributes}
    if len(names) > MAX_ATTRIBUTES:
        raise ClipError(
            path, f"its .json files name {len(names):,} numbers; at most {MAX_ATTRIBUTES:,} can be"
        )
    return items


class _Member(tarfile.TarInfo):
    """A header with a possible size: tarfile reads as many bytes as it names, and seeks by it."""

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> Self:
        found = super().frombuf(buf, encoding, errors)
        if found.size < 0:
            raise tarfile.ReadError(f"a member of {found.size} bytes")
        if found.type in _HEADERS and found.size > _MAX_TEXT_BYTES:
            raise tarfile.ReadError(f"a header of {found.size:,} bytes")
        return found


_HEADERS = (
    tarfile.XHDTYPE,
    tarfile.XGLTYPE,
    tarfile.SOLARIS_XHDTYPE,
    tarfile.GNUTYPE_LONGNAME,
    tarfile.GNUTYPE_LONGLINK,
)


def _members(path: Path) -> list[tarfile.TarInfo]:
    with open_regular(path) as file, tarfile.open(fileobj=file, mode="r:", tarinfo=_Member) as tar:
        members, before = [], -1
        while (member := tar.next()) is not None:
            if tar.offset <= before:  # an extended header may name a negative size, too
                raise ValueError(f"the member after byte {before} does not end behind it")
            before = tar.offset
            if not _is_hidden(member.name):
                members.append(member)
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
    with open_regular(path) as file:
        for member in members:
            if is_media(member.name):
                continue
            if member.size > _MAX_TEXT_BYTES:
                raise ValueError(
                    f"{member.name} has {member.size:,} bytes; a text has at most "
                    f"{_MAX_TEXT_BYTES:,}"
                )
            file.seek(member.offset_data)
            data = file.read(member.size).removeprefix(codecs.BOM_UTF8)
            if member.name.endswith(".txt"):
                texts[_key(member.name)] = data.decode().strip()
            elif isinstance(entry := parse_record(data, _ANY, Path(member.name)), dict):
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
    values = ((name, score_of(value)) for name, value in entry.items() if name not in MEASURED)
    numbers = {name: value for name, value in values if value is not None}
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
