"""Which files of a run are mirrored, which are pushed back, and which say that others are whole.

The optimizer's state is left out, for it is most of a checkpoint and no sampling needs it; so are
the ledger, what watchers dumped, and the trackers' files. Leases (evaluations/claims, tracking/)
are neither pulled nor pushed: how long nothing has changed in them cannot be told through a copy.
So servers share work by claims only where they share a mirror, or the run directory itself.
"""

from collections.abc import Sequence
from pathlib import Path

from longtake.evaluation.sync.rules import Rules, literal, only
from longtake.evaluation_dir import EvaluationDirectory
from longtake.run_dir import RunDirectory

_HIDDEN = "- .*"  # written aside, or not ours
_WHOLE = ("recipe.toml", "checkpoints/step_*/COMMITTED", "evaluations/*/step_*/scores.json")
_LEFT_OUT = (
    "recipe.toml",  # it comes last: with it the run exists
    "checkpoints/",
    "ledger/",
    "nodes/",
    "tensorboard/",
    "wandb/",
    "tracking/",
    "evaluations/claims/",
    "evaluations/servers/",
    "evaluations/*/step_*/scores.json",
)
_RECORDS = (
    *(".json", ".jsonl", ".txt", ".html", ".parquet"),
    *(".png", ".jpg", ".jpeg", ".webp", ".gif", ".mp4"),
    *(".safetensors", ".model"),  # components, and a tokenizer's
)
"""What a run's records, pictures and frozen parts are called. Nothing else is mirrored: no code."""
CHECKPOINT: Rules = ("- /optimizer/",)
"""Of a checkpoint's folder; names that begin with a dot are torch's."""


def signs() -> Rules:
    """Files that say that something is whole, of a run and of each run in a folder."""
    return (_HIDDEN, *only([f"/{place}{each}" for place in ("", "*/") for each in _WHOLE]))


def records(runs: Sequence[tuple[str, RunDirectory]]) -> Rules:
    """What is mirrored but checkpoints and what `signs` means.

    Args:
        runs: names below the source ("" for the source itself), and their mirrors.
    """
    rules = [_HIDDEN]
    for name, mirror in runs:
        top = f"/{literal(name)}/" if name else "/"
        rules += [f"- {top}{each}" for each in (*_LEFT_OUT, *our_results(mirror))]
        rules += [f"+ {top}"] if name else []
    if all(name for name, _ in runs):
        rules.append("- /*")
    return (*rules, "+ */", *(f"+ *{suffix}" for suffix in _RECORDS), "- *")


def our_results(mirror: RunDirectory) -> list[str]:
    """Folders of results that a server of this mirror makes, has made or makes anew."""
    claims = EvaluationDirectory(mirror).path / "claims"
    found = (path.relative_to(claims) for path in claims.glob("*/step_*"))
    names = {(path.parts[0], path.parts[1].partition("-")[0]) for path in found}
    return [f"evaluations/{literal(preset)}/{step}/" for preset, step in sorted(names)]


def heartbeat(server: str) -> Rules:
    """The heartbeat of a server, in a folder of evaluations."""
    return only([f"/servers/{literal(server)}/heartbeat.json"])


def results(evaluations: Path) -> Rules:
    """What is pushed back of a folder of evaluations, but for scores.json and heartbeats."""
    halves = [path for path in evaluations.glob("*/step_*") if not (path / "scores.json").exists()]
    names = [path.relative_to(evaluations).as_posix() for path in halves]
    left_out = [f"- /{literal(name)}/" for name in names]
    last = ("- /*/step_*/scores.json", "- /servers/*/heartbeat.json")
    return (_HIDDEN, "- *.partial", "- /claims/", *left_out, *last)


def scores() -> Rules:
    """scores.json of each result in a folder of evaluations: with it the result exists."""
    return (_HIDDEN, *only(["/*/step_*/scores.json"]))
