"""Numbers as people write them; torch-free."""

_STEPS_OF_TIME = (("d", "h", 86400, 3600), ("h", "min", 3600, 60), ("min", "s", 60, 1))


def plural(number: int, noun: str, many: str = "") -> str:
    """A number of things: 1 clip, 2 clips, 6,000 clips."""
    return f"{number:,} {noun if number == 1 else many or f'{noun}s'}"


def size(num_bytes: int) -> str:
    """An amount of memory in the largest unit of which there is one at least: 1.50 GiB, 3 bytes."""
    for unit, of_one in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if num_bytes >= of_one:
            return f"{num_bytes / of_one:.2f} {unit}"
    return f"{num_bytes} bytes"


def duration(seconds: float) -> str:
    """A time in its two largest units: 0.4 s, 34 s, 3 min 10 s, 2 h 14 min, 3 d 4 h."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    for high, low, of_high, of_low in _STEPS_OF_TIME:
        if whole >= of_high:
            return f"{whole // of_high} {high} {whole % of_high // of_low} {low}"
    return f"{whole} s"
