"""What a launch reports: seconds before the first step, attention kernel, truncated captions."""

import io
import subprocess
import sys
from collections.abc import Callable
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from tests.build import QUIET, Recipes, forget_after
from torch.nn.attention import SDPBackend

from longtake import config
from longtake.fsio import read_json_lines
from longtake.heartbeat import HeartbeatWriter, Phase, heartbeat_session, launch_seconds
from longtake.inspection.facts import run_facts
from longtake.inspection.tables import print_run, said
from longtake.run_dir import RunDirectory
from longtake.training.startup import attention_backend, slow_attention, slowest
from longtake.training.train import train

_PHASES: tuple[Phase, ...] = ("open", "build", "open", "forward")


def _events(run: RunDirectory, kind: str) -> list[dict[str, Any]]:
    return [each for each in read_json_lines(run.events_path) if each["event"] == kind]


def test_a_heart_knows_how_long_each_phase_took_before_the_first_step(tmp_path: Path) -> None:
    """Phases that come twice are added up; what comes after that step changes nothing."""
    with heartbeat_session(HeartbeatWriter(tmp_path, "rank")) as heart:
        for phase in _PHASES:
            heart.set_phase(phase)
        before = launch_seconds()
        heart.end_step()
        done = launch_seconds()
        heart.set_phase("data")
        assert launch_seconds() == done
    assert list(before) == ["start", "open", "build", "forward"]
    assert all(done[phase] >= before[phase] for phase in before)


_TRAIN = """
import sys, time
from pathlib import Path
time.sleep(0.3)
from longtake.heartbeat import HeartbeatWriter, heartbeat_session
from longtake.heartbeat import launch_seconds, restart_launch_timer
begun = time.monotonic()
if "restart" in sys.argv: restart_launch_timer()
for _ in range(2):
    with heartbeat_session(HeartbeatWriter(Path(sys.argv[1]), "rank")):
        print(launch_seconds()["start"], time.monotonic() - begun)
"""


def test_imports_count_from_the_start_of_the_process(tmp_path: Path) -> None:
    """Not for a second training in it, nor what came before as the demo, which writes its clips."""

    def start_seconds(*option: str) -> list[float]:
        """Of both trainings, and what has passed since the imports by then."""
        command = [sys.executable, "-c", _TRAIN, str(tmp_path), *option]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        return list(map(float, said.split()))

    first, passed, second, passed_by_second = start_seconds()
    assert first > 0.3 + passed
    assert second <= passed_by_second
    restarted, passed, *_ = start_seconds("restart")
    assert restarted <= passed


def test_of_each_part_the_slowest_rank_is_named() -> None:
    told = slowest([{"imports": 2.0, "build": 1.0}, {"imports": 1.0, "build": 3.5, "load": 0.5}])
    assert told["seconds"] == {"imports": 2.0, "build": 3.5, "load": 0.5}
    assert told["slowest"] == {"imports": 0, "build": 1, "load": 1}
    assert told["total"] == 5.0


@pytest.fixture
def restarted(small_recipe: Recipes) -> RunDirectory:
    """A run that was launched, crashed after a checkpoint, and was launched again."""
    recipe = small_recipe.trained("checkpoint.every=4")
    run = RunDirectory(recipe.out)
    events = list(read_json_lines(run.events_path))
    lines = run.events_path.read_text().splitlines(keepends=True)
    kept = [line for line, event in zip(lines, events, strict=True) if event["event"] != "finished"]
    run.events_path.write_text("".join(kept))
    forget_after(recipe, 8)
    train(recipe, QUIET)
    return run


def test_each_launch_tells_where_its_seconds_went(restarted: RunDirectory) -> None:
    """What comes before the first step is in `launched` already, and all of it in `started`."""
    first, second = _events(restarted, "startup_timing")
    assert (first["step"], second["step"]) == (0, 8)
    parts = ["imports", "rendezvous", "data", "plan", "build", "load", "first_batch", "first_step"]
    for event in (first, second):
        assert list(event["seconds"]) == parts
        assert event["total"] == pytest.approx(sum(event["seconds"].values()), abs=0.01)
        assert set(event["slowest"].values()) == {0}
    (launched,), (resumed,) = _events(restarted, "launched"), _events(restarted, "resumed")
    assert list(launched["seconds"]) == parts[:-2]
    assert resumed["seconds"]["load"] > 0
    assert first["down_seconds"] is None
    assert 0 < second["down_seconds"] < 600


def test_a_launch_after_a_regular_end_was_not_down(restarted: RunDirectory) -> None:
    recipe = config.load(restarted.recipe_path)
    forget_after(recipe, 8)
    train(recipe, QUIET)
    assert _events(restarted, "startup_timing")[-1]["down_seconds"] is None


def _line(start: dict[str, Any]) -> str:
    return said({"event": "startup_timing", **start})


def test_starts_are_shown(restarted: RunDirectory) -> None:
    """The newest as a table, those before it in a line each."""
    found = run_facts(restarted)["starts"]
    assert [each["step"] for each in found] == [0, 8]
    text = StringIO()
    print_run(Console(file=text, highlight=False, soft_wrap=True), run_facts(restarted))
    shown = text.getvalue()
    assert _line(found[0])[:60] in shown
    assert _line(found[0]).startswith("from step 0 to the next in ")
    assert "a step again" in _line(found[1])
    for part in ("model is built", "since the last step before a crash"):
        assert part in shown
    assert "slowest rank" not in shown


def test_two_ranks_name_the_slower_one(
    small_recipe: Recipes, run_on_ranks: Callable[..., str], tmp_path: Path
) -> None:
    recipe = small_recipe("training.steps=2", "checkpoint.every=2")
    path = tmp_path / "launched.toml"
    path.write_text(config.dump(recipe))
    run_on_ranks(2, "-m", "longtake", "train", path)
    (event,) = _events(RunDirectory(recipe.out), "startup_timing")
    assert set(event["slowest"].values()) <= {0, 1}
    assert event["seconds"]["rendezvous"] > 0


_GPU = torch.device("cuda", 0)


@pytest.mark.parametrize(
    ("chosen", "capability", "name", "warns"),
    [
        (SDPBackend.CUDNN_ATTENTION, (9, 0), "cuDNN", False),
        (SDPBackend.FLASH_ATTENTION, (9, 0), "FlashAttention-2", True),
        (SDPBackend.FLASH_ATTENTION, (8, 6), "FlashAttention-2", False),
    ],
)
def test_a_hopper_gpu_without_cudnn_is_warned_of(
    chosen: SDPBackend,
    capability: tuple[int, int],
    name: str,
    warns: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The kernel is asked of torch itself."""
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *shape, device, **given: empty(*shape, **given))
    monkeypatch.setattr(torch, "_fused_sdp_choice", lambda *_, **__: chosen.value)
    assert attention_backend(_GPU) == name
    advice = slow_attention(name, capability)
    assert ("1.6 times" in advice) == ("2.14.1 or newer" in advice) == warns


def test_torch_can_be_asked() -> None:
    """The function is torch's own, and not public."""
    heads = torch.empty(1, 2, 256, 128)
    assert SDPBackend(torch._fused_sdp_choice(heads, heads, heads)).name
    assert attention_backend(torch.device("cpu")) is None
    assert slow_attention(None, (9, 0)) == ""


@pytest.mark.parametrize("max_tokens", [3, 8])
def test_truncated_captions_are_reported_at_the_start(
    max_tokens: int, small_recipe: Recipes
) -> None:
    recipe = small_recipe(f"text.max_tokens={max_tokens}", "training.steps=1")
    said = io.StringIO()
    train(recipe, Console(file=said, width=500))
    events = list(read_json_lines(RunDirectory(recipe.out).events_path))
    found = [each for each in events if each["event"] == "captions_truncated"]
    assert ("captions are truncated" in said.getvalue()) == bool(found) == (max_tokens == 3)
    if found:
        assert found[0]["num_truncated"] == found[0]["num_counted"] > 0
        assert events[0]["event"] == "launched"
