"""Modular pipelines of diffusers: text encoded by their blocks, and their folders in exports."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from longtake.config import ModelSection
from longtake.fsio import write_json
from longtake.models import releases


def is_modular(pipeline_class: type[Any]) -> bool:
    import diffusers

    return issubclass(pipeline_class, diffusers.ModularPipeline)


def text_pipeline(pipeline_class: Any, parts: Mapping[str, Any]) -> Any:
    """Make a pipeline of the block `text_encoder` alone, as a family's text contract calls it.

    Args:
        pipeline_class: a modular pipeline's class.
        parts: encoders, tokenizers and processors by their names in the pipeline.
    """
    import diffusers

    blocks = getattr(diffusers, pipeline_class.default_blocks_name)()
    pipeline = blocks.sub_blocks["text_encoder"].init_pipeline()
    pipeline.register_components(**parts)
    return pipeline


def save_pipeline(
    pipeline_class: Any, components: Mapping[str, Any], section: ModelSection, folder: Path
) -> None:
    """Write a folder that `ModularPipeline.from_pretrained` and `load_components` load.

    Parts of the release that are not in `components`, such as one that rewrites prompts, are loaded
    from where the release has them; `components` from the folder, wherever it is moved.
    """
    import diffusers

    where, index = section.release(), dict[str, Any]()
    if where is not None:
        here = Path(where).expanduser()
        source = str(here.resolve()) if here.is_dir() else where
        index = {
            name: releases.modular_entry(entry, source)
            for name, entry in releases.modular_index(where).items()
        }
    for name, component in components.items():
        component.save_pretrained(str(folder / name))
        kind = type(component).__name__  # perhaps a class of the user's own with diffusers' name
        owner = ["diffusers" if hasattr(diffusers, kind) else "transformers", kind]
        index[name] = releases.modular_entry([*owner, {"type_hint": owner, "subfolder": name}])
    own = {
        "_class_name": pipeline_class.__name__,
        "_blocks_class_name": pipeline_class.default_blocks_name,
        "_diffusers_version": diffusers.__version__,
    }
    write_json(folder / releases.MODULAR_INDEX, index | own)
