"""Other users of the node, and of the run directory: they cannot misuse what watches a run."""

import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from longtake.checkpoint.files import delete
from longtake.errors import RunError
from longtake.evaluation_dir import ServerDirectory
from longtake.fsio import append_json, atomic_write, now, write_json
from longtake.heartbeat import HeartbeatWriter, make_private_dir, page_path, read_heartbeats
from longtake.monitor.coordinator import RequestQueue
from longtake.monitor.dumps import prune_dumps, prune_requests
from longtake.monitor.watcher import WatcherLock
from longtake.node_dir import NodeDirectory, request_path, this_node
from longtake.run_dir import RunDirectory
from longtake.stacks import enable_stack_dumps, stack_file

_OTHER = 2001
_needs_root = pytest.mark.skipif(os.getuid() != 0, reason="another user is played by root only")


def _as_other(work: Callable[[], None]) -> None:
    pid = os.fork()
    if pid == 0:
        try:
            os.setgroups([])
            os.setgid(_OTHER)
            os.setuid(_OTHER)
            work()
        except BaseException:
            os._exit(1)
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0


@pytest.fixture
def shared() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="shared-"))
    folder.chmod(0o1777)
    yield folder
    shutil.rmtree(folder)


@_needs_root
@pytest.mark.parametrize("made", ["longtake-0", "longtake-0/host-run"])
def test_a_folder_that_another_user_made_is_refused(made: str, shared: Path) -> None:
    folder = shared / "longtake-0" / "host-run"
    if made != "longtake-0":
        (shared / "longtake-0").mkdir()
        (shared / "longtake-0").chmod(0o777)
    _as_other(lambda: (shared / made).mkdir(mode=0o777))
    with pytest.raises(RunError, match=f"{shared / made} belongs to user {_OTHER}, expected"):
        make_private_dir(folder)
    with pytest.raises(RunError, match="belongs to user"):
        WatcherLock(folder).acquire()
    HeartbeatWriter(folder, "rank").set_phase("forward")
    assert not list(shared.rglob("rank_*"))


@_needs_root
def test_the_heart_of_another_user_is_not_read(shared: Path) -> None:
    """Its processes would be killed by name of this user's watcher."""
    ours = HeartbeatWriter(shared / "hearts", "rank", rank=0)
    (shared / "hearts").chmod(0o777)

    def forge() -> None:
        forged = page_path(shared / "hearts", "rank", 1, 1)
        forged.write_bytes(ours.path.read_bytes())

    ours.path.chmod(0o644)
    _as_other(forge)
    assert [pulse.rank for pulse in read_heartbeats(shared / "hearts")] == [0]
    assert len(list((shared / "hearts").iterdir())) == 2


def test_links_in_the_folder_of_hearts_are_not_followed(tmp_path: Path) -> None:
    folder, victim = tmp_path / "hearts", tmp_path / "victim"
    folder.mkdir(mode=0o700)
    victim.write_text("mine")
    heart = page_path(folder, "rank", 0, os.getpid())
    stacks = stack_file(folder, os.getpid())
    for path in (folder / "watcher.lock", heart.with_suffix(".new"), stacks):
        path.symlink_to(victim)
    with pytest.raises(OSError, match="symbolic link"):
        WatcherLock(folder).acquire()
    HeartbeatWriter(folder, "rank").remove()
    enable_stack_dumps(stacks)
    enable_stack_dumps()
    assert victim.read_text() == "mine"


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("asked_1", {}),
        ("asked_1", []),
        ("asked_1", {"token": "../../../victim/config"}),
        ("asked_1", {"token": "asked_2"}),
        ("asked_1", {"rounds": 10**9}),
        ("asked_1", {"reason": "stall"}),
        ("asked_1", {"reason": "stall", "stall": {"launch": 1}}),
        ("asked 1;touch x", {"token": "asked 1;touch x"}),
    ],
)
def test_a_bad_request_is_refused_once(name: str, content: object, tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    good = {"time": now(), "by": "gpu1", "reason": "asked", "rounds": 2, "native": False}
    inbox = RequestQueue(NodeDirectory(run, "gpu1"))
    assert inbox.look("") == []
    request_path(run, "x").parent.mkdir()
    bad = {"token": name, **good, **content} if isinstance(content, dict) and content else content
    request_path(run, name).write_text(json.dumps(bad))
    write_json(request_path(run, "asked_good"), {"token": "asked_good", **good})
    assert [each["token"] for each in inbox.look("")] == ["asked_good"]
    [reason] = inbox.take_refused()
    assert str(request_path(run, name)) in reason
    assert [each["token"] for each in inbox.look("")] == ["asked_good"]
    assert inbox.take_refused() == []


def test_what_is_written_aside_never_goes_through_a_link(tmp_path: Path) -> None:
    victim = tmp_path / "thesis"
    victim.write_text("mine")
    node = this_node(RunDirectory(tmp_path / "run"))
    node.path.mkdir(parents=True)
    (node.path / ".heartbeat.partial.json").symlink_to(victim)
    node.write_heartbeat({"beat": 1})
    assert node.read_heartbeat() == {"beat": 1}
    node.events_path.symlink_to(victim)
    with pytest.raises(OSError, match="symbolic link"):
        append_json(node.events_path, {"event": "x"})

    def be_swapped() -> None:
        with atomic_write(tmp_path / "out") as aside:
            aside.symlink_to(victim)

    with pytest.raises(OSError, match="symbolic link"):
        be_swapped()
    assert victim.read_text() == "mine"


def test_nothing_is_deleted_behind_a_link(tmp_path: Path) -> None:
    """Not a dead server's heartbeat, nor old requests and answers; a link blocks no deletion."""
    run, old = RunDirectory(tmp_path / "run"), time.time() - 10**6
    victims = tmp_path / "victims"
    victims.mkdir()
    for number in range(60):
        for name in (f"asked_{number}.json", f"thesis_{number}.json"):
            (victims / name).write_text("{}")
            os.utime(victims / name, (old + number, old + number))
    (victims / "new.json").write_text("{}")
    checkpoint = run.checkpoint_path(10)
    checkpoint.mkdir(parents=True)
    (checkpoint / "COMMITTED").touch()
    (victims / "heartbeat.json").write_text("{}")
    server = ServerDirectory(run, "dead")
    server.path.parent.mkdir(parents=True)
    server.path.symlink_to(victims)
    request_path(run, "x").parent.symlink_to(victims)
    node = NodeDirectory(run, "gpu1")
    node.path.mkdir(parents=True)
    node.dump_path("x").parent.symlink_to(victims)
    before = sorted(victims.iterdir())
    server.remove_heartbeat()
    prune_requests(run, "")
    prune_dumps(node)
    checkpoint.with_name(f".{checkpoint.name}.deleted").symlink_to(victims)
    delete([checkpoint])
    assert sorted(victims.iterdir()) == before
    assert list(run.checkpoints_path.iterdir()) == []
