"""Types of the fields of records, and times in their format.

A record is a TypedDict, a frozen dataclass or a `TypeAdapter`; the package that owns a format
declares its type. Validation is strict: 5.0 and "5" are not integers. Fields that a TypedDict
does not name are dropped, unless it is decorated with `@with_other_fields`.
"""

from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from typing import Annotated, Any, Final, Literal, TypeVar, Union

import pydantic

_T = TypeVar("_T")
with_other_fields: Final[Callable[[type[_T]], type[_T]]] = pydantic.with_config(
    pydantic.ConfigDict(extra="allow")
)


def is_file_name(text: str) -> bool:
    return text not in ("", ".", "..") and "/" not in text and "\0" not in text


def _check_name(text: str) -> str:
    if not is_file_name(text):
        raise ValueError("expected a file name without a folder")
    return text


def _check_time(text: str) -> str:
    with suppress(ValueError, OverflowError):
        # `timestamp` too, as readers compute with it, and it fails for a time at the edge of the
        # calendar.
        datetime.fromisoformat(text).timestamp()
        return text
    raise ValueError("expected a time such as 2026-05-01T12:00:00+00:00")


def _check_inner_path(text: str) -> str:
    if "\0" in text or text.startswith("/") or not {"", ".", ".."}.isdisjoint(text.split("/")):
        raise ValueError("expected a path to a file below the folder")
    return text


def _check_span(span: list[int]) -> list[int]:
    if span[0] > span[1]:
        raise ValueError(f"expected [first, end), got {span}")
    return span


Count = Annotated[int, pydantic.Field(ge=0, le=2**53)]
"""Number of steps, samples or bytes, at most 2**53, so that a float holds it exactly."""
Finite = Annotated[float, pydantic.Field(allow_inf_nan=False)]
# The upper limit is the year 5138, which `datetime` (up to 9999) can still show.
Timestamp = Annotated[float, pydantic.Field(ge=0, le=1e11)]
"""Time in seconds since 1970."""
NumberOrText = Finite | Literal["nan", "inf", "-inf"]
"""Float in a JSON record. NaN and infinities, which JSON lacks, are written as text."""
Span = Annotated[
    list[Count], pydantic.Field(min_length=2, max_length=2), pydantic.AfterValidator(_check_span)
]
"""Half-open range of numbers in a record, as a list [first, end]."""
FileName = Annotated[str, pydantic.Field(max_length=255), pydantic.AfterValidator(_check_name)]
InnerPath = Annotated[
    str, pydantic.Field(max_length=4096), pydantic.AfterValidator(_check_inner_path)
]
"""Relative path of a file below a folder, such as a checkpoint, without ".." in it."""
Time = Annotated[str, pydantic.Field(max_length=64), pydantic.AfterValidator(_check_time)]
"""Time in ISO 8601 format, such as 2026-05-01T12:00:00.000+00:00."""


def format_number(number: int) -> Any:
    """Return the type of a field `format` that accepts only `number`."""

    def check(found: int) -> int:
        if found != number:
            raise ValueError(
                f"it has format {found}, and this longtake reads format {number}: use the "
                "longtake that wrote it"
            )
        return found

    return Annotated[int, pydantic.AfterValidator(check)]


def by_field(
    name: str, kinds: Mapping[str, Any], other: Any
) -> pydantic.TypeAdapter[dict[str, Any]]:
    """Return a validator for records, such as events, whose type depends on one field.

    Args:
        name: the field.
        kinds: type of the record, by value of the field.
        other: type of records with any other value.
    """

    def tag(record: Any) -> str:
        # pydantic refuses a record whose tag is None. With the tag "" a record of an unknown kind,
        # such as an event of a newer version, is validated as `other`.
        value = record.get(name) if isinstance(record, dict) else None
        return value if isinstance(value, str) and value in kinds else ""

    tagged = [Annotated[kind, pydantic.Tag(value)] for value, kind in {**kinds, "": other}.items()]
    union: Any = Annotated[Union[tuple(tagged)], pydantic.Discriminator(tag)]  # noqa: UP007
    return pydantic.TypeAdapter(union)


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def file_time() -> str:
    """Return the present time (UTC) as text for a file name; such names sort by time."""
    return datetime.now(UTC).strftime("%Y%m%dT%H%M%S_%f")
