"""A diffusers pipeline of the whole model, whatever of it was trained.

LoRA is merged into its weights, and is also there apart for `load_lora_weights`, in
`pytorch_lora_weights.safetensors`.
"""

from pathlib import Path

from longtake.evaluation.export.weights import save_weights
from longtake.evaluation.sampling.studio import Sampler
from longtake.models.lora import lora_state
from longtake.models.trainable import plain_copy


def write_pipeline(sampler: Sampler, folder: Path) -> None:
    """Write a folder that `from_pretrained` loads.

    Raises:
        RecipeError: diffusers has no pipeline for the run's family, codec and text encoder.
        OSError: it cannot be written.
    """
    parts, recipe = sampler.components, sampler.recipe
    at_bucket = sampler.shift(recipe.sampling, recipe.data.buckets[0])
    shift = recipe.sampling.shift or parts.defaults.shift
    parts.family.export(plain_copy(parts.model), parts.codec, parts.text, shift, at_bucket, folder)
    if lora := lora_state(parts.model):
        named = {f"transformer.{name}": value for name, value in lora.items()}
        save_weights(named, folder / "pytorch_lora_weights.safetensors")
