"""The page of a plan: from plan.json and events to HTML."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from tests.board.node_runs import make_run
from tests.build import make_row

from longtake.board.pages import ServerLinks
from longtake.board.plan_page import block_strip, render_plan
from longtake.inspection.reader import RunReader
from longtake.planner.record import BlockOption
from longtake.run_dir import RunDirectory

_MIB = 2**20
_HOSTILE = "<script>alert(1)</script>\x1b[2J"


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return make_run(tmp_path / "runs" / "run")


def _page(run: RunDirectory) -> str:
    facts = RunReader(run.path.parent, run.path.name).facts()
    return render_plan(facts, ServerLinks(), {})


def _policy(name: str, mib: float, overhead: float, fits: bool | None = True) -> dict[str, Any]:
    size = int(mib * _MIB)
    return {
        "name": name,
        "forward_end_bytes": size // 2,
        "peak_bytes": size - _MIB,
        "step_peak_bytes": size,
        "overhead": overhead,
        "fits": fits,
        "host_bytes": 3 * _MIB,
        "link_share": 0.0,
    }


def _plan(**changes: Any) -> dict[str, Any]:
    optimizer = {"device": 10 * _MIB, "host": 2 * _MIB, "step": 0}
    sizes = {"weights": 5, "elsewhere": 0, "gradients": 4, "reduced": 0, "inputs": 1}
    sizes |= {"inputs_ahead": 0, "ema": 5, "encoders": 0, "encoding": 0, "pinned_beside": 0}
    kinds = [("keep", "keep"), ("recompute", "keep"), ("save-attention", "nf4")]
    return {
        "policy": "best",
        "options": {
            f"blocks.{number}": dict(zip(("activations", "weights"), kind, strict=True))
            for number, kind in enumerate(kinds)
        },
        "memory": _policy("best", 80, 0.06),
        "activation_bytes": 60 * _MIB,
        "bucket": {"num_frames": 8, "height": 32, "width": 48, "batch_size": None, "share": None},
        "notes": ["blocks.1: something costs time"],
        "budget_bytes": 84 * _MIB,
        "encodes_ahead": False,
        "compared": [_policy("none", 96, 0.0, fits=False), _policy("all", 30, 0.3)],
        "fixed": {**{name: mib * _MIB for name, mib in sizes.items()}, "optimizer": optimizer},
        **changes,
    }


def _keep(run: RunDirectory, plan: object) -> RunDirectory:
    run.plan_path.write_text(json.dumps({"key": "x", "plan": plan}))
    return run


def test_without_a_plan_the_page_says_how_one_is_made(run: RunDirectory) -> None:
    html = _page(run)
    assert "No plan is kept here" in html
    assert f"longtake plan {run.recipe_path} --memory 48GiB" in html


def test_policies_are_compared_with_the_budget(run: RunDirectory) -> None:
    html = _page(_keep(run, _plan()))
    rows = re.findall(r"<tr[^>]*><td>(▸ )?([\w-]+)</td>(.*?)</tr>", html, re.DOTALL)
    found = {
        name: (chosen, *re.findall(r">([^<>\n]+)</td>", rest)[:5]) for chosen, name, rest in rows
    }
    assert found["none"] == ("", "48.00 MiB", "95.00 MiB", "96.00 MiB", "+0.0 %", "no")
    assert found["best"] == ("▸ ", "40.00 MiB", "79.00 MiB", "80.00 MiB", "+6.0 %", "yes")
    assert "96.00 MiB, too much, time +0.0 %" in html
    assert 'class="limit"' in html


def test_the_peak_is_shown_by_part(run: RunDirectory) -> None:
    html = _page(_keep(run, _plan()))
    parts = dict(re.findall(r"</svg> ([\w ]+)</td><td class=\"number\">([\d.]+) MiB", html))
    assert {name: float(size) for name, size in parts.items()} == {
        "weights": 5,
        "optimizer": 10,
        "ema": 5,
        "inputs": 1,
        "activations and gradients": 80 - 21,
    }
    assert "80.00 MiB of 84.00 MiB" in html
    assert "<dd>3.00 MiB</dd>" in html


def test_the_option_of_each_block_is_a_cell(run: RunDirectory) -> None:
    titles = re.findall(r"<title>(blocks[^<]*)", _page(_keep(run, _plan())))
    assert titles[0] == "blocks.0: activations keep"
    assert titles[2].startswith("blocks.2: activations save-attention (attention&#x27;s output")
    assert titles[5] == "blocks.2: frozen weights nf4 (on the device, in 4 bits (nf4))"
    assert "something costs time" in _page(run)


def test_hundreds_of_blocks_take_several_rows() -> None:
    picture = block_strip({f"b{number}": BlockOption() for number in range(500)})
    assert picture is not None
    assert picture.count("<title>") == 1000
    assert picture.count(">activations</text>") == 3


def test_a_launch_without_a_kept_plan_shows_that_of_its_event(run: RunDirectory) -> None:
    run.append_event("memory_planned", step=0, **_plan())
    kept = _page(run)
    assert "blocks.2: frozen weights nf4" in kept
    run.append_event("memory_planned", step=1, **_plan(policy=5))
    assert _page(run) == kept


def test_a_run_without_a_limit_has_blocks_and_says_how_to_set_one(run: RunDirectory) -> None:
    plan = _plan(policy="none", memory=None, budget_bytes=None, compared=[], fixed=None, notes=[])
    html = _page(_keep(run, plan))
    assert "--set recompute.memory=48GiB" in html
    assert 'class="blocks"' in html


def test_measured_memory_stands_beside_the_planned(run: RunDirectory) -> None:
    numbers = {"predicted_gib": 2.0, "measured_gib": 1.6, "error": 0.25}
    run.append_event("memory_measured", step=2, **numbers)
    run.append_event("memory_measured", step=3, predicted_gib="much", measured_gib=1, error=0)
    assert re.search(r"2\.00 GiB</td>.*1\.60 GiB</td>.*\+25\.0 %", _page(_keep(run, _plan())))


def test_peaks_of_steps_are_drawn_with_the_plan(run: RunDirectory) -> None:
    for step in range(1, 9):
        run.append_metrics(make_row(step, batch=step - 1, peak_memory_bytes=70 * _MIB))
    html = _page(_keep(run, _plan()))
    assert "70.00 MiB at most; 80.00 MiB planned (+14.3 %" in html
    assert html.count('class="plot"') == 1


@pytest.mark.parametrize(
    "plan",
    [
        "[" * 10_000,
        '{"key": "x"}',
        '{"key": "x", "plan": {"policy": 5}}',
        '{"plan": {"policy": "x", "options": {"a": {"activations": "keep", "weights": 1}}}}',
        b"\xff\x00".decode("latin-1"),
    ],
)
def test_a_damaged_plan_is_one_sentence(run: RunDirectory, plan: str) -> None:
    run.plan_path.write_text(plan)
    html = _page(run)
    assert 'class="problem"' in html
    assert "plan.json" in html


def test_names_of_others_are_text(run: RunDirectory) -> None:
    options = {_HOSTILE: {"activations": "recompute", "weights": "keep"}}
    html = _page(_keep(run, _plan(policy=_HOSTILE, options=options, notes=[_HOSTILE])))
    assert "<script>alert" not in html
    assert "\x1b" not in html
    assert html.count("&lt;script&gt;alert(1)&lt;/script&gt;\\x1b[2J") >= 4
