"""Releases that have a modular pipeline alone: written, and called as ordinary pipelines are."""

from collections.abc import Collection
from pathlib import Path
from typing import Any

import diffusers

from longtake.models import pretrained


def save(folder: Path, pipeline_class: Any, **components: Any) -> None:
    """Write what diffusers writes of a pipeline with these components."""
    with pretrained.quiet(pipeline_class):
        pipeline = pipeline_class()
        pipeline.update_components(**components)
        pipeline.save_pretrained(str(folder), overwrite_modular_index=True)


def load(folder: Path, without: Collection[str] = (), workflow: str = "", **components: Any) -> Any:
    """Load a folder's pipeline without blocks of these names; a call returns latents, in a tuple.

    `components` are not loaded from the folder.
    """
    with pretrained.quiet(diffusers.ModularPipeline):
        named = diffusers.ModularPipeline.load_config(str(folder))["_class_name"]
        found = getattr(diffusers, named)
        blocks = getattr(diffusers, found.default_blocks_name)()
        if workflow:
            blocks = blocks.get_workflow(workflow)
        for name in [name for name in blocks.sub_blocks if name.startswith(tuple(without))]:
            blocks.sub_blocks.pop(name)
        own = type(named, (_Called, found), {})
        pipeline = own(blocks=blocks, pretrained_model_name_or_path=str(folder))
        names = [each for each in pipeline.pretrained_component_names if each not in components]
        pipeline.load_components(names)
        pipeline.register_components(**components)
    missing = [name for name, each in pipeline.components.items() if each is None]
    assert not missing, missing
    return pipeline


class _Called:
    def __call__(self, *, output_type: str, **inputs: Any) -> tuple[Any]:
        assert output_type == "latent"
        return (super().__call__(**inputs, output="latents"),)  # type: ignore[misc]
