"""What three objectives change: a training adapter, preferences, and alignment with features.

    python -m benchmarks.objectives [--seeds 0 1 2] [--folder FOLDER] [--only PART...]

All three train a small Wan on the clips of the demo (`longtake demo`), without an autoencoder.

    adapter    The model is trained, distilled for four steps (examples/objectives/few_steps.py),
               and given a training adapter: a LoRA that learns the distilled model back to flow
               matching. Then each seed trains a LoRA of one subject on the distilled model, with
               the adapter and without. Distances are those of four-step samples of other captions
               from the samples of the model before distillation, in many steps from equal noise.
    pairs      Each seed trains a LoRA of Diffusion-DPO (examples/objectives/preference.py) on pairs
               in which the brighter of two clips was preferred.
    alignment  Each seed trains the model from random weights, with the features of
               examples/objectives/alignment.py and without.

Writes benchmarks/results/objectives.md; half an hour on two idle CPU cores.
"""

import argparse
import json
import shutil
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
from diffusers import FlowMatchEulerDiscreteScheduler, WanPipeline
from numpy.typing import NDArray
from rich.console import Console
from torch import Tensor

from longtake import config
from longtake.data.encode import write_video
from longtake.data.index import index
from longtake.demo import oracle, shapes
from longtake.evaluation.export import export
from longtake.evaluation.held_out import HeldOut
from longtake.flow.path import velocity_from_latents
from longtake.models.trainable import plain_copy
from longtake.run_dir import RunDirectory
from longtake.sampling.presets import Request, settings_for
from longtake.sampling.sampler import Sampler, load_sampler
from longtake.training.train import train

_RESULTS = Path(__file__).parent / "results" / "objectives.md"
_HEAD = """
# Objectives on the demo's clips

`python -m benchmarks.objectives`: a Wan of 3 blocks of width 96, three seeds, one core; means, and
each seed in brackets. What a sample shows is read from its pixels, as the demo does. Distances are
the root of the mean squared difference of pixels, as a share of their range, from samples of the
same noise.
"""
_TITLES = {
    "adapter": "A distilled model that is trained further, with and without a training adapter",
    "pairs": "Diffusion-DPO on pairs of a bright and a dim clip",
    "alignment": "Training from random weights, with and without alignment with features (REPA)",
}
_PARTS = tuple(_TITLES)
_NUM_CLIPS, _NUM_HELD_OUT, _NUM_SAMPLES, _BATCH = 1500, 48, 96, 48
_STEPS, _SHIFT, _GUIDANCE, _FEW = 20, 9.0, 2.0, 4
_DIMMED = 0.55
_GRID = 4  # tokens of a clip along frames, rows and columns
_MODEL = {
    "num_layers": 3,
    "num_attention_heads": 3,
    "attention_head_dim": 32,
    "ffn_dim": 384,
    "freq_dim": 64,
    "patch_size": [2, 8, 8],
}
_TEXT = {"d_model": 96, "d_kv": 32, "d_ff": 192, "num_layers": 1, "num_heads": 3}


def main() -> None:
    """Measure each part on every seed; print and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--folder", type=Path, default=Path("runs/objectives"))
    parser.add_argument("--only", nargs="+", choices=_PARTS, default=list(_PARTS))
    asked = parser.parse_args()
    world = World(asked.folder.absolute())
    lines = _HEAD.strip().splitlines()
    for part in asked.only:
        lines += ["", f"## {_TITLES[part]}", "", *_MEASURES[part](world, asked.seeds)]
    text = "\n".join(lines) + "\n"
    _RESULTS.write_text(text, encoding="utf-8")
    print(text)  # noqa: T201


class WanTransformer3DModel(diffusers.WanTransformer3DModel):  # type: ignore[misc]
    """Wan whose network predicts the clean clip, as tubelet's does: it is narrower than noise."""

    def forward(self, hidden_states: Tensor, timestep: Tensor, *args: Any, **more: Any) -> Any:
        predicted = super().forward(hidden_states, timestep, *args, **more)[0]
        return (velocity_from_latents(hidden_states, predicted, timestep / 1000),)


class World:
    """The demo's clips, bright and dim, their features, and a model that was trained on all."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.bright, self.all = folder / "bright.parquet", folder / "all.parquet"
        self.held_out = folder / "held_out.parquet"
        if not self.held_out.exists():
            self._write()

    def _write(self) -> None:
        trained, held_out = shapes.training_captions(), shapes.held_out_captions()
        rng = np.random.default_rng(0)
        drawn = [trained[each % len(trained)] for each in range(_NUM_CLIPS)]
        self._draw("bright", drawn, rng)
        self._draw("held", [held_out[each % len(held_out)] for each in range(_NUM_HELD_OUT)], rng)
        for name, folders in {
            "bright": ["bright"],
            "all": ["bright", "dim_bright"],
            "held_out": ["held"],
        }.items():
            captions = self.folder / f"{name}.jsonl"
            lines = [(self.folder / f"{each}.jsonl").read_text() for each in folders]
            captions.write_text("".join(lines))
            out = self.folder / f"{name}.parquet"
            index([self.folder / each for each in folders], captions=captions, out=out)

    def _draw(self, name: str, captions: Sequence[str], rng: np.random.Generator) -> None:
        """Write clips, and beside them each clip dimmed, and its features."""
        for folder in (name, f"dim_{name}", "features"):
            (self.folder / folder).mkdir(parents=True, exist_ok=True)
        lines: dict[str, list[str]] = {name: [], f"dim_{name}": []}
        for number, caption in enumerate(captions):
            shown, file = shapes.parse_caption(caption), f"{name}_{number:05d}"
            frames = shapes.render(shown.shape, shown.colour, shown.direction, rng)
            dim = np.rint(frames * _DIMMED).astype(np.uint8)
            for folder, pixels in ((name, frames), (f"dim_{name}", dim)):
                write_video(self.folder / folder / f"{file}.mp4", pixels, shapes.FPS)
                path = str(self.folder / folder / f"{file}.mp4")
                lines[folder].append(json.dumps({"video": path, "caption": caption}))
            np.save(self.folder / "features" / f"{file}.npy", _features(frames, shown))
        for folder, each in lines.items():
            (self.folder / f"{folder}.jsonl").write_text("\n".join(each) + "\n")

    def run(self, name: str, seed: int, *sections: dict[str, Any]) -> Sampler:
        """Train a run, or take it from an earlier call, and load what it trained."""
        values: dict[str, Any] = {
            "out": str(self.folder / name),
            "seed": seed,
            "data": {
                "catalog": str(self.all),
                "buckets": [{"num_frames": 8, "height": 32, "width": 32}],
                "windows": 1,
                "cache": str(self.folder / "cache"),
            },
            "model": {
                "family": "wan",
                "transformer_class": "benchmarks.objectives:WanTransformer3DModel",
            },
            "codec": {"kind": "pixels"},
            "text": {"kind": "transformers", "max_tokens": 16},
            "flow": {"timestep_sampling": "logit_normal", "logit_mean": 2.0},
            "optimizer": {
                "learning_rate": 3e-3,
                "betas": [0.9, 0.95],
                "warmup_steps": 30,
                "schedule": "linear",
            },
            "training": {"global_batch_size": 32, "steps": 300},
            "sampling": {"num_inference_steps": _STEPS, "shift": _SHIFT, "guidance_scale": 1.0},
            "evaluation": {"held_out": str(self.held_out)},
            "watch": {"enabled": False},
            "tracking": {"tensorboard": False},
        }
        for section in sections:
            for key, value in section.items():
                values[key] = {**values.get(key, {}), **value}
        recipe, begun = config.parse(values, source=name), time.monotonic()
        train(recipe, Console(quiet=True))
        print(f"{name}: {time.monotonic() - begun:.0f} s", flush=True)  # noqa: T201
        return load_sampler(recipe.out, device="cpu")

    def release(self, name: str, sampler: Sampler) -> dict[str, Any]:
        """Write a trained model as a release; return a recipe's sections that begin with it."""
        folder, parts = self.folder / name, sampler.components
        if not folder.exists():
            aside = self.folder / f"{name}.part"
            shutil.rmtree(aside, ignore_errors=True)
            WanPipeline(
                transformer=plain_copy(parts.model),
                vae=None,
                scheduler=FlowMatchEulerDiscreteScheduler(shift=_SHIFT),
                **parts.text.pipeline_parts(),
            ).save_pretrained(aside)
            aside.rename(folder)
        return {"model": {"pretrained": str(folder)}, "text": {"pretrained": str(folder)}}

    def base(self) -> tuple[Sampler, dict[str, Any]]:
        """Train the model on all clips, and write it as a release."""
        sampler = self.run(
            "base",
            0,
            {"model": {"config": _MODEL}, "text": {"config": _TEXT}},
            {"optimizer": {"kind": "muon"}, "training": {"steps": 1500}, "ema": {"decay": 0.99}},
        )
        return sampler, self.release("base_release", sampler)


def _features(frames: NDArray[np.uint8], shown: shapes.Combination) -> NDArray[np.float32]:
    """What each token's part of a clip shows, as a network that understands clips would tell.

    The object's share of the part, its centre from there, and its shape, colour and direction.
    """
    objects = frames.max(axis=3) > 96
    grid = np.stack(np.meshgrid(*(np.arange(_GRID),) * 3, indexing="ij"), axis=-1)
    parts = objects.reshape(_GRID, 2, _GRID, 8, _GRID, 8).mean(axis=(1, 3, 5))
    centres = (parts[..., None] * grid).sum(axis=(1, 2)) / parts.sum(axis=(1, 2))[:, None]
    away = (grid[..., 1:] - centres[:, None, None, 1:]) / _GRID
    names = (
        [each == shown.shape for each in shapes.SHAPES]
        + [each == shown.colour for each in shapes.COLOURS]
        + [each == shown.direction for each in shapes.DIRECTIONS]
    )
    known = np.broadcast_to(np.array(names, dtype=np.float64), (*parts.shape, len(names)))
    features = np.concatenate([parts[..., None], away, known * (parts[..., None] > 0)], axis=-1)
    return features.astype(np.float32).reshape(-1)


# --- Measures ---------------------------------------------------------------------------------


def _samples(
    sampler: Sampler, steps: int, guidance: float, captions: Sequence[str]
) -> NDArray[np.uint8]:
    """Sample a video [F, H, W, 3] of each caption, each from a noise of its own."""
    settings, bucket = settings_for(
        sampler.recipe, num_inference_steps=steps, guidance_scale=guidance, shift=_SHIFT
    )
    requests = [Request(caption, seed) for seed, caption in enumerate(captions)]
    batches = (requests[at : at + _BATCH] for at in range(0, len(requests), _BATCH))
    return np.concatenate([sampler.sample(each, settings, bucket) for each in batches])


def _captions() -> list[str]:
    known = shapes.held_out_captions() + shapes.training_captions()
    return [known[each * len(known) // _NUM_SAMPLES] for each in range(_NUM_SAMPLES)]


def _share(videos: NDArray[np.uint8], captions: Sequence[str]) -> float:
    """Return the share of videos that show their caption, in percent."""
    shown = [oracle.shows(*each) for each in zip(videos, captions, strict=True)]
    return 100 * sum(shown) / len(shown)


def _distance(videos: NDArray[np.uint8], others: NDArray[np.uint8]) -> float:
    """Return the root of the mean squared difference of pixels, as a share of their range."""
    return float(np.sqrt(np.square((videos / 255.0) - (others / 255.0)).mean()))


def _brightness(videos: NDArray[np.uint8]) -> float:
    """Return how bright the videos' objects are, from 0 to 1."""
    brightest = videos.max(axis=4).reshape(len(videos), -1)
    return float(np.quantile(brightest, 0.98, axis=1).mean() / 255)


def _spread(values: Sequence[float], digits: int = 3) -> str:
    listed = ", ".join(f"{each:.{digits}f}" for each in values)
    return f"{statistics.mean(values):.{digits}f} ({listed})"


# --- Parts ------------------------------------------------------------------------------------


def _lora(rank: int, rate: float = 1e-3) -> dict[str, Any]:
    return {
        "trainable": {"kind": "lora", "rank": rank, "targets": ["*"]},
        "optimizer": {"learning_rate": rate},
    }


def _adapter(world: World, seeds: Sequence[int]) -> list[str]:
    base, released = world.base()
    captions = _captions()
    wanted = _samples(base, _STEPS, _GUIDANCE, captions)
    options = {"steps": _FEW, "shift": _SHIFT, "guidance": _GUIDANCE}
    distilled = world.run(
        "distilled",
        0,
        released,
        _lora(64),
        {"flow": {"timestep_sampling": "uniform"}, "training": {"steps": 600}},
        {"objective": {"kind": "examples.objectives.few_steps:FewSteps", "options": options}},
    )
    few = world.release("distilled_release", distilled)
    adapter = world.run("adapter", 0, few, _lora(32), {"training": {"steps": 600}})
    file = world.folder / "training_adapter.safetensors"
    if not file.exists():
        export(adapter, file, "comfyui")
    rows = {
        f"the model, {_STEPS} steps with guidance": [wanted],
        f"the model, {_FEW} steps": [_samples(base, _FEW, 1.0, captions)],
        f"distilled, {_FEW} steps": [_samples(distilled, _FEW, 1.0, captions)],
    }
    for name, kind, more in (
        ("without the training adapter", "alone", {}),
        ("with the training adapter", "adapted", {"model": {"training_adapter": str(file)}}),
    ):
        rows[f"distilled, then a LoRA {name}"] = [
            _samples(
                world.run(f"further_{kind}_{seed}", seed, few, _lora(16, 3e-4), more),
                _FEW,
                1.0,
                captions,
            )
            for seed in seeds
        ]
    return [
        "| samples | distance from the model | show their caption, % |",
        "|---|---|---|",
        *(
            f"| {name} | {_spread([_distance(each, wanted) for each in videos])} | "
            f"{_spread([_share(each, captions) for each in videos], 1)} |"
            for name, videos in rows.items()
        ),
    ]


def _pairs(world: World, seeds: Sequence[int]) -> list[str]:
    base, released = world.base()
    captions = _captions()
    before = _samples(base, _STEPS, _GUIDANCE, captions)
    worse = {"kind": "video", "path": "../dim_bright/{stem}.mp4"}
    pairs = {
        "data": {"catalog": str(world.bright), "conditioning": {"worse": worse}},
        "training": {"steps": 100},
        "objective": {
            "kind": "examples.objectives.preference:Preference",
            "inputs": ["worse"],
            "options": {"beta": 2000.0},
        },
    }
    after = [
        _samples(
            world.run(f"pairs_{seed}", seed, released, _lora(16, 1e-4), pairs),
            _STEPS,
            _GUIDANCE,
            captions,
        )
        for seed in seeds
    ]
    return [
        "| samples | brightness of the object | show their caption, % |",
        "|---|---|---|",
        *(
            f"| {name} | {_spread([_brightness(each) for each in videos])} | "
            f"{_spread([_share(each, captions) for each in videos], 1)} |"
            for name, videos in (("before", [before]), ("after Diffusion-DPO", after))
        ),
    ]


def _alignment(world: World, seeds: Sequence[int]) -> list[str]:
    captions, width = _captions(), 3 + len((*shapes.SHAPES, *shapes.COLOURS, *shapes.DIRECTIONS))
    features = {"kind": "numbers", "path": "../features/{stem}.npy", "width": _GRID**3 * width}
    module = {"module": "examples.objectives.alignment:Projector", "blocks": ["blocks.1"]}
    aligned = {
        # A projector at this rate makes updates four times as large once it finds the features.
        "guard": {"mode": "report"},
        "data": {"conditioning": {"features": features}},
        "trainable": {
            "kind": "full",
            "modules": {"align": {**module, "options": {"feature_width": width}}},
        },
        "objective": {
            "kind": "examples.objectives.alignment:Alignment",
            "inputs": ["features"],
        },
    }
    model = {
        "data": {"catalog": str(world.bright)},
        "model": {"config": _MODEL},
        "text": {"config": _TEXT},
        "optimizer": {"kind": "muon"},
        "training": {"steps": 400},
    }
    lines = []
    for name, kind, more in (
        ("flow matching alone", "unaligned", {}),
        ("with alignment", "aligned", aligned),
    ):
        samplers = [world.run(f"{kind}_{seed}", seed, model, more) for seed in seeds]
        losses = [_held_out(each) for each in samplers]
        shares = [
            _share(_samples(each, _STEPS, _GUIDANCE, captions), captions) for each in samplers
        ]
        lines.append(f"| {name} | {_spread(losses, 4)} | {_spread(shares, 1)} |")
    return ["| trained by | held-out loss | show their caption, % |", "|---|---|---|", *lines]


def _held_out(sampler: Sampler) -> float:
    opened = HeldOut.open(sampler.recipe, RunDirectory(sampler.recipe.out))
    assert opened is not None
    return opened.loss(sampler)["mean"]


_MEASURES = {"adapter": _adapter, "pairs": _pairs, "alignment": _alignment}

if __name__ == "__main__":
    main()
