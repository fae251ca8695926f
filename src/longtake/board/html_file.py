"""Writes one HTML file that needs no server and no network: it has styles and scripts inside."""

import base64
from collections.abc import Iterable, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

from markupsafe import Markup

from longtake import errors, fsio
from longtake.board import assets
from longtake.board.pages import PageLinks, render


def render_file(
    template: str, links: PageLinks | None = None, scripts: Sequence[str] = (), **values: Any
) -> str:
    """Return the text of a file, from a template that extends `file.html`."""
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


def check_name(out: Path) -> None:
    """Refuse a path that does not end in .html, or that exists and is not a page.

    Raises:
        RunError: the path cannot be used; the message says what was expected.
    """
    fsio.check_picture_name(out, (".html",))


def write(out: Path, text: str) -> None:
    """Write a page to a file.

    Raises:
        RunError: the file cannot be written.
    """
    try:
        fsio.write_text(out, text)
    except OSError as error:
        raise errors.RunError(
            f"{out} cannot be written: {error.strerror}. Choose another --out."
        ) from error
