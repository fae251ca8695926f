"""Named cases: inputs that once gave tracebacks, hangs or losses, by the file that read them.

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
    make_read_only,
    make_unreadable,
    put_kind,
    recommit,
    set_cell,
    set_text,
    set_values,
)
from tests.fuzz.generators import LOGS, TRAINED, take_permission
from tests.fuzz.mutations import DEEP, hostile_pickle, replace_with, unevaluate

_Check = Callable[..., Any]

_SCORES = "run/evaluations/tiny/step_00000004/scores.json"
_LAUNCH = "run/ledger/launch_0000/launch.json"
_REPORT = "run/guard/step_00000002_0.json"
_HEARTBEAT = "run/nodes/node7/heartbeat.json"
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

_DEEP_LIST = b"[" * DEEP
_DEEP_OBJECT = b'{"a":' * DEEP + b"1" + b"}" * DEEP
_LONG = "x" * 300
_DIGITS = "9" * 5000

_MAY_CHANGE = (*TRAINED, "run/evaluations/*", "run/slurm/*", _JOURNAL)


def _nothing(place: Path) -> None:
    """The place is as it was."""


def _case(site: str, damage: Damage, command: Sequence[str], **more: Any) -> Any:
    return pytest.param(damage, command, more, id=f"{site} {' '.join(command[:2])}"[:90])


_SUCCEEDS: dict[str, Any] = {"must_succeed": True}
_UNPRIVILEGED: dict[str, Any] = {"unprivileged": True}
_EVALUATES: dict[str, Any] = {"must_succeed": True, "makes": _SCORES}
_METRICS, _EVENTS, _ROLLBACKS = LOGS
_RUN_JSON = "run/run.json"

_T1 = [
    _case("T1 announce.py:104", add_lines(_METRICS), _TRAIN, **_SUCCEEDS),
    _case("T1 rows.py:36 tables.py:127,128,276", add_lines(_METRICS), _SHOW, **_SUCCEEDS),
    _case("T1 curves.py:62,95,135", add_lines(_METRICS), _CURVES, **_SUCCEEDS),
    _case("T1 strip.py:96", add_lines(_METRICS), _STRIP, **_SUCCEEDS),
    _case("T1 startup.py:85", add_lines(_EVENTS), _TRAIN, **_SUCCEEDS),
    _case("T1 node_dir.py:237 troubles.py:32", add_lines(_EVENTS), _SHOW, **_SUCCEEDS),
    _case("T1 glance.py:77", add_lines(_EVENTS), (*_SHOW, "--json"), **_SUCCEEDS),
    _case("T1 around.py:57,62,84", add_lines(_EVENTS), _AROUND, **_SUCCEEDS),
    _case("T1 strip.py:169,173", add_lines(_EVENTS), _STRIP, **_SUCCEEDS),
    _case("T1 node events", add_lines("run/nodes/node7/events.jsonl"), _AROUND, **_SUCCEEDS),
    _case("T1 node health", add_lines("run/nodes/node7/health.jsonl"), _SHOW, **_SUCCEEDS),
    _case("T1 rollback.py:130", add_lines(_ROLLBACKS), _TRAIN, **_SUCCEEDS),
    _case("T1 tables.py:153,155", add_lines(_ROLLBACKS), _SHOW, **_SUCCEEDS),
    _case("T1 strip.py:53,163,165", add_lines(_ROLLBACKS), _STRIP, **_SUCCEEDS),
    *[
        _case(f"T1 {site} {text.decode()}", set_text(name, text), command)
        for name, site, command in [
            (_RUN_JSON, "tables.py:40,102", _SHOW),
            (_REPORT, "verdicts.py:29,33,44", _AROUND),
            (_REPORT, "clips.py:22,84 tables.py:221", (*_AROUND, "--json")),
            (_LAUNCH, "course.py:143 ledger.py:218 audit.py:125", _AUDIT),
            (_LAUNCH, "skipped.py:30 order.py:62 clips.py:57", _AROUND),
            (_SCORES, "choose.py:40 draw.py:118", _REPORT_RUN),
            (_SCORES, "evaluated scores", _SHOW),
            (_CLAIM, "evaluated.py:44", _SHOW),
            (_HEARTBEAT, "heartbeat", _SHOW),
            ("run/plan.json", "plan", _TRAIN),
        ]
        for text in (b"[]", b"{}", b"5")
    ],
    _case("T1 tables.py:121,123,280", set_values(_RUN_JSON, launches=[5, {}]), _SHOW),
    _case("T1 verdicts.py:80", set_values(_REPORT, verdict=[], samples=[{}]), _AROUND),
    _case("T1 around.py:96,107", set_values(_REPORT, samples=[5], history=[5]), _STRIP),
    _case("T1 ledger.py:276,278,283", set_values(_LAUNCH, world_size="x", streams=5), _AUDIT),
    _case("T1 course.py:287", set_values(_LAUNCH, history=[5], start_step=-1), _AUDIT),
    _case("T1 audit.py:227", set_values(_LAUNCH, catalogs={"a": "../x"}), _AUDIT),
    _case("T1 page.py:114", set_values(_SCORES, measures={"a": "x"}, alarms=[5]), _REPORT_RUN),
    _case("T1 claims without ended", set_values(_CLAIM, ended=None, server=5), _SHOW),
    _case("T1 studio.py:88,90 []", recommit("trainer.json", b"[]"), _SAMPLE),
    _case("T1 studio.py:88,90 {}", recommit("trainer.json", b"{}"), _SAMPLE),
    _case("T1 resume.py", recommit("trainer.json", b'{"global_step": "x"}'), _TRAIN),
    _case(
        "T1 catalog.py:103",
        lambda place: [
            add_source("x.txt", b"")(place),
            set_text(_JOURNAL, b'[]\n5\n{"media": 5}\n')(place),
        ],
        ("data", "index", "more/a.mp4", "--out", "new.parquet"),
        **_SUCCEEDS,
    ),
]

_T2 = [
    _case("T2 records.py:54 metrics", add_lines(_METRICS, [_DEEP_LIST, _DEEP_OBJECT]), _SHOW),
    _case("T2 records.py:147 events", add_lines(_EVENTS, [_DEEP_LIST, _DEEP_OBJECT]), _SHOW),
    _case("T2 records.py:69 run.json", set_text(_RUN_JSON, _DEEP_OBJECT), _SHOW),
    _case("T2 run_dir.py:324", set_text(_RUN_JSON, _DEEP_OBJECT), _TRAIN),
    _case("T2 COMMITTED", set_text(f"{STEP}/COMMITTED", _DEEP_OBJECT), _SAMPLE),
    _case("T2 trainer.json", recommit("trainer.json", _DEEP_OBJECT), _TRAIN),
    _case("T2 ledger.py:260", set_text(_LAUNCH, _DEEP_OBJECT), _AUDIT),
    _case("T2 glance.py:64", set_text("run/plan.json", _DEEP_OBJECT), _SHOW),
    _case("T2 verdicts.py:68", set_text(_REPORT, _DEEP_OBJECT), _AROUND),
    _case("T2 tars.py:71", add_tar(_DEEP_OBJECT), _INDEX),
]


def _pipe_beside_clips(place: Path) -> None:
    add_source("x.txt", b"")(place)
    os.mkfifo(place / "more" / "x.tar")


_T3 = [
    _case(f"T3 {kind} {name}", put_kind(name, kind), command)
    for name, command in [
        (_METRICS, _SHOW),
        (_METRICS, _TRAIN),
        (_EVENTS, _SHOW),
        (_ROLLBACKS, _SHOW),
        (_RUN_JSON, _SHOW),
        ("run/recipe.toml", _SHOW),
        ("run/plan.json", _SHOW),
        (_REPORT, _AROUND),
        (f"{STEP}/trainer.json", _TRAIN),
        (f"{STEP}/COMMITTED", _SAMPLE),
        (_SCORES, _REPORT_RUN),
        (_LAUNCH, _AUDIT),
        ("run/ledger/launch_0000/rank_0000.bin", _AUDIT),
        ("run/catalogs/*.parquet", _AUDIT),
        (_HEARTBEAT, _SHOW),
        ("run/evaluations/tiny/step_00000004/00_s0.mp4", _REPORT_RUN),
        ("recipe.toml", _SHOW_DATA),
        ("catalog.parquet", _SHOW_DATA),
        (_JOURNAL, ("data", "index", "catalog.parquet", "--out", "new.parquet")),
        ("o.html", _CURVES),
    ]
    for kind in ("pipe", "folder")
] + [
    _case("T3 tars.py:40", _pipe_beside_clips, _INDEX),
    _case("T3 device metrics", put_kind(_METRICS, "device"), _SHOW),
]

_SURROGATE = json.dumps({"caption": "\ud800"}).encode()
_T4 = [
    _case("T4 listing.py:74", add_source("a.csv", f"video,id\na.mp4,{2**60}1\n"), _INDEX),
    _case("T4 listing.py:74 parquet", add_table(video=["a.mp4"], id=[2**60 + 1]), _INDEX,
          **_SUCCEEDS),
    _case("T4 listing.py:121", add_source("a.csv", "video,caption,caption\na.mp4,a,b\n"), _INDEX),
    _case("T4 listing.py:139", add_source("a.csv", "video,n,n\na.mp4,1,2\n"), _INDEX),
    _case("T4 listing.py:127", add_table(video=pa.array([b"\xff.mp4"]).view(pa.string())), _INDEX),
    _case("T4 listing.py:40", add_source("a.txt", _LONG), _INDEX),
    _case("T4 listing.py:95", add_source("a.csv", 'video,caption\na.mp4,"open\nb.mp4,x\n'), _INDEX),
    _case("T4 sources.py:69", _nothing, ("data", "index", _LONG, "--out", "new.parquet")),
    _case("T4 index.py:262", _nothing, ("data", "index", "clips", "--out", f"{_LONG}/x.parquet")),
    _case("T4 catalog.py:255", _nothing, ("data", "show", f"{_LONG}.parquet")),
    _case("T4 run_dir.py:226", _nothing, ("show", _LONG)),
    _case("T4 options.py:97", _nothing, (*_EVALUATE, "--presets", f"{_LONG}.toml")),
    _case("T4 write.py:183", _nothing, (*_SAMPLE, "--out", f"{_LONG}.mp4")),
    _case("T4 pretrained.py:183", _nothing, (*_TRAIN, "--set", "out=new", "--set",
          f"codec={{kind='autoencoder', pretrained='./{_LONG}'}}")),
    _case("T4 tars.py:86", add_tar(b'{"n": 1' + b"0" * 400 + b"}"), _INDEX),
    _case("T4 catalog.py:110", add_tar(_SURROGATE), _INDEX),
    _case("T4 table.py:122", add_source("a.jsonl", b'{"video": "a.mp4", "text": "\\ud800"}\n'),
          _INDEX),
    *[
        _case(
            f"T4 catalog {column}={str(value)[:20]} {'kept' if fingerprint else 'no'} fingerprint",
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
    ],
]  # fmt: skip

_T5 = [
    *[
        _case(f"T5 {site} {value[:40]}", _nothing, (*_TRAIN, "--set", "out=new", "--set", value))
        for site, value in [
            ("record.py:71", 'data.catalog="a\\u0000b"'),
            ("watching.py:138", 'text.pretrained="a\\u0000b"'),
            ("tubelet_network.py:75", "model.config={hidden_size=4611686018427387904}"),
            ("tubelet_network.py:76", "model.config={num_blocks=9223372036854775807}"),
            ("loader.py:326 windows", "data.windows=9223372036854775807"),
            ("shift", "sampling.shift=[]"),
        ]
    ],
    _case("T5 record.py:71 out", _nothing, (*_TRAIN, "--set", 'out="a\\u0000b"')),
]

_TOKENIZER = "run/components/tokenizer/tokenizer.json"
_T6 = [
    *[
        _case(f"T6 text.py:237 {text.decode('latin-1')[:9]!r}", set_text(_TOKENIZER, text), command)
        for text in (b"", b"[]", b"{}", b"\xff\xfe", b'{"version": "1.0"}')
        for command in (_SAMPLE, _TRAIN)
    ],
    _case("T6 words.py:68", _nothing, (*_TRAIN, "--set", "out=new"), file_bytes=900),
    *[
        _case(f"T6 COMMITTED {name!r}", set_values(f"{STEP}/COMMITTED", files=names), command)
        for name, names in [
            ("nul", {"a\0b": {"size": 1, "sha256": "0"}}),
            ("surrogate", {"\ud800": {"size": 1, "sha256": "0"}}),
            ("outside", {"../../run.json": {"size": 1, "sha256": "0"}}),
            ("list", ["a\0b"]),
        ]
        for command in (_SAMPLE, _TRAIN)
    ],
    _case(
        "T6 studio.py:137", set_text(f"{STEP}/ema/main/.metadata", b"\x80\x05no pickle"), _SAMPLE
    ),
    _case("T6 studio.py:137 empty", set_text(f"{STEP}/ema/main/.metadata", b""), _SAMPLE),
    _case(
        "T6 sampler.py:164", change_kept_recipe("height = 16", "height = 1000000000000"), _SAMPLE
    ),
    _case(
        "T6 tubes.py:35",
        change_kept_recipe("hidden_size = 24", "hidden_size = 100000000000"),
        _SAMPLE,
    ),
]

_T7 = [
    *[
        _case(f"T7 {site}", make_unreadable(name), command, **_UNPRIVILEGED)
        for site, name, command in [
            ("records.py:50", _METRICS, _SHOW),
            ("records.py:50 events", _EVENTS, _SHOW),
            ("run_dir.py:210", "run", _SHOW),
            ("run_dir.py:210 recipe", "run/recipe.toml", _SHOW),
            ("evaluation_dir.py:130", "run/evaluations", _SHOW),
            ("evaluation_dir.py:226", "run/evaluations/tiny", _REPORT_RUN),
            ("node_dir.py:198", "run/nodes", _SHOW),
            ("node_dir.py:198 node", "run/nodes/node7", _SHOW),
            ("clips.py:80", "run/ledger", _AROUND),
            ("course.py:287", "run/catalogs/*.parquet", _AUDIT),
            ("course.py:287 folder", "run/catalogs", _AUDIT),
            ("text.py:236", _TOKENIZER, _SAMPLE),
            ("text.py:236 folder", "run/components", _SAMPLE),
            ("checkpoints", "run/checkpoints", _SAMPLE),
            ("checkpoint", STEP, _SAMPLE),
        ]
    ],
    _case("T7 logs.py:49", take_permission, _LAUNCH_ONE, **_UNPRIVILEGED),
    *[
        _case(f"T7 read-only {command[0]} {name}", make_read_only(name), command, **_UNPRIVILEGED)
        for name, command in [
            ("", _TRAIN),
            ("run", _TRAIN),
            ("run/checkpoints", _TRAIN),
            ("run/ledger", _TRAIN),
            ("run/lease", _TRAIN),
            ("", _TRAIN_NEW),
            ("", _EVALUATE),
            ("run", _EVALUATE),
            ("run/evaluations", _EVALUATE),
            ("run/evaluations/tiny", _EVALUATE),
        ]
    ],
]  # fmt: skip

_T8 = [
    _case("T8 order.py:92", _nothing, ("launch", "recipe.toml", "--nnodes", _DIGITS)),
    _case("T8 order.py:132", _nothing, ("launch", "recipe.toml", "--nproc-per-node", _DIGITS)),
    _case("T8 index of nothing", _nothing, ("data", "index", "", "--out", "new.parquet")),
]


def _left_by(server: object) -> Damage:
    """The evaluation of a checkpoint was begun by a server that died over it."""

    def damage(place: Path) -> None:
        name = server.replace("/PLACE", str(place)) if isinstance(server, str) else server
        set_values(_CLAIM, server=name, ended=None)(place)
        unevaluate(place, keep_claims=True)

    return damage


def _beaten_by(server: str) -> Damage:
    """A server of that name has worked on the run."""

    def damage(place: Path) -> None:
        unevaluate(place)
        folder = place / "run" / "evaluations" / "servers" / "vm-1"
        folder.mkdir(parents=True)
        record = {"server": server, "pid": 4242, "beat": 3, "time": "2026-05-01T12:00:00+00:00"}
        (folder / "heartbeat.json").write_text(json.dumps(record))
        event = {"event": "evaluation_started", "server": server, "step": 4, "preset": "tiny"}
        (folder / "events.jsonl").write_text(json.dumps({**event, "time": record["time"]}) + "\n")

    return damage


_T9 = [
    _case("T9 publish.py:38 show", set_values(_CLAIM, server="../../x"), _SHOW),
    *[
        _case(f"T9 publish.py:38 {server!r}", _left_by(server), _EVALUATE, **_EVALUATES)
        for server in ("a/b", "../../../recipe.toml", "/PLACE/recipe.toml", "", "..", "a\0b", 5)
    ],
    *[
        _case(f"T9 heartbeat {server!r}", _beaten_by(server), command, **_SUCCEEDS)
        for server in ("a/b", "../../x")
        for command in (_SHOW, _EVALUATE)
    ],
]


def _dangling(step: int) -> Damage:
    """A checkpoint that was moved to a disk which is not there now."""

    def damage(place: Path) -> None:
        (place / _ROLLBACKS).unlink()  # so that training goes on from the newest
        replace_with(place / "run" / "checkpoints" / f"step_{step:08d}", "dangling")

    return damage


_D8 = [
    _case("D8 newest", _dangling(4), _TRAIN, says="step_00000004 is a symbolic link to /no/such"),
    _case("D8 next", _dangling(6), _TRAIN, says="delete the link"),
    _case("D8 sample", _dangling(4), _SAMPLE),
    _case("D8 evaluate", _dangling(4), _EVALUATE),
    _case("D8 older", _dangling(2), _TRAIN, **_SUCCEEDS),
]


def _damaged_event_file(place: Path) -> None:
    """TensorBoard's file: a record that says it is as long as memory is."""
    folder = place / "run" / "tensorboard"
    folder.mkdir()
    name = "events.out.tfevents.1700000000.node7"
    (folder / name).write_bytes(struct.pack("<QI", 2**62, 0) + b"no record")


_T9.append(
    _case(
        "T9 event_file.py:77",
        _damaged_event_file,
        (*_TRAIN, "--set", "tracking.tensorboard=true"),
        **_SUCCEEDS,
    )
)


def _picture(name: str, width: int, height: int, num_frames: int = 1) -> Damage:
    """A picture that is large only when it is decoded."""

    def damage(place: Path) -> None:
        (place / "more").mkdir()
        frames = [
            Image.new("P", (width, height), number % 2) for number in range(min(2, num_frames))
        ]
        if num_frames == 1:
            frames[0].save(place / "more" / name)
        else:
            rest = [frames[number % 2] for number in range(1, num_frames)]
            frames[0].save(place / "more" / name, save_all=True, append_images=rest)

    return damage


def _many_rows(place: Path) -> None:
    """A table of 20 million rows in few bytes."""
    (place / "more").mkdir()
    names = pa.DictionaryArray.from_arrays(np.zeros(20_000_000, np.int8), ["a.mp4"])
    pq.write_table(pa.table({"video": names}), place / "more" / "a.parquet", compression="zstd")


_MANY = json.dumps({f"a{number}": number for number in range(100_000)}).encode()
_S11 = [
    _case("S11 PNG 60000 x 1", _picture("a.png", 60_000, 1), _INDEX, memory_bytes=3 * 2**30),
    _case("S11 GIF 16000 x 16000", _picture("a.gif", 16_000, 16_000), _INDEX),
    _case("S11 GIF of 20,000 frames", _picture("a.gif", 64, 64, 20_000), _INDEX),
    _case("S11 PNG 9400 x 9400", _picture("a.png", 9_400, 9_400), _INDEX),
    _case("S11 20 million rows", _many_rows, _INDEX, memory_bytes=4 * 2**30),
    _case("S11 100,000 attributes", add_tar(_MANY), _INDEX),
    _case("S11 deep JSON lines", add_source("a.jsonl", _DEEP_LIST + b"\n"), _INDEX),
    _case("S11 world_size", set_values(_LAUNCH, world_size=10**8), _AUDIT),
    _case("S11 workers", _nothing, (*_TRAIN, "--set", "data.workers=100000", "--set", "out=new")),
]


def _high_lease(place: Path) -> None:
    """A lease whose number is the last of a thousand million."""
    for path in (place / "run").glob("evaluations/claims/tiny/*/0.json"):
        path.rename(path.with_name("999999999.json"))
    for name in ("run/lease", "run/leases"):
        folder = place / name
        folder.mkdir(exist_ok=True)
        (folder / "999999999.json").write_text('{"server": "x", "beat": 0}')


_S11 += [
    _case("S11 leases", _high_lease, _SHOW),
    _case("S11 leases evaluate", _high_lease, _EVALUATE),
    _case("S11 leases train", _high_lease, _TRAIN),
]


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
    ("damage", "command", "more"),
    [*_FOREIGN, *_T1, *_T2, *_T3, *_T4, *_T5, *_T6, *_T7, *_T8, *_T9, *_D8, *_S11],
)
def test_a_named_input_ends_in_order(
    damage: Damage, command: Sequence[str], more: dict[str, Any], place: Path, check: _Check
) -> None:
    made, said = more.get("makes"), more.get("says", "")
    limits = {name: each for name, each in more.items() if name not in ("makes", "says")}
    damage(place)
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
