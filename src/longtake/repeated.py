"""Something that is done again and again while something else goes on."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def repeated(
    name: str, work: Callable[[], object], seconds: float, *, rest: float = 0.0
) -> Iterator[None]:
    """Do something every so often, in a thread of its own, until the block ends.

    The block's end waits for work that is being done. What it raises ends the repetition.

    Args:
        name: of the thread.
        work: what is done, first after `seconds`.
        seconds: between two times.
        rest: pauses are so many times as long as the work has last taken, if that is longer.
    """
    is_over = threading.Event()

    def repeat() -> None:
        pause = seconds
        while not is_over.wait(pause):
            begun = time.monotonic()
            work()
            pause = max(seconds, rest * (time.monotonic() - begun))

    thread = threading.Thread(target=repeat, name=name, daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()
