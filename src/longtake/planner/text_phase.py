"""Memory and time of text encoders that run layer by layer, where a GPU cannot hold them whole."""

from dataclasses import replace
from functools import partial

from longtake.config import Bucket, Recipe
from longtake.models import numerics
from longtake.models.base import family_of
from longtake.models.components import text_section
from longtake.models.conditioning import picture_sizes
from longtake.models.streamed import layer_lists
from longtake.models.text import TextEncoder, encodes_by_layer
from longtake.planner.block_weights import blocks_with
from longtake.planner.devices import DeviceBudget
from longtake.planner.fake_tensors import CachedFakeMode
from longtake.planner.trace import InferenceTrace, trace_inference

_SHARE_OF_PAGEABLE = 1 / 3
"""Share of the rate of page-locked copies that copies of other memory reach: the driver copies it
to memory of its own first (NVIDIA's bandwidthTest measures 6 to 12 of 24 to 26 GB/s)."""


_PROCESS_BYTES = 3 * 2**30
"""Host RAM of a process and of the system beside the weights that it reads."""


def ram_to_read(recipe: Recipe, text: TextEncoder) -> int:
    """Return the bytes of host RAM that a process needs to read text encoders; 0 for small ones.

    Weights are read whole, before they are quantised or moved to a GPU.
    """
    itemsize = numerics.DTYPES[text_section(recipe).kept_in()].itemsize
    num_bytes = itemsize * sum(map(numerics.count_weights, text.modules()))
    return num_bytes + _PROCESS_BYTES if num_bytes > _PROCESS_BYTES else 0


def text_that_fits(
    mode: CachedFakeMode,
    recipe: Recipe,
    text: TextEncoder,
    bucket: Bucket,
    device: DeviceBudget,
    whole: InferenceTrace,
) -> InferenceTrace:
    """Return the trace of encoding a caption as a launch does it: whole, or layer by layer.

    Args:
        mode: active fake mode of the encoders' weights.
        recipe: recipe with a cache, so that the encoders have the device to themselves.
        text: the text encoders.
        bucket: shape of the clips, for encoders that read pictures.
        device: device that is planned for.
        whole: trace with all weights on the device.
    """
    budget = device.budget_bytes
    layers = [layer for each in text.modules() for row in layer_lists(each) for layer in row]
    if budget is None or device.target != "cuda" or not layers:
        return whole
    if not encodes_by_layer(whole.weight_bytes, budget):
        return whole
    run = partial(text.run_longest, picture_sizes(family_of(recipe.model), recipe, bucket))
    slower = replace(device, host_bandwidth=device.host_bandwidth * _SHARE_OF_PAGEABLE)
    with blocks_with(["stream"] * len(layers), layers, mode) as streamed:
        trace = trace_inference(mode, text.modules(), run, slower, streamed)
    return replace(trace, how="layer by layer")
