"""The system's programs that make namespaces, and whether they are allowed to."""

import os
import shutil
import subprocess

from longtake.errors import RunError

NAMESPACES = ("--net", "--uts", "--mount", "--pid", "--fork", "--mount-proc")
"""What a host has of its own, as options of unshare."""

_TOOLS = ("ip", "tc", "unshare", "nsenter", "mount", "setpriv", "taskset")
_SSH_TOOLS = ("ssh", "sshd", "ssh-keygen")
_SYSTEM_PATH = "/usr/local/sbin:/usr/sbin:/sbin:/usr/local/bin:/usr/bin:/bin"


def why_not(*, with_ssh: bool = False) -> str | None:
    """Why hosts cannot be made here, or None if they can."""
    if os.geteuid() != 0:
        return "hosts as network namespaces need root"
    tools = (*_TOOLS, *_SSH_TOOLS) if with_ssh else _TOOLS
    if missing := [tool for tool in tools if _program(tool) is None]:
        return (
            f"hosts as network namespaces need {', '.join(missing)} (of iproute2, util-linux "
            "and openssh)"
        )
    command = [needed("unshare"), *NAMESPACES, "true"]
    if subprocess.run(command, capture_output=True, check=False).returncode:  # noqa: S603
        return "this machine does not let namespaces be made (a container without CAP_SYS_ADMIN?)"
    return None


def needed(name: str) -> str:
    """Where a program lies.

    Raises:
        RunError: nowhere.
    """
    found = _program(name)
    if found is None:
        raise RunError(f"Hosts as network namespaces need {name}, which is not installed.")
    return found


def _program(name: str) -> str | None:
    """Where a program lies; what belongs to root is often on no user's path."""
    return shutil.which(name, path=f"{os.environ.get('PATH', '')}:{_SYSTEM_PATH}")
