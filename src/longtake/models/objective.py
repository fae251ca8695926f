"""What a step learns: the objective's per-sample losses, and the forward passes they are made of.

docs/guides/objectives.md is the guide for objectives of one's own.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import Tensor, nn

from longtake import config
from longtake.errors import ModelError, RecipeError
from longtake.flow import path
from longtake.formatting import did_you_mean
from longtake.models import numerics, pretrained, trainable
from longtake.models.audio import audio_shape
from longtake.models.base import Conditioning, latent_shape
from longtake.models.components import Components
from longtake.models.conditioning import outline_conditioning, outline_no_caption
from longtake.parallel import fsdp
from longtake.trust import import_class


@dataclass(frozen=True)
class FlowBatch:
    """The samples of one forward pass: their latents, noise, sigmas and conditioning."""

    latents: Tensor  # [B, C, F, H, W], never padded: all clips of a batch have one shape
    noise: Tensor  # [B, C, F, H, W]
    sigmas: Tensor  # [B]
    conditioning: Conditioning
    # [B, 1, F, H, W] in the latents' resolution: the mask that `flow.loss_mask` names, averaged
    # over the pixels of each latent position, at least `flow.loss_mask_floor`.
    loss_weights: Tensor | None = None
    # Embeddings of the empty caption [B, ...] or [1, ...], for objectives with `uses_no_caption`.
    no_caption: Conditioning = field(default_factory=dict)
    source: str = ""  # name of the samples' catalog in the recipe; "" if it is not known
    # Of the audio: `latents` and `noise` [B, L, D], and `weights` [B, L] of its loss, 0 where the
    # clip has no sound. Empty for the video alone.
    audio: dict[str, Tensor] = field(default_factory=dict)

    def without_captions(self) -> "FlowBatch":
        """Return the same samples with the empty caption."""
        size = len(self.sigmas)
        empty = {name: each.expand(size, *each.shape[1:]) for name, each in self.no_caption.items()}
        return replace(self, conditioning=self.conditioning | empty)


def joined(batches: Sequence[FlowBatch]) -> FlowBatch:
    """Return one batch with the samples of several, for one forward pass over all of them.

    They must have the same inputs; `no_caption` and `source` are those of the first.
    """

    def concatenate(values: Sequence[Any]) -> Any:
        if isinstance(values[0], dict):
            return {name: torch.cat([each[name] for each in values]) for name in values[0]}
        return None if values[0] is None else torch.cat([*values])

    kept = ("no_caption", "source")
    names = [each.name for each in fields(FlowBatch) if each.name not in kept]
    made = {name: concatenate([getattr(each, name) for each in batches]) for name in names}
    return replace(batches[0], **made)


class Passes:
    """The forward passes of one micro-batch: any number without gradient, then one with it.

    A model with bf16 weights computes in bf16 without autocast.
    """

    def __init__(
        self, parts: Components, precision: numerics.Precision, device: torch.device
    ) -> None:
        self._parts = parts
        self._autocast = numerics.autocast(
            precision if parts.dtype == torch.float32 else "fp32", device
        )
        self.num_trained = 0
        """Number of samples that were predicted with gradient."""
        self.num_frozen = 0
        """Number of samples that were predicted without gradient."""

    @property
    def model(self) -> nn.Module:
        """The trained model; its added modules are `added_module.added_modules(model)`."""
        return self._parts.model

    def predict(self, batch: FlowBatch) -> Tensor:
        """Predict velocities [B, C, F, H, W] with gradients; once, and after all other passes.

        Recomputation, offloading, streaming, FSDP2 and the memory plan rely on a backward pass
        that follows the last forward pass, through each block once.
        """
        return self.predict_streams(batch)[0]

    def predict_streams(self, batch: FlowBatch) -> tuple[Tensor, Tensor | None]:
        """Predict the velocities of video and audio in place of `predict`; None without audio."""
        if self.num_trained:
            raise ModelError(
                "An objective predicts with gradients a second time in one step. Give the model "
                "all samples at once: longtake.models.objective.joined makes one batch of several."
            )
        self.num_trained = len(batch.sigmas)
        return self._velocities(batch)

    def predict_frozen(self, batch: FlowBatch, *, adapter: bool = True) -> Tensor:
        """Predict velocities [B, C, F, H, W] without gradients, by the model as it is now.

        Args:
            batch: samples, which may be other than those that are trained.
            adapter: False: without LoRA and added modules, also those that training began with:
                the release.

        Raises:
            RecipeError: the recipe trains all weights, so no model without adapter is there.
        """
        return self.predict_frozen_streams(batch, adapter=adapter)[0]

    def predict_frozen_streams(
        self, batch: FlowBatch, *, adapter: bool = True
    ) -> tuple[Tensor, Tensor | None]:
        """Predict the velocities of video and audio without gradients; None without audio."""
        if self.num_trained:
            raise ModelError(
                "An objective calls predict_frozen after predict, so that the backward pass would "
                "not follow the pass that it belongs to. Call predict_frozen first."
            )
        self.num_frozen += len(batch.sigmas)
        with torch.no_grad(), nullcontext() if adapter else trainable.without_adapter(self.model):
            predicted = self._velocities(batch)
        # FSDP2 would wait for a backward pass of this one.
        fsdp.free_gathered(self.model)
        return predicted

    def _velocities(self, batch: FlowBatch) -> tuple[Tensor, Tensor | None]:
        parts, sigmas, audio = self._parts, batch.sigmas, batch.audio
        noisy = path.interpolate(batch.latents, batch.noise, sigmas)
        with self._autocast:
            if not audio:
                return parts.predict_velocity(noisy, sigmas, batch.conditioning), None
            at = parts.audio_sigmas(sigmas)
            noisy_audio = path.interpolate(audio["latents"], audio["noise"], at)
            return parts.predict_streams(noisy, noisy_audio, sigmas, batch.conditioning)

    def velocity_losses(
        self, batch: FlowBatch, predicted: Tensor, target: Tensor | None = None
    ) -> Tensor:
        """Compute the mean squared error [B] fp32 of predicted velocities.

        It is the mean over C, F, H, W of (predicted - target)^2. With weights it is the mean of
        weight * square divided by the mean weight: given first frames have the weight 0, and the
        recipe may have a loss mask.

        Args:
            batch: the predicted samples.
            predicted: velocities [B, C, F, H, W].
            target: velocities to predict; None: noise - latents.
        """
        # 0 at frames that the model is given rather than asked for (image to video); mostly None.
        inputs = self._parts.family.inputs
        weights = inputs.loss_weights(batch.latents, batch.conditioning)
        if weights is None or batch.loss_weights is None:
            weights = batch.loss_weights if weights is None else weights
        else:
            # A product, because given frames have no loss whatever the recipe's mask says.
            weights = weights * batch.loss_weights
        if target is None:
            target = path.velocity(batch.latents, batch.noise)
        return path.velocity_loss(predicted, target, weights)

    def audio_losses(
        self, batch: FlowBatch, predicted: Tensor, target: Tensor | None = None
    ) -> Tensor:
        """Compute the loss [B] fp32 of the predicted velocity [B, L, D] of the audio.

        It is the mean over all positions of weight * (mean square at the position). Silence in
        place of sound that a clip lacks has the weight 0.
        """
        if target is None:
            target = path.velocity(batch.audio["latents"], batch.audio["noise"])
        errors = (predicted.float() - target.float()).square().mean(dim=2)
        return (errors * batch.audio["weights"]).mean(dim=1)


class Objective(ABC):
    """The loss of a training; a class of your own may be named in `objective.kind`.

    Its constructor takes the recipe's `objective.options`. It holds no weights that are trained:
    these belong into an added module (`trainable.modules`), so that optimizers, sharding,
    checkpoints and averages have them. Nothing in it is saved, so the losses of a step must depend
    on their arguments alone; random numbers of torch are seeded for each step.
    """

    inputs: Sequence[str] = ()
    """Names that the recipe must have in `data.conditioning`; the tensors are in
    `FlowBatch.conditioning`, as `longtake.models.conditioning` lists them."""
    uses_no_caption: bool = False
    """True to get `FlowBatch.no_caption`, for the model's prediction without caption."""
    sources: Sequence[str] = ()
    """Names of catalogs whose batches have another loss, by `FlowBatch.source`, and take the most
    memory: the plan is made for such a batch."""
    trains_audio: bool = False
    """True if the losses contain that of the audio, for a recipe with `model.audio` = "train"."""

    def networks(self) -> Sequence[nn.Module]:
        """Return frozen networks, which are moved to the device and whose memory is planned."""
        return ()

    @abstractmethod
    def losses(self, passes: Passes, batch: FlowBatch) -> Tensor:
        """Compute the loss [B] fp32 of each sample of a micro-batch.

        A plan runs it on tensors without values before step 1, and so sees its memory, its time
        and the parameters that get a gradient: it must not read a tensor's values.

        Args:
            passes: forward passes of the model.
            batch: the samples.
        """


class FlowMatching(Objective):
    """The mean squared error of the velocity of the path to noise (`flow.path`): the default."""

    trains_audio = True

    def losses(self, passes: Passes, batch: FlowBatch) -> Tensor:
        video, audio = passes.predict_streams(batch)
        losses = passes.velocity_losses(batch, video)
        return losses if audio is None else losses + passes.audio_losses(batch, audio)


class GuidedTarget(Objective):
    """Flow matching whose target has classifier-free guidance, for guidance-distilled models.

    The target is u + scale * (v - u), where v is the path's velocity and u the model's own
    prediction without caption, without gradient. What is learnt is thus the guided velocity, which
    a distilled model predicts, and not the plain one, which would undo its distillation.

    Args:
        scale: guidance of the target, such as that with which the model is sampled; 1 is flow
            matching.
    """

    uses_no_caption = True
    trains_audio = True

    def __init__(self, scale: float) -> None:
        if scale < 1:
            raise ValueError(f"scale is {scale:g}; expected a guidance scale of at least 1")
        self.scale = scale

    def losses(self, passes: Passes, batch: FlowBatch) -> Tensor:
        plain, plain_audio = passes.predict_frozen_streams(batch.without_captions())
        target = torch.lerp(plain.float(), path.velocity(batch.latents, batch.noise), self.scale)
        video, audio = passes.predict_streams(batch)
        losses = passes.velocity_losses(batch, video, target)
        if audio is None or plain_audio is None:
            return losses
        of_path = path.velocity(batch.audio["latents"], batch.audio["noise"])
        target = torch.lerp(plain_audio.float(), of_path, self.scale)
        return losses + passes.audio_losses(batch, audio, target)


class PriorPreservation(Objective):
    """Flow matching, and for the clips of some catalogs the prediction of the model as it began.

    For these the target is the velocity that the model predicts without LoRA and added modules, so
    that what it knows of their captions stays. Their loss is the mean squared distance from it,
    plus a constant: the flow-matching loss of that velocity. The sum is what the flow-matching loss
    of clips that the model itself made would be, so that the losses of all catalogs compare.

    Args:
        catalogs: names in data.catalogs of the clips whose prediction is kept.
        weight: weight of their loss.
    """

    def __init__(self, catalogs: Sequence[str], weight: float = 1.0) -> None:
        if not catalogs or isinstance(catalogs, str) or weight <= 0:
            raise ValueError(
                f"catalogs = {catalogs!r} and weight = {weight!r}; expected a list of names of "
                "data.catalogs and a weight above 0"
            )
        self.sources = tuple(catalogs)
        self.weight = weight

    def losses(self, passes: Passes, batch: FlowBatch) -> Tensor:
        if batch.source not in self.sources:
            return passes.velocity_losses(batch, passes.predict(batch))
        prior = passes.predict_frozen(batch, adapter=False)
        usual = passes.velocity_losses(batch, prior)
        return self.weight * (passes.velocity_losses(batch, passes.predict(batch), prior) + usual)


_OBJECTIVES: dict[str, type[Objective]] = {
    "flow_matching": FlowMatching,
    "guided_target": GuidedTarget,
    "prior_preservation": PriorPreservation,
}


def build_objective(recipe: config.Recipe) -> Objective:
    """Build a recipe's objective, its networks on the CPU.

    Raises:
        RecipeError: its class cannot be found or constructed, or the recipe lacks what it needs.
    """
    section, known = recipe.objective, recipe.data.sources()
    key = f"objective.kind {section.kind!r}"
    objective_class: Any = _OBJECTIVES.get(section.kind)
    if objective_class is None:
        objective_class = import_class(section.kind, "objective.kind")
        if not issubclass(objective_class, Objective):
            raise RecipeError(
                f"{key} is not an Objective. Make it a subclass of "
                "longtake.models.objective.Objective."
            )
    objective: Objective = pretrained.construct(
        "objective.options", objective_class, section.options
    )
    if missing := [name for name in objective.inputs if name not in recipe.step_inputs()]:
        raise RecipeError(
            f"{key} needs {', '.join(missing)} in data.conditioning: name the files of each clip "
            "there, and the name in objective.inputs if the model itself does not take it."
        )
    for name in objective.sources:
        if name not in known:
            raise RecipeError(
                f"{key} has a loss for the catalog {name}, which the recipe lacks; "
                f"{did_you_mean(name, known)}"
            )
    if recipe.model.audio == "train" and not objective.trains_audio:
        raise RecipeError(
            f'{key} has a loss of the video alone, and model.audio is "train". Set it to "attend": '
            "the video is then trained beside the audio of its clips."
        )
    for network in objective.networks():
        network.requires_grad_(False).eval()
    return objective


def training_losses(
    objective: Objective,
    parts: Components,
    batch: FlowBatch,
    precision: numerics.Precision,
    device: torch.device,
) -> Tensor:
    """Compute the objective's loss [B] fp32 of each sample of a micro-batch.

    Raises:
        ModelError: the objective returned something else.
    """
    losses = objective.losses(Passes(parts, precision, device), batch)
    shape = [len(batch.sigmas)]
    if list(losses.shape) != shape or losses.dtype != torch.float32:
        raise ModelError(
            f"The objective {type(objective).__name__} returned losses of shape "
            f"{list(losses.shape)} and {losses.dtype}; expected {shape}, one for each sample, and "
            "torch.float32."
        )
    return losses


def flow_losses(
    parts: Components, batch: FlowBatch, precision: numerics.Precision, device: torch.device
) -> Tensor:
    """Compute the flow-matching loss [B] fp32 of each sample, whatever the run's objective is."""
    return training_losses(FlowMatching(), parts, batch, precision, device)


def losses_of_zero(parts: Components, batch: FlowBatch) -> Tensor:
    """Compute the flow-matching loss [B] fp32 of each sample for a velocity of 0 everywhere."""
    passes = Passes(parts, "fp32", batch.noise.device)
    losses = passes.velocity_losses(batch, torch.zeros_like(batch.noise))
    if not batch.audio:
        return losses
    return losses + passes.audio_losses(batch, torch.zeros_like(batch.audio["noise"]))


def outline_batch(
    objective: Objective,
    parts: Components,
    recipe: config.Recipe,
    bucket: config.Bucket,
    size: int = 1,
) -> FlowBatch:
    """Outline a micro-batch of an objective: shapes on the meta device, no values."""
    shape, audio = latent_shape(parts.codec, bucket), dict[str, Tensor]()
    if (of_audio := audio_shape(recipe, parts.codec.audio, bucket)) is not None:
        sizes = {"latents": of_audio, "noise": of_audio, "weights": of_audio[:1]}
        audio = {name: torch.empty(size, *each, device="meta") for name, each in sizes.items()}
    empty = outline_no_caption(parts, recipe, bucket, size) if objective.uses_no_caption else {}
    with torch.device("meta"):
        return FlowBatch(
            latents=torch.empty(size, *shape),
            noise=torch.empty(size, *shape),
            sigmas=torch.empty(size),
            conditioning=outline_conditioning(parts, recipe, bucket, size),
            loss_weights=torch.empty(size, 1, *shape[1:]) if recipe.flow.loss_mask else None,
            no_caption=empty,
            audio=audio,
        )


def training_flops(
    objective: Objective, parts: Components, recipe: config.Recipe, bucket: config.Bucket
) -> int:
    """Count the floating-point operations of a training step on one sample."""
    counted = _CountedStep(objective, parts)
    batch = outline_batch(objective, parts, recipe, bucket)
    found = numerics.count_flops(counted, {"batch": batch})
    passes = counted.passes
    # Passes without gradient have no backward pass.
    frozen = passes.num_frozen / max(1, passes.num_trained + passes.num_frozen)
    with_gradient = found.for_training(trains_all=recipe.trainable.base() == "full")
    return round((1 - frozen) * with_gradient + frozen * found.total)


class _CountedStep(nn.Module):
    """An objective's step as the forward pass of a module, so that its FLOPs can be counted."""

    def __init__(self, objective: Objective, parts: Components) -> None:
        super().__init__()
        self.model = parts.model
        self.objective, self.parts = objective, parts

    def forward(self, batch: FlowBatch) -> Tensor:
        self.passes = Passes(self.parts, "fp32", torch.device("cpu"))
        return self.objective.losses(self.passes, batch)
