"""Renders HTML pages from facts of a run: the same pages for the server and for a report."""

import base64
import json
import math
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any, Final, Literal
from urllib.parse import quote, urlencode

import numpy as np
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from longtake import errors, fsio
from longtake.board import assets
from longtake.formatting import format_duration, format_size, plural, printable_lines

PageName = Literal["overview", "samples", "data", "nodes", "plan"]
PAGES: Final[dict[PageName, str]] = {
    "overview": "Run",
    "samples": "Samples",
    "data": "Data",
    "nodes": "Nodes",
    "plan": "Plan",
}
"""The pages of a run with their titles, in the order of the navigation links."""
STATES: Final = {
    "running": "running",
    "stalled": "stalled",
    "dead": "ended without a word",
    "interrupted": "interrupted",
    "diverged": "diverged",
    "finished": "finished",
}


_LARGEST_SCALE = 1e300


class PageLinks:
    """Makes the URLs in a page: of other pages, of a run's files, and of data to load later.

    This class has the URLs of a page that is one file: it loads nothing, and links to nothing.
    """

    layout = "bare.html"
    """Name of the HTML template that the run's pages extend."""

    def home(self) -> str:
        """Return the URL of the page with the list of runs; empty if there is no such page."""
        return ""

    def live(self, run: str | None) -> str:
        """Return the URL of the event stream of a run, or of all runs; empty if there is none."""
        return ""

    def page(self, page: PageName, run: str, **query: object) -> str:
        return f"#{page}"

    def media(self, run: str, path: str) -> str | None:
        """Return the URL of a video or picture by its path below the run; None if not available."""
        return None

    def poster(self, run: str, path: str) -> str | None:
        """Return the URL of a video's still by its path below the run; None if not available."""
        return None

    def series(self, run: str) -> str:
        """Return the URL of the data of a run's plots; empty if they are in the page."""
        return ""

    def static(self, name: str) -> str:
        """Return the URL of a script or style sheet; empty if the page contains them all."""
        return ""


class ServerLinks(PageLinks):
    """Makes the URLs in pages that the board's server serves."""

    layout = "run_base.html"

    def home(self) -> str:
        return "/"

    def live(self, run: str | None) -> str:
        return "/live" if run is None else f"/live/{_quoted(run)}"

    def page(self, page: PageName, run: str, **query: object) -> str:
        given = {name: value for name, value in query.items() if value is not None}
        values = f"?{urlencode(given, errors='replace')}" if given else ""
        return f"/run/{page}/{_quoted(run)}{values}"

    def media(self, run: str, path: str) -> str | None:
        return f"/media/{_quoted(f'{run}/{path}' if run else path)}"

    def poster(self, run: str, path: str) -> str | None:
        return f"/poster/{quote(f'{run}/{path}' if run else path)}"

    def series(self, run: str) -> str:
        return f"/series/{_quoted(run)}"

    def static(self, name: str) -> str:
        return assets.static_url(name)


def _quoted(path: str) -> str:
    """Return a path quoted for a URL; a name that is not UTF-8 gives a URL that leads nowhere."""
    return quote(path, errors="replace")


def render(template: str, links: PageLinks | None, **values: Any) -> str:
    """Return the HTML of a page from a template and values, which are escaped.

    Control characters in texts are spelled out.
    """
    return environment().get_template(template).render(links=links, **values)


@cache
def environment() -> Environment:
    found = Environment(
        loader=PackageLoader("longtake.board"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        # Only plain strings: Markup was made by this package, and is not changed.
        finalize=lambda value: printable_lines(value) if type(value) is str else value,
    )
    found.filters |= {
        "number": number,
        "percent": percent,
        "duration": format_duration,
        "size": lambda value: format_size(int(value)),
        "at": at,
        "plural": plural,
        "embedded": embedded,
    }
    found.globals |= {"pages": PAGES, "states": STATES, "assets": assets}
    return found


# --- A file that needs no server and no network ------------------------------------------------


def render_file(
    template: str, links: PageLinks | None = None, scripts: Sequence[str] = (), **values: Any
) -> str:
    """Return the HTML of a page that is one file, from a template that extends `file.html`."""
    files = assets.static_files()
    styles = [files[name].decode() for name in assets.STYLES]

    def hashes(texts: Iterable[str]) -> str:
        digests = (base64.b64encode(sha256(each.encode()).digest()).decode() for each in texts)
        return " ".join(f"'sha256-{each}'" for each in digests) or "'none'"

    # Nothing is loaded. Scripts and styles are allowed by their hashes, so no text of a run can
    # add another.
    policy = (
        f"default-src 'none'; style-src {hashes(styles)}; script-src {hashes(scripts)}; "
        "img-src data:; media-src data: blob:; base-uri 'none'; form-action 'none'"
    )
    return render(
        template,
        links,
        styles=[Markup(each) for each in styles],  # noqa: S704 - files of this package
        scripts=[Markup(each) for each in scripts],  # noqa: S704 - files of this package
        policy=policy,
        written=fsio.now(),
        **values,
    )


def write_file(out: Path, text: str) -> None:
    """Write the text of a page to a file.

    Raises:
        RunError: the file cannot be written.
    """
    try:
        fsio.write_text(out, text)
    except OSError as error:
        raise errors.RunError(
            f"{out} cannot be written: {error.strerror}. Choose another --out."
        ) from error


# --- Filters ----------------------------------------------------------------------------------


def number(value: float | None, digits: int = 4) -> str:
    """Format a number of a page with `digits` significant digits; "-" for None, NaN, infinity."""
    if value is None or not math.isfinite(value):
        return "-"
    return f"{value:,}" if isinstance(value, int) else f"{value:.{digits}g}"


def percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.1f} %" if share < 0.995 else "100 %"


def at(seconds: float | None) -> str:
    """Format seconds since 1970 as `2026-03-01 12:30 UTC`; None is "-"."""
    if seconds is None:
        return "-"
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M UTC")


def embedded(value: Any) -> Markup:
    """Return a value as JSON to embed in HTML (`<script type="application/json">`), escaped."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    # "<" could begin "</script>" or "<!--"; U+2028 and U+2029 end lines in older JavaScript.
    for letter in "<>&\u2028\u2029":
        text = text.replace(letter, f"\\u{ord(letter):04x}")
    return Markup(text)  # noqa: S704 - no character of it is special in HTML


def rounded(values: Iterable[float], digits: int = 6) -> list[float | None]:
    """Round numbers for JSON to `digits` significant digits; None stands for NaN, infinity."""
    numbers = np.asarray(values if isinstance(values, np.ndarray) else [*values], np.float64)
    is_finite = np.isfinite(numbers)
    with np.errstate(all="ignore"):
        magnitudes = np.floor(np.log10(np.abs(numbers)))
        places = np.where(np.isfinite(magnitudes), digits - 1 - magnitudes, 0)
        scales = 10.0 ** np.abs(places)  # never 1e-5, which is not exact as a double; 1e5 is
        is_small = places >= 0
        short = np.round(np.where(is_small, numbers * scales, numbers / scales))
        short = np.where(is_small, short / scales, short * scales)
        # Near the limits of doubles the scale itself overflows: such numbers stay as they are.
        short = np.where(np.isfinite(short) & (scales < _LARGEST_SCALE), short, numbers)
    found: list[float | None] = short.tolist()
    if is_finite.all():
        return found
    return [x if ok else None for x, ok in zip(found, is_finite.tolist(), strict=True)]
