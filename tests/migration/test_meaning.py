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
