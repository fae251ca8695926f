"""The data page, from facts to HTML: the numbers of `data show` and `data audit`, and damage."""

import json
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.data.build import catalog_of
from tests.data.catalogs import make_catalog
from tests.data.test_audit import _Run

from longtake.board.data_page import render_data, stages_of
from longtake.board.pages import ServerLinks
from longtake.data import ledger
from longtake.data.audit import audit
from longtake.data.catalog import Catalog, Rejection
from longtake.inspection import batch_facts, curriculum_facts, data_facts, ledger_facts, stills
from longtake.inspection.reader import RunFacts, RunReader
from longtake.run_dir import RunDirectory

_HOSTILE = "<script>alert(1)</script>\x1b[31m"
_STAGES = [
    {"name": "easy", "where": ["difficulty <= q40"], "epochs": 2},
    {"name": "all", "drop_hardest": 0.1, "ramp_steps": 4},
]


def _facts(run: RunDirectory) -> RunFacts:
    return RunReader(run.path.parent, run.path.name).facts()


def _page(run: RunDirectory, **query: str) -> str:
    return render_data(_facts(run), ServerLinks(), query)


def _words(html: str) -> str:
    return " ".join(re.sub(r"<[^>]*>", " ", html).split())


def _only(folder: Path, pattern: str) -> Path:
    (path,) = folder.glob(pattern)
    return path


def _catalog(run: RunDirectory) -> Path:
    return _only(run.catalogs_path, "*.parquet")


def _ledger(run: RunDirectory) -> Path:
    return _only(run.ledger_path, "launch_0000/rank_0000.bin")


@pytest.fixture
def curriculum(tmp_path: Path) -> RunDirectory:
    """30 steps over 41 clips of which 4 have no caption and one file was rejected."""
    (tmp_path / "curriculum").mkdir()
    clips = catalog_of(
        range(41),
        attributes=lambda n: {"nouns": float(n % 12)},
        caption=lambda n: f"clip {n}" if n % 10 else "",
        num_frames=lambda n: 2 + n,
    )
    clips = Catalog(clips.table, make_catalog([], [Rejection("/bad.mp4", _HOSTILE)]).set_aside)
    run = _Run(tmp_path / "curriculum", clips, stages=_STAGES, difficulty="nouns")
    run.launch(30)
    return run.directory


def _shown(run: RunDirectory) -> dict[str, Any]:
    loaded = curriculum_facts.load(_catalog(run), run.recipe())
    return curriculum_facts.describe(loaded)


@pytest.mark.parametrize("which", ["told", "curriculum"])
def test_catalog_and_plan_are_those_of_data_show(
    which: str, request: pytest.FixtureRequest
) -> None:
    run: RunDirectory = request.getfixturevalue(which)
    shown, data = _shown(run), data_facts.read_data(_facts(run))
    assert data.problems == []
    (catalog,) = data.catalogs
    assert catalog.stats.items() <= shown.items()
    assert data.summary is not None
    assert data.summary.items() <= shown.items()
    words = _words(_page(run))
    for stage in shown["stages"]:
        dropped = stage["clips"] - stage["selected"]
        assert (
            f"Stage {stage['stage']} : {stage['selected']} clips kept, {dropped} dropped" in words
        )
        for reason, count in stage["dropped"].items():
            assert not count or f"{reason.replace('<=', '&lt;=')} {count} clips" in words


@pytest.mark.parametrize("which", ["told", "curriculum"])
def test_the_ledger_is_audited_as_data_audit_does(
    which: str, request: pytest.FixtureRequest
) -> None:
    run: RunDirectory = request.getfixturevalue(which)
    facts = _facts(run)
    found, expected = (
        ledger_facts.read_ledger(facts, data_facts.read_data(facts)),
        audit(run),
    )
    assert found is not None
    assert found.is_exact is expected.ok is True
    assert all(row.audit in expected.epochs for row in found.rows)
    words = _words(_page(run))
    assert (
        "✓ By the ledger, every clip was trained exactly as often as it should have been." in words
    )
    assert f"longtake data audit {run.path}" in words


def test_epochs_are_put_in_words(curriculum: RunDirectory) -> None:
    assert "each clip of these 2 epochs was seen once" in _words(_page(curriculum))
    path = _ledger(curriculum)
    data = path.read_bytes()
    path.write_bytes(data[16:32] + data[16:])  # the second clip in the place of the first
    words = _words(_page(curriculum))
    assert "✕ Not exact: clips were repeated, missed or out of place." in words
    assert "✕ 1 repeated, 1 missing: clips whose identity begins with" in words


def test_stages_are_drawn_over_the_batches_with_the_current_one(told: RunDirectory) -> None:
    data = data_facts.read_data(_facts(told))
    assert data.strip is not None
    assert (data.strip.names, data.strip.end) == (["all"], 49)  # 40 steps, and 9 skipped batches
    words = _words(_page(told))
    assert re.search(r"batch 0\s+49\s+the run is at batch 33", words)


def test_before_the_first_batch_the_first_stage_is_open(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    stages = [{"name": "a", "steps": 1}, {"name": "b"}]
    run = _Run(tmp_path / "run", catalog_of(range(22)), stages=stages).directory
    strip = data_facts.StageStrip(["a", "b"], [[1.0, 0.0], [0.0, 1.0]], end=2)
    views = stages_of(replace(data_facts.read_data(_facts(run)), strip=strip), None)
    assert [(each.facts["stage"], each.is_open) for each in views] == [("a", True), ("b", False)]


def test_a_histogram_has_the_span_of_each_stage(curriculum: RunDirectory) -> None:
    (found,) = data_facts.read_data(_facts(curriculum)).histograms
    assert (found.name, sum(found.counts), found.num_unknown) == ("nouns", 41, 0)
    easy, everything = found.spans
    assert (easy.low, easy.high, easy.conditions) == (0.0, 3.0, "difficulty <= q40")
    assert (everything.high, everything.conditions) == (10.0, "without the hardest 10 %")
    assert sum(easy.counts) == easy.num_clips


def test_stages_after_a_change_of_the_data_are_those_that_were_trained(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    stages = [{"name": "a", "epochs": 1}, {"name": "b"}]
    run = _Run(tmp_path / "run", catalog_of(range(22)), stages=stages)
    run.launch(3)
    run.resume(catalog_of(range(40)))
    run.launch(20)
    data = data_facts.read_data(_facts(run.directory))
    assert (data.num_plans, data.problems) == (2, [])
    assert data.strip is not None
    assert data.strip.shares[0][:6] == [1.0] * 6  # of 5 batches for 3 spans; 22 clips have 6
    assert "✓ By the ledger, every clip" in _page(run.directory)


@pytest.mark.parametrize("limit", ["MOST_CLIPS", "_MOST_BYTES"])
def test_of_a_large_catalog_the_command_that_shows_it_is_named(
    curriculum: RunDirectory, monkeypatch: pytest.MonkeyPatch, limit: str
) -> None:
    monkeypatch.setattr(data_facts, limit, 40)
    data = data_facts.read_data(_facts(curriculum))
    assert (data.catalogs, data.summary) == ([], None)
    words, path = _words(_page(curriculum)), _catalog(curriculum)
    assert f"data show {path} {curriculum.recipe_path} --out data.html" in words
    assert "the command compares them" in words


def test_more_buckets_than_a_page_can_try_are_named(
    curriculum: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data_facts, "_MOST_CLIPS_BY_BUCKETS", 40)
    data = data_facts.read_data(_facts(curriculum))
    assert (len(data.catalogs), data.summary) == (1, None)
    assert "too many for these clips" in data.problems[0]


def test_of_a_large_ledger_the_command_that_reads_it_is_named(
    curriculum: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ledger_facts, "MOST_RECORDS", 10)
    words = _words(_page(curriculum))
    count = ledger.num_records(curriculum.ledger_path)
    assert f"The ledger has {count} records: the command compares them" in words
    assert f"longtake data audit {curriculum.path}" in words
    assert "seen once" not in words


def test_batches_around_verdicts_list_their_clips_the_worst_first(told: RunDirectory) -> None:
    batches, count = batch_facts.batches_around_verdicts(_facts(told), 9)
    assert (count, [(each.step, each.is_open) for each in batches]) == (2, [(20, False), (9, True)])
    clips = batches[1].clips
    assert clips is not None
    assert [str(each.loss) for each in clips] == ["nan", "3.0", "2.0", "1.0"]
    assert all(each.path and each.path.endswith(".mp4") for each in clips)
    page = _page(told, step="9")
    assert '<details class="data-verdict" data-step="9" open>' in page
    assert f"longtake show {told.path} --around 9" in page
    assert "The guard said nothing of step 3." in _page(told, step="3")
    assert _page(told, step="-1") == _page(told, step="9" * 40) == _page(told)


def test_large_reports_are_read_only_when_asked_for(
    told: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_facts, "_MOST_BYTES", 10)
    page = _page(told, step="20")
    assert "/run/data/run?step=9" in page
    assert page.count('<table class="data-clips">') == 1


def test_text_of_a_run_is_escaped(curriculum: RunDirectory, told: RunDirectory) -> None:
    path = told.guard_report_path(8, 0)
    report = json.loads(path.read_text())
    for sample in report["samples"]:
        sample["caption"] = _HOSTILE
    path.write_text(json.dumps(report))
    told.append_event("sample_rejected", step=1, rank=0, identity="ab" * 16, reason=_HOSTILE)
    for run in (curriculum, told):
        page = _page(run)
        assert "<script>alert" not in page
        assert "\x1b" not in page
        assert "&lt;script&gt;alert(1)&lt;/script&gt;\\x1b[31m" in page


# --- What is missing or damaged ---------------------------------------------------------------


def test_a_mirror_without_data_says_what_will_appear(told: RunDirectory) -> None:
    for path in (told.catalogs_path, told.ledger_path, told.guard_path):
        shutil.rmtree(path)
    words = _words(_page(told))
    assert "a mirror leaves them out" in words
    assert "The ledger has an entry for each clip that was trained, and there is none" in words
    assert words.count("The guard's report of it is missing.".replace("'", "&#39;")) == 2


def test_a_run_without_a_readable_recipe_shows_its_catalog(told: RunDirectory) -> None:
    told.recipe_path.write_text("nothing = ")
    words = _words(_page(told))
    assert "appear here once the recipe and its catalogs can be read" in words
    assert "length of all videos 1:04" in words


def _link(path: Path) -> None:
    path.symlink_to(path.rename(path.with_name("moved")))


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (
            lambda run: _catalog(run).write_bytes(_catalog(run).read_bytes()[:-100]),
            "is not a catalog of longtake.",
        ),
        (lambda run: _link(_catalog(run)), "is a symbolic link; links are not followed."),
        (lambda run: _link(run.catalogs_path), "is a symbolic link; links are not followed."),
        (
            lambda run: _catalog(run).rename(run.catalogs_path / "another.parquet"),
            "copy of the catalog catalog is missing",
        ),
        (
            lambda run: _ledger(run).write_bytes(b"\xff" + _ledger(run).read_bytes()[1:]),
            "is damaged: the checksum of record 0",
        ),
        (
            lambda run: (run.ledger_path / "launch_0001" / "launch.json").write_text("{}"),
            "launch.json cannot be read",
        ),
        (
            lambda run: _link(_ledger(run)),
            "rank_0000.bin is a symbolic link; links are not followed.",
        ),
        (
            lambda run: run.guard_report_path(8, 0).write_text('{"step": 8}'),
            "step_00000008_0.json cannot be read",
        ),
    ],
)
def test_what_is_damaged_is_one_sentence_and_the_rest_is_shown(
    told: RunDirectory, damage: Callable[[RunDirectory], object], said: str
) -> None:
    damage(told)
    words = _words(_page(told))
    assert said in words
    assert "step 20 is bad" in words
    for title in ("Catalog", "Difficulty and stages", "Buckets", "Ledger", "Batches around"):
        assert title in words


def test_what_has_not_changed_is_not_read_again(
    told: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader = RunReader(told.path.parent, "run")
    before = render_data(reader.facts(), ServerLinks(), {})
    for name in ("_catalog_facts", "begin"):
        monkeypatch.setattr(data_facts, name, None)
    monkeypatch.setattr(ledger_facts, "audit", None)
    monkeypatch.setattr(batch_facts, "samples_of_step", None)
    assert render_data(reader.facts(), ServerLinks(), {}) == before


# --- Stills -----------------------------------------------------------------------------------


@pytest.fixture
def rejected(
    told: RunDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[RunDirectory, Path]:
    """A run with a clip that could not be decoded, and is whole up to frame 3 of 8."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    catalog = Catalog.load(_catalog(told))
    clip = catalog.clip(5)
    told.append_event(
        "sample_rejected", step=3, rank=0, identity=clip.identity, reason="it is broken"
    )
    return told, clip.media.file


def test_a_clip_that_was_rejected_has_a_still_in_the_page(
    rejected: tuple[RunDirectory, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, path = rejected
    monkeypatch.setattr(stills, "_WAIT_SECONDS", 60.0)
    monkeypatch.setattr(stills.stills_of, "__defaults__", (60.0,))
    page = _page(run)
    assert '<img src="data:image/jpeg;base64,' in page
    assert "it is broken" in page
    assert str(path) in page
    assert len(list((tmp_path / "cache" / "longtake" / "stills").glob("*.json"))) == 1
    monkeypatch.setattr(stills, "_decode_in_background", None)  # the second time it is in the cache
    assert _page(run) == page


def test_clips_of_a_run_that_another_began_are_not_opened(
    rejected: tuple[RunDirectory, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    run, _ = rejected
    record = json.loads(run.record_path.read_text())
    record["begun_by"]["host"] = "another"
    run.record_path.write_text(json.dumps(record))
    monkeypatch.setattr(stills, "_decode_in_background", None)
    page = _page(run)
    assert "this run was not begun by you on this host" in page
    assert "<img" not in page
    assert "it is broken" in page


def test_clips_of_a_catalog_that_another_wrote_are_not_opened(
    rejected: tuple[RunDirectory, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    run, _ = rejected
    monkeypatch.setattr("longtake.trust.is_own", lambda run: True)
    monkeypatch.setattr(os, "getuid", lambda: 2**31)
    monkeypatch.setattr(stills, "_decode_in_background", None)
    assert "copies of its catalogs were not written by you" in _page(run)
