"""The verb `longtake preflight`: are the nodes fit for a run."""

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from longtake.cli import say
from longtake.cli.say import AsJson, Changes

if TYPE_CHECKING:
    from longtake.preflight.report import Report


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
        float, typer.Option(min=1, max=1e6, help="Seconds that a node, or a check, is waited for.")
    ] = 120.0,
    changes: Changes = None,
    as_json: AsJson = False,
    relayed: Annotated[bool, typer.Option(hidden=True)] = False,
) -> None:
    """Look at all nodes before a run: the same software, data and disks? Clocks, speed, links?

    Alone it looks at this machine. On several: with --nodes; or started like the training itself,
    one process a node or more: `torchrun --nnodes 4 --nproc-per-node 1 … -m longtake preflight
    RECIPE`, or `srun --ntasks-per-node 1 longtake preflight RECIPE`.

    Exit code 0 without errors (there may be warnings), 1 with errors, 2 for a mistake of the user.
    """
    if nodes is not None:
        from longtake.preflight.over_ssh import preflight_over_ssh

        named = [each.strip() for each in nodes.split(",") if each.strip()]
        with say.console().status(f"Looking at {len(named)} nodes …"):
            told = preflight_over_ssh(named, recipe, changes or (), timeout, ssh_option or ())
        _tell(told, as_json=as_json)
        raise typer.Exit(told["exit_status"])
    from longtake.preflight.run import preflight as look

    found, hangs = look(recipe, changes or (), timeout)
    status = 0
    if found is not None:
        _tell(found, as_json=as_json or relayed)
        status = 0 if relayed else found["exit_status"]
    if hangs:
        # Its thread is in the kernel, and waiting for it would be another hang.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    raise typer.Exit(status)


def _tell(found: "Report", *, as_json: bool) -> None:
    if as_json:
        say.result(found)
        return
    from longtake.preflight.tables import print_report

    print_report(say.stdout_console(), found)
