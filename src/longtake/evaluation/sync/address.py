"""What --source names: a place on another machine, on this one, or in some store."""

from dataclasses import dataclass
from pathlib import Path

from longtake.errors import RunError

_EXPECTED = (
    "Expected user@host:/path or host:/path (rsync over ssh), /path (a disk that is shared), or "
    "protocol://path (by fsspec, such as s3://bucket/runs): a run, or a folder of runs."
)


@dataclass(frozen=True)
class Address:
    """Where runs are.

    Attributes:
        text: as it was given.
        host: as ssh knows it, with the user; empty for this machine.
        path: there; a URL where it is neither of the two.
    """

    text: str
    host: str
    path: str

    @property
    def is_url(self) -> bool:
        """Whether fsspec has to read it."""
        return "://" in self.path

    @property
    def for_rsync(self) -> str:
        """What rsync calls it."""
        return f"{self.host}:{self.path}" if self.host else self.path


def parse(text: str) -> Address:
    """Take what was given after --source apart; a relative path is one of this folder.

    Raises:
        RunError: it names nothing.
    """
    if "://" in text:
        return Address(text, "", text.rstrip("/"))
    host, colon, path = _split(text)
    if colon and (not host or host.startswith("-") or not path or path.startswith(":")):
        raise RunError(f"--source {text}: this names no host and path. {_EXPECTED}")
    if not text.strip():
        raise RunError(f"--source is empty. {_EXPECTED}")
    if colon:
        return Address(text, host, path.rstrip("/") or "/")
    return Address(text, "", str(Path(text).expanduser().absolute()))


def _split(text: str) -> tuple[str, str, str]:
    """Host, colon and path; without a colon it is a path. An IPv6 address has brackets."""
    before, bracket, after = text.partition("]:")
    if bracket and "/" not in before:
        return f"{before}]", ":", after
    host, colon, path = text.partition(":")
    return (host, colon, path) if "/" not in host else ("", "", text)
