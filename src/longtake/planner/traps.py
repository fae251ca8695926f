"""Traps of a training step, with fixes: code that cuts gradients off or wastes memory."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import or_

from longtake.formatting import format_size
from longtake.planner.gradient_flow import (
    SECOND_TIME,
    GradientWatch,
    LostGradient,
    ParameterSet,
    RecomputeRegion,
)

_NON_REENTRANT = (
    "Call torch.utils.checkpoint.checkpoint with use_reentrant=False, or drop the call and set "
    'recompute.policy = "all"'
)
_OR_DIRECTLY = "; or hand that tensor over as an argument of its own"
_MEANT_TO_TRAIN = "If they are meant to train, {}; if not, freeze them with requires_grad_(False)."


_NOTABLE_SHARE = 0.01
"""Least notable excess of a recompute policy's peak memory over the peak without recompute, as a
share of the latter."""


@dataclass(frozen=True)
class Trap:
    """A mistake in a training step, such as lost gradients or useless recomputation; its fix."""

    block: str  # module where it happens, or the first of several; "model": all of it
    trap: str  # what happens, and why, in sentences
    fix: str  # remedy, in sentences
    stops: bool  # true if it keeps parameters from training; else it costs memory or time

    def __str__(self) -> str:
        return f"{self.block}: {self.trap}\n  Fix: {self.fix}"


def flow_traps(watch: GradientWatch) -> list[Trap]:
    """Find code that kept gradients from trainable parameters in a watched step, or wasted memory.

    Every parameter of `watch.unreached()` is in at least one of the traps.
    """
    unreached = _set(watch, watch.unreached())
    # A reentrant region gives its parameters no gradient unless an argument carries one.
    dead = [
        region
        for region in watch.regions
        if region.reentrant and not region.carries_grad and region.inside & unreached
    ]
    traps = [_dead_regions(watch, dead, unreached)] if dead else []
    traps += _regions_of_everything(watch, dead)
    # Behind a dead region, later ones would look idle as well.
    traps += [] if dead else _idle_regions(watch)
    # All other traps would follow from it.
    if watch.gone_twice:
        return [*traps, _gone_twice(watch)]
    traps += _demands(watch, dead, unreached)
    # Parameters are removed once a trap explains them, so that the next detector need not.
    unreached &= ~_union(region.inside | region.hidden for region in dead)
    unreached &= ~_union(demand.upstream for demand in watch.provenance.demands)
    return [*traps, *_cut_off(watch, unreached), *_left_over(watch, unreached), *_copies(watch)]


def idle_recompute(options: Mapping[str, str], saved_bytes: Mapping[str, int]) -> list[Trap]:
    """Return a trap if blocks before the first trainable parameter are recomputed in vain."""
    idle = [name for name, option in options.items() if option != "keep" and saved_bytes[name] == 0]
    useful = {name: saved for name, saved in saved_bytes.items() if saved > 0}
    if not idle:
        return []
    trap = (
        f"Recomputing {_listed(idle)} saves 0 bytes: nothing trainable lies there or before, so no "
        "gradient passes and nothing is kept for one."
    )
    fix = "Leave recompute off there."
    if useful:
        fix = (
            f"Recompute what comes after the first trainable parameter: {_listed(useful)} "
            f"save{'s' if len(useful) == 1 else ''} {format_size(sum(useful.values()))}. Frozen "
            "blocks count there too, because gradient passes through them."
        )
    return [Trap(idle[0], trap, fix, stops=False)]


def costly_policies(peaks: Mapping[str, int]) -> list[Trap]:
    """Return at most one trap: recompute policies that need clearly more memory than `none`."""
    usual = peaks.get("none")
    if usual is None:
        return []
    more = {
        name: peak - usual for name, peak in peaks.items() if peak - usual > _NOTABLE_SHARE * usual
    }
    if not more:
        return []
    listed = ", ".join(f'"{name}" by {format_size(extra)}' for name, extra in more.items())
    return [
        Trap(
            "model",
            f'Recompute can cost memory. Above the peak of recompute.policy = "none", '
            f"{format_size(usual)}, are: {listed}. They hold on to tensors that autograd by itself "
            "would not keep: where weights are frozen, a gradient needs few of them.",
            "If your policy is among them, take another: the plan's table shows which.",
            stops=False,
        )
    ]


def _dead_regions(
    watch: GradientWatch, dead: Sequence[RecomputeRegion], unreached: ParameterSet
) -> Trap:
    """Make one trap of all reentrant recompute regions that get no gradient.

    Each makes the next one lose it too.
    """
    first, name = dead[0], _name(dead[0])
    kind = f"reentrant recompute region{f' of {first.by}' if first.by else ''}"
    frozen: list[str] = []  # blocks before the first region, if nothing trainable lies there
    if not first.upstream and first.blocks and first.blocks[0] in watch.blocks:
        blocks = list(watch.blocks)
        frozen = blocks[: blocks.index(first.blocks[0])]
    if first.hidden:
        opening = (
            f"{name} runs in a {kind}, and what carries gradient is handed to "
            "it inside a dict, list or dataclass, where such a region does not look"
        )
    elif _holds_everything(watch, first):
        opening = (
            f"One {kind} in {first.where} holds all blocks that train "
            f"({_listed(first.blocks)}), and no tensor that it is handed carries gradient"
        )
    elif frozen:
        opening = (
            f"{_listed(frozen)} {'is' if len(frozen) == 1 else 'are'} frozen, so that no tensor "
            f"handed on to {name} carries gradient, and {name} runs in a {kind}"
        )
    else:
        because = "" if first.upstream else ": data and frozen layers give none"
        opening = (
            f"{name} runs in a {kind}, and no tensor that it is handed carries gradient{because}"
        )
    others = [_name(region) for region in dead if _name(region) != name]
    untrained = _union((region.inside | region.hidden) & unreached for region in dead)
    also = f", nor does anything in {_listed(others)}" if others else ""
    return Trap(
        name,
        f"{opening}. So nothing in it gets a gradient{also}. Untrained: "
        f"{_parameters(watch, untrained)}.",
        f"{_NON_REENTRANT}{_OR_DIRECTLY if first.hidden else ''}.",
        stops=True,
    )


def _regions_of_everything(watch: GradientWatch, dead: Sequence[RecomputeRegion]) -> Iterator[Trap]:
    for region in watch.regions:
        if region not in dead and _holds_everything(watch, region):
            yield Trap(
                region.where,
                f"One recompute region in {region.where} holds all blocks that train "
                f"({_listed(region.blocks)}). The backward pass computes all of it again at once "
                "and holds it at once: the peak is as high as without recompute, and a step takes "
                "one more forward pass.",
                'Recompute block by block: drop the call and set recompute.policy = "all".',
                stops=False,
            )


def _idle_regions(watch: GradientWatch) -> Iterator[Trap]:
    """Yield at most one trap: all checkpoint calls around parts that no gradient passes."""
    idle = [
        _name(region)
        for region in watch.regions
        if not (region.carries_grad or region.hidden or region.upstream or region.inside)
    ]
    if idle:
        yield Trap(
            idle[0],
            f"The checkpoint call around {_listed(idle)} saves nothing: nothing trainable lies "
            "there or before, so no gradient passes and nothing is kept for one.",
            "Leave the call out there.",
            stops=False,
        )


def _holds_everything(watch: GradientWatch, region: RecomputeRegion) -> bool:
    trained = {name for name in map(_group_in(watch), watch.parameters) if name in watch.blocks}
    needing = trained | watch.needing_gradient
    return len(set(region.blocks)) > 1 and needing <= set(region.blocks)


def _gone_twice(watch: GradientWatch) -> Trap:
    """Make the trap of a reentrant recompute region that gradients pass twice.

    They pass it again through tensors that its function captured.
    """
    alive = [region for region in watch.regions if region.reentrant and region.carries_grad]
    names = [_name(region) for region in alive if region.hidden] or [_name(each) for each in alive]
    return Trap(
        names[0],
        f"Reentrant recompute of {_listed(names)} uses a tensor that carries gradient and is no "
        "argument of its own: it lies inside a dict, list or dataclass, or comes from outside. The "
        "backward pass goes through what made it more than once, where torch stops with "
        f'"{SECOND_TIME}".',
        f"{_NON_REENTRANT}{_OR_DIRECTLY}.",
        stops=True,
    )


def _demands(
    watch: GradientWatch, dead: Sequence[RecomputeRegion], unreached: ParameterSet
) -> Iterator[Trap]:
    demands = watch.provenance.demands
    says = (
        "requires_grad_ in {} is called on a tensor that is neither a parameter nor an input of "
        "the model."
    )
    harmful = [demand.where for demand in demands if demand.upstream & unreached]
    if harmful:
        untrained = _union(demand.upstream for demand in demands) & unreached
        causes = [
            *(
                f"the reentrant region of {_name(region)} (use_reentrant=False)."
                for region in dead
                if region.inside & untrained
            ),
            *(
                f"the {_means(cut)} in {cut.where}."
                for cut in watch.provenance.cuts
                if cut.parameters & untrained
            ),
            "a detach(), torch.no_grad() or a reentrant region.",
        ]
        yield Trap(
            harmful[0],
            f"{says.format(_listed(harmful))} torch's error goes away, but gradient ends at that "
            "tensor and never gets to what made it. Untrained: "
            f"{_parameters(watch, untrained)}.",
            f"Remove it, and mend what stopped gradient before: {causes[0]}",
            stops=True,
        )
    idle = [demand.where for demand in demands if not demand.upstream]
    if idle:
        yield Trap(
            idle[0],
            f"{says.format(_listed(idle))} Nothing before it is trained, so nothing is lost; but "
            "frozen layers between it and the first trainable one now keep activations for a "
            "gradient that is not needed.",
            "Remove it. Only reentrant recompute needs it: use_reentrant=False.",
            stops=False,
        )


def _cut_off(watch: GradientWatch, unreached: ParameterSet) -> Iterator[Trap]:
    """Yield one trap for each way (`detach`, `no_grad` ...) in which gradients were lost."""
    by_means: dict[str, dict[str, ParameterSet]] = {}
    for cut in watch.provenance.cuts:
        lost = cut.parameters & unreached
        # Each parameter is reported once, for the first cut that explains it.
        unreached &= ~lost
        if lost:
            places = by_means.setdefault(_means(cut), {})
            places[cut.where] = places.get(cut.where, 0) | lost
    for means, places in by_means.items():
        lost = sum(places.values())  # the sets have no parameter in common
        yield Trap(
            next(iter(places)),
            f"The {means} in {_listed(places)} lets no gradient through. Untrained: "
            f"{_parameters(watch, lost)}.",
            _MEANT_TO_TRAIN.format("take it out"),
            stops=True,
        )


def _means(cut: LostGradient) -> str:
    known = {"detach": "detach() (or .data)", "no_grad": "torch.no_grad()"}
    return known.get(cut.how, f"{cut.how}(), which has no derivative,")


def _left_over(watch: GradientWatch, unreached: ParameterSet) -> Iterator[Trap]:
    """Yield traps of parameters without gradient that the step, or its loss, does not use."""
    # Cuts have explained these parameters already.
    unreached &= ~_union(cut.parameters for cut in watch.provenance.cuts)
    reasons = {
        "the forward pass does not use them": unreached & ~watch.provenance.used,
        "what they compute does not reach the loss": unreached & watch.provenance.used,
    }
    group_of = _group_in(watch)
    alive = {group_of(name) for name in watch.reached()}
    for reason, parameters in reasons.items():
        groups = dict.fromkeys(map(group_of, watch.names(parameters)))
        # A layer without any gradient is an error; single parameters may be unused by design.
        for is_whole in (True, False):
            chosen = [group for group in groups if (group not in alive) == is_whole]
            names = [name for name in watch.names(parameters) if group_of(name) in chosen]
            if not names:
                continue
            trap = f"Some parameters of {_listed(chosen)} get no gradient: {reason}. "
            fix = (
                "Some models are built so: a last block may drop one of its streams. Then nothing "
                "is lost but the optimizer's memory; freeze them to save that."
            )
            if is_whole:
                trap = f"No parameter of {_listed(chosen)} gets a gradient: {reason}. "
                fix = _MEANT_TO_TRAIN.format("use them, or what they compute, in the forward pass")
            untrained = f"Untrained: {_parameters(watch, _set(watch, names))}."
            yield Trap(chosen[0], trap + untrained, fix, is_whole)


def _copies(watch: GradientWatch) -> Iterator[Trap]:
    """Yield a trap if fp32 weights (LoRA) on a 16-bit base copy their inputs to fp32."""
    if copies := watch.provenance.copies:
        groups = list(dict.fromkeys(map(_group_in(watch), copies)))
        sizes = [size for sizes in copies.values() for size in sizes]
        yield Trap(
            groups[0],
            f"Trainable weights in {_listed(groups)} are fp32 on a 16-bit base: {len(sizes)} of "
            "their layers copy their input to fp32 and keep the copy for the backward pass, "
            f"{format_size(sum(sizes))} in all where nothing is recomputed.",
            'Set trainable.dtype = "model": longtake\'s optimizers do not lose updates that are '
            "too small for 16 bits.",
            stops=False,
        )


def _set(watch: GradientWatch, names: Iterable[str]) -> ParameterSet:
    bits = {name: 1 << bit for bit, name in enumerate(watch.parameters)}
    return sum(bits[name] for name in names)


def _union(sets: Iterable[ParameterSet]) -> ParameterSet:
    return reduce(or_, sets, 0)


def _name(region: RecomputeRegion) -> str:
    return region.blocks[0] if len(set(region.blocks)) == 1 else region.where


def _group_in(watch: GradientWatch) -> Callable[[str], str]:
    """Return a function from a parameter's name to its block, or to its layer outside of blocks."""

    def group(name: str) -> str:
        inside = (block for block in watch.blocks if name.startswith(f"{block}."))
        return next(inside, name.rpartition(".")[0] or name)

    return group


def _parameters(watch: GradientWatch, parameters: ParameterSet) -> str:
    names = watch.names(parameters)
    count = f"{len(names)} trainable parameter{'s' if len(names) > 1 else ''}"
    return f"{count} ({_listed(names)})"


def _listed(names: Iterable[str], most: int = 3) -> str:
    """Join names for a message: `a`, `a and b`, or `a, b, c and 24 more`."""
    names = list(dict.fromkeys(names))
    if len(names) == 1:
        return names[0]
    if len(names) <= most:
        return f"{', '.join(names[:-1])} and {names[-1]}"
    return f"{', '.join(names[:most])} and {len(names) - most} more"
