"""English words for a plan's policies, options and memory; imports no torch."""

from typing import Final

POLICY_WORDS: Final = {
    "none": "nothing is recomputed",
    "all": "every block is",
    "all-but-first": "every block but the first is",
    "alternate": "every second block is",
    "save-attention": "all but attention is",
    "all+stream": "every block is, and weights are streamed: the least",
    "all+stream-int8": "every block is, and weights are streamed in 8 bits: the least",
    "all+stream-nf4": "every block is, and weights are streamed in 4 bits: the least",
    "all+int8": "every block is, and weights are in 8 bits: the least",
    "all+fp8": "every block is, and weights are in 8 bits: the least",
    "all+nf4": "every block is, and weights are in 4 bits: the least",
    "best": "the fastest mixture that fits",
}
ACTIVATION_WORDS: Final = {
    "keep": "kept",
    "save-attention": "attention's output kept, the rest computed again",
    "recompute": "computed again",
    "offload": "in host RAM",
    "offload-input": "computed again, from inputs in host RAM",
}
WEIGHT_WORDS: Final = {
    "keep": "on the device",
    "stream": "in host RAM, copied one block ahead",
    "int8": "on the device, in 8 bits (int8)",
    "fp8": "on the device, in 8 bits (fp8)",
    "nf4": "on the device, in 4 bits (nf4)",
    "stream-int8": "in host RAM, in 8 bits (int8), copied one block ahead",
    "stream-nf4": "in host RAM, in 4 bits (nf4), copied one block ahead",
}
FIXED_WORDS: Final = {
    "weights": "the model's weights",
    "gradients": "gradients of trainable weights",
    "optimizer": "optimizer states",
    "ema": "running averages of trainable weights (EMA)",
    "encoders": "codec and text encoders; with data.cache they are not needed",
    "inputs": "latents, noise and conditioning of a micro-batch",
}
"""Words for the parts of device memory that are taken under every recompute policy."""


PHASE_WORDS: Final = {
    "text": ("text encoder", "a caption: to fill a cache, and to sample"),
    "encode": ("codec, encoding", "a clip: to fill a cache"),
    "step": ("training, encoding", "encoders in the step, beside model and optimizer"),
    "model": ("model, sampling", "a video, one forward pass"),
    "decode": ("codec, decoding", "a video"),
    "sampling": ("training, sampling", "between two steps, beside model and optimizer"),
}
"""Name and meaning of each phase of a run."""
PHASE_REMEDIES: Final = {
    "text": 'Or lower text.max_tokens, set text.quantize to "int8" or "nf4", or fill the cache '
    "there, by `longtake data cache`.",
    "step": "Or set data.cache and data.windows, so that nothing is encoded between steps.",
    "sampling": "Or leave sampling.every out and sample by `longtake sample` or `evaluate`, or "
    "sample smaller videos.",
}
"""What to do where a phase of a run other than its steps does not fit; see also `cannot_encode`."""


def cannot_encode(
    bucket: str, needed: str, how: str, more: str = "", gpu: str = "a larger GPU"
) -> str:
    """Say that the memory is too little to encode clips, and what to do.

    Args:
        bucket: shape of the clips.
        needed: memory that encoding one takes.
        how: in which tiles it would be encoded; "" for whole clips.
        more: a sentence on tiles, with a space after it.
        gpu: one on which they can be encoded.
    """
    even = f" even {how}" if how else ""
    return (
        f"Clips of {bucket} cannot be encoded in this memory{even}: {needed} are needed. "
        f'{more}Train smaller clips, set codec.dtype = "bf16", or fill a cache on {gpu} by '
        "`longtake data cache`."
    )
