"""Where a process stands, by the variables that torchrun and Slurm set."""

import pytest

from longtake.errors import LongtakeError
from longtake.preflight.place import find_place, hosts_of

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
    """Without their variables a process is alone, and meets nobody."""
    place = find_place({})
    assert (place.rank, place.size, place.address) == (0, 1, None)


def test_torchrun() -> None:
    """The agent of torchrun serves the store; where it does not, rank 0 does."""
    place = find_place(_TORCHRUN)
    assert (place.rank, place.size, place.local_rank) == (3, 4, 1)
    assert place.address == ("gpu0", 29500)
    assert not place.hosts_store
    first = _TORCHRUN | {"RANK": "0", "TORCHELASTIC_USE_AGENT_STORE": "False"}
    assert find_place(first).hosts_store


def test_slurm() -> None:
    """Of srun's tasks the first serves, at the first host, at a port that follows from the job."""
    place = find_place(_SLURM)
    assert place.address == ("gpu04", 20077)
    assert place.hosts_store
    second = _SLURM | {"SLURM_PROCID": "1", "SLURM_NODEID": "1", "MASTER_ADDR": "elsewhere"}
    assert find_place(second).address == ("elsewhere", 20077)
    assert not find_place(second).hosts_store


def test_a_batch_script_of_slurm_is_no_task() -> None:
    """A job's own shell has SLURM_PROCID, too, but nobody beside it whom it could wait for."""
    given = {"SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_JOB_ID": "1"}
    assert find_place(given).size == 1


def test_half_an_environment_is_an_error_in_words() -> None:
    """A rank without the address to meet at names the variable that is missing."""
    with pytest.raises(LongtakeError, match="MASTER_ADDR"):
        find_place({"RANK": "0", "WORLD_SIZE": "2"})


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("gpu7", ["gpu7"]),
        ("gpu[08-10],login1", ["gpu08", "gpu09", "gpu10", "login1"]),
        ("r[1,3]n[1-2]x", ["r1n1x", "r1n2x", "r3n1x", "r3n2x"]),
        ("", []),
    ],
)
def test_lists_of_hosts(text: str, expected: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Slurm's short form is spelt out in its order, with its leading zeros, without scontrol."""
    monkeypatch.setenv("PATH", "")
    assert list(hosts_of(text)) == expected
