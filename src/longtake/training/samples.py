"""Samples videos of presets between two steps of a training, on the devices that train.

All ranks take part. A result is claimed (locked for one process), measured and published as an
evaluation server does it, so that no server repeats it. Sampling changes nothing that the next
training step depends on.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from longtake import config, errors, heartbeat, process
from longtake.data.encode import Sound
from longtake.data.loader import Loader
from longtake.evaluation_dir import Scores
from longtake.models.components import PARTS, Components, Part, build_frozen_parts
from longtake.models.conditioning import text_reads_pictures
from longtake.models.pretrained import local_copies
from longtake.models.text import TextEncoder
from longtake.parallel import collectives, context_parallel, fsdp, mesh
from longtake.run_dir import RunDirectory
from longtake.sampling import claims
from longtake.sampling.guidance import uses_other
from longtake.sampling.memory_strategy import ONE_BY_ONE, MemoryFallback, MemoryStrategy
from longtake.sampling.other_expert import load_other, refuse_wrong_other
from longtake.sampling.presets import Preset, Request, training_presets
from longtake.sampling.sampler import Sampler, refuse_unfitting
from longtake.training.record import Recorder
from longtake.training.session import Session, TrainingState

EvaluateSamples = Callable[[claims.EvaluationTask, Sampler, Path, claims.Progress], Scores]
"""A function that samples and measures a preset: it writes all files of the result but
scores.json."""

_LEASE_SECONDS, _STUCK_SECONDS, _PAUSE_SECONDS = 60.0, 1800.0, 30.0
_MAX_ATTEMPTS = 3  # per result; an evaluation server may make the remaining ones


@dataclass(frozen=True)
class _Work:
    """Requests for videos that rank 0 sends to all ranks, so that they sample them together."""

    requests: Sequence[Request]
    settings: config.SamplingSection
    bucket: config.Bucket
    decoding: str


@dataclass(frozen=True)
class SharedSampler(Sampler):
    """A sampler of videos that distributes rank 0's requests over all ranks."""

    world: mesh.World = field(kw_only=True)

    def sample_with_sound(
        self,
        requests: Sequence[Request],
        settings: config.SamplingSection,
        bucket: config.Bucket,
        on_step: Callable[[int], None] | None = None,
        *,
        decoding: str = "auto",
    ) -> tuple[NDArray[np.uint8], list[Sound | None]]:
        """Sample videos as `Sampler` does; on several ranks `on_step` is called at the end only."""
        if self.world.mesh is None:
            return super().sample_with_sound(requests, settings, bucket, on_step, decoding=decoding)
        work = _Work(tuple(requests), settings, bucket, decoding)
        # With the long timeout: other ranks wait while rank 0 measures and writes the videos
        # before.
        collectives.from_first(work, self.world, self.world.patient_group)
        sampled = self.compute(work)
        if on_step is not None:
            on_step(self.num_steps(settings))
        return sampled

    def compute(self, work: _Work) -> tuple[NDArray[np.uint8], list[Sound | None]]:
        """Sample this rank's share of the requested videos; rank 0 returns all, others nothing.

        Each rank samples the same number of videos, since ranks that share a model must call it
        equally often.
        """
        world = self.world
        mine = work.requests[world.data_rank :: world.data_size]
        share = -(-len(work.requests) // world.data_size)
        # Padded with copies of the first request, which are dropped below.
        padded = [*mine, *[work.requests[0]] * (share - len(mine))]
        try:
            with collectives.joint_work(world):
                both = super().sample_with_sound(
                    padded, work.settings, work.bucket, _still_sampling, decoding=work.decoding
                )
                sampled = list(zip(*both, strict=True))[: len(mine)]
        except Exception:
            # The error may have come between the gathering of weights and their release.
            fsdp.free_gathered(self.components.model)
            raise
        gathered = collectives.gather_to_first(sampled if world.speaks_for_data else None, world)
        found = [each for each in gathered if each is not None]
        if not found:
            return np.empty(0, np.uint8), []
        # Request i was sampled by rank i modulo the number of ranks.
        count = len(work.requests)
        ordered = [found[place % len(found)][place // len(found)] for place in range(count)]
        return np.stack([video for video, _ in ordered]), [sound for _, sound in ordered]


def _still_sampling(_: int) -> None:
    heartbeat.set_phase("sampling")  # restarts the phase's clock, by which the watcher finds hangs


def refuse_wrong_samples(recipe: config.Recipe, run: RunDirectory) -> None:
    """Refuse a recipe whose presets, or second transformer, cannot be sampled in training.

    No weights are read.
    """
    training_presets(recipe, run)
    refuse_wrong_other(recipe)


class TrainingSampler:
    """Samples the recipe's presets of prompts during training; publishes videos and scores."""

    def __init__(
        self,
        session: Session,
        parts: Components,
        presets: Sequence[Preset],
        evaluate: EvaluateSamples,
    ) -> None:
        self._session, self._parts, self._evaluate = session, parts, evaluate
        self._presets = presets
        self._claims = claims.Claims(
            claims.own_name(), _LEASE_SECONDS, _MAX_ATTEMPTS, _PAUSE_SECONDS
        )
        self._memory = MemoryFallback()
        self._prompts: dict[tuple[str, ...], Any] = {}
        self.failure: str | None = None
        """Reason why the presets' prompts could not be encoded; then this launch samples
        nothing."""

    def encode_prompts(self, text: TextEncoder) -> None:
        """Encode the presets' prompts on rank 0; from then on use `text` as the text encoder.

        Call it before the model is on the device: the encoder needs the memory.
        """
        world = self._session.world
        try:
            with collectives.joint_work(world), ExitStack() as opened:
                if world.is_first:
                    # The encoder leaves the device again before the model needs the memory.
                    opened.callback(self._parts.bring, None, world.device)
                    sampler = self._sampler(0, "model")
                    for each in (group for preset in self._presets for group in preset.groups()):
                        negative = each.settings.negative_prompt
                        sampler.encode_prompts(each.requests, each.bucket, negative)
        except Exception as error:
            _reraise_lost_peer(error)
            self.failure = f"Prompts could not be encoded when it began: {_describe(error)}"
            self._prompts.clear()
        # A joint failure cleared the prompts on rank 0, so all ranks get none.
        self._prompts.update(collectives.from_first(self._prompts, world, world.patient_group))
        self._parts = replace(self._parts, text=text)

    def sample(self, state: TrainingState, recorder: Recorder, stop: process.StopSignal) -> None:
        """Sample the presets that lack a result of this step's checkpoint; all ranks must call it.

        The checkpoint must be complete. A failure is recorded as an event, and training continues.
        """
        world, step, tasks = self._session.world, state.global_step, list[claims.EvaluationTask]()
        if world.is_first:
            with self._failure_is_event("presets", step, recorder):
                tasks = self._pending(step)
        tasks = collectives.from_first(tasks, world, world.patient_group)
        # Presets of the same weights together, so that averages are swapped in once.
        for weights in dict.fromkeys(task.preset.weights for task in tasks):
            mine = [task for task in tasks if task.preset.weights == weights]
            with ExitStack() as opened:
                try:
                    sampler = self._enter(opened, weights, state)
                except Exception as error:
                    names = ", ".join(task.preset.name for task in mine)
                    self._record_failure(names, step, recorder, error)
                    continue
                if not world.is_first:
                    _follow(sampler)
                    continue
                for task in mine:
                    if stop.wanted:
                        break
                    with self._failure_is_event(task.preset.name, step, recorder):
                        self._sample_preset(task, sampler, recorder, stop)
                # Ends `_follow` on the other ranks.
                collectives.from_first(None, world, world.patient_group)
        with self._failure_is_event("presets", step, recorder), collectives.joint_work(world):
            self._parts.bring(None, world.device)

    def _enter(self, opened: ExitStack, weights: str, state: TrainingState) -> SharedSampler:
        """Return a sampler of the weights of this name, such as `model` or `ema/main`.

        The model holds them until `opened` is closed. An error on one rank is raised on all.
        """
        if self.failure is not None:
            raise errors.SamplingError(self.failure)
        model, (part, _, profile) = state.components.model, weights.partition("/")
        with collectives.joint_work(self._session.world):
            opened.enter_context(_in_evaluation(model))
            if part == "ema":
                opened.enter_context(state.ema.in_place_of_weights(profile))
        return self._sampler(state.global_step, weights, model)

    @contextmanager
    def _failure_is_event(self, name: str, step: int, recorder: Recorder) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self._record_failure(name, step, recorder, error)

    def _record_failure(self, name: str, step: int, recorder: Recorder, error: Exception) -> None:
        """Record a failed sampling, after which training continues unless a rank was lost."""
        _reraise_lost_peer(error)
        if self._session.world.is_first:
            recorder.sampling_failed(name, step, _describe(error))

    def _sampler(self, step: int, weights: str, model: nn.Module | None = None) -> SharedSampler:
        session, world = self._session, self._session.world
        gathers = model is not None and fsdp.gathers_weights(model)
        # Ranks that share a model or a clip wait for each other in each forward pass.
        waits = gathers or world.sequence_group is not None
        self._memory.first = ONE_BY_ONE if waits else MemoryStrategy()
        return SharedSampler(
            self._parts,
            session.recipe,
            step,
            world.device,
            session.precision,
            weights,
            self._memory,
            self._prompts,
            is_shared=world.mesh is not None,
            world=world,
        )

    def _pending(self, step: int) -> list[claims.EvaluationTask]:
        """Return the presets that lack a result of this step's weights, if these were saved."""
        run, tasks = self._session.run, list[claims.EvaluationTask]()
        for preset in self._presets:
            key = claims.checkpoint_key(run.checkpoint_path(step), preset.weights)
            if key is None:
                continue
            task = claims.EvaluationTask(run, preset, step, key)
            scores = task.directory.scores(preset.name, step)
            attempts = self._claims.attempts(task)
            # A result of other weights of this step is replaced.
            if not attempts.is_final and (scores is None or scores["key"] != key):
                tasks.append(replace(task, attempts=attempts.number))
        return tasks

    def _sample_preset(
        self,
        task: claims.EvaluationTask,
        sampler: SharedSampler,
        recorder: Recorder,
        stop: process.StopSignal,
    ) -> None:
        claim = self._claims.take(task)
        if claim is None:  # an evaluation server was faster
            return

        def evaluate(
            task: claims.EvaluationTask, folder: Path, progress: claims.Progress
        ) -> Scores:
            return self._evaluate(task, sampler, folder, progress)

        begun = time.monotonic()
        progress = claims.TaskProgress(claim.lease, stop, lambda *_: _still_sampling(0))
        outcome = claims.attempt(
            claim, nullcontext(), evaluate, progress, claims.own_name(), _STUCK_SECONDS
        )
        if outcome.how == "done" and outcome.scores is not None:
            self._claims.end(claim, "done")
            recorder.sampled(outcome.scores, time.monotonic() - begun)
        elif outcome.how in ("failed", "damaged"):
            facts = {"reason": outcome.reason, "final": outcome.is_final, **outcome.facts}
            self._claims.end(claim, outcome.how, **facts)
            recorder.sampling_failed(task.preset.name, task.step, outcome.reason)
        else:  # a stop was requested, or an evaluation server published first
            self._claims.end(claim, "released")


def open_sampler(
    session: Session, parts: Components, loader: Loader, evaluate: EvaluateSamples | None
) -> TrainingSampler | None:
    """Open the sampler of a training; None if the recipe samples nothing during training.

    Encodes the prompts, so call it before the model is on the device. All ranks must call it.

    The training's own codec and text encoder are used, and stay where they are. If training reads a
    cache and has neither, they are loaded here; the codec is then on the device only while it
    decodes, as is the transformer that the run does not train, where a release has two. A text
    encoder that reads pictures stays in host memory on each rank.

    Raises:
        RecipeError: a preset is wrong, or its size cannot be sampled.
    """
    recipe, run, world = session.recipe, session.run, session.world
    if not recipe.sampling.in_training:
        return None
    assert evaluate is not None, "the recipe samples in training: train() needs `evaluate`"
    presets: list[Preset] = []

    def find() -> None:
        loader.keep_catalogs()  # the default preset takes its prompts from their captions
        presets.extend(training_presets(recipe, run))
        for preset in presets:
            refuse_unfitting(parts, recipe, preset)

    collectives.first_does(find, world)
    presets = collectives.from_first(presets, world, world.patient_group)
    # Each rank samples `batch_size` videos at a time.
    presets = [replace(each, batch_size=each.batch_size * world.data_size) for each in presets]
    there = replace(parts, stays=frozenset(PARTS))
    reads_pictures = text_reads_pictures(recipe)
    if recipe.data.cache is not None:
        with local_copies():
            with_text = world.is_first or reads_pictures
            codec, text = build_frozen_parts(recipe, run.components_path, with_text=with_text)
        there = replace(parts, codec=codec, text=text, stays=frozenset[Part](["model"]))
    groups = (group for preset in presets for group in preset.groups())
    if any(uses_other(parts, group.settings) for group in groups):
        with local_copies():
            there = load_other(recipe, there, world.device)
        if world.sequence_group is not None and there.other is not None:
            sharing = context_parallel.TokenExchange(
                world, parts.family.block.num_heads(parts.model)
            )
            parts.family.block.share_tokens(there.other.model, sharing)
    sampler = TrainingSampler(session, there, presets, evaluate)
    # A single process also computes the held-out loss, which encodes captions.
    is_read_again = recipe.evaluation.held_out is not None and world.mesh is None
    sampler.encode_prompts(there.text if is_read_again or reads_pictures else parts.text)
    return sampler


@contextmanager
def _in_evaluation(model: nn.Module) -> Iterator[None]:
    """Run the model without dropout in the context, and compile nothing for the presets' shapes."""
    model.eval()
    try:
        with torch.compiler.set_stance("force_eager"):
            yield
    finally:
        # Without a backward pass, FSDP2 leaves the weights of the outermost module gathered.
        fsdp.free_gathered(model)
        model.train()


def _follow(sampler: SharedSampler) -> None:
    """Sample this rank's share of each of rank 0's requests, until rank 0 ends the loop."""
    while True:
        heartbeat.set_phase("idle")
        work: _Work | None = collectives.from_first(
            None, sampler.world, sampler.world.patient_group
        )
        heartbeat.set_phase("sampling")
        if work is None:
            return
        try:
            sampler.compute(work)
        except Exception as error:  # rank 0 gets it as well, and records it
            _reraise_lost_peer(error)


def _reraise_lost_peer(error: Exception) -> None:
    """Raise the error again if a lost rank caused it, since training cannot continue then."""
    if mesh.tells_of_a_lost_peer(error):
        raise error


def _describe(error: Exception) -> str:
    known = isinstance(error, errors.LongtakeError | OSError)
    return claims.format_error(error) if known else f"{type(error).__name__}: {error}"
