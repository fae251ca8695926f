"""What is done otherwise on a GPU, run without one: nothing is moved to this device of its type."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from longtake.errors import PlanError
from longtake.sampling.sampler import refuse_too_large_parts
from longtake.training import latent_cache, runtime

_GPU = torch.device("cuda", 0)


class _Text:
    """Notes what it encodes together, and where it is brought."""

    def __init__(self) -> None:
        self.batches: list[int] = []
        self.places: list[str] = []

    def encode(self, captions: list[str]) -> dict[str, torch.Tensor]:
        self.batches.append(len(captions))
        return {"lengths": torch.tensor([len(each) for each in captions])}

    def to(self, device: torch.device) -> None:
        self.places.append(device.type)


@pytest.mark.parametrize(("device", "batches"), [(_GPU, [3]), (torch.device("cpu"), [1, 1, 1])])
def test_captions_are_encoded_together_on_a_gpu(device: torch.device, batches: list[int]) -> None:
    text: Any = _Text()
    encoded = latent_cache._caption_encoder(text, device)(["a", "bb", "ccc"])
    assert [int(each["lengths"]) for each in encoded] == [1, 2, 3]
    assert text.batches == batches
    with latent_cache._on_device(text, device):
        pass
    assert text.places == [device.type, "cpu"]


def test_a_part_that_no_gpu_holds_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    facts = SimpleNamespace(total_memory=2**30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: facts)
    parts: Any = SimpleNamespace(part_bytes=lambda: {"text": 2**20, "model": 2**31, "codec": 0})
    with pytest.raises(PlanError, match="take 2"):
        refuse_too_large_parts(parts, _GPU)
    refuse_too_large_parts(parts, torch.device("cpu"))


def test_memory_of_a_gpu_is_told_after_it_ran_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda _: 3 * 2**30)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 5 * 2**30)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (2**30, 8 * 2**30))
    measured = runtime._measured(_GPU)
    assert all(number in measured for number in ("3.00", "5.00", "1.00", "8.00"))
