"""What the loader asks of whatever fills its batches: a decoder (`decoding`) or a cache (`cached`).

A batch has places, each of one sample. They are begun ahead, waited for when the batch's turn has
come, and copied where a clip has to stand in for one that is not to be had.
"""

from types import TracebackType
from typing import Any, Protocol, Self

from longtake.config import Bucket
from longtake.data.clip import Clip
from longtake.data.window import Window
from longtake.data.workers import WorkerIncident


class Places(Protocol):
    """What fills the places of one batch."""

    def begin(self, place: int, clip: Clip, window: Window) -> None:
        """Start to fetch what a sample is made of."""
        ...

    def wait(self, place: int) -> None:
        """Return when a place that was begun is filled, or will never be.

        Raises:
            ClipError: it cannot be.
        """
        ...

    def copy(self, source: int, place: int) -> None:
        """Fill a place like another one, which is filled."""
        ...

    def fields(self) -> dict[str, Any]:
        """The fields of a `Batch` that all places together make."""
        ...


class Feed(Protocol):
    """Fetches what batches are made of, several at a time; is closed like a file."""

    def places(self, shape: Bucket, num_places: int) -> Places:
        """The empty places of one batch."""
        ...

    def incidents(self) -> list[WorkerIncident]:
        """What befell its processes since this was last asked."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None: ...
