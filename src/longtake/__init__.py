"""longtake trains video and image diffusion transformers with flow matching."""

__version__ = "0.1.0"
