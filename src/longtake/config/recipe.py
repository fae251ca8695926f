"""The whole recipe, and checks that involve several of its sections."""

import math
from collections.abc import Mapping
from typing import Any, Self

from pydantic import Field, model_validator

from longtake.config.data import Bucket, ConditioningSection, DataSection, Stage
from longtake.config.model import CodecSection, ModelSection, TextSection, TrainableSection
from longtake.config.sampling import EvaluationSection, SamplingSection
from longtake.config.training import (
    CheckpointSection,
    EmaSection,
    FlowSection,
    GuardSection,
    ObjectiveSection,
    OptimizerSection,
    ParallelSection,
    RecomputeSection,
    TrackingSection,
    TrainingSection,
    WatchSection,
)
from longtake.config.values import MAX_STEPS, FilePath, Section

_KEYS_OF_STAGES = {
    "learning_rate": ("optimizer", "learning_rate"),
    "ema_decay": ("ema", "decay"),
    "global_batch_size": ("training", "global_batch_size"),
    "shift": ("flow", "shift"),
    "caption_dropout": ("data", "caption_dropout"),
}
"""Section and key of the recipe that each key of a stage replaces."""
_WHOLE_RUN = "all"  # name of the stage of a run whose length is training.epochs


class Recipe(Section):
    """All settings of a run."""

    out: FilePath
    """Path of the run directory."""
    seed: int = Field(0, ge=0, lt=2**63)
    data: DataSection
    model: ModelSection
    codec: CodecSection = CodecSection()
    text: TextSection = TextSection()
    flow: FlowSection = FlowSection()
    objective: ObjectiveSection = ObjectiveSection()
    optimizer: OptimizerSection = OptimizerSection()
    training: TrainingSection
    trainable: TrainableSection = TrainableSection()
    recompute: RecomputeSection = RecomputeSection()
    ema: EmaSection = EmaSection()
    guard: GuardSection = GuardSection()
    watch: WatchSection = WatchSection()
    parallel: ParallelSection = ParallelSection()
    checkpoint: CheckpointSection = CheckpointSection()
    sampling: SamplingSection = SamplingSection()
    evaluation: EvaluationSection = EvaluationSection()
    tracking: TrackingSection = TrackingSection()

    @model_validator(mode="before")
    @classmethod
    def _epochs_are_those_of_a_stage(cls, values: Any) -> Any:
        """Give a run whose length is `training.epochs` one stage of so many epochs.

        The recipe that a run keeps has both, and the number of steps.
        """
        training, data = (dict(values).get(name) for name in ("training", "data"))
        if not isinstance(training, Mapping) or not isinstance(data, Mapping):
            return values
        epochs = training.get("epochs")
        if type(epochs) is not int or not 0 < epochs <= MAX_STEPS:  # its own section refuses it
            return values
        stages = list(data.get("stages") or ())
        names = [each.get("name") if isinstance(each, Mapping) else each for each in stages]
        is_kept = names == [_WHOLE_RUN]
        if stages and not is_kept:
            raise ValueError(
                f"training.epochs = {epochs}, but data.stages has stages of their own lengths "
                f"({', '.join(map(str, names))}): give the last of them epochs, and the run "
                "training.steps"
            )
        steps = training.get("steps") or None
        if steps is not None and not is_kept:
            raise ValueError(
                f"training.steps = {steps} and training.epochs = {epochs} both say how long the "
                "run is: leave one of them out"
            )
        stage = {**(stages[0] if is_kept else {"name": _WHOLE_RUN}), "epochs": epochs}
        with_steps = {name: each for name, each in training.items() if name != "steps" or each}
        return {**values, "data": {**data, "stages": [stage]}, "training": with_steps}

    def with_steps(self, end_step: int | None) -> Self:
        """Return the recipe with the steps that `training.epochs` makes, if it has that key.

        Args:
            end_step: number of steps of the data plan; None if it is not known.
        """
        if self.training.epochs is None or end_step is None:
            return self
        training = self.training.model_copy(update={"steps": end_step})
        return self.model_copy(update={"training": training})

    def steps_between(
        self, section: CheckpointSection | SamplingSection, epoch: float | None, most: int | None
    ) -> int | None:
        """Return the steps between two saves or samplings in a stage; 0 if there are none.

        Args:
            section: the recipe's section that says when.
            epoch: mean steps of an epoch of the stage; without them, intervals in epochs are None.
            most: steps of the stage, whose end ends an interval in epochs, too.
        """
        if section.every_epochs is None:
            return section.every or 0
        if epoch is None:
            return None
        between = math.ceil(section.every_epochs * epoch)
        return min(between, most or self.training.steps or between)

    def model_inputs(self) -> dict[str, ConditioningSection]:
        """Return the inputs in `data.conditioning` that the model gets, in training and sampling.

        The loss mask is none of them, nor is what only the objective reads.
        """
        return self.without_inputs_of_objective().step_inputs()

    def without_inputs_of_objective(self) -> Self:
        """Return the recipe without the inputs that only the objective reads."""
        inputs, own = self.data.conditioning, self.objective.inputs
        kept = {name: each for name, each in inputs.items() if name not in own}
        return self.model_copy(update={"data": self.data.model_copy(update={"conditioning": kept})})

    def step_inputs(self) -> dict[str, ConditioningSection]:
        """Return the inputs of a training step: the model's and the objective's."""
        mask = self.flow.loss_mask
        return {name: each for name, each in self.data.conditioning.items() if name != mask}

    def encodes_in_steps(self) -> bool:
        """Return True if a codec or text encoder runs in training steps: there is no cache."""
        has_encoder = self.codec.kind != "pixels" or self.text.kind != "words"
        return has_encoder and self.data.cache is None

    def with_encode_tile(self, tile: int) -> Self:
        """Return a recipe that names the tiles in which clips are encoded; 0: as a whole."""
        codec = self.codec.model_copy(update={"encode_tile": tile})
        return self.model_copy(update={"codec": codec})

    @model_validator(mode="after")
    def _has_what_is_encoded_ahead(self) -> Self:
        if self.training.encode_ahead is True and not self.encodes_in_steps():
            because = f'codec.kind = "{self.codec.kind}" and text.kind = "{self.text.kind}"'
            if self.data.cache is not None:
                because = f"data.cache = {str(self.data.cache)!r}"
            raise ValueError(
                f"training.encode_ahead = true, but with {because} nothing is encoded in a step: "
                "leave one of the two out"
            )
        return self

    @model_validator(mode="after")
    def _second_adapter_has_an_expert(self) -> Self:
        if self.sampling.adapter_2 is not None and self.model.expert is None:
            raise ValueError(
                "sampling.adapter_2 is for the low-noise expert of a release with two "
                "transformers, and model.expert is unset: leave it out, or set model.expert"
            )
        return self

    @model_validator(mode="after")
    def _loss_mask_is_there(self) -> Self:
        name, known = self.flow.loss_mask, self.data.conditioning
        if name is None and self.flow.loss_mask_floor:
            raise ValueError("flow.loss_mask_floor needs flow.loss_mask, the name of a mask")
        if name is not None and (name not in known or known[name].kind != "mask"):
            masks = [each for each, section in known.items() if section.kind == "mask"]
            raise ValueError(
                f'flow.loss_mask = "{name}" is not a mask in data.conditioning; masks there: '
                f"{', '.join(masks) or 'none'}"
            )
        return self

    @model_validator(mode="after")
    def _inputs_of_the_objective_are_there(self) -> Self:
        inputs = self.step_inputs()
        if missing := [name for name in self.objective.inputs if name not in inputs]:
            raise ValueError(
                f"objective.inputs names {', '.join(missing)}, but data.conditioning has "
                f"{', '.join(inputs) or 'no inputs'} beside the loss mask; name its files there"
            )
        return self

    def micro_batch_size(self, stage: Stage, bucket: Bucket, data_size: int) -> int:
        """Return the clips per forward pass of one process.

        Args:
            stage: the stage of the batch.
            bucket: the bucket of the batch.
            data_size: number of processes that share each batch.
        """
        # `-(-a // b)` rounds up. A bucket with its own `batch_size` is split into as many
        # micro-batches as the stage's others, so that every step accumulates equally often.
        of_stage = -(-(stage.global_batch_size or self.training.global_batch_size) // data_size)
        micro = self.training.micro_batch_size
        if bucket.batch_size is None:
            return min(micro or of_stage, of_stage)
        count = 1 if micro is None else -(-of_stage // micro)
        return -(-bucket.batch_size // (data_size * count))

    def in_stage(self, name: str) -> "Recipe":
        """Return the recipe with the settings of a stage in place of the run's.

        A stage's `warmup_steps` do not replace `optimizer.warmup_steps`: they count from the
        stage's first step.
        """
        stage = self.data.stage(name)
        given: dict[str, dict[str, Any]] = {}
        for key, (section, inner) in _KEYS_OF_STAGES.items():
            if (value := getattr(stage, key)) is not None:
                given.setdefault(section, {})[inner] = value
        sections = {
            section: getattr(self, section).model_copy(update=values)
            for section, values in given.items()
        }
        # `model_copy` validates nothing, which is safe: a key of a stage has the bounds of the key
        # that it replaces.
        return self.model_copy(update=sections) if sections else self

    def stage_changes(self, before: str, after: str) -> dict[str, tuple[object, object]]:
        """Return the settings that differ between two stages: key to (value before, after)."""
        old, new = self.in_stage(before), self.in_stage(after)
        found = {
            key: (getattr(getattr(old, section), inner), getattr(getattr(new, section), inner))
            for key, (section, inner) in _KEYS_OF_STAGES.items()
        }
        changes = {key: (one, other) for key, (one, other) in found.items() if one != other}
        warmup = self.data.stage(after).warmup_steps
        return changes | ({"warmup_steps": (None, warmup)} if warmup else {})

    @model_validator(mode="after")
    def _stalls_are_named_in_time(self) -> Self:
        seconds, stall = self.parallel.timeout_seconds, self.watch.min_seconds
        # The default must not clash with a longer watch.min_seconds that a user sets. The default
        # is known by its value, as the recipe that a run keeps sets every key.
        is_default = seconds == ParallelSection.model_fields["timeout_seconds"].default
        if not is_default and self.watch.enabled and seconds <= stall:
            raise ValueError(
                f"parallel.timeout_seconds {seconds:g} is not more than watch.min_seconds "
                f"{stall:g}: a launch would end before its stall is named; set it to more"
            )
        return self

    @model_validator(mode="after")
    def _micro_batches_divide(self) -> Self:
        micro = self.training.micro_batch_size
        batches = {"training.global_batch_size": self.training.global_batch_size}
        for stage in self.data.stages:
            if stage.global_batch_size is not None:
                batches[f"global_batch_size of stage {stage.name},"] = stage.global_batch_size
        for key, batch in batches.items():
            if micro is not None and batch % micro:
                raise ValueError(f"training.micro_batch_size {micro} does not divide {key} {batch}")
            if micro is not None and batch > micro and self.optimizer.fused_backward:
                raise ValueError(
                    "optimizer.fused_backward updates weights in each backward pass, but with "
                    f"training.micro_batch_size {micro} {key} {batch} takes several: leave one of "
                    "the two out"
                )
        return self

    @model_validator(mode="after")
    def _stages_have_an_average_to_change(self) -> Self:
        for stage in self.data.stages:
            if stage.ema_decay is None or (self.ema.decay and not self.ema.profiles):
                continue
            has = "ema.decay = 0 keeps none"
            if self.ema.profiles:
                names = ", ".join(each.name for each in self.ema.profiles)
                has = f"ema.profiles ({names}) have decays of their own"
            raise ValueError(
                f"stage {stage.name} sets ema_decay = {stage.ema_decay:g} of the one average that "
                f"ema.decay makes, but {has}: leave one of the two out"
            )
        return self

    @model_validator(mode="after")
    def _exports_what_is_trained(self) -> Self:
        wanted, kind = self.checkpoint.export, self.trainable.kind
        if wanted is not None and self.trainable.base() != "lora":
            raise ValueError(
                f'checkpoint.export = "{wanted}" writes a LoRA at each save, and trainable.kind is '
                f'"{self.trainable.base()}": leave it out, and write the model of a checkpoint by '
                "longtake export"
            )
        if wanted == "diffusers" and kind == "lokr":
            raise ValueError(
                'checkpoint.export = "diffusers" is for its pipelines, which read no LoKr: take '
                '"comfyui" or "peft"'
            )
        return self

    @model_validator(mode="after")
    def _dora_has_exact_weights(self) -> Self:
        if self.trainable.kind == "dora" and self.model.quantize != "none":
            raise ValueError(
                f'trainable.kind = "dora" begins with the lengths of the weights\' rows, and '
                f'model.quantize = "{self.model.quantize}" rounds them: take trainable.kind = '
                '"lora", or leave model.quantize out'
            )
        return self

    @model_validator(mode="after")
    def _weights_are_frozen_and_whole(self) -> Self:
        """Refuse quantized or streamed weights that are trained or sharded.

        `stream` = "auto" is always accepted: the plan then streams nothing if it cannot.
        """
        for key, is_set in (
            (f'model.quantize = "{self.model.quantize}"', self.model.quantize != "none"),
            ('model.stream = "all"', self.model.stream == "all"),
        ):
            if is_set and self.trainable.base() == "full":
                raise ValueError(
                    f'{key} is for frozen weights, and trainable.kind = "full" trains them all: '
                    'set trainable.kind = "lora", or leave the key out'
                )
            if is_set and self.parallel.strategy != "replicate":
                raise ValueError(
                    f'{key} works with parallel.strategy = "replicate", not '
                    f'"{self.parallel.strategy}", whose processes each hold a part of the weights: '
                    "choose one of the two"
                )
        return self
