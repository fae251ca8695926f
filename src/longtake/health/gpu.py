"""GPUs, as NVIDIA's driver tells of them: power, heat, clocks and what holds them down, errors."""

import ctypes
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import Any

from longtake.health.check import Numbers
from longtake.health.xid import Bus, DriverEvents, KernelLog, bus_of

_THROTTLES = {
    0x02: "clocks set by somebody",
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
"""nvmlClocksEventReason...: why clocks are lower than they could be. 0x01, idle, is none."""
HARMFUL_THROTTLES = 0x08 | 0x20 | 0x40 | 0x80
"""What no healthy GPU does; a power limit is usual under full load."""


def throttle_words(bits: float) -> list[str]:
    """What `gpu_throttle_bits` says, in words."""
    return [words for bit, words in _THROTTLES.items() if int(bits) & bit]


class Gpu:
    """Asks the driver; where there is none it measures nothing."""

    name = "gpu"
    numbers: Mapping[str, str] = {
        "gpu_power_watts": "Power drawn",
        "gpu_power_limit_watts": "Power that it may draw",
        "gpu_temperature_celsius": "Temperature of the chip",
        "gpu_sm_clock_mhz": "Clock of the multiprocessors",
        "gpu_memory_clock_mhz": "Clock of the memory",
        "gpu_throttle_bits": "Why clocks are lower than they could be (nvmlClocksEventReason)",
        "gpu_utilization_share": "Of the last moments, when some kernel ran",
        "gpu_memory_used_bytes": "Memory in use",
        "gpu_memory_size_bytes": "All memory",
        "gpu_ecc_corrected_total": "Memory errors that were corrected, since the driver was loaded",
        "gpu_ecc_uncorrected_total": "Memory errors that could not be corrected",
        "gpu_remapped_rows": "Rows of memory that were replaced for good after errors",
        "gpu_xid_errors_total": "Errors that the driver has told of since the watcher began",
        "gpu_last_xid": "Number of the last of them (XID)",
        "gpu_is_lost": "1: the driver no longer reaches it",
    }

    def __init__(self) -> None:
        self._nvml: Any = None
        self._has_looked = False
        self._handles: dict[str, Any] = {}
        self._buses: dict[Bus, str] = {}
        self._xids: dict[str, list[int]] = {}
        self._log: KernelLog | DriverEvents | None = None

    @property
    def is_present(self) -> bool:
        """Whether there is a driver with a GPU; asking may hang where the driver does."""
        if not self._has_looked:
            self._has_looked = True
            self._nvml = _driver()
            if self._nvml is not None:
                self._find(self._nvml)
        return bool(self._handles)

    def sample(self) -> Numbers:
        """The numbers now, with the GPU's number behind a colon."""
        if not self.is_present:
            return {}
        for bus, xid in self._log.take() if self._log is not None else ():
            self._xids.setdefault(self._buses.get(bus, "unknown"), []).append(xid)
        found: Numbers = {}
        for device, handle in self._handles.items():
            found |= {f"{name}:{device}": value for name, value in _read(self._nvml, handle)}
            xids = self._xids.get(device, [])
            found[f"gpu_xid_errors_total:{device}"] = len(xids)
            found |= {f"gpu_last_xid:{device}": xids[-1]} if xids else {}
        return found

    def close(self) -> None:
        """Let go of the driver."""
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
                    name = nvml.nvmlDeviceGetPciInfo(handle).busId
                    bus = bus_of(name.decode() if isinstance(name, bytes) else name)
                    self._buses[bus] = str(number)
        with suppress(nvml.NVMLError):
            self._log = self._listen(nvml)

    def _listen(self, nvml: Any) -> KernelLog | DriverEvents:
        with suppress(OSError):
            return KernelLog()
        return DriverEvents(nvml, {bus: self._handles[name] for bus, name in self._buses.items()})


def _driver() -> Any:
    """The module that speaks with the driver, ready; None: there is no driver."""
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


def _read(nvml: Any, handle: Any) -> Iterator[tuple[str, float]]:
    """What a GPU tells; each number alone may be one that this GPU does not have."""
    yield "gpu_is_lost", 0.0 if _answers(nvml, handle) else 1.0
    for name, (read, of_one) in _questions(nvml).items():
        with suppress(nvml.NVMLError):
            yield name, float(read(handle)) * of_one


def _answers(nvml: Any, handle: Any) -> bool:
    try:
        nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU)
    except nvml.NVMLError as error:
        return bool(error.value not in (nvml.NVML_ERROR_GPU_IS_LOST, nvml.NVML_ERROR_UNKNOWN))
    return True


def _questions(nvml: Any) -> Mapping[str, tuple[Callable[[Any], float], float]]:
    """By number: what is asked, and how much one of the answer is."""
    volatile = nvml.NVML_VOLATILE_ECC
    return {
        "gpu_power_watts": (nvml.nvmlDeviceGetPowerUsage, 1e-3),
        "gpu_power_limit_watts": (nvml.nvmlDeviceGetEnforcedPowerLimit, 1e-3),
        "gpu_temperature_celsius": (
            lambda gpu: nvml.nvmlDeviceGetTemperature(gpu, nvml.NVML_TEMPERATURE_GPU),
            1,
        ),
        "gpu_sm_clock_mhz": (lambda gpu: nvml.nvmlDeviceGetClockInfo(gpu, nvml.NVML_CLOCK_SM), 1),
        "gpu_memory_clock_mhz": (
            lambda gpu: nvml.nvmlDeviceGetClockInfo(gpu, nvml.NVML_CLOCK_MEM),
            1,
        ),
        # Its older name: every driver has it.
        "gpu_throttle_bits": (nvml.nvmlDeviceGetCurrentClocksThrottleReasons, 1),
        "gpu_utilization_share": (lambda gpu: nvml.nvmlDeviceGetUtilizationRates(gpu).gpu, 0.01),
        "gpu_memory_used_bytes": (lambda gpu: nvml.nvmlDeviceGetMemoryInfo(gpu).used, 1),
        "gpu_memory_size_bytes": (lambda gpu: nvml.nvmlDeviceGetMemoryInfo(gpu).total, 1),
        "gpu_ecc_corrected_total": (
            lambda gpu: nvml.nvmlDeviceGetTotalEccErrors(
                gpu, nvml.NVML_MEMORY_ERROR_TYPE_CORRECTED, volatile
            ),
            1,
        ),
        "gpu_ecc_uncorrected_total": (
            lambda gpu: nvml.nvmlDeviceGetTotalEccErrors(
                gpu, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, volatile
            ),
            1,
        ),
        "gpu_remapped_rows": (lambda gpu: sum(nvml.nvmlDeviceGetRemappedRows(gpu)[:2]), 1),
    }
