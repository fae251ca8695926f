"""Are the same packages installed on every node, in the same versions."""

import hashlib
import re
from importlib import metadata

from longtake.config import Recipe
from longtake.preflight.compare import differences, tell_differences
from longtake.preflight.finding import Judged, Severity
from longtake.preflight.setting import Facts, Setting

NAME = "packages"

_COMES_WITH_TORCH = re.compile(r"nvidia-.*|triton.*|torch.*")
_ADVICE = (
    "Install the same versions on all nodes, such as by pip install --constraint with what one of "
    "them has (pip freeze)."
)


def measure(setting: Setting) -> Facts:
    """Every installed package's version, a digest of all, and those that longtake needs."""
    versions = _versions()
    listed = "\n".join(f"{name}=={version}" for name, version in versions.items())
    digest = hashlib.sha256(listed.encode()).hexdigest()[:12]
    return {"versions": versions, "digest": digest, "needed": sorted(_needed() & versions.keys())}


def judge(facts: dict[str, Facts], recipe: Recipe | None) -> Judged:
    """Which versions differ; those of packages that longtake needs are worse."""
    found = differences(NAME, {node: each["versions"] for node, each in facts.items()})
    needed = {name for each in facts.values() for name in each["needed"]}
    severities: dict[str, Severity] = {
        each.name: "warning"
        for each in found
        if each.name in needed or _COMES_WITH_TORCH.fullmatch(each.name)
    }
    return Judged(tell_differences(NAME, found, severities, _ADVICE), found)


def _versions() -> dict[str, str]:
    """Versions by normalised name; of two installed on the path the first, which is imported."""
    found: dict[str, str] = {}
    for each in metadata.distributions():
        name = each.metadata["Name"]
        if name:
            found.setdefault(_normal(name), each.version)
    return dict(sorted(found.items()))


def _needed() -> set[str]:
    try:
        wanted = metadata.requires("longtake") or []
    except metadata.PackageNotFoundError:
        return set()
    names = (re.match(r"[\w.-]+", each) for each in wanted if "extra ==" not in each)
    return {_normal(found[0]) for found in names if found}


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
