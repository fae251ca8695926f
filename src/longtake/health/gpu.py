"""Probe of NVIDIA GPUs through NVML: power, temperature, clocks, throttling and errors (XIDs)."""

import ctypes
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from longtake.health.system import HealthProbe, Numbers, Rates

_XID_LINE = re.compile(r"NVRM: Xid \(PCI:([0-9a-fA-F]+:[0-9a-fA-F]+:[0-9a-fA-F]+)[^)]*\): (\d+)")
_RECORD_BYTES = 8192  # of /dev/kmsg: a shorter buffer gives EINVAL for a long record
_MAX_RECORDS = 10_000  # in one sample, so that a log that is flooded cannot hold it up
_NVLINK_ERRORS = (0, 1, 2, 3)  # nvmlNvLinkErrorCounter_t: replay, recovery, CRC of flits and data
PciAddress = tuple[int, int, int]
"""PCI address of a GPU: domain, bus and device."""
_THROTTLES = {
    0x02: "clocks set by a user",
    0x04: "power limit",
    0x08: "hardware slowdown",
    0x10: "clocks of several GPUs kept the same",
    0x20: "thermal slowdown by the driver",
    0x40: "thermal slowdown",
    0x80: "power brake: the power supply asked for it",
    0x100: "display clocks",
    0x200: "limit of the board",
    0x400: "voltage limit",
}
"""Words for the reasons of a throttled GPU: NVML's bits nvmlClocksEventReason..., except 0x01
(idle)."""
HARMFUL_THROTTLES = 0x08 | 0x20 | 0x40 | 0x80
"""Bits of throttle reasons that no healthy GPU has; the power limit is normal under full load."""


def throttle_words(bits: float) -> list[str]:
    return [words for bit, words in _THROTTLES.items() if int(bits) & bit]


class GpuProbe(HealthProbe):
    """Health probe of all GPUs of the node; without a driver it measures nothing."""

    name = "gpu"
    numbers: Mapping[str, str] = {
        "gpu_power_watts": "Power that the GPU draws",
        "gpu_power_limit_watts": "Power that the GPU may draw",
        "gpu_temperature_celsius": "Temperature of the chip",
        "gpu_sm_clock_mhz": "Clock of the multiprocessors",
        "gpu_memory_clock_mhz": "Clock of the memory",
        "gpu_throttle_bits": "Reasons for lowered clocks, as bits (nvmlClocksEventReason)",
        "gpu_utilization_share": "Share of the last moments in which a kernel ran",
        "gpu_memory_used_bytes": "Memory of the GPU in use",
        "gpu_memory_size_bytes": "Size of the GPU's memory",
        "gpu_ecc_corrected_total": "Corrected memory errors since the driver was loaded",
        "gpu_ecc_uncorrected_total": "Uncorrectable memory errors",
        "gpu_remapped_rows": "Rows of memory that were remapped for good after errors",
        "gpu_nvlink_errors_total": "Replays, recoveries and checksum errors of the GPU's NVLinks",
        "gpu_nvlink_errors_per_second": "The same errors per second",
        "gpu_xid_errors_total": "Errors that the driver has reported since the watcher began",
        "gpu_last_xid": "Number of the last of these errors (XID)",
        "gpu_is_lost": "1: the driver no longer reaches the GPU",
    }

    def __init__(self) -> None:
        self._nvml: Any = None
        self._has_looked = False
        self._handles: dict[str, Any] = {}
        self._buses: dict[PciAddress, str] = {}
        self._xids: dict[str, list[int]] = {}
        self._log: KernelLog | DriverEvents | None = None
        self._rates = Rates()

    @property
    def is_present(self) -> bool:
        """True if there is a driver with a GPU; the first access hangs if the driver does."""
        if not self._has_looked:
            self._has_looked = True
            self._nvml = _driver()
            if self._nvml is not None:
                self._find(self._nvml)
        return bool(self._handles)

    def sample(self) -> Numbers:
        """Read the health numbers of all GPUs, as `name:index`."""
        if not self.is_present:
            return {}
        for bus, xid in self._log.take() if self._log is not None else ():
            self._xids.setdefault(self._buses.get(bus, "unknown"), []).append(xid)
        found: Numbers = {}
        for device, handle in self._handles.items():
            own = dict(_read(self._nvml, handle))
            errors = own.get("gpu_nvlink_errors_total")
            own |= self._rates.rate("gpu_nvlink_errors_per_second", device, errors)
            found |= {f"{name}:{device}": value for name, value in own.items()}
            xids = self._xids.get(device, [])
            found[f"gpu_xid_errors_total:{device}"] = len(xids)
            found |= {f"gpu_last_xid:{device}": xids[-1]} if xids else {}
        return found

    def close(self) -> None:
        if self._log is not None:
            self._log.close()
        if self._nvml is not None:
            with suppress(self._nvml.NVMLError):
                self._nvml.nvmlShutdown()
        self._nvml, self._log, self._handles = None, None, {}

    def _find(self, nvml: Any) -> None:
        with suppress(nvml.NVMLError):
            for number in range(nvml.nvmlDeviceGetCount()):
                with suppress(nvml.NVMLError):  # one of them may be lost
                    handle = nvml.nvmlDeviceGetHandleByIndex(number)
                    self._handles[str(number)] = handle
                    self._buses[_bus(nvml, handle)] = str(number)
        # The kernel's log also has errors of GPUs that no longer answer, but containers and
        # unprivileged users often cannot read it.
        try:
            self._log = KernelLog()
        except OSError:
            with suppress(nvml.NVMLError):
                self._log = DriverEvents(nvml, map(self._handles.get, self._buses.values()))


def _driver() -> Any:
    """Import and initialise pynvml, NVIDIA's library; None: there is no driver."""
    # The library comes with the driver: without it pynvml is not even imported.
    try:
        ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None
    import pynvml  # a megabyte, which only a watcher of GPUs needs

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    return pynvml


def driver_facts() -> dict[str, Any]:
    """Return the versions of NVIDIA's driver and CUDA, and the GPUs; empty without a driver."""
    nvml = _driver()
    if nvml is None:
        return {}
    gpus = []
    for number in range(nvml.nvmlDeviceGetCount()):
        with suppress(nvml.NVMLError):  # one of them may be lost
            handle = nvml.nvmlDeviceGetHandleByIndex(number)
            memory = int(nvml.nvmlDeviceGetMemoryInfo(handle).total)
            gpus.append({"name": str(nvml.nvmlDeviceGetName(handle)), "memory_bytes": memory})
    return {
        "driver": str(nvml.nvmlSystemGetDriverVersion()),
        "cuda": int(nvml.nvmlSystemGetCudaDriverVersion()),
        "gpus": gpus,
    }


def _read(nvml: Any, handle: Any) -> Iterator[tuple[str, float]]:
    """Yield name and value of each health number that a GPU supports."""
    lost_errors, is_lost = (nvml.NVML_ERROR_GPU_IS_LOST, nvml.NVML_ERROR_UNKNOWN), False
    for name, (read, unit) in _readers(nvml).items():
        try:
            yield name, float(read(handle)) * unit
        except nvml.NVMLError as error:
            # Every GPU has a temperature; other numbers may be unknown to a healthy one.
            is_lost |= name == "gpu_temperature_celsius" and error.value in lost_errors
    yield "gpu_is_lost", float(is_lost)


def _readers(nvml: Any) -> Mapping[str, tuple[Callable[[Any], float], float]]:
    """Return the reader of each health number of a GPU by name, with the factor to its unit."""

    def clock(kind: int) -> Callable[[Any], float]:
        return lambda gpu: nvml.nvmlDeviceGetClockInfo(gpu, kind)

    def ecc(kind: int) -> Callable[[Any], float]:
        return lambda gpu: nvml.nvmlDeviceGetTotalEccErrors(gpu, kind, nvml.NVML_VOLATILE_ECC)

    def nvlink_errors(gpu: Any) -> float:
        counts = []
        for link in range(nvml.NVML_NVLINK_MAX_LINKS):
            for kind in _NVLINK_ERRORS:
                with suppress(nvml.NVMLError):  # the GPU has fewer links, or this one is off
                    counts.append(nvml.nvmlDeviceGetNvLinkErrorCounter(gpu, link, kind))
        # A GPU without NVLink has no number, instead of 0 errors.
        if not counts:
            raise nvml.NVMLError(nvml.NVML_ERROR_NOT_SUPPORTED)
        return float(sum(counts))

    return {
        "gpu_power_watts": (nvml.nvmlDeviceGetPowerUsage, 1e-3),
        "gpu_power_limit_watts": (nvml.nvmlDeviceGetEnforcedPowerLimit, 1e-3),
        "gpu_temperature_celsius": (
            lambda gpu: nvml.nvmlDeviceGetTemperature(gpu, nvml.NVML_TEMPERATURE_GPU),
            1,
        ),
        "gpu_sm_clock_mhz": (clock(nvml.NVML_CLOCK_SM), 1),
        "gpu_memory_clock_mhz": (clock(nvml.NVML_CLOCK_MEM), 1),
        # The older name of nvmlDeviceGetCurrentClocksEventReasons, which every driver has.
        "gpu_throttle_bits": (nvml.nvmlDeviceGetCurrentClocksThrottleReasons, 1),
        "gpu_utilization_share": (lambda gpu: nvml.nvmlDeviceGetUtilizationRates(gpu).gpu, 0.01),
        "gpu_memory_used_bytes": (lambda gpu: nvml.nvmlDeviceGetMemoryInfo(gpu).used, 1),
        "gpu_memory_size_bytes": (lambda gpu: nvml.nvmlDeviceGetMemoryInfo(gpu).total, 1),
        "gpu_ecc_corrected_total": (ecc(nvml.NVML_MEMORY_ERROR_TYPE_CORRECTED), 1),
        "gpu_ecc_uncorrected_total": (ecc(nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED), 1),
        "gpu_nvlink_errors_total": (nvlink_errors, 1),
        "gpu_remapped_rows": (lambda gpu: sum(nvml.nvmlDeviceGetRemappedRows(gpu)[:2]), 1),
    }


# --- XIDs, such as 79: the GPU has fallen off the bus.


def pci_address(text: str) -> PciAddress:
    domain, bus, device = text.split(".")[0].split(":")
    return int(domain, 16), int(bus, 16), int(device, 16)


def parse_xid(line: str) -> tuple[PciAddress, int] | None:
    """Parse GPU and error number (XID) from a line of the kernel's log; None: it has none."""
    found = _XID_LINE.search(line)
    return None if found is None else (pci_address(found[1]), int(found[2]))


class KernelLog:
    """Follows the kernel's log, which has all GPU errors (XIDs), even of a GPU that is gone.

    Raises:
        OSError: the log cannot be read.
    """

    def __init__(self, path: Path = Path("/dev/kmsg")) -> None:
        self._file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        # Errors from before the run are not its own.
        os.lseek(self._file, 0, os.SEEK_END)

    def take(self) -> Iterator[tuple[PciAddress, int]]:
        """Yield GPU and number of each GPU error (XID) in the kernel's log since the last call."""
        for _ in range(_MAX_RECORDS):
            try:
                record = os.read(self._file, _RECORD_BYTES)
            except BrokenPipeError:  # records were overwritten before they were read
                continue
            except OSError:
                return
            if not record:
                return
            for line in record.decode(errors="replace").splitlines():
                if (found := parse_xid(line)) is not None:
                    yield found

    def close(self) -> None:
        os.close(self._file)


class DriverEvents:
    """Critical GPU errors (XIDs) reported by the driver itself, which any user may read."""

    def __init__(self, nvml: Any, handles: Iterable[Any]) -> None:
        self._nvml = nvml
        self._events = nvml.nvmlEventSetCreate()
        for handle in handles:
            with suppress(nvml.NVMLError):  # one GPU of several may not report
                kind = nvml.nvmlEventTypeXidCriticalError
                nvml.nvmlDeviceRegisterEvents(handle, kind, self._events)

    def take(self) -> Iterator[tuple[PciAddress, int]]:
        """Yield GPU and number of each error (XID) that the driver reported since the last call."""
        with suppress(self._nvml.NVMLError):  # a timeout, without an event, is an error too
            for _ in range(_MAX_RECORDS):
                event = self._nvml.nvmlEventSetWait_v2(self._events, 0)
                yield _bus(self._nvml, event.device), int(event.eventData)

    def close(self) -> None:
        with suppress(self._nvml.NVMLError):
            self._nvml.nvmlEventSetFree(self._events)


def _bus(nvml: Any, handle: Any) -> PciAddress:
    name = nvml.nvmlDeviceGetPciInfo(handle).busId
    return pci_address(name.decode() if isinstance(name, bytes) else name)
