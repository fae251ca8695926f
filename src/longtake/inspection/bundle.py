"""Packs what is needed to help with a run into one archive.

It has texts only, without weights, clips and samples: records, logs, dumps and, on request, the
source of own modules. `redact.Redactor` removes secrets and names from each. No link is followed.
"""

import ast
import gzip
import io
import json
import os
import platform
import re
import sys
import tarfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata, util
from pathlib import Path
from typing import Any

from longtake import __version__, errors, formatting, fsio, lease, process, trust
from longtake.health.gpu import driver_facts
from longtake.inspection import facts, redact
from longtake.run_dir import RunDirectory

_TAIL_BYTES = 2**20  # read from the end of logs and of records that grow
_WHOLE_BYTES = 8 * 2**20  # limit of any other file, of which a part is of no use
_TOTAL_BYTES = 64 * 2**20
_NEWEST = 8  # files of each kind: reports, diagnoses, dumps and logs
_MOST_LISTED = 5000
_DRIVER_SECONDS = 10.0  # a broken driver may never answer

_RECORDS = (
    *("recipe.toml", "run.json", "plan.json", "events.jsonl", "metrics.jsonl", "rollbacks.jsonl"),
    *("lease/*.json", "ledger/launch_*/launch.json", "requests/*.json", "tracking/*.json"),
    *("stalls/*.json", "guard/*.json", "checkpoints/*/trainer.json", "checkpoints/*/COMMITTED"),
    *("nodes/*/heartbeat.json", "nodes/*/events.jsonl", "nodes/*/health.jsonl"),
    *("nodes/*/watcher.log", "nodes/*/stacks/*.json", "nodes/*/logs/*/*.log"),
    *("evaluations/servers/*/heartbeat.json", "evaluations/servers/*/events.jsonl"),
    *("evaluations/*/preset.json", "evaluations/*/step_*/scores.json"),
)
"""Glob patterns of records below a run directory; the newest files of each pattern are packed."""
_IS_A_RUN = ("recipe.toml", "run.json", "events.jsonl", "metrics.jsonl")
_GROWS = (".jsonl", ".log")
_VARIABLES = re.compile(r"(LONGTAKE|NCCL|TORCH|PYTORCH|CUDA|OMP|MKL|GLOO|LD_LIBRARY)_?\w*")
_CLASS = re.compile(r"([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*):[A-Za-z_]\w*")


@dataclass(frozen=True)
class BundledFile:
    """One text file of a bundle, with secrets and names removed."""

    name: str
    data: bytes
    note: str | None  # says which part was left out


@dataclass(frozen=True)
class Bundle:
    """The files of a help bundle, collected in memory before the archive is written."""

    files: list[BundledFile]
    left_out: list[tuple[str, str]]  # name and reason
    removed: Mapping[str, int]  # number of different values that were removed, by kind

    def as_dict(self) -> dict[str, Any]:
        files = [{"file": f.name, "bytes": len(f.data), "note": f.note} for f in self.files]
        left_out = [{"file": name, "reason": reason} for name, reason in self.left_out]
        return {"files": files, "left_out": left_out, "removed": dict(self.removed)}


def collect(run: RunDirectory, *, with_modules: bool = False, is_trusted: bool = False) -> Bundle:
    """Collect the texts of a bundle (an archive to ask for help with a run) and redact them.

    Args:
        run: the run directory, whole or damaged.
        with_modules: also include the source files of the classes that its recipe names.
        is_trusted: include these even if somebody else began the run.

    Raises:
        RunError: there is no run.
        TrustError: modules of a run that somebody else began, without `is_trusted`.
    """
    top = run.path.resolve()
    if not any((top / name).exists() for name in _IS_A_RUN):
        raise errors.RunError(
            f"{run.path} is not a run directory: it has none of "
            f"{formatting.join_words(_IS_A_RUN)}. Expected the `out` folder of a recipe that was "
            "trained."
        )
    run, reader = RunDirectory(top), _Reader({}, {}, [])
    for name, path in _run_files(top, reader.left_out):
        reader.read(name, path, top)
    if with_modules:
        trust.refuse_foreign_code(run, trust=is_trusted)
        for name, path in _modules(reader, top):
            reader.read(name, path, path.parent)
    texts = reader.texts
    texts["files.txt"] = "".join(_listed(top))
    texts["environment.json"] = json.dumps(_environment(), indent=2) + "\n"
    try:
        shown = facts.run_facts(run)
    except (errors.LongtakeError, OSError, ValueError, KeyError, TypeError, IndexError) as error:
        shown = {"error": str(error)}
    texts["show.json"] = json.dumps(shown, indent=2, default=str) + "\n"
    redactor = _redactor(run)
    # All texts are learned before any is redacted: a secret in one may be bare in another.
    for text in texts.values():
        redactor.learn(text)
    files = [
        BundledFile(redactor.redact(name), redactor.redact(text).encode(), reader.notes.get(name))
        for name, text in texts.items()
    ]
    left_out = [(redactor.redact(name), redactor.redact(why)) for name, why in reader.left_out]
    readme = BundledFile("README.txt", _readme(left_out, redactor.removed).encode(), None)
    return Bundle([readme, *files], left_out, redactor.removed)


def default_name(run: RunDirectory) -> str:
    name = re.sub(r"[^\w.-]+", "", _redactor(run).redact(run.path.resolve().name))
    return f"{name or 'run'}-bundle-{fsio.file_time()[:15]}.tar.gz"


def check_out(out: Path) -> None:
    """Refuse a path for the bundle that exists, or whose name is not that of a .tar.gz archive.

    Raises:
        RunError: the archive cannot be written there.
    """
    if not out.name.endswith((".tar.gz", ".tgz")):
        raise errors.RunError(f"--out {out}: expected a file name such as help.tar.gz.")
    if out.is_symlink() or out.exists():
        raise errors.RunError(
            f"--out {out} is there already. It was not overwritten; choose another."
        )
    if not out.absolute().parent.is_dir():
        raise errors.RunError(
            f"--out {out}: there is no folder {out.absolute().parent}; make it first."
        )


def write(bundle: Bundle, out: Path) -> int:
    """Write the bundle as a .tar.gz archive, and return its size in bytes."""
    with fsio.atomic_write(out) as partial:
        with (
            partial.open("xb") as file,
            # Neither the name of the archive nor the user who packs it is recorded.
            gzip.GzipFile(filename="", mode="wb", fileobj=file, mtime=0) as packed,
            tarfile.open(fileobj=packed, mode="w") as tar,
        ):
            for each in bundle.files:
                member = tarfile.TarInfo(f"bundle/{each.name}")
                member.size, member.mode = len(each.data), 0o644
                tar.addfile(member, io.BytesIO(each.data))
        return partial.stat().st_size


def _redactor(run: RunDirectory) -> redact.Redactor:
    hosts = [path.name for path in (run.path / "nodes").glob("*") if path.is_dir()]
    stems = (
        path.stem for name in ("requests", "stalls") for path in (run.path / name).glob("*.json")
    )
    launches = list[str]()
    # The records may be damaged.
    with suppress(errors.LongtakeError, OSError, ValueError, KeyError, TypeError):
        launches = [str(record["token"]) for record in lease.history(run.lease_path)]
    redactor = redact.Redactor(environment=os.environ, hosts=hosts, keep=[*stems, *launches])
    redactor.add_owner(os.getuid())
    redactor.add_owner(run.path.stat().st_uid)
    return redactor


def _run_files(top: Path, left_out: list[tuple[str, str]]) -> Iterator[tuple[str, Path]]:
    """Yield names and paths of a run's records: per kind, the newest of each node and preset."""
    for pattern in _RECORDS:
        found: dict[str, list[Path]] = {}
        for path in top.glob(pattern):
            parts = path.relative_to(top).parts
            of = parts[1] if parts[0] in ("nodes", "evaluations") else ""
            found.setdefault(of, []).append(path)
        for paths in found.values():
            newest = sorted(paths, key=lambda path: (-path.lstat().st_mtime, path))
            yield from ((f"run/{path.relative_to(top)}", path) for path in newest[:_NEWEST])
            if older := len(newest[_NEWEST:]):
                left_out.append((f"run/{pattern}", f"{older} older than the newest {_NEWEST}"))


@dataclass
class _Reader:
    """Reads a run's files as texts for a bundle, until its maximum size is reached."""

    texts: dict[str, str]
    notes: dict[str, str]
    left_out: list[tuple[str, str]]

    def read(self, name: str, path: Path, top: Path) -> None:
        """Read a file, or only the end of a growing one; leave out links below `top`, big files."""
        grows = path.suffix in _GROWS
        room = _TOTAL_BYTES - sum(map(len, self.texts.values()))
        most = min(_TAIL_BYTES if grows else _WHOLE_BYTES, room)
        try:
            if fsio.is_linked(path, top):
                raise OSError("it is a link, or lies behind one")
            with fsio.open_regular(path) as file:
                size = os.fstat(file.fileno()).st_size
                if size > most and not grows:
                    raise OSError(
                        f"it has {formatting.format_size(size)}, and there is room for {most:,}"
                    )
                file.seek(max(0, size - most))
                data = file.read(most)
        except OSError as error:
            self.left_out.append((name, error.strerror or str(error)))
            return
        if size > most:
            data = data.partition(b"\n")[2]  # half a line could be half a secret
            self.notes[name] = (
                f"the last {formatting.format_size(len(data))} of {formatting.format_size(size)}"
            )
        self.texts[name] = data.decode(errors="replace")


def _modules(reader: _Reader, top: Path) -> Iterator[tuple[str, Path]]:
    """Yield source files of own classes ("module:Class") in a recipe, found without an import."""
    recipe = reader.texts.get("run/recipe.toml", "")
    for module in dict.fromkeys(_CLASS.findall(recipe)):
        inner = module.replace(".", "/")
        places = [
            Path(folder or ".").absolute() / file
            for folder in ("", *sys.path)
            for file in (f"{inner}.py", f"{inner}/__init__.py")
        ]
        path = next((each for each in places if each.is_file()), None)
        if path is None or path.resolve().is_relative_to(top):
            why = "there is no source file of it outside the run"
            reader.left_out.append((f"modules/{module}", why))
        else:
            yield f"modules/{module}.py", path


def _listed(top: Path) -> Iterator[str]:
    """Yield a line with size and path of each file of the run, for a list in the bundle.

    Links are not followed.
    """
    count = 0
    for folder, folders, files in os.walk(top):
        folders.sort()
        for name in sorted(files):
            count += 1
            if count > _MOST_LISTED:
                yield f"... and more than {_MOST_LISTED:,} files\n"
                return
            path = Path(folder, name)
            with suppress(OSError):
                size = "link" if path.is_symlink() else str(path.lstat().st_size)
                yield f"{size:>14} {path.relative_to(top)}\n"


def _environment() -> dict[str, Any]:
    """Describe the machine on which the bundle is made; launches' versions are in run.json."""
    installed = {
        str(each.metadata["Name"]): each.version
        for each in metadata.distributions()
        if each.metadata["Name"]
    }
    gpus: dict[str, Any] = {}
    asked = threading.Thread(target=lambda: gpus.update(driver_facts()), daemon=True)
    asked.start()
    asked.join(_DRIVER_SECONDS)
    # Only variables that change how a run trains: any other may be a secret.
    variables = {name: os.environ[name] for name in os.environ if _VARIABLES.fullmatch(name)}
    return {
        "longtake": __version__,
        "python": sys.version,
        "platform": f"{platform.system()} {platform.release()} {platform.machine()}",
        "libc": " ".join(platform.libc_ver()),
        "cores": process.num_cores(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "torch": _torch_build(),
        "gpus": gpus if not asked.is_alive() else {"error": "the driver does not answer"},
        "variables": variables,
        "packages": dict(sorted(installed.items(), key=lambda item: item[0].lower())),
    }


def _torch_build() -> dict[str, Any]:
    """Return the build of the installed torch, parsed from version.py: an import may hang."""
    spec = util.find_spec("torch")
    folders = spec.submodule_search_locations if spec else None
    found: dict[str, Any] = {}
    with suppress(OSError, SyntaxError, ValueError):
        tree = ast.parse((Path(folders[0]) / "version.py").read_text() if folders else "")
        for node in tree.body:
            targets = node.targets if isinstance(node, ast.Assign) else ()
            target = node.target if isinstance(node, ast.AnnAssign) else next(iter(targets), None)
            value = getattr(node, "value", None)
            if isinstance(target, ast.Name) and isinstance(value, ast.Constant):
                found[target.id] = value.value
    return found


def _readme(left_out: Sequence[tuple[str, str]], removed: Mapping[str, int]) -> str:
    what = formatting.join_words(
        formatting.plural(number, kind, "addresses" if kind == "address" else "")
        for kind, number in removed.items()
    )
    lines = [
        f"Made by `longtake bundle`, longtake {__version__}.",
        "",
        "run/              records, logs and stack dumps of the run directory",
        "show.json         what `longtake show --json` says of it",
        "files.txt         size and name of each file of the run directory",
        "environment.json  packages, PyTorch's build, driver and GPUs of this machine",
        "modules/          source of own classes, with --with-modules",
        "",
        f"Removed, each with the same replacement everywhere: {what or 'nothing'}.",
        "",
        *("Left out:" for _ in left_out[:1]),
        *(f"  {name}: {reason}" for name, reason in left_out),
    ]
    return "\n".join(lines) + "\n"
