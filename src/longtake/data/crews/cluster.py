"""Does errands on a Ray cluster: how it is connected to, and what can be wrong with that."""

import importlib
import logging
import os
import secrets
import socket
import warnings
from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import ModuleType

from longtake.data.crews.errand import Errand, Item, Result
from longtake.data.crews.far import Sent
from longtake.data.crews.gang import Gang
from longtake.errors import DataError
from longtake.fsio import make_writable

_REACH_SECONDS = 5.0
_CLIENT_PORT = "10001"
# Neither is anything that Ray is to do without being asked: report usage, or warn of a change.
_QUIET = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}
# By this, as on other systems by default, one that is started here listens on 127.0.0.1 only.
_ALONE = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
_GO_ON = "The same command again goes on where this one was."


class Cluster:
    """A crew of Ray workers; see `longtake.data.crews.errand.Crew`.

    Args:
        ray: the module, connected.
        workers: how many at a time; None: as many as the cluster has cores or cards for.
    """

    def __init__(self, ray: ModuleType, workers: int | None = None) -> None:
        self._ray = ray
        self._workers = workers

    def work(
        self, errand: Errand[Item, Result], items: Iterable[Item]
    ) -> Generator[tuple[int, Result]]:
        """As `Crew.work`.

        Raises:
            DataError: a worker has other versions or does not see the same files, workers die again
                and again, or the cluster is gone.
            LongtakeError: the errand raised it.
        """
        with _signs(errand.folders) as signs:
            gang = Gang(self._ray, errand, Sent.to_do(errand, signs), self._workers)
            try:
                yield from gang.work(items)
            except (ConnectionError, self._ray.exceptions.RaySystemError) as error:
                raise DataError(
                    f"The Ray cluster is gone: {_first_line(error)}. {_GO_ON}"
                ) from error
            finally:
                gang.dismiss()


@contextmanager
def _signs(folders: Iterable[Path]) -> Iterator[list[Path]]:
    """A file in each folder, by which others see whether it is the same one."""
    signs = [folder.resolve() / f".sign-{secrets.token_hex(8)}" for folder in folders]
    try:
        for sign in signs:
            try:
                make_writable(sign.parent)
                sign.touch()
            except OSError as error:
                raise DataError(
                    f"{sign.parent} cannot be written: {error.strerror or error}."
                ) from error
        yield signs
    finally:
        for sign in signs:
            with suppress(OSError):
                sign.unlink()


@contextmanager
def connected(where: str) -> Iterator[ModuleType]:
    """Ray, connected to a cluster; left alone where the caller has connected it already.

    Args:
        where: `ray` or `ray://HOST:PORT`; see `longtake.data.crews.choice.crew_on`.

    Raises:
        DataError: it is not installed, or cannot be reached.
    """
    address = os.environ.get("RAY_ADDRESS") if where == "ray" else where
    ray = _import({} if address else _ALONE)
    if ray.is_initialized():
        yield ray
        return
    if address:
        _reach(address)
    try:
        with warnings.catch_warnings():  # what they say is in the errors
            warnings.simplefilter("ignore")
            _connect(ray, address)
    except Exception as error:  # it raises whatever comes along
        raise DataError(_unreachable(address, error)) from error
    try:
        yield ray
    finally:
        ray.shutdown()


def _import(further: dict[str, str]) -> ModuleType:
    for name, value in (_QUIET | further).items():
        os.environ.setdefault(name, value)
    try:
        return importlib.import_module("ray")
    except ImportError as error:
        raise DataError(
            f"--on ray needs Ray, which cannot be imported here: {error}. Install it: "
            "pip install 'longtake[ray]'."
        ) from error


def _connect(ray: ModuleType, address: str | None) -> None:
    quiet = {"log_to_driver": False, "logging_level": logging.CRITICAL}
    if address and address.startswith("ray://"):
        ray.init(address, **quiet)
    else:
        ray.init(address, include_dashboard=False, **quiet)


def _reach(address: str) -> None:
    """Find out in seconds what takes Ray minutes: that nobody listens there.

    Raises:
        DataError: nobody does.
    """
    host, colon, port = address.removeprefix("ray://").split("/")[0].rpartition(":")
    if not colon and address.startswith("ray://"):
        host, port = port, _CLIENT_PORT
    if not host or not port.isdecimal():
        return  # such as `auto`, which Ray knows
    try:
        socket.create_connection((host.strip("[]"), int(port)), _REACH_SECONDS).close()
    except OSError as error:
        raise DataError(_unreachable(address, error)) from error


def _unreachable(address: str | None, error: Exception) -> str:
    if address is None:
        return f"Ray cannot be started here: {_first_line(error)}."
    return (
        f"The Ray cluster at {address} cannot be reached: {_first_line(error)}. Is it running "
        "(`ray start --head` on one node), is its client server's port open "
        f"({_CLIENT_PORT}, unless it was started otherwise), and is its Ray the version that is "
        "installed here? If it asks for a token, set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN_PATH."
    )


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
