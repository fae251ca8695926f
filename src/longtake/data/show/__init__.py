"""What `longtake data show` tells: what a catalog holds, and what a recipe makes of it.

holdings.py   a catalog's clips, as numbers
sieve.py      for each clip of a stage its bucket, or why it is dropped
outline.py    a recipe's stages, buckets, drift and warnings, as numbers
tables.py     both, as tables for people
gallery.py    both, as pictures
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from longtake.config import Recipe
from longtake.data.catalog import Catalog
from longtake.data.plan import begin
from longtake.data.show.holdings import show_catalog
from longtake.data.show.outline import show_plan
from longtake.errors import DataError

ReviewCaptions = Callable[[Sequence[str]], tuple[dict[str, int] | None, str | None]]
"""Maps captions to facts, None if they cannot be known, and a warning, if there is one."""


def show(
    path: Path,
    recipe: Recipe | None = None,
    out: Path | None = None,
    progress: Callable[[int, int], None] | None = None,
    review_captions: ReviewCaptions | None = None,
) -> dict[str, Any]:
    """Look at a catalog, and at what a recipe would train on.

    A recipe of one catalog is shown with the catalog at `path` in its place, so that it can be
    tried on another. Of a recipe of several, `path` has to be one, and all of them are shown.

    Args:
        path: the catalog.
        recipe: what is planned; None: only the catalog is shown.
        out: a folder to draw pictures in; None: none are drawn.
        progress: called with (pictures done, pictures in all).
        review_captions: counts the tokens of all captions that the recipe trains on.

    Returns:
        JSON-able: `catalog` (the path), what `show_catalog` says of it, what `show_plan` says of
        the recipe, `captions` (facts of `review_captions`), `catalogs` (by name, where there are
        several) and `pictures` (paths).

    Raises:
        DataError: a catalog cannot be read, a stage selects nothing, `path` is none of the
            recipe's catalogs, or a picture cannot be written.
    """
    paths = {"catalog": path} if recipe is None else _paths(path, recipe)
    catalogs = {name: Catalog.load(each) for name, each in paths.items()}
    facts = {
        name: {"catalog": str(paths[name]), **show_catalog(catalog)}
        for name, catalog in catalogs.items()
    }
    mine = next(name for name, each in paths.items() if each.resolve() == path.resolve())
    result = {**facts[mine], "catalog": str(path), "pictures": []}
    if len(facts) > 1:
        result["catalogs"] = facts
    plan = None
    if recipe is not None:
        plan = begin(catalogs, recipe.data, recipe.training.batch_size, recipe.seed)
        result |= show_plan(plan, recipe)
        if review_captions is not None:
            captions = [text for catalog in catalogs.values() for text in catalog.captions()]
            result["captions"], warning = review_captions(captions)
            result["warnings"] += [warning] if warning else []
    if out is not None:
        from longtake.data.show.gallery import write_pictures  # matplotlib takes a second

        written = write_pictures(out, catalogs[mine], plan, recipe, progress)
        result["pictures"] = list(map(str, written))
    return result


def _paths(path: Path, recipe: Recipe) -> dict[str, Path]:
    """The catalogs that are shown, by the names that the recipe has for them."""
    paths = recipe.data.sources()
    if len(paths) == 1:
        return dict.fromkeys(paths, path)
    if path.resolve() not in {each.resolve() for each in paths.values()}:
        known = ", ".join(f"{name} ({each})" for name, each in paths.items())
        raise DataError(
            f"{path} is none of the recipe's catalogs: {known}. Name one of these; or set "
            "data.catalogs and data.weights with --set."
        )
    return paths
