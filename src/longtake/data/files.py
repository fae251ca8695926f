"""Whether the files of a catalog are still there: looked at before the training, not during it."""

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pyarrow.compute as pc

from longtake.data.catalog import Catalog
from longtake.data.references import reference_path
from longtake.errors import DataError

_MOST_FILES = 20_000
_EXAMPLES = 3


def refuse_archives(catalog: Catalog, references: Mapping[str, str]) -> None:
    """Refuse further pictures of clips that lie in tars: there is no folder to look for them in.

    Raises:
        DataError: names one of the clips.
    """
    inside = catalog.table.filter(pc.not_equal(catalog.table["member"], ""))
    if references and len(inside):
        names = ", ".join(references)
        raise DataError(
            f"{len(inside)} clips lie in tars, such as {inside['path'][0]}/{inside['member'][0]}: "
            f"data.references ({names}) are found beside a clip's own file. Unpack the tars, and "
            "run longtake data index again."
        )


def refuse_missing(
    catalog: Catalog, allowed: int, references: Mapping[str, str] | None = None
) -> list[str]:
    """Look for a catalog's files: for all of them, or, of very many, for some taken at random.

    Args:
        catalog: the clips.
        allowed: how many files may be missing.
        references: patterns of further pictures by name, which are looked for, too.

    Returns:
        A sentence if some are missing, but not too many; else nothing.

    Raises:
        DataError: more are missing than allowed; says how many, and names some.
    """
    paths: list[str] = pc.unique(catalog.table["path"]).to_pylist()
    looked_for = _some(paths)
    patterns = list((references or {}).values())
    with ThreadPoolExecutor(16) as pool:
        found = pool.map(lambda path: _first_missing(path, patterns), looked_for)
        missing = [path for path in found if path is not None]
    if not missing:
        return []
    of = "" if len(looked_for) == len(paths) else " that were looked for"
    lack = "clips{} lack their file or a further picture" if patterns else "files{} are gone"
    said = (
        f"{len(missing)} of the catalog's {len(looked_for)} {lack.format(of)}, such as "
        f"{', '.join(missing[:_EXAMPLES])}"
    )
    if len(missing) * len(paths) > allowed * len(looked_for):
        raise DataError(
            f"{said}. At most {allowed} (data.max_quarantined_clips) may fail. Are the files "
            "still where they were indexed? Put them back, or run longtake data index again."
        )
    return [said]


def _first_missing(clip_path: str, patterns: Sequence[str]) -> str | None:
    needed = [clip_path, *(reference_path(clip_path, pattern) for pattern in patterns)]
    return next((path for path in needed if not Path(path).is_file()), None)


def _some(paths: Sequence[str]) -> Sequence[str]:
    if len(paths) <= _MOST_FILES:
        return paths
    chosen = np.random.default_rng(0).choice(len(paths), _MOST_FILES, replace=False)
    return [paths[number] for number in chosen]
