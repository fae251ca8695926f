"""The components of a model (family, transformer, codec, text encoder): built, moved, outlined.

An outline has shapes and dtypes on torch's meta device, and no values.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn

from longtake import config
from longtake.errors import RecipeError
from longtake.flow import timesteps
from longtake.flow.shift import ClipSize, ShiftRule, named_rule
from longtake.fsio import read_record, write_json
from longtake.models import (
    added_module,
    deferred_init,
    numerics,
    pretrained,
    recognition,
    release_checks,
    releases,
    trainable,
)
from longtake.models.audio import audio_format
from longtake.models.base import (
    FAMILIES,
    Conditioning,
    Defaults,
    Family,
    LatentShape,
    family,
    family_of,
    latent_shape,
)
from longtake.models.codec import Codec, build_codec, outline_codec
from longtake.models.experts import Experts, OtherExpert, read_experts
from longtake.models.quantized import quantize_linears
from longtake.models.recipe_checks import fit_latents, trained_shapes
from longtake.models.stored_weights import find_in_one_file
from longtake.models.text import TextEncoder, build_text, outline_text, place_text
from longtake.parallel import attention_rules

Part = Literal["text", "model", "codec"]
PARTS: tuple[Part, ...] = ("text", "model", "codec")
"""Names of a model's parts, in the order in which sampling a video needs them."""


@dataclass(frozen=True)
class Components:
    """The parts of a text-to-video model; only `model` is trained."""

    family: Family
    model: nn.Module
    codec: Codec
    text: TextEncoder
    defaults: Defaults
    unfilled: deferred_init.DeferredWeights = deferred_init.NOTHING_DEFERRED
    """Parameters of the model that get their values only when it is sharded."""
    stays: frozenset[Part] = frozenset()
    """Parts that `bring` never moves between devices, since training uses them between two
    samplings."""
    experts: Experts | None = None
    """The release's two transformers (for high and low noise), if `model` is one of them."""
    unconditional: str | None = None
    """Folder of the release's transformer for the second pass of guidance, if it is another one."""
    other: OtherExpert | None = None
    """The release's transformer that is not trained, for sampling; it is on the device while
    `model` is."""

    @cached_property
    def dtype(self) -> torch.dtype:
        return numerics.main_dtype(self.model)

    def predict_velocity(
        self, noisy_latents: Tensor, sigmas: Tensor, conditioning: Conditioning
    ) -> Tensor:
        added_module.condition(self.model, noisy_latents, sigmas, conditioning)
        return self.family.predict_velocity(self.model, noisy_latents, sigmas, conditioning)

    def predict_streams(
        self, video: Tensor, audio: Tensor, sigmas: Tensor, conditioning: Conditioning
    ) -> tuple[Tensor, Tensor]:
        """Predict the velocities of noisy video, at `sigmas`, and of the noisy audio beside it."""
        at = self.audio_sigmas(sigmas)
        conditioning = conditioning | {"audio": audio, "audio_sigmas": at}
        added_module.condition(self.model, video, sigmas, conditioning)
        return self.family.predict_streams(self.model, video, sigmas, conditioning)

    def audio_sigmas(self, sigmas: Tensor) -> Tensor:
        """Return the sigmas of the audio where its video has these."""
        return timesteps.shift_sigmas(sigmas, self.defaults.audio_shift)

    def shift_rule(self, shift: config.Shift | None) -> ShiftRule:
        """Return the rule by which sigmas are shifted, for a recipe's value.

        None and `release` name the model's own rule.
        """
        if shift is None or shift == "release":
            return self.defaults.shift
        return named_rule(shift)

    def shift(
        self, shift: config.Shift | None, bucket: config.Bucket, num_steps: int | None = None
    ) -> float:
        """Return the shift of sigmas, as a number, for clips of one shape.

        Args:
            shift: the recipe's value.
            bucket: the clips' shape.
            num_steps: number of sampling steps, on which FLUX.2's rule depends. None, in training,
                takes the release's own number, so that no key of sampling changes what is trained,
                and limits the tokens to those that the rule was made for.
        """
        shape = latent_shape(self.codec, bucket)
        num_tokens = self.family.block.num_tokens(self.model, shape)
        size = ClipSize(num_tokens, bucket.height, bucket.width, shape.num_frames)
        rule = self.shift_rule(shift)
        if num_steps is None:
            return rule.factor(rule.within_range(size), self.defaults.num_inference_steps)
        return rule.factor(size, num_steps)

    def sample_sigmas(
        self, uniform: Tensor, flow: config.FlowSection, bucket: config.Bucket
    ) -> Tensor:
        """Map uniform numbers to the sigmas trained for clips of one shape."""
        return timesteps.sample_sigmas(
            uniform,
            flow.timestep_sampling,
            mean=flow.logit_mean,
            std=flow.logit_std,
            scale=flow.mode_scale,
            shift=self.shift(flow.shift, bucket),
            sigma_range=self.sigma_range(flow),
            uniform_share=self.defaults.uniform_share if flow.shift == "release" else 0.0,
        )

    def sigma_range(self, flow: config.FlowSection) -> tuple[float, float]:
        """Return the lowest and the highest sigma that is trained."""
        return flow.sigma_range if self.experts is None else self.experts.sigmas_within(flow)

    @property
    def has_other(self) -> bool:
        """Return True if another transformer of the release takes part in sampling alone."""
        return self.experts is not None or self.unconditional is not None

    def with_other(self) -> "Components":
        """Return components for sampling with the release's other transformer as the model."""
        assert self.other is not None
        return replace(self, model=self.other.model, other=None)

    def bring(self, part: Part | None, device: torch.device) -> None:
        """Move one part (codec, text ...) to a device and the others to the CPU.

        None moves all parts to the CPU. A part on the meta device, without weights, is left there.
        """
        if device.type == "cpu":
            return
        if self.other is not None and part != "model":
            self.other.bring(torch.device("cpu"))
        held: dict[Part, nn.Module | Codec | TextEncoder]
        held = {"text": self.text, "model": self.model, "codec": self.codec}
        # The other parts leave first: two of them may not fit on the device.
        for other, modules in self._modules().items():
            has_weights = not any(tensor.is_meta for each in modules for tensor in _tensors(each))
            if other != part and other not in self.stays and has_weights:
                held[other].to(torch.device("cpu"))
        # Freed blocks have the sizes of the old part's tensors: kept in the allocator's cache, they
        # would add to the memory that the next part takes.
        if device.type == "cuda":
            torch.cuda.empty_cache()
        if part == "text" and part not in self.stays:
            place_text(self.text, device)
        elif part is not None and part not in self.stays:
            held[part].to(device)
        if self.other is not None and part == "model":
            self.other.bring(device)

    def part_bytes(self) -> dict[Part, int]:
        return {
            part: sum(tensor.nbytes for each in modules for tensor in _tensors(each))
            for part, modules in self._modules().items()
        }

    def _modules(self) -> dict[Part, Sequence[nn.Module]]:
        codec = self.codec.modules()
        return {"text": self.text.modules(), "model": [self.model], "codec": codec}


def _tensors(module: nn.Module) -> list[Tensor]:
    return [*module.parameters(), *module.buffers()]


Kinds = Mapping[str, config.Quantization]
"""Number format of the quantised blocks' frozen linear layers, by block's name."""
_KINDS = "quantized.json"

Source = Literal["here", "files", "checkpoint", "seed"]
"""Source of a model's weights. `here` gives the whole model its weights at once; the others give
each rank's shard its weights later, from the files of `model.pretrained`, from a checkpoint, or
drawn from the seed.
"""


def assemble(
    recipe: config.Recipe,
    captions: Iterable[str],
    made: Path | None,
    *,
    frozen_parts: bool = True,
    weights: Source = "here",
    quantized: Kinds | None = None,
) -> Components:
    """Build every part on the CPU; random weights depend on the recipe's seed alone.

    Args:
        recipe: checked here for parts that do not fit together.
        captions: captions of the catalog, for a vocabulary; not read if the run has one.
        made: the folder of frozen parts that the run made when it began; None when it begins.
        frozen_parts: without them codec and text encoders have shapes but cannot encode, for a run
            whose latents and prompt embeddings are cached; a vocabulary is the real one.
        weights: source of the model's weights. A model that cannot be filled later is built with
            its weights, and `unfilled` is empty.
        quantized: formats of the blocks, for model.quantize = "auto" before the run begins;
            later they are read in `made`.

    Raises:
        RecipeError: the recipe's parts do not fit together.
        ModelError: weights cannot be loaded.
    """
    # Every model of a training is built here, so no attention runs before faulty kernels are
    # barred.
    attention_rules.guard_attention()
    # Random numbers of the caller go on as if nothing had been built. No devices: weights are drawn
    # on the CPU, and forking the generators of GPUs would start CUDA.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe.seed)
        chosen, section = chosen_family(recipe.model), recipe.codec
        if frozen_parts:
            codec = build_codec(section, chosen.frozen.codec, made)
        else:
            codec = outline_codec(section, chosen.frozen.codec)
        shapes = fit_latents(recipe, chosen, codec)
        if frozen_parts or recipe.text.kind == "words":
            text = build_text(text_section(recipe), chosen, captions, made)
        else:
            text = outline_text(text_section(recipe), chosen)
        torch.manual_seed(recipe.seed)  # the model's weights do not depend on the other parts
        source: Source = weights
        # From files tensor by tensor: a quantised model may not fit memory in full precision.
        if recipe.model.quantize != "none" and recipe.model.pretrained is not None:
            source = "files"
        model, unfilled = _build(chosen, recipe, shapes, text, source)
        chosen.block.note_inputs(model, recipe.model_inputs())
        kinds = _kinds(recipe, added_module.block_names(model, chosen, ("*",)), quantized, made)
        defaults = chosen.defaults(recipe.model)
        parts = Components(chosen, model, codec, text, defaults, unfilled)
        parts = _finish(parts, recipe, kinds)
        if weights == "here" and unfilled.parameters:  # read and quantised tensor by tensor
            unfilled.give_memory(model, torch.device("cpu"))
            unfilled.fill()
            parts = replace(parts, unfilled=deferred_init.NOTHING_DEFERRED)
    return parts


def build_frozen_parts(
    recipe: config.Recipe, made: Path, *, with_text: bool
) -> tuple[Codec, TextEncoder]:
    """Build codec and text encoder of a run that has begun, on the CPU (see `assemble`).

    Without `with_text` the text encoder has shapes, but cannot encode.
    """
    chosen, section = family_of(recipe.model), text_section(recipe)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe.seed)
        codec = build_codec(recipe.codec, chosen.frozen.codec, made)
        if with_text or section.kind == "words":
            return codec, build_text(section, chosen, (), made)
        return codec, outline_text(section, chosen)


def fetch(recipe: config.Recipe, *, frozen_parts: bool = True) -> dict[str, Path]:
    """Download all models and tokenizers that a recipe names, for all processes on this node.

    Of a release with two transformers both are downloaded, if the run samples while it trains.

    Returns:
        The folders of weights and tokenizers, by key and name of the part.

    Raises:
        ModelError: a part cannot be found.
    """
    chosen, second = chosen_family(recipe.model), recipe.text.second_encoder()
    parts = chosen.frozen
    located: dict[str, Path] = {}

    def locate(key: str, where: str, folder: str) -> None:
        located[f"{key}.pretrained {folder}"] = pretrained.locate(where, folder) / folder

    if (release := recipe.model.release()) is not None:
        own, file = recipe.model.folder(), recipe.model.one_file()
        pair = [own, chosen.unconditional]
        if recipe.model.expert is not None:
            pair = [*config.EXPERT_FOLDERS.values()]
        for folder in filter(None, pair if recipe.sampling.in_training else [own]):
            if file is None or folder != own:
                locate("model", release, folder)
        if file is not None:
            located["model.pretrained"] = file
    if not frozen_parts:
        return located
    for key, where, part in (
        ("codec", recipe.codec.pretrained, parts.codec),
        *(("codec", recipe.codec.pretrained, part) for part in parts.codec.audio),
        ("text", recipe.text.pretrained, parts.text),
        ("text.pooled", None if second is None else second.pretrained, parts.pooled),
        ("text", recipe.text.pretrained, parts.processor),
        *(("text", recipe.text.pretrained, part) for part in parts.further),
    ):
        if where is None or part is None:
            continue
        # A release need not have the further parts.
        if part not in parts.further or releases.has_part(where, part):
            there = releases.find_part(where, part)
            for folder in filter(None, (there.folder, there.tokenizer)):
                locate(key, where, folder)
    return located


def chosen_family(section: config.ModelSection) -> Family:
    """Return the model family that a section names; ModelError if its release is another's."""
    recognition.refuse_other_family(section, FAMILIES)
    if (release := section.release()) is not None:
        release_checks.refuse_wrong_expert(releases.pipeline_index(release), section)
    chosen = family_of(section)
    if section.transformer_class is not None and not hasattr(chosen, "transformer_class"):
        raise RecipeError(
            f"model.transformer_class = {section.transformer_class!r} takes the place of a "
            f"transformer of diffusers, and the family {section.family} has none. A family of your "
            "own builds any model: docs/guides/modules.md."
        )
    return chosen


def audio_wanted(recipe: config.Recipe) -> config.AudioFormat | None:
    """Return the sound of clips that the model takes, by the configuration of its audio codec."""
    part = family_of(recipe.model).frozen.codec
    return audio_format(recipe, outline_codec(recipe.codec, part).audio) if part.audio else None


def text_section(recipe: config.Recipe) -> config.TextSection:
    """Return the recipe's text section, in which an unset `max_tokens` gets the family's value."""
    section = recipe.text
    if section.max_tokens is not None or section.pretrained is None:
        return section
    tokens = family(recipe.model.family).defaults(recipe.model).max_tokens
    return section.model_copy(update={"max_tokens": tokens})


def source_of(recipe: config.Recipe, *, resumed: bool, is_sharded: bool) -> Source:
    # A checkpoint lacks frozen parameters: with any of these it is not the whole model.
    is_whole = recipe.trainable.base() == "full" and not family_of(recipe.model).block.untrained
    if resumed and is_whole:  # a checkpoint has what is trained
        return "checkpoint"
    if recipe.trainable.kind == "dora":  # its magnitudes begin as the lengths of the weights' rows
        return "here"
    if recipe.model.pretrained is not None:
        return "files"
    return "seed" if is_sharded else "here"


def _build(
    chosen: Family,
    recipe: config.Recipe,
    shapes: Sequence[LatentShape],
    text: TextEncoder,
    weights: Source,
) -> tuple[nn.Module, deferred_init.DeferredWeights]:
    section, files = recipe.model, None
    file = section.one_file()
    if weights == "files" and file is None:
        files = deferred_init.release_files(section)
    program = None
    if weights == "seed":
        # The same constructor on the meta device; each rank runs it again for its shard.
        program = deferred_init.record(lambda: chosen.build(section, shapes, text, weights=False))
    is_later = weights == "files" and file is not None
    if weights == "checkpoint" or is_later or files is not None or program is not None:
        with torch.random.fork_rng(devices=[]), deferred_init.parameters_on_meta():
            model = chosen.build(section, shapes, text, weights="later")
        if is_later:
            assert file is not None
            files = find_in_one_file(file, model, section.qkv_layout)
        deferred = deferred_init.deferred_parameters(model)
        # `adapt` may have changed the model's layout after the constructor that was recorded.
        fits = program is None or program.shapes == deferred_init.shapes_of(deferred)
        if fits and deferred_init.can_be_filled(deferred, model, files):
            return model, deferred_init.DeferredWeights(deferred, files, program)
    # The model's own layout does not fit the deferred source: build it whole, with its weights.
    return chosen.build(section, shapes, text), deferred_init.NOTHING_DEFERRED


def outline(recipe: config.Recipe, captions: Sequence[str] = ()) -> Components:
    """Outline all parts on torch's meta device: shapes and dtypes at any size, in seconds.

    It needs neither weights nor a catalog; without `captions`, a vocabulary of their words is
    assumed to have its largest size. Codec and text encoders cannot encode. No block is quantised,
    because the plan compares formats.

    Raises:
        RecipeError: the recipe's parts do not fit together.
        ModelError: the configuration of a pretrained part cannot be found.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe.seed)
        chosen = chosen_family(recipe.model)
        codec = outline_codec(recipe.codec, chosen.frozen.codec)
        shapes = fit_latents(recipe, chosen, codec)
        text = outline_text(text_section(recipe), chosen, captions)
        model = chosen.build(recipe.model, shapes, text, weights=False)
        chosen.block.note_inputs(model, recipe.model_inputs())
        parts = Components(chosen, model, codec, text, chosen.defaults(recipe.model))
        return _finish(parts, recipe, {})


def _finish(parts: Components, recipe: config.Recipe, kinds: Kinds) -> Components:
    """Make a built model ready: its dtype, quantised blocks, what trains, and its experts.

    Raises:
        RecipeError: no sigma lies in the range that is trained, at the shift of a bucket.
    """
    model, chosen = parts.model, parts.family
    numerics.keep_weights_in(model, numerics.DTYPES[recipe.model.dtype])
    if kinds:  # before any layer gets a LoRA
        # `quantize_linears` leaves layers that train as they are.
        model.requires_grad_(False)
        names = added_module.block_names(model, chosen, ("*",))
        for name, block in zip(names, chosen.blocks(model), strict=True):
            if name in kinds:
                quantize_linears(block, kinds[name])
    deferred = parts.unfilled.parameters
    trainable.make_trainable(model, chosen, recipe.trainable, parts.codec.channels, deferred)
    unconditional = recipe.model.pretrained and chosen.unconditional
    parts = replace(parts, experts=read_experts(recipe.model), unconditional=unconditional)
    for flow, bucket in trained_shapes(recipe):
        # Fails before training if a stage's range of sigmas is empty at the shift of a bucket.
        parts.sample_sigmas(torch.zeros(1), flow, bucket)
    return parts


def _kinds(
    recipe: config.Recipe, names: Sequence[str], quantized: Kinds | None, made: Path | None
) -> Kinds:
    """Return each block's number format; a run with `auto` keeps what it chose first."""
    if recipe.model.quantize == "none":
        return {}
    if recipe.model.quantize != "auto":
        return dict.fromkeys(names, recipe.model.quantize)
    kept = None if made is None else read_kinds(made)
    return quantized or {} if kept is None else kept


def with_exact_weights(recipe: config.Recipe) -> config.Recipe:
    """Return the recipe with the quantisation of model and text encoders turned off."""
    exact = {"quantize": "none"}
    pooled = recipe.text.pooled and recipe.text.pooled.model_copy(update=exact)
    return recipe.model_copy(
        update={
            "model": recipe.model.model_copy(update=exact),
            "text": recipe.text.model_copy(update=exact | {"pooled": pooled}),
        }
    )


def keep_kinds(quantized: Kinds, made: Path) -> None:
    """Save the number formats that a run chose for its quantised blocks, for `assemble`."""
    made.mkdir(parents=True, exist_ok=True)
    write_json(made / _KINDS, quantized)


def read_kinds(made: Path) -> dict[str, config.Quantization] | None:
    """Read the number formats that a run chose for its quantised blocks; None if it did not."""
    return read_record(made / _KINDS, dict[str, config.Quantization])
