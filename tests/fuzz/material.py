"""What every case begins with: clips, a catalog, a recipe and a run with some of everything."""

import os
import shutil
from pathlib import Path

from longtake.demo.shapes import write_clips
from longtake.fsio import append_json, now, write_json

RECIPE = """\
out = "run"
[data]
catalog = "catalog.parquet"
buckets = [{ num_frames = 8, height = 16, width = 16 }]
workers = 0
[model]
family = "tubelet"
config = { hidden_size = 24, num_heads = 2, num_blocks = 1 }
[text]
max_tokens = 6
[optimizer]
learning_rate = 1e-3
[training]
steps = 6
global_batch_size = 2
device = "cpu"
precision = "fp32"
[checkpoint]
every = 2
keep = 9
[sampling]
num_inference_steps = 1
[evaluation]
run = ["tiny"]
[evaluation.presets.tiny]
prompts = ["a red circle"]
num_frames = 8
height = 16
width = 16
fps = 4.0
measures = []
[watch]
enabled = false
[tracking]
tensorboard = false
"""
COMMANDS = (
    ("data", "index", "clips", "--captions", "clips/captions.jsonl", "--out", "catalog.parquet"),
    ("train", "recipe.toml"),
    ("evaluate", "run", "--device", "cpu"),
)
HOST = "node7"


def begin(folder: Path) -> None:
    """The files that the commands need."""
    write_clips(folder / "clips", num_clips=8, seed=0)
    (folder / "recipe.toml").write_text(RECIPE)


def finish(folder: Path) -> None:
    """Leave two steps to train, and add a rollback, a guard report and a node's records."""
    run = folder / "run"
    shutil.rmtree(run / "checkpoints" / "step_00000006")
    facts = {"skipped": [3, 4], "reason": "spike", "message": "the loss rose"}
    append_json(run / "rollbacks.jsonl", {"time": now(), "from_step": 3, "to_step": 2, **facts})
    append_json(
        run / "events.jsonl",
        {"time": now(), "event": "rolled_back", "step": 2, "from_step": 3, **facts},
    )
    verdict = {"kind": "skip", "reason": "non_finite", "message": "step 3 is bad", "began": 2}
    sample = {
        "step": 2,
        "batch": 2,
        "rank": 0,
        "host": HOST,
        "identity": "0" * 32,
        "caption": "a red circle",
        "epoch": 0,
        "sigma": 0.25,
        "loss": 1.0,
    }
    report = {
        "step": 2,
        "batch": 2,
        "verdict": verdict,
        "time": now(),
        "history": [],
        "samples": [sample],
        "state": {"checkpoint": 0},
    }
    (run / "guard").mkdir(exist_ok=True)
    write_json(run / "guard" / "step_00000002_0.json", report)
    told: dict[str, object] = {
        "step": 2,
        "batch": 2,
        "verdict": "skip",
        "reason": "non_finite",
        "began": 2,
    }
    told |= {
        "event": "update_skipped",
        "message": "step 3 is bad",
        "report": "guard/step_00000002_0.json",
    }
    append_json(run / "events.jsonl", {"time": now(), **told})
    _add_node(run, run / "nodes" / HOST)


def _add_node(run: Path, node: Path) -> None:
    (node / "stacks").mkdir(parents=True)
    heart = {
        "pid": 4242,
        "role": "rank",
        "rank": 0,
        "local_rank": 0,
        "world_size": 1,
        "phase": "forward",
        "step": 3,
        "alive": True,
        "limit": 30.0,
        "seconds": 1.0,
    }
    beat = {
        "host": HOST,
        "pid": 4241,
        "beat": 3,
        "launch": "abcd1234",
        "ranks": [heart],
        "workers": [],
        "health": {"cpu_load": 0.5},
        "addresses": {},
        "stalls": 1,
        "stall": "",
        "watch_seconds_late": 0.0,
        "by_hand": False,
        "ended": False,
        "time": now(),
    }
    write_json(node / "heartbeat.json", beat)
    append_json(node / "health.jsonl", {"time": now(), "cpu_load": 0.5, "disk_free_bytes": 10**9})
    append_json(node / "events.jsonl", {"time": now(), "event": "watcher_started", "pid": 4241})
    stalled = {"kind": "stuck", "step": 3, "token": "t_1", "verdict": "stalls/t_1.json"}
    sentence = {"sentence": "rank 0 hangs", "suspects": [{"rank": 0, "host": HOST, "pid": 4242}]}
    append_json(node / "events.jsonl", {"time": now(), "event": "stalled", **stalled, **sentence})
    died = {"pid": 4242, "rank": 0, "phase": "forward", "out_of_memory": False, "step": 3}
    died |= {"world_size": 1, "launch": "a", "kind": "killed", "error": "", "source": "watcher"}
    append_json(node / "events.jsonl", {"time": now(), "event": "rank_failed", **died})
    dump = {"token": "t_1", "time": now(), "host": HOST, "reason": "stall", "launch": "abcd1234"}
    write_json(node / "stacks" / "t_1.json", {**dump, "rounds": [], "missing": []})
    (run / "requests").mkdir()
    asked = {"token": "t_1", "time": now(), "by": HOST, "reason": "asked"}
    write_json(run / "requests" / "t_1.json", {**asked, "rounds": 1, "native": False})


def copy(base: Path, folder: Path) -> None:
    """A case's own copy; clips are shared, as the catalog names those of the base."""
    shutil.copytree(base, folder, symlinks=True)


def files(folder: Path) -> dict[str, bytes]:
    """The content of all regular files below a folder, by name."""
    found = (path for path in folder.rglob("*") if not path.is_symlink() and path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in found if _is_open(path)}


def _is_open(path: Path) -> bool:
    return os.access(path, os.R_OK)
