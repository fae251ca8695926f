"""Sends an export to the Hugging Face Hub with a model card, where a user asks for it.

huggingface_hub reads the user's token; nothing here does.
"""

import json
import re
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import jinja2

from longtake import fsio
from longtake.errors import RunError
from longtake.evaluation.export import ExportChoice, header
from longtake.evaluation_dir import EvaluationDirectory
from longtake.formatting import first_line, format_size, printable
from longtake.models.pretrained import is_repository_id
from longtake.models.releases import MODULAR_INDEX
from longtake.sampling.sampler import Sampler

_TEMPLATE = Path(__file__).parent / "model_card.md.j2"
_MOST_SAMPLES = 4

Files = dict[str, Path | bytes]
"""Files of a repository by their names there: a path on this computer, or the content."""


def check_push(repository: str, *, update: bool) -> None:
    """Refuse a repository that cannot be, or that exists if it is not to be updated.

    Raises:
        RunError: it is not accepted, or the Hub cannot be reached.
    """
    if _ask(repository, "repo_exists") and not update:
        raise RunError(
            f"--push {repository}: the Hub has it already. Name another one, or add --update to "
            "replace those of its files that have the names of new ones."
        )


def collect(sampler: Sampler, out: Path, choice: ExportChoice, repository: str) -> Files:
    """Return all files that an export's repository gets: its own, samples, and the model card.

    Paths of this computer in the JSON files of libraries are replaced by their last part, and are
    removed from a modular index, in which they are the place of a part that is not exported.
    """
    root = out.parent if out.is_file() else out
    found = [out] if out.is_file() else sorted(path for path in out.rglob("*") if path.is_file())
    files: Files = {path.relative_to(root).as_posix(): path for path in found}
    for name in [name for name in files if name.endswith(".json")]:
        try:
            read = json.loads((root / name).read_bytes())
        except ValueError:  # a release's own file, copied as it is
            continue
        values = _without_paths(read, is_index=Path(name).name == MODULAR_INDEX)
        if values != read:
            files[name] = json.dumps(values, indent=2).encode()
    prompts = dict[str, str]()
    for path, prompt in islice(_sampled(sampler), _MOST_SAMPLES):
        name = f"samples/{path.parents[1].name}-{path.name}"
        files[name], prompts[name] = path, prompt
    return {**files, "README.md": _card(sampler, out, choice, repository, prompts).encode()}


def _without_paths(value: Any, *, is_index: bool) -> Any:
    if isinstance(value, list):
        return [_without_paths(each, is_index=is_index) for each in value]
    if not isinstance(value, dict):
        return value
    found = {key: _without_paths(each, is_index=is_index) for key, each in value.items()}
    for key, where in found.items():
        if key.endswith("name_or_path") and where and not is_repository_id(str(where)):
            found[key] = None if is_index else Path(str(where)).name
    return found


def list_files(files: Files) -> list[str]:
    """Return lines with the name and size of each file, and the text of the model card."""
    card = files["README.md"]
    assert isinstance(card, bytes)
    sized = {
        n: len(each) if isinstance(each, bytes) else each.stat().st_size
        for n, each in files.items()
    }
    return [*(f"  {n}  {format_size(size)}" for n, size in sized.items()), "", card.decode()]


def send(repository: str, files: Files, message: str, *, private: bool, update: bool) -> str:
    """Send files to a repository, which is created if it is not there; return the commit's URL.

    Raises:
        RunError: the Hub does not take them.
    """
    from huggingface_hub import CommitOperationAdd

    _ask(repository, "create_repo", private=private, exist_ok=update)
    added = [CommitOperationAdd(name, content) for name, content in files.items()]
    commit = _ask(repository, "create_commit", operations=added, commit_message=message)
    return str(commit.commit_url)


def _ask(repository: str, method: str, **arguments: Any) -> Any:
    from huggingface_hub import HfApi

    try:
        return getattr(HfApi(), method)(repository, **arguments)
    except Exception as error:  # the hub's HTTP client, and its exceptions, change by version
        raise RunError(
            f"--push {repository}: the Hub refused, or cannot be reached ({method}): "
            f"{first_line(error).rstrip('.')}. Check the name, and log in with a token that may "
            "write: hf auth login. An export that was written stays."
        ) from error


def _sampled(sampler: Sampler) -> Iterator[tuple[Path, str]]:
    """Yield path and prompt of each video that the run has sampled with the exported weights."""
    if sampler.run is None:
        return
    folder = EvaluationDirectory(sampler.run)
    for preset in folder.presets():
        scores = folder.scores(preset, sampler.step)
        for video in scores["videos"] if scores and scores["weights"] == sampler.weights else ():
            path = folder.result_path(preset, sampler.step) / video["file"]
            if path.is_file() and not fsio.is_linked(path, sampler.run.path):
                yield path, video["prompt"]


def _card(
    sampler: Sampler, out: Path, choice: ExportChoice, repository: str, prompts: Mapping[str, str]
) -> str:
    """Return the text of README.md, in which the template's filters quote all texts of users."""
    facts, recipe = header(sampler, choice), sampler.recipe
    base = facts.get("ss_sd_model_name", "")
    made = "video" if any(each.num_frames > 1 for each in recipe.data.buckets) else "image"
    blocks: dict[str, Any] = {"trim_blocks": True, "lstrip_blocks": True}
    environment = jinja2.Environment(undefined=jinja2.StrictUndefined, **blocks)  # noqa: S701
    environment.filters |= {"quoted": _quoted, "escaped": _escaped}
    return environment.from_string(_TEMPLATE.read_text(encoding="utf-8")).render(
        facts=facts,
        choice=choice,
        base=base,
        is_repository=is_repository_id(base),
        task=f"{'image' if recipe.model_inputs() else 'text'}-to-{made}",
        repository=repository,
        file=out.name,
        prompts=[{"text": text, "output": {"url": name}} for name, text in prompts.items()],
    )


def _quoted(value: object) -> str:
    """Quote texts for YAML and Python, also within a block of code in Markdown."""
    return json.dumps(value, ensure_ascii=False).replace("`", "\\u0060")


def _escaped(text: str) -> str:
    """Escape all that Markdown or HTML could take for markup."""
    return re.sub(r"([!-/:-@\[-`{-~])", r"\\\1", printable(text))
