"""Something that is done again and again while something else goes on."""

import threading
import time

from longtake.repeated import repeated


def test_it_is_done_until_the_block_ends() -> None:
    """And not once more after that."""
    twice, done = threading.Event(), []

    def work() -> None:
        done.append(threading.current_thread().name)
        if len(done) >= 2:
            twice.set()

    with repeated("mine", work, 0.001):
        assert twice.wait(30)
    count = len(done)
    time.sleep(0.02)
    assert len(done) == count
    assert set(done) == {"mine"}


def test_it_is_not_done_at_once() -> None:
    """The first time is after a pause; a block that ends before sees none."""
    done: list[int] = []
    with repeated("mine", lambda: done.append(1), 60.0):
        pass
    assert done == []


def test_slow_work_leaves_time_for_others() -> None:
    """Pauses grow with what the work takes: of each two in a row, as many times that long."""
    begun: list[float] = []
    ended: list[float] = []
    enough = threading.Event()

    def work() -> None:
        begun.append(time.monotonic())
        time.sleep(0.02)
        ended.append(time.monotonic())
        if len(ended) == 3:
            enough.set()

    with repeated("mine", work, 0.001, rest=3.0):
        assert enough.wait(30)
    assert all(begun[n + 1] - ended[n] >= 0.06 for n in range(2))
