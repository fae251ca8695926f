"""Builds all that a recipe names: family, transformer, codec and text encoder."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn

from longtake.config import Bucket, PooledSection, Recipe, Shift, TextSection
from longtake.errors import RecipeError
from longtake.flow.timesteps import resolution_shift
from longtake.models.added import condition, main_dtype
from longtake.models.architecture import DTYPES, keep_weights_in
from longtake.models.codec import Codec, build_codec, outline_codec
from longtake.models.defaults import Defaults
from longtake.models.family import Conditioning, Family, LatentShape
from longtake.models.flops import count_flops
from longtake.models.image_codec import ALONE
from longtake.models.pretrained import locate
from longtake.models.registry import family
from longtake.models.stored import files_in
from longtake.models.text import TextEncoder, build_text, outline_text
from longtake.models.trainable import make_trainable
from longtake.models.unfilled import WHOLE, Unfilled, can_be_filled, parameters_on_meta, slots_of

Part = Literal["text", "model", "codec"]
PARTS: tuple[Part, ...] = ("text", "model", "codec")
"""In the order in which a video needs them."""


@dataclass(frozen=True)
class Components:
    """The parts of a text-to-video model; only `model` is trained."""

    family: Family
    model: nn.Module
    codec: Codec
    text: TextEncoder
    defaults: Defaults
    """What recipe keys that are unset stand for."""
    unfilled: Unfilled = WHOLE
    """What the model lacks, until it was spread over the ranks."""

    @cached_property
    def dtype(self) -> torch.dtype:
        """What most of the model's weights are in: bf16 where the recipe keeps them so."""
        return main_dtype(self.model)

    def predict_velocity(
        self, noisy_latents: Tensor, sigmas: Tensor, conditioning: Conditioning
    ) -> Tensor:
        """The model's velocity, [B, C, F, H, W]."""
        condition(self.model, conditioning)
        return self.family.predict_velocity(self.model, noisy_latents, sigmas, conditioning)

    def shift(self, shift: Shift, bucket: Bucket) -> float:
        """The recipe's shift of sigmas for clips of one shape."""
        shape = latent_shape(self.codec, bucket)
        return resolution_shift(
            shift,
            num_tokens=self.family.num_tokens(self.model, shape),
            height=bucket.height,
            width=bucket.width,
            num_latent_frames=shape.num_frames,
        )

    def bring(self, part: Part, device: torch.device) -> None:
        """Move one part to a device and the others off it: their memory is never added up."""
        if device.type == "cpu":
            return
        held: dict[Part, nn.Module | Codec | TextEncoder]
        held = {"text": self.text, "model": self.model, "codec": self.codec}
        with torch.inference_mode(mode=False):  # moved weights may be loaded into again
            for other in PARTS:
                if other != part:
                    held[other].to(torch.device("cpu"))
            if device.type == "cuda":
                torch.cuda.empty_cache()
            held[part].to(device)

    def part_bytes(self) -> dict[Part, int]:
        """Bytes of each part's weights."""
        modules = {
            "text": self.text.modules(),
            "model": [self.model],
            "codec": self.codec.modules(),
        }
        return {part: sum(map(_num_bytes, modules[part])) for part in PARTS}


def _num_bytes(module: nn.Module) -> int:
    return sum(tensor.nbytes for tensor in (*module.parameters(), *module.buffers()))


Source = Literal["here", "files", "checkpoint"]
"""Where a model gets its weights: at once and whole; or later, each rank its share of them, from
the files of `model.pretrained`, or from a checkpoint that is loaded into it."""


def assemble(
    recipe: Recipe,
    captions: Iterable[str],
    made: Path | None,
    *,
    frozen_parts: bool = True,
    weights: Source = "here",
) -> Components:
    """Build every part on the CPU; random weights follow from the recipe's seed alone.

    Args:
        recipe: the recipe; all that does not fit together in it is found here.
        captions: of the catalog, for a vocabulary (not read where the run has one).
        made: the folder of frozen parts that the run made when it began; None when it begins.
        frozen_parts: without them codec and text encoders are outlines, which know shapes but
            cannot encode: for a run whose latents and prompt embeddings are cached. Of words the
            vocabulary is the real one.
        weights: where the model gets them. Where it cannot get them later it has them at once, as
            `unfilled` of what is returned tells.

    Raises:
        RecipeError: the recipe's parts do not fit together.
        ModelError: weights cannot be loaded.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe.seed)
        is_whole = frozen_parts or recipe.codec.kind == "pixels"
        codec = build_codec(recipe.codec, made) if is_whole else outline_codec(recipe.codec)
        chosen, shapes = _check(recipe, codec)
        is_whole = frozen_parts or recipe.text.kind == "words"
        section = text_section(recipe)
        text = build_text(section, captions, made) if is_whole else outline_text(section)
        torch.manual_seed(recipe.seed)  # the model's weights do not depend on the other parts'
        model, unfilled = _build(chosen, recipe, shapes, text, weights)
        _finish(model, chosen, recipe, codec, unfilled)
    return Components(chosen, model, codec, text, chosen.defaults(recipe.model), unfilled)


def fetch(recipe: Recipe, *, frozen_parts: bool = True) -> None:
    """Download what a recipe names by repository ids, so that others on this node find it.

    Raises:
        ModelError: a part cannot be found.
    """
    model, codec, text = recipe.model, recipe.codec, recipe.text
    wanted: list[tuple[str | None, str]] = [(model.pretrained, model.subfolder)]
    if frozen_parts:
        wanted.append((codec.pretrained, codec.subfolder))
        encoders: list[tuple[str | None, TextSection | PooledSection]] = [(text.pretrained, text)]
        if text.pooled is not None:
            first = None if text.pooled.config else text.pretrained
            encoders.append((text.pooled.pretrained or first, text.pooled))
        for where, section in encoders:
            wanted += [(where, section.subfolder), (where, section.tokenizer_subfolder)]
    for where, subfolder in wanted:
        if where is not None:
            locate(where, subfolder)


def text_section(recipe: Recipe) -> TextSection:
    """The recipe's text section, with the family's `max_tokens` if it is unset."""
    section = recipe.text
    if section.max_tokens is not None or section.pretrained is None:
        return section
    tokens = family(recipe.model.family).defaults(recipe.model).max_tokens
    return section.model_copy(update={"max_tokens": tokens})


def source_of(recipe: Recipe, *, resumed: bool) -> Source:
    """Where a training's model gets its weights; a checkpoint has all that is trained."""
    if resumed and recipe.trainable.base() == "full":
        return "checkpoint"
    return "here" if recipe.model.pretrained is None else "files"


def _build(
    chosen: Family,
    recipe: Recipe,
    shapes: Sequence[LatentShape],
    text: TextEncoder,
    weights: Source,
) -> tuple[nn.Module, Unfilled]:
    """The family's model, and what it lacks."""
    files = _files(recipe) if weights == "files" else None
    if weights == "checkpoint" or files is not None:
        with parameters_on_meta():
            model = chosen.build(recipe.model, shapes, text, weights="later")
        slots = slots_of(model)
        if can_be_filled(slots, model, files):
            return model, Unfilled(slots, files)
    return chosen.build(recipe.model, shapes, text), WHOLE


def _files(recipe: Recipe) -> dict[str, Path] | None:
    section = recipe.model
    assert section.pretrained is not None
    return files_in(locate(section.pretrained, section.subfolder) / section.subfolder)


def outline(recipe: Recipe) -> Components:
    """All parts on torch's meta device: shapes and dtypes at any size, no values, in seconds.

    Neither weights nor a catalog are needed; a vocabulary of the catalog's words is taken at its
    largest. The codec and the text encoders cannot encode.

    Raises:
        RecipeError: the recipe's parts do not fit together.
        ModelError: the configuration of a pretrained part cannot be found.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe.seed)
        codec = outline_codec(recipe.codec)
        chosen, shapes = _check(recipe, codec)
        text = outline_text(text_section(recipe))
        model = chosen.build(recipe.model, shapes, text, weights=False)
        _finish(model, chosen, recipe, codec)
    return Components(chosen, model, codec, text, chosen.defaults(recipe.model))


def _check(recipe: Recipe, codec: Codec) -> tuple[Family, list[LatentShape]]:
    """The family, and the shapes of its latents, which it can take."""
    chosen = family(recipe.model.family)
    for name in chosen.references:
        if name not in recipe.data.references:
            raise RecipeError(
                f"The family {recipe.model.family} looks at a picture named {name} for each clip, "
                f"but data.references does not have it. Say where it lies, such as "
                f'data.references.{name} = "../{name}/{{stem}}.png".'
            )
    _refuse_unused_references(chosen, recipe)
    patch = chosen.patch(recipe.model)
    shapes = [latent_shape(codec, bucket, patch) for bucket in recipe.data.shapes()]
    chosen.check(recipe.model, shapes)
    return chosen, shapes


def _refuse_unused_references(chosen: Family, recipe: Recipe) -> None:
    """Refuse pictures that would be decoded and encoded, and then not looked at."""
    unused = [name for name in recipe.data.references if name not in chosen.references]
    if not unused or recipe.trainable.module is not None:  # which may use any of them
        return
    takes = ", ".join(chosen.references)
    raise RecipeError(
        f"data.references has {', '.join(unused)}, which would be read and then not used: the "
        f"family {recipe.model.family} takes {takes or 'no picture'}, and there is no "
        "trainable.module. Remove it, or name the family or module that uses it."
    )


def _finish(
    model: nn.Module,
    chosen: Family,
    recipe: Recipe,
    codec: Codec,
    unfilled: Unfilled = WHOLE,
) -> None:
    keep_weights_in(model, DTYPES[recipe.model.dtype])
    make_trainable(model, chosen, recipe.trainable, codec.channels, unfilled.slots)


def training_conditioning(
    parts: Components, recipe: Recipe, conditioning: Conditioning
) -> Conditioning:
    """What the model is told in training: a distilled one also `guidance` [B], the recipe's."""
    if not parts.family.distils_guidance(parts.model):
        return conditioning
    return conditioning | guidance_of(conditioning, recipe.model.guidance)


def guidance_of(conditioning: Conditioning, scale: float) -> Conditioning:
    """`guidance` [B] fp32: the same scale for every sample of a conditioning."""
    like = next(iter(conditioning.values()))
    return {"guidance": torch.full((len(like),), scale, device=like.device)}


def outline_conditioning(
    parts: Components, recipe: Recipe, shape: LatentShape, batch_size: int = 1
) -> Conditioning:
    """What the model is told in training about samples of a shape, on the meta device.

    Pictures that go with a clip have its rows and columns.
    """
    told = parts.text.outline()
    for name in recipe.data.references:
        told[f"{name}_latents"] = torch.empty(1, *shape._replace(num_frames=1), device="meta")
    told = {key: value.new_empty(batch_size, *value.shape[1:]) for key, value in told.items()}
    return training_conditioning(parts, recipe, told)


def latent_shape(codec: Codec, bucket: Bucket, patch: Sequence[int] = ALONE) -> LatentShape:
    """Shape of one clip's latents in a bucket.

    Args:
        codec: of the recipe.
        bucket: in pixels.
        patch: the family's; without it the codec alone has to divide the bucket.

    Raises:
        RecipeError: the bucket does not divide; names the nearest that does.
    """
    return LatentShape(codec.channels, *codec.latent_shape(bucket, patch))


def forward_flops(parts: Components, recipe: Recipe, shape: LatentShape) -> int:
    """Floating-point operations of one forward pass over one sample."""
    inputs = {
        "noisy_latents": torch.empty(1, *shape, device="meta"),
        "sigmas": torch.empty(1, device="meta"),
        **outline_conditioning(parts, recipe, shape),
    }
    return count_flops(_Asked(parts), inputs)


class _Asked(nn.Module):
    """A model as its family asks it, so that its FLOPs can be counted through `forward`."""

    def __init__(self, parts: Components) -> None:
        super().__init__()
        self.model = parts.model
        self.parts = parts

    def forward(self, noisy_latents: Tensor, sigmas: Tensor, **conditioning: Tensor) -> Tensor:
        return self.parts.predict_velocity(noisy_latents, sigmas, conditioning)
