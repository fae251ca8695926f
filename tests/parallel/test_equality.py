"""Facts that ranks compare, and messages about their differences."""

import random
from pathlib import Path

import torch

from longtake import config
from longtake.parallel.equality import Facts, differences_of, files_read, software


def test_a_difference_names_key_values_and_nodes_and_whether_it_decides() -> None:
    first: Facts = {
        ("recipe", "optimizer.learning_rate"): "0.001",
        ("recipe", "watch.min_seconds"): "6.0",
        ("version", "torch"): "2.13.0",
        ("version", "python"): "3.11.2",
    }
    other: Facts = {
        ("recipe", "optimizer.learning_rate"): "0.002",
        ("recipe", "watch.min_seconds"): "9.0",
        ("version", "python"): "3.11.9",
        ("setting", "NCCL_ALGO"): "Ring",
    }
    everyone: list[tuple[str, Facts]] = [
        ("a", {}),
        ("a", {}),
        ("b", other),
        ("c", {("version", "torch"): "2.12"}),
    ]
    found = {each.name: each for each in differences_of(first, everyone)}
    assert str(found["optimizer.learning_rate"]) == (
        "optimizer.learning_rate is 0.001 on a (ranks 0, 1), c (rank 3) and 0.002 on b (rank 2)"
    )
    assert str(found["NCCL_ALGO"]) == (
        "NCCL_ALGO is absent on a (ranks 0, 1), c (rank 3) and Ring on b (rank 2)"
    )
    assert {name for name, each in found.items() if each.decides} == {
        *("optimizer.learning_rate", "NCCL_ALGO", "torch"),
    }


def test_a_file_that_was_trained_elsewhere_is_found(tmp_path: Path) -> None:
    rng = random.Random(0)  # noqa: S311 - not a secret
    folder = tmp_path / "transformer"
    folder.mkdir()
    content = bytearray(rng.randbytes(3 * 2**20))
    (folder / "model.safetensors").write_bytes(content)
    (folder / "README.md").write_text("not read")
    before = files_read({"model.pretrained transformer": folder})
    key = ("weights", "model.pretrained transformer/model.safetensors")
    assert list(before) == [key]
    for place in (100, len(content) - 1):
        content[place] ^= 1
        (folder / "model.safetensors").write_bytes(content)
        assert files_read({"model.pretrained transformer": folder}) != before
        content[place] ^= 1


def test_what_computes_is_compared_and_a_hook_is_not_told(tiny_recipe: config.Recipe) -> None:
    recipe = config.changed(tiny_recipe, ["watch.hook=curl -H token"])
    facts = software(recipe, torch.device("cpu"))
    names = {name for _, name in facts}
    assert {"seed", "longtake's code", "torch", "peft", "torchao", "numpy", "av"} <= names
    assert {"deterministic algorithms", "precision of fp32 matmuls"} <= names
    assert "token" not in facts["recipe", "watch.hook"]
