"""Base class of families whose transformer and pipeline are classes of diffusers; helpers."""

import functools
import math
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from longtake.config import ModelSection
from longtake.errors import ModelError, RecipeError
from longtake.flow.shift import ShiftRule
from longtake.models import deferred_init, modular, numerics, pretrained, releases
from longtake.models.base import BlockContract, Conditioning, Defaults, Family, LatentShape
from longtake.models.codec import Codec
from longtake.models.experts import ExpertPair
from longtake.models.release_scheduler import PipelineScheduler, guider_scale
from longtake.models.text import TextEncoder, TransformersText
from longtake.parallel.context_parallel import SharedAttention, TokenSharing
from longtake.trust import import_class


class TransformerCall(NamedTuple):
    """Arguments of one call of a diffusers transformer, and the reading of its output."""

    inputs: dict[str, Any]
    """Keyword arguments of the transformer's `forward`."""
    read: Callable[[Any], Tensor]
    """Function that turns the first value that `forward` returns into the prediction [B, C, F, H,
    W], in the model's sign."""
    read_audio: Callable[[Any], Tensor] = lambda audio: audio
    """Function that turns the second value into the prediction for the audio [B, L, D]."""


@dataclass(frozen=True, kw_only=True)
class DiffusersBlocks(BlockContract):
    """Description of blocks in the layout that most transformers of diffusers share."""

    lists: tuple[str, ...] = ("transformer_blocks",)
    """Names of the transformer's attributes that list its repeated blocks, in running order."""
    patch_size: tuple[int, int, int] = (1, 2, 2)
    arguments: Mapping[str, str] = field(
        default_factory=lambda: {
            "tokens": "hidden_states",
            "text": "encoder_hidden_states",
            "temb": "temb",
            "rope": "image_rotary_emb",
        }
    )
    outputs: tuple[str, ...] = ("text", "tokens")
    attentions: tuple[str, ...] = ("attn",)
    lora_targets: tuple[str, ...] = ("to_q", "to_k", "to_v", "to_out.0")
    joins_text: bool = False
    """True if the image attends to the tokens of text and references as to its own."""

    def of(self, model: nn.Module) -> Sequence[nn.Module]:
        lists: Any = (model.get_submodule(name) for name in self.lists)
        return [block for blocks in lists for block in blocks]

    def call_by(self, model: nn.Module, call: Callable[..., Any]) -> None:
        # diffusers calls its checkpointing function in place of each block.
        model.enable_gradient_checkpointing(call)  # type: ignore[operator]

    def num_heads(self, model: Any) -> int:
        return int(model.config.num_attention_heads)

    def width(self, model: Any) -> int:
        return int(model.config.num_attention_heads * model.config.attention_head_dim)

    def num_tokens(self, model: nn.Module, shape: LatentShape) -> int:
        return math.prod(shape[1:]) // math.prod(self.patch_size)


class DiffusersFamily(Family):
    """A family whose transformer and pipeline are diffusers'.

    A subclass names them, and writes `fitted_config` and `call`; the other methods serve most
    transformers and are overridden where one differs. Code that needs the model's own inputs (ids,
    masks, per-token timesteps, several references) belongs into `call`.
    """

    label: str
    """Name of the model family in messages to the user."""
    transformer_class: str
    original_layers: Mapping[str, tuple[str, ...]] = MappingProxyType({})
    """Names of linear layers in the release's own code that differ from diffusers', with those of
    the layers that they are in diffusers: several where the original is one for them, with their
    rows in this order. `*` is the number of a block."""
    pipeline_class: str
    codec_class: type[Any]
    parts: str
    """The pipeline's codec and text encoders in words, for the message that refuses to export
    others."""
    copied_parts: tuple[str, ...] = ()
    """Folders of the pipeline that longtake does not use; an export copies the release's."""

    block: DiffusersBlocks = DiffusersBlocks()
    makes_videos = True
    channel_ratios: ClassVar[tuple[float, ...]] = ()
    """Ratios in_channels / out_channels of the transformers that the family trains, apart from
    1."""

    time_range = (0.0, 1.0)
    """Timesteps that the transformer gets for sigma 0 and for sigma 1."""
    negates = False
    """True if the transformer predicts latents - noise, the negated velocity."""
    scheduler = PipelineScheduler()
    guidance_scale = 5.0
    num_inference_steps = 50
    max_tokens = Defaults.max_tokens

    @abstractmethod
    def fitted_config(self, channels: int, text: TextEncoder) -> dict[str, int]:
        """Return the transformer's arguments that follow from codec and text encoder.

        Raises:
            RecipeError: the family cannot be conditioned on this text encoder.
        """

    def single_embed_dim(self, text: TextEncoder) -> int:
        """Return the width of `prompt_embeds`, for a family that has one text encoder.

        Raises:
            RecipeError: there is another text encoder, or only ids of words.
        """
        if text.embed_dim is None or text.pooled_dim is not None:
            raise RecipeError(
                f"{self.label} is conditioned on the prompt_embeds of one text encoder. Set "
                'text.kind = "transformers", and remove text.pooled.'
            )
        return text.embed_dim

    def check_config(self, config: Any) -> None:
        """Refuse a transformer's config that diffusers accepts but fails with (RecipeError)."""

    def adapt(
        self, model: Any, section: ModelSection, shapes: Sequence[LatentShape], text: TextEncoder
    ) -> None:
        """Adapt a built transformer to a recipe, or refuse it for the recipe's latents and texts.

        It raises RecipeError.
        """

    @abstractmethod
    def call(
        self,
        model: Any,
        noisy_latents: Tensor,
        timesteps: Tensor,
        conditioning: Conditioning,
    ) -> TransformerCall:
        """Prepare a call of the transformer from noisy latents in its dtype and timesteps [B].

        Raises:
            ModelError: conditioning that the model needs is missing.
        """

    def pipeline_of(self, parts: Mapping[str, Any], release: releases.Release | None = None) -> str:
        return self.pipeline_class

    def further_components(self, release: releases.Release) -> dict[str, Any]:
        """Return components of an exported pipeline that training never uses, such as a guider."""
        return {}

    def predict_velocity(
        self, model: Any, noisy_latents: Tensor, sigmas: Tensor, conditioning: Conditioning
    ) -> Tensor:
        call, output = self._run(model, noisy_latents, sigmas, conditioning)
        velocity = call.read(output[0])
        return -velocity if self.negates else velocity

    def predict_streams(
        self, model: Any, noisy_latents: Tensor, sigmas: Tensor, conditioning: Conditioning
    ) -> tuple[Tensor, Tensor]:
        call, output = self._run(model, noisy_latents, sigmas, conditioning)
        video, audio = call.read(output[0]), call.read_audio(output[1])
        return (-video, -audio) if self.negates else (video, audio)

    def _run(
        self, model: Any, noisy_latents: Tensor, sigmas: Tensor, conditioning: Conditioning
    ) -> tuple[TransformerCall, Any]:
        """Call the transformer; return the call and its output, a tuple."""
        first, last = self.time_range
        # Sigmas of a range of 1 are not multiplied, so that they are not rounded.
        timesteps = sigmas if last - first == 1 else sigmas * (last - first)
        # The converted latents get no name: a local would keep them alive during the whole call.
        call = self.call(
            model,
            noisy_latents.to(model.dtype),
            timesteps if first == 0 else first + timesteps,
            conditioning,
        )
        with numerics.mixed_norms():
            return call, model(**call.inputs, return_dict=False)

    def patch(self, section: ModelSection) -> tuple[int, ...]:
        return self.block.patch_size

    def sequence_length(
        self, model: nn.Module, shape: LatentShape, conditioning: Conditioning
    ) -> int:
        tokens = self.block.num_tokens(model, shape)
        if not self.block.joins_text:
            return tokens
        pixels = sum(math.prod(each.shape[-2:]) for each in self.inputs.pictures(conditioning))
        text = conditioning["prompt_embeds"].shape[1]
        return tokens + text + pixels // math.prod(self.block.patch_size)

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
        fitted = self.fitted_config(shapes[0].channels, text)
        if further := self.inputs.further_channels(section):
            # Image-to-video transformers take a mask and a first frame as channels behind the noisy
            # ones.
            fitted["in_channels"] += further
        model = deferred_init.build_transformer(
            self._model_class(section),
            section,
            fitted,
            weights=weights,
            channel_ratios=self.channel_ratios,
        )
        self.check_config(model.config)
        self.adapt(model, section, shapes, text)
        return model

    def _model_class(self, section: ModelSection) -> Any:
        """Return the transformer's class, or the user's own in its place."""
        import diffusers

        if section.transformer_class is None:
            return getattr(diffusers, self.transformer_class)
        own = import_class(section.transformer_class, "model.transformer_class")
        # `refuse_other_class` compares a release's `_class_name` with the class's name, and an
        # export saves that name for diffusers to load.
        is_model = issubclass(own, diffusers.ModelMixin) and hasattr(own, "from_config")
        if not is_model or own.__name__ != self.transformer_class:
            raise RecipeError(
                f"model.transformer_class = {section.transformer_class!r} is no model of diffusers "
                f"that is called {self.transformer_class}, as releases name it. Edit a copy of "
                "that class's file, or make a subclass with the same name."
            )
        return own

    def defaults(self, section: ModelSection) -> Defaults:
        """Return the defaults of sampling, with the release's shift, and its guidance if any."""
        guider, scale = releases.read_release(section).guider, self.guidance_scale
        if guider is not None:
            scale = guider_scale(guider, str(section.release()))
        # A scale of 1 has no pass without a caption for which the model would have to train.
        dropout = Defaults.caption_dropout if scale != 1 else 0.0
        shift, steps = self.scheduler.shift(section), self.num_inference_steps
        return Defaults(shift, scale, steps, dropout, self.max_tokens)

    def distils_guidance(self, model: Any) -> bool:
        return bool(model.config.get("guidance_embeds", False))

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

        # The very class: a subclass of a codec normalises latents in another way than the pipeline
        # does.
        if type(codec) is not self.codec_class or not isinstance(text, TransformersText):
            raise RecipeError(
                f"A {self.pipeline_class} needs {self.parts}; this run has {type(codec).__name__} "
                f"and {type(text).__name__}. `longtake sample` samples it."
            )
        release = releases.read_release(section)
        missing = [name for name in self.copied_parts if not (release.pipeline.get(name) or [0])[0]]
        if missing:
            raise RecipeError(
                f"A {self.pipeline_class} needs {' and '.join(missing)}, which are copied from the "
                "release that a run starts from, and model.pretrained names none that has them. "
                "`longtake sample` samples this run."
            )
        autoencoder = codec.modules()[0]
        parts = text.pipeline_parts()
        pipeline_class = getattr(diffusers, self.pipeline_of(parts, release))
        pair = dict(model.named_children()) if isinstance(model, ExpertPair) else None
        components = {
            **(pair or {"transformer": model}),
            "vae": autoencoder,
            "scheduler": self.scheduler.build(section, rule, bucket_shift),
            **parts,
            **self.further_components(release),
        }
        with pretrained.quiet(pipeline_class), pretrained.quiet(text.encoder):
            if modular.is_modular(pipeline_class):
                modular.save_pipeline(pipeline_class, components, section, folder)
                return
            known = pretrained.defaults(pipeline_class.__init__)
            index = release.pipeline
            # Values in the release's model_index.json that are no components, such as
            # boundary_ratio.
            settings = {n: v for n, v in index.items() if n in known and not isinstance(v, list)}
            # None for now: these folders are copied from the release after saving.
            copied = dict.fromkeys(self.copied_parts)
            pipeline_class(**components, **copied, **settings).save_pretrained(folder)
        for name in self.copied_parts:
            releases.copy_part(section, name, folder)

    def comfyui_name(self, name: str, *, is_lora: bool) -> str:
        """Return diffusers' name of a weight; a LoRA's gets the prefix that ComfyUI expects."""
        # FLUX's original layers are fused, so LoRA of one of three fused projections has no
        # original name: ComfyUI reads diffusers' names under this prefix.
        return f"{'transformer.' if is_lora else ''}{name}"


def guidance_scales(
    chosen: DiffusersFamily, model: nn.Module, conditioning: Conditioning
) -> Tensor | None:
    """Return the guidance scales [B] that a guidance-distilled model gets; None for others.

    Raises:
        ModelError: the conditioning has no `guidance`.
    """
    if not chosen.distils_guidance(model):
        return None
    if "guidance" not in conditioning:
        raise ModelError(
            f"This {chosen.label} is distilled for guidance, but its conditioning names no "
            f"guidance scale (it has {', '.join(conditioning)}). Add guidance [B], such as "
            f"{chosen.guidance_scale}."
        )
    return conditioning["guidance"]


@torch.no_grad()
def embed_pictures(
    text: TextEncoder,
    pictures: Tensor,
    embed: Callable[[Any, Image.Image], Tensor],
    further_tokens: int = 0,
) -> Tensor:
    """Embed the first frames of [B, 3, F, H, W] uint8 by the pipeline's image encoder.

    Args:
        text: text encoder of the recipe, with the pipeline.
        pictures: pictures on any device; those on the meta device are outlined.
        embed: function from the pipeline and an image to its embeddings [1, T, D].
        further_tokens: tokens T beside one per patch, such as a class token.

    Returns:
        [B, T, D] in fp32.
    """
    # A plan asks for shapes, which the encoder's configuration states: no encoder runs for it.
    if pictures.is_meta:
        config = text.pipeline_parts()["image_encoder"].config
        tokens = (config.image_size // config.patch_size) ** 2 + further_tokens
        return torch.empty(len(pictures), tokens, config.hidden_size, device="meta")
    assert isinstance(text, TransformersText)
    return torch.cat([embed(text.pipeline, to_image(each)).float() for each in pictures])


def to_image(picture: Tensor) -> Image.Image:
    """Convert a picture, the first frame of [3, F, H, W] uint8, to an image for a processor."""
    return Image.fromarray(picture[:, 0].permute(1, 2, 0).cpu().numpy())


def pad_texts(texts: Sequence[Tensor], max_tokens: int, name: str = "prompt") -> Conditioning:
    """Pad embedded texts [L, D] with zeros to `<name>_embeds` [B, T, D]; add their lengths [B]."""
    padded = torch.stack([F.pad(each, (0, 0, 0, max_tokens - len(each))) for each in texts])
    lengths = torch.tensor([len(each) for each in texts], device=padded.device)
    return {f"{name}_embeds": padded, f"{name}_length": lengths}


def cut_texts(padded: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor | None]:
    """Cut padded texts [B, T, D] to the longest one; also return a mask, false for padding.

    The mask is bool [B, T], or None if nothing is padding, because attention without a mask has
    faster kernels. It waits for the device. In a plan the longest text has the greatest length, and
    the texts of a batch are taken to differ in length.
    """
    # Without values `total` stays one text's length, which equals the sum only in a batch of one:
    # larger batches of a plan get a mask.
    longest = total = padded.shape[1]
    if not isinstance(padded, FakeTensor) and not padded.is_meta:
        known = lengths.tolist()
        longest, total = max(known), sum(known)
    padded = padded[:, :longest]
    if total == padded[..., 0].numel():
        return padded, None
    return padded, torch.arange(longest, device=padded.device) < lengths[:, None]


def run_block(model: Any, block: nn.Module, *inputs: Any) -> Any:
    """Run a block as diffusers' forward passes do: with gradients, by what `call_by` has set."""
    if torch.is_grad_enabled() and model.gradient_checkpointing:
        return model._gradient_checkpointing_func(block, *inputs)
    return block(*inputs)


def share_inputs(
    model: Any, sharing: TokenSharing, dims: Mapping[str, int], lengths: Sequence[str]
) -> None:
    """Cut a transformer's token arguments between ranks, and gather what its `proj_out` returns.

    Args:
        model: a model of diffusers.
        sharing: the group's token sharing.
        dims: the dimension along which an argument is cut, by its name. What is None or has fewer
            dimensions stays as it is.
        lengths: names of the arguments [B, T, D] whose tokens attend to each other.
    """

    def cut(_: nn.Module, args: Any, inputs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        # Whole lengths, counted before the cut: behind this hook a rank sees only its own part.
        sharing.begin(*(inputs[name].shape[1] for name in lengths))
        has_tokens = {
            name: dim
            for name, dim in dims.items()
            if inputs[name] is not None and inputs[name].ndim > dim
        }
        return args, inputs | {n: sharing.cut(inputs[n], dim) for n, dim in has_tokens.items()}

    model.register_forward_pre_hook(cut, with_kwargs=True)
    # Gathered behind the last layer that works token by token, where tokens are narrowest.
    model.proj_out.register_forward_hook(lambda _module, _args, part: sharing.gather(part, 1))


def cut_outputs(module: Any, sharing: TokenSharing, dim: int) -> None:
    """Cut the tensors that a module returns, such as tables of positions, between the ranks."""

    def cut(_module: nn.Module, _args: object, tables: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return tuple(sharing.cut(table, dim) for table in tables)

    module.register_forward_hook(cut)


def share_attention(attention: Any, sharing: TokenSharing) -> None:
    processor_class: Any = type(attention.processor)
    attention.set_processor(_sharing_class(processor_class)(attention.processor, sharing))


@functools.cache
def _sharing_class(processor_class: Any) -> type["_SharingProcessor"]:
    """Make a processor class with the signature of another processor's `__call__`.

    diffusers' `Attention` drops arguments that are missing from that signature. It is a class of
    its own, because torch.compile takes a `__call__` set on an instance for the class's.
    """

    @functools.wraps(processor_class.__call__)
    def call(self: "_SharingProcessor", *args: Any, **kwargs: Any) -> Any:
        return self.attend(*args, **kwargs)

    return type("_SharingProcessor", (_SharingProcessor,), {"__call__": call})


class _SharingProcessor:
    """Attention processor that calls another one, whose attention the ranks share."""

    def __init__(self, processor: Any, sharing: TokenSharing) -> None:
        self._processor = processor
        self._sharing = sharing

    def attend(self, attn: nn.Module, *args: Any, **kwargs: Any) -> Any:
        shared = SharedAttention(self._sharing)
        with shared:
            mixed = self._processor(attn, *args, **kwargs)
        # Each rank would attend to its own tokens alone, and train on wrong gradients without an
        # error.
        if not shared.num_calls:
            raise ModelError(
                f"{type(self._processor).__name__} attends in another way than by torch's "
                "scaled_dot_product_attention, so ranks cannot share its tokens. Set diffusers' "
                'attention backend "native", or parallel.context = 1.'
            )
        return mixed
