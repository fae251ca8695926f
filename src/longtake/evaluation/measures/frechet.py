"""Frechet distance between features of sampled and of real videos: FVD, FID and their kin.

Which of them it is depends on the features alone, so that the user brings what makes them (an I3D
network for FVD, an Inception network on single frames for FID) and those of real videos.
"""

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from longtake.errors import ModelError
from longtake.evaluation.measures.extra import made_of
from longtake.evaluation.measures.setting import setting
from longtake.evaluation.measures.signals import Video

EXTRACTOR = "LONGTAKE_FEATURES"
REAL = "LONGTAKE_REAL_FEATURES"

Features = NDArray[np.float64]
"""[N, D]: D numbers of each of N videos."""


def frechet_distance(one: Features, other: Features) -> float:
    """Squared Frechet distance of the normal distributions that fit two sets of features.

    |m1 - m2|^2 + tr(C1 + C2 - 2 (C1 C2)^(1/2)), of their means and covariances (Dowson and Landau,
    "The Frechet distance between multivariate normal distributions", 1982; for generated pictures
    Heusel et al., 2017). Of few videos it is far too large: compare only sets of the same size.
    """
    assert min(len(one), len(other)) > 1
    shift = one.mean(axis=0) - other.mean(axis=0)
    first, second = (np.cov(each, rowvar=False).reshape(each.shape[1], -1) for each in (one, other))
    values, vectors = np.linalg.eigh(first)
    root = (vectors * np.sqrt(values.clip(min=0))) @ vectors.T
    cross = np.sqrt(np.linalg.eigvalsh(root @ second @ root).clip(min=0)).sum()
    return float(max(0.0, shift @ shift + np.trace(first) + np.trace(second) - 2 * cross))


class Extractor:
    """Makes features of videos with a network of the user's.

    Args:
        place: a TorchScript file, or package.module:Class of an nn.Module that is made without
            arguments. It is given [1, 3, F, H, W] fp32 in [0, 1], one video at a time, and returns
            a tensor of its features, of whatever shape.

    Raises:
        RecipeError: there is no such class.
        ModelError: there is no such file, or it is no TorchScript.
    """

    def __init__(self, place: str) -> None:
        self._network: Any = made_of(place) if ":" in place else _load(Path(place))
        if isinstance(self._network, torch.nn.Module):
            self._network.eval()

    def __call__(self, videos: Sequence[Video]) -> Features:
        """[N, D] features of N videos."""
        return np.stack([self._features(videos[number]) for number in range(len(videos))])

    @torch.inference_mode()
    def _features(self, video: Video) -> Features:
        given = torch.from_numpy(np.ascontiguousarray(video)).permute(3, 0, 1, 2)[None]
        features: Features = self._network(given.float() / 255).flatten().double().cpu().numpy()
        return features


class FrechetDistance:
    """`frechet_distance` of all videos of a preset from real ones.

    The environment says what makes features, LONGTAKE_FEATURES (see `Extractor`), and where those
    of real videos lie, LONGTAKE_REAL_FEATURES: a .npy file of [N, D], made by the same.

    Raises:
        RecipeError: one of them is not set, or names what is not there.
        ModelError: what is there cannot be used.
    """

    name = "frechet_distance"

    def __init__(self) -> None:
        self._extractor = Extractor(
            setting(self.name, EXTRACTOR, "a network that makes features of videos")
        )
        place = Path(setting(self.name, REAL, "features of real videos"))
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
        """One number for all; None: one video has no covariance."""
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
    "longtake.evaluation.measures.frechet."
)


def _load(path: Path) -> Any:
    if not path.is_file():
        raise ModelError(
            f"{EXTRACTOR}={path}: there is no such file. Expected a TorchScript file, or "
            "package.module:Class of an nn.Module."
        )
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # it is what FVD networks come as
            return torch.jit.load(path, map_location="cpu")  # type: ignore[no-untyped-call]
    except RuntimeError as error:
        first = str(error).strip().splitlines()[0]
        raise ModelError(f"{EXTRACTOR}={path} is no TorchScript file: {first}.") from error
