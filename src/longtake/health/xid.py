"""The NVIDIA driver's error numbers (XIDs), such as 79: the GPU has fallen off the bus.

The kernel's log has all of them, also those of a GPU that no longer answers, but only some users
may read it. To others the driver itself tells the critical ones while they wait for them.
"""

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

_LINE = re.compile(r"NVRM: Xid \(PCI:([0-9a-fA-F]+):([0-9a-fA-F]+):([0-9a-fA-F]+)[^)]*\): (\d+)")
_RECORD_BYTES = 8192
_MOST_RECORDS = 10_000

Bus = tuple[int, int, int]
"""Where a GPU is: domain, bus and device."""


def bus_of(text: str) -> Bus:
    """Of a text such as `00000000:3B:00.0`."""
    domain, bus, device = text.split(".")[0].split(":")
    return int(domain, 16), int(bus, 16), int(device, 16)


def parse(line: str) -> tuple[Bus, int] | None:
    """Which GPU and which XID a line of the kernel's log tells of; None: none."""
    found = _LINE.search(line)
    if found is None:
        return None
    domain, bus, device = (int(found[number], 16) for number in (1, 2, 3))
    return (domain, bus, device), int(found[4])


class KernelLog:
    """Follows the kernel's log from now on.

    Args:
        path: of the log.

    Raises:
        OSError: this user may not read it, or there is none.
    """

    def __init__(self, path: Path = Path("/dev/kmsg")) -> None:
        self._file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        os.lseek(self._file, 0, os.SEEK_END)

    def take(self) -> Iterator[tuple[Bus, int]]:
        """GPUs and their XIDs since the last call."""
        for _ in range(_MOST_RECORDS):
            try:
                record = os.read(self._file, _RECORD_BYTES)
            except BrokenPipeError:  # some were overwritten before we came
                continue
            except OSError:
                return
            if not record:
                return
            for line in record.decode(errors="replace").splitlines():
                if (found := parse(line)) is not None:
                    yield found

    def close(self) -> None:
        """Stop following."""
        os.close(self._file)


class DriverEvents:
    """What the driver itself tells.

    Args:
        nvml: the module, initialised.
        handles: of the GPUs, by bus.

    Raises:
        Exception: that of the module: the driver tells of no XIDs.
    """

    def __init__(self, nvml: Any, handles: Mapping[Bus, Any]) -> None:
        self._nvml = nvml
        self._events = nvml.nvmlEventSetCreate()
        for handle in handles.values():
            with suppress(nvml.NVMLError):  # one GPU of several may not tell
                kind = nvml.nvmlEventTypeXidCriticalError
                nvml.nvmlDeviceRegisterEvents(handle, kind, self._events)

    def take(self) -> Iterator[tuple[Bus, int]]:
        """GPUs and their XIDs since the last call."""
        with suppress(self._nvml.NVMLError):  # also "nothing has happened"
            for _ in range(_MOST_RECORDS):
                event = self._nvml.nvmlEventSetWait_v2(self._events, 0)
                yield (
                    bus_of(_text(self._nvml.nvmlDeviceGetPciInfo(event.device).busId)),
                    int(event.eventData),
                )

    def close(self) -> None:
        """Stop listening."""
        with suppress(self._nvml.NVMLError):
            self._nvml.nvmlEventSetFree(self._events)


def _text(name: bytes | str) -> str:
    return name.decode() if isinstance(name, bytes) else name
