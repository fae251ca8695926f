"""One file for ComfyUI: LoRA where a run trained one, else the whole transformer.

How ComfyUI calls the weights is for the family to say. LoRA's scale is multiplied into B, so that
there are no alphas: every reader takes the scale for 1 where there are none.
"""

from pathlib import Path

from longtake.evaluation.export.weights import save_weights
from longtake.evaluation.sampling.studio import Sampler
from longtake.models.lora import lora_state
from longtake.models.trainable import plain_copy


def write_comfyui_file(sampler: Sampler, path: Path) -> str:
    """Write a safetensors file, in the dtype that the weights are kept in.

    Returns:
        Where it belongs.

    Raises:
        RecipeError: ComfyUI has no such model.
        OSError: it cannot be written.
    """
    parts = sampler.components
    lora = lora_state(parts.model)
    weights = lora or plain_copy(parts.model).state_dict()
    name_of = parts.family.comfyui_name
    named = {name_of(name, is_lora=bool(lora)): value for name, value in weights.items()}
    assert len(named) == len(weights), "two weights have one name"
    save_weights(named, path)
    if lora:
        return "ComfyUI looks for it in models/loras."
    return "ComfyUI looks for it in models/diffusion_models; codec and text encoder are not in it."
