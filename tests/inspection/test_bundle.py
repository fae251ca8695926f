"""An archive to ask for help with: complete, without secrets, also of a damaged run."""

import io
import json
import os
import re
import shutil
import tarfile
from pathlib import Path

import pytest

from longtake import config
from longtake.errors import RunError
from longtake.inspection.bundle import Bundle, collect, default_name, write
from longtake.run_dir import RunDirectory
from longtake.trust import TrustError

_PLANTED = (
    *("hf_PLANTEDplantedPLANTED12", "s3cr3t-of-the-hook", "planted-in-the-shell"),
    *("planted_user", "planted-host", "hunter2hunter2", "/home/planted_user", "10.9.8.7"),
)


@pytest.fixture
def run(told: RunDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDirectory:
    """A run with what a bundle must have, and what it must not have."""
    path = tmp_path / "planted-host-run"
    shutil.copytree(told.path, path)
    changes = [
        "out=/home/planted_user/runs/a",
        "watch.hook=curl https://example.org/s3cr3t-of-the-hook",
        'trainable.modules.mine.module="my_planted.adapter:Adapter"',
    ]
    recipe = config.changed(told.recipe(), changes)
    (path / "recipe.toml").write_text(config.dump(recipe))
    node = path / "nodes" / "planted-host"
    for folder in ("stacks", "logs/20260501T120000"):
        (node / folder).mkdir(parents=True)
    (node / "stacks" / "asked_1.json").write_text('{"host": "planted-host", "rounds": []}')
    log = "HF_TOKEN=hf_PLANTEDplantedPLANTED12\npassword: hunter2hunter2\nssh 10.9.8.7\n"
    lines = "Traceback (most recent call last):\nplanted-in-the-shell hunter2hunter2\n"
    for number in range(10):
        (node / "logs" / "20260501T120000" / f"rank_{number:04d}.log").write_text(log + lines)
    (node / "watcher.log").write_text("x" * 100 + "\n" + "a line of the watcher\n" * 100_000)
    (node / "health.jsonl").symlink_to(tmp_path / "outside.txt")
    (tmp_path / "outside.txt").write_text("planted-outside")
    (path / "tracking").mkdir()
    os.mkfifo(path / "tracking" / "wandb.json")
    (path / "stalls").mkdir()
    (path / "stalls" / "asked_1.json").write_text('{"sentence": "rank 1 hangs"}')
    module = tmp_path / "my_planted"
    module.mkdir()
    (module / "adapter.py").write_text('TOKEN = "hunter2hunter2"\nraise SystemExit\n')
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PLANTED_SECRET", "planted-in-the-shell")
    return RunDirectory(path)


def _unpacked(bundle: Bundle, out: Path) -> dict[str, bytes]:
    write(bundle, out)
    with tarfile.open(out) as tar:
        assert all(each.isfile() and not each.uname for each in tar)
        return {each.name: tar.extractfile(each).read() for each in tar}  # type: ignore[union-attr]


def test_a_bundle_has_what_explains_a_run_and_no_secret(run: RunDirectory, tmp_path: Path) -> None:
    bundle = collect(run, with_modules=True)
    files = _unpacked(bundle, tmp_path / "help.tar.gz")
    everything = b"\n".join([*files.values(), *map(str.encode, files)])
    assert [each for each in (*_PLANTED, "planted-outside") if each.encode() in everything] == []
    assert "planted-host" not in default_name(run)
    [node] = {name.rpartition("/")[0] for name in files if name.endswith("watcher.log")}
    assert re.fullmatch(r"bundle/run/nodes/<host-\d+>", node)
    expected = {
        *("bundle/README.txt", "bundle/files.txt", "bundle/show.json", "bundle/environment.json"),
        *(f"bundle/run/{name}.jsonl" for name in ("events", "metrics", "rollbacks")),
        *("bundle/run/recipe.toml", "bundle/run/run.json", "bundle/run/stalls/asked_1.json"),
        *(f"{node}/stacks/asked_1.json", f"{node}/watcher.log"),
        "bundle/modules/my_planted.adapter.py",
    }
    assert expected <= files.keys()
    assert sum("/logs/" in name for name in files) == 8
    environment = json.loads(files["bundle/environment.json"])
    assert {"torch", "av", "longtake"} <= environment["packages"].keys()
    assert "cuda" in environment["torch"]
    assert json.loads(files["bundle/show.json"])["steps"] == 24
    for line in files["bundle/run/events.jsonl"].splitlines():
        json.loads(line)
    assert set(files[f"{node}/watcher.log"].splitlines()) == {b"a line of the watcher"}
    readme = files["bundle/README.txt"].decode()
    reasons = ("health.jsonl: it is a link", "wandb.json: it is a named pipe", "2 older than")
    assert all(reason in readme for reason in reasons)


@pytest.mark.parametrize("damage", ["recipe.toml", "run.json", "events.jsonl", "all"])
def test_a_damaged_run_gives_a_bundle(run: RunDirectory, tmp_path: Path, damage: str) -> None:
    for path in run.path.glob("*.*") if damage == "all" else [run.path / damage]:
        path.write_bytes(b"\x00\xff{[[[ token=hunter2hunter2 \n" * 3)
    files = _unpacked(collect(run), tmp_path / "help.tar.gz")
    assert "bundle/run/recipe.toml" in files
    assert b"hunter2" not in b"".join(files.values())


def test_what_is_no_run_and_modules_of_others_are_refused(
    run: RunDirectory, tmp_path: Path
) -> None:
    for path in (tmp_path / "nothing", tmp_path / "outside.txt", tmp_path / "my_planted"):
        with pytest.raises(RunError, match="is not a run directory: it has none of"):
            collect(RunDirectory(path))
    record = json.loads(run.record_path.read_text())
    record["begun_by"]["host"] = "elsewhere"
    run.record_path.write_text(json.dumps(record))
    with pytest.raises(TrustError, match="was not begun by this user"):
        collect(run, with_modules=True)
    names = [each.name for each in collect(run, with_modules=True, is_trusted=True).files]
    assert "modules/my_planted.adapter.py" in names


def test_a_module_inside_the_run_is_left_out(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.move(run.path.parent / "my_planted", run.path)
    monkeypatch.chdir(run.path)
    bundle = collect(run, with_modules=True)
    assert ("modules/my_planted.adapter", "there is no source file of it outside the run") in (
        bundle.left_out
    )


def test_nothing_but_what_was_listed_is_written(run: RunDirectory, tmp_path: Path) -> None:
    bundle, again = collect(run), collect(run)
    assert [each.name for each in bundle.files] == [each.name for each in again.files]
    assert bundle.removed == again.removed
    write(bundle, tmp_path / "one.tar.gz")
    write(bundle, tmp_path / "two.tgz")
    data = (tmp_path / "one.tar.gz").read_bytes()
    assert data == (tmp_path / "two.tgz").read_bytes()
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        sizes = {each.name.removeprefix("bundle/"): each.size for each in tar}
    assert sizes == {each.name: len(each.data) for each in bundle.files}
