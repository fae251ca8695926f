"""Records the content of `data.conditioning` files when a run first uses them.

No catalog holds it. So one rank writes a line for each local file beside the run's catalogs, and
every reader compares files with it like clips with their catalog (`longtake.data.content`).
"""

from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from typing_extensions import TypedDict

from longtake.data.clip import Indexed, Media
from longtake.data.conditioning import Wanted
from longtake.data.content import content_hash
from longtake.errors import ClipError, DataError
from longtake.fsio import Count, append_json, read_records

NAME = "inputs.jsonl"
_MAX_FILES = 20_000
_MAX_HASHED_BYTES = 8 * 2**30  # limit for all files together; of the rest only sizes count
_THREADS = 16  # threads that hash files


class _Line(TypedDict):
    path: str
    bytes: Count
    mtime_ns: int
    hash: str  # BLAKE2b-128; empty if it was not computed


def read_known(folder: Path) -> dict[str, Indexed]:
    """Return the recorded content of each conditioning file by path; the first line counts."""
    known: dict[str, Indexed] = {}
    for line in read_records(folder / NAME, _Line):
        stamp = line["bytes"], line["mtime_ns"]
        known.setdefault(line["path"], Indexed(line["hash"], 0, 0.0, *stamp, is_by_run=True))
    return known


def note(
    folder: Path, paths: Iterable[str], hash_of_file: Callable[[str], str] | None = None
) -> None:
    """Record the content of local conditioning files that have no record yet, up to 20,000 files.

    Raises:
        DataError: the record cannot be written.
    """
    known = read_known(folder)
    new = [path for path in dict.fromkeys(paths) if "://" not in path and path not in known]
    hash_of = hash_of_file or (lambda path: content_hash(Media(path)))
    hashed, lines = 0, list[tuple[str, int, int, bool]]()
    # Hashing is bounded, so that the start of a run takes minutes at most.
    for path in new[: max(0, _MAX_FILES - len(known))]:
        with suppress(OSError):  # a missing file is refused elsewhere
            status = Path(path).stat()
            hashed += status.st_size
            is_hashed = hashed <= _MAX_HASHED_BYTES
            lines.append((path, status.st_size, status.st_mtime_ns, is_hashed))

    def line_of(found: tuple[str, int, int, bool]) -> _Line | None:
        path, num_bytes, mtime_ns, is_hashed = found
        try:
            content = hash_of(path) if is_hashed else ""
        except ClipError:  # reading the file will report its damage
            return None
        return {"path": path, "bytes": num_bytes, "mtime_ns": mtime_ns, "hash": content}

    try:
        with ThreadPoolExecutor(_THREADS) as pool:
            for line in filter(None, pool.map(line_of, lines)):
                append_json(folder / NAME, line)
    except OSError as error:
        raise DataError(f"{folder / NAME} cannot be written: {error.strerror or error}.") from error


def with_known(wanted: Wanted, known: Mapping[str, Indexed]) -> Wanted:
    """Return a conditioning input whose file is compared with the run's record when it is read."""
    found = known.get(wanted.media.path)
    # Frames of the clip itself are compared with the catalog.
    if found is None or wanted.media.indexed is not None:
        return wanted
    return replace(wanted, media=replace(wanted.media, indexed=found))
