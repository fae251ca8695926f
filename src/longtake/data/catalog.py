"""The catalog: one table of all clips that can be trained on, and of the files that cannot.

`index` decodes every file once and writes the table; training only reads it. A clip is named by
the hash of its content, and paths below the catalog's folder are stored relative to it, so a
folder of clips with its catalog inside can be moved or copied.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from longtake.aside import make_writable, written_aside
from longtake.data.captions import read_captions
from longtake.data.probe import Probe, probe
from longtake.errors import ClipError, DataError
from longtake.machine import num_cores

SCHEMA_VERSION = 1
VIDEO_SUFFIXES = (".mp4", ".mov", ".mkv", ".webm", ".avi", ".mpg", ".mpeg", ".m4v", ".ts")

_VERSION_KEY = b"longtake.catalog"
_SCHEMA = pa.schema(
    [
        ("identity", pa.string()),
        ("path", pa.string()),
        ("caption", pa.string()),
        ("num_frames", pa.int64()),
        ("width", pa.int32()),
        ("height", pa.int32()),
        ("fps", pa.float64()),
        ("duration_seconds", pa.float64()),
        ("stream_index", pa.int32()),
        ("rotation", pa.int32()),
        ("codec", pa.string()),
        ("pix_fmt", pa.string()),
        ("reason", pa.string()),  # only rejected files have one; they have nothing else but a path
    ],
    metadata={_VERSION_KEY: str(SCHEMA_VERSION)},
)


@dataclass(frozen=True)
class Clip:
    """One video that can be trained on; `longtake.data.decode.Probe` explains the fields.

    Attributes:
        path: absolute path of the file.
        caption: what it shows; empty where none is known.
    """

    identity: str
    path: str
    caption: str
    num_frames: int
    width: int
    height: int
    fps: float
    duration_seconds: float
    stream_index: int
    rotation: int
    codec: str
    pix_fmt: str


@dataclass(frozen=True)
class Rejection:
    """One file that cannot be trained on, and why in a few words."""

    path: str
    reason: str


@dataclass(frozen=True)
class Catalog:
    """All clips, sorted by identity and each there once, and all rejected files, by path."""

    clips: tuple[Clip, ...]
    rejected: tuple[Rejection, ...] = ()

    def __post_init__(self) -> None:
        identities = [clip.identity for clip in self.clips]
        assert identities == sorted(set(identities)), "clips are sorted by identity, and unique"

    @cached_property
    def fingerprint(self) -> str:
        """Names the training data: 32 hex digits over all that decides what is trained, and how.

        That is each clip's identity and caption, and what its bucket and window follow from. Where
        the files lie plays no part, so a moved folder keeps its fingerprint.
        """
        digest = hashlib.blake2b(f"catalog {SCHEMA_VERSION}\n".encode(), digest_size=16)
        for clip in self.clips:
            shape = [clip.num_frames, clip.width, clip.height, clip.stream_index, clip.rotation]
            digest.update(json.dumps([clip.identity, clip.caption, *shape]).encode() + b"\n")
        return digest.hexdigest()

    @classmethod
    def load(cls, path: Path) -> "Catalog":
        """Read a catalog; its clips' paths come back absolute.

        Raises:
            DataError: the file is missing, is no catalog, or has another schema version.
        """
        rows = _read_rows(path)
        folder = path.resolve().parent
        clips, rejected = [], []
        for row in rows:
            reason = row.pop("reason")
            row["path"] = str(folder / row["path"])
            if reason is None:
                clips.append(Clip(**row))
            else:
                rejected.append(Rejection(row["path"], reason))
        return cls(tuple(clips), tuple(rejected))

    def save(self, path: Path) -> None:
        """Write the catalog as Parquet, aside first and renamed when whole.

        Raises:
            DataError: the file cannot be written.
        """
        folder = path.parent.resolve()
        entries: list[Clip | Rejection] = [*self.clips, *self.rejected]
        rows = [asdict(entry) for entry in entries]
        for row in rows:
            row["path"] = _relative(row["path"], folder)
        try:
            with written_aside(path) as aside:
                pq.write_table(pa.Table.from_pylist(rows, schema=_SCHEMA), aside)
        except OSError as error:
            raise _cannot_write(path, error) from error


@dataclass(frozen=True)
class IndexReport:
    """What `index` found.

    Attributes:
        accepted: clips in the catalog.
        rejected: files that cannot be trained on, by path.
        duplicates: further files with the content of an accepted one; left out.
        without_caption: accepted clips whose caption is empty.
        unmatched_captions: videos that the captions name but that are not among the files.
    """

    accepted: int
    rejected: list[Rejection]
    duplicates: int
    without_caption: int
    unmatched_captions: list[str]


def index(
    sources: Sequence[Path],
    *,
    captions: Path | None,
    out: Path,
    workers: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> IndexReport:
    """Decode every video once and write the catalog of those that can be trained on.

    Args:
        sources: video files, and folders that are searched with all their subfolders; names
            that begin with a dot are passed over, and links to folders are not followed.
        captions: JSONL with one `{"video": path, "caption": text}` per line. None:
            `captions.jsonl` in each source folder, and `clip.txt` next to `clip.mp4`. How videos
            are found by their names: see `read_captions`.
        out: the catalog to write; an older catalog there is replaced, nothing else is.
        workers: threads that decode; by default as many as there are cores.
        progress: called with (files done, files in all) after each file.

    Raises:
        DataError: a source or the captions cannot be read, there is no video, no video can be
            decoded, or the catalog cannot be written (which is found out before decoding).
    """
    _check_out(out)
    folders, videos = _find_videos(sources)
    texts, unmatched = read_captions(captions, folders, videos)
    clips, rejected = [], []
    for video, found in zip(videos, _probe_all(videos, workers, progress), strict=True):
        if isinstance(found, Probe):
            caption = texts.get(video, "")
            clips.append(Clip(path=str(video), caption=caption, **asdict(found)))
        else:
            rejected.append(Rejection(_printable(video), found.reason))
    if not clips:
        raise DataError(_all_rejected(rejected))
    kept = _without_duplicates(clips)
    Catalog(kept, tuple(rejected)).save(out)
    return IndexReport(
        accepted=len(kept),
        rejected=rejected,
        duplicates=len(clips) - len(kept),
        without_caption=sum(not clip.caption for clip in kept),
        unmatched_captions=unmatched,
    )


def _find_videos(sources: Sequence[Path]) -> tuple[list[Path], list[Path]]:
    """Return the folders that were searched and the video files in them, absolute and sorted."""
    folders: list[Path] = []
    videos: set[Path] = set()
    for source in sources:
        if source.is_dir():
            folders.append(source.resolve())
            videos.update(path for path in folders[-1].rglob("*") if _is_video(path, folders[-1]))
        elif source.is_file():
            folders.append(source.parent.resolve())
            videos.add(folders[-1] / source.name)  # the file itself may be a link: keep its name
        else:
            raise DataError(f"{source} does not exist. Name a folder of videos, or video files.")
    if not videos:
        where = ", ".join(str(source) for source in sources) or "no folder at all"
        raise DataError(
            f"No video was found. Looked in: {where}; for files that end in "
            f"{' '.join(VIDEO_SUFFIXES)}. Name a folder that holds some."
        )
    return folders, sorted(videos)


def _is_video(path: Path, folder: Path) -> bool:
    if path.suffix.lower() not in VIDEO_SUFFIXES or path.is_dir():
        return False
    return not any(part.startswith(".") for part in path.relative_to(folder).parts)


def _probe_all(
    videos: Sequence[Path], workers: int | None, progress: Callable[[int, int], None] | None
) -> list[Probe | ClipError]:
    # Threads: PyAV lets go of the interpreter while it decodes, and processes measured no faster.
    pool = ThreadPoolExecutor(workers or num_cores())
    results: list[Probe | ClipError] = []
    try:
        for result in pool.map(_try_probe, videos):
            results.append(result)
            if progress is not None:
                progress(len(results), len(videos))
    finally:
        pool.shutdown(cancel_futures=True)  # Ctrl-C must not wait for thousands of files
    return results


def _try_probe(path: Path) -> Probe | ClipError:
    if str(path) != _printable(path):
        return ClipError(path, "its name is not valid UTF-8; rename it")
    try:
        return probe(path)
    except ClipError as error:
        return error


def _printable(path: Path) -> str:
    return str(path).encode("utf-8", "backslashreplace").decode()


def _without_duplicates(clips: Iterable[Clip]) -> tuple[Clip, ...]:
    """Keep one clip of each identity, by path the first that has a caption, or else the first."""
    kept: dict[str, Clip] = {}
    for clip in sorted(clips, key=lambda clip: (not clip.caption, clip.path)):
        kept.setdefault(clip.identity, clip)
    return tuple(sorted(kept.values(), key=lambda clip: clip.identity))


def _all_rejected(rejected: Sequence[Rejection]) -> str:
    shown = "".join(f"\n  {each.path}: {each.reason}" for each in rejected[:5])
    more = f"\n  and {len(rejected) - 5} more" if len(rejected) > 5 else ""
    return f"None of {len(rejected)} files can be trained on; no catalog was written.{shown}{more}"


def _check_out(out: Path) -> None:
    """Refuse an output that cannot be written, or that would overwrite something else."""
    if out.exists() and _version(out) is None:
        raise DataError(
            f"{out} exists and is not a catalog; it was not overwritten. Name another file, such "
            f"as {out.parent / 'catalog.parquet'}."
        )
    try:
        make_writable(out.parent)
    except OSError as error:
        raise _cannot_write(out, error) from error


def _read_rows(path: Path) -> list[dict[str, Any]]:
    remedy = "Run `longtake data index` to write it."
    if not path.exists():
        raise DataError(f"The catalog {path} does not exist. {remedy}")
    version = _version(path)
    if version is None:
        raise DataError(f"{path} is not a catalog of longtake. {remedy}")
    if version != str(SCHEMA_VERSION):
        raise DataError(
            f"The catalog {path} has schema version {version}; this longtake reads "
            f"{SCHEMA_VERSION}. {remedy}"
        )
    try:
        table = pq.ParquetFile(path).read()
        rows: list[dict[str, Any]] = table.select(_SCHEMA.names).to_pylist()
    except (OSError, LookupError, pa.ArrowException) as error:
        raise DataError(f"The catalog {path} is damaged: {error}. {remedy}") from error
    return rows


def _version(path: Path) -> str | None:
    """Return the schema version of the catalog in a file, or None if there is no catalog."""
    try:
        metadata: Mapping[bytes, bytes] = pq.read_schema(path).metadata or {}
    except (OSError, pa.ArrowException):
        return None
    version = metadata.get(_VERSION_KEY)
    return None if version is None else version.decode()


def _relative(path: str, folder: Path) -> str:
    return str(Path(path).relative_to(folder)) if Path(path).is_relative_to(folder) else path


def _cannot_write(path: Path, error: OSError) -> DataError:
    return DataError(
        f"The catalog {path} cannot be written: {error.strerror or error}. Name another file."
    )
