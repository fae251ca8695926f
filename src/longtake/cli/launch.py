"""The commands `launch` (all ranks of a node, or a Slurm job) and `preflight`."""

import os
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from longtake import process, progress
from longtake.cli import say, train

if TYPE_CHECKING:
    from longtake.cluster.findings import PreflightReport


def _slurm_option(*names: str, **facts: Any) -> Any:
    return typer.Option(*names, rich_help_panel="Slurm (with --slurm)", **facts)


_PerNode = Annotated[str, typer.Option(metavar="N|auto", help="Ranks per node; auto: one per GPU.")]
_NumNodes = Annotated[
    str, typer.Option(metavar="M|MIN:MAX", help="Nodes; MIN:MAX continues when some are lost.")
]
_Endpoint = Annotated[
    str | None,
    typer.Option(metavar="HOST[:PORT]", help="Address where nodes meet: the same node for all."),
]
_RunId = Annotated[
    str, typer.Option(metavar="ID", help="Distinguishes launches that meet at one address.")
]
_MaxRestarts = Annotated[
    int, typer.Option(min=0, help="Restarts after a crash, without a new checkpoint in between.")
]
_Tee = Annotated[bool, typer.Option("--tee/--no-tee", help="Show the output of rank 0 here.")]
_Slurm = Annotated[bool, _slurm_option("--slurm", help="Submit it as a job.")]
_DryRun = Annotated[bool, _slurm_option("--dry-run", help="Print the job's file instead.")]
_Nodes = Annotated[int, _slurm_option(min=1, help="Nodes of the job.")]
_Gpus = Annotated[int | None, _slurm_option(min=1, help="GPUs per node [default: none].")]
_Cpus = Annotated[int | None, _slurm_option(min=1, help="Cores per node; unset: whole nodes.")]
_Time = Annotated[str | None, _slurm_option(help="Time limit, such as 1-12:00:00.")]
_Partition = Annotated[str | None, _slurm_option(help="Partition of the job.")]
_Account = Annotated[str | None, _slurm_option(help="Account of the job.")]
_Qos = Annotated[str | None, _slurm_option(help="Quality of service of the job.")]
_Sbatch = Annotated[
    list[str] | None,
    _slurm_option(metavar="FLAG=VALUE", help="Another option of sbatch; may be repeated."),
]
_SignalSeconds = Annotated[
    int, _slurm_option(min=1, help="Seconds before the limit at which the job saves.")
]
_Preflight = Annotated[
    bool, _slurm_option("--preflight/--no-preflight", help="Check the nodes before the training.")
]
_Requeue = Annotated[
    bool,
    _slurm_option(
        "--requeue/--no-requeue", help="Requeue the job after the time limit and after failures."
    ),
]


def launch(
    recipe: Annotated[Path, typer.Argument(help="A recipe (TOML).")],
    nproc_per_node: _PerNode = "auto",
    nnodes: _NumNodes = "1",
    rdzv_endpoint: _Endpoint = None,
    rdzv_id: _RunId = "longtake",
    max_restarts: _MaxRestarts = 3,
    tee: _Tee = True,
    changes: say.Changes = None,
    fresh: train.Fresh = False,
    begin_from: train.From = None,
    weights_only: train.WeightsOnly = False,
    trust: say.Trust = False,
    slurm: _Slurm = False,
    dry_run: _DryRun = False,
    nodes: _Nodes = 1,
    gpus_per_node: _Gpus = None,
    cpus_per_task: _Cpus = None,
    time: _Time = None,
    partition: _Partition = None,
    account: _Account = None,
    qos: _Qos = None,
    sbatch: _Sbatch = None,
    signal_seconds: _SignalSeconds = 300,
    with_preflight: _Preflight = True,
    requeue: _Requeue = True,
    load: train.Load = None,
) -> None:
    """Train a recipe with several ranks, which are started again after a crash.

    One node: `longtake launch RECIPE --nproc-per-node 8`. Several: the same command on
    each, `longtake launch RECIPE --nnodes 4 --rdzv-endpoint node1:29400`. By Slurm:
    `longtake launch RECIPE --slurm --nodes 4 --gpus-per-node 8 --time 12:00:00`.

    Each rank writes its output to RUN/nodes/HOST/logs. After a signal (Ctrl-C, SIGTERM, SIGUSR1)
    all ranks save. Exit code 0; 2 if a restart would not help; 130, 143 or 75 after such a signal.
    """
    from longtake.cluster import options

    processes, numbers = options.parse_processes(nproc_per_node), options.parse_nodes(nnodes)
    numbers = (nodes, nodes) if slurm else numbers
    endpoint = "" if slurm else options.parse_endpoint(rdzv_endpoint, numbers)
    read, given = options.load_for_all_ranks(
        recipe, tuple(changes or ()), fresh=fresh, is_alone=slurm or numbers == (1, 1), trust=trust
    )
    # Refused now, not later by each rank, or by a job that starts tomorrow.
    train.parent_of(read.out, begin_from, weights_only=weights_only, trust=trust)
    launched = options.LaunchOptions(
        recipe,
        given,
        read,
        processes,
        numbers,
        endpoint,
        rdzv_id,
        max_restarts,
        tee,
        trust,
        begin_from,
        weights_only,
    )
    if not slurm:
        from longtake.cluster.launcher import launch as start

        raise typer.Exit(start(launched, say.console()))

    from longtake.cluster.slurm import BatchJob, SlurmOptions

    named = {"partition": partition, "account": account, "qos": qos}
    flags = [f"{name}={value}" for name, value in named.items() if value is not None]
    flags += sbatch or ()
    asked = SlurmOptions(
        gpus_per_node, cpus_per_task, time, tuple(flags), signal_seconds, with_preflight, requeue
    )
    job = BatchJob(launched, asked)
    if dry_run:
        print(job.script(), end="")  # noqa: T201 - a result, for a file or a pager
        say.line(f"Not written to {job.path}, and not submitted.")
        return
    job.write()
    number = job.submit()
    say.line(f"Job {number}: {job.path}")
    say.line(f"  squeue --jobs {number}")
    say.line(f"  tail -F {str(job.log).replace('%j', number)}")
    say.line(f"  {process.command()} show {shlex.quote(str(job.run_path))}")


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
    changes: say.Changes = None,
    as_json: say.AsJson = False,
    relayed: Annotated[bool, typer.Option(hidden=True)] = False,
) -> None:
    """Check all nodes before a run: software, data, disks, clocks, speed and links.

    By itself it checks this machine. To check several, use --nodes, or start it like the training,
    with one process per node or more: `torchrun --nnodes 4 --nproc-per-node 1 … -m longtake
    preflight RECIPE`, or `srun --ntasks-per-node 1 longtake preflight RECIPE`.

    Exit code 0 without errors (there may be warnings), 1 with errors, 2 for a mistake of the user.
    """
    # Started over ssh by a preflight with --nodes: the function below ends this process.
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
    with progress.phase_lines(say.console(), "importing PyTorch") as enter:
        from longtake.cluster.preflight import preflight as check

        enter("checking")
        found, is_hanging = check(recipe, changes or (), timeout)
    if found is not None:
        _show(found, as_json=as_json)
    status = 0 if found is None else found["exit_status"]
    if is_hanging:
        # Its thread hangs in the kernel, and a normal exit would wait for it.
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
