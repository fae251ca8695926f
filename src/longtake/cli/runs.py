"""The commands that read a run: `show`, `health`, `stacks` with its tree, `watch`, `bundle`."""

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text
from rich.tree import Tree

from longtake import errors, fsio, progress
from longtake.cli import say
from longtake.formatting import plural
from longtake.monitor import sentences
from longtake.run_dir import RunDirectory
from longtake.stacks import common_calls

_PIPE_WIDTH = 120
_MOST_CALLS, _MOST_CALLS_OF_WAITING, _MOST_NATIVE_CALLS = 16, 2, 8
_MOST_GROUPS, _MOST_THREADS = 12, 6


def show(
    run: Annotated[Path, typer.Argument(help="A run directory.")],
    around: Annotated[
        int | None,
        typer.Option(min=1, max=10**9, metavar="STEP", help="Show the steps around this one."),
    ] = None,
    span: Annotated[
        int | None,
        typer.Option(
            min=0,
            max=10**9,
            help="Number of steps on each side [default: 8 in tables, 100 in plots].",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Write a page (.html) with curves, events, uses of time and the recipe."),
    ] = None,
    as_json: say.AsJson = False,
) -> None:
    """Show how a run goes, or everything about the steps around one: numbers, events and clips."""
    directory = RunDirectory(run)
    with progress.phase_lines(say.console(), "reading the run's records") as enter:
        from longtake.inspection.facts import run_facts, step_facts
        from longtake.inspection.tables import print_run, print_steps

        if out is not None:
            fsio.check_picture_name(out, (".html",))

        def say_share(share: float) -> None:
            # Only long phases are printed: for a large file, each quarter is one.
            enter(f"reading the run's records: {int(4 * share) * 25} %")

        if around is None:
            facts, tell = run_facts(directory, say_share), print_run
        else:
            facts = step_facts(directory, around, 8 if span is None else span, say_share)
            tell = print_steps
        if out is not None:
            enter("writing the page")
            from longtake.board.report import write_report

            # Curves of 8 steps on each side, the tables' default, would show hardly more than the
            # step.
            most = 100 if span is None else span
            near = {} if around is None else {"first": max(0, around - most), "last": around + most}
            query = {name: str(step) for name, step in near.items()}
            # Resolved, because `.` has no name, by which the page calls the run.
            write_report(run.resolve(), out, pages=("overview",), query=query)
            facts["page"] = str(out)
    say.skipped_lines()
    if as_json:
        say.result(facts)
        return
    tell(say.stdout_console(), facts)
    if out is not None:
        say.line(f"wrote {out}")


def health(
    run: Annotated[Path, typer.Argument(help="A run directory.")],
    minutes: Annotated[
        float,
        typer.Option(min=0, help="Maximum age of an event; one that still lasts is always listed."),
    ] = 60.0,
    as_json: say.AsJson = False,
) -> None:
    """Show a table of a run's nodes: power, temperature, clocks, links, disk, step time.

    Values that are worse than on other nodes, or than in the node's own past, are marked; events of
    clocks, links and GPUs follow.
    """
    from longtake.inspection.nodes import node_facts, print_nodes

    facts = node_facts(RunDirectory(run), 60 * minutes)
    say.skipped_lines()
    if as_json:
        say.result(facts)
    else:
        print_nodes(say.stdout_console(), facts)


def stacks(
    run: Annotated[
        Path | None, typer.Argument(help="Show the processes of all nodes of this run directory.")
    ] = None,
    pid: Annotated[
        int | None,
        typer.Option(min=1, help="Show this process of this node, and all that it has started."),
    ] = None,
    native: Annotated[
        bool,
        typer.Option("--native", help="Also show calls of C; each process is paused for a second."),
    ] = False,
    as_json: say.AsJson = False,
) -> None:
    """Show the stacks of all processes of a run; identical ones of all nodes are grouped.

    The processes keep running, except with --native, which pauses each for a second.
    """
    from longtake.monitor.asked import dump_process_tree, dump_run
    from longtake.monitor.dumps import group_processes

    if run is not None and pid is None:
        found, of = dump_run(RunDirectory(run), native=native), str(run)
    elif run is None and pid is not None:
        found, of = dump_process_tree(pid, native=native), f"process {pid}"
    else:
        raise errors.RunError("Name a run directory, or a process with --pid: one of the two.")
    facts = {"of": of, **group_processes(found.dumps()), "silent": list(found.silent)}
    facts["files"] = list(map(str, found.files))
    if as_json:
        say.result(facts)
    else:
        print_stacks(say.stdout_console(), facts)


def watch(
    run: Annotated[Path, typer.Argument(help="A run directory.")],
    trust: say.Trust = False,
) -> None:
    """Watch a run's processes on this node, and report what is wrong; Ctrl-C ends it.

    `train` starts a watcher on each node by itself, unless watch.enabled is false.
    """
    from longtake.monitor.reporting import watch_target
    from longtake.monitor.watcher import watch as watch_node

    if not run.is_dir():
        raise errors.RunError(f"{run} is not a folder. Expected the `out` folder of a recipe.")
    target = watch_target(run, by_hand=True, trust=trust)
    say.line(f"Watching {run} on {target.host}; action: {target.settings.action}. Ctrl-C ends it.")
    if not any(target.folder.glob("rank_*")):
        say.line("No rank of it runs on this node now: this waits for one.")
    names_a_hook = False
    # The run's recipe may be unreadable, which is no reason not to watch its processes.
    with suppress(errors.LongtakeError):
        names_a_hook = RunDirectory(run).recipe().watch.hook is not None
    if target.settings.hook is None and names_a_hook:
        say.line("watch.hook is not run: this user did not begin the run here (see --trust).")
    watch_node(target)


def bundle(
    run: Annotated[Path, typer.Argument(help="A run directory.")],
    out: Annotated[
        Path | None,
        typer.Option(help="The archive to write (.tar.gz) [default: RUN-bundle-TIME.tar.gz]."),
    ] = None,
    yes: Annotated[
        bool, typer.Option("--yes", help="Write it without asking; the contents are listed first.")
    ] = False,
    with_modules: Annotated[
        bool,
        typer.Option("--with-modules", help="Add the source of your own classes (module:Class)."),
    ] = False,
    trust: say.Trust = False,
    as_json: say.AsJson = False,
) -> None:
    """Write an archive of a run to ask for help with: its records, logs, stacks and versions.

    Secrets, home folders and the names of users and hosts are removed. Weights, clips and samples
    are not in it; captions and file names of clips may be.
    """
    from longtake.inspection.bundle import check_out, collect, default_name, write

    directory = RunDirectory(run)
    with progress.phase_lines(say.console(), "reading the run's records"):
        found = collect(directory, with_modules=with_modules, is_trusted=trust)
    archive = Path(default_name(directory)) if out is None else out
    # Before the contents are listed, which one reads to the end before answering.
    check_out(archive)
    for each in found.files:
        say.line(f"{len(each.data):>11,} bytes  {each.name}" + (f": {each.note}" * bool(each.note)))
    for name, reason in found.left_out:
        say.line(f"       left out  {name}: {reason}")
    total = sum(len(each.data) for each in found.files)
    say.line(
        f"{plural(len(found.files), 'file')} of {total:,} bytes; read them before you send them."
    )
    # Without a terminal nobody can answer the question below.
    if not yes and not sys.stdin.isatty():
        raise errors.RunError(
            f"{archive} was not written. Add --yes to write it without a question."
        )
    # On stderr, because stdout is for the JSON of --json.
    if not yes and not typer.confirm(f"Write {archive}?", err=True):
        raise typer.Exit(1)
    size = write(found, archive)
    say.line(f"wrote {archive} ({size:,} bytes)")
    if as_json:
        say.result({"archive": str(archive), "bytes": size, **found.as_dict()})


# --- What `stacks` prints: a tree made from its JSON ------------------------------------------


def print_stacks(console: Console, facts: Mapping[str, Any]) -> None:
    """Print the stacks that `group_processes` returned, with `of` (run or process) and `silent`."""
    # A pipe has no width; rich would wrap stacks at 80 columns.
    if not console.is_terminal:
        console.width = max(console.width, _PIPE_WIDTH)
    hosts, count = facts["hosts"], sum(each["count"] for each in facts["groups"])
    where = f"on {hosts[0]}" if len(hosts) == 1 else f"on {len(hosts)} nodes"
    title = f"{facts['of']}: {plural(count, 'process', 'processes')} {where}"
    tree = Tree(Text(title, style="bold"), guide_style="dim")
    # groupby joins neighbours only; `group_processes` has sorted by role.
    for role, of_role in groupby(facts["groups"], key=lambda each: str(each["role"])):
        groups = list(of_role)
        count = sum(each["count"] for each in groups)
        head = Text(f"{count} {sentences.ROLES[role][count != 1]}", style="bold")
        # Calls that all groups share are printed once, then where they differ.
        if shared := _shared(groups) if len(groups) > 1 else 0:
            call = sentences.spelled(groups[0]["stack"][-shared])
            head.append(f", all in {call}", style="not bold")
        branch = tree.add(head)
        for each in groups[:_MOST_GROUPS]:
            _add_group(branch, each, shared)
        if left := groups[_MOST_GROUPS:]:
            count = sum(each["count"] for each in left)
            branch.add(Text(f"{count} more, in {len(left)} further places", style="dim"))
    for each in facts["missing"]:
        tree.add(
            Text(
                f"gone: {sentences.who(each['role'], [each])}, {sentences.doing([each])}",
                style="red",
            )
        )
    for host in facts["silent"]:
        tree.add(Text(f"{host}: its watcher lives, but did not answer within 10 s", style="red"))
    console.print(tree)
    console.print("[dim]Innermost calls first; some of libraries are left out (--json: all).[/dim]")


def _shared(groups: Sequence[Mapping[str, Any]]) -> int:
    """Count the outermost calls that all groups of stacks share, up to one outside of libraries.

    It is less than the shortest stack, so that each group has a call of its own to print.
    """
    stacks = [
        tuple((call["function"], call["file"], call["line"]) for call in each["stack"])
        for each in groups
        if each["stack"]
    ]
    shared = min(len(common_calls(stacks)), min(map(len, stacks), default=1) - 1)
    while shared and sentences.is_library(groups[0]["stack"][-shared]):
        shared -= 1
    return shared


def _add_group(branch: Tree, group: Mapping[str, Any], shared: int) -> None:
    members = group["members"]
    head = Text(sentences.who(group["role"], members), style="cyan")
    head.append(f"  {sentences.doing(members)}", style="bold default")
    if state := sentences.state_of(members):
        head.append(
            f"  {state}", style="bold red" if sentences.is_halted(members) else "dim default"
        )
    stack = group["stack"][: len(group["stack"]) - shared]
    # It does not matter where a process is that waits for work.
    waits = group["role"] == "agent" or all(each["phase"] == "idle" for each in members)
    most = _MOST_CALLS_OF_WAITING if waits else _MOST_CALLS
    lines = list(
        _calls(group["native"], stack, most)
        if stack
        else [Text(f"  {sentences.unread(members[0])}", style="dim")]
    )
    branch.add(Text("\n").join([head, *lines, *_threads(group["threads"])]))


def _calls(
    native: Sequence[Mapping[str, Any]], stack: Sequence[Mapping[str, Any]], most: int
) -> Iterator[Text]:
    # A call without debug symbols is an address, which tells nothing.
    named = [call for call in native if not call["function"].startswith("0x")]
    for call in named[:_MOST_NATIVE_CALLS]:
        yield Text(f"  {sentences.spelled(call)}", style="magenta")
    shown = sentences.worth_showing(stack)
    for number, call in enumerate(shown[:most]):
        style = "bold yellow" if number == 0 else ("dim" if sentences.is_library(call) else "")
        yield Text(f"  {sentences.spelled(call)}", style=style)
    if shown[most:]:
        yield Text(f"  … and {len(shown) - most} more", style="dim")


def _threads(threads: Sequence[Mapping[str, Any]]) -> Iterator[Text]:
    """Yield a line per further thread of a process: its innermost call not of Python itself."""
    there = [each for each in threads if each["stack"]]
    for each in there[:_MOST_THREADS]:
        call = sentences.own_call(each["stack"])
        times = f" (in {each['count']})" if each["count"] > 1 else ""
        yield Text(
            f"  thread {', '.join(each['names'][:3])}{times}: {sentences.spelled(call)}",
            style="dim",
        )
    if len(there) > _MOST_THREADS:
        yield Text(f"  and {len(there) - _MOST_THREADS} other kinds of threads", style="dim")
