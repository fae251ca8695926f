"""What rsync and ssh said, as one sentence that names the cause and what to do."""

from longtake.errors import RunError
from longtake.evaluation.sync.address import Address
from longtake.evaluation.sync.transport import GoneError

_PARTIAL, _VANISHED = 23, 24
_DANGLING = "symlink has no referent"
_CONNECTION = (5, 10, 12, 30, 35, 255)  # of rsync's; 255 is ssh's
_CONSEQUENCES = ("rsync error:", "rsync warning:", "Broken pipe", "unexpectedly closed")
_NOT_FOUND = "No such file or directory"
_BY_SSH = (
    ("Host key verification failed", "ssh does not know its host key", "connect once by hand"),
    ("IDENTIFICATION HAS CHANGED", "ssh knows another host key of it", "compare the keys"),
    (
        "Permission denied (",
        "ssh is not let in without a password",
        "put your public key into its ~/.ssh/authorized_keys",
    ),
    ("Could not resolve hostname", "there is no such host", "check its name"),
    ("rsync: command not found", "rsync is not installed there", "install it there"),
    ("rsync: not found", "rsync is not installed there", "install it there"),
    ("rsync: No such file", "rsync is not installed there", "install it there"),
)
_BY_DISK = (
    ("No space left on device", "a disk is full", "make room"),
    ("Disk quota exceeded", "a quota is used up", "make room"),
    ("Read-only file system", "a disk is read-only", "see what is wrong with it"),
    ("Permission denied (13)", "a file may not be read or written", "change its permissions"),
)


def is_fine(status: int, said: str) -> bool:
    """Whether rsync has brought all that there is.

    A file that is deleted while it is listed is not missed, nor is one that a link only names.
    """
    return status in (0, _VANISHED) or (
        status == _PARTIAL and bool(told := _causes(said)) and all(_DANGLING in x for x in told)
    )


def error_of(address: Address, status: int, said: str) -> RunError:
    """The error that an ended rsync stands for, if that is not fine."""
    lines, told = _lines(said), _causes(said)
    last = (told or lines or [f"rsync ended with status {status}"])[-1]
    for sign, what, advice in (*_BY_DISK, *_BY_SSH):
        if at := next((line for line in told if sign in line), None):
            return RunError(f"{address.text}: {what} ({at}); {advice}.")
    if status == _PARTIAL and told and all(_is_absence(line) for line in told):
        return GoneError(f"{address.text}: there is no such file or folder ({told[0]}).")
    if status in _CONNECTION or not told:
        by_hand = f"ssh -o BatchMode=yes {address.host} true" if address.host else "rsync by hand"
        return RunError(f"{address.text}: it cannot be reached ({last}); try {by_hand}.")
    return RunError(f"{address.text}: it could not be copied ({last}).")


def _lines(said: str) -> list[str]:
    return [line.strip() for line in said.splitlines() if line.strip()]


def _causes(said: str) -> list[str]:
    return [line for line in _lines(said) if not any(sign in line for sign in _CONSEQUENCES)]


def _is_absence(line: str) -> bool:
    return _NOT_FOUND in line or "vanished" in line
