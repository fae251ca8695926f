"""Checks that all nodes run the same software: versions, variables, packages, code, the recipe."""

import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tomllib
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from longtake import __version__, config
from longtake.cluster.findings import (
    CheckContext,
    CheckResult,
    Facts,
    FactsByNode,
    Severity,
    same_everywhere,
)
from longtake.config import Recipe
from longtake.health.system import LoadProbe
from longtake.process import num_cores

# --- Environment: versions, hardware, and the variables that change what torch and NCCL do --------

_VERSION_SEVERITIES: dict[str, Severity] = {
    **dict.fromkeys(("longtake", "Python", "torch", "CUDA", "NCCL"), "error"),
    **dict.fromkeys(("driver", "GPUs"), "warning"),
}
_COMPARED = re.compile(r"(NCCL|TORCH|GLOO|UCX|CUDA|OMP|MKL|PYTORCH|XLA)_\w+|PYTHONPATH")
_PER_PROCESS = re.compile(r"TORCHELASTIC_\w+|CUDA_VISIBLE_DEVICES|TORCHINDUCTOR_CACHE_DIR")
_VERSION_ADVICE = (
    "Install the same on all nodes: one image, or one environment on a shared disk. Then restart."
)
_VARIABLE_ADVICE = "Set them for all nodes in one place: the job's script, or /etc/environment."


def measure_environment(context: CheckContext) -> Facts:
    variables = {
        name: value
        for name, value in os.environ.items()
        if _COMPARED.fullmatch(name) and not _PER_PROCESS.fullmatch(name)
    }
    memory = LoadProbe().sample()["memory_size_bytes"]
    versions = {
        "longtake": __version__,
        "Python": platform.python_version(),
        "torch": torch.__version__,
        "kernel": platform.release(),
        "processor": _processor(),
        "cores": str(num_cores()),
        "memory": f"{round(memory / 2**30)} GiB",
        **_gpu_versions(),
    }
    variables["interpreter"] = sys.executable
    return {"versions": versions, "variables": variables, "gpus": torch.cuda.device_count()}


def judge_environment(facts: FactsByNode, recipe: Recipe | None) -> CheckResult:
    versions = {node: each["versions"] for node, each in facts.items()}
    result = same_everywhere("environment", versions, "note", _VERSION_ADVICE, _VERSION_SEVERITIES)
    variables = {node: each["variables"] for node, each in facts.items()}
    exceptions: dict[str, Severity] = {"interpreter": "note"}
    result.add(same_everywhere("variables", variables, "warning", _VARIABLE_ADVICE, exceptions))
    if not any(each["gpus"] for each in facts.values()):
        result.skip("driver, CUDA and NCCL", "no GPU")
    return result


def _gpu_versions() -> dict[str, str]:
    if not torch.cuda.is_available():
        return {"GPUs": "none"}
    names = [torch.cuda.get_device_name(gpu) for gpu in range(torch.cuda.device_count())]
    return {
        "GPUs": ", ".join(f"{names.count(each)} x {each}" for each in dict.fromkeys(names)),
        "CUDA": str(torch.version.cuda),
        "NCCL": ".".join(map(str, torch.cuda.nccl.version())),  # type: ignore[no-untyped-call]
        "driver": _driver(),
    }


def _driver() -> str:
    try:
        import pynvml

        pynvml.nvmlInit()
        return str(pynvml.nvmlSystemGetDriverVersion())
    except Exception as error:  # no driver, or not NVIDIA's
        return f"unknown ({type(error).__name__})"


def _processor() -> str:
    path = Path("/proc/cpuinfo")
    text = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
    found = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return found[1].strip() if found else platform.machine()


# --- Packages -------------------------------------------------------------------------------------

_COMES_WITH_TORCH = re.compile(r"nvidia-.*|triton.*|torch.*")
_PACKAGE_ADVICE = (
    "Install the same versions on all nodes, such as by pip install --constraint with what one of "
    "them has (pip freeze)."
)


def measure_packages(context: CheckContext) -> Facts:
    """The version of each package, a digest of all, and those that longtake needs."""
    versions: dict[str, str] = {}
    for each in metadata.distributions():
        if name := each.metadata["Name"]:  # of two on the path the first one is imported
            versions.setdefault(_normalized(name), each.version)
    try:
        requires = metadata.requires("longtake") or []
    except metadata.PackageNotFoundError:
        requires = []
    names = (re.match(r"[\w.-]+", each) for each in requires if "extra ==" not in each)
    needed = {_normalized(found[0]) for found in names if found}
    versions = dict(sorted(versions.items()))
    lines = "\n".join(f"{name}=={version}" for name, version in versions.items())
    return {
        "versions": versions,
        "digest": _digest(lines.encode()),
        "needed": sorted(needed & versions.keys()),
    }


def judge_packages(facts: FactsByNode, recipe: Recipe | None) -> CheckResult:
    """Differences of packages that longtake needs are warnings, others notes."""
    versions = {node: each["versions"] for node, each in facts.items()}
    names = {name for each in versions.values() for name in each}
    needed = {name for each in facts.values() for name in each["needed"]}
    needed |= {name for name in names if _COMES_WITH_TORCH.fullmatch(name)}
    exceptions: dict[str, Severity] = dict.fromkeys(needed, "warning")
    return same_everywhere("packages", versions, "note", _PACKAGE_ADVICE, exceptions)


def _normalized(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


# --- Code: files of longtake, the recipe's own module, the revision of the working folder ---------

_REVISION = "revision of the working folder"
_GIT_SECONDS = 20.0
_CODE_ADVICE = (
    "Bring all nodes to the same commit (git pull, or rsync the folder), without changes of "
    "their own."
)


def measure_code(context: CheckContext) -> Facts:
    """Digests of files by name."""
    package = Path(__file__).resolve().parents[1]
    files = {
        f"longtake/{path.relative_to(package)}": _digest(path.read_bytes())
        for path in sorted(package.rglob("*.py"))
    }
    module = context.recipe.trainable.module if context.recipe else None
    if module is not None:
        files |= _module_digest(module)
    if git := shutil.which("git"):
        command = [git, "describe", "--always", "--dirty", "--abbrev=12"]
        done = subprocess.run(  # noqa: S603 - fixed arguments
            command, capture_output=True, text=True, check=False, timeout=_GIT_SECONDS
        )
        if done.returncode == 0:
            files[_REVISION] = done.stdout.strip()
    return {"files": files}


def judge_code(facts: FactsByNode, recipe: Recipe | None) -> CheckResult:
    files = {node: each["files"] for node, each in facts.items()}
    return same_everywhere("code", files, "error", _CODE_ADVICE, {_REVISION: "warning"})


def _module_digest(module: str) -> dict[str, str]:
    """The file of a module, found from the working folder as the trainer finds it."""
    name = module.partition(":")[0]
    local = Path(*name.split(".")).with_suffix(".py")
    if local.is_file():
        return {str(local): _digest(local.read_bytes())}
    try:
        spec = find_spec(name)
    except (ImportError, ValueError):
        spec = None
    origin = spec.origin if spec else None
    return {module: _digest(Path(origin).read_bytes()) if origin else "cannot be found"}


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:12]


# --- Recipe ---------------------------------------------------------------------------------------

_MAY_BE_SECRET = {"watch.hook"}  # only its digest leaves the node
_RECIPE_ADVICE = "Copy the recipe to all nodes, or keep it on a disk that all of them share."


def measure_recipe(context: CheckContext) -> Facts:
    """Keys and values, with defaults, as this node reads them."""
    if context.recipe_path is None:
        return {}
    if context.recipe is None:
        return {"problem": context.recipe_problem}
    text = config.dump(context.recipe)
    keys = _flatten(tomllib.loads(text))
    for name in _MAY_BE_SECRET & keys.keys():
        keys[name] = f"set (sha256 {_digest(keys[name].encode())})"
    return {"keys": keys, "digest": _digest(text.encode())}


def judge_recipe(facts: FactsByNode, recipe: Recipe | None) -> CheckResult:
    if not any(facts.values()):
        result = CheckResult()
        result.skip("recipe, dataset, run directory and disk space", "no recipe was given")
        return result
    keys = {node: each["keys"] for node, each in facts.items() if "keys" in each}
    result = same_everywhere("recipe", keys, "error", _RECIPE_ADVICE)
    for node, each in facts.items():
        if problem := each.get("problem"):
            what = f"the recipe cannot be used: {problem}"
            result.find("error", (node,), what, "", _RECIPE_ADVICE)
    return result


def _flatten(values: dict[str, Any], prefix: str = "") -> dict[str, str]:
    flat: dict[str, str] = {}
    for key, value in values.items():
        if isinstance(value, dict):
            flat |= _flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = json.dumps(value)
    return flat
