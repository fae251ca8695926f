"""The program of a worker process."""

import subprocess
import sys

_SECONDS = 60


def test_a_worker_started_by_hand_says_what_it_is() -> None:
    """It waits for nothing."""
    command = [sys.executable, "-m", "longtake.data.decode_worker"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_SECONDS)
    assert (ended.returncode, ended.stdout) == (1, "")
    assert ended.stderr == "This is a part of longtake's worker pool, which starts it itself.\n"


def test_a_worker_imports_neither_torch_nor_pyarrow() -> None:
    """There are many workers, and each would take their memory and seconds to start."""
    program = (
        "import sys, longtake.data.decode_worker\n"
        "print(sorted({'torch', 'pyarrow', 'ray', 'matplotlib'} & sys.modules.keys()))"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=True,
        timeout=_SECONDS,
    )
    assert ended.stdout == "[]\n"
