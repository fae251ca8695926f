"""The report of `longtake plan`: forecasts of a step, of stages, sampling and the whole run."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace

from pydantic import TypeAdapter

from longtake.config import Recipe
from longtake.data.cache_fill import count_clips, distinct_captions
from longtake.data.checks import review_catalogs
from longtake.data.plan import Plan
from longtake.data.stages import StagePosition
from longtake.models.review import review_model
from longtake.models.text import NO_CAPTION
from longtake.optim.update import learning_rate_factor, schedule_cycle
from longtake.planner import plan_cache
from longtake.planner.batch_sizes import StageBatch
from longtake.planner.cost import RunCost
from longtake.planner.devices import DeviceBudget
from longtake.planner.encoding import (
    CacheForecast,
    CacheRates,
    TileChoice,
    cache_forecast,
    cache_rates,
    choose_tile,
)
from longtake.planner.forecast import (
    EncodingAhead,
    Forecast,
    ForecastFacts,
    StoredStart,
    Suggestion,
    encoding_ahead,
    forecast,
    short_memory,
    stored_start,
    suggest_changes,
)
from longtake.planner.memory import StepFacts, beside_encoding, static_memory, step_of_facts
from longtake.planner.mesh import Links, MeshForecast, mesh_forecast
from longtake.planner.phases import PhaseForecast, forecast_phases
from longtake.planner.plan import does_not_fit
from longtake.run_dir import RunDirectory
from longtake.sampling.presets import training_presets


@dataclass(frozen=True)
class StageForecast:
    """Forecast of one stage of the data curriculum: its batch, its steps and its settings."""

    batch: StageBatch
    first_step: int | None  # None: depends on the number of clips, and there is no catalog
    num_steps: int | None  # None: all remaining steps
    epoch_steps: float | None  # mean steps of an epoch; None: there is no catalog
    learning_rates: tuple[float, float] | None  # highest after the warm-up, and of the last step
    warmup_steps: int | None
    ema_decay: float | None  # None: averages are profiles, which have no decay
    shift: float | str | None
    caption_dropout: float | None
    is_planned: bool  # true for the largest stage, which is forecast


@dataclass(frozen=True)
class TracedFacts:
    """What a report says beside the forecast of a step, and takes seconds to find out."""

    phases: Sequence[PhaseForecast]  # caching, sampling, and encoders in a step
    suggestions: Sequence[Suggestion]  # if nothing fits
    mesh: MeshForecast | None  # None: a single process, or a step that cannot be traced
    ahead: EncodingAhead | None  # None: no encoders work in a step
    policy_problem: str | None  # reason for which training would refuse the recipe's policy
    warnings: Sequence[str]  # of the model
    cache_rates: CacheRates | None  # None: there is no cache
    tile: TileChoice


@dataclass(frozen=True)
class PlanReport(TracedFacts):
    """Everything that `longtake plan` tells a user about a recipe before training."""

    known: Forecast
    stages: Sequence[StageForecast]
    start: StoredStart | None  # None: `trainable.init_from` is unset
    named_policy: str | None  # of the recipe; None: the plan chooses
    data_warnings: Sequence[str]
    refusal: str | None  # reason for which training would refuse the data
    cache: CacheForecast | None = None  # None: there is no cache, or no catalog yet
    is_filled: bool = False  # the cache was filled once, maybe on a larger computer
    cost: RunCost | None = None  # of the whole run, if requested

    @property
    def recipe(self) -> Recipe:
        return self.known.step.recipe

    @property
    def short(self) -> tuple[str, ...]:
        """Return the kinds of memory that are too small even for the cheapest recompute policy."""
        row = self.known.best_or_least
        return () if row is None else short_memory(self.known.step, row)

    @property
    def short_phases(self) -> list[PhaseForecast]:
        """Return what a training does besides its steps, and for which its memory is too little.

        What a cache holds is encoded until it was filled once; steps that fit in no way say enough.
        """
        names = set[str]() if self.known.misses else {"step", "sampling"}
        if self.recipe.data.cache is not None and not self.is_filled:
            names |= {"text", "encode"}
        elif self.recipe.data.cache is None or self.recipe.sampling.in_training:
            device = self.known.step.device
            names |= {each.name for each in self.phases if each.lacks_ram(device)}
        return [each for each in self.phases if each.name in names and each.fits is False]

    @property
    def needed_ram(self) -> int:
        """Host RAM that a node needs, in bytes, for steps and to read text encoders."""
        step = self.known.step
        to_read = (step.per_node or step.world_size) * max(
            (each.ram_bytes for each in self.phases), default=0
        )
        return max(self.known.needed_host_bytes, to_read)

    @property
    def exit_code(self) -> int:
        """Return the exit code of `longtake plan`.

        2 if training would refuse the data, 1 if steps or what is done besides them do not fit, or
        not everything trains, else 0.
        """
        if self.refusal is not None:
            return 2
        is_short = self.known.misses or self.policy_problem is not None or bool(self.short_phases)
        return int(is_short or bool(self.known.gradients.fatal))


@dataclass(frozen=True)
class _Record:
    """The parts of a report that are kept in the user's cache."""

    step: StepFacts
    forecast: ForecastFacts
    traced: TracedFacts


def make_report(
    recipe: Recipe,
    device: DeviceBudget,
    links: Links,
    world_size: int = 1,
    per_node: int | None = None,
    enter: Callable[[str], None] = lambda _: None,
    begun: TileChoice | None = None,
) -> PlanReport:
    """Forecast a recipe's training steps, encoding, sampling, stages, ranks and data.

    The arguments are those of `forecast`, the links between ranks, a function that is called with
    the name of each longer part of the work, and the tiles with which the run or its cache was
    begun. What needs traces is read from the user's cache if an equal recipe was planned before.

    Raises:
        RecipeError: the recipe's parts do not fit together.
        PlanError: the model cannot run on tensors without values.
        ModelError: `trainable.init_from` is of another model.
    """

    def find() -> _Record:
        known = forecast(recipe, device, world_size=world_size, per_node=per_node, tries_more=True)
        enter("running encoders and sampling on tensors without values")
        return _Record(known.step, known, _trace_more(known, links, begun))

    facts = _facts(recipe, device, links, world_size, per_node, begun)
    found = plan_cache.recalled("report", facts, _RECORD, find)
    known = found.forecast
    if not isinstance(known, Forecast):  # it was read from the cache
        step = step_of_facts(found.step, recipe, device)
        known = Forecast(**vars(known), step=step)
    data_plan, data_warnings, refusal = review_catalogs(recipe)
    policy, rates, cache = recipe.recompute.policy, found.traced.cache_rates, None
    if rates is not None and data_plan is not None:
        captions = list[str]()
        if rates.caption_bytes:  # else they are encoded with the pictures of each window
            captions = distinct_captions(data_plan, recipe.data, NO_CAPTION)
        counts = count_clips(data_plan)
        cache = cache_forecast(rates, counts, len(captions), recipe.data, world_size)
    return PlanReport(
        **vars(found.traced),
        cache=cache,
        is_filled=recipe.data.cache is not None and (recipe.data.cache / "index").exists(),
        known=known,
        stages=list(_stages(known, data_plan)),
        start=stored_start(known.step),
        named_policy=policy if policy not in ("auto", "best") else None,
        data_warnings=data_warnings,
        refusal=refusal,
    )


_RECORD = TypeAdapter(_Record)


def _facts(
    recipe: Recipe,
    device: DeviceBudget,
    links: Links,
    world_size: int,
    per_node: int | None,
    begun: TileChoice | None,
) -> plan_cache.Facts | None:
    """Return everything on which `_Record` depends; None: it must not be kept."""
    # Of another run's transformer, which may have changed since, nothing is kept.
    if recipe.sampling.other_expert is not None:
        return None
    presets = [
        vars(preset)
        | {"prompts": len(preset.prompts), "seeds": len(preset.seeds)}
        | {"settings": preset.settings.model_dump(exclude={"fps"})}
        | {"own": [(each.seeds, each.settings, each.bucket) for each in preset.own.values()]}
        | {"conditioning": sorted(preset.conditioning)}
        for preset in training_presets(recipe, RunDirectory(recipe.out))
    ]
    ranks = world_size, per_node, asdict(links)
    tile = None if begun is None else begun.pixels
    return plan_cache.facts_of(recipe, device, ranks=ranks, presets=presets, tile=tile)


def _trace_more(known: Forecast, links: Links, begun: TileChoice | None) -> TracedFacts:
    options, fixed = None, None
    if known.chosen is not None:
        options, trace = known.chosen
        fixed = static_memory(known.step, trace.input_bytes, trace.weight_bytes)
    step, recipe = known.step, known.step.recipe
    tile = begun or choose_tile(recipe, step.device, beside_encoding(step, fixed))
    recipe = recipe.with_encode_tile(tile.pixels)
    step = replace(step, recipe=recipe)
    # For the shape that does not fit, instead of the one with the most tokens.
    worst = "step" if recipe.encodes_in_steps() else "encode"
    phases = [
        replace(each, peak_bytes=tile.needed_bytes, fits=False)
        if tile.bucket is not None and each.name == worst
        else each
        for each in forecast_phases(step, options)
    ]
    policy, chosen = recipe.recompute.policy, recipe.recompute.chosen()
    is_named = policy not in ("auto", "best")
    is_short = is_named and known.best is not None and known.policy(policy).fits is False
    ahead = None
    if known.policies:
        # The policy that would be trained with: what it leaves free decides on encoding ahead.
        is_chosen = chosen != "best" and not known.misses
        row = known.policy(chosen) if is_chosen else known.best_policy
        ahead = encoding_ahead(step, row)
    return TracedFacts(
        phases=phases,
        suggestions=suggest_changes(known) if known.misses else [],
        mesh=mesh_forecast(known, links),
        ahead=ahead,
        policy_problem=str(does_not_fit(known)) if is_short else None,
        warnings=review_model(step.components, recipe),
        tile=tile,
        cache_rates=cache_rates(
            recipe, step.components, step.batch.bucket, {each.name: each.seconds for each in phases}
        ),
    )


def _stages(known: Forecast, data_plan: Plan | None) -> Iterator[StageForecast]:
    """Forecast each stage of the curriculum.

    A stage after one whose length is in epochs begins at an unknown step, unless there is a
    catalog.
    """
    recipe, first = known.step.recipe, 0
    lengths = [stage.steps for stage in recipe.data.curriculum()]
    epochs = dict[str, float]()
    if data_plan is not None:
        epochs = {each.name: each.epoch_steps(recipe.data.repeats) for each in data_plan.stages}
        # With a catalog, the length of stages in epochs is known, too.
        lengths = list(data_plan.timeline.lengths)
    is_known = bool(recipe.training.steps)  # else the data decide it, and there are none yet
    for batch, length in zip(known.step.stages, lengths, strict=True):
        inside, stage = recipe.in_stage(batch.name), recipe.data.stage(batch.name)
        # The run's first stage warms up by the optimizer section.
        of_run = recipe.optimizer.num_warmup_steps(recipe.training.steps)
        warmup = stage.warmup_steps if first or not is_known else of_run
        end = recipe.training.steps if length is None else first + length
        rates = None
        if is_known:
            # The stage's last step, if the run gets there.
            last = max(first, min(end, recipe.training.steps) - 1)
            full = min(first + (warmup or 0), last)
            section, steps = recipe.optimizer, recipe.training.steps
            restarts = [schedule_cycle(step, steps, section)[0] for step in (full, last)]
            # A restart in the stage brings the schedule's full value back.
            highest = full if restarts[0] == restarts[1] else of_run
            at_full, at_end = (
                section.learning_rate
                * learning_rate_factor(recipe, step, StagePosition(batch.name, at - first))
                for step, at in ((highest, full), (last, last))
            )
            rates = (at_full, at_end)
        yield StageForecast(
            batch=batch,
            first_step=first if is_known else None,
            num_steps=length,
            epoch_steps=epochs.get(batch.name),
            learning_rates=rates,
            warmup_steps=warmup,
            ema_decay=inside.ema.decay if not inside.ema.profiles else None,
            shift=inside.flow.shift,
            caption_dropout=inside.data.caption_dropout,
            is_planned=batch.name == known.step.batch.name,
        )
        first, is_known = end, is_known and length is not None
