from pathlib import Path

from longtake.faults.expect import Evidence
from longtake.faults.faulty_processes import CLOCK_FILE
from longtake.faults.nodes import expect_clock_event, expect_disk_error, expect_slow_rank
from longtake.faults.sandbox import ObservedEvent, TrainingSite
from longtake.fsio import write_json
from longtake.node_dir import this_node


def test_a_slow_rank_must_be_named_with_how_slow_it_is() -> None:
    good, bad = Evidence(), Evidence()
    expect_slow_rank(good, ObservedEvent({"rank": 1, "percent": 12.1}, 9.0), 1.0, 0.1)
    assert good.complaints == []
    expect_slow_rank(bad, ObservedEvent({"rank": 0, "percent": 4.0}, 99.0), 1.0, 0.1)
    assert bad.complaints == [
        "it was reported after 98.0 s, not within 45",
        "rank 0 is said to be slow, and rank 1 is",
        "it is said to take 4.0% longer, and takes 10% longer",
    ]


def test_a_clock_event_must_be_the_only_one(tmp_path: Path) -> None:
    """Tiny steps of the machine's own clock are left out."""
    site, good, bad = TrainingSite(tmp_path), Evidence(), Evidence()
    write_json(site.folder / CLOCK_FILE, {"at": 1.0})
    found, node = ObservedEvent({"message": "Set."}, 2.0), this_node(site.run)
    node.append_event("clock_stepped", seconds=1e-9)
    node.append_event("clock_slewed", ppm=500.0)
    expect_clock_event(good, site, found, "clock_slewed", within=3.0)
    assert (good.complaints, good.detected_seconds) == ([], 1.0)
    node.append_event("clock_slewed", ppm=500.0)
    node.append_event("stalled", token="t")
    expect_clock_event(bad, site, ObservedEvent({"message": ""}, 9.0), "clock_slewed", within=3.0)
    assert bad.complaints == [
        "it was reported after 8.0 s, not within 3",
        "events of what did not happen: stalled",
        "it was reported 2 times",
    ]


def test_a_full_disk_must_be_named(trained: TrainingSite) -> None:
    good, bad = Evidence(), Evidence()
    output = "The run directory run cannot\nbe written: File too large."
    expect_disk_error(good, trained, 2, output)
    assert good.complaints == []
    expect_disk_error(bad, trained, 1, "Traceback (most recent call last)")
    assert bad.complaints == [
        "without room it ended with exit code 1, not 2",
        "the output does not say 'cannot be written'",
        "it ended with a traceback",
    ]
