"""What nobody has foreseen: told once, and the rest goes on; torch-free.

A server runs for weeks beside trainings, on files that others write. Whatever is wrong with one
run may end neither the server nor one of its threads without a word.
"""

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from longtake.errors import LongtakeError
from longtake.evaluation.server.report import Report


class Mishaps:
    """Keeps errors of one part from the others; any thread may use it.

    Args:
        report: who is told.
    """

    def __init__(self, report: Report) -> None:
        self._report = report
        self._told: set[tuple[str, str]] = set()

    @contextmanager
    def kept_to(self, part: Path | str) -> Iterator[None]:
        """End the block at an error, whatever it is, and tell each kind of it once.

        Args:
            part: what the error leaves out, such as a run's folder.
        """
        try:
            yield
        except Exception as error:
            self._tell(f"{part}", error)

    def _tell(self, part: str, error: Exception) -> None:
        kind = str(error) if isinstance(error, LongtakeError) else whence(error)
        if (part, kind) not in self._told:
            self._told.add((part, kind))
            said = str(error) if isinstance(error, LongtakeError) else f"{kind}: {error}"
            self._report.wrong(f"{part}: {said.rstrip('.')}. It is tried again; the rest goes on.")


def whence(error: Exception) -> str:
    """The class of an error and the line that raised it: there is no traceback to read."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__} in {Path(last.filename).name}, line {last.lineno}"
