"""Which models fit GPUs of 8, 12 and 16 GiB, and what a step then takes: predicted, for LoRA.

    python -m benchmarks.low_memory [MODEL...]

For each model the recipe of `longtake init RELEASE --memory 8GiB` (12, 16) is planned, for a
release with the folder layout and the sizes of the real one, but without weights, and for 16, 32
and 64 GiB of RAM. A model fits if every phase does: text encoder, codec and training on the GPU,
and what they take of the RAM. Needs 10 to 20 minutes of one core. Writes
benchmarks/results/low_memory.json, the tables of low_memory.md and of docs/guides/families.md.
"""

import argparse
import json
import math
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tests.families import plans
from tests.families.rows import ROWS

from longtake import config
from longtake.cli import init
from longtake.planner import forecast, memory, phases, solver
from longtake.planner.activation_checkpointing import options_of
from longtake.planner.devices import (
    SHARE_OF_HOST_MEMORY,
    DeviceBudget,
    device_budget,
    with_host_memory,
)
from longtake.planner.encoding import choose_tile

_RESULTS = Path(__file__).parent / "results"
_JSON, _MD = _RESULTS / "low_memory.json", _RESULTS / "low_memory.md"
_GUIDE = Path(__file__).resolve().parents[1] / "docs" / "guides" / "families.md"
BEGIN, END = (
    "<!-- small GPUs: written by benchmarks/low_memory.py -->",
    "<!-- end of small GPUs -->",
)
_ASKED = ((8, 16), (8, 32), (12, 32), (12, 64), (16, 32))
"""GiB of GPU memory and of RAM in the guide's table."""
_PHASES = {
    "text": "text encoder",
    "encode": "codec, encoding",
    "model": "sampling",
    "decode": "codec, decoding",
}
_COLUMNS = (
    *("GPU, GiB", "RAM, GiB", "fits", "a step takes, GiB", "RAM that it needs, GiB"),
    *("s a step", "than with all memory", "bits a weight", "blocks", "text encoder", "encoding"),
)
_HEAD = """
# GPUs of 8, 12 and 16 GiB

`python -m benchmarks.low_memory`: LoRA by the recipe of `longtake init RELEASE --memory`, with
micro-batches of one clip, predicted for an RTX 4060, 4070 and 4080 from their data sheets. Nothing
was run on a GPU. Seconds are those of one micro-batch's forward and backward pass; `init` sums up
four for an update. Bits are the mean over the blocks' frozen weights.
"""
_GPUS = {8: "rtx4060", 12: "rtx4070", 16: "rtx4080"}
_HOSTS = (16, 32, 64)
_BITS = {
    "keep": 16.0,
    "stream": 16.0,
    "int8": 8.0,
    "fp8": 8.0,
    "nf4": 4.15,
    "stream-int8": 8.0,
    "stream-nf4": 4.15,
}
_GIB = 2**30

_T5: dict[str, Any] = {
    "d_model": 4096,
    "d_ff": 10240,
    "d_kv": 64,
    "num_heads": 64,
    "num_layers": 24,
    "feed_forward_proj": "gated-gelu",
    "is_gated_act": True,
    "dense_act_fn": "gelu_new",
}
_WAN_TEXT = {"text_encoder": {**_T5, "vocab_size": 256384}}
_WAN_VAE = {"base_dim": 96, "num_res_blocks": 2, "dim_mult": [1, 2, 4, 4]}
_FLUX_VAE = {
    "block_out_channels": [128, 256, 512, 512],
    "layers_per_block": 2,
    "norm_num_groups": 32,
}
_FLUX_PARTS = {
    "text_encoder": {
        "hidden_size": 768,
        "intermediate_size": 3072,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "vocab_size": 49408,
    },
    "text_encoder_2": {**_T5, "vocab_size": 32128},
    "vae": _FLUX_VAE,
}
_QWEN3_4B = {
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "layer_types": ["full_attention"] * 36,
    "tie_word_embeddings": True,
}
_QWEN_VL_7B = {
    "text_config": {
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "vocab_size": 152064,
        "layer_types": ["full_attention"] * 28,
        "rope_parameters": {"rope_type": "default", "mrope_section": [16, 24, 24]},
    },
    "vision_config": {
        "depth": 32,
        "hidden_size": 1280,
        "intermediate_size": 3420,
        "num_heads": 16,
        "out_hidden_size": 3584,
        "fullatt_block_indexes": [7, 15, 23, 31],
    },
}


@dataclass(frozen=True)
class Model:
    """A model of the table: its row of the families' suite, and sizes beyond `Row.real`."""

    row: str
    parts: Mapping[str, Mapping[str, Any]]


MODELS = {
    "Wan 2.1 T2V 1.3B": Model(
        "Wan 2.1 T2V",
        {
            "transformer": {"num_attention_heads": 12, "num_layers": 30, "ffn_dim": 8960},
            **_WAN_TEXT,
            "vae": _WAN_VAE,
        },
    ),
    "Wan 2.1 T2V 14B": Model("Wan 2.1 T2V", {**_WAN_TEXT, "vae": _WAN_VAE}),
    "Wan 2.2 TI2V-5B": Model(
        "Wan 2.2 TI2V-5B",
        {
            **_WAN_TEXT,
            "vae": {**_WAN_VAE, "base_dim": 160, "decoder_base_dim": 256},
        },
    ),
    "FLUX.1": Model("FLUX.1", _FLUX_PARTS),
    "FLUX.1 Kontext": Model("FLUX.1 Kontext", _FLUX_PARTS),
    "FLUX.2 klein 4B": Model("FLUX.2 klein", {"text_encoder": _QWEN3_4B, "vae": _FLUX_VAE}),
    "Z-Image": Model("Z-Image", {"text_encoder": _QWEN3_4B, "vae": _FLUX_VAE}),
    "Qwen-Image": Model("Qwen-Image", {"text_encoder": _QWEN_VL_7B, "vae": _WAN_VAE}),
}


def main() -> None:
    """Plan the models that are named, or all; write what is found and the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", default=list(MODELS))
    for name in parser.parse_args().models:
        rows = [row for gpu in _GPUS for row in _planned(MODELS[name], gpu)]
        sys.stdout.writelines(f"{name} {json.dumps(row)}\n" for row in rows)
        sys.stdout.flush()
        _JSON.write_text(json.dumps({**known(), name: rows}, indent=1) + "\n", encoding="utf-8")
    _write_tables()


def known() -> dict[str, list[dict[str, Any]]]:
    """Return what was found before, by models."""
    found: dict[str, list[dict[str, Any]]] = {}
    if _JSON.exists():
        found = json.loads(_JSON.read_text(encoding="utf-8"))
    return found


def _planned(model: Model, gpu: int) -> list[dict[str, Any]]:
    """Plan one model for one GPU and several sizes of RAM."""
    row = next(each for each in ROWS if each.kind == model.row)
    real = {part: dict(sizes) for part, sizes in (row.real or {}).items()}
    for part, sizes in model.parts.items():
        real[part] = {**real.get(part, {}), **sizes}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        plans._write_release(replace(row, real=real), folder / "release")
        recipe = folder / "mine.toml"
        template = init.template_of_release(str(folder / "release"), "lora")
        text = init.render_recipe(template, f"{gpu}GiB", Path("clips.parquet"), recipe)
        recipe.write_text(text)
        changes = ["training.device=cuda", f"recompute.device={_GPUS[gpu]}"]
        device = device_budget(config.load(recipe, changes))
        step = memory.outline_step(config.load(recipe, changes), device)
        forecast.check_gradients(step)
        sweep = solver.sweep_policies(step.tracer)
        return [_facts(step, sweep, device, gpu, host) for host in _HOSTS]


def _facts(
    step: memory.MetaStep, sweep: solver.PolicySweep, device: DeviceBudget, gpu: int, host: int
) -> dict[str, Any]:
    pinnable = with_host_memory(device, host * _GIB, 1).host_bytes
    beside = memory.pinned_beside_bytes(
        step.components, step.recipe, step.precision, device, step.num_shards
    )
    step.tracer.subject = replace(step.tracer.subject, host_bytes=pinnable - beside)
    best = forecast._find_best(step, sweep, tries_more=False)
    bucket, short = step.batch.bucket, list[str]()
    facts: dict[str, Any] = {
        "gpu": gpu,
        "ram": host,
        "bucket": [bucket.num_frames, bucket.height, bucket.width],
        "tokens": step.num_tokens,
    }
    if best is None:
        rounded = step.tracer.subject.weights[-1]
        least = step.tracer.trace(options_of("all", step.block_names, rounded))
        row = memory.policy_forecast("all", least, step)
        assert device.budget_bytes is not None
        if row.step_peak_bytes > device.budget_bytes:
            short.append(f"step: {row.step_peak_bytes / _GIB:.1f} GiB of GPU memory")
        else:
            needed = (row.host_bytes + beside) / SHARE_OF_HOST_MEMORY / _GIB
            short.append(f"step: {needed:.0f} GiB of RAM, or a larger GPU")
    else:
        row = memory.policy_forecast("best", best.traced, step, sweep.overhead(best.traced))
        held = Counter(each.weights for each in best.options.values())
        bits = sum(_BITS[kind] * count for kind, count in held.items()) / len(best.options)
        facts |= {
            "step_gib": round(row.step_peak_bytes / _GIB, 1),
            "ram_gib": math.ceil((row.host_bytes + beside) / SHARE_OF_HOST_MEMORY / _GIB),
            "seconds": float(f"{best.traced.seconds:.3g}"),
            "slower": round(best.overhead, 3),
            "bits": round(bits, 1),
            "weights": dict(held),
            "activations": dict(Counter(each.activations for each in best.options.values())),
        }
    tile = choose_tile(step.recipe, step.device)  # the recipe has a cache
    step = replace(step, recipe=step.recipe.with_encode_tile(tile.pixels))
    found = phases.forecast_phases(step, None if best is None else best.options)
    for phase in found:
        facts[phase.name] = {"gib": round(phase.peak_bytes / _GIB, 1), "how": phase.how}
        if phase.fits is False:
            short.append(f"{_PHASES[phase.name]}: {phase.peak_bytes / _GIB:.1f} GiB of GPU memory")
        if phase.name == "text":
            facts["text_ram_gib"] = math.ceil(phase.ram_bytes / _GIB)
            if phase.ram_bytes > host * _GIB:
                short.append(f"text encoder: {facts['text_ram_gib']} GiB of RAM")
    return {**facts, "short": short}


def _write_tables() -> None:
    """Write the tables of all results, and the shorter one of the guide."""
    found = known()
    lines = [_HEAD.strip("\n"), ""]
    for name in MODELS:
        rows = found.get(name, [])
        if not rows:
            continue
        frames, height, width = rows[0]["bucket"]
        size = f"{frames} frames of {width}x{height}" if frames > 1 else f"{width}x{height}"
        lines += [f"## {name}, {size}, {rows[0]['tokens']} tokens", ""]
        lines += ["| " + " | ".join(_COLUMNS) + " |", "|" + "---|" * len(_COLUMNS)]
        lines += ["| " + " | ".join(_cells(row, rows)) + " |" for row in rows]
        lines += [""]
    _MD.write_text("\n".join(lines).rstrip("\n") + "\n", encoding="utf-8")
    page = _GUIDE.read_text(encoding="utf-8")
    before, _, rest = page.partition(BEGIN)
    after = rest.partition(END)[2]
    table = "\n".join(guide_lines())
    _GUIDE.write_text(f"{before}{BEGIN}\n\n{table}\n\n{END}{after}", encoding="utf-8")


def _cells(row: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> list[str]:
    begins = [f"{row['gpu']}", f"{row['ram']}"]
    if row["short"]:
        larger = [
            each
            for each in rows
            if not each["short"] and each["gpu"] >= row["gpu"] and each["ram"] >= row["ram"]
        ]
        nearest = min(larger, key=lambda each: (each["gpu"], each["ram"]), default=None)
        fits = "" if nearest is None else f"; {nearest['gpu']} with {nearest['ram']} fits"
        return [*begins, f"no: {', '.join(row['short'])}{fits}", *["-"] * (len(_COLUMNS) - 3)]
    counts = {**row["weights"], **row["activations"]}
    used = [f"{kind} {count}" for kind, count in counts.items() if kind != "keep"]
    ram = max(row["ram_gib"], row["text_ram_gib"])
    return [
        *begins,
        "yes",
        f"{row['step_gib']}",
        f"{ram}",
        f"{row['seconds']:g}",
        f"{row['slower']:+.0%}",
        f"{row['bits']:g}",
        ", ".join(used) or "keep",
        row["text"]["how"] or "whole",
        row["encode"]["how"] or "whole",
    ]


def guide_lines() -> list[str]:
    """Return the guide's table: what the RAM that most have, and twice it, lets each GPU do."""
    head = ["model", "clips", *(f"{gpu} GiB, {ram} GiB of RAM" for gpu, ram in _ASKED)]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for name, rows in known().items():
        frames, height, width = rows[0]["bucket"]
        size = f"{frames} frames of {width}x{height}" if frames > 1 else f"{width}x{height}"
        cells = [
            _guide_cell(row) for at in _ASKED for row in rows if (row["gpu"], row["ram"]) == at
        ]
        lines.append("| " + " | ".join([name, size, *cells]) + " |")
    return lines


def _guide_cell(row: Mapping[str, Any]) -> str:
    if row["short"]:
        return f"no: {row['short'][0]}"
    ram = max(row["ram_gib"], row["text_ram_gib"])
    digits = 0 if row["seconds"] >= 10 else 1
    return (
        f"{row['step_gib']} GiB, {ram} GiB RAM; {row['seconds']:.{digits}f} s "
        f"({row['slower']:+.0%}); {row['bits']:g} bits"
    )


if __name__ == "__main__":
    main()
