"""Finds media and their captions in folders, object stores and WebDataset tars.

Hidden names are ignored, and links to folders are not followed. Tars are read in place.
"""

import io
import os
import re
import stat
import tarfile
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import Any, Self

from longtake import fsio
from longtake.data import caption_files, stores, tables, text_files
from longtake.data.catalog import Rejection
from longtake.data.clip import MEDIA_SUFFIXES, Given, Item, Media, is_media
from longtake.data.media_list import MediaList
from longtake.errors import ClipError, DataError, RecordError

_TAR = ".tar"
_BESIDE = (*tables.LISTING_SUFFIXES, ".caption")  # kept beside clips: captions and tables
_CLASS_FOLDER = re.compile(r"([1-9]\d{0,5})_(.+)")
_METADATA = ("metadata.csv", "metadata.jsonl", "metadata.parquet")
"""Names of tables that Hugging Face's imagefolder and videofolder read; they have the column
`file_name`."""
_TABLES = (*_METADATA, "captions.jsonl")  # tables that are read when a store has them
_MAX_TEXT_BYTES = 2**20  # size of a caption, a .json, or a header that names a member
_END_BYTES = 2**20  # padding after the last member of a tar


@dataclass
class FoundMedia:
    """Videos and images that were found in the sources to index, and everything left out."""

    items: MediaList = field(default_factory=MediaList)  # sorted, without duplicates
    # Absolute paths of the searched folders, and of the folders of named files.
    folders: list[Path] = field(default_factory=list)
    refused: list[ClipError] = field(default_factory=list)  # tars that cannot be read
    # Number of files in the searched folders by unknown ending.
    passed_over: Counter[str] = field(default_factory=Counter)
    unreadable: list[ClipError] = field(default_factory=list)  # folders that cannot be searched
    notes: list[str] = field(default_factory=list)  # about what may be captions and is not read


def find(
    sources: Sequence[Path], conditioning: Sequence[str] = (), extracted: Path | None = None
) -> FoundMedia:
    """Find the videos and images that sources name, with their captions and scores.

    Args:
        sources: folders, media files, lists, tables, tars and URLs.
        conditioning: columns of tables with paths or numbers of further inputs.
        extracted: folder to which media inside of tables are written.

    Raises:
        DataError: a source cannot be read, or nothing is found.
    """
    found, tars = FoundMedia(), set[Path]()

    def mentions(source: Path) -> Iterator[Item]:
        if (url := stores.url_of(source)) is not None:
            yield from _find_in_store(url, conditioning, found)
            return
        folder, is_named = _folder_of(source), not source.is_dir()
        found.folders.append(folder)
        files: Iterable[Path] = [folder / source.name] if is_named else _search(folder, found)
        for file in files:
            suffix = file.suffix.lower()
            if suffix == _TAR:
                tars.add(file)
            elif suffix in tables.LISTING_SUFFIXES:
                yield from tables.read_listing(
                    file, conditioning, extracted, is_named=is_named, notes=found.notes
                )
            else:
                yield Item(Media(str(file)))

    for source in sources:
        found.items.add(mentions(source))
    # Tars last: their members are read at once, and an unreadable one is only refused itself.
    for tar in sorted(tars):
        try:
            found.items.add(read_tar(tar, conditioning, found.notes))
        except ClipError as error:
            found.refused.append(error)
    found.items.settle()
    if not len(found.items) and not found.refused:
        where = ", ".join(str(source) for source in sources) or "no folder at all"
        raise DataError(
            f"No video or image was found. Looked in: {where}; for files that end in "
            f"{' '.join((*MEDIA_SUFFIXES, _TAR))}. Name a folder that holds some."
            + "".join(f" {each}" for each in describe_ignored(found.passed_over, found.unreadable))
        )
    _refuse_wrong_columns(found.items, conditioning)
    found.folders = list(dict.fromkeys(found.folders))
    return found


def _find_in_store(url: str, conditioning: Sequence[str], found: FoundMedia) -> Iterator[Item]:
    """Yield the media below a prefix of an object store, in its tars and tables, with captions."""
    objects = stores.find_objects(url)
    # One listing answers all questions about files beside clips: requests are slow.
    by_name = {str(each): each for each in objects}
    texts = _texts_in_store(by_name, found.refused)
    faulty = {error.path for error in found.refused}
    for media in objects:
        suffix = PurePath(media.path).suffix.lower()
        beside = _captions_beside(media, by_name, asks=media.path == url)
        if suffix == _TAR:
            try:
                yield from read_tar(media, conditioning, found.notes)
            except ClipError as error:
                found.refused.append(error)
        elif is_media(media.path):
            if str(media) not in faulty:
                yield Item(media, texts.get(str(media)))
        elif suffix in tables.LISTING_SUFFIXES and (
            media.path == url or PurePath(media.path).name in _TABLES or beside is not None
        ):
            # Fetched to files: a table is read twice, and Parquet from its end.
            with tempfile.TemporaryDirectory(prefix="longtake-") as folder:
                for each in filter(None, (media, beside)):
                    Path(folder, PurePath(each.path).name).write_bytes(stores.read_object(each))
                table = Path(folder, PurePath(media.path).name)
                yield from tables.read_listing(
                    table, conditioning, at=media.path, known=by_name, notes=found.notes
                )
        elif suffix not in _BESIDE:
            found.passed_over[suffix or "no ending"] += 1


def _captions_beside(
    listing: Media, objects: Mapping[str, Media], *, asks: bool = False
) -> Media | None:
    """Return the list of captions (one a line) that lies beside a list such as videos.txt, or None.

    With `asks` the store is asked, since a list that was named alone has no listing of its folder.
    """
    folder, _, name = listing.path.rpartition("/")
    if not tables.is_paired_list(name):
        return None
    places = [f"{folder}/{each}" for each in tables.CAPTION_LISTS]
    found = [objects.get(place) for place in places]
    if asks and not any(found):
        found = list(stores.measure([Media(place) for place in places]))
    return next(filter(None, found), None)


def _texts_in_store(objects: Mapping[str, Media], refused: list[ClipError]) -> dict[str, str]:
    """Read the captions of text files beside media in a store, by the media's URLs.

    Unreadable ones are added to `refused`.
    """
    beside = {
        name: objects[text]
        for name in objects
        if is_media(name)
        for text in (
            name.removesuffix(PurePath(name).suffix) + end
            # Reversed: the dictionary keeps the last text, that of the preferred ending.
            for end in caption_files.SIDECAR_SUFFIXES[::-1]
        )
        if text in objects
    }
    for name, media in beside.items():
        if (media.num_bytes or 0) > _MAX_TEXT_BYTES:
            raise DataError(f"{media}, the caption of {name}, has {media.num_bytes:,} bytes.")
    found = dict[str, str]()
    for name, content in zip(beside, stores.read_objects(beside.values()), strict=True):
        try:
            found[name] = text_files.decode_text(content, beside[name]).strip()
        except DataError as error:
            refused.append(ClipError(name, f"its caption: {error}"))
    return found


def _folder_of(source: Path) -> Path:
    why = "does not exist"
    try:
        mode = source.stat().st_mode
        if stat.S_ISDIR(mode):
            return source.resolve()
        if stat.S_ISREG(mode):
            return source.parent.resolve()  # the file may be a link: its name and folder count
        why = "is neither a file nor a folder"
    except (OSError, ValueError) as error:
        if not isinstance(error, FileNotFoundError):
            why = f"cannot be read: {getattr(error, 'strerror', None) or error}"
    raise DataError(
        f"{source} {why}. Name a folder of videos, video or image files, a list or a "
        "table of paths, or a tar."
    )


def _search(folder: Path, found: FoundMedia) -> Iterator[Path]:
    """Yield the paths of media, tars and tables in a folder and its subfolders.

    Ignored files are counted by ending in `found`.
    """
    # A list instead of recursion, because folders may be nested deeply.
    waiting = [folder]
    while waiting:
        parent = waiting.pop()
        try:
            with os.scandir(parent) as entries:
                for entry in entries:
                    name, suffix = entry.name, PurePath(entry.name).suffix.lower()
                    if name.startswith("."):
                        continue
                    if _is_folder(entry):
                        # A link to a folder above it would make the search endless.
                        if not entry.is_symlink():
                            waiting.append(parent / name)
                    elif (
                        is_media(name)
                        or suffix == _TAR
                        or name in _METADATA
                        or tables.captions_of_list(parent / name) is not None
                    ):
                        yield parent / name
                    elif suffix not in _BESIDE:
                        found.passed_over[suffix or "no ending"] += 1
        except OSError as error:
            found.unreadable.append(ClipError(str(parent), error.strerror or str(error)))


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a circle of links
        return False


def _refuse_wrong_columns(items: MediaList, columns: Sequence[str]) -> None:
    """Refuse tables with too many scores, or with a clip that lacks a conditioning input."""
    if (num_names := len(items.attribute_names)) > tables.MAX_ATTRIBUTES:
        raise DataError(
            f"The sources name {num_names:,} different numbers of clips, and a catalog has at "
            f"most {tables.MAX_ATTRIBUTES:,}. Remove the columns that no recipe selects by."
        )
    for column in columns:
        # Objects are asked for in parallel before the loop below, which would send one request
        # after another.
        gone = stores.missing_of(
            each
            for item in items
            if isinstance(each := item.conditioning.get(column), str) and "://" in each
        )
        num_lacking, shown, kinds = 0, list[str](), set[bool]()
        for item in items:
            each = item.conditioning.get(column)
            kinds.add(isinstance(each, str))
            is_gone = each in gone or (
                isinstance(each, str) and "://" not in each and not fsio.is_there(Path(each))
            )
            if each is None or is_gone:
                num_lacking += 1
                if len(shown) < tables.NUM_SHOWN:
                    shown.append(
                        f"{item.media} has none"
                        if each is None
                        else f"{each}, of {item.media}, does not exist"
                    )
        if num_lacking:
            raise DataError(
                f"--conditioning {column}: {num_lacking} of {len(items)} clips lack theirs:"
                f"{tables.first_of(shown, num_lacking)}\nAdd them to the table, or leave these "
                "clips out of it."
            )
        if len(kinds) > 1:
            raise DataError(
                f"--conditioning {column}: some clips have a path there and others numbers. Make "
                "two columns of it, or give all of them the same."
            )


def describe_ignored(
    passed_over: Mapping[str, int], unreadable: Sequence[ClipError | Rejection]
) -> list[str]:
    """Return sentences about files that were ignored for their ending, and unreadable folders."""
    sentences = []
    if passed_over:
        kinds = [f"{count} {ending}" for ending, count in Counter(passed_over).most_common(8)]
        more = f" and {len(passed_over) - 8} other endings" if len(passed_over) > 8 else ""
        total = sum(passed_over.values())
        files = "1 file has" if total == 1 else f"{total:,} files have"
        were = "was" if total == 1 else "were"
        sentences.append(f"{files} another ending and {were} left out: {', '.join(kinds)}{more}.")
    if unreadable:
        shown = ", ".join(f"{error.path} ({error.reason})" for error in unreadable[:3])
        more = f" and {len(unreadable) - 3} more" if len(unreadable) > 3 else ""
        folders = "1 folder" if len(unreadable) == 1 else f"{len(unreadable)} folders"
        sentences.append(f"{folders} cannot be read: {shown}{more}.")
    return sentences


@dataclass(frozen=True)
class ClassFolder:
    """A folder of pictures as Kohya's trainers name it, such as `10_sks dog`: repeats and class."""

    path: Path
    repeats: int
    label: str  # caption of pictures that have none
    name: str  # name for its catalog, different for all folders


def class_folders(root: Path) -> list[ClassFolder]:
    """Return the folders inside a folder that are named as `10_sks dog`, sorted by name.

    Raises:
        DataError: there is no such folder, or the folder cannot be read.
    """
    try:
        inside = sorted(each for each in root.iterdir() if each.is_dir())
    except OSError as error:
        raise DataError(f"The folder {root} cannot be read: {error.strerror}.") from error
    found: list[ClassFolder] = []
    for path in inside:
        parsed = _CLASS_FOLDER.fullmatch(path.name)
        if parsed is not None and (label := parsed[2].strip()):
            stem = re.sub(r"\W+", "_", label.lower()).strip("_") or "clips"
            # Folders whose labels give the same name are numbered.
            same = sum(re.sub(r"_\d+$", "", each.name) == stem for each in found)
            name = f"{stem}_{same + 1}" if same else stem
            found.append(ClassFolder(path, int(parsed[1]), label, name))
    if not found:
        shown = ", ".join(path.name for path in inside[:5]) or "none"
        raise DataError(
            f"{root} has no folder that is named like `10_sks dog` (repeats and class); its "
            f"folders: {shown}. Index it without --kohya, or rename them."
        )
    return found


def read_tar(
    tar: Path | Media, conditioning: Sequence[str] = (), notes: list[str] | None = None
) -> list[Item]:
    """Return the videos and images in a tar, in its order.

    Members with the same key (the name up to the first dot of its last part) are one sample: its
    videos and images are captioned by its .txt, or by `caption`, `text` ... of its .json.
    If no clip has a caption, `notes` gets a sentence about other texts in the .json files.

    Raises:
        ClipError: the tar is damaged, cut short, or has no media.
    """
    whole = tar if isinstance(tar, Media) else Media(str(tar))
    path = whole.path
    try:
        members = _members(whole)
        texts, entries = _beside(whole, members)
    except RecordError as error:
        reason = f"{error.path}: {error.reason}"
        raise ClipError(path, f"not a readable tar: {reason}") from error
    except RecursionError as error:
        raise ClipError(path, "not a readable tar: too many headers for one member") from error
    except (OSError, tarfile.TarError, LookupError, ValueError, DataError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ClipError(path, f"not a readable tar: {reason}") from error
    media = [member for member in members if is_media(member.name)]
    if not media:
        raise ClipError(path, f"no video or image among its {len(members)} members")
    items = [_item(whole, member, texts, entries, conditioning) for member in media]
    texts_in = {
        name: None
        for entry in entries.values()
        for name, value in entry.items()
        if isinstance(value, str) and name not in (*conditioning, *tables.MEASURED)
    }
    if notes is not None and texts_in and all(item.caption is None for item in items):
        notes.append(f"{path} has no captions; {tables.name_unread(list(texts_in))}")
    names = {name for item in items for name in item.attributes}
    if len(names) > tables.MAX_ATTRIBUTES:
        raise ClipError(
            path,
            f"its .json files name {len(names):,} numbers; at most {tables.MAX_ATTRIBUTES:,} "
            "can be",
        )
    return items


class _Member(tarfile.TarInfo):
    """Header of a tar member, with a check of its size, because tarfile reads and seeks by it."""

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


def _open_tar(tar: Media) -> io.BufferedReader:
    return stores.open_object(tar) if tar.is_remote else fsio.open_regular(Path(tar.path))


def _members(path: Media) -> list[tarfile.TarInfo]:
    with (
        _open_tar(path) as file,
        # Mode "r:" refuses compressed tars: their members could not be read by offset.
        tarfile.open(fileobj=file, mode="r:", tarinfo=_Member) as tar,
    ):
        members, before = [], -1
        while (member := tar.next()) is not None:
            if tar.offset <= before:  # an extended header can give a negative size, too
                raise ValueError(f"the member after byte {before} does not end behind it")
            before = tar.offset
            # Hidden members are left out as hidden files are: tar on macOS adds a `._name` for each
            # file.
            if not any(part.startswith(".") for part in Path(member.name).parts):
                members.append(member)
        end = tar.offset
        file.seek(end)
        padding = file.read(_END_BYTES)
    # A complete tar ends with zeros; tarfile itself accepts a file that was cut between members.
    if not padding:
        raise ValueError("it ends without an end marker, so it is cut short")
    if padding.strip(b"\0"):
        raise ValueError(f"damaged at byte {end}, or several tars in one file")
    # Other members may be anything; those that are read must be plain files.
    wanted = [
        each for each in members if is_media(each.name) or each.name.endswith((".txt", ".json"))
    ]
    for member in wanted:
        if not member.isreg() or member.issparse():
            raise ValueError(f"{member.name} is not a plain file")
    # A catalog names a member by its name, so each name may occur once.
    if len({member.name for member in wanted}) < len(wanted):
        raise ValueError("two members have the same name")
    return wanted


def _beside(
    path: Media, members: Iterable[tarfile.TarInfo]
) -> tuple[dict[str, str], dict[str, dict[str, Any]]]:
    """Read the captions (.txt) and entries (.json) beside a tar's media, by the sample's key."""
    texts, entries = {}, {}
    with _open_tar(path) as file:
        for member in members:
            if is_media(member.name):
                continue
            if member.size > _MAX_TEXT_BYTES:
                raise ValueError(
                    f"{member.name} has {member.size:,} bytes; a text has at most "
                    f"{_MAX_TEXT_BYTES:,}"
                )
            file.seek(member.offset_data)
            text = text_files.decode_text(file.read(member.size), member.name)
            if member.name.endswith(".txt"):
                texts[_key(member.name)] = text.strip()
            elif isinstance(
                entry := fsio.parse_record(text.encode(), tables.ANY_JSON, Path(member.name)), dict
            ):
                entries[_key(member.name)] = entry
    return texts, entries


def _item(
    tar: Media,
    member: tarfile.TarInfo,
    texts: Mapping[str, str],
    entries: Mapping[str, dict[str, Any]],
    conditioning: Sequence[str],
) -> Item:
    key = _key(member.name)
    entry = entries.get(key, {})
    of_entry = (tables.caption_of(name, entry.get(name)) for name in tables.CAPTION_COLUMNS)
    captions = [texts.get(key), *of_entry]
    values = (
        (name, tables.score_of(value))
        for name, value in entry.items()
        if name not in tables.MEASURED
    )
    numbers = {name: value for name, value in values if value is not None}
    at = tar.path if tar.is_remote else ""

    def further(name: str) -> Given | None:
        return tables.further_input(Path(tar.path), 0, name, entry.get(name), at)

    return Item(
        Media(tar.path, member.name, member.offset_data, member.size, stamp=tar.stamp),
        next((text.strip() for text in captions if isinstance(text, str)), None),
        numbers,
        {name: given for name in conditioning if (given := further(name)) is not None},
    )


def _key(name: str) -> str:
    """Return the key of a WebDataset sample: the name up to the first dot of its last part."""
    folder, _, last = name.rpartition("/")
    return f"{folder}/{last.split('.')[0]}"
