"""MiniMax H3: diffusers' `MiniMaxH3Transformer3DModel`, called as its modular pipeline does.

One sequence holds a text, the audio and the video, in this order, and each token attends to all.

Legend: B batch, C latent channels, F, h, w latent frames, rows and columns, T tokens of a text, A
of the audio (L positions in time for each of two channels), N of the video, S all these, D width.
"""

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from longtake.config import ModelSection
from longtake.errors import ModelError, RecipeError
from longtake.flow.shift import ShiftRule
from longtake.models import base, codec, diffusers_family, pretrained, releases
from longtake.models.base import LatentShape
from longtake.models.diffusers_family import DiffusersBlocks
from longtake.models.release_scheduler import PipelineScheduler
from longtake.models.text import TextEncoder
from longtake.models.text_contract import TextContract
from longtake.parallel import fsdp
from longtake.parallel.context_parallel import TokenSharing

_LAYER = 50  # of the text encoder: the hidden state that the transformer reads
_OF_REFERENCES = "transformer_ref"  # folder of the transformer of another task
_PACK = 2  # latent rows and columns of one token
_SOUND_CHANNELS = 2
_SHIFT, _AUDIO_SHIFT = 12.0, 3.0  # of releases without files of schedulers
_JOINED = ("to_q", "to_k", "to_v")  # one layer in MiniMax's files, with its rows in this order
_OF_LORA = (".lora_A.weight", ".lora_B.weight")
_PARTS = ((0, 1), (1, 2), (0, 0))
"""Of text, audio and video: the number of its time (0 the video's, 1 the audio's), and that of its
modality in the transformer's tables."""


class MiniMaxH3Text(TextContract):
    """How MiniMax H3 encodes text: a hidden layer of a Qwen3-VL, without a template.

    An empty caption is read as one space, because the encoder takes no text without a token.
    """

    def encode(
        self, pipeline: Any, captions: list[str], max_tokens: int, pictures: Mapping[str, Tensor]
    ) -> base.Conditioning:
        encoder = pipeline.text_encoder
        texts = []
        for caption in captions:
            ids = pipeline.tokenizer(caption or " ", add_special_tokens=False).input_ids
            ids = torch.tensor([ids[:max_tokens]], device=encoder.device)
            texts.append(_hidden_state(encoder, ids)[0])
        return diffusers_family.pad_texts(texts, max_tokens)

    def run(self, encoders: Mapping[str, nn.Module], max_tokens: Mapping[str, int]) -> None:
        for folder, length in max_tokens.items():
            _hidden_state(encoders[folder], torch.ones(1, length, dtype=torch.long))


def _hidden_state(encoder: Any, ids: Tensor) -> Tensor:
    """Return the hidden state [1, T, D] of a text; the layers behind it and the head do not count.

    Raises:
        ModelError: it would be the last one, which is normalised.
    """
    layers = encoder.config.get_text_config().num_hidden_layers
    if layers <= _LAYER:
        raise ModelError(
            f"MiniMax H3 reads the hidden state after layer {_LAYER} of its Qwen3-VL, before the "
            f"last norm, and this one has {layers} layers. Name the release in text.pretrained."
        )
    # Without the projection to the vocabulary, which the whole model would compute as well.
    output = encoder.model(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        use_cache=False,
        output_hidden_states=True,
    )
    hidden: Tensor = output.hidden_states[_LAYER]
    return hidden


class _Attention:
    """Attention processor with rotations and a mask of keys for each sample.

    diffusers' processor has one table of rotations for a batch, whose samples then need texts of
    one length: positions of audio and video begin behind the text.
    """

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        rotary_emb: tuple[Tensor, Tensor] | None = None,
        attention_mask: Tensor | None = None,
    ) -> Tensor:
        query, key, value = (
            to(hidden_states).unflatten(-1, (attn.heads, -1))
            for to in (attn.to_q, attn.to_k, attn.to_v)
        )
        query, key = attn.norm_q(query), attn.norm_k(key)
        if rotary_emb is not None:
            query, key = _rotated(query, *rotary_emb), _rotated(key, *rotary_emb)
        query, key, value = (each.to(value.dtype).transpose(1, 2) for each in (query, key, value))
        mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=attention_mask)
        joined: Tensor = attn.to_out[0](mixed.transpose(1, 2).flatten(2))
        return joined


def _rotated(heads: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Rotate the first channels of heads [B, S, H, d] by tables [B, S, 1, fewer than d]."""
    turned, kept = heads.tensor_split([cosines.shape[-1]], dim=-1)
    first, second = turned.chunk(2, dim=-1)
    turned = turned * cosines + torch.cat([-second, first], dim=-1) * sines
    return torch.cat([turned, kept], dim=-1)


def _refine_block(
    block: Any, hidden_states: Tensor, attention_mask: Tensor | None = None
) -> Tensor:
    """Run a block of the token refiner, whose own forward pass takes no mask."""
    mixed = block.attn(block.norm1(hidden_states), None, attention_mask)
    hidden_states = hidden_states + mixed
    refined: Tensor = hidden_states + block.ff(block.norm2(hidden_states))
    return refined


def _run_block(
    block: Any,
    hidden_states: Tensor,
    temb: Tensor,
    counts: Sequence[int],
    rotary_emb: tuple[Tensor, Tensor],
    attention_mask: Tensor | None = None,
) -> Tensor:
    """Run a block for samples of unlike times: its own forward pass has one table for a batch.

    Args:
        block: a block of the transformer.
        hidden_states: tokens [B, S, D].
        temb: embeddings [B, 2, D'] of the video's time and the audio's.
        counts: numbers of tokens of text, audio and video.
        rotary_emb: cosines and sines.
        attention_mask: mask of keys [B, 1, 1, S].
    """
    # Shift, scale and gate of attention, then those of the feed-forward layers.
    tables = block.adaln_proj.linear(F.silu(temb).to(hidden_states.dtype))
    tables = tables.unflatten(-1, (3, 6, 1, -1))
    rows = [tables[:, time, modality].unbind(1) for time, modality in _PARTS]  # [B, 1, D] each

    def modulated(tokens: Tensor, first: int) -> Tensor:
        parts = zip(torch.split(tokens, list(counts), dim=1), rows, strict=True)
        return torch.cat([part * (1 + row[first + 1]) + row[first] for part, row in parts], dim=1)

    def gated(tokens: Tensor, number: int) -> Tensor:
        parts = zip(torch.split(tokens, list(counts), dim=1), rows, strict=True)
        return torch.cat([part * row[number] for part, row in parts], dim=1)

    mixed = block.attn(modulated(block.norm1(hidden_states), 0), rotary_emb, attention_mask)
    hidden_states = hidden_states + gated(mixed, 2)
    return hidden_states + gated(block.ff(modulated(block.norm2(hidden_states), 3)), 5)


def _forward(
    model: Any,
    sharing: TokenSharing | None,
    *,
    hidden_states: Tensor,
    audio_hidden_states: Tensor,
    encoder_hidden_states: Tensor,
    known: Tensor | None,
    timestep: Tensor,
    position_ids: Sequence[Tensor],
    return_dict: bool = False,
) -> tuple[Tensor, Tensor]:
    """Compute the forward pass for samples of unlike times and texts of unlike length.

    diffusers' `forward` has one layout and one set of times for a batch.

    Args:
        model: the transformer.
        sharing: of tokens between ranks.
        hidden_states: tokens [B, N, 4 C] of the video.
        audio_hidden_states: tokens [B, A, C'] of the audio.
        encoder_hidden_states: texts [B, T, D'].
        known: mask [B, T], false for padding; None: nothing is padding.
        timestep: times [B, 2] of video and audio; 1 is clean.
        position_ids: places [B, T, 3] of the text's tokens, [B, A, 3] and [B, N, 3].
        return_dict: not used; the velocities of video and audio are returned.
    """
    # As in diffusers' forward passes: the function is the one that `call_by` has set.
    recomputes = torch.is_grad_enabled() and model.gradient_checkpointing

    def run(block: Any, *inputs: Any) -> Any:
        call = partial(model._gradient_checkpointing_func, block) if recomputes else block
        return call(*inputs)

    def join(parts: Sequence[Tensor]) -> Tensor:  # this rank's of text, audio and video
        return torch.cat([p if sharing is None else sharing.cut(p, 1) for p in parts], dim=1)

    text = _refined(model, encoder_hidden_states, known, run)
    dtype, exact = text.dtype, model.proj_in.weight.dtype
    audio = model.audio_proj_in(audio_hidden_states.to(exact)).to(dtype)
    parts = [text, audio, model.proj_in(hidden_states.to(exact)).to(dtype)]
    counts, mask = [part.shape[1] for part in parts], None
    if sharing is not None:
        sharing.begin(*counts)
    if known is not None:
        others = (known.new_ones(len(known), count) for count in counts[1:])
        mask = join([known, *others])[:, None, None]
    tokens, places = join(parts), join(position_ids)
    if sharing is not None:
        counts = [sharing.cut(part, 1).shape[1] for part in parts]
    tables = model.rope(places.flatten(0, 1))
    rope = tuple(each.unflatten(0, places.shape[:2])[:, :, None].to(dtype) for each in tables)
    times = model.time_proj(timestep.flatten()).to(model.time_embedder.linear_1.weight.dtype)
    temb = model.time_embedder(times).unflatten(0, (-1, 2))
    for block in model.transformer_blocks:
        tokens = run(block, tokens, temb, tuple(counts), rope, mask)
    _, audio, video = torch.split(tokens, counts, dim=1)
    return _velocities(model, (video, audio), temb, sharing)


def _refined(model: Any, text: Tensor, known: Tensor | None, run: Callable[..., Tensor]) -> Tensor:
    mask = None if known is None else known[:, None, None]
    text = model.context_embedder(text)
    for block in model.token_refiner.refiner_blocks:
        text = run(block, text, mask)
    refined: Tensor = model.token_refiner.final_norm(text)
    return refined


def _velocities(
    model: Any, parts: tuple[Tensor, Tensor], temb: Tensor, sharing: TokenSharing | None
) -> tuple[Tensor, Tensor]:
    """Return the velocities of the tokens of video and audio: diffusers has both of all tokens."""
    tables = model.norm_out.linear(F.silu(temb).to(parts[0].dtype)).chunk(2, dim=-1)
    velocities = []
    for number, (tokens, head) in enumerate(
        zip(parts, (model.proj_out, model.audio_proj_out), strict=True)
    ):
        shift, scale = (table[:, number : number + 1] for table in tables)
        tokens = model.norm_out.norm(tokens) * (1 + scale) + shift
        velocity = head(tokens.to(head.weight.dtype))
        if sharing is not None:
            velocity = sharing.gather(velocity, 1, row=2 - number)
        velocities.append(velocity)
    return velocities[0], velocities[1]


def _places(
    lengths: Tensor, num_text: int, num_audio: int, size: Sequence[int]
) -> tuple[Tensor, ...]:
    """Return places of text, audio and video in float64: time, row and column of each token.

    A text's tokens have a time each, and audio and video begin behind it. The audio has 40 tokens a
    second for each channel of sound, on the first and the last of the video's columns; a latent
    frame of the video begins with its first frame, of 24 a second, on the same clock.

    Args:
        lengths: numbers [B] of tokens of the texts.
        num_text: tokens of padded texts.
        num_audio: tokens of the audio.
        size: latent frames, rows and columns of the video.
    """
    frames, *sides = size
    count = partial(torch.arange, dtype=torch.float64, device=lengths.device)
    text = torch.cartesian_prod(count(num_text), count(1), count(1))
    # Of 17 frames the first is a latent frame, and then each four.
    number = count(frames)
    begun = 17 * (number // 5) + (4 * (number % 5) - 3).clamp(min=0)
    root = math.sqrt(math.prod(sides))
    rows, columns = (
        (count(side // _PACK) * (side / root / (side // _PACK)) + (1 - side / root) / 2) * 32
        for side in sides
    )
    ends = torch.stack([columns[0], columns[-1]])
    sound = torch.cartesian_prod(ends, count(num_audio // _SOUND_CHANNELS), count(1))[:, [1, 2, 0]]
    video = torch.cartesian_prod(begun * 5 / 3, rows, columns)
    begin = F.pad(lengths[:, None].double(), (0, 2))[:, None]
    return text + 0 * begin, sound + begin, video + begin


def _unpack(tokens: Tensor, size: Sequence[int]) -> Tensor:
    """Return tokens [B, N, 4 C], frame by frame and row by row, as latents [B, C, F, h, w]."""
    frames, height, width = size
    rows, columns = height // _PACK, width // _PACK
    packed = tokens.reshape(len(tokens), frames, rows * columns, -1).mT
    packed = packed.reshape(len(tokens), frames, -1, rows, columns)
    return F.pixel_shuffle(packed, _PACK).transpose(1, 2)


def _side_by_side(tokens: Tensor) -> Tensor:
    """Return tokens [B, A, C'] of the audio as [B, L, 2 C']: the left channel beside the right."""
    by_channel = tokens.reshape(len(tokens), _SOUND_CHANNELS, -1, tokens.shape[2])
    return by_channel.transpose(1, 2).flatten(2)


def _share_tokens(model: Any, sharing: TokenSharing) -> None:
    """Split the tokens of text, audio and video between ranks (context parallelism)."""
    # In place of the forward pass that `adapt` has set, which shares nothing.
    model.forward = partial(_forward, model, sharing)
    for block in model.transformer_blocks:
        diffusers_family.share_attention(block.attn, sharing)


class MiniMaxH3Blocks(DiffusersBlocks):
    """The blocks of MiniMax H3, whose heads together are wider than its tokens."""

    def width(self, model: Any) -> int:
        return int(model.config.hidden_size)


class MiniMaxH3(diffusers_family.DiffusersFamily):
    """Family from a text to a video with sound, conditioned on `prompt_embeds` and their lengths.

    Its transformer predicts latents - noise, and its times run from 0 for noise to 1; the audio has
    a time of its own. What the audio's latents are is a conditioning of each pass: `audio` [B, L,
    64] (of a position in time the 32 channels of the left, then those of the right), with
    `audio_sigmas` [B].
    """

    frozen = pretrained.FrozenParts(
        codec=pretrained.PipelinePart(("AutoencoderKLMiniMaxH3",), "vae"),
        text=pretrained.PipelinePart(
            ("Qwen3VLForConditionalGeneration",), "text_encoder", "tokenizer"
        ),
        has_random_text=False,
    )
    label = "MiniMax H3"
    transformer_class = "MiniMaxH3Transformer3DModel"
    pipeline_class = "MiniMaxH3ModularPipeline"
    codec_class = codec.MiniMaxH3Codec
    parts = "an AutoencoderKLMiniMaxH3 and a Qwen3-VL"
    text = MiniMaxH3Text(has_lengths=True)
    inputs = base.InputContract(has_audio=True, fps=24.0)
    block = MiniMaxH3Blocks(
        lists=("token_refiner.refiner_blocks", "transformer_blocks"),
        arguments={"tokens": "hidden_states", "temb": "temb", "rope": "rotary_emb"},
        outputs=("tokens",),
        share=_share_tokens,
    )
    time_range = (1.0, 0.0)
    negates = True
    scheduler = PipelineScheduler("MiniMaxH3Scheduler", default_shift=ShiftRule(_SHIFT), mu=None)
    guidance_scale = 1.0  # the release is distilled for guidance, and its pipeline has none
    num_inference_steps = 49  # its pipeline's 50 sigmas, of which the last is 0

    def with_audio(self, section: ModelSection) -> base.Family:
        """Return the family for `model.audio`; video and audio are one sequence, so not "off".

        Raises:
            RecipeError: it is.
        """
        if section.audio == "off":
            raise RecipeError(
                f'model.audio is "off", but {self.label} has video and audio in one sequence, and '
                'makes neither alone. Set "train", or "attend" for the loss of the video alone: '
                "clips need no sound for either."
            )
        if not section.uses_audio:
            return self
        chosen = copy.copy(self)
        sound = pretrained.PipelinePart(
            ("AutoencoderKLMiniMaxH3Audio",), "audio_vae", module="diffusers"
        )
        chosen.frozen = replace(self.frozen, codec=replace(self.frozen.codec, audio=(sound,)))
        if section.audio == "attend":
            # The only layers that no token of the video sees.
            chosen.block = replace(self.block, untrained=("audio_proj_out.*",))
        return chosen

    def check(self, section: ModelSection, shapes: Sequence[LatentShape]) -> None:
        super().check(section, shapes)
        if section.subfolder == _OF_REFERENCES:
            raise RecipeError(
                f"model.subfolder is {_OF_REFERENCES}, the transformer of {self.label} that makes "
                "videos from references, which longtake does not give it. Leave it out."
            )

    def fitted_config(self, channels: int, text: TextEncoder) -> dict[str, int]:
        return {"in_channels": channels, "text_dim": self.single_embed_dim(text)}

    def check_config(self, config: Any) -> None:
        if tuple(config.patch_size) != (1, _PACK, _PACK):
            raise RecipeError(
                f"model.config.patch_size is {list(config.patch_size)}, but a token of "
                f"{self.label} is one frame of 2 x 2 latent pixels. Leave it out."
            )

    def adapt(
        self, model: Any, section: ModelSection, shapes: Sequence[LatentShape], text: TextEncoder
    ) -> None:
        """Give the model forward passes that take a batch of samples of unlike times and texts."""
        for blocks, forward in (
            (model.token_refiner.refiner_blocks, _refine_block),
            (model.transformer_blocks, _run_block),
        ):
            for block in blocks:
                block.attn.set_processor(_Attention())
                block.forward = partial(forward, block)
        model.forward = partial(_forward, model, None)

    def defaults(self, section: ModelSection) -> base.Defaults:
        """Return the sampling defaults; without a second pass no caption has to be dropped."""
        shift = self.scheduler.shift(section)
        audio = (releases.read_release(section).audio_scheduler or {}).get("shift", _AUDIO_SHIFT)
        return base.Defaults(
            shift,
            self.guidance_scale,
            self.num_inference_steps,
            caption_dropout=0.0,
            max_tokens=1024,
            audio_shift=audio / shift.by,
        )

    def call(
        self, model: Any, noisy_latents: Tensor, timesteps: Tensor, conditioning: base.Conditioning
    ) -> diffusers_family.TransformerCall:
        """Prepare a call with a text, the audio's noisy latents and the video's."""
        audio, lengths = conditioning["audio"], conditioning["prompt_length"]
        prompt, known = diffusers_family.cut_texts(conditioning["prompt_embeds"], lengths)
        size = noisy_latents.shape[2:]
        # [B, F, 4 C, rows, columns]
        packed = F.pixel_unshuffle(noisy_latents.transpose(1, 2), _PACK)
        # All of the left channel first.
        by_channel = audio.reshape(*audio.shape[:2], _SOUND_CHANNELS, -1)
        tokens = by_channel.transpose(1, 2).flatten(1, 2)
        inputs = {
            "hidden_states": packed.flatten(3).mT.flatten(1, 2),
            "audio_hidden_states": tokens,
            "encoder_hidden_states": prompt.to(noisy_latents.dtype),
            "known": known,
            "timestep": torch.stack([timesteps, 1 - conditioning["audio_sigmas"]], dim=1),
            "position_ids": _places(lengths, prompt.shape[1], tokens.shape[1], size),
        }
        return diffusers_family.TransformerCall(inputs, partial(_unpack, size=size), _side_by_side)

    def sequence_length(
        self, model: nn.Module, shape: LatentShape, conditioning: base.Conditioning
    ) -> int:
        # 17 frames have 5 latent frames, and the last five have two.
        frames = (shape.num_frames - 2) // 5 * 17 + 5
        audio = _SOUND_CHANNELS * round(frames / 24 * 40)
        texts = conditioning["prompt_embeds"].shape[1]
        return texts + audio + self.block.num_tokens(model, shape)

    def comfyui_name(self, name: str, *, is_lora: bool) -> str:
        if not is_lora:
            raise RecipeError(
                f"ComfyUI's file of a whole {self.label} joins layers that are apart here, such as "
                f"{name}. Train LoRA, or export with --format diffusers."
            )
        front = next((each for each in _ORIGINAL if name.startswith(each)), "")
        name = _ORIGINAL.get(front, "") + name.removeprefix(front)
        for ours, original in _ORIGINAL_IN_BLOCKS.items():
            name = name.replace(ours, original)
        return f"diffusion_model.{name}"

    def comfyui_lora(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return a LoRA of ComfyUI's layers, which join queries, keys and values, in this order.

        Its rank is then the sum of theirs. Of feed-forward layers the gate comes first there.
        """
        if other := [name for name in weights if not name.endswith(_OF_LORA)]:
            raise RecipeError(
                f"ComfyUI's {self.label} joins layers that are apart here. Only LoRA can be "
                f"joined, and {other[0]} is of another kind: export with --format diffusers."
            )
        weights, named = {n: fsdp.full(each) for n, each in weights.items()}, dict[str, Tensor]()
        for layer in dict.fromkeys(name.rpartition(".lora_")[0] for name in weights):
            front, _, last = layer.rpartition(".")
            names = [f"{front}.{each}" for each in (_JOINED if last in _JOINED else (last,))]
            pairs = [[weights.get(f"{n}{end}") for end in _OF_LORA] for n in names]
            mine = weights[layer + _OF_LORA[1]]
            ups = [mine.new_zeros(len(mine), 0) if up is None else up for _, up in pairs]
            whole: Tensor = torch.block_diag(*ups)  # type: ignore[no-untyped-call]
            if layer.endswith(".ff.net.0.proj"):
                whole = torch.cat(whole.chunk(2)[::-1])
            down = torch.cat([down for down, _ in pairs if down is not None])
            for end, value in zip(_OF_LORA, (down, whole), strict=True):
                named[self.comfyui_name(layer + end, is_lora=True)] = value
        return named


# The inverse of diffusers' `convert_minimax_h3_transformer_checkpoint_to_diffusers`.
_ORIGINAL = {
    "transformer_blocks.": "blocks.",
    "token_refiner.refiner_blocks.": "token_refiner.blocks.",
    "audio_proj_in": "audio_patch_proj",
    "audio_proj_out": "final_layer.audio_out",
    "proj_in": "video_patch_proj",
    "proj_out": "final_layer.video_out",
    "context_embedder": "condition_proj",
    "time_embedder.linear_1": "time_embedder.proj_in",
    "time_embedder.linear_2": "time_embedder.proj_out",
    "norm_out.linear": "final_layer.adaln_proj.linear",
}
_ORIGINAL_IN_BLOCKS = {
    **{f".attn.{name}.": ".attn.qkv_proj." for name in _JOINED},
    ".attn.to_out.0.": ".attn.out_proj.",
    ".ff.net.0.proj.": ".mlp.fc1.",
    ".ff.net.2.": ".mlp.fc2.",
}
