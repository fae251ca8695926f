"""What is wrong with a node, in words, from its numbers and what degrades."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from longtake.formatting import format_size
from longtake.health.apart import HANGING_SECONDS, HANGS
from longtake.health.check import Numbers
from longtake.health.disk import Disk
from longtake.health.gpu import HARMFUL_THROTTLES, throttle_words
from longtake.health.reach import BUSY, RATE, SLOW, UNANSWERED
from longtake.health.signals import Finding
from longtake.health.steps import CHECKPOINT

_PERSISTS = 3
"""Windows that a number has to be bad for, where nothing else weighs it."""
_STAYS = 30
"""Windows for which what happened in a moment (an error) is told of."""
_APART_SECONDS = 0.1
_SAVING_SECONDS = 60.0
"""A look at the disk may hang for so long while a checkpoint is written."""
_MEMORY_SHARE, _FILES_SHARE = 0.02, 0.9
_FULL_BYTES, _FULL_SHARE = 5 * 2**30, 0.05
_FULL_INODES_SHARE = 0.01
_SLOW_SHARE = 1 / 3
_AT_ONCE = (HANGS, "disk_is_failing", "clock_offset", UNANSWERED)
_DISK = Disk.name
"""An fsync that takes seconds now and then is usual on ext4 and NFS."""
_COUNTS = {
    "gpu_ecc_uncorrected_total": "{count:.0f} memory errors of GPU {device} that no code corrects",
    "gpu_xid_errors_total": "the driver reports errors of GPU {device} (XID {xid:.0f})",
    "cgroup_oom_kills_total": "the kernel has ended {count:.0f} processes for want of memory",
    "link_downed_total": "the link {device} went down for a moment",
}


@dataclass
class Conditions:
    """Remembers what a single look cannot tell: how it was, and for how long."""

    def __post_init__(self) -> None:
        self._before: Numbers = {}
        self._was_up: set[str] = set()
        self._ages: dict[str, int] = {}
        self._left: dict[str, tuple[int, str]] = {}

    def of(self, numbers: Numbers, findings: Sequence[Finding]) -> dict[str, str]:
        """What is wrong now.

        Args:
            numbers: the node's, one window after those of the last call.
            findings: what degrades.

        Returns:
            A few words for each, by something that tells it from others.
        """
        found = dict(_words_of(findings))
        found |= self._that_persist(dict(_bad_now(numbers)))
        for device, is_up in _each(numbers, "link_up"):
            if is_up:
                self._was_up.add(device)
            elif device in self._was_up:
                found[f"link_up:{device}"] = f"the link {device} is down"
        found |= self._that_happened(numbers)
        self._before = dict(numbers)
        return found

    def _that_persist(self, bad: Mapping[str, str]) -> dict[str, str]:
        self._ages = {key: self._ages.get(key, 0) + 1 for key in bad}
        return {
            key: words
            for key, words in bad.items()
            if self._ages[key] >= _PERSISTS
            or (key.startswith(_AT_ONCE) and key != f"{HANGS}:{_DISK}")
        }

    def _that_happened(self, numbers: Numbers) -> dict[str, str]:
        self._left = {key: (n - 1, words) for key, (n, words) in self._left.items() if n > 1}
        for name, words in _COUNTS.items():
            for device, count in _each(numbers, name):
                key = f"{name}:{device}" if device else name
                more = count - self._before.get(key, count)
                if more > 0:
                    xid = numbers.get(f"gpu_last_xid:{device}", 0)
                    told = words.format(count=more, device=device, xid=xid)
                    self._left[key] = (_STAYS, told)
        return {key: words for key, (_, words) in self._left.items()}


def full_disks(numbers: Numbers) -> dict[str, float]:
    """Disks that are full, or nearly: the name of each, and the bytes that are free.

    Nearly: less than 5 GiB and than 5 %, or 1 % of the files that there can be.
    """
    found = {}
    for name, free in _each(numbers, "disk_free_bytes"):
        nearly = min(_FULL_BYTES, _FULL_SHARE * numbers.get(f"disk_size_bytes:{name}", 0))
        inodes = numbers.get(f"disk_free_inodes:{name}", 1)
        few = _FULL_INODES_SHARE * numbers.get(f"disk_inodes:{name}", 0)
        if free < nearly or inodes < few or numbers.get(f"disk_is_full:{name}"):
            found[name] = free
    return found


def _each(numbers: Numbers, name: str) -> Iterator[tuple[str, float]]:
    for key, value in numbers.items():
        found, _, device = key.partition(":")
        if found == name:
            yield device, value


def _words_of(findings: Sequence[Finding]) -> Iterator[tuple[str, str]]:
    """Of each number the worst device, and how many others there are."""
    for name in dict.fromkeys(each.signal.name for each in findings):
        alike = [each for each in findings if each.signal.name == name]
        devices = {each.device for each in alike}
        worst = max(alike, key=lambda each: abs(each.percent))
        more = f" (and {len(devices) - 1} more)" if len(devices) > 1 else ""
        yield name, worst.words() + more


def _bad_now(numbers: Numbers) -> Iterator[tuple[str, str]]:
    for device, bits in _each(numbers, "gpu_throttle_bits"):
        for word in throttle_words(int(bits) & HARMFUL_THROTTLES):
            yield f"gpu_throttle_bits:{device}:{word}", f"GPU {device} {word}"
    for device, lost in _each(numbers, "gpu_is_lost"):
        if lost:
            yield f"gpu_is_lost:{device}", f"the driver no longer reaches GPU {device}"
    for check, seconds in _each(numbers, HANGS):
        is_saving = check == _DISK and numbers.get(CHECKPOINT)
        if seconds >= (_SAVING_SECONDS if is_saving else HANGING_SECONDS):
            yield f"{HANGS}:{check}", f"looking at {check} has been hanging for {seconds:.0f} s"
    if numbers.get("disk_is_failing:run"):
        yield "disk_is_failing", "the run directory can be neither written nor read"
    for host, seconds in _each(numbers, "clock_offset_at_least_seconds"):
        if seconds >= _APART_SECONDS:
            yield f"clock_offset:{host}", f"its clock and {host}'s are {seconds:.3f} s apart"
    for host, seconds in _each(numbers, UNANSWERED):
        if seconds:
            words = f"{host} has confirmed nothing for {seconds:.0f} s of what is sent to it"
            yield f"{UNANSWERED}:{host}", words
    for host, share in _each(numbers, SLOW):
        if share <= _SLOW_SHARE:
            rate, busy = numbers[f"{RATE}:{host}"], numbers[f"{BUSY}:{host}"]
            said = f"{rate / 1e6:.3g} MB/s, {1 / max(share, 1e-4):.0f} times less than usual"
            yield (
                f"{SLOW}:{host}",
                f"the link to {host} takes {said}, and is busy {busy:.0%} of the time",
            )
    yield from _shortages(numbers)


def _shortages(numbers: Numbers) -> Iterator[tuple[str, str]]:
    available = numbers.get("memory_available_bytes")
    if available is not None and available < _MEMORY_SHARE * numbers["memory_size_bytes"]:
        yield "memory", f"{format_size(int(available))} of memory left"
    files, limit = numbers.get("open_files", 0), numbers.get("open_files_limit", 0)
    if limit and files >= _FILES_SHARE * limit:
        yield "open_files", f"a process has {files:.0f} of {limit:.0f} files open"
