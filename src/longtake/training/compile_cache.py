"""Keeps what torch compiles, so that a restart need not compile it again."""

import os
from pathlib import Path

from longtake.config import TrainingSection

_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"


def keep_compiled(section: TrainingSection) -> None:
    """Have torch keep it in the user's cache folder, which a reboot does not empty as /tmp is.

    Nothing where the environment names a folder, or nothing is compiled. Ranks and runs may share
    one: torch finds what it has compiled by code, shapes, versions and processor.
    """
    if section.compile:
        home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        os.environ.setdefault(_VARIABLE, str(Path(home) / "longtake" / "compiled"))
