"""A recipe's parts: one seed, one model, a plan of it before, and what does not fit refused."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from tests.build import TINY_WAN
from tests.models.tiny import KONTEXT, write_configs
from torch import Tensor, nn

from longtake import config
from longtake.config import Recipe
from longtake.errors import ModelError, RecipeError
from longtake.flow.shift import MuLine, ShiftRule
from longtake.flow.timesteps import sample_sigmas, stretched_logit_normal
from longtake.models.base import family, latent_shape
from longtake.models.components import (
    Components,
    Kinds,
    assemble,
    fetch,
    keep_kinds,
    outline,
    text_section,
    with_exact_weights,
)
from longtake.models.conditioning import training_conditioning
from longtake.models.numerics import Precision, count_weights
from longtake.models.objective import FlowBatch, FlowMatching, flow_losses, training_flops
from longtake.models.pretrained import quiet
from longtake.models.quantized import QuantizedLinear
from longtake.models.review import refuse_sharing, review_model
from longtake.models.trainable import adapter_layers

_CAPTIONS = ["a red ball rolls left", "a blue square"]
_PICTURE = {"kind": "picture", "path": "{stem}.png"}
_TUBELET: dict[str, Any] = {
    "out": "run",
    "data": {
        "catalog": "catalog.parquet",
        "buckets": [{"num_frames": 8, "height": 16, "width": 16}],
    },
    "model": {"family": "tubelet", "config": {"hidden_size": 24, "num_heads": 2}},
    "training": {"steps": 1, "global_batch_size": 2},
}


def _recipe(values: dict[str, Any] = KONTEXT, **sections: dict[str, Any]) -> Recipe:
    merged = {key: values.get(key, {}) | keys for key, keys in sections.items()}
    return config.parse(values | merged, source="test")


def _base(parts: Components) -> dict[str, Tensor]:
    """The family's own weights, by the names they have without LoRA."""
    weights = parts.model.named_parameters()
    own = {name: weight for name, weight in weights if "lora_" not in name}
    return {name.replace(".base_layer", ""): weight.detach() for name, weight in own.items()}


def test_the_base_follows_from_the_seed_alone_whatever_is_trained() -> None:
    """Nor do the frozen parts decide it, whether they are there or not."""
    full = _base(assemble(_recipe(), _CAPTIONS, None))
    kinds = ({"kind": "full"}, {"kind": "lora", "rank": 2}, {"kind": "lora", "rank": 3})
    for trainable in kinds:
        for whole in (True, False):
            recipe = _recipe(trainable=trainable)
            again = _base(assemble(recipe, _CAPTIONS, None, frozen_parts=whole))
            assert again.keys() == full.keys()
            assert all(torch.equal(again[name], weight) for name, weight in full.items())
    other = _base(assemble(_recipe().model_copy(update={"seed": 1}), _CAPTIONS, None))
    assert any(not torch.equal(other[name], weight) for name, weight in full.items())


def test_building_leaves_the_callers_random_numbers_alone() -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    assemble(_recipe(), _CAPTIONS, None)
    outline(_recipe())
    assert torch.equal(torch.rand(3), expected)


@pytest.mark.usefixtures("few_words")
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("values", [KONTEXT, _TUBELET])
@pytest.mark.parametrize("kind", ["full", "lora"])
def test_an_outline_is_what_will_be_trained(values: Any, kind: str, dtype: str) -> None:
    """Same names, shapes, dtypes and the same weights frozen; only the vocabulary may shrink."""
    model = values["model"] | {"dtype": dtype}
    recipe = _recipe(values, model=model, trainable={"kind": kind})

    def facts(parts: Components) -> dict[str, Any]:
        named = [*parts.model.named_parameters(), *parts.model.named_buffers()]
        return {name: (each.shape, each.dtype, each.requires_grad) for name, each in named}

    planned = outline(recipe)
    many_words = " ".join(f"word{number}" for number in range(40))
    assert facts(planned) == facts(assemble(recipe, [many_words], None))
    assert {weight.device.type for weight in planned.model.parameters()} == {"meta"}
    dtypes = {weight.dtype for weight in planned.model.parameters()}
    assert dtypes == {{"fp32": torch.float32, "bf16": torch.bfloat16}[dtype]}


@pytest.mark.parametrize("when", ["at first", "later"])
def test_blocks_are_quantised_as_the_plan_chose_when_the_run_began(
    when: str, tmp_path: Path
) -> None:
    """A later plan may choose otherwise; the run keeps its weights. Outside of blocks none are."""
    chosen: Kinds = {"transformer_blocks.0": "int8"}
    other: Kinds = {"single_transformer_blocks.0": "fp8"}
    recipe = _recipe(model={"quantize": "auto"}, trainable={"kind": "lora", "rank": 2})
    if when == "at first":
        parts = assemble(recipe, _CAPTIONS, None, quantized=chosen)
    else:
        keep_kinds(chosen, tmp_path)
        parts = assemble(recipe, _CAPTIONS, tmp_path, quantized=other)
    quantised = {
        name: layer.kind
        for name, layer in parts.model.named_modules()
        if isinstance(layer, QuantizedLinear)
    }
    assert set(quantised.values()) == {"int8"}
    assert all(name.startswith("transformer_blocks.0.") for name in quantised)
    exact = assemble(with_exact_weights(recipe), _CAPTIONS, None).model
    assert count_weights(parts.model) == count_weights(exact)
    layer, same = (each.get_submodule(next(iter(quantised))) for each in (parts.model, exact))
    torch.testing.assert_close(layer.weight, same.weight, rtol=0, atol=2e-3)


def test_only_a_distilled_model_is_told_a_guidance_scale() -> None:
    recipe = _recipe()
    told = {"prompt_embeds": torch.zeros(3, 8, 12)}
    distilled = training_conditioning(outline(recipe), recipe, told)
    assert distilled["guidance"].tolist() == [2.5, 2.5, 2.5]
    assert list(told) == ["prompt_embeds"]
    model = KONTEXT["model"] | {"config": KONTEXT["model"]["config"] | {"guidance_embeds": False}}
    plain = _recipe(model=model)
    assert training_conditioning(outline(plain), plain, told) is told


def test_without_frozen_parts_the_model_is_the_same_and_nothing_encodes() -> None:
    recipe = _recipe()
    parts = assemble(recipe, _CAPTIONS, None, frozen_parts=False)
    bucket = recipe.data.buckets[0]
    assert parts.codec.latent_shape(bucket) == (1, 8, 12)
    assert parts.text.outline().keys() == {"prompt_embeds", "pooled_prompt_embeds"}
    frozen = [*parts.codec.modules(), *parts.text.modules()]
    assert len(frozen) == 3
    assert {weight.device.type for each in frozen for weight in each.parameters()} == {"meta"}
    with pytest.raises(AssertionError, match="an outline cannot encode"):
        parts.text.encode(_CAPTIONS)


def test_without_frozen_parts_words_keep_their_vocabulary(tmp_path: Path) -> None:
    recipe = _recipe(_TUBELET)
    whole = assemble(recipe, _CAPTIONS, None)
    whole.text.save(tmp_path)
    again = assemble(recipe, (), tmp_path, frozen_parts=False)
    assert again.text.vocabulary_size == whole.text.vocabulary_size
    ids = again.text.encode(_CAPTIONS)["token_ids"]
    assert torch.equal(ids, whole.text.encode(_CAPTIONS)["token_ids"])


class _Located(nn.Module):
    """Stands in for a part; says how many are on the device whenever one is moved."""

    there: ClassVar[set["_Located"]] = set()

    def modules(self, remove_duplicate: bool = True) -> Any:
        """None."""
        return []

    def to(self, device: torch.device, *, by_layer: bool = False) -> None:  # type: ignore[override]
        """Move it."""
        assert not by_layer
        (self.there.discard if device.type == "cpu" else self.there.add)(self)
        assert len(self.there) <= 1


def test_parts_take_turns_on_a_device() -> None:
    stand_ins: Any = {"text": _Located(), "model": _Located(), "codec": _Located()}
    parts = replace(outline(_recipe()), **stand_ins)
    parts.bring("text", torch.device("cpu"))
    assert not _Located.there
    for part in ("text", "model", "codec", "model"):
        parts.bring(part, torch.device("meta"))
        assert _Located.there == {stand_ins[part]}


def test_flops_count_the_references_tokens() -> None:
    """A picture to go by of the same size doubles the tokens of the pictures."""
    flops = {}
    for name in ("flux", "flux_kontext"):
        pictures = KONTEXT["data"]["conditioning"] if name == "flux_kontext" else {}
        recipe = _recipe(
            model=KONTEXT["model"] | {"family": name},
            data=KONTEXT["data"] | {"conditioning": pictures},
        )
        parts = outline(recipe)
        flops[name] = training_flops(FlowMatching(), parts, recipe, recipe.data.buckets[0])
    assert 1.5 < flops["flux_kontext"] / flops["flux"] < 3


@pytest.mark.parametrize(
    "build", [outline, fetch, lambda recipe: assemble(recipe, _CAPTIONS, None)]
)
def test_a_release_of_another_family_is_refused(
    build: Callable[[Recipe], object], tmp_path: Path
) -> None:
    config = {"transformer/config.json": {"_class_name": "FluxTransformer2DModel"}}
    recipe = _recipe(model={"family": "wan", "pretrained": write_configs(tmp_path, config)})
    with pytest.raises(ModelError, match=r'is FLUX\.1: set model\.family = "flux"; it is "wan"'):
        build(recipe)


def _buckets(height: int, width: int, num_frames: int = 1) -> dict[str, Any]:
    return {"buckets": [{"num_frames": num_frames, "height": height, "width": width}]}


def _inputs(**conditioning: dict[str, Any]) -> dict[str, Any]:
    return {"data": {"conditioning": conditioning}}


@pytest.mark.parametrize("build", [outline, lambda recipe: assemble(recipe, _CAPTIONS, None)])
@pytest.mark.parametrize(
    ("sections", "message"),
    [
        (_inputs(pose=_PICTURE), r"flux_kontext needs a reference image named ref.*\.reference = "),
        (
            _inputs(reference=_PICTURE, pose=_PICTURE),
            "pose, .* not used: .* flux_kontext takes ref",
        ),
        (_inputs(reference=_PICTURE | {"encode": False}), "named reference .* it with encode = f"),
        (_inputs(reference=_PICTURE | {"kind": "mask"}), 'named reference .* has it as "mask"'),
        ({"model": {"family": "flux"}}, "has reference, .* flux takes no image, and there are no"),
        ({"data": _buckets(16, 23)}, r"codec and model want .* divisible by 4\. The .* of 24x16"),
        ({"data": {"stages": [{"name": "large", **_buckets(16, 23)}]}}, r"divisible by 4\. The ne"),
        ({"data": _buckets(16, 22)}, r"1 frame of 22x16 .* by 4\. The nearest .* 1 frame of 24x16"),
        ({"data": _buckets(16, 24, 9)}, r"not videos, but a bucket has 9 frames\. Set num_frames"),
        ({"trainable": {"kind": "lora", "targets": ["to_qq"]}}, "'to_qq' matches no linear layer"),
        (
            {"model": {"family": "fluxx"}},
            r"'fluxx' is unknown; did you mean flux or flux2 or flux3\?",
        ),
    ],
)
def test_what_does_not_fit_together_is_refused_alike_in_plan_and_run(
    build: Any, sections: dict[str, Any], message: str
) -> None:
    """One sentence with the nearest valid choice, before anything large is built."""
    with pytest.raises(RecipeError, match=message):
        build(_recipe(**sections))


_OWN_TRANSFORMERS = """
import diffusers


class FluxTransformer2DModel(diffusers.FluxTransformer2DModel):
    def forward(self, *args, **kwargs):
        return tuple(2 * each for each in super().forward(*args, **kwargs))


class Other(FluxTransformer2DModel): ...


class Wrong: ...
"""


def test_a_transformer_of_ones_own_takes_the_place_of_diffusers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own_transformers.py").write_text(_OWN_TRANSFORMERS)
    monkeypatch.chdir(tmp_path)

    def with_class(name: str, values: dict[str, Any] = KONTEXT) -> Recipe:
        own = {"transformer_class": f"own_transformers:{name}"}
        return _recipe({**values, "model": {**values["model"], **own}})

    plain = assemble(_recipe(), _CAPTIONS, None)
    own = assemble(with_class("FluxTransformer2DModel"), _CAPTIONS, None)
    assert type(own.model).__module__ == "own_transformers"
    assert _base(own).keys() == _base(plain).keys()
    assert all(torch.equal(each, _base(plain)[name]) for name, each in _base(own).items())
    outline(with_class("FluxTransformer2DModel"))
    with quiet(own.model):  # it is asked of the library of the class
        pass
    for name in ("Other", "Wrong"):
        with pytest.raises(RecipeError, match="called FluxTransformer2DModel, as releases name"):
            outline(with_class(name))
    with pytest.raises(RecipeError, match="the family tubelet has none"):
        outline(with_class("Other", _TUBELET))


@pytest.mark.parametrize(
    ("width", "height", "nearest"),
    [(1000, 1000, "992x992"), (1020, 1000, "1024x992"), (1023, 1024, "1024x1024")],
)
def test_the_nearest_bucket_is_one_that_codec_and_model_take(
    width: int, height: int, nearest: str
) -> None:
    like_flux = KONTEXT["codec"]["config"] | {"block_out_channels": [4, 4, 4, 4]}
    codec = KONTEXT["codec"] | {"config": like_flux}
    with pytest.raises(RecipeError, match=f"divisible by 16.* nearest .* 1 frame of {nearest}.$"):
        outline(_recipe(data=_buckets(height, width), codec=codec))
    fitting_width, fitting_height = map(int, nearest.split("x"))
    outline(_recipe(data=_buckets(fitting_height, fitting_width), codec=codec))


_HEADS = "model.config={hidden_size=48, num_blocks=1, num_heads=4}"


def test_ranks_need_not_divide_the_heads(small_recipe: Callable[..., Recipe]) -> None:
    for size in (1, 2, 3, 4, 8):
        recipe = small_recipe(_HEADS, f"parallel.context={size}")
        refuse_sharing(outline(recipe), recipe)


def test_an_added_module_is_refused(
    small_recipe: Callable[..., Recipe], own_module: Callable[[str], str]
) -> None:
    module = own_module("tokens")
    recipe = small_recipe(_HEADS, "parallel.context=2", f"trainable.modules.own.module={module}")
    with pytest.raises(RecipeError, match=r"modules of trainable\.modules \(own\) get all tokens"):
        refuse_sharing(outline(recipe), recipe)


def test_more_ranks_than_tokens_are_refused(small_recipe: Callable[..., Recipe]) -> None:
    one_tube = "data.buckets=[{num_frames=8, height=4, width=4}]"
    recipe = small_recipe(_HEADS, "parallel.context=2", one_tube)
    with pytest.raises(RecipeError, match=r"has only 1\. Take fewer processes"):
        refuse_sharing(outline(recipe), recipe)


def test_captions_are_as_long_as_the_release_expects(tmp_path: Path) -> None:
    """512 tokens for a pretrained encoder, 256 for schnell, 64 for an encoder from scratch."""
    scheduler = {"use_dynamic_shifting": False, "shift": 1.0}
    model = {"guidance_embeds": False}
    release = {"transformer/config.json": model, "scheduler/scheduler_config.json": scheduler}
    schnell, wan = write_configs(tmp_path, release), "Wan-AI/Wan2.1-T2V-1.3B-Diffusers"

    def length(family: str, model: str | None, text: str | None, **changes: Any) -> int:
        sections = {
            "model": {"family": family, "pretrained": model},
            "text": {"kind": "transformers", "pretrained": text, **changes},
        }
        return text_section(config.parse(_TUBELET | sections, "test")).num_tokens()

    assert length("wan", wan, wan) == 512
    assert length("flux", schnell, schnell) == 256
    assert length("flux", schnell, None) == 64
    assert length("wan", None, wan) == 512
    assert length("wan", wan, wan, max_tokens=100) == 100


def _asked(parts: Components, recipe: Recipe) -> FlowBatch:
    shape = latent_shape(parts.codec, recipe.data.buckets[0])
    generator = torch.Generator().manual_seed(0)
    latents, noise = torch.randn(2, 1, *shape, generator=generator)
    told = {name: value[:1] for name, value in parts.text.encode(["a red ball"]).items()}
    return FlowBatch(latents, noise, torch.tensor([0.5]), told)


@pytest.mark.parametrize(("dtype", "is_cast"), [("fp32", True), ("bf16", False)])
def test_weights_in_bf16_are_not_cast_again(
    dtype: str, is_cast: bool, small_recipe: Callable[..., Recipe]
) -> None:
    """Wan's first weight stays in fp32 all the same: what most of them are in decides."""
    recipe = small_recipe(*TINY_WAN, f"model.dtype={dtype}")
    parts = assemble(recipe, ["a red ball"], None)
    assert next(parts.model.parameters()).dtype == torch.float32
    examples = _asked(parts, recipe)
    precisions: tuple[Precision, ...] = ("fp32", "bf16")
    exact, mixed = (
        flow_losses(parts, examples, precision, torch.device("cpu")) for precision in precisions
    )
    assert (not torch.equal(exact, mixed)) == is_cast


def test_a_part_without_weights_is_left_alone() -> None:
    """With a cache training has no text encoder. The meta device stands for a GPU."""
    parts = assemble(_recipe(), _CAPTIONS, None)
    without_text = replace(parts, text=outline(_recipe()).text)
    without_text.bring(None, torch.device("meta"))
    replace(without_text, stays=frozenset({"model"})).bring("codec", torch.device("meta"))
    held = (without_text.text.modules(), [parts.model], parts.codec.modules())
    places = [
        {each.device.type for one in modules for each in one.parameters()} for modules in held
    ]
    assert places == [{"meta"}, {"cpu"}, {"meta"}]


def test_training_follows_a_releases_rule_only_within_its_range() -> None:
    """LTX-2 draws as its own trainer does; sampling follows the line beyond its end."""
    recipe = _recipe(flow={"shift": "release"})
    bucket, uniform = recipe.data.buckets[0], torch.rand(64, generator=torch.Generator())
    ltx2 = family("ltx2").defaults(recipe.model)
    assert ltx2.uniform_share == 0.1
    line = ShiftRule(MuLine(1, 0.95, 2, 2.05), 0.1)  # the bucket has more than 2 tokens
    parts = replace(outline(recipe), defaults=replace(ltx2, shift=line))
    assert parts.shift("release", bucket, 30) > 2 * parts.shift("release", bucket)
    found = parts.sample_sigmas(uniform, recipe.flow, bucket)
    torch.testing.assert_close(found, stretched_logit_normal(uniform, 2.05, 1.0, 0.1))
    assert not review_model(parts, recipe)
    plain = recipe.flow.model_copy(update={"shift": 3.0})
    found = parts.sample_sigmas(uniform, plain, bucket)
    assert torch.equal(found, sample_sigmas(uniform, "logit_normal", shift=3.0))


def test_a_recipe_that_trains_hardly_anything_but_noise_is_named() -> None:
    recipe = _recipe(flow={"shift": 50.0})
    (sentence,) = review_model(outline(recipe), recipe)
    for fact in ("1 frame of 24x16", "0.830", "second last of", "flow.shift (50.0)"):
        assert fact in sentence
    for flow in ({"shift": 9.0}, {"shift": 50.0, "sigma_range": [0.9, 1.0]}):
        recipe = _recipe(flow=flow)
        assert not review_model(outline(recipe), recipe)


def test_lokr_of_two_full_matrices_has_the_scale_1_as_in_lycoris() -> None:
    settings = {"kind": "lokr", "rank": 10_000, "alpha": 1.0}
    recipe = _recipe(trainable=settings)
    parts = outline(recipe)
    layers = [layer for _, layer in adapter_layers(parts.model)]
    assert {layer.scaling["default"] for layer in layers} == {1.0}
    (sentence,) = review_model(parts, recipe, has_parent=True)
    assert f"trainable.alpha = 1 has no effect on {len(layers)} of {len(layers)}" in sentence
    recipe = _recipe(trainable=settings | {"rank": 2})
    parts = outline(recipe)
    assert {layer.scaling["default"] for _, layer in adapter_layers(parts.model)} == {0.5}
    assert not review_model(parts, recipe, has_parent=True)


def test_what_is_added_to_a_frozen_model_of_random_weights_is_warned_of() -> None:
    recipe = _recipe(trainable={"kind": "lora"})
    parts = outline(recipe)
    (sentence,) = review_model(parts, recipe)
    assert sentence.startswith("A lora on a model of random weights that stays frozen")
    assert not review_model(parts, recipe, has_parent=True)
    recipe = _recipe()
    assert not review_model(outline(recipe), recipe)
