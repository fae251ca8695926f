"""Which recompute policies fit a budget, what each costs, and which is the fastest that fits."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from longtake.recompute.apply import OPTIONS, Option
from longtake.recompute.policies import POLICIES, Options, options_of
from longtake.recompute.solve import Costs, costs, fastest
from longtake.recompute.trace import StepTrace, Tracer

_GIB = 2**30
_MOST_TRIES = 5
_LEAST_STEP_BYTES = 2**16  # below it the solver's tolerance hides the difference
_UNIFORM: Mapping[Option, str] = {
    "keep": "none",
    "save-attention": "save-attention",
    "recompute": "all",
}


@dataclass(frozen=True)
class Best:
    """The fastest options that fit, traced again as a whole."""

    options: Options
    predicted_bytes: int
    """Peak of forward and backward pass, composed of what single blocks take."""
    traced: StepTrace
    overhead: float
    """Share of a step without recompute that it takes longer."""
    overhead_with_another_gib: float
    """Likewise with a budget of 1 GiB more."""

    def per_block(self) -> dict[Option, int]:
        counted = Counter(self.options.values())
        return {option: counted[option] for option in OPTIONS}


@dataclass(frozen=True)
class Survey:
    """Every named policy, traced."""

    traces: Mapping[str, StepTrace]
    costs: Costs

    def overhead(self, trace: StepTrace) -> float:
        """Share of a step without recompute that a traced step takes longer."""
        return trace.seconds / self.traces["none"].seconds - 1


def survey(tracer: Tracer) -> Survey:
    """Trace every named policy; three of the traces say what any mixture takes."""
    names = tuple(tracer.subject.blocks)
    traces = {policy: tracer.trace(options_of(policy, names)) for policy in POLICIES}
    return Survey(traces, costs({option: traces[name] for option, name in _UNIFORM.items()}))


def find_best(tracer: Tracer, surveyed: Survey, budget_bytes: int) -> Best | None:
    """The fastest options whose traced peak is within a budget; None if nothing fits."""
    names = tuple(tracer.subject.blocks)
    fitting: list[tuple[Options, StepTrace]] = [
        (options_of(policy, names), trace)
        for policy, trace in surveyed.traces.items()
        if trace.peak_bytes <= budget_bytes
    ]
    if not any(trace.seconds <= surveyed.traces["none"].seconds for _, trace in fitting):
        fitting += _solved(tracer, surveyed, budget_bytes)
    if not fitting:
        return None
    options, traced = min(fitting, key=lambda each: each[1].seconds)
    return _best(options, traced, surveyed, budget_bytes)


def unlimited(tracer: Tracer, surveyed: Survey) -> Best:
    names, traced = tuple(tracer.subject.blocks), surveyed.traces["none"]
    return Best(options_of("none", names), traced.peak_bytes, traced, 0.0, 0.0)


def _solved(tracer: Tracer, surveyed: Survey, budget_bytes: int) -> list[tuple[Options, StepTrace]]:
    """What the solver finds, traced: its budget is tightened until the trace fits."""
    within = budget_bytes
    for _ in range(_MOST_TRIES):
        options = fastest(surveyed.costs, within)
        if options is None:
            return []
        traced = tracer.trace(options)
        if traced.peak_bytes <= budget_bytes:
            return [(options, traced)]
        within -= max(traced.peak_bytes - budget_bytes, _LEAST_STEP_BYTES)
    return []


def _best(options: Options, traced: StepTrace, surveyed: Survey, budget_bytes: int) -> Best:
    """A solver's solution may be a little off, so more memory is never said to cost time."""
    roomier = fastest(surveyed.costs, budget_bytes + _GIB)
    without = surveyed.traces["none"].seconds
    with_another = surveyed.costs.predicted_seconds(roomier or options)
    return Best(
        options=options,
        predicted_bytes=int(surveyed.costs.peak_bytes(options)),
        traced=traced,
        overhead=surveyed.overhead(traced),
        overhead_with_another_gib=min(with_another / without - 1, surveyed.overhead(traced)),
    )
