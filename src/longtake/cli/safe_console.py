"""A console of rich that sends a terminal nothing but what rich itself means to send."""

from collections.abc import Iterable
from typing import Any

from rich.console import Console
from rich.segment import Segment

from longtake.formatting import printable_lines


class SafeConsole(Console):
    """Spells control characters in whatever is printed: tables, progress, lines."""

    def render(self, renderable: Any, options: Any = None) -> Iterable[Segment]:
        """See `Console.render`."""
        for segment in super().render(renderable, options):
            text = segment.text if segment.control else printable_lines(segment.text)
            yield segment if text == segment.text else Segment(text, segment.style)
