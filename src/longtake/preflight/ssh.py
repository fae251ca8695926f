"""Commands on other nodes, by the ssh program and never with a question to anybody."""

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence

from longtake.errors import LongtakeError

_SECONDS_TO_CONNECT = 10
_UNKNOWN_KEY, _CHANGED_KEY = "Host key verification failed", "IDENTIFICATION HAS CHANGED"
_REFUSED = "Permission denied"
_COMMAND_NOT_FOUND = 127
SSH_FAILED = 255


class Ssh:
    """How nodes are reached.

    Args:
        options: further ones for ssh's -o, such as `User=me`; they come before ours and win.

    Raises:
        LongtakeError: there is no ssh on this machine.
    """

    def __init__(self, options: Sequence[str] = ()) -> None:
        program = shutil.which("ssh")
        if program is None:
            raise LongtakeError(
                "--nodes needs the ssh program, which is not installed here. Install it "
                "(openssh-client), or start the preflight by torchrun or srun."
            )
        # BatchMode: what ssh would ask for (a password, an unknown host's key), it refuses.
        ours = ("BatchMode=yes", f"ConnectTimeout={_SECONDS_TO_CONNECT}", "ServerAliveInterval=5")
        given = [word for each in (*options, *ours) for word in ("-o", each)]
        self._words = [program, "-T", *given]

    def start(self, node: str, command: Sequence[str]) -> "subprocess.Popen[str]":
        """Start a command on a node, in this folder and with what Python is told here.

        It should end when its stdin does, as nothing else tells it that ssh is gone.
        """
        there = f"cd {shlex.quote(os.getcwd())} && exec {_variables()} {shlex.join(command)}"  # noqa: PTH109 - as text
        return subprocess.Popen(  # noqa: S603 - ssh, by its path
            [*self._words, "--", node, there],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
        )


def python(*arguments: str) -> list[str]:
    """A command of this same interpreter, at the same path on the node."""
    return [sys.executable, *arguments]


def explain(node: str, status: int, said: str) -> tuple[str, str]:
    """What went wrong when a command could not be run on a node, and what to do."""
    lines = [line for line in said.strip().splitlines() if line.strip()]
    last = lines[-1] if lines else f"exit status {status}"
    if _UNKNOWN_KEY in said or _CHANGED_KEY in said:
        advice = (
            f"Connect once by hand (ssh {node}) and compare its key, or let ssh take new ones: "
            "--ssh-option StrictHostKeyChecking=accept-new."
        )
        return f"ssh does not know its host key, or knows another: {last}", advice
    if status == SSH_FAILED and _REFUSED in said:
        advice = "Put your public key into its ~/.ssh/authorized_keys; ssh must not have to ask."
        return f"ssh is not let in without a password: {last}", advice
    if status == SSH_FAILED:
        return f"it cannot be reached by ssh: {last}", f"Try: ssh -o BatchMode=yes {node} true."
    if status == _COMMAND_NOT_FOUND or "No such file" in last:
        advice = "The environment, and this folder, must be at the same path on all nodes."
        return f"{sys.executable} or {os.getcwd()} is not there: {last}", advice  # noqa: PTH109
    return f"longtake cannot be imported there: {last}", "Install longtake in that environment."


def _variables() -> str:
    passed = ("PYTHONPATH", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "NCCL_IB_HCA")
    given = {name: os.environ[name] for name in passed if os.environ.get(name)}
    return "env " + " ".join(f"{name}={shlex.quote(value)}" for name, value in given.items())
