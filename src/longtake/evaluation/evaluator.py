"""Evaluates a checkpoint: loads it, samples videos of a preset, measures and compares them."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from longtake import errors, evaluation_dir, fsio, process
from longtake.config import Recipe
from longtake.data import clip, decode
from longtake.evaluation import measures, options, pending
from longtake.evaluation.extra_measures import Measure, load_extras, measure_extra
from longtake.evaluation.held_out import HeldOut
from longtake.run_dir import RunDirectory
from longtake.sampling.claims import EvaluationTask, NotHereError, Progress
from longtake.sampling.presets import OF_PROMPTS
from longtake.sampling.sampler import Sampler, SamplerLoader
from longtake.sampling.videos import sample_preset


class SampleEvaluator:
    """Samples a preset's videos and measures them, with models that are already loaded.

    Sampling takes longest, so no error after it loses the videos: the error is reported, and the
    result lacks the number concerned.
    """

    def __init__(
        self,
        server: str,
        report: options.ServerReport,
        recipe_of: Callable[[RunDirectory], Recipe] = RunDirectory.recipe,
    ) -> None:
        self._server, self._report, self._recipe_of = server, report, recipe_of
        # None before the catalog is looked for; (None,) if the recipe names none.
        self._held_out: tuple[HeldOut | None] | None = None
        self._extras: dict[tuple[str, ...], list[Measure]] = {}

    def __call__(
        self,
        task: EvaluationTask,
        sampler: Sampler,
        folder: Path,
        progress: Progress,
        watch: "_Stopwatch | None" = None,
    ) -> evaluation_dir.Scores:
        """Sample and measure the videos of a task (a checkpoint and a preset) in a folder.

        Returns the content of scores.json.
        """
        watch = watch or _Stopwatch()
        # First, as a measure that cannot be loaded must not cost an hour of sampling.
        extras = self.extras_of(task)
        videos = self._sample(task, sampler, folder, progress, watch)
        with watch.of("measure"):
            of_set = self._measure_extra(task, extras, videos, folder)
            # Read for each task: [evaluation] may be edited while a server runs.
            recipe = self._recipe_of(task.run)
            held_out = None
            if not sampler.is_shared:  # else other ranks would have to run the model too
                with self._without(task, "held-out loss"):
                    # Opened once for a run, even if the recipe names no held-out clips.
                    self._held_out = self._held_out or (HeldOut.open(recipe, task.run),)
                    if (clips := self._held_out[0]) is not None:
                        # Called between batches: a request to stop is raised from there.
                        show = partial(progress, "held out", 0, 1)
                        held_out = clips.loss(sampler, task.preset.batch_size, show)
            values = measures.mean_of([each["measures"] for each in videos]) | of_set
            alarms = self._alarms(task, recipe, values, videos, progress)
        record = task.preset.as_record()
        settings = {name: value for name, value in record.items() if name not in OF_PROMPTS}
        scores: evaluation_dir.Scores = {
            "preset": task.preset.name,
            "step": task.step,
            "key": task.key,
            "weights": task.preset.weights,
            "time": fsio.now(),
            "server": self._server,
            "settings": settings,
            "videos": videos,
            "measures": values,
            "alarms": alarms,
            "seconds": {"wait": round(task.waited_seconds, 3), **watch.seconds},
        }
        return scores if held_out is None else {**scores, "held_out": held_out}

    def forget_held_out(self) -> None:
        """Forget the encoded held-out clips, as another run or codec is used next."""
        self._held_out = None

    def extras_of(self, task: EvaluationTask) -> list[Measure]:
        """Return the measures that the preset itself names, loaded before any video is sampled."""
        names = task.preset.measures
        # A measure may hold a network, which is loaded once and not for each checkpoint.
        if names not in self._extras:
            try:
                self._extras[names] = load_extras(names)
            except (errors.RecipeError, errors.ModelError) as error:
                raise NotHereError(f"Preset {task.preset.name}: {error}") from error
        return self._extras[names]

    def _sample(
        self,
        task: EvaluationTask,
        sampler: Sampler,
        folder: Path,
        progress: Progress,
        watch: "_Stopwatch",
    ) -> list[evaluation_dir.VideoScores]:
        found: list[evaluation_dir.VideoScores] = []
        preset, num_videos = task.preset, len(task.preset.requests())
        sampled = sample_preset(sampler, preset, folder, partial(progress, "sample"))
        while True:
            # `sampled` is a generator: the time to its next video is that of sampling it.
            with watch.of("sample"):
                made = next(sampled, None)
            if made is None:
                # Sampled by groups of equal settings, and recorded in the preset's order.
                return sorted(found, key=lambda each: evaluation_dir.prompt_number(each["file"]))
            watch.lap("first_video")
            with watch.of("measure"):
                values = measures.measure(made.video, preset.settings.fps)
            prompt, seed, own = made.request.prompt, made.request.seed, made.request.own
            scores: evaluation_dir.VideoScores
            scores = {"file": made.path.name, "prompt": prompt, "seed": seed, "measures": values}
            found.append({**scores, "settings": {**own}} if own else scores)
            progress("measure", len(found), num_videos)

    def _measure_extra(
        self,
        task: EvaluationTask,
        extras: list[Measure],
        videos: list[evaluation_dir.VideoScores],
        folder: Path,
    ) -> dict[str, float]:
        """Add the preset's own measures to each video's; return measures of all videos together."""
        # All videos of a preset at once may not fit into memory.
        again = Reread([folder / each["file"] for each in videos])
        prompts, fps = [each["prompt"] for each in videos], task.preset.settings.fps
        of_all: dict[str, float] = {}
        for extra in extras:
            with self._without(task, extra.name):
                of_each, of_set = measure_extra(extra, again, prompts, fps)
                of_all |= of_set
                for video, found in zip(videos, of_each, strict=True):
                    video["measures"] |= found
        return of_all

    def _alarms(
        self,
        task: EvaluationTask,
        recipe: Recipe,
        values: dict[str, float],
        videos: Sequence[evaluation_dir.VideoScores],
        progress: Progress,
    ) -> list[evaluation_dir.Alarm]:
        name, reference, remark = task.preset.name, None, ""
        with self._without(task, "comparison with training clips"):
            bucket, fps = task.preset.bucket, task.preset.settings.fps
            # Called before each clip: a request to stop is raised from there.
            show = partial(progress, "training clips", 0, 1)
            reference, remark = measures.reference_of(task.run, recipe, name, bucket, fps, show)
        if remark:
            self._report.remark(f"{task.run.path}: {remark}")
        # Checkpoints may be evaluated out of order; later ones say nothing about this drift.
        earlier = [each for each in task.directory.all_scores(name) if each["step"] < task.step]
        history = [*(each["measures"] for each in earlier), values]
        steps = [*(each["step"] for each in earlier), task.step]
        alarms = measures.find_drift(name, history, steps, reference)
        of_size = measures.mean_of_size(videos)
        return [
            *alarms,
            *(measures.find_out_of_range(name, of_size, reference) if reference else ()),
        ]

    @contextmanager
    def _without(self, task: EvaluationTask, name: str) -> Iterator[None]:
        """Report any failure in the block as one of `name`, and continue without its result."""
        try:
            yield
        except process.Stopped:
            # A request to stop is not a failure: it must end the evaluation.
            raise
        except Exception as error:
            kind = "" if isinstance(error, errors.LongtakeError) else f"{type(error).__name__}: "
            self._report.wrong(f"{task.run.path}: there is no {name}: {kind}{error}")


class CheckpointEvaluator:
    """Evaluates checkpoints; the model stays in memory for the next checkpoint of the same run."""

    def __init__(
        self,
        device: str,
        server: str,
        report: options.ServerReport,
        recipe_of: Callable[[RunDirectory], Recipe] = RunDirectory.recipe,
        on_device: Callable[[str], None] | None = None,
        *,
        trust: bool = False,
    ) -> None:
        self._trust, self._device, self._report = trust, device, report
        self._recipe_of = recipe_of
        self._evaluate, self._on_device = SampleEvaluator(server, report, recipe_of), on_device
        self._loader: SamplerLoader | None = None
        self._recipe_read: fsio.FileVersion | None = None
        self._loaded: tuple[tuple[object, ...], Sampler] | None = None  # its weights, itself

    def __call__(
        self, task: EvaluationTask, folder: Path, progress: Progress
    ) -> evaluation_dir.Scores:
        """Load the checkpoint of a task and evaluate it, as `SampleEvaluator` does."""
        watch = _Stopwatch()
        progress("load", 0, 1)
        with watch.of("load"):
            self._evaluate.extras_of(task)
            sampler = self._load(task)
        return self._evaluate(task, sampler, folder, progress, watch)

    def _load(self, task: EvaluationTask) -> Sampler:
        """Return a sampler of the task's checkpoint, shared by presets of the same weights.

        The loader is that of the task's run and its current recipe; it replaces any other.
        """
        weights = task.run, task.step, task.key, task.preset.weights
        if self._loaded is not None and self._loaded[0] != weights:
            self._loaded = None  # its model is about to be overwritten
        run, recipe = task.run, pending.target_version(task.run.recipe_path)
        if self._loader is None or self._loader.run != run or self._recipe_read != recipe:
            # Both are freed before the next model is loaded: two may not fit into memory.
            self._loader, self._loaded, self._recipe_read = None, None, recipe
            sampling = self._recipe_of(run).sampling
            self._loader = SamplerLoader(run, self._device, trust=self._trust, sampling=sampling)
            if self._loader.why_device:
                self._report.say(self._loader.why_device)
            # Once only: every further call would lower the priority of the process again.
            if self._on_device is not None:
                self._on_device(self._loader.device.type)
                self._on_device = None
            self._evaluate.forget_held_out()
        if self._loaded is None:
            self._loaded = weights, self._loader.load(task.checkpoint, task.preset.weights)
        self._loader.check(task.preset)
        return self._loaded[1]


class _Stopwatch:
    """Measures the seconds that the parts of an evaluation (load, sample ...) take, by name."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._begun = time.perf_counter()

    @contextmanager
    def of(self, name: str) -> Iterator[None]:
        """Add the duration of the block to the part `name` of an evaluation."""
        begun = time.perf_counter()
        yield
        taken = self.seconds.get(name, 0.0) + time.perf_counter() - begun
        self.seconds[name] = round(taken, 3)

    def lap(self, name: str) -> None:
        self.seconds.setdefault(name, round(time.perf_counter() - self._begun, 3))


class Reread(Sequence[measures.Video]):
    """A sequence of sampled videos, each of which is read from its file on every access."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self._paths = paths

    def __len__(self) -> int:
        return len(self._paths)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return Reread(self._paths[index])
        with decode.opened(clip.Media(str(self._paths[index]))) as (container, stream):
            frames = [frame.to_ndarray(format="rgb24") for frame in container.decode(stream)]
        return np.stack(frames)
