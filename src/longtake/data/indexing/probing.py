"""Probes many files in worker processes: no file can stop the rest."""

from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from typing import Any

from longtake.data.image import probe_image
from longtake.data.indexing.item import Item
from longtake.data.indexing.probe import Probe, probe
from longtake.data.limits import DEFAULT, Limits, OutOfTimeError
from longtake.data.tasks import run_tasks
from longtake.data.workers import SILENCE_SECONDS, Task
from longtake.errors import ClipError


@dataclass(frozen=True)
class Outcome:
    """What came of one item.

    Attributes:
        item: what was looked at.
        found: what is in it, or why it cannot be trained on.
        is_lasting: whether another look at the same bytes must end the same.
    """

    item: Item
    found: Probe | ClipError
    is_lasting: bool = True


def probe_all(
    items: Sequence[Item],
    *,
    on: str | None = None,
    workers: int | None = None,
    silence_seconds: float = SILENCE_SECONDS,
    limits: Limits = DEFAULT,
) -> Generator[Outcome]:
    """Probe every item and yield what came of each, in the order in which they finish.

    Args:
        items: what to look at.
        on: see `run_tasks`.
        workers: likewise.
        silence_seconds: a file is given up if there is no progress for so long.
        limits: what one file may cost.

    Raises:
        DataError: no worker can be started.
    """
    task = _ProbeTask(limits, silence_seconds)
    with closing(run_tasks(task, items, on=on, workers=workers)) as results:
        for number, (found, is_lasting) in results:
            yield Outcome(items[number], found, is_lasting)


@dataclass(frozen=True)
class _ProbeTask(Task[Item, tuple[Probe | ClipError, bool]]):
    """Look into one file, from its first byte to its last frame."""

    limits: Limits = DEFAULT
    silence_seconds: float = SILENCE_SECONDS

    @property
    def memory_gib(self) -> float:  # type: ignore[override]  # it follows from the limits
        """As the limits say."""
        return self.limits.memory_gib

    def do(self, item: Item, progress: Callable[[], object]) -> tuple[Probe | ClipError, bool]:
        try:
            str(item.media).encode()  # what is no text cannot be written into a catalog
            progress = self.limits.timed(item.media, progress)
            is_image = item.kind == "image"
            return probe_image(item.media) if is_image else probe(item.media, progress), True
        except UnicodeEncodeError:
            return ClipError(str(item.media), "its name is not valid UTF-8; rename it"), True
        except OutOfTimeError as error:
            return ClipError(error.path, error.reason), False
        except ClipError as error:
            return error, True

    def lost(self, item: Item, reason: str) -> tuple[Probe | ClipError, bool]:
        return ClipError(str(item.media), reason), False

    def reads(self, item: Item) -> str:
        return item.media.path


def to_json(found: Probe | ClipError) -> dict[str, Any]:
    """What came of an item, as JSON can hold it."""
    return {"reason": found.reason} if isinstance(found, ClipError) else {"probe": asdict(found)}
