"""A recipe is read strictly: what does not fit is named, what fits survives being written."""

import os
import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from longtake import config
from longtake.config import DECIDES_ORDER, MAY_CHANGE_ON_RESUME, Recipe, is_among
from longtake.errors import RecipeError
from longtake.models.base import FAMILIES

_RECIPE = """
out = "runs/a"

[data]
catalog = "clips/catalog.parquet"
buckets = [{ num_frames = 9, height = 64, width = 96 }]

[model]
family = "tubelet"
config = { width = 128, layers = 4 }

[training]
steps = 1000
global_batch_size = 8
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A recipe file with nothing but what has no default."""
    path = tmp_path / "recipe.toml"
    path.write_text(_RECIPE)
    return path


def _recipe(**sections: dict[str, Any]) -> Recipe:
    """The recipe above with some keys of some sections replaced."""
    values = tomllib.loads(_RECIPE)
    for section, keys in sections.items():
        values.setdefault(section, {}).update(keys)
    return config.parse(values, "test")


def _message(path: Path, *overrides: str) -> str:
    with pytest.raises(RecipeError) as caught:
        config.load(path, overrides)
    return str(caught.value).removeprefix(f"{path}:").strip()


def test_a_recipe_is_read_with_its_types(path: Path) -> None:
    recipe = config.load(path)
    assert recipe.out == Path("runs/a")
    assert recipe.data.catalog == Path("clips/catalog.parquet")
    assert [str(bucket) for bucket in recipe.data.buckets] == ["9 frames of 96x64"]
    assert recipe.model.config == {"width": 128, "layers": 4}
    assert recipe.training.micro_batch_size is None
    assert recipe.optimizer.betas == (0.9, 0.99)


def test_a_byte_order_mark_is_passed_over(path: Path) -> None:
    path.write_text(_RECIPE, encoding="utf-8-sig")
    assert config.load(path).training.steps == 1000


@pytest.mark.parametrize(
    ("override", "nearest"),
    [
        ("training.step=1", "training.steps"),
        ("trainig.steps=1", "training"),
        ("data.bucket=1", "data.buckets"),
        ("steps=1", "training.steps"),
        ("lr=1", "optimizer.learning_rate"),
        ("optimizer.lr=1", "optimizer.learning_rate"),
        ("optimizer.learning_rat=1", "optimizer.learning_rate"),
        ("training.learning_rate=1", "optimizer.learning_rate"),
        ("sampling.steps=1", "sampling.num_inference_steps"),
        ("data.batch_size=1", "training.global_batch_size"),
        ("fps=1", "data.fps"),
    ],
)
def test_an_unknown_key_is_named_with_the_nearest(path: Path, override: str, nearest: str) -> None:
    key = override.partition("=")[0]
    unknown = "trainig" if key == "trainig.steps" else key
    assert _message(path, override) == (
        f"{unknown} is not a key of a recipe; did you mean {nearest}?"
    )


def test_an_unknown_key_in_the_file_is_named(path: Path) -> None:
    text = _RECIPE.replace("width = 96", "width = 96, heigt = 1")
    path.write_text("sede = 1\n" + text + "batchsize = 1\n")
    assert _message(path).splitlines() == [
        "data.buckets.0.heigt is not a key of a recipe; did you mean data.buckets.height?",
        "  training.batchsize is not a key of a recipe; did you mean training.global_batch_size?",
        "  sede is not a key of a recipe; did you mean seed?",
    ]


def test_where_nothing_is_near_the_known_keys_are_listed(path: Path) -> None:
    message = _message(path, "checkpoint.xyzzy=1")
    known = "every, every_epochs, export, export_dtype, export_keep, keep, keep_every, minutes"
    assert message == f"checkpoint.xyzzy is not a key of a recipe; known there: {known}."
    assert "known there: checkpoint, codec, data, ema," in _message(path, "xyzzy=1")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ("training.steps=abc", "training.steps is 'abc'; it should be a valid integer."),
        ("training.steps=1.5", "training.steps is 1.5; it should be a valid integer."),
        ("training.steps='7'", "training.steps is '7'; it should be a valid integer."),
        ("training.steps=0", "training.steps is 0; it should be greater than 0."),
        (
            "training={global_batch_size=4}",
            "training.steps is missing, and it has no default: give it, or training.epochs.",
        ),
        ("training.epochs=0", "training.epochs is 0; it should be greater than 0."),
        ("training.epochs='3'", "training.epochs is '3'; it should be a valid integer."),
        (
            "training.epochs=3",
            "training.steps = 1000 and training.epochs = 3 both say how long the run is: leave one "
            "of them out.",
        ),
        (
            "trainable={kind='lora', factor=4}",
            'trainable.factor needs trainable.kind = "lokr".',
        ),
        (
            "checkpoint={every=10, every_epochs=2}",
            "checkpoint.every = 10 steps and checkpoint.every_epochs = 2 both say when to save: "
            "leave one of them out; checkpoint.minutes also saves in between.",
        ),
        (
            "checkpoint.export=comfyui",
            'checkpoint.export = "comfyui" writes a LoRA at each save, and trainable.kind is '
            '"full": leave it out, and write the model of a checkpoint by longtake export.',
        ),
        (
            "sampling.at_start=true",
            "sampling.at_start also samples before the first step, but sampling.every is unset, so "
            "nothing is sampled in training; set sampling.every, such as 500.",
        ),
        (
            "sampling={every=10, every_epochs=2}",
            "sampling.every = 10 steps and sampling.every_epochs = 2 both say when to sample: "
            "leave one of them out.",
        ),
        ("seed=-1", "seed is -1; it should be greater than or equal to 0."),
        ("data.caption_dropout=true", "data.caption_dropout is True; it should be a valid number."),
        (
            "data.caption_dropout=1.5",
            "data.caption_dropout is 1.5; it should be less than or equal to 1.",
        ),
        ("flow.logit_mean=nan", "flow.logit_mean is nan; it should be a finite number."),
        (
            "optimizer.kind=sgd",
            "optimizer.kind is 'sgd'; it should be 'adamw', 'muon', 'adamw8bit', 'prodigy', or a "
            "class of your own such as 'my_project.optim:Lion'.",
        ),
        ("optimizer.betas=[0.9, 1.0]", "optimizer.betas.1 is 1.0; it should be less than 1."),
        ("optimizer.betas=0.9", "optimizer.betas is 0.9; it should be a list."),
        (
            "optimizer.betas=[0.1, 0.2, 0.3]",
            "optimizer.betas is [0.1, 0.2, 0.3]; it should have at most 2 items.",
        ),
        ("data.buckets=[3]", "data.buckets.0 is 3; it should be a table of keys and values."),
        ("optimizer=3", "optimizer is 3; it should be a table of keys and values."),
        (
            "recompute.memory=48",
            'recompute.memory is 48; write it with its unit, such as "48GiB".',
        ),
        (
            "recompute.memory='48'",
            "recompute.memory: '48' is not an amount of memory; write it like 48GiB or 48GB.",
        ),
        (
            "recompute.policy=al",
            "recompute.policy is 'al'; it should be 'auto', 'none', 'all', 'all-but-first', "
            "'alternate', 'save-attention' or 'best'.",
        ),
        (
            "recompute.policy=best",
            'recompute.policy = "best" needs recompute.memory, such as "48GiB".',
        ),
        (
            "trainable.kind=frozen",
            'trainable.kind = "frozen" without trainable.modules leaves nothing to train.',
        ),
        (
            'optimizer={kind="muon", offload=true}',
            'optimizer.offload works with optimizer.kind = "adamw", not "muon", whose states stay '
            "on the GPU: choose one of the two.",
        ),
        ("model.config=3", "model.config is 3; it should be a table of keys and values."),
        ("out=3", "out is 3; it should be a path in quotes."),
        (
            "training.micro_batch_size=3",
            "training.micro_batch_size 3 does not divide training.global_batch_size 8.",
        ),
        (
            "model.quantize=fp9",
            "model.quantize is 'fp9'; it should be 'none', 'fp8', 'int8', 'nf4', "
            "'fp8_dynamic', 'int8_dynamic' or 'auto'.",
        ),
        (
            "model.quantize=nf4",
            'model.quantize = "nf4" is for frozen weights, and trainable.kind = "full" trains them '
            'all: set trainable.kind = "lora", or leave the key out.',
        ),
        (
            "model.stream=all",
            'model.stream = "all" is for frozen weights, and trainable.kind = "full" trains them '
            'all: set trainable.kind = "lora", or leave the key out.',
        ),
        (
            "trainable.kind=lora; model.quantize=auto; parallel.strategy=shard",
            'model.quantize = "auto" works with parallel.strategy = "replicate", not "shard", '
            "whose processes each hold a part of the weights: choose one of the two.",
        ),
        (
            "parallel.timeout_seconds=0.5",
            "parallel.timeout_seconds is 0.5; it should be greater than or equal to 1.",
        ),
        (
            "parallel.timeout_seconds=6",
            "parallel.timeout_seconds 6 is not more than watch.min_seconds 6: a launch would end "
            "before its stall is named; set it to more.",
        ),
        (
            "parallel.long_timeout_seconds=60",
            "parallel.long_timeout_seconds 60 is less than parallel.timeout_seconds 600; set it to "
            "as much or more.",
        ),
        (
            "text.kind=transformers; text.quantize=int8",
            'text.quantize = "int8" keeps a pretrained encoder in fewer bits, and text.pretrained '
            "is unset: name one, or leave text.quantize out.",
        ),
        (
            'text.kind=transformers; text.pooled={quantize="fp8"}',
            'text.pooled.quantize = "fp8" keeps a pretrained encoder in fewer bits, and '
            "text.pooled.pretrained is unset: name one, or leave text.pooled.quantize out.",
        ),
    ],
)
def test_a_wrong_value_is_one_sentence(path: Path, overrides: str, message: str) -> None:
    assert _message(path, *overrides.split("; ")) == message


def test_a_long_value_is_cut_short(path: Path) -> None:
    assert len(_message(path, f"text.kind={'word ' * 1000}")) < 160


def test_missing_keys_are_all_named(path: Path) -> None:
    path.write_text("")
    missing = ["out", "data", "model", "training"]
    assert _message(path).split("\n  ") == [
        f"{key} is missing, and it has no default." for key in missing
    ]
    path.write_text(_RECIPE.replace("num_frames = 9, ", ""))
    assert _message(path) == "data.buckets.0.num_frames is missing, and it has no default."


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("7", 7),
        ("-0.5", -0.5),
        ("1e-4", 1e-4),
        ("true", True),
        ('"7"', "7"),
        ("[1, 2]", [1, 2]),
        ("{ a = { b = [1] } }", {"a": {"b": [1]}}),
        ("word", "word"),
        ("runs/a b=c", "runs/a b=c"),
        ("2024-01-31", "2024-01-31"),
        ("1\nsteps = 2", "1\nsteps = 2"),
    ],
)
def test_overrides_are_toml_values_or_bare_words(path: Path, text: str, value: object) -> None:
    changed = config.load(path, [f"model.config.new={text}"]).model.config
    assert changed == {"width": 128, "layers": 4, "new": value}
    assert type(changed["new"]) is type(value)


def test_overrides_reach_every_depth_and_the_last_one_counts(path: Path) -> None:
    overrides = ["seed=1", "flow . shift = 3.0", "model.config.a.b=2", "seed=2"]
    recipe = config.load(path, [*overrides, "data.buckets=[{num_frames=1,height=8,width=8}]"])
    assert (recipe.seed, recipe.flow.shift) == (2, 3.0)
    assert recipe.model.config["a"] == {"b": 2}
    assert [bucket.num_frames for bucket in recipe.data.buckets] == [1]
    assert config.load(path, ["out=2024-01-31"]).out == Path("2024-01-31")


_plain = st.recursive(
    st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False)
    | st.text(st.characters(exclude_categories=["Cs"]), max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text("abc.é ", max_size=3), inner)
    ),
    max_leaves=6,
)


@settings(max_examples=60, deadline=None)
@given(
    options=st.dictionaries(st.text("abc_", min_size=1, max_size=4), _plain, max_size=4),
    betas=st.tuples(*[st.floats(0, 1, exclude_max=True)] * 2),
    micro=st.sampled_from([None, 1, 2, 4, 8]),
    seed=st.integers(0, 2**63 - 1),
    out=st.text("ab /.é\"'\\", min_size=1),
)
def test_a_written_recipe_is_the_same_recipe(
    tmp_path_factory: pytest.TempPathFactory,
    options: dict[str, Any],
    betas: tuple[float, float],
    micro: int | None,
    seed: int,
    out: str,
) -> None:
    values = _recipe(
        model={"config": options},
        optimizer={"betas": list(betas)},
        training={"micro_batch_size": micro},
    ).model_dump()
    recipe = config.parse(values | {"seed": seed, "out": out}, "test")
    path = tmp_path_factory.mktemp("dump") / "recipe.toml"
    path.write_text(config.dump(recipe), encoding="utf-8")
    assert config.load(path) == recipe
    assert config.differences(config.load(path), recipe) == []


@pytest.mark.parametrize(
    "changes",
    [
        ["watch.min_seconds=700"],  # more than a timeout that is not set
        ["optimizer.kind='my_project.optim:Lion'"],  # which need not take betas
        ["optimizer={kind='adamw', offload=true, schedule='cosine_restarts'}", "flow.shift=flux"],
        ["trainable={kind='lora', rank=4}", "model.quantize=nf4", "model.stream=all"],
        ["codec.kind=autoencoder", "data.cache=kept", "data.windows=1"],
        ["text={kind='transformers', max_tokens=7}", "data.captions.catalog.shuffle_tags=true"],
        ["data.buckets=[]", "data.auto_buckets={pixels=6144}", "data.repeats.catalog=2"],
        ["data.stages=[{name='a', epochs=2}, {name='b', global_batch_size=4, ramp_steps=2}]"],
        ["ema.profiles=[{name='slow', decay=0.999}, {name='wide', sigma_rel=0.1}]"],
        ["parallel.strategy=hybrid", "parallel.context=2", "training.precision=bf16"],
        ["recompute={policy='best', memory='48GiB', device='h100'}", "checkpoint.minutes=5"],
        ["evaluation.presets.low={prompts=['a'], num_frames=9}", "sampling.every=4"],
        ["guard.window=50", "tracking.tensorboard=false"],
    ],
    ids=lambda changes: changes[0].partition("=")[0],
)
def test_a_run_is_resumed_by_the_recipe_that_it_keeps(path: Path, changes: list[str]) -> None:
    """A kept recipe names every key, also those that were left to their defaults."""
    recipe = config.load(path, changes)
    path.write_text(config.dump(recipe))
    assert config.load(path) == recipe


_CHANGES: dict[str, object] = {
    "out": "elsewhere",
    "seed": 5,
    "data.catalog": "other.parquet",
    "data.buckets": "[{ num_frames = 5, height = 64, width = 96 }]",
    "data.frame_stride": 2,
    "data.auto_buckets": "{ pixels = 4096 }",
    "data.tokens_per_batch": 4096,
    "data.fps": 16.0,
    "data.caption_dropout": 0.5,
    "data.random_crop": "true",
    "data.max_crop": 0.3,
    "data.flip": 0.5,
    "data.weights.catalog": 2.0,
    "data.repeats.catalog": 2,
    "data.loss_weights.catalog": 2.0,
    "data.trigger": "sks",
    "data.stages": "[{ name = 'a' }]",
    "data.difficulty": "nouns",
    "data.on_change": "merge",
    "data.on_drift": "refuse",
    "data.drift_limit": 7.0,
    "data.sample_timeout_seconds": 7.0,
    "data.workers": 7,
    "data.frame_cache_gib": 7.0,
    "data.sample_memory_gib": 7.0,
    "data.stills_from_videos": "true",
    "data.min_size": 7,
    "data.upscale": "false",
    "data.keep_uncaptioned": "true",
    "data.max_quarantined_clips": 7,
    "model.config.layers": 5,
    "model.config.new": "x",
    "codec.kind": "autoencoder",
    "text.max_tokens": 7,
    "flow.shift": 7.0,
    "optimizer.learning_rate": 7.0,
    "training.steps": 7,
    "training.global_batch_size": 16,
    "training.micro_batch_size": 4,
    "training.device": "cpu",
    "training.precision": "fp32",
    "ema.decay": 0.5,
    "parallel.strategy": "shard",
    "checkpoint.every": 7,
    "checkpoint.keep": 7,
    "sampling.fps": 7.0,
}


def _changed(key: str, *overrides: str) -> Recipe:
    """Return the recipe above with overrides and a change of `_CHANGES`."""
    return config.changed(_recipe(), [*overrides, f"{key}={_CHANGES[key]}"])


@pytest.mark.parametrize("key", _CHANGES)
def test_differences_are_what_may_not_change_on_resume(key: str) -> None:
    found = config.differences(_recipe(), _changed(key))
    is_free = is_among(key, MAY_CHANGE_ON_RESUME)
    assert [changed for changed, _, _ in found] == ([] if is_free else [key])


def _free_when(on_change: str) -> set[str]:
    """Return the keys of `_CHANGES` that may change if `on_change` says how to continue."""
    free = set()
    for key in _CHANGES:
        if not config.differences(_recipe(), _changed(key, f"data.on_change={on_change}")):
            is_by_name = key.startswith(("data.weights", "data.repeats"))
            free.add(key.removesuffix(".catalog") if is_by_name else key)
    return free


def test_what_decides_the_order_may_change_when_asked() -> None:
    refusing = _free_when("refuse")
    assert refusing.isdisjoint(DECIDES_ORDER)
    for policy in ("merge", "finish", "restart"):
        # Another number of epochs is another stage: see the next test.
        assert _free_when(policy) - refusing == set(DECIDES_ORDER) - {"training.epochs"}


def test_the_epochs_of_a_run_are_those_of_a_stage_and_decide_its_steps() -> None:
    values = _recipe().model_dump(exclude_none=True)
    del values["training"]["steps"]
    values["training"]["epochs"] = 2
    given = config.parse(values, "given")
    assert [(each.name, each.epochs) for each in given.data.curriculum()] == [("all", 2)]
    kept = config.parse(config.kept(given.with_steps(70)).model_dump(exclude_none=True), "kept")
    assert (kept.training.steps, kept.training.epochs) == (70, 2)
    assert config.differences(kept, given) == []
    longer = config.changed(kept, ["training.epochs=3"])
    assert longer.data.stage("all").epochs == 3
    changed = [key for key, _, _ in config.differences(kept, longer)]
    assert changed == ["data.stages", "training.epochs"]
    assert not config.differences(kept, config.changed(longer, ["data.on_change=finish"]))
    with pytest.raises(RecipeError, match=r"training\.epochs = 2, but data\.stages has .*\(a, b\)"):
        config.changed(given, ["data.stages=[{name='a', steps=1}, {name='b', epochs=2}]"])


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"catalog": None}, "data needs either one catalog or several catalogs by name"),
        ({"catalogs": {"a": "a.parquet"}}, "data needs either one catalog or several"),
        ({"weights": {"b": 1.0}}, "data.weights names b, which is not among the catalogs: catalog"),
        ({"stages": [{"name": "x", "weights": {"b": 1.0}}]}, "the weights of stage x names b, "),
        ({"buckets": None}, "data.buckets is missing: list shapes of clips, or let"),
        (
            {"auto_buckets": {"pixels": 100}},
            "data.auto_buckets.pixels is 100, less than one square of multiple_of = 16",
        ),
        ({"repeats": {"b": 2}}, "data.repeats names b, which is not among the catalogs"),
        ({"loss_weights": {"b": 2}}, "data.loss_weights names b, which is not among the catalogs"),
        ({"captions": {"b": {}}}, "data.captions names b, which is not among the catalogs"),
        (
            {"weights": {"catalog": 1.0}, "repeats": {"catalog": 2}},
            "data.repeats and data.weights both say how often catalogs are trained",
        ),
        (
            {"captions": {"catalog": {"keep_tags": 2}}},
            "data.captions: keep_tags = 2 needs shuffle_tags = true",
        ),
        (
            {"cache": "c", "windows": 1, "captions": {"catalog": {"shuffle_tags": True}}},
            "data.captions.catalog.shuffle_tags puts tags in another order each time",
        ),
        (
            {"stages": [{"name": "x", "steps": 1}, {"name": "x"}]},
            "data.stages must have names of their own, but are x, x",
        ),
        (
            {"stages": [{"name": "x"}, {"name": "y"}]},
            "stage x has neither epochs nor steps, so the stages after it would never begin",
        ),
        (
            {"window": "head", "windows": 3},
            'data.window = "head" is one window of each clip, and data.windows = 3 are several: '
            "leave one of them out",
        ),
        (
            {"stages": [{"name": "x", "ramp_steps": 4}]},
            "stage x is the first: there is nothing to ramp from",
        ),
        (
            {"stages": [{"name": "x", "steps": 1, "epochs": 1}]},
            "stage x has both epochs and steps; give one of them",
        ),
        (
            {"buckets": [{"num_frames": 1, "height": 8, "width": 8, "share": 0.5}]},
            "data.buckets: 1 frame of 8x8 has share = 0.5 of clips that fit another bucket better, "
            "and there is no other",
        ),
        (
            {"tokens_per_batch": 9, "stages": [{"name": "x", "global_batch_size": 4}]},
            "data.tokens_per_batch = 9 and stage x's global_batch_size = 4 both say how many clips",
        ),
        (
            {"stages": [{"name": "x", "warmup_steps": 4}]},
            "stage x is the first: its warm-up is that of the section optimizer, so leave its own "
            "warmup_steps = 4 out",
        ),
        (
            {"stages": [{"name": "x", "steps": 1}, {"name": "y", "steps": 3, "warmup_steps": 4}]},
            "stage y has 3 steps and warmup_steps = 4, so its learning rate would never be reached",
        ),
    ],
)
def test_stages_and_catalogs_that_do_not_fit_together(
    values: dict[str, object], message: str
) -> None:
    recipe = tomllib.loads(_RECIPE)
    recipe["data"].update(values)
    recipe["data"] = {key: value for key, value in recipe["data"].items() if value is not None}
    with pytest.raises(RecipeError) as caught:
        config.parse(recipe, "test")
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("stage", "sections", "message"),
    [
        (
            {"global_batch_size": 6},
            {"training": {"micro_batch_size": 4, "global_batch_size": 8}},
            "training.micro_batch_size 4 does not divide global_batch_size of stage x, 6",
        ),
        (
            {"global_batch_size": 8},
            {
                "training": {"micro_batch_size": 4, "global_batch_size": 4},
                "optimizer": {"fused_backward": True, "max_grad_norm": 1e9},
            },
            "with training.micro_batch_size 4 global_batch_size of stage x, 8 takes several",
        ),
        (
            {"ema_decay": 0.99},
            {"ema": {"decay": 0.0}},
            "stage x sets ema_decay = 0.99 of the one average that ema.decay makes, but ema.decay "
            "= 0 keeps none: leave one of the two out",
        ),
        (
            {"ema_decay": 0.99},
            {"ema": {"profiles": [{"name": "slow", "decay": 0.999}]}},
            "but ema.profiles (slow) have decays of their own",
        ),
    ],
)
def test_what_a_stage_sets_has_to_fit_the_other_sections(
    stage: dict[str, object], sections: dict[str, Any], message: str
) -> None:
    with pytest.raises(RecipeError) as caught:
        _recipe(data={"stages": [{"name": "x", **stage}]}, **sections)
    assert message in str(caught.value)


def test_a_section_without_stages_is_one_stage_of_all_clips() -> None:
    data = _recipe().data
    assert [stage.name for stage in data.curriculum()] == ["all"]
    assert data.sources() == {"catalog": data.catalog}
    assert data.shapes() == data.buckets
    values = _recipe().model_dump(exclude_none=True)
    shape = {"num_frames": 1, "height": 8, "width": 8}
    values["data"]["stages"] = [{"name": "a", "steps": 1, "buckets": [shape, shape]}, {"name": "b"}]
    staged = config.parse(values, "test").data
    assert [str(each) for each in staged.shapes()] == ["1 frame of 8x8", "9 frames of 96x64"]


def test_differences_hold_both_values() -> None:
    new = _recipe(training={"steps": 2000}, model={"config": {"layers": 4, "heads": 2}})
    assert config.differences(_recipe(), new) == [
        ("model.config.heads", None, 2),
        ("model.config.width", 128, None),
        ("training.steps", 1000, 2000),
    ]


def test_every_key_that_may_change_exists() -> None:
    """A renamed key cannot silently leave the list."""
    known = _recipe().model_dump()
    for key in MAY_CHANGE_ON_RESUME:
        inner: Any = known
        for part in key.split("."):
            assert part in inner, key
            inner = inner[part]


@pytest.mark.parametrize(
    ("optimizer", "steps", "is_accepted"),
    [
        ({"schedule": "constant"}, 20, True),
        ({"schedule": "constant"}, 5, False),
        ({"schedule": "inverse_sqrt"}, 20, True),
        ({"schedule": "inverse_sqrt", "warmup_ratio": 0.1}, 20, False),
        ({"schedule": "cosine_restarts"}, 20, False),
    ],
)
def test_only_a_run_at_a_plateau_may_be_made_longer(
    optimizer: dict[str, Any], steps: int, is_accepted: bool
) -> None:
    values = _recipe().model_dump(exclude_none=True)
    values["optimizer"] |= optimizer
    values["training"]["steps"] = 10
    old = config.parse(values, "old")
    values["training"]["steps"] = steps
    changed = config.differences(old, config.parse(values, "new"))
    assert (changed == []) == is_accepted


@pytest.mark.parametrize(
    ("change", "message"),
    [
        *[
            (malformed, f"--set {malformed}: expected key=value, such as training.steps=2000.")
            for malformed in ("training.steps", "=3", "training..steps=3", "out=", "")
        ],
        ("training.steps.x=1", "training.steps is a value, not a section"),
        ("data.buckets.0.width=8", "data.buckets is a value, not a section"),
        ("evaluation.presets.claims={}", "a preset cannot be called claims; give it another name"),
        ("evaluation.presets.Low={}", "a name of small letters, digits, - and _"),
        ("evaluation.presets.low.hieght=3", "did you mean evaluation.presets.height?"),
        (
            "training.encode_ahead=true",
            'training.encode_ahead = true, but with codec.kind = "pixels" and text.kind = "words" '
            "nothing is encoded in a step: leave one of the two out.",
        ),
        ("training.num_train_epochs=3", "did you mean training.epochs?"),
        ("trainable.dropout=0.1", "no layer has dropout; captions have, by data.caption_dropout"),
        ("optimizer.max_grad_norm=0", "to clip none, set 1e9"),
        (
            "optimizer={warmup_steps=20, warmup_ratio=0.1}",
            "optimizer.warmup_steps = 20 and optimizer.warmup_ratio = 0.1 both say",
        ),
        ("optimizer={fused_backward=true}", "set it to 1e9, which clips none"),
        ("optimizer={fused_backward=true, kind='muon'}", "take adamw or adamw8bit, or"),
        ("training.global_batch_size=2147483648", "it should be less than or equal to 65536"),
        ("training.steps=1" + "0" * 30, "it should be less than or equal to 1000000000"),
        ("training.steps=1" + "0" * 5000, "it should be a valid integer"),
        ("data.workers=100000", "it should be less than or equal to 256"),
        ("trainable.rank=1000000000", "it should be less than or equal to 16384"),
        ("guard.window=1000000000000", "it should be less than or equal to 100000"),
        ("sampling.guidance_scale=1e308", "it should be less than or equal to 1000"),
        ("optimizer.schedule_cycles=0", "it should be greater than or equal to 1"),
        ("flow.shift=-1", 'should be a number above 0 and up to 1000, "release", "flux" or'),
        ("flow.shift=flax", 'should be a number above 0 and up to 1000, "release", "flux" or'),
        ('out="a\\u0000b"', "a path cannot contain a NUL character"),
        ("recompute.memory=" + "9" * 10_000 + "GiB", "is not an amount of memory"),
        ("x" * 10_000 + "=1", "is not a key of a recipe"),
        ("seed=" + "[" * 10_000, "it should be a valid integer"),
    ],
)
def test_what_cannot_be_meant_is_refused_in_one_short_sentence(
    path: Path, change: str, message: str
) -> None:
    """Not by a hang or a crash later; and without the words of the library that validates."""
    said = _message(path, change)
    assert message in said
    assert len(said) < 700
    assert "constrained" not in said
    assert "literal" not in said.lower()


def test_a_cache_leaves_nothing_to_encode_ahead(path: Path) -> None:
    cached = ("codec.kind=autoencoder", "data.cache=kept", "data.windows=1")
    message = _message(path, *cached, "training.encode_ahead=true")
    assert "training.encode_ahead = true, but with data.cache = " in message


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"out = \n", "is not valid TOML: .*line 1"),
        (b"\xff\xfe", r"is not valid TOML: it is not UTF-8 text\."),
        (b"seed = 1" + b"0" * 5000, "is not valid TOML"),
        (b"seed = " + b"[" * 10_000, "is not valid TOML"),
        (b"a = \0", "is not valid TOML"),
    ],
    ids=["no value", "no UTF-8", "a long number", "a deep list", "a NUL character"],
)
def test_a_file_that_is_no_toml_is_refused(path: Path, content: bytes, message: str) -> None:
    path.write_bytes(content)
    with pytest.raises(RecipeError, match=rf"recipe\.toml {message}") as caught:
        config.load(path)
    assert len(str(caught.value)) < 400


def test_a_recipe_is_read_from_a_regular_file(tmp_path: Path) -> None:
    path = tmp_path / "recipe.toml"
    with pytest.raises(RecipeError, match=r"There is no recipe .*recipe\.toml"):
        config.load(path)
    with pytest.raises(RecipeError, match="cannot be read: it is a folder"):
        config.load(tmp_path)
    os.mkfifo(path)
    with pytest.raises(RecipeError, match="it is a named pipe, expected a regular file"):
        config.load(path)


def test_home_is_where_the_shell_has_it(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/somebody")
    assert config.load(path, ["out=~/run"]).out == Path("/home/somebody/run")


def test_a_cache_of_images_needs_no_windows(path: Path) -> None:
    images = "data.buckets=[{num_frames=1, height=64, width=96}]"
    assert config.load(path, [images, "data.cache=kept"]).data.windows is None
    for changes in ([], [images, "data.stills_from_videos=true"]):
        with pytest.raises(RecipeError, match=r"data\.windows = 1"):
            config.load(path, [*changes, "data.cache=kept"])


def test_no_buckets_is_the_default(path: Path) -> None:
    loaded = config.load(path, ["data.buckets=[]", "data.auto_buckets={pixels=6144}"])
    assert loaded.data.buckets == ()


def test_all_families_are_named_with_the_key() -> None:
    text = Path(__file__).parents[1].joinpath("docs/reference/recipe.md").read_text()
    (line,) = [each for each in text.splitlines() if each.startswith("| `family` |")]
    assert [name for name in FAMILIES if f"`{name}`" not in line] == []
