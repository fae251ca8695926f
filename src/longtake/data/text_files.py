"""Reads text of others: UTF-8, or UTF-16 with a byte order mark."""

import codecs
import io
from pathlib import Path

from longtake import fsio
from longtake.errors import DataError


def decode_text(data: bytes, name: object) -> str:
    """Decode text in UTF-8, or in UTF-16 with a byte order mark.

    Raises:
        DataError: the text is neither; the message has the name of its file.
    """
    try:
        return data.decode(encoding_of(io.BytesIO(data)))
    except UnicodeDecodeError as error:
        raise DataError(f"{name} is not UTF-8 text: {error}. Save it as UTF-8.") from error


def encoding_of(file: io.BufferedReader | io.BytesIO) -> str:
    """Return the encoding of a file of text, at its beginning."""
    # UTF-16 is told by its mark only; without one it cannot be distinguished surely. "utf-8-sig"
    # reads UTF-8 with the mark that spreadsheets write, and without.
    start = file.read(2)
    file.seek(0)
    return "utf-16" if start in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE) else "utf-8-sig"


def read_text(path: Path) -> str:
    """Return the content of a file of captions.

    Raises:
        DataError: the file cannot be read, or is not UTF-8 or UTF-16.
    """
    try:
        return decode_text(fsio.read_regular(path), path)
    except OSError as error:
        raise DataError(f"The captions {path} cannot be read: {error.strerror}.") from error
