"""Tubelet: longtake's own small text-to-video family, which trains from scratch on a laptop.

It serves the demo, tests and drills. Clips are cut into tubes of some frames, rows and columns. The
caption's tokens come before the clip's, and every token attends to every other.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from longtake.config import ModelSection
from longtake.errors import ModelError, RecipeError
from longtake.flow.path import velocity_from_latents
from longtake.formatting import first_line
from longtake.models import deferred_init, pretrained
from longtake.models.base import BlockContract, Conditioning, Family, LatentShape, read_patch
from longtake.models.text import TextEncoder
from longtake.parallel.context_parallel import TokenSharing

_TUBE = (8, 4, 4)  # frames, rows and columns, unless the recipe says otherwise


class TubeletBlocks(BlockContract):
    """The blocks of tubelet: one for the caption's tokens, then those for all tokens."""

    def of(self, model: Any) -> Sequence[nn.Module]:
        return [model.caption_block, *model.blocks]

    def call_by(self, model: Any, call: Callable[..., Any]) -> None:
        model.block_caller = call

    def num_heads(self, model: Any) -> int:
        return int(model.caption_block.attention.num_heads)

    def width(self, model: Any) -> int:
        return int(model.tube_in.out_features)

    def num_tokens(self, model: Any, shape: LatentShape) -> int:
        return int(math.prod(shape[1:]) // math.prod(model.patch_size))


class Tubelet(Family):
    """Text-to-video family that embeds a caption's word ids itself, for one shape of clips."""

    frozen = pretrained.FrozenParts(
        codec=pretrained.PipelinePart(("AutoencoderKLWan", "AutoencoderKL"), "vae"),
        text=pretrained.PipelinePart(("UMT5EncoderModel",), "text_encoder", "tokenizer"),
    )
    block = TubeletBlocks(
        arguments={"tokens": "tokens", "temb": "condition"},
        lora_targets=("to_qkv", "to_out"),
        share=lambda model, sharing: cast("TubeletTransformer", model).share_tokens(sharing),
    )

    def patch(self, section: ModelSection) -> tuple[int, ...]:
        return read_patch(section, _TUBE)

    def check(self, section: ModelSection, shapes: Sequence[LatentShape]) -> None:
        if len(set(shapes)) > 1:
            raise RecipeError(
                f"data.buckets lists {len(set(shapes))} shapes, but the tubelet family learns a "
                "position for every tube and is built for one shape. Keep one bucket."
            )
        _, *sizes = shapes[0]
        tube = self.patch(section)
        fits = [max(1, round(size / step)) * step for size, step in zip(sizes, tube, strict=True)]
        if fits != sizes:
            raise RecipeError(
                f"data.buckets: {_clip(sizes)} do not divide into tubes of {_clip(tube)}. The "
                f"nearest that do are {_clip(fits)}; or change model.config.patch_size."
            )

    def build(
        self,
        section: ModelSection,
        shapes: Sequence[LatentShape],
        text: TextEncoder,
        *,
        weights: deferred_init.Weights = True,
    ) -> nn.Module:
        if section.pretrained is not None:
            raise RecipeError("model.pretrained: the tubelet family has no pretrained weights.")
        if text.embed_dim is not None:
            raise RecipeError(
                'text.kind = "transformers" gives prompt_embeds, but the tubelet family embeds '
                'word ids itself. Set text.kind = "words".'
            )
        fitted = shapes[0]._asdict()
        fitted |= {"max_tokens": text.max_tokens, "vocabulary_size": text.vocabulary_size}
        pretrained.check_arguments("model.config", TubeletTransformer.__init__, section.config)
        try:
            with torch.device("cpu" if weights else "meta"):
                return TubeletTransformer(**(fitted | section.config))
        except ModelError as error:
            raise RecipeError(f"model.config: {error}") from error
        except Exception as error:  # wrong sizes fail inside torch in any way
            raise RecipeError(
                f"model.config does not fit the tubelet family. {first_line(error)}"
            ) from error

    def sequence_length(
        self, model: nn.Module, shape: LatentShape, conditioning: Conditioning
    ) -> int:
        return self.block.num_tokens(model, shape) + cast("TubeletTransformer", model).max_tokens

    def predict_velocity(
        self, model: nn.Module, noisy_latents: Tensor, sigmas: Tensor, conditioning: Conditioning
    ) -> Tensor:
        return model(noisy_latents, sigmas, conditioning["token_ids"])

    def export(self, *_: Any, **__: Any) -> None:
        raise RecipeError(
            "diffusers has no pipeline for the tubelet family, so it cannot be exported. "
            "`longtake sample` samples it."
        )

    def comfyui_name(self, name: str, *, is_lora: bool) -> str:
        raise RecipeError(
            "ComfyUI has no model of the tubelet family. `longtake sample` samples it."
        )


def _clip(sizes: Sequence[int]) -> str:
    return f"{sizes[0]} frames of {sizes[2]}x{sizes[1]}"


class TubeletTransformer(nn.Module):
    """Transformer that predicts the velocity of noisy clips from their captions' tokens.

    Inside, the network predicts the clean clip: it lies near few dimensions, so a narrow network
    can represent it, and noise it cannot. `forward` converts it to the velocity.

    Legend: B batch, C channels, F frames, H height, W width, T caption tokens, N tubes, D width
    of a token.
    """

    def __init__(
        self,
        *,
        num_frames: int,
        height: int,
        width: int,
        vocabulary_size: int,
        channels: int = 3,
        patch_size: tuple[int, int, int] = _TUBE,
        max_tokens: int = 6,
        hidden_size: int = 96,
        num_blocks: int = 4,
        num_heads: int = 3,
        mlp_ratio: int = 4,
        residual_gate: float = 0.5,
    ) -> None:
        super().__init__()
        self.clip_shape = (channels, num_frames, height, width)
        self.patch_size = patch_size
        self.max_tokens = max_tokens
        self.block_caller: Callable[..., Any] | None = None
        self._sharing: TokenSharing | None = None
        grid = _grid_of(self.clip_shape, patch_size)
        # Six parts: a sine and a cosine for frames, rows and columns.
        if hidden_size % num_heads or hidden_size % 6:
            raise ModelError(
                f"a hidden_size of {hidden_size} does not divide into {num_heads} heads and 6 "
                "parts for the positions. Choose a multiple of both."
            )
        tube_size = channels * math.prod(patch_size)
        self.tube_in = nn.Linear(tube_size, hidden_size)
        self.positions = nn.Parameter(_sine_positions(grid, hidden_size))
        self.token_embedding = nn.Embedding(vocabulary_size, hidden_size)
        self.token_positions = nn.Parameter(torch.zeros(max_tokens, hidden_size))
        self.caption_block = Block(hidden_size, num_heads, mlp_ratio, residual_gate)
        self.condition = Condition(hidden_size)
        self.blocks = nn.ModuleList(
            Block(hidden_size, num_heads, mlp_ratio, residual_gate) for _ in range(num_blocks)
        )
        # With its last layers at 0, a new network predicts a clip of zeros.
        self.modulation_out = _zeroed(nn.Linear(hidden_size, 2 * hidden_size))
        self.tube_out = _zeroed(nn.Linear(hidden_size, tube_size))
        nn.init.normal_(self.token_embedding.weight, std=0.5)

    def share_tokens(self, sharing: TokenSharing) -> None:
        self._sharing = sharing
        for block in self.blocks:
            cast("Block", block).attention.sharing = sharing

    def forward(self, noisy_latents: Tensor, sigmas: Tensor, token_ids: Tensor) -> Tensor:
        """Return the velocity, noise minus clip.

        Args:
            noisy_latents: [B, C, F, H, W], `(1 - sigma) * latents + sigma * noise`.
            sigmas: [B] in [0, 1], 1 being pure noise.
            token_ids: [B, T] int64; 0 pads, and all zeros are the unconditional caption.

        Returns:
            [B, C, F, H, W] in float32.
        """
        if tuple(noisy_latents.shape[1:]) != self.clip_shape:
            raise ModelError(
                f"a clip of shape {list(noisy_latents.shape[1:])} does not fit this tubelet "
                f"transformer, which is built for {list(self.clip_shape)} (channels, frames, "
                "height, width). Resize the clips or build the model for them."
            )
        if token_ids.shape[1] > self.max_tokens:
            raise ModelError(
                f"a caption of {token_ids.shape[1]} tokens does not fit this tubelet transformer, "
                f"which reads at most {self.max_tokens}. Shorten it or raise max_tokens."
            )
        tubes = to_tubes(noisy_latents, self.patch_size).to(self.tube_in.weight.dtype)
        noise_level = self.condition.of_noise(sigmas)
        # Shorter captions are padded to the number of learnt positions.
        token_ids = F.pad(token_ids, (0, self.max_tokens - token_ids.shape[1]))
        words = self.token_embedding(token_ids) + self.token_positions
        words = self._call(self.caption_block, words, noise_level)
        condition = noise_level + self.condition.of_caption(words)
        tokens = torch.cat([words, self.tube_in(tubes) + self.positions], dim=1)
        if self._sharing is not None:
            # Caption and clip are cut as one row of tokens, because all attend to each other.
            self._sharing.begin(tokens.shape[1])
            tokens = self._sharing.cut(tokens, 1)
        for block in self.blocks:
            tokens = self._call(block, tokens, condition)
        if self._sharing is not None:
            tokens = self._sharing.gather(tokens, 1)
        shift, scale = self.modulation_out(condition)[:, None].chunk(2, dim=-1)
        clip = self.tube_out(_normalise(tokens[:, words.shape[1] :]) * (1 + scale) + shift)
        # In fp32, because the division by a small sigma magnifies rounding errors.
        clip = from_tubes(clip.float(), self.patch_size, self.clip_shape)
        return velocity_from_latents(noisy_latents.float(), clip, sigmas.float())

    def _call(self, block: nn.Module, *inputs: Tensor) -> Tensor:
        call = self.block_caller if torch.is_grad_enabled() else None
        return block(*inputs) if call is None else call(block, *inputs)


class Block(nn.Module):
    """Block of tubelet: attention and a two-layer network, modulated by a condition [B, D].

    After Peebles and Xie, "Scalable Diffusion Models with Transformers" (2023), with the gates
    started open and the activation squared (So et al., "Primer", 2021).
    """

    def __init__(
        self, hidden_size: int, num_heads: int, mlp_ratio: int, residual_gate: float
    ) -> None:
        super().__init__()
        self.residual_gate = residual_gate
        self.modulation = _zeroed(nn.Linear(hidden_size, 6 * hidden_size))
        self.attention = Attention(hidden_size, num_heads)
        self.mlp_in = nn.Linear(hidden_size, mlp_ratio * hidden_size)
        self.mlp_out = nn.Linear(mlp_ratio * hidden_size, hidden_size)

    def forward(self, tokens: Tensor, condition: Tensor) -> Tensor:
        modulation = self.modulation(condition)[:, None].chunk(6, dim=-1)
        attention_shift, attention_scale, attention_gate, mlp_shift, mlp_scale, mlp_gate = (
            modulation
        )
        modulated = _normalise(tokens) * (1 + attention_scale) + attention_shift
        tokens = tokens + (self.residual_gate + attention_gate) * self.attention(modulated)
        modulated = _normalise(tokens) * (1 + mlp_scale) + mlp_shift
        inner = F.relu(self.mlp_in(modulated)).square()
        return tokens + (self.residual_gate + mlp_gate) * self.mlp_out(inner)


class Attention(nn.Module):
    """Attention of every token to every other, with normalised queries and keys."""

    def __init__(self, hidden_size: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.sharing: TokenSharing | None = None
        self.to_qkv = nn.Linear(hidden_size, 3 * hidden_size, bias=False)
        self.to_out = nn.Linear(hidden_size, hidden_size, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        num_clips, num_tokens, width = tokens.shape
        heads = self.to_qkv(tokens).view(num_clips, num_tokens, 3, self.num_heads, -1)
        heads = heads.permute(2, 0, 3, 1, 4)
        query, key, value = (self.sharing.to_heads(heads) if self.sharing else heads).unbind()
        # The query is scaled here, so that both ways below attend with a scale of 1.
        query, key = _normalise(query) * query.shape[-1] ** -0.5, _normalise(key)
        if self.sharing is not None and self.sharing.ring_size > 1:
            query, key = query.to(value.dtype), key.to(value.dtype)
            mixed = self.sharing.attend_around(query, key, value, scale=1.0)
        else:
            # Written out: at these sizes the fused kernel takes twice as long on a CPU in bfloat16.
            mixed = (query @ key.mT).softmax(dim=-1).to(value.dtype) @ value
        if self.sharing is not None:
            mixed = self.sharing.to_tokens(mixed[None])[0]
        return self.to_out(mixed.transpose(1, 2).reshape(num_clips, num_tokens, width))


class Condition(nn.Module):
    """Embeds the noise level and the caption's words into vectors [B, D] for the blocks."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.hidden_size = hidden_size
        self.noise_in = nn.Linear(hidden_size, hidden_size)
        self.noise_out = nn.Linear(hidden_size, hidden_size)
        self.caption_out = nn.Linear(hidden_size, hidden_size)

    def of_noise(self, sigmas: Tensor) -> Tensor:
        """Embed noise levels by sines of 1 to 1000 radians, taken in fp32."""
        half = self.hidden_size // 2
        frequencies = torch.logspace(0, 3, half, device=sigmas.device, dtype=torch.float32)
        angles = sigmas.float()[:, None] * frequencies
        waves = torch.cat([angles.cos(), angles.sin()], dim=-1)
        return self.noise_out(F.silu(self.noise_in(waves.to(self.noise_in.weight.dtype))))

    def of_caption(self, words: Tensor) -> Tensor:
        return self.caption_out(_normalise(words.mean(dim=1)))


def _normalise(tokens: Tensor) -> Tensor:
    return F.layer_norm(tokens, tokens.shape[-1:])


def _zeroed(linear: nn.Linear) -> nn.Linear:
    nn.init.zeros_(linear.weight)
    nn.init.zeros_(linear.bias)
    return linear


def _grid_of(
    clip_shape: tuple[int, int, int, int], patch_size: tuple[int, int, int]
) -> tuple[int, int, int]:
    """Return the numbers of tubes of a clip along its frames, height and width."""
    _, num_frames, height, width = clip_shape
    extents = (num_frames, height, width)
    for name, extent, patch in zip(("frames", "height", "width"), extents, patch_size, strict=True):
        if extent < 1 or patch < 1 or extent % patch:
            raise ModelError(
                f"clips of {num_frames} frames of {height}x{width} do not divide into tubes of "
                f"{' x '.join(map(str, patch_size))} (frames, height, width): {name} {extent} is "
                f"not a multiple of {patch}. Choose another patch_size or clip size."
            )
    return num_frames // patch_size[0], height // patch_size[1], width // patch_size[2]


def _sine_positions(grid: tuple[int, int, int], hidden_size: int) -> Tensor:
    """Return sine position embeddings [N, D], a third of D for each of frame, row and column."""
    sixth = hidden_size // 6
    frequencies = 32.0 ** -(torch.arange(sixth) / sixth)
    axes = torch.meshgrid(*[torch.arange(extent).float() for extent in grid], indexing="ij")
    angles = [axis.reshape(-1, 1) * frequencies for axis in axes]
    return torch.cat([wave for angle in angles for wave in (angle.sin(), angle.cos())], dim=-1)


def to_tubes(clips: Tensor, patch_size: tuple[int, int, int]) -> Tensor:
    """Cut clips [B, C, F, H, W] into tubes [B, N, values of a tube]."""
    num_clips, channels, num_frames, height, _ = clips.shape
    frames, rows, columns = patch_size
    parts = clips.reshape(
        num_clips, channels, num_frames // frames, frames, height // rows, rows, -1, columns
    )
    return parts.permute(0, 2, 4, 6, 1, 3, 5, 7).reshape(
        num_clips, -1, channels * math.prod(patch_size)
    )


def from_tubes(
    tubes: Tensor, patch_size: tuple[int, int, int], clip_shape: tuple[int, int, int, int]
) -> Tensor:
    """Join tubes [B, N, values of a tube] to clips [B, C, F, H, W]."""
    channels, num_frames, height, width = clip_shape
    frames, rows, columns = patch_size
    parts = tubes.reshape(
        -1, num_frames // frames, height // rows, width // columns, channels, *patch_size
    )
    return parts.permute(0, 4, 1, 5, 2, 6, 3, 7).reshape(-1, *clip_shape)
