"""Named cases: inputs that once gave tracebacks, hangs or losses, by what is wrong with them.

Each damages one thing in the place, and runs one command there.
"""

import json
import math
import os
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image
from tests.fuzz.damages import (
    STEP,
    Damage,
    add_lines,
    add_source,
    add_table,
    add_tar,
    change_kept_recipe,
    damage,
    put_kind,
    recommit,
    set_cell,
    set_text,
    set_values,
    take_reading,
)
from tests.fuzz.generators import LOGS, TRAINED, take_permission
from tests.fuzz.mutations import DEEP, hostile_pickle, replace_with, unevaluate

_Check = Callable[..., Any]

_SCORES = "run/evaluations/tiny/step_00000004/scores.json"
_LAUNCH = "run/ledger/launch_0000/launch.json"
_REPORT = "run/guard/step_00000002_0.json"
_CLAIM = "run/evaluations/claims/tiny/*/0.json"
_JOURNAL = ".new.parquet.journal.jsonl"

_SHOW = ("show", "run")
_AROUND = ("show", "run", "--around", "3")
_CURVES = ("show", "run", "--out", "o.html")
_STRIP = ("show", "run", "--around", "3", "--out", "o.html")
_LAUNCH_ONE = ("launch", "recipe.toml", "--nproc-per-node", "1")
_AUDIT = ("data", "audit", "run")
_TRAIN = ("train", "recipe.toml")
_TRAIN_NEW = (*_TRAIN, "--set", "out=new")
_CPU = ("--device", "cpu")
_SAMPLE = ("sample", "run", "--prompt", "a red circle", "--out", "o.mp4", *_CPU)
_EVALUATE = ("evaluate", "run", *_CPU)
_REPORT_RUN = ("report", "run", "--out", "r.html")
_INDEX = ("data", "index", "more", "--out", "new.parquet")
_SHOW_DATA = ("data", "show", "catalog.parquet", "recipe.toml")
_SELECT = (*_SHOW_DATA, "--set", 'data.stages=[{name="a",where=["score >= q40"]}]')
_PREPARE = ("data", "prepare", "catalog.parquet", "--size", "16x16", "--out", "prepared")
_SCORE = ("data", "score", "catalog.parquet", "--out", "scored.parquet", "--by", "length")
_PICTURES = ("data", "show", "catalog.parquet", "--out", "pictures")

_DEEP_OBJECT = b'{"a":' * DEEP + b"1" + b"}" * DEEP

_MAY_CHANGE = (*TRAINED, "run/evaluations/*", "run/slurm/*", _JOURNAL)


@damage
def _nothing(place: Path) -> None:
    """The place is as it was."""


def _case(about: str, damaging: Damage, command: Sequence[str], **more: Any) -> Any:
    return pytest.param(damaging, command, more, id=f"{about} {' '.join(command[:2])}"[:90])


_SUCCEEDS: dict[str, Any] = {"must_succeed": True}
_EVALUATES: dict[str, Any] = {"must_succeed": True, "makes": _SCORES}
_METRICS, _EVENTS, _ROLLBACKS = LOGS
_RUN_JSON = "run/run.json"

_READERS: dict[str, list[tuple[str, ...]]] = {
    _METRICS: [_TRAIN, _SHOW, _CURVES, _STRIP],
    _EVENTS: [_TRAIN, _SHOW, (*_SHOW, "--json"), _AROUND, _STRIP],
    _ROLLBACKS: [_TRAIN, _SHOW, _STRIP],
    "run/nodes/node7/events.jsonl": [_AROUND],
    "run/nodes/node7/health.jsonl": [_SHOW],
}
_OTHER_LINES = [
    _case(f"other lines in {name}", add_lines(name), command, **_SUCCEEDS)
    for name, commands in _READERS.items()
    for command in commands
]
_OTHER_TYPES = [
    *[
        _case(f"plan.json is {text[:9]!r}", set_text("run/plan.json", text), _TRAIN)
        for text in (b"[]", b"{}", b"5", _DEEP_OBJECT)
    ],
    _case("launches", set_values(_RUN_JSON, launches=[5, {}]), _SHOW),
    _case("verdict", set_values(_REPORT, verdict=[], samples=[{}]), _AROUND),
    _case("samples", set_values(_REPORT, samples=[5], history=[5]), _STRIP),
    _case("world_size", set_values(_LAUNCH, world_size="x", streams=5), _AUDIT),
    _case("history", set_values(_LAUNCH, history=[5], start_step=-1), _AUDIT),
    _case("catalogs", set_values(_LAUNCH, catalogs={"a": "../x"}), _AUDIT),
    _case("measures", set_values(_SCORES, measures={"a": "x"}, alarms=[5]), _REPORT_RUN),
    _case("claims without ended", set_values(_CLAIM, ended=None, server=5), _SHOW),
    _case("trainer.json is []", recommit("trainer.json", b"[]"), _SAMPLE),
    _case("trainer.json is {}", recommit("trainer.json", b"{}"), _SAMPLE),
    _case("global_step", recommit("trainer.json", b'{"global_step": "x"}'), _TRAIN),
    _case(
        "journal",
        lambda place: [
            add_source("x.txt", b"")(place),
            set_text(_JOURNAL, b'[]\n5\n{"media": 5}\n')(place),
        ],
        ("data", "index", "more/a.mp4", "--out", "new.parquet"),
        **_SUCCEEDS,
    ),
]


def _pipe_beside_clips(place: Path) -> None:
    add_source("x.txt", b"")(place)
    os.mkfifo(place / "more" / "x.tar")


_OTHER_KINDS = [
    *[
        _case(f"{kind} at {name}", put_kind(name, kind), command)
        for name, command in [
            (_JOURNAL, ("data", "index", "catalog.parquet", "--out", "new.parquet")),
            ("o.html", _CURVES),
        ]
        for kind in ("pipe", "folder")
    ],
    _case("pipe beside clips", _pipe_beside_clips, _INDEX),
]

_SOURCES = [
    _case("large integer", add_table(video=["a.mp4"], id=[2**60 + 1]), _INDEX, **_SUCCEEDS),
]
_CATALOGS = [
    _case(
        f"{column}={str(value)[:20]} {'kept' if fingerprint else 'no'} fingerprint",
        set_cell(column, value, fingerprint=fingerprint),
        command,
    )
    for column, value, command in [
        ("num_frames", 2**30, _SHOW_DATA),
        ("num_frames", 0, _PICTURES),
        ("num_frames", None, _SHOW_DATA),
        ("height", -1, _PICTURES),
        ("width", 0, _SHOW_DATA),
        ("width", None, _SHOW_DATA),
        ("caption", None, _PICTURES),
        ("caption", None, _TRAIN_NEW),
        ("path", None, _PICTURES),
        ("path", None, _TRAIN_NEW),
        ("path", "a\0b.mp4", _PICTURES),
        ("path", "a\0b.mp4", _TRAIN_NEW),
        ("identity", None, _SHOW_DATA),
        ("identity", None, _TRAIN_NEW),
        ("pts_step", None, _PICTURES),
        ("first_pts", None, _PICTURES),
        ("pts", [3, 2, 1], _PICTURES),
        ("keyframes", [99], _PREPARE),
        ("width", 2**21, _SHOW_DATA),
        ("height", None, _PREPARE),
        ("rotation", 45, _PICTURES),
        ("stream_index", 10**6, _PREPARE),
        ("offset", -1, _PREPARE),
        ("caption", None, _SCORE),
        ("duration_seconds", None, _SCORE),
        ("num_frames", 0, (*_SCORE[:-1], "motion")),
        ("attributes.score", math.inf, _PICTURES),
        ("attributes.$\\frac{x$", 1.5, _PICTURES),
        ("attributes.score", None, _SELECT),
        ("attributes.score", math.nan, _SELECT),
        ("fps", math.nan, _SHOW_DATA),
        ("fps", math.nan, _PICTURES),
        ("fps", 1e308, _PICTURES),
        ("fps", 1e308, _TRAIN_NEW),
    ]
    for fingerprint in ((True, False) if column == "caption" else (False,))
]

_SETTINGS = [
    _case(value[:40], _nothing(), (*_TRAIN_NEW, "--set", value))
    for value in [
        f"codec={{kind='autoencoder', pretrained='./{'x' * 300}'}}",
        'data.catalog="a\\u0000b"',
        'text.pretrained="a\\u0000b"',
        "model.config={hidden_size=4611686018427387904}",
        "model.config={num_blocks=9223372036854775807}",
        "data.windows=9223372036854775807",
        "data.workers=100000",
        "sampling.shift=[]",
        'out="a\\u0000b"',
    ]
]

_TOKENIZER = "run/components/tokenizer/tokenizer.json"
_METADATA = f"{STEP}/ema/main/.metadata"
_PARTS = [
    *[
        _case(f"tokenizer {text.decode('latin-1')[:9]!r}", set_text(_TOKENIZER, text), command)
        for text in (b"", b"[]", b"{}", b"\xff\xfe", b'{"version": "1.0"}')
        for command in (_SAMPLE, _TRAIN)
    ],
    _case("full disk", _nothing(), _TRAIN_NEW, file_bytes=900),
    *[
        _case(f"COMMITTED {name!r}", set_values(f"{STEP}/COMMITTED", files=names), command)
        for name, names in [
            ("nul", {"a\0b": {"size": 1, "sha256": "0"}}),
            ("surrogate", {"\ud800": {"size": 1, "sha256": "0"}}),
            ("outside", {"../../run.json": {"size": 1, "sha256": "0"}}),
            ("list", ["a\0b"]),
        ]
        for command in (_SAMPLE, _TRAIN)
    ],
    _case("no pickle", set_text(_METADATA, b"\x80\x05no pickle"), _SAMPLE),
    _case("empty metadata", set_text(_METADATA, b""), _SAMPLE),
    _case("height", change_kept_recipe("height = 16", "height = 1000000000000"), _SAMPLE),
    _case("width", change_kept_recipe("hidden_size = 24", f"hidden_size = {10**11}"), _SAMPLE),
]

_UNREADABLE = [
    _case(f"unreadable {name}", take_reading(name), command, unprivileged=True)
    for name, command in [
        ("run/metrics.jsonl", _SHOW),
        ("run/recipe.toml", _SHOW),
        ("run/evaluations", _SHOW),
        ("run/nodes", _SHOW),
        ("run/ledger", _AROUND),
        ("run/catalogs", _AUDIT),
        ("run/components", _SAMPLE),
        (STEP, _SAMPLE),
    ]
]

_LAUNCHES = [
    _case("many nodes", _nothing(), ("launch", "recipe.toml", "--nnodes", "9" * 5000)),
    _case("read-only", take_permission, _LAUNCH_ONE, unprivileged=True),
]


@damage
def _left_by(place: Path, server: object) -> None:
    """Leave the evaluation of a checkpoint as begun by a server that died over it."""
    name = server.replace("/PLACE", str(place)) if isinstance(server, str) else server
    set_values(_CLAIM, server=name, ended=None)(place)
    unevaluate(place, keep_claims=True)


@damage
def _beaten_by(place: Path, server: str) -> None:
    """Have a server of that name work on the run."""
    unevaluate(place)
    folder = place / "run" / "evaluations" / "servers" / "vm-1"
    folder.mkdir(parents=True)
    record = {"server": server, "pid": 4242, "beat": 3, "time": "2026-05-01T12:00:00+00:00"}
    (folder / "heartbeat.json").write_text(json.dumps(record))
    event = {"event": "evaluation_started", "server": server, "step": 4, "preset": "tiny"}
    (folder / "events.jsonl").write_text(json.dumps({**event, "time": record["time"]}) + "\n")


def _damaged_event_file(place: Path) -> None:
    """Write TensorBoard's file: a record that says it is as long as memory is."""
    folder = place / "run" / "tensorboard"
    folder.mkdir()
    name = "events.out.tfevents.1700000000.node7"
    (folder / name).write_bytes(struct.pack("<QI", 2**62, 0) + b"no record")


_SERVERS = [
    _case("publish", set_values(_CLAIM, server="../../x"), _SHOW),
    *[
        _case(f"publish {server!r}", _left_by(server), _EVALUATE, **_EVALUATES)
        for server in ("a/b", "../../../recipe.toml", "/PLACE/recipe.toml", "", "..", "a\0b", 5)
    ],
    *[
        _case(f"heartbeat {server!r}", _beaten_by(server), command, **_SUCCEEDS)
        for server in ("a/b", "../../x")
        for command in (_SHOW, _EVALUATE)
    ],
    _case(
        "event file",
        _damaged_event_file,
        (*_TRAIN, "--set", "tracking.tensorboard=true"),
        **_SUCCEEDS,
    ),
]


@damage
def _dangling(place: Path, step: int) -> None:
    """Move a checkpoint to a disk which is not there now."""
    (place / _ROLLBACKS).unlink()  # so that training goes on from the newest
    replace_with(place / "run" / "checkpoints" / f"step_{step:08d}", "dangling")


_LINKS = [
    _case("newest", _dangling(4), _TRAIN, says="step_00000004 is a symbolic link to /no/such"),
    _case("next", _dangling(6), _TRAIN, says="delete the link"),
    _case("sample", _dangling(4), _SAMPLE),
    _case("evaluate", _dangling(4), _EVALUATE),
    _case("older", _dangling(2), _TRAIN, **_SUCCEEDS),
]


@damage
def _picture(place: Path, name: str, width: int, height: int, num_frames: int = 1) -> None:
    """Add a picture that is large only when it is decoded."""
    (place / "more").mkdir()
    frames = [Image.new("P", (width, height), number) for number in range(min(2, num_frames))]
    if num_frames == 1:
        frames[0].save(place / "more" / name)
    else:
        rest = [frames[number % 2] for number in range(1, num_frames)]
        frames[0].save(place / "more" / name, save_all=True, append_images=rest)


def _many_rows(place: Path) -> None:
    """A table of 20 million rows in few bytes."""
    (place / "more").mkdir()
    names = pa.DictionaryArray.from_arrays(np.zeros(20_000_000, np.int8), ["a.mp4"])
    pq.write_table(pa.table({"video": names}), place / "more" / "a.parquet", compression="zstd")


_MANY = json.dumps({f"a{number}": number for number in range(100_000)}).encode()
_LARGE = [
    _case("PNG 60000 x 1", _picture("a.png", 60_000, 1), _INDEX, memory_bytes=3 * 2**30),
    _case("GIF 16000 x 16000", _picture("a.gif", 16_000, 16_000), _INDEX),
    _case("GIF of 20,000 frames", _picture("a.gif", 64, 64, 20_000), _INDEX),
    _case("PNG 9400 x 9400", _picture("a.png", 9_400, 9_400), _INDEX),
    _case("20 million rows", _many_rows, _INDEX, memory_bytes=4 * 2**30),
    _case("100,000 attributes", add_tar(_MANY), _INDEX),
    _case("deep JSON lines", add_source("a.jsonl", b"[" * DEEP + b"\n"), _INDEX),
    _case("world_size", set_values(_LAUNCH, world_size=10**8), _AUDIT),
]


def _high_lease(place: Path) -> None:
    """A lease whose number is the last of a thousand million."""
    for path in (place / "run").glob("evaluations/claims/tiny/*/0.json"):
        path.rename(path.with_name("999999999.json"))
    for name in ("run/lease", "run/leases"):
        folder = place / name
        folder.mkdir(exist_ok=True)
        (folder / "999999999.json").write_text('{"server": "x", "beat": 0}')


_LEASES = [_case("leases", _high_lease, command) for command in (_SHOW, _EVALUATE, _TRAIN)]


def _hostile_hook(place: Path) -> None:
    path = place / "run" / "recipe.toml"
    text = path.read_text().replace("[watch]", '[watch]\nhook = "touch canary"')
    path.write_text(text)


def _hostile_module(place: Path) -> None:
    (place / "run" / "hostile.py").write_text("open('canary', 'w')\nclass Hostile: pass\n")
    path = place / "run" / "recipe.toml"
    path.write_text(path.read_text() + '\n[trainable]\nmodule = "run.hostile:Hostile"\n')


_FOREIGN = [
    *[
        _case(f"pickle {part}", recommit(f"{part}/.metadata", hostile_pickle()), command)
        for part, command in [
            ("ema/main", _SAMPLE),
            ("ema/main", _EVALUATE),
            ("model", _TRAIN),
            ("optimizer", _TRAIN),
            ("ema/main", ("export", "run", "--out", "exported")),
        ]
    ],
    _case("hook", _hostile_hook, _SAMPLE),
    *[_case("module", _hostile_module, command) for command in (_SAMPLE, _EVALUATE, _SHOW)],
]


@pytest.mark.parametrize(
    ("damaging", "command", "more"),
    [
        *(*_FOREIGN, *_OTHER_LINES, *_OTHER_TYPES, *_OTHER_KINDS, *_SOURCES),
        *(*_CATALOGS, *_SETTINGS, *_PARTS, *_UNREADABLE, *_LAUNCHES, *_SERVERS, *_LINKS),
        *(*_LARGE, *_LEASES),
    ],
)
def test_a_named_input_ends_in_order(
    damaging: Damage, command: Sequence[str], more: dict[str, Any], place: Path, check: _Check
) -> None:
    made, said = more.get("makes"), more.get("says", "")
    limits = {name: each for name, each in more.items() if name not in ("makes", "says")}
    damaging(place)
    ended = check(list(command), may_change=_MAY_CHANGE, appended=LOGS, **limits)
    assert made is None or (place / made).exists()
    assert said in " ".join(ended.stderr.split())


@pytest.mark.parametrize("name", ["wide.png", "captions"])
def test_pictures_of_a_catalog_stay_small(name: str, place: Path, check: _Check) -> None:
    """A picture of 60,000 pixels in a row, and a caption of 3 MB, become a cell of the sheet."""
    if name == "captions":
        add_source("a.txt", b"word " * 600_000)(place)
    else:
        _picture("a.png", 60_000, 1)(place)
    assert check(list(_INDEX)).code in (0, 2)
    if (place / "new.parquet").exists():
        command = ["data", "show", "new.parquet", "--out", "pictures"]
        check(command, memory_bytes=3 * 2**30, seconds=60.0)
