"""Memory of text encoders that run layer by layer, against that of real ones."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from tests.build import TINY_WAN

from longtake.config import Recipe
from longtake.models.components import assemble
from longtake.models.streamed import NUM_BUFFERS, layer_lists, streamed_bytes
from longtake.planner.devices import DEVICES
from longtake.planner.memory import outline_step
from longtake.planner.phases import PhaseForecast, forecast_phases
from longtake.planner.record import KEEP

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
