"""Scripts and style sheets of the pages; none of them loads anything from another host."""

import re
from collections.abc import Iterator
from functools import cache
from hashlib import sha256
from importlib import resources
from typing import Final

SCRIPTS: Final = ("uPlot.iife.min.js",)
"""Names of classic scripts (not modules) of the pages, loaded before the module."""
STYLES: Final = ("uPlot.min.css", "board.css", "samples.css", "data.css", "nodes.css")
MODULE: Final = "board.js"
_IMPORT = re.compile(r'^import \{[^}]*\} from "\./(?P<name>\w+\.js)";\n', re.MULTILINE)
_EXPORT = re.compile(r"^export (?=(async )?function|const|let|class)", re.MULTILINE)


@cache
def static_files() -> dict[str, bytes]:
    folder = resources.files("longtake.board") / "static"
    return {each.name: each.read_bytes() for each in folder.iterdir() if each.is_file()}


@cache
def digest() -> str:
    """Return a digest of all scripts and style sheets, for URLs that browsers cache for ever."""
    files = sorted(static_files().items())
    return sha256(b"".join(name.encode() + data for name, data in files)).hexdigest()[:12]


def static_url(name: str) -> str:
    assert name in static_files(), name
    return f"/static/{digest()}/{name}"


@cache
def bundled_module() -> str:
    """Return all JavaScript modules of the pages as one script, for a page that is a single file.

    Names must be unique across all modules, and each import must be on one line.
    """
    return "".join(_bundled(MODULE, set()))


def _bundled(name: str, done: set[str]) -> Iterator[str]:
    text = static_files()[name].decode()
    # Imported modules come first, each once.
    for found in _IMPORT.finditer(text):
        if found["name"] not in done:
            done.add(found["name"])
            yield from _bundled(found["name"], done)
    # All modules share one scope there: imports go, and exports become plain declarations.
    yield _EXPORT.sub("", _IMPORT.sub("", text))
