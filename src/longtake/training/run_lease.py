"""The lease on a run directory, by which one launch at a time trains a run.

Rank 0 holds it as files in the run's folder `lease`.
"""

import os
import secrets
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from typing import Any

from rich.console import Console

from longtake import errors
from longtake.lease import Lease, Leases, has_same_owner, is_alive, kept, newest
from longtake.parallel import collectives, mesh
from longtake.run_dir import LAUNCH_VARIABLE, RunDirectory

_LEASE_SECONDS = 60.0
_LOOK_SECONDS = 0.25
_SECONDS_TO_EXIT = 10.0
"""Seconds within which a rank 0 process that its launcher replaces on this host must have ended."""


@contextmanager
def hold_run(run: RunDirectory, world: mesh.World, console: Console) -> Iterator[Lease | None]:
    """Hold the lease on a run while the context lasts; yields None on ranks other than 0.

    A rank 0 that a launcher or Slurm has restarted inherits the lease of its predecessor. Any other
    launch waits as long as the holder may still be alive. All ranks must call it.

    Raises:
        RunError: another launch trains the run, or its directory cannot be written.
    """
    taken: list[Lease] = []
    collectives.first_does(lambda: taken.append(_take(run, console)), world)
    lease, how = taken[0] if taken else None, "failed"
    try:
        with nullcontext() if lease is None else kept(lease):
            yield lease
        how = "ended"
    finally:
        if lease is not None:
            # A disk that fails now must not hide the error that ends the block.
            with suppress(OSError):
                if run.exists():
                    lease.end(how)
                else:  # it was refused before it was created
                    (lease.folder / f"{lease.number}.json").unlink()
                    lease.folder.rmdir()  # fails if another launch has begun to train here


def refuse_lost(lease: Lease | None) -> None:
    """Refuse to continue if another launch has taken over the lease on the run directory.

    This happens to a process that was stopped, or cut off from the disk, for a minute.

    Raises:
        RunError: another launch holds the lease.
    """
    # Renewed recently enough that nobody can have taken it: no look at the disk in most steps.
    if lease is None or lease.renewed_seconds() < _LEASE_SECONDS / 2:
        return
    if lease.is_held:
        with suppress(OSError):  # a full disk
            lease.renew()
        return
    raise errors.RunError(
        f"This launch was silent for more than {_LEASE_SECONDS:g} s, and "
        f"{_holder(newest(lease.folder))} has taken over the run {lease.folder.parent}. Only "
        "one launch may write a run, so this one ends; nothing that it saved is lost."
    )


def _take(run: RunDirectory, console: Console) -> Lease:
    owner = {**_this_launch(), "token": secrets.token_hex(4)}
    leases = Leases(_LEASE_SECONDS, owner, inherits=("launch", "job"))
    first, begun, is_said = newest(run.lease_path), time.monotonic(), False
    try:
        while (lease := leases.take(run.lease_path)) is None:
            holder = newest(run.lease_path)
            if holder is not None:
                _refuse_if_alive(run, holder, first, time.monotonic() - begun)
            if not is_said and time.monotonic() - begun > 1:
                # Most waits are shorter than a second: for a predecessor that is about to end.
                is_said = True
                console.print(
                    f"{run.path} is held by {_holder(holder)}. It has not given a sign of life "
                    f"yet; if it gives none within {_LEASE_SECONDS:g} s, this launch takes over.",
                    markup=False,
                )
            time.sleep(_LOOK_SECONDS)
    except OSError as error:
        raise errors.RunError(
            f"The run directory {run.path} cannot be written: {error.strerror or error}. Make room "
            "or make it writable, or choose another one with --set out=FOLDER."
        ) from error
    return lease


def _refuse_if_alive(
    run: RunDirectory, holder: Mapping[str, Any], first: Mapping[str, Any] | None, seconds: float
) -> None:
    # A holder whose record changes while this launch waits is alive, whatever host it runs on.
    is_same = has_same_owner(holder, _this_launch())
    runs_here = is_alive(holder) and not (is_same and seconds < _SECONDS_TO_EXIT)
    has_moved = first is not None and any(
        first.get(name) != holder.get(name) for name in ("host", "pid", "time", "beat")
    )
    if runs_here or has_moved:
        raise errors.RunError(
            f"{run.path} is being trained by {_holder(holder)}. A run is trained by one launch at "
            f"a time. Stop that one first (kill {holder['pid']} on {holder['host']}: it saves and "
            "ends), or train beside it: --fresh, or --set out=FOLDER."
        )


def _this_launch() -> dict[str, str]:
    """Return the launch and Slurm job of this process, which a restarted rank 0 has as well."""
    job = os.environ.get("SLURM_JOB_ID", "")
    cluster = os.environ.get("SLURM_CLUSTER_NAME", "")
    return {"launch": os.environ.get(LAUNCH_VARIABLE, ""), "job": f"{cluster}/{job}" if job else ""}


def _holder(record: Mapping[str, Any] | None) -> str:
    """Describe the process that holds a lease: its number, host, Slurm job and start time."""
    if record is None:
        return "another process"
    job = f" (Slurm job {str(record['job']).rpartition('/')[2]})" if record.get("job") else ""
    since = str(record["time"])[:19].replace("T", " ")
    return f"process {record['pid']} on {record['host']}{job} since {since} UTC"
