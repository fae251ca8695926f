"""The verb `longtake preflight`: are the nodes fit for a run."""

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from longtake.cli import say
from longtake.cli.say import AsJson, Changes
from longtake.progress import phase_lines

if TYPE_CHECKING:
    from longtake.cluster.findings import PreflightReport


def preflight(
    recipe: Annotated[
        Path | None, typer.Argument(help="A recipe (TOML): its data, run directory and disk, too.")
    ] = None,
    nodes: Annotated[
        str | None,
        typer.Option(
            metavar="A,B,…", help="Check these nodes over ssh; ranks meet at the first one."
        ),
    ] = None,
    ssh_option: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=VALUE", help="An option for ssh -o, such as User=me; may be repeated."
        ),
    ] = None,
    timeout: Annotated[
        float, typer.Option(min=1, max=1e6, help="Seconds to wait for a node or a check.")
    ] = 120.0,
    changes: Changes = None,
    as_json: AsJson = False,
    relayed: Annotated[bool, typer.Option(hidden=True)] = False,
) -> None:
    """Check all nodes before a run: the same software, data and disks? Clocks, speed, links?

    Alone it checks this machine. On several: with --nodes; or started like the training itself,
    one process per node or more: `torchrun --nnodes 4 --nproc-per-node 1 … -m longtake preflight
    RECIPE`, or `srun --ntasks-per-node 1 longtake preflight RECIPE`.

    Exit code 0 without errors (there may be warnings), 1 with errors, 2 for a mistake of the user.
    """
    if relayed:
        from longtake.cluster.over_ssh import preflight_on_node

        preflight_on_node(recipe, changes or (), timeout)
    if nodes is not None:
        from longtake.cluster.over_ssh import preflight_over_ssh

        names = [each.strip() for each in nodes.split(",") if each.strip()]
        with say.console().status(f"Checking {len(names)} nodes …"):
            report = preflight_over_ssh(names, recipe, changes or (), timeout, ssh_option or ())
        _show(report, as_json=as_json)
        raise typer.Exit(report["exit_status"])
    with phase_lines(say.console(), "importing PyTorch") as enter:
        from longtake.cluster.preflight import preflight as check

        enter("checking")
        found, is_hanging = check(recipe, changes or (), timeout)
    if found is not None:
        _show(found, as_json=as_json)
    status = 0 if found is None else found["exit_status"]
    if is_hanging:
        # Its thread is in the kernel, and waiting for it would be another hang.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    raise typer.Exit(status)


def _show(report: "PreflightReport", *, as_json: bool) -> None:
    if as_json:
        say.result(report)
        return
    from longtake.cluster.findings import print_report

    print_report(say.stdout_console(), report)
