"""What the videos of a result show, and which of them a range of prompts means; torch-free."""

import re
from collections.abc import Sequence
from typing import NamedTuple

from longtake.errors import RunError
from longtake.evaluation_dir import Scores

_RANGE = re.compile(r"(\d*)(:?)(\d*)")


class Scene(NamedTuple):
    """What a video shows, whoever made it."""

    prompt: str
    seed: int
    pictures: tuple[tuple[str, str], ...] = ()
    """Name and content of each that it goes by, see `Picture`."""


def files_by_scene(scores: Scores) -> dict[Scene, str]:
    """Names of a result's videos by what they show."""
    pictures = scores["settings"].get("references", {})
    found = {}
    for video in scores["videos"]:
        number = prompt_number(video["file"]) if pictures else 0
        of_prompt = tuple((name, contents[number]) for name, contents in pictures.items())
        found[Scene(video["prompt"], video["seed"], of_prompt)] = video["file"]
    return found


def prompt_number(file: str) -> int:
    """Of a video's prompt, from 0, by `Preset.file_name`."""
    return int(file.partition("_")[0])


def of_prompts(scenes: Sequence[Scene], wanted: str | None) -> list[Scene]:
    """The scenes of the prompts that a range such as 0:4, 2: or 3 means; all if None.

    The same prompt with other pictures counts as another.

    Raises:
        RunError: it is no such range, or there are no such prompts.
    """
    known = list(dict.fromkeys(scene._replace(seed=0) for scene in scenes))
    chosen = set(known if wanted is None else _within(known, wanted))
    return [scene for scene in scenes if scene._replace(seed=0) in chosen]


def _within(known: Sequence[Scene], wanted: str) -> Sequence[Scene]:
    found = _RANGE.fullmatch(wanted.strip())
    if found is None or not any(found.groups()):
        raise RunError(f"--prompts {wanted}: expected a range such as 0:4, or a number.")
    start = int(found[1] or 0)
    end = int(found[3] or len(known)) if found[2] else start + 1
    if not 0 <= start < end <= len(known):
        raise RunError(
            f"--prompts {wanted}: there are {len(known)} prompts, counted from 0: choose from "
            f"0:{len(known)}, whose end is not part of it."
        )
    return known[start:end]
