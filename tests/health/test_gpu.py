"""GPUs: of a machine that has some, of a driver in place of NVIDIA's, and of a machine without."""

import ctypes
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from longtake.health.gpu import GpuProbe, KernelLog, parse_xid, pci_address, throttle_words

_SAMPLE = """
import json
from longtake.health import gpu
from longtake.health.gpu import KernelLog
def unreadable(*_):
    raise PermissionError
gpu.KernelLog = unreadable  # what most users meet: the driver itself is asked for XIDs
check = gpu.GpuProbe()
print(json.dumps([check.sample(), check.sample()]))
check.close()
"""


def _has_driver() -> bool:
    try:
        ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return False
    return True


@pytest.mark.skipif(_has_driver(), reason="this machine has NVIDIA's driver")
def test_absent() -> None:
    """Without a driver there are no GPUs, no numbers and no error."""
    check = GpuProbe()
    assert not check.is_present
    assert check.sample() == {}
    check.close()
    check.close()


@pytest.mark.skipif(
    not _has_driver(), reason="no NVIDIA driver (libnvidia-ml.so.1) on this machine"
)
def test_real() -> None:
    """A real GPU tells its power, temperature, clocks and memory."""
    check = GpuProbe()
    if not check.is_present:
        pytest.skip("NVIDIA's driver finds no GPU")
    found = check.sample()
    check.close()
    assert {key.partition(":")[0] for key in found} <= set(GpuProbe.numbers)
    assert 0 < found["gpu_memory_used_bytes:0"] <= found["gpu_memory_size_bytes:0"]
    assert 0 < found["gpu_temperature_celsius:0"] < 120
    assert 0 < found["gpu_power_watts:0"] < 2000
    assert found["gpu_is_lost:0"] == 0


@pytest.mark.skipif(shutil.which("gcc") is None, reason="no compiler for a driver in its place")
def test_through_a_driver(tmp_path: Path) -> None:
    """All numbers come through NVIDIA's own Python module, in their units, and each XID once."""
    library = tmp_path / "libnvidia-ml.so.1"
    source = Path(__file__).with_name("nvml.c")
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", str(library), str(source)], check=True)
    environment = {**os.environ, "LD_LIBRARY_PATH": str(tmp_path)}
    command = [sys.executable, "-c", _SAMPLE]
    said = subprocess.run(
        command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=True
    )
    first, second = json.loads(said.stdout)
    hot = {key.partition(":")[0]: value for key, value in second.items() if key.endswith(":0")}
    assert hot == {
        "gpu_is_lost": 0,
        "gpu_power_watts": 412,
        "gpu_power_limit_watts": 700,
        "gpu_temperature_celsius": 91,
        "gpu_sm_clock_mhz": 1155,
        "gpu_memory_clock_mhz": 2619,
        "gpu_throttle_bits": 0x44,
        "gpu_utilization_share": 0.97,
        "gpu_memory_used_bytes": 60 * 2**30,
        "gpu_memory_size_bytes": 80 * 2**30,
        "gpu_ecc_corrected_total": 11,
        "gpu_ecc_uncorrected_total": 2,
        "gpu_nvlink_errors_total": 0 + 1 + 2 + 3 + 10 + 11 + 12 + 13,
        "gpu_nvlink_errors_per_second": 0,
        "gpu_remapped_rows": 3,
        "gpu_xid_errors_total": 1,
        "gpu_last_xid": 79,
    }
    assert set(hot) == set(GpuProbe.numbers)
    assert first["gpu_power_watts:1"] == 655
    assert not {"gpu_ecc_uncorrected_total:1", "gpu_nvlink_errors_total:1"} & first.keys()
    assert first["gpu_xid_errors_total:1"] == 0


def test_xids_that_are_logged_from_now_on_are_found_with_their_gpu(tmp_path: Path) -> None:
    path = tmp_path / "kmsg"
    line = "4,7,8,-;NVRM: Xid (PCI:0000:{bus}:00): {xid}, pid=1, GPU has fallen off the bus.\n"
    path.write_text(line.format(bus="3b", xid=13))
    log = KernelLog(path)
    assert list(log.take()) == []
    with path.open("a") as file:
        file.write("6,9,10,-;usb 1-1: new device\n" + line.format(bus="5e", xid=79))
    assert list(log.take()) == [(pci_address("00000000:5E:00.0"), 79)]
    assert list(log.take()) == []
    log.close()
    assert parse_xid("6,9,10,-;usb 1-1: new device") is None


def test_reasons_of_lowered_clocks_are_told_in_words_and_idleness_is_none() -> None:
    assert throttle_words(0x01) == []
    assert throttle_words(0x445) == ["power limit", "thermal slowdown", "voltage limit"]
