"""What loading promises: one clear sentence in seconds, and never a half-filled model."""

import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from diffusers import AutoencoderKLWan
from safetensors.torch import load_file, save_file
from transformers import UMT5Config, UMT5EncoderModel

from longtake.errors import ModelError, RecipeError
from longtake.models.pretrained import (
    check_arguments,
    construct,
    diffusers_class,
    load_pretrained,
    quiet,
    transformers_class,
)


def _autoencoder(**config: Any) -> Any:
    sizes = {"base_dim": 4, "dim_mult": [1, 1], "num_res_blocks": 1, "temperal_downsample": [True]}
    return AutoencoderKLWan(**(sizes | config))


@pytest.mark.parametrize("where", ["/no/such/folder", "./nope", "no/such/folder", "nope"])
def test_a_path_that_is_no_folder_fails_at_once(where: str) -> None:
    """What cannot be a repository id is never looked for on the network."""
    with pytest.raises(ModelError, match=f"There is no folder {where}"):
        load_pretrained(AutoencoderKLWan, where, "vae")


def test_a_missing_subfolder_names_those_that_are_there(tmp_path: Path) -> None:
    """The usual mistake is one level too deep or too high."""
    (tmp_path / "vea").mkdir()
    with pytest.raises(ModelError, match="has no subfolder vae; it has vea"):
        load_pretrained(AutoencoderKLWan, str(tmp_path), "vae")


def test_a_folder_without_a_model_is_named(tmp_path: Path) -> None:
    """Folder, class and reason stand in one sentence."""
    (tmp_path / "vae").mkdir()
    with pytest.raises(ModelError, match=r"AutoencoderKLWan cannot be loaded from .*vae: "):
        load_pretrained(AutoencoderKLWan, str(tmp_path), "vae")


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A hub that refuses every connection, and an empty folder as its cache."""
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize("is_offline", [True, False])
def test_an_unreachable_hub_fails_in_seconds(
    is_offline: bool,
    hub: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Switched off or refused: one sentence, where the hub's client would retry for minutes."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", is_offline)
    began = time.monotonic()
    with pytest.raises(ModelError, match="nothing of that name was downloaded before") as raised:
        load_pretrained(UMT5EncoderModel, "some/where", "text_encoder")
    assert time.monotonic() - began < 60
    assert len(str(raised.value).splitlines()) == 1
    assert capfd.readouterr() == ("", "")
    assert not list(hub.iterdir())


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


@pytest.mark.parametrize("where", ["flux1-dev.safetensors", "models/wan.gguf"])
def test_one_file_is_no_folder_in_diffusers_layout(where: str) -> None:
    """Whether it is there or not."""
    with pytest.raises(ModelError, match=f"{where} is one file of weights. longtake loads folders"):
        load_pretrained(AutoencoderKLWan, where, "vae")


def test_weights_of_a_variant_alone_are_named(tmp_path: Path) -> None:
    """The libraries would say that there is no file."""
    _autoencoder().save_pretrained(tmp_path / "vae", variant="fp16")
    with pytest.raises(ModelError, match="has weights of the variant fp16 only, and longtake"):
        load_pretrained(AutoencoderKLWan, str(tmp_path), "vae")


def test_what_was_downloaded_before_needs_no_network(hub: Path) -> None:
    """A repository in the hub's cache loads where the hub cannot be reached."""
    repository = hub / "models--some--where"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("0" * 40)
    saved = _autoencoder()
    saved.save_pretrained(repository / "snapshots" / ("0" * 40) / "vae")
    loaded = load_pretrained(AutoencoderKLWan, "some/where", "vae")
    assert torch.equal(loaded.quant_conv.weight, saved.quant_conv.weight)


def test_weights_that_do_not_fill_the_model_are_refused(tmp_path: Path) -> None:
    """The libraries would only log that the rest stays random."""
    _autoencoder().save_pretrained(tmp_path / "vae")
    file = tmp_path / "vae" / "diffusion_pytorch_model.safetensors"
    weights = load_file(file)
    del weights["quant_conv.bias"]
    save_file(weights, file, metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"1 tensors of AutoencoderKLWan .* quant_conv\.bias"):
        load_pretrained(AutoencoderKLWan, str(tmp_path), "vae")


def test_weights_of_another_size_are_refused(tmp_path: Path) -> None:
    """A config that was edited by hand does not load."""
    _autoencoder().save_pretrained(tmp_path / "vae")
    config = tmp_path / "vae" / "config.json"
    config.write_text(config.read_text().replace('"base_dim": 4', '"base_dim": 8'))
    with pytest.raises(ModelError, match="AutoencoderKLWan"):
        load_pretrained(AutoencoderKLWan, str(tmp_path), "vae")


def test_another_class_than_the_saved_one_is_refused(tmp_path: Path) -> None:
    """Its weights have other names, so nothing of the model would have been filled."""
    _autoencoder().save_pretrained(tmp_path / "vae")
    wrong = diffusers_class("codec.class_name", "AutoencoderKL")
    with pytest.raises(ModelError, match="is of AutoencoderKLWan, but AutoencoderKL is wanted"):
        load_pretrained(wrong, str(tmp_path), "vae")


def test_an_encoder_whose_embedding_is_tied_counts_as_filled(tmp_path: Path) -> None:
    """Wan's release stores the shared embedding alone, with tie_word_embeddings off."""
    config = UMT5Config(vocab_size=9, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2)
    encoder = UMT5EncoderModel(config)
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
    """Whatever it raises: the key, the class and the reason are named."""
    with pytest.raises(RecipeError, match=r"codec\.config does not fit AutoencoderKLWan.*Error"):
        construct("codec.config", AutoencoderKLWan, {"dim_mult": []})


@pytest.mark.parametrize("find", [diffusers_class, transformers_class])
def test_what_is_no_class_is_refused(find: Any) -> None:
    """A module's name is not a class, and the message names the recipe's key."""
    with pytest.raises(RecipeError, match=r"text\.class_name: \w+ has no class utils"):
        find("text.class_name", "utils")


def test_silence_ends_where_it_should() -> None:
    """A library speaks again after loading, and after loading that failed."""
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
    """As diffusers and transformers have many."""

    class Wrong:
        def __init__(self, head_dim: int) -> None:
            if head_dim % 2:
                raise AssertionError

    with pytest.raises(RecipeError, match=r"AssertionError in .*, line \d+: raise AssertionError"):
        construct("model.config", Wrong, {"head_dim": 7})
