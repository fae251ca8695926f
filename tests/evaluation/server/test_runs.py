"""Whether a run has ended is known from its events, which are read once."""

import json
from pathlib import Path

from longtake.evaluation.server.runs import is_over
from longtake.run_dir import RunDirectory


def _line(kind: str) -> str:
    return json.dumps({"event": kind}) + "\n"


def test_the_newest_beginning_or_ending_counts(tmp_path: Path) -> None:
    """Other events and lines that are no events do not; half a line waits for its rest."""
    run = RunDirectory(tmp_path)
    assert not is_over(run)
    with run.events_path.open("a") as file:
        for text, expected in (
            (_line("launched") + "[1]\n" + "{broken\n", False),
            (_line("finished") + _line("checkpoint"), True),
            (_line("resumed")[:9], True),
            (_line("resumed")[9:], False),
            (_line("diverged"), True),
        ):
            file.write(text)
            file.flush()
            assert is_over(run) == expected


def test_no_line_is_read_twice_and_another_file_is_read_anew(tmp_path: Path) -> None:
    """What was read is spoilt here, which nobody sees; a shorter file begins anew."""
    run = RunDirectory(tmp_path)
    run.events_path.write_text(_line("launched") + _line("finished"))
    assert is_over(run)
    with run.events_path.open("r+") as file:
        file.write(" " * len(_line("launched") + _line("finished")))
    with run.events_path.open("a") as file:
        file.write(_line("checkpoint"))
    assert is_over(run)
    run.events_path.write_text(_line("launched"))
    assert not is_over(run)
    run.events_path.unlink()
    assert not is_over(run)
