"""`longtake plan` for several processes: its options, its JSON and its mistakes."""

import json
from collections.abc import Callable
from pathlib import Path

from longtake import config
from longtake.config import Recipe

_Call = Callable[..., tuple[int, str, str]]
_SMALL = ("text.max_words=24", "model.config={hidden_size=48, num_blocks=2}")


def test_a_mesh_is_planned_by_its_links(
    small_recipe: Callable[..., Recipe], call: _Call, tmp_path: Path
) -> None:
    path = tmp_path / "recipe.toml"
    changes = (
        "parallel.strategy=shard",
        "training.batch_size=8",
        "training.precision=bf16",
        "checkpoint.every=1000000",
        "checkpoint.minutes=15",
    )
    path.write_text(config.dump(small_recipe(*_SMALL, *changes)))
    options = ("--processes=8", "--per-node=4", "--link=1,0.01", "--device=h100")
    code, out, _ = call("plan", path, *options, "--json")
    assert code == 0
    facts = json.loads(out)
    mesh = facts["mesh"]
    assert (facts["processes"], facts["per_node"]) == (8, 4)
    assert mesh["link_gb_per_second"] == {"node": 1, "network": 0.01}
    assert (mesh["ranks_of_a_copy"], mesh["copies"]) == (8, 1)
    assert [row["what"] for row in mesh["sent"]] == ["weights", "gradients to shards"]
    assert all(row["exposed_seconds"] <= row["seconds"] * 1.001 for row in mesh["sent"])
    assert mesh["step_seconds"] > mesh["compute_seconds"] > 0
    both = ["parallel.strategy=hybrid", "parallel.gather=bf16"]
    assert [each["set"] for each in mesh["advice"]] == [both, both[:1], both[1:]]
    assert mesh["advice"][-1]["step_seconds"] < mesh["step_seconds"]

    code, out, err = call("plan", path, *options)
    assert (code, err) == (0, "")
    assert "8 processes on 2 nodes: one copy of the model, held by all together." in out
    assert "every 1000000 steps and every 15 minutes: a crash loses at most 15:00 of" in out
    rows = [line.split() for line in out.splitlines()]
    assert ["weights", "8", "the", "network"] in [row[:4] for row in rows]
    assert "That is much. What would help, each by itself:" in out
    assert "  --set parallel.strategy=hybrid --set parallel.gather=bf16: " in out


def test_plan_refuses_what_train_would(
    small_recipe: Callable[..., Recipe], call: _Call, tmp_path: Path
) -> None:
    recipe = small_recipe("parallel={strategy='hybrid', shard_size=3}", "training.batch_size=8")
    path = tmp_path / "recipe.toml"
    path.write_text(config.dump(recipe))
    code, out, err = call("plan", path, "--processes=4")
    assert (code, out) == (2, "")
    assert "parallel.shard_size = 3 processes, which would hold one copy of the model" in err
    code, _, err = call("plan", path, "--processes=3", "--link=quick")
    assert code == 2
    assert err.startswith("longtake: The link 'quick' is none.")
