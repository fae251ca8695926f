"""Releases with two transformers, each for a part of the noise levels, such as Wan 2.2 A14B.

`transformer` serves the sigmas from boundary_ratio on (the `high` expert), `transformer_2` those
below it (`low`). A run trains one of them; the other is frozen and takes part in sampling alone.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

from longtake.config import EXPERT_FOLDERS, Expert, FlowSection, ModelSection
from longtake.errors import RecipeError
from longtake.models import release_checks, releases
from longtake.models.streamed import StreamedBlocks


@dataclass(frozen=True)
class Experts:
    """The two transformers (experts) of a release, and the sigma at which one takes over."""

    boundary: float
    """The lowest sigma that the high-noise transformer serves, after the shift, in the open
    interval (0, 1)."""
    trained: Expert

    @property
    def other(self) -> Expert:
        return "low" if self.trained == "high" else "high"

    @property
    def sigma_range(self) -> tuple[float, float]:
        """Range of sigmas that the trained transformer serves; the boundary belongs to `high`."""
        return (self.boundary, 1.0) if self.trained == "high" else (0.0, self.boundary)

    def sigmas_within(self, flow: FlowSection) -> tuple[float, float]:
        """Return the range of sigmas (low, high) that the run trains.

        Raises:
            RecipeError: the recipe asks for sigmas that the expert never serves.
        """
        low, high = self.sigma_range
        # The default value: it stands for all that the expert serves, not for sigmas of the other
        # one.
        if flow.sigma_range == (0.0, 1.0):
            return low, high
        first, last = flow.sigma_range
        if first < low or last > high:
            raise RecipeError(
                f"flow.sigma_range is [{first:g}, {last:g}], but model.expert = "
                f'"{self.trained}" serves sigmas from {low:g} to {high:g} alone, by the release\'s '
                "boundary_ratio. Leave flow.sigma_range out, or narrow it to a part of these."
            )
        return first, last


def read_experts(section: ModelSection) -> Experts | None:
    """Read the boundary between a release's two transformers; None for a model that has one."""
    if section.expert is None or section.pretrained is None:
        return None
    pipeline = releases.read_release(section).pipeline
    release_checks.refuse_wrong_expert(pipeline, section)
    return Experts(float(pipeline["boundary_ratio"]), section.expert)


@dataclass(frozen=True)
class OtherExpert:
    """The transformer that a run does not train, frozen; on a GPU its blocks are streamed."""

    model: nn.Module
    dtype: Literal["fp32", "bf16"]
    """Dtype of the model's weights; streamed weights are None, so the model cannot tell it."""
    streamed: StreamedBlocks | None = None

    def bring(self, device: torch.device) -> None:
        """Move the transformer's unstreamed weights to a device.

        On the CPU, the GPU buffers of streamed weights are freed, too.
        """
        if device.type == "cpu" and self.streamed is not None:
            self.streamed.free_buffers()
        self.model.to(device)


class ExpertPair(nn.Module):
    """Both transformers of a release, named by their folders, for the export of a pipeline."""

    def __init__(self, trained: Expert, model: nn.Module, other: nn.Module) -> None:
        super().__init__()
        # `EXPERT_FOLDERS` lists the high-noise expert first.
        pair = (model, other) if trained == "high" else (other, model)
        for folder, each in zip(EXPERT_FOLDERS.values(), pair, strict=True):
            self.add_module(folder, each)
