"""Compares what all ranks of a launch must have in common, such as the recipe and versions."""

import hashlib
import json
import os
import platform
import socket
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch

from longtake import config, errors, process, run_dir
from longtake.parallel import collectives
from longtake.parallel.mesh import World

Group = Literal["recipe", "code", "version", "setting", "weights"]
Facts = dict[tuple[Group, str], str]
"""Recipe values, versions and settings of a rank, as texts by group and name."""

ABSENT = "absent"
_CODE = "longtake's code"
_READ_SUFFIXES = (".safetensors", ".gguf", ".bin", ".json", ".model", ".txt")
_HEAD_BYTES, _SAMPLE_BYTES, _NUM_SAMPLES = 2**20, 2**12, 256
_MAY_BE_SECRET = ("watch.hook",)  # only its digest leaves the node
_MAX_NAMED = 6
_MAX_VALUE = 120  # characters of a value in a message

_RECIPE_MAY_DIFFER = (
    "watch",
    "tracking",
    "evaluation",
    "data.catalog",  # what catalogs hold is compared by itself
    "data.catalogs",
    "data.cache",
    "data.store",
    "data.workers",
    "data.frame_cache_gib",
    "data.sample_memory_gib",
)
"""Recipe keys and sections whose values may differ between nodes."""
_DECIDING_VARIABLES = ("NCCL_ALGO", "NCCL_PROTO", "NVIDIA_TF32_OVERRIDE")
_VARIABLES = (
    *("CUBLAS_WORKSPACE_CONFIG", "CUBLASLT_WORKSPACE_SIZE", "NCCL_NVLS_ENABLE"),
    *("OMP_NUM_THREADS", "MKL_NUM_THREADS", "MKL_CBWR", "ATEN_CPU_CAPABILITY"),
)
_MAY_DIFFER = frozenset((*_VARIABLES, "python", "GPU", "threads", "vector instructions"))
"""Names of software and hardware facts, such as the GPU, that may differ between ranks: they change
at most the last bits of results, or the speed."""

_REMEDIES: Mapping[Group, str] = {
    "recipe": "Start all nodes with one recipe: copy it, or keep it on a disk that they share.",
    "code": "Copy the folder of the package longtake from one node to the others.",
    "version": "Install the same versions on all nodes: longtake preflight prints the commands.",
    "setting": "Set it for all nodes in one place, such as the job's script.",
    "weights": "Copy the files from one node to the others.",
}


# --- Facts ------------------------------------------------------------------------------------


def software(recipe: config.Recipe, device: torch.device) -> Facts:
    """Collect this rank's recipe, code, software versions and arithmetic settings, to compare."""
    facts: Facts = {("code", _CODE): process.code_digest("")}
    facts |= {("recipe", key): value for key, value in recipe_keys(recipe).items()}
    facts |= {("version", name): value for name, value in _versions(device).items()}
    facts |= {("setting", name): value for name, value in _settings(device).items()}
    return facts


def recipe_keys(recipe: config.Recipe) -> dict[str, str]:
    """Return the recipe's values as JSON by dotted keys; possible secrets become a digest."""
    values = json.loads(recipe.model_dump_json(exclude_none=True))
    keys = {key: json.dumps(value) for key, value in config.flatten(values)}
    for name in keys.keys() & set(_MAY_BE_SECRET):
        keys[name] = f"set (sha256 {hashlib.sha256(keys[name].encode()).hexdigest()[:12]})"
    return keys


def _versions(device: torch.device) -> dict[str, str]:
    versions = {"python": platform.python_version(), **run_dir.package_versions()}
    if device.type == "cuda":
        versions["CUDA"] = str(torch.version.cuda)
        versions["cuDNN"] = str(torch.backends.cudnn.version())  # type: ignore[no-untyped-call]
        versions["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    return versions


def _settings(device: torch.device) -> dict[str, str]:
    names = (*_DECIDING_VARIABLES, *_VARIABLES)
    settings: dict[str, Any] = {name: os.environ[name] for name in names if name in os.environ}
    # Read from torch and not from the recipe: modules that were imported may have set them.
    settings["precision of fp32 matmuls"] = torch.get_float32_matmul_precision()
    settings["deterministic algorithms"] = torch.are_deterministic_algorithms_enabled()
    if device.type == "cuda":
        matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
        settings["TF32 of cuDNN"] = cudnn.allow_tf32
        settings["deterministic cuDNN"] = cudnn.deterministic
        settings["bf16 sums of bf16 matmuls"] = matmul.allow_bf16_reduced_precision_reduction
        settings["GPU"] = torch.cuda.get_device_name(device)
    else:
        settings["threads"] = torch.get_num_threads()
        settings["vector instructions"] = torch.backends.cpu.get_cpu_capability()
    return {name: str(value) for name, value in settings.items()}


def files_read(paths: Mapping[str, Path]) -> Facts:
    """Return size and digest of files of weights, and of those in folders, by their recipe key.

    Large files are sampled: the beginning and 256 places. Another training changes all weights.
    """
    facts: Facts = {}
    for name, path in paths.items():
        for file in [path] if path.is_file() else sorted(path.glob("*")):
            if file.is_file() and file.suffix in _READ_SUFFIXES:
                label = name if file == path else f"{name}/{file.name}"
                facts["weights", label] = _sampled_digest(file)
    return facts


def _sampled_digest(path: Path) -> str:
    size = path.stat().st_size
    digest = hashlib.sha256()
    with path.open("rb") as file:
        # The head of a safetensors file has all names, dtypes and shapes.
        digest.update(file.read(_HEAD_BYTES))
        rest = size - _HEAD_BYTES
        count = min(_NUM_SAMPLES, -(-rest // _SAMPLE_BYTES))
        for number in range(1, count + 1):
            # The last place ends with the file.
            file.seek(max(_HEAD_BYTES, _HEAD_BYTES + rest * number // count - _SAMPLE_BYTES))
            digest.update(file.read(_SAMPLE_BYTES))
    return f"{size} bytes, sha256 {digest.hexdigest()[:12]}"


# --- Comparison -------------------------------------------------------------------------------


class RankDifference(NamedTuple):
    """A value, such as a package's version or a recipe key, that differs between ranks."""

    group: Group
    name: str
    values: dict[str, str]  # ranks in words by value, rank 0's value first

    @property
    def decides(self) -> bool:
        """True if ranks would train differently; else only last bits or the speed may differ."""
        if self.group != "recipe":
            return self.name not in _MAY_DIFFER
        return not config.is_among(self.name, _RECIPE_MAY_DIFFER)

    def __str__(self) -> str:
        return f"{self.name} is " + " and ".join(
            f"{value[:_MAX_VALUE]}{'...' * (len(value) > _MAX_VALUE)} on {places}"
            for value, places in self.values.items()
        )


def compare_with_first(facts: Facts, world: World) -> list[RankDifference]:
    """Compare every rank's recipe, code and versions with rank 0's; all ranks must call it.

    All get the same differences.

    Raises:
        RunError: facts that decide what is trained differ; raised on every rank.
    """
    if world.mesh is None:
        return []
    # Rank 0's facts once and only differences back: without any, these are two small collectives.
    first = collectives.from_first(facts, world)
    keys = [each for each in first | facts if first.get(each) != facts.get(each)]
    mine = {each: facts.get(each, ABSENT) for each in keys}
    # Only the facts that differ from rank 0's are sent.
    everyone = collectives.gather_objects((socket.gethostname(), mine), world)
    differences = differences_of(first, everyone)
    if deciding := [each for each in differences if each.decides]:
        more = len(deciding) - _MAX_NAMED
        listed = "; ".join(map(str, deciding[:_MAX_NAMED])) + (f"; and {more} more" * (more > 0))
        remedies = dict.fromkeys(_REMEDIES[each.group] for each in deciding)
        raise errors.RunError(
            f"The {world.size} ranks would not train the same: {listed}. {' '.join(remedies)}"
        )
    return differences


def differences_of(
    first: Facts, everyone: Sequence[tuple[str, Mapping[tuple[Group, str], str]]]
) -> list[RankDifference]:
    """List the differences from rank 0's facts, given each rank's host and differing facts."""
    differences = []
    for key in dict.fromkeys(key for _, differing in everyone for key in differing):
        own = first.get(key, ABSENT)
        ranks: dict[str, dict[str, list[int]]] = {own: defaultdict(list)}
        for rank, (host, differing) in enumerate(everyone):
            ranks.setdefault(differing.get(key, own), defaultdict(list))[host].append(rank)
        differences.append(RankDifference(*key, {each: _places(ranks[each]) for each in ranks}))
    return differences


def _places(ranks: Mapping[str, Sequence[int]]) -> str:
    """Describe hosts and their ranks in words."""
    words = [
        f"{host} (rank {of_host[0]})"
        if len(of_host) == 1
        else f"{host} (ranks {', '.join(map(str, of_host[:_MAX_NAMED]))}"
        f"{', ...' * (len(of_host) > _MAX_NAMED)})"
        for host, of_host in ranks.items()
    ]
    more = len(words) - _MAX_NAMED
    return ", ".join(words[:_MAX_NAMED]) + (f" and {more} more nodes" * (more > 0))
