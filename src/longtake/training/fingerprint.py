"""Names what encodes: other weights, tokenizers or settings have another fingerprint.

Of a part that is loaded it is the files' names, sizes and content that count, not where they lie:
small ones whole, of large ones the header (names, shapes and places of all tensors) and samples
spread over the rest, so that ten gigabytes are fingerprinted in milliseconds.
"""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

from longtake.config import PooledSection, Recipe, TextSection
from longtake.models.pretrained import locate

_ENCODING = 1
"""Version of longtake's own code between pixels and codec, captions and encoder."""

_WHOLE_BYTES = 2**24
_NUM_SAMPLES, _SAMPLE_BYTES = 16, 2**16


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
        return _fingerprint([section.kind], [])
    if section.pretrained is None:
        folders = [made / "vae"]
    else:
        folders = [locate(section.pretrained, section.subfolder) / section.subfolder]
    return _fingerprint([section.kind, section.class_name], folders)


def text_fingerprint(recipe: Recipe, made: Path) -> str:
    """32 hex digits over what turns captions into embeddings; see `codec_fingerprint`."""
    section = recipe.text
    facts = [section.kind, section.class_name, section.max_tokens]
    folders = _encoder_folders(section, section.pretrained, made)
    if section.kind == "words":
        facts, folders = [section.kind, section.max_tokens], [made / "tokenizer"]
    elif (pooled := section.pooled) is not None:
        facts += [pooled.class_name, pooled.max_tokens]
        # As the text encoder is built: unset and without a config, from where the first one is.
        where = pooled.pretrained or (None if pooled.config else section.pretrained)
        folders += _encoder_folders(pooled, where, made)
    return _fingerprint(facts, folders)


def _encoder_folders(
    section: TextSection | PooledSection, where: str | None, made: Path
) -> list[Path]:
    if where is None:
        return sorted(path for path in made.glob("t*") if path.is_dir())  # text_… and tokenizer…
    names = (section.subfolder, section.tokenizer_subfolder)
    return [locate(where, name) / name for name in names]


def _fingerprint(facts: list[object], folders: list[Path]) -> str:
    digest = hashlib.blake2b(json.dumps([_ENCODING, *facts]).encode(), digest_size=16)
    for folder in folders:
        digest.update(b"folder")
        for path in sorted(folder.rglob("*")):
            name = path.relative_to(folder).as_posix()
            if path.is_file() and not any(part.startswith(".") for part in name.split("/")):
                digest.update(f"{name} {path.stat().st_size}".encode())
                for piece in _pieces(path):
                    digest.update(piece)
    return digest.hexdigest()


def _pieces(path: Path) -> Iterator[bytes]:
    """All of a small file; of a large one the beginning, the end, and samples between them."""
    size = path.stat().st_size
    with path.open("rb") as file:
        if size <= _WHOLE_BYTES:
            yield file.read()
            return
        start = file.read(8)
        yield start
        if path.suffix == ".safetensors":
            yield file.read(min(int.from_bytes(start, "little"), _WHOLE_BYTES))
        for number in range(_NUM_SAMPLES):
            file.seek((size - _SAMPLE_BYTES) * number // (_NUM_SAMPLES - 1))
            yield file.read(_SAMPLE_BYTES)
