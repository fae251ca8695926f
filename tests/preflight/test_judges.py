"""What each check says of what nodes tell: nothing here asks a machine."""

from typing import Any

import pytest

from longtake.preflight import (
    addresses,
    clocks,
    code,
    compute,
    dataset,
    devices,
    discipline,
    environment,
    hostnames,
    inspection,
    limits,
    links,
    packages,
    recipe,
    room,
    run_folder,
    speed,
)
from longtake.preflight.finding import Judged

_GIB = 2**30


def _severities(judged: Judged) -> list[tuple[str, tuple[str, ...]]]:
    return [(each.severity, each.nodes) for each in judged.findings]


def test_another_torch_is_an_error_and_another_kernel_a_note() -> None:
    """How bad a difference is depends on what differs."""
    usual = {"versions": {"torch": "2.13", "kernel": "6.1"}, "variables": {}, "cards": 0}
    other = {"versions": {"torch": "2.12", "kernel": "6.2"}, "variables": {}, "cards": 0}
    judged = environment.judge({"a": usual, "b": usual, "c": other}, None)
    assert sorted(_severities(judged)) == [("error", ("c",)), ("note", ("c",))]
    assert [each.why for each in judged.skipped] == ["no GPU"]


def test_a_variable_that_one_node_lacks() -> None:
    """NCCL_IB_HCA on all but one is a warning that names it."""
    usual: dict[str, Any] = {"versions": {}, "variables": {"NCCL_IB_HCA": "mlx5"}, "cards": 1}
    judged = environment.judge({"a": usual, "b": usual, "c": usual | {"variables": {}}}, None)
    assert _severities(judged) == [("warning", ("c",))]
    assert "NCCL_IB_HCA is absent instead of mlx5" in judged.findings[0].what


def test_packages_that_longtake_needs_matter_more() -> None:
    """Another PyAV is a warning, another package that nobody here imports a note."""
    usual: dict[str, Any] = {
        "versions": {"av": "17", "cowsay": "1"},
        "digest": "x",
        "needed": ["av"],
    }
    other = usual | {"versions": {"av": "16", "cowsay": "2"}}
    judged = packages.judge({"a": usual, "b": usual, "c": other}, None)
    assert sorted(_severities(judged)) == [("note", ("c",)), ("warning", ("c",))]


def test_other_code_is_an_error() -> None:
    """A file of longtake with another digest is named; a folder's revision alone is a warning."""
    usual = {"files": {"longtake/flow/loss.py": "aa", "revision of the working folder": "1"}}
    other = {"files": {"longtake/flow/loss.py": "bb", "revision of the working folder": "2"}}
    judged = code.judge({"a": usual, "b": usual, "c": other}, None)
    assert {each.severity for each in judged.findings} == {"error", "warning"}
    assert "longtake/flow/loss.py" in " ".join(each.what for each in judged.findings)


def test_another_recipe_names_its_key_and_values() -> None:
    """A key with another value, and a recipe that cannot be read, are errors of their nodes."""
    usual = {"keys": {"seed": "0", "training.steps": "10"}, "digest": "x"}
    facts: dict[str, dict[str, Any]] = {
        "a": usual,
        "b": usual,
        "c": {"keys": {"seed": "1", "training.steps": "10"}, "digest": "y"},
        "d": {"problem": "There is no recipe r.toml."},
    }
    judged = recipe.judge(facts, None)
    assert sorted(_severities(judged)) == [("error", ("c",)), ("error", ("d",))]
    assert "seed is 1 instead of 0" in " ".join(each.what for each in judged.findings)
    assert recipe.judge({"a": {}}, None).skipped[0].why == "no recipe was given"


def _catalog(**changes: Any) -> dict[str, Any]:
    usual = {
        "filesystem": "nfs4 store:/clips",
        "fingerprint": "f",
        "clips": "100",
        "sampled files": "s",
        "sampled": 64,
        "missing": [],
        "read": 500.0,
    }
    return {"catalogs": {"catalog": usual | changes}}


def test_clips_that_are_not_there_are_named() -> None:
    """A node that lacks clips, and one with another catalog, are errors; a slow one a warning."""
    lacks = _catalog(missing=["/clips/1.mp4", "/clips/2.mp4"], **{"sampled files": "t"})
    facts = {"a": _catalog(), "b": _catalog(), "c": _catalog(fingerprint="g"), "d": lacks}
    facts["e"] = _catalog(read=100.0)
    judged = dataset.judge(facts, None)
    said = {each.nodes: each for each in judged.findings}
    assert said["e",].severity == "warning"
    assert "100 MB/s" in said["e",].what
    assert said["c",].severity == "error"
    assert any(
        "2 of 64 clips" in each.what and "/clips/1.mp4" in each.what
        for each in judged.findings
        if each.nodes == ("d",)
    )


def _folder(**changes: Any) -> dict[str, Any]:
    usual = {"path": "/runs/a", "filesystem": "nfs4 s:/", "exists": True, "seen_after": 0.0}
    return usual | {"cannot_write": ""} | changes


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"exists": False, "seen_after": None}, "is not there"),
        ({"seen_after": None}, "another folder than on the first node"),
        ({"cannot_write": "Permission denied"}, "cannot be written: Permission denied"),
    ],
)
def test_a_run_directory_that_is_not_shared(changes: dict[str, Any], said: str) -> None:
    """Each way in which a node has no part in the run directory is an error of that node."""
    judged = run_folder.judge({"a": _folder(), "b": _folder(**changes)}, None)
    [finding] = judged.findings
    assert (finding.severity, finding.nodes) == ("error", ("b",))
    assert said in finding.what


def test_a_folder_that_is_seen_late_is_a_note() -> None:
    """A cache of directories that is seconds old is no error."""
    judged = run_folder.judge({"a": _folder(), "b": _folder(seen_after=5.0)}, None)
    assert _severities(judged) == [("note", ("b",))]


def test_a_slow_disk() -> None:
    """Half of the median's speed, or many times its fsync, is a warning with both numbers."""
    facts: dict[str, dict[str, Any]] = {n: {"write": 900.0, "sync": 0.002} for n in "abc"}
    facts["d"] = {"write": 300.0, "sync": 0.2}
    judged = speed.judge(facts, None)
    assert _severities(judged) == [("warning", ("d",)), ("warning", ("d",))]
    assert "300 MB/s" in judged.findings[0].what
    assert "200 ms" in judged.findings[1].what
    few = {n: {"write": 900.0, "sync": 0.0001 * (1 + 9 * (n == "d"))} for n in "abcd"}
    assert not speed.judge(few, None).findings, "ten times of next to nothing is nothing"


def test_disk_space_for_checkpoints() -> None:
    """With a known size the checkpoints that are kept, and one more, have to fit."""
    from longtake import config

    one = {
        "out": "run",
        "data": {"catalog": "c", "buckets": [{"num_frames": 1, "height": 32, "width": 32}]},
        "model": {"family": "tubelet"},
        "training": {"steps": 1, "batch_size": 1},
    }
    read = config.parse(one, "test")
    free = {"run directory": {"bytes": 30 * _GIB, "files": -1}}
    known = {"bytes": 10 * _GIB, "source": "a checkpoint"}
    [finding] = room.judge({"a": {"folders": free, "checkpoint": known}}, read).findings
    assert finding.severity == "error"
    assert "30.00 GiB" in finding.what
    assert "40.00 GiB" in finding.expected
    known = {"bytes": 5 * _GIB, "source": "a checkpoint"}
    assert not room.judge({"a": {"folders": free, "checkpoint": known}}, read).findings


def test_few_files_left_on_a_disk() -> None:
    """A disk can be full of files while it has bytes; one without a limit says -1."""
    free = {"temporary files": {"bytes": 99 * _GIB, "files": 12}}
    [finding] = room.judge({"a": {"folders": free}}, None).findings
    assert finding.what.startswith("12 more files")


def test_a_clock_that_is_off_is_found_though_the_first_asked() -> None:
    """The node that asks is the one whose clock is off: all others seem to be, and it is named."""
    offsets = {node: [-2.0, 0.0002] for node in "bcd"}
    judged = clocks.judge({"a": {"offsets": offsets}, "b": {}, "c": {}, "d": {}}, None)
    [finding] = judged.findings
    assert (finding.severity, finding.nodes) == ("error", ("a",))
    assert "2.000 s ahead of the median" in finding.what


def test_a_clock_offset_within_its_uncertainty_is_none() -> None:
    """A slow answer proves nothing: 3 ms with +- 2.5 ms is no warning, with +- 0.1 ms it is."""
    assert not clocks.judge({"a": {"offsets": {"b": [0.003, 0.0025]}}, "b": {}}, None).findings
    [finding] = clocks.judge({"a": {"offsets": {"b": [-0.003, 0.0001]}}, "b": {}}, None).findings
    assert (finding.severity, finding.nodes) == ("warning", ("b",))
    assert "3.000 ms behind that of a (+-0.100 ms)" in finding.what


def test_who_keeps_the_clock() -> None:
    """Nobody is a warning on several nodes, two at once always, and chrony's own offset counts."""
    kept = {"daemons": ["chronyd"], "kernel": {"clock_is_synchronised": 1.0}, "chrony": {}}
    free = {"daemons": [], "kernel": {"clock_is_synchronised": 0.0}, "chrony": {}}
    two = kept | {"daemons": ["chronyd", "ntpd"]}
    off = kept | {"chrony": {"clock_ntp_offset_seconds": -0.02, "clock_ntp_stratum": 3.0}}
    judged = discipline.judge({"a": kept, "b": free, "c": two, "d": off}, None)
    assert _severities(judged) == [("warning", ("b",)), ("warning", ("c",)), ("warning", ("d",))]
    assert "-20.000 ms" in judged.findings[2].what
    assert _severities(discipline.judge({"a": free}, None)) == [("note", ("a",))]


def test_a_link_that_runs_at_a_tenth_of_its_speed() -> None:
    """A card that has agreed on less than the others', and a port that is down, are named."""
    usual = {"ethernet": {"eth0": {"link_up": 1.0, "link_speed_bits_per_second": 1e11}}}
    slow = {"ethernet": {"eth0": {"link_up": 1.0, "link_speed_bits_per_second": 1e10}}}
    port = {"infiniband": {"mlx5_0/1": {"link_up": 1.0}}}
    down = {"infiniband": {"mlx5_0/1": {"link_up": 0.0}}}
    facts = {"a": usual | port, "b": usual | port, "c": slow | port, "d": usual | down}
    said = [(each.nodes, each.what) for each in devices.judge(facts, None).findings]
    assert (("c",), "eth0 is up, 10 Gbit/s instead of up, 100 Gbit/s") in said
    assert (("d",), "InfiniBand ports are down: mlx5_0/1") in said


def test_a_container_without_ptrace() -> None:
    """Why py-spy cannot read is said, and what is used instead."""
    facts = {"method": "none", "may_trace": False, "yama": "2", "seccomp": "2", "user": 1000}
    fine = facts | {"method": "py-spy --native"}
    [finding] = inspection.judge({"a": facts, "b": fine}, None).findings
    assert (finding.severity, finding.nodes) == ("warning", ("a",))
    for word in ("CAP_SYS_PTRACE", "ptrace_scope is 2", "seccomp", "faulthandler"):
        assert word in finding.what


def test_limits_that_are_too_low() -> None:
    """Few open files and a small /dev/shm are warnings; locked memory matters with InfiniBand."""
    usual = {
        "open files": 65536,
        "locked memory": 8 * 2**20,
        "shared memory": 64 * _GIB,
        "memory": -1,
        "machine": 512 * _GIB,
        "has_infiniband": False,
    }
    low = usual | {"open files": 1024, "shared memory": 64 * 2**20, "has_infiniband": True}
    judged = limits.judge({"a": usual, "b": low}, None)
    assert _severities(judged) == [("warning", ("b",))] * 3
    assert "1024 files" in judged.findings[0].what
    assert "64.00 MiB" in judged.findings[1].what
    assert limits.judge({"a": usual}, None).skipped[0].why == "no InfiniBand device"


def test_a_card_that_is_slower_than_the_others() -> None:
    """7 % below the median is much for a card, and little for cores that others use too."""
    cards = {f"a:{n}": {"on": "GPU", "tflops": 700.0} for n in range(7)}
    judged = compute.judge(cards | {"a:7": {"on": "GPU", "tflops": 640.0}}, None)
    assert _severities(judged) == [("warning", ("a:7",))]
    assert "640 TFLOP/s" in judged.findings[0].what
    cores = {"a": {"on": "CPU", "tflops": 1.0}, "b": {"on": "CPU", "tflops": 0.9}}
    judged = compute.judge(cores | {"b:1": {"on": "none"}}, None)
    assert not judged.findings
    assert judged.skipped[0].why == "no GPU"


def _ring(count: int, **slow: float) -> dict[str, dict[str, Any]]:
    facts: dict[str, dict[str, Any]] = {f"n{n}": {"to": {}, "all": 900.0} for n in range(count)}
    for number in range(count):
        for other in ((number + 1) % count, (number - 1) % count):
            facts[f"n{number}"]["to"][f"n{other}"] = slow.get(f"n{number}_n{other}", 1000.0)
    return facts


def test_one_slow_link_is_named_by_its_ends() -> None:
    """Between two nodes that are well connected to others it is the link."""
    judged = links.judge(_ring(5, n1_n2=200.0, n2_n1=210.0), None)
    assert [each.nodes for each in judged.findings] == [("n1", "n2"), ("n2", "n1")]
    assert all(each.severity == "error" for each in judged.findings)


def test_a_node_all_of_whose_links_are_slow_is_named() -> None:
    """Slow to and from both neighbours: it is the node, and they are not told of."""
    slow = {"n2_n1": 500.0, "n1_n2": 500.0, "n2_n3": 480.0, "n3_n2": 490.0}
    [finding] = links.judge(_ring(5, **slow), None).findings
    assert (finding.severity, finding.nodes) == ("warning", ("n2",))
    assert "all links of n2 are slow" in finding.what


@pytest.mark.parametrize("count", [1, 2, 3, 4, 7, 8])
def test_a_ring_in_rounds(count: int) -> None:
    """Every pair of neighbours once, nobody twice in a round, in three rounds at most."""
    rounds = list(links.rounds(count))
    pairs = [frozenset(pair) for each in rounds for pair in each]
    expected = {frozenset((n, (n + 1) % count)) for n in range(count)} if count > 1 else set()
    assert set(pairs) == expected
    assert len(pairs) == len(expected)
    assert all(len({n for pair in each for n in pair}) == 2 * len(each) for each in rounds)
    assert len(rounds) <= 3


def test_two_nodes_of_one_name() -> None:
    """Nodes that share their host name are an error, with both and what to do; others are none.

    Processes that were started apart on one machine share more than its name: they are one node.
    """
    one, other = ({"name": "gpu07", "machine": each} for each in ("m1 25", "m2 25"))
    third = {"name": "gpu08", "machine": "m3 25"}
    [finding] = hostnames.judge({"gpu07": one, "gpu07 (2)": other, "gpu08": third}, None).findings
    assert (finding.severity, finding.nodes) == ("error", ("gpu07", "gpu07 (2)"))
    assert "2 nodes are called gpu07" in finding.what
    assert "nodes/gpu07" in finding.what
    assert "hostnamectl set-hostname" in finding.advice
    assert not hostnames.judge({"gpu07": one, "gpu07 (2)": one, "gpu08": third}, None).findings


def test_a_name_that_resolves_to_loopback() -> None:
    """127.0.1.1, as Debian writes it, keeps others from connecting, unless gloo is told another."""
    fine, wrong = {"own": ["10.0.0.1"], "interface": ""}, {"own": ["127.0.1.1"], "interface": ""}
    judged = addresses.judge({"a": fine, "b": wrong, "c": wrong | {"interface": "eth0"}}, None)
    assert _severities(judged) == [("error", ("b",))]
    assert "127.0.1.1" in judged.findings[0].what
    assert addresses.judge({"a": wrong}, None).skipped[0].why == "one node"
