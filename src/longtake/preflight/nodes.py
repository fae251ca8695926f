"""Which processes are on the same node, and what each node is called."""

from collections.abc import Mapping


def nodes_of(came: Mapping[int, tuple[str, str]]) -> tuple[list[str], list[list[int]]]:
    """Group processes by node.

    Args:
        came: by rank the host's name, and the node's number, which may be empty.

    Returns:
        The nodes' names, that of rank 0 first, and the ranks on each. Of several that are called
        the same, as containers can be, the later ones get a number.
    """
    together: dict[tuple[str, str], list[int]] = {}
    for rank in sorted(came):
        together.setdefault(came[rank], []).append(rank)
    names: list[str] = []
    for host, _ in together:
        taken = sum(name == host or name.startswith(f"{host} (") for name in names)
        names.append(f"{host} ({taken + 1})" if taken else host)
    return names, list(together.values())
