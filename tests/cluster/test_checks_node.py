"""What is concluded from what a node measured of itself; what this machine measures is JSON."""

import re
import sys
from typing import Any

import pytest
import torch
from tests.cluster.build import severities

from longtake.cluster.checks_node import (
    judge_code,
    judge_compute,
    judge_environment,
    judge_host_names,
    judge_inspection,
    judge_limits,
    judge_packages,
    judge_recipe,
    judge_time_sync,
)

_GIB = 2**30
_TORCH = torch.__version__.partition("+")[0]


def test_two_nodes_of_one_name() -> None:
    """Nodes that share their host name are an error, with both and what to do; others are none.

    Processes that were started apart on one machine share more than its name: they are one node.
    """
    one, other = ({"name": "gpu07", "machine": each} for each in ("m1 25", "m2 25"))
    third = {"name": "gpu08", "machine": "m3 25"}
    [finding] = judge_host_names({"gpu07": one, "gpu07 (2)": other, "gpu08": third}).findings
    assert (finding.severity, finding.nodes) == ("error", ("gpu07", "gpu07 (2)"))
    assert "2 nodes are called gpu07" in finding.what
    assert "nodes/gpu07" in finding.what
    assert "hostnamectl set-hostname" in finding.advice
    assert not judge_host_names({"gpu07": one, "gpu07 (2)": one, "gpu08": third}).findings


def test_limits_that_are_too_low() -> None:
    usual = {"open files": 65536, "locked memory": 8 * 2**20, "has_infiniband": False}
    usual |= {"shared memory": 64 * _GIB, "memory": 512 * _GIB}
    low = usual | {"open files": 1024, "shared memory": 64 * 2**20, "has_infiniband": True}
    result = judge_limits({"a": usual, "b": low})
    assert severities(result) == [("warning", ("b",))] * 3
    assert "1024 files" in result.findings[0].what
    assert "64.00 MiB" in result.findings[1].what
    assert judge_limits({"a": usual}).skipped[0].why == "no InfiniBand device"


def test_a_container_without_ptrace() -> None:
    facts = {"method": "none", "may_trace": False, "yama": "2", "seccomp": "2", "user": 1000}
    fine = facts | {"method": "py-spy --native"}
    [finding] = judge_inspection({"a": facts, "b": fine}).findings
    assert (finding.severity, finding.nodes) == ("warning", ("a",))
    for word in ("CAP_SYS_PTRACE", "ptrace_scope is 2", "seccomp", "faulthandler"):
        assert word in finding.what


def test_a_clock_that_no_program_keeps_or_two_or_that_is_off() -> None:
    """On a single node the first is a note."""
    kept = {"daemons": ["chronyd"], "kernel": {"clock_is_synchronised": 1.0}, "chrony": {}}
    free = {"daemons": [], "kernel": {"clock_is_synchronised": 0.0}, "chrony": {}}
    two = kept | {"daemons": ["chronyd", "ntpd"]}
    off = kept | {"chrony": {"clock_ntp_offset_seconds": -0.02, "clock_ntp_stratum": 3.0}}
    result = judge_time_sync({"a": kept, "b": free, "c": two, "d": off})
    assert severities(result) == [("warning", ("b",)), ("warning", ("c",)), ("warning", ("d",))]
    assert "-20.000 ms" in result.findings[2].what
    assert severities(judge_time_sync({"a": free})) == [("note", ("a",))]


def test_a_gpu_that_is_slower_than_the_others() -> None:
    """7 % below the median is much for a GPU, and little for cores that others use too."""
    gpus = {f"a:{n}": {"on": "GPU", "tflops": 700.0} for n in range(7)}
    result = judge_compute(gpus | {"a:7": {"on": "GPU", "tflops": 640.0}})
    assert severities(result) == [("warning", ("a:7",))]
    assert "640 TFLOP/s" in result.findings[0].what
    cores = {"a": {"on": "CPU", "tflops": 1.0}, "b": {"on": "CPU", "tflops": 0.9}}
    result = judge_compute(cores | {"b:1": {"on": "none"}})
    assert not result.findings
    assert result.skipped[0].why == "no GPU"


def test_another_torch_is_an_error_and_another_kernel_a_note() -> None:
    usual = {"versions": {"torch": "2.13", "kernel": "6.1"}, "variables": {}, "gpus": 0}
    other = {"versions": {"torch": "2.12", "kernel": "6.2"}, "variables": {}, "gpus": 0}
    result = judge_environment({"a": usual, "b": usual, "c": other})
    assert sorted(severities(result)) == [("error", ("c",)), ("note", ("c",))]
    assert [each.why for each in result.skipped] == ["no GPU"]


def test_a_variable_that_one_node_lacks() -> None:
    usual: dict[str, Any] = {"versions": {}, "variables": {"NCCL_IB_HCA": "mlx5"}, "gpus": 1}
    result = judge_environment({"a": usual, "b": usual, "c": usual | {"variables": {}}})
    assert severities(result) == [("warning", ("c",))]
    assert "NCCL_IB_HCA is absent instead of mlx5" in result.findings[0].what


def test_a_fault_of_torch_on_the_gpus_of_some_nodes_is_a_note() -> None:
    usual: dict[str, Any] = {"versions": {}, "variables": {}, "gpus": 1, "faults": []}
    result = judge_environment({"a": usual, "b": usual | {"faults": ["cuDNN's is wrong"]}})
    assert severities(result) == [("note", ("b",))]
    assert "2.14.1" in result.findings[0].advice


def test_packages_that_longtake_needs_matter_more() -> None:
    usual: dict[str, Any] = {"versions": {"av": "17", "cowsay": "1"}, "needed": ["av"]}
    usual["digest"] = "x"
    other = usual | {"versions": {"av": "16", "cowsay": "2"}}
    result = judge_packages({"a": usual, "b": usual, "c": other})
    assert sorted(severities(result)) == [("error", ("c",)), ("note", ("c",))]


def test_other_code_is_an_error() -> None:
    usual = {"files": {"longtake/flow/loss.py": "aa", "revision of the working folder": "1"}}
    other = {"files": {"longtake/flow/loss.py": "bb", "revision of the working folder": "2"}}
    result = judge_code({"a": usual, "b": usual, "c": other})
    assert {each.severity for each in result.findings} == {"error", "warning"}
    assert "longtake/flow/loss.py" in " ".join(each.what for each in result.findings)


def test_another_recipe_names_its_key_and_values() -> None:
    usual = {"keys": {"seed": "0", "training.steps": "10"}, "digest": "x"}
    other = {"keys": {"seed": "1", "training.steps": "10"}, "digest": "y"}
    none: dict[str, Any] = {"problem": "There is no recipe r.toml."}
    result = judge_recipe({"a": usual, "b": usual, "c": other, "d": none})
    assert sorted(severities(result)) == [("error", ("c",)), ("error", ("d",))]
    assert "seed is 1 instead of 0" in " ".join(each.what for each in result.findings)
    assert judge_recipe({"a": {}}).skipped[0].why == "no recipe was given"


@pytest.mark.parametrize(
    ("name", "most", "other", "command"),
    [
        ("torch", "2.13.0+cu130", "2.12.0", "PIP install torch==2.13.0+cu130 INDEXcu130"),
        ("torch", "2.13.0", "2.12.0", "PIP install torch==2.13.0"),
        ("CUDA", "13.0", "12.8", f"PIP install torch=={_TORCH}+cu130 INDEXcu130"),
        ("driver", "580.95.05", "570.1", "sudo apt-get install --yes nvidia-driver-580"),
        ("Python", "3.11.7", "3.12.1", f"uv venv --clear --python 3.11.7 {sys.prefix}"),
        (
            "kernel",
            "6.8.0-90",
            "6.5",
            "sudo apt-get install --yes linux-image-6.8.0-90 && sudo reboot",
        ),
        ("driver", "unknown (NVMLError)", "570.1", ""),
        ("memory", "2048 GiB", "1024 GiB", ""),
    ],
)
def test_a_version_that_differs_comes_with_what_to_type(
    name: str, most: str, other: str, command: str
) -> None:
    facts = {
        node: {"versions": {name: other if node == "c" else most}, "variables": {}, "gpus": 1}
        for node in "abc"
    }
    [found] = judge_environment(facts).differences
    pip, index = f"{sys.executable} -m pip", "--index-url https://download.pytorch.org/whl/"
    assert found.command == command.replace("PIP", pip).replace("INDEX", index)
    [tie] = judge_environment({node: facts[node] for node in "bc"}).differences
    assert (tie.majority, tie.command) == (None, found.command)  # then as the first node


def test_variables_packages_files_and_keys_come_with_what_to_type() -> None:
    """What most nodes lack is removed; what they have is copied from one of them."""

    def facts(section: str, most: dict[str, str], other: dict[str, str]) -> dict[str, Any]:
        rest = {"versions": {}, "variables": {}, "needed": [], "gpus": 1}
        return {n: {**rest, section: other if n == "c" else most} for n in ("a", "b", "c")}

    given = facts("variables", {"NCCL_IB_HCA": "a b"}, {"NCCL_DEBUG": "INFO"})
    commands = [each.command for each in judge_environment(given).differences]
    assert commands == ["unset NCCL_DEBUG", "export NCCL_IB_HCA='a b'"]
    given, pip = facts("versions", {"av": "18.1.0"}, {"x": "1"}), f"{sys.executable} -m pip"
    commands = [each.command for each in judge_packages(given).differences]
    assert commands == [f"{pip} install av==18.1.0", f"{pip} uninstall --yes x"]
    name = "revision of the working folder"
    clean = judge_code(facts("files", {name: "v1-3-gabc"}, {name: "v1"})).differences
    assert clean[0].command == "git fetch --all && git checkout --force v1-3-gabc"
    file = judge_code(facts("files", {"own.py": "1"}, {"own.py": "2"})).differences
    assert file[0].command == "rsync a:$PWD/own.py own.py"
    ours = judge_code(facts("files", {"longtake/errors.py": "1"}, {})).differences
    assert re.fullmatch(r"rsync --archive --delete a:(\S+/longtake/) \1", ours[0].command)
    keys = judge_recipe(facts("keys", {"seed": "1"}, {"seed": "2"})).differences
    assert keys[0].command == "longtake launch RECIPE --set seed=1"
