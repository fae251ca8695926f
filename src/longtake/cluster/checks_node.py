"""Preflight checks of single nodes: name, limits, stack dumps, time, compute, software, recipe."""

import hashlib
import os
import platform
import re
import resource
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections import defaultdict
from contextlib import suppress
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from statistics import median

import torch

from longtake import __version__, config, process, stacks
from longtake.cluster.findings import (
    ABSENT,
    CheckContext,
    CheckResult,
    Facts,
    FactsByNode,
    NodeDifference,
    Severity,
    far_from_median,
    same_everywhere,
)
from longtake.formatting import format_size
from longtake.health import clock, network, system
from longtake.health.gpu import driver_facts
from longtake.parallel import attention_rules, equality
from longtake.run_dir import COMPUTING_PACKAGES
from longtake.trust import training_classes

_GIB = 2**30


# --- Host names: the folder of a node in the run directory is called by its host name -------------

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - where the processes of one node share memory
_HOST_NAME_ADVICE = (
    "Give each node its own name and start again: hostnamectl set-hostname NAME, or the "
    "container's: docker run --hostname NAME; in Kubernetes pods of a StatefulSet have their own."
)


def measure_host_name(context: CheckContext) -> Facts:
    """Read the node's host name, and an identifier of the machine whose memory it shares."""
    try:
        machine = f"{_BOOT_ID.read_text().strip()} {_SHARED_MEMORY.stat().st_dev}"
    except OSError:
        machine = f"of rank {context.process.rank}"  # unknown: it counts as a machine of its own
    return {"name": socket.gethostname(), "machine": machine}


def judge_host_names(facts: FactsByNode) -> CheckResult:
    """Find different machines of the preflight that have the same host name.

    Processes that were started separately on one machine are one node.
    """
    nodes = defaultdict(list)
    for node, each in facts.items():
        nodes[each["name"]].append(node)
    result = CheckResult()
    for name, some in nodes.items():
        machines = {facts[node]["machine"] for node in some}
        if len(machines) > 1:
            what = (
                f"{len(machines)} nodes are called {name}: their watchers would write to one "
                f"folder, nodes/{name} in the run directory, and no message could distinguish them"
            )
            expected = "a host name that no other node has"
            result.find("error", some, what, expected, _HOST_NAME_ADVICE)
    return result


# --- Limits of the system -------------------------------------------------------------------------

_MIN_OPEN_FILES = 4096
_MIN_SHARED_BYTES = _GIB
_UNLIMITED = -1


def measure_limits(context: CheckContext) -> Facts:
    """Read the node's limits: open files, and locked, shared and total memory; -1: unlimited."""
    shared = system.disk_space(_SHARED_MEMORY).get("disk_size_bytes", 0)
    memory = system.CgroupMemory().sample().get("cgroup_memory_limit_bytes")
    machine = system.LoadProbe().sample()["memory_size_bytes"]
    return {
        "open files": resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        "locked memory": resource.getrlimit(resource.RLIMIT_MEMLOCK)[0],
        "shared memory": int(shared),
        "memory": int(machine if memory is None else min(memory, machine)),
        "has_infiniband": bool(network.InfiniBand().sample()),
    }


def judge_limits(facts: FactsByNode) -> CheckResult:
    result = CheckResult()
    memory = {node: each["memory"] / _GIB for node, each in facts.items()}
    result.measure("memory that may be used", "GiB", memory)
    if few := _below(facts, "open files", _MIN_OPEN_FILES):
        what = f"{facts[few[0]]['open files']} files may be open at once"
        advice = "ulimit -n 65536; for services LimitNOFILE=, for Docker --ulimit nofile=65536."
        result.find("warning", few, what, f"{_MIN_OPEN_FILES}", advice)
    if small := _below(facts, "shared memory", _MIN_SHARED_BYTES):
        size = format_size(facts[small[0]]["shared memory"])
        what = f"shared memory has {size}, which NCCL may fill"
        advice = "Docker: --shm-size 16g or --ipc host; Kubernetes: an emptyDir of medium Memory."
        result.find("warning", small, what, "1 GiB", advice)
    # InfiniBand pins its buffers (ibv_reg_mr); without it nothing here is locked.
    with_ports = {node: each for node, each in facts.items() if each["has_infiniband"]}
    if not with_ports:
        result.skip("locked memory", "no InfiniBand device")
    if limited := _below(with_ports, "locked memory", sys.maxsize):
        what = f"only {format_size(facts[limited[0]]['locked memory'])} may be locked"
        advice = "ulimit -l unlimited; Docker: --ulimit memlock=-1; Slurm: PropagateResourceLimits."
        expected = "unlimited, for InfiniBand"
        result.find("warning", limited, what, expected, advice)
    return result


def _below(facts: FactsByNode, name: str, least: int) -> tuple[str, ...]:
    return tuple(
        node for node, each in facts.items() if each[name] != _UNLIMITED and each[name] < least
    )


# --- Inspection: tries py-spy on a child process, as a watcher uses it ----------------------------

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
_PTRACE_ADVICE = (
    "Start the container with --cap-add SYS_PTRACE (Kubernetes: securityContext.capabilities.add), "
    "and with a seccomp profile that allows ptrace and process_vm_readv."
)


def measure_inspection(context: CheckContext) -> Facts:
    """Try to read the stacks of a child process, as watchers do, and read the ptrace settings."""
    # The child calls `enable_stack_dumps` like a rank, which lets py-spy read it under Yama.
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
    lines = (system.read_text(Path("/proc/self/status")) or "").splitlines()
    status = dict(line.split(":", 1) for line in lines if ":" in line)
    capabilities = int(status.get("CapEff", "0").strip() or "0", 16)
    return {
        "method": dump.method if is_right else "none",
        "may_trace": bool(capabilities >> _SYS_PTRACE & 1),
        "yama": system.read_text(Path("/proc/sys/kernel/yama/ptrace_scope")) or "",
        "seccomp": status.get("Seccomp", "0").strip(),
        "user": os.getuid(),
    }


def judge_inspection(facts: FactsByNode) -> CheckResult:
    result = CheckResult()
    for node, each in facts.items():
        if each["method"].startswith("py-spy"):
            continue
        reasons = [] if each["may_trace"] else ["CAP_SYS_PTRACE is missing"]
        # 1 allows processes that called PR_SET_PTRACER, as ranks do; 2 needs CAP_SYS_PTRACE.
        if each["yama"] not in ("", "0", "1"):
            reasons.append(f"kernel.yama.ptrace_scope is {each['yama']}")
        if each["seccomp"] != "0":
            reasons.append("a seccomp filter is on")
        what = (
            f"py-spy cannot read a process ({'; '.join(reasons) or 'the reason is not known'}). "
            "Hangs are still found, but stacks come from faulthandler, which shows neither C code "
            "nor a process that is stopped"
        )
        expected = "py-spy can read processes"
        result.find("warning", (node,), what, expected, _PTRACE_ADVICE)
    return result


# --- Time synchronization -------------------------------------------------------------------------

_MAX_NTP_OFFSET_SECONDS = 0.001
_NO_SOURCE_STRATUM = 16
_TIME_ADVICE = (
    "Run chrony on every node, with the same servers, `makestep 1.0 3` (step only at the start) "
    "and without any other program that sets the clock."
)


def measure_time_sync(context: CheckContext) -> Facts:
    """Find the programs that set the node's clock, and read the kernel's and chrony's state."""
    return {
        "daemons": clock.time_daemons(),
        "kernel": clock.KernelClock().sample(),
        "chrony": clock.Chrony().sample(),
    }


def judge_time_sync(facts: FactsByNode) -> CheckResult:
    """Find nodes' clocks that no or several programs set, or that chrony reports as wrong."""
    result = CheckResult()
    free = tuple(n for n, e in facts.items() if e["kernel"].get("clock_is_synchronised") == 0)
    if free:
        daemons = ", ".join(facts[free[0]]["daemons"])
        running = f"running: {daemons}" if daemons else "no chronyd, ntpd or timesyncd is seen"
        what = f"no program keeps the clock (adjtimex: not synchronised; {running})"
        expected = "a clock that follows a source"
        severity: Severity = "note" if len(facts) == 1 else "warning"
        result.find(severity, free, what, expected, _TIME_ADVICE)
    several = tuple(node for node, each in facts.items() if len(each["daemons"]) > 1)
    if several:
        what = f"several programs set the clock: {', '.join(facts[several[0]]['daemons'])}"
        result.find("warning", several, what, "one", _TIME_ADVICE)
    for node, each in facts.items():
        offset = each["chrony"].get("clock_ntp_offset_seconds", 0.0)
        if each["chrony"].get("clock_ntp_stratum") == _NO_SOURCE_STRATUM:
            what = "chrony reaches no source"
            result.find("warning", (node,), what, "one", _TIME_ADVICE)
        elif abs(offset) > _MAX_NTP_OFFSET_SECONDS:
            what = f"chrony reports that the clock is off by {offset * 1000:+.3f} ms"
            advice = "See chronyc sources -v."
            result.find("warning", (node,), what, "within 1 ms", advice)
    return result


# --- Compute: products of large matrices ----------------------------------------------------------

_CPU_SIZE, _CPU_SECONDS, _CPU_FACTOR = 1024, 0.4, 0.6
_GPU_SIZE, _GPU_SECONDS, _GPU_FACTOR = 8192, 1.0, 0.93
_GPU_ERROR_FACTOR = 0.4
_GPU_ADVICE = "Look at its temperature, power limit and clocks: nvidia-smi -q -d PERFORMANCE,POWER"
_CPU_ADVICE = "Look for other programs (top), and at its clocks (cpupower frequency-info)."


def measure_compute(context: CheckContext) -> Facts:
    """Measure the TFLOP/s of this process's GPU in bf16; without one, of the cores in fp32."""
    gpu = context.process.local_rank
    if gpu < torch.cuda.device_count():
        return {"on": "GPU", "tflops": _gpu_tflops(torch.device("cuda", gpu))}
    if not context.process.is_node_leader:
        return {"on": "none"}
    # torchrun sets OMP_NUM_THREADS=1 for several processes; the node is to be measured.
    torch.set_num_threads(process.num_cores())
    left, right = (torch.rand(_CPU_SIZE, _CPU_SIZE) for _ in range(2))
    left @ right  # the first product starts threads and allocates
    taken, end = [], time.perf_counter() + _CPU_SECONDS
    while time.perf_counter() < end:
        begun = time.perf_counter()
        left @ right
        taken.append(time.perf_counter() - begun)
    return {"on": "CPU", "tflops": 2 * _CPU_SIZE**3 / median(taken) / 1e12}


def judge_compute(facts: FactsByNode) -> CheckResult:
    result = CheckResult()
    for on, dtype, factor, error_factor, advice in (
        ("GPU", "bf16", _GPU_FACTOR, _GPU_ERROR_FACTOR, _GPU_ADVICE),
        ("CPU", "fp32", _CPU_FACTOR, None, _CPU_ADVICE),
    ):
        rates = {who: each["tflops"] for who, each in facts.items() if each["on"] == on}
        name = f"matrix products, {on}, {dtype}, TFLOP/s"
        judged = far_from_median(
            name, rates, "lower", factor=factor, error_factor=error_factor, advice=advice
        )
        result.add(judged)
        if on == "GPU" and not rates:
            result.skip("matrix products on GPUs", "no GPU")
    return result


def _gpu_tflops(device: torch.device) -> float:
    """Return a GPU's TFLOP/s: the median of many matrix products without the first half.

    In the first half its clocks settle.
    """
    shape, taken = (_GPU_SIZE, _GPU_SIZE), list[float]()
    with torch.cuda.device(device):  # events belong to the current device of the thread
        left, right = (torch.rand(shape, device=device, dtype=torch.bfloat16) for _ in range(2))
        begun = time.perf_counter()
        while time.perf_counter() - begun < _GPU_SECONDS:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            start.record()
            left @ right
            end.record()
            end.synchronize()
            taken.append(start.elapsed_time(end) / 1000)
    return 2 * _GPU_SIZE**3 / median(taken[len(taken) // 2 :]) / 1e12


# --- Environment: versions, hardware, and the variables that change what torch and NCCL do --------

_VERSION_SEVERITIES: dict[str, Severity] = {
    **dict.fromkeys(("longtake", "Python", "torch", "CUDA", "NCCL"), "error"),
    **dict.fromkeys(("driver", "GPUs"), "warning"),
}
_COMPARED = re.compile(r"(NCCL|TORCH|GLOO|UCX|CUDA|OMP|MKL|PYTORCH|XLA)_\w+|PYTHONPATH")
# Variables that launchers set differently for each process.
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
    memory = system.LoadProbe().sample()["memory_size_bytes"]
    cpus = system.read_text(Path("/proc/cpuinfo")) or ""
    processor = re.search(r"^model name\s*:\s*(.+)$", cpus, re.MULTILINE)
    versions = {
        "longtake": __version__,
        "Python": platform.python_version(),
        "torch": torch.__version__,
        "kernel": platform.release(),
        "processor": processor[1].strip() if processor else platform.machine(),
        "cores": str(process.num_cores()),
        "memory": f"{round(memory / 2**30)} GiB",
        **_gpu_versions(),
    }
    variables["interpreter"] = sys.executable
    gpus = range(torch.cuda.device_count())
    notes = {attention_rules.cudnn_note(torch.cuda.get_device_capability(gpu)) for gpu in gpus}
    faults = sorted(filter(None, notes))
    return {"versions": versions, "variables": variables, "gpus": len(gpus), "faults": faults}


def judge_environment(facts: FactsByNode) -> CheckResult:
    versions = {node: each["versions"] for node, each in facts.items()}
    result = same_everywhere(
        *("environment", versions, "note", _VERSION_ADVICE, _VERSION_SEVERITIES),
        command=_install_command,
    )
    variables = {node: each["variables"] for node, each in facts.items()}
    exceptions: dict[str, Severity] = {"interpreter": "note"}
    result.add(
        same_everywhere(
            *("variables", variables, "warning", _VARIABLE_ADVICE, exceptions),
            command=_variable_command,
        )
    )
    for fault in sorted({fault for each in facts.values() for fault in each.get("faults", ())}):
        nodes = [node for node, each in facts.items() if fault in each.get("faults", ())]
        result.find("note", nodes, fault, advice=attention_rules.INSTALL)
    if not any(each["gpus"] for each in facts.values()):
        result.skip("driver, CUDA and NCCL", "no GPU")
    return result


# --- Commands that remove a difference, to run on the nodes that differ from most.

_TORCH_INDEX = "https://download.pytorch.org/whl/"


def pip_command(name: str, version: str) -> str:
    """Return the pip command that installs a version of a package, or removes it if `ABSENT`.

    torch's builds for one CUDA version (2.13.0+cu130) need their own package index.
    """
    pip = f"{shlex.quote(sys.executable)} -m pip"
    if version == ABSENT:
        return f"{pip} uninstall --yes {shlex.quote(name)}"
    build = version.partition("+")[2]
    index = f" --index-url {_TORCH_INDEX}{build}" if re.fullmatch(r"cu\d+|cpu", build) else ""
    return f"{pip} install {shlex.quote(f'{name}=={version}')}{index}"


def _install_command(each: NodeDifference) -> str:
    """Return the command to make a version equal on nodes; empty for hardware and absent values."""
    version = str(each.majority)
    if version == ABSENT or not re.match(r"\d", version):
        return ""
    torch_version, cuda = torch.__version__.partition("+")[0], version.replace(".", "")
    match each.name:
        case "longtake":
            return _copy_command(each)
        case "Python":
            return f"uv venv --clear --python {shlex.quote(version)} {shlex.quote(sys.prefix)}"
        case "torch":
            return pip_command("torch", version)
        case "CUDA":
            return pip_command("torch", f"{torch_version}+cu{cuda}")
        case "NCCL":
            major = (torch.version.cuda or "13").partition(".")[0]
            return pip_command(f"nvidia-nccl-cu{major}", version)
        case "driver":
            return f"sudo apt-get install --yes nvidia-driver-{version.partition('.')[0]}"
        case "kernel":
            return f"sudo apt-get install --yes linux-image-{shlex.quote(version)} && sudo reboot"
    return ""


def _variable_command(each: NodeDifference) -> str:
    value = str(each.majority)
    if each.name == "interpreter":
        return f"export PATH={shlex.quote(str(Path(value).parent))}:$PATH"
    is_unset = value == ABSENT
    return f"unset {each.name}" if is_unset else f"export {each.name}={shlex.quote(value)}"


def _code_command(each: NodeDifference) -> str:
    value = str(each.majority)
    if each.name == _REVISION and not value.endswith("-dirty") and value != ABSENT:
        return f"git fetch --all && git checkout --force {shlex.quote(value)}"
    if each.name == _REVISION or each.name.startswith("longtake/"):
        return _copy_command(each)
    name = shlex.quote(each.name)
    return f"rm {name}" if value == ABSENT else f"rsync {_one_of(each)}:$PWD/{name} {name}"


def _copy_command(each: NodeDifference) -> str:
    package = shlex.quote(f"{Path(__file__).resolve().parents[1]}/")
    return f"rsync --archive --delete {_one_of(each)}:{package} {package}"


def _one_of(each: NodeDifference) -> str:
    """Return the quoted name of a node that has the majority's value of a differing fact."""
    return shlex.quote(each.values[str(each.majority)][0])


def _gpu_versions() -> dict[str, str]:
    if not torch.cuda.is_available():
        return {"GPUs": "none"}
    names = [torch.cuda.get_device_name(gpu) for gpu in range(torch.cuda.device_count())]
    driver = "unknown"
    with suppress(Exception):  # a driver that does not answer must not hide the other versions
        driver = driver_facts().get("driver", driver)
    return {
        "GPUs": ", ".join(f"{names.count(each)} x {each}" for each in dict.fromkeys(names)),
        "CUDA": str(torch.version.cuda),
        "NCCL": ".".join(map(str, torch.cuda.nccl.version())),  # type: ignore[no-untyped-call]
        "driver": driver,
    }


# --- Packages -------------------------------------------------------------------------------------

_COMES_WITH_TORCH = re.compile(r"nvidia-.*|triton.*|torch.*")
_PACKAGE_ADVICE = (
    "Install the same versions on all nodes, such as by pip install --constraint with what one of "
    "them has (pip freeze)."
)


def measure_packages(context: CheckContext) -> Facts:
    """Read installed packages' versions, a digest of all, and the packages longtake requires."""
    versions: dict[str, str] = {}
    for each in metadata.distributions():
        if name := each.metadata["Name"]:  # Python imports the first of two on sys.path
            versions.setdefault(_normalized(name), each.version)
    try:
        requires = metadata.requires("longtake") or []
    except metadata.PackageNotFoundError:
        requires = []
    # Packages of extras are optional: their versions matter like any other package's.
    names = (re.match(r"[\w.-]+", each) for each in requires if "extra ==" not in each)
    needed = {_normalized(found[0]) for found in names if found}
    versions = dict(sorted(versions.items()))
    lines = "\n".join(f"{name}=={version}" for name, version in versions.items())
    return {
        "versions": versions,
        "digest": _digest(lines.encode()),
        "needed": sorted(needed & versions.keys()),
    }


def judge_packages(facts: FactsByNode) -> CheckResult:
    """Compare the nodes' packages: differences of packages that compute are errors.

    These are `COMPUTING_PACKAGES`. For other packages that longtake requires they are warnings, for
    all others notes.
    """
    versions = {node: each["versions"] for node, each in facts.items()}
    names = {name for each in versions.values() for name in each}
    needed = {name for each in facts.values() for name in each["needed"]}
    needed |= {name for name in names if _COMES_WITH_TORCH.fullmatch(name)}
    exceptions: dict[str, Severity] = dict.fromkeys(needed, "warning")
    exceptions |= dict.fromkeys(COMPUTING_PACKAGES, "error")  # `train` refuses such ranks
    return same_everywhere(
        *("packages", versions, "note", _PACKAGE_ADVICE, exceptions),
        command=lambda each: pip_command(each.name, str(each.majority)),
    )


def _normalized(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


# --- Code: files of longtake, the recipe's own classes, revision of the working folder ------------

_REVISION = "revision of the working folder"
_GIT_SECONDS = 20.0
_CODE_ADVICE = (
    "Bring all nodes to the same commit (git pull, or rsync the folder), without changes of "
    "their own."
)


def measure_code(context: CheckContext) -> Facts:
    """Compute digests of longtake's files and of the recipe's own classes, and the git revision."""
    package = Path(__file__).resolve().parents[1]
    files = {
        f"longtake/{path.relative_to(package)}": _digest(path.read_bytes())
        for path in sorted(package.rglob("*.py"))
    }
    for path in training_classes(context.recipe).values() if context.recipe else ():
        files |= _module_digest(path)
    if git := shutil.which("git"):
        # With `--dirty`, as equal commits with different changes are not the same code.
        command = [git, "describe", "--always", "--dirty", "--abbrev=12"]
        done = subprocess.run(  # noqa: S603 - fixed arguments
            command, capture_output=True, text=True, check=False, timeout=_GIT_SECONDS
        )
        if done.returncode == 0:
            files[_REVISION] = done.stdout.strip()
    return {"files": files}


def judge_code(facts: FactsByNode) -> CheckResult:
    files = {node: each["files"] for node, each in facts.items()}
    exceptions: dict[str, Severity] = {_REVISION: "warning"}
    return same_everywhere(
        *("code", files, "error", _CODE_ADVICE, exceptions), command=_code_command
    )


def _module_digest(module: str) -> dict[str, str]:
    """Return the digest of an own class's file, found from the current directory as in training."""
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

_RECIPE_ADVICE = "Copy the recipe to all nodes, or keep it on a disk that all of them share."


def measure_recipe(context: CheckContext) -> Facts:
    """Read the recipe's keys and values, including defaults, as this node reads them."""
    if context.recipe_path is None:
        return {}
    if context.recipe is None:
        return {"problem": context.recipe_problem}
    text = config.dump(context.recipe)
    return {"keys": equality.recipe_keys(context.recipe), "digest": _digest(text.encode())}


def judge_recipe(facts: FactsByNode) -> CheckResult:
    if not any(facts.values()):
        result = CheckResult()
        result.skip("recipe, dataset, run directory and disk space", "no recipe was given")
        return result
    keys = {node: each["keys"] for node, each in facts.items() if "keys" in each}

    def command(each: NodeDifference) -> str:
        value = shlex.quote(f"{each.name}={each.majority}")
        return "" if each.majority == ABSENT else f"longtake launch RECIPE --set {value}"

    result = same_everywhere("recipe", keys, "error", _RECIPE_ADVICE, command=command)
    for node, each in facts.items():
        if problem := each.get("problem"):
            what = f"the recipe cannot be used: {problem}"
            result.find("error", (node,), what, "", _RECIPE_ADVICE)
    return result
