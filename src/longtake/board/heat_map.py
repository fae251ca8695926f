"""Heat maps of ranks: a row per host, a cell per rank, one colour scale, and marked outliers."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from markupsafe import Markup

from longtake.board import svg
from longtake.board.pages import number
from longtake.formatting import for_seconds
from longtake.inspection.columns import Numbers
from longtake.inspection.node_reader import NodeNow, RankNow
from longtake.node_numbers import COLUMNS, HealthSignal, find_far

COLOURS: Final = 7
_ROWS, _LEAST_ROWS = 32, 8  # hosts in a block, one below the other
_NARROW = 2  # ranks of a host up to which many hosts are drawn side by side
_MANY_HOSTS = 40
_ACROSS, _DOWN = 10, 10  # hosts in a block if they are drawn side by side


@dataclass(frozen=True)
class PhaseLook:
    """Letter and colour by which the board shows a phase (such as saving) of a rank."""

    letter: str
    colour: str = ""
    """Suffix of a `fill-*` class in board.css, for phases that are parts of a training step."""


PHASES: Final[Mapping[str, PhaseLook]] = {
    **dict.fromkeys(("start", "open", "plan", "build", "load", "cache"), PhaseLook("S")),
    "rendezvous": PhaseLook("M"),
    "data": PhaseLook("D", "4"),
    "forward": PhaseLook("F", "1"),
    "backward": PhaseLook("B", "5"),
    "collective": PhaseLook("C", "2"),
    "optimizer": PhaseLook("O", "3"),
    "checkpoint": PhaseLook("K", "6"),
    "save": PhaseLook("K", "7"),
    "rollback": PhaseLook("R"),
    "sampling": PhaseLook("P", "8"),
    "idle": PhaseLook("-"),
    "ended": PhaseLook("E"),
}
UNKNOWN_PHASE: Final = PhaseLook("?")


@dataclass(frozen=True)
class RankNumber:
    """A number measured of each rank that a heat map can show, such as the time of a step."""

    key: str
    title: str
    value: Callable[[RankNow], float | None]
    said: Callable[[float], str]
    signal: HealthSignal


def _seconds(value: float) -> str:
    return f"{number(value, 3)} s" if value >= 1 else f"{number(1e3 * value, 3)} ms"


def _of_gpu(label: str) -> RankNumber:
    """Return the measurement of each rank's own GPU for a column of the nodes' table."""
    column = COLUMNS[label]
    name, signal = column.number, column.signal
    return RankNumber(label, f"GPU {label}", lambda it: it.of_gpu(name), column.text, signal)


_WORK = COLUMNS["step"].signal
MEASURES: Final = (
    RankNumber("work", "own work for a step", lambda it: it.work_seconds, _seconds, _WORK),
    RankNumber("step", "time of a step", lambda it: it.step_seconds, _seconds, _WORK),
    *map(_of_gpu, ("temperature", "power", "clock")),
)


@dataclass(frozen=True)
class HeatMap:
    """A heat map of ranks as drawn, with its legend and its outliers."""

    measure: RankNumber
    blocks: list[Markup]
    legend: Markup
    least: str
    middle: str
    most: str
    outliers: list[str]  # sentences, worst first
    num_without: int  # ranks without a value


def heat_map(nodes: Sequence[NodeNow], measure: RankNumber) -> HeatMap | None:
    """Return the heat map of a measurement of the ranks, or None if no rank has a value."""
    ranks = [rank for node in nodes for rank in node.ranks]
    known = [(rank, value) for rank in ranks if (value := measure.value(rank)) is not None]
    if not known:
        return None
    far = find_far(dict(enumerate(value for _, value in known)), measure.signal)
    scale = _Scale.of(np.array([value for _, value in known]), frozenset(far.values()), measure)
    outlying = sorted(
        (known[place] for place in far), key=lambda each: -abs(each[1] - scale.middle)
    )
    cells = "".join(
        f'<rect x="{place * 22}" y="0" width="21" height="10" class="heat-{place}"/>'
        for place in range(COLOURS)
    )
    return HeatMap(
        measure=measure,
        blocks=list(_blocks(nodes, measure, scale)),
        legend=svg.picture(22 * COLOURS, 10, cells, "scale"),
        least=measure.said(scale.low),
        middle=measure.said(scale.middle),
        most=measure.said(scale.high),
        outliers=[
            f"rank {rank.rank} on {rank.host}: {measure.said(value)}" for rank, value in outlying
        ],
        num_without=len(ranks) - len(known),
    )


@dataclass(frozen=True)
class _Scale:
    low: float
    middle: float
    high: float
    far: frozenset[float]  # values of outliers

    @classmethod
    def of(cls, values: Numbers, far: frozenset[float], measure: RankNumber) -> "_Scale":
        middle = float(np.median(values))
        room = 2 * measure.signal.spread * abs(middle)  # smaller differences are noise
        # A few extreme values must not make all others look the same.
        low, high = np.percentile(values, [2, 98])
        return cls(min(float(low), middle - room), middle, max(float(high), middle + room), far)

    def colour(self, value: float) -> int:
        share = (value - self.low) / max(self.high - self.low, 1e-12)
        return min(COLOURS - 1, max(0, int(share * COLOURS)))


def _blocks(nodes: Sequence[NodeNow], measure: RankNumber, scale: _Scale) -> Iterator[Markup]:
    """Yield parts of a heat map; a wide page shows them side by side, a narrow one in a column.

    Each part has `columns` hosts per row with `across` cells, labelled by row.
    """
    across = max((len(node.ranks) for node in nodes), default=1) or 1
    if across <= _NARROW and len(nodes) > _MANY_HOSTS:
        rows, columns, size = _DOWN, _ACROSS, 12
    else:
        # About four blocks side by side, none of which is too low or too high.
        rows, columns = min(_ROWS, max(_LEAST_ROWS, -(-len(nodes) // 4))), 1
        size = 14 if len(nodes) <= 48 else 10
        if len(nodes) <= 16 and across <= 16:
            size = 24
    for first in range(0, len(nodes), rows * columns):
        block, parts = nodes[first : first + rows * columns], list[str]()
        label = 18 + 6.5 * min(18, max(len(node.host) for node in block))
        for place, node in enumerate(block):
            row, column = divmod(place, columns)
            if not column:
                parts.append(_host_label(node, label, row * size + size / 2 + 4))
            for local, rank in enumerate(sorted(node.ranks, key=lambda each: each.local_rank)):
                x = label + (column * across + local) * size
                parts.append(_cell(x, row * size, size, rank, node, measure, scale))
        width, height = columns * across * size, -(-len(block) // columns) * size
        yield svg.picture(label + width + 1, height, "".join(parts), "heat")


def _host_label(node: NodeNow, right: float, y: float) -> str:
    name = node.host if len(node.host) <= 18 else f"…{node.host[-17:]}"
    is_bad = node.state in ("silent", "unread")
    kind, mark = ("bad host", "? ") if is_bad else ("pale host", "")
    title = f"<title>{svg.text(f'{node.host}: {node.state}')}</title>"
    return (
        f'<text x="{right - 5}" y="{y:g}" text-anchor="end" class="{kind}">'
        f"{mark}{svg.text(name)}{title}</text>"
    )


def _cell(
    x: float, y: float, size: int, rank: RankNow, node: NodeNow, measure: RankNumber, scale: _Scale
) -> str:
    value = measure.value(rank)
    kind = "none" if value is None else f"{scale.colour(value)}"
    is_old = " old" if node.state == "silent" else ""
    title = svg.text(said_of_rank(rank, measure, value))
    found = (
        f'<rect x="{x:g}" y="{y:g}" width="{size - 1}" height="{size - 1}" '
        f'class="heat-{kind}{is_old}"><title>{title}</title></rect>'
    )
    middle = x + (size - 1) / 2
    if size >= 20 and rank.phase in PHASES:
        letter = PHASES[rank.phase].letter
        dark = " on" if value is not None and scale.colour(value) >= COLOURS // 2 else ""
        found += (
            f'<text x="{middle:g}" y="{y + 15}" text-anchor="middle" '
            f'class="letter{dark}">{letter}</text>'
        )
    if value is not None and value in scale.far:
        found += _mark(x, y, size - 1)
    return found


def _mark(x: float, y: float, size: float) -> str:
    """Draw the mark of an outlier in a heat map: frame and corner, visible without colours."""
    corner = max(4.0, 0.45 * size)
    return (
        f'<path class="outlier" d="M{x:g} {y:g}h{size:g}v{size:g}h-{size:g}z"/>'
        f'<path class="corner" d="M{x + size:g} {y:g}h-{corner:g}l{corner:g} {corner:g}z"/>'
    )


def said_of_rank(rank: RankNow, measure: RankNumber, value: float | None) -> str:
    parts = [f"rank {rank.rank} on {rank.host}"]
    if rank.step is not None:
        parts.append(f"step {rank.step:,}")
    if rank.phase:
        since = "" if rank.seconds is None else f" for {for_seconds(rank.seconds)}"
        parts.append(f"{rank.phase}{since}")
    said = "not known" if value is None else measure.said(value)
    return f"{', '.join(parts)}: {measure.title} {said}"


def outlier_key() -> Markup:
    return svg.picture(
        13, 13, f'<rect width="12" height="12" class="heat-5"/>{_mark(0, 0, 12)}', "scale"
    )
