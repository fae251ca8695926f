"""What someone asks a sampler for; torch-free, so that a preset can be read without a model."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class Request:
    """One video that someone wants."""

    prompt: str
    seed: int
    references: Mapping[str, Path] = field(default_factory=dict)
    """Pictures that it goes by, for a model that was trained with such: images or videos, of which
    the first frame counts, by their names in `data.references`."""
