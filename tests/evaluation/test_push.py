"""Exports that are sent to the Hub: here to a server that speaks what huggingface_hub asks for."""

import base64
import json
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]
from huggingface_hub import constants
from tests.build import TINY_WAN, Recipes

from longtake.errors import RunError
from longtake.evaluation.export import ExportChoice, export
from longtake.evaluation.push import check_push, collect, list_files, send
from longtake.models.file_header import Words
from longtake.run_dir import RunDirectory
from longtake.sampling.sampler import Sampler, load_sampler

_TOKEN = "hf_no_token_of_anybody"  # noqa: S105
_LORA = (*TINY_WAN, "trainable={kind='lora', rank=2}", "data.trigger='`ohwx` <b>'")


@dataclass
class Hub:
    """What the server has been told."""

    repositories: dict[str, dict[str, Any]] = field(default_factory=dict)
    """What each was created with, and under `files` the contents by name."""
    tokens: set[str] = field(default_factory=set)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    told = Hub()

    class Handler(BaseHTTPRequestHandler):
        def answer(self, status: int, value: Any, **headers: str) -> None:
            content = json.dumps(value).encode()
            self.send_response(status)
            for name, text in {"Content-Length": str(len(content)), **headers}.items():
                self.send_header(name.replace("_", "-"), text)
            self.end_headers()
            self.wfile.write(content)

        def do_GET(self) -> None:
            name = self.path.removeprefix("/api/models/")
            if name in told.repositories:
                self.answer(200, {"id": name})
            else:
                self.answer(404, {"error": "none"}, X_Error_Code="RepoNotFound")

        def do_POST(self) -> None:
            content = self.rfile.read(int(self.headers["Content-Length"]))
            told.tokens.add(self.headers.get("Authorization", ""))
            repository = "/".join(self.path.split("/")[3:5])
            if self.path == "/api/repos/create":
                asked = json.loads(content)
                name = f"{asked['organization']}/{asked['name']}"
                is_new = name not in told.repositories
                told.repositories.setdefault(name, {**asked, "files": {}})
                self.answer(200 if is_new else 409, {"url": f"{constants.ENDPOINT}/{name}"})
            elif "/preupload/" in self.path:
                named = [each["path"] for each in json.loads(content)["files"]]
                modes = [
                    {"path": name, "uploadMode": "regular", "shouldIgnore": False} for name in named
                ]
                self.answer(200, {"files": modes})
            elif "/commit/" in self.path:
                lines = [json.loads(line) for line in content.splitlines()]
                for line in (each["value"] for each in lines if each["key"] == "file"):
                    files = told.repositories[repository]["files"]
                    files[line["path"]] = base64.b64decode(line["content"])
                url = f"{constants.ENDPOINT}/{repository}/commit/{'1' * 40}"
                self.answer(200, {"commitUrl": url, "commitOid": "1" * 40})
            else:
                self.answer(200, {"errors": [], "warnings": []})  # the check of the card's YAML

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setenv("HF_TOKEN", _TOKEN)
    Thread(target=server.serve_forever, daemon=True).start()
    yield told
    server.shutdown()
    server.server_close()


def _exported(recipes: Recipes, folder: Path, *wanted: Any) -> tuple[Sampler, ExportChoice, Path]:
    recipe = recipes.trained(*_LORA, "training={steps=1, global_batch_size=4, device='cpu'}")
    sampler = load_sampler(recipe.out, device="cpu")
    choice = ExportChoice(*wanted)._replace(is_pushed=True)
    out = folder / ("my lora.safetensors" if choice.is_file else "out")
    export(sampler, out, **choice._asdict())
    return sampler, choice, out


def test_an_export_is_sent_with_its_card_and_samples(
    small_recipe: Recipes, tmp_path: Path, hub: Hub, capsys: pytest.CaptureFixture[str]
) -> None:
    """The user's token is used, and shown nowhere."""
    words = Words('A "dog": #1 <script>', license="apache-2.0")
    sampler, choice, out = _exported(small_recipe, tmp_path, "comfyui", "bf16", words)
    assert sampler.run is not None
    folder = RunDirectory(sampler.run.path).evaluation_path("tiny", sampler.step)
    folder.mkdir(parents=True)
    videos = [
        {"file": f"0{n}_s0.mp4", "prompt": f"a dog: {n}", "seed": 0, "measures": {}}
        for n in range(6)
    ]
    for video in videos:
        (folder / str(video["file"])).write_bytes(b"a video")
    (folder / "05_s0.mp4").unlink()
    (folder / "00_s0.mp4").unlink()
    (folder / "00_s0.mp4").symlink_to(out)  # of somebody: not followed
    scores = {"preset": "tiny", "step": sampler.step, "key": "k", "weights": sampler.weights}
    scores |= {"time": "2026-05-01T12:00:00+00:00", "server": "s", "settings": {"fps": 8}}
    scores |= {"videos": videos, "measures": {}, "alarms": [], "seconds": {}}
    (folder / "scores.json").write_text(json.dumps(scores))

    check_push("me/dog", update=False)
    files = collect(sampler, out, choice, "me/dog")
    url = send("me/dog", files, "step 1", private=True, update=False)
    assert url.startswith(f"{constants.ENDPOINT}/me/dog/commit/")
    repository = hub.repositories["me/dog"]
    sent = repository["files"]
    assert repository["visibility"] == "private"
    assert sent["my lora.safetensors"] == out.read_bytes()
    samples = [f"samples/tiny-0{n}_s0.mp4" for n in (1, 2, 3, 4)]
    assert sent.keys() == {"my lora.safetensors", "README.md", *samples}
    _, head, body = sent["README.md"].decode().split("---\n")
    told = yaml.safe_load(head)
    assert told == {
        "license": "apache-2.0",
        "library_name": "diffusers",
        "pipeline_tag": "text-to-video",
        "instance_prompt": "`ohwx` <b>",
        "tags": ["lora"],
        "widget": [
            {"text": f"a dog: {n}", "output": {"url": samples[n - 1]}} for n in (1, 2, 3, 4)
        ],
    }
    assert r"\<script\>" in body
    assert r"\`ohwx\` \<b\>" in body
    assert "<script>" not in body.replace(r"\<script\>", "")
    assert 'weight_name="my lora.safetensors")' in body
    assert hub.tokens == {f"Bearer {_TOKEN}"}
    shown = "\n".join(list_files(files)) + "".join(capsys.readouterr())
    assert _TOKEN not in shown
    assert _TOKEN.encode() not in b"".join(sent.values())


def test_a_repository_that_exists_is_updated_only_by_request(
    small_recipe: Recipes, tmp_path: Path, hub: Hub
) -> None:
    hub.repositories["me/dog"] = {"files": {"README.md": b"mine", "other": b"mine"}}
    with pytest.raises(RunError, match="--push me/dog: the Hub has it already"):
        check_push("me/dog", update=False)
    with pytest.raises(RunError, match=r"the Hub refused.*\(create_repo\)"):
        send("me/dog", {"README.md": b"new"}, "step", private=True, update=False)
    assert hub.repositories["me/dog"]["files"]["README.md"] == b"mine"
    check_push("me/dog", update=True)
    send("me/dog", {"README.md": b"new"}, "step", private=True, update=True)
    assert hub.repositories["me/dog"]["files"] == {"README.md": b"new", "other": b"mine"}
    with pytest.raises(RunError, match=r"--push a//b: .*Check the name"):
        check_push("a//b", update=False)


def test_no_path_of_this_computer_is_in_what_is_sent(small_recipe: Recipes, tmp_path: Path) -> None:
    sampler, choice, out = _exported(small_recipe, tmp_path, "peft")
    base = tmp_path / "releases" / "wan"
    base.mkdir(parents=True)
    model = sampler.recipe.model.model_copy(update={"pretrained": str(base)})
    recipe = sampler.recipe.model_copy(update={"model": model})
    config = json.loads((out / "adapter_config.json").read_text())
    (out / "adapter_config.json").write_text(
        json.dumps(config | {"base_model_name_or_path": str(base)})
    )
    (out / "nested").mkdir()
    (out / "nested" / "no.json").write_bytes(b"\xff")
    place = {"pretrained_model_name_or_path": str(base), "subfolder": "writer"}
    hub = {"pretrained_model_name_or_path": "their/writer", "subfolder": None}
    index = {"writer": ["transformers", "Writer", place], "theirs": [None, None, hub]}
    (out / "modular_model_index.json").write_text(json.dumps(index))
    (out / "nested" / "config.json").write_text(json.dumps({"text": {"_name_or_path": str(base)}}))
    files = collect(replace(sampler, recipe=recipe), out, choice, "me/dog")
    contents = [each if isinstance(each, bytes) else each.read_bytes() for each in files.values()]
    assert all(str(tmp_path).encode() not in each for each in contents)
    card = files["README.md"]
    assert isinstance(card, bytes)
    assert 'DiffusionPipeline.from_pretrained("wan")' in card.decode()
    assert json.loads(files["adapter_config.json"])["base_model_name_or_path"] == "wan"  # type: ignore[arg-type]
    assert files["nested/no.json"] == out / "nested" / "no.json"
    # What a modular pipeline would load from there has no place: nobody else has that folder.
    sent = json.loads(files["modular_model_index.json"])  # type: ignore[arg-type]
    nowhere = place | {"pretrained_model_name_or_path": None}
    assert sent == {"writer": ["transformers", "Writer", nowhere], "theirs": [None, None, hub]}
    assert json.loads(files["nested/config.json"]) == {"text": {"_name_or_path": "wan"}}  # type: ignore[arg-type]
