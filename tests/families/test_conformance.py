"""Each kind of model does what diffusers' own pipeline does, with releases of random weights.

A row of a `release_` module is a kind of model; what holds of one holds of all.
"""

import copy
import dataclasses
import fnmatch
import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial, partialmethod
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tests.build import block_names, fill_lora, fill_weights, measure_step
from tests.families import plans, share_clips, table
from tests.families.row import Row
from tests.families.rows import ONE_OF_EACH, ROWS
from tests.families.tiny import LONG, SHORT, Tiny, loss_and_gradients, relative
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter

from longtake.config import ModuleSection, Quantization, TrainableSection
from longtake.errors import RecipeError
from longtake.evaluation.export import export
from longtake.fsio import read_json_lines
from longtake.models.base import family
from longtake.models.components import Components, outline
from longtake.models.conditioning import outline_conditioning
from longtake.models.objective import FlowBatch
from longtake.models.quantized import QuantizedLinear
from longtake.models.review import refuse_sharing
from longtake.models.streamed import StreamedBlocks
from longtake.models.trainable import lora_state
from longtake.planner.activation_checkpointing import POLICIES, options_of
from longtake.planner.devices import CPU
from longtake.planner.memory import outline_step
from longtake.planner.record import KEEP
from longtake.training.compiled import compile_blocks

_BY_LENGTH = [row for row in ONE_OF_EACH if family(row.family).text.has_lengths]


@pytest.mark.parametrize("prompt", [SHORT, LONG], ids=["short", "long"])
def test_a_velocity_is_that_of_the_pipeline(tiny: Tiny, prompt: str) -> None:
    steps = tiny.steps(tiny.released, 2, tiny.scale, prompt)
    assert len(steps) == 2
    for step in steps:
        assert relative(tiny.velocity(tiny.sampler, step, prompt), step.velocity) <= 1e-5


@torch.no_grad()
def test_captions_of_unlike_length_in_a_batch_are_each_as_alone(tiny: Tiny) -> None:
    sampler, prompts = tiny.sampler, [SHORT, LONG]
    noisy, sigmas = torch.cat([tiny.noise(1), tiny.noise(2)]), torch.tensor([0.3, 0.8])
    predict = partial(tiny.predict, sampler.components)
    together = predict(noisy, sigmas, tiny.told(sampler, prompts))
    for row, prompt in enumerate(prompts):
        mine = slice(row, row + 1)
        alone = predict(noisy[mine], sigmas[mine], tiny.told(sampler, [prompt]))
        assert relative(together[mine], alone) <= 1e-5
        other = predict(noisy[mine], sigmas[mine], tiny.told(sampler, [prompts[1 - row]]))
        assert relative(other, alone) > 1e-4


def test_gradients_of_captions_of_unlike_length_are_the_sum_of_each_alone(tiny: Tiny) -> None:
    parts, batch = tiny.training(TrainableSection(kind="lora", rank=2)), tiny.batch()
    together, *each = (
        torch.cat([gradient.flatten() for gradient in loss_and_gradients(parts, one).values()])
        for one in (batch, _alone(batch, 0), _alone(batch, 1))
    )
    assert relative(together, each[0] + each[1]) <= 1e-5
    assert relative(together, 2 * each[0]) > 1e-3


@pytest.mark.filterwarnings("ignore")  # torch's compiler looks at .grad of what is no leaf
@pytest.mark.parametrize("tiny", _BY_LENGTH, ids=lambda row: row.kind, indirect=True)
def test_compiled_blocks_take_captions_of_any_length(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program for each length would take minutes each, and then torch's limit of programs."""
    torch._dynamo.reset()
    compiled = CompileCounter()
    whole = partialmethod(nn.Module.compile, backend=compiled, fullgraph=True)
    monkeypatch.setattr(nn.Module, "compile", whole)
    parts = tiny.training(TrainableSection(kind="lora", rank=2))
    compile_blocks(dict.fromkeys(block_names(parts), KEEP), parts, tiny.recipe())
    batch, counts = _alone(tiny.batch(), 1), list[int]()
    width = batch.conditioning["prompt_embeds"].shape[-1]
    for length in (30, 40, 70, 100):
        text = {"prompt_embeds": torch.randn(1, length, width)}
        text["prompt_length"] = torch.tensor([length])
        told = {**batch.conditioning, **text}
        loss_and_gradients(parts, dataclasses.replace(batch, conditioning=told))
        counts.append(int(compiled.frame_count))
    assert counts[0] < counts[1] == counts[-1]


def _alone(batch: FlowBatch, row: int) -> FlowBatch:
    mine = slice(row, row + 1)
    told, sound = (
        {name: each[mine] for name, each in inputs.items()}
        for inputs in (batch.conditioning, batch.audio)
    )
    return FlowBatch(batch.latents[mine], batch.noise[mine], batch.sigmas[mine], told, audio=sound)


def test_an_outline_of_conditioning_has_its_shapes(tiny: Tiny) -> None:
    recipe = tiny.recipe()
    parts, bucket = outline(recipe), recipe.data.buckets[0]
    outlined = outline_conditioning(parts, recipe, bucket, batch_size=2)
    told = tiny.told(tiny.sampler, [SHORT, LONG])
    assert {name: (each.shape, each.dtype) for name, each in outlined.items()} == {
        name: (each.shape, each.dtype) for name, each in told.items()
    }


def test_sampled_latents_are_those_of_the_pipeline(tiny: Tiny) -> None:
    """By the release's own scheduler, and at its guidance."""
    steps = tiny.steps(tiny.released, 4, tiny.row.guidance, LONG)
    experts = tiny.sampler.components.experts
    assert len({*map(tiny.is_low, steps)}) == (1 if experts is None else 2)
    assert relative(tiny.sampled(tiny.sampler, 4), steps[-1].after) <= 1e-5


def test_diffusers_loads_every_key_of_a_lora_and_the_merged_model(
    tiny: Tiny, tmp_path: Path
) -> None:
    sampler = tiny.made(trainable={"kind": "lora", "rank": 2, "alpha": 3.0})
    fill_lora(sampler.components.model)
    export(sampler, tmp_path / "out", "diffusers")
    pipeline = tiny.pipeline()
    released = tiny.first_trained(tiny.steps(pipeline, 2, tiny.scale, LONG))
    ours = tiny.velocity(sampler, released, LONG)
    assert relative(released.velocity, ours) > 1e-3
    folder = "transformer_2" if tiny.is_low(released) else "transformer"
    second = {"load_into_transformer_2": True} if folder == "transformer_2" else {}
    (file,) = (tmp_path / "out").glob("*.safetensors")
    state = load_file(file)
    if hasattr(pipeline, "load_lora_weights"):
        pipeline.load_lora_weights(tmp_path / "out", weight_name=file.name, **second)
    else:
        pipeline.transformer.load_lora_adapter(state, prefix="transformer")
    loaded = {
        name.replace(".default_0.", ".").replace(".default.", "."): weight
        for name, weight in getattr(pipeline, folder).named_parameters()
        if "lora_" in name
    }
    scaled = {name.removeprefix("transformer."): each for name, each in state.items()}
    # To a LoRA of Wan without them diffusers adds zeros for the layers that read a picture.
    assert loaded.keys() >= {name for name in scaled if not name.endswith(".alpha")}
    adapted = tiny.first_trained(tiny.steps(pipeline, 2, tiny.scale, LONG))
    assert relative(adapted.velocity, ours) <= 1e-5
    merged = tiny.first_trained(tiny.steps(tiny.pipeline(tmp_path / "out"), 2, tiny.scale, LONG))
    assert relative(merged.velocity, ours) <= 1e-5


def test_a_lora_for_comfyui_is_read_back_by_diffusers(tiny: Tiny, tmp_path: Path) -> None:
    parts = tiny.training(TrainableSection(kind="lora", rank=2))
    sampler, file = dataclasses.replace(tiny.sampler, components=parts), tmp_path / "x.safetensors"
    if reason := tiny.row.refuses.get("comfyui"):
        with pytest.raises(RecipeError, match=reason):
            export(sampler, file, "comfyui")
        return
    export(sampler, file, "comfyui")
    read = type(tiny.released).lora_state_dict(file)
    wanted = {f"transformer.{name}": each for name, each in lora_state(parts.model).items()}
    assert read.keys() == wanted.keys()
    for down in [name for name in wanted if name.endswith(".lora_A.weight")]:
        up = down.replace(".lora_A.", ".lora_B.")
        # Layers that are one for ComfyUI get a LoRA of their joint rank.
        torch.testing.assert_close(read[up] @ read[down], wanted[up] @ wanted[down])


@pytest.mark.usefixtures("without_onednn")
@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")
@pytest.mark.parametrize("tiny", ONE_OF_EACH, ids=lambda row: row.kind, indirect=True)
def test_memory_of_full_training_is_foreseen(tiny: Tiny) -> None:
    _check_memory_and_gradients(tiny, "full", ["alternate"])


@pytest.mark.usefixtures("without_onednn")
@pytest.mark.parametrize(
    ("kind", "policies"),
    [
        ("lora", ["save-attention"]),
        pytest.param("full", POLICIES, marks=pytest.mark.drill),
        pytest.param("lora", POLICIES, marks=pytest.mark.drill),
    ],
    ids=["lora", "full, all policies", "lora, all policies"],
)
@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")
def test_memory_is_foreseen_and_gradients_reach_all_that_is_trained(
    tiny: Tiny, kind: str, policies: Sequence[str]
) -> None:
    """Under each policy of the blocks; what gets none is in the family's `idle`."""
    _check_memory_and_gradients(tiny, kind, policies)


def _check_memory_and_gradients(tiny: Tiny, kind: str, policies: Sequence[str]) -> None:
    trainable = {"kind": kind, **({"rank": 2} if kind == "lora" else {})}
    recipe = tiny.recipe(trainable=trainable)
    step, real = (outline_step(recipe, CPU) for _ in range(2))
    planned, subject = step.tracer, real.tracer.subject
    fill_weights(subject.model)
    idle = step.components.family.block.idle
    unreached = set(planned.watch_gradients().unreached())
    for policy in policies:
        options = options_of(policy, tuple(planned.subject.blocks))
        trace = planned.trace(options)
        memory = measure_step(subject, options)
        predicted = trace.peak_bytes - trace.weight_bytes
        assert predicted == pytest.approx(memory.peak_bytes, rel=0.01), policy
        without = {
            name
            for name, each in subject.model.named_parameters()
            if each.requires_grad and (each.grad is None or not each.grad.any())
        }
        assert unreached <= without
        expected = {name for name in without if any(fnmatch.fnmatch(name, like) for like in idle)}
        assert without == expected, policy


def test_modules_around_every_block_begin_as_nothing_and_train(tiny: Tiny) -> None:
    """In every block each value that it is given, and each attention's, reaches the velocity."""
    own = ModuleSection(module="tests.families.own_module:Scales")
    parts, batch = tiny.training(TrainableSection(modules={"own": own})), tiny.batch()
    # Frozen too: torch multiplies in another order where a weight requires gradients.
    model = copy.deepcopy(tiny.sampler.components.model).requires_grad_(False)
    alone = dataclasses.replace(tiny.sampler.components, model=model)
    with torch.no_grad():
        noise = torch.cat([tiny.noise(3), tiny.noise(4)])
        plain, within = (
            tiny.predict(each, noise, batch.sigmas, batch.conditioning) for each in (alone, parts)
        )
    assert torch.equal(plain, within)
    gradients = loss_and_gradients(parts, batch)
    trained = [name for name, each in parts.model.named_parameters() if each.requires_grad]
    assert len(trained) == 4 * len(parts.family.blocks(parts.model))
    assert [name for name in trained if name not in gradients or not gradients[name].any()] == []


_LORA = TrainableSection(kind="lora", rank=2)


def test_streamed_blocks_have_the_gradients_of_others(tiny: Tiny) -> None:
    parts, batch = tiny.training(_LORA), tiny.batch()
    plain = loss_and_gradients(parts, batch)
    assert len(plain) > 2
    streamed = _streamed(tiny.training(_LORA), batch)
    torch.testing.assert_close(streamed, plain, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("kind", "error"), [("int8", 0.02), pytest.param("nf4", 0.25, marks=pytest.mark.drill)]
)
def test_quantised_blocks_have_the_gradients_of_the_weights_that_they_stand_for(
    tiny: Tiny, kind: Quantization, error: float
) -> None:
    """Streamed too; the gradients are near those of the release's weights."""
    if reason := tiny.row.refuses.get(kind):
        with pytest.raises(RecipeError, match=reason):
            tiny.training(_LORA, kind)
        return
    batch, parts = tiny.batch(), tiny.training(_LORA, kind)
    quantised = loss_and_gradients(parts, batch)
    twin = tiny.training(_LORA)
    exact = loss_and_gradients(twin, batch)
    layers = {
        name: each
        for name, each in parts.model.named_modules()
        if isinstance(each, QuantizedLinear)
    }
    assert len(layers) >= 4 * len(parts.family.blocks(parts.model))
    for name, layer in layers.items():
        twin.model.get_submodule(name).weight.data = layer.weight
    expected = loss_and_gradients(twin, batch)
    assert quantised.keys() == expected.keys() == exact.keys()
    for name, gradient in quantised.items():
        assert relative(gradient, expected[name]) <= 1e-5, name
    assert 0 < relative(_joined(quantised), _joined(exact)) <= error
    torch.testing.assert_close(_streamed(parts, batch), quantised, rtol=0, atol=0)


def _streamed(parts: Components, batch: FlowBatch) -> dict[str, Tensor]:
    StreamedBlocks(parts.family.blocks(parts.model), torch.device("cpu"))
    return loss_and_gradients(parts, batch)


def _joined(tensors: Mapping[str, Tensor]) -> Tensor:
    return torch.cat([each.flatten() for name, each in tensors.items() if name])


@pytest.mark.slow
def test_two_ranks_that_share_a_clip_are_as_one(
    tiny_of: Callable[[Row], Tiny], run_on_two_ranks: Callable[..., str], tmp_path: Path
) -> None:
    """Velocity, loss and all gradients of each kind, by the same two processes."""
    shared = [row for row in ROWS if "context" not in row.refuses]
    for row in shared:
        with row.within():
            share_clips.write(tiny_of(row), tmp_path)
    run_on_two_ranks(share_clips.__file__, tmp_path)
    rows = list(read_json_lines(tmp_path / "deviations.jsonl"))
    assert {each["kind"] for each in rows} == {row.kind for row in shared}
    for each in rows:
        assert max(each["velocity"], each["loss"], each["gradients"]) <= 1e-5, each


def test_sharing_clips_is_refused_where_a_row_says_so(tiny: Tiny) -> None:
    parts, recipe = tiny.sampler.components, tiny.recipe(parallel={"context": 2})
    if reason := tiny.row.refuses.get("context"):
        with pytest.raises(RecipeError, match=f"the family {tiny.row.family} cannot: {reason}"):
            refuse_sharing(parts, recipe)
    else:
        refuse_sharing(parts, recipe)


def test_the_guide_has_a_row_for_each_kind() -> None:
    """`python -m tests.families.table` writes them."""
    assert table.lines(table.page()) == table.expected()


def test_plans_of_the_guide_are_for_the_sizes_of_the_rows() -> None:
    """`python -m tests.families.table --plans MODEL` plans one anew."""
    planned = {name: each["real"] for name, each in plans.known().items()}
    rows = {row.kind: json.loads(json.dumps(row.real)) for row in ROWS}
    assert planned == {name: rows.get(name) for name in planned}
