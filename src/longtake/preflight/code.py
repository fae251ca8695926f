"""Is the same code on every node: longtake's, the recipe's own module, the folder's revision."""

import hashlib
import shutil
import subprocess
from importlib.util import find_spec
from pathlib import Path

from longtake.config import Recipe
from longtake.preflight.compare import differences, tell_differences
from longtake.preflight.finding import Judged, Severity
from longtake.preflight.setting import Facts, Setting

NAME = "code"

_REVISION = "revision of the working folder"
_ADVICE = (
    "Bring all nodes to the same commit (git pull, or rsync the folder), without changes of "
    "their own."
)


def measure(setting: Setting) -> Facts:
    """Digests of files by name, and the git revision of the folder that this was started in."""
    package = Path(__file__).resolve().parents[1]
    files = {
        f"longtake/{path.relative_to(package)}": _digest(path) for path in package.rglob("*.py")
    }
    return {"files": dict(sorted(files.items())) | _own_module(setting) | _revision()}


def judge(facts: dict[str, Facts], recipe: Recipe | None) -> Judged:
    """Which files are not the same; a working folder's revision alone is a warning."""
    found = differences(NAME, {node: each["files"] for node, each in facts.items()})
    severities: dict[str, Severity] = {each.name: "error" for each in found}
    if _REVISION in severities:
        severities[_REVISION] = "warning"
    return Judged(tell_differences(NAME, found, severities, _ADVICE), found)


def _own_module(setting: Setting) -> dict[str, str]:
    """The file of the recipe's own module, found from the working folder as the trainer does."""
    module = setting.recipe.trainable.module if setting.recipe else None
    if module is None:
        return {}
    name = module.partition(":")[0]
    beside = Path(*name.split(".")).with_suffix(".py")
    if beside.is_file():
        return {str(beside): _digest(beside)}
    try:
        spec = find_spec(name)
    except (ImportError, ValueError):
        spec = None
    origin = spec.origin if spec else None
    return {module: _digest(Path(origin)) if origin else "cannot be found"}


def _revision() -> dict[str, str]:
    if (git := shutil.which("git")) is None:
        return {}
    command = [git, "describe", "--always", "--dirty", "--abbrev=12"]
    said = subprocess.run(command, capture_output=True, text=True, check=False, timeout=20)  # noqa: S603 - fixed arguments
    return {_REVISION: said.stdout.strip()} if said.returncode == 0 else {}


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:12]
