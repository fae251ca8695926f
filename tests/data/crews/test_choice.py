"""Where the work is done, and what is said where that cannot be."""

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from longtake.data.crews.choice import crew_on
from longtake.data.crews.gang import _by_value, differences
from longtake.data.crews.processes import Processes
from longtake.errors import DataError


def test_without_a_place_it_is_this_machine() -> None:
    """As many processes as are wanted, 0 of them too."""
    for count in (None, 0, 3):
        with crew_on(None, count) as crew:
            assert isinstance(crew, Processes)


def test_another_place_is_refused() -> None:
    """With what there is."""
    with (
        pytest.raises(DataError, match=r"--on dask: expected `ray` .* or `ray://HOST:PORT`"),
        crew_on("dask"),
    ):
        pass


def test_without_ray_it_is_said_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """As an error of the user's, with the command."""
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(DataError, match=r"pip install 'longtake\[ray\]'"), crew_on("ray"):
        pass


@pytest.mark.parametrize("named", ["--on", "RAY_ADDRESS"])
def test_a_cluster_that_cannot_be_reached_is_named(
    named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At once, though Ray itself would try for half a minute."""
    pytest.importorskip("ray", reason="Ray is not installed: pip install 'longtake[ray]'")
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{nobody.getsockname()[1]}"  # bound, but nobody listens
        where = f"ray://{address}" if named == "--on" else "ray"
        monkeypatch.delenv("RAY_ADDRESS", raising=False)
        if named == "RAY_ADDRESS":
            monkeypatch.setenv("RAY_ADDRESS", address)
        with (
            pytest.raises(DataError, match=f"cluster at .*{address} cannot be reached: .*refused"),
            crew_on(where),
        ):
            pass


def test_versions_that_differ_are_named() -> None:
    """Only those, with both values, and what to do."""
    here = {"longtake": "0.1.0", "av": "18.1.0", "numpy": "2.4.6"}
    said = differences("node7", {"longtake": "0.1.0", "av": "17.0.0"}, here)
    assert said.startswith(
        "node7 would not do the same work: av is 17.0.0 there and 18.1.0 here, "
        "numpy is not installed there and 2.4.6 here. Install the same"
    )


def test_a_node_without_longtake_says_so(tmp_path: Path) -> None:
    """The worker's class brings its own code, so it gets as far as to say what is missing."""
    pickler = pytest.importorskip(
        "ray.cloudpickle", reason="Ray is not installed: pip install 'longtake[ray]'"
    )
    (tmp_path / "class.pickle").write_bytes(pickler.dumps(_by_value()))
    code = (
        "import pickle, sys\n"
        "sys.modules['longtake'] = None\n"
        f"made = pickle.load(open({str(tmp_path / 'class.pickle')!r}, 'rb'))\n"
        "print(made(b'').begin({})[1:])"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=300
    )
    assert "'absent'" in ended.stdout, ended.stderr
