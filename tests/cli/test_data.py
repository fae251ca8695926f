"""The verbs of `longtake data`, and `drill`: what they say of good and of bad input."""

import json
import shutil
import signal
import subprocess
import tomllib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from tests.build import change_options, wait_until
from tests.cli.conftest import Call, CallJson, Refuse
from tests.data.catalogs import make_catalog

from longtake.cli.data import _parse_size
from longtake.data.catalog import Catalog
from longtake.data.encode import write_video
from longtake.run_dir import RunDirectory

_WRONG_SHARDS = ("5/4", "0/4", "x", "1/2/3", "")


def test_a_run_is_audited(place: Path, call: Call, call_json: CallJson) -> None:
    code, out, err = call("data", "audit", place / "run")
    assert (code, out) == (0, "")
    assert "every clip was trained exactly as often as it should have been." in err
    found = call_json("data", "audit", place / "run")
    assert found["ok"] is True
    (epoch,) = found["epochs"]
    wanted = {"epoch": 0, "stage": "all", "seen": 8, "repeated": 0, "missing": 0, "skipped": 0}
    assert {key: epoch[key] for key in wanted} == wanted


def test_what_the_guard_skipped_is_counted(
    place: Path, tmp_path: Path, call: Call, call_json: CallJson
) -> None:
    run = RunDirectory(tmp_path / "run")
    shutil.copytree(place / "begun", run.path)  # which has no checkpoint: it begins again
    _, _, err = call("data", "audit", run.path)
    assert "skipped" in err
    assert "The guard" not in err
    run.append_rollback(
        {
            "time": "2026-01-01T00:00:00.000+00:00",
            "from_step": 2,
            "to_step": 0,
            "skipped": [1, 4],
            "reason": "spike",
            "message": "a test's",
        }
    )
    code, _, err = call("train", place / "recipe.toml", "--set", f"out={run.path}")
    assert code == 0, err
    with run.events_path.open("a") as file:
        file.write("damaged\n")
    code, out, err = call("data", "audit", run.path)
    assert (code, out) == (0, "")
    assert "events.jsonl: 1 line is no record and was left out." in err
    assert "The guard skipped 3 batches (12 samples) for good" in err
    assert "2 steps; 8 samples of abandoned steps do not count." in err
    found = call_json("data", "audit", run.path, says_more=True)
    assert (found["ok"], found["end_step"], found["num_skipped"]) == (True, 5, 3)
    assert found["restarts"] == []  # it had saved nothing, and began again
    assert [(each["seen"], each["skipped"]) for each in found["epochs"]] == [(8, 12)]


def test_a_run_that_repeated_a_clip_is_found_out(run: Path, call: Call) -> None:
    ledger = run / "ledger" / "launch_0000" / "rank_0000.bin"
    records = ledger.read_bytes()
    ledger.write_bytes(records[:16] + records[:16] + records[32:])  # the first clip twice
    code, out, err = call("data", "audit", run)
    assert (code, out) == (1, "")
    assert "Not exact" in err
    assert records[:7].hex() in err
    code, out, _ = call("data", "audit", run, "--json")
    found = json.loads(out)
    assert (code, found["ok"]) == (1, False)
    assert (found["epochs"][0]["repeated"], found["epochs"][0]["missing"]) == (1, 1)


def test_a_catalog_is_scored_and_shown(
    catalog: Path, place: Path, call: Call, call_json: CallJson
) -> None:
    scored = call_json("data", "score", catalog, "--by", "length")
    assert (scored["name"], scored["scored"], scored["unknown"]) == ("length", 64, 0)
    (bucket,) = call_json("data", "show", catalog, place / "recipe.toml")["buckets"]
    kept = {"clips": 64, "kept": 64, "dropped": 0, "reasons": {}}
    assert kept.items() <= bucket.items()
    assert bucket["batch_tokens"] == bucket["batch_size"] * bucket["tokens"] > bucket["tokens"] > 1
    code, out, err = call("data", "show", catalog)
    assert (code, out) == (0, "")
    assert "length" in err


def test_near_duplicates_are_told(
    catalog: Path, tmp_path: Path, call: Call, call_json: CallJson
) -> None:
    first, second, *others = Catalog.load(catalog).clips()
    make_catalog([first, replace(second, media=first.media), *others]).save(catalog)
    scored = call_json("data", "score", catalog, "--by", "duplicates", "--distance", 0)
    assert first.path in scored["largest"]
    assert scored["copies"] >= scored["groups"] >= 1
    assert np.count_nonzero(Catalog.load(catalog).column("duplicates")) == scored["copies"]
    code, _, err = call("data", "score", catalog, "--by", "duplicates", "--out", tmp_path / "c")
    assert code == 0
    assert "a stage with `duplicates == 0` leaves out" in err
    assert "is kept; copies are" in err


def test_scenes_of_a_film_become_clips(tmp_path: Path, call: Call, refuse: Refuse) -> None:
    levels = np.random.default_rng(0).integers(0, 256, (2, 4, 4, 3), np.uint8)
    scenes = levels.repeat(16, axis=1).repeat(16, axis=2).repeat(20, axis=0)
    write_video(tmp_path / "film.mp4", scenes, 10)
    table, out = tmp_path / "scenes.csv", tmp_path / "clips.parquet"
    code, _, err = call("data", "cuts", tmp_path / "film.mp4", "--out", table, "--workers", 1)
    assert code == 0
    assert "2 scenes in " in err
    assert "of 1 cut in 1 file" in err
    assert call("data", "index", table, "--out", out)[0] == 0
    assert [clip.num_frames for clip in Catalog.load(out).clips()] == [20, 20]
    said = refuse("data", "cuts", tmp_path / "film.mp4", "--out", out)
    assert "Scenes are written as CSV" in said


_CAPTIONER = """
import pathlib, time

class Slow:
    def __init__(self, word, seconds=0.0):
        self.word, self.seconds = word, seconds

    def captions(self, frames, clips):
        time.sleep(self.seconds)
        with pathlib.Path("asked.txt").open("a") as file:
            file.writelines(f"{clip.identity}\\n" for clip in clips)
        return [f"{self.word} {clip.num_frames} {each.shape}" for each, clip in zip(frames, clips)]
"""


def test_an_interrupted_captioning_resumes(
    place: Path,
    warm: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    call_json: CallJson,
) -> None:
    (tmp_path / "own_captioner.py").write_text(_CAPTIONER)
    monkeypatch.chdir(tmp_path)
    asked = tmp_path / "asked.txt"
    words = ["data", "caption", str(place / "silent.parquet"), "--with", "own_captioner:Slow"]
    words += ["--option", "word=shapes", "--out", "out.parquet", "--frames", "2", "--workers", "1"]
    words += ["--option", "seconds=2"]
    command = [*warm, "1", "-m", "longtake", *words]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as begun:
        wait_until(lambda: asked.exists() and len(asked.read_text().split()) >= 3)
        begun.send_signal(signal.SIGINT)
        _, said = begun.communicate(timeout=60)
    assert begun.returncode == 130, said
    assert "Traceback" not in said
    num_asked = len(asked.read_text().split())
    assert num_asked < 64
    assert not (tmp_path / "out.parquet").exists()
    words[words.index("seconds=2") - 1 : words.index("seconds=2") + 1] = []
    call_json(*words)  # other options: from the beginning
    assert len(asked.read_text().split()) == num_asked + 64
    facts = call_json(*words, "--all", "--batch-size", "16")
    assert (facts["captioned"], facts["without_caption"], facts["failed"]) == (64, 0, [])
    captions = Catalog.load(tmp_path / "out.parquet").captions()
    assert set(captions) == {"shapes 8 (2, 32, 32, 3)"}
    assert list(tmp_path.glob(".out*")) == []


def test_truncated_captions_are_counted(catalog: Path, place: Path, call_json: CallJson) -> None:
    arguments = ("data", "show", catalog, place / "recipe.toml", "--set", "text.max_tokens=2")
    shown = call_json(*arguments)
    assert shown["captions"]["num_truncated"] == shown["captions"]["num_counted"] > 0
    assert any("captions are truncated" in each for each in shown["warnings"])


def test_a_catalog_and_what_a_recipe_makes_of_it_are_drawn_in_one_file(
    catalog: Path, place: Path, tmp_path: Path, call: Call, refuse: Refuse
) -> None:
    said = refuse("data", "show", catalog, "--out", tmp_path / "pictures")
    assert "expected a file name such as name.html" in said
    out = tmp_path / "shown.html"
    for recipe in ((), (place / "recipe.toml",)):
        code, _, err = call("data", "show", catalog, *recipe, "--out", out)
        assert (code, f"wrote {out}" in err) == (0, True)
        page = out.read_text()
        assert ("data-catalog" in page, 'id="data-buckets"' in page) == (True, bool(recipe))


def test_a_size_is_width_and_height() -> None:
    assert _parse_size("832x480") == (480, 832)


def test_clips_are_prepared(catalog: Path, tmp_path: Path, call: Call, call_json: CallJson) -> None:
    arguments = ("data", "prepare", catalog, "--size", "16x16", "--out", tmp_path / "small")
    report = call_json(*arguments)
    assert (report["prepared"], report["reused"]) == (64, 0)
    clips = list(Catalog.load(Path(report["catalog"])).clips())
    assert {(clip.height, clip.width, clip.num_frames) for clip in clips} == {(16, 16, 8)}
    code, _, err = call(*arguments)
    assert code == 0
    assert "64 were there already" in err


def test_stages_that_are_too_different_are_shown_and_refused(
    catalog: Path, place: Path, call: Call
) -> None:
    call("data", "score", catalog, "--by", "length")
    stages = (
        'data.stages=[{name="a", steps=1, where=["length <= q10"]}, '
        '{name="b", where=["length > q10"]}]'
    )
    changes = ("--set", stages, "--set", "data.on_drift=refuse", "--set", "data.drift_limit=0.001")
    code, _, err = call("data", "show", catalog, place / "recipe.toml", *changes)
    assert code == 2
    assert "Clips are too different from those before" in err
    assert "Stage b" in err


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ("--on=dask", "--on dask: expected `ray`"),
        ("--workers=2", "--workers is for --on"),
        *((f"--shard={each}", f"--shard {each}: expected I/N") for each in _WRONG_SHARDS),
    ],
)
def test_a_place_that_there_is_not_is_refused(
    place: Path, call: Call, option: str, said: str
) -> None:
    """Where to work is said by --on; how many work there means nothing without it."""
    code, _, err = call("data", "cache", place / "recipe.toml", option)
    assert code == 2
    assert said in " ".join(err.split())


def test_drills_are_listed(call: Call, call_json: CallJson) -> None:
    listed = {each["fault"]: each for each in call_json("drill", "--list")}
    some = {"data-grown", "data-shrunk", "data-swapped", "killed-loader-worker", "decoder-hang"}
    assert listed.keys() >= some
    assert all(each["does"] and each["must"] for each in listed.values())
    for arguments in (["drill", "--list"], ["drill"]):
        code, _, err = call(*arguments)
        assert code == 0
        assert "decoder-hang" in err
    assert "longtake drill data-grown; or all: --all." in err


def test_a_cache_is_filled_ahead(
    place: Path, tmp_path: Path, call: Call, call_json: CallJson
) -> None:
    recipe, cache = place / "recipe.toml", tmp_path / "cache"
    changes = change_options(f"data.cache={cache}", "data.windows=1", f"out={tmp_path / 'run'}")
    facts = call_json("data", "cache", recipe, *changes)
    assert facts["cache"] == str(cache)
    assert facts["latents"] == {"present": 0, "computed": 64}
    assert facts["conditioning"] == {"present": 0, "computed": 0}
    assert facts["prompts"]["computed"] > 1
    packs = [path for path in cache.rglob("*.safetensors") if path.parent.name != "index"]
    assert facts["bytes"] == sum(path.stat().st_size for path in packs)
    assert facts["damaged"] == []
    assert (facts["failed"], facts["seconds"] > 0) == ([], True)
    code, out, err = call("data", "cache", recipe, *changes)
    assert (code, out) == (0, "")
    assert f"{cache}: 64 latents (0 computed now)" in err
    assert "0.0 MiB written." in err


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ([], "names no folder for a cache. Set one, such as --set data.cache=cache"),
        (["data.cache=c"], "data.cache keeps the latents of a fixed number of spans"),
        (["data.cache=c", "data.windows=1", "data.random_crop=true"], "turn one of them off"),
        (["data.cache=recipe.toml/c", "data.windows=1"], "The cache cannot be written: "),
        (["data.cache=c", "data.windows=0"], "data.windows is 0; it should be greater than 0"),
    ],
)
def test_a_cache_that_cannot_be(
    place: Path, refuse: Refuse, monkeypatch: pytest.MonkeyPatch, changes: list[str], said: str
) -> None:
    monkeypatch.chdir(place)
    settings = change_options(*changes, "out=other")
    assert said in refuse("data", "cache", "recipe.toml", *settings)


def test_clips_without_a_caption_get_the_text_that_is_given(tmp_path: Path, call: Call) -> None:
    folder = tmp_path / "clips"
    folder.mkdir()
    for number, name in enumerate(("a_red_ball", "b")):
        Image.new("RGB", (16, 16), (9 * number,) * 3).save(folder / f"{name}.png")
    (folder / "b.txt").write_text("its own")
    out = tmp_path / "c.parquet"
    for text, expected in (("a photo", "a photo"), ("{stem}, a photo", "a red ball, a photo")):
        code, _, err = call(
            "data", "index", folder, "--out", out, "--uncaptioned", text, "--workers", "1"
        )
        assert code == 0, err
        assert sorted(Catalog.load(out).captions()) == sorted([expected, "its own"])


def test_a_folder_of_a_kohya_trainer_becomes_catalogs_with_repeats(
    tmp_path: Path, call: Call, refuse: Refuse
) -> None:
    for name, shade in (("10_sks dog", 10), ("2_Sks Dog", 90)):
        folder = tmp_path / "train" / name
        folder.mkdir(parents=True)
        for number in range(2):
            Image.new("RGB", (16, 16), (shade + number,) * 3).save(folder / f"{number}.png")
    (tmp_path / "train" / "10_sks dog" / "0.txt").write_text("a sks dog on sand")
    (tmp_path / "train" / "10_sks dog" / "1.caption").write_text("a sks dog in snow")
    arguments = ("data", "index", tmp_path / "train", "--kohya", "--out", tmp_path / "catalogs")
    code, _, err = call(*arguments, "--workers", "1")
    assert code == 0, err
    lines = err[err.index("[data]") :].replace("\n\n", "\n")
    recipe = tomllib.loads(lines)["data"]
    assert recipe["repeats"] == {"sks_dog": 10, "sks_dog_2": 2}
    captions = {
        name: sorted(Catalog.load(Path(path)).captions())
        for name, path in recipe["catalogs"].items()
    }
    assert captions == {
        "sks_dog": ["a sks dog in snow", "a sks dog on sand"],
        "sks_dog_2": ["Sks Dog", "Sks Dog"],
    }
    said = refuse("data", "index", tmp_path, "--kohya", "--out", tmp_path / "catalogs")
    assert "has no folder that is named like `10_sks dog`" in said


def test_clips_without_captions_are_told_with_what_that_means(
    shapes_catalog: Path, tmp_path: Path, call: Call
) -> None:
    clips = shapes_catalog.parent / "clips"
    arguments = ("data", "index", clips, "--captions", "sidecar", "--out", tmp_path / "c.parquet")
    code, _, err = call(*arguments)
    assert code == 0
    left_out = "training leaves such clips out, unless data.keep_uncaptioned is set. Give captions"
    assert f"64 clips without a caption: {left_out}" in err
