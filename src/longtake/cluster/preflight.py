"""Preflight of all nodes before a run: the table of checks, and their execution in one process.

Every stage ends when rank 0 has the facts of all processes. So nodes measure at the same time, and
a process that does not come back is named together with the check that it was doing.
"""

import secrets
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist

from longtake import config, errors
from longtake.cluster import checks_network as network
from longtake.cluster import checks_node as node
from longtake.cluster import checks_storage as storage
from longtake.cluster import findings, topology
from longtake.cluster.rendezvous import Rendezvous, SilentProcessError
from longtake.data.auto_buckets import with_buckets
from longtake.formatting import first_line, join_words
from longtake.run_dir import refuse_moved

CHECKS: tuple[findings.Check, ...] = (
    findings.Check("host names", node.measure_host_name, node.judge_host_names),
    findings.Check("environment", node.measure_environment, node.judge_environment),
    findings.Check("packages", node.measure_packages, node.judge_packages),
    findings.Check("code", node.measure_code, node.judge_code),
    findings.Check("recipe", node.measure_recipe, node.judge_recipe),
    findings.Check("dataset", storage.measure_dataset, storage.judge_dataset),
    findings.Check("disk space", storage.measure_disk_space, storage.judge_disk_space),
    findings.Check("limits", node.measure_limits, node.judge_limits),
    findings.Check("inspection", node.measure_inspection, node.judge_inspection),
    findings.Check("time sync", node.measure_time_sync, node.judge_time_sync),
    findings.Check("network devices", network.measure_devices, network.judge_devices),
    findings.Check("addresses", network.measure_addresses, network.judge_addresses),
    findings.Check(
        "run directory", storage.measure_run_directory, storage.judge_run_directory, "together"
    ),
    findings.Check("disk speed", storage.measure_disk_speed, storage.judge_disk_speed, "together"),
    findings.Check("compute", node.measure_compute, node.judge_compute, "together", each="rank"),
    findings.Check("clocks", network.measure_clocks, network.judge_clocks, "connected"),
    findings.Check("links", network.measure_links, network.judge_links, "connected", each="rank"),
)
"""All checks of a preflight in order; consecutive `independent` ones form one stage."""

_RUN_DIRECTORY = "run directory"
_OWN_SHARE = 0.8
"""Share of the time limit for a process's own checks, so that it can still report a hanging one."""
_SECONDS_TO_LET_GO = 0.1  # see parallel.mesh.join


@dataclass
class _Measured:
    """Facts that checks measured: on rank 0 those of all processes, elsewhere this process's."""

    checks: list[findings.Check] = field(default_factory=list)
    facts: dict[str, dict[str, findings.Facts]] = field(default_factory=dict)
    """Measured facts by check, then by node or process."""
    skipped: list[findings.SkippedCheck] = field(default_factory=list)
    is_hanging: bool = False

    def judge(self, check: findings.Check) -> findings.CheckResult:
        """Judge the facts of a check, with an error for each node that could not measure."""
        facts = self.facts[check.name]
        good = {who: each for who, each in facts.items() if "failed" not in each}
        result = check.judge(good) if good else findings.CheckResult()
        for who in facts.keys() - good.keys():
            what = f"{check.name} could not be checked: {facts[who]['failed']}"
            result.findings.append(findings.Finding("error", (who,), what))
        result.findings = [replace(each, check=check.name) for each in result.findings]
        return result


def preflight(
    path: Path | None = None, changes: Sequence[str] = (), seconds: float = 120.0
) -> tuple[findings.PreflightReport | None, bool]:
    """Check this node before a run, or all nodes if further processes were started with it.

    Args:
        path: the recipe's file; None: check what every run needs.
        changes: --set changes of the recipe, such as `training.steps=100`.
        seconds: limit of the wait for any process and any check.

    Returns:
        The report, on rank 0 only; and True if a check of this process still hangs, so that the
        process has to end without waiting for its threads.

    Raises:
        LongtakeError: a process has not come, or rank 0 cannot be reached; for a single process
            also: the recipe cannot be used.
    """
    begun = time.monotonic()
    rendezvous = Rendezvous(topology.find_process(), seconds)
    context = _context(rendezvous, path, changes)
    measured, created = _Measured(), list[Path]()
    silent, not_writable = list[findings.Finding](), list[findings.Finding]()
    # The token is removed even if a process is silent, and after a signal.
    try:
        if context.process.is_first:
            not_writable = _leave_token(context, created)
        _measure_all(rendezvous, context, measured)
    except SilentProcessError as error:
        nodes = tuple(dict.fromkeys(context.node_of(rank) for rank in error.silent))
        advice = "Look at what hangs there: longtake stacks --pid, ps, dmesg."
        silent = [findings.Finding("error", nodes, str(error), "an answer", advice, "silence")]
    finally:
        storage.remove_token(context, created)
    report = None
    if context.process.is_first:
        result = findings.CheckResult(skipped=list(measured.skipped))
        for check in measured.checks:
            result.add(measured.judge(check))
        # The check itself may have found the same, and says more.
        if not any(each.check == _RUN_DIRECTORY for each in result.findings):
            result.findings += not_writable
        result.findings += silent
        name = None if path is None else str(path)
        taken = time.monotonic() - begun
        described = _describe_nodes(measured, context)
        report = findings.make_report(described, context.process.world_size, name, result, taken)
    try:
        rendezvous.close()
    except SilentProcessError:
        measured.is_hanging = True
    if dist.is_initialized() and not measured.is_hanging:
        dist.destroy_process_group()
        time.sleep(_SECONDS_TO_LET_GO)
    return report, measured.is_hanging


def _context(
    rendezvous: Rendezvous, path: Path | None, changes: Sequence[str]
) -> findings.CheckContext:
    process = rendezvous.process
    recipe, problem = None, ""
    if path is not None:
        try:
            loaded = config.load(path, changes)
            refuse_moved(path, loaded, changes)
            recipe = with_buckets(loaded)
        except errors.LongtakeError as error:
            if process.world_size == 1:
                raise
            # With several processes all take part in the exchange below, and the report names
            # the nodes that cannot read the recipe.
            problem = str(error)
    hosts, ranks = rendezvous.from_first("nodes", topology.group_by_node(rendezvous.came))
    own = next(each for each in ranks if process.rank in each)
    return findings.CheckContext(
        process=replace(process, local_rank=own.index(process.rank)),
        recipe=recipe,
        recipe_path=path,
        recipe_problem=problem,
        token=rendezvous.from_first("token", secrets.token_hex(6)),
        seconds=rendezvous.seconds,
        hosts=hosts,
        ranks=ranks,
    )


def _leave_token(context: findings.CheckContext, created: list[Path]) -> list[findings.Finding]:
    """Write the preflight's token into the run directory; return a finding if that fails."""
    try:
        storage.leave_token(context, created)
    except OSError as error:
        assert context.recipe is not None
        what = f"{context.recipe.out} cannot be written: {error.strerror or error}"
        nodes = (context.hosts[0],)
        return [
            findings.Finding("error", nodes, what, "", storage.RUN_DIRECTORY_ADVICE, _RUN_DIRECTORY)
        ]
    return []


def _measure_all(
    rendezvous: Rendezvous, context: findings.CheckContext, measured: _Measured
) -> None:
    """Measure all stages (groups of checks) into `measured`.

    After SilentProcessError it has the earlier stages.
    """
    # Checks that need no connection come first: they explain why a connection fails.
    for stage in _stages([check for check in CHECKS if check.when != "connected"]):
        _measure_stage(stage, rendezvous, context, measured)
    if rendezvous.store is None:
        return
    connected = [check for check in CHECKS if check.when == "connected"]
    why = rendezvous.from_first("skip connection", _why_not_connected(measured, "addresses"))
    if not why:
        # NCCL needs a GPU for each process.
        gpus = {node: each.get("gpus", 0) for node, each in measured.facts["environment"].items()}
        nodes = zip(context.hosts, context.ranks, strict=True)
        has_gpus = all(gpus.get(host, 0) >= len(ranks) for host, ranks in nodes)
        use_nccl = rendezvous.from_first("nccl", dist.is_nccl_available() and has_gpus)
        join = partial(network.connect, store=rendezvous.store, use_nccl=use_nccl)
        check = findings.Check(
            "connection", join, lambda facts: findings.CheckResult(), "connected", each="rank"
        )
        _measure_stage([check], rendezvous, context, measured)
        why = rendezvous.from_first("skip links", _why_not_connected(measured, "connection"))
    if why:
        names = join_words(check.name for check in connected)
        measured.skipped.append(findings.SkippedCheck(names, why))
        return
    for stage in _stages(connected):
        _measure_stage(stage, rendezvous, context, measured)


def _why_not_connected(measured: _Measured, name: str) -> str:
    """Return why the failed check `name` prevents checks that need connections, or ""."""
    check = next((each for each in measured.checks if each.name == name), None)
    if check is None or not measured.judge(check).findings:
        return ""
    return f"the check of {name} found errors, so not all processes can connect"


def _stages(checks: Sequence[findings.Check]) -> list[list[findings.Check]]:
    stages: list[list[findings.Check]] = []
    for check in checks:
        if check.when != "independent" or not stages or stages[-1][0].when != "independent":
            stages.append([check])
        else:
            stages[-1].append(check)
    return stages


def _measure_stage(
    stage: Sequence[findings.Check],
    rendezvous: Rendezvous,
    context: findings.CheckContext,
    measured: _Measured,
) -> None:
    """Measure a stage's checks in this process, and collect all processes' facts on rank 0."""
    own: dict[str, findings.Facts] = {}
    end = time.monotonic() + _OWN_SHARE * rendezvous.seconds
    for check in stage:
        if check.each == "node" and not context.process.is_node_leader:
            continue
        rendezvous.doing(check.name)
        # In a stage of several checks, one that hangs takes half of the time that is left.
        left = end - time.monotonic()
        own[check.name] = measure_within(left if len(stage) == 1 else left / 2, check, context)
        measured.is_hanging |= "hangs" in own[check.name]
    rendezvous.doing(f"waiting after {stage[-1].name}")
    found = rendezvous.gather(f"stage/{stage[-1].name}", own)
    measured.checks += stage
    for check in stage:
        name = context.name_of if check.each == "rank" else context.node_of
        measured.facts[check.name] = {
            name(rank): each[check.name] for rank, each in found.items() if check.name in each
        }


def measure_within(
    seconds: float, check: findings.Check, context: findings.CheckContext
) -> findings.Facts:
    """Measure the facts of a check of the preflight with a time limit.

    It runs in a thread, which is abandoned if it hangs, such as on a disk that does not answer.

    Returns:
        The facts; `{"failed": reason}` if it raises or takes longer than `seconds`.
    """
    box: list[findings.Facts] = []

    def measure() -> None:
        try:
            box.append(check.measure(context))
        except Exception as error:  # one check must not hide the others
            box.append({"failed": f"{type(error).__name__}: {first_line(error)}"})

    # A daemon, as a thread that hangs in the kernel cannot be ended.
    thread = threading.Thread(target=measure, name=check.name, daemon=True)
    thread.start()
    thread.join(seconds)
    return box[0] if box else {"failed": f"it took longer than {seconds:.3g} s", "hangs": True}


def _describe_nodes(measured: _Measured, context: findings.CheckContext) -> list[dict[str, Any]]:
    """Return each node's name, number of processes, versions and digests for the report."""
    described = []
    for host, ranks in zip(context.hosts, context.ranks, strict=True):
        facts = {name: each.get(host, {}) for name, each in measured.facts.items()}
        described.append(
            {
                "name": host,
                "processes": len(ranks),
                "packages": facts.get("packages", {}).get("digest"),
                "recipe": facts.get("recipe", {}).get("digest"),
                "versions": facts.get("environment", {}).get("versions", {}),
                "inspection": facts.get("inspection", {}).get("method"),
                "clock_daemons": facts.get("time sync", {}).get("daemons"),
            }
        )
    return described
