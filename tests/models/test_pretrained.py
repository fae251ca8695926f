"""Released models: loaded whole or refused in one sentence, in seconds; what their files say."""

import json
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from diffusers import AutoencoderKL, AutoencoderKLWan
from safetensors.torch import load_file, save_file
from tests.models.tiny import T5, write_configs
from transformers import UMT5Config, UMT5EncoderModel

from longtake.config import Expert, ModelSection
from longtake.errors import ModelError, RecipeError
from longtake.models.flux import Flux
from longtake.models.pretrained import (
    PipelinePart,
    check_arguments,
    construct,
    load_pretrained,
    quiet,
)
from longtake.models.release_checks import (
    refuse_further_inputs,
    refuse_other_objectives,
    refuse_wrong_expert,
)
from longtake.models.releases import SHIPPED, Release, find_part, part_config
from longtake.models.tubelet import Tubelet
from longtake.models.wan import Wan


def _autoencoder(**config: Any) -> Any:
    sizes = {"base_dim": 4, "dim_mult": [1, 1], "num_res_blocks": 1, "temperal_downsample": [True]}
    return AutoencoderKLWan(**(sizes | config))


def _saved(folder: Path) -> Path:
    _autoencoder().save_pretrained(folder / "vae")
    return folder / "vae"


def _without_a_tensor(folder: Path) -> None:
    file = _saved(folder) / "diffusion_pytorch_model.safetensors"
    weights = load_file(file)
    del weights["quant_conv.bias"]
    save_file(weights, file, metadata={"format": "pt"})


def _of_another_size(folder: Path) -> None:
    config = _saved(folder) / "config.json"
    config.write_text(config.read_text().replace('"base_dim": 4', '"base_dim": 8'))


@pytest.mark.parametrize(
    ("make", "loaded_class", "message"),
    [
        (lambda folder: (folder / "vea").mkdir(), AutoencoderKLWan, "no subfolder vae; it has vea"),
        (lambda folder: (folder / "vae").mkdir(), AutoencoderKLWan, "cannot be loaded from .*vae"),
        (
            lambda folder: _autoencoder().save_pretrained(folder / "vae", variant="fp16"),
            AutoencoderKLWan,
            "has weights of the variant fp16 only, and longtake",
        ),
        (_without_a_tensor, AutoencoderKLWan, r"1 tensors of AutoencoderKLWan .* quant_conv\.bias"),
        (_of_another_size, AutoencoderKLWan, "AutoencoderKLWan"),
        (_saved, AutoencoderKL, "is of the class AutoencoderKLWan, but AutoencoderKL is needed"),
    ],
    ids=["no folder", "empty", "variant", "a tensor missing", "another size", "another class"],
)
def test_what_would_not_fill_the_model_is_refused(
    make: Callable[[Path], object], loaded_class: Any, message: str, tmp_path: Path
) -> None:
    """The libraries would log that the rest stays random, or that there is no file."""
    make(tmp_path)
    with pytest.raises(ModelError, match=message):
        load_pretrained(loaded_class, str(tmp_path), "vae")


@pytest.mark.parametrize(
    ("where", "message"),
    [
        ("/no/such/folder", "There is no folder /no/such/folder"),
        ("./nope", "There is no folder ./nope"),
        ("no/such/folder", "There is no folder no/such/folder"),
        ("flux1-dev.safetensors", "is one file of weights. longtake loads folders"),
        ("models/wan.gguf", "is one file of weights"),
    ],
)
def test_what_cannot_be_a_repository_is_not_looked_for_on_the_network(
    where: str, message: str
) -> None:
    with pytest.raises(ModelError, match=message):
        load_pretrained(AutoencoderKLWan, where, "vae")


def _downloaded(hub: Path) -> Path:
    """An empty snapshot of some/where in the hub's cache."""
    repository = hub / "models--some--where"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("0" * 40)
    snapshot = repository / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    return snapshot


@pytest.mark.parametrize("is_offline", [True, False])
def test_an_unreachable_hub_fails_in_seconds(
    is_offline: bool,
    no_hub: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Switched off or refused: one sentence, where the hub's client would retry for minutes."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", is_offline)
    began = time.monotonic()
    with pytest.raises(ModelError, match="nothing of that name was downloaded before") as raised:
        load_pretrained(UMT5EncoderModel, "some/where", "text_encoder")
    with pytest.raises(ModelError, match="the hub cannot be reached") as config_raised:
        part_config("some/where", "transformer")
    assert all(name in str(config_raised.value) for name in SHIPPED)
    assert time.monotonic() - began < 60
    assert len(str(raised.value).splitlines()) == 1
    assert capfd.readouterr() == ("", "")
    assert not list(no_hub.iterdir())


def test_what_was_downloaded_before_needs_no_network(no_hub: Path) -> None:
    snapshot, saved = _downloaded(no_hub), _autoencoder()
    saved.save_pretrained(snapshot / "vae")
    loaded = load_pretrained(AutoencoderKLWan, "some/where", "vae")
    assert torch.equal(loaded.quant_conv.weight, saved.quant_conv.weight)
    write_configs(snapshot, {"transformer/config.json": {"num_attention_heads": 2}})
    assert part_config("some/where", "transformer")["num_attention_heads"] == 2


class _GatedHub(BaseHTTPRequestHandler):
    """Answers as the hub does for a gated repository: its facts are public, its files are not."""

    status = 401

    def do_GET(self) -> None:
        if "/tree/" in self.path:
            file = {"type": "file", "path": "vae/config.json", "size": 9, "oid": "1" * 40}
            return self._answer(200, json.dumps([file]).encode())
        if self.path.startswith("/api/models/"):
            files = [{"rfilename": "vae/config.json"}]
            facts = {"id": "some/gated", "sha": "0" * 40, "gated": "auto", "siblings": files}
            return self._answer(200, json.dumps(facts | {"modelId": "some/gated"}).encode())
        return self._answer(self.status, b"Access to model some/gated is restricted.")

    do_HEAD = do_GET  # noqa: N815

    def _answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        if status != 200:
            self.send_header("X-Error-Code", "GatedRepo")
            self.send_header("X-Error-Message", "Access to model some/gated is restricted.")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *args: object) -> None:
        """Nothing."""


@pytest.mark.parametrize("status", [401, 403])
def test_a_gated_repository_says_what_to_do(
    status: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Whether one is logged in without access (403) or not at all (401)."""
    handler = type("Hub", (_GatedHub,), {"status": status})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        address = f"http://127.0.0.1:{server.server_address[1]}"
        files = f"{address}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", address)
        monkeypatch.setattr(huggingface_hub.constants, "HUGGINGFACE_CO_URL_TEMPLATE", files)
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
        advice = r"Accept the licence at https://huggingface\.co/some/gated, then run `hf auth "
        with pytest.raises(ModelError, match=advice) as raised:
            load_pretrained(AutoencoderKLWan, "some/gated", "vae")
        assert len(str(raised.value).splitlines()) == 1
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_an_encoder_whose_embedding_is_tied_counts_as_filled(tmp_path: Path) -> None:
    """Wan's release stores the shared embedding alone, with tie_word_embeddings off."""
    encoder = UMT5EncoderModel(UMT5Config(vocab_size=9, **T5))
    encoder.save_pretrained(tmp_path / "text_encoder")
    file = tmp_path / "text_encoder" / "config.json"
    file.write_text(file.read_text().replace('embeddings": true', 'embeddings": false'))
    loaded = load_pretrained(UMT5EncoderModel, str(tmp_path), "text_encoder")
    assert torch.equal(loaded.encoder.embed_tokens.weight, encoder.shared.weight)


def test_arguments_are_checked_against_names_alone() -> None:
    """`self` and what would vanish in **kwargs are no arguments of a recipe."""

    def function(self: object, width: int, **rest: int) -> None: ...

    check_arguments("model.config", function, {"width": 1})
    for wrong in ("self", "rest", "height"):
        with pytest.raises(RecipeError, match=rf"model\.config\.{wrong} is not an argument"):
            check_arguments("model.config", function, {wrong: 1})


def test_a_constructor_that_fails_is_the_recipes_fault() -> None:
    with pytest.raises(RecipeError, match=r"codec\.config does not fit AutoencoderKLWan.*Error"):
        construct("codec.config", AutoencoderKLWan, {"dim_mult": []})


def test_silence_ends_where_it_should() -> None:
    from transformers.utils import logging

    before = logging.get_verbosity(), logging.is_progress_bar_enabled()

    def fail_quietly() -> None:
        with quiet(UMT5EncoderModel):
            assert not logging.is_progress_bar_enabled()
            raise KeyError

    with pytest.raises(KeyError):
        fail_quietly()
    assert (logging.get_verbosity(), logging.is_progress_bar_enabled()) == before


def test_an_assertion_without_a_message_is_told_by_its_line() -> None:

    class Wrong:
        def __init__(self, head_dim: int) -> None:
            if head_dim % 2:
                raise AssertionError

    with pytest.raises(RecipeError, match=r"AssertionError in .*, line \d+: raise AssertionError"):
        construct("model.config", Wrong, {"head_dim": 7})


_INDEX: dict[str, Any] = {
    "_class_name": "FluxPipeline",
    "text_encoder": ["transformers", "CLIPTextModel"],
    "text_encoder_2": ["transformers", "T5EncoderModel"],
    "tokenizer_2": ["transformers", "T5TokenizerFast"],
    "transformer_2": [None, None],
    "force_zeros": True,
}
_ELSEWHERE = {
    "text_encoder_3": ["transformers", "T5EncoderModel"],
    "tokenizer_3": ["transformers", "T5TokenizerFast"],
    "autoencoder": ["diffusers", "AutoencoderKLWan"],
}
_AS_EXPECTED = "T5EncoderModel text_encoder_2 tokenizer_2"


@pytest.mark.parametrize(
    ("expected", "index", "found"),
    [
        (Flux.frozen.text, None, _AS_EXPECTED),
        (Flux.frozen.text, _INDEX, _AS_EXPECTED),
        (Flux.frozen.text, {"vae": ["diffusers", "AutoencoderKL"]}, _AS_EXPECTED),
        (Flux.frozen.text, _ELSEWHERE, "T5EncoderModel text_encoder_3 tokenizer_3"),
        (Wan.frozen.codec, _ELSEWHERE, "AutoencoderKLWan autoencoder "),
        (Tubelet.frozen.codec, {"vae": ["diffusers", "AutoencoderKL"]}, "AutoencoderKL vae "),
    ],
    ids=["no index", "as expected", "not named", "another folder", "of a codec", "second class"],
)
def test_class_and_folder_of_a_part_are_those_of_the_repositorys_index(
    expected: PipelinePart, index: dict[str, Any] | None, found: str, tmp_path: Path
) -> None:
    if index is not None:
        write_configs(tmp_path, {"model_index.json": index})
    part = find_part(str(tmp_path), expected)
    assert f"{part.class_name} {part.folder} {part.tokenizer}" == found


@pytest.mark.parametrize("named", [["diffusers", "AutoencoderKLMagi"], ["diffusers", "os"]])
def test_a_class_that_the_family_cannot_use_is_refused(named: list[str], tmp_path: Path) -> None:
    write_configs(tmp_path, {"model_index.json": {"vae": named}})
    refused = f"names {named[1]} as its vae, but AutoencoderKLWan is ne"
    with pytest.raises(ModelError, match=refused):
        find_part(str(tmp_path), Wan.frozen.codec)


def test_parts_of_a_downloaded_repository_are_found_without_the_network(no_hub: Path) -> None:
    index = {"autoencoder": ["diffusers", "AutoencoderKLWan"]}
    write_configs(_downloaded(no_hub), {"model_index.json": index})
    assert find_part("some/where", Wan.frozen.codec).folder == "autoencoder"


@pytest.mark.parametrize(
    "scheduler",
    [
        None,
        {},
        {"_class_name": "FlowMatchEulerDiscreteScheduler", "shift": 3.0},
        {"_class_name": "FlowMatchHeunDiscreteScheduler"},
        {"_class_name": "UniPCMultistepScheduler", "prediction_type": "flow_prediction"},
        {"_class_name": "SomebodysOwnScheduler"},
    ],
)
def test_flow_matching_and_the_unknown_pass(scheduler: dict[str, object] | None) -> None:
    refuse_other_objectives(scheduler, "somewhere")


@pytest.mark.parametrize(
    ("scheduler", "target"),
    [
        ({"_class_name": "DDPMScheduler", "prediction_type": "epsilon"}, r"the noise \(epsilon\)"),
        ({"_class_name": "DDPMScheduler"}, r"the noise \(epsilon\)"),
        ({"_class_name": "UniPCMultistepScheduler"}, r"the noise \(epsilon\)"),
        ({"_class_name": "CogVideoXDDIMScheduler", "prediction_type": "v_prediction"}, "a mixture"),
        ({"_class_name": "MyOwn", "prediction_type": "v_prediction"}, "a mixture"),
        ({"_class_name": "DDIMScheduler", "prediction_type": "sample"}, "the latents themselves"),
    ],
)
def test_noise_and_v_prediction_are_refused(scheduler: dict[str, object], target: str) -> None:
    with pytest.raises(ModelError, match=f"somewhere predicts {target}.*as its scheduler") as said:
        refuse_other_objectives(scheduler, "somewhere")
    message = str(said.value)
    assert str(scheduler["_class_name"]) in message
    assert "toward the velocity noise - latents" in message
    assert len(message.splitlines()) == 1


def test_a_subfolder_that_a_shipped_model_lacks_is_named() -> None:
    with pytest.raises(ModelError, match=r"no subfolder text_encoder_2; it has transformer, vae"):
        part_config("Wan-AI/Wan2.1-T2V-1.3B-Diffusers", "text_encoder_2")


def test_a_variant_with_further_inputs_says_what_it_is() -> None:
    config = {"_class_name": "WanTransformer3DModel", "in_channels": 52, "out_channels": 16}
    release = Release(config, None, {"_class_name": "WanPipeline"})
    said = (
        r"somewhere is a variant of WanTransformer3DModel .*\(in_channels 52, out_channels 16, WanP"
    )
    with pytest.raises(ModelError, match=said):
        refuse_further_inputs(release, Wan.channel_ratios, "somewhere")


def test_a_model_that_is_trained_passes() -> None:
    """As WanPipeline writes its index for Wan 2.1, and FLUX.1 its out_channels."""
    index = {"_class_name": "WanPipeline", "boundary_ratio": None, "transformer_2": [None, None]}
    refuse_wrong_expert(index, ModelSection(family="wan", pretrained="somewhere"))
    refuse_further_inputs(Release({"in_channels": 64, "out_channels": None}, None, {}), (), "there")


_PAIR = {"transformer_2": ["diffusers", "WanTransformer3DModel"]}


@pytest.mark.parametrize(
    ("index", "expert", "message"),
    [
        (_PAIR | {"boundary_ratio": 0.875}, None, r"ratio 0\.875\)\. Set model\.expert = \"high\""),
        (_PAIR, "high", "has two transformers, but its model_index.json has no boundary_ratio: at"),
        (_PAIR | {"boundary_ratio": 1.5}, "low", "its model_index.json has boundary_ratio 1.5: at"),
        ({"boundary_ratio": 0.9}, "low", r"boundary_ratio \(0\.9\) .* names no transformer_2"),
        ({}, "low", 'model.expert = "low", but the model_index.json of somewhere names one tran'),
    ],
)
def test_one_of_two_transformers_is_chosen_by_name(
    index: dict[str, Any], expert: Expert | None, message: str
) -> None:
    section = ModelSection(family="wan", pretrained="somewhere", expert=expert)
    with pytest.raises(ModelError, match=message):
        refuse_wrong_expert(index, section)
    refuse_wrong_expert(
        _PAIR | {"boundary_ratio": 0.875}, section.model_copy(update={"expert": "low"})
    )
