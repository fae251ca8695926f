"""Rates of a GPU are measured, kept, and change a plan's seconds and nothing else."""

import dataclasses
import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.build import bare_recipe

from longtake import config
from longtake.errors import PlanError
from longtake.planner import calibration
from longtake.planner.calibration import MeasuredRates, calibrate, kept_rates, measure_rates
from longtake.planner.devices import DEVICES, DeviceBudget, device_budget, device_for, device_named
from longtake.planner.tracker import seconds

_CPU = torch.device("cpu")
_RATES = MeasuredRates(
    bf16_products=500e12,
    fp32_products=50e12,
    attention=250e12,
    masked_attention=100e12,
    memory=2.4e12,
    host=40e9,
    measured_at="2026-01-02T03:04:05.000+00:00",
)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "longtake" / "rates"


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measurements take some hundredths of a second."""
    monkeypatch.setattr(
        calibration, "measure_rates", partial(measure_rates, seconds=0.01, scale=64)
    )


@pytest.fixture
def h100(monkeypatch: pytest.MonkeyPatch) -> None:
    """This machine has an H100, with `_RATES`."""
    label = "NVIDIA H100 80GB HBM3"
    properties = SimpleNamespace(name=label, total_memory=80 * 2**30, major=9, minor=0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: label)
    monkeypatch.setattr(calibration, "measure_rates", lambda _: _RATES)
    calibrate(torch.device("cuda", 0))


def _seconds(
    name: str, device: Any, *shapes: tuple[int, ...], dtype: Any = torch.bfloat16
) -> float:
    operation = getattr(torch.ops.aten, name).default
    args = [torch.empty(shape, dtype=dtype, device="meta") for shape in shapes]
    return seconds(operation, args, {}, operation(*args), device)


def test_rates_are_those_of_the_work_that_was_done(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each call takes a second of a clock that stands still otherwise."""
    ticks = iter(range(10**6))
    monkeypatch.setattr("time.perf_counter", lambda: float(next(ticks)))
    found = measure_rates(_CPU, seconds=1, scale=64)
    assert found.bf16_products == found.fp32_products == 2 * 256 * 48 * 192
    assert found.attention == found.masked_attention == 14 * 24 * 128**2 * 128
    assert found.memory == 2 * found.host == 2 * 2**28 / 64**2


@pytest.mark.usefixtures("small")
def test_rates_of_real_work_are_kept_for_this_device(cache: Path) -> None:
    assert kept_rates(_CPU) is None
    found = calibrate(_CPU)
    assert kept_rates(_CPU) == found
    (path,) = cache.iterdir()
    damaged: tuple[Mapping[str, Any] | str, ...] = (
        "no JSON",
        dataclasses.asdict(found) | {"memory": 0},
        dataclasses.asdict(found) | {"memory": "fast"},
        {},
    )
    for text in damaged:
        path.write_text(text if isinstance(text, str) else json.dumps(text))
        assert kept_rates(_CPU) is None


@pytest.mark.usefixtures("small")
def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file")
    with pytest.raises(PlanError, match=r"cannot be kept in the cache folder.* Set XDG_CACHE_HOME"):
        calibrate(_CPU)


@pytest.mark.usefixtures("h100")
def test_the_gpu_at_hand_is_planned_for_by_its_rates() -> None:
    found = device_for("cuda")
    assert found.measured_at == _RATES.measured_at
    assert found.link == pytest.approx(40e9)
    product = (6000, 5000), (5000, 4000)
    assert _seconds("mm", found, *product) == pytest.approx(2 * 6000 * 5000 * 4000 / 500e12)
    fp32 = _seconds("mm", found, *product, dtype=torch.float32)
    assert fp32 == pytest.approx(2 * 6000 * 5000 * 4000 / 50e12)
    assert _seconds("neg", found, (10**6,)) == pytest.approx(4e6 / 2.4e12)
    heads = [(1, 24, 2048, 128)] * 3
    attention = _seconds("_scaled_dot_product_flash_attention", found, *heads)
    assert attention == pytest.approx(4 * 24 * 2048**2 * 128 / 250e12)


@pytest.mark.usefixtures("h100")
def test_attention_with_a_mask_goes_by_a_rate_of_its_own() -> None:
    found, aten = device_for("cuda"), torch.ops.aten
    heads = torch.empty(1, 24, 2048, 128, dtype=torch.bfloat16, device="meta")
    count = 4 * 24 * 2048**2 * 128
    forward, backward = (
        getattr(aten, f"_scaled_dot_product_efficient_attention{name}").default
        for name in ("", "_backward")
    )
    for bias, rate in ((None, 250e12), (heads.new_empty(1, 24, 2048, 2048), 100e12)):
        args = heads, heads, heads, bias, True
        made = forward(*args)
        assert seconds(forward, args, {}, made, found) == pytest.approx(count / rate)
        others = bias, *made, 0.0, [True, True, True, False]
        again = heads, heads, heads, heads, *others
        taken = seconds(backward, again, {}, backward(*again), found)
        assert taken == pytest.approx(2.5 * count / rate)


@pytest.mark.usefixtures("h100")
def test_only_the_gpu_at_hand_has_measured_rates() -> None:
    """Named or not; a recipe for another GPU is planned for by that one's data sheet."""

    def planned(name: str) -> DeviceBudget:
        recipe = bare_recipe(Path("run"))
        return device_budget(config.changed(recipe, [f"recompute.device={name}"]))

    assert planned("h100").measured_at == _RATES.measured_at
    assert planned("h200").measured_at is None
    assert device_named("h100") is DEVICES["h100"]
