"""What `longtake plan` tells, as tables for people; made of nothing but its JSON."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Console, RenderableType
from rich.table import Table

from longtake.formatting import escape, format_duration, format_short_duration, format_size

_PIPE_WIDTH = 100
_MOST_NAMES = 12
_MUCH_MORE_THAN_ONE_GIB = 4
"""Below it "the next GiB" would be another GPU."""
_POLICIES = {
    "none": "nothing is recomputed",
    "all": "every block is",
    "all-but-first": "every block but the first is",
    "alternate": "every second block is",
    "save-attention": "all but attention is",
    "best": "the fastest mixture that fits",
}
_OPTIONS = {
    "keep": "keep everything",
    "save-attention": "keep attention's output",
    "recompute": "are computed again",
}
_PHASES = {
    "text": ("text encoder", "a caption: to fill a cache, and to sample"),
    "encode": ("codec, encoding", "a clip: to fill a cache"),
    "step": ("training, encoding", "encoders in the step, beside model and optimizer"),
    "model": ("model, sampling", "a video, one forward pass"),
    "decode": ("codec, decoding", "a video as a whole; tiles take less"),
    "sampling": ("training, sampling", "between two steps, beside model and optimizer"),
}
_GB = 1e9
_LITTLE_EXPOSED = 0.05
_SENT_WHEN = {
    "weights": "twice in each micro-batch",
    "gradients to shards": "in the last one",
    "gradients": "in the last one, between copies",
    "tokens": "in each attention",
}
_LINKS = {"node": "a node's links", "network": "the network"}
_LEGEND = (
    "forward: when the backward pass begins. peak: the most in forward and backward pass of the "
    "first step. with optimizer: the most in any later step, with all that stays in memory. time: "
    "how much longer a step takes than without recompute, predicted from the GPU's data sheet."
)


def print_plan(console: Console, recipe: str, facts: Mapping[str, Any]) -> None:
    """Print what `longtake plan --json` would, at least 100 columns wide in a pipe."""
    if not console.is_terminal:
        console.width = max(console.width, _PIPE_WIDTH)
    for part in _parts(recipe, facts):
        console.print(part, highlight=False, soft_wrap=isinstance(part, str))


def _parts(recipe: str, facts: Mapping[str, Any]) -> Iterator[RenderableType]:
    yield f"[bold]{escape(recipe)}[/bold]"
    yield escape(_of_model(facts))
    yield escape(_of_device(facts))
    yield ""
    yield _fixed(facts)
    if facts["policies"]:
        yield _policies(facts)
        yield f"[dim]{_LEGEND}[/dim]"
        yield ""
        yield from _result(facts)
        yield from _remarks(facts)
        yield from _phases(facts)
        if facts["mesh"]:
            yield ""
            yield from mesh_report(facts["mesh"], facts["processes"], facts["per_node"])
            yield _of_checkpoints(facts["checkpoint"], facts["mesh"]["step_seconds"])
    yield from _gradients(facts)
    for warning in facts["data_warnings"]:
        yield f"[yellow]data[/yellow] {escape(warning)}"
    yield f"[dim]Predicted in {facts['seconds']:.1f} s; nothing was run on a GPU.[/dim]"


def _of_model(facts: Mapping[str, Any]) -> str:
    model, bucket = facts["model"], facts["bucket"]
    frames = bucket["num_frames"]
    clips = f"{frames} frame{'s' if frames > 1 else ''} of {bucket['width']}x{bucket['height']}"
    share = model["trainable"] / model["parameters"]
    batch = f"micro-batches of {facts['micro_batch_size']}"
    if facts["num_micro_batches"] > 1:
        batch += f", {facts['num_micro_batches']} for an update"
    return (
        f"{_number(model['parameters'])} parameters, of which {_number(model['trainable'])} train "
        f"({share:.2%}). Clips of {clips}: {model['tokens']} tokens each. In {batch}, computed in "
        f"{facts['precision']}."
    )


def _of_device(facts: Mapping[str, Any]) -> str:
    if facts["budget_gib"] is None:
        return f"Planned for {facts['device']}, without a limit (--memory 48GiB sets one)."
    kept_back = facts["memory_gib"] - facts["budget_gib"]
    nccl = ", NCCL" if facts["processes"] > 1 else ""
    return (
        f"Planned for {facts['device']} with {_size(facts['memory_gib'])}: "
        f"{_size(facts['budget_gib'])} for tensors, {_size(kept_back)} is left to the CUDA "
        f"context{nccl} and fragmentation (recompute.reserve)."
    )


def _fixed(facts: Mapping[str, Any]) -> Table:
    words = {
        "weights": "the model's weights",
        "gradients": "gradients of what trains",
        "optimizer": "optimizer states",
        "ema": "running averages of what trains (EMA)",
        "encoders": "codec and text encoders; with data.cache they are not needed",
        "inputs": "latents, noise and conditioning of a micro-batch",
    }
    table = _table("in memory whatever is recomputed", "", "")
    for name, meaning in words.items():
        value = facts["fixed_gib"][name]
        if value or name not in ("encoders", "ema"):
            table.add_row(name, _size(value), meaning)
    if facts["host_gib"]:
        meaning = "optimizer states and fp32 weights, in the computer's own memory"
        table.add_row("offloaded", _size(facts["host_gib"]), meaning)
    return table


def _policies(facts: Mapping[str, Any]) -> Table:
    most = max(row["step_peak_gib"] for row in facts["policies"])
    unit, scale = ("GiB", 1) if most >= 1 else ("MiB", 2**10)
    table = _table(f"policy, {unit}", "forward", "peak", "with optimizer", "time", "fits", "")
    for row in facts["policies"]:
        table.add_row(*_cells(row, scale), _POLICIES[row["name"]])
    if best := facts["best"]:
        row = {**best, "name": "best", "peak_gib": best["traced_gib"]}
        table.add_row(*_cells(row, scale), _POLICIES["best"], style="bold")
    return table


def _cells(row: Mapping[str, Any], scale: int) -> list[str]:
    fits = {True: "[green]yes[/green]", False: "[red]no[/red]", None: ""}[row["fits"]]
    sizes = [f"{row[key] * scale:.2f}" for key in ("forward_end_gib", "peak_gib", "step_peak_gib")]
    return [row["name"], *sizes, f"+{row['overhead']:.1%}", fits]


def _result(facts: Mapping[str, Any]) -> Iterator[str]:
    if facts["best"] is not None:
        yield _of_best(facts["best"])
        return
    yield "[red]Nothing fits.[/red] What would help, each by itself:"
    for change in facts["changes"]:
        settings = " ".join(f"--set '{each}'" for each in change["set"])
        result = "[green]fits[/green]" if change["fits"] else "not enough"
        yield (
            f"  {escape(change['what'])}: {_size(change['step_peak_gib'])}, {result}  "
            f"[dim]{escape(settings)}[/dim]"
        )


def _of_checkpoints(checkpoint: Mapping[str, Any], step_seconds: float) -> str:
    """How much training a crash can cost."""
    every, minutes = checkpoint["every"], checkpoint["minutes"]
    lost = every * step_seconds
    also = ""
    if minutes is not None:
        lost = min(lost, 60 * minutes)
        also = f" and every {minutes:g} minutes"
    return (
        f"A checkpoint is saved every {every} steps{also}: a crash loses at most "
        f"{format_duration(lost)} of training, and what one save takes."
    )


def _phases(facts: Mapping[str, Any]) -> Iterator[RenderableType]:
    """What the other work takes, part by part."""
    if not facts["phases"]:
        return
    table = _table("one part at a time, GiB", "weights", "peak", "takes", "fits", "")
    for row in facts["phases"]:
        fits = {True: "[green]yes[/green]", False: "[red]no[/red]", None: ""}[row["fits"]]
        sizes = [f"{row[key]:.2f}" for key in ("weights_gib", "peak_gib")]
        label, meaning = _PHASES[row["name"]]
        table.add_row(label, *sizes, f"{row['seconds']:.2g} s", fits, meaning)
    yield ""
    yield table


def _remarks(facts: Mapping[str, Any]) -> Iterator[str]:
    """What the table does not say."""
    phases = {phase["name"]: phase for phase in facts["phases"]}
    if (between := phases.get("sampling")) is not None:
        yield (
            f"Every {between['every']} steps training stops for about "
            f"{format_duration(between['seconds'])} and samples {between['how']}."
        )
    encoding = phases.get("step")
    if encoding is not None:
        yield (
            "[yellow]note[/yellow] Step times leave out the encoders in the step: about "
            f"{encoding['seconds']:.1f} s more for this process's clips of one update. With "
            "data.cache they are not in the step."
        )
    if facts["processes"] > 1:
        yield (
            f"[yellow]note[/yellow] For one of {facts['processes']} processes: an estimate, which "
            "does not know the buffers of collectives."
        )
    if facts["foreach_gib"] >= 1:
        yield (
            f"AdamW is fused: torch's own default (foreach) would need {facts['foreach_gib']:.1f} "
            "GiB more at each update."
        )


def _of_best(best: Mapping[str, Any]) -> str:
    counts = best["per_block"]
    chosen = ", ".join(
        f"{counts[name]} {words}" for name, words in _OPTIONS.items() if counts[name]
    )
    text = f"Best: of {sum(counts.values())} blocks {chosen}."
    if best["overhead"] > 0:
        text += f" A step takes {best['overhead']:.1%} longer than without recompute"
        more = 100 * (best["overhead"] - best["overhead_with_another_gib"])
        is_much = more >= 0.05 and best["traced_gib"] > _MUCH_MORE_THAN_ONE_GIB
        text += f"; the next GiB would take {more:.1f} points off." if is_much else "."
    return text


def _gradients(facts: Mapping[str, Any]) -> Iterator[str]:
    gradients = facts["gradients"]
    trained, reached = gradients["trainable"], gradients["reached"]
    colour = "green" if reached == trained else "red"
    yield (f"[{colour}]Gradient reaches {reached} of {trained} trainable parameters.[/{colour}]")
    if unreached := gradients["unreached"]:
        names, left = unreached[:_MOST_NAMES], len(unreached) - _MOST_NAMES
        more = f" and {left} more" if left > 0 else ""
        yield f"  without: {escape(', '.join(names) + more)}"
    for trap in facts["traps"]:
        kind = "[red]trap[/red]" if trap["stops"] else "[yellow]note[/yellow]"
        yield f"{kind} {escape(trap['block'])}: {escape(trap['trap'])}"
        yield f"  Fix: {escape(trap['fix'])}"


def _size(gib: float) -> str:
    return format_size(round(gib * 2**30))


def _number(count: int) -> str:
    return f"{count / 1e9:.2f} B" if count >= 1e9 else f"{count / 1e6:.2f} M"


def _table(*columns: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for number, column in enumerate(columns):
        is_text = number in (0, len(columns) - 1) or column == "fits"
        table.add_column(column, justify="left" if is_text else "right", no_wrap=not is_text)
    return table


def mesh_report(mesh: Mapping[str, Any], processes: int, per_node: int) -> Iterator[RenderableType]:
    """What each rank sends as a table, how much of it is exposed, and what would help."""
    yield _mesh_opening(mesh, processes, per_node)
    yield _mesh_table(mesh["sent"])
    yield _exposed(mesh)
    for each in mesh["advice"]:
        settings = escape(" ".join(f"--set {change}" for change in each["set"]))
        suffix = "" if each["fits"] is not False else ", [red]does not fit[/red]"
        yield f"  {settings}: {format_short_duration(each['step_seconds'])} a step{suffix}"
    if mesh["idle_share"]:
        yield (
            f"[yellow]note[/yellow] The batch does not divide: {mesh['idle_share']:.1%} of all "
            "places stay empty, and their ranks compute for nothing."
        )


def _mesh_opening(mesh: Mapping[str, Any], processes: int, per_node: int) -> str:
    nodes, link = -(-processes // per_node), mesh["link_gb_per_second"]
    text = f"{processes} processes on {nodes} node{'s' * (nodes > 1)}: "
    copies, ranks = mesh["copies"], mesh["ranks_of_a_copy"]
    many = f"{copies} copies of the model" if copies > 1 else "one copy of the model"
    held = (
        f"{many}, each held by {ranks} together" if copies > 1 else f"{many}, held by all together"
    )
    text += held if ranks > 1 else many
    text += f". Each GPU sends {link['node']:g} GB/s within its node"
    return text + (f" and {link['network']:g} GB/s beyond." if nodes > 1 else ".")


def _mesh_table(sent: Sequence[Mapping[str, Any]]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in ("each rank sends", "among", "over", "GB a step", "takes", "exposed", ""):
        is_text = column in ("each rank sends", "over", "")
        table.add_column(column, justify="left" if is_text else "right", no_wrap=column != "")
    for row in sent:
        table.add_row(
            row["what"],
            str(row["ranks"]),
            _LINKS[row["over"]],
            f"{row['bytes'] / _GB:.3g}",
            format_short_duration(row["seconds"]),
            format_short_duration(row["exposed_seconds"]),
            _SENT_WHEN[row["what"]],
        )
    return table


def _exposed(mesh: Mapping[str, Any]) -> str:
    step, compute, share = mesh["step_seconds"], mesh["compute_seconds"], mesh["exposed_share"]
    text = (
        f"A step takes {format_short_duration(step)}, of which "
        f"{format_short_duration(compute)} is compute: {format_short_duration(step - compute)} "
        f"({share:.1%}) waits for other ranks."
    )
    if share < _LITTLE_EXPOSED:
        return f"{text} The rest of what is sent hides behind compute."
    if not mesh["advice"]:
        return f"{text} [yellow]That is much[/yellow]: faster links, or more work for each rank."
    return f"{text} [yellow]That is much.[/yellow] What would help, each by itself:"
