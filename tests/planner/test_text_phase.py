"""Memory of text encoders that run layer by layer, against that of real ones."""

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.build import TINY_WAN
from torch import nn

from longtake import config
from longtake.config import Recipe
from longtake.models.components import assemble
from longtake.models.quantized import quantize_linears
from longtake.models.streamed import NUM_BUFFERS, layer_lists, streamed_bytes
from longtake.planner.devices import DEVICES
from longtake.planner.memory import outline_step
from longtake.planner.phases import PhaseForecast, forecast_phases
from longtake.planner.record import KEEP
from longtake.planner.text_phase import ram_to_read

_MANY_WORDS = " ".join(f"word{number}" for number in range(40))
_CACHE = ("data.cache=cache", "data.windows=1", "text.config.num_layers=6")


@pytest.mark.usefixtures("few_words")
def test_an_encoder_without_room_is_planned_layer_by_layer(
    small_recipe: Callable[..., Recipe],
) -> None:
    """As it is then trained with: two layers are on the GPU, and all that is no layer."""
    recipe = small_recipe(*TINY_WAN, *_CACHE)

    def planned(memory_bytes: int) -> PhaseForecast:
        step = outline_step(recipe, replace(DEVICES["rtx4060"], memory_bytes=memory_bytes))
        options = dict.fromkeys(step.block_names, KEEP)
        return next(each for each in forecast_phases(step, options) if each.name == "text")

    whole, by_layer = planned(2**31), planned(2**29)
    assert (whole.how, by_layer.how) == ("", "layer by layer")
    text = assemble(recipe, [_MANY_WORDS], None).text
    (module,) = text.modules()
    (layers,) = layer_lists(module)
    buffers = NUM_BUFFERS * max(map(streamed_bytes, layers))
    text.to(torch.device("cpu"), by_layer=True)
    # On a GPU each tensor takes a multiple of 512 bytes.
    held = sum(-(-each.nbytes // 512) * 512 for each in module.parameters())
    assert by_layer.weight_bytes == pytest.approx(held + buffers, abs=512 * len(layers))
    assert by_layer.peak_bytes < whole.peak_bytes
    assert by_layer.seconds > whole.seconds


@pytest.mark.usefixtures("few_words")
def test_encoders_are_read_whole_into_ram(
    small_recipe: Callable[..., Recipe], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before they are quantised; small ones count for nothing."""
    recipe = small_recipe(*TINY_WAN, *_CACHE)
    small, large = nn.Module(), nn.Module()
    large.linear = nn.Linear(2**16, 2**15, bias=False, device="meta")
    of: Any = SimpleNamespace(modules=lambda: [small, large])
    assert ram_to_read(recipe, of) == 4 * 2**31 + 3 * 2**30
    in_bf16 = config.changed(recipe, ["text.dtype=bf16"])
    assert ram_to_read(in_bf16, of) == 2 * 2**31 + 3 * 2**30
    quantize_linears(large, "nf4", "text.quantize")
    assert ram_to_read(in_bf16, of) == 2 * 2**31 + 3 * 2**30
    of.modules = lambda: [small]
    assert ram_to_read(recipe, of) == 0

    monkeypatch.setattr("longtake.planner.phases.ram_to_read", lambda *_: 2**34)
    gpu = replace(DEVICES["rtx4060"], memory_bytes=2**31)
    for ram, fits in ((None, True), (2**34, True), (2**34 - 1, False)):
        text, *_ = forecast_phases(outline_step(recipe, replace(gpu, ram_bytes=ram)))
        assert (text.name, text.fits, text.ram_bytes) == ("text", fits, 2**34)
