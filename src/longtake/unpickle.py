"""Reads pickles without running code: the only place that may unpickle what others wrote."""

import pickle
from collections.abc import Mapping
from typing import Any, BinaryIO, Final

PLAIN: Final[Mapping[tuple[str, str], Any]] = {}
"""Allows containers, numbers and texts only, which need no import."""


class RestrictedUnpickler(pickle.Unpickler):
    """Builds what pickle has opcodes for, and the named things that are allowed; imports nothing.

    Args:
        file: the pickle.
        allowed: what may be named, by module and name; what each name stands for.
    """

    def __init__(self, file: BinaryIO, allowed: Mapping[tuple[str, str], Any] = PLAIN) -> None:
        super().__init__(file)
        self._allowed = allowed

    def find_class(self, module: str, name: str) -> Any:
        """What a name stands for.

        Raises:
            pickle.UnpicklingError: it is not allowed.
        """
        if (module, name) not in self._allowed:
            raise pickle.UnpicklingError(
                f"it wants {module}.{name}, which is not allowed here. It was not read further, "
                "and no code was run"
            )
        return self._allowed[module, name]

    def persistent_load(self, pid: Any) -> Any:
        """Refuse references to what lies outside the file.

        Raises:
            pickle.UnpicklingError: always.
        """
        raise pickle.UnpicklingError(f"it refers to {pid!r} outside the file")
