"""The tubelet family's transformer: small enough to train from nothing on a laptop."""

import math
from collections.abc import Callable
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from longtake.errors import ModelError
from longtake.flow.path import velocity_from_latents
from longtake.models.tubes import from_tubes, grid_of, sine_positions, to_tubes
from longtake.parallel.context_parallel import TokenSharing

TUBE = (8, 4, 4)
"""Frames, rows and columns of a tube, unless the recipe says otherwise."""


class TubeletTransformer(nn.Module):
    """Predicts the velocity of noisy clips from their captions' tokens.

    Inside, the network predicts the clean clip, which lies near few dimensions and so passes a
    narrow network where noise does not; `forward` turns it into the velocity.

    Legend: B batch, C channels, F frames, H height, W width, T caption tokens, N tubes, D width
    of a token.

    Args:
        num_frames: F of the clips it is built for.
        height: H of them.
        width: W of them.
        vocabulary_size: how many token ids there are, 0 (padding) included.
        channels: C of them.
        patch_size: frames, rows and columns of a tube.
        max_tokens: T at most; shorter captions are padded with 0.
        hidden_size: D.
        num_blocks: transformer blocks.
        num_heads: attention heads of a block.
        mlp_ratio: width of the inner layer of a block, in D.
        residual_gate: what the gate of a residual branch starts at, before the caption and the
            noise level modulate it.

    Raises:
        ModelError: the clips do not divide into tubes, or the width into heads.
    """

    def __init__(
        self,
        *,
        num_frames: int,
        height: int,
        width: int,
        vocabulary_size: int,
        channels: int = 3,
        patch_size: tuple[int, int, int] = TUBE,
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
        grid = grid_of(self.clip_shape, patch_size)
        _check_width(hidden_size, num_heads)
        tube_size = channels * math.prod(patch_size)
        self.tube_in = nn.Linear(tube_size, hidden_size)
        self.positions = nn.Parameter(sine_positions(grid, hidden_size))
        self.token_embedding = nn.Embedding(vocabulary_size, hidden_size)
        self.token_positions = nn.Parameter(torch.zeros(max_tokens, hidden_size))
        self.caption_block = Block(hidden_size, num_heads, mlp_ratio, residual_gate)
        self.condition = Condition(hidden_size)
        self.blocks = nn.ModuleList(
            Block(hidden_size, num_heads, mlp_ratio, residual_gate) for _ in range(num_blocks)
        )
        self.modulation_out = _zeroed(nn.Linear(hidden_size, 2 * hidden_size))
        self.tube_out = _zeroed(nn.Linear(hidden_size, tube_size))
        nn.init.normal_(self.token_embedding.weight, std=0.5)

    def share_tokens(self, sharing: TokenSharing) -> None:
        """Have ranks share the tokens of caption and clip from the first of `blocks` on."""
        self._sharing = sharing
        for block in self.blocks:
            cast("Block", block).attention.sharing = sharing

    def forward(self, noisy_latents: Tensor, sigmas: Tensor, token_ids: Tensor) -> Tensor:
        """Return the velocity, noise minus clip.

        Args:
            noisy_latents: [B, C, F, H, W], `(1 - sigma) * latents + sigma * noise`.
            sigmas: [B] in [0, 1], 1 being pure noise.
            token_ids: [B, T] int64; 0 pads, and all zeros ask for any clip.

        Returns:
            [B, C, F, H, W] in float32.

        Raises:
            ModelError: the clips or the captions have another shape than the model is built for.
        """
        self._check_inputs(noisy_latents, token_ids)
        tubes = to_tubes(noisy_latents, self.patch_size).to(self.tube_in.weight.dtype)
        noise_level = self.condition.of_noise(sigmas)
        words = self._read_caption(token_ids, noise_level)
        condition = noise_level + self.condition.of_caption(words)
        tokens = torch.cat([words, self.tube_in(tubes) + self.positions], dim=1)
        tokens = self._through_blocks(tokens, condition)
        shift, scale = self.modulation_out(condition)[:, None].chunk(2, dim=-1)
        clip = self.tube_out(_normalise(tokens[:, words.shape[1] :]) * (1 + scale) + shift)
        clip = from_tubes(clip.float(), self.patch_size, self.clip_shape)
        return velocity_from_latents(noisy_latents.float(), clip, sigmas.float())

    def _through_blocks(self, tokens: Tensor, condition: Tensor) -> Tensor:
        """The tokens [B, T, D] after all blocks, of which ranks may share each."""
        if self._sharing is not None:
            self._sharing.begin(tokens.shape[1])
            tokens = self._sharing.cut(tokens, 1)
        for block in self.blocks:
            tokens = self._call(block, tokens, condition)
        return tokens if self._sharing is None else self._sharing.gather(tokens, 1)

    def _read_caption(self, token_ids: Tensor, noise_level: Tensor) -> Tensor:
        """Return the words in the light of each other, [B, max_tokens, D]."""
        token_ids = F.pad(token_ids, (0, self.max_tokens - token_ids.shape[1]))
        words = self.token_embedding(token_ids) + self.token_positions
        return self._call(self.caption_block, words, noise_level)

    def _call(self, block: nn.Module, *inputs: Tensor) -> Tensor:
        """The block's tokens; whoever recomputes activations calls it himself."""
        wanted = self.block_caller if torch.is_grad_enabled() else None
        tokens: Tensor = block(*inputs) if wanted is None else wanted(block, *inputs)
        return tokens

    def _check_inputs(self, noisy_latents: Tensor, token_ids: Tensor) -> None:
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


class Block(nn.Module):
    """Attention and a two-layer network, both modulated and gated by a condition.

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
        """Return the tokens [B, N, D] after the block; `condition` is [B, D]."""
        modulation = self.modulation(condition)[:, None].chunk(6, dim=-1)
        attention_shift, attention_scale, attention_gate, mlp_shift, mlp_scale, mlp_gate = (
            modulation
        )
        modulated = _normalise(tokens) * (1 + attention_scale) + attention_shift
        tokens = tokens + (self.residual_gate + attention_gate) * self.attention(modulated)
        modulated = _normalise(tokens) * (1 + mlp_scale) + mlp_shift
        inner = F.relu(self.mlp_in(modulated)).square()
        moved: Tensor = tokens + (self.residual_gate + mlp_gate) * self.mlp_out(inner)
        return moved


class Attention(nn.Module):
    """Attention of every token to every other, with normalised queries and keys."""

    def __init__(self, hidden_size: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.sharing: TokenSharing | None = None
        self.to_qkv = nn.Linear(hidden_size, 3 * hidden_size, bias=False)
        self.to_out = nn.Linear(hidden_size, hidden_size, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return [B, N, D] from [B, N, D]."""
        num_clips, num_tokens, width = tokens.shape
        heads = self.to_qkv(tokens).view(num_clips, num_tokens, 3, self.num_heads, -1)
        heads = heads.permute(2, 0, 3, 1, 4)
        query, key, value = (self.sharing.to_heads(heads) if self.sharing else heads).unbind()
        query, key = _normalise(query) * query.shape[-1] ** -0.5, _normalise(key)
        # Written out: at these sizes the fused kernel takes twice as long on a CPU in bfloat16.
        mixed = (query @ key.mT).softmax(dim=-1).to(value.dtype) @ value
        if self.sharing is not None:
            mixed = self.sharing.to_tokens(mixed[None])[0]
        out: Tensor = self.to_out(mixed.transpose(1, 2).reshape(num_clips, num_tokens, width))
        return out


class Condition(nn.Module):
    """Puts the noise level and the caption's words into one vector."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.hidden_size = hidden_size
        self.noise_in = nn.Linear(hidden_size, hidden_size)
        self.noise_out = nn.Linear(hidden_size, hidden_size)
        self.caption_out = nn.Linear(hidden_size, hidden_size)

    def of_noise(self, sigmas: Tensor) -> Tensor:
        """Return [B, D] from sigmas [B], by sines of 1 to 1000 radians taken in float32."""
        half = self.hidden_size // 2
        frequencies = torch.logspace(0, 3, half, device=sigmas.device, dtype=torch.float32)
        angles = sigmas.float()[:, None] * frequencies
        waves = torch.cat([angles.cos(), angles.sin()], dim=-1)
        level: Tensor = self.noise_out(F.silu(self.noise_in(waves.to(self.noise_in.weight.dtype))))
        return level

    def of_caption(self, words: Tensor) -> Tensor:
        """Return [B, D] from words [B, T, D]."""
        pooled: Tensor = self.caption_out(_normalise(words.mean(dim=1)))
        return pooled


def _normalise(tokens: Tensor) -> Tensor:
    """Return the tokens at a mean of 0 and a variance of 1; the kernel sums in float32."""
    return F.layer_norm(tokens, tokens.shape[-1:])


def _zeroed(linear: nn.Linear) -> nn.Linear:
    nn.init.zeros_(linear.weight)
    nn.init.zeros_(linear.bias)
    return linear


def _check_width(hidden_size: int, num_heads: int) -> None:
    if hidden_size % num_heads or hidden_size % 6:
        raise ModelError(
            f"a hidden_size of {hidden_size} does not divide into {num_heads} heads and 6 parts "
            "for the positions. Choose a multiple of both."
        )
