"""Types of a recipe's values, and the base class of its sections."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    PlainSerializer,
    Strict,
    ValidationInfo,
)

from longtake.errors import RecipeError
from longtake.formatting import shorten


def _at_home(path: Path) -> Path:
    """Replace a leading ~ in a path by the home folder."""
    # Every use of such a path raises a ValueError, where callers expect an OSError.
    if "\0" in str(path):
        raise ValueError("a path cannot contain a NUL character")
    try:
        return path.expanduser()
    except RuntimeError as error:
        raise ValueError(f"{path}: {error}") from error


# TOML knows neither paths nor tuples: these two are made from strings and lists.
FilePath = Annotated[Path, Strict(False), AfterValidator(_at_home), PlainSerializer(str)]
FromList = Strict(False)
# Far above any use: a typing error is then refused in a sentence, and does not use up memory or
# run for ever.
MAX_SIDE, MAX_BATCH, MAX_STEPS = 2**16, 2**16, 10**9
MAX_SECONDS, MAX_GUIDANCE = 1e7, 1000.0

Shape = Annotated[list[Annotated[int, Field(gt=0, le=MAX_SIDE)]], Field(min_length=3, max_length=3)]
"""A bucket (clip shape) as records hold it: frames, height and width."""


def _not_reserved(name: str) -> str:
    if name in ("claims", "servers"):  # other folders below evaluations/ have these names
        raise ValueError(f"a preset cannot be called {name}; give it another name")
    return name


SectionName = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9_-]*$"), AfterValidator(_not_reserved)]


AUDIO = "clip audio"
"""Name of the clips' sound among the inputs of a batch; no input of `data.conditioning` has it."""


@dataclass(frozen=True)
class AudioFormat:
    """The sound of clips that a model takes, and the frames per second of the videos beside it."""

    rate: int  # samples per second
    channels: int
    fps: float

    def seconds(self, num_frames: int) -> float:
        return num_frames / self.fps

    def num_samples(self, num_frames: int) -> int:
        return round(self.seconds(num_frames) * self.rate)


class Section(BaseModel):
    """Base class of a recipe's sections: immutable, with strict types and no unknown keys."""

    # Strict, so that caption_dropout = true is refused rather than read as 1.0.
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


def in_words(steps: int | None, epochs: int | None) -> str:
    """Return an interval such as "500 steps" or "2 epochs"; epochs go before steps."""
    if epochs is not None:
        return "epoch" if epochs == 1 else f"{epochs} epochs"
    return f"{steps} steps"


Shift = Annotated[float, Field(gt=0, le=1000)] | Literal["release", "flux", "opensora"]
"""Timestep shift: a factor, or the name of a rule.

`release`: the rule of the pretrained model's scheduler; `flux`: exp(mu), mu linear in the number of
tokens; `opensora`: by pixels and frames.
"""

_MEMORY = re.compile(r"(\d+(?:\.\d+)?)\s*(gib|gb|mib|mb)")
_MAX_MEMORY_BYTES = 2**50
_UNIT_BYTES = {"gib": 2**30, "gb": 10**9, "mib": 2**20, "mb": 10**6}


def memory_bytes(text: str) -> int:
    """Parse an amount of memory such as "48GiB" (2**30) or "48GB" (10**9) into bytes.

    Raises:
        RecipeError: the text is not an amount of memory.
    """
    found = _MEMORY.fullmatch(text.strip().lower())
    num_bytes = 0.0 if found is None else float(found[1]) * _UNIT_BYTES[found[2]]
    if not 1 <= num_bytes <= _MAX_MEMORY_BYTES:
        raise RecipeError(
            f"{shorten(repr(text))} is not an amount of memory; write it like 48GiB or 48GB."
        )
    return int(num_bytes)


def check_memory(text: object, info: ValidationInfo) -> object:
    key = f"recompute.{info.field_name}"
    # A boolean is an int for Python; pydantic refuses it with a better sentence.
    if isinstance(text, int | float) and not isinstance(text, bool):
        raise ValueError(f'{key} is {text}; write it with its unit, such as "{text}GiB"')
    if isinstance(text, str):
        try:
            memory_bytes(text)
        except RecipeError as error:
            raise ValueError(f"{key}: {str(error).rstrip('.')}") from None
    return text
