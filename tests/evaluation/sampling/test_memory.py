"""What is tried when memory runs out, in which order, and that the videos stay the same."""

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from longtake.errors import PlanError
from longtake.evaluation.sampling.memory import Memory, Way, attempt, device_with_room
from longtake.evaluation.sampling.studio import Request, Sampler, load_sampler, settings_for
from longtake.models.base import Conditioning
from longtake.models.build import Components
from longtake.models.codec import PixelCodec

_PROMPTS = ["a red circle moving up", "a blue square moving left", "a green cross moving down"]
_REQUESTS = [Request(prompt, seed) for seed, prompt in enumerate([*_PROMPTS, _PROMPTS[0]])]
_STEPS = 3


class SmallCodec(PixelCodec):
    """Has memory for tiles, or not even for those."""

    def __init__(self, fits_tiles: bool = True) -> None:
        self.asked: list[bool] = []
        self._fits_tiles = fits_tiles

    def decode(self, latents: Tensor, *, tiles: bool = False) -> Tensor:
        """Decode in tiles only."""
        self.asked.append(tiles)
        if not (tiles and self._fits_tiles):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return super().decode(latents)


@dataclass(frozen=True)
class SmallCard(Components):
    """Components whose model has memory for so many videos in one pass."""

    room: int = 0
    error: Exception = field(default_factory=lambda: torch.OutOfMemoryError("CUDA out of memory."))
    asked: list[int] = field(default_factory=list)

    def predict_velocity(
        self, noisy_latents: Tensor, sigmas: Tensor, conditioning: Conditioning
    ) -> Tensor:
        """Refuse more, as a card does."""
        self.asked.append(len(noisy_latents))
        if len(noisy_latents) > self.room:
            raise self.error
        return super().predict_velocity(noisy_latents, sigmas, conditioning)


@pytest.fixture(scope="module")
def sampler(tiny_run: Path) -> Sampler:
    """The newest averaged weights of the tiny run, with room for everything."""
    return load_sampler(tiny_run, device="cpu")


def _on_small_card(sampler: Sampler, room: int, error: Exception | None = None) -> Sampler:
    parts = {each.name: getattr(sampler.components, each.name) for each in fields(Components)}
    card = SmallCard(**parts, room=room)
    if error is not None:
        card = replace(card, error=error)
    return replace(sampler, components=card, memory=Memory())


def _with_codec(sampler: Sampler, codec: PixelCodec) -> Sampler:
    return replace(sampler, components=replace(sampler.components, codec=codec), memory=Memory())


def _sample(
    sampler: Sampler, on_step: Callable[[int], None] | None = None, **how: str
) -> NDArray[np.uint8]:
    settings, bucket = settings_for(sampler.recipe, num_inference_steps=_STEPS)
    return sampler.sample(_REQUESTS, settings, bucket, on_step, **how)


def _asked(sampler: Sampler) -> list[int]:
    """Sizes of the model's batches since it was last asked for them, repetitions left out."""
    assert isinstance(sampler.components, SmallCard)
    asked = sampler.components.asked
    kept = [size for place, size in enumerate(asked) if not place or asked[place - 1] != size]
    asked.clear()
    return kept


def _apart(left: NDArray[np.uint8], right: NDArray[np.uint8]) -> int:
    return int(np.abs(left.astype(int) - right.astype(int)).max())


@pytest.mark.parametrize(
    ("room", "tried", "way"),
    [
        (8, [8], "all at once"),
        (4, [8, 4], "guidance in two passes"),
        (2, [8, 4, 2], "guidance in two passes, 2 at a time"),
        (1, [8, 4, 2, 1], "guidance in two passes, 1 at a time"),
    ],
)
def test_first_two_passes_then_fewer_at_once(
    room: int, tried: list[int], way: str, sampler: Sampler
) -> None:
    """The videos differ by no more than rounding, and the next call begins with what worked."""
    small = _on_small_card(sampler, room)
    videos = _sample(small)
    assert _asked(small) == tried
    assert [str(each) for each in small.memory.ways.values()] == [way]
    assert _apart(videos, _sample(sampler)) <= 1
    _sample(small)
    assert _asked(small) == tried[-1:]


def test_three_videos_are_halved_to_two_and_one(sampler: Sampler) -> None:
    """Each is made once, and in order."""
    small = _on_small_card(sampler, 2)
    settings, bucket = settings_for(sampler.recipe, num_inference_steps=_STEPS)
    videos = small.sample(_REQUESTS[:3], settings, bucket)
    assert _asked(small) == [6, 3, 2, 1]
    assert _apart(videos, sampler.sample(_REQUESTS[:3], settings, bucket)) <= 1


def test_what_is_asked_for_is_kept_to(sampler: Sampler) -> None:
    """`batched` never becomes two passes, `two_passes` never asks for both halves at once."""
    small = _on_small_card(sampler, 2)
    _sample(small, guidance="batched")
    assert _asked(small) == [8, 4, 2]
    small = _on_small_card(sampler, 8)
    _sample(small, guidance="two_passes")
    assert _asked(small) == [4]


def test_a_video_that_does_not_fit_is_an_error_that_says_so(sampler: Sampler) -> None:
    """Not a traceback of torch's; another size can be tried with the same sampler."""
    small = _on_small_card(sampler, 0)
    with pytest.raises(PlanError, match=r"One video of 8 frames of 32x32 does not fit .*two pass"):
        _sample(small)


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        RuntimeError("[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate"),
    ],
)
def test_the_machines_own_memory_is_memory_too(error: Exception, sampler: Sampler) -> None:
    """The CPU says it in other words."""
    assert len(_sample(_on_small_card(sampler, 4, error))) == len(_REQUESTS)


def test_any_other_error_is_raised(sampler: Sampler) -> None:
    """A defect is not tried again in four ways."""
    small = _on_small_card(sampler, 4, RuntimeError("shapes do not match"))
    with pytest.raises(RuntimeError, match="shapes do not match"):
        _sample(small)
    assert _asked(small) == [8]


def test_steps_are_counted_over_all_parts(sampler: Sampler) -> None:
    """A progress bar neither runs past its end nor stops before it."""
    told: list[int] = []
    _sample(_on_small_card(sampler, 1), told.append)
    assert told == sorted(told)
    assert (len(told), told[-1]) == (len(_REQUESTS) * _STEPS, _STEPS)


def test_whole_pictures_first_and_then_tiles(sampler: Sampler) -> None:
    """Only the first video of all is tried whole; pixels are the same in either way."""
    codec = SmallCodec()
    small = _with_codec(sampler, codec)
    videos = _sample(small)
    assert codec.asked == [False, True, True, True, True]
    assert np.array_equal(videos, _sample(sampler))
    assert list(small.memory.ways.values()) == [Way(tiles=True)]
    with pytest.raises(PlanError, match=r'does not fit the memory .decoding = "whole"'):
        _sample(small, decoding="whole")
    with pytest.raises(PlanError, match="even in tiles"):
        _sample(_with_codec(sampler, SmallCodec(fits_tiles=False)))


def test_what_an_attempt_held_is_free_when_it_has_failed() -> None:
    """The error's traceback keeps no tensor alive, else the next attempt would find no room."""

    class Big:
        """Stands for a tensor."""

    found: list[weakref.ref[Big]] = []

    def work() -> None:
        big = Big()
        found.append(weakref.ref(big))
        raise torch.OutOfMemoryError("CUDA out of memory.")

    assert attempt(work) is None
    assert found[0]() is None


@pytest.mark.parametrize(
    ("free_gib", "device", "why"),
    [
        ([5, 70], "cuda:1", "samples on cuda:1, 70.00 GiB free"),
        ([5, 20], "cpu", "samples on the CPU: it needs 30.00 GiB on a GPU, and cuda:1"),
    ],
)
def test_auto_takes_the_gpu_with_most_free_memory(
    free_gib: list[int], device: str, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A training on GPU 0 is left alone; where no GPU has enough, the CPU samples."""
    total = 80 * 2**30
    chosen: list[int] = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(free_gib))
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    properties = SimpleNamespace(total_memory=total)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    used = [total - free * 2**30 for free in free_gib]
    monkeypatch.setattr(torch.cuda, "device_memory_used", lambda index: used[index])
    parts: Any = SimpleNamespace(part_bytes=lambda: {"model": 28 * 2**30, "text": 11 * 2**30})
    found, said = device_with_room("auto", parts)
    assert str(found) == device
    assert said.startswith(why)
    assert device_with_room("cpu", parts) == (torch.device("cpu"), "")
    assert chosen == ([1] if device == "cuda:1" else [])
