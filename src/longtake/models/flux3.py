"""FLUX.3: diffusers' `Flux3Transformer2DModel`, called as its modular pipeline does.

A text, an image and its references are modes: each has blocks of its own, in which it attends to
itself alone, before joint ones. Legend: B batch, T tokens of a text, S of a mode or of all of them,
D width, d width of a head.
"""

import copy
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from longtake.config import ModelSection
from longtake.errors import RecipeError
from longtake.flow.shift import ShiftRule
from longtake.models import base, codec, diffusers_family, flux, qwen_image_edit
from longtake.models.base import LatentShape
from longtake.models.diffusers_family import DiffusersBlocks, run_block
from longtake.models.pretrained import FrozenParts, PipelinePart
from longtake.models.release_scheduler import PipelineScheduler
from longtake.models.text import TextEncoder
from longtake.models.text_contract import DECODER, TextContract
from longtake.parallel.context_parallel import TokenSharing

_REFERENCES = ("reference", *qwen_image_edit.MORE_REFERENCES)
_COND = "mode_blocks.image_cond"
_MODES = {"txt": "txt_mode_blocks", "image": "mode_blocks.image", "image_cond": _COND}
"""Names of the transformer's lists of blocks by mode, in the order of joint tokens."""
_ROPE_SCALE = 0.5  # of rows and columns
_ORIGINAL = {
    "single_transformer_blocks.": "single_blocks.",
    "mode_blocks.image": "content_mode_blocks.image",
    ".attn.to_q.": ".q_proj.",
    ".attn.to_k.": ".k_proj.",
    ".attn.to_v.": ".v_proj.",
    ".attn.to_out.0.": ".attn_out.",
    ".ff.linear_in.": ".mlp_in.",
    ".ff.linear_out.": ".mlp_out.",
}
"""Parts of the names of blocks' layers, and what they are in the files of FLUX.3's makers."""


class Flux3Text(TextContract):
    """How FLUX.3 encodes text: eight hidden states of a Qwen3-VL for each token of a caption.

    A caption is padded to a multiple of 80 tokens, and this padding is attended to.
    """

    def encode(
        self, pipeline: Any, captions: list[str], max_tokens: int, pictures: Mapping[str, Tensor]
    ) -> base.Conditioning:
        given = {"max_sequence_length": max_tokens, "output": "prompt_embeds"}
        texts = [pipeline(prompt=caption, **given)[0] for caption in captions]
        return diffusers_family.pad_texts(texts, max_tokens)

    def load_processor(self, where: str, subfolder: str) -> Any:
        return qwen_image_edit.load_processor("Qwen3VLProcessor", where, subfolder)


class Flux3Blocks(DiffusersBlocks):
    """The blocks of FLUX.3: those of each mode, then joint ones, which also get the text."""

    def arguments_of(self, block: nn.Module) -> Mapping[str, str]:
        joint = {"text": "encoder_hidden_states"} if "text" in self.outputs_of(block) else {}
        return {**self.arguments, **joint}

    def outputs_of(self, block: nn.Module) -> tuple[str, ...]:
        is_joint = type(block).__name__ == "Flux3SingleTransformerBlock"
        return ("text", "tokens") if is_joint else ("tokens",)

    def of(self, model: nn.Module) -> Sequence[nn.Module]:
        unused = [] if _sees_references(model) else [*model.get_submodule(_COND).modules()]
        return [block for block in super().of(model) if block not in unused]

    def untrained_parameters(self, model: nn.Module) -> list[str]:
        return [] if _sees_references(model) else super().untrained_parameters(model)


def _sees_references(model: nn.Module) -> bool:
    names = getattr(model, "input_names", _REFERENCES)  # which `note_inputs` sets
    return any(name in _REFERENCES for name in names)


class _Attention:
    """diffusers' attention processor, with a mask [B, 1, 1, S] of keys behind the rotations.

    Blocks pass the tables of rotations on as they are, and have no argument for a mask.
    """

    def __init__(self, processor: Any) -> None:
        self._processor = processor

    def __call__(
        self, attn: Any, hidden_states: Tensor, _no_mask: None, image_rotary_emb: Sequence[Tensor]
    ) -> Any:
        cosines, sines, *masks = image_rotary_emb
        mask = masks[0] if masks else None
        return self._processor(attn, hidden_states, mask, (cosines, sines))


class _Mode(NamedTuple):
    """Tokens of a text, of an image or of its references; of this rank, if ranks share them."""

    tokens: Tensor  # [B, S, C], and [B, S, D] behind the blocks of the mode
    rope: Sequence[Tensor]  # places [S, 4], then cosines and sines [S, d]
    known: Tensor | None = None  # bool [B, S], false for padding; None: nothing is padding

    def tables(self) -> tuple[Tensor, ...]:
        return (*self.rope, *([] if self.known is None else [self.known[:, None, None]]))

    def run(self, model: Any, name: str, temb: Tensor, sharing: TokenSharing | None) -> "_Mode":
        """Run the blocks of the mode, for the time [B, 1, D] of its tokens."""
        embedder = model.context_embedder if name == "txt" else model.x_embedders[name]
        mode = _Mode(embedder(self.tokens), model.pos_embed(*self.rope), self.known)
        if sharing is not None:
            sharing.begin(mode.tokens.shape[1])
            rope = [sharing.cut(table, 0) for table in mode.rope]
            known = None if mode.known is None else sharing.cut(mode.known, 1)
            mode = _Mode(sharing.cut(mode.tokens, 1), rope, known)
        tokens, modulation = mode.tokens, model.early_stream_modulations[name](temb)
        for block in model.get_submodule(_MODES[name]):
            tokens = run_block(model, block, tokens, modulation, mode.tables())
        return mode._replace(tokens=tokens)


def _forward(
    model: Any,
    sharing: Mapping[str, TokenSharing],
    *,
    modes: Mapping[str, _Mode],
    timestep: Tensor,
    return_dict: bool = False,
) -> tuple[Tensor]:
    """Compute the transformer's forward pass for texts of unlike length.

    diffusers' `forward` has no mask, and computes the same modulation for each token of a mode.
    """
    # Text and references have the time 0.
    times = torch.cat([timestep, torch.zeros_like(timestep)]) * 1000
    waves = model.time_proj(times).to(modes["image"].tokens.dtype)
    image_temb, temb = model.timestep_embedder(waves)[:, None].chunk(2)
    activated = dict.fromkeys(modes, F.silu(temb)) | {"image": F.silu(image_temb)}
    modulations = {name: model.single_stream_modulations[name](activated[name]) for name in modes}
    ready = {n: m.run(model, n, activated[n], sharing.get(n)) for n, m in modes.items()}
    rope = [torch.cat(tables) for tables in zip(*(e.rope for e in ready.values()), strict=True)]
    text, content = ready.pop("txt"), [mode.tokens for mode in ready.values()]
    lengths = [each.shape[1] for each in content]
    tokens, modulation = content[0], modulations["image"]
    if len(content) > 1:
        tokens = torch.cat(content, dim=1)
        spread = zip(ready, lengths, strict=True)
        modulation = torch.cat([modulations[n].expand(-1, s, -1) for n, s in spread], dim=1)
    known = None if text.known is None else F.pad(text.known, (0, sum(lengths)), value=True)
    words, tables = text.tokens, _Mode(tokens, rope, known).tables()
    if sharing:  # the image last: its velocity is gathered
        rows = [name for name in ("txt", "image_cond", "image") if name in modes]
        sharing["joint"].begin(*(modes[row].tokens.shape[1] for row in rows))
    del ready, content, text
    for block in model.single_transformer_blocks:
        words, tokens = run_block(
            model, block, tokens, words, modulation, modulations["txt"], tables
        )
    velocity = model.proj_out(model.norm_out(tokens[:, : lengths[0]], image_temb))
    return (sharing["joint"].gather(velocity, 1) if sharing else velocity,)


def _share_tokens(model: Any, sharing: TokenSharing) -> None:
    """Split the tokens of each mode between ranks (context parallelism)."""
    # A mode attends to itself alone, and blocks that are recomputed read its numbers again.
    shared = {name: copy.copy(sharing) for name in _MODES} | {"joint": sharing}
    for name, blocks in {**_MODES, "joint": "single_transformer_blocks"}.items():
        for block in model.get_submodule(blocks):
            diffusers_family.share_attention(block.attn, shared[name])
    model.forward = partial(_forward, model, shared)


class Flux3(diffusers_family.DiffusersFamily):
    """Family from a text and any reference images to an image, of FLUX.2's autoencoder.

    It is conditioned on `prompt_embeds` [B, T, 8 D'] with their `prompt_length`. Its velocity has
    longtake's sign (noise - latents), its timestep is sigma, and a token is one latent pixel.
    """

    frozen = FrozenParts(
        codec=PipelinePart(("AutoencoderKLFlux2",), "vae"),
        text=PipelinePart(("Qwen3VLForConditionalGeneration",), "text_encoder", "tokenizer"),
        processor=PipelinePart(("AutoProcessor", "Qwen3VLProcessor"), "tokenizer"),
        has_random_text=False,
    )
    label = "FLUX.3"
    transformer_class, pipeline_class = "Flux3Transformer2DModel", "Flux3ModularPipeline"
    codec_class = codec.PatchedImageCodec
    parts = "an AutoencoderKLFlux2 and a Qwen3-VL"
    text = Flux3Text(has_lengths=True, layers=8, arguments=DECODER)
    inputs = base.InputContract(optional=_REFERENCES)
    block = Flux3Blocks(
        lists=(*_MODES.values(), "single_transformer_blocks"),
        patch_size=(1, 1, 1),
        arguments={"tokens": "hidden_states", "temb": "temb_mod", "rope": "image_rotary_emb"},
        untrained=("*image_cond*",),  # without references
        untrained_because="They read reference images, and data.conditioning names none "
        "(reference, reference_2 ...).",
        joins_text=True,
        share=_share_tokens,
    )
    makes_videos = False
    scheduler = PipelineScheduler(default_shift=ShiftRule(6.93), mu=None)
    guidance_scale = 3.5
    max_tokens = 560  # seven windows

    def fitted_config(self, channels: int, text: TextEncoder) -> dict[str, int]:
        width = self.text.layers * self.single_embed_dim(text)
        return {"in_channels": channels, "cond_in_channels": channels, "joint_attention_dim": width}

    def check_config(self, config: Any) -> None:
        axes, head = list(config.axes_dims_rope), config.attention_head_dim
        if config.flow_map or len(axes) != 4 or sum(axes) != head:
            raise RecipeError(
                f"model.config: flow_map {config.flow_map} and axes_dims_rope {axes}. {self.label} "
                "is trained without flow_map, which is another objective, and with four even "
                f"numbers (time, rows, columns, words) that add up to attention_head_dim {head}."
            )

    def adapt(
        self, model: Any, section: ModelSection, shapes: Sequence[LatentShape], text: TextEncoder
    ) -> None:
        for block in self.blocks(model):
            attention: Any = block.attn
            attention.set_processor(_Attention(attention.processor))
        model.forward = partial(_forward, model, {})

    def call(
        self, model: Any, noisy_latents: Tensor, timesteps: Tensor, conditioning: base.Conditioning
    ) -> diffusers_family.TransformerCall:
        """Prepare a call whose places are (time, row, column, word).

        References stand at the words -1, -2 ..., with rows and columns as the image has.
        """
        height, width = noisy_latents.shape[-2:]
        prompt, known = diffusers_family.cut_texts(
            conditioning["prompt_embeds"], conditioning["prompt_length"]
        )
        words = torch.arange(prompt.shape[1], dtype=torch.float32, device=prompt.device)
        text = _Mode(prompt.to(noisy_latents.dtype), [F.pad(words[:, None], (3, 0))], known)
        images = [noisy_latents, *self.inputs.pictures(conditioning)]
        tokens = [image.to(noisy_latents).flatten(2).mT for image in images]
        places = [
            F.pad(flux.image_ids(image, 0, patch=1) * _ROPE_SCALE, (0, 1), value=-number)
            for number, image in enumerate(images)
        ]
        modes = {"txt": text, "image": _Mode(tokens[0], places[:1])}
        if len(images) > 1:
            modes["image_cond"] = _Mode(torch.cat(tokens[1:], 1), [torch.cat(places[1:])])
        inputs = {"modes": modes, "timestep": timesteps}
        return diffusers_family.TransformerCall(
            inputs, lambda out: out.mT.unflatten(2, (1, height, width))
        )

    def comfyui_name(self, name: str, *, is_lora: bool) -> str:
        if "blocks." not in name:
            advice = "Train LoRA in these" if is_lora else "Name a file of this model by --like"
            raise RecipeError(
                f"ComfyUI's name of {self.label}'s {name} is not known; those of layers in blocks "
                f"are. {advice}, or export with --format diffusers."
            )
        original = f"{name}."
        for own, others in _ORIGINAL.items():
            original = original.replace(own, others)
        return f"{'diffusion_model.' if is_lora else ''}{original[:-1]}"
