"""Servers that are killed and replaced lose nothing, do nothing twice, and read nothing half."""

import random
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from itertools import chain
from typing import Any

import pytest
from tests.build import wait_until
from tests.evaluation.build import MakeRun, save, steps_in
from tests.evaluation.probe import read_weights

from longtake.checkpoint import files
from longtake.config import CheckpointSection, EvaluationSection
from longtake.evaluation_dir import EvaluationDirectory, all_servers
from longtake.lease import history
from longtake.node_dir import read_events
from longtake.run_dir import RunDirectory

_STEPS = range(10, 510, 10)
_TRAINED = range(10, 130, 10)
_LIMIT = 90.0
_KILLS = 10


class _Sync(threading.Thread):
    """Copies checkpoints file by file, in any order, a piece at a time.

    Some files are given their size before their content.
    """

    def __init__(self, origin: RunDirectory, run: RunDirectory, chance: random.Random) -> None:
        super().__init__(daemon=True)
        self._origin, self._run, self._chance = origin, run, chance
        self.whole: dict[int, float] = {}

    def run(self) -> None:
        waiting = list(_STEPS)
        under_way: list[tuple[int, Iterator[bool]]] = []
        while waiting or under_way:
            while waiting and len(under_way) < 3:
                step = waiting.pop(0)
                under_way.append((step, self._pieces(step)))
            step, pieces = self._chance.choice(under_way)
            if next(pieces, None) is None:
                under_way = [each for each in under_way if each[0] != step]
                self.whole[step] = time.time()
            time.sleep(self._chance.expovariate(1 / 0.004))

    def _pieces(self, step: int) -> Iterator[bool]:
        there, here = self._origin.checkpoint_path(step), self._run.checkpoint_path(step)
        files = [path for path in there.rglob("*") if path.is_file()]
        self._chance.shuffle(files)
        for file in files:
            place, content = here / file.relative_to(there), file.read_bytes()
            place.parent.mkdir(parents=True, exist_ok=True)
            first = self._chance.random() < 0.3
            place.write_bytes(bytes(len(content)) if first else b"")
            yield True
            half = len(content) // 2
            with place.open("r+b") as copy:
                copy.write(content[:half])
                copy.flush()
                yield True
                copy.write(content[half:])
            yield True


class _Retention(threading.Thread):
    def __init__(self, run: RunDirectory, sync: _Sync, chance: random.Random) -> None:
        super().__init__(daemon=True)
        self._of, self._sync, self._chance = run, sync, chance
        self.deleted: set[int] = set()
        self.refused: set[int] = set()
        self.is_over = threading.Event()

    def run(self) -> None:
        while not self.is_over.wait(0.05):
            done = EvaluationDirectory(self._of).steps("probe")
            for step in set(self._sync.whole) - self.deleted:
                self._thin_out(step, evaluated=step in done)

    def _thin_out(self, step: int, *, evaluated: bool) -> None:
        if (evaluated and self._chance.random() < 0.1) or self._is_needed_since_whole(step):
            gone = files.delete_unless_needed(self._of, step)
            (self.deleted if gone else self.refused).add(step)
        elif not evaluated and step % 20 == 0 and self._chance.random() < 0.02:
            path = self._of.checkpoint_path(step)
            files.hide(path).rename(path)

    def _is_needed_since_whole(self, step: int) -> bool:
        times = []
        for server in all_servers(self._of) if step % 20 == 10 else ():
            with suppress(OSError):
                written = server.heartbeat_path.stat().st_mtime
                heartbeat = server.read_heartbeat()
                times += [written] if heartbeat and step in heartbeat["needs"] else []
        return any(each > self._sync.whole[step] + 0.05 for each in times)


class _Trainer(threading.Thread):
    """Saves as a training does, whole at once, and keeps two: by its own rules, after each save.

    It saves as soon as a server has looked, but for what would be beyond the limit.
    """

    def __init__(self, run: RunDirectory) -> None:
        super().__init__(daemon=True)
        self._of = run
        self.spared: set[int] = set()

    def run(self) -> None:
        directory, section = EvaluationDirectory(self._of), CheckpointSection(keep=2)
        for step in _TRAINED:
            wait_until(lambda: len(self._waiting()) <= EvaluationSection().hold_waiting, _LIMIT)
            aside = save(RunDirectory(self._of.path / "aside"), step)
            aside.rename(self._of.checkpoint_path(step))
            wait_until(lambda step=step: self._is_seen(step), _LIMIT)  # type: ignore[misc]
            files.prune(self._of, step, step - 10, section, reach=0)
            begun = {path.name[:13] for path in (directory.path / "claims/probe").glob("*")}
            old = self._of.checkpoint_steps()[:-2]
            self.spared |= {each for each in old if f"step_{each:08d}" not in begun}

    def _waiting(self) -> set[int]:
        return {*self._of.checkpoint_steps()} - {*EvaluationDirectory(self._of).steps("probe")}

    def _is_seen(self, step: int) -> bool:
        return step in files.needed_steps(self._of) or step not in self._waiting()


@pytest.mark.drill
@pytest.mark.slow
def test_fifty_checkpoints_three_servers_and_kills_at_random(
    make_run: MakeRun, probing: Any
) -> None:
    """None is lost, none is done twice, no half one is read; nothing is left lying about.

    Beside those that are synced, the same servers serve a training that keeps its newest two.
    """
    chance = random.Random(7)  # noqa: S311 - no secret
    origin, run, trained = make_run("origin"), make_run("runs/synced"), make_run("runs/trained")
    for step in _STEPS:
        save(origin, step, content=bytes([step % 251]) * chance.randrange(100, 20_000))
    sync = _Sync(origin, run, chance)
    retention = _Retention(run, sync, random.Random(8))  # noqa: S311
    trainer = _Trainer(trained)
    directory, kills = EvaluationDirectory(run), 0
    with ExitStack() as stack:

        def start() -> "subprocess.Popen[bytes]":
            process: subprocess.Popen[bytes] = stack.enter_context(
                probing(RunDirectory(run.path.parent), "--seconds", "0.1", "--attempts", "1000")
            )
            return process

        servers = [start() for _ in range(3)]
        sync.start()
        retention.start()
        trainer.start()
        limit = time.monotonic() + _LIMIT
        while _num_done(run, trained) < len(_STEPS) + len(_TRAINED) and time.monotonic() < limit:
            time.sleep(chance.uniform(0.2, 0.8))
            begun = _that_have_begun((run, trained), servers)
            if begun and kills < _KILLS:
                victim = chance.choice(begun)
                victim.kill()
                servers[servers.index(victim)] = start()
                kills += 1
        retention.is_over.set()
        # The others might not know SIGTERM yet.
        for server in _that_have_begun((run, trained), servers):
            server.terminate()
            assert server.wait(30) == 0
        retention.join()
        trainer.join(_LIMIT)

    assert EvaluationDirectory(trained).steps("probe") == list(_TRAINED), "deleted before its turn"
    assert trainer.spared, "nothing ever had to wait"
    assert not steps_in(trained, "evaluation_missed")
    for each in (run, trained):
        evaluated = steps_in(each, "evaluation_finished")
        assert len(evaluated) == len(set(evaluated)), "done twice"
    assert directory.steps("probe") == list(_STEPS), "lost"
    for step in _STEPS:
        scores = directory.scores("probe", step)
        assert scores is not None
        read = read_weights(origin.checkpoint_path(step), scores["weights"])
        assert scores["videos"][0]["prompt"] == read
        folder = directory.result_path("probe", step)
        assert (folder / "00_s0.mp4").read_text() == read
    leases = [history(path) for path in (directory.path / "claims" / "probe").iterdir()]
    assert all([r["ended"] for r in each].count("done") <= 1 for each in leases)
    assert len(leases) == len(_STEPS)
    assert not list(directory.path.glob("*/superseded"))
    assert not list(directory.path.glob("*/.step_*")), "left half"
    assert kills == _KILLS
    assert steps_in(run, "evaluation_lost"), "no server was killed while it worked"
    assert retention.refused, "no need was ever respected"
    assert retention.deleted


def _num_done(*runs: RunDirectory) -> int:
    return sum(len(EvaluationDirectory(run).steps("probe")) for run in runs)


def _that_have_begun(
    runs: Sequence[RunDirectory], servers: list["subprocess.Popen[bytes]"]
) -> list["subprocess.Popen[bytes]"]:
    events = chain.from_iterable(map(read_events, runs))
    active = {event["server"] for event in events if event["event"] == "evaluation_started"}
    return [each for each in servers if any(name.endswith(f"-{each.pid}") for name in active)]
