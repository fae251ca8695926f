"""The examples are recipes, say how they are run, and can be planned without weights."""

import json
import re
import socket
import subprocess
from pathlib import Path

import pytest
from tests.data.catalogs import make_catalog

from longtake import config
from longtake.data.catalog import Catalog
from longtake.models.base import family
from longtake.models.components import outline
from longtake.planner.devices import device_named
from longtake.planner.forecast import check_gradients
from longtake.planner.memory import outline_step

_ROOT = Path(__file__).resolve().parents[2]
_EXAMPLES = sorted((_ROOT / "examples").glob("*.toml"))
_ON_CARDS = [path for path in _EXAMPLES if path.stem.endswith("gb")]


_each_example = pytest.mark.parametrize("path", _EXAMPLES, ids=lambda path: path.name)


@_each_example
def test_an_example_is_a_recipe(path: Path) -> None:
    recipe = config.load(path)
    family(recipe.model.family)
    for bucket in recipe.data.buckets:
        assert bucket.num_frames % 4 == 1
        assert (bucket.height % 16, bucket.width % 16) == (0, 0)


@_each_example
def test_an_example_says_how_to_run_it(path: Path) -> None:
    recipe, opening = config.load(path), path.read_text().partition("\nout = ")[0]
    assert all(line.startswith("#") for line in opening.splitlines())
    assert f"longtake train examples/{path.name}" in opening
    assert "Expected" in opening or "Predicted" in opening
    assert "@" not in opening
    if path.stem == "tiny_flux_module":
        assert "python examples/make_pairs.py pairs" in opening
        return
    assert re.search(f"longtake data index .* --out {recipe.data.catalog}$", opening, re.MULTILINE)
    assert f"longtake sample {recipe.out} " in opening
    assert f"longtake export {recipe.out} " in opening
    for name in recipe.data.conditioning:
        assert f"--conditioning {name}=" in opening
        assert f"`{'before' if name == 'reference' else name}`" in opening


def test_there_is_one_for_each_gpu() -> None:
    assert [path.stem for path in _ON_CARDS] == [
        "flux_kontext_lora_48gb",
        "flux_kontext_module_48gb",
        "wan_14b_lora_80gb",
        "wan_1_3b_full_80gb",
        "wan_1_3b_lora_24gb",
    ]
    for path in _ON_CARDS:
        memory = config.load(path).recompute.memory
        assert memory is not None
        named = int(path.stem.rpartition("_")[2].removesuffix("gb"))
        assert 0.95 < config.memory_bytes(memory) / 2**30 / named <= 1


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the repository's root, without a network."""

    def refuse(*_: object) -> None:
        raise OSError("there is no network in this test")

    monkeypatch.chdir(_ROOT)
    monkeypatch.setattr(socket.socket, "connect", refuse)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("path", _ON_CARDS, ids=lambda path: path.name)
def test_an_example_is_planned_without_weights(path: Path) -> None:
    step = outline_step(config.load(path), device_named("h100"))
    gradients = check_gradients(step)
    trained = [name for name, p in step.components.model.named_parameters() if p.requires_grad]
    assert sorted(gradients.reached) == sorted(trained)
    assert len(trained) > 100
    assert not gradients.unreached
    assert not gradients.traps
    billions = sum(p.numel() for p in step.components.model.parameters()) / 1e9
    assert any(0 <= billions - size < 0.1 for size in (11.9, 14.3, 1.4))


# --- a run on 24 nodes --------------------------------------------------------------------------

_CLUSTER = _ROOT / "examples" / "video_1_1b_192_h100.toml"


def test_the_cluster_s_recipe_has_the_size_that_it_says() -> None:
    recipe = config.load(_CLUSTER)
    assert recipe.model.pretrained is None
    parameters = list(outline(recipe).model.parameters())
    assert 1.0e9 < sum(parameter.numel() for parameter in parameters) < 1.2e9
    assert all(parameter.requires_grad for parameter in parameters)


def test_the_stages_of_the_cluster_s_recipe_grow() -> None:
    data = config.load(_CLUSTER).data
    buckets = [stage.buckets or data.buckets for stage in data.stages]
    sizes = [max(shape.height * shape.width for shape in shapes) for shapes in buckets]
    assert sizes == sorted(set(sizes))
    assert len(sizes) == 3
    assert data.stages[0].where == ("nouns <= q70",)
    for shape in data.shapes():
        assert (shape.num_frames % 4, shape.height % 16, shape.width % 16) == (1, 0, 0)


def test_ranks_of_the_cluster_share_model_and_batch_as_it_says() -> None:
    step = outline_step(config.load(_CLUSTER), device_named("h100"), 192, 8)
    assert (step.num_shards, step.num_copies) == (8, 24)
    assert (step.batch.micro_batch_size, step.batch.num_micro_batches) == (2, 1)
    assert (step.batch.bucket.num_frames, step.batch.bucket.height) == (101, 720)


@pytest.mark.parametrize("preset", ["low4s", "high4s"])
def test_the_cluster_s_presets_fit_its_codec(preset: str) -> None:
    changed = config.load(_CLUSTER).evaluation.presets[preset]
    assert changed.num_frames == 101
    assert (changed.height or 720) % 16 == 0


def test_the_cluster_s_plan_is_of_its_recipe() -> None:
    plan = _CLUSTER.with_suffix(".plan.txt").read_text()
    assert f"longtake plan examples/{_CLUSTER.name} --processes 192 --per-node 8" in plan
    stages = config.load(_CLUSTER).data.stages
    for row in (
        "encoders",
        "waits",
        "saves",
        "failures",
        *(f"stage {each.name}" for each in stages),
    ):
        assert f"\n {row} " in plan
    # What its comments say of it.
    assert re.search(r"all +8 d 1 h +37,\d\d\d ", plan)
    assert "take 8.0 days and 37,000 GPU-hours" in _CLUSTER.read_text()
    assert "1.14 B parameters, of which 1.14 B train (100.00%)" in plan
    assert "192 processes on 24 nodes: 24 copies of the model, each held by 8 together." in plan
    assert "Gradient reaches 663 of 663 trainable parameters." in plan
    guide = (_ROOT / "docs" / "guides" / "cluster.md").read_text()
    *_, whole = (line for line in plan.splitlines() if line.startswith(" all "))
    assert whole in guide  # the table of costs is the plan's


# --- a loop of one's own -------------------------------------------------------------------------

_OWN_LOOP = _ROOT / "examples" / "own_loop.py"


@pytest.mark.slow
def test_a_loop_of_ones_own_goes_on_where_it_was(
    shapes_catalog: Path, warm: list[str], tmp_path: Path
) -> None:
    def call(*arguments: object) -> subprocess.CompletedProcess[str]:
        command = [*warm, "1", str(_OWN_LOOP), "clips.parquet", *map(str, arguments)]
        return subprocess.run(
            command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=600
        )

    catalog = Catalog.load(shapes_catalog)
    clips = list(catalog.clips())
    make_catalog(clips[:48]).save(tmp_path / "clips.parquet")
    first = call("--steps", 7)
    assert first.returncode == 0, first.stderr
    catalog.save(tmp_path / "clips.parquet")
    refused = call("--steps", 9)
    assert refused.returncode == 1
    assert "16 clips added" in refused.stderr
    assert "Traceback" not in refused.stderr
    assert refused.stderr.endswith("--on-change merge (or another).\n")
    second = call("--steps", 9, "--on-change", "merge")
    assert second.returncode == 0, second.stderr
    lines = [*first.stdout.splitlines(), *second.stdout.splitlines()]
    assert [line.split()[1] for line in lines] == [str(step) for step in range(16)]
    seen = [clip for line in lines for clip in line.partition("clips ")[2].split()]
    assert len(seen) == len(set(seen)) == 64
    state = json.loads((tmp_path / "own_loop.json").read_text())
    assert (state["global_step"], state["epoch"], state["step_in_epoch"]) == (16, 1, 0)
