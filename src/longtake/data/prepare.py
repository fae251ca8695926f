"""Transcodes a catalog's clips to the size that they are trained in, so that reading is cheap.

A window of a large video costs the decoding of everything from the keyframe before it, at full
size, only for most pixels to be scaled away. Prepared clips have the training's size and a
keyframe every few frames. They keep frame count, timestamps, captions and scores, and say in
`prepared_from` which clip they were made of.
"""

import socket
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from longtake.data.catalog import Catalog, Rejection
from longtake.data.clip import Clip, Media
from longtake.data.index import Seen, check_out, look_at, without_duplicates
from longtake.data.indexing.item import Item
from longtake.data.indexing.probe import Probe
from longtake.data.limits import MEMORY_GIB
from longtake.data.tasks import run_tasks
from longtake.data.transcode import Settings, TranscodeTask
from longtake.errors import ClipError, DataError

CATALOG_NAME = "catalog.parquet"
_SEEN_SECONDS = 90.0


@dataclass(frozen=True)
class PrepareReport:
    """What `prepare` did.

    Attributes:
        prepared: clips in the new catalog.
        reused: of these, files that were there already.
        rejected: clips that could not be transcoded any more.
        duplicates: prepared files with the same content as another; left out.
        bytes_before: of the clips' files.
        bytes_after: of the prepared files.
        catalog: the new catalog.
    """

    prepared: int
    reused: int
    rejected: list[Rejection]
    duplicates: int
    bytes_before: int
    bytes_after: int
    catalog: Path


def prepare(
    catalog_path: Path,
    out_folder: Path,
    *,
    settings: Settings,
    on: str | None = None,
    workers: int | None = None,
    progress: Callable[[int, int], None] | None = None,
    memory_gib: float = MEMORY_GIB,
) -> PrepareReport:
    """Transcode every clip of a catalog, and write a catalog of the results.

    Videos become H.264 in mp4 with closed groups of pictures; images become JPEG of quality 95
    without chroma subsampling. All are upright, scaled to cover their size (never up), and even in
    height and width. Files are named by the clip's identity and the settings, so those that are
    there already are taken as they are, and a call that was stopped goes on where it was.

    Args:
        catalog_path: the catalog of the clips.
        out_folder: where files and the new `catalog.parquet` are written.
        settings: how clips are to look.
        on: where clips are transcoded and checked; see `run_tasks`. What is written is the same to
            the byte.
        workers: processes that do so; by default one for each core. 0: this process, which a
            hostile file can then hang or crash.
        progress: called with (done, in all); each clip counts twice, when it is written and when
            what was written has been read again.
        memory_gib: what decoding one clip may take; a clip that needs more is rejected.

    Raises:
        DataError: the catalog cannot be read, the settings do not fit, the folder cannot be
            written, or no clip could be prepared.
    """
    settings.check()
    source, out = Catalog.load(catalog_path), out_folder / CATALOG_NAME
    if out.resolve() == catalog_path.resolve():
        raise DataError(f"{out} is the catalog to be prepared. Name another folder.")
    check_out(out)
    clips, tell = list(source.clips()), progress or (lambda done, total: None)
    task = TranscodeTask(out_folder.resolve(), settings, memory_gib)
    targets = {clip.identity: task.target(clip) for clip in clips}
    reused = sum(target.exists() for target in targets.values())
    failed = _transcode_all(clips, task, on, workers, tell)
    written = [clip for clip in clips if clip.identity not in failed]
    seen = look_at(  # from the first byte to the last
        [_item(clip, targets[clip.identity]) for clip in written],
        out,
        on=on,
        workers=workers,
        progress=lambda done, total: tell(total + done, 2 * len(clips)),
    )
    prepared = _trusted(written, targets, seen, settings, failed)
    rejected = [Rejection(str(error.path), error.reason) for error in failed.values()]
    rejected.sort(key=lambda each: each.path)
    if not prepared:
        raise DataError(_nothing_left(rejected))
    kept, duplicates = without_duplicates(prepared)
    Catalog.of(kept, rejected, duplicates, seen.stamps).save(out)
    seen.journal.remove()
    return PrepareReport(
        prepared=len(kept),
        reused=reused,
        rejected=rejected,
        duplicates=len(duplicates),
        bytes_before=_num_bytes(source),
        bytes_after=sum(Path(clip.media.path).stat().st_size for clip in kept),
        catalog=out,
    )


def _nothing_left(rejected: Sequence[Rejection]) -> str:
    shown = "".join(f"\n  {each.path}: {each.reason}" for each in rejected[:5])
    return f"None of {len(rejected)} clips could be prepared.{shown}"


def _item(clip: Clip, target: Path) -> Item:
    return Item(Media(str(target)), clip.caption, clip.attributes)


def _trusted(
    written: Sequence[Clip],
    targets: dict[str, Path],
    seen: Seen,
    settings: Settings,
    failed: dict[str, ClipError],
) -> list[Clip]:
    """Return the prepared clips that hold what they should; add the others to `failed`."""
    trusted = []
    for clip in written:
        item = _item(clip, targets[clip.identity])
        found = seen.results[str(item.media)]
        if isinstance(found, Probe) and (settings.fps or found.num_frames == clip.num_frames):
            trusted.append(_prepared(clip, item, found))
        else:
            failed[clip.identity] = _mistrusted(clip, targets[clip.identity], found)
    return trusted


def _prepared(clip: Clip, item: Item, found: Probe) -> Clip:
    return Clip(
        media=item.media,
        caption=clip.caption,
        attributes=clip.attributes,
        prepared_from=clip.identity,
        **vars(found),
    )


def _mistrusted(clip: Clip, target: Path, found: Probe | ClipError) -> ClipError:
    """Remove what did not come out right, so that it is written anew next time."""
    target.unlink(missing_ok=True)
    if isinstance(found, ClipError):
        return ClipError(clip.path, f"its prepared file: {found.reason}")
    return ClipError(clip.path, f"{clip.num_frames} frames became {found.num_frames}")


def _num_bytes(catalog: Catalog) -> int:
    columns = catalog.column("num_bytes"), catalog.column("file_bytes")
    members, files = (column.astype(np.float64) for column in columns)
    return int(np.nansum(np.where(np.isnan(members), files, members)))


def _transcode_all(
    clips: Sequence[Clip],
    task: TranscodeTask,
    on: str | None,
    workers: int | None,
    tell: Callable[[int, int], None],
) -> dict[str, ClipError]:
    """Write what is not there yet; return those that failed, by identity."""
    missing = [clip for clip in clips if not task.target(clip).exists()]
    if present := len(clips) - len(missing):
        tell(present, 2 * len(clips))
    failed = {}
    with closing(run_tasks(task, missing, on=on, workers=workers)) as results:
        for done, (number, error) in enumerate(results, start=present + 1):
            if error is not None:
                failed[missing[number].identity] = error
            else:
                _see(task.target(missing[number]))
            tell(done, 2 * len(clips))
    for left in task.folder.glob("??/.*.partial.*"):  # of processes that were killed
        left.unlink(missing_ok=True)
    return failed


def _see(target: Path) -> None:
    """Wait until a file is seen that another machine has written: network disks take a while.

    Raises:
        DataError: it is not seen in time.
    """
    deadline = time.monotonic() + _SEEN_SECONDS
    while not target.exists():
        if time.monotonic() > deadline:
            raise DataError(
                f"{target} was written, but is not seen on {socket.gethostname()}. Is it on a disk "
                "that all nodes share?"
            )
        time.sleep(0.1)
        folder = target.parent if target.parent.exists() else target.parents[1]
        list(folder.iterdir())  # so the disk is asked anew
