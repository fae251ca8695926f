"""Error messages that lost values: `python -m benchmarks.messages [COMMIT]`.

For each `raise` of an earlier commit (default: that of the goldens) it takes the text of the
message and the expressions interpolated into it, finds the `raise` of this tree with the most
similar text, and prints those that interpolate fewer values, or have no counterpart. The output is
for a reader: a value that was removed on purpose gets a line in docs/decisions.
"""

import argparse
import ast
import io
import subprocess
import tarfile
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from difflib import SequenceMatcher
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[1]
_GOLDEN = _ROOT / "tests" / "goldens" / "COMMIT"
_HOLE = "{}"
_ALIKE = 0.6  # ratio of SequenceMatcher from which on two texts are the same message


@dataclass(frozen=True)
class Message:
    """The message of one `raise`."""

    place: str
    error: str
    text: str
    values: tuple[str, ...]


def messages(sources: Mapping[str, str]) -> list[Message]:
    """Every `raise` of an error with a message, by path of the file and its source."""
    return [
        Message(f"{path}:{node.lineno}", error, text, values)
        for path, source in sorted(sources.items())
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call)
        for error in [ast.unparse(node.exc.func)]
        for text, values in [_parts(node.exc.args)]
        if text.replace(_HOLE, "").strip()
    ]


def _parts(arguments: list[ast.expr]) -> tuple[str, tuple[str, ...]]:
    text, values = "", []
    for argument in arguments:
        for piece in _pieces(argument):
            if isinstance(piece, str):
                text += piece
            else:
                text += _HOLE
                values.append(ast.unparse(piece))
    return text, tuple(values)


def _pieces(node: ast.expr) -> Iterator[str | ast.expr]:
    if isinstance(node, ast.Constant):
        yield str(node.value)
    elif isinstance(node, ast.JoinedStr):
        for part in node.values:
            yield from _pieces(part)
    elif isinstance(node, ast.FormattedValue):
        yield node.value
    elif isinstance(node, ast.BinOp):
        yield from _pieces(node.left)
        yield from _pieces(node.right)
    else:
        yield node


def lost_values(before: list[Message], now: list[Message]) -> list[tuple[Message, Message | None]]:
    """Earlier messages that interpolate more values than their counterpart, or have none."""
    left = defaultdict(list)
    for each in now:
        left[each.text].append(each)
    unmatched = []
    for each in before:
        if found := left.get(each.text):
            found.pop()
        else:
            unmatched.append(each)
    candidates = [each for found in left.values() for each in found]
    lost: list[tuple[Message, Message | None]] = []
    for each in unmatched:
        scored = [(SequenceMatcher(None, each.text, other.text).ratio(), other) for other in now]
        ratio, best = max(scored, key=lambda pair: (pair[0], pair[1] in candidates))
        if ratio < _ALIKE:
            lost.append((each, None))
        elif len(best.values) < len(each.values):
            lost.append((each, best))
    return lost


def _sources_at(commit: str) -> dict[str, str]:
    command = ["git", "-C", str(_ROOT), "archive", commit, "src/longtake"]
    packed = subprocess.run(command, capture_output=True, check=True).stdout  # noqa: S603
    with tarfile.open(fileobj=io.BytesIO(packed)) as files:
        return {
            each.name: file.read().decode()
            for each in files
            if each.name.endswith(".py") and (file := files.extractfile(each))
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("commit", nargs="?", default=_GOLDEN.read_text(encoding="utf-8").strip())
    before = messages(_sources_at(parser.parse_args().commit))
    paths = (_ROOT / "src" / "longtake").rglob("*.py")
    now = messages({str(each.relative_to(_ROOT)): each.read_text("utf-8") for each in paths})
    lost = lost_values(before, now)
    for old, new in lost:
        print(f"{old.place}: {old.error}: {old.text}\n    values: {', '.join(old.values)}")  # noqa: T201
        if new is None:
            print("    no message like it\n")  # noqa: T201
        else:
            print(f"    now {new.place}: {new.text}\n    values: {', '.join(new.values)}\n")  # noqa: T201
    print(f"{len(before)} messages before, {len(now)} now, {len(lost)} to look at")  # noqa: T201


if __name__ == "__main__":
    main()
