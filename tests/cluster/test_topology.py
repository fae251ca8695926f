"""Which process this is, by the variables of torchrun and Slurm; and lists of hosts."""

import pytest

from longtake.cluster.topology import expand_hosts, find_process, fold_hosts, group_by_node
from longtake.errors import LongtakeError

_TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "GROUP_RANK": "1",
    "MASTER_ADDR": "gpu0",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}
_SLURM = {
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_NODELIST": "gpu[04-05]",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
    "SLURM_JOB_ID": "77",
}


def test_alone() -> None:
    process = find_process({})
    assert (process.rank, process.world_size, process.address) == (0, 1, None)


def test_torchrun() -> None:
    """The agent of torchrun serves the store; where it does not, rank 0 does."""
    process = find_process(_TORCHRUN)
    assert (process.rank, process.world_size, process.local_rank) == (3, 4, 1)
    assert process.address == ("gpu0", 29500)
    assert not process.serves_store
    first = _TORCHRUN | {"RANK": "0", "TORCHELASTIC_USE_AGENT_STORE": "False"}
    assert find_process(first).serves_store


def test_slurm() -> None:
    """Of srun's tasks the first serves, at the first host, at a port that follows from the job."""
    process = find_process(_SLURM)
    assert process.address == ("gpu04", 20077)
    assert process.serves_store
    second = _SLURM | {"SLURM_PROCID": "1", "SLURM_NODEID": "1", "MASTER_ADDR": "elsewhere"}
    assert find_process(second).address == ("elsewhere", 20077)
    assert not find_process(second).serves_store
    assert process.expected_hosts == ("gpu04", "gpu05")


def test_slurm_on_one_node_meets_on_loopback() -> None:
    """No other machine can reach that store."""
    process = find_process(_SLURM | {"SLURM_STEP_NODELIST": "gpu04"})
    assert process.address == ("127.0.0.1", 20077)


def test_a_batch_script_of_slurm_is_no_task() -> None:
    """A job's own shell has SLURM_PROCID, too, but nobody beside it whom it could wait for."""
    given = {"SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_JOB_ID": "1"}
    assert find_process(given).world_size == 1


def test_half_an_environment_is_an_error_in_words() -> None:
    with pytest.raises(LongtakeError, match="MASTER_ADDR"):
        find_process({"RANK": "0", "WORLD_SIZE": "2"})


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("gpu7", ["gpu7"]),
        ("gpu[08-10],login1", ["gpu08", "gpu09", "gpu10", "login1"]),
        ("r[1,3]n[1-2]x", ["r1n1x", "r1n2x", "r3n1x", "r3n2x"]),
        ("", []),
    ],
)
def test_lists_of_hosts(text: str, expected: list[str]) -> None:
    assert list(expand_hosts(text)) == expected


@pytest.mark.parametrize(
    ("nodes", "expected"),
    [
        (["b", "a"], "a, b"),
        (["gpu2", "gpu10", "gpu1", "gpu3"], "gpu[1-3,10]"),
        ([f"gpu{n:03d}" for n in range(200) if n != 7], "gpu[000-006,008-199]"),
        (["gpu0", "gpu1", "gpu2", "login"], "gpu[0-2], login"),
        ([f"gpu{n}" for n in range(0, 400, 2)], "gpu[0,2,4,6,8,10,12,… (200 in all)]"),
        (["r0n0", "r0n1", "r0n2", "r1n0"], "r0n[0-2], r1n0"),
        (["n01", "n1", "n02", "n2", "n03", "n3", "n10"], "n[01-03,10], n[1-3]"),
        (["n1", "n01", "n2"], "n01, n1, n2"),
        ([], ""),
    ],
)
def test_many_names_in_one_line(nodes: list[str], expected: str) -> None:
    assert fold_hosts(nodes) == expected


def test_interleaved_ranks_belong_to_nodes_and_equal_names_get_a_number() -> None:
    came = {0: ("b", "0"), 1: ("a", "1"), 2: ("b", "0"), 3: ("a", "2")}
    assert group_by_node(came) == (["b", "a", "a (2)"], [[0, 2], [1], [3]])
