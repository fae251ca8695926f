"""Will it fit, and will everything train: the answer before the first step, without weights."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from longtake.config import Recipe
from longtake.errors import PlanError
from longtake.formatting import format_size
from longtake.planner.activation_checkpointing import options_of
from longtake.planner.gradient_traps import Trap, costly_policies, idle_recompute
from longtake.planner.solver import BestOptions, PolicySweep, find_best, sweep_policies
from longtake.planner.trace import StepTrace
from longtake.training.card import Card
from longtake.training.gradients import Gradients, check_gradients
from longtake.training.optimizer_memory import foreach_bytes
from longtake.training.outlined import OutlinedStep, outlined_step
from longtake.training.resident import Fixed, PolicyForecast, fixed_of, memory_of


@dataclass(frozen=True)
class Forecast:
    """All that is known about a step before there is one."""

    card: Card
    step: OutlinedStep
    num_parameters: int
    num_trainable: int
    num_tokens: int
    """Of one sample, that attend to each other; those of text and references included."""
    foreach_bytes: int
    """What torch's own default, AdamW by foreach, would take at each update beside the fused one
    that longtake uses; 0 where another optimizer is used."""
    fixed: Fixed
    gradients: Gradients
    traces: Mapping[str, StepTrace]
    """Of every named policy; none where a trap keeps the step from being traced."""
    policies: Sequence[PolicyForecast]
    best: BestOptions | None
    """The fastest that fits; without a budget, everything kept."""
    best_policy: PolicyForecast | None

    @property
    def misses(self) -> bool:
        return bool(self.policies) and self.best is None

    @property
    def least(self) -> PolicyForecast:
        return min(self.policies, key=lambda row: row.step_peak_bytes)

    def policy(self, name: str) -> PolicyForecast:
        """One policy's forecast; `best` where something fits."""
        rows = [*self.policies, self.best_policy]
        return next(row for row in rows if row is not None and row.name == name)


def forecast(
    recipe: Recipe, card: Card, *, world_size: int = 1, per_node: int | None = None
) -> Forecast:
    """Trace a recipe's step under every policy, find the best that fits, and look for traps.

    Args:
        recipe: neither its catalog nor its weights are needed.
        card: whose memory and speed are predicted.
        world_size: processes that share a batch, and the model where it is sharded.
        per_node: of these, those of one node; None: all are on one.

    Raises:
        RecipeError: the recipe's parts do not fit together.
        PlanError: the model cannot be run on tensors without values, or its weights alone are
            above the budget.
    """
    step = outlined_step(recipe, card.device, world_size, per_node)
    gradients = check_gradients(step)
    if gradients.fatal:  # torch may not even get through such a step
        return _forecast(card, step, gradients, None, None)
    if card.budget_bytes is not None:
        _refuse_below_weights(step, card)
    surveyed = sweep_policies(step.tracer)
    return _forecast(card, step, gradients, surveyed, _best(step, surveyed, card.budget_bytes))


def wasteful(step: OutlinedStep, traces: Mapping[str, StepTrace]) -> list[Trap]:
    """What the recipe's own policy recomputes in vain, and policies that cost memory."""
    traps = costly_policies({name: trace.peak_bytes for name, trace in traces.items()})
    policy, kept = step.recipe.recompute.chosen(), traces["none"]
    if policy not in traces:
        return traps
    upstream = [name for name, block in kept.blocks.items() if block.backward is None]
    options, saved = options_of(policy, tuple(kept.blocks)), _saved(kept, traces[policy])
    return [*idle_recompute({name: options[name] for name in upstream}, saved), *traps]


def _forecast(
    card: Card,
    step: OutlinedStep,
    gradients: Gradients,
    surveyed: PolicySweep | None,
    best: BestOptions | None,
) -> Forecast:
    traces = surveyed.traces if surveyed else {}
    traps = [*gradients.traps, *(wasteful(step, traces) if traces else [])]
    parameters = list(step.parts.model.parameters())

    def row(name: str, trace: StepTrace) -> PolicyForecast:
        assert surveyed is not None
        return memory_of(name, trace, step, surveyed.overhead(trace), card.budget_bytes)

    return Forecast(
        card=card,
        step=step,
        num_parameters=sum(parameter.numel() for parameter in parameters),
        num_trainable=sum(p.numel() for p in parameters if p.requires_grad),
        num_tokens=step.num_tokens,
        foreach_bytes=_foreach_bytes(step),
        fixed=fixed_of(step, traces["none"].input_bytes if traces else 0),
        gradients=Gradients(gradients.reached, gradients.unreached, traps),
        traces=traces,
        policies=[row(name, trace) for name, trace in traces.items()],
        best=best,
        best_policy=None if best is None else row("best", best.traced),
    )


def _best(
    step: OutlinedStep, surveyed: PolicySweep, budget_bytes: int | None
) -> BestOptions | None:
    if budget_bytes is None:
        return find_best(step.tracer, surveyed, None)
    fixed = fixed_of(step, surveyed.traces["none"].input_bytes)
    if fixed.update_bytes > budget_bytes:
        return None
    return find_best(step.tracer, surveyed, budget_bytes - fixed.resident + fixed.elsewhere)


def _foreach_bytes(step: OutlinedStep) -> int:
    section = step.recipe.optimizer
    is_plain = section.kind == "adamw" and not section.offload
    return foreach_bytes(step.parts.model) if is_plain else 0


def _saved(kept: StepTrace, other: StepTrace) -> dict[str, int]:
    return {name: _left_behind(kept, name) - _left_behind(other, name) for name in kept.blocks}


def _left_behind(trace: StepTrace, name: str) -> int:
    span = trace.blocks[name].forward
    return span.end_bytes - span.begin_bytes


def _refuse_below_weights(step: OutlinedStep, card: Card) -> None:
    assert card.budget_bytes is not None
    weights = fixed_of(step).weights
    if weights < card.budget_bytes:
        return
    traced = step.tracer.trace(options_of("all", tuple(step.tracer.subject.blocks)))
    least = memory_of("all", traced, step).step_peak_bytes
    raise PlanError(
        f"The model's weights alone take {format_size(weights)}, but the budget for all tensors is "
        f"{format_size(card.budget_bytes)}. With every block recomputed this recipe takes "
        f"{format_size(least)}: it wants a card of {format_size(card.memory_for(least))} "
        "(--memory), or a smaller model"
        + (', or model.dtype = "bf16".' if step.recipe.model.dtype == "fp32" else ".")
    )
