"""One process over all rounds of a dump."""

from typing import Any, cast

import pytest

from longtake.node_dir import NodeDump
from longtake.stacks.trace import traces

Seen = dict[str, Any]


def _thread(*lines: int, name: str = "MainThread") -> Seen:
    frames = [{"function": f"f{line}", "file": "a.py", "line": line} for line in lines]
    return {"name": name, "is_active": True, "has_gil": False, "frames": frames}


def _heart(**fields: Any) -> Seen:
    standard = {"phase": "forward", "step": 5, "steps_done": 5, "detail": "", "seconds": 1.0}
    return {**standard, **fields}


def _process(pid: int = 7, *threads: Seen, **fields: Any) -> Seen:
    standard = {"pid": pid, "role": "rank", "rank": 0, "state": "S", "cpu_seconds": 2.0}
    return {**standard, "threads": list(threads), "heart": None, **fields}


def _dump(*rounds: list[Seen], host: str = "here") -> NodeDump:
    seen = [{"seconds": 1.5 * number, "processes": each} for number, each in enumerate(rounds)]
    return cast("NodeDump", {"host": host, "rounds": seen})


def test_a_process_is_followed_through_the_rounds() -> None:
    """By its number and node; one that came later or went earlier is seen in fewer."""
    first = _dump([_process(7), _process(8)], [_process(7)], host="first")
    found = traces([first, _dump([_process(7)], host="second")])
    assert [(each.host, each.pid, each.seconds) for each in found] == [
        ("first", 7, (0.0, 1.5)),
        ("first", 8, (0.0,)),
        ("second", 7, (0.0,)),
    ]


def test_a_stack_that_changes_has_moved() -> None:
    """Of the main thread; what stays is counted from the outermost call."""
    rounds = [[_process(7, _thread(3, 2, 1))], [_process(7, _thread(4, 2, 1))]]
    [found] = traces([_dump(*rounds)])
    assert found.has_moved
    assert found.stack == (("f4", "a.py", 4), ("f2", "a.py", 2), ("f1", "a.py", 1))
    assert found.unmoved == found.stack[1:]


@pytest.mark.parametrize(
    "later",
    [
        {"phase": "backward"},
        {"step": 6},
        {"steps_done": 6},
        {"detail": "another clip"},
        {"seconds": 0.2},
    ],
)
def test_a_heart_that_went_on_has_moved(later: Seen) -> None:
    """Though it is in the same place again: in another phase, step or clip, or in it anew."""
    still = _process(7, _thread(1), heart=_heart())
    waits = _process(7, _thread(1), heart=_heart(seconds=2.5))
    went_on = _process(7, _thread(1), heart=_heart(**{"seconds": 2.5, **later}))
    assert [each.has_moved for each in traces([_dump([still], [waits])])] == [False]
    assert [each.has_moved for each in traces([_dump([still], [went_on])])] == [True]


def test_a_round_without_stacks_says_nothing() -> None:
    """The last one that was read counts, and its heart."""
    read = _process(7, _thread(2, 1), _thread(9, name="decoding"), heart=_heart())
    [found] = traces([_dump([read], [_process(7, heart=_heart(seconds=2.0))])])
    assert found.stack == (("f2", "a.py", 2), ("f1", "a.py", 1))
    assert not found.has_moved
    assert found.stacks_of("decoding") == [(("f9", "a.py", 9),)]
    [unread] = traces([_dump([_process(7)], [_process(7)])])
    assert (unread.stack, unread.unmoved, unread.has_moved) == ((), (), False)


def test_processor_time_is_a_share_of_the_time_between_rounds() -> None:
    """1.0: one processor; nothing can be said of one round."""
    rounds = [[_process(7, cpu_seconds=seconds)] for seconds in (2.0, 3.0, 5.0)]
    assert [each.cpu_share for each in traces([_dump(*rounds)])] == [1.0]
    assert [each.cpu_share for each in traces([_dump(rounds[0])])] == [0.0]
