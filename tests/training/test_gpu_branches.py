"""What is done otherwise on a GPU, run without one: nothing is moved to this device of its type."""

import functools
import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn

from longtake.checkpoint import store
from longtake.cluster import checks_network
from longtake.config import ParallelSection, Recipe
from longtake.errors import ModelError, PlanError
from longtake.evaluation import server
from longtake.models import caption_writer, codec, streamed, text
from longtake.optim import build, master_weights
from longtake.parallel import equality, mesh, replicas, transfer
from longtake.sampling.sampler import refuse_too_large_parts
from longtake.training import latent_cache, runtime
from longtake.training.step import ComputeTimer, seed_step
from longtake.training.threads import CpuThreads

_GPU = torch.device("cuda", 0)
_CPU = torch.device("cpu")


class _Cuda:
    """Stands in for a stream and an event; notes what is asked of them."""

    def __init__(self, name: str, asked: list[str]) -> None:
        self.name, self.asked, self.device = name, asked, _GPU

    def wait_stream(self, other: "_Cuda") -> None:
        self.asked.append(f"{self.name} waits for {other.name}")

    def wait_event(self, event: "_Cuda") -> None:
        self.asked.append(f"{self.name} waits for {event.name}")

    def record_event(self) -> "_Cuda":
        return _Cuda(f"what {self.name} had begun", self.asked)

    def record(self) -> None:
        self.asked.append(f"{self.name} is recorded")

    def synchronize(self) -> None:
        self.asked.append(f"the host waits for {self.name}")

    def elapsed_time(self, _: "_Cuda") -> float:
        return 250.0


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is asked of the streams and events of a GPU."""
    asked: list[str] = []

    @contextmanager
    def within(stream: _Cuda) -> Iterator[None]:
        asked.append(f"in {stream.name}:")
        yield

    monkeypatch.setattr(torch.cuda, "Stream", lambda _: _Cuda("the side stream", asked))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: _Cuda("the model", asked))
    monkeypatch.setattr(torch.cuda, "stream", within)
    monkeypatch.setattr(torch.cuda, "Event", lambda **_: _Cuda("the event", asked))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: asked.append("the host waits"))
    return asked


class _Text:
    """Notes what it encodes together, and where it is brought."""

    def __init__(self) -> None:
        self.batches: list[int] = []
        self.places: list[str] = []

    def encode(self, captions: list[str]) -> dict[str, torch.Tensor]:
        self.batches.append(len(captions))
        return {"lengths": torch.tensor([len(each) for each in captions])}

    def modules(self) -> list[nn.Module]:
        return []

    def to(self, device: torch.device, *, by_layer: bool) -> None:
        assert not by_layer
        self.places.append(device.type)


@pytest.mark.parametrize(("device", "batches"), [(_GPU, [3]), (torch.device("cpu"), [1, 1, 1])])
def test_captions_are_encoded_together_on_a_gpu(
    monkeypatch: pytest.MonkeyPatch, device: torch.device, batches: list[int]
) -> None:
    text, recipe = _Text(), cast("Recipe", None)
    monkeypatch.setattr(latent_cache, "_text", lambda *_: text)
    encode = latent_cache._load_caption_encoder(recipe, Path(), device)
    assert [int(each["lengths"]) for each in encode(["a", "bb", "ccc"])] == [1, 2, 3]
    assert (text.batches, text.places) == (batches, [device.type])


def test_a_part_that_no_gpu_holds_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    facts = SimpleNamespace(total_memory=2**30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: facts)
    sizes, text = {"text": 2**20, "model": 2**31, "codec": 0}, SimpleNamespace(modules=list)
    parts: Any = SimpleNamespace(part_bytes=lambda: sizes, text=text)
    with pytest.raises(PlanError, match="take 2"):
        refuse_too_large_parts(parts, _GPU)
    refuse_too_large_parts(parts, torch.device("cpu"))


def test_a_text_encoder_that_runs_by_layer_may_be_larger_than_a_gpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Six equal layers, of which two are on the GPU at a time."""
    encoder = nn.Module()
    encoder.layers = nn.ModuleList(nn.Linear(64, 64, bias=False) for _ in range(6))
    encoder.requires_grad_(False)
    facts = SimpleNamespace(total_memory=3 * 64 * 64 * 4)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: facts)
    sizes = {"text": 6 * 64 * 64 * 4, "model": 0, "codec": 0}
    text = SimpleNamespace(modules=lambda: [encoder])
    parts: Any = SimpleNamespace(part_bytes=lambda: sizes, text=text)
    refuse_too_large_parts(parts, _GPU)
    facts.total_memory = 64 * 64 * 4
    with pytest.raises(PlanError, match="text encoder"):
        refuse_too_large_parts(parts, _GPU)


def test_memory_of_a_gpu_is_told_after_it_ran_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda _: 3 * 2**30)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 5 * 2**30)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (2**30, 8 * 2**30))
    measured = runtime._measured(_GPU)
    assert all(number in measured for number in ("3.00", "5.00", "1.00", "8.00"))


def test_copies_of_a_stream_wait_for_the_model_and_the_model_for_them(cuda: list[str]) -> None:
    copies, target = transfer.CopyStream(_GPU), torch.zeros(2)
    copies.copy(target, torch.ones(2))
    copies.wait(copies.mark())
    assert cuda == [
        "the side stream waits for the model",
        "in the side stream:",
        "the model waits for what the side stream had begun",
    ]
    assert target.tolist() == [1, 1]


def test_what_a_gpu_copies_to_is_page_locked(
    cuda: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[tuple[str, bool]] = []

    def make(_: Any, device: str, pin_memory: bool) -> Tensor:
        made.append((device, pin_memory))
        return torch.zeros(3)

    monkeypatch.setattr(torch, "empty_like", make)
    for is_cuda in (True, False):
        like: Any = SimpleNamespace(is_cuda=is_cuda)
        transfer.host_like(like)
    assert made == [("cpu", True), ("cpu", False)]

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    staged = store.Staging().copy({"weight": torch.ones(3)})
    assert staged["weight"].tolist() == [1, 1, 1]
    assert cuda == ["the host waits"]


def test_a_thread_that_saves_uses_the_gpu_of_its_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    for device in (_GPU, _CPU):
        store._prepare_thread(device)
    assert chosen == [_GPU]


def test_streamed_weights_are_page_locked_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    locked, freed = list[int](), list[int]()
    monkeypatch.setattr(streamed, "pin_memory", lambda address, size: locked.append(size))
    monkeypatch.setattr(streamed, "unpin_memory", freed.append)
    memory = streamed._host_memory(1000, _GPU)
    address = memory.data_ptr()
    assert (locked, len(memory)) == ([1000], 1000)
    del memory
    gc.collect()
    assert freed == [address]

    def refuse(*_: int) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(streamed, "pin_memory", refuse)
    with pytest.raises(ModelError, match="cannot be page-locked: out of memory"):
        streamed._host_memory(1000, _GPU)


def test_gradients_come_while_others_update_and_weights_go_back_rounded(cuda: list[str]) -> None:
    parameters = [nn.Parameter(torch.zeros(2)) for _ in range(3)]
    for number, each in enumerate(parameters):
        each.grad = torch.full((2,), float(number))
    arrived = []
    for batch in master_weights._with_gradients([[each] for each in parameters], True):
        arrived.append(int(batch.gradients[0][0]))
        cuda.append(f"updates {arrived[-1]}")
    assert arrived == [0, 1, 2]
    recorded, waited = "the event is recorded", "the host waits for the event"
    expected = [recorded, recorded, waited, "updates 0", recorded, waited, "updates 1"]
    assert cuda == [*expected, waited, "updates 2"]

    gradient, master = torch.zeros(4), torch.tensor([1.0, 2, 3, 1 + 2**-12])
    weight = torch.empty(4, dtype=torch.bfloat16, device="meta")
    master_weights._round_into(weight, master, gradient)
    assert gradient.view(torch.bfloat16)[:4].tolist() == [1, 2, 3, 1]


def test_random_numbers_of_each_gpu_are_put_back() -> None:
    parameters: Any = [SimpleNamespace(device=each) for each in (_GPU, _CPU, _GPU)]
    assert build.gpus_of(parameters) == [_GPU]


def test_an_autoencoder_has_channels_last_on_a_gpu() -> None:
    class Stays(nn.Conv3d):
        def to(self, *_: Any) -> Any:
            return self

    layer = Stays(8, 4, 3)
    codec._Autoencoder(layer).to(_CPU)
    assert not layer.weight.is_contiguous(memory_format=torch.channels_last_3d)
    codec._Autoencoder(layer).to(_GPU)
    assert layer.weight.is_contiguous(memory_format=torch.channels_last_3d)


def test_token_ids_go_to_a_gpu_from_page_locked_memory() -> None:
    class Ids:
        def __init__(self, pinned: bool = False) -> None:
            self.pinned = pinned

        def pin_memory(self) -> "Ids":
            return Ids(pinned=True)

        def to(self, device: torch.device, non_blocking: bool = False) -> tuple[str, bool, bool]:
            return device.type, self.pinned, non_blocking

    ids: Any = Ids()
    assert text._moved(ids, _GPU) == ("cuda", True, True)
    assert text._moved(ids, _CPU) == ("cpu", False, False)


def test_an_evaluation_on_a_gpu_keeps_its_priority(monkeypatch: pytest.MonkeyPatch) -> None:
    changed: list[int] = []
    monkeypatch.setattr(os, "nice", changed.append)
    monkeypatch.setattr(torch, "set_num_threads", changed.append)
    server._lower_priority("cuda")
    assert changed == []
    server._lower_priority("cpu")
    assert len(changed) == 2


def test_the_time_of_a_gpu_is_that_between_its_events(cuda: list[str]) -> None:
    timer = ComputeTimer(_GPU)
    for _ in range(2):
        with timer.measure():
            cuda.append("forward pass")
    assert cuda == ["the event is recorded", "forward pass", "the event is recorded"] * 2
    assert timer.seconds() == 0.5


def test_ranks_with_gpus_meet_over_nccl_and_record_their_collectives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class MetError(Exception):
        pass

    def meet(backend: str, **_: Any) -> None:
        raise MetError(backend)

    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    records, names = tmp_path / "records", mesh.recorder_environment(tmp_path / "records")
    for name in names:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)
    monkeypatch.setattr(dist, "init_process_group", meet)
    backends: dict[mesh.Device, str] = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}
    for device, backend in backends.items():
        assert not records.exists()
        entered = mesh.join(device, ParallelSection(), records)
        with pytest.raises(MetError, match=f"^{backend}$"), entered:
            pass
    assert records.is_dir()
    assert {name: os.environ[name] for name in names} == names
    for name in names:
        monkeypatch.delenv(name)


def test_a_network_of_gpus_is_measured_on_them(
    cuda: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dist, "get_backend_config", lambda: "cpu:gloo,cuda:nccl")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    assert checks_network._device() == torch.device("cuda", 3)
    large = checks_network._load_bytes()
    load: Any = SimpleNamespace(is_cuda=True, device=_GPU)
    checks_network._synchronize(load)
    assert cuda == ["the host waits"]
    monkeypatch.setattr(dist, "get_backend_config", lambda: "gloo")
    assert checks_network._device() == _CPU
    assert large > checks_network._load_bytes()


def _returns(value: Any, *_: Any, **__: Any) -> Any:
    return value


@pytest.mark.parametrize("has_gpu", [True, False])
def test_captions_are_written_on_a_gpu_where_there_is_one(
    has_gpu: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    places: list[str] = []

    class Model:
        def to(self, device: str) -> "Model":
            places.append(device)
            return self

        def eval(self) -> None:
            pass

    (tmp_path / "config.json").touch()
    (tmp_path / "model.safetensors").touch()
    report = {"missing_keys": (), "mismatched_keys": ()}
    for name, loaded in (
        ("AutoProcessor", SimpleNamespace()),
        ("AutoModelForImageTextToText", (Model(), report)),
    ):
        load = functools.partial(_returns, loaded)
        monkeypatch.setattr(getattr(transformers, name), "from_pretrained", load)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    caption_writer.TransformersCaptioner(str(tmp_path))
    caption_writer.TransformersCaptioner(str(tmp_path), device="cpu")
    assert places == ["cuda" if has_gpu else "cpu", "cpu"]


def test_a_gpu_is_named_and_what_decides_its_arithmetic_is_compared(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    facts = SimpleNamespace(uuid="GPU-7")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: facts)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "H200")
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 28, 9))
    world = mesh.World(0, 0, 1, _GPU, None)
    assert replicas._place(world).endswith("GPU 0, GPU-7")
    assert equality._versions(_GPU)["NCCL"] == "2.28.9"
    assert equality._settings(_GPU)["GPU"] == "H200"
    assert CpuThreads(world, None).choice is None


def test_random_operations_on_a_gpu_follow_from_the_step_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seeds = list[int]()
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "manual_seed", seeds.append)
    for step in (3, 4, 3):
        seed_step(0, step, 1)
    assert seeds[0] == seeds[2] != seeds[1]
