"""Captioner for `data caption`: models of transformers that describe pictures, from a folder.

Only local files are read, weights only from safetensors, and no code beside the weights is run.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from longtake import errors
from longtake.formatting import one_line
from longtake.models.pretrained import quiet, without_values

PROMPT = "Describe what this video shows in one or two plain sentences."


class TransformersCaptioner:
    """Captions by an image-text-to-text model of transformers, such as Qwen2.5-VL or BLIP.

    Args:
        model: a folder with config.json, the processor's files and weights in safetensors.
        prompt: question to a chat model, or text that another model continues (by default none).
        max_new_tokens: the most tokens that are generated for a caption.
        device: by default "cuda" if there is one, else "cpu".
        dtype: dtype of the weights, such as "bfloat16"; by default as they are stored.

    Raises:
        ModelError: the folder holds no such model, or needs code or weights that are not read.
    """

    def __init__(
        self,
        model: str,
        prompt: str | None = None,
        max_new_tokens: int = 128,
        device: str | None = None,
        dtype: str = "auto",
    ) -> None:
        from transformers import AutoModelForImageTextToText, AutoProcessor

        folder = Path(model).expanduser()
        if not (folder / "config.json").is_file():
            raise errors.ModelError(
                f"{model} is no folder with a config.json. Name a local folder that holds a model "
                "of transformers; nothing is downloaded here."
            )
        if not any(folder.glob("*.safetensors")):
            raise errors.ModelError(
                f"{model} has no weights in safetensors, and others are not read. Save the model "
                "with save_pretrained(...) of transformers."
            )
        self._device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        # A folder from elsewhere may name code of its own, which is not run.
        safe: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
        try:
            with quiet(AutoProcessor):
                self._processor: Any = AutoProcessor.from_pretrained(str(folder), **safe)
                weights, report = AutoModelForImageTextToText.from_pretrained(
                    str(folder), use_safetensors=True, dtype=dtype, output_loading_info=True, **safe
                )
        except Exception as error:  # each model's files raise their own kinds
            reason = one_line(error)[:400].rstrip(".")
            raise errors.ModelError(
                f"No captioner can be loaded from {folder}: {reason}. Expected a model of "
                "transformers for image-text-to-text with its processor; code beside the weights "
                "is not run."
            ) from error
        if missing := without_values(report):
            raise errors.ModelError(
                f"The weights in {folder} leave {len(missing)} tensors without values, such as "
                f"{missing[0]}. They belong to another model or another version of transformers."
            )
        self._model: Any = weights.to(self._device).eval()
        self._max_new_tokens = max_new_tokens
        self._is_chat = bool(getattr(self._processor, "chat_template", None))
        self._prompt = (PROMPT if self._is_chat else "") if prompt is None else prompt
        if (tokenizer := getattr(self._processor, "tokenizer", None)) is not None:
            tokenizer.padding_side = "left"  # prompts end where generation begins

    def captions(self, frames: Sequence[NDArray[np.uint8]], clips: Sequence[object]) -> list[str]:
        """Write a caption for each clip; see `Captioner` in longtake.data.generated_captions.

        A model without a chat template is shown one frame of each clip, the middle one.
        """
        del clips
        with torch.inference_mode():
            inputs = self._prepare(frames).to(self._device, self._model.dtype)
            tokens = self._model.generate(
                **inputs, max_new_tokens=self._max_new_tokens, do_sample=False
            )
        asked = inputs.get("input_ids")
        if asked is not None and torch.equal(tokens[:, : asked.shape[1]], asked):
            tokens = tokens[:, asked.shape[1] :]  # models differ in whether they repeat it
        texts = self._processor.batch_decode(tokens, skip_special_tokens=True)
        return [" ".join(text.split()) for text in texts]

    def _prepare(self, frames: Sequence[NDArray[np.uint8]]) -> Any:
        if not self._is_chat:
            shown = [Image.fromarray(video[len(video) // 2]) for video in frames]
            prompts = {"text": [self._prompt] * len(shown), "padding": True}
            prompts = prompts if self._prompt else {}
            return self._processor(images=shown, return_tensors="pt", **prompts)
        pictures = [[Image.fromarray(frame) for frame in video] for video in frames]
        texts = []
        for video in frames:
            question = [*({"type": "image"} for _ in video), {"type": "text", "text": self._prompt}]
            message = [{"role": "user", "content": question}]
            texts.append(self._processor.apply_chat_template(message, add_generation_prompt=True))
        return self._processor(images=pictures, text=texts, padding=True, return_tensors="pt")
