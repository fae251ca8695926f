"""Names what encodes: other weights, tokenizers or settings have another fingerprint.

Of a part that is loaded it is the files' names and content that count, not where they lie. Large
files are read whole, but once: the cache remembers their hash while path, size and time of change
stay the same. In the hub's own cache they are called by it.
"""

import hashlib
import json
import re
from collections.abc import Callable
from pathlib import Path

from longtake.config import PooledSection, Recipe, TextSection
from longtake.data.hashes import ContentHashes
from longtake.models.assemble import text_section
from longtake.models.pretrained import locate

_PIXELS, _CAPTIONS = 1, 2
"""Versions of longtake's own code between pixels and codec, captions and encoder."""

_LARGE_BYTES = 2**24
"""Smaller files are read each time: that takes no longer than to look them up."""

_SHA256 = re.compile("[0-9a-f]{64}")


def codec_fingerprint(recipe: Recipe, made: Path) -> str:
    """32 hex digits over what turns pixels into latents.

    Args:
        recipe: the recipe.
        made: the folder of parts that are pretrained nowhere.

    Raises:
        ModelError: a pretrained part cannot be found.
    """
    section = recipe.codec
    if section.kind == "pixels":
        return _fingerprint(recipe, [_PIXELS, section.kind], [])
    if section.pretrained is None:
        folders = [made / "vae"]
    else:
        folders = [locate(section.pretrained, section.subfolder) / section.subfolder]
    facts = [_PIXELS, section.kind, section.class_name, section.dtype]
    return _fingerprint(recipe, facts, folders)


def text_fingerprint(recipe: Recipe, made: Path) -> str:
    """32 hex digits over what turns captions into embeddings; see `codec_fingerprint`."""
    section = text_section(recipe)
    facts = [section.kind, section.class_name, section.num_tokens(), section.kept_in()]
    folders = _encoder_folders(section, section.pretrained, made)
    if section.kind == "words":
        facts, folders = [section.kind, section.num_tokens()], [made / "tokenizer"]
    elif (pooled := section.pooled) is not None:
        facts += [pooled.class_name, pooled.max_tokens]
        # As the text encoder is built: unset and without a config, from where the first one is.
        where = pooled.pretrained or (None if pooled.config else section.pretrained)
        folders += _encoder_folders(pooled, where, made)
    return _fingerprint(recipe, [_CAPTIONS, *facts], folders)


def _encoder_folders(
    section: TextSection | PooledSection, where: str | None, made: Path
) -> list[Path]:
    if where is None:
        return sorted(path for path in made.glob("t*") if path.is_dir())  # text_… and tokenizer…
    names = (section.subfolder, section.tokenizer_subfolder)
    return [locate(where, name) / name for name in names]


def _fingerprint(recipe: Recipe, facts: list[object], folders: list[Path]) -> str:
    digest = hashlib.blake2b(json.dumps(facts).encode(), digest_size=16)
    cache = recipe.data.cache
    of_large = _sha256 if cache is None else ContentHashes(cache / "encoders", _sha256).of
    for folder in folders:
        digest.update(b"folder")
        for path in sorted(folder.rglob("*")):
            name = path.relative_to(folder).as_posix()
            if path.is_file() and not any(part.startswith(".") for part in name.split("/")):
                digest.update(f"{name} {_content(path, of_large)}".encode())
    return digest.hexdigest()


def _content(path: Path, of_large: Callable[[str], str]) -> str:
    """SHA-256 of a file, which the hub's cache calls large files by."""
    stored = path.resolve()
    if stored.parent.name == "blobs" and _SHA256.fullmatch(stored.name):
        return stored.name
    is_large = stored.stat().st_size > _LARGE_BYTES
    return of_large(str(stored)) if is_large else _sha256(str(stored))


def _sha256(path: str) -> str:
    with Path(path).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
