"""Builds the family, transformer, codec and text encoder that a recipe names."""

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
from longtake.models.added_module import condition
from longtake.models.base import Conditioning, Defaults, Family, LatentShape, family
from longtake.models.codec import NO_PATCH, Codec, build_codec, outline_codec
from longtake.models.deferred_init import (
    NOTHING_DEFERRED,
    DeferredWeights,
    can_be_filled,
    deferred_parameters,
    files_in,
    parameters_on_meta,
)
from longtake.models.numerics import DTYPES, keep_weights_in, main_dtype
from longtake.models.pretrained import locate
from longtake.models.text import TextEncoder, build_text, outline_text
from longtake.models.trainable import make_trainable

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
    unfilled: DeferredWeights = NOTHING_DEFERRED
    """Parameters that get values when the model is sharded."""

    @cached_property
    def dtype(self) -> torch.dtype:
        return main_dtype(self.model)

    def predict_velocity(
        self, noisy_latents: Tensor, sigmas: Tensor, conditioning: Conditioning
    ) -> Tensor:
        condition(self.model, conditioning)
        return self.family.predict_velocity(self.model, noisy_latents, sigmas, conditioning)

    def shift(self, shift: Shift, bucket: Bucket) -> float:
        """The shift of sigmas, as a number, for clips of one shape."""
        shape = latent_shape(self.codec, bucket)
        return resolution_shift(
            shift,
            num_tokens=self.family.num_tokens(self.model, shape),
            height=bucket.height,
            width=bucket.width,
            num_latent_frames=shape.num_frames,
        )

    def bring(self, part: Part, device: torch.device) -> None:
        """Move one part to a device and the others to the CPU: one of them is there at a time."""
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
        modules = {
            "text": self.text.modules(),
            "model": [self.model],
            "codec": self.codec.modules(),
        }
        return {part: sum(map(_num_bytes, modules[part])) for part in PARTS}


def _num_bytes(module: nn.Module) -> int:
    return sum(tensor.nbytes for tensor in (*module.parameters(), *module.buffers()))


Source = Literal["here", "files", "checkpoint"]
"""Where a model gets its weights: at once and whole; or later, each rank its shard, from the files
of `model.pretrained` or from a checkpoint."""


def assemble(
    recipe: Recipe,
    captions: Iterable[str],
    made: Path | None,
    *,
    frozen_parts: bool = True,
    weights: Source = "here",
) -> Components:
    """Build every part on the CPU; random weights depend on the recipe's seed alone.

    Args:
        recipe: checked here for parts that do not fit together.
        captions: of the catalog, for a vocabulary (not read where the run has one).
        made: the folder of frozen parts that the run made when it began; None when it begins.
        frozen_parts: without them codec and text encoders have shapes but cannot encode, for a run
            whose latents and prompt embeddings are cached; a vocabulary is the real one.
        weights: where the model gets them. If it cannot get them later, it has them at once, and
            `unfilled` is empty.

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
        torch.manual_seed(recipe.seed)  # the model's weights do not depend on the other parts
        model, unfilled = _build(chosen, recipe, shapes, text, weights)
        _finish(model, chosen, recipe, codec, unfilled)
    return Components(chosen, model, codec, text, chosen.defaults(recipe.model), unfilled)


def fetch(recipe: Recipe, *, frozen_parts: bool = True) -> None:
    """Download what a recipe names by repository ids, for the other processes on this node.

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
    if resumed and recipe.trainable.base() == "full":
        return "checkpoint"
    return "here" if recipe.model.pretrained is None else "files"


def _build(
    chosen: Family,
    recipe: Recipe,
    shapes: Sequence[LatentShape],
    text: TextEncoder,
    weights: Source,
) -> tuple[nn.Module, DeferredWeights]:
    section, files = recipe.model, None
    if weights == "files":
        assert section.pretrained is not None
        files = files_in(locate(section.pretrained, section.subfolder) / section.subfolder)
    if weights == "checkpoint" or files is not None:
        with parameters_on_meta():
            model = chosen.build(section, shapes, text, weights="later")
        deferred = deferred_parameters(model)
        if can_be_filled(deferred, model, files):
            return model, DeferredWeights(deferred, files)
    return chosen.build(section, shapes, text), NOTHING_DEFERRED


def outline(recipe: Recipe) -> Components:
    """All parts on torch's meta device: shapes and dtypes at any size, in seconds.

    Needs neither weights nor a catalog; a vocabulary of the catalog's words is taken at its
    largest. Codec and text encoders cannot encode.

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
    """The family and the shapes of its latents, which it can take."""
    chosen = family(recipe.model.family)
    for name in chosen.references:
        if name not in recipe.data.references:
            raise RecipeError(
                f"The family {recipe.model.family} needs a reference image named {name} for each "
                f"clip, but data.references does not have it. Name its files, such as "
                f'data.references.{name} = "../{name}/{{stem}}.png".'
            )
    unused = [name for name in recipe.data.references if name not in chosen.references]
    if unused and recipe.trainable.module is None:  # a module may use any of them
        takes = ", ".join(chosen.references)
        raise RecipeError(
            f"data.references has {', '.join(unused)}, which would be read and then not used: the "
            f"family {recipe.model.family} takes {takes or 'no image'}, and there is no "
            "trainable.module. Remove it, or name the family or module that uses it."
        )
    patch = chosen.patch(recipe.model)
    shapes = [latent_shape(codec, bucket, patch) for bucket in recipe.data.shapes()]
    chosen.check(recipe.model, shapes)
    return chosen, shapes


def _finish(
    model: nn.Module,
    chosen: Family,
    recipe: Recipe,
    codec: Codec,
    unfilled: DeferredWeights = NOTHING_DEFERRED,
) -> None:
    keep_weights_in(model, DTYPES[recipe.model.dtype])
    make_trainable(model, chosen, recipe.trainable, codec.channels, unfilled.parameters)


def latent_shape(codec: Codec, bucket: Bucket, patch: Sequence[int] = NO_PATCH) -> LatentShape:
    """Shape of the latents of one clip in a bucket.

    Args:
        codec: of the recipe.
        bucket: in pixels.
        patch: the family's; without it only the codec has to divide the bucket.

    Raises:
        RecipeError: the bucket does not divide; names the nearest that does.
    """
    return LatentShape(codec.channels, *codec.latent_shape(bucket, patch))


def refuse_sharing(parts: Components, recipe: Recipe) -> None:
    """Refuse a recipe whose ranks cannot share the model's tokens (`parallel.context`).

    Raises:
        RecipeError: heads do not divide, a clip has too few tokens, or an added module reads them.
    """
    size = recipe.parallel.context
    if size == 1:
        return
    asked = f"parallel.context = {size}: so many processes share the tokens of each clip, "
    if (heads := parts.family.num_heads(parts.model)) % size:
        fits = ", ".join(str(n) for n in range(1, heads + 1) if not heads % n)
        raise RecipeError(
            f"{asked}and in attention each has some of the heads, but {size} does not divide the "
            f"model's {heads} heads. Take one of {fits}."
        )
    if recipe.trainable.module is not None:
        raise RecipeError(
            f"{asked}but trainable.module {recipe.trainable.module} reads all tokens of a "
            "clip after a block. Set parallel.context = 1, or leave the module out."
        )
    for bucket in recipe.data.shapes():
        num_tokens = parts.family.num_tokens(parts.model, latent_shape(parts.codec, bucket))
        if num_tokens < size:
            raise RecipeError(
                f"{asked}but a clip of {bucket} has only {num_tokens}. Take fewer processes for "
                "it, or longer clips."
            )
