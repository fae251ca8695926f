"""Metadata in the headers of exported files, which other tools show."""

import hashlib
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save
from tests.models.tiny import make_recipe

from longtake.errors import RunError
from longtake.models.base import family
from longtake.models.file_header import Words, base_name, describe, triggers
from longtake.models.lora_export import write_weights
from longtake.run_dir import RunDirectory

_WEIGHTS = {"b.weight": torch.arange(6.0).view(2, 3), "a": torch.ones(3, dtype=torch.bfloat16)}
_FACTS = {f"ss_{number}": str(number) for number in range(20)}


def _behind_header(data: bytes) -> bytes:
    return data[8 + int.from_bytes(data[:8], "little") :]


def test_the_hash_is_that_of_the_tensors_as_the_spec_and_kohya_define_it(tmp_path: Path) -> None:
    """Kohya's scripts save the tensors with less metadata, and leave the header out."""
    file, texts = tmp_path / "a.safetensors", {"title": 'a "b" \\ ü 猫 \x7f\u2028', **_FACTS}
    write_weights(_WEIGHTS, file, texts)
    with safe_open(file, "pt") as opened:
        metadata = opened.metadata()
        assert torch.equal(opened.get_tensor("b.weight"), _WEIGHTS["b.weight"])
    digest = hashlib.sha256(_behind_header(save(_WEIGHTS, {"ss_0": "0"}))).hexdigest()
    hashes = {"modelspec.hash_sha256": f"0x{digest}", "sshs_model_hash": digest}
    assert metadata == {"format": "pt", **texts, **hashes}


def test_the_same_weights_and_facts_give_the_same_bytes(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write_weights(_WEIGHTS, tmp_path / name, _FACTS)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_a_base_is_named_without_its_path(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    for where, name in {
        "Wan-AI/Wan2.1-T2V-1.3B-Diffusers": "Wan-AI/Wan2.1-T2V-1.3B-Diffusers",
        str(tmp_path / "mine"): "mine",
        "folder/wan.safetensors": "wan.safetensors",
    }.items():
        model = {"pretrained": where}
        if where.endswith(".safetensors"):
            model["config_from"] = "a/b"
        assert base_name(make_recipe("wan", (1, 16, 16), model=model)) == name


def test_names_of_folders_are_printable(tmp_path: Path) -> None:
    folder = tmp_path / "a\x1b\udcff"
    model = {"pretrained": str(folder)}
    recipe, run = make_recipe("wan", (1, 16, 16), model=model), RunDirectory(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RunDirectory, "record", lambda _: {"created": "now"})
        facts = describe(recipe, family("wan"), run, 1, "comfyui")
    assert facts["modelspec.title"] == facts["ss_sd_model_name"] == r"a\x1b\udcff"


def test_a_file_that_cannot_be_written_is_an_os_error(tmp_path: Path) -> None:
    """As on a full disk, after which a training goes on; safetensors has an error of its own."""
    with pytest.raises(OSError, match="No such file"):
        write_weights(_WEIGHTS, tmp_path / "none" / "a.safetensors")


def test_trigger_words_are_those_of_the_catalogs() -> None:
    data: dict[str, Any] = {"catalogs": {"a": "a.parquet", "b": "b.parquet", "c": "c.parquet"}}
    data |= {"catalog": None, "trigger": "sks dog"}
    data["captions"] = {"a": {"trigger": "ohwx"}, "b": {"trigger": ""}}
    assert triggers(make_recipe("wan", (1, 16, 16), data=data)) == "ohwx, sks dog"


@pytest.mark.parametrize(
    ("name", "architecture"),
    [("flux", "Flux.1-dev"), ("qwen_image_edit", "Qwen-Image-Edit"), ("z_image", "Z-Image")],
)
def test_facts_say_what_was_trained(name: str, architecture: str) -> None:
    sections: dict[str, Any] = {"trainable": {"kind": "dora", "rank": 4, "alpha": 2.0}}
    recipe = make_recipe(name, (1, 16, 24), optimizer={"kind": "mine.optim:Lion"}, **sections)
    words = Words("A dog", "Somebody", "apache-2.0")
    facts = describe(recipe, family(name), None, 30, "comfyui", words)
    assert facts["modelspec.architecture"] == f"{architecture}/lora"
    assert facts["modelspec.title"] == facts["ss_output_name"] == "A dog"
    assert (facts["modelspec.author"], facts["modelspec.license"]) == ("Somebody", "apache-2.0")
    assert facts["modelspec.resolution"] == "24x16"
    assert facts["modelspec.description"] == "dora of rank 4, trained for 30 steps"
    # The file's weights have alpha / rank in them.
    assert (facts["ss_network_dim"], facts["ss_network_alpha"]) == ("4", "4")
    assert facts["ss_optimizer"] == "Lion"
    assert all(facts.values())
    whole = describe(make_recipe(name, (1, 16, 24)), family(name), None, 30, "comfyui")
    assert whole["modelspec.architecture"] == architecture


@pytest.mark.parametrize("title", ["", "  ", "two\nlines", "\x1b[31m", "\udcff", "x" * 1001])
def test_words_that_no_header_should_have_are_refused(title: str) -> None:
    with pytest.raises(RunError, match=r"--title .*: expected one line"):
        Words(title)
