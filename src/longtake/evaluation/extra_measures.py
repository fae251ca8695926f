"""Measures that presets name as module:Class: their Protocol, CLIP score, Frechet distance."""

import math
import os
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol, cast

import numpy as np
import torch
from numpy.typing import NDArray

from longtake.errors import LongtakeError, ModelError, RecipeError
from longtake.evaluation.measures import MEASURES, Video
from longtake.formatting import first_line
from longtake.models import pretrained
from longtake.trust import import_class

_SEE = "See Measure in longtake.evaluation.extra_measures."


class Measure(Protocol):
    """The interface of a user's measure, which presets name as module:Class."""

    name: str  # key of its values; small letters, digits and underscores

    def __call__(
        self, videos: Sequence[Video], prompts: Sequence[str], fps: float
    ) -> Sequence[float | None] | float | None:
        """Return the measure's values for all videos of a preset.

        Args:
            videos: each [F, H, W, 3] uint8 RGB. Access them one after another: each may be read
                from disk on access.
            prompts: the prompt of each video.
            fps: frames per second at which they are shown.

        Returns:
            One number for each video, None where it is not defined for it; or one number for all of
            them together, such as a Frechet distance; or None: it is not defined here.
        """


def load_extra(path: str) -> Measure:
    """Make the measure of a class "module:Class"; refuse one without a name or `__call__`."""
    made = made_of(path)
    name = getattr(made, "name", None)
    if not isinstance(name, str) or not name.isidentifier() or not callable(made):
        raise RecipeError(
            f"The measure {path} has the name {name!r} and {'a' if callable(made) else 'no'} "
            f"__call__. Give it a name such as 'clip_score' and __call__(videos, prompts, fps). "
            f"{_SEE}"
        )
    return cast("Measure", made)


def made_of(path: str) -> Any:
    """Make an object of the user's class "package.module:Class", without arguments."""
    if ":" not in path:
        raise RecipeError(
            f"The measure {path!r} is no name of a class; write it as package.module:Class."
        )
    found = import_class(path, "The measure")
    try:
        return found()
    except LongtakeError:
        raise
    except Exception as error:  # a user's class can fail in any way
        raise RecipeError(
            f"The measure {path} cannot be made: {found.__name__}() failed with "
            f"{type(error).__name__}: {error}. It is made without arguments. {_SEE}"
        ) from error


def load_extras(paths: Sequence[str]) -> list[Measure]:
    """Return the user's measures that a preset names; their names must all be different."""
    extras: dict[str, Measure] = {}
    for path in paths:
        extra = load_extra(path)
        if extra.name in MEASURES or extra.name in extras:
            raise RecipeError(
                f"The measure {path} is called {extra.name!r}, as another one is. Names in use: "
                f"{', '.join([*MEASURES, *extras])}. Call it otherwise."
            )
        extras[extra.name] = extra
    return list(extras.values())


def measure_extra(
    extra: Measure, videos: Sequence[Video], prompts: Sequence[str], fps: float
) -> tuple[list[dict[str, float]], dict[str, float]]:
    """Return the values of a user's measure: a dict for each video, and one for all together."""
    try:
        found: Any = extra(videos, prompts, fps)
        # Tensors and arrays of no dimension have `__len__`, but are single numbers.
        is_single = not hasattr(found, "__len__") or getattr(found, "ndim", 1) == 0
        # None, where a measure is not defined, is left out like NaN.
        answers = [found] if is_single else found
        values = [math.nan if each is None else float(each) for each in answers]
    except LongtakeError:
        raise
    except Exception as error:  # a user's class can fail in any way
        raise RecipeError(
            f"The measure {extra.name} failed with {type(error).__name__}: {error}. {_SEE}"
        ) from error
    if not is_single and len(values) != len(videos):
        raise RecipeError(
            f"The measure {extra.name} gave {len(values)} numbers for {len(videos)} videos; "
            "expected one for each, or a single number for all of them. " + _SEE
        )
    results = [{extra.name: value} if math.isfinite(value) else {} for value in values]
    return ([{} for _ in videos], results[0]) if is_single else (results, {})


def _setting(measure: str, variable: str, what: str) -> str:
    value = os.environ.get(variable, "")
    if not value:
        raise RecipeError(
            f"The measure {measure} needs {what}. Say where with {variable}=…, in the environment "
            "of `longtake evaluate`, or leave the measure out of the preset."
        )
    return value


VARIABLE = "LONGTAKE_CLIP"
_FRAMES = 8


class ClipScore:
    """CLIP score, a measure: 100 x the cosine of the embeddings of frame and prompt, at least 0.

    As in Hessel et al., "CLIPScore: a reference-free evaluation metric for image captioning"
    (2021), without their factor of 2.5; mean over at most 8 evenly spaced frames. The environment
    variable LONGTAKE_CLIP names a `CLIPModel` of transformers with its processor: a folder, or an
    id on the hub. It runs on the CPU.
    """

    name = "clip_score"

    def __init__(self) -> None:
        place = _setting(self.name, VARIABLE, "a CLIP model (a folder, or an id on the hub)")
        # Imported here, as no other measure needs transformers.
        from transformers import CLIPModel, CLIPProcessor

        try:
            with pretrained.quiet(CLIPModel):
                self._model: Any = CLIPModel.from_pretrained(place).eval()
                self._processor: Any = CLIPProcessor.from_pretrained(place)
        except (OSError, ValueError) as error:
            first = first_line(error).rstrip(".")
            raise ModelError(
                f"{VARIABLE}={place}: no CLIP model can be loaded from there: {first}. Expected a "
                "folder with config.json, model.safetensors and the processor's files, such as "
                "`hf download openai/clip-vit-base-patch32 --local-dir clip` makes."
            ) from error

    @torch.inference_mode()
    def __call__(
        self, videos: Sequence[Video], prompts: Sequence[str], fps: float
    ) -> list[float | None]:
        del fps
        scores: list[float | None] = []
        for video, prompt in zip(videos, prompts, strict=True):
            count = min(_FRAMES, len(video))
            places = np.linspace(0, len(video) - 1, count).round().astype(int)
            frames = [video[place] for place in places]
            # Truncated, because CLIP reads at most 77 tokens.
            inputs = self._processor(
                text=[prompt], images=frames, return_tensors="pt", padding=True, truncation=True
            )
            answer = self._model(**inputs)
            embeddings = answer.image_embeds, answer.text_embeds
            pictures, text = (torch.nn.functional.normalize(each, dim=-1) for each in embeddings)
            scores.append(100 * max(0.0, float((pictures @ text.T).mean())))
        return scores


EXTRACTOR = "LONGTAKE_FEATURES"
REAL = "LONGTAKE_REAL_FEATURES"

Features = NDArray[np.float64]
"""Features of videos by a network: an array [N, D], D features of each of N videos."""


def frechet_distance(one: Features, other: Features) -> float:
    """Return the squared Frechet distance of normal distributions fitted to two feature sets.

    |m1 - m2|^2 + tr(C1 + C2 - 2 (C1 C2)^(1/2)), of their means and covariances (Dowson and Landau,
    "The Frechet distance between multivariate normal distributions", 1982; for generated pictures
    Heusel et al., 2017). For few videos it is far too large: compare only sets of the same size.
    """
    assert min(len(one), len(other)) > 1
    shift = one.mean(axis=0) - other.mean(axis=0)
    # For a single feature np.cov returns a scalar, which is made a matrix.
    first, second = (np.cov(each, rowvar=False).reshape(each.shape[1], -1) for each in (one, other))
    # The trace of (C1 C2)^(1/2) is that of (C1^(1/2) C2 C1^(1/2))^(1/2), which is symmetric, so
    # that its eigenvalues are real.
    values, vectors = np.linalg.eigh(first)
    # With fewer videos than features a covariance is singular, and rounding makes some of its
    # eigenvalues slightly negative.
    root = (vectors * np.sqrt(values.clip(min=0))) @ vectors.T
    cross = np.sqrt(np.linalg.eigvalsh(root @ second @ root).clip(min=0)).sum()
    return float(max(0.0, shift @ shift + np.trace(first) + np.trace(second) - 2 * cross))


class Extractor:
    """Computes features of videos with the user's network: module:Class, or TorchScript."""

    def __init__(self, place: str) -> None:
        self._network: Any = made_of(place) if ":" in place else _load(Path(place))
        if isinstance(self._network, torch.nn.Module):
            self._network.eval()

    @torch.inference_mode()
    def __call__(self, videos: Sequence[Video]) -> Features:
        features = []
        for video in videos:
            # [1, 3, F, H, W] in [0, 1], as networks for videos take them.
            pixels = torch.from_numpy(np.ascontiguousarray(video)).permute(3, 0, 1, 2)[None]
            features.append(self._network(pixels.float() / 255).flatten().double().cpu().numpy())
        return np.stack(features)


class FrechetDistance:
    """A measure: the `frechet_distance` between all videos of a preset and real ones.

    The environment variable LONGTAKE_FEATURES names the network that makes features (see
    `Extractor`), and LONGTAKE_REAL_FEATURES a .npy file of [N, D] with its features of real videos.
    """

    name = "frechet_distance"

    def __init__(self) -> None:
        self._extractor = Extractor(
            _setting(self.name, EXTRACTOR, "a network that makes features of videos")
        )
        place = Path(_setting(self.name, REAL, "features of real videos"))
        try:
            self._real = np.asarray(np.load(place), np.float64)
        except (OSError, ValueError) as error:
            raise ModelError(f"{REAL}={place} cannot be read: {error}. {_MAKE}") from error
        if self._real.ndim != 2 or len(self._real) < 2:
            raise ModelError(
                f"{REAL}={place} has the shape {list(self._real.shape)}; expected [N, D], with at "
                f"least 2 videos. {_MAKE}"
            )

    def __call__(self, videos: Sequence[Video], prompts: Sequence[str], fps: float) -> float | None:
        """Return the Frechet distance of all videos; None for one video, without a covariance."""
        del prompts, fps
        if len(videos) < 2:
            return None
        found = self._extractor(videos)
        if found.shape[1] != self._real.shape[1]:
            raise ModelError(
                f"{EXTRACTOR} makes {found.shape[1]} features of a video, and {REAL} has "
                f"{self._real.shape[1]} of each. {_MAKE}"
            )
        return frechet_distance(found, self._real)


_MAKE = (
    "Make them with numpy.save(file, Extractor(network)(videos)), Extractor being that of "
    "longtake.evaluation.extra_measures."
)


def _load(path: Path) -> Any:
    if not path.is_file():
        raise ModelError(
            f"{EXTRACTOR}={path}: there is no such file. Expected a TorchScript file, or "
            "package.module:Class of an nn.Module."
        )
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # FVD networks come as TorchScript
            return torch.jit.load(path, map_location="cpu")  # type: ignore[no-untyped-call]
    except RuntimeError as error:
        first = first_line(error)
        raise ModelError(f"{EXTRACTOR}={path} is no TorchScript file: {first}.") from error
