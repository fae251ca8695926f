"""The catalog: one table of all clips that can be trained on, and of the files that cannot.

`longtake.data.index` writes it; training only reads it. It is one Parquet file: the clips sorted
by identity, then, with a `reason`, what was set aside (rejected files and further copies). Paths
below the catalog's folder are stored relative to it, so a folder of clips with its catalog inside
can be moved or copied. Columns stay columns: no Python object is made for each clip, and a large
table is mapped from disk, so that all processes of a machine read it from the same memory.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from longtake.data.clip import Clip
from longtake.data.table import (
    ASIDE_SCHEMA,
    ATTRIBUTE,
    CLIP_SCHEMA,
    FINGERPRINT_KEY,
    ROWS_PER_GROUP,
    SCHEMA_VERSION,
    VERSION_KEY,
    check_values,
    clip_of,
    fingerprint_of,
    is_ascending,
    one_array,
    read,
    relative,
    row_of,
    version_of,
    with_attributes,
)
from longtake.errors import DataError
from longtake.fsio import atomic_write, is_missing, open_regular

_HOW: Final[dict[str, Any]] = {
    "row_group_size": ROWS_PER_GROUP,
    "compression": "zstd",
    "write_page_checksum": True,
}


@dataclass(frozen=True)
class Rejection:
    path: str
    reason: str


@dataclass(frozen=True)
class Duplicate:
    path: str
    identity: str


@dataclass(frozen=True)
class Stamp:
    """What tells without reading that a file is still the same."""

    num_bytes: int
    mtime_ns: int


@dataclass(frozen=True)
class Catalog:
    """All clips, sorted by identity and each there once, and what was set aside.

    Attributes:
        table: one row a clip, with the fields of `longtake.data.clip.Clip` as columns; `media`
            and `timing` are laid out flat, and each attribute is a column `attributes.<name>`.
        set_aside: one row for each rejected file and each further copy of a clip.
        stored_fingerprint: of this table, where it is known already.
    """

    table: pa.Table
    set_aside: pa.Table
    stored_fingerprint: str | None = field(default=None, compare=False, repr=False)

    def __len__(self) -> int:
        return int(self.table.num_rows)

    @classmethod
    def of(
        cls,
        clips: Iterable[Clip],
        rejected: Iterable[Rejection] = (),
        duplicates: Iterable[Duplicate] = (),
        stamps: Mapping[str, Stamp] | None = None,
    ) -> "Catalog":
        """Make a catalog of clips, in whatever order; no two have the same identity.

        Args:
            clips: what can be trained on.
            rejected: what cannot.
            duplicates: further copies of clips.
            stamps: by `str(media)`, of the files that the entries were found in.
        """
        ordered = sorted(clips, key=lambda clip: clip.identity)
        names = sorted({name for clip in ordered for name in clip.attributes})
        known = stamps or {}
        rows = [row_of(clip, names) | _stamp_row(known.get(clip.path)) for clip in ordered]
        aside = [*map(_rejection_row, rejected), *map(_duplicate_row, duplicates)]
        aside = [row | _stamp_row(known.get(row["path"])) for row in aside]
        catalog = cls(
            pa.Table.from_pylist(rows, schema=with_attributes(CLIP_SCHEMA, names)),
            pa.Table.from_pylist(aside, schema=ASIDE_SCHEMA),
        )
        assert is_ascending(catalog.identities), "no two clips have the same identity"
        return catalog

    @cached_property
    def rejected(self) -> tuple[Rejection, ...]:
        table = self.set_aside.filter(pc.is_null(self.set_aside["identity"]))
        return tuple(Rejection(**row) for row in table.select(["path", "reason"]).to_pylist())

    @cached_property
    def duplicates(self) -> tuple[Duplicate, ...]:
        table = self.set_aside.filter(pc.is_valid(self.set_aside["identity"]))
        rows = table.select(["path", "identity"]).to_pylist()
        return tuple(Duplicate(row["path"], row["identity"].hex()) for row in rows)

    def clip(self, row: int) -> Clip:
        return clip_of(self.table.slice(row, 1).to_pylist()[0], self.attribute_names)

    def clips(self) -> Iterator[Clip]:
        for batch in self.table.to_batches(max_chunksize=4096):
            for row in batch.to_pylist():
                yield clip_of(row, self.attribute_names)

    def column(self, name: str) -> NDArray[Any]:
        """One column as [N]: of the clips' fields, or an attribute by its bare name.

        Attributes are float64, NaN where unknown.

        Raises:
            DataError: there is no such column.
        """
        full = name if name in CLIP_SCHEMA.names else ATTRIBUTE + name
        if full not in self.table.column_names:
            known = ", ".join(self.attribute_names) or "none"
            raise DataError(
                f"The catalog has no attribute {name!r}; it has: {known}. "
                "Run `longtake data score` to add one."
            )
        values: NDArray[Any] = self.table[full].to_numpy()
        return values

    def captions(self) -> list[str]:
        """All captions; empty where none is known."""
        texts: list[str] = self.table["caption"].to_pylist()
        return texts

    @cached_property
    def identities(self) -> pa.Array:
        """[N] the clips' identities as 16 bytes each, ascending."""
        return one_array(self.table["identity"])

    @cached_property
    def attribute_names(self) -> tuple[str, ...]:
        names = (name for name in self.table.column_names if name.startswith(ATTRIBUTE))
        return tuple(name.removeprefix(ATTRIBUTE) for name in names)

    def with_attribute(self, name: str, values: NDArray[np.float64]) -> "Catalog":
        """Add one score for each clip, or replace it; NaN where it is unknown."""
        assert values.shape == (len(self),)
        column = pa.array(values, pa.float64(), from_pandas=True)  # NaN becomes null
        names = sorted({*self.attribute_names, name})
        table = self.table.select(CLIP_SCHEMA.names)
        for each in names:
            full = ATTRIBUTE + each
            table = table.append_column(full, column if each == name else self.table[full])
        return Catalog(table, self.set_aside, self.stored_fingerprint)

    def relocated(self, other: "Catalog") -> "Catalog":
        """The same clips; those that another catalog has too lie where it says."""
        where = pc.index_in(self.identities, value_set=other.identities)
        is_there, rows, table = pc.is_valid(where), pc.fill_null(where, 0), self.table
        if not len(other) or not pc.any(is_there).as_py():
            return self
        for name in ("path", "member", "offset", "num_bytes"):
            moved = pc.if_else(is_there, other.table[name].take(rows), table[name])
            table = table.set_column(table.column_names.index(name), name, moved)
        return Catalog(table, self.set_aside, self.fingerprint)

    @cached_property
    def fingerprint(self) -> str:
        """Names the training data: 32 hex digits over all that decides what is trained, and how.

        That is each clip's identity and caption, and what its bucket and window follow from.
        Neither paths nor attributes play a part, so a moved folder keeps its fingerprint.
        """
        return self.stored_fingerprint or fingerprint_of(self.table)

    @classmethod
    def load(cls, path: Path) -> "Catalog":
        """Read a catalog; its clips' paths come back absolute.

        Raises:
            DataError: the file is missing, is no catalog, is damaged, or of another version.
        """
        remedy = "Run `longtake data index` to write it."
        _check_version(path, remedy)
        try:
            table = read(path)
            marks = table.schema.metadata
            table = table.replace_schema_metadata(None)
            num_clips = table["reason"].null_count
            catalog = cls(
                table.slice(0, num_clips).drop_columns(["reason"]),
                table.slice(num_clips).select(ASIDE_SCHEMA.names),
                marks.get(FINGERPRINT_KEY, b"").decode() or None,
            )
            if catalog.set_aside["reason"].null_count or not is_ascending(catalog.identities):
                raise ValueError("its clips are not sorted by identity, each there once")
            check_values(catalog.table)
            if catalog.set_aside["path"].null_count:
                raise ValueError("a file that was set aside has no path")
            fingerprint = fingerprint_of(catalog.table)
            if catalog.stored_fingerprint not in (None, fingerprint):
                raise ValueError(
                    "its content was changed after it was written: its fingerprint is "
                    f"{catalog.stored_fingerprint}, and that of its clips {fingerprint}"
                )
        except (OSError, LookupError, ValueError, TypeError, pa.ArrowException) as error:
            raise DataError(f"The catalog {path} is damaged: {error}. {remedy}") from error
        return replace(catalog, stored_fingerprint=fingerprint)

    def save(self, path: Path) -> None:
        """Write the catalog as Parquet, aside first and renamed when whole.

        Raises:
            DataError: the file cannot be written.
        """
        table = pa.concat_tables([self.table, self.set_aside], promote_options="default")
        paths = relative(table["path"], f"{path.parent.resolve()}/")
        table = table.set_column(table.column_names.index("path"), "path", paths)
        marks = {VERSION_KEY: str(SCHEMA_VERSION), FINGERPRINT_KEY: self.fingerprint}
        try:
            with atomic_write(path) as aside:
                table = table.replace_schema_metadata(marks)
                pq.write_table(table, aside, **_HOW)
        except OSError as error:
            raise cannot_write(path, error) from error


def cannot_write(path: Path, error: OSError) -> DataError:
    return DataError(
        f"The catalog {path} cannot be written: {error.strerror or error}. Name another file."
    )


def _check_version(path: Path, remedy: str) -> None:
    try:
        open_regular(path).close()
    except OSError as error:
        if is_missing(error):
            raise DataError(f"The catalog {path} does not exist. {remedy}") from None
        reason = error.strerror or str(error)
        raise DataError(f"The catalog {path} cannot be read: {reason}. {remedy}") from error
    version = version_of(path)
    if version is None:
        raise DataError(f"{path} is not a catalog of longtake. {remedy}")
    if version != str(SCHEMA_VERSION):
        raise DataError(
            f"The catalog {path} has format {version}, and this longtake reads format "
            f"{SCHEMA_VERSION}. {remedy}"
        )


def _rejection_row(entry: Rejection) -> dict[str, Any]:
    return {"path": entry.path, "reason": entry.reason}


def _duplicate_row(entry: Duplicate) -> dict[str, Any]:
    identity = bytes.fromhex(entry.identity)
    return {"path": entry.path, "reason": "duplicate", "identity": identity}


def _stamp_row(stamp: Stamp | None) -> dict[str, Any]:
    return {"file_bytes": stamp.num_bytes, "file_mtime_ns": stamp.mtime_ns} if stamp else {}
