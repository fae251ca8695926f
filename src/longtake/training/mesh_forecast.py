"""What a step on a mesh sends, over which links, and whether that hides behind compute."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from longtake import config
from longtake.errors import LongtakeError
from longtake.planner.activation_checkpointing import options_of
from longtake.planner.trace import StepTrace
from longtake.training.forecast import Forecast
from longtake.training.links import Links
from longtake.training.outlined import OutlinedStep, outlined_step
from longtake.training.resident import memory_of
from longtake.training.share import idle_share
from longtake.training.timeline import seconds_of, timeline_of
from longtake.training.traffic import Group, traffic_of

MUCH_EXPOSED = 0.05
"""Of a step's time; below it there is nothing worth changing."""


@dataclass(frozen=True)
class Sent:
    """What each rank sends in one step for one purpose."""

    what: str
    """weights, gradients to shards, gradients (between copies of the model), or tokens."""
    ranks: int
    """That take part in each collective."""
    over: str
    """The slowest of its links: node or network."""
    num_bytes: int
    seconds: float
    exposed_seconds: float
    """By so much a step would be shorter without it."""


@dataclass(frozen=True)
class Advice:
    """One change of the recipe, and a step with it."""

    changes: Sequence[str]
    """As `--set` takes them."""
    step_seconds: float
    step_peak_bytes: int
    fits: bool | None


@dataclass(frozen=True)
class MeshForecast:
    """One update of all ranks, but for the optimizer."""

    links: Links
    num_shards: int
    num_copies: int
    sent: Sequence[Sent]
    compute_seconds: float
    step_seconds: float
    idle_share: float
    """Of all places of a batch, those that are empty since it does not divide."""
    advice: Sequence[Advice]
    """What would make a step shorter, the best first; empty where little is exposed."""

    @property
    def num_bytes(self) -> int:
        return sum(each.num_bytes for each in self.sent)

    @property
    def exposed_share(self) -> float:
        return 1 - self.compute_seconds / self.step_seconds if self.step_seconds else 0.0


def mesh_forecast(known: Forecast, links: Links) -> MeshForecast | None:
    """What a forecast's ranks send each other; None where one process is alone or never steps."""
    step, trace = known.step, _chosen_trace(known)
    if step.world_size == 1 or trace is None:
        return None
    found = _forecast(step, trace, links)
    if found.exposed_share < MUCH_EXPOSED:
        return found
    return replace(found, advice=_advice(known, trace, found))


def _chosen_trace(known: Forecast) -> StepTrace | None:
    if known.best is not None:
        return known.best.traced
    return known.traces[known.least.name] if known.policies else None


def _forecast(step: OutlinedStep, trace: StepTrace, links: Links) -> MeshForecast:
    traffic = traffic_of(step, trace)
    line = timeline_of(step, trace, traffic, links)
    whole = line.seconds()

    def sent(what: str, num_bytes: int, group: Group, name: str) -> Sent:
        exposed = whole - line.without(name).seconds()
        over = "node" if group.size <= group.in_node else "network"
        seconds = seconds_of(num_bytes, group, links)
        return Sent(what, group.size, over, num_bytes, seconds, exposed)

    weights = traffic.forward + traffic.backward
    rows = [
        sent("weights", weights, traffic.shards, "gather"),
        sent("gradients to shards", traffic.scattered, traffic.shards, "scatter"),
        sent("gradients", traffic.reduced, traffic.copies, "reduce"),
        sent("tokens", traffic.tokens, traffic.sequence, "waits"),
    ]
    batch, sharing = step.recipe.training.batch_size, step.recipe.parallel.sequence
    return MeshForecast(
        links=links,
        num_shards=step.num_shards,
        num_copies=step.num_copies,
        sent=[row for row in rows if row.num_bytes],
        compute_seconds=line.compute_seconds(),
        step_seconds=whole,
        idle_share=idle_share(batch, step.world_size // sharing),
        advice=(),
    )


def _advice(known: Forecast, trace: StepTrace, found: MeshForecast) -> list[Advice]:
    tried = [_tried(changes, known, trace, found.links) for changes in _changes(known.step)]
    helping = [each for each in tried if each and each.step_seconds < found.step_seconds]
    return sorted(helping, key=lambda advice: (advice.fits is False, advice.step_seconds))


def _changes(step: OutlinedStep) -> Iterator[list[str]]:
    section = step.recipe.parallel
    if section.strategy == "shard" and step.world_size > step.per_node:
        yield ["parallel.strategy=hybrid"]
    is_fp32 = any(p.itemsize == 4 for p in step.parts.model.parameters())
    if step.num_shards > 1 and section.gather == "fp32" and step.precision == "bf16" and is_fp32:
        yield ["parallel.gather=bf16"]
        if section.strategy == "shard" and step.world_size > step.per_node:
            yield ["parallel.strategy=hybrid", "parallel.gather=bf16"]
    if step.num_micro_batches > 1:
        yield [f"training.micro_batch_size={2 * step.micro_batch_size}"]


def _tried(changes: list[str], known: Forecast, trace: StepTrace, links: Links) -> Advice | None:
    """A step of the changed recipe; None where its parts do not fit together."""
    budget, step = known.card.budget_bytes, known.step
    try:
        changed = config.changed(step.recipe, changes)
        if all(change.startswith("parallel.") for change in changes):
            step = replace(step, recipe=changed)
        else:
            step = outlined_step(changed, known.card.device, step.world_size, step.per_node)
            options = known.best.options if known.best else options_of("all", tuple(trace.blocks))
            trace = step.tracer.trace(options)
    except LongtakeError:
        return None
    memory = memory_of("", trace, step, budget_bytes=budget)
    return Advice(
        changes, _forecast(step, trace, links).step_seconds, memory.step_peak_bytes, memory.fits
    )
