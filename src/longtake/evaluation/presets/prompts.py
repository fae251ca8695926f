"""Finds prompts; reads files of them strictly: a line more or less would shift the whole row."""

from pathlib import Path

from longtake.config import Bucket, PresetSection
from longtake.errors import RecipeError
from longtake.evaluation.presets.places import find_file

_OURS = Path(__file__).with_name("prompts")
_SHOWN = 10
"""Lines that an error names."""


def find_prompts(section: PresetSection, bucket: Bucket, folder: Path | None) -> tuple[str, ...]:
    """The prompts of a preset; where it names none, those that come with longtake.

    Args:
        section: what is said about the preset.
        bucket: the videos' size; images have other prompts.
        folder: of the file that names the prompts file, which is looked for there first.

    Raises:
        RecipeError: there is no such file, or prompts are empty.
    """
    if section.prompts_file is not None:
        return read_prompts(find_file("prompts_file", section.prompts_file, folder))
    if section.prompts is None:
        return read_prompts(_OURS / ("images.txt" if bucket.num_frames == 1 else "videos.txt"))
    empty = [str(number) for number, each in enumerate(section.prompts) if not each.strip()]
    if empty:
        raise RecipeError(f"prompts[{', '.join(empty)}] are empty, counted from 0. Remove them.")
    return section.prompts


def read_prompts(path: Path) -> tuple[str, ...]:
    """The prompts of a file, in its order, without the spaces around them.

    Raises:
        RecipeError: the file is missing, empty, has empty lines, or is no UTF-8; names the lines.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise RecipeError(
            f"The prompts file {path} cannot be read: {error.strerror or error}."
        ) from None
    lines = _decoded(content, path).split("\n")
    if not lines[-1].strip():
        lines.pop()  # what stands behind the last line's end
    if not any(line.strip() for line in lines):
        raise RecipeError(f"The prompts file {path} is empty. Write one prompt a line.")
    prompts = tuple(line.strip() for line in lines)
    empty = [str(number) for number, prompt in enumerate(prompts, 1) if not prompt]
    if empty:
        more = ", ..." if len(empty) > _SHOWN else ""
        which = (
            f"lines {', '.join(empty[:_SHOWN])}{more} are" if empty[1:] else f"line {empty[0]} is"
        )
        raise RecipeError(
            f"The prompts file {path} cannot be used: {which} empty. Write one prompt a line, "
            "without empty lines between them."
        )
    return prompts


def _decoded(content: bytes, path: Path) -> str:
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        # Counted in the bytes as they are; Python counts from behind a byte order mark.
        start = error.start + (len(content) - len(error.object))
        line = content[:start].count(b"\n") + 1
        raise RecipeError(
            f"The prompts file {path} is not UTF-8: line {line} has the byte "
            f"0x{content[start]:02x}. Save it as UTF-8."
        ) from None
