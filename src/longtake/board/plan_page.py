"""The page of a run's memory plan: recompute policies, parts of the peak, options of each block.

The plan is read from plan.json, or from the event `memory_planned` if there is no such file.
"""

import shlex
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, Final

import numpy as np
from markupsafe import Markup

from longtake import process
from longtake.board import charts, svg
from longtake.board.overview import status_of
from longtake.board.pages import PageLinks, number, render
from longtake.errors import RecordError
from longtake.formatting import format_size, one_line
from longtake.inspection.files import read_below
from longtake.inspection.reader import RunFacts
from longtake.planner.record import (
    BlockOption,
    KeptPlan,
    MemoryPlan,
    PolicyForecast,
    newest_measurements,
    newest_plan,
)
from longtake.planner.words import ACTIVATION_WORDS, FIXED_WORDS, POLICY_WORDS, WEIGHT_WORDS

_GIB: Final = 2**30
_MOST_BLOCKS, _MOST_NOTES, _MOST_MEASURED = 2000, 50, 20
_PLAN_BYTES = 2**24
ACTIVATION_COLOURS: Final = {
    "keep": "pale",
    "save-attention": "3",
    "recompute": "4",
    "offload": "5",
    "offload-input": "6",
}
WEIGHT_COLOURS: Final = {
    "keep": "pale",
    "stream": "5",
    "fp8": "1",
    "int8": "3",
    "nf4": "2",
    "stream-int8": "7",
    "stream-nf4": "6",
}
_LETTERS: Final = {
    "save-attention": "A",
    "recompute": "R",
    "offload": "O",
    "offload-input": "I",
    "stream": "S",
    "fp8": "8f",
    "int8": "8i",
    "nf4": "4",
    "stream-int8": "S8",
    "stream-nf4": "S4",
}
_PART_COLOURS: Final = {
    "weights": "1",
    "optimizer": "5",
    "ema": "6",
    "encoders": "8",
    "inputs": "7",
    "activations and gradients": "4",
}


def render_plan(facts: RunFacts, links: PageLinks, query: Mapping[str, str]) -> str:
    """Return the HTML of the page of a run's memory plan; `query` is not used."""
    plan, problem = read_plan(facts)
    path = shlex.quote(str(facts.run.recipe_path))
    values = None if plan is None else _values(plan)
    return render(
        "plan.html",
        links,
        page="plan",
        facts=facts,
        status=status_of(facts),
        plan=plan,
        shown=values,
        problem=problem,
        measured=[
            {
                "step": f"{measured.step:,}",
                "predicted": _gib(measured.predicted_gib),
                "measured": _gib(measured.measured_gib),
                "error": f"{100 * measured.error:+.1f} %",
            }
            for measured in islice(newest_measurements(facts.events), _MOST_MEASURED)
        ],
        peak=_peak_plot(facts, plan),
        commands=[
            (f"{process.command()} plan {path} --memory 48GiB", "the plan for a GPU of 48 GiB"),
            (f"{process.command()} plan {path}", "the plan, and what sampling and encoding take"),
        ],
        memory_key="recompute.memory=48GiB",
    )


def read_plan(facts: RunFacts) -> tuple[MemoryPlan | None, str]:
    """Return the newest memory plan of a run, and a sentence about what cannot be read."""
    problem = ""
    try:
        kept = read_below(facts.run.path, facts.run.plan_path.name, KeptPlan, _PLAN_BYTES)
        if kept is not None:
            return kept.plan, ""
    except (RecordError, OSError) as error:
        problem = one_line(error)
    return newest_plan(facts.events), problem


# --- What is shown of a plan ------------------------------------------------------------------


def _values(plan: MemoryPlan) -> dict[str, Any]:
    chosen, policies = plan.memory, list(plan.compared)
    # A mixture is not among the policies that it was compared with.
    if chosen is not None and all(policy.name != chosen.name for policy in policies):
        policies.append(chosen)
    activations = [option.activations for option in plan.options.values()]
    weights = [option.weights for option in plan.options.values()]
    return {
        "policies": [_row(each, plan.policy) for each in policies],
        "policy_bars": _policy_bars(policies, plan),
        "parts": _parts_bar(plan),
        "part_rows": _part_rows(plan),
        "budget": plan.budget_bytes,
        "peak": chosen and chosen.step_peak_bytes,
        "host": chosen.host_bytes if chosen else 0,
        "overhead": chosen and chosen.overhead,
        "blocks": list(plan.options),
        "strip": block_strip(plan.options),
        "legend": [
            *_legend("activations", activations, ACTIVATION_COLOURS, ACTIVATION_WORDS),
            *_legend("weights", weights, WEIGHT_COLOURS, WEIGHT_WORDS),
        ],
        "notes": plan.notes[:_MOST_NOTES],
        "bucket": plan.bucket,
        "encodes_ahead": plan.encodes_ahead,
    }


def _row(policy: PolicyForecast, chosen: str) -> dict[str, Any]:
    """Return a policy (of recomputing and offloading) with its predicted sizes as a table row."""
    sizes = (policy.forward_end_bytes, policy.peak_bytes, policy.step_peak_bytes)
    return {
        "name": policy.name,
        "is_chosen": policy.name == chosen,
        "sizes": [format_size(size) if size else "-" for size in sizes],
        "overhead": _percent(policy.overhead),
        "fits": {True: "yes", False: "no", None: ""}[policy.fits],
        "meaning": POLICY_WORDS.get(policy.name, ""),
    }


def _percent(overhead: float | None) -> str:
    return "-" if overhead is None else f"{100 * overhead:+.1f} %"


def _policy_bars(policies: Sequence[PolicyForecast], plan: MemoryPlan) -> Markup | None:
    rows = []
    for each in policies:
        peak, mark = each.step_peak_bytes, "▸ " if each.name == plan.policy else ""
        said = format_size(peak) + (", too much" if each.fits is False else "")
        if each.overhead is not None:
            said += f", time {_percent(each.overhead)}"
        colour = "pale" if each.fits is False else "1"
        bar = svg.Bar(f"{each.name}: with optimizer", peak, format_size(peak), colour)
        rows.append(charts.Stack(f"{mark}{each.name}", [bar], said))
    limit = plan.budget_bytes
    return charts.stacks(rows, limit=limit, room=210) if rows else None


def _part_sizes(plan: MemoryPlan) -> Iterator[tuple[str, int]]:
    """Yield the parts of a step's peak memory in bytes; activations are the rest of the peak."""
    memory, fixed = plan.memory, plan.fixed
    if memory is None or fixed is None:
        return
    # Gradients are counted with the activations, whose place they take one by one.
    sizes = {name: size for name, size in fixed.parts().items() if name != "gradients"}
    yield from sizes.items()
    yield "activations and gradients", max(0, memory.step_peak_bytes - sum(sizes.values()))


def _parts_bar(plan: MemoryPlan) -> Markup | None:
    parts = [
        svg.Bar(_said_of_part(name), size, format_size(size), _PART_COLOURS[name])
        for name, size in _part_sizes(plan)
        if size
    ]
    memory, limit = plan.memory, plan.budget_bytes
    if not parts or memory is None:
        return None
    peak = memory.step_peak_bytes
    said = format_size(peak) + (f" of {format_size(limit)}" if limit else "")
    rows = [charts.Stack("peak of a step", parts, said)]
    return charts.stacks(rows, limit=limit, label_width=100, room=150)


def _said_of_part(name: str) -> str:
    return FIXED_WORDS.get(name, "activations, and gradients at the peak")


def _part_rows(plan: MemoryPlan) -> list[dict[str, str]]:
    peak = plan.memory.step_peak_bytes if plan.memory else 0
    rows = [
        {
            "name": name,
            "colour": _PART_COLOURS[name],
            "size": format_size(size),
            "share": f"{100 * size / peak:.0f} %" if peak else "",
            "meaning": _said_of_part(name),
        }
        for name, size in _part_sizes(plan)
        if size or name in ("weights", "optimizer")
    ]
    if (fixed := plan.fixed) and rows:
        # Sizes that are not a part of the peak by themselves.
        beside = {
            "gradients, all": (fixed.gradients, "of trainable weights, after the backward pass"),
            "offloaded": (fixed.optimizer.host, "optimizer states, in host RAM"),
        }
        for name, (size, meaning) in beside.items():
            if size or name != "offloaded":
                row = {"name": name, "colour": "", "size": format_size(size), "share": ""}
                rows.append({**row, "meaning": meaning})
    return rows


def block_strip(options: Mapping[str, BlockOption]) -> Markup | None:
    """Draw a cell per model block: its activations' option above, its frozen weights' below."""
    shown = list(options.items())[:_MOST_BLOCKS]
    if not shown:
        return None
    label, room = 72, 840
    # Cells shrink to fit into one row; below 4 pixels, several rows are used.
    size = max(4.0, min(26.0, room / len(shown)))
    per_row = int(room / size)
    parts, y, height = list[str](), 0.0, 18
    for first in range(0, len(shown), per_row):
        of_row = shown[first : first + per_row]
        for kind, colours in (("activations", ACTIVATION_COLOURS), ("weights", WEIGHT_COLOURS)):
            parts.append(
                f'<text x="{label - 6}" y="{y + 13:g}" text-anchor="end" class="pale">{kind}</text>'
            )
            for place, (block, option) in enumerate(of_row):
                value = option.activations if kind == "activations" else option.weights
                parts.append(_cell(label + place * size, y, size, height, block, value, colours))
            y += height + 2
        last = first + len(of_row) - 1
        parts.append(f'<text x="{label}" y="{y + 11:g}" class="pale">{first}</text>')
        if last > first:
            end = label + len(of_row) * size
            parts.append(
                f'<text x="{end:.1f}" y="{y + 11:g}" text-anchor="end" class="pale">{last}</text>'
            )
        y += 22
    width = label + min(per_row, len(shown)) * size + 2
    return svg.picture(max(width, 160), y, "".join(parts), "blocks")


def _cell(
    x: float, y: float, size: float, height: int, block: str, value: str, colours: Mapping[str, str]
) -> str:
    words = {**ACTIVATION_WORDS, **WEIGHT_WORDS} if value != "keep" else {}
    what = "activations" if colours is ACTIVATION_COLOURS else "frozen weights"
    title = svg.text(f"{block}: {what} {value}" + (f" ({words[value]})" if value in words else ""))
    colour = colours.get(value, "rule")
    cell = (
        f'<rect x="{x:.1f}" y="{y:g}" width="{max(1.0, size - 1):.1f}" height="{height}" '
        f'class="fill-{colour}"><title>{title}</title></rect>'
    )
    letter = _LETTERS.get(value, "")
    if letter and size >= 12:
        cell += (
            f'<text x="{x + (size - 1) / 2:.1f}" y="{y + 13:g}" text-anchor="middle" '
            f'class="on">{letter}</text>'
        )
    return cell


def _legend(
    kind: str, values: Iterable[str], colours: Mapping[str, str], words: Mapping[str, str]
) -> list[dict[str, Any]]:
    """Return a legend of the blocks' options (keep, recompute ...), the most frequent first."""
    return [
        {
            "of": kind,
            "name": name,
            "letter": _LETTERS.get(name, ""),
            "count": count,
            "colour": colours[name],
            "words": words[name],
        }
        for name, count in Counter(values).most_common()
    ]


# --- What was measured ------------------------------------------------------------------------


def _gib(gib: float) -> str:
    return format_size(max(0, int(min(gib, 2.0**30) * _GIB)))


def _peak_plot(facts: RunFacts, plan: MemoryPlan | None) -> dict[str, Any] | None:
    """Plot the peak memory of rank 0's GPU over the steps, with the planned peak as a limit."""
    kept = facts.rows.kept
    if not len(kept):
        return None
    recorded = kept.is_recorded("peak_memory_bytes")
    if not recorded.any():
        return None
    y = np.asarray(kept.column("peak_memory_bytes"), np.float64)[recorded] / _GIB
    x = np.asarray(kept.step, np.float64)[recorded]
    planned = plan.memory.step_peak_bytes if plan and plan.memory else None
    axes = charts.Axes(
        "GiB",
        lambda step: f"step {step:,.0f}",
        lambda gib: f"{number(gib, 3)}",
        limit=None if planned is None else planned / _GIB,
        width=640,
        height=160,
    )
    most = float(np.nanmax(y)) * _GIB if np.isfinite(y).any() else 0.0
    picture = charts.line_plot([charts.Line("measured peak", x, y)], axes)
    if picture is None:
        return None
    return {
        "picture": picture,
        "most": format_size(int(most)),
        "planned": planned and format_size(planned),
        "error": f"{100 * (planned / most - 1):+.1f} %" if planned and most else "",
    }
