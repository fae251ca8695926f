"""Metadata in the headers of exported files, as SwarmUI, Civitai and managers of models show it.

The keys are those of the SAI model spec (`modelspec.*`) and of kohya's scripts (`ss_*`, `sshs_*`).
Their values are facts of the run and its step that a resumed launch keeps, so that an export of a
checkpoint always has the same bytes; there is no path, and no name of a user or a computer.
"""

import hashlib
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from longtake.config import Recipe
from longtake.errors import RunError
from longtake.formatting import printable
from longtake.models.base import Family
from longtake.models.pretrained import is_repository_id
from longtake.run_dir import RunDirectory

_PLACE = "0" * 64
HASHES = {"modelspec.hash_sha256": f"0x{_PLACE}", "sshs_model_hash": _PLACE}
"""Metadata in which `write_header` replaces zeros by the hash of a file's tensors."""
_ARCHITECTURES = {"flux": "Flux.1-dev", "flux_kontext": "Flux.1-dev", "wan": "wan2.1"}
"""Names of architectures in other tools (SwarmUI, OneTrainer, musubi-tuner), by family, where they
are not the family's label with dashes."""
_COMFYUI = "https://github.com/comfyanonymous/ComfyUI"
_MAX_LETTERS = 1000


@dataclass(frozen=True)
class Words:
    """What a user says of an export; None: nothing, but the run's name as the title."""

    title: str | None = None
    author: str | None = None
    license: str | None = None

    def __post_init__(self) -> None:
        for name, text in vars(self).items():
            if text is not None and not (
                text.isprintable() and 0 < len(text.strip()) <= _MAX_LETTERS
            ):
                raise RunError(
                    f"--{name} {text!r:.60}: expected one line of 1 to {_MAX_LETTERS} printable "
                    "letters in UTF-8."
                )


def base_name(recipe: Recipe) -> str | None:
    """Return the base model's repository id, or else the last part of its path; None without."""
    where = recipe.model.pretrained
    if where is None or is_repository_id(where):
        return where
    return printable(Path(where).expanduser().resolve().name)


def triggers(recipe: Recipe) -> str:
    """Return the trigger words of a recipe's captions, separated by commas."""
    changes = (recipe.data.captions.get(name) for name in recipe.data.sources())
    own = (None if each is None else each.trigger for each in changes)
    words = (recipe.data.trigger if word is None else word for word in own)
    return ", ".join(dict.fromkeys(word for word in words if word))


def describe(
    recipe: Recipe,
    family: Family,
    run: RunDirectory | None,
    step: int,
    wanted: Literal["comfyui", "diffusers", "peft"],
    words: Words = Words(),
    extracted: int | None = None,
) -> dict[str, str]:
    """Return the metadata of an exported file.

    Args:
        recipe: recipe of the run.
        family: family of the model.
        run: run that is exported; without one, there is no date.
        step: step of the checkpoint.
        wanted: tool whose names the file's tensors have.
        words: what the user says.
        extracted: rank of LoRA that was extracted from a model whose weights were all trained.
    """
    named = str(getattr(family, "label", "") or recipe.model.family.rpartition(":")[2])
    architecture = _ARCHITECTURES.get(recipe.model.family, named.replace(" ", "-"))
    title = words.title or ("longtake" if run is None else printable(run.path.resolve().name))
    base, trigger, optimizer = base_name(recipe), triggers(recipe), recipe.optimizer
    section = recipe.trainable
    rank = extracted or (section.rank if section.base() == "lora" else None)
    kind = "lora" if extracted else section.kind or "full"
    what = f"{kind} of rank {rank}" if rank else "all weights"
    source = f" from {base}" if base else ""
    width, height = max(((b.width, b.height) for b in recipe.data.buckets), key=math.prod)
    facts = {
        "modelspec.sai_model_spec": "1.0.1",
        "modelspec.architecture": architecture + ("/lora" if rank else ""),
        "modelspec.implementation": _COMFYUI if wanted == "comfyui" else "diffusers",
        "modelspec.title": title,
        "modelspec.description": f"{what}, trained for {step} steps{source}",
        "modelspec.author": words.author,
        "modelspec.license": words.license,
        "modelspec.date": None if run is None else run.record()["created"],
        "modelspec.resolution": f"{width}x{height}",
        "modelspec.trigger_phrase": trigger,
        "modelspec.usage_hint": trigger and f"Trigger: {trigger}",
        "ss_base_model_version": architecture,
        "ss_sd_model_name": base,
        "ss_output_name": title,
        "ss_network_module": f"longtake.{kind}",
        # As alpha / rank is multiplied into the weights, the alpha of the file is its rank.
        **(dict.fromkeys(("ss_network_dim", "ss_network_alpha"), str(rank)) if rank else {}),
        "ss_steps": str(step),
        "ss_learning_rate": str(optimizer.learning_rate),
        "ss_optimizer": optimizer.kind.rpartition(":")[2],
        "ss_lr_scheduler": optimizer.schedule,
        "ss_total_batch_size": str(recipe.training.global_batch_size),
        "ss_seed": str(recipe.seed),
    }
    return {name: value for name, value in facts.items() if value}


def write_header(path: Path) -> None:
    """Write the metadata of a safetensors file in order, and into it the hash of its tensors.

    safetensors writes metadata in an order that differs between processes. Both hashes are the
    SHA-256 of all that is behind the header, as the model spec and kohya's scripts define them.
    """
    with path.open("r+b") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        hashes = {name: place.replace(_PLACE, digest) for name, place in HASHES.items()}
        header["__metadata__"] = dict(sorted((header["__metadata__"] | hashes).items()))
        text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
        assert len(text) <= length, "safetensors writes JSON in another form"
        file.seek(8)
        file.write(text.ljust(length))
