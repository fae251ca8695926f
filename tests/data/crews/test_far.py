"""What a cluster's worker finds out before it begins."""

import pickle
from importlib.metadata import version
from pathlib import Path

import pytest

from longtake.data.crews.far import Far, Sent, versions
from longtake.data.scores.motion import MotionScore
from longtake.errors import DataError


def test_a_folder_that_is_not_shared_is_named(tmp_path: Path) -> None:
    """By a file that was left in it, before anything is written; where it is, all is well."""
    sign = tmp_path / ".sign"
    told = pickle.dumps(Sent.to_do(MotionScore(), [sign]))
    with pytest.raises(DataError, match=f"{tmp_path} on .* is another folder than where this was"):
        Far(told)
    sign.touch()
    Far(told)


def test_versions_are_those_that_results_depend_on() -> None:
    """Of what decodes, scores and encodes; a build for another card is no other version."""
    found = versions()
    assert found["av"] == version("av")
    assert found["torch"] == version("torch").split("+")[0]
    assert {"longtake", "longtake's files", "Python", "numpy", "pillow", "HanTa"} <= set(found)
