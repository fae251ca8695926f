"""What /proc says of processes, and which belong to which."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable

from longtake.stacks.processes import descendants, facts, parents

AwaitState = Callable[[int, str], None]


def test_facts_of_a_process(await_state_of: AwaitState) -> None:
    """Its parent, command and state; and the processor time that it has used so far."""
    program = "while True: pass"
    with subprocess.Popen([sys.executable, "-c", program, "a name (with) words"]) as process:
        found, until = facts(process.pid), time.monotonic() + 60
        while found and found.cpu_seconds <= 0.05 and time.monotonic() < until:
            time.sleep(0.05)
            found = facts(process.pid)
        os.kill(process.pid, signal.SIGSTOP)
        await_state_of(process.pid, "T")
        stopped = facts(process.pid)
        process.kill()
    assert found
    assert (found.pid, found.ppid) == (process.pid, os.getpid())
    assert found.command == f"{sys.executable} -c {program} a name (with) words"
    assert 0.05 < found.cpu_seconds < 60
    assert stopped
    assert stopped.state == "T"
    assert stopped.cpu_seconds >= found.cpu_seconds


def test_a_dead_process_has_its_name_alone(await_state_of: AwaitState) -> None:
    """Its memory, in which the command line lay, is gone; and then all of it is."""
    process = subprocess.Popen(["sleep", "60"])
    os.kill(process.pid, signal.SIGKILL)
    await_state_of(process.pid, "Z")
    found = facts(process.pid)
    assert found
    assert (found.command, found.state) == ("[sleep]", "Z")
    process.wait()
    assert facts(process.pid) is None


def test_descendants() -> None:
    """Children and theirs, parents first; whoever is left out takes along what it has started."""
    inner = "import subprocess; subprocess.run(['sleep', '60'])"
    outer = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {inner!r}])"
    with subprocess.Popen([sys.executable, "-c", outer], start_new_session=True) as process:
        end = time.monotonic() + 10
        while len(found := descendants(process.pid)) < 2 and time.monotonic() < end:
            time.sleep(0.02)
        known = parents()
        assert [known[pid] for pid in found] == [process.pid, found[0]]
        assert descendants(process.pid, known) == found
        assert descendants(process.pid, known, without={found[0]}) == []
        assert descendants(process.pid, known, without={found[1]}) == found[:1]
        assert set(found) < set(descendants(os.getpid(), known))
        os.killpg(process.pid, signal.SIGKILL)
