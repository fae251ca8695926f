"""Which attention kernel runs is logged, as its speed decides that of training."""

import pytest
import torch
from torch.nn.attention import SDPBackend

from longtake.training.announce import attention_backend, slow_attention

_GPU = torch.device("cuda", 0)


@pytest.mark.parametrize(
    ("chosen", "capability", "name", "warns"),
    [
        (SDPBackend.CUDNN_ATTENTION, (9, 0), "cuDNN", False),
        (SDPBackend.FLASH_ATTENTION, (9, 0), "FlashAttention-2", True),
        (SDPBackend.FLASH_ATTENTION, (8, 6), "FlashAttention-2", False),
    ],
)
def test_a_hopper_gpu_without_cudnn_is_warned_of(
    chosen: SDPBackend,
    capability: tuple[int, int],
    name: str,
    warns: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The kernel is asked of torch itself."""
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *shape, device, **given: empty(*shape, **given))
    monkeypatch.setattr(torch, "_fused_sdp_choice", lambda *_: chosen.value)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    assert attention_backend(_GPU) == name
    assert ("1.6 times" in slow_attention(name, _GPU)) == warns


def test_torch_can_be_asked() -> None:
    """The function is torch's own, and not public."""
    heads = torch.empty(1, 2, 256, 128)
    assert SDPBackend(torch._fused_sdp_choice(heads, heads, heads)).name
    assert attention_backend(torch.device("cpu")) is None
    assert slow_attention(None, torch.device("cpu")) == ""
