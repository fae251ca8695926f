"""Numbers as people write them; torch-free."""


def size(num_bytes: int) -> str:
    """An amount of memory in the largest unit of which there is one at least: 1.50 GiB, 3 bytes."""
    for unit, of_one in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if num_bytes >= of_one:
            return f"{num_bytes / of_one:.2f} {unit}"
    return f"{num_bytes} bytes"
