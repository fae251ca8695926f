"""Can a hung process be looked into: py-spy is really tried, the way a watcher uses it."""

import os
import signal
import subprocess
import sys
from pathlib import Path

from longtake import stacks
from longtake.config import Recipe
from longtake.preflight.finding import Finding, Judged
from longtake.preflight.setting import Facts, Setting

NAME = "inspection"

_CHILD = """
import time
from longtake.stacks import enable_stack_dumps

def held_here():
    time.sleep(60)

enable_stack_dumps()
print("ready", flush=True)
held_here()
"""
_SYS_PTRACE = 19  # from linux/capability.h
_ADVICE = (
    "Start the container with --cap-add SYS_PTRACE (Kubernetes: securityContext.capabilities.add), "
    "and with a seccomp profile that lets ptrace and process_vm_readv through."
)


def measure(setting: Setting) -> Facts:
    """How a child of ours could be read, and what decides that."""
    child = subprocess.Popen(  # noqa: S603 - our own interpreter
        [sys.executable, "-P", "-c", _CHILD], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    try:
        assert child.stdout is not None
        child.stdout.readline()
        dump = stacks.dump_process(child.pid)
    finally:
        child.send_signal(signal.SIGKILL)
        child.communicate()
    is_right = any(f.function == "held_here" for each in dump.threads for f in each.frames)
    return {"method": dump.method if is_right else "none", **_why()}


def judge(facts: dict[str, Facts], recipe: Recipe | None) -> Judged:
    """Where a hang could only be seen from within."""
    findings = [
        Finding("warning", NAME, (node,), _said(each), "py-spy can read processes", _ADVICE)
        for node, each in facts.items()
        if not each["method"].startswith("py-spy")
    ]
    return Judged(findings)


def _said(each: Facts) -> str:
    reasons = [] if each["may_trace"] else ["CAP_SYS_PTRACE is missing"]
    if each["yama"] not in ("", "0", "1"):
        reasons.append(f"kernel.yama.ptrace_scope is {each['yama']}")
    if each["seccomp"] != "0":
        reasons.append("a seccomp filter is on")
    why = "; ".join(reasons) or "the reason is not known"
    return (
        f"py-spy cannot read a process ({why}). Hangs are found all the same, but stacks come from "
        "faulthandler, which says nothing of C code, nor of a process that is stopped"
    )


def _why() -> Facts:
    status = dict(
        line.split(":", 1) for line in _read("/proc/self/status").splitlines() if ":" in line
    )
    capabilities = int(status.get("CapEff", "0").strip() or "0", 16)
    return {
        "may_trace": bool(capabilities >> _SYS_PTRACE & 1),
        "yama": _read("/proc/sys/kernel/yama/ptrace_scope").strip(),
        "seccomp": status.get("Seccomp", "0").strip(),
        "user": os.getuid(),
    }


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
