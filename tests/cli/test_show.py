"""The verb `show`: a run at a glance, and the steps around one."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

Call = Callable[..., tuple[int, str, str]]


def test_a_run_is_shown(place: Path, call: Call) -> None:
    code, out, err = call("show", place / "run")
    assert (code, err) == (0, "")
    assert out.startswith(f"{place}/run: tubelet, step 2 of 2, finished")
    code, out, err = call("show", place / "run", "--json")
    assert (code, err) == (0, "")
    facts = json.loads(out)
    assert (facts["steps"], facts["state"], facts["rollbacks"]) == (2, "finished", [])
    assert [each["step"] for each in facts["checkpoints"]] == [2]
    assert facts["next"][0]["command"].startswith(f"longtake sample {place}/run")


def test_the_steps_around_one_are_shown(place: Path, call: Call) -> None:
    code, out, err = call("show", place / "run", "--around", "2", "--span", "1")
    assert (code, err) == (0, "")
    assert "The clips of step 2, batch 1, by the ledger" in out
    code, out, _ = call("show", place / "run", "--around", "2", "--json")
    facts = json.loads(out)
    assert [row["step"] for row in facts["rows"]] == [1, 2]
    assert facts["report"] is None
    assert all(Path(each["path"]).is_file() for each in facts["clips"]["samples"])
    assert len(facts["clips"]["samples"]) == 4


@pytest.mark.parametrize("around", [(), ("--around", "1")])
def test_a_picture_is_drawn(
    place: Path, tmp_path: Path, call: Call, around: tuple[str, ...]
) -> None:
    out = tmp_path / "curves.png"
    code, _, err = call("show", place / "run", *around, "--out", out)
    assert (code, err) == (0, f"wrote {out}\n")
    assert out.read_bytes().startswith(b"\x89PNG")
    code, printed, _ = call("show", place / "run", *around, "--out", out, "--json")
    assert json.loads(printed)["picture"] == str(out)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("empty",), "is not a run directory"),
        (("nowhere",), "is not a run directory"),
        (("run", "--around", "3"), "has done 2 steps so far, and none is known of step 3"),
        (("run", "--out", "/nowhere/x.png"), "/nowhere/x.png cannot be written"),
    ],
)
def test_bad_input_is_one_message(
    place: Path, call: Call, arguments: tuple[str, ...], message: str
) -> None:
    code, out, err = call("show", place / arguments[0], *arguments[1:])
    assert (code, out) == (2, "")
    assert err.startswith("longtake: ")
    assert message in err
