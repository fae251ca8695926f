"""What is alerted to, and what is only written down."""

import time
from typing import Any

import pytest

from longtake.watch.disk import Disk
from longtake.watch.post import Post
from longtake.watch.report import Reporter


def _stalled(token: str, **changes: Any) -> dict[str, Any]:
    suspect = {"host": "node", "pid": 7, "file": "decode.py", "line": 88, "seconds": 9.0}
    return {"token": token, "sentence": "", "suspects": [{**suspect, **changes}]}


def test_the_same_culprit_at_the_same_place_is_alerted_to_once(
    stage: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In ten minutes; so is that it went on. All of it is written down."""
    section = stage.section.model_copy(update={"hook": f"cat >> {stage.path}/alerts"})
    post = Post(stage.run, section, "node", stage.folder())
    disk = Disk(post.node)
    reporter, now = Reporter(post, disk), [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    for at, token, changes in (
        (1000.0, "first", {}),
        (1300.0, "again", {"seconds": 12.0}),
        (1301.0, "elsewhere", {"line": 89}),
        (1599.0, "still", {}),
        (1601.0, "later", {}),
    ):
        now[0] = at
        reporter.tell("stalled", **_stalled(token, **changes))
        reporter.tell("went_on", token=token)
    for _ in range(2):
        reporter.tell("stalled", **{**_stalled("nobody"), "suspects": []})
    monkeypatch.undo()
    reporter.close(10.0)
    disk.close(10.0)
    told = ["first", "elsewhere", "later"]
    assert [each["token"] for each in stage.alerts("stalled")] == [*told, "nobody", "nobody"]
    assert [each["token"] for each in stage.alerts("went_on")] == told
    assert len(stage.events("stalled")) == 7
    assert len(stage.events("went_on")) == 5
