"""The names that a misspelt one most likely meant."""

from collections.abc import Iterable
from difflib import SequenceMatcher

_NEAR = 0.6
"""difflib's own limit, below which two names do not resemble each other."""
_AS_NEAR = 0.1
"""Names that resemble it nearly as much as the nearest are said too."""


def hint(name: str, known: Iterable[str], shown: int = 20) -> str:
    """A question that has up to three near names, or a list of known ones where none is near."""
    names = sorted(set(known))
    likeness = {each: SequenceMatcher(None, name, each).ratio() for each in names}
    limit = max(_NEAR, max(likeness.values(), default=0) - _AS_NEAR)
    near = [each for each in names if likeness[each] >= limit]
    if near:
        nearest = sorted(near, key=lambda each: -likeness[each])[:3]
        return f"did you mean {' or '.join(nearest)}?"
    more = ", ..." if len(names) > shown else ""
    return f"there are: {', '.join(names[:shown]) or 'none'}{more}."
