"""A list of any number of media (files to index) in a temporary database on disk, sorted.

The database is SQLite's own temporary file (in SQLITE_TMPDIR or TMPDIR), of some hundred bytes for
each item. It has no name, so it disappears when the process ends.
"""

import json
import sqlite3
from collections.abc import Callable, Iterable, Iterator
from itertools import groupby
from operator import itemgetter
from typing import Any

from longtake.data.clip import Item, Media
from longtake.errors import DataError

_CACHE_KIB = 64 * 1024  # pages in memory, and as much again while rows are sorted
_ROWS_IN_MEMORY = 4096
# Names are blobs: they need not be UTF-8, and SQLite compares blobs byte by byte, as
# `KnownFiles.join` does.
_COLUMNS = (
    "whole BLOB, name BLOB, path BLOB, member BLOB, offset INTEGER, num_bytes INTEGER, "
    "span_start REAL, span_end REAL, stamp INTEGER, caption TEXT, attributes TEXT, "
    "conditioning TEXT"
)
_WHOLE, _NAME, _ATTRIBUTES, _CONDITIONING = 0, 1, 10, 11
_Row = tuple[Any, ...]


def open_scratch(*tables: str) -> sqlite3.Connection:
    """Return a new database with these tables in a nameless temporary file."""
    # An empty name makes SQLite create a temporary file and delete it at once.
    database = sqlite3.connect("", isolation_level=None, check_same_thread=False)
    for statement in (
        f"PRAGMA cache_size = -{_CACHE_KIB}",
        "PRAGMA journal_mode = OFF",
        "PRAGMA synchronous = OFF",
        *(f"CREATE TABLE {table}" for table in tables),
        "BEGIN",  # never committed: nothing must survive a crash
    ):
        database.execute(statement)
    return database


def as_bytes(name: str) -> bytes:
    return name.encode("utf-8", "surrogatepass")  # a file's name need not be UTF-8


def as_name(data: bytes) -> str:
    return data.decode("utf-8", "surrogatepass")


class MediaList:
    """Videos and images to index, on disk: added in any order, then sorted by `settle`."""

    def __init__(self) -> None:
        self._database = open_scratch(f"mentions ({_COLUMNS})", f"items ({_COLUMNS})")
        self._num_items = self.num_files = 0
        self.attribute_names = set[str]()

    def __len__(self) -> int:
        return self._num_items

    def add(self, items: Iterable[Item]) -> None:
        self._insert("mentions", map(_row_of, items))

    def settle(self) -> None:
        """Sort the added media by file and span, and join all mentions of a video or image.

        Raises:
            DataError: a video or image has two captions.
        """
        # Sorting by rowid last keeps the order of the sources: `_joined` prefers later ones.
        mentions = self._database.execute("SELECT * FROM mentions ORDER BY whole, name, rowid")
        self._insert("items", self._merged(mentions))
        self._database.execute("DROP TABLE mentions")

    def _merged(self, mentions: Iterable[_Row]) -> Iterator[_Row]:
        last = None
        for _, same in groupby(mentions, itemgetter(_NAME)):
            row = _joined(list(same))
            self._num_items += 1
            self.num_files += row[_WHOLE] != last
            last = row[_WHOLE]
            if row[_ATTRIBUTES]:
                self.attribute_names |= json.loads(row[_ATTRIBUTES]).keys()
            yield row

    def caption(self, text_of: Callable[[Media], str], *, every: bool) -> None:
        """Set the caption of every video and image, or only of those that have none."""
        # Pages by rowid: a cursor that is open while its table changes would be undefined.
        rowid, where = 0, "" if every else "AND caption IS NULL"
        query = f"SELECT rowid, * FROM items WHERE rowid > ? {where} LIMIT {_ROWS_IN_MEMORY}"  # noqa: S608 - of constants
        while rows := self._database.execute(query, (rowid,)).fetchall():
            texts = ((text_of(_item_of(row[1:]).media), row[0]) for row in rows)
            self._database.executemany("UPDATE items SET caption = ? WHERE rowid = ?", texts)
            rowid = rows[-1][0]

    def __iter__(self) -> Iterator[Item]:
        # `settle` inserted the rows in sorted order, so that reading them needs no sorting.
        return map(_item_of, self._database.execute("SELECT * FROM items ORDER BY rowid"))

    def by_file(self) -> Iterator[list[Item]]:
        """Yield for each file the list of its items: the file itself, and spans (scenes) of it."""
        rows = self._database.execute("SELECT * FROM items ORDER BY rowid")
        for _, same in groupby(rows, itemgetter(_WHOLE)):
            yield [_item_of(row) for row in same]

    def _insert(self, table: str, rows: Iterable[_Row]) -> None:
        places = ", ".join("?" * (_CONDITIONING + 1))
        self._database.executemany(f"INSERT INTO {table} VALUES ({places})", rows)  # noqa: S608

    def close(self) -> None:
        self._database.close()

    __del__ = close


def _row_of(item: Item) -> _Row:
    media = item.media
    start, end = media.span or (None, None)
    return (
        as_bytes(str(media.whole)),
        as_bytes(str(media)),
        as_bytes(media.path),
        as_bytes(media.member),
        media.offset,
        media.num_bytes,
        start,
        end,
        media.stamp,
        item.caption,
        json.dumps(dict(item.attributes)) if item.attributes else None,
        json.dumps(dict(item.conditioning)) if item.conditioning else None,
    )


def _item_of(row: _Row) -> Item:
    _, _, path, member, offset, num_bytes, start, end, stamp, caption, attributes, given = row
    span = None if start is None else (start, end)
    media = Media(as_name(path), as_name(member), offset, num_bytes, span, stamp)
    if attributes is None and given is None:
        return Item(media, caption)
    conditioning = {
        name: each if isinstance(each, str) else tuple(each)
        for name, each in json.loads(given or "{}").items()
    }
    return Item(media, caption, json.loads(attributes or "{}"), conditioning)


def _joined(mentions: list[_Row]) -> _Row:
    """Merge several mentions of one video or image in the sources into a single row."""
    if len(mentions) == 1:
        return mentions[0]
    items = [_item_of(row) for row in mentions]
    captions = list(dict.fromkeys(item.caption for item in items if item.caption is not None))
    if len(captions) > 1:
        raise DataError(
            f"{items[0].media} has two captions: {captions[0]!r:.200} and {captions[1]!r:.200}. "
            "A clip has one caption; correct one of the sources."
        )
    # If two sources give a score, the value of the later source counts.
    attributes = {name: value for item in items for name, value in item.attributes.items()}
    conditioning = {name: value for item in items for name, value in item.conditioning.items()}
    return _row_of(Item(items[-1].media, next(iter(captions), None), attributes, conditioning))
