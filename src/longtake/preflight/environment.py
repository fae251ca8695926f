"""Is the same software on every node: Python, longtake, torch, driver, CUDA, NCCL, kernel."""

import os
import platform
import re
import sys
from pathlib import Path

import psutil
import torch

from longtake import __version__
from longtake.config import Recipe
from longtake.preflight.compare import differences, tell_differences
from longtake.preflight.finding import Judged, Severity, Skipped
from longtake.preflight.setting import Facts, Setting
from longtake.process import num_cores

NAME = "environment"

_SEVERITIES: dict[str, Severity] = {
    "longtake": "error",
    "Python": "error",
    "torch": "error",
    "CUDA": "error",
    "NCCL": "error",
    "driver": "warning",
    "GPUs": "warning",
    "processor": "note",
    "cores": "note",
    "kernel": "note",
}
_TELLING = re.compile(r"(NCCL|TORCH|GLOO|UCX|CUDA|OMP|MKL|PYTORCH|XLA)_\w+|PYTHONPATH")
_OF_ONE_PROCESS = re.compile(r"TORCHELASTIC_\w+|CUDA_VISIBLE_DEVICES|TORCHINDUCTOR_CACHE_DIR")
_ADVICE = (
    "Install the same on all nodes: one image, or one environment on a shared disk. Then restart."
)


def measure(setting: Setting) -> Facts:
    """Versions by name, and the variables that change what torch and NCCL do."""
    return {"versions": _versions(), "variables": _variables(), "cards": torch.cuda.device_count()}


def judge(facts: dict[str, Facts], recipe: Recipe | None) -> Judged:
    """What is not the same everywhere."""
    versions = differences(NAME, {node: each["versions"] for node, each in facts.items()})
    variables = differences("variables", {node: each["variables"] for node, each in facts.items()})
    judged = Judged(differences=[*versions, *variables])
    judged.findings += tell_differences(NAME, versions, _SEVERITIES, _ADVICE)
    bad: dict[str, Severity] = {
        each.name: "warning" for each in variables if each.name != "interpreter"
    }
    advice = "Set them for all nodes in one place: the job's script, or /etc/environment."
    judged.findings += tell_differences("variables", variables, bad, advice)
    if not any(each["cards"] for each in facts.values()):
        judged.skipped.append(Skipped("driver, CUDA and NCCL", "no GPU"))
    return judged


def _versions() -> dict[str, str]:
    return {
        "longtake": __version__,
        "Python": platform.python_version(),
        "torch": torch.__version__,
        "kernel": platform.release(),
        "processor": _processor(),
        "cores": str(num_cores()),
        "memory": f"{round(psutil.virtual_memory().total / 2**30)} GiB",
        **_of_cards(),
    }


def _of_cards() -> dict[str, str]:
    if not torch.cuda.is_available():
        return {"GPUs": "none"}
    names = [torch.cuda.get_device_name(card) for card in range(torch.cuda.device_count())]
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
    except Exception as error:  # no driver, or one that is not NVIDIA's
        return f"unknown ({type(error).__name__})"


def _processor() -> str:
    path = Path("/proc/cpuinfo")
    text = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
    found = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return found[1].strip() if found else platform.machine()


def _variables() -> dict[str, str]:
    found = {
        name: value
        for name, value in os.environ.items()
        if _TELLING.fullmatch(name) and not _OF_ONE_PROCESS.fullmatch(name)
    }
    return {**found, "interpreter": sys.executable}
