"""Saves the result of attention while the rest of a transformer block is recomputed.

While a block runs, forward or recomputed, torch.nn.functional's attention is replaced by an
autograd function, so that no other operation passes through Python.
"""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import _get_current_function_mode, handle_torch_function

from longtake.parallel import attention


class KeptAttention:
    """Attention results of one run of a block, kept until the block is recomputed."""

    def __init__(self) -> None:
        self._results: deque[tuple[list[Any], int]] = deque()

    def contexts(self) -> tuple["_Replaced", "_Replaced"]:
        """Return contexts for a block's forward pass and its recomputation by torch."""
        return _Replaced(self._keep), _Replaced(self._take)

    def _keep(self, compute: Callable[[], Sequence[Any]]) -> Sequence[Any]:
        made = compute()
        # Detached, so that they do not hold the graph of the forward pass.
        kept = [each.detach() if isinstance(each, Tensor) else each for each in made]
        self._results.append((kept, kept[0]._version))
        return made

    def _take(self, compute: Callable[[], Sequence[Any]]) -> Sequence[Any]:
        """Return attention's saved result; compute it again if it was changed or taken already."""
        if self._results:
            made, version = self._results.popleft()
            if made[0]._version == version:
                return made
        return compute()


class _Replaced:
    """A context in which this thread's attention calls get their results from `obtain`."""

    def __init__(self, obtain: attention.Obtain) -> None:
        self._obtain = obtain
        self._original: Any = None

    def __enter__(self) -> None:
        self._original = F.scaled_dot_product_attention
        functions: Any = F
        functions.scaled_dot_product_attention = self._attend
        attention.THIS_THREAD.obtain = self._obtain

    def __exit__(self, *_: object) -> None:
        F.scaled_dot_product_attention = self._original
        attention.THIS_THREAD.obtain = None

    def _attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        **how: Any,
    ) -> Tensor:
        mode: Any = _get_current_function_mode()  # type: ignore[no-untyped-call]
        if isinstance(mode, attention.AttentionMode):  # the mode calls this function again
            options: Any = {"attn_mask": attn_mask, "dropout_p": dropout_p, "is_causal": is_causal}
            given = (query, key, value)
            public: Any = F.scaled_dot_product_attention
            return handle_torch_function(public, given, *given, **options, **how)
        how = {"dropout_p": dropout_p, "is_causal": is_causal, **how}
        # These cases have no kernel here: they are recomputed like the rest of the block.
        is_other = attention.THIS_THREAD.obtain is None or not torch.is_grad_enabled()
        mask_learns = attn_mask is not None and attn_mask.requires_grad
        if is_other or mask_learns or dropout_p or how.get("enable_gqa"):
            return self._original(query, key, value, attn_mask, **how)
        query, key, value = (attention.as_computed(each) for each in (query, key, value))
        mask = attn_mask
        if mask is not None and mask.is_floating_point():
            mask = attention.as_computed(mask)
        kernel = attention.choose_kernel(query, key, value, mask, how)
        if kernel is None:
            return self._original(query, key, value, mask, **how)
        scores = attention.ScoreTerms(
            attention.as_bias(mask, query, key), is_causal, how.get("scale")
        )
        return attention.attend(kernel, scores, query, key, value)
