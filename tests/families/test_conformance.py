"""Each kind of model does what diffusers' own pipeline does, with releases of random weights.

A row of a `release_` module is a kind of model; what holds of one holds of all.
"""

import dataclasses
import fnmatch
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import diffusers
import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from tests.build import fill_weights, measure_step
from tests.families import table
from tests.families.row import Asked, KeepsLatents, Row
from tests.families.rows import ROWS
from torch import Tensor, nn

from longtake import config
from longtake.config import Recipe
from longtake.errors import ModelError
from longtake.evaluation.export import export
from longtake.models import build
from longtake.models.base import Conditioning, family
from longtake.planner.activation_checkpointing import POLICIES, options_of
from longtake.planner.devices import CPU
from longtake.planner.memory import outline_step
from longtake.sampling.presets import Request, settings_for
from longtake.sampling.sampler import Sampler

_SHORT = "a red circle"
_LONG = "a \u201cred\u201d  circle, moving &amp; it\u2019s up, a blue square moving left"


def _relative(ours: Tensor, theirs: Tensor) -> float:
    """Norm of the difference over the norm; 1e-5 is the rounding of fp32."""
    assert ours.shape == theirs.shape
    return float((ours - theirs).norm() / theirs.norm())


class _Step(NamedTuple):
    """One call of a pipeline's scheduler."""

    velocity: Tensor
    sigma: Tensor  # [1]
    noisy: Tensor
    after: Tensor


class _Tiny:
    """A tiny release, what longtake makes of it, and its own pipeline."""

    def __init__(self, row: Row, folder: Path) -> None:
        self.row, self.folder = row, folder
        torch.manual_seed(0)
        row.make(folder / "release")
        random = np.random.default_rng(0)
        for number in range(2):
            pixels = random.integers(0, 256, (*row.bucket[1:], 3), np.uint8)
            Image.fromarray(pixels).save(folder / f"{number}.png")
        self.sampler = self.made()

    def recipe(self, **sections: Any) -> Recipe:
        release, (frames, height, width) = str(self.folder / "release"), self.row.bucket
        picture = {"kind": "picture", "path": "../{stem}.png"}
        values: dict[str, Any] = {
            "out": str(self.folder / "run"),
            "data": {
                "catalog": "none.parquet",
                "buckets": [{"num_frames": frames, "height": height, "width": width}],
                "conditioning": dict.fromkeys(self.row.pictures, picture),
            },
            "model": {"family": self.row.family, "pretrained": release},
            "codec": {"kind": "autoencoder", "pretrained": release},
            "training": {"steps": 1, "global_batch_size": 2, "device": "cpu", "precision": "fp32"},
        }
        text = {"kind": "transformers", "pretrained": release, "dtype": "fp32"}
        for name, keys in {"text": text, **self.row.keys, **sections}.items():
            values[name] = values.get(name, {}) | keys
        values["text"] = text | values["text"]
        return config.parse(values, source="test")

    def made(self, **sections: Any) -> Sampler:
        recipe = self.recipe(**sections)
        parts = build.assemble(recipe, (), None)
        parts.model.eval()
        return Sampler(parts, recipe, 0, torch.device("cpu"), "fp32")

    def pipeline(self, folder: Path | None = None) -> Any:
        pipeline = diffusers.DiffusionPipeline.from_pretrained(folder or self.folder / "release")
        pipeline.set_progress_bar_config(disable=True)
        return pipeline

    @property
    def scale(self) -> float:
        """At which a pipeline makes one pass: of a distilled model any, of others 1."""
        parts = self.sampler.components
        return self.row.guidance if parts.family.distils_guidance(parts.model) else 1.0

    def pictures(self, number: int) -> dict[str, Path]:
        return dict.fromkeys(self.row.pictures, self.folder / f"{number}.png")

    def told(self, sampler: Sampler, prompts: Sequence[str], number: int = 0) -> Conditioning:
        """What the model is told in sampling."""
        bucket = sampler.recipe.data.buckets[0]
        requests = [Request(prompt, 3, self.pictures(number)) for prompt in prompts]
        return sampler._guidance(requests, bucket, self.scale, "").conditional

    def noise(self, seed: int) -> Tensor:
        shape = build.latent_shape(self.sampler.components.codec, self.recipe().data.buckets[0])
        return torch.randn(tuple(shape), generator=torch.Generator().manual_seed(seed))[None]

    def steps(self, pipeline: Any, num_steps: int, scale: float, prompt: str) -> list[_Step]:
        """What the pipeline's own call hands to its scheduler, and gets."""
        frames, height, width = self.row.bucket
        pictures = {
            name: Image.open(path).convert("RGB") for name, path in self.pictures(0).items()
        }
        asked = Asked(
            pipeline, prompt, self.noise(3), frames, height, width, num_steps, scale, pictures
        )
        own, found = pipeline.scheduler.step, list[_Step]()

        def step(velocity: Tensor, time: Tensor, noisy: Tensor, *args: Any, **options: Any) -> Any:
            result = own(velocity, time, noisy, *args, **options)
            tensors = (
                self.row.unpack(asked, each.clone()) for each in (velocity, noisy, result[0])
            )
            mine, before, after = tensors
            found.append(_Step(mine, torch.tensor([float(time) / 1000]), before, after))
            return result

        pipeline.scheduler.step = step
        try:
            given = {"num_inference_steps": num_steps, "output_type": "latent"}
            result = pipeline(**given, **self.row.call(asked))[0]
        finally:
            pipeline.scheduler.step = own
        if self.row.returns_latents:
            found[-1] = found[-1]._replace(after=result)
        return found

    @torch.no_grad()
    def velocity(self, sampler: Sampler, step: _Step, prompt: str) -> Tensor:
        told = self.told(sampler, [prompt])
        return sampler.components.predict_velocity(step.noisy, step.sigma, told)


@pytest.fixture(scope="module", params=ROWS, ids=lambda row: row.kind)
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> _Tiny:
    return _Tiny(request.param, tmp_path_factory.mktemp("release"))


@pytest.mark.parametrize("prompt", [_SHORT, _LONG], ids=["short", "long"])
def test_a_velocity_is_that_of_the_pipeline(tiny: _Tiny, prompt: str) -> None:
    steps = tiny.steps(tiny.pipeline(), 2, tiny.scale, prompt)
    assert len(steps) == 2
    for step in steps:
        assert _relative(tiny.velocity(tiny.sampler, step, prompt), step.velocity) <= 1e-5


@torch.no_grad()
def test_captions_of_unlike_length_in_a_batch_are_each_as_alone(tiny: _Tiny) -> None:
    sampler, prompts = tiny.sampler, [_SHORT, _LONG]
    noisy, sigmas = torch.cat([tiny.noise(1), tiny.noise(2)]), torch.tensor([0.3, 0.8])
    predict = sampler.components.predict_velocity
    together = predict(noisy, sigmas, tiny.told(sampler, prompts))
    for row, prompt in enumerate(prompts):
        mine = slice(row, row + 1)
        alone = predict(noisy[mine], sigmas[mine], tiny.told(sampler, [prompt]))
        assert _relative(together[mine], alone) <= 1e-5
        other = predict(noisy[mine], sigmas[mine], tiny.told(sampler, [prompts[1 - row]]))
        assert _relative(other, alone) > 1e-4


@torch.no_grad()
def test_pictures_change_the_answer(tiny: _Tiny) -> None:
    if not tiny.row.pictures:
        assert tiny.row.task == "text"
        return
    noisy, sigmas = tiny.noise(1), torch.tensor([0.7])
    one, other = (
        tiny.sampler.components.predict_velocity(
            noisy, sigmas, tiny.told(tiny.sampler, [_SHORT], number)
        )
        for number in range(2)
    )
    assert _relative(one, other) > 1e-4


def test_an_outline_of_conditioning_has_its_shapes(tiny: _Tiny) -> None:
    recipe = tiny.recipe()
    parts, bucket = build.outline(recipe), recipe.data.buckets[0]
    outlined = build.outline_conditioning(parts, recipe, bucket, batch_size=2)
    told = tiny.told(tiny.sampler, [_SHORT, _LONG])
    assert {name: (each.shape, each.dtype) for name, each in outlined.items()} == {
        name: (each.shape, each.dtype) for name, each in told.items()
    }


def test_sampled_latents_are_those_of_the_pipeline(tiny: _Tiny) -> None:
    """By the release's own scheduler, and at its guidance."""
    codec = KeepsLatents(tiny.sampler.components.codec)
    parts = dataclasses.replace(tiny.sampler.components, codec=codec)
    sampler = dataclasses.replace(tiny.sampler, components=parts)
    settings, bucket = settings_for(
        sampler.recipe,
        num_inference_steps=4,
        solver=tiny.row.solver,
        guidance_scale=tiny.row.guidance,
    )
    sampler.sample([Request(_LONG, 3, tiny.pictures(0))], settings, bucket)
    *_, last = tiny.steps(tiny.pipeline(), 4, tiny.row.guidance, _LONG)
    assert _relative(codec.latents[0], last.after) <= 1e-5


def test_diffusers_loads_every_key_of_a_lora_and_the_merged_model(
    tiny: _Tiny, tmp_path: Path
) -> None:
    sampler = tiny.made(trainable={"kind": "lora", "rank": 2, "alpha": 3.0})
    generator = torch.Generator().manual_seed(5)
    for name, weight in sampler.components.model.named_parameters():
        if "lora_" in name:
            weight.data = torch.randn(weight.shape, generator=generator) / 8
    export(sampler, tmp_path / "out", "diffusers")
    pipeline = tiny.pipeline()
    released, _ = tiny.steps(pipeline, 2, tiny.scale, _LONG)
    ours = tiny.velocity(sampler, released, _LONG)
    assert _relative(released.velocity, ours) > 1e-3
    state = load_file(tmp_path / "out" / "pytorch_lora_weights.safetensors")
    if hasattr(pipeline, "load_lora_weights"):
        pipeline.load_lora_weights(tmp_path / "out")
    else:
        pipeline.transformer.load_lora_adapter(state, prefix="transformer")
    loaded = {
        name.replace(".default_0.", ".").replace(".default.", "."): weight
        for name, weight in pipeline.transformer.named_parameters()
        if "lora_" in name
    }
    scaled = {name.removeprefix("transformer."): each for name, each in state.items()}
    # To a LoRA of Wan without them diffusers adds zeros for the layers that read a picture.
    assert loaded.keys() >= {name for name in scaled if not name.endswith(".alpha")}
    adapted, _ = tiny.steps(pipeline, 2, tiny.scale, _LONG)
    assert _relative(adapted.velocity, ours) <= 1e-5
    merged, _ = tiny.steps(tiny.pipeline(tmp_path / "out"), 2, tiny.scale, _LONG)
    assert _relative(merged.velocity, ours) <= 1e-5


@pytest.mark.usefixtures("without_onednn")
@pytest.mark.parametrize(
    ("kind", "policies"),
    [
        ("full", ["alternate"]),
        ("lora", ["save-attention"]),
        pytest.param("full", POLICIES, marks=pytest.mark.drill),
        pytest.param("lora", POLICIES, marks=pytest.mark.drill),
    ],
    ids=["full", "lora", "full, all policies", "lora, all policies"],
)
@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")
def test_memory_is_foreseen_and_gradients_reach_all_that_is_trained(
    tiny: _Tiny, kind: str, policies: Sequence[str]
) -> None:
    """Under each policy of the blocks; what gets none is in the family's `idle`."""
    trainable = {"kind": kind, **({"rank": 2} if kind == "lora" else {})}
    recipe = tiny.recipe(trainable=trainable)
    step, real = (outline_step(recipe, CPU) for _ in range(2))
    planned, subject = step.tracer, real.tracer.subject
    fill_weights(subject.model)
    idle = step.components.family.idle
    for policy in policies:
        options = options_of(policy, tuple(planned.subject.blocks))
        trace = planned.trace(options)
        memory = measure_step(subject, options)
        predicted = trace.peak_bytes - trace.weight_bytes
        assert predicted == pytest.approx(memory.peak_bytes, rel=0.01), policy
        without = _without_gradient(subject.model)
        assert {*trace.unreached} <= without
        assert not [name for name in without if not _is_like(name, idle)], policy


def _without_gradient(model: nn.Module) -> set[str]:
    """Names of trainable parameters whose gradient is missing, or zero."""
    return {
        name
        for name, each in model.named_parameters()
        if each.requires_grad and (each.grad is None or not each.grad.any())
    }


def _is_like(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch.fnmatch(name, pattern) for pattern in patterns)


def test_the_checkpoint_of_another_kind_is_refused_by_name(tiny: _Tiny, tmp_path: Path) -> None:
    others = [row for row in ROWS if _transformer(row.family) != _transformer(tiny.row.family)]
    others[0].make(tmp_path / "other")
    recipe = tiny.recipe(model={"pretrained": str(tmp_path / "other")})
    wanted = f'set model.family = "{others[0].family}"; it is "{tiny.row.family}"'
    with pytest.raises(ModelError, match=wanted):
        build.outline(recipe)


def _transformer(name_of_family: str) -> str:
    name: str = getattr(family(name_of_family), "transformer_class")  # noqa: B009
    return name


def test_the_guide_has_a_row_for_each_kind() -> None:
    """`python -m tests.families.table` writes them."""
    assert table.lines(table.page()) == table.expected()
