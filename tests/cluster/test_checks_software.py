"""Which differences of software are errors, warnings and notes."""

from typing import Any

from tests.cluster.build import severities

from longtake.cluster.checks_software import (
    judge_code,
    judge_environment,
    judge_packages,
    judge_recipe,
)


def test_another_torch_is_an_error_and_another_kernel_a_note() -> None:
    """How bad a difference is depends on what differs."""
    usual = {"versions": {"torch": "2.13", "kernel": "6.1"}, "variables": {}, "gpus": 0}
    other = {"versions": {"torch": "2.12", "kernel": "6.2"}, "variables": {}, "gpus": 0}
    result = judge_environment({"a": usual, "b": usual, "c": other}, None)
    assert sorted(severities(result)) == [("error", ("c",)), ("note", ("c",))]
    assert [each.why for each in result.skipped] == ["no GPU"]


def test_a_variable_that_one_node_lacks() -> None:
    """NCCL_IB_HCA on all but one is a warning that names it."""
    usual: dict[str, Any] = {"versions": {}, "variables": {"NCCL_IB_HCA": "mlx5"}, "gpus": 1}
    result = judge_environment({"a": usual, "b": usual, "c": usual | {"variables": {}}}, None)
    assert severities(result) == [("warning", ("c",))]
    assert "NCCL_IB_HCA is absent instead of mlx5" in result.findings[0].what


def test_packages_that_longtake_needs_matter_more() -> None:
    """Another PyAV is a warning, another package that nobody here imports a note."""
    usual: dict[str, Any] = {
        "versions": {"av": "17", "cowsay": "1"},
        "digest": "x",
        "needed": ["av"],
    }
    other = usual | {"versions": {"av": "16", "cowsay": "2"}}
    result = judge_packages({"a": usual, "b": usual, "c": other}, None)
    assert sorted(severities(result)) == [("note", ("c",)), ("warning", ("c",))]


def test_other_code_is_an_error() -> None:
    """A file of longtake with another digest is named; a folder's revision alone is a warning."""
    usual = {"files": {"longtake/flow/loss.py": "aa", "revision of the working folder": "1"}}
    other = {"files": {"longtake/flow/loss.py": "bb", "revision of the working folder": "2"}}
    result = judge_code({"a": usual, "b": usual, "c": other}, None)
    assert {each.severity for each in result.findings} == {"error", "warning"}
    assert "longtake/flow/loss.py" in " ".join(each.what for each in result.findings)


def test_another_recipe_names_its_key_and_values() -> None:
    """A key with another value, and a recipe that cannot be read, are errors of their nodes."""
    usual = {"keys": {"seed": "0", "training.steps": "10"}, "digest": "x"}
    facts: dict[str, dict[str, Any]] = {
        "a": usual,
        "b": usual,
        "c": {"keys": {"seed": "1", "training.steps": "10"}, "digest": "y"},
        "d": {"problem": "There is no recipe r.toml."},
    }
    result = judge_recipe(facts, None)
    assert sorted(severities(result)) == [("error", ("c",)), ("error", ("d",))]
    assert "seed is 1 instead of 0" in " ".join(each.what for each in result.findings)
    assert judge_recipe({"a": {}}, None).skipped[0].why == "no recipe was given"
