"""Rows of metrics: what is read, what is skipped, what was abandoned, and the cache."""

import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from longtake import fsio
from longtake.errors import RecordError
from longtake.inspection import rows as rows_module
from longtake.inspection.rows import MetricRows, read_rows
from longtake.metrics import METRIC_COLUMNS
from longtake.run_dir import RunDirectory

_GOOD = {
    "step": 1,
    "epoch": 0,
    "loss": 0.5,
    "grad_norm": 1,
    "learning_rate": 1e-3,
    "step_seconds": 0.25,
    "data_seconds": 0.0,
    "time": 1.7e9,
    "batch": 0,
    "update_ratio": 1.5e-6,
    "num_samples": 4,
    "loss_by_sigma": [0.1, None, 0.3, 0.4],
    "bucket": [33, 256, 480],
    "weight_norm": 7.5,
    "group_grad_norms": {"mlp": 0.1, "other": None},
    "launch": "73e88faa",
}


def test_what_counts_is_what_the_run_says_counts(told: RunDirectory) -> None:
    rows = read_rows(told)
    assert rows.kept.metrics() == told.metrics()
    assert rows.metrics() == told.metric_lines()
    assert rows.step[rows.is_abandoned].tolist() == list(range(13, 21))
    assert rows.step.tolist() == [*range(1, 21), *range(13, 25)]


def test_a_rollback_abandons_rows_though_none_follow(killed: RunDirectory) -> None:
    rows = read_rows(killed)
    assert rows.step[rows.is_abandoned].tolist() == list(range(13, 21))


def test_a_step_that_was_given_up_once_counts_when_it_is_done_again(told: RunDirectory) -> None:
    """Whatever the clock said then, and though it was the last step before the rollback."""
    lines = told.metrics_path.read_text().splitlines(keepends=True)
    told.metrics_path.write_text("".join(lines[:28]))  # up to step 20 of the second pass
    assert read_rows(told).kept.step.tolist() == list(range(1, 21))


def test_batches_are_known_of_older_runs_too(told: RunDirectory) -> None:
    assert read_rows(told).column("batch")[-3:].tolist() == [30, 31, 32]
    assert read_rows(told).step_of_batch(30) == 22
    assert read_rows(told).step_of_batch(13) == 14  # abandoned, and never trained again
    assert read_rows(told).step_of_batch(99) is None
    lines = [json.loads(line) for line in told.metrics_path.read_text().splitlines()]
    for line in lines[3], lines[-1]:
        del line["batch"]
    _write(told, *lines)
    assert read_rows(told).column("batch")[[3, -1]].tolist() == [3, 23]


def _write(run: RunDirectory, *lines: dict[str, Any] | bytes) -> None:
    octets = [line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines]
    run.metrics_path.write_bytes(b"".join(line + b"\n" for line in octets))


def _with(**fields: Any) -> dict[str, Any]:
    return {**_GOOD, **fields}


def _without(name: str) -> dict[str, Any]:
    return {key: value for key, value in _GOOD.items() if key != name}


_LINES: dict[str, dict[str, Any] | bytes] = {
    "null": _with(loss=None, grad_norm=None, weight_norm=None),
    "no loss": _without("loss"),
    "no weight norm": _without("weight_norm"),
    "no batch": _without("batch"),
    "no launch": _without("launch"),
    "launch null": _with(launch=None),
    "batch null": _with(batch=None),
    "verdict": _with(verdict="skip"),
    "verdict null": _with(verdict=None),
    "verdict unknown": _with(verdict="maybe"),
    "other field": _with(new_in_a_later_longtake=[{}]),
    "another optional field": _with(mfu=0.4),
    "another group": _with(group_grad_norms={"norm": 0.1}),
    "group is text": _with(group_grad_norms={"mlp": "x"}),
    "group null": _with(group_grad_norms=None),
    "step is a float": _with(step=5.0),
    "step is text": _with(step="5"),
    "step is negative": _with(step=-1),
    "step is huge": _with(step=2**60),
    "epoch is huge": _with(epoch=2**53 + 1),
    "NaN": _with(loss=float("nan")),
    "infinite in a group": _with(group_grad_norms={"mlp": float("inf")}),
    "no samples": _without("num_samples"),
    "samples null": _with(num_samples=None),
    "samples are a float": _with(num_samples=4.0),
    "no sigmas": _without("loss_by_sigma"),
    "sigmas null": _with(loss_by_sigma=None),
    "sometimes memory": _with(peak_memory_bytes=80 * 2**30),
    "memory null": _with(peak_memory_bytes=None),
    "memory is a float": _with(peak_memory_bytes=5.0),
    "from a store": _with(store_bytes=5, store_seconds=0.5, store_retries=0),
    "store bytes are a float": _with(store_bytes=5.0, store_seconds=0.5, store_retries=0),
    "update ratio null": _with(update_ratio=None),
    "huge integer": json.dumps(_GOOD).replace("7.5", "1" + "0" * 400).encode(),
    "large integer": json.dumps(_GOOD).replace("7.5", "1" + "0" * 30).encode(),
    "truth value": _with(loss=True),
    "exponent": json.dumps(_GOOD).replace("7.5", "1e999").encode(),
    "time": _with(time=1e12),
    "three sigmas": _with(loss_by_sigma=[0.1, 0.2, 0.3]),
    "no bucket": _without("bucket"),
    "bucket null": _with(bucket=None),
    "bucket of two numbers": _with(bucket=[33, 256]),
    "bucket without frames": _with(bucket=[0, 256, 480]),
    "bucket too large": _with(bucket=[33, 256, 2**16 + 1]),
    "empty": b"",
    "blank": b"  \t",
    "half": json.dumps(_GOOD).encode()[:80],
    "two on a line": json.dumps(_GOOD).encode() * 2,
    "space around": b" " + json.dumps(_GOOD).encode() + b" ",
    "carriage return": json.dumps(_GOOD).encode() + b"\r",
    "field twice": json.dumps(_GOOD).encode().replace(b'"epoch"', b'"loss": 9.0, "epoch"'),
    "escaped name": json.dumps(_GOOD).encode().replace(b'"epoch"', b'"\\u0065poch"'),
    "lone surrogate": _with(launch="\ud800"),
    "not UTF-8": json.dumps(_GOOD).encode().replace(b"73e88faa", b"\xff\xfe"),
    "deep": json.dumps(_GOOD).encode()[:-1] + b', "x": ' + b"[" * 9 + b"]" * 9 + b"}",
    "very deep": b"[" * 60_000 + b"]",
    "long": _with(launch="x" * 70_000),
    "list": b"[1, 2]",
    "no field": b"{}",
}


@pytest.mark.parametrize("name", _LINES)
@pytest.mark.parametrize("place", [0, 2])
def test_the_same_lines_are_kept_and_skipped_as_by_pydantic_alone(
    told: RunDirectory, name: str, place: int
) -> None:
    lines: list[dict[str, Any] | bytes] = [_with(step=step, batch=step) for step in (1, 2, 3, 4)]
    lines.insert(place, _LINES[name])
    _write(told, *lines)
    fsio.skipped_lines()  # those of other tests
    expected = told.metric_lines()
    sentences = fsio.skipped_lines()
    rows = read_rows(told)
    assert rows.metrics() == expected
    assert fsio.skipped_lines() == sentences
    assert rows.step.tolist() == [each["step"] for each in expected]
    assert rows.column("batch").tolist() == [
        each.get("batch", each["step"] - 1) for each in expected
    ]
    for field in ("loss", "grad_norm", "weight_norm", "time", "step_seconds"):
        np.testing.assert_array_equal(rows.column(field), _values(expected, field))
    for field in ("learning_rate", "data_seconds", "update_ratio", "mfu", "peak_memory_bytes"):
        wanted = np.array(_values(expected, field), np.float32)
        np.testing.assert_array_equal(rows.column(field), wanted)
        assert rows.is_recorded(field).tolist() == [field in each for each in expected]
    for quarter, field in enumerate(METRIC_COLUMNS["loss_by_sigma"]):
        quarters = [
            {field: each["loss_by_sigma"][quarter]} if "loss_by_sigma" in each else {}
            for each in expected
        ]
        wanted = np.array(_values(quarters, field), np.float32)
        np.testing.assert_array_equal(rows.column(field), wanted)
        assert rows.is_recorded(field).tolist() == [field in each for each in quarters]
    assert rows.is_recorded("weight_norm").tolist() == ["weight_norm" in each for each in expected]
    assert rows.column("has_verdict").tolist() == ["verdict" in each for each in expected]


def _values(records: Sequence[Mapping[str, Any]], field: str) -> list[float]:
    values = (each.get(field) for each in records)
    return [np.nan if value is None else value for value in values]


def test_an_unknown_key_makes_no_line_slower(
    told: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lines are validated a field at a time, whatever else they have."""
    num_calls = 0
    validate = rows_module._VALIDATE["loss"]

    def count(*arguments: Any, **options: Any) -> Any:
        nonlocal num_calls
        num_calls += 1
        return validate(*arguments, **options)

    monkeypatch.setitem(rows_module._VALIDATE, "loss", count)
    _write(told, *(_with(step=step, tokens_per_second=step) for step in range(1, 200)))
    assert len(read_rows(told)) == 199
    assert num_calls == 1


@pytest.mark.parametrize("ending", [b"", b"\n"])
def test_lines_longer_than_a_block_are_skipped(
    told: RunDirectory, ending: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rows_module, "_BLOCK_BYTES", 2**17)
    data = told.metrics_path.read_bytes()
    told.metrics_path.write_bytes(data + b"[" * 2**20 + b"\n" + data + b"[" * 2**20 + ending)
    expected = told.metric_lines()
    sentences = fsio.skipped_lines()
    assert read_rows(told).metrics() == expected
    assert fsio.skipped_lines() == sentences


def test_a_file_that_changed_while_it_was_read_is_named(told: RunDirectory) -> None:
    rows = read_rows(told)
    told.metrics_path.write_text("{}\n")
    with pytest.raises(RecordError, match=r"metrics\.jsonl cannot be read: it changed while"):
        rows.metrics()
    told.metrics_path.unlink()
    assert len(read_rows(told)) == 0
    told.metrics_path.mkdir()
    with pytest.raises(RecordError, match=r"it is a folder, expected a regular file"):
        read_rows(told)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(rows_module, "_CACHED_BYTES", 1)
    return tmp_path / "cache" / "longtake" / "metrics"


@pytest.fixture
def parsed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    sizes: list[int] = []
    parse = rows_module._parse

    def noted(lines: Sequence[bytes], begins: Any) -> Any:
        sizes.append(sum(len(line) + 1 for line in lines))
        return parse(lines, begins)

    monkeypatch.setattr(rows_module, "_parse", noted)
    return sizes


def _same(rows: MetricRows, run: RunDirectory) -> bool:
    return rows.metrics() == run.metric_lines() and len(rows) > 0


def test_only_new_lines_are_parsed(told: RunDirectory, cache: Path, parsed: list[int]) -> None:
    before = sorted(told.path.rglob("*"))
    _write(told, _GOOD, b"{", _with(step=2))
    assert _same(read_rows(told), told)
    with told.metrics_path.open("ab") as file:
        file.write(json.dumps(_with(step=3)).encode() + b'\n{"step": 4')
    size = told.metrics_path.stat().st_size
    fsio.skipped_lines()
    assert _same(read_rows(told), told)
    assert len(parsed) == 2
    assert sum(parsed) == size - len(b'{"step": 4')
    assert fsio.skipped_lines() == [f"{told.metrics_path}: 1 line is no record and was left out."]
    assert _same(read_rows(told), told)
    assert len(parsed) == 2
    assert sorted(told.path.rglob("*")) == before
    assert [path.stat().st_mode & 0o077 for path in (cache,)] == [0]


def test_rows_that_were_read_before_are_not_read_again(
    told: RunDirectory, parsed: list[int]
) -> None:
    _write(told, *(_with(step=step) for step in range(1, 50)))
    rows = first = read_rows(told)
    for step in (50, 30, 31):
        with told.metrics_path.open("ab") as file:
            file.write(json.dumps(_with(step=step)).encode() + b'\n{"step":')
        rows = read_rows(told, rows)
        assert rows.step[-1] == step
        os.truncate(told.metrics_path, told.metrics_path.stat().st_size - len('{"step":'))
    assert parsed[1:] == [len(json.dumps(_with(step=30))) + 1] * 3
    assert _same(rows, told)
    assert rows.is_abandoned.tolist() == [False] * 29 + [True] * 21 + [False] * 2
    assert len(first) == 49
    _write(told, *(_with(step=step) for step in range(1, 9)))
    assert read_rows(told, rows).step.tolist() == list(range(1, 9))
    told.metrics_path.unlink()
    assert len(read_rows(told, rows)) == 0


def _flip(path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(data[:-9] + bytes([data[-9] ^ 1]) + data[-8:])


def _make_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


_CHANGES: dict[str, Callable[[Path, Path], object]] = {
    "a newer file": lambda metrics, _: os.utime(metrics, (1, 1)),
    "a shorter file": lambda metrics, _: metrics.write_bytes(
        metrics.read_bytes().partition(b"\n")[0] + b"\n"
    ),
    "other lines": lambda metrics, _: metrics.write_bytes(
        metrics.read_bytes().replace(b'"step":24', b'"step":25') + metrics.read_bytes()
    ),
    "another file": lambda metrics, _: fsio.write_text(metrics, 2 * metrics.read_text()),
    "a damaged cache": lambda _, cache: _flip(cache),
    "a shorter cache": lambda _, cache: cache.write_bytes(cache.read_bytes()[:-20]),
    "a cache that lies": lambda _, cache: cache.write_bytes(
        b'{"format": 1, "num_rows": 99999999999999}\n'
    ),
    "a pipe as cache": lambda _, cache: _make_pipe(cache),
}


@pytest.mark.parametrize("change", _CHANGES)
def test_a_cache_of_another_file_or_a_damaged_one_is_not_used(
    told: RunDirectory, cache: Path, parsed: list[int], change: str
) -> None:
    read_rows(told)
    (path,) = cache.iterdir()
    _CHANGES[change](told.metrics_path, path)
    assert _same(read_rows(told), told)
    assert parsed[1] == told.metrics_path.stat().st_size


def test_without_a_place_for_caches_all_is_read(
    told: RunDirectory, cache: Path, parsed: list[int]
) -> None:
    cache.parent.parent.write_text("a file")
    assert _same(read_rows(told), told)
    assert _same(read_rows(told), told)
    assert len(parsed) == 2


def test_old_caches_are_deleted(
    told: RunDirectory, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rows_module, "_MAX_CACHES", 1)
    cache.mkdir(parents=True)
    old = cache / "old.rows"
    old.write_bytes(b"")
    os.utime(old, (1, 1))
    read_rows(told)
    assert len(list(cache.iterdir())) == 1
    assert not old.exists()
