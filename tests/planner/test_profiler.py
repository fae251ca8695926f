"""Memory that tensors take is measured exactly, temporaries inside an operation included."""

import pytest
import torch

from longtake.planner.profiler import measured, take_peak

_CPU = torch.device("cpu")


def test_counts_bytes_of_known_tensors_exactly() -> None:
    with measured(_CPU) as memory:
        kept = torch.empty(1000, dtype=torch.float32)
        passing = torch.empty(500, dtype=torch.bfloat16)
        del passing
        memory.mark("first")
        small = torch.empty(3, dtype=torch.int8)
        memory.mark("second")
        del kept
        large = torch.empty(700, dtype=torch.float64)
    assert memory.at == {"first": 4000, "second": 4003}
    assert memory.peaks == {"first": 5000, "second": 4003}
    assert memory.end_bytes == small.nbytes + large.nbytes == 5603
    assert memory.peak_bytes == 5603


def test_ignores_what_is_older_than_the_measurement() -> None:
    with measured(_CPU):
        older = torch.empty(1000)
    with measured(_CPU) as memory:
        del older
        younger = torch.empty(10)
    assert memory.end_bytes == memory.peak_bytes == younger.nbytes


def test_sees_the_temporaries_inside_an_operation() -> None:
    """A softmax of bf16 numbers in fp32 converts them first, and drops the copy."""
    x = torch.randn(256, 64, dtype=torch.bfloat16)
    with measured(_CPU) as memory:
        out = torch.softmax(x, dim=1, dtype=torch.float32)
    assert memory.end_bytes == out.nbytes
    assert memory.peak_bytes == 2 * out.nbytes


def test_refuses_a_device_it_cannot_measure() -> None:
    """The meta device holds no memory."""
    with pytest.raises(ValueError, match="not on meta"), measured(torch.device("meta")):
        pass


def test_the_peak_of_a_gpu_is_since_the_last_time(monkeypatch: pytest.MonkeyPatch) -> None:
    reset = list[torch.device]()
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda _: 5)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", reset.append)
    gpu = torch.device("cuda", 1)
    assert take_peak(gpu) == 5
    assert reset == [gpu]
    assert take_peak(_CPU) is None
