"""A run that was killed in mid-epoch goes on with another catalog: what must hold then."""

from typing import Literal

import numpy as np

from longtake.data.catalog import Catalog
from longtake.data.change import compare
from longtake.drill.ground import Ground
from longtake.drill.looking import Sighting
from longtake.drill.place import STEPS, Place
from longtake.drill.verdict import Verdict, identities_of, seen_before


def go_on(
    fault: str,
    place: Place,
    old: Catalog,
    policy: Literal["merge", "finish"],
    ground: Ground,
) -> Verdict:
    """Resume with `data.on_change` and judge; `old` is the catalog that the run began with.

    Raises:
        RunError: the training process ended with an error.
    """
    with place.launch(f"data.on_change={policy}") as launch:
        found = launch.find("data_changed", policy=policy)
        launch.finish()
    return judge(fault, place, old, policy, found, launch.began, ground.undisturbed)


def judge(
    fault: str,
    place: Place,
    old: Catalog,
    policy: Literal["merge", "finish"],
    found: Sighting | None,
    began: float,
    undisturbed: Place,
) -> Verdict:
    """Hold a run whose data changed against what the policy promises.

    `merge`: epoch 0 is what it had seen and what of the new catalog it had not. `finish`: epoch 0
    is the old catalog. Either way, each epoch after it is the new catalog, and the steps before
    the change are the undisturbed run's.
    """
    verdict = Verdict(fault)
    new = identities_of(place.catalog())
    step = found.event["step"] if found else 0
    first = identities_of(old)
    if policy == "merge":
        first = np.union1d(seen_before(place.run, step), new)
    verdict.must(found is not None, f"no event says that the data changed ({policy})")
    verdict.must(0 < step < STEPS, f"the change was to meet the run in mid-epoch, not at {step}")
    if found:
        verdict.detected_seconds = found.at - began
    verdict.must_be_exact(place.run, first, new)
    verdict.must_be_equal(place.run, undisturbed.run, until=step)
    return verdict


def sentence(place: Place, old: Catalog, policy: str, verdict: Verdict) -> str:
    """What happened, for people."""
    changed, tally = compare(old, place.catalog()), verdict.tally
    assert tally is not None
    return (
        f"With {changed.added} clips added and {changed.removed} removed it went on by {policy}: "
        f"{tally.repeated} samples repeated, {tally.missing} missing; the steps before are the "
        "undisturbed run's to the bit."
    )
