"""The interface of model families: their inputs and blocks, building, velocity and export.

A family is the one place that knows how an architecture differs from others. Everything outside it
has latents [B, C, F, H, W], sigmas [B] (1 = pure noise) and the velocity, noise - latents.
"""

import importlib
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from longtake.config import Bucket, ModelSection
from longtake.errors import ModelError, RecipeError
from longtake.flow import solver
from longtake.flow.shift import ShiftRule
from longtake.formatting import did_you_mean
from longtake.models import deferred_init, pretrained, releases
from longtake.models.codec import NO_PATCH, Codec, encode_videos
from longtake.models.release_scheduler import DEFAULT_SHIFT
from longtake.models.text import TextEncoder
from longtake.models.text_contract import TextContract
from longtake.parallel.context_parallel import TokenSharing
from longtake.trust import import_class

# Named by text, so that only the module of the chosen family is imported.
FAMILIES = {
    "flux": "longtake.models.flux:Flux",
    "flux2": "longtake.models.flux2:Flux2",
    "flux3": "longtake.models.flux3:Flux3",
    "flux_kontext": "longtake.models.flux:FluxKontext",
    "hunyuan_video15": "longtake.models.hunyuan_video15:HunyuanVideo15",
    "ideogram4": "longtake.models.ideogram4:Ideogram4",
    "krea2": "longtake.models.krea2:Krea2",
    "ltx2": "longtake.models.ltx2:LTX2",
    "minimax_h3": "longtake.models.minimax_h3:MiniMaxH3",
    "qwen_image": "longtake.models.qwen_image:QwenImage",
    "qwen_image21": "longtake.models.qwen_image21:QwenImage21",
    "qwen_image_edit": "longtake.models.qwen_image_edit:QwenImageEdit",
    "qwen_image_edit_plus": "longtake.models.qwen_image_edit:QwenImageEditPlus",
    "tubelet": "longtake.models.tubelet:Tubelet",
    "wan": "longtake.models.wan:Wan",
    "z_image": "longtake.models.z_image:ZImage",
}


Conditioning = dict[str, Tensor]
"""Inputs of a model other than its noisy latents, by name; each tensor is [B, ...].

Text encoders give `token_ids`, or `prompt_embeds` and `pooled_prompt_embeds`.
`data.conditioning` gives what `longtake.models.conditioning` lists, such as `<name>_latents` [B,
C, 1, h, w] of a picture. A guidance-distilled model gets `guidance` [B], a model that takes
frames per second `fps` [B]. Tensors whose length differs between samples are padded, such as
`prompt_embeds` [B, T, D], and come with their length, `prompt_length` [B] int64, from which
`call` makes a mask or a list, or cuts."""


class LatentShape(NamedTuple):
    """Shape of the latents of one sample, without the batch dimension."""

    channels: int
    num_frames: int
    height: int
    width: int


def latent_shape(codec: Codec, bucket: Bucket, patch: Sequence[int] = NO_PATCH) -> LatentShape:
    """Return the shape of the latents of one clip in a bucket.

    Args:
        codec: the recipe's codec.
        bucket: shape of the clips in pixels.
        patch: the family's patch; without it only the codec has to divide the bucket.

    Raises:
        RecipeError: the bucket does not divide; names the nearest that does.
    """
    return LatentShape(codec.channels, *codec.latent_shape(bucket, patch))


@dataclass(frozen=True)
class BlockInputs:
    """Inputs of one block of a transformer; `dataclasses.replace` changes a value.

    B clips, T tokens of the video or of all images, T' of the text, D width.
    """

    tokens: Tensor
    """Tokens [B, T, D] of the main stream: the noisy image's, then its references' (FLUX,
    Qwen-Image), or the caption's, then the clip's (tubelet, Krea 2, Ideogram 4, Qwen-Image 2.1,
    FLUX.2's single blocks)."""
    text: Tensor | None
    """Tokens [B, T', D] of FLUX's second stream, or of the text that Wan attends to; None if the
    block gets neither."""
    temb: Tensor | None
    """Embedding of the timestep: [B, D], in Wan [B, 6, D], in Krea 2 [B, 1, 6 D], in Ideogram 4
    [B, 1, adaln_dim], in Qwen-Image 2.1 [B + 1, 4 D] with that of the text last, in
    Qwen-Image-Edit-2511 [2 B, D] with that of the references last; in FLUX.3 a modulation [B, 1, 3
    D], or one for each token; in MiniMax H3 [B, 2, D'] of video and audio; None for blocks without
    it, such as Z-Image's `context_refiner`."""
    rope: Any
    """Tables of rotary position embeddings: (cosines, sines), in FLUX.3 perhaps with a mask of keys
    as a third, in Qwen-Image complex rotations of (images, text); None for models without them."""
    sigmas: Tensor
    """Noise levels [B] in fp32; 1 is pure noise."""
    name: str
    """Name of the block in the transformer, such as `transformer_blocks.3`."""
    index: int
    """Number of the block among all blocks of the transformer, in running order."""
    prepared: Mapping[str, Tensor]
    """Tensors that the added module's `prepare` returned for this forward pass."""
    audio: Tensor | None = None
    """Audio tokens [B, T', D'] of LTX-2, which keep their dtype; None in other families."""


@dataclass(frozen=True)
class AttentionInputs:
    """Inputs of one attention in a block; `dataclasses.replace` changes a value.

    B clips, H heads, T tokens, S tokens that are attended to, d width of a head.
    """

    query: Tensor
    """Queries [B, H, T, d] of the attention, normalised and rotated; in FLUX the text's tokens come
    first."""
    key: Tensor
    """Keys [B, H, S, d], normalised and rotated; a key that is not rotated has the position of
    FLUX's text."""
    value: Tensor
    """Values [B, H, S, d] of the attention."""
    mask: Tensor | None
    """Attention mask, bool [B, 1, 1, S], false for padding keys, if captions of a batch differ in
    length; None if nothing is padding. A module that passes other keys replaces the mask, too."""
    name: str
    """Name of the attention in the block, such as Wan's `attn1` (video) or `attn2` (text)."""
    block: BlockInputs
    """Inputs of the block that calls the attention."""


@dataclass(frozen=True)
class Defaults:
    """Values of a family for unset recipe keys, such as shift, guidance scale and steps."""

    shift: ShiftRule = DEFAULT_SHIFT  # in sampling
    guidance_scale: float = 5.0
    num_inference_steps: int = 30
    caption_dropout: float = 0.1  # for sampling with classifier-free guidance
    max_tokens: int = 512  # for a pretrained text encoder
    uniform_share: float = 0.0
    """Share of the sigmas drawn uniformly if the release's shift is trained. If it is above 0, the
    others are stretched over [0, 1] (`stretched_logit_normal`).
    """
    audio_shift: float = 1.0
    """Factor by which the sigmas of the audio are shifted relative to those of its video."""
    end_guidance_scale: float | None = None
    """Guidance scale of the last sixteenth of the steps, rounded up, where a recipe sets no scale;
    None: `guidance_scale`."""


@dataclass(frozen=True)
class InputContract:
    """The inputs that a family's model takes beyond text: references, first frames, fps, audio."""

    references: tuple[str, ...] = ()
    """Names in `data.conditioning` of the reference pictures whose latents every forward pass
    needs."""
    optional: tuple[str, ...] = ()
    """Names in `data.conditioning` of pictures that the model takes if a recipe has them."""
    continues: tuple[str, ...] = ()
    """Names of the pictures that a recipe may replace by a video's first frames (`frames`)."""
    takes_fps: bool = False
    """True if the frames per second of a clip are an input of the model (`fps`)."""
    has_audio: bool = False
    """True if the model also makes audio; a recipe must then set `model.audio`."""
    fps: float | None = None
    """Frames per second of all videos that the model makes; None: it has no rate of its own."""
    version: int = 1
    """Version of `encode` in the keys of a latent cache; raise it when `encode` returns other
    values."""

    def names(self, section: ModelSection) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return the names of the conditioning inputs that the model needs, and of all it takes."""
        return self.references, (*self.references, *self.optional)

    def further_channels(self, section: ModelSection) -> int:
        """Count the transformer's input channels beyond those of the noisy latents."""
        return 0

    def size(self, bucket: Bucket) -> tuple[int, int]:
        """Return height and width in pixels at which reference pictures are encoded."""
        return bucket.height, bucket.width

    def encode(
        self, codec: Codec, text: TextEncoder, pixels: Mapping[str, Tensor], bucket: Bucket
    ) -> Conditioning:
        """Encode the pictures and videos in `data.conditioning` to tensors [B, ...].

        A sample's tensors are the same alone as in a batch. A plan calls it with tensors on the
        meta device, and with codec and text encoders that have shapes but no weights.

        Args:
            codec: codec of the recipe, on the device of the pixels.
            text: text encoder of the recipe; its `pipeline` has the encoders of pictures, if any.
            pixels: [B, 3, F, H, W] uint8 by name; F is 1 for a picture, and less than the clip's
                for its first frames.
            bucket: size of the clips.
        """
        return {f"{name}_latents": encode_videos(codec, each) for name, each in pixels.items()}

    @property
    def encodes_together(self) -> bool:
        """True if the family encodes inputs together, not each to its own latents."""
        # The override itself is the answer: a flag beside it could contradict it.
        return type(self).encode is not InputContract.encode

    def given_frames(self, latents: Tensor, conditioning: Conditioning) -> Tensor | None:
        """Return latents [B, C, F', h, w] of the video's given first frames, or None without any.

        They replace the first noisy ones.
        """
        return None

    def with_given(self, latents: Tensor, conditioning: Conditioning) -> Tensor:
        """Replace the first latent frames of [B, C, F, H, W] by those of given frames, if any."""
        given = self.given_frames(latents, conditioning)
        if given is None:
            return latents
        return torch.cat([given.to(latents), latents[:, :, given.shape[2] :]], dim=2)

    def loss_weights(self, latents: Tensor, conditioning: Conditioning) -> Tensor | None:
        """Return weights [B, 1, F, H, W] of the loss in fp32: 0 for given first frames, else 1.

        None stands for 1 everywhere.
        """
        given = self.given_frames(latents, conditioning)
        if given is None:
            return None
        weights = torch.ones_like(latents[:, :1])
        # Given frames are clean in the input: the target there, noise - latents, has noise that the
        # model never sees.
        weights[:, :, : given.shape[2]] = 0
        return weights

    def pictures(self, conditioning: Conditioning) -> list[Tensor]:
        """List the latents [B, C, 1, h, w] of reference pictures, then of optional pictures.

        Raises:
            ModelError: a reference is missing.
        """
        needed = [reference_latents(conditioning, name) for name in self.references]
        may_have = (f"{name}_latents" for name in self.optional)
        return needed + [conditioning[name] for name in may_have if name in conditioning]


def read_patch(section: ModelSection, default: tuple[int, int, int]) -> tuple[int, ...]:
    """Return the frames, rows and columns of `model.config.patch_size`.

    Raises:
        RecipeError: they are not three positive whole numbers.
    """
    patch = section.config.get("patch_size", default)
    # `type` below, not isinstance: TOML's true would count as the number 1.
    is_list = isinstance(patch, list | tuple) and len(patch) == 3
    if not is_list or not all(type(side) is int and 0 < side < 2**16 for side in patch):
        raise RecipeError(
            f"model.config.patch_size = {patch!r:.60}: expected frames, rows and columns, such as "
            f"{list(default)}."
        )
    return tuple(patch)


def reference_latents(conditioning: Conditioning, name: str) -> Tensor:
    """Return the latents [B, C, 1, h, w] of a reference image from a model's conditioning.

    Raises:
        ModelError: the conditioning has none of that name.
    """
    key = f"{name}_latents"
    if key not in conditioning:
        raise ModelError(
            f"The model looks at a reference image, but its conditioning has no {key} (it has "
            f"{', '.join(conditioning)}). Name the images in data.conditioning.{name}, and when "
            f"sampling with --conditioning {name}=FILE."
        )
    return conditioning[key]


@dataclass(frozen=True, kw_only=True)
class BlockContract(ABC):
    """Description of a transformer's repeated blocks, and of the tokens that pass between them."""

    arguments: Mapping[str, str]
    """Names of a block's arguments by the field of `BlockInputs` that they carry: `tokens` and
    `temb`, and `text` and `rope` if blocks take them.
    """
    outputs: tuple[str, ...] = ("tokens",)
    """Fields of `BlockInputs` that a block returns; several are returned as a tuple."""
    attentions: tuple[str, ...] = ()
    """Names of a block's attentions, in the order of their calls of torch's
    `scaled_dot_product_attention`; empty if blocks attend in another way."""
    lora_targets: tuple[str, ...]
    """Names of the linear layers that get LoRA by default: the projections of attention."""
    idle: tuple[str, ...] = ()
    """Patterns (fnmatch) of names of parameters whose gradient is missing or always zero by
    design."""
    untrained: tuple[str, ...] = ()
    """Patterns of names of parameters that cannot change the velocity and are frozen, such as those
    of the last block's text output. `{last}` is the number of the last block.
    """
    untrained_because: str = "The velocity does not depend on what they compute."
    """Sentence that says why `untrained` parameters get no gradient."""
    share: Callable[[nn.Module, TokenSharing], None] | None = None
    """Function that makes a group of ranks share the tokens of each sample (context parallelism).

    All ranks give the model equal inputs and get the whole output. Tokens that attend to each
    other are cut before the first block and gathered after the last. `share_attention` serves
    diffusers' attention modules. None: ranks cannot share them.
    """

    @abstractmethod
    def of(self, model: nn.Module) -> Sequence[nn.Module]:
        """List the repeated blocks of a model."""

    @abstractmethod
    def call_by(self, model: nn.Module, call: Callable[..., Any]) -> None:
        """Make the model call each block as `call(block, *inputs)` where gradients are enabled.

        `call` must return what `block(*inputs)` returns. A second `call` replaces the first.
        """

    @abstractmethod
    def num_heads(self, model: nn.Module) -> int:
        """Return the number of heads of the attention between a sample's tokens."""

    @abstractmethod
    def width(self, model: nn.Module) -> int:
        """Return D, the width of a token between the transformer's blocks."""

    @abstractmethod
    def num_tokens(self, model: nn.Module, shape: LatentShape) -> int:
        """Count the tokens of one sample's noisy latents."""

    def share_tokens(self, model: nn.Module, sharing: TokenSharing) -> None:
        """Make ranks share each sample's tokens by the family's `share` (context parallelism).

        Recipes of families without it are refused earlier.
        """
        assert self.share is not None
        self.share(model, sharing)

    def arguments_of(self, block: nn.Module) -> Mapping[str, str]:
        """Return the names of a block's arguments by field of `BlockInputs`; blocks may differ."""
        return self.arguments

    def outputs_of(self, block: nn.Module) -> tuple[str, ...]:
        """Return the fields of `BlockInputs` that a block returns; blocks of a model may differ."""
        return self.outputs

    def note_inputs(self, model: Any, names: Collection[str]) -> None:
        """Note on a new model which inputs of `data.conditioning` it gets."""
        model.input_names = frozenset(names)

    def untrained_parameters(self, model: nn.Module) -> list[str]:
        """Return the names of a model's parameters that `untrained` says to freeze."""
        last = str(len(self.of(model)) - 1)
        patterns = [pattern.replace("{last}", last) for pattern in self.untrained]
        return [
            name
            for name, _ in model.named_parameters()
            if any(fnmatchcase(name, pattern) for pattern in patterns)
        ]


class Family(ABC):
    """One model architecture: how it is built, called and exported."""

    frozen: pretrained.FrozenParts
    """The frozen codec and text encoders of the family's diffusers pipeline."""
    text: TextContract = TextContract()
    inputs: InputContract = InputContract()
    block: BlockContract
    unconditional: str | None = None
    """Folder of the release's transformer that makes the second pass of guidance, without any text,
    and that no run trains; None: the trained transformer makes it, from the negative prompt."""

    def pipeline_of(self, parts: Mapping[str, Any], release: releases.Release | None = None) -> str:
        """Return the name of the diffusers pipeline class for given encoders and tokenizers.

        Args:
            parts: encoders and tokenizers by their folders in the pipeline.
            release: release of a run that is exported; None for the pipeline that encodes text.
        """
        raise NotImplementedError(f"{type(self).__name__} embeds the ids of words")

    @abstractmethod
    def patch(self, section: ModelSection) -> tuple[int, ...]:
        """Return the latent frames, rows and columns that one token of the transformer covers.

        Raises:
            RecipeError: the section's own are not three positive whole numbers.
        """

    @abstractmethod
    def check(self, section: ModelSection, shapes: Sequence[LatentShape]) -> None:
        """Refuse latent shapes that the model cannot take, before anything is built.

        Raises:
            RecipeError: names the shape and the nearest that fits.
        """

    @abstractmethod
    def build(
        self,
        section: ModelSection,
        shapes: Sequence[LatentShape],
        text: TextEncoder,
        *,
        weights: deferred_init.Weights = True,
    ) -> nn.Module:
        """Build the model on the CPU, with random weights in fp32 or pretrained ones.

        Without `weights` it is the same architecture on torch's meta device, made in seconds at any
        size, and no file of weights is opened or downloaded. `later` is called within
        `parameters_on_meta`: buffers are real, and pretrained weights are read afterwards.

        Raises:
            RecipeError: the model's arguments do not fit.
            ModelError: pretrained weights, or their configuration, cannot be loaded.
        """

    def blocks(self, model: nn.Module) -> Sequence[nn.Module]:
        """Return the model's repeated blocks: units of sharding and recompute, trained by Muon."""
        return self.block.of(model)

    def sequence_length(
        self, model: nn.Module, shape: LatentShape, conditioning: Conditioning
    ) -> int:
        """Count one sample's tokens that attend to each other; memory and time grow with them."""
        return self.block.num_tokens(model, shape)

    def defaults(self, section: ModelSection) -> Defaults:
        """Return the family's values for unset recipe keys, by the release's configuration.

        Raises:
            ModelError: the configuration of the pretrained model cannot be found.
        """
        return Defaults()

    def with_audio(self, section: ModelSection) -> "Family":
        """Return the family as `model.audio` says.

        With audio its codec names the parts of the audio codec (`PipelinePart.audio`), and its
        blocks are described with what is trained then.
        """
        return self

    def distils_guidance(self, model: nn.Module) -> bool:
        """Return True if the model takes the guidance scale as an input: it has no second pass."""
        return False

    @abstractmethod
    def predict_velocity(
        self, model: nn.Module, noisy_latents: Tensor, sigmas: Tensor, conditioning: Conditioning
    ) -> Tensor:
        """Predict the velocity [B, C, F, H, W] for latents of that shape and sigmas [B]."""

    def predict_streams(
        self, model: nn.Module, noisy_latents: Tensor, sigmas: Tensor, conditioning: Conditioning
    ) -> tuple[Tensor, Tensor]:
        """Predict the velocities of video and audio, for a family with audio.

        `conditioning` has the noisy latents of the audio, `audio` [B, L, D], at `audio_sigmas` [B].
        """
        raise NotImplementedError(f"{type(self).__name__} has no audio")

    def guided(self, conditional: Tensor, unconditional: Tensor, scale: float) -> Tensor:
        """Combine velocities [B, C, F, H, W] by classifier-free guidance, as the pipeline does."""
        return solver.guided(conditional, unconditional, scale)

    @abstractmethod
    def export(
        self,
        section: ModelSection,
        model: nn.Module,
        codec: Codec,
        text: TextEncoder,
        rule: ShiftRule,
        bucket_shift: float,
        folder: Path,
    ) -> None:
        """Write a diffusers pipeline folder that `from_pretrained` loads.

        Call that pipeline with max_sequence_length = the recipe's `text.max_tokens`.

        Args:
            section: model section of the run's recipe.
            model: without LoRA layers; an `ExpertPair` where the release has two.
            codec: the run's codec.
            text: the run's text encoder.
            rule: shift rule of sampling; the scheduler gets it if the pipeline can follow it.
            bucket_shift: the shift at the run's first bucket, for a pipeline that cannot.
            folder: folder to write.

        Raises:
            RecipeError: diffusers has no pipeline for this family, codec and text encoder.
        """

    def comfyui_lora(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return a LoRA as ComfyUI has it, from its tensors by their names in the model.

        Raises:
            RecipeError: ComfyUI has no such model, or no such LoRA of it.
        """
        named = {self.comfyui_name(name, is_lora=True): each for name, each in weights.items()}
        assert len(named) == len(weights), "two weights have one name"
        return named

    @abstractmethod
    def comfyui_name(self, name: str, *, is_lora: bool) -> str:
        """Return ComfyUI's name of a weight of the model, or of its LoRA.

        Raises:
            RecipeError: ComfyUI has no such model.
        """


def family_of(section: ModelSection) -> Family:
    """Return the family that a section names, with or without its audio."""
    return family(section.family).with_audio(section)


def family(name: str) -> Family:
    """Return the family of a name, or of a user's class given as `package.module:Class`."""
    if ":" in name:
        return _own_family(name)
    if name not in FAMILIES:
        hint = did_you_mean(name, FAMILIES, otherwise="no name is near.")
        raise RecipeError(
            f"model.family {name!r} is unknown; {hint} Known: {', '.join(FAMILIES)}, or a class of "
            "your own as package.module:Class."
        )
    module, _, class_name = FAMILIES[name].partition(":")
    return cast("Family", getattr(importlib.import_module(module), class_name)())


def _own_family(path: str) -> Family:
    family_class, advice = import_class(path, "model.family"), "See Family in longtake.models.base."
    if not issubclass(family_class, Family):
        raise RecipeError(
            f"model.family {path!r} is not a Family. Make it a subclass of Family, or of "
            f"DiffusersFamily for a transformer of diffusers. {advice}"
        )
    # Attributes that base classes only annotate, such as `frozen`, must get a value. Python would
    # fail only where one is read, perhaps hours later in an export.
    attributes = {name for part in family_class.__mro__ for name in inspect.get_annotations(part)}
    # Constructing the class would raise a TypeError for these alone, without the attributes above.
    methods: frozenset[str] = family_class.__abstractmethods__
    missing = [name for name in attributes if not hasattr(family_class, name)]
    if missing or methods:
        listed = ", ".join([*sorted(missing), *sorted(f"{name}()" for name in methods)])
        raise RecipeError(f"model.family {path!r} lacks {listed}. {advice}")
    return family_class()
