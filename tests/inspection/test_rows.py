"""Rows of metrics, the abandoned ones told from those that count."""

from longtake.inspection.rows import passes, read_rows
from longtake.run_dir import RunDirectory


def test_what_counts_is_what_the_run_says_counts(told: RunDirectory) -> None:
    """Rows that are not abandoned are the run's metrics, one for each step."""
    rows = read_rows(told)
    assert [row.metrics for row in rows if not row.is_abandoned] == told.metrics()
    assert [row.step for row in rows if row.is_abandoned] == list(range(13, 21))
    assert [row.step for row in rows] == [*range(1, 21), *range(13, 25)]


def test_each_time_that_the_run_went_forward_is_a_pass(told: RunDirectory) -> None:
    """It went back once."""
    spans = [(mine[0].step, mine[-1].step) for mine in passes(read_rows(told))]
    assert spans == [(1, 20), (13, 24)]
    assert passes([]) == []


def test_a_rollback_abandons_rows_though_none_follow(killed: RunDirectory) -> None:
    """The run was killed right after it."""
    rows = read_rows(killed)
    assert [row.step for row in rows if row.is_abandoned] == list(range(13, 21))


def test_a_step_that_was_given_up_once_counts_when_it_is_done_again(told: RunDirectory) -> None:
    """Whatever the clock said then, and though it was the last step before the rollback."""
    lines = told.metrics_path.read_text().splitlines(keepends=True)
    told.metrics_path.write_text("".join(lines[:28]))  # up to step 20 of the second pass
    rows = read_rows(told)
    assert [row.step for row in rows if not row.is_abandoned] == list(range(1, 21))


def test_batches_are_known_of_older_runs_too(told: RunDirectory) -> None:
    """Which did not write them down, and skipped none."""
    rows = read_rows(told)
    assert [row.batch for row in rows[-3:]] == [30, 31, 32]
    del rows[3].metrics["batch"]
    assert rows[3].batch == 3
