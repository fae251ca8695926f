"""Gives every clip of a catalog a number that a curriculum can select by."""

from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from pydantic import TypeAdapter

from longtake.data.catalog import Catalog, Rejection
from longtake.data.clip import Clip
from longtake.data.limits import MEMORY_GIB, Limits
from longtake.data.scores.motion import MotionScore
from longtake.data.scores.own import OwnScore
from longtake.data.scores.words import nouns_of_all, num_words
from longtake.data.table import CLIP_SCHEMA
from longtake.data.tasks import in_order, run_tasks
from longtake.data.workers import Task
from longtake.errors import ClipError, DataError
from longtake.formatting import nearest
from longtake.fsio import Count, Journal

SCORES = {
    "nouns": "nouns in the caption, each as often as it occurs (English)",
    "motion": "how far the picture changes in an eighth of a second (0 to 255)",
    "length": "words in the caption",
}
"""The scores that come with longtake, and what each one counts."""

_Progress = Callable[[int, int], None]
_ROW: TypeAdapter[tuple[int, float]] = TypeAdapter(tuple[Count, float])


@dataclass(frozen=True)
class Scored:
    """A catalog with one more attribute.

    Attributes:
        catalog: the same clips.
        name: what the attribute is called.
        values: [N] float64, in the catalog's order; NaN where unknown: a clip without a caption,
            or one that failed.
        failed: clips that could not be decoded, and why.
        journal: what is kept of it until the catalog is written.
    """

    catalog: Catalog
    name: str
    values: NDArray[np.float64]
    failed: tuple[Rejection, ...] = ()
    journal: Journal[tuple[int, float]] | None = field(default=None, compare=False, repr=False)

    def settle(self) -> None:
        """Forget what was kept beside the catalog: it is written now."""
        if self.journal is not None:
            self.journal.remove()

    @property
    def num_known(self) -> int:
        """How many clips have a score."""
        return int(np.count_nonzero(~np.isnan(self.values)))


def score(
    catalog: Catalog,
    by: str,
    *,
    name: str | None = None,
    on: str | None = None,
    workers: int | None = None,
    out: Path | None = None,
    progress: _Progress | None = None,
    memory_gib: float = MEMORY_GIB,
) -> Scored:
    """Add one attribute to all clips; one of that name that is already there is replaced.

    Args:
        catalog: of which clips; it is not changed.
        by: one of `SCORES`, or `module:function`: a function that takes a `Clip` and returns a
            number, NaN for unknown. It is called in this process, for one clip after the other,
            or on a cluster in many. The module is looked for where Python looks, and then in the
            working directory.
        name: of the attribute; by default that of the score or of the function.
        on: where clips are tagged or decoded; see `run_tasks`. The values are the same.
        workers: processes that do so; by default as many as there are cores.
        out: the catalog that will be written: beside it is kept what is known so far, and taken up
            again (`Scored.settle` removes that). None: nothing is kept.
        progress: called with (clips done, clips in all).
        memory_gib: what decoding one clip may take; the score of a clip that needs more is unknown.

    Raises:
        DataError: there is no such score or function, the name cannot be an attribute's, the
            function returned no number or raised an error (a ClipError apart: that clip failed),
            or no worker can be started.
    """
    own = None if by in SCORES else _own(by)
    name = _checked(by.rpartition(":")[2] if name is None else name)
    if by == "length":
        lengths = [num_words(caption) for caption in catalog.captions()]
        return _scored(catalog, name, np.array(lengths, dtype=np.float64))
    if own and on is None:
        workers = 0  # a user's function need not work in another process
    facts = {"by": by, "version": own.version if own else "", "catalog": catalog.fingerprint}
    journal = None
    if out is not None:
        path = out.with_name(f".{out.name}.{name}.journal.jsonl")
        journal = Journal(path, _ROW, header=facts)
    known = dict(journal.read()) if journal else {}
    rows = [row for row in range(len(catalog)) if row not in known]
    task = own or MotionScore(Limits(memory_gib))
    results = _results(catalog, rows, by, task, on, workers)
    with closing(results), journal or nullcontext():
        values, failed = _collected(
            catalog, known, zip(rows, results, strict=True), journal, progress
        )
    return replace(_scored(catalog, name, values), failed=failed, journal=journal)


def _own(by: str) -> OwnScore:
    if not all(by.partition(":")):
        near = nearest(by, SCORES)
        hint = f" Did you mean {near!r}?" if near else ""
        raise DataError(
            f"There is no score {by!r}.{hint} There are "
            f"{', '.join(SCORES)}, and your own as module:function."
        )
    own = OwnScore(by, str(Path.cwd()))
    _ = own.function  # what is wrong with it is said before any work
    return own


def _scored(catalog: Catalog, name: str, values: NDArray[np.float64]) -> Scored:
    return Scored(catalog.with_attribute(name, values), name, values)


def _results(
    catalog: Catalog,
    rows: Sequence[int],
    by: str,
    task: Task[Clip, float | ClipError],
    on: str | None,
    workers: int | None,
) -> Generator[float | ClipError]:
    """The scores of some clips, in their order."""
    if by == "nouns":
        captions = catalog.captions()
        yield from nouns_of_all([captions[row] for row in rows], on=on, workers=workers)
        return
    is_all = len(rows) == len(catalog)
    clips = catalog.clips() if is_all else (catalog.clip(row) for row in rows)
    yield from in_order(run_tasks(task, clips, on=on, workers=workers))


def _collected(
    catalog: Catalog,
    known: Mapping[int, float],
    results: Iterable[tuple[int, float | ClipError]],
    journal: Journal[tuple[int, float]] | None,
    progress: _Progress | None,
) -> tuple[NDArray[np.float64], tuple[Rejection, ...]]:
    """The values [N], NaN where a clip failed, and the failures."""
    values, failed = np.full(len(catalog), np.nan), []
    values[list(known)] = list(known.values())
    for done, (row, result) in enumerate(results, start=len(known) + 1):
        if isinstance(result, ClipError):
            failed.append(Rejection(catalog.clip(row).path, result.reason))
        else:
            values[row] = result
            if journal:
                journal.add((row, result))
        if progress:
            progress(done, len(catalog))
    return values, tuple(failed)


def _checked(name: str) -> str:
    if not name.isidentifier():
        raise DataError(
            f"An attribute cannot be called {name!r}: recipes use it in conditions such as "
            f"`nouns <= 12`. Choose a name of letters, digits and _ (--name)."
        )
    if name in (*CLIP_SCHEMA.names, "aspect", "difficulty"):
        raise DataError(
            f"An attribute cannot be called {name!r}: in recipes that has "
            f"a meaning already. Choose another name (--name my_{name})."
        )
    return name
