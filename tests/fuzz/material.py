"""The place that every case begins with: clips, a catalog, a recipe, and a run of all parts."""

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
    back = {"time": now(), "from_step": 3, **facts}
    append_json(run / "rollbacks.jsonl", {**back, "to_step": 2})
    append_json(run / "events.jsonl", {**back, "event": "rolled_back", "step": 2})
    batch = {"step": 2, "batch": 2}
    skip = {"reason": "non_finite", "message": "step 3 is bad", "began": 2}
    sample = {**batch, "rank": 0, "host": HOST, "epoch": 0, "sigma": 0.25, "loss": 1.0}
    sample |= {"identity": "0" * 32, "caption": "a red circle"}
    report = {**batch, "verdict": {"kind": "skip", **skip}, "time": now(), "history": []}
    report |= {"samples": [sample], "state": {"checkpoint": 0}}
    (run / "guard").mkdir(exist_ok=True)
    write_json(run / "guard" / "step_00000002_0.json", report)
    told = {**batch, **skip, "verdict": "skip", "report": "guard/step_00000002_0.json"}
    append_json(run / "events.jsonl", {"time": now(), "event": "update_skipped", **told})
    _add_node(run, run / "nodes" / HOST)


def _add_node(run: Path, node: Path) -> None:
    (node / "stacks").mkdir(parents=True)
    process = {"pid": 4242, "rank": 0, "world_size": 1, "phase": "forward", "step": 3}
    rank = {**process, "role": "rank", "local_rank": 0, "alive": True, "limit": 30.0}
    beat = {"host": HOST, "pid": 4241, "beat": 3, "launch": "abcd1234", "time": now()}
    beat |= {"ranks": [rank | {"seconds": 1.0}], "workers": [], "health": {"cpu_load": 0.5}}
    beat |= {"stalls": 1, "stall": "", "watch_seconds_late": 0.0, "addresses": {}}
    write_json(node / "heartbeat.json", beat | {"by_hand": False, "ended": False})
    append_json(node / "health.jsonl", {"time": now(), "cpu_load": 0.5, "disk_free_bytes": 10**9})
    stalled = {"kind": "stuck", "step": 3, "token": "t_1", "verdict": "stalls/t_1.json"}
    stalled |= {"sentence": "rank 0 hangs"}
    stalled |= {"suspects": [{"rank": 0, "host": HOST, "pid": 4242}]}
    died = {**process, "out_of_memory": False, "launch": "a", "kind": "killed", "error": ""}
    for event, facts in (
        ("watcher_started", {"pid": 4241}),
        ("stalled", stalled),
        ("rank_failed", died | {"source": "watcher"}),
    ):
        append_json(node / "events.jsonl", {"time": now(), "event": event, **facts})
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
