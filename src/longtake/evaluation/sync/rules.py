r"""Which files of a tree are meant: ordered rules, of which the first that matches decides.

They are a small part of rsync's filter rules, so that rsync is given them as they are, and other
ways of copying choose the same files: `+ PATTERN` and `- PATTERN`, where a pattern that begins
with / is anchored at the top of the tree, another matches a name at any depth; one that ends with
/ matches folders only; * stands for any part of a name; `\` takes the next character's meaning. A
folder that is left out is left out with all that is in it. What no rule matches is meant.
"""

import re
from collections.abc import Iterable

Rules = tuple[str, ...]


def literal(name: str) -> str:
    """A name as a part of a pattern; it must have no backslash."""
    return re.sub(r"([*?\[])", r"\\\1", name)


def chosen(rules: Rules, name: str, *, is_folder: bool) -> bool:
    """Whether a file or folder is meant, if the folder that it lies in is.

    Args:
        rules: in their order.
        name: its path in the tree, parts joined by /.
        is_folder: whether it is one.
    """
    first = next((rule for rule in rules if _matches(rule[2:], name, is_folder)), "+ ")
    return first.startswith("+")


def only(patterns: Iterable[str]) -> Rules:
    """Rules by which nothing but some paths is meant; with the folders on the way to them.

    Args:
        patterns: anchored paths of files.
    """
    wanted: dict[str, None] = {}
    for pattern in patterns:
        parts = pattern.strip("/").split("/")
        ways = ["/" + "/".join(parts[:number]) + "/" for number in range(1, len(parts))]
        wanted |= dict.fromkeys([*ways, pattern])
    return (*(f"+ {each}" for each in wanted), "- *")


def _matches(pattern: str, name: str, is_folder: bool) -> bool:
    if pattern.endswith("/") and not is_folder:
        return False
    compared = name if pattern.startswith("/") else name.rpartition("/")[2]
    return re.fullmatch(_expression(pattern.strip("/")), compared, re.DOTALL) is not None


def _expression(pattern: str) -> str:
    parts = re.findall(r"\\.|.", pattern, re.DOTALL)
    wild = {"*": "[^/]*", "?": "[^/]"}
    return "".join(wild.get(part, re.escape(part[-1])) for part in parts)
