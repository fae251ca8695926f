"""One generator for each set of inputs: it damages a place, and names the command to try there."""

import io
import json
import random
import shutil
import tarfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tests.fuzz.mutations import (
    TEXTS,
    TOML_VALUES,
    VALUES,
    Change,
    damage_bytes,
    damage_catalog,
    damage_json,
    damage_lines,
    damage_recipe,
    damage_tree,
    hostile_pickle,
    replace_by_other_kind,
)

LOGS = ("run/metrics.jsonl", "run/events.jsonl", "run/rollbacks.jsonl")
TRAINED = (
    *("run/run.json", "run/recipe.toml", "run/plan.json", "run/lease/*", "run/tracking/*"),
    *("run/checkpoints/*", "run/components/*", "run/catalogs/*", "run/nodes/*", "run/stalls/*"),
)
_EVALUATED = ("run/evaluations/*", "run/components/*")


@dataclass(frozen=True)
class Case:
    """A command, and what it may do.

    Attributes:
        command: the arguments.
        may_change: patterns of files that it may change or remove.
        appended: patterns of files to whose end it may add.
        must_succeed: whether the damage is such as must not stop it.
        file_bytes: no file becomes longer, as on a full disk.
        unprivileged: whether it is run without root's rights.
    """

    command: list[str]
    may_change: tuple[str, ...] = ()
    appended: tuple[str, ...] = ()
    must_succeed: bool = False
    file_bytes: int | None = None
    unprivileged: bool = False


Generator = Callable[[random.Random, Path], Case]

_TRAIN = Case(["train", "recipe.toml", "--json"], TRAINED, LOGS)
_EVALUATE = Case(["evaluate", "run", "--device", "cpu"], _EVALUATED)
_SAMPLE = Case(["sample", "run", "--prompt", "a red circle", "--out", "o.mp4", "--device", "cpu"])
_SHOW = [
    Case(["show", "run"]),
    Case(["show", "run", "--json"]),
    Case(["show", "run", "--around", "3"]),
    Case(["show", "run", "--around", "2", "--span", "1", "--json"]),
]
_REPORT = Case(["report", "run", "--out", "r.html"])
_CURVES = [
    Case(["show", "run", "--out", "o.html"]),
    Case(["show", "run", "--around", "3", "--out", "o.html"]),
]
_AUDIT = Case(["data", "audit", "run"])


def _damaged(change: Change, name: str, commands: list[Case]) -> Generator:
    """A generator that changes one file, or a file of one folder."""

    def generate(chance: random.Random, place: Path) -> Case:
        change(chance, place / name)
        return chance.choice(commands)

    return generate


_STEP = "run/checkpoints/step_00000004"
_SEEN = [*_SHOW, *_CURVES]
_events = _damaged(damage_lines, "run/events.jsonl", [*_SEEN, _AUDIT])
_metrics = _damaged(damage_lines, "run/metrics.jsonl", _SEEN)
_rollbacks = _damaged(damage_lines, "run/rollbacks.jsonl", [*_SEEN, _AUDIT])
_guard_reports = _damaged(damage_json, "run/guard/step_00000002_0.json", _SEEN)
_run_json = _damaged(damage_json, "run/run.json", [*_SHOW, _AUDIT, _SAMPLE, _REPORT])
_checkpoint_bytes = _damaged(damage_tree, _STEP, [_SAMPLE, _SAMPLE, _EVALUATE, _TRAIN])
_kept_recipe = _damaged(damage_recipe, "run/recipe.toml", [_SAMPLE, *_SHOW, _AUDIT, _EVALUATE])
_catalogs = _damaged(
    damage_catalog,
    "catalog.parquet",
    [
        Case(["data", "show", "catalog.parquet"]),
        Case(["data", "show", "catalog.parquet", "--json"]),
        Case(["data", "show", "catalog.parquet", "--out", "pictures"]),
        Case(["data", "show", "catalog.parquet", "recipe.toml"]),
        Case(["data", "index", "clips", "--out", "catalog.parquet"], ("catalog.parquet",)),
        _TRAIN,
    ],
)
_committed = _damaged(damage_json, f"{_STEP}/COMMITTED", [_SAMPLE, *_SHOW, _TRAIN])


def ledger(chance: random.Random, place: Path) -> Case:
    """Damage a ledger."""
    launch = place / "run" / "ledger" / "launch_0000"
    if chance.random() < 0.6:
        damage_json(chance, launch / "launch.json")
    else:
        damage_bytes(chance, launch / "rank_0000.bin")
    return chance.choice([_AUDIT, _AUDIT, *_SHOW])


def node_files(chance: random.Random, place: Path) -> Case:
    """Damage a record of a node's watcher."""
    node = place / "run" / "nodes" / "node7"
    kind = chance.choice(["heartbeat", "events", "health", "dump", "request", "request"])
    match kind:
        case "heartbeat":
            damage_json(chance, node / "heartbeat.json")
        case "dump":
            damage_json(chance, node / "stacks" / "t_1.json")
        case "request":
            damage_json(chance, place / "run" / "requests" / "t_1.json")
        case _:
            damage_lines(chance, node / f"{kind}.jsonl")
    return chance.choice(_SEEN)


def scores(chance: random.Random, place: Path) -> Case:
    """Damage a record of an evaluation."""
    evaluations = place / "run" / "evaluations"
    names = ["tiny/step_00000004/scores.json"] * 3 + ["tiny/preset.json", "tiny/reference.json"]
    claims = [
        str(path.relative_to(evaluations)) for path in (evaluations / "claims").rglob("*.json")
    ]
    damage_json(chance, evaluations / chance.choice([*names, *claims]))
    return chance.choice([*_SHOW, *_CURVES, _REPORT, _REPORT, _EVALUATE])


def recommitted(chance: random.Random, place: Path) -> Case:
    """A file of a checkpoint that was damaged before its checksum was taken."""
    from longtake.checkpoint.files import commit, describe_files, list_files

    folder = place / _STEP
    (folder / "COMMITTED").unlink()
    match chance.choice(["trainer", "any", "hostile"]):
        case "trainer":
            damage_json(chance, folder / "trainer.json")
        case "any":
            damage_tree(chance, folder)
        case _:
            damage_tree(chance, folder, lambda _, path: path.write_bytes(hostile_pickle()))
    commit(folder, describe_files(folder, list_files(folder)))
    return chance.choice([_SAMPLE, _TRAIN, _EVALUATE])


def components(chance: random.Random, place: Path) -> Case:
    """Frozen parts that were made for the run."""
    damage_tree(chance, place / "run" / "components", chance.choice([damage_json, damage_bytes]))
    return chance.choice([_SAMPLE, _EVALUATE, _TRAIN])


def sources(chance: random.Random, place: Path) -> Case:
    """Folders, tables, tars and captions to index."""
    more = place / "more"
    more.mkdir()
    clip = next((place / "clips").glob("*.mp4"))
    kind = chance.choice(["clip", "name", "csv", "jsonl", "parquet", "tar", "captions", "text"])
    options: list[str] = []
    _SOURCES[kind](chance, more, clip)
    if kind == "captions":
        options = ["--captions", "more/captions.jsonl"]
    return Case(["data", "index", "clips", "more", "--out", "new.parquet", *options])


def recipes_parsed(chance: random.Random, place: Path) -> Case:
    """Recipes that are only read."""
    damage_recipe(chance, place / "recipe.toml")
    command = ["data", "show", "catalog.parquet", "recipe.toml"]
    if chance.random() < 0.4:
        key = chance.choice(["data.windows", "optimizer.kind", "ema.decay", "x.y", "model.config"])
        command += ["--set", f"{key}={chance.choice(TOML_VALUES)}"]
    return Case(command)


def recipes_trained(chance: random.Random, place: Path) -> Case:
    """Recipes that are trained."""
    damage_recipe(chance, place / "recipe.toml")
    out = chance.choice(["run", "run", "new"])
    command = ["train", "recipe.toml", "--set", "training.steps=6", "--set", f"out={out}"]
    return Case(command, TRAINED, LOGS)


def arguments(chance: random.Random, place: Path) -> Case:
    """Options with values that nobody means."""
    values = ["", "-1", "0", "nan", "inf", "1e308", "9" * 30, "9" * 5000, "x" * 300, "a\nb", "..",
              "/dev/null", "/proc/self/mem", "clips", "recipe.toml", "\udcff", "$(touch canary)",
              "\x1b]0;t\x07", "1,2", "=", "run/../run"]  # fmt: skip
    value = chance.choice(values)
    run = chance.choice(["run", value])
    device = ["--device", "cpu"]
    commands = [
        ["show", run, chance.choice(["--around", "--span", "--out"]), value],
        ["sample", run, "--prompt", chance.choice([value, "x"]), "--out", "o.mp4", *device,
         chance.choice(["--step", "--steps", "--guidance", "--shift", "--frames", "--height",
                        "--width", "--fps", "--seed", "--solver", "--profile", "--batch"]), value],
        ["report", run, "--out", "r.html", "--media-mib", value],
        ["data", "show", value],
        ["data", "show", "catalog.parquet", "recipe.toml", "--set", value],
        ["data", "audit", value],
        ["data", "index", value, "--out", "new.parquet"],
        ["data", "index", "clips", "--out", value],
        ["train", "recipe.toml", "--set", value],
        ["export", "run", "--out", value],
        ["evaluate", run, chance.choice(["--preset", "--presets", "--backlog"]), value, *device],
        ["plan", "recipe.toml", chance.choice(["--memory", "--device", "--link"]), value],
        ["launch", "recipe.toml", "--slurm", "--dry-run",
         chance.choice(["--nproc-per-node", "--time", "--partition", "--sbatch"]), value],
    ]  # fmt: skip
    command = chance.choice(commands)
    return Case(command, (*_EVALUATED, *TRAINED, "run/slurm/*"), LOGS)


def disks(chance: random.Random, place: Path) -> Case:
    """Full disks, folders without permission, and things that are no files in place of files."""
    kind = chance.choice(["full", "kind", "kind", "permission"])
    commands = [*_SHOW, *_CURVES, _AUDIT, _SAMPLE, _EVALUATE, _TRAIN, _REPORT]
    if kind == "kind":
        names = sorted(
            str(path.relative_to(place))
            for top in ("run", "recipe.toml", "catalog.parquet")
            for path in ([place / top, *(place / top).rglob("*")])
        )
        replace_by_other_kind(chance, place / chance.choice(names))
        data = Case(["data", "show", "catalog.parquet", "recipe.toml"])
        return chance.choice([*commands, data])
    index = Case(["data", "index", "clips", "--out", "new.parquet"])
    chosen = chance.choice([*commands, index])
    if kind == "full":
        limit = chance.choice([0, 1, 100, 5_000, 50_000])
        return Case(chosen.command, chosen.may_change, chosen.appended, file_bytes=limit)
    found = [place / "recipe.toml", place / "catalog.parquet", *(place / "run").rglob("*")]
    if chance.random() < 0.5:
        take_permission(place)
    else:
        chance.choice(found).chmod(0)
    return Case(chosen.command, chosen.may_change, chosen.appended, unprivileged=True)


def resume(chance: random.Random, place: Path) -> Case:
    """A run with any one file damaged, trained on; a damaged log never stops it."""
    run = place / "run"
    logs = [place / name for name in LOGS]
    if chance.random() < 0.5:
        damage_lines(chance, chance.choice(logs))
        return Case(_TRAIN.command, _TRAIN.may_change, _TRAIN.appended, must_succeed=True)
    if chance.random() < 0.3:
        replace_by_other_kind(chance, chance.choice([*logs, run / "run.json", run / "ledger"]))
    else:
        folder = chance.choice(
            ["checkpoints", "ledger", "guard", "nodes", "catalogs", "evaluations"]
        )
        damage_tree(chance, run / folder)
    return _TRAIN


SHARES: dict[str, tuple[Generator, int]] = {
    "sources": (sources, 284),
    "catalogs": (_catalogs, 725),
    "recipes_parsed": (recipes_parsed, 222),
    "recipes_trained": (recipes_trained, 523),
    "events": (_events, 540),
    "guard_reports": (_guard_reports, 160),
    "ledger": (ledger, 344),
    "metrics": (_metrics, 500),
    "node_files": (node_files, 594),
    "rollbacks": (_rollbacks, 96),
    "run_json": (_run_json, 271),
    "scores": (scores, 673),
    "checkpoint_bytes": (_checkpoint_bytes, 82),
    "committed": (_committed, 128),
    "components": (components, 35),
    "kept_recipe": (_kept_recipe, 129),
    "recommitted": (recommitted, 91),
    "arguments": (arguments, 412),
    "disks": (disks, 221),
    "resume": (resume, 385),
}
"""Generators, and the number of cases of each among 6,415."""


def cases_of(shares: Mapping[str, tuple[Generator, int]], count: int) -> list[Any]:
    """Return about `count` pairs of a generator's name and a number; one of each at least."""
    whole = sum(share for _, share in shares.values())
    return [
        pytest.param(name, number, id=f"{name}-{number}")
        for name, (_, share) in shares.items()
        for number in range(max(1, round(count * share / whole)))
    ]


def take_permission(place: Path) -> None:
    """Let nothing below be written."""
    for path in (place, *place.rglob("*")):
        if not path.is_symlink():
            path.chmod(0o555 if path.is_dir() else 0o444)


def _damaged_clip(chance: random.Random, folder: Path, clip: Path) -> None:
    path = folder / f"a{chance.choice(['.mp4', '.mkv', '.png', '.gif', '.jpg', '.webm'])}"
    shutil.copy(clip, path)
    damage_bytes(chance, path)


def _odd_name(chance: random.Random, folder: Path, clip: Path) -> None:
    names = ["\x1b]0;title\x07.mp4", "a\nb.mp4", "\udcff.mp4", "-rf.mp4", "$(touch canary).mp4",
             "x" * 250 + ".mp4", "[red]a[/red].mp4", " .mp4", "a\\b.mp4", "\u202e.mp4"]  # fmt: skip
    named, text = folder / chance.choice(names), folder / chance.choice(names)
    for path in (named, text):
        path.parent.mkdir(exist_ok=True)
    shutil.copy(clip, named)
    text.with_suffix(".txt").write_bytes(chance.choice(TEXTS))


def _csv(chance: random.Random, folder: Path, clip: Path) -> None:
    shutil.copy(clip, folder / "a.mp4")
    rows = [
        f"video,caption,id\na.mp4,red,{2**53 + 1}\n",
        "video,caption,caption\na.mp4,a,b\n",
        "video,video\na.mp4,a.mp4\n",
        'video,caption\na.mp4,"open\n',
        "video,caption\n" + "x" * 300 + ".mp4,a\n",
        "caption\nred\n",
        "",
        "video\na.mp4\0\n",
        "video,score\na.mp4," + "9" * 400 + "\n",
        "video,caption\na.mp4," + "x" * 2_000_000 + "\n",
    ]
    (folder / "list.csv").write_text(chance.choice(rows))
    if chance.random() < 0.4:
        damage_bytes(chance, folder / "list.csv")


def _jsonl(chance: random.Random, folder: Path, clip: Path) -> None:
    shutil.copy(clip, folder / "a.mp4")
    line = json.dumps(
        {"video": "a.mp4", "caption": "red", "score": 1.0, "n": chance.choice(VALUES)}
    )
    (folder / "list.jsonl").write_text(f"{line}\n")
    damage_lines(chance, folder / "list.jsonl")


def _parquet(chance: random.Random, folder: Path, clip: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    shutil.copy(clip, folder / "a.mp4")
    columns = [
        {"video": ["a.mp4"], "id": [2**60 + 1]},
        {"video": pa.array([b"a.mp4\xff"]).cast(pa.binary()).view(pa.string())},
        {"video": [None]},
        {"video": [1]},
        {"video": [["a.mp4"]]},
        {"path": ["a.mp4"], "caption": [{"a": 1}]},
        {"video": ["a.mp4"], "$\\frac{x$": [1.5]},
        {"video": ["a\0.mp4"]},
        {"video": ["a.mp4"], "score": [float("nan")]},
    ]
    pq.write_table(pa.table(chance.choice(columns)), folder / "list.parquet")
    if chance.random() < 0.3:
        damage_bytes(chance, folder / "list.parquet")


def _tar(chance: random.Random, folder: Path, clip: Path) -> None:
    with tarfile.open(folder / "a.tar", "w") as tar:
        tar.add(clip, "a.mp4")
        text = chance.choice([*TEXTS, json.dumps({"n": chance.choice(VALUES)}).encode()])
        member = tarfile.TarInfo(chance.choice(["a.json", "a.txt", "../a.json", "b/../a.txt"]))
        member.size = len(text)
        tar.addfile(member, io.BytesIO(text))
    if chance.random() < 0.5:
        damage_bytes(chance, folder / "a.tar")


def _captions(chance: random.Random, folder: Path, clip: Path) -> None:
    shutil.copy(clip, folder / "a.mp4")
    line = json.dumps({"video": "a.mp4", "caption": chance.choice(VALUES)})
    (folder / "captions.jsonl").write_text(f"{line}\n{line}\n")
    damage_lines(chance, folder / "captions.jsonl")


def _text(chance: random.Random, folder: Path, clip: Path) -> None:
    (folder / "list.txt").write_bytes(
        chance.choice([*TEXTS, b"../clips\n", b"/etc/hostname\n", b"x" * 5000, b"\0\n"])
    )


_SOURCES = {
    "clip": _damaged_clip,
    "name": _odd_name,
    "csv": _csv,
    "jsonl": _jsonl,
    "parquet": _parquet,
    "tar": _tar,
    "captions": _captions,
    "text": _text,
}
