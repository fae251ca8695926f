"""Ranks of a run, their devices and process groups.

Rank and world size come from torchrun's environment variables. A process without them is a world of
one, without a process group.
"""

import os
import re
import socket
import time
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from longtake import errors, node_dir, process
from longtake.config import ParallelSection

Device = Literal["auto", "cpu", "cuda"]

LOOPBACK = "127.0.0.1"
"""Rendezvous address of the ranks of one node: no other machine can reach it."""

_FLIGHT_RECORDER_SIZE = 2000
"""Number of collectives that NCCL's flight recorder keeps: some steps of a large model. Each costs
a few hundred bytes and about a microsecond, so that the recorder is always on."""
_SECONDS_TO_LET_GO = 0.1
_RENDEZVOUS_TIMEOUT = timedelta(minutes=10)
_MAX_WAITING = 2048
_SIGNS_OF_A_LOST_PEER = (
    *("closed by peer", "reset by peer", "Broken pipe"),  # what gloo says
    *("Timed out waiting", "connectFullMesh failed", "Connection refused"),
    *("remote process exited", "communicator was aborted"),  # what NCCL says
)


@dataclass(frozen=True)
class World:
    """This process's rank and device, and its process groups with the other ranks."""

    rank: int
    local_rank: int
    size: int
    device: torch.device
    mesh: DeviceMesh | None
    """Mesh of all ranks: those along `replicate` hold the same weights, those along `shard` hold
    one copy between them. A dimension of size 1 is left out; None in a world of one rank."""
    sequence_size: int = 1
    """Number of consecutive ranks that share the tokens of each clip."""
    sequence_group: dist.ProcessGroup | None = None
    """Process group of the ranks that share clips with this one (context parallelism); None if none
    do."""
    patient_group: dist.ProcessGroup | None = None
    """Process group of all ranks over gloo, with the timeout `parallel.long_timeout_seconds`: for
    work of rank 0 such as downloads."""
    timeout: timedelta = timedelta(minutes=10)
    """Timeout of all other process groups (apart from `patient_group`)."""

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    @property
    def data_size(self) -> int:
        return self.size // self.sequence_size

    @property
    def data_rank(self) -> int:
        return self.rank // self.sequence_size

    @property
    def is_sharded(self) -> bool:
        """True if each rank holds only a part of the model."""
        return self.mesh is not None and "shard" in (self.mesh.mesh_dim_names or ())

    @property
    def num_copies(self) -> int:
        """Number of ranks with the same weights; a sum over all ranks has each that often."""
        names = () if self.mesh is None else self.mesh.mesh_dim_names or ()
        if self.mesh is None or "replicate" not in names:
            return 1
        return self.mesh.size(names.index("replicate"))

    @property
    def speaks_for_data(self) -> bool:
        return self.rank % self.sequence_size == 0


@contextmanager
def join(device: Device, section: ParallelSection, records: Path | None = None) -> Iterator[World]:
    """Join the process groups of torchrun's ranks, or make a world of one rank; leave at the end.

    Args:
        device: device of the computation.
        section: settings of how ranks share model and clips.
        records: a folder of this node in which NCCL's flight recorders write dumps on request;
            None: they record nothing.

    Raises:
        RecipeError: CUDA is asked for where there is none, or too few GPUs for the processes; or
            their number does not divide as the section wants it.
        LostPeerError: another process ended while this one waited for it, or is too slow.
    """
    rank, local_rank, size = place_in_world()
    place = pick_device(device, local_rank)
    shard_size(section, size)
    if "RANK" not in os.environ or size == 1:
        yield World(0, 0, 1, place, None)
        return
    local_size = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    # The processes of a node share its cores.
    torch.set_num_threads(max(1, process.num_cores() // local_size))
    if place.type == "cuda" and records is not None:
        records.mkdir(parents=True, exist_ok=True, mode=0o700)
        for name, value in recorder_environment(records).items():
            os.environ.setdefault(name, value)
    backend = "cpu:gloo,cuda:nccl" if place.type == "cuda" else "gloo"
    try:
        dist.init_process_group(backend, timeout=_RENDEZVOUS_TIMEOUT, **_meeting(rank, size))
        long = timedelta(seconds=section.long_timeout_seconds)
        patient = dist.new_group(backend="gloo", timeout=long, group_desc="patient")
        timeout = timedelta(seconds=section.timeout_seconds)
        # Meeting had a timeout of its own; from here on the recipe's applies.
        dist.distributed_c10d._set_pg_timeout(timeout)
        joined = World(rank, local_rank, size, place, None, patient_group=patient, timeout=timeout)
        yield arranged(joined, section)
        # Not after an error: NCCL would wait here for ranks that wait for this one elsewhere.
        dist.destroy_process_group()
    except RuntimeError as error:
        if not tells_of_a_lost_peer(error):
            raise
        raise errors.LostPeerError(
            _describe_timeout(error, rank, size)
            or f"Another of the {size} processes has ended or cannot be reached, so rank {rank} "
            "cannot continue. What that one said is the reason; this one knows only: "
            f"{(str(error).strip().splitlines() or [type(error).__name__])[0]}"
        ) from error
    finally:
        # Gloo's threads need Python's lock to let go of the last collective's tensors. One that
        # comes to it when the interpreter is ending aborts the process, after a good run too.
        time.sleep(_SECONDS_TO_LET_GO)


def _meeting(rank: int, size: int) -> dict[str, Any]:
    """Return a rendezvous store for one node: torch's own would listen on all addresses."""
    # torchrun's agent then listens at this port itself, and ranks use its store.
    is_shared = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if os.environ.get("MASTER_ADDR") != LOOPBACK or is_shared:
        return {}
    port = int(os.environ["MASTER_PORT"])
    listening = None
    if rank == 0:
        listening = socket.create_server((LOOPBACK, port), backlog=_MAX_WAITING).detach()
    store = dist.TCPStore(  # type: ignore[attr-defined]
        LOOPBACK,
        port,
        size,
        is_master=rank == 0,
        timeout=_RENDEZVOUS_TIMEOUT,
        multi_tenant=True,
        master_listen_fd=listening,
    )
    return {"store": store, "rank": rank, "world_size": size}


def arranged(world: World, section: ParallelSection) -> World:
    """Return a world with the meshes and groups for sharding and context parallelism."""
    shards, sequence, group = shard_size(section, world.size), section.context, None
    # FSDP2 replicates over a mesh's first dimension and shards over its last.
    if shards in (1, world.size):
        sizes = {"replicate" if shards == 1 else "shard": world.size}
    else:
        sizes = {"replicate": world.size // shards, "shard": shards}
    mesh = _init_mesh(world, sizes)
    if sequence > 1:
        own = _init_mesh(world, {"data": world.size // sequence, "sequence": sequence})
        group = own["sequence"].get_group()
    return replace(world, mesh=mesh, sequence_size=sequence, sequence_group=group)


def _describe_timeout(error: RuntimeError, rank: int, size: int) -> str | None:
    """Describe the collective that timed out, its wait and process group.

    None if the error is no timeout.
    """
    waited = re.search(r"Timed out waiting (\d+)ms", str(error))
    if waited is None:
        return None
    # The error names neither operation nor group; torch's frames in its traceback have both.
    called = "a collective"
    for frame, _ in traceback.walk_tb(error.__traceback__):
        is_torchs = frame.f_code.co_filename == dist.distributed_c10d.__file__
        if is_torchs and "group" in frame.f_locals:
            group = frame.f_locals["group"]
            is_default = group is None or group is dist.group.WORLD
            name = "default" if is_default else str(getattr(group, "group_desc", group))
            called = f"{frame.f_code.co_name} of the process group {name}"
            break
    return (
        f"Rank {rank} has waited {int(waited[1]) / 1000:g} s in "
        f"{called}, and one of the {size} processes has not come: it has "
        "ended, hangs or is slow. What that one said is the reason; if it was only slow, raise "
        "parallel.timeout_seconds (or long_timeout_seconds for the group patient)."
    )


def tells_of_a_lost_peer(error: Exception) -> bool:
    if isinstance(error, (dist.DistNetworkError, dist.DistStoreError)):
        return True
    # An OSError may say the same of a file or a subprocess.
    is_of_torch = isinstance(error, RuntimeError) and dist.is_initialized()
    return is_of_torch and any(sign in str(error) for sign in _SIGNS_OF_A_LOST_PEER)


def place_in_world() -> tuple[int, int, int]:
    names = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    rank, local_rank, size = (int(os.environ.get(name, none)) for name, none in names.items())
    return rank, local_rank, size


def pick_device(wanted: str, local_rank: int = 0) -> torch.device:
    """Choose the device that a process runs on.

    Args:
        wanted: `cpu`; `cuda`, the GPU of this process; `auto`, the same if there is a GPU, else
            the CPU; or one GPU by its number from 0, such as `cuda:1`.
        local_rank: the process's number on this machine.

    Raises:
        RecipeError: CUDA is asked for where there is none, or has no GPU for this process.
    """
    # Set before CUDA starts: an allocator with growing segments loses less memory to fragmentation.
    # A value that the user has set, also under the deprecated name, stays.
    if "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:
        os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    gpus = torch.cuda.device_count()
    if wanted == "cpu" or (wanted == "auto" and not gpus):
        return torch.device("cpu")
    kind, colon, number = wanted.partition(":")
    if kind not in ("auto", "cuda") or (colon and (kind == "auto" or not number.isdecimal())):
        raise errors.RecipeError(
            f"{wanted!r} is no device. Expected auto, cpu, cuda, or one GPU, such as cuda:1."
        )
    gpu = int(number) if colon else local_rank
    if gpu >= gpus and colon:
        raise errors.RecipeError(
            f"There is no GPU {wanted}: this machine has {gpus} CUDA GPUs, counted from 0. "
            "Choose another, or cpu."
        )
    if gpu >= gpus and torch.version.cuda is None and torch.version.hip is None:
        raise errors.RecipeError(
            f'training.device is "{wanted}", but PyTorch {torch.__version__} is a CPU build. '
            'Install the CUDA build (README, "Install"), or try it here with '
            "--set training.device=cpu."
        )
    if gpu >= gpus:
        raise errors.RecipeError(
            f"training.device = {wanted!r} and local rank {local_rank}, but this machine has "
            f"{gpus} CUDA GPUs. Start at most one process per GPU, or --set training.device=cpu."
        )
    # Code that names no device, such as Triton's kernels, would open a second context on GPU 0.
    torch.cuda.set_device(gpu)
    return torch.device("cuda", gpu)


def shard_size(section: ParallelSection, size: int, of_node: int | None = None) -> int:
    """Count the ranks that hold one copy of the model between them.

    Args:
        section: the recipe's parallel section.
        size: ranks of the launch.
        of_node: ranks of a node; None: torchrun's LOCAL_WORLD_SIZE.

    Raises:
        RecipeError: the number of processes does not divide as the section requires.
    """
    if size % section.context:
        raise errors.RecipeError(
            f"parallel.context = {section.context} does not divide the {size} "
            f"process{'es' * (size > 1)} of this launch. Start a multiple of it, or change it."
        )
    if section.strategy != "hybrid":
        return size if section.strategy == "shard" else 1
    of_node = of_node or int(os.environ.get("LOCAL_WORLD_SIZE", size))
    shards = section.shard_size or of_node
    if size % shards:
        says = f"parallel.shard_size = {shards}" if section.shard_size else f"A node's {shards}"
        raise errors.RecipeError(
            f"{says} processes, which would hold one copy of the model, do not divide the {size} "
            "processes of this launch. Start a multiple of them, or set another "
            "parallel.shard_size."
        )
    return shards


def sequence_groups(world: World, heads_size: int) -> Mapping[str, dist.ProcessGroup]:
    """Make the process groups of ranks that share clips with this one: `all`, `heads`, `ring`.

    All ranks call it.

    Args:
        world: world in which ranks share clips.
        heads_size: number of neighbours that have other heads of the same tokens.
    """
    everyone = world.sequence_group
    assert everyone is not None
    rings = world.sequence_size // heads_size
    if 1 in (rings, heads_size):
        return {"all": everyone, "heads": everyone, "ring": everyone}
    sizes = {"data": world.data_size, "ring": rings, "heads": heads_size}
    mesh = _init_mesh(world, sizes)
    return {"all": everyone, **{name: mesh[name].get_group() for name in ("heads", "ring")}}


def _init_mesh(world: World, sizes: dict[str, int]) -> DeviceMesh:
    """Make a device mesh from its dimensions' sizes; set the timeout, which torch leaves out."""
    shape, names = tuple(sizes.values()), tuple(sizes)
    mesh = init_device_mesh(world.device.type, shape, mesh_dim_names=names)
    for group in mesh.get_all_groups():
        dist.distributed_c10d._set_pg_timeout(world.timeout, group)
    return mesh


def new_group(world: World, name: str) -> dist.ProcessGroup:
    """Make a process group of all ranks over gloo for a thread; errors contain its name."""
    group = dist.new_group(backend="gloo", timeout=world.timeout, group_desc=name)
    assert isinstance(group, dist.ProcessGroup)
    return group


def recorder_environment(folder: Path) -> dict[str, str]:
    """Return environment variables that make NCCL's flight recorder write dumps on request.

    They are read when the process group is created; variables that the user has set should be kept.
    """
    dump, pipe = folder / node_dir.FLIGHT_FILE_PREFIX, folder / node_dir.FLIGHT_PIPE_PREFIX
    return {
        "TORCH_FR_BUFFER_SIZE": str(_FLIGHT_RECORDER_SIZE),
        "TORCH_FR_DUMP_TEMP_FILE": str(dump),
        "TORCH_NCCL_DEBUG_INFO_PIPE_FILE": str(pipe),
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
        "TORCH_NCCL_ENABLE_MONITORING": "1",
    }
