"""Attention of diffusers' models where ranks share the tokens of each clip."""

from typing import Any

from torch import nn

from longtake.errors import ModelError
from longtake.parallel.context_parallel import SharedAttention, TokenSharing


def share_attention(attention: nn.Module, sharing: TokenSharing) -> None:
    module: Any = attention
    module.set_processor(_SharingProcessor(module.processor, sharing))


class _SharingProcessor:
    """Does what another processor does, but exchanges tokens for heads where it attends."""

    def __init__(self, processor: Any, sharing: TokenSharing) -> None:
        self._processor = processor
        self._sharing = sharing

    def __call__(self, attn: nn.Module, *args: Any, **kwargs: Any) -> Any:
        shared = SharedAttention(self._sharing)
        with shared:
            mixed = self._processor(attn, *args, **kwargs)
        if not shared.num_calls:
            raise ModelError(
                f"{type(self._processor).__name__} attends in another way than by torch's "
                "scaled_dot_product_attention, so ranks cannot share its tokens. Set diffusers' "
                'attention backend "native", or parallel.sequence = 1.'
            )
        return mixed
