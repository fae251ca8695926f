"""What cannot be shared must not train on with each rank looking at its own tokens alone."""

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn

from longtake.errors import ModelError
from longtake.models.base import share_attention


class _Attention(nn.Module):
    processor: Any

    def set_processor(self, processor: Any) -> None:
        """As diffusers' have it."""
        self.processor = processor


def test_a_kernel_that_cannot_be_seen_is_refused() -> None:
    """Some of diffusers' attention backends do not go through torch's own function."""
    attention = _Attention()
    attention.processor = lambda attn, tokens: tokens
    share_attention(attention, cast("Any", SimpleNamespace(size=2)))
    with pytest.raises(ModelError, match=r'backend "native", or parallel\.sequence = 1'):
        attention.processor(attention, torch.ones(1, 2, 3))
