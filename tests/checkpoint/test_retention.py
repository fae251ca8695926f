"""What is kept is what somebody may need."""

from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from longtake.checkpoint.retention import doomed


@pytest.mark.parametrize(
    ("rules", "gone"),
    [
        ({"keep": 2}, [100, 200, 300, 400]),
        ({"keep": 2, "keep_every": 200}, [100, 300]),
        ({"keep": 2, "needed": {300, 999}}, [100, 200, 400]),
        # At least 250 before 600 is 300; when 600 has become 700, 400 would take its place.
        ({"keep": 1, "reach": 250}, [100, 200, 500]),
        ({"keep": 1, "reach": 600}, [200, 300, 400, 500]),
        ({"keep": 9}, []),
    ],
)
def test_each_rule_keeps_its_own(rules: dict[str, object], gone: list[int]) -> None:
    """The newest, every so many, what is held, and what a rollback would go to."""
    given: dict[str, object] = {"keep_every": None, "needed": (), "reach": 0} | rules
    assert doomed(range(100, 601, 100), **given) == gone  # type: ignore[arg-type]


_STEPS = st.sets(st.integers(0, 5000), max_size=40)


@given(_STEPS, st.integers(1, 6), st.none() | st.integers(1, 700), _STEPS, st.integers(0, 2000))
def test_nothing_that_is_needed_goes(
    steps: set[int], keep: int, keep_every: int | None, held: set[int], reach: int
) -> None:
    """Whatever there is and in whatever order: no rule is broken, and nothing new comes up."""
    gone = doomed(steps, keep=keep, keep_every=keep_every, needed=held, reach=reach)
    kept = steps - set(gone)
    assert gone == sorted(set(gone) & steps)
    assert kept >= set(sorted(steps)[-keep:])
    assert kept >= steps & held
    assert keep_every is None or all(step % keep_every for step in gone)
    old = [step for step in steps if step <= max(steps) - reach]
    assert not (reach and old) or max(old) in kept


@given(
    st.lists(st.integers(1, 100), min_size=1, max_size=120), st.integers(1, 3), st.integers(1, 500)
)
def test_a_run_can_always_go_back_far_enough_and_not_much_further(
    gaps: list[int], keep: int, reach: int
) -> None:
    """However often it saves and how few it keeps: there is one of between one and two reaches."""
    kept: list[int] = []
    saved = list(accumulate(gaps))
    for step in saved:
        kept.append(step)
        gone = doomed(kept, keep=keep, keep_every=None, needed=(), reach=reach)
        kept = [each for each in kept if each not in gone]
        assert len(kept) <= keep + 2
        if step - saved[0] >= reach:
            targets = [step - each for each in kept if step - each >= reach]
            assert min(targets) < 2 * reach + max(gaps)
