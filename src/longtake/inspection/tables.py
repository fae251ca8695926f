"""Prints the facts of a run, or of the steps around one, as tables."""

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

from rich import box
from rich.console import Console, RenderableType
from rich.table import Table

from longtake.formatting import (
    escape,
    escape_lines,
    for_seconds,
    format_duration,
    format_size,
    format_time,
    plural,
)
from longtake.run_dir import skipped_batches

_PIPE_WIDTH = 120
_LEAST_SECONDS_SHOWN = 0.005
_MOST_SPEEDS = 10
_QUARTERS = ("0-¼", "¼-½", "½-¾", "¾-1")
_MAX_LISTED = 12
START_PHASES = {
    "imports": "process and imports",
    "rendezvous": "ranks meet",
    "data": "data and run directory",
    "plan": "plan of the memory",
    "build": "model is built",
    "cache": "cache is filled",
    "load": "checkpoint is loaded",
    "first_batch": "first batch",
    "first_step": "first step",
}
_INCIDENTS = {
    "killed_rank": "rank killed",
    "restarted_worker": "worker restarted",
    "checkpoint_failed": "save failed",
}
"""Words for kinds of incidents (troubles of processes and nodes), where the kind's name is
unclear."""
_SENTENCES = (
    *("stalled", "rank_failed", "clock_stepped", "clock_slewed", "degraded", "disk_full"),
    "first_loss_high",
)
"""Kinds of events that `said` describes with the sentence of `incident_sentence`."""


def print_run(console: Console, facts: Mapping[str, Any]) -> None:
    """Print the facts of a run, from `facts.run_facts`, as tables."""
    _widen(console)
    steps = f"step {facts['steps']} of {facts['total_steps']}"
    title = f"{facts['run']}: {facts['family']}, {steps}, {_state(facts)}"
    _print(console, f"[bold]{escape(title)}[/bold]")
    grid = Table.grid(padding=(0, 2))
    for name, lines in _about(facts).items():
        for number, line in enumerate(lines):
            grid.add_row(f"  {name}" if number == 0 else "", escape(line))
    _print(console, grid)
    if facts["starts"] and facts["launches"]:
        _print(console, _start_table(facts["starts"][-1], facts["launches"][-1]["world_size"]))
    if facts["speeds"]:
        _print(console, _speed_table(facts["speeds"]))
    _print(console, "\nType next" if facts["next"] else "")
    for way in facts["next"]:
        _print(console, f"  {way['for']}:\n    [bold]{escape(way['command'])}[/bold]")


def print_steps(console: Console, facts: Mapping[str, Any]) -> None:
    """Print the facts of a step and its neighbours, from `facts.step_facts`, as tables."""
    _widen(console)
    _print(console, f"[bold]{escape(facts['run'])}, around step {facts['step']}[/bold]")
    _print(console, _rows(facts))
    if any(row["abandoned"] for row in facts["rows"]):
        _print(console, "[dim]Pale rows were abandoned: the run went back to before them.[/dim]")
    for event in facts["events"]:
        _print(console, f"  {format_time(event['time'])}  {escape(said(event))}")
    if (report := facts["report"]) is not None:
        verdict, of = report["verdict"], f"step {report['step']}, batch {report['batch']}"
        title = escape(f"The guard at {of}: {_words(verdict['kind'])}")
        _print(console, f"\n[bold]{title}[/bold]")
        _print(console, f"  {escape_lines(verdict['message'])}")
        if verdict["reason"] not in ("", "non_finite", "spike"):
            _print(console, f"  It began after step {verdict['began']}.")
        if report["checkpoint"] is not None:
            _print(console, f"  Nearest checkpoint before it: step {report['checkpoint']}.")
        _print(console, f"  All that it saw: {escape(report['path'])}")
    _print_clips(console, facts)


def said(event: Mapping[str, Any]) -> str:
    """Describe an event of a run in one line."""
    kind, step = event["event"], event.get("at")
    if kind in ("update_skipped", "anomaly_detected"):
        return f"step {step}: {_words(event['verdict'])}: {event['message']}"
    if kind == "rolled_back":
        went = f"went back from step {event['from_step']} to the checkpoint of step {step}"
        return f"{went}; {skipped_batches(event)} are skipped from then on"
    if kind == "epoch":
        return f"step {step}: epoch {event['epoch']} of stage {event['stage']} begins"
    if kind == "stage":
        return f"step {step}: stage {event['stage']} begins"
    if kind == "settings_changed":
        changes = (
            f"{name} {' to '.join('unset' if each is None else _value(each) for each in both)}"
            for name, both in event["changes"].items()
        )
        return f"step {step}: in stage {event['stage']} {', '.join(changes)}"
    if kind == "checkpoint":
        return f"checkpoint of step {step}"
    if kind == "threads_chosen":
        times = (f"{seconds:.3g} s with {n}" for n, seconds in event["seconds"].items())
        return f"step {step}: computed by {plural(event['threads'], 'thread')} ({', '.join(times)})"
    if kind == "startup_timing":
        return _start_line(event)
    if kind in _SENTENCES:
        return incident_sentence(event)
    # An event without a sentence of its own is printed key by key.
    hidden = ("event", "time", "at", "step", "options", "per_block", "report")
    rest = {name: value for name, value in event.items() if name not in hidden and value}
    facts = _in_words(rest)
    where = "" if step is None else f" at step {step}"
    return f"{_words(kind)}{where}{': ' * bool(facts)}{facts}"


def incident_words(incident: Mapping[str, Any]) -> str:
    """Name an incident (trouble of a process or node) in a word or two, with its size or length."""
    words = _INCIDENTS.get(incident["event"], _words(incident["event"]))
    if incident["event"] == "clock_stepped" and "seconds" in incident:
        return f"{words} {incident['seconds']:+.3g} s"
    if incident.get("lasted_seconds"):
        return f"{words} for {for_seconds(incident['lasted_seconds'])}"
    return words


def incident_sentence(incident: Mapping[str, Any]) -> str:
    """Describe an incident (trouble of a process or node): what happened, on which node and why."""
    texts = (incident.get(name) for name in ("sentence", "message", "reason", "error"))
    text = str(next((each for each in texts if each), ""))
    text = text.removesuffix(str(incident.get("advice", ""))).rstrip()
    if incident["event"] == "rank_failed" and "reason" not in incident:
        text = f"rank {incident['rank']} (phase {incident['phase']}): {text}"
    host = incident.get("host", "")
    where = f" on {host}" if host and host not in text else ""
    return f"{incident_words(incident)}{where}{': ' * bool(text)}{text}"


def restart_sentence(restart: Mapping[str, Any]) -> str:
    """Describe the steps that a launch trained again after a crash, and the cause of the crash."""
    first, last, cause = (
        restart["step"] + 1,
        restart["step"] + restart["lost_steps"],
        restart["cause"],
    )
    steps = f"Step {first} was" if first == last else f"Steps {first} to {last} were"
    began = format_time(restart["time"], with_date=True)
    why = "the launch before it had not saved them"
    if cause is not None:
        why = f"at {format_time(cause['time'])} a {incident_sentence(cause)}"
    return f"{steps} trained again by the launch that began at {began}, because {why}"


def _start_line(start: Mapping[str, Any]) -> str:
    """Describe a launch's start-up in a line: first step, duration and longest phases."""
    parts = sorted(start["seconds"].items(), key=lambda each: -each[1])[:3]
    most = ", ".join(f"{START_PHASES.get(part, part)} {seconds:.1f} s" for part, seconds in parts)
    down = start["down_seconds"]
    again = "" if down is None else f"; a step again {down:.1f} s after the last one before a crash"
    return f"from step {start['step']} to the next in {start['total']:.1f} s: {most}{again}"


def _start_table(start: Mapping[str, Any], num_ranks: int) -> Table:
    """Return a table of a launch's start-up phases; with several ranks, of the slowest in each."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("start-up", no_wrap=True)
    table.add_column("seconds", justify="right")
    if num_ranks > 1:
        table.add_column("slowest rank", justify="right")
    for part, seconds in start["seconds"].items():
        if seconds < _LEAST_SECONDS_SHOWN:  # for example imports that `longtake demo` made before
            continue
        slowest = str(start["slowest"].get(part, ""))
        cells = [START_PHASES.get(part, part), f"{seconds:.2f}", slowest]
        table.add_row(*cells[: len(table.columns)])
    table.add_section()
    table.add_row("to the end of the first step", f"{start['total']:.2f}")
    if start["down_seconds"] is not None:
        table.add_row("since the last step before a crash", f"{start['down_seconds']:.2f}")
    return table


def _speed_table(speeds: Sequence[Mapping[str, Any]]) -> Table:
    """Return a table of the speed of training by bucket; the MFU only if a bucket has one."""
    has_mfu = any(each["mfu"] is not None for each in speeds)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("clips of", no_wrap=True)
    for heading in ("steps", "s/step", "tokens/s", *["MFU, %"] * has_mfu):
        table.add_column(heading, justify="right")
    for each in speeds[:_MOST_SPEEDS]:
        cells = [f"{each['num_steps']:,}", f"{each['step_seconds']:.3g}", f"{each['median']:,.0f}"]
        if has_mfu:
            cells.append("" if each["mfu"] is None else f"{100 * each['mfu']:.1f}")
        table.add_row(escape(each["bucket"]), *cells)
    if (left := len(speeds) - _MOST_SPEEDS) > 0:
        table.caption = f"and {plural(left, 'bucket')} with fewer steps"
    return table


def _state(facts: Mapping[str, Any]) -> str:
    """Describe a run's state, with its speed and time left or its last sign of life."""
    kind, silent = facts["state"], facts["silent_seconds"]
    ago = "" if silent is None else f", last sign of life {format_duration(silent)} ago"
    if kind == "running":
        if facts["newest"] is None:
            return f"starting{ago}"
        seconds = facts["step_seconds"]
        speed = f"{1 / seconds:.3g} steps/s" if 0 < seconds < 1 else f"{seconds:.3g} s/step"
        speed = f"{speed}, {format_duration(facts['seconds_left'])} left"
        return f"running: {speed}{ago}"
    if kind == "stalled":
        return f"stalled: it runs, but does not move{ago}"
    if kind == "dead":
        return f"not running: its last launch did not end as it should{ago}"
    endings = {"diverged": "stopped by the guard", "interrupted": "interrupted and saved"}
    return endings.get(kind, str(kind))


def _in_words(facts: Mapping[str, Any]) -> str:
    return ", ".join(f"{_words(name)} {_value(value)}" for name, value in facts.items())


def _value(value: object) -> str:
    match value:
        case Mapping():
            return f"({_in_words(value)})"
        case list() | tuple():
            return ", ".join(map(_value, value)) or "none"
        case float():
            return f"{value:.4g}"
        case _:
            return str(value)


def _about(facts: Mapping[str, Any]) -> dict[str, list[str]]:
    """Return the lines that describe a run (recipe, launches, checkpoints ...), by heading."""
    lines = {
        "recipe": [facts["recipe"]],
        "begun": [format_time(facts["created"], with_date=True)],
        "launches": _shortened(
            [
                f"{format_time(each['time'], with_date=True)}  from step {each['start_step']}, "
                f"{plural(each['world_size'], 'process', 'processes')} on {each['device']} of "
                f"{each['host']}"
                for each in facts["launches"]
            ]
        ),
        "newest step": [_newest(facts["newest"])] if facts["newest"] else ["none yet"],
        "checkpoints": _checkpoints(facts["checkpoints"]),
        "verdicts": _shortened([said({**each, "at": each["step"]}) for each in facts["verdicts"]]),
        "rollbacks": _shortened(
            [
                f"from step {each['from_step']} to {each['to_step']} ({each['reason']}), "
                f"{skipped_batches(each)} skipped"
                for each in facts["rollbacks"]
            ]
        ),
    }
    if facts["settings"]:
        lines["settings"] = _shortened([said(each) for each in facts["settings"]])
    # The newest start has a table of its own.
    if earlier := [_start_line(each) for each in facts["starts"][:-1]]:
        lines["started"] = _shortened(earlier)
    if facts["troubles"]:
        lines["troubles"] = _shortened(
            [
                f"{format_time(each['time'], with_date=True)}  step {each['at']}: "
                f"{incident_sentence(each)}"
                for each in facts["troubles"]
            ]
        )
    for each in facts["evaluations"]:
        lines[f"preset {each['preset']}"] = _evaluated(each)
    if facts["abandoned_rows"]:
        lines["abandoned"] = [
            f"{plural(facts['abandoned_rows'], 'step')} that were done, and given up"
        ]
    return lines


def _newest(row: Mapping[str, Any]) -> str:
    numbers = f"loss {_number(row['loss'])}, gradient norm {_number(row['grad_norm'])}"
    times = f"{row['step_seconds']:.3g} s"
    if row.get("store_seconds"):
        rate = format_size(int(row["store_bytes"] / row["store_seconds"]))
        times += f", {row['data_seconds']:.3g} s of it waiting for data; fetched "
        times += f"{format_size(row['store_bytes'])} from stores at {rate}/s a request"
        times += f", {row['store_retries']} retries" if row["store_retries"] else ""
    return f"{row['step']} (epoch {row['epoch']}): {numbers}, {times}"


def _checkpoints(checkpoints: Sequence[Mapping[str, Any]]) -> list[str]:
    given_up = [each for each in checkpoints if each["abandoned"]]
    damaged = [each for each in checkpoints if each["damage"] and not each["abandoned"]]
    whole = [each for each in checkpoints if each not in given_up and each not in damaged]
    lines = [f"step {each['step']} is damaged: {each['damage']}" for each in damaged]
    if given_up:
        lines.append(f"{_steps(given_up)}: abandoned; the next launch deletes them")
    if not whole:
        return ["none is whole", *lines] if checkpoints else ["none yet"]
    return [f"{_steps(whole)}; the newest has {format_size(whole[-1]['bytes'])}", *lines]


def _steps(checkpoints: Sequence[Mapping[str, Any]]) -> str:
    steps = ", ".join(str(each["step"]) for each in checkpoints)
    return f"step{'s' * (len(checkpoints) > 1)} {steps}"


def _evaluated(facts: Mapping[str, Any]) -> list[str]:
    """Describe a preset (set of prompts) in lines: sampled steps, scores, alarms and failures."""
    steps = facts["steps"]
    lines = []
    if steps:
        loss = facts.get("held_out", {}).get("mean")
        known = facts["measures"] | ({"held-out loss": loss} if loss is not None else {})
        numbers = ", ".join(f"{_words(name)} {_number(value)}" for name, value in known.items())
        count = plural(len(steps), "checkpoint")
        lines.append(f"{count}, the newest of step {steps[-1]}: {numbers}")
    lines += [f"alarm: {message}" for message in facts["alarms"]]
    if facts["unlike"]:
        names = ", ".join(map(_words, facts["unlike"]))
        lines.append(f"differs from the training clips (a comparison, not a fault): {names}")
    for each in facts["failed"]:
        tries = "once" if each["attempts"] == 1 else f"{each['attempts']} times"
        lines.append(f"step {each['step']} failed {tries}: {each['reason']}")
    return _shortened(lines)


def _shortened(lines: Sequence[str]) -> list[str]:
    left_out = len(lines) - _MAX_LISTED
    before = [f"… and {left_out} before that"] if left_out > 0 else []
    return [*before, *lines[-_MAX_LISTED:]] or ["none"]


def _rows(facts: Mapping[str, Any]) -> Table:
    """Return a table of the metrics of steps around one; values that a row lacks are empty."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    names = ["", "step", "batch", "loss", *(f"sigma\n{each}" for each in _QUARTERS)]
    for name in (*names, "gradient\nnorm", "weight\nnorm", "update\nratio"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("verdict", no_wrap=True)
    # Within a pass, the step less the row's index is constant.
    for _, rows in groupby(enumerate(facts["rows"]), lambda each: each[1]["step"] - each[0]):
        for _, row in rows:
            mark = "→" if row["step"] == facts["step"] else ""
            table.add_row(mark, *_cells(row), style="dim" if row["abandoned"] else None)
        table.add_section()
    return table


def _cells(row: Mapping[str, Any]) -> list[str]:
    quarters = row.get("loss_by_sigma") or [None] * len(_QUARTERS)
    update = row.get("update_ratio")
    verdict = _words(row["verdict"]) if "verdict" in row else ""
    return [
        str(row["step"]),
        str(row["batch"]),
        _number(row["loss"]),
        *("" if each is None else _number(each) for each in quarters),
        _number(row["grad_norm"]),
        _number(row["weight_norm"], digits=6) if "weight_norm" in row else "",
        "" if update is None else f"{update:.1e}",
        ", ".join(filter(None, [verdict, "abandoned" * row["abandoned"]])),
    ]


def _print_clips(console: Console, facts: Mapping[str, Any]) -> None:
    clips = facts["clips"]
    if not clips["samples"]:
        steps = ", ".join(map(str, facts["verdict_steps"][-_MAX_LISTED:]))
        known = f" Its verdicts are on the steps {steps}." if steps else ""
        reasons = {
            "guard": "the guard wrote none down.",
            "ledger": "the ledger has none of them.",
            None: f"it was abandoned, and no report of the guard is near.{known}",
        }
        why = reasons[clips["source"]]
        _print(console, f"\nNo clips are known of step {clips['step']}: {why}")
        return
    by = "as the guard saw them" if clips["source"] == "guard" else "by the ledger"
    title = f"The clips of step {clips['step']}, batch {clips['batch']}, {by}"
    _print(console, f"\n[bold]{title}[/bold]")
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    is_measured = "loss" in clips["samples"][0]
    for name in ("loss", "sigma") if is_measured else ():
        table.add_column(name, justify="right", no_wrap=True)
    for name in ("epoch", "clip"):
        table.add_column(name, no_wrap=True)
    table.add_column("caption, file", overflow="fold")
    for sample in clips["samples"]:
        measured = [_number(sample[name]) for name in ("loss", "sigma")] if is_measured else []
        table.add_row(
            *measured,
            str(sample["epoch"]),
            sample["identity"][:12],
            f"{escape(sample['caption'] or '(no caption is known)')}\n"
            f"[dim]{escape(sample['path'] or '(in no catalog that the run kept)')}[/dim]",
        )
    _print(console, table)


def _words(name: str) -> str:
    return name.replace("_", " ")


def _number(value: float | str | None, digits: int = 4) -> str:
    if value is None:
        return "no number"
    return value if isinstance(value, str) else f"{value:.{digits}g}"


def _print(console: Console, what: RenderableType) -> None:
    console.print(what, highlight=False)


def _widen(console: Console) -> None:
    # A pipe has no width, and rich would wrap tables at 80 columns.
    if not console.is_terminal:
        console.width = max(console.width, _PIPE_WIDTH)
