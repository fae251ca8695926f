"""What a process does so that it can be asked."""

import os
import signal
import subprocess
import sys
from pathlib import Path

_PROGRAM = """
import os, signal, sys
from pathlib import Path
from longtake.stacks.allow import allow_inspection
allow_inspection(Path(sys.argv[1]) if len(sys.argv) > 1 else None)
os.kill(os.getpid(), signal.SIGUSR2)
os.kill(os.getpid(), signal.SIGSEGV)
"""


def test_stacks_go_to_a_file_and_a_crash_to_stderr(tmp_path: Path) -> None:
    """What the file held before is of another process with the same number."""
    file = tmp_path / "stacks.txt"
    file.write_text("of another process")
    ended = subprocess.run(
        [sys.executable, "-c", _PROGRAM, str(file)],
        stderr=subprocess.PIPE,
        check=False,
        timeout=300,
    )
    assert ended.returncode == -signal.SIGSEGV
    assert file.read_text().startswith("Current thread")
    assert b"Segmentation fault" in ended.stderr


def test_without_a_file_all_goes_to_stderr() -> None:
    """Where whoever started the process reads it."""
    ended = subprocess.run(
        [sys.executable, "-c", _PROGRAM], stderr=subprocess.PIPE, check=False, timeout=300
    )
    assert ended.stderr.count(b"most recent call first") == 2


def test_a_schedulers_warning_is_not_taken_for_a_question() -> None:
    """Slurm's SIGUSR1 does what the program has chosen for it, which is nothing here."""
    program = (
        "import signal, time\n"
        "from longtake.stacks.allow import allow_inspection\n"
        "allow_inspection()\n"
        "print(signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL, flush=True)\n"
        "time.sleep(60)\n"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as process:
        assert process.stdout
        assert process.stdout.readline() == b"True\n"
        os.kill(process.pid, signal.SIGUSR1)
        assert process.wait(10) == -signal.SIGUSR1
