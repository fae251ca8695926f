"""What a model family answers, and the base class of families whose transformer is diffusers'.

A family is the one place that knows how an architecture differs from others. Everything outside it
has latents [B, C, F, H, W], sigmas [B] (1 = pure noise) and the velocity, noise - latents.
"""

import functools
import importlib
import inspect
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from longtake.config import Bucket, ModelSection
from longtake.errors import ModelError, RecipeError
from longtake.flow import solver
from longtake.flow.shift import ShiftRule
from longtake.formatting import did_you_mean
from longtake.models import deferred_init, numerics, pretrained
from longtake.models.codec import Codec, encode_videos
from longtake.models.text import TextEncoder, TransformersText
from longtake.parallel.context_parallel import SharedAttention, TokenSharing
from longtake.trust import import_class

FAMILIES = {
    "flux": "longtake.models.flux:Flux",
    "flux2": "longtake.models.flux2:Flux2",
    "flux_kontext": "longtake.models.flux:FluxKontext",
    "qwen_image": "longtake.models.qwen_image:QwenImage",
    "tubelet": "longtake.models.tubelet:Tubelet",
    "wan": "longtake.models.wan:Wan",
    "z_image": "longtake.models.z_image:ZImage",
}

Conditioning = dict[str, Tensor]
"""A model's inputs besides its noisy latents, each [B, ...].

From text encoders `token_ids`, or `prompt_embeds` and `pooled_prompt_embeds`; of
`data.conditioning` what `longtake.models.conditioning` says, such as `<name>_latents`
[B, C, 1, h, w] of a picture; for a guidance-distilled model `guidance` [B]. What is of another
length for each sample is padded, such as `prompt_embeds` [B, T, D], and comes with its length,
`prompt_length` [B] int64: `call` makes a mask or a list of it, or cuts.
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
    """[B, T, D]: of FLUX the noisy image's, then those of its references; of tubelet, and in
    FLUX.2's single blocks, the caption's, then the clip's."""
    text: Tensor | None
    """[B, T', D]: FLUX's second stream, or what Wan attends to; None where blocks see no other."""
    temb: Tensor
    """The timestep's embedding as the block takes it: [B, D], of Wan [B, 6, D]."""
    rope: Any
    """Tables of rotary positions (cosines, sines); None where there are none."""
    sigmas: Tensor
    """[B] fp32."""
    name: str
    """The block's, such as `transformer_blocks.3`."""
    index: int
    """Of the block among all blocks, in the order in which they run."""
    prepared: Mapping[str, Tensor]
    """What the added module's `prepare` returned for this forward pass."""


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
    name: str
    """The attention's in the block, such as Wan's `attn1` (video) or `attn2` (to the text)."""
    block: BlockInputs
    """What the block was called with."""


_SHIFT = ShiftRule(5.0)


@dataclass(frozen=True)
class Defaults:
    """Values of recipe keys that are unset."""

    shift: ShiftRule = _SHIFT  # of sampling
    guidance_scale: float = 5.0
    num_inference_steps: int = 30
    caption_dropout: float = 0.1  # of a model that is sampled with classifier-free guidance
    max_tokens: int = 512  # of a pretrained text encoder


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
    """Names in `data.conditioning` of pictures that its text encoder sees, with the caption."""

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
            max_tokens: T, what captions are cut or padded to.
            pictures: [B, 3, 1, H, W] uint8 of each name in `encodes_text_with`.
        """
        raise NotImplementedError(f"{type(self).__name__} embeds the ids of words")

    def outline_text(self, encoders: Mapping[str, nn.Module], max_tokens: int) -> Conditioning:
        """Shapes and dtypes of what `encode_text` gives for one caption, on the meta device.

        Args:
            encoders: by their folders in the pipeline; on the meta device.
            max_tokens: T.
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
            max_tokens: of those that read captions.
        """
        for folder, length in max_tokens.items():
            ids = torch.ones(1, length, dtype=torch.long)
            encoders[folder](input_ids=ids, attention_mask=torch.ones_like(ids))

    encodes_inputs_itself = False
    """Whether `encode_inputs` gives other tensors than one input's latents, which a cache lacks."""

    def inputs_of(self, section: ModelSection) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Names of pictures in `data.conditioning` that the model needs, and that it may get."""
        return self.references, (*self.references, *self.optional_references)

    def encode_inputs(
        self, codec: Codec, text: TextEncoder, given: Mapping[str, Tensor], bucket: Bucket
    ) -> Conditioning:
        """Tensors [B, ...] of the pictures and videos in `data.conditioning` that are encoded.

        They are the same for a sample alone as in a batch.

        Args:
            codec: of the recipe, on the device of the pixels.
            text: of the recipe; its `pipeline` has encoders of pictures, where there are such.
            given: by name, [B, 3, F, H, W] uint8; F is 1 for a picture.
            bucket: of the clips.
        """
        return {f"{name}_latents": encode_videos(codec, each) for name, each in given.items()}

    def outline_inputs(
        self, codec: Codec, text: TextEncoder, given: Mapping[str, int], bucket: Bucket
    ) -> Conditioning:
        """Shapes and dtypes of what `encode_inputs` gives for one sample, on the meta device.

        `given` has numbers of frames by name.
        """
        frames, *size = codec.latent_shape(bucket)
        shapes = {
            f"{name}_latents": (1, codec.channels, 1 if number == 1 else frames, *size)
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
            model: without LoRA layers.
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


class TransformerCall(NamedTuple):
    """One call of a transformer of diffusers."""

    inputs: dict[str, Any]
    """Keyword arguments of its `forward`."""
    read: Callable[[Any], Tensor]
    """Makes [B, C, F, H, W] of the first value that it returns, in the model's own sign."""


class DiffusersFamily(Family):
    """A family whose transformer and pipeline are diffusers'.

    A subclass names them, and writes `fitted_config`, `call` and `share_tokens`; the other methods
    serve most transformers and are overridden where one differs. Code that needs the model's own
    inputs (ids, masks, per-token timesteps, several references) belongs into `call`.
    """

    label: str
    """Its name in messages."""
    transformer_class: str
    pipeline_class: str
    text_pipeline_class: str | None = None
    """Whose methods encode text, where those of `pipeline_class` cannot."""
    codec_class: type[Any]
    parts: str
    """Codec and text encoders in words, for the message that others cannot be exported."""

    block_lists: tuple[str, ...] = ("transformer_blocks",)
    """Attributes of the transformer with its repeated blocks, in the order of the forward pass."""
    patch_size: tuple[int, int, int] = (1, 2, 2)
    makes_videos = True
    lora_targets: tuple[str, ...] = ("to_q", "to_k", "to_v", "to_out.0")
    block_arguments: ClassVar[Mapping[str, str]] = {
        "tokens": "hidden_states",
        "text": "encoder_hidden_states",
        "temb": "temb",
        "rope": "image_rotary_emb",
    }
    block_outputs: ClassVar[tuple[str, ...]] = ("text", "tokens")
    attentions: ClassVar[tuple[str, ...]] = ("attn",)
    variants: ClassVar[Mapping[float, str]] = {}
    """By in_channels / out_channels of their transformer, variants that longtake does not train;
    empty: one that it trains."""

    time_scale = 1.0
    """Timestep of sigma 1."""
    negates = False
    """Whether the transformer predicts latents - noise."""
    scheduler_class = "FlowMatchEulerDiscreteScheduler"
    scheduler_options: ClassVar[Mapping[str, Any]] = {}
    """Arguments of that class; like it and the next, where there is no release with a scheduler."""
    default_shift = _SHIFT
    mu: ClassVar[pretrained.PipelineMu] = "line"
    guidance_scale = 5.0
    num_inference_steps = 50

    @abstractmethod
    def fitted_config(self, channels: int, text: TextEncoder) -> dict[str, int]:
        """Arguments of the transformer that follow from codec and text encoder.

        Raises:
            RecipeError: the family cannot be conditioned on this text encoder.
        """

    @abstractmethod
    def call(
        self,
        model: Any,
        noisy_latents: Tensor,
        timesteps: Tensor,
        conditioning: Conditioning,
    ) -> TransformerCall:
        """How the transformer is called; `noisy_latents` come in its dtype, timesteps as [B].

        Raises:
            ModelError: conditioning that the model needs is missing.
        """

    @abstractmethod
    def encode_text(
        self, pipeline: Any, captions: list[str], max_tokens: int, pictures: Mapping[str, Tensor]
    ) -> Conditioning:
        """See `Family.encode_text`."""

    def pipeline_of(self, parts: Mapping[str, Any]) -> str:
        """The pipeline's class, where it depends on the text encoders."""
        return self.pipeline_class

    def text_pipeline(self, parts: Mapping[str, Any]) -> Any:
        import diffusers
        import transformers

        with (
            pretrained.quiet(diffusers.DiffusionPipeline),
            pretrained.quiet(transformers.CLIPTextModel),
        ):
            pipeline = getattr(diffusers, self.text_pipeline_class or self.pipeline_of(parts))
            required = inspect.Parameter.empty
            wanted = pretrained.defaults(pipeline.__init__).items()
            absent = {name: None for name, default in wanted if default is required}
            return pipeline(**{**absent, **parts})

    def exported_pipeline(self, release: pretrained.Release, parts: Mapping[str, Any]) -> str:
        """Class of the pipeline that is exported, with these encoders and tokenizers."""
        return self.pipeline_of(parts)

    def further_channels(self, section: ModelSection) -> int:
        """Channels that the transformer takes besides the noisy latents'."""
        return 0

    def check_config(self, config: Any) -> None:
        """Refuse arguments that diffusers takes, and that fail at the first step: RecipeError."""

    def timesteps(self, sigmas: Tensor) -> Tensor:
        return sigmas if self.time_scale == 1 else sigmas * self.time_scale

    def predict_velocity(
        self, model: nn.Module, noisy_latents: Tensor, sigmas: Tensor, conditioning: Conditioning
    ) -> Tensor:
        transformer: Any = model
        call = self.call(
            transformer,
            noisy_latents.to(transformer.dtype),
            self.timesteps(sigmas),
            conditioning,
        )
        with numerics.mixed_norms():
            output = transformer(**call.inputs, return_dict=False)[0]
        velocity = call.read(output)
        return -velocity if self.negates else velocity

    def patch(self, section: ModelSection) -> tuple[int, ...]:
        return self.patch_size

    def check(self, section: ModelSection, shapes: Sequence[LatentShape]) -> None:
        patch = self.patch(section)
        for shape in shapes:
            if shape.num_frames != 1 and not self.makes_videos:
                raise RecipeError(
                    f"data.buckets: {self.label} makes images, not videos, but a bucket has "
                    f"{shape.num_frames} frames. Set num_frames = 1."
                )
            sizes = (shape.num_frames, shape.height, shape.width)
            fits = [max(1, round(n / step)) * step for n, step in zip(sizes, patch, strict=True)]
            if fits != list(sizes):
                raise RecipeError(
                    f"data.buckets: latents of {self._sizes(sizes)} do not divide into "
                    f"{self.label}'s patches of {self._sizes(patch)}. The nearest latents that do "
                    f"are {self._sizes(fits)}: multiply height and width by the codec's "
                    "compression to get the bucket's."
                )

    def _sizes(self, sizes: Sequence[int]) -> str:
        frames = f"{sizes[0]} frames of " if self.makes_videos else ""
        return f"{frames}{sizes[2]}x{sizes[1]}"

    def build(
        self,
        section: ModelSection,
        shapes: Sequence[LatentShape],
        text: TextEncoder,
        *,
        weights: deferred_init.Weights = True,
    ) -> nn.Module:
        import diffusers

        fitted = self.fitted_config(shapes[0].channels, text)
        if further := self.further_channels(section):
            fitted["in_channels"] += further
        model_class = getattr(diffusers, self.transformer_class)
        model = deferred_init.build_transformer(
            model_class, section, fitted, weights=weights, variants=self.variants
        )
        self.check_config(model.config)
        return model

    def blocks(self, model: nn.Module) -> Sequence[nn.Module]:
        lists: Any = (model.get_submodule(name) for name in self.block_lists)
        return [block for blocks in lists for block in blocks]

    def call_blocks_by(self, model: nn.Module, call: Callable[..., Any]) -> None:
        model.enable_gradient_checkpointing(call)  # type: ignore[operator]

    def num_heads(self, model: nn.Module) -> int:
        config: Any = model.config
        return int(config.num_attention_heads)

    def width(self, model: nn.Module) -> int:
        config: Any = model.config
        return int(config.num_attention_heads * config.attention_head_dim)

    def num_tokens(self, model: nn.Module, shape: LatentShape) -> int:
        return math.prod(shape[1:]) // math.prod(self.patch_size)

    def defaults(self, section: ModelSection) -> Defaults:
        """Shift by the release's scheduler; guidance scale and steps are the pipeline's."""
        return Defaults(self.release_shift(section), self.guidance_scale, self.num_inference_steps)

    def release_shift(self, section: ModelSection) -> ShiftRule:
        """By the release's scheduler_config.json."""
        release = pretrained.read_release(section).scheduler
        found = pretrained.scheduler_shift(release, self.mu, str(section.pretrained))
        return found or self.default_shift

    def scheduler(self, section: ModelSection, rule: ShiftRule, bucket_shift: float) -> Any:
        """The exported pipeline's scheduler: the release's, with another shift if the run has it.

        A pipeline that cannot follow the rule gets `bucket_shift`.
        """
        import diffusers

        release = pretrained.read_release(section).scheduler or {}
        named = getattr(diffusers, str(release.get("_class_name")), None)
        scheduler_class = named or getattr(diffusers, self.scheduler_class)
        values = {**self.scheduler_options, **release}
        if not release or rule != self.release_shift(section):
            known = pretrained.defaults(scheduler_class.__init__)
            changed = pretrained.shift_values(rule, self.mu, bucket_shift)
            values |= {key: value for key, value in changed.items() if key in known}
        with pretrained.quiet(scheduler_class):
            return scheduler_class.from_config(values)

    def distils_guidance(self, model: nn.Module) -> bool:
        config: Any = model.config
        return bool(config.get("guidance_embeds", False))

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
        import diffusers

        if type(codec) is not self.codec_class or not isinstance(text, TransformersText):
            raise RecipeError(
                f"A {self.pipeline_class} needs {self.parts}; this run has {type(codec).__name__} "
                f"and {type(text).__name__}. `longtake sample` samples it."
            )
        autoencoder = codec.modules()[0]
        parts = text.pipeline_parts()
        release = pretrained.read_release(section)
        pipeline_class = getattr(diffusers, self.exported_pipeline(release, parts))
        known = pretrained.defaults(pipeline_class.__init__)
        index = release.pipeline
        settings = {n: v for n, v in index.items() if n in known and not isinstance(v, list)}
        pipeline = pipeline_class(
            transformer=model,
            vae=autoencoder,
            scheduler=self.scheduler(section, rule, bucket_shift),
            **parts,
            **settings,
        )
        with pretrained.quiet(model), pretrained.quiet(text.encoder):
            pipeline.save_pretrained(folder)

    def comfyui_name(self, name: str, *, is_lora: bool) -> str:
        """The part of ComfyUI that a LoRA is for, and diffusers' name."""
        return f"{'transformer.' if is_lora else ''}{name}"

    def guidance(self, model: nn.Module, conditioning: Conditioning) -> Tensor | None:
        """The guidance scales [B] of a guidance-distilled model; None for others."""
        if not self.distils_guidance(model):
            return None
        if "guidance" not in conditioning:
            raise ModelError(
                f"This {self.label} is distilled for guidance, but its conditioning names no "
                f"guidance scale (it has {', '.join(conditioning)}). Add guidance [B], such as "
                f"{self.guidance_scale}."
            )
        return conditioning["guidance"]

    def reference(self, conditioning: Conditioning, name: str) -> Tensor:
        """The latents [B, C, 1, h, w] of a reference image."""
        key = f"{name}_latents"
        if key not in conditioning:
            raise ModelError(
                f"{self.label} looks at a reference image, but its conditioning has no {key} (it "
                f"has {', '.join(conditioning)}). Name the images in data.conditioning.{name}, "
                f"and when sampling with --conditioning {name}=FILE."
            )
        return conditioning[key]


def text_width(encoder: nn.Module) -> int:
    """Width of a text encoder's hidden states."""
    config: Any = encoder.config
    return int(config.get_text_config().hidden_size)


def run_decoders(encoders: Mapping[str, nn.Module], max_tokens: Mapping[str, int]) -> None:
    """`Family.run_encoders` of decoders whose hidden layers are the text's."""
    for folder, length in max_tokens.items():
        ids = torch.ones(1, length, dtype=torch.long)
        mask = torch.ones_like(ids)
        encoders[folder](
            input_ids=ids, attention_mask=mask, output_hidden_states=True, use_cache=False
        )


def pad_texts(texts: Sequence[Tensor], max_tokens: int) -> Conditioning:
    """`prompt_embeds` [B, T, D] of texts [L, D], zeros behind them; `prompt_length` [B] int64."""
    padded = torch.stack([F.pad(each, (0, 0, 0, max_tokens - len(each))) for each in texts])
    lengths = torch.tensor([len(each) for each in texts], device=padded.device)
    return {"prompt_embeds": padded, "prompt_length": lengths}


def cut_texts(padded: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor | None]:
    """Texts [B, T, D] cut where the longest ends, and bool [B, T] of what is no padding.

    None instead where nothing is: attention without a mask has faster kernels. It waits for the
    device. In a plan every text is as long as it can be, and those of a batch are of unlike length.
    """
    longest = total = padded.shape[1]
    if not isinstance(padded, FakeTensor) and not padded.is_meta:
        known = lengths.tolist()
        longest, total = max(known), sum(known)
    padded = padded[:, :longest]
    if total == padded[..., 0].numel():
        return padded, None
    return padded, torch.arange(longest, device=padded.device) < lengths[:, None]


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


def share_attention(attention: nn.Module, sharing: TokenSharing) -> None:
    module: Any = attention
    processor_class: Any = type(module.processor)
    module.set_processor(_sharing_class(processor_class)(module.processor, sharing))


@functools.cache
def _sharing_class(processor_class: Any) -> type["_SharingProcessor"]:
    """With the signature of another processor's `__call__`.

    diffusers' `Attention` drops arguments that are not in it. torch.compile would take a `__call__`
    that an instance has for the class's.
    """

    @functools.wraps(processor_class.__call__)
    def call(self: "_SharingProcessor", *args: Any, **kwargs: Any) -> Any:
        return self.attend(*args, **kwargs)

    return type("_SharingProcessor", (_SharingProcessor,), {"__call__": call})


class _SharingProcessor:
    """Calls another processor of diffusers with its attention shared by ranks."""

    def __init__(self, processor: Any, sharing: TokenSharing) -> None:
        self._processor = processor
        self._sharing = sharing

    def attend(self, attn: nn.Module, *args: Any, **kwargs: Any) -> Any:
        shared = SharedAttention(self._sharing)
        with shared:
            mixed = self._processor(attn, *args, **kwargs)
        if not shared.num_calls:
            raise ModelError(
                f"{type(self._processor).__name__} attends in another way than by torch's "
                "scaled_dot_product_attention, so ranks cannot share its tokens. Set diffusers' "
                'attention backend "native", or parallel.context = 1.'
            )
        return mixed
