"""Does every node read the same recipe."""

import hashlib
import json
import tomllib
from typing import Any

from longtake import config
from longtake.config import Recipe
from longtake.preflight.compare import differences, tell_differences
from longtake.preflight.finding import Finding, Judged, Severity, Skipped
from longtake.preflight.setting import Facts, Setting

NAME = "recipe"

_MAY_BE_SECRET = {"watch.hook"}
_ADVICE = "Copy the recipe to all nodes, or keep it on a disk that all of them share."


def measure(setting: Setting) -> Facts:
    """The recipe's keys and values, defaults and all, as this node reads them."""
    if setting.recipe_path is None:
        return {}
    if setting.recipe is None:
        return {"problem": setting.recipe_problem}
    text = config.dump(setting.recipe)
    digest = hashlib.sha256(text.encode()).hexdigest()[:12]
    keys = _flat(tomllib.loads(text))
    for name in _MAY_BE_SECRET & keys.keys():
        keys[name] = f"set (sha256 {hashlib.sha256(keys[name].encode()).hexdigest()[:12]})"
    return {"keys": keys, "digest": digest}


def judge(facts: dict[str, Facts], recipe: Recipe | None) -> Judged:
    """Who cannot read it, and which keys differ."""
    if not any(facts.values()):
        what = "recipe, dataset, run directory and disk space"
        return Judged(skipped=[Skipped(what, "no recipe was given")])
    judged = Judged()
    for node, each in facts.items():
        if problem := each.get("problem"):
            what = f"the recipe cannot be used: {problem}"
            judged.findings.append(Finding("error", NAME, (node,), what, "", _ADVICE))
    found = differences(
        NAME, {node: each["keys"] for node, each in facts.items() if "keys" in each}
    )
    bad: dict[str, Severity] = {each.name: "error" for each in found}
    judged.findings += tell_differences(NAME, found, bad, _ADVICE)
    judged.differences += found
    return judged


def _flat(values: dict[str, Any], prefix: str = "") -> dict[str, str]:
    flat: dict[str, str] = {}
    for key, value in values.items():
        if isinstance(value, dict):
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = json.dumps(value)
    return flat
