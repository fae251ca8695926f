"""Samples videos from checkpoints, with strategies that fit the available memory.

`Sampler.sample` is a function of a loaded model, requests and settings. `SamplerLoader` loads the
checkpoints of a run into one model, one after another.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from longtake.checkpoint import files
from longtake.config import EXPERT_FOLDERS, Bucket, EvaluationSection, Recipe, SamplingSection
from longtake.data.encode import Sound
from longtake.errors import PlanError, RecipeError, SamplingError
from longtake.flow import solver
from longtake.flow.timesteps import build_sigmas
from longtake.formatting import format_size
from longtake.models import conditioning, numerics, streamed, trainable
from longtake.models.audio import Streams, audio_shape, refuse_not_finite
from longtake.models.base import Conditioning, LatentShape, latent_shape
from longtake.models.components import Components, Part, assemble, with_exact_weights
from longtake.models.conditioning import fps_of, guidance_of, without_text
from longtake.models.frozen_adapter import attach_sampling_adapter, sampled_with
from longtake.parallel.mesh import pick_device
from longtake.run_dir import RunDirectory
from longtake.sampling import preset_files
from longtake.sampling.checkpoints import find_checkpoint, find_run, load_start, load_weights
from longtake.sampling.claims import NotHereError
from longtake.sampling.guidance import (
    Guidance,
    guidance_end,
    guidance_scale,
    refuse_wrong_settings,
    uses_other,
)
from longtake.sampling.memory_strategy import MemoryFallback
from longtake.sampling.other_expert import load_other, other_bytes, refuse_wrong_other
from longtake.sampling.presets import Preset, Request, weights_to_sample
from longtake.trust import refuse_foreign_code

_ACTIVATION_BYTES = 2 * 2**30
"""Free GPU memory that device "auto" requires beyond the weights of the largest part (text encoder,
model or codec)."""
_PART_NAMES = {"text": "text encoder", "model": "model", "codec": "codec"}


def refuse_too_large_parts(parts: Components, device: torch.device) -> None:
    """Refuse a GPU whose memory does not hold the weights of the largest part.

    Raises:
        PlanError: the weights take all of the GPU's memory.
    """
    if device.type != "cuda":
        return
    total = torch.cuda.get_device_properties(device).total_memory
    part, num_bytes = max(_part_bytes(parts).items(), key=lambda each: each[1])
    if num_bytes >= total:
        raise PlanError(
            f"The weights of the {_PART_NAMES[part]} take {format_size(num_bytes)}, but {device} "
            f'has {format_size(total)}. Set {part}.dtype = "bf16", if it is not, or sample on a '
            "GPU with more memory."
        )


def streams_for_sampling(recipe: Recipe) -> bool:
    """Return true if the recipe allows frozen weights to be streamed where a GPU has no room."""
    return recipe.model.stream != "none" and recipe.trainable.base() != "full"


@dataclass(frozen=True)
class Placement:
    """The device on which videos are sampled, why, and whether blocks are streamed to it."""

    device: torch.device
    why: str = ""  # a sentence if the device was chosen; empty if it was named
    streams: bool = False  # true if frozen weights are copied to the device block by block


def place(wanted: str, parts: Components, recipe: Recipe, *, with_other: bool = True) -> Placement:
    """Choose the device to sample on.

    "auto" is the GPU with the most free memory if that holds the largest part and some activations,
    else the CPU, since another process may train on the GPU. If the model's frozen weights can be
    streamed, two blocks of them count; they are streamed only if not all of them fit.
    """
    if wanted != "auto" or not torch.cuda.device_count():
        device = pick_device(wanted)
        if device.type != "cuda":
            return Placement(device)
        more = other_bytes(recipe, parts, "cuda") if with_other else 0
        is_short = _free_bytes(device) < _needed_bytes(parts, more, streams=False)
        return Placement(device, "", is_short and streams_for_sampling(recipe))
    free = [_free_bytes(index) for index in range(torch.cuda.device_count())]
    most = max(range(len(free)), key=lambda index: free[index])
    more = other_bytes(recipe, parts, "cuda") if with_other else 0
    # First without streaming, as its copies take time.
    for streams in (False, True) if streams_for_sampling(recipe) else (False,):
        if free[most] >= (needed := _needed_bytes(parts, more, streams=streams)):
            how = ", the model's frozen weights are copied block by block" if streams else ""
            why = f"samples on cuda:{most}, {format_size(free[most])} free{how}"
            return Placement(pick_device(f"cuda:{most}"), why, streams)
    why = (
        f"samples on the CPU: it needs {format_size(needed)} on a GPU, and cuda:{most}, which has "
        f"most, has {format_size(free[most])} free; --device cuda:{most} takes it all the same"
    )
    return Placement(pick_device("cpu"), why)


def _free_bytes(device: torch.device | int) -> int:
    """Return a GPU's free bytes as NVML reports them; CUDA would first allocate a context."""
    total = torch.cuda.get_device_properties(device).total_memory
    return total - torch.cuda.device_memory_used(device)


def _part_bytes(parts: Components) -> dict[Part, int]:
    """Return the least GPU bytes of each part's weights: text encoders can run layer by layer."""
    by_layer = (
        streamed.least_bytes(each, *streamed.layer_lists(each)) for each in parts.text.modules()
    )
    return {**parts.part_bytes(), "text": sum(by_layer)}


def _needed_bytes(parts: Components, more: int, *, streams: bool) -> int:
    """Return the GPU bytes of the largest part and activations; `more` is added to the model's."""
    needed = _part_bytes(parts)
    if streams:
        # Buffers of two blocks replace the weights of all.
        needed["model"] = streamed.least_bytes(parts.model, parts.family.blocks(parts.model))
    needed["model"] += more
    return max(needed.values()) + _ACTIVATION_BYTES


@dataclass(frozen=True)
class Sampler:
    """Samples videos with a model and its trained weights, its codec and text encoder."""

    components: Components  # on a GPU, only the part at work
    recipe: Recipe
    step: int  # number of steps that the weights were trained
    device: torch.device
    precision: numerics.Precision  # of the run's training
    weights: str = "model"  # `model`, or `ema/` and the name of a profile
    memory: MemoryFallback = field(default_factory=MemoryFallback)
    prompts: dict[tuple[str, ...], Conditioning] = field(default_factory=dict)
    """Embeddings of prompts on the CPU, by prompt and the files of pictures encoded with it."""
    is_shared: bool = False
    """True if several ranks sample together; only `sample` makes the others run the model."""
    run: RunDirectory | None = None

    def sample(self, *given: Any, **options: Any) -> NDArray[np.uint8]:
        """Sample videos [N, F, H, W, 3]: those of `sample_with_sound`."""
        return self.sample_with_sound(*given, **options)[0]

    def sample_with_sound(
        self,
        requests: Sequence[Request],
        settings: SamplingSection,
        bucket: Bucket,
        on_step: Callable[[int], None] | None = None,
        *,
        decoding: str = "auto",
    ) -> tuple[NDArray[np.uint8], list[Sound | None]]:
        """Sample videos [N, F, H, W, 3] of the bucket's size, and the sound of each; None without.

        Each depends on its own request only. Repeated in the same batches, results are bitwise
        equal. In other batches or in two passes, some values differ by one grey level, since matrix
        products with a single row per video use another kernel.

        Args:
            requests: one per video.
            settings: settings of solver and guidance.
            bucket: size of the videos.
            on_step: called after each step with the number of finished steps.
            decoding: `whole`, `tiles`, or `auto` for what fits the memory.

        Raises:
            RecipeError: the codec or the model cannot divide the bucket, or a negative prompt would
                have no effect.
            ModelError: the model is built for another shape.
            DataError: a request lacks a reference input of the model, or it cannot be read.
            PlanError: not even one video fits the memory.
            SamplingError: latents or decoded pixels are NaN or infinite.
        """
        parts, streams = self.components, self.streams(bucket)
        shape = fitting_shape(parts, self.recipe, bucket)
        refuse_wrong_settings(parts, settings)
        # Drawn on the CPU from each request's seed, so that it is equal on any device.
        generators = [torch.Generator().manual_seed(request.seed) for request in requests]
        noise = torch.stack([torch.randn(tuple(shape), generator=each) for each in generators])
        if streams is not None:
            audio = [torch.randn(streams.audio, generator=each) for each in generators]
            noise = streams.join(noise, torch.stack(audio))
        scale = guidance_scale(parts, settings)
        guide = self._guidance(requests, bucket, scale, settings.negative_prompt)
        end = guidance_end(parts, settings, bucket, self.num_steps(settings))
        guide = replace(guide, end=end)
        denoise = partial(self._denoise, guide, noise.to(self.device), settings, bucket, on_step)
        # After `_guidance`, for which text encoder and codec were on the device: they leave it
        # first.
        parts.bring("model", self.device)
        with torch.no_grad():  # not inference_mode: modules may cache tensors for training
            # Two transformers take two passes anyway.
            uses_guidance = guide.unconditional is not None and parts.unconditional is None
            latents = self.memory.denoise(
                denoise, len(requests), bucket, uses_guidance=uses_guidance
            )
            self._refuse_non_finite(latents)
            latents, of_audio = (latents, ()) if streams is None else streams.split(latents)
            # Given frames are returned as they were, not as they were denoised.
            latents = parts.family.inputs.with_given(latents, guide.conditional)
            parts.bring("codec", self.device)
            # One by one, so that the device holds the pixels of one video only.
            videos = [
                self.memory.decode(partial(self._decode, each[None]), bucket, decoding=decoding)
                for each in latents
            ]
            sounds = [self._decode_sound(each) for each in of_audio] or [None] * len(videos)
        return np.concatenate(videos), sounds

    def streams(self, bucket: Bucket) -> Streams | None:
        """Return the shapes of video and audio latents; None for a model that makes no sound."""
        codec = self.components.codec
        audio = audio_shape(self.recipe, codec.audio, bucket)
        return audio and Streams(tuple(latent_shape(codec, bucket)), audio)

    def _decode_sound(self, latents: Tensor) -> Sound | None:
        codec = self.components.codec.audio
        assert codec is not None
        samples = codec.decode(latents[None])[0]
        refuse_not_finite(samples)
        return Sound(samples.cpu().numpy(), codec.output_rate)

    def _denoise(
        self,
        guide: Guidance,
        noise: Tensor,
        settings: SamplingSection,
        bucket: Bucket,
        on_step: Callable[[int], None] | None,
        part: slice,
        two_passes: bool,
    ) -> Tensor:
        """Denoise the videos in `part` by the solver; guidance and noise cover all videos."""
        steps, count = self.num_steps(settings), len(noise)
        rule = self.components.shift_rule(settings.shift)

        def on_part_step(step: int) -> None:
            if on_step is not None:
                # Steps of a part of the videos count as that share of all.
                on_step((part.start * steps + (part.stop - part.start) * step) // count)

        velocity = self._velocity(guide, part, settings, two_passes=two_passes)
        shift, streams = self.shift(settings, bucket), self.streams(bucket)
        if streams is not None and self.components.defaults.audio_shift != 1:
            sigmas = build_sigmas(steps, shift, rule.terminal, rule.logit_std)
            velocity = self._at_own_sigmas(velocity, streams, sigmas)
        given = velocity, noise[part], steps, shift, settings.solver, on_part_step
        with sampled_with(settings.adapter_strength):
            return solver.solve(*given, terminal=rule.terminal, logit_std=rule.logit_std)

    def _at_own_sigmas(
        self, velocity: solver.Velocity, streams: Streams, sigmas: Sequence[float]
    ) -> solver.Velocity:
        """Scale the audio's velocity so that each Euler step leads it to its own next sigma."""
        ends = torch.tensor(sigmas, dtype=torch.float64)
        ratios = self.components.audio_sigmas(ends).diff() / ends.diff()
        scales = dict(zip(sigmas, ratios.tolist(), strict=False))

        def scaled(latents: Tensor, sigma: float) -> Tensor:
            video, audio = streams.split(velocity(latents, sigma))
            return streams.join(video, scales[sigma] * audio)

        return scaled

    def _velocity(
        self, guide: Guidance, part: slice, settings: SamplingSection, *, two_passes: bool
    ) -> solver.Velocity:
        """Return a function that predicts the guided velocity by the transformer for each sigma."""
        experts = self.components.experts
        if experts is None:
            if guide.unconditional is not None and self.components.unconditional is not None:
                guide = replace(guide, second=self._with_other().predict)
            return guide.velocity(part, two_passes=two_passes)
        scale_2 = settings.guidance_scale_2
        of_low = guide.scale if scale_2 is None else scale_2
        # Both transformers need weights here, as one solver's steps cross the boundary.
        other = replace(guide, predict=self._with_other().predict)
        sides = {experts.trained: guide, experts.other: other}
        # guidance_scale_2 is the low-noise expert's, whichever of the two is trained.
        sides["low"] = replace(sides["low"], scale=of_low)
        high, low = (sides[name].velocity(part, two_passes=two_passes) for name in EXPERT_FOLDERS)
        return lambda latents, sigma: (high if sigma >= experts.boundary else low)(latents, sigma)

    def _with_other(self) -> "Sampler":
        """Return a sampler by the release's other transformer."""
        assert self.components.other is not None
        # It may have weights of another dtype.
        section = self.recipe.model.model_copy(update={"dtype": self.components.other.dtype})
        recipe = self.recipe.model_copy(update={"model": section})
        return replace(self, components=self.components.with_other(), recipe=recipe)

    def shift(self, settings: SamplingSection, bucket: Bucket) -> float:
        return self.components.shift(settings.shift, bucket, self.num_steps(settings))

    def num_steps(self, settings: SamplingSection) -> int:
        return settings.num_inference_steps or self.components.defaults.num_inference_steps

    def encode_prompts(
        self, requests: Sequence[Request], bucket: Bucket, negative_prompt: str
    ) -> None:
        """Encode all that `sample` needs of these prompts, so that it needs no text encoder."""
        sees_pictures = bool(self.components.family.text.pictures)
        read = self._read_inputs(requests, bucket) if sees_pictures else {}
        self._encode_text([each.prompt for each in requests], requests, read)
        if self.components.unconditional is None:
            self._encode_text([negative_prompt] * len(requests), requests, read)

    def unknown_words(self, prompt: str) -> list[str]:
        return self.components.text.unknown_words(prompt)

    def _refuse_non_finite(self, latents: Tensor) -> None:
        """Refuse latents that would be decoded to a black video.

        Raises:
            SamplingError: latents hold NaN or inf.
        """
        bad = int((~torch.isfinite(latents.flatten(1)).all(dim=1)).sum())
        if not bad:
            return
        weights = self.components.model.parameters()
        if all(torch.isfinite(each).all() for each in weights):
            why = "The weights are finite: lower the guidance scale, or sample in fp32."
        else:
            why = "The weights hold NaN or inf: sample an earlier checkpoint (--step)."
        raise SamplingError(
            f"{bad} of {len(latents)} videos of step {self.step} ({self.weights}) have NaN or "
            f"infinite latents; none was written. {why}"
        )

    def _decoding_error(self, latents: Tensor, error: SamplingError) -> str:
        """Explain why a video with finite latents cannot be decoded."""
        modules = self.components.codec.modules()
        weights = [each for module in modules for each in module.parameters()]
        largest = latents.abs().max().item()
        if not all(torch.isfinite(each).all() for each in weights):
            why = "The codec's weights hold NaN or inf: load them from another copy."
        elif any(each.dtype != torch.float32 for each in weights):
            why = f'The codec decodes in {self.recipe.codec.dtype}: set codec.dtype = "fp32".'
        else:
            why = "Sample another checkpoint (--step), or lower the guidance scale."
        return (
            f"Decoding a video of step {self.step} ({self.weights}) failed: {error} Its latents "
            f"are finite, at most {largest:.3g} (1 is usual). None was written. {why}"
        )

    def _decode(self, latents: Tensor, tiles: bool) -> NDArray[np.uint8]:
        """Decode one video's latents to [1, F, H, W, 3]."""
        try:
            video = self.components.codec.decode(latents, tiles=tiles)
        except SamplingError as error:
            raise SamplingError(self._decoding_error(latents, error)) from None
        return video.permute(0, 2, 3, 4, 1).cpu().numpy()

    def _guidance(
        self, requests: Sequence[Request], bucket: Bucket, scale: float, negative_prompt: str
    ) -> Guidance:
        """Encode prompts for guidance; one pass if the scale is at most 1 or a model's input."""
        parts, read = self.components, self._read_inputs(requests, bucket)
        predict = partial(self.predict, streams=self.streams(bucket))
        prompts = [request.prompt for request in requests]
        conditional = self._encode_text(prompts, requests, read)
        further = self.recipe.model_inputs()
        if any(section.is_encoded for section in further.values()):
            parts.bring("codec", self.device)
        inputs = conditioning.condition_on(parts, further, read, bucket)
        inputs |= fps_of(conditional, parts.family, self.recipe)
        conditional |= inputs
        is_distilled = parts.family.distils_guidance(parts.model)
        if is_distilled:
            conditional |= guidance_of(conditional, scale)
        if is_distilled or scale <= 1:
            return Guidance(predict, conditional, None, scale)
        if parts.unconditional is not None:
            unconditional = without_text(conditional)
            return Guidance(predict, conditional, unconditional, scale, parts.family.guided)
        negative = [negative_prompt] * len(requests)
        # Both passes have the same references: guidance moves along the text alone.
        unconditional = self._encode_text(negative, requests, read) | inputs
        return Guidance(predict, conditional, unconditional, scale, parts.family.guided)

    def _encode_text(
        self,
        prompts: Sequence[str],
        requests: Sequence[Request],
        read: Mapping[str, Tensor],
    ) -> Conditioning:
        """Encode each distinct prompt alone, so that its embeddings are always bitwise equal."""
        pictures, encoded = self.components.family.text.seen_pictures(read), list[Conditioning]()
        sizes = [str(tuple(each.shape[-2:])) for each in pictures.values()]  # in the bucket's size
        for row, prompt in enumerate(prompts):
            files = (str(requests[row].conditioning[name]) for name in pictures)
            if (key := (prompt, *files, *sizes)) not in self.prompts:
                self.components.bring("text", self.device)
                seen = {name: each[row : row + 1] for name, each in pictures.items()}
                embeddings = self.components.text.encode([prompt], seen)
                self.prompts[key] = {name: each.cpu() for name, each in embeddings.items()}
            encoded.append(self.prompts[key])
        return {
            name: torch.cat([each[name] for each in encoded]).to(self.device) for name in encoded[0]
        }

    def _read_inputs(self, requests: Sequence[Request], bucket: Bucket) -> dict[str, Tensor]:
        """Read the files that the requests name, for each reference input of the model."""
        inputs, stride = self.recipe.model_inputs(), self.recipe.data.frame_stride
        for request in requests:
            preset_files.refuse_other_inputs(request.conditioning, inputs)
        tensors = dict[str, Tensor]()
        for name, section in inputs.items():
            read = partial(preset_files.read_input, section, bucket=bucket, stride=stride)
            values = np.stack([read(request.conditioning[name]) for request in requests])
            tensors[name] = torch.from_numpy(values).to(self.device)
        return tensors

    def predict(
        self,
        latents: Tensor,
        sigmas: Tensor,
        conditioning: Conditioning,
        streams: Streams | None = None,
    ) -> Tensor:
        """Predict velocities in fp32; with `streams`, of latents that are joined."""
        # bf16 weights compute in bf16 without autocast, as in training.
        precision = "fp32" if self.recipe.model.dtype == "bf16" else self.precision
        with numerics.autocast(precision, self.device):
            if streams is None:
                return self.components.predict_velocity(latents, sigmas, conditioning).float()
            velocities = self.components.predict_streams(
                *streams.split(latents), sigmas, conditioning
            )
            return streams.join(*velocities).float()


def fitting_shape(components: Components, recipe: Recipe, bucket: Bucket) -> LatentShape:
    shape = latent_shape(components.codec, bucket, components.family.patch(recipe.model))
    components.family.check(recipe.model, [shape])
    return shape


def refuse_unfitting(components: Components, recipe: Recipe, preset: Preset) -> None:
    """Refuse a preset whose size codec or model cannot divide, or whose settings have no effect.

    Raises:
        RecipeError: names the nearest size that both support.
    """
    try:
        for each in preset.groups():
            fitting_shape(components, recipe, each.bucket)
            refuse_wrong_settings(components, each.settings)
    except RecipeError as error:
        reason = str(error).removeprefix("data.buckets: ")
        raise RecipeError(f"Preset {preset.name}: {reason}") from None


def _refuse_missing_adapter(sampling: SamplingSection) -> None:
    """Refuse to sample where the file of an adapter is not.

    Raises:
        NotHereError: another evaluation server may have it.
    """
    for key, file in sampling.adapters().items():
        if not file.is_file():
            option = "--adapter FILE of `longtake sample`, or " if key == "sampling.adapter" else ""
            raise NotHereError(
                f"{key} is {file}, and there is no such file on this machine. Copy it there, or "
                f"name its place here: {option}a recipe with {key} = FILE by --recipe of "
                "`longtake evaluate`."
            )


class SamplerLoader:
    """Loader of checkpoints, one after another, into a run's model, which it keeps in memory.

    Args:
        run: run whose checkpoints are sampled.
        device: `cpu`, `cuda`, one GPU such as `cuda:1`, or `auto`: the GPU with the most free
            memory, or the CPU if no GPU has enough.
        trust: run code that the run names, even of another user.
        exact: build quantised layers in full precision and without an adapter, to export them.
        sampling: settings whose adapter and other transformer are loaded; None: the recipe's, and
            the other transformer for settings of any kind.
        other_expert: see `load_other`; None: `sampling.other_expert`.
        with_other: load the transformer that the run does not train, if its release has two.

    Raises:
        RunError: there is no run, or it names code and another user began it.
        RecipeError: the recipe's parts do not fit together, or there is no such device.
        ModelError, PlanError: a frozen part cannot be loaded, or exceeds the GPU's memory.
    """

    def __init__(
        self,
        run: RunDirectory,
        device: str = "auto",
        *,
        trust: bool = False,
        exact: bool = False,
        sampling: SamplingSection | None = None,
        other_expert: Path | None = None,
        with_other: bool = True,
    ) -> None:
        self.run, self.recipe, self._trust = run, run.recipe(), trust
        if sampling is not None:
            self.recipe = self.recipe.model_copy(update={"sampling": sampling})
        if exact:
            self.recipe = with_exact_weights(self.recipe)
        # Without presets, since their measures are loaded elsewhere.
        model_recipe = self.recipe.model_copy(update={"evaluation": EvaluationSection()})
        # Before `assemble`, which imports the classes that the recipe names.
        refuse_foreign_code(run, trust=trust, recipe=model_recipe)
        # Before minutes of loading, though the other transformer is built last.
        refuse_wrong_other(self.recipe, other_expert)
        if not exact:
            _refuse_missing_adapter(self.recipe.sampling)
        if device != "auto":
            pick_device(device)  # refuses a missing device before anything is loaded
        self.components = parts = assemble(self.recipe, (), run.components_path)
        if not exact:
            expert, cpu = self.recipe.model.expert, torch.device("cpu")
            attach_sampling_adapter(self.recipe.sampling, parts.model, parts.family, expert, cpu)
        # An export copies the files of a transformer without text.
        of_any = parts.experts is not None or (parts.has_other and not exact)
        with_other &= of_any if sampling is None else uses_other(parts, sampling)
        placed = place(device, parts, self.recipe, with_other=with_other)
        self.device, self.why_device = placed.device, placed.why
        # Before `requires_grad_(False)` below, since trained weights are those that require
        # gradients.
        self._trained = frozenset(trainable.trained_state(self.components.model))
        self._memory = MemoryFallback()
        self._prompts: dict[tuple[str, ...], Conditioning] = {}
        model = self.components.model.eval()
        if placed.streams and not exact:  # trained weights are loaded later, and stay on the device
            streamed.StreamedBlocks(self.components.family.blocks(model), self.device)
        model.requires_grad_(False)
        refuse_too_large_parts(self.components, self.device)
        if with_other:
            self.components = load_other(
                self.recipe, self.components, self.device, other_expert, trust=trust, exact=exact
            )

    def check(self, preset: Preset) -> None:
        refuse_unfitting(self.components, self.recipe, preset)

    def load(self, checkpoint: Path, weights: str) -> Sampler:
        """Return a sampler with a checkpoint's weights; it invalidates the one returned before.

        Only they and trainer.json need exist in it. After an error another one can be loaded.

        Raises:
            CheckpointError: the checkpoint is incomplete, damaged, or of another model.
        """
        trainer = files.load_trainer(checkpoint, files.SampledTrainer)
        load_weights(checkpoint, weights, self.components.model, self._trained)
        return self._sampler(trainer["global_step"], trainer["precision"], weights)

    def load_start(self, weights: str) -> Sampler:
        """Return a sampler with the run's first weights; call it before `load`."""
        load_start(self.run, self.components, weights, self._trained, trust=self._trust)
        precision = numerics.choose_precision(self.recipe.training.precision, self.device)
        return self._sampler(0, precision, weights)

    def _sampler(self, step: int, precision: numerics.Precision, weights: str) -> Sampler:
        made_by = self.components, self.recipe, step, self.device, precision, weights
        return Sampler(*made_by, self._memory, self._prompts, run=self.run)


def load_sampler(
    path: Path,
    *,
    step: int | None = None,
    ema: bool | None = None,
    profile: str | None = None,
    **options: Any,
) -> Sampler:
    """Load a sampler.

    Args:
        path: folder of a run or of a checkpoint.
        step: step of the run's checkpoint; None: the newest; 0: what the run began with.
        ema: sample averaged weights; None: if the run keeps any.
        profile: EMA profile of the averages; None: the first.
        options: `device` and the further arguments of `SamplerLoader`.

    Raises:
        RunError: there is no run, or it names code and another user began it.
        RecipeError, CheckpointError: there is no such average, or no whole checkpoint.
    """
    run = find_run(path)
    weights = weights_to_sample(run.recipe(), ema=ema, profile=profile)
    if step == 0 and run.path == path and 0 not in run.checkpoint_steps():
        return SamplerLoader(run, **options).load_start(weights)
    run, checkpoint = find_checkpoint(path, step, weights)
    return SamplerLoader(run, **options).load(checkpoint, weights)
