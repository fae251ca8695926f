"""State dicts of diffusers' transformers in the layouts that their authors and ComfyUI use.

Each is the inverse of a conversion, written from the names of the original files.
"""

import re
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from longtake.models import ltx2, wan

Weights = dict[str, Tensor]


def _renamed(weights: Weights, *pairs: tuple[str, str]) -> Weights:
    """Replace what the patterns match, each in the names that the ones before have made."""
    made = Weights()
    for name, value in weights.items():
        for pattern, new in pairs:
            name = re.sub(pattern, new, name)
        made[name] = value
    return made


def _joined(weights: Weights, pattern: str, parts: tuple[str, ...], whole: str) -> Weights:
    """Put the rows of several projections in one, by their place in the dotted name."""
    made = Weights()
    for name, value in weights.items():
        if not (match := re.search(pattern.format(f"({'|'.join(parts)})"), name)):
            made[name] = value
            continue
        if match[1] == parts[0]:
            names = [name[: match.start(1)] + part + name[match.end(1) :] for part in parts]
            made[name[: match.start(1)] + whole + name[match.end(1) :]] = torch.cat(
                [weights[each] for each in names]
            )
    return made


def _swapped(weights: Weights, beginning: str) -> Weights:
    """Put shift before scale, as BFL's last layer has them."""
    return {
        name: torch.cat(value.chunk(2)[::-1]) if name.startswith(beginning) else value
        for name, value in weights.items()
    }


def _z_image(weights: Weights) -> Weights:
    qkv = r"attention\.{}\.weight"
    return _renamed(
        _joined(weights, qkv, ("to_q", "to_k", "to_v"), "qkv"),
        (r"attention\.to_out\.0\.", "attention.out."),
        (r"attention\.norm_(q|k)\.", r"attention.\1_norm."),
        (r"^all_(final_layer|x_embedder)\.2-1\.", r"\1."),
    )


def _krea2(weights: Weights) -> Weights:
    flat = {
        name: value.flatten() if re.match(r"transformer_blocks.*table$", name) else value
        for name, value in weights.items()
    }
    return _renamed(
        flat,
        (r"^final_layer\.scale_shift_table", "last.modulation.lin"),
        (r"^final_layer\.norm\.weight", "last.norm.scale"),
        (r"^final_layer\.linear", "last.linear"),
        (r"\.scale_shift_table", ".mod.lin"),
        (r"^img_in\.", "first."),
        (r"^time_embed\.linear_1", "tmlp.0"),
        (r"^time_embed\.linear_2", "tmlp.2"),
        (r"^time_mod_proj", "tproj.1"),
        (r"^txt_in\.norm\.weight", "txtmlp.0.scale"),
        (r"^txt_in\.linear_1", "txtmlp.1"),
        (r"^txt_in\.linear_2", "txtmlp.3"),
        (r"^text_fusion\.", "txtfusion."),
        (r"^transformer_blocks\.", "blocks."),
        (r"\.attn\.to_(q|k|v)\.", r".attn.w\1."),
        (r"\.attn\.to_out\.0\.", ".attn.wo."),
        (r"\.attn\.to_gate\.", ".attn.gate."),
        (r"\.attn\.norm_(q|k)\.weight", r".attn.qknorm.\1norm.scale"),
        (r"\.ff\.", ".mlp."),
        (r"\.norm1\.weight", ".prenorm.scale"),
        (r"\.norm2\.weight", ".postnorm.scale"),
    )


_BFL = (
    (r"^x_embedder", "img_in"),
    (r"^context_embedder", "txt_in"),
    (r"^transformer_blocks\.", "double_blocks."),
    (r"^single_transformer_blocks\.", "single_blocks."),
    (r"(double.*)\.attn\.norm_q\.weight", r"\1.img_attn.norm.query_norm.scale"),
    (r"(double.*)\.attn\.norm_k\.weight", r"\1.img_attn.norm.key_norm.scale"),
    (r"\.attn\.norm_added_q\.weight", ".txt_attn.norm.query_norm.scale"),
    (r"\.attn\.norm_added_k\.weight", ".txt_attn.norm.key_norm.scale"),
    (r"(single.*)\.attn\.norm_q\.weight", r"\1.norm.query_norm.scale"),
    (r"(single.*)\.attn\.norm_k\.weight", r"\1.norm.key_norm.scale"),
    (r"\.attn\.to_out\.0\.", ".img_attn.proj."),
    (r"\.attn\.to_add_out\.", ".txt_attn.proj."),
    (r"\.attn\.img_qkv\.", ".img_attn.qkv."),
    (r"\.attn\.txt_qkv\.", ".txt_attn.qkv."),
    (r"^norm_out\.linear", "final_layer.adaLN_modulation.1"),
    (r"^proj_out\.", "final_layer.linear."),
)


def _bfl(weights: Weights) -> Weights:
    joined = _joined(
        weights, r"^transformer_blocks.*attn\.{}\.", ("to_q", "to_k", "to_v"), "img_qkv"
    )
    added = ("add_q_proj", "add_k_proj", "add_v_proj")
    return _swapped(
        _joined(joined, r"^transformer_blocks.*attn\.{}\.", added, "txt_qkv"), "norm_out."
    )


def _flux2(weights: Weights) -> Weights:
    embed = r"^time_guidance_embed\."
    return _renamed(
        _bfl(weights),
        *_BFL,
        (rf"{embed}timestep_embedder\.linear_1", "time_in.in_layer"),
        (rf"{embed}timestep_embedder\.linear_2", "time_in.out_layer"),
        (rf"{embed}guidance_embedder\.linear_1", "guidance_in.in_layer"),
        (rf"{embed}guidance_embedder\.linear_2", "guidance_in.out_layer"),
        (r"modulation(_img|_txt|)\.linear", r"modulation\1.lin"),
        (r"\.ff\.linear_in\.", ".img_mlp.0."),
        (r"\.ff\.linear_out\.", ".img_mlp.2."),
        (r"\.ff_context\.linear_in\.", ".txt_mlp.0."),
        (r"\.ff_context\.linear_out\.", ".txt_mlp.2."),
        (r"\.attn\.to_qkv_mlp_proj\.", ".linear1."),
        (r"(single.*)\.attn\.to_out\.", r"\1.linear2."),
    )


def _flux3(weights: Weights) -> Weights:
    return _renamed(
        _swapped(weights, "norm_out."),
        (r"^single_transformer_blocks\.", "single_blocks."),
        (r"^mode_blocks\.", "content_mode_blocks."),
        (r"\.attn\.to_(q|k|v)\.", r".\1_proj."),
        (r"\.attn\.to_out\.0\.", ".attn_out."),
        (r"\.attn\.norm_q\.weight", ".norm.query_norm.scale"),
        (r"\.attn\.norm_k\.weight", ".norm.key_norm.scale"),
        (r"\.ff\.linear_(in|out)\.", r".mlp_\1."),
        (r"^x_embedders\.", "emb_in."),
        (r"^context_embedder\.", "txt_in."),
        (r"^timestep_embedder\.linear_1\.", "time_in.in_layer."),
        (r"^timestep_embedder\.linear_2\.", "time_in.out_layer."),
        (r"^proj_out\.", "final_layer.image.linear."),
        (r"^norm_out\.linear\.", "final_layer.image.adaLN_modulation.1."),
        (r"(modulations.*)\.linear\.", r"\1.lin."),
    )


def flux(weights: Weights) -> Weights:
    """FLUX.1 as Black Forest Labs release it."""
    parts = ("attn.to_q", "attn.to_k", "attn.to_v", "proj_mlp")
    fused = _joined(_bfl(weights), r"^single_transformer_blocks\.\d+\.{}\.", parts, "linear1")
    embed = r"^time_text_embed\."
    return _renamed(
        fused,
        (r"(single.*)\.proj_out\.", r"\1.linear2."),
        (r"(single.*)\.norm\.linear\.", r"\1.modulation.lin."),
        *_BFL,
        (rf"{embed}timestep_embedder\.linear_1", "time_in.in_layer"),
        (rf"{embed}timestep_embedder\.linear_2", "time_in.out_layer"),
        (rf"{embed}guidance_embedder\.linear_1", "guidance_in.in_layer"),
        (rf"{embed}guidance_embedder\.linear_2", "guidance_in.out_layer"),
        (rf"{embed}text_embedder\.linear_1", "vector_in.in_layer"),
        (rf"{embed}text_embedder\.linear_2", "vector_in.out_layer"),
        (r"\.norm1\.linear\.", ".img_mod.lin."),
        (r"\.norm1_context\.linear\.", ".txt_mod.lin."),
        (r"\.ff\.net\.0\.proj\.", ".img_mlp.0."),
        (r"\.ff\.net\.2\.", ".img_mlp.2."),
        (r"\.ff_context\.net\.0\.proj\.", ".txt_mlp.0."),
        (r"\.ff_context\.net\.2\.", ".txt_mlp.2."),
    )


def _hunyuan_video15(weights: Weights) -> Weights:
    parts = ("attn.to_q", "attn.to_k", "attn.to_v")
    joined = _joined(weights, r"refiner_blocks\.\d+\.{}\.", parts, "self_attn_qkv")
    table = Path(__file__).with_name("hunyuan_video15_names.txt").read_text().splitlines()
    pairs = (line.split("  ") for line in table)
    return _renamed(_swapped(joined, "norm_out."), *((ours, theirs) for ours, theirs in pairs))


def minimax_h3(weights: Weights, qkv_layout: str = "stacked") -> Weights:
    """MiniMax H3 as files for ComfyUI have it, or as MiniMax's own, with heads of 16 channels."""
    named = _renamed(
        _joined(weights, r"attn\.{}\.weight", ("to_q", "to_k", "to_v"), "qkv_proj"),
        (r"^transformer_blocks\.", "blocks."),
        (r"^token_refiner\.refiner_blocks\.", "token_refiner.blocks."),
        (r"^proj_in\.", "video_patch_proj."),
        (r"^audio_proj_in\.", "audio_patch_proj."),
        (r"^context_embedder\.", "condition_proj."),
        (r"^time_embedder\.linear_1\.", "time_embedder.proj_in."),
        (r"^time_embedder\.linear_2\.", "time_embedder.proj_out."),
        (r"^norm_out\.norm\.", "final_layer.norm."),
        (r"^norm_out\.linear\.", "final_layer.adaln_proj.linear."),
        (r"^proj_out\.", "final_layer.video_out."),
        (r"^audio_proj_out\.", "final_layer.audio_out."),
        (r"\.attn\.norm_(q|k)\.", r".attn.\1_norm."),
        (r"\.attn\.to_out\.0\.", ".attn.out_proj."),
        (r"\.ff\.net\.0\.proj\.", ".mlp.fc1."),
        (r"\.ff\.net\.2\.", ".mlp.fc2."),
    )
    for name, value in named.items():
        if name.endswith(".mlp.fc1.weight"):
            named[name] = torch.cat(value.chunk(2)[::-1])
        if name.endswith(".qkv_proj.weight") and qkv_layout == "interleaved":
            by_head = value.reshape(3, -1, 16, value.shape[1]).transpose(0, 1)
            named[name] = by_head.flatten(0, 2)
    return named | {"rope.inv_freq": torch.ones(2)}


ORIGINAL: Mapping[str, Callable[[Weights], Weights]] = {
    "WanTransformer3DModel": lambda weights: {
        wan.original_name(name): value for name, value in weights.items()
    },
    "LTX2VideoTransformer3DModel": lambda weights: {
        ltx2.original_name(name): value for name, value in weights.items()
    },
    "QwenImageTransformer2DModel": dict,
    "QwenImage21Transformer2DModel": lambda weights: _joined(
        weights, r"img_mlp\.{}\.", ("gate_layer", "proj"), "gate_up"
    ),
    "ZImageTransformer2DModel": _z_image,
    "HunyuanVideo15Transformer3DModel": _hunyuan_video15,
    "Krea2Transformer2DModel": _krea2,
    "Flux2Transformer2DModel": _flux2,
    "Flux3Transformer2DModel": _flux3,
    "MiniMaxH3Transformer3DModel": minimax_h3,
}
"""By the transformer's class; FLUX.1's converter has the width of the release."""
