"""Loads checkpoints into samplers: one for the verb `sample`, one after another for a server."""

from pathlib import Path

from torch import Tensor

from longtake.checkpoint import files, store
from longtake.config import EvaluationSection, Recipe
from longtake.errors import CheckpointError, RecipeError
from longtake.evaluation.presets import Preset, settings_for, weights_to_sample
from longtake.evaluation.sampling.find import find_checkpoint, find_run
from longtake.evaluation.sampling.memory import Memory, device_with_room, refuse_too_large_parts
from longtake.evaluation.sampling.read_pictures import Request
from longtake.evaluation.sampling.sampler import Sampler, fitting_shape
from longtake.models.base import Conditioning
from longtake.models.build import assemble
from longtake.models.trainable import load_trained, trained_state
from longtake.parallel.mesh import pick_device
from longtake.run_dir import RunDirectory
from longtake.trust import refuse_foreign_code

__all__ = [
    "Request",
    "Sampler",
    "Studio",
    "find_checkpoint",
    "find_run",
    "load_sampler",
    "settings_for",
    "weights_to_sample",
]


class Studio:
    """A run's model, codec and text encoder, kept in memory; only the weights are loaded anew.

    On a GPU is only the part that works: the text encoder, then the model, then the codec.

    Args:
        run: whose checkpoints are sampled.
        device: `cpu`, `cuda`, one GPU, such as `cuda:1`; `auto`: the GPU with most free memory, or
            the CPU where no GPU has enough.
        trust: whether code that the run names may be run, whoever began it.

    Raises:
        RunError: there is no run; or it names code, and somebody else began it.
        RecipeError: the recipe's parts do not fit together, or there is no such device.
        ModelError: a frozen part cannot be loaded.
        PlanError: the weights of one part alone are more than the GPU's memory.
    """

    def __init__(self, run: RunDirectory, device: str = "auto", *, trust: bool = False) -> None:
        self.run, self.recipe = run, run.recipe()
        refuse_foreign_code(run, trust=trust, recipe=_without_presets(self.recipe))
        if device != "auto":
            pick_device(device)  # which is refused before anything is loaded
        self.components = assemble(self.recipe, (), run.components_path)
        self.device, self.why_device = device_with_room(device, self.components)
        self._trained = frozenset(trained_state(self.components.model))
        self._memory = Memory()
        self._prompts: dict[str, Conditioning] = {}
        self.components.model.eval().requires_grad_(False)
        refuse_too_large_parts(self.components, self.device)

    def check(self, preset: Preset) -> None:
        """Refuse a preset whose size codec or model cannot divide.

        Raises:
            RecipeError: names the nearest size that both can take.
        """
        try:
            fitting_shape(self.components, self.recipe, preset.bucket)
        except RecipeError as error:
            reason = str(error).removeprefix("data.buckets: ")
            raise RecipeError(f"Preset {preset.name}: {reason}") from None

    def load(self, checkpoint: Path, weights: str) -> Sampler:
        """A sampler of a checkpoint's weights; the one of the call before is void from here on.

        Nothing of the checkpoint but those weights and trainer.json has to be there. After an
        error another checkpoint can be loaded.

        Args:
            checkpoint: its folder.
            weights: `model`, or `ema/` and the name of a profile.

        Raises:
            CheckpointError: it is not whole, is damaged, or is of another model.
        """
        trainer = files.load_trainer(checkpoint, files.SampledTrainer)
        state = self._state()
        files.verify_part(checkpoint, weights)
        _refuse_another_model(checkpoint / weights, state)
        store.load_parts(checkpoint, {weights: state}, is_verified=True)
        load_trained(self.components.model, state)
        return Sampler(
            self.components,
            self.recipe,
            trainer["global_step"],
            self.device,
            trainer["precision"],
            weights,
            self._memory,
            self._prompts,
        )

    def _state(self) -> dict[str, Tensor]:
        """What checkpoints hold of the model; the rest is as the recipe's model brings it."""
        state = self.components.model.state_dict()
        return {name: value for name, value in state.items() if name in self._trained}


def load_sampler(
    path: Path,
    *,
    step: int | None = None,
    ema: bool | None = None,
    profile: str | None = None,
    device: str,
    trust: bool = False,
) -> Sampler:
    """Load a sampler from a run directory (its newest checkpoint) or from one checkpoint folder.

    Nothing but the weights that are sampled has to be there: not the optimizer, for one.

    Args:
        path: of the run or checkpoint.
        step: which checkpoint of a run; its newest by default.
        ema: whether averaged weights are wanted; unset, where the run keeps any.
        profile: of the averages; `ema.sample_from` by default.
        device: to sample on, as `Studio` takes it.
        trust: whether code that the run names may be run, whoever began it.

    Raises:
        RunError: there is no run; or it names code, and somebody else began it.
        RecipeError: the run keeps no such average.
        CheckpointError: there is no whole checkpoint, or it is damaged.
    """
    recipe = find_run(path).recipe()
    weights = weights_to_sample(recipe, ema=ema, profile=profile)
    run, checkpoint = find_checkpoint(path, step, weights)
    return Studio(run, device, trust=trust).load(checkpoint, weights)


def _without_presets(recipe: Recipe) -> Recipe:
    """What decides the model; the presets' measures are loaded elsewhere."""
    return recipe.model_copy(update={"evaluation": EvaluationSection()})


def _refuse_another_model(folder: Path, state: dict[str, Tensor]) -> None:
    """Refuse weights of other names or shapes, of which some might fit and be loaded.

    What cannot be read is left to the loading, which says what is wrong with it.
    """
    try:
        shapes = store.part_shapes(folder)
    except (OSError, ValueError):
        return
    expected = {name: tuple(value.shape) for name, value in state.items()}
    if shapes != expected:
        name = min(
            (each for each in shapes | expected if shapes.get(each) != expected.get(each)),
        )
        has, wants = (list(each[name]) if name in each else "none" for each in (shapes, expected))
        raise CheckpointError(
            f"{folder} holds another model than the recipe describes: {name} is {has} there and "
            f"{wants} by the recipe. Is it a checkpoint of another run?"
        )
