"""A run at a glance: all that its directory says, and what one can type next."""

import os
import shlex
import shutil
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from longtake import config
from longtake.config import STEM
from longtake.data.catalog import Catalog
from longtake.data.clip import Clip, Media
from longtake.errors import RunError
from longtake.inspection.glance import command_to_sample, glance
from longtake.run_dir import RunDirectory


def test_a_run_is_summed_up(told: RunDirectory) -> None:
    """Steps, checkpoints with their damage, the newest row, verdicts and rollbacks."""
    facts = glance(told)
    assert (facts["family"], facts["steps"], facts["total_steps"]) == ("tubelet", 24, 40)
    assert (facts["state"], facts["abandoned_rows"]) == ("interrupted", 8)
    assert [launch["start_step"] for launch in facts["launches"]] == [0]
    assert facts["newest"] == told.metrics()[-1]
    first, second = facts["checkpoints"]
    assert (first["step"], first["damage"]) == (12, None)
    assert first["bytes"] > 1000
    assert (second["step"], "has 9 bytes, and had 2,000" in second["damage"]) == (24, True)
    verdicts = [(each["step"], each["verdict"], each["reason"]) for each in facts["verdicts"]]
    assert verdicts == [(9, "skip", "non_finite"), (20, "roll_back", "divergence")]
    assert facts["rollbacks"] == told.rollbacks()


def _commands(facts: dict[str, Any]) -> list[str]:
    return [way["command"] for way in facts["next"]]


def test_what_to_type_next_follows_from_how_it_ended(told: RunDirectory) -> None:
    go_on = told.command_to_go_on()
    assert _commands(glance(told))[:2] == [go_on, f"longtake show {told.path} --around 20"]
    assert glance(told)["next"][0]["for"] == "resume"
    told.append_event("resumed", step=24)
    facts = glance(told)
    assert facts["state"] == "running"  # its files are young
    assert go_on not in _commands(facts)
    _make_old(told)
    facts = glance(told)
    assert facts["state"] == "dead"
    assert facts["next"][0] == {"command": go_on, "for": "resume"}
    told.append_event("finished", step=40)
    facts = glance(told)
    assert facts["state"] == "finished"
    assert go_on not in _commands(facts)
    assert f"longtake data audit {told.path}" in _commands(facts)
    told.append_event("diverged", step=40, message="again", why="no checkpoint")
    assert glance(told)["state"] == "diverged"
    assert _commands(glance(told))[0] == f"longtake show {told.path} --around 20"


def _make_old(run: RunDirectory) -> None:
    for path in (run.metrics_path, run.events_path):
        os.utime(path, (0, 0))


def test_a_run_that_has_just_begun(teller_of: Callable[[Path], Any], tmp_path: Path) -> None:
    """Nothing is known yet, and nothing is missing either."""
    facts = glance(teller_of(tmp_path / "new").run)
    assert (facts["steps"], facts["newest"], facts["state"]) == (0, None, "running")
    assert (facts["checkpoints"], facts["verdicts"], facts["rollbacks"]) == ([], [], [])
    assert facts["next"] == []


def test_a_folder_without_a_run_or_with_half_of_one_is_named(
    told: RunDirectory, tmp_path: Path
) -> None:
    """Each with what is wrong."""
    with pytest.raises(RunError, match=r"nowhere is not a run directory"):
        glance(RunDirectory(tmp_path / "nowhere"))
    told.record_path.write_text("{}")
    with pytest.raises(RunError, match=r"run\.json cannot be read: id: .* holds a run"):
        glance(told)


def test_checkpoints_that_a_rollback_gave_up_are_told_apart(killed: RunDirectory) -> None:
    """The run was killed before it could delete them, and trained no step since."""
    facts = glance(killed)
    assert facts["steps"] == 12
    abandoned = [(each["step"], each["abandoned"]) for each in facts["checkpoints"]]
    assert abandoned == [(12, False), (24, True)]


def test_only_the_runs_own_checkpoints_are_listed(told: RunDirectory) -> None:
    """Not somebody's copy."""
    path = told.checkpoint_path(12)
    shutil.copytree(path, path.with_name(f"{path.name}.bak"))
    assert [each["step"] for each in glance(told)["checkpoints"]] == [12, 24]


def test_the_suggested_sample_of_an_image_model_has_its_references(tmp_path: Path) -> None:
    """Of a clip it was trained on, and a PNG: else the command would be refused."""
    clip = Clip(
        identity="0" * 32,
        media=Media("/clips/a cat.png"),
        kind="image",
        caption="a cat's hat",
        num_frames=1,
        height=32,
        width=32,
        fps=0.0,
        duration_seconds=0.0,
        stream_index=0,
        rotation=0,
        codec="png",
        pix_fmt="rgb24",
    )
    text = f"""
    out = "{tmp_path / "run"}"
    model.family = "flux"
    training = {{ steps = 4, batch_size = 1 }}
    [data]
    catalog = "clips.parquet"
    buckets = [{{ num_frames = 1, height = 32, width = 32 }}]
    references = {{ before = "../before/<stem>.png" }}
    """
    recipe = config.parse(tomllib.loads(text.replace("<stem>", STEM)), source="test")
    run = RunDirectory(recipe.out)
    run.path.mkdir()
    run.create(recipe)
    run.catalogs_path.mkdir()
    Catalog.of([clip]).save(run.catalogs_path / "0.parquet")
    words = shlex.split(command_to_sample(run))
    assert words[:3] == ["longtake", "sample", str(run.path)]
    assert words[3:] == [
        *("--prompt", "a cat's hat"),
        *("--reference", "before=/before/a cat.png"),
        *("--out", "sample.png"),
    ]
