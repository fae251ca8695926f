"""The named policies."""

import pytest

from longtake.config import RecomputeSection
from longtake.recompute.policies import POLICIES, options_of

_BLOCKS = ("a", "b", "c", "d", "e")
_SHORT = {"keep": "k", "recompute": "r", "save-attention": "s"}


@pytest.mark.parametrize(
    ("policy", "expected"),
    {
        "none": "kkkkk",
        "all": "rrrrr",
        "all-but-first": "krrrr",
        "alternate": "krkrk",
        "save-attention": "sssss",
    }.items(),
)
def test_what_each_policy_does(policy: str, expected: str) -> None:
    """Each block by its name, in the model's order."""
    options = options_of(policy, _BLOCKS)
    assert tuple(options) == _BLOCKS
    assert "".join(_SHORT[option] for option in options.values()) == expected


@pytest.mark.parametrize("policy", POLICIES)
def test_a_model_may_have_one_block(policy: str) -> None:
    """No policy needs two of them."""
    assert len(options_of(policy, ("only",))) == 1


def test_recipes_know_every_policy() -> None:
    """What a recipe can name, besides those that are found: `auto` and `best`."""
    for policy in POLICIES:
        assert RecomputeSection.model_validate({"policy": policy}).chosen() == policy
