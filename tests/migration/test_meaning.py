"""Settings of one name that mean something else here, and settings that decide only together."""

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest

from longtake.migration.migrate import Migration, migrate
from longtake.migration.settle import Answers

_ANSWERS = Answers(release="black-forest-labs/FLUX.1-dev", gpus=1)


def _migrate(folder: Path, name: str, content: Any) -> Migration:
    (folder / name).write_text(content if isinstance(content, str) else json.dumps(content))
    return migrate([folder / name], folder / "mine.toml", _ANSWERS)


def _ai_toolkit(folder: Path, **parts: Any) -> Migration:
    process = {"datasets": [{"folder_path": "/d", "resolution": 512}], **parts}
    process["model"] = {"arch": "flux", **process.get("model", {})}
    return _migrate(folder, "job.json", {"config": {"name": "x", "process": [process]}})


def _script(folder: Path, script: str, options: str, clips: str, release: str) -> Migration:
    clips = clips or '[[datasets]]\nimage_directory = "/d"\nresolution = [512, 512]\n'
    (folder / "clips.toml").write_text(clips)
    (folder / "train.sh").write_text(f"python {script} --dataset_config clips.toml {options}")
    files = [folder / "train.sh", folder / "clips.toml"]
    return migrate(files, folder / "mine.toml", Answers(release=release, gpus=1))


def _musubi(folder: Path, options: str, clips: str = "") -> Migration:
    script = "zimage_train_network.py --network_module networks.lora_zimage"
    return _script(folder, script, options, clips, "Tongyi-MAI/Z-Image")


def _sd_scripts(folder: Path, options: str, clips: str = "") -> Migration:
    clips = clips or '[[datasets]]\nresolution = 512\n[[datasets.subsets]]\nimage_dir = "/d"\n'
    return _script(folder, "flux_train_network.py", options, clips, str(_ANSWERS.release))


def _onetrainer(folder: Path, **values: Any) -> Migration:
    base = {"model_type": "FLUX_DEV_1", "training_method": "LORA", "resolution": "512"}
    concepts = [{"path": "/d", "name": "d"}]
    return _migrate(folder, "preset.json", {**base, "concepts": concepts, **values})


def _values(done: Migration) -> dict[str, Any]:
    return tomllib.loads(done.text)


def _said(done: Migration, key: str) -> str:
    return "\n".join(line for line in done.notes if line.strip().startswith(f"{key}:"))


def test_a_lora_file_is_written_at_each_save_as_there(tmp_path: Path) -> None:
    """Of a full fine-tune no LoRA file can be."""
    network = {"type": "lokr", "linear": 8, "lokr_factor": 4}
    done = _values(_ai_toolkit(tmp_path, network=network, save={"dtype": "float16"}))
    saved = {"export": "comfyui", "export_dtype": "fp16"}
    assert saved.items() <= done["checkpoint"].items()
    assert done["trainable"]["factor"] == 4
    full = _values(_ai_toolkit(tmp_path, save={"dtype": "float16"}))
    assert not saved.keys() & full["checkpoint"].keys()


def test_adapters_beside_a_model_keep_their_parts(tmp_path: Path) -> None:
    lora = {"assistant_lora_path": "undo.safetensors", "inference_lora_path": "fast.safetensors"}
    done = _values(_ai_toolkit(tmp_path, network={"type": "lora", "linear": 8}, model=lora))
    assert done["model"]["training_adapter"] == "undo.safetensors"
    assert done["sampling"]["adapter"] == "fast.safetensors"


def test_clips_without_a_caption_get_the_one_of_the_configuration(tmp_path: Path) -> None:
    datasets = [{"folder_path": "/d", "resolution": 512, "default_caption": "a dog's day"}]
    done = _ai_toolkit(tmp_path, datasets=datasets)
    (command, *_) = done.commands
    assert command.startswith("""longtake data index /d --uncaptioned 'a dog'"'"'s day' --out""")


@pytest.mark.parametrize(
    ("kind", "expected"),
    [("linear", [0.5, 0.9]), ("sigmoid", [0.5, 0.782714]), ("shift", [0.5, 0.9])],
)
def test_places_in_ai_toolkits_list_of_levels_go_from_noise_down(
    tmp_path: Path, kind: str, expected: list[float]
) -> None:
    """For `sigmoid` they are shares of the distribution; a shift by the release is left to do."""
    train = {"timestep_type": kind, "min_denoising_steps": 100, "max_denoising_steps": 500}
    done = _ai_toolkit(tmp_path, train=train)
    assert _values(done)["flow"]["sigma_range"] == expected
    assert ("before the shift" in _said(done, "flow.sigma_range")) == (kind == "shift")


@pytest.mark.parametrize(
    ("options", "expected", "is_squeezed"),
    [
        ("--discrete_flow_shift 3", [0.75, 1.0], False),
        ("--weighting_scheme logit_normal", [0.5, 1.0], True),
        ("--timestep_sampling shift", [0.0, 0.5], True),
        ("--timestep_sampling shift --preserve_distribution_shape", [0.0, 0.5], False),
        ("--timestep_sampling uniform", [0.0, 0.5], False),
    ],
)
def test_musubi_tuners_range_is_of_places_or_squeezes(
    tmp_path: Path, options: str, expected: list[float], is_squeezed: bool
) -> None:
    done = _musubi(tmp_path, f"--min_timestep 0 --max_timestep 500 {options}")
    assert _values(done)["flow"]["sigma_range"] == expected
    assert ("squeezes" in _said(done, "flow.sigma_range")) == is_squeezed


def test_a_range_that_sd_scripts_does_not_read_is_not_written(tmp_path: Path) -> None:
    done = _sd_scripts(tmp_path, "--min_timestep 200 --max_timestep 800")
    assert "sigma_range" not in _values(done).get("flow", {})
    assert "do not read it" in _said(done, "min_timestep")


@pytest.mark.parametrize(
    ("values", "expected", "said"),
    [
        ({"timestep_shift": 3.0}, [0.5, 1.0], ""),
        ({"timestep_distribution": "LOGIT_NORMAL"}, [0.25, 1.0], "squeezes"),
        ({"dynamic_timestep_shifting": True}, [0.25, 1.0], "before the shift"),
        ({"timestep_distribution": "INVERTED_PARABOLA"}, None, "depends on the distribution"),
    ],
)
def test_onetrainers_range_is_before_the_shift(
    tmp_path: Path, values: dict[str, Any], expected: list[float] | None, said: str
) -> None:
    done = _onetrainer(tmp_path, min_noising_strength=0.25, **values)
    assert _values(done).get("flow", {}).get("sigma_range") == expected
    assert said in _said(done, "flow.sigma_range")


@pytest.mark.parametrize("trainer", [_musubi, _sd_scripts])
def test_a_mean_of_places_has_the_other_sign_as_one_of_levels(tmp_path: Path, trainer: Any) -> None:
    done = trainer(
        tmp_path, "--timestep_sampling sigma --weighting_scheme logit_normal --logit_mean 1.0"
    )
    assert _values(done)["flow"]["logit_mean"] == -1


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("LOGIT_NORMAL", {"logit_std": 1.5, "logit_mean": 0.25}),
        ("HEAVY_TAIL", {"timestep_sampling": "mode", "mode_scale": 0.5}),
        ("SIGMOID", {}),
        ("BETA", {}),
    ],
)
def test_numbers_of_onetrainers_distributions_go_with_their_kind(
    tmp_path: Path, kind: str, expected: dict[str, Any]
) -> None:
    done = _onetrainer(tmp_path, timestep_distribution=kind, noising_weight=0.5, noising_bias=0.25)
    flow = _values(done).get("flow", {})
    flow.pop("shift", None)
    if expected:
        assert expected.items() <= flow.items()
    else:
        assert not {"logit_std", "logit_mean", "mode_scale"} & set(flow)
        assert "no equivalent" in _said(done, "flow.timestep_sampling")


def test_onetrainers_restarts_are_no_jumps(tmp_path: Path) -> None:
    done = _onetrainer(tmp_path, learning_rate_scheduler="COSINE_WITH_RESTARTS")
    assert _values(done)["optimizer"]["schedule"] == "cosine"
    assert "no equivalent" in _said(done, "optimizer.schedule")


def test_steps_that_are_micro_batches_are_divided(tmp_path: Path) -> None:
    """`gradient_accumulation` of ai-toolkit makes updates of its steps; the older name does not."""
    lengths = {"steps": 2000, "gradient_accumulation": 1, "gradient_accumulation_steps": 4}
    done = _values(_ai_toolkit(tmp_path, train=lengths, save={"save_every": 400}))
    assert (done["training"]["steps"], done["training"]["global_batch_size"]) == (500, 4)
    assert done["checkpoint"]["every"] == 100
    lengths = {"steps": 2000, "gradient_accumulation": 4, "gradient_accumulation_steps": 1}
    done = _values(_ai_toolkit(tmp_path, train=lengths))
    assert (done["training"]["steps"], done["training"]["global_batch_size"]) == (2000, 4)
    preset = _onetrainer(tmp_path, gradient_accumulation_steps=4, sample_after=100)
    assert _values(preset)["optimizer"]["warmup_steps"] == 50


def test_onetrainers_average_of_each_fifth_update_is_as_long(tmp_path: Path) -> None:
    done = _onetrainer(tmp_path, ema="GPU", ema_decay=0.995, learning_rate_warmup_steps=1.0)
    assert _values(done)["ema"]["decay"] ** 5 == pytest.approx(0.995, abs=1e-5)
    assert _values(done)["optimizer"]["warmup_ratio"] == 0.999


def test_onetrainers_lokr_has_a_rank_of_its_own(tmp_path: Path) -> None:
    lokr = {"peft_type": "LOKR", "lora_rank": 8, "lora_decompose": True}
    assert _values(_onetrainer(tmp_path, **lokr))["trainable"]["rank"] == 16
    done = _values(_onetrainer(tmp_path, **lokr, lokr_dim=64))["trainable"]
    assert (done["kind"], done["rank"], done["alpha"]) == ("lokr", 64, 1)
    done = _values(_onetrainer(tmp_path, **lokr, lokr_full_matrix=True))["trainable"]
    assert (done["rank"], "alpha" in done) == (2**14, False)


def test_an_unknown_adapter_is_lora_and_not_full_fine_tuning(tmp_path: Path) -> None:
    done = [
        _ai_toolkit(tmp_path, network={"type": "loha", "linear": 8}),
        _onetrainer(tmp_path, peft_type="OFT_2"),
        _sd_scripts(tmp_path, "--network_module lycoris.kohya --network_args algo=loha"),
    ]
    for each in done:
        assert _values(each)["trainable"]["kind"] == "lora"
        assert "no equivalent" in _said(each, "trainable.kind")


def test_dora_is_lora_s_alone_in_any_order(tmp_path: Path) -> None:
    options = "--network_module lycoris.kohya --network_args dora_wd=True algo=locon"
    assert _values(_sd_scripts(tmp_path, options))["trainable"]["kind"] == "dora"
    full = _onetrainer(tmp_path, training_method="FINE_TUNE", lora_decompose=True)
    assert _values(full)["trainable"]["kind"] == "full"


@pytest.mark.parametrize("is_first", [True, False])
def test_what_one_set_of_clips_lacks_is_compared(tmp_path: Path, is_first: bool) -> None:
    sets: list[dict[str, Any]] = [
        {"folder_path": "/a", "caption_dropout_rate": 0.1},
        {"folder_path": "/b"},
    ]
    sets[1]["buckets"] = False
    sets = [{**each, "resolution": 512} for each in sets[:: 1 if is_first else -1]]
    done = _ai_toolkit(tmp_path, datasets=sets)
    assert "0.1 is written, another has 0.0" in _said(done, "data.caption_dropout")
    assert "False is written, another has True" in _said(done, "data.auto_buckets")


def test_the_largest_size_and_the_sets_own_batch_are_written(tmp_path: Path) -> None:
    clips = "".join(
        f'[[datasets]]\nresolution = {size}\nimage_directory = "/{size[0]}"\nenable_bucket=false\n'
        for size in ([960, 544], [512, 512])
    )
    (bucket,) = _values(_musubi(tmp_path, "", clips))["data"]["buckets"]
    assert (bucket["width"], bucket["height"]) == (960, 544)
    clips = "[general]\nenable_bucket = true\n[[datasets]]\nbatch_size = 4\n"
    clips += '[[datasets.subsets]]\nimage_dir = "/d"\n'
    done = _sd_scripts(tmp_path, "--train_batch_size 1 --resolution 768", clips)
    assert _values(done)["training"]["micro_batch_size"] == 4
    assert _values(done)["data"]["auto_buckets"]["pixels"] == 768**2


def test_weights_of_losses_are_those_of_their_sets(tmp_path: Path) -> None:
    sets: list[dict[str, Any]] = [
        {"folder_path": "/a", "is_reg": True, "loss_multiplier": 0.5, "resolution": 512},
        {"folder_path": "/b", "resolution": 512},
    ]
    done = _ai_toolkit(tmp_path, datasets=sets, train={"reg_weight": 0.5})
    assert _values(done)["data"]["loss_weights"] == {"a": 0.25}
    clips = "[[datasets]]\nresolution = 512\n"
    clips += '[[datasets.subsets]]\nimage_dir = "/a"\n'
    clips += '[[datasets.subsets]]\nimage_dir = "/b"\nis_reg = true\n'
    done = _sd_scripts(tmp_path, "--prior_loss_weight 0.3", clips)
    assert _values(done)["data"]["loss_weights"] == {"b": 0.3}
    assert "set data.repeats so" in _said(done, "is_reg")
    done = _sd_scripts(tmp_path, "--prior_loss_weight 0", clips)
    assert "loss_weights" not in _values(done)["data"]
    assert "catalogs/a.parquet" in _values(done)["data"]["catalog"]
    assert "loss weight of /b is 0: its clips train nothing" in _said(done, "data.loss_weights")
    concepts = [{"path": "/d", "name": "d", "loss_weight": 2}]
    done = _onetrainer(tmp_path, concepts=concepts)
    assert _values(done)["data"]["loss_weights"] == {"catalog": 2.0}


def test_lines_of_texts_are_captions_where_the_trainer_takes_them_for_such(tmp_path: Path) -> None:
    assert "longtake data index /d --caption-lines --out" in _onetrainer(tmp_path).commands[0]
    (tmp_path / "config.json").write_text('{"model_family": "flux", "data_backend_config": "b"}')
    for whole, option in ((False, " --caption-lines"), (True, "")):
        sets = [{"instance_data_dir": "/d", "resolution": 512, "disable_multiline_split": whole}]
        (tmp_path / "sets.json").write_text(json.dumps(sets))
        files = [tmp_path / "config.json", tmp_path / "sets.json"]
        done = migrate(files, tmp_path / "mine.toml", _ANSWERS)
        assert done.commands[0] == f"longtake data index /d{option} --out catalogs/d.parquet"


def test_the_alpha_of_pictures_is_a_mask(tmp_path: Path) -> None:
    done = _ai_toolkit(
        tmp_path, datasets=[{"folder_path": "/d", "resolution": 512, "alpha_mask": True}]
    )
    values = _values(done)
    assert values["data"]["conditioning"] == {"mask": {"kind": "mask", "alpha": True}}
    assert values["flow"]["loss_mask"] == "mask"


def test_what_a_loss_or_clipping_lacks_is_said(tmp_path: Path) -> None:
    done = _sd_scripts(tmp_path, "--timestep_sampling shift --weighting_scheme sigma_sqrt")
    assert "sigma_sqrt has no equivalent" in _said(done, "flow.timestep_sampling")
    assert _values(done)["flow"].get("timestep_sampling", "logit_normal") == "logit_normal"


@pytest.mark.parametrize("lines", ["shift = 3\nflux_shift = true", "flux_shift = true\nshift = 3"])
def test_a_fixed_shift_comes_first_and_released_gradients_are_not_clipped(
    tmp_path: Path, lines: str
) -> None:
    (tmp_path / "t.toml").write_text(
        f'epochs = 1\ngradient_clipping = 1.0\n[model]\ntype = "flux"\n{lines}\n'
        '[optimizer]\ntype = "adamw"\nlr = 2e-5\ngradient_release = true\n'
    )
    (tmp_path / "c.toml").write_text('resolutions = [512]\n[[directory]]\npath = "/d"\n')
    done = migrate([tmp_path / "t.toml", tmp_path / "c.toml"], tmp_path / "mine.toml", _ANSWERS)
    assert _values(done)["flow"]["shift"] == 3
    assert _values(done)["optimizer"]["max_grad_norm"] == 1e9
