"""What a model family answers.

A family is the one place that knows how an architecture differs from others. Everything outside it
has latents [B, C, F, H, W], sigmas [B] (1 = pure noise) and the velocity, noise - latents.
"""

import importlib
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, TypeVar, cast

import torch
from torch import Tensor, nn

from longtake import config
from longtake.config import Bucket, ModelSection
from longtake.errors import RecipeError
from longtake.flow import solver
from longtake.flow.shift import ShiftRule
from longtake.formatting import did_you_mean
from longtake.models import deferred_init, pretrained
from longtake.models.codec import NO_PATCH, Codec, encode_videos
from longtake.models.text import TextEncoder
from longtake.parallel.context_parallel import TokenSharing
from longtake.trust import import_class

T = TypeVar("T")

FAMILIES = {
    "flux": "longtake.models.flux:Flux",
    "flux2": "longtake.models.flux2:Flux2",
    "flux_kontext": "longtake.models.flux:FluxKontext",
    "hunyuan_video15": "longtake.models.hunyuan_video15:HunyuanVideo15",
    "ltx2": "longtake.models.ltx2:LTX2",
    "qwen_image": "longtake.models.qwen_image:QwenImage",
    "qwen_image_edit": "longtake.models.qwen_image_edit:QwenImageEdit",
    "qwen_image_edit_plus": "longtake.models.qwen_image_edit:QwenImageEditPlus",
    "tubelet": "longtake.models.tubelet:Tubelet",
    "wan": "longtake.models.wan:Wan",
    "z_image": "longtake.models.z_image:ZImage",
}

Conditioning = dict[str, Tensor]
"""A model's inputs besides its noisy latents, each [B, ...].

From text encoders `token_ids`, or `prompt_embeds` and `pooled_prompt_embeds`; of
`data.conditioning` what `longtake.models.conditioning` says, such as `<name>_latents`
[B, C, 1, h, w] of a picture; for a guidance-distilled model `guidance` [B]; for one that
`takes_fps`, `fps` [B]. What is of another length for each sample is padded, such as
`prompt_embeds` [B, T, D], and comes with its length, `prompt_length` [B] int64: `call` makes a
mask or a list of it, or cuts.
"""


class LatentShape(NamedTuple):
    """Shape of one sample's latents."""

    channels: int
    num_frames: int
    height: int
    width: int


@dataclass(frozen=True)
class BlockInputs:
    """What one block of a model sees; `dataclasses.replace` changes a value.

    B clips, T tokens of the video or of all images, T' of the text, D width.
    """

    tokens: Tensor
    """[B, T, D]: of FLUX and Qwen-Image the noisy image's, then those of its references; of
    tubelet, and in FLUX.2's single blocks, the caption's, then the clip's."""
    text: Tensor | None
    """[B, T', D]: FLUX's second stream, or what Wan attends to; None where blocks see no other."""
    temb: Tensor | None
    """The timestep's embedding as the block takes it: [B, D], of Wan [B, 6, D], of
    Qwen-Image-Edit-2511 [2 B, D], those of its references last; None where a block does not see it,
    as in Z-Image's `context_refiner`."""
    rope: Any
    """Tables of rotary positions (cosines, sines), of Qwen-Image (images', text's) complex; None
    where there are none."""
    sigmas: Tensor
    """[B] fp32."""
    name: str
    """The block's, such as `transformer_blocks.3`."""
    index: int
    """Of the block among all blocks, in the order in which they run."""
    prepared: Mapping[str, Tensor]
    """What the added module's `prepare` returned for this forward pass."""
    audio: Tensor | None = None
    """[B, T', D']: the tokens of LTX-2's audio, which stays in its dtype; None of others."""


@dataclass(frozen=True)
class AttentionInputs:
    """What one attention in a block sees; `dataclasses.replace` changes a value.

    B clips, H heads, T tokens, S tokens that are attended to, d width of a head.
    """

    query: Tensor
    """[B, H, T, d], normalised and rotated; of FLUX the text's tokens come first."""
    key: Tensor
    """[B, H, S, d], as the query. Keys that are not rotated stand where FLUX's text stands."""
    value: Tensor
    """[B, H, S, d]"""
    mask: Tensor | None
    """Bool [B, 1, 1, S], false for keys that are padding, where captions of a batch are of unlike
    length; None: there is no padding. With other keys it is replaced as well."""
    name: str
    """The attention's in the block, such as Wan's `attn1` (video) or `attn2` (to the text)."""
    block: BlockInputs
    """What the block was called with."""


SHIFT = ShiftRule(5.0)


@dataclass(frozen=True)
class Defaults:
    """Values of recipe keys that are unset."""

    shift: ShiftRule = SHIFT  # of sampling
    guidance_scale: float = 5.0
    num_inference_steps: int = 30
    caption_dropout: float = 0.1  # of a model that is sampled with classifier-free guidance
    max_tokens: int = 512  # of a pretrained text encoder
    uniform_share: float = 0.0
    """Of the sigmas trained by the release's shift: if above 0, the others are stretched over
    [0, 1], as `stretched_logit_normal` says."""


class Family(ABC):
    """One architecture: how to build and call it."""

    frozen: pretrained.FrozenParts
    """Its codec and text encoders, as a pipeline has them."""

    references: tuple[str, ...] = ()
    """Names of the pictures in `data.conditioning` whose latents its forward pass needs."""

    encodes_by_length = False
    """Whether `encode_text` gives the same for shorter padding, followed by zeros [B, T, D]."""

    has_text_lengths = False
    """Whether `encode_text` gives what `pad_texts` does."""

    encodes_text_with: tuple[str, ...] = ()
    """Names in `data.conditioning` of pictures that its text encoder sees, with the caption; in the
    order in which it sees those that a recipe has."""

    takes_fps = False
    """Whether frames per second are an input of its model (`fps`)."""

    has_audio = False
    """Whether its model makes audio too, for which a recipe says `model.audio`."""

    shares_tokens = True
    """Whether ranks can share the tokens of its samples, by `share_tokens`."""

    idle: ClassVar[tuple[str, ...]] = ()
    """Patterns (fnmatch) of the names of parameters that get no gradient, or zeros alone."""

    untrained: ClassVar[tuple[str, ...]] = ()
    """Such patterns of parameters that change no velocity whatever the inputs: they are frozen.
    `{last}` is the number of the last block, whose text is of no use, for example."""

    optional_references: tuple[str, ...] = ()
    """Names of the pictures that it takes besides, where a recipe has them."""

    lora_targets: tuple[str, ...]
    """The linear layers that get LoRA unless the recipe names others: attention's projections."""

    block_arguments: ClassVar[Mapping[str, str]]
    """Names of the blocks' arguments, by the values of `BlockInputs` that they are: of `tokens` and
    `temb`, and of `text` and `rope` where blocks see such."""

    block_outputs: ClassVar[tuple[str, ...]] = ("tokens",)
    """What a block returns, by the names of `BlockInputs`; more than one are a tuple."""

    attentions: ClassVar[tuple[str, ...]] = ()
    """Names of the attentions in a block, in the order in which torch's
    `scaled_dot_product_attention` is called; empty where blocks attend in another way."""

    def arguments_of(self, block: nn.Module) -> Mapping[str, str]:
        """`block_arguments` of one block, where blocks differ."""
        return self.block_arguments

    def outputs_of(self, block: nn.Module) -> tuple[str, ...]:
        """`block_outputs` of one block, where blocks differ."""
        return self.block_outputs

    @abstractmethod
    def patch(self, section: ModelSection) -> tuple[int, ...]:
        """Latent frames, rows and columns of one token.

        Raises:
            RecipeError: the section's own are not three positive whole numbers.
        """

    @abstractmethod
    def check(self, section: ModelSection, shapes: Sequence[LatentShape]) -> None:
        """Refuse shapes that the model cannot take, before anything is built.

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
        """The model on the CPU, with random weights in fp32 or pretrained ones in the section's.

        Without `weights` it is the same architecture on torch's meta device, made in seconds at any
        size, and no file of weights is opened or downloaded. `later` is called within
        `parameters_on_meta`: buffers are real, and pretrained weights are read afterwards.

        Raises:
            RecipeError: the model's arguments do not fit.
            ModelError: pretrained weights, or their configuration, cannot be loaded.
        """

    @abstractmethod
    def blocks(self, model: nn.Module) -> Sequence[nn.Module]:
        """The repeated blocks: units of sharding and recomputation, whose matrices Muon trains."""

    def untrained_parameters(self, model: nn.Module) -> list[str]:
        """Names of the parameters of a model that match `untrained`."""
        last = len(self.blocks(model)) - 1
        patterns = [pattern.replace("{last}", str(last)) for pattern in self.untrained]
        return [
            name
            for name, _ in model.named_parameters()
            if any(fnmatchcase(name, pattern) for pattern in patterns)
        ]

    @abstractmethod
    def call_blocks_by(self, model: nn.Module, call: Callable[..., Any]) -> None:
        """Have each block called as `call(block, *inputs)` wherever gradients are enabled.

        `call` must return what `block(*inputs)` returns. A second `call` replaces the first.
        """

    @abstractmethod
    def share_tokens(self, model: nn.Module, sharing: TokenSharing) -> None:
        """Have the ranks of a group share the tokens of each sample (context parallelism).

        All ranks give the model equal inputs and get the whole output. Tokens that attend to each
        other are cut before the first block and gathered after the last. `share_attention` serves
        diffusers' attention modules.
        """

    @abstractmethod
    def num_heads(self, model: nn.Module) -> int:
        """Heads of the attention in which tokens of a sample attend to each other."""

    @abstractmethod
    def width(self, model: nn.Module) -> int:
        """D, the width of a token between blocks."""

    @abstractmethod
    def num_tokens(self, model: nn.Module, shape: LatentShape) -> int:
        """Tokens of one sample's noisy latents."""

    def text_pipeline(self, parts: Mapping[str, Any]) -> Any:
        """A pipeline of diffusers that encodes text with these parts, and lacks the others."""
        raise NotImplementedError(f"{type(self).__name__} embeds the ids of words")

    def encode_text(
        self, pipeline: Any, captions: list[str], max_tokens: int, pictures: Mapping[str, Tensor]
    ) -> Conditioning:
        """What the pipeline's own methods make of captions, on its device; without gradients.

        Args:
            pipeline: of `text_pipeline`.
            captions: B of them, in a list that may be changed.
            max_tokens: T, what captions are cut or padded to; `picture_tokens` are besides.
            pictures: [B, 3, 1, H, W] uint8 of each name in `encodes_text_with`.
        """
        raise NotImplementedError(f"{type(self).__name__} embeds the ids of words")

    def load_processor(self, where: str, subfolder: str) -> Any:
        """The processor of pictures that are encoded with captions, of `frozen.processor`.

        Args:
            where: folder or repository id of the pipeline.
            subfolder: of it.
        """
        raise NotImplementedError(f"{type(self).__name__} encodes captions alone")

    def picture_tokens(self, processor: Any, sizes: Sequence[tuple[int, int]]) -> int:
        """Tokens of a text for pictures that are encoded with it, besides `max_tokens`.

        Args:
            processor: of `load_processor`.
            sizes: height and width of each picture.
        """
        return 0

    def outline_text(self, encoders: Mapping[str, nn.Module], max_tokens: int) -> Conditioning:
        """Shapes and dtypes of what `encode_text` gives for one caption, on the meta device.

        Args:
            encoders: by their folders in the pipeline; on the meta device.
            max_tokens: T, with those for pictures.
        """
        width = text_width(encoders[self.frozen.text.folder])
        found = {"prompt_embeds": torch.empty(1, max_tokens, width, device="meta")}
        if self.has_text_lengths:
            found["prompt_length"] = torch.empty(1, dtype=torch.int64, device="meta")
        return found

    def run_encoders(
        self, encoders: Mapping[str, nn.Module], max_tokens: Mapping[str, int]
    ) -> None:
        """Call the encoders as `encode_text` does for the longest caption; they are fake tensors.

        Args:
            encoders: by their folders in the pipeline.
            max_tokens: of those that read captions, with those for pictures.
        """
        for folder, length in max_tokens.items():
            ids = torch.ones(1, length, dtype=torch.long)
            encoders[folder](input_ids=ids, attention_mask=torch.ones_like(ids))

    encodes_inputs_itself = False
    """Whether `encode_inputs` gives other tensors than the latents of each of its inputs."""

    inputs_version = 1
    """Of `encode_inputs`, in the keys of a cache: raise it where other numbers come out."""

    continues: tuple[str, ...] = ()
    """Names of its pictures that may be a video's first frames (`frames`) instead."""

    def inputs_of(self, section: ModelSection) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Names of pictures in `data.conditioning` that the model needs, and that it may get."""
        return self.references, (*self.references, *self.optional_references)

    def seen_with_text(self, given: Mapping[str, T]) -> dict[str, T]:
        """Those of `encodes_text_with` that are given, by name."""
        return {name: given[name] for name in self.encodes_text_with if name in given}

    def reference_size(self, bucket: Bucket) -> tuple[int, int]:
        """Height and width in pixels of its references when they are encoded."""
        return bucket.height, bucket.width

    def encode_inputs(
        self, codec: Codec, text: TextEncoder, given: Mapping[str, Tensor], bucket: Bucket
    ) -> Conditioning:
        """Tensors [B, ...] of the pictures and videos in `data.conditioning` that are encoded.

        They are the same for a sample alone as in a batch.

        Args:
            codec: of the recipe, on the device of the pixels.
            text: of the recipe; its `pipeline` has encoders of pictures, where there are such.
            given: by name, [B, 3, F, H, W] uint8; F is 1 for a picture, and less than the clip's
                for its first frames.
            bucket: of the clips.
        """
        return {f"{name}_latents": encode_videos(codec, each) for name, each in given.items()}

    def outline_inputs(
        self, codec: Codec, text: TextEncoder, given: Mapping[str, int], bucket: Bucket
    ) -> Conditioning:
        """Shapes and dtypes of what `encode_inputs` gives for one sample, on the meta device.

        `given` has numbers of frames by name.
        """
        shapes = {
            f"{name}_latents": (
                1,
                codec.channels,
                *codec.latent_shape(_with_frames(bucket, number)),
            )
            for name, number in given.items()
        }
        return {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}

    def with_given(self, latents: Tensor, conditioning: Conditioning) -> Tensor:
        """Sampled latents [B, C, F, H, W], with the frames that were given and not predicted."""
        return latents

    def loss_weights(self, latents: Tensor, conditioning: Conditioning) -> Tensor | None:
        """[B, 1, F, H, W] fp32: 0 where frames are given, which are not predicted; None: 1."""
        return None

    def sequence_length(
        self, model: nn.Module, shape: LatentShape, conditioning: Conditioning
    ) -> int:
        """Tokens of one sample that attend to each other; memory and time grow with them."""
        return self.num_tokens(model, shape)

    def defaults(self, section: ModelSection) -> Defaults:
        """Values of unset recipe keys, by the section or the pretrained model's configuration.

        Raises:
            ModelError: the configuration of the pretrained model cannot be found.
        """
        return Defaults()

    def distils_guidance(self, model: nn.Module) -> bool:
        """Whether the guidance scale is an input (`guidance`), so that no second pass is needed."""
        return False

    @abstractmethod
    def predict_velocity(
        self, model: nn.Module, noisy_latents: Tensor, sigmas: Tensor, conditioning: Conditioning
    ) -> Tensor:
        """The velocity, [B, C, F, H, W], for latents of that shape and sigmas [B]."""

    def guided(self, conditional: Tensor, unconditional: Tensor, scale: float) -> Tensor:
        """The velocity [B, C, F, H, W] of classifier-free guidance, as the pipeline has it."""
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
            section: of the run's recipe.
            model: without LoRA layers; an `ExpertPair` where the release has two.
            codec: of the run.
            text: of the run.
            rule: of sampling; the scheduler gets it if the pipeline can follow it.
            bucket_shift: the shift at the run's first bucket, for a pipeline that cannot.
            folder: to write.

        Raises:
            RecipeError: diffusers has no pipeline for this family, codec and text encoder.
        """

    @abstractmethod
    def comfyui_name(self, name: str, *, is_lora: bool) -> str:
        """ComfyUI's name of a weight of the model or of its LoRA.

        Raises:
            RecipeError: ComfyUI has no such model.
        """


def _with_frames(bucket: Bucket, num_frames: int) -> Bucket:
    return Bucket(num_frames=num_frames, height=bucket.height, width=bucket.width)


def text_width(encoder: nn.Module) -> int:
    """Width of a text encoder's hidden states."""
    config: Any = encoder.config
    return int(config.get_text_config().hidden_size)


def family(name: str) -> Family:
    """The family of that name, or of a class of the user's own; its module is imported here."""
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
    found, advice = import_class(path, "model.family"), "See Family in longtake.models.base."
    if not issubclass(found, Family):
        raise RecipeError(
            f"model.family {path!r} is not a Family. Make it a subclass of Family, or of "
            f"DiffusersFamily for a transformer of diffusers. {advice}"
        )
    attributes = {name for part in found.__mro__ for name in inspect.get_annotations(part)}
    methods: frozenset[str] = found.__abstractmethods__
    missing = [name for name in attributes if not hasattr(found, name)]
    if missing or methods:
        listed = ", ".join([*sorted(missing), *sorted(f"{name}()" for name in methods)])
        raise RecipeError(f"model.family {path!r} lacks {listed}. {advice}")
    own: Family = found()
    return own


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
