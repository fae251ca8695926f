"""The JSON that `longtake plan --json` prints; numbers are rounded, and keys stay the same.

Each function names the keys of one class of the planner.
"""

from typing import TYPE_CHECKING, Any

from longtake.planner.record import blocks_by_option

if TYPE_CHECKING:
    from longtake.config import SamplingSection
    from longtake.planner.cost import RunCost
    from longtake.planner.encoding import CacheForecast
    from longtake.planner.forecast import Forecast
    from longtake.planner.mesh import MeshForecast
    from longtake.planner.phases import PhaseForecast
    from longtake.planner.record import PolicyForecast
    from longtake.planner.report import PlanReport, StageForecast

_GIB = 2**30
_GB = 1e9
_HOUR_SECONDS = 3600.0


def report_json(report: "PlanReport") -> dict[str, Any]:
    known, recipe, step = report.known, report.recipe, report.known.step
    ahead = report.ahead
    reached, unreached = known.gradients.reached, known.gradients.unreached
    facts = {
        "device": known.device.name,
        "rates_measured_at": known.device.measured_at,
        "memory_gib": _gib(known.device.memory_bytes),
        "budget_gib": _gib(known.device.budget_bytes),
        "model": {
            "parameters": step.num_parameters,
            "trainable": step.num_trainable,
            "by_rule": dict(step.rules),
            "tokens": step.num_tokens,
        },
        "bucket": step.batch.bucket.model_dump(exclude_none=True),
        "micro_batch_size": step.batch.micro_batch_size,
        "num_micro_batches": step.batch.num_micro_batches,
        "precision": known.precision,
        "processes": step.world_size,
        "per_node": step.per_node,
        "fixed_gib": {name: _gib(size) for name, size in known.static.parts().items()},
        "host_gib": _gib(known.static.optimizer.host),
        "host_ram": {
            "pinned_gib": _gib(known.pinned_host_bytes),
            "limit_gib": _gib(step.host_room),
            "needed_gib": _gib(known.needed_host_bytes),  # for steps; see phases
        },
        "short": list(report.short),
        "foreach_gib": _gib(known.foreach_bytes),
        "policies": [_policy(row) for row in known.policies],
        "best": _best(known),
        "gradients": {
            "trainable": len(reached) + len(unreached),
            "reached": len(reached),
            "unreached": list(unreached),
        },
        "traps": [_facts(trap, "block", "trap", "fix", "stops") for trap in known.gradients.traps],
        "changes": [
            {"set": list(change.changes), "short": list(change.short)}
            | _facts(change, "what", "policy", "step_peak_gib", "host_gib", "fits")
            for change in report.suggestions
        ],
        "phases": [_phase(phase, recipe.sampling) for phase in report.phases],
        "short_phases": [phase.name for phase in report.short_phases],
        "checkpoint": {
            name: getattr(recipe.checkpoint, name) for name in ("every", "every_epochs", "minutes")
        },
        "init_from": _start(report),
        "stages": [_stage(stage) for stage in report.stages],
        "policy": report.named_policy,
        "policy_misses": report.policy_problem,
        "data_warnings": list(report.data_warnings),
        "refusals": [] if report.refusal is None else [report.refusal],
        "warnings": list(report.warnings),
        "encode_ahead": ahead and {"gib": _gib(ahead.num_bytes), "is_chosen": ahead.is_chosen},
        "mesh": report.mesh and _mesh(report.mesh),
        "cache": report.cache and _cache(report.cache),
    }
    return facts if report.cost is None else facts | {"cost": _cost(report.cost)}


def _start(report: "PlanReport") -> dict[str, Any] | None:
    start, recipe = report.start, report.recipe
    if start is None:
        return None
    return {
        "file": str(recipe.trainable.init_from),
        "layers": start.num_layers,
        "trained_layers": start.num_trained,
        "rank": start.rank,
        "expert": recipe.model.expert and recipe.model.folder(),
    }


def _policy(row: "PolicyForecast") -> dict[str, Any]:
    facts = _facts(row, "name", "forward_end_gib", "peak_gib", "step_peak_gib", "fits")
    return facts | {"overhead": None if row.overhead is None else round(row.overhead, 4)}


def _best(known: "Forecast") -> dict[str, Any] | None:
    best, row = known.best, known.best_policy
    if best is None or row is None:
        return None
    assert best.overhead_with_another_gib is not None
    away, facts = known.static.elsewhere, _policy(row)
    del facts["name"], facts["peak_gib"]
    return {
        **facts,
        "host_gib": _gib(row.host_bytes),
        "link_share": round(row.link_share, 4),
        "per_block": best.per_block(),
        "blocks": [
            {
                "blocks": names,
                "count": count,
                "activations": option.activations,
                "weights": option.weights,
            }
            for option, count, names in blocks_by_option(best.options)
        ],
        "options": {name: str(option) for name, option in best.options.items()},
        # Traces hold the whole model: weights that other ranks hold are taken off.
        "predicted_gib": _gib(best.predicted_bytes - away),
        "traced_gib": _gib(best.traced.peak_bytes - away),
        "overhead_with_another_gib": round(best.overhead_with_another_gib, 4),
    }


def _cache(cache: "CacheForecast") -> dict[str, Any]:
    return {
        "clips": cache.num_clips,
        "windows": cache.num_windows,
        "captions": cache.num_captions,
        "seconds": _digits(cache.seconds, 3),
        "gib": _gib(cache.num_bytes),
    }


def _phase(phase: "PhaseForecast", sampling: "SamplingSection") -> dict[str, Any]:
    between = dict[str, int | None]()
    if phase.name == "sampling":
        between = {"every": sampling.every, "every_epochs": sampling.every_epochs}
    how = {"how": phase.how} if phase.how else {}
    ram = {"ram_gib": _gib(phase.ram_bytes)} if phase.ram_bytes else {}
    return {
        "name": phase.name,
        "weights_gib": _gib(phase.weight_bytes),
        "peak_gib": _gib(phase.peak_bytes),
        "seconds": _digits(phase.seconds, 3),
        "fits": phase.fits,
        **between,
        **how,
        **ram,
    }


def _stage(stage: "StageForecast") -> dict[str, Any]:
    batch, rates = stage.batch, stage.learning_rates
    return {
        **_facts(batch, "name", "global_batch_size", "micro_batch_size", "num_micro_batches"),
        "bucket": batch.bucket.model_dump(exclude_none=True),
        "tokens": batch.num_tokens,
        "steps": stage.num_steps,
        "learning_rate": rates and list(rates),
        **_facts(stage, "first_step", "warmup_steps", "ema_decay", "shift", "caption_dropout"),
        "is_planned": stage.is_planned,
    }


def _mesh(mesh: "MeshForecast") -> dict[str, Any]:
    return {
        "link_gb_per_second": {"node": mesh.links.node / _GB, "network": mesh.links.network / _GB},
        "ranks_of_a_copy": mesh.num_shards,
        "copies": mesh.num_copies,
        "sent_bytes": mesh.num_bytes,
        "sent": [
            {
                "what": row.what,
                "ranks": row.ranks,
                "over": row.over,
                "bytes": row.num_bytes,
                "seconds": _digits(row.seconds, 5),
                "exposed_seconds": _digits(row.exposed_seconds, 5),
            }
            for row in mesh.sent
        ],
        "compute_seconds": _digits(mesh.compute_seconds, 5),
        "step_seconds": _digits(mesh.step_seconds, 5),
        "exposed_share": round(mesh.exposed_share, 4),
        "idle_share": round(mesh.idle_share, 4),
        "advice": [
            {
                "set": list(change.changes),
                "step_seconds": _digits(change.step_seconds, 5),
                "step_peak_gib": _gib(change.step_peak_bytes),
                "fits": change.fits,
            }
            for change in mesh.advice
        ],
    }


def _cost(cost: "RunCost") -> dict[str, Any]:
    best = None
    if cost.saving.failures_per_day:
        at_best = cost.at_best()
        minutes = at_best.saving.interval / 60
        best = {"minutes": _digits(minutes), "goodput": round(at_best.goodput, 5)}
    seconds = ("compute_seconds", "exposed_seconds", "encoder_seconds", "sampling_seconds")
    return {
        "processes": cost.num_ranks,
        "stages": [
            {
                **_facts(stage, "name", "steps", *seconds, "network_bytes"),
                "save_interval_seconds": _digits(stage.failures.interval),
                "lost_per_failure_seconds": _digits(stage.failures.lost_per_failure),
                "goodput": round(stage.failures.goodput, 5),
            }
            for stage in cost.stages
        ],
        "failures_per_day": cost.saving.failures_per_day,
        "failures": round(cost.num_failures, 3),
        "restart_seconds": _digits(cost.saving.restart),
        "saves": round(cost.num_saves, 2),
        "save_bytes": cost.save_bytes,
        "kept_bytes": cost.num_kept * cost.save_bytes,
        "save_write_seconds": _digits(cost.saving.write),
        **_facts(cost, "lost_seconds", "stalled_seconds", "work_seconds", "wall_seconds"),
        "gpu_hours": _digits(cost.wall_seconds * cost.num_ranks / _HOUR_SECONDS),
        "goodput": round(cost.goodput, 5),
        "best": best,
    }


def _facts(record: object, *keys: str) -> dict[str, Any]:
    """Return the attributes `keys` of a planner's record; `x_gib` is `x_bytes` in GiB."""
    facts: dict[str, Any] = {}
    for key in keys:
        if key.endswith("_gib"):
            facts[key] = _gib(getattr(record, key.removesuffix("gib") + "bytes"))
        else:
            value = getattr(record, key)
            facts[key] = _digits(value) if key.endswith("_seconds") else value
    return facts


def _gib(num_bytes: int | None) -> float | None:
    return None if num_bytes is None else round(num_bytes / _GIB, 6)


def _digits(value: float, digits: int = 6) -> float:
    # Digits that count instead of decimals: times reach from microseconds to months.
    return float(f"{value:.{digits}g}")
