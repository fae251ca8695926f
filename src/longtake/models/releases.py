"""Reads configurations of released models: shipped with longtake, in a folder, or downloaded."""

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from longtake.config import ModelSection
from longtake.errors import ModelError
from longtake.fsio import file_version
from longtake.models.pretrained import _REPOSITORY_ID, PipelinePart, locate, read_config

SHIPPED = {
    "black-forest-labs/FLUX.1-dev": "flux_1_dev.json",
    "black-forest-labs/FLUX.1-Kontext-dev": "flux_1_dev.json",
    "Wan-AI/Wan2.1-T2V-1.3B-Diffusers": "wan_2_1_1_3b.json",
    "Wan-AI/Wan2.1-T2V-14B-Diffusers": "wan_2_1_14b.json",
}
"""Configurations that longtake ships, by repository id; Kontext's are those of FLUX.1-dev."""
MODULAR_INDEX = "modular_model_index.json"
SHIPPED_PIPELINES = {"black-forest-labs/FLUX.1-Kontext-dev": "FluxKontextPipeline"}
"""Class names of pipelines by repository id, for transformers that several pipelines share."""


@dataclass(frozen=True)
class Release:
    """Configurations (pipeline, transformer, scheduler) of a release or of an untrained model."""

    config: Mapping[str, Any]  # the transformer's; of a model from scratch the recipe's
    scheduler: Mapping[str, Any] | None  # None: the pipeline has none, or the model is from scratch
    pipeline: Mapping[str, Any]  # as `pipeline_index` returns it
    guider: Mapping[str, Any] | None = None  # for pipelines whose guidance is a component
    audio_scheduler: Mapping[str, Any] | None = None  # of pipelines whose sound has one of its own


def read_release(section: ModelSection) -> Release:
    """Read the configurations of the released model that a model section starts from."""
    where = section.release()
    if where is None:
        return Release(section.config, None, {})
    if Path(where).expanduser().is_dir():
        return _read_release(where, section.folder())
    return _read_repository(where, section.folder())


def _read_release(where: str, subfolder: str) -> Release:
    config = part_config(where, subfolder)
    if _is_shipped(where):
        return Release(config, _shipped(SHIPPED[where]).get("scheduler"), {})
    root = (locate(where, subfolder, files="config.json") / subfolder).resolve().parent
    index = _read_index(root)

    def part(name: str, kind: str | None = None) -> dict[str, Any] | None:
        file = root / name / f"{kind or name}_config.json"
        # A modular pipeline makes a part that its index does not name by its own defaults.
        if "_blocks_class_name" not in index:
            return read_config(file) if file.is_file() else None
        if name not in index:
            return None
        return read_config(locate(where, name, files=file.name) / name / file.name)

    sound = part("audio_scheduler", "scheduler")
    return Release(config, part("scheduler"), index, part("guider"), sound)


_read_repository = cache(_read_release)  # so that the hub is asked once


def find_part(where: str, expected: PipelinePart) -> PipelinePart:
    """Find a part of a release's pipeline by model_index.json; `expected` if none is named there.

    Raises:
        ModelError: the repository has it in a class that the family cannot use.
    """
    index = pipeline_index(where)
    named = {name: value[1] for name, value in index.items() if _is_class(value)}
    folders = [name for name, value in named.items() if value in expected.class_names]
    if expected.folder in folders or (folders and expected.folder not in named):
        folder = expected.folder if expected.folder in folders else folders[0]
        # A text encoder in another folder, such as text_encoder_3, may have a tokenizer of its own.
        beside = folder.replace("text_encoder", "tokenizer")
        has_own = "text_encoder" in folder and bool(expected.tokenizer) and beside in named
        tokenizer = beside if has_own else expected.tokenizer
        return replace(expected, class_names=(named[folder],), folder=folder, tokenizer=tokenizer)
    if expected.folder in named:
        raise ModelError(
            f"{where}: its model_index.json names {named[expected.folder]} as its "
            f"{expected.folder}, but {' or '.join(expected.class_names)} is needed. Name another "
            "repository in the recipe, or another model.family."
        )
    return expected


def has_part(where: str, part: PipelinePart) -> bool:
    """Return True if a release's model_index.json names a class for this part of the pipeline."""
    return bool((pipeline_index(where).get(part.folder) or [None])[0])


def _is_class(value: Any) -> bool:
    # Any other library that an index names is never imported.
    is_pair = isinstance(value, list) and len(value) == 2
    return is_pair and value[0] in ("diffusers", "transformers") and isinstance(value[1], str)


def pipeline_index(where: str) -> dict[str, Any]:
    """Read a release's model_index.json, or that of a modular pipeline; {} if there is neither.

    A modular index gets the form of the other one: a library and a class for each part.
    """
    return _index(where) if Path(where).expanduser().is_dir() else _repository_index(where)


def _index(where: str) -> dict[str, Any]:
    if _is_shipped(where):
        return {"_class_name": SHIPPED_PIPELINES[where]} if where in SHIPPED_PIPELINES else {}
    try:
        folder = _root(where)
    except ModelError:  # the part itself will not be found either, and that error says more
        return {}
    return _read_index(folder)


def _read_index(folder: Path) -> dict[str, Any]:
    files = (folder / name for name in ("model_index.json", MODULAR_INDEX))
    index = next((read_config(file) for file in files if file.is_file()), {})
    for name, entry in index.items():
        if _is_modular(entry):
            # The first two are null for a part that was not loaded when the index was saved.
            hint = entry[2].get("type_hint")
            index[name] = entry[:2] if entry[1] or not isinstance(hint, list) else hint
    return index


def _is_modular(entry: Any) -> bool:
    return isinstance(entry, list) and len(entry) == 3 and isinstance(entry[2], dict)


def modular_index(where: str) -> dict[str, Any]:
    """Read a release's modular_model_index.json as it is; {} if there is none."""
    file = _root(where) / MODULAR_INDEX
    return read_config(file) if file.is_file() else {}


def modular_entry(entry: Any, where: str | None = None) -> Any:
    """Complete the entry of a part in a modular index, which is in `where` unless it says so.

    Without `where` diffusers looks for it in the folder that has the index.
    """
    if not _is_modular(entry):
        return entry
    source = where if entry[2].get("subfolder") else None  # otherwise it names no place at all
    place = {"pretrained_model_name_or_path": source, "variant": None, "revision": None}
    said = {name: value for name, value in entry[2].items() if value is not None}
    return [*entry[:2], place | said]


_repository_index = cache(_index)  # so that the hub is asked once


def _root(where: str) -> Path:
    """Return the local folder of a release, in which its pipeline's index is."""
    is_here = Path(where).expanduser().is_dir()
    return locate(where, ".", files="model_index.json") if is_here else _repository_root(where)


@cache  # so that the hub is asked once
def _repository_root(where: str) -> Path:
    return locate(where, ".", files="model_index.json")


def release_version(where: str, subfolder: str = "") -> str | None:
    """Return a text that changes with the files of a release; None if they cannot be listed.

    The files are those of the release's folder and of its parts, and those of `subfolder`.
    """
    if _is_shipped(where):
        return "shipped"
    try:
        root = _root(where)
    except ModelError:
        return None
    if not Path(where).expanduser().is_dir():
        return root.resolve().name  # the commit of a repository
    try:
        parts = [part for part in (*root.iterdir(), root / subfolder) if part.is_dir()]
        # Parts may be links to folders of another release, whose configurations then count.
        folders = {root, *parts, *(part.resolve().parent for part in parts)}
        files = sorted({file for folder in folders for file in folder.iterdir()})
        return str([(str(file), file_version(file.resolve())) for file in files])
    except OSError:
        return None


def copy_part(section: ModelSection, name: str, folder: Path) -> None:
    """Copy one part of the release that a section names into an exported pipeline."""
    where = section.release()
    assert where is not None
    root = locate(where, name)
    shutil.copytree(root / name, folder / name)
    # The saved index has null for the part, which the pipeline was built without.
    index = read_config(folder / "model_index.json") | {name: pipeline_index(str(root))[name]}
    text = json.dumps(index, indent=2) + "\n"
    (folder / "model_index.json").write_text(text, encoding="utf-8")


def part_config(where: str, subfolder: str) -> dict[str, Any]:
    """Read a part's `config.json` from a folder, the shipped configurations or the hub."""
    if _is_shipped(where):
        parts = _shipped(SHIPPED[where])
        if subfolder in parts:
            return dict(parts[subfolder])
        known = ", ".join(part for part in parts if part != "scheduler")
        raise ModelError(f"{where} has no subfolder {subfolder}; it has {known}.")
    try:
        folder = locate(where, subfolder, files="config.json")
    except ModelError as error:
        if not _REPOSITORY_ID.fullmatch(where) or Path(where).is_dir():
            raise
        raise ModelError(f"{error} Known without a download are: {', '.join(SHIPPED)}.") from error
    return read_config(folder / subfolder / "config.json")


def _is_shipped(where: str) -> bool:
    # A folder of that name in the current one comes first, as in `locate`.
    return where in SHIPPED and not Path(where).is_dir()


@cache
def _shipped(name: str) -> dict[str, Any]:
    return read_config(Path(__file__).parent / "architectures" / name)
