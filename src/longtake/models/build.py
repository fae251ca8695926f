"""Builds the family, transformer, codec and text encoder that a recipe names; their objective."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn

from longtake import config
from longtake.errors import RecipeError
from longtake.flow import path, timesteps
from longtake.flow.shift import ClipSize, ShiftRule, named_rule
from longtake.fsio import read_record, write_json
from longtake.models import (
    added_module,
    deferred_init,
    numerics,
    pretrained,
    recognition,
    trainable,
)
from longtake.models.base import FAMILIES, Conditioning, Defaults, Family, LatentShape, family
from longtake.models.codec import NO_PATCH, Codec, build_codec, outline_codec
from longtake.models.conditioning import outline_inputs
from longtake.models.experts import Experts, OtherExpert, read_experts
from longtake.models.quantized import quantize_linears
from longtake.models.text import TextEncoder, build_text, outline_text
from longtake.parallel import attention_rules

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
    unfilled: deferred_init.DeferredWeights = deferred_init.NOTHING_DEFERRED
    """Parameters that get values when the model is sharded."""
    stays: frozenset[Part] = frozenset()
    """Parts that `bring` leaves where they are: those that training uses between two samplings."""
    experts: Experts | None = None
    """Where `model` is one of a release's two transformers."""
    other: OtherExpert | None = None
    """The one that is not trained, to sample with; it is on the device while `model` is wanted."""

    @cached_property
    def dtype(self) -> torch.dtype:
        return numerics.main_dtype(self.model)

    def predict_velocity(
        self, noisy_latents: Tensor, sigmas: Tensor, conditioning: Conditioning
    ) -> Tensor:
        added_module.condition(self.model, noisy_latents, sigmas, conditioning)
        return self.family.predict_velocity(self.model, noisy_latents, sigmas, conditioning)

    def shift_rule(self, shift: config.Shift | None) -> ShiftRule:
        """What a recipe's value means; unset and `release` are the pretrained model's own."""
        if shift is None or shift == "release":
            return self.defaults.shift
        return named_rule(shift)

    def shift(
        self, shift: config.Shift | None, bucket: config.Bucket, num_steps: int | None = None
    ) -> float:
        """The shift of sigmas, as a number, for clips of one shape.

        Args:
            shift: of the recipe.
            bucket: the clips' shape.
            num_steps: of sampling, which FLUX.2's rule follows. None, in training: those with
                which the release is sampled, so that no key of sampling changes what is trained;
                and a rule is not followed beyond the tokens that it was made for.
        """
        shape = latent_shape(self.codec, bucket)
        num_tokens = self.family.num_tokens(self.model, shape)
        size = ClipSize(num_tokens, bucket.height, bucket.width, shape.num_frames)
        rule = self.shift_rule(shift)
        if num_steps is None:
            return rule.factor(rule.within_range(size), self.defaults.num_inference_steps)
        return rule.factor(size, num_steps)

    def sample_sigmas(
        self, uniform: Tensor, flow: config.FlowSection, bucket: config.Bucket
    ) -> Tensor:
        """The sigmas that are trained for clips of one shape, as `timesteps.sample_sigmas`."""
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
        """Lowest and highest sigma that is trained."""
        return flow.sigma_range if self.experts is None else self.experts.sigmas_within(flow)

    def with_other(self) -> "Components":
        """The same with the other expert as the model."""
        assert self.other is not None
        return replace(self, model=self.other.model, other=None)

    def bring(self, part: Part | None, device: torch.device) -> None:
        """Move one part to a device and the others to the CPU: one of them is there at a time.

        None: none of them is. A part without weights, on the meta device, is left there.
        """
        if device.type == "cpu":
            return
        if self.other is not None and part != "model":
            self.other.bring(torch.device("cpu"))
        held: dict[Part, nn.Module | Codec | TextEncoder]
        held = {"text": self.text, "model": self.model, "codec": self.codec}
        for other, modules in self._modules().items():
            has_weights = not any(tensor.is_meta for each in modules for tensor in _tensors(each))
            if other != part and other not in self.stays and has_weights:
                held[other].to(torch.device("cpu"))
        if device.type == "cuda":
            torch.cuda.empty_cache()
        if part is not None and part not in self.stays:
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
"""What the frozen linear layers of blocks are quantised to, by the blocks' names."""
_KINDS = "quantized.json"

Source = Literal["here", "files", "checkpoint", "seed"]
"""Where a model gets its weights: at once and whole; or later, each rank its shard, from the files
of `model.pretrained`, from a checkpoint, or drawn from the seed."""


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
        captions: of the catalog, for a vocabulary (not read where the run has one).
        made: the folder of frozen parts that the run made when it began; None when it begins.
        frozen_parts: without them codec and text encoders have shapes but cannot encode, for a run
            whose latents and prompt embeddings are cached; a vocabulary is the real one.
        weights: where the model gets them. If it cannot get them later, it has them at once, and
            `unfilled` is empty.
        quantized: what blocks are quantised to where model.quantize = "auto" and the run has not
            begun; afterwards `made` says it.

    Raises:
        RecipeError: the recipe's parts do not fit together.
        ModelError: weights cannot be loaded.
    """
    attention_rules.guard_attention()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe.seed)
        chosen, section = chosen_family(recipe.model), recipe.codec
        if frozen_parts:
            codec = build_codec(section, chosen.frozen.codec, made)
        else:
            codec = outline_codec(section, chosen.frozen.codec)
        shapes = _check(recipe, chosen, codec)
        if frozen_parts or recipe.text.kind == "words":
            text = build_text(text_section(recipe), chosen, captions, made)
        else:
            text = outline_text(text_section(recipe), chosen)
        torch.manual_seed(recipe.seed)  # the model's weights do not depend on the other parts
        source: Source = weights
        if recipe.model.quantize != "none" and recipe.model.pretrained is not None:
            source = "files"
        model, unfilled = _build(chosen, recipe, shapes, text, source)
        kinds = _kinds(recipe, added_module.block_names(model, chosen, ("*",)), quantized, made)
        _finish(model, chosen, recipe, codec, unfilled, kinds)
        if weights == "here" and unfilled.parameters:  # read and quantised tensor by tensor
            unfilled.give_memory(model, torch.device("cpu"))
            unfilled.fill()
            unfilled = deferred_init.NOTHING_DEFERRED
    defaults, experts = chosen.defaults(recipe.model), read_experts(recipe.model)
    parts = Components(chosen, model, codec, text, defaults, unfilled, experts=experts)
    _check_sigma_range(parts, recipe)
    return parts


def build_other(recipe: config.Recipe, parts: Components, *, weights: bool = True) -> nn.Module:
    """The release's transformer that the recipe does not train, on the CPU; frozen.

    Without `weights` it is on the meta device.
    """
    assert parts.experts is not None
    section = recipe.model.model_copy(update={"expert": parts.experts.other})
    patch = parts.family.patch(section)
    shapes = [latent_shape(parts.codec, bucket, patch) for bucket in recipe.data.shapes()]
    model = parts.family.build(section, shapes, parts.text, weights=weights)
    numerics.keep_weights_in(model, numerics.DTYPES[section.dtype])
    return model.eval().requires_grad_(False)


def build_frozen_parts(
    recipe: config.Recipe, made: Path, *, with_text: bool
) -> tuple[Codec, TextEncoder]:
    """Codec and text encoder of a run that has begun, on the CPU; `made` as for `assemble`.

    If not `with_text` the text encoder cannot encode.
    """
    chosen, section = family(recipe.model.family), text_section(recipe)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe.seed)
        codec = build_codec(recipe.codec, chosen.frozen.codec, made)
        if with_text or section.kind == "words":
            return codec, build_text(section, chosen, (), made)
        return codec, outline_text(section, chosen)


def fetch(recipe: config.Recipe, *, frozen_parts: bool = True) -> dict[str, Path]:
    """Download what a recipe names by repository ids, for the other processes on this node.

    That is both transformers of a release with two, where the other one is sampled with.

    Returns:
        The folders of weights and tokenizers, by key and name of the part.

    Raises:
        ModelError: a part cannot be found.
    """
    parts, second = chosen_family(recipe.model).frozen, recipe.text.second_encoder()
    located: dict[str, Path] = {}
    if recipe.model.pretrained is not None:
        folders = [recipe.model.folder()]
        if recipe.model.expert is not None and recipe.sampling.every is not None:
            folders = list(config.EXPERT_FOLDERS.values())
        for folder in folders:
            path = pretrained.locate(recipe.model.pretrained, folder) / folder
            located[f"model.pretrained {folder}"] = path
    if not frozen_parts:
        return located
    for key, where, part in (
        ("codec", recipe.codec.pretrained, parts.codec),
        ("text", recipe.text.pretrained, parts.text),
        ("text.pooled", None if second is None else second.pretrained, parts.pooled),
        ("text", recipe.text.pretrained, parts.processor),
        *(("text", recipe.text.pretrained, part) for part in parts.further),
    ):
        if where is None or part is None:
            continue
        if part not in parts.further or pretrained.has_part(where, part):
            found = pretrained.find_part(where, part)
            for subfolder in filter(None, (found.folder, found.tokenizer)):
                path = pretrained.locate(where, subfolder) / subfolder
                located[f"{key}.pretrained {subfolder}"] = path
    return located


def chosen_family(section: config.ModelSection) -> Family:
    """The family that a section names; ModelError if its release is of another, or two experts."""
    recognition.refuse_other_family(section, FAMILIES)
    if section.pretrained is not None:
        pretrained.refuse_wrong_expert(pretrained.pipeline_index(section.pretrained), section)
    chosen = family(section.family)
    if section.transformer_class is not None and not hasattr(chosen, "transformer_class"):
        raise RecipeError(
            f"model.transformer_class = {section.transformer_class!r} takes the place of a "
            f"transformer of diffusers, and the family {section.family} has none. A family of your "
            "own builds any model: docs/guides/modules.md."
        )
    return chosen


def text_section(recipe: config.Recipe) -> config.TextSection:
    """The recipe's text section, with the family's `max_tokens` if it is unset."""
    section = recipe.text
    if section.max_tokens is not None or section.pretrained is None:
        return section
    tokens = family(recipe.model.family).defaults(recipe.model).max_tokens
    return section.model_copy(update={"max_tokens": tokens})


def source_of(recipe: config.Recipe, *, resumed: bool, is_sharded: bool) -> Source:
    is_whole = recipe.trainable.base() == "full" and not family(recipe.model.family).untrained
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
    if weights == "files":
        assert section.pretrained is not None
        files = deferred_init.files_in(
            pretrained.locate(section.pretrained, section.folder()) / section.folder()
        )
    program = None
    if weights == "seed":
        program = deferred_init.record(lambda: chosen.build(section, shapes, text, weights=False))
    if weights == "checkpoint" or files is not None or program is not None:
        with torch.random.fork_rng(devices=[]), deferred_init.parameters_on_meta():
            model = chosen.build(section, shapes, text, weights="later")
        deferred = deferred_init.deferred_parameters(model)
        fits = program is None or program.shapes == deferred_init.shapes_of(deferred)
        if fits and deferred_init.can_be_filled(deferred, model, files):
            return model, deferred_init.DeferredWeights(deferred, files, program)
    return chosen.build(section, shapes, text), deferred_init.NOTHING_DEFERRED


def outline(recipe: config.Recipe, captions: Sequence[str] = ()) -> Components:
    """All parts on torch's meta device: shapes and dtypes at any size, in seconds.

    Needs neither weights nor a catalog; without `captions` a vocabulary of their words is taken at
    its largest. Codec and text encoders cannot encode. No block is quantised: the plan compares
    kinds.

    Raises:
        RecipeError: the recipe's parts do not fit together.
        ModelError: the configuration of a pretrained part cannot be found.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe.seed)
        chosen = chosen_family(recipe.model)
        codec = outline_codec(recipe.codec, chosen.frozen.codec)
        shapes = _check(recipe, chosen, codec)
        text = outline_text(text_section(recipe), chosen, captions)
        model = chosen.build(recipe.model, shapes, text, weights=False)
        _finish(model, chosen, recipe, codec)
    defaults, experts = chosen.defaults(recipe.model), read_experts(recipe.model)
    parts = Components(chosen, model, codec, text, defaults, experts=experts)
    _check_sigma_range(parts, recipe)
    return parts


def _check_sigma_range(parts: Components, recipe: config.Recipe) -> None:
    """Refuse a range of sigmas that nothing lies in, at the shift of each bucket."""
    for flow, bucket in _trained_shapes(recipe):
        parts.sample_sigmas(torch.zeros(1), flow, bucket)


def _trained_shapes(recipe: config.Recipe) -> Iterator[tuple[config.FlowSection, config.Bucket]]:
    for stage in recipe.data.curriculum():
        flow = recipe.in_stage(stage.name).flow
        yield from ((flow, bucket) for bucket in stage.buckets or recipe.data.buckets)


_FEW = 0.01
_LEAST_NOISE = 0.5
"""Logit-normal sigmas by the releases' own shifts have 1 % below 0.2 to 0.47, and serve well."""


def review_model(
    parts: Components, recipe: config.Recipe, *, has_parent: bool = False
) -> list[str]:
    """Sentences about parts of a recipe that train other than one would think, on any device.

    `has_parent`: the run begins with the weights of another one.
    """
    warnings = []
    settings, section = recipe.sampling, recipe.trainable
    if recipe.model.pretrained is None and section.base() != "full" and not has_parent:
        added = "trainable.modules" if section.base() == "frozen" else f"A {section.kind}"
        warnings.append(
            f"{added} on a model of random weights that stays frozen (model.pretrained is unset): "
            "what it can learn is of no use to a trained model, and it learns nothing where the "
            "model's last layer begins at 0. Name a release in model.pretrained, begin with the "
            'weights of a run (--from), or train all (trainable.kind = "full").'
        )
    steps = settings.num_inference_steps or parts.defaults.num_inference_steps
    terminal = parts.shift_rule(settings.shift).terminal
    for flow, bucket in _trained_shapes(recipe):
        if parts.sigma_range(flow)[0] > 0 or steps < 2:
            continue  # low sigmas are left out on purpose
        uniform = torch.tensor([_FEW], dtype=torch.float64)
        lowest = parts.sample_sigmas(uniform, flow, bucket).item()
        shift = parts.shift(settings.shift, bucket, steps)
        sampled = timesteps.build_sigmas(steps, shift, terminal)[-3]  # the last one is 0
        if lowest > max(sampled, _LEAST_NOISE):
            warnings.append(
                f"Of the sigmas trained on clips of {bucket} 99 % lie above {lowest:.3f}, but the "
                f"second last of {steps} sampled steps is at sigma {sampled:.3f}, where hardly "
                f"anything is trained. Lower flow.shift ({flow.shift}) or flow.logit_mean."
            )
            break
    layers = [layer for _, layer in trainable.adapter_layers(parts.model)]
    full = [layer for layer in layers if section.kind == "lokr" and trainable.is_full_lokr(layer)]
    if full and section.alpha not in (None, section.rank):
        warnings.append(
            f"trainable.alpha = {section.alpha:g} has no effect on {len(full)} of {len(layers)} "
            f"layers: with trainable.rank = {section.rank} their LoKr is of two full matrices, "
            "whose scale is 1, as in LyCORIS."
        )
    return warnings


def _check(recipe: config.Recipe, chosen: Family, codec: Codec) -> list[LatentShape]:
    """The shapes of the latents, which the family can take."""
    _check_time_and_audio(recipe, chosen)
    given = recipe.model_inputs()
    needed, taken = chosen.inputs_of(recipe.model)
    for name in (*needed, *(each for each in taken if each in given)):
        section = given.get(name)
        begins = section is not None and section.frames is not None and name in chosen.continues
        is_picture = section is not None and (section.kind == "picture" or begins)
        if section is None or not is_picture or not section.is_encoded:
            has = "does not have it" if section is None else f'has it as "{section.kind}"'
            if section is not None and is_picture:
                has = "has it with encode = false"
            raise RecipeError(
                f"The family {recipe.model.family} needs a reference image named {name} for each "
                f"clip, encoded, but data.conditioning {has}. Name its files, such as "
                f'data.conditioning.{name} = {{ kind = "picture", '
                f'path = "../{name}/{{stem}}.png" }}.{_or_frames(name, chosen)}'
            )
    _refuse_frames(given, recipe, codec)
    unused = [name for name in given if name not in taken]
    if unused and not recipe.trainable.modules:  # a module may use any of them
        takes = ", ".join(taken)
        raise RecipeError(
            f"data.conditioning has {', '.join(unused)}, which would be read and then not used: "
            f"the family {recipe.model.family} takes {takes or 'no image'}, and there are no "
            "trainable.modules. Remove it, or name the family or module that uses it."
        )
    patch = chosen.patch(recipe.model)
    shapes = [latent_shape(codec, bucket, patch) for bucket in recipe.data.shapes()]
    chosen.check(recipe.model, shapes)
    return shapes


def _or_frames(name: str, chosen: Family) -> str:
    if name not in chosen.continues:
        return ""
    own = f'{{ kind = "picture", frame = "{name}" }}'
    return (
        f" Or take it from the clip: {own}, or as a video that is continued "
        '{ kind = "video", frames = 5 }.'
    )


def _refuse_frames(
    given: Mapping[str, config.ConditioningSection], recipe: config.Recipe, codec: Codec
) -> None:
    """Refuse first frames of a video that are all of it, or that the codec cannot encode alone."""
    for name, section in given.items():
        if section.frames is None:
            continue
        key = f"data.conditioning.{name}.frames = {section.frames}"
        for bucket in recipe.data.shapes():
            if section.frames >= bucket.num_frames:
                raise RecipeError(
                    f"{key}, but a bucket has {bucket.num_frames} frames: nothing would be left to "
                    "generate. Set fewer, or larger buckets."
                )
            size = {"height": bucket.height, "width": bucket.width}
            try:
                codec.latent_shape(config.Bucket(num_frames=section.frames, **size))
            except RecipeError as error:
                raise RecipeError(f"{key} cannot be encoded alone. {error}") from None


def _check_time_and_audio(recipe: config.Recipe, chosen: Family) -> None:
    named, audio = f"The family {recipe.model.family}", recipe.model.audio
    if audio is not None and not chosen.has_audio:
        raise RecipeError(f"{named} has no audio. Remove model.audio, which is {audio!r}.")
    if audio is None and chosen.has_audio:
        raise RecipeError(
            f"{named} makes videos with audio, and longtake trains its video alone. Set "
            'model.audio = "off": video and audio are isolated from each other, and the audio\'s '
            "weights stay as they are (docs/guides/families.md)."
        )
    if chosen.takes_fps and recipe.data.fps is None:
        raise RecipeError(
            f"{named} takes the number of frames per second as an input, and data.fps is unset. "
            "Set it, such as data.fps = 24: videos are then trained at this rate."
        )


def _finish(
    model: nn.Module,
    chosen: Family,
    recipe: config.Recipe,
    codec: Codec,
    unfilled: deferred_init.DeferredWeights = deferred_init.NOTHING_DEFERRED,
    quantized: Kinds | None = None,
) -> None:
    numerics.keep_weights_in(model, numerics.DTYPES[recipe.model.dtype])
    if quantized:
        _quantize(model, chosen, quantized)
    trainable.make_trainable(model, chosen, recipe.trainable, codec.channels, unfilled.parameters)


def _kinds(
    recipe: config.Recipe, names: Sequence[str], quantized: Kinds | None, made: Path | None
) -> Kinds:
    """What each block is quantised to; a run that chose for itself keeps to its choice."""
    if recipe.model.quantize == "none":
        return {}
    if recipe.model.quantize != "auto":
        return dict.fromkeys(names, recipe.model.quantize)
    kept = None if made is None else read_kinds(made)
    return quantized or {} if kept is None else kept


def _quantize(model: nn.Module, chosen: Family, quantized: Kinds) -> None:
    """Quantise the blocks' linear layers, before any of them gets a LoRA."""
    model.requires_grad_(False)
    names = added_module.block_names(model, chosen, ("*",))
    for name, block in zip(names, chosen.blocks(model), strict=True):
        if name in quantized:
            quantize_linears(block, quantized[name])


def with_exact_weights(recipe: config.Recipe) -> config.Recipe:
    """The same model and text encoders, none of them quantised."""
    exact = {"quantize": "none"}
    pooled = recipe.text.pooled and recipe.text.pooled.model_copy(update=exact)
    return recipe.model_copy(
        update={
            "model": recipe.model.model_copy(update=exact),
            "text": recipe.text.model_copy(update=exact | {"pooled": pooled}),
        }
    )


def keep_kinds(quantized: Kinds, made: Path) -> None:
    """Keep what a run's blocks are quantised to, where `assemble` finds it."""
    made.mkdir(parents=True, exist_ok=True)
    write_json(made / _KINDS, quantized)


def read_kinds(made: Path) -> dict[str, config.Quantization] | None:
    """What the blocks of a run that chose for itself are quantised to; None: it has not chosen."""
    return read_record(made / _KINDS, dict[str, config.Quantization])


def latent_shape(
    codec: Codec, bucket: config.Bucket, patch: Sequence[int] = NO_PATCH
) -> LatentShape:
    """Shape of the latents of one clip in a bucket.

    Args:
        codec: of the recipe.
        bucket: in pixels.
        patch: the family's; without it only the codec has to divide the bucket.

    Raises:
        RecipeError: the bucket does not divide; names the nearest that does.
    """
    return LatentShape(codec.channels, *codec.latent_shape(bucket, patch))


def refuse_sharing(parts: Components, recipe: config.Recipe) -> None:
    """Refuse a recipe whose ranks cannot share the model's tokens (`parallel.context`).

    Raises:
        RecipeError: a clip has too few tokens, an added module reads them, or the family has no
            way to share them.
    """
    size = recipe.parallel.context
    if size == 1:
        return
    asked = f"parallel.context = {size}: so many processes share the tokens of each clip, "
    if not parts.family.shares_tokens:
        raise RecipeError(
            f"{asked}which the family {recipe.model.family} cannot: its captions are of unlike "
            "length in a batch. Set parallel.context = 1."
        )
    if recipe.trainable.modules:
        raise RecipeError(
            f"{asked}but the modules of trainable.modules ({', '.join(recipe.trainable.modules)}) "
            "get all tokens of a clip. Set parallel.context = 1, or leave them out."
        )
    for bucket in recipe.data.shapes():
        num_tokens = parts.family.num_tokens(parts.model, latent_shape(parts.codec, bucket))
        if num_tokens < size:
            raise RecipeError(
                f"{asked}but a clip of {bucket} has only {num_tokens}. Take fewer processes for "
                "it, or longer clips."
            )


@dataclass(frozen=True)
class FlowBatch:
    """Samples of one forward pass, and what their velocities are computed from."""

    latents: Tensor  # [B, C, F, H, W]
    noise: Tensor  # [B, C, F, H, W]
    sigmas: Tensor  # [B]
    conditioning: Conditioning
    loss_weights: Tensor | None = None  # [B, 1, F, H, W], see `flow.loss_mask`


def flow_losses(
    parts: Components, batch: FlowBatch, precision: numerics.Precision, device: torch.device
) -> Tensor:
    """[B] fp32: the flow-matching loss of each sample.

    A model whose weights are bf16 computes in it without autocast.
    """
    noisy = path.interpolate(batch.latents, batch.noise, batch.sigmas)
    with numerics.autocast(precision if parts.dtype == torch.float32 else "fp32", device):
        predicted = parts.predict_velocity(noisy, batch.sigmas, batch.conditioning)
    return _velocity_loss(parts, batch, predicted)


def losses_of_zero(parts: Components, batch: FlowBatch) -> Tensor:
    """[B] fp32: the loss of each sample if the model predicted a velocity of 0 everywhere."""
    return _velocity_loss(parts, batch, torch.zeros_like(batch.noise))


def _velocity_loss(parts: Components, batch: FlowBatch, predicted: Tensor) -> Tensor:
    weights = parts.family.loss_weights(batch.latents, batch.conditioning)
    if weights is None or batch.loss_weights is None:
        weights = batch.loss_weights if weights is None else weights
    else:
        weights = weights * batch.loss_weights
    return path.velocity_loss(predicted, path.velocity(batch.latents, batch.noise), weights)


def training_conditioning(
    parts: Components, recipe: config.Recipe, conditioning: Conditioning
) -> Conditioning:
    if fps := fps_of(conditioning, parts.family, recipe):
        conditioning = conditioning | fps
    if not parts.family.distils_guidance(parts.model):
        return conditioning
    return conditioning | guidance_of(conditioning, recipe.model.guidance)


def guidance_of(conditioning: Conditioning, scale: float) -> Conditioning:
    like = next(iter(conditioning.values()))
    return {"guidance": torch.full((len(like),), scale, device=like.device)}


def fps_of(conditioning: Conditioning, chosen: Family, recipe: config.Recipe) -> Conditioning:
    """Frames per second of what is trained and sampled, of a model that takes them."""
    if not chosen.takes_fps or recipe.data.fps is None:
        return {}
    like, fps = next(iter(conditioning.values())), recipe.data.fps / recipe.data.frame_stride
    return {"fps": torch.full((len(like),), fps, device=like.device)}


def outline_conditioning(
    parts: Components, recipe: config.Recipe, bucket: config.Bucket, batch_size: int = 1
) -> Conditioning:
    """A model's conditioning in training, on the meta device, for samples of a bucket."""
    one = parts.text.outline(picture_sizes(parts.family, recipe, bucket))
    one |= outline_inputs(parts, recipe.model_inputs(), bucket)
    batch = {key: value.new_empty(batch_size, *value.shape[1:]) for key, value in one.items()}
    return training_conditioning(parts, recipe, batch)


def picture_sizes(
    chosen: Family, recipe: config.Recipe, bucket: config.Bucket
) -> list[tuple[int, int]]:
    """Height and width of each picture that is encoded together with a caption."""
    sizes = dict.fromkeys(recipe.model_inputs(), (bucket.height, bucket.width))
    return list(chosen.seen_with_text(sizes).values())


def forward_flops(
    parts: Components, recipe: config.Recipe, bucket: config.Bucket
) -> numerics.ForwardFlops:
    """Operations of one forward pass over one sample."""
    inputs = {
        "noisy_latents": torch.empty(1, *latent_shape(parts.codec, bucket), device="meta"),
        "sigmas": torch.empty(1, device="meta"),
        **outline_conditioning(parts, recipe, bucket),
    }
    return numerics.count_flops(_WithConditioning(parts), inputs)


class _WithConditioning(nn.Module):
    """A family's model as a module, so that its FLOPs can be counted through `forward`."""

    def __init__(self, parts: Components) -> None:
        super().__init__()
        self.model = parts.model
        self.parts = parts

    def forward(self, noisy_latents: Tensor, sigmas: Tensor, **conditioning: Tensor) -> Tensor:
        return self.parts.predict_velocity(noisy_latents, sigmas, conditioning)
