"""Encodes clips and captions for a cache, wherever it is done: here, or on a cluster's workers.

One sample is encoded after the other, whoever does it, so that a cache's files do not depend on how
the work was divided. On a CPU they could depend on the number of threads that sum up a product:
workers compute with as many as this process would.
"""

from abc import abstractmethod
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TypeVar

import torch
from rich.console import Console
from torch import Tensor

from longtake.config import Recipe
from longtake.data.cache import Cache
from longtake.data.crews.errand import Crew, Errand, Needs, Sign
from longtake.data.fill import (
    EncodeCaption,
    EncodePixels,
    Given,
    Missing,
    Progress,
    Report,
    fill_latents,
    fill_prompts,
    refuse_too_many,
)
from longtake.errors import DataError
from longtake.models.assemble import text_section
from longtake.models.codec import Codec, build_codec
from longtake.models.text import NO_CAPTION, TextEncoder, build_text
from longtake.parallel.mesh import pick_device
from longtake.progress import counted

_Part = TypeVar("_Part")

_MOST_AT_ONCE = 32
_SHARES = 64
_SILENCE_SECONDS = 3600.0  # weights may have to be read, and a long clip gives no sign


def encode_videos(codec: Codec, videos: Tensor) -> Tensor:
    """Latents [B, C, F', H', W'] of videos [B, 3, F, H, W] uint8."""
    return torch.cat([codec.encode(videos[place : place + 1]) for place in range(len(videos))])


def encode_captions(text: TextEncoder, captions: Sequence[str]) -> dict[str, Tensor]:
    """What a model is told of captions: named tensors, each [B, ...]."""
    each = [text.encode([caption]) for caption in captions]
    return {name: torch.cat([told[name] for told in each]) for name in each[0]}


def pixels_by(codec: Codec, device: torch.device) -> EncodePixels:
    """What encodes windows, one after the other."""
    return lambda pixels: codec.encode(torch.from_numpy(pixels)[None].to(device))[0]


def captions_by(text: TextEncoder) -> EncodeCaption:
    """What encodes captions, one after the other."""

    def encode(caption: str) -> dict[str, torch.Tensor]:
        return {name: told[0] for name, told in text.encode([caption]).items()}

    return encode


@dataclass(frozen=True)
class _Encoding(Errand[Sequence[_Part], Report]):
    """Add to a cache what some parts lack; the files are written by whoever encodes them.

    Attributes:
        recipe: of which data, codec and text say what to encode by what.
        made: the folder of parts that are pretrained nowhere.
        codec: fingerprint of the codec.
        text: fingerprint of the text encoder.
        threads: to compute with on a CPU.
    """

    recipe: Recipe
    made: Path
    codec: str
    text: str
    threads: int = field(default_factory=torch.get_num_threads)
    doing = "encoding"
    silence_seconds: float = _SILENCE_SECONDS

    @property
    def needs(self) -> Needs:  # type: ignore[override]  # it follows from the recipe
        return Needs(self.threads, takes_gpu=self.recipe.training.device != "cpu")

    @property
    def folders(self) -> tuple[Path, ...]:
        return (self.cache.folder / "aside",)

    @cached_property
    def cache(self) -> Cache:
        folder, data = self.recipe.data.cache, self.recipe.data
        assert folder is not None
        return Cache(folder, codec=self.codec, text=self.text, data=data, no_caption=NO_CAPTION)

    @cached_property
    def device(self) -> torch.device:
        torch.set_num_threads(self.threads)
        return pick_device(self.recipe.training.device)

    def lost(self, item: Sequence[_Part], reason: str) -> Report:
        raise DataError(
            f"{reason}. It was at {len(item)} of them, the first {self.name(item[0])}. The same "
            "command again goes on where this one was."
        )

    @abstractmethod
    def name(self, part: _Part) -> str:
        """What a part is called where it could not be encoded."""


class _EncodingClips(_Encoding[Given]):
    """Add the windows of some clips and their further pictures."""

    @cached_property
    def _encode(self) -> EncodePixels:
        codec = build_codec(self.recipe.codec, self.made)
        codec.to(self.device)
        return pixels_by(codec, self.device)

    def do(self, item: Sequence[Given], alive: Sign) -> Report:
        report = Report()
        fill_latents(self.cache, item, self.recipe.data, self._encode, report, _each_time(alive))
        return report

    def name(self, part: Given) -> str:
        return part.clip.path

    def reads(self, item: Sequence[Given]) -> str:
        return item[0].clip.media.path


class _EncodingCaptions(_Encoding[str]):
    """Add some captions."""

    @cached_property
    def _encode(self) -> EncodeCaption:
        text = build_text(text_section(self.recipe), (), self.made)
        text.to(self.device)
        return captions_by(text)

    def do(self, item: Sequence[str], alive: Sign) -> Report:
        report = Report()
        fill_prompts(self.cache, item, self._encode, report, _each_time(alive))
        return report

    def name(self, part: str) -> str:
        return repr(part)


def _each_time(alive: Sign) -> Progress:
    """Progress as a sign of life."""

    def tell(done: int, total: int) -> None:
        alive()

    return tell


def fill_on(
    crew: Crew,
    missing: Missing,
    recipe: Recipe,
    made: Path,
    fingerprints: tuple[str, str],
    console: Console,
    report: Report,
) -> None:
    """Have a crew add what a cache lacks.

    Args:
        crew: who encodes.
        missing: what.
        recipe: of which data, codec and text say by what.
        made: the folder of parts that are pretrained nowhere, which the crew can see.
        fingerprints: of the codec and of the text encoder.
        console: where progress is shown.
        report: is told what was done.

    Raises:
        DataError: the crew cannot work, the cache cannot be written, or too many clips cannot be
            decoded.
        ModelError: codec or text encoder cannot be loaded.
    """
    given = (made.resolve(), *fingerprints)
    captions, places = missing.captions, [place.given() for place in missing.places]
    most = recipe.data.max_quarantined_clips
    _add(
        crew, _EncodingCaptions(recipe, *given), captions, "cache: captions", console, report, most
    )
    _add(crew, _EncodingClips(recipe, *given), places, "cache: clips", console, report, most)


def _add(
    crew: Crew,
    errand: _Encoding[_Part],
    parts: Sequence[_Part],
    label: str,
    console: Console,
    report: Report,
    most_failures: int,
) -> None:
    if not parts:
        return
    count = max(1, min(_MOST_AT_ONCE, len(parts) // _SHARES))
    shares = [parts[start : start + count] for start in range(0, len(parts), count)]
    done = 0
    with counted(console, label) as advance, closing(crew.work(errand, shares)) as reports:
        for number, made in reports:
            report.add(made)
            refuse_too_many(list(report.failures.values()), most_failures)
            done += len(shares[number])
            advance(done, len(parts))
