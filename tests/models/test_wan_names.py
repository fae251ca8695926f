"""Names of Wan's own release, which diffusers turns back into its own."""

from typing import Any

import torch

from longtake.models.wan import original_name

_SIZES: dict[str, Any] = {
    "num_attention_heads": 2,
    "attention_head_dim": 12,
    "in_channels": 4,
    "out_channels": 4,
    "text_dim": 6,
    "freq_dim": 8,
    "ffn_dim": 16,
    "num_layers": 11,
}


def test_diffusers_turns_every_name_back() -> None:
    """Of a model that also looks at pictures, with blocks of two digits; none stays diffusers'."""
    from diffusers import WanTransformer3DModel
    from diffusers.loaders.single_file_utils import convert_wan_transformer_to_diffusers

    with torch.device("meta"):
        model: Any = WanTransformer3DModel(**_SIZES, image_dim=6, added_kv_proj_dim=24)
    names = list(model.state_dict())
    originals = [original_name(name) for name in names]
    back = convert_wan_transformer_to_diffusers({each: torch.empty(0) for each in originals})
    assert list(back) == names
    unchanged = {name for name in names if original_name(name) == name}
    assert unchanged == {"patch_embedding.weight", "patch_embedding.bias"}


def test_only_whole_parts_of_a_name_are_meant() -> None:
    """What has another name's letters in it stays; LoRA's own part does, too."""
    assert original_name("blocks.1.attn1.to_q.lora_A.weight") == (
        "blocks.1.self_attn.q.lora_A.weight"
    )
    assert original_name("blocks.1.norm22.weight") == "blocks.1.norm22.weight"
    assert original_name("my_proj_out.weight") == "my_proj_out.weight"
