"""A module that a recipe names is found, or it is said what is wrong and what is near."""

import sys
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from longtake.config import TrainableSection
from longtake.errors import RecipeError
from longtake.models.added_module import build_module

_ROOT = Path(__file__).resolve().parents[2]
_POSE = "examples.modules.pose_adapter:PoseAdapter"
_FILES = {
    "broken": "1 / 0",
    "in_need": "import no_such",
    "narrow": "import torch\nclass Narrow(torch.nn.Module):\n"
    "    def __init__(self, width): pass\n"
    "    def prepare(self, conditioning): return {}\n",
}


def _build(module: str, **options: Any) -> nn.Module:
    return build_module(TrainableSection(module=module, options=options), 24, ["blocks.0"], 4)


def test_it_is_found_from_the_current_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything that is installed, and with its options; sys.path is left as it was."""
    monkeypatch.chdir(_ROOT)
    path = list(sys.path)
    module = _build(_POSE, hidden_size=8)
    assert type(module).__name__ == "PoseAdapter"
    assert module.state_dict()["read.0.weight"].shape == (8, 16)
    assert sys.path == path


@pytest.mark.parametrize(
    ("module", "options", "message"),
    [
        ("exampels.modules.pose:A", {}, r": /.* has no module exampels; did you mean examples\?"),
        ("examples.modles.pose:A", {}, r"examples has no module modles; did you mean modules\?"),
        (
            "examples.modules.pose_adaptor:PoseAdapter",
            {},
            r"examples\.modules has no module pose_adaptor; did you mean pose_adapter\?",
        ),
        (
            "examples.modules.pose_adapter:PoseAdaptor",
            {},
            r"pose_adapter\.py has no class PoseAdaptor; did you mean PoseAdapter\?",
        ),
        ("torch.nn.Linear:Linear", {}, r"torch\.nn has no module Linear; there are: .*utils"),
        (_POSE, {"hidden": 8}, r"options\.hidden is not an option of PoseAdapter; .*hidden_size"),
        (_POSE, {"width": 8}, r"options\.width is not an option of PoseAdapter"),
        (_POSE, {"hidden_size": "8"}, r"trainable\.options does not fit PoseAdapter\. TypeError"),
        ("collections.abc:Sized", {}, r"'collections\.abc:Sized' is not a torch\.nn\.Module"),
        ("torch.nn:Linear", {}, r"no method prepare\(self, conditioning\)\. See AddedModule"),
    ],
)
def test_what_is_wrong_with_it_is_said(
    monkeypatch: pytest.MonkeyPatch, module: str, options: dict[str, Any], message: str
) -> None:
    """And the nearest that exists."""
    monkeypatch.chdir(_ROOT)
    with pytest.raises(RecipeError, match=message):
        _build(module, **options)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("broken", r"importing it failed with ZeroDivisionError: division by zero"),
        ("in_need", r"importing it failed with ModuleNotFoundError: No module named 'no_such'"),
        ("narrow", r"its __init__ does not take blocks, latent_channels\. See AddedModule"),
    ],
)
def test_a_file_of_the_users_that_fails_is_not_hidden(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, message: str
) -> None:
    """The reason is the file's own; sys.path is left as it was."""
    (tmp_path / f"{name}.py").write_text(_FILES[name])
    monkeypatch.chdir(tmp_path)
    path = list(sys.path)
    with pytest.raises(RecipeError, match=message):
        _build(f"{name}:{name.title()}")
    assert sys.path == path
    sys.modules.pop(name, None)
