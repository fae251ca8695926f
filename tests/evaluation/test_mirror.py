"""Runs are mirrored whole, and get their results back, whichever way they are reached."""

import json
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from tests.build import wait_until
from tests.evaluation.build import MakeRun, Trainer, at_10, save, serve, steps_in, steps_of, write

from longtake.checkpoint.files import STALE_SECONDS, needed_steps
from longtake.errors import RunError
from longtake.evaluation.mirror import (
    Mirror,
    MirrorFolder,
    RemoteRun,
    needed_at_source,
    open_mirror,
)
from longtake.evaluation.transports import Rsync, Rules, parse_address
from longtake.evaluation_dir import ServerDirectory
from longtake.fsio import append_json, write_json
from longtake.run_dir import RunDirectory
from longtake.trust import is_mirror


@pytest.fixture
def mirror(tmp_path: Path) -> Path:
    return tmp_path / "mirror"


@pytest.fixture
def place(trainer: Trainer) -> Path:
    """The folder of its run."""
    return trainer.run.path.parent


@pytest.fixture
def source(place: Path, mirror: Path) -> Iterator[Mirror]:
    with closing(open_mirror(str(place), mirror, "vm-1")) as source:
        yield source


@pytest.fixture
def run(source: Mirror) -> RemoteRun:
    (run,) = source.look()
    return run


def test_what_is_small_is_mirrored_and_what_nobody_samples_from_is_not(
    source: Mirror, mirror: Path
) -> None:
    """A look brings components, metrics and recipe; no checkpoint, ledger, dump, tracker, lease."""
    (run,) = source.look()
    assert run.name == "one [a]"
    small = ["components/vae/weights.model", "metrics.jsonl", "recipe.toml"]
    assert files(mirror / "one [a]") == small
    assert run.index.checkpoint_steps() == [1, 2]
    assert is_mirror(run.mirror.path)


def test_a_run_itself_can_be_the_source(place: Path, mirror: Path) -> None:
    with closing(open_mirror(f"{place}/one [a]", mirror, "vm-1")) as source:
        (run,) = source.look()
        source.pull(run, [2])
        write_result(run.mirror, 2)
        source.push(run)
    assert RunDirectory(mirror).checkpoint_steps() == [2]
    assert "one [a]/evaluations/demo/step_00000002/scores.json" in files(place)


def test_a_run_that_appears_later_is_found(trainer: Trainer, source: Mirror, place: Path) -> None:
    """The next look has it, and rows that were added since."""
    source.look()
    trainer.log(1)
    Trainer(place / "two").save(5)
    one, two = source.look()
    assert (two.name, two.index.checkpoint_steps()) == ("two", [5])
    assert one.mirror.metrics_path.read_text().count("\n") == 2


def test_checkpoints_come_whole_without_the_optimizer_and_once(
    source: Mirror, run: RemoteRun
) -> None:
    """In the order that is asked for; what is here is not brought again."""
    assert [each.step for each in source.pull(run, [2, 1, 9])] == [2, 1]
    assert run.mirror.checkpoint_steps() == [1, 2]
    names = ["COMMITTED", "model/.metadata", "model/__0_0.distcp", "trainer.json"]
    assert files(run.mirror.checkpoint_path(2)) == names
    assert source.pull(run, [1, 2]) == []


def test_half_a_checkpoint_is_not_shown_until_it_is_whole(trainer: Trainer, source: Mirror) -> None:
    file = trainer.run.checkpoint_path(2) / "model" / "__0_0.distcp"
    file.write_bytes(b"w" * 10)
    (run,) = source.look()
    assert [each.step for each in source.pull(run, [1, 2])] == [1]
    assert run.mirror.checkpoint_steps() == [1]
    file.write_bytes(b"w" * 1000)
    (run,) = source.look()
    assert [each.step for each in source.pull(run, [1, 2])] == [2]


def test_a_checkpoint_that_was_saved_anew_is_brought_anew(
    trainer: Trainer, source: Mirror, run: RemoteRun
) -> None:
    """A run went back and came by again; but not while somebody reads what is here."""
    source.pull(run, [1, 2])
    trainer.save(2, b"n" * 1000)
    (run,) = source.look()
    need(run.mirror, 2)
    weights = run.mirror.checkpoint_path(2) / "model" / "__0_0.distcp"
    assert source.pull(run, [1, 2]) == []
    assert weights.read_bytes() == b"w" * 1000
    need(run.mirror)
    assert [each.step for each in source.pull(run, [1, 2])] == [2]
    assert weights.read_bytes() == b"n" * 1000
    assert files(run.mirror.checkpoints_path / ".pulling") == []


def test_a_source_whose_clock_is_ahead_makes_no_heartbeat_stale(
    trainer: Trainer, source: Mirror
) -> None:
    ahead = time.time() + 10 * STALE_SECONDS
    for step in (1, 2):
        os.utime(trainer.run.checkpoint_path(step) / "COMMITTED", (ahead, ahead))
    (run,) = source.look()
    source.pull(run, [1, 2])
    need(run.mirror, 1)
    assert needed_steps(run.mirror) == {1}
    assert source.prune(run.mirror, []) == []


def test_a_checkpoint_that_is_deleted_meanwhile_leaves_nothing(
    trainer: Trainer, source: Mirror, run: RemoteRun
) -> None:
    remains = run.mirror.checkpoints_path / ".pulling" / "step_00000001" / "model" / "x"
    write(remains, b"")
    gone = trainer.run.checkpoint_path(1)
    gone.rename(gone.with_name(".step_00000001.deleted"))
    assert [each.step for each in source.pull(run, [1, 2])] == [2]
    (run,) = source.look()
    assert run.index.checkpoint_steps() == [2]
    assert files(run.mirror.checkpoints_path / ".pulling") == []


class Watching(Rsync):
    def __init__(self, run: RunDirectory) -> None:
        super().__init__(parse_address(str(run.path.parent)))
        self._run = run
        self.needed: dict[str, set[int]] = {}

    def fetch(self, folder: str, into: Path, rules: Rules, *, exactly: bool = False) -> None:
        """See `Rsync.fetch`."""
        self.needed[folder.rpartition("/")[2]] = needed_steps(self._run)
        super().fetch(folder, into, rules, exactly=exactly)


def test_checkpoints_are_needed_at_the_source_while_they_are_pulled(
    trainer: Trainer, mirror: Path
) -> None:
    transport = Watching(trainer.run)
    folder = MirrorFolder(mirror, parse_address(str(trainer.run.path.parent)))
    with closing(Mirror(transport, folder, "vm-1")) as source:
        source.pull(source.look()[0], [2, 1])
    both = {1, 2}
    assert transport.needed == {"": set(), "step_00000002": both, "step_00000001": both}
    assert needed_steps(trainer.run) == set()


def test_a_pull_writes_the_heartbeat_of_its_own_server_only(
    trainer: Trainer, source: Mirror, run: RemoteRun
) -> None:
    for server in ("vm-1", "vm-2"):
        need(trainer.run, 1, server=server)
    here = ServerDirectory(run.mirror, "vm-1")
    here.write_heartbeat({"server": "vm-1", "time": "2026-01-01", "needs": [7], "beat": 3})
    source.pull(run, [2])
    own, other = (
        json.loads((trainer.run.path / _heartbeat(name)).read_bytes()) for name in ("vm-1", "vm-2")
    )
    assert (own["beat"], own["needs"]) == (3, [])
    assert other["needs"] == [1]


@pytest.mark.skipif(not shutil.which("rsync"), reason="rsync is not installed")
def test_a_heartbeat_is_sent_again_as_long_as_a_pull_lasts(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    run = RemoteRun("run", RunDirectory(tmp_path / "mirror"), RunDirectory(tmp_path / "index"))
    transport, there = Rsync(parse_address(str(tmp_path))), RunDirectory(tmp_path / "run")
    with needed_at_source(transport, run, [7], "vm-1", seconds=0.05):
        path = ServerDirectory(there, "vm-1").heartbeat_path
        first = path.stat().st_mtime_ns
        wait_until(lambda: path.stat().st_mtime_ns > first, 10)
        assert needed_steps(there) == {7}
    assert needed_steps(there) == set()
    transport.close()


def test_results_arrive_whole_at_the_source(
    trainer: Trainer, source: Mirror, run: RemoteRun
) -> None:
    write_result(run.mirror, 1)
    evaluations = run.mirror.path / "evaluations"
    for name in (
        "demo/step_00000002/00_s0.mp4",
        "demo/.step_00000002.vm-1.partial/00_s0.mp4",
        "claims/demo/step_00000001-ab/0.json",
        "servers/vm-1/events.jsonl",
    ):
        write(evaluations / name, b"{}")
    need(run.mirror, 1)
    source.push(run)
    assert [name for name in files(trainer.run.path) if "evaluations" in name] == [
        "evaluations/demo/step_00000001/00_s0.mp4",
        "evaluations/demo/step_00000001/scores.json",
        "evaluations/servers/vm-1/events.jsonl",
        _heartbeat("vm-1"),
    ]
    assert json.loads((trainer.run.path / _heartbeat("vm-1")).read_bytes())["needs"] == []


def test_what_was_pushed_is_not_pushed_again(
    trainer: Trainer, source: Mirror, run: RemoteRun
) -> None:
    first, second = (trainer.run.evaluation_path("demo", step) / "scores.json" for step in (1, 2))
    write_result(run.mirror, 1)
    source.push(run)
    first.unlink()
    source.push(run)
    assert not first.exists()
    write_result(run.mirror, 2)
    source.push(run)
    assert second.is_file()


def test_results_of_others_are_known_here(trainer: Trainer, source: Mirror, run: RemoteRun) -> None:
    for step in (1, 2):
        write_result(trainer.run, step, by="another")
    write(run.mirror.path / "evaluations" / "claims" / "demo" / "step_00000002-ab" / "0", b"{}")
    write_result(run.mirror, 2, by="us")
    source.look()
    result = run.mirror.evaluation_path("demo", 1)
    assert files(result) == ["00_s0.mp4", "scores.json"]
    assert "us" in (run.mirror.evaluation_path("demo", 2) / "scores.json").read_text()


def test_one_server_mirrors_at_a_time(place: Path, source: Mirror, mirror: Path) -> None:
    with closing(open_mirror(str(place), mirror, "vm-2")) as other:
        assert len(source.look()) == 1
        assert other.look() == []
        source.close()
        assert len(other.look()) == 1


def test_what_is_evaluated_is_forgotten_but_for_the_newest(source: Mirror, run: RemoteRun) -> None:
    """Nor is what still waits, or a server needs; it is not pulled again unless it is asked for."""
    source.pull(run, [1, 2])
    assert source.prune(run.mirror, [1]) == []
    need(run.mirror, 1, server="vm-9")
    assert source.prune(run.mirror, []) == []
    need(run.mirror, server="vm-9")
    assert source.prune(run.mirror, []) == [1]
    assert run.mirror.checkpoint_steps() == [2]


def test_a_run_of_ones_own_is_no_mirror(place: Path, tmp_path: Path) -> None:
    for folder, text in ((tmp_path / "runs", str(place)), (tmp_path / "own", str(place))):
        write(folder / "x" / "recipe.toml", b"{}")
        with pytest.raises(RunError, match=r"itself|no mirror"):
            open_mirror(text, folder, "vm-1")


def test_a_mirror_belongs_to_the_first_source_from_which_something_came(
    place: Path, tmp_path: Path
) -> None:
    open_mirror(f"{place}typo", tmp_path / "mirror", "vm-1").close()
    with closing(open_mirror(str(place), tmp_path / "mirror", "vm-1")) as source:
        assert source.look()
    with pytest.raises(RunError, match="choose another folder"):
        open_mirror(f"{place}2", tmp_path / "mirror", "vm-1")


def test_a_source_that_is_not_there_is_told_in_a_sentence_and_tried_again(
    tmp_path: Path, place: Path
) -> None:
    with closing(open_mirror(f"{place}/later", tmp_path / "mirror", "vm-1")) as source:
        with pytest.raises(RunError, match=r"there is no .*later"):
            source.look()
        Trainer(place / "later" / "one")
        assert [run.name for run in source.look()] == ["one"]


def test_what_is_under_way_can_be_ended(source: Mirror) -> None:
    source.interrupt()
    with pytest.raises(RunError, match="interrupted"):
        source.look()


def test_a_mirror_that_cannot_be_written_is_told_in_a_sentence(
    source: Mirror, run: RemoteRun, mirror: Path
) -> None:
    (mirror / ".source" / run.name / ".sent").write_text("")
    with pytest.raises(RunError, match=r"mirror.* cannot be written|could not be copied"):
        source.pull(run, [1])


def files(folder: Path) -> list[str]:
    paths = (path for path in folder.rglob("*") if path.is_file())
    return sorted(str(path.relative_to(folder)) for path in paths)


def write_result(run: RunDirectory, step: int, **scores: str) -> None:
    folder = run.evaluation_path("demo", step)
    write(folder / "00_s0.mp4", b"{}")
    write_json(folder / "scores.json", {"step": step, **scores})


def need(run: RunDirectory, *steps: int, server: str = "vm-1") -> None:
    heartbeat = {"server": server, "time": "2026-01-01", "needs": list(steps)}
    ServerDirectory(run, server).write_heartbeat(heartbeat)


def _heartbeat(server: str) -> str:
    return f"evaluations/servers/{server}/heartbeat.json"


# --- The server's thread ----------------------------------------------------------------------


_FOLLOWING: dict[str, Any] = {"follows": True, "until_finished": True, "every_seconds": 0.2}


@pytest.fixture
def origin(make_run: MakeRun) -> RunDirectory:
    """A run elsewhere, that was launched and has saved two checkpoints."""
    run = make_run("elsewhere/run")
    append_json(run.events_path, {"time": "1", "event": "launched"})
    save(run, 10, 20)
    return run


def test_what_is_wanted_is_brought_here_and_its_results_go_back(
    origin: RunDirectory, mirror: Path
) -> None:
    server = serve(mirror, source=str(origin.path))
    assert [each["step"] for each in server.evaluated] == [10, 20]
    assert steps_of(origin) == [10, 20]
    assert steps_in(RunDirectory(mirror), "checkpoint_synced") == [10, 20]
    assert needed_steps(origin) == set()
    shutil.rmtree(mirror)
    assert serve(mirror, source=str(origin.path)).evaluated == []
    assert RunDirectory(mirror).checkpoint_steps() == []


def test_what_was_brought_here_waits_though_the_source_has_deleted_it(
    origin: RunDirectory, mirror: Path
) -> None:
    """The source is followed until the run has ended."""

    def until_here(step: int) -> None:
        wait_until(lambda: step in RunDirectory(mirror).checkpoint_steps(), 30)

    def delete_and_save() -> None:
        until_here(20)
        shutil.rmtree(origin.checkpoint_path(20))
        for step in (30, 40):  # two more looks at the source
            save(origin, step)
            until_here(step)
        append_json(origin.events_path, {"time": "2", "event": "finished"})

    server = serve(mirror, at_10(delete_and_save), source=str(origin.path), **_FOLLOWING)
    assert [each["step"] for each in server.evaluated] == [10, 20, 30, 40]
    assert steps_of(origin) == [10, 20, 30, 40]
    assert RunDirectory(mirror).checkpoint_steps()[-1:] == [40]
    assert steps_in(RunDirectory(mirror), "evaluation_missed") == []


def test_a_source_that_is_not_there_is_told_of(
    mirror: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert serve(mirror, source=str(tmp_path / "nowhere")).evaluated == []
    assert "nowhere" in capsys.readouterr().out
