"""What cannot be used ends in one sentence and exit code 2, and nothing is lost."""

import json
import os
import resource
import shutil
from pathlib import Path

import pytest
import scipy.ndimage  # noqa: F401 - another user may not read the interpreter's folders
from tests.build import change_options
from tests.cli.conftest import Call, Refuse


@pytest.fixture
def refuse(refuse: Refuse) -> Refuse:
    """Refuses as elsewhere; the text stays short, however much cannot be used."""

    def refused(*arguments: object) -> str:
        said = refuse(*arguments)
        assert len(said) < 1000
        return said

    return refused


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("note.txt", "expected a file name such as name.html"),
        ("", "expected a file name such as name.html"),
        ("note.html", "is there already, and is no .html file"),
        ("folder.html", "is there already, and is no .html file"),
        ("pipe.html", "is there already, and is no .html file"),
        ("x" * 300 + ".html", "cannot be written: File name too long"),
    ],
)
def test_a_page_is_never_written_over_something_else(
    place: Path, tmp_path: Path, refuse: Refuse, name: str, why: str
) -> None:
    (tmp_path / "folder.html").mkdir()
    os.mkfifo(tmp_path / "pipe.html")
    for note in ("note.txt", "note.html"):
        (tmp_path / note).write_text("three days of work")
    out = tmp_path / name if name else ""
    assert why in refuse("show", place / "run", "--out", out)
    for note in ("note.txt", "note.html"):
        assert (tmp_path / note).read_text() == "three days of work"


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["show", "RUN", "--around", "9" * 20], "--around"),
        (["show", "RUN", "--around", "9" * 5000], "--around"),
        (["sample", "RUN", "--prompt", "x", "--out", "o.mp4", "--steps", str(2**63)], "10000"),
        (["sample", "RUN", "--prompt", "x", "--out", "o.mp4", "--guidance", "1e308"], "1000"),
        (["sample", "RUN", "--prompt", "x", "--out", "o.mp4", "--seed", str(2**64)], "--seed"),
        (["sample", "RUN", "--prompt", "\udcff", "--out", "o.mp4"], "not valid UTF-8"),
        (["sample", "RUN", "--prompt", "x", "--out", "/dev/null"], "expected the name of"),
        (["evaluate", "RUN", "--backlog", "every=" + "9" * 5000], "--backlog"),
        (["plan", "RECIPE", "--memory", "9" * 5000 + "GiB"], "is not an amount of memory"),
        (["preflight", "RECIPE", "--timeout", "inf"], "--timeout"),
        (["train", "RECIPE", "--weights-only"], "--weights-only needs --from RUN"),
        (["train", "RECIPE", "--load", "x"], "the same command again resumes"),
        (["launch", "RECIPE", "--resume-from", "x"], "--from RUN[@STEP] begins a new run"),
        (["launch", "RECIPE", "--weights-only"], "--weights-only needs --from RUN"),
        (["launch", "RECIPE", "--slurm", "--from", "gone"], "gone is not a run directory"),
        (["launch", "RECIPE", "--from", "RUN@7"], "no whole checkpoint of step 7"),
        (["data", "prepare", "CATALOG", "--size", "9" * 5000 + "x8", "--out", "o"], "--size"),
        (["data", "prepare", "CATALOG", "--size", "8x8", "--fps", "nan", "--out", "o"], "fps nan"),
    ],
)
def test_absurd_arguments_are_refused(
    place: Path,
    shapes_catalog: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    call: Call,
    arguments: list[str],
    why: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    names = {
        "RUN": place / "run",
        "RUN@7": f"{place}/run@7",
        "RECIPE": place / "recipe.toml",
        "CATALOG": shapes_catalog,
    }
    code, _, err = call(*(names.get(each, each) for each in arguments))
    assert why in "".join(err.split("│")) if code == 2 else code == 2, err
    assert "Traceback" not in err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("text", ["", "{}", "[" * 100_000, "\0"])
def test_a_damaged_vocabulary_is_named(
    run: Path, tmp_path: Path, refuse: Refuse, text: str
) -> None:
    (saved,) = run.rglob("tokenizer.json")
    saved.write_text(text)
    said = refuse("sample", run, "--prompt", "x", "--out", tmp_path / "o.mp4")
    assert f"{saved} cannot be read" in said


def test_a_full_disk_ends_an_index_in_a_sentence(
    shapes_catalog: Path, tmp_path: Path, call: Call, refuse: Refuse
) -> None:
    out = tmp_path / "catalog.parquet"
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1500, before[1]))
    try:
        said = refuse("data", "index", shapes_catalog.parent, "--out", out)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert "journal.jsonl cannot be written: File too large. Make room" in said
    code, _, err = call("data", "index", shapes_catalog.parent, "--out", out)
    assert code == 0
    assert " 0 not read again" not in err


def test_a_run_that_may_not_be_read_is_named(another_user: Path, refuse: Refuse) -> None:
    run = another_user / "run"
    run.mkdir()
    (run / "recipe.toml").touch()
    run.chmod(0)
    for verb in (["show"], ["data", "audit"], ["evaluate"]):
        assert str(run) in refuse(*verb, run)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ("model.config.hidden_size=824633720832", "model.config does not fit the tubelet family"),
        ("model.config.num_blocks=x", "model.config does not fit the tubelet family"),
        ("model.config.patch_size=[0,8,8]", "model.config.patch_size = "),
        ("model.config.patch_size=8", "model.config.patch_size = "),
        ("data.buckets=[{num_frames=65536,height=65536,width=65536}]", ""),
    ],
)
def test_sizes_that_no_memory_holds_are_refused(
    place: Path, tmp_path: Path, refuse: Refuse, change: str, why: str
) -> None:
    changes = ("--set", change, "--set", f"out={tmp_path / 'run'}")
    said = refuse("train", place / "recipe.toml", *changes)
    assert why in said


def test_a_further_input_that_clips_lack_is_refused_before_there_is_a_run(
    place: Path, tmp_path: Path, call: Call, refuse: Refuse
) -> None:
    changes = change_options(
        f"out={tmp_path / 'run'}",
        f"data.cache={tmp_path / 'cache'}",
        "data.windows=1",
        'data.conditioning.face={kind="mask", path="../masks/{stem}.png"}',
        "flow.loss_mask=face",
    )
    for verb in (("train",), ("data", "cache")):
        said = refuse(*verb, place / "recipe.toml", *changes)
        assert "data.conditioning.face: 64 of 64 clips lack their file" in said
        assert "and 61 more" in said
        assert not (tmp_path / "run" / "recipe.toml").exists()
    code, out, _ = call("plan", place / "recipe.toml", *changes)
    assert code == 2
    assert "refuse this recipe. data.conditioning.face: 64 of 64 clips" in " ".join(out.split())


def test_no_pipe_keeps_an_index_waiting(
    shapes_catalog: Path, tmp_path: Path, call: Call, refuse: Refuse
) -> None:
    clips = tmp_path / "clips"
    clips.mkdir()
    shutil.copy(next(shapes_catalog.parent.rglob("*.mp4")), clips)
    for name in ("x.tar", "x.mp4", "pipe.parquet", "captions.txt"):
        os.mkfifo(clips / name)
    said = refuse("data", "index", clips, "--out", clips / "pipe.parquet")
    assert "exists and is not a catalog" in said
    out = tmp_path / "catalog.parquet"
    said = refuse("data", "index", clips, "--captions", clips / "captions.txt", "--out", out)
    assert "it is a named pipe, expected a regular file" in said
    code, _, err = call("data", "index", clips, "--out", out)
    assert code == 0, err
    assert "2 files rejected" in err


# --- files of a run that hold something else than records ---------------------------------------

_TIME = "2026-01-02T03:04:05.000+00:00"
_LINES = {
    "a list": "[]",
    "a number": "5",
    "nothing": "{}",
    "null": "null",
    "5,000 digits": '{"step": ' + "9" * 5000 + "}",
    "deep": "[" * 60_000,
    "fields of other types": '{"step": "x", "time": [], "event": {}, "loss": "low"}',
    "a time that is none": '{"step": 1, "time": "yesterday", "event": "finished"}',
    "a verdict without words": f'{{"step": 1, "time": "{_TIME}", "event": "update_skipped"}}',
    "a start without parts": f'{{"step": 1, "time": "{_TIME}", "event": "startup_timing"}}',
    "an epoch without a name": f'{{"step": 1, "time": "{_TIME}", "event": "epoch"}}',
    "a rank without a number": f'{{"step": 1, "time": "{_TIME}", "event": "rank_failed"}}',
    "a lone surrogate": f'{{"time": "{_TIME}", "event": "\\udcff"}}',
}
_LOGS = (
    "metrics.jsonl",
    "events.jsonl",
    "rollbacks.jsonl",
    "nodes/vm/events.jsonl",
    "evaluations/servers/vm-1/events.jsonl",
)


@pytest.mark.parametrize("log", _LOGS)
def test_lines_that_are_no_records_are_left_out(log: str, run: Path, call: Call) -> None:
    path = run / log
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write("".join(f"{line}\n" for line in _LINES.values()) + '{"step": 3')
    count = len(_LINES)
    code, _, err = call("show", run)
    assert code == 0
    assert f"{path}: {count} lines are no records and were left out." in err
    for verb in (
        ("show", run, "--around", 1, "--json"),
        ("show", run, "--out", run / "curves.html"),
        ("data", "audit", run),
    ):
        assert call(*verb)[0] == 0


def test_another_format_is_refused_in_a_sentence(run: Path, refuse: Refuse) -> None:
    path = run / "run.json"
    record = json.loads(path.read_text())
    assert record["format"] == 1
    path.write_text(json.dumps(record | {"format": 2}))
    assert "it has format 2, and this longtake reads format 1" in refuse("show", run)


def test_a_damaged_newest_checkpoint_is_named_where_an_older_one_is_sampled(
    run: Path, call: Call, tmp_path: Path
) -> None:
    newest = run / "checkpoints" / "step_00000003"
    shutil.copytree(run / "checkpoints" / "step_00000002", newest)
    (newest / "COMMITTED").write_text('{"format": 2')
    options = ["--prompt", "x", "--steps", "1", "--out", tmp_path / "o.mp4"]
    code, _, stderr = call("sample", run, *options)
    assert code == 0
    assert f"{newest} is not whole (COMMITTED cannot be read" in " ".join(stderr.split())
    _, _, stderr = call("sample", run, *options, "--step", "2")
    assert "passed over" not in stderr
