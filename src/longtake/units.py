"""Numbers as people write them; torch-free."""


def plural(number: int, noun: str, many: str = "") -> str:
    """A number of things: 1 clip, 2 clips, 6,000 clips."""
    return f"{number:,} {noun if number == 1 else many or f'{noun}s'}"


def size(num_bytes: int) -> str:
    """An amount of memory in the largest unit of which there is one at least: 1.50 GiB, 3 bytes."""
    for unit, of_one in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if num_bytes >= of_one:
            return f"{num_bytes / of_one:.2f} {unit}"
    return f"{num_bytes} bytes"
