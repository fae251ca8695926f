"""LoRA alone, in peft's own format."""

from pathlib import Path

from longtake.evaluation.export.weights import save_weights
from longtake.evaluation.sampling.studio import Sampler
from longtake.models.lora import adapter_config, lora_state

PREFIX = "base_model.model."
"""Of names in peft's files; diffusers' `load_lora_adapter` takes it as `prefix`."""


def write_adapter(sampler: Sampler, folder: Path) -> None:
    """Write a folder that `peft.PeftModel.from_pretrained(base_model, folder)` loads.

    Raises:
        OSError: it cannot be written.
    """
    model = sampler.components.model
    named = {f"{PREFIX}{name}": value for name, value in lora_state(model).items()}
    save_weights(named, folder / "adapter_model.safetensors")
    adapter_config(model, sampler.recipe.model.pretrained).save_pretrained(str(folder))
