"""Plans LoRA for each release at its own size: `python -m tests.families.table --plans [MODEL...]`.

Of a release only files of configuration are needed. What is found is kept in
benchmarks/results/family_plans.json, from which the table of docs/guides/families.md has it.
"""

import json
import math
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

from tests.families.row import Row
from tests.families.tiny import name_optional_pictures

from longtake import config
from longtake.cli import init
from longtake.planner.activation_checkpointing import ACTIVATIONS
from longtake.planner.devices import device_budget
from longtake.planner.forecast import Forecast, forecast
from longtake.planner.record import BlockOption, BlockWeights

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results" / "family_plans.json"
DEVICES = {"24": "rtx4090", "48": "rtx-6000-ada", "80": "a100-80gb"}
"""GPUs, by their GiB."""
_SETTINGS = (
    "trainable.rank=32",
    "model.quantize=auto",
    "training.device=cuda",
    "recompute.host_memory=64GiB",
)


def known() -> dict[str, Any]:
    """What was found, by the names of models."""
    found: dict[str, Any] = json.loads(RESULTS.read_text(encoding="utf-8"))
    return found


def cells(found: Mapping[str, Any] | None) -> list[str]:
    """Of the table; "-" where nothing is planned."""
    if found is None:
        return ["-"] * len(DEVICES)
    return [_cell(found["plans"][gib]) for gib in DEVICES]


def _cell(plan: Mapping[str, Any]) -> str:
    size = f"{plan['gib']:.1f} GiB"
    if not plan["fits"]:
        return f"does not fit: {size}"
    size += f", {plan['ram_gib']} GiB RAM" if plan.get("ram_gib") else ""
    total, order = plan["blocks"], (*get_args(BlockWeights), *ACTIVATIONS)
    named = [
        name if count == total else f"{name} {count}/{total}"
        for name, count in sorted(plan["options"].items(), key=lambda each: order.index(each[0]))
    ]
    return f"{size}; {', '.join(named) or 'keep'}"


def update(rows: Sequence[Row]) -> None:
    """Plan these anew, one after the other, and keep what is found at once."""
    for row in rows:
        if row.real is None:
            continue
        with tempfile.TemporaryDirectory() as folder:
            found = {**(known() if RESULTS.exists() else {}), row.kind: _plans(row, Path(folder))}
        RESULTS.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n", encoding="utf-8")


def _plans(row: Row, folder: Path) -> dict[str, Any]:
    """By what `longtake init` writes for the release, with its usual size of clips."""
    _write_release(row, folder / "release")
    recipe = folder / "mine.toml"
    template = init.template_of_release(str(folder / "release"), "lora")
    recipe.write_text(init.render_recipe(template, None, Path("clips.parquet"), recipe))
    name_optional_pictures(row, recipe)
    shape = template.shapes[-1]
    plans = {}
    for gib, device in DEVICES.items():
        given = (*_SETTINGS, f"recompute.memory={gib}GiB", f"recompute.device={device}")
        loaded = config.load(recipe, given)
        plans[gib] = _facts(forecast(loaded, device_budget(loaded)))
    return {
        "bucket": [shape.frames, shape.height, shape.width],
        "real": row.real,
        "plans": plans,
    }


def _write_release(row: Row, folder: Path) -> None:
    assert row.real is not None
    row.make(folder)
    for part, settings in row.real.items():
        path = folder / part / "config.json"
        held = json.loads(path.read_text())
        if part.startswith("transformer"):
            held = {"_class_name": held["_class_name"]}
        path.write_text(json.dumps(_merged(held, settings)))
    for weights in folder.rglob("*.safetensors*"):
        weights.unlink()


def _merged(held: Mapping[str, Any], changed: Mapping[str, Any]) -> dict[str, Any]:
    inner = {
        name: _merged(held[name], each) if isinstance(each, Mapping) else each
        for name, each in changed.items()
    }
    return {**held, **inner}


def _facts(found: Forecast) -> dict[str, Any]:
    best = found.best_policy
    if best is None or found.best is None:
        return {"fits": False, "gib": round(found.least.step_peak_bytes / 2**30, 1)}
    options = list(found.best.options.values())
    return {
        "fits": True,
        "gib": round(best.step_peak_bytes / 2**30, 1),
        "ram_gib": math.ceil(found.needed_host_bytes / 2**30),
        "blocks": len(options),
        "options": _counted(options),
    }


def _counted(options: Sequence[BlockOption]) -> dict[str, int]:
    """How many blocks have what; what is kept as it is is not named."""
    chosen = Counter(each.weights for each in options) + Counter(
        each.activations for each in options
    )
    return {name: count for name, count in chosen.items() if name != "keep"}
