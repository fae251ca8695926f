"""Scheduler and guider of a family's diffusers pipeline: a release's, and those of an export."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from longtake.config import ModelSection
from longtake.errors import ModelError
from longtake.flow.shift import MuLine, ShiftRule
from longtake.models import pretrained, releases

DEFAULT_SHIFT = ShiftRule(5.0)

PipelineMu = Literal["line", "flux2"] | None
"""Way in which a pipeline gives its scheduler mu, the logarithm of the shift: by the line in its
scheduler_config.json, by FLUX.2's formula, or not at all, so that it can follow no rule."""

_LINE = {
    "base_image_seq_len": "base_tokens",
    "base_shift": "base_mu",
    "max_image_seq_len": "max_tokens",
    "max_shift": "max_mu",
}
"""Names of the fields of `MuLine` in diffusers' scheduler_config.json."""

_OTHER_SIGMAS = (
    "use_karras_sigmas",
    "use_exponential_sigmas",
    "use_beta_sigmas",
    "invert_sigmas",
    "stochastic_sampling",
)
"""Options of diffusers' flow-matching schedulers that longtake's sampling does not support."""


def scheduler_shift(
    scheduler: Mapping[str, Any] | None, mu: PipelineMu, where: str
) -> ShiftRule | None:
    """Return the shift that a release's scheduler_config.json states; None if it states none.

    Raises:
        ModelError: sampling by this scheduler needs more than a shift.
    """
    if scheduler is None:
        return None
    other = [name for name in _OTHER_SIGMAS if scheduler.get(name)]
    if scheduler.get("time_shift_type", "exponential") != "exponential":
        other.append(f'time_shift_type = "{scheduler["time_shift_type"]}"')
    if other:
        raise ModelError(
            f"{where}: its scheduler_config.json has {', '.join(other)}, by which longtake does "
            "not sample; it shifts evenly spaced sigmas exponentially. Copy the release and remove "
            "that from scheduler/scheduler_config.json, if the model works without it."
        )
    names = (*_LINE, "shift_terminal")
    numbers = {name: scheduler[name] for name in names if scheduler.get(name) is not None}
    terminal = numbers.get("shift_terminal", 0.0)
    line = MuLine(**{_LINE[name]: value for name, value in numbers.items() if name in _LINE})
    if not all(isinstance(value, int | float) for value in numbers.values()) or not (
        line.base_tokens != line.max_tokens and 0 <= terminal < 1
    ):
        raise ModelError(
            f"{where}: its scheduler_config.json has {numbers}; expected two numbers of tokens, "
            "two shifts, and shift_terminal from 0 to below 1. Correct scheduler_config.json."
        )
    # Before the fixed shift, which diffusers' schedulers ignore where the dynamic one is on.
    if scheduler.get("use_dynamic_shifting"):
        return ShiftRule("flux2" if mu == "flux2" else line, terminal)
    shift = scheduler.get("flow_shift", scheduler.get("shift"))
    is_number = isinstance(shift, int | float) and shift > 0
    return ShiftRule(float(shift), terminal) if is_number else None


def shift_values(rule: ShiftRule, mu: PipelineMu, bucket_shift: float) -> dict[str, Any]:
    """Return a scheduler's values for a shift rule, or for `bucket_shift` if `mu` does not fit."""
    terminal = {"shift_terminal": rule.terminal or None}
    if isinstance(rule.by, MuLine) and mu == "line":
        line = {name: getattr(rule.by, field) for name, field in _LINE.items()}
        return {"use_dynamic_shifting": True, **line, **terminal}
    if rule.by == "flux2" == mu:
        return {"use_dynamic_shifting": True, **terminal}
    # Classes of schedulers have one name or the other; `build` keeps the one that the class takes.
    fixed = {"shift": bucket_shift, "flow_shift": bucket_shift}
    return {"use_dynamic_shifting": False, **fixed, **terminal}


@dataclass(frozen=True)
class PipelineScheduler:
    """The diffusers scheduler of a family's pipeline, for releases that bring none."""

    class_name: str = "FlowMatchEulerDiscreteScheduler"
    options: Mapping[str, Any] = field(default_factory=dict)
    """Arguments for the constructor of the scheduler's class."""
    default_shift: ShiftRule = DEFAULT_SHIFT
    mu: PipelineMu = "line"

    def shift(self, section: ModelSection) -> ShiftRule:
        """Return the shift in the release's scheduler_config.json, or else the default one."""
        release = releases.read_release(section).scheduler
        return scheduler_shift(release, self.mu, str(section.release())) or self.default_shift

    def build(self, section: ModelSection, rule: ShiftRule, bucket_shift: float) -> Any:
        """Build the exported pipeline's scheduler: the release's, with the run's shift.

        A pipeline that cannot follow the rule gets `bucket_shift`.
        """
        import diffusers

        release = releases.read_release(section).scheduler or {}
        named = getattr(diffusers, str(release.get("_class_name")), None)
        scheduler_class = named or getattr(diffusers, self.class_name)
        values = {**self.options, **release}
        # An unchanged rule leaves the release's values as they are, those of unknown keys included.
        if not release or rule != self.shift(section):
            known = pretrained.defaults(scheduler_class.__init__)
            changed = shift_values(rule, self.mu, bucket_shift)
            values |= {key: value for key, value in changed.items() if key in known}
        with pretrained.quiet(scheduler_class):
            return scheduler_class.from_config(values)


_PLAIN = {"guidance_rescale": 0.0, "use_original_formulation": False, "start": 0.0, "stop": 1.0}


def guider_scale(guider: Mapping[str, Any], where: str) -> float:
    """Return the guidance scale in a guider_config.json; ModelError for other guidance."""
    name = str(guider.get("_class_name", "ClassifierFreeGuidance"))
    other = [key for key, plain in _PLAIN.items() if guider.get(key, plain) != plain]
    if name != "ClassifierFreeGuidance" or other:
        raise ModelError(
            f"{where}: its guider_config.json has {', '.join([name, *other])}, by which longtake "
            "does not sample; it has plain ClassifierFreeGuidance. Copy the release and correct "
            "guider/guider_config.json, if the model works with plain guidance."
        )
    return float(guider.get("guidance_scale", 7.5)) if guider.get("enabled", True) else 1.0
