"""CLIP score: how well a video's frames go with its prompt, by a CLIP model that the user has."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from longtake.errors import ModelError
from longtake.evaluation.measures.setting import setting
from longtake.evaluation.measures.signals import Video
from longtake.models.pretrained import quiet

VARIABLE = "LONGTAKE_CLIP"
_FRAMES = 8


class ClipScore:
    """100 x the cosine between the embeddings of frame and prompt, negative ones as 0; 0 to 100.

    As in Hessel et al., "CLIPScore: a reference-free evaluation metric for image captioning"
    (2021), without their factor of 2.5; mean over at most 8 frames at equal distances. Where
    the environment's LONGTAKE_CLIP says lies a `CLIPModel` of transformers with its processor: a
    folder, or an id on the hub. It runs on the CPU, beside whatever the card does.

    Raises:
        RecipeError: LONGTAKE_CLIP is not set.
        ModelError: there is no such model.
    """

    name = "clip_score"

    def __init__(self) -> None:
        place = setting(self.name, VARIABLE, "a CLIP model (a folder, or an id on the hub)")
        from transformers import CLIPModel, CLIPProcessor

        try:
            with quiet(CLIPModel):
                self._model: Any = CLIPModel.from_pretrained(place).eval()
                self._processor: Any = CLIPProcessor.from_pretrained(place)
        except (OSError, ValueError) as error:
            first = str(error).strip().splitlines()[0].rstrip(".")
            raise ModelError(
                f"{VARIABLE}={place}: no CLIP model can be loaded from there: {first}. Expected a "
                "folder with config.json, model.safetensors and the processor's files, such as "
                "`hf download openai/clip-vit-base-patch32 --local-dir clip` makes."
            ) from error

    def __call__(
        self, videos: Sequence[Video], prompts: Sequence[str], fps: float
    ) -> list[float | None]:
        """The score of each video."""
        del fps
        pairs = zip(videos, prompts, strict=True)
        return [self._score(video, prompt) for video, prompt in pairs]

    @torch.inference_mode()
    def _score(self, video: Video, prompt: str) -> float:
        count = min(_FRAMES, len(video))
        frames = [video[each] for each in np.linspace(0, len(video) - 1, count).round().astype(int)]
        inputs = self._processor(
            text=[prompt], images=frames, return_tensors="pt", padding=True, truncation=True
        )
        answer = self._model(**inputs)
        pictures, text = _unit(answer.image_embeds), _unit(answer.text_embeds)
        return 100 * max(0.0, float((pictures @ text.T).mean()))


def _unit(embeddings: Tensor) -> Tensor:
    return torch.nn.functional.normalize(embeddings, dim=-1)
