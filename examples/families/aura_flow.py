"""A family of one's own: AuraFlow, which longtake does not come with. Copy it, and change it.

In the recipe: model.family = "examples.families.aura_flow:AuraFlow" (docs/guides/families.md).
"""

from typing import Any

from torch import Tensor

from longtake.models.base import Conditioning
from longtake.models.codec import ImageCodec
from longtake.models.diffusers_family import DiffusersBlocks, DiffusersFamily, TransformerCall
from longtake.models.pretrained import FrozenParts, PipelinePart
from longtake.models.release_scheduler import PipelineScheduler
from longtake.models.text import TextEncoder


class AuraFlow(DiffusersFamily):
    """Text to image. Its velocity is noise - latents, and its timestep is sigma."""

    frozen = FrozenParts(  # classes and folders in the pipeline
        codec=PipelinePart(("AutoencoderKL",), "vae"),
        text=PipelinePart(("UMT5EncoderModel",), "text_encoder", "tokenizer"),
    )
    label = "AuraFlow"
    transformer_class, pipeline_class = "AuraFlowTransformer2DModel", "AuraFlowPipeline"
    codec_class, parts = ImageCodec, "an AutoencoderKL and a text encoder"
    block = DiffusersBlocks(lists=("joint_transformer_blocks", "single_transformer_blocks"))
    makes_videos = False
    scheduler = PipelineScheduler(mu=None)  # the pipeline tells it no number of tokens

    def fitted_config(self, channels: int, text: TextEncoder) -> dict[str, int]:
        width = self.single_embed_dim(text)
        sizes = {"in_channels": channels, "out_channels": channels}
        return sizes | {"joint_attention_dim": width}

    def call(
        self, model: Any, noisy_latents: Tensor, timesteps: Tensor, conditioning: Conditioning
    ) -> TransformerCall:
        inputs = {
            "hidden_states": noisy_latents.squeeze(2),  # of the one frame
            "encoder_hidden_states": conditioning["prompt_embeds"].to(noisy_latents.dtype),
            "timestep": timesteps,
        }
        return TransformerCall(inputs, lambda velocity: velocity.unsqueeze(2))
