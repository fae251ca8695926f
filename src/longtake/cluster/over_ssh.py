"""Preflight over ssh: starts a process on each named node, and returns the report of rank 0.

First every node is tried; the preflight then runs without nodes that cannot take part. Each process
gets its rank in the environment like from torchrun, prints one JSON object, and ends when its stdin
is closed, as nothing else tells it that ssh is gone.
"""

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn

from longtake.cluster import findings, topology
from longtake.errors import LongtakeError
from longtake.process import LeftError, leave_on_signals, program

_MAX_AT_ONCE = 64
_CONNECT_SECONDS = 10
_ASK_SECONDS = 30.0
_MARGIN_SECONDS = 30.0  # added to twice the time limit, for the start of Python and torch
_OTHERS_SECONDS = 5.0  # time for others to report after one process failed
_CLEANUP_SECONDS = 5.0  # time for a process to clean up after ssh is gone
_END_SECONDS = 8.0
_POLL_SECONDS = 0.05
_COMMAND_NOT_FOUND, _SSH_FAILED = 127, 255
_PASSED_VARIABLES = ("PYTHONPATH", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "NCCL_IB_HCA")
_ASK = """
import socket
import longtake
with socket.socket() as free:
    free.bind(("", 0))
    print(free.getsockname()[1])
"""


def preflight_over_ssh(
    nodes: Sequence[str],
    recipe: Path | None,
    changes: Sequence[str],
    seconds: float,
    options: Sequence[str] = (),
) -> findings.PreflightReport:
    """Run a preflight: check nodes from this machine over ssh.

    Args:
        nodes: names for ssh; the other nodes must also be able to resolve the first name.
        recipe: path of the recipe, the same here and on the nodes; None: check what every run
            needs.
        changes: --set changes of the recipe.
        seconds: limit of the wait for a node or a check.
        options: options of ssh, such as `User=me`.

    Returns:
        The report of rank 0, with findings about nodes that could not take part.

    Raises:
        LongtakeError: no node is named, or one twice; or ssh is not installed here.
    """
    begun = time.monotonic()
    if not nodes or len(set(nodes)) < len(nodes):
        raise LongtakeError(
            f"--nodes {','.join(nodes)}: expected names of nodes, each once, such as gpu00,gpu01."
        )
    ssh = _ssh_command(options)
    ask = _on_node([sys.executable, "-P", "-c", _ASK], {})
    # Every node is asked for a free port, which also shows that Python and longtake start there.
    answers = _run_on_all(ssh, dict.fromkeys(nodes, ask), _ASK_SECONDS)
    there = [node for node in nodes if answers[node].status == 0]
    found = []
    for node in (node for node in nodes if node not in there):
        what, advice = _explain(node, answers[node])
        expected = "an answer" if answers[node].status is None else ""
        found.append(findings.Finding("error", (node,), what, expected, advice, "nodes"))
    report = None
    if there:
        port = int(answers[there[0]].out.split()[-1])
        commands = _commands(there, port, recipe, changes, seconds)
        limit = 2 * seconds + _MARGIN_SECONDS
        outputs = _run_on_all(ssh, commands, limit, until_one_fails=True)
        said = {node: _json_of(each.out) for node, each in outputs.items()}
        report = next((each["report"] for each in said.values() if "report" in each), None)
        found += [] if report else _why_no_report(outputs, said, limit)
    if report is None:
        skipped = [findings.SkippedCheck("everything else", "no node reported what it found")]
        facts = [{"name": node, "processes": 0} for node in nodes]
        name = None if recipe is None else str(recipe)
        report = findings.make_report(facts, 0, name, findings.CheckResult(skipped=skipped), 0)
    else:
        absent = [node for node in nodes if node not in there]
        report["nodes"] += [{"name": node, "processes": 0} for node in absent]
    report["findings"] += [asdict(each) for each in found]
    return findings.with_verdict({**report, "seconds": round(time.monotonic() - begun, 2)})


# --- On the nodes ---------------------------------------------------------------------------------


def preflight_on_node(recipe: Path | None, changes: Sequence[str], seconds: float) -> NoReturn:
    """Run the preflight as one of the nodes over ssh, print its result, and end this process.

    The JSON object has `report` (rank 0) or `error`.
    """
    from longtake.cluster.preflight import preflight
    from longtake.cluster.rendezvous import SilentProcessError

    threading.Thread(target=_end_with_stdin, daemon=True).start()
    answer: dict[str, Any] = {}
    with leave_on_signals():
        try:
            report, _ = preflight(recipe, changes, seconds)
            answer = {} if report is None else {"report": report}
        except SilentProcessError as error:
            answer = {"error": str(error), "silent": list(error.silent)}
        except LongtakeError as error:
            answer = {"error": str(error)}
        except LeftError:
            _kill_own_group()
    print(json.dumps(answer), flush=True)  # noqa: T201 - read at the other end of ssh
    # Not sys.exit: a check may hang in the kernel, and the thread above in read(2).
    os._exit("error" in answer)


def _end_with_stdin() -> None:
    """Wait until stdin closes (ssh is gone), then end this process, by force after some seconds."""
    while os.read(0, 4096):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(_CLEANUP_SECONDS)
    _kill_own_group()


def _kill_own_group() -> NoReturn:
    # The group of another program, such as a test's, must not be killed.
    is_own = os.getpgrp() == os.getpid()
    os.kill(-os.getpid() if is_own else os.getpid(), signal.SIGKILL)
    raise SystemExit(1)  # not reached


def _commands(
    nodes: Sequence[str], port: int, recipe: Path | None, changes: Sequence[str], seconds: float
) -> dict[str, str]:
    """Return each node's shell command for the preflight; the first node serves torch's store."""
    arguments = [] if recipe is None else [str(recipe)]
    arguments += [word for each in changes for word in ("--set", each)]
    command = program("longtake", "preflight", *arguments, "--timeout", f"{seconds:g}", "--relayed")
    common = {
        "WORLD_SIZE": str(len(nodes)),
        "LOCAL_RANK": "0",
        "MASTER_ADDR": nodes[0].rpartition("@")[2],
        "MASTER_PORT": str(port),
        topology.HOSTS_VARIABLE: ",".join(nodes),
    }
    return {
        node: _on_node(command, {**common, "RANK": str(rank), "GROUP_RANK": str(rank)})
        for rank, node in enumerate(nodes)
    }


def _on_node(command: Sequence[str], variables: Mapping[str, str]) -> str:
    passed = {name: os.environ[name] for name in _PASSED_VARIABLES if os.environ.get(name)}
    env = [f"{name}={value}" for name, value in {**passed, **variables}.items()]
    return f"cd {shlex.quote(str(Path.cwd()))} && exec {shlex.join(['env', *env, *command])}"


# --- ssh ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Output:
    """Output and exit status of a command on a node; `status` is None if it had to be killed."""

    status: int | None
    out: str
    error: str

    @property
    def last_line(self) -> str:
        lines = [line.strip() for line in self.error.splitlines() if line.strip()]
        return lines[-1] if lines else f"exit status {self.status}, without a message"


class _RemoteCommand:
    """A running command on a node, through a local process of ssh."""

    def __init__(self, command: Sequence[str]) -> None:
        # Files and not pipes, which nobody would read while many commands run.
        self._files = tempfile.TemporaryFile(), tempfile.TemporaryFile()  # noqa: SIM115 - see end
        out, error = self._files
        self.process = subprocess.Popen(  # noqa: S603 - ssh, by its path
            command, stdin=subprocess.PIPE, stdout=out, stderr=error
        )

    def end(self) -> _Output:
        """Return the command's output; if it still runs, close its stdin, then kill it."""
        status = self.process.poll()
        assert self.process.stdin is not None
        with suppress(OSError):
            self.process.stdin.close()
        try:
            self.process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        texts = []
        for file in self._files:
            with file:
                file.seek(0)
                texts.append(file.read().decode(errors="replace"))
        return _Output(status, *texts)


def _ssh_command(options: Sequence[str]) -> list[str]:
    program = shutil.which("ssh")
    if program is None:
        raise LongtakeError(
            "--nodes needs the ssh program, which is not installed here. Install it "
            "(openssh-client), or start the preflight by torchrun or srun."
        )
    # BatchMode: ssh fails instead of asking for a password or about an unknown host key. Of equal
    # options ssh takes the first, so the user's win.
    ours = ("BatchMode=yes", f"ConnectTimeout={_CONNECT_SECONDS}", "ServerAliveInterval=5")
    return [program, "-T", *(word for each in (*options, *ours) for word in ("-o", each))]


def _run_on_all(
    ssh: Sequence[str],
    commands: Mapping[str, str],
    seconds: float,
    *,
    until_one_fails: bool = False,
) -> dict[str, _Output]:
    """Run a command on each node in parallel, for up to `seconds`."""
    running = {node: _RemoteCommand([*ssh, "--", node, each]) for node, each in commands.items()}
    end = time.monotonic() + seconds
    try:
        while (now := time.monotonic()) < end:
            # After one failure the others wait for it in vain, so they have seconds left.
            statuses = [each.process.poll() for each in running.values()]
            if None not in statuses:
                break
            if until_one_fails and any(statuses):
                end = min(end, now + _OTHERS_SECONDS)
            time.sleep(_POLL_SECONDS)
    finally:
        with ThreadPoolExecutor(_MAX_AT_ONCE) as pool:
            outputs = list(pool.map(_RemoteCommand.end, running.values()))
    return dict(zip(running, outputs, strict=True))


# --- What went wrong ------------------------------------------------------------------------------


def _json_of(out: str) -> dict[str, Any]:
    """Parse the JSON object at the end of an output; before it, a login shell may print text."""
    start = f"\n{out}".rfind("\n{")
    try:
        found: dict[str, Any] = json.loads(out[start:] if start >= 0 else "")
    except ValueError:
        return {}
    return found


def _explain(node: str, output: _Output) -> tuple[str, str]:
    """Return the reason why the preflight could not run on the node, and advice, as two texts."""
    status, error, last = output.status, output.error, output.last_line
    if status is None:
        what = f"it has not answered within {_ASK_SECONDS:g} s"
        return what, f"Look at what hangs there: ssh {node}; its disks, and its load."
    if "Host key verification failed" in error or "IDENTIFICATION HAS CHANGED" in error:
        advice = (
            f"Connect once by hand (ssh {node}) and compare its key, or let ssh accept new ones: "
            "--ssh-option StrictHostKeyChecking=accept-new."
        )
        return f"ssh does not know its host key, or knows another: {last}", advice
    if status == _SSH_FAILED and "Permission denied" in error:
        advice = "Put your public key into its ~/.ssh/authorized_keys; ssh must not have to ask."
        return f"ssh is not let in without a password: {last}", advice
    if status == _SSH_FAILED:
        return f"it cannot be reached by ssh: {last}", f"Try: ssh -o BatchMode=yes {node} true."
    if status == _COMMAND_NOT_FOUND or "No such file" in last:
        advice = "The environment, and this folder, must be at the same path on all nodes."
        return f"{sys.executable} or {Path.cwd()} does not exist there: {last}", advice
    return f"longtake cannot be imported there: {last}", "Install longtake in that environment."


def _why_no_report(
    outputs: Mapping[str, _Output], said: Mapping[str, Mapping[str, Any]], limit: float
) -> list[findings.Finding]:
    """Return findings on nodes that prevented the report, not on nodes that waited for them."""
    nodes = list(outputs)
    silent = {nodes[rank] for each in said.values() for rank in each.get("silent", ())}
    failed = {node for node, each in outputs.items() if each.status and "silent" not in said[node]}
    unended = {node for node, each in outputs.items() if each.status is None}
    # The best evidence first: a node that failed, then one that others name and that still runs.
    causes = failed or (silent & unended) or silent or unended or set(nodes)
    waited = next((each["error"] for each in said.values() if each.get("silent")), "")
    found = []
    for node in (each for each in nodes if each in causes):
        advice = "Start it there by hand: longtake preflight."
        if error := said[node].get("error"):
            what = f"it ended before there was a report: {error}"
        elif outputs[node].status is not None:
            what = f"it ended before there was a report: {outputs[node].last_line}"
        else:
            what = f"it has not ended within {limit:g} s, or was ended because of another"
            what += f": {waited}" if waited else ""
            advice = f"Look at what hangs there: ssh {node}; its disks, and its load."
        found.append(findings.Finding("error", (node,), what, "", advice, "nodes"))
    return found
