"""What the weights of Wan 2.1 are called in its own release, after which ComfyUI goes.

Diffusers gave most parts other names, and counts a block's norms in another order. Learnt from
diffusers' `convert_wan_transformer_to_diffusers`, which goes the other way.
"""

import re

_IN_BLOCKS = {
    "attn1": "self_attn",
    "attn2": "cross_attn",
    "to_q": "q",
    "to_k": "k",
    "to_v": "v",
    "to_out.0": "o",
    "add_k_proj": "k_img",
    "add_v_proj": "v_img",
    "norm_added_k": "norm_k_img",
    "ffn.net.0.proj": "ffn.0",
    "ffn.net.2": "ffn.2",
    "norm2": "norm3",
    "norm3": "norm2",
    "scale_shift_table": "modulation",
}
_AROUND_BLOCKS = {
    "condition_embedder.time_embedder.linear_1": "time_embedding.0",
    "condition_embedder.time_embedder.linear_2": "time_embedding.2",
    "condition_embedder.time_proj": "time_projection.1",
    "condition_embedder.text_embedder.linear_1": "text_embedding.0",
    "condition_embedder.text_embedder.linear_2": "text_embedding.2",
    "condition_embedder.image_embedder.norm1": "img_emb.proj.0",
    "condition_embedder.image_embedder.ff.net.0.proj": "img_emb.proj.1",
    "condition_embedder.image_embedder.ff.net.2": "img_emb.proj.3",
    "condition_embedder.image_embedder.norm2": "img_emb.proj.4",
    "scale_shift_table": "head.modulation",
    "proj_out": "head.head",
}


def original_name(name: str) -> str:
    names = _IN_BLOCKS if name.startswith("blocks.") else _AROUND_BLOCKS
    whole_parts = rf"(?<![^.])({'|'.join(map(re.escape, names))})(?![^.])"
    return re.sub(whole_parts, lambda found: names[found[0]], name)
