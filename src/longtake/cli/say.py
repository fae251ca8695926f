"""Output of commands: results on stdout, all else on stderr, and from one rank only."""

import json
import os
import sys
from collections.abc import Iterable
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.segment import Segment

from longtake.formatting import printable_lines

AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON on stdout.")]
Changes = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Change a key, such as training.steps=100."),
]
Trust = Annotated[
    bool,
    typer.Option(
        "--trust", help="Run the code that a run names, even if somebody else began the run."
    ),
]


class SafeConsole(Console):
    """A console that prints control characters in texts as visible escapes.

    File names and captions may hold escape sequences, which would control the terminal.
    """

    def render(self, renderable: Any, options: Any = None) -> Iterable[Segment]:
        """Render like rich's `Console.render`, with control characters spelled out."""
        for segment in super().render(renderable, options):
            # Control segments are escape sequences of rich's own.
            text = segment.text if segment.control else printable_lines(segment.text)
            yield segment if text == segment.text else Segment(text, segment.style)


def console() -> Console:
    """Return the console for messages, which writes to stderr, as stdout is for results."""
    return SafeConsole(stderr=True, highlight=False, soft_wrap=True)


def stdout_console() -> Console:
    # All ranks have the same result; one prints it.
    return SafeConsole(highlight=False, soft_wrap=True, quiet=rank() != 0)


def rank() -> int:
    """Return this process's rank if torchrun started it, else 0."""
    # Not from torch.distributed: commands print before PyTorch is imported.
    return int(os.environ.get("RANK", "0"))


def line(text: str) -> None:
    if rank() == 0:
        print(printable_lines(text), file=sys.stderr)  # noqa: T201 - this is what a command line does


def complain(message: str) -> None:
    # Every rank prints its errors, because an error may occur on one rank alone.
    prefix = f"[rank {rank()}] " if rank() else ""
    print(f"{prefix}longtake: {printable_lines(message)}", file=sys.stderr)  # noqa: T201


def skipped_lines() -> None:
    """Print how many lines of the JSON files that were read are not records, and of which."""
    from longtake.fsio import skipped_lines as sentences

    for sentence in sentences():
        line(sentence)


def result(value: Any) -> None:
    if rank() == 0:
        print(json.dumps(value, indent=2))  # noqa: T201
