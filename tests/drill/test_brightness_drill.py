"""The drill of the quiet bug: videos that get brighter while the loss stays what it is."""

from collections.abc import Callable
from pathlib import Path

import pytest

from longtake.drill.brighten import brighten
from longtake.drill.faults import brightness_drift
from longtake.drill.ground import Ground
from longtake.drill.place import Place
from longtake.drill.run import drill
from longtake.drill.verdict import Verdict
from longtake.evaluation.sampling.studio import load_sampler


def test_brighter_checkpoints_are_whole_and_only_their_averages_differ(place: Place) -> None:
    """Weights, of which losses are, stay what they are to the bit."""
    (last,) = place.run.checkpoint_steps()[-1:]
    steps = brighten(place.run, times=4, brighter=0.03, apart=5)
    assert steps == [last + 5, last + 10, last + 15, last + 20]
    for ema, differs in ((False, False), (True, True)):
        models = [
            load_sampler(place.run.path, step=step, ema=ema, device="cpu").components.model
            for step in (last, steps[-1])
        ]
        states = [model.state_dict() for model in models]
        changed = {name for name in states[0] if not states[0][name].equal(states[1][name])}
        assert changed == ({"tube_out.bias"} if differs else set())


@pytest.mark.parametrize(
    ("early", "late", "complaint"),
    [
        ([], ["brightness of drill rose 4 checkpoints in a row, +9 %."], None),
        ([], [], "no alarm was given at step 30, where brightness was [100.0, 100.0, 100.0]"),
        (["brightness of drill fell"], ["brightness of drill rose 4"], "an alarm was given before"),
    ],
)
def test_an_alarm_is_demanded_at_the_end_and_none_before(
    place: Place,
    add_scores: Callable[..., Path],
    early: list[str],
    late: list[str],
    complaint: str | None,
) -> None:
    """By what scores.json says."""
    for step, messages in ((10, early), (20, []), (30, late)):
        drifts = [{"measure": "brightness", "kind": "drift", "message": each} for each in messages]
        alarms = [*drifts, {"measure": "motion", "kind": "drift", "message": "another"}]
        add_scores(place.run, "drill", step, alarms=alarms)
    verdict = Verdict("brightness-drift")
    brightness_drift.judge(verdict, place.run, [10], [20, 30])
    if complaint is None:
        assert verdict.complaints == []
    else:
        assert verdict.complaints[0].startswith(complaint)


@pytest.mark.slow
@pytest.mark.usefixtures("started_warm")
def test_the_drill_passes(ground: Ground) -> None:
    """With a real run and a real evaluator."""
    result = drill(brightness_drift.FAULT, ground)
    assert result.passed, result.message
    assert "brightness of drill rose" in result.message
