"""Whether the files of a catalog are still there: looked at before the training, not during it."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pyarrow.compute as pc

from longtake.data.catalog import Catalog
from longtake.errors import DataError

_MOST_FILES = 20_000
_EXAMPLES = 3


def refuse_missing(catalog: Catalog, allowed: int) -> list[str]:
    """Look for a catalog's files: for all of them, or, of very many, for some taken at random.

    Args:
        catalog: the clips.
        allowed: how many files may be missing.

    Returns:
        A sentence if some are missing, but not too many; else nothing.

    Raises:
        DataError: more are missing than allowed; says how many, and names some.
    """
    paths: list[str] = pc.unique(catalog.table["path"]).to_pylist()
    looked_for = _some(paths)
    with ThreadPoolExecutor(16) as pool:
        is_there = list(pool.map(lambda path: Path(path).is_file(), looked_for))
    missing = [path for path, there in zip(looked_for, is_there, strict=True) if not there]
    if not missing:
        return []
    of = "" if len(looked_for) == len(paths) else " that were looked for"
    found = (
        f"{len(missing)} of the catalog's {len(looked_for)} files{of} are gone, such as "
        f"{', '.join(missing[:_EXAMPLES])}"
    )
    if len(missing) * len(paths) > allowed * len(looked_for):
        raise DataError(
            f"{found}. At most {allowed} (data.max_quarantined_clips) may fail. Are the files "
            "still where they were indexed? Put them back, or run longtake data index again."
        )
    return [found]


def _some(paths: Sequence[str]) -> Sequence[str]:
    if len(paths) <= _MOST_FILES:
        return paths
    chosen = np.random.default_rng(0).choice(len(paths), _MOST_FILES, replace=False)
    return [paths[number] for number in chosen]
