"""Releases are told by their files, and refused by name where no family trains them."""

from pathlib import Path
from typing import Any

import diffusers
import pytest
from tests.models.tiny import write_configs

from longtake.config import ModelSection
from longtake.errors import ModelError
from longtake.models.base import FAMILIES
from longtake.models.recognition import KINDS, Kind, recognise, refuse_other_family

_ALL = {kind.family for kind in KINDS}
_WAN = {"_class_name": "WanTransformer3DModel", "in_channels": 16, "out_channels": 16}
_FLUX = {"_class_name": "FluxTransformer2DModel", "in_channels": 64, "out_channels": None}
_QWEN = {"_class_name": "QwenImageTransformer2DModel", "in_channels": 64, "out_channels": 16}
_HUNYUAN = {"_class_name": "HunyuanVideo15Transformer3DModel"}
_LTX = {"_class_name": "LTX2VideoTransformer3DModel"}
_QWEN21 = {"_class_name": "QwenImage21Transformer2DModel"}
_KREA = {"_class_name": "Krea2Transformer2DModel"}
_H3 = {"_class_name": "MiniMaxH3Transformer3DModel"}
_FLUX3 = {"_class_name": "Flux3Transformer2DModel"}
_IDEOGRAM = {"_class_name": "Ideogram4Transformer2DModel"}
_PAIR = ["diffusers", "WanTransformer3DModel"]


def _release(
    folder: Path, pipeline: str | None, config: dict[str, Any], index: dict[str, Any]
) -> ModelSection:
    files: dict[str, Any] = {}
    if pipeline is not None:
        name = "modular_model_index.json" if "Modular" in pipeline else "model_index.json"
        files[name] = {"_class_name": pipeline, **index}
    if config:
        files["transformer/config.json"] = config
    return ModelSection(family="wan", pretrained=write_configs(folder, files))


_I2V = _WAN | {"in_channels": 36}
_FLF2V = _I2V | {"pos_embed_seq_len": 514}
_RELEASES: list[tuple[str | None, dict[str, Any], dict[str, Any], str, str]] = [
    ("WanPipeline", _WAN, {"transformer_2": [None, None]}, "wan", "Wan 2.1, from text to video"),
    ("WanImageToVideoPipeline", _I2V, {}, "wan", "Wan 2.1, from a first frame and"),
    ("WanImageToVideoPipeline", _FLF2V, {}, "wan", "Wan 2.1, from a first and a last frame"),
    ("WanPipeline", _WAN, {"transformer_2": _PAIR, "boundary_ratio": 0.875}, "wan", "A14B, from t"),
    ("WanImageToVideoPipeline", _I2V, {"transformer_2": _PAIR}, "wan", "A14B, from a first"),
    ("WanPipeline", _WAN | {"in_channels": 48}, {"expand_timesteps": True}, "wan", "TI2V-5B"),
    ("FluxPipeline", _FLUX, {}, "flux", "FLUX.1"),
    (None, _FLUX, {}, "flux", "FLUX.1"),
    ("FluxKontextPipeline", _FLUX, {}, "flux_kontext", "FLUX.1 Kontext"),
    ("Flux2Pipeline", {"_class_name": "Flux2Transformer2DModel"}, {}, "flux2", "FLUX.2"),
    ("Flux2KleinPipeline", {"_class_name": "Flux2Transformer2DModel"}, {}, "flux2", "klein"),
    ("QwenImagePipeline", _QWEN, {}, "qwen_image", "Qwen-Image"),
    ("QwenImageEditPipeline", _QWEN, {}, "qwen_image_edit", "Qwen-Image-Edit"),
    (
        "QwenImageEditPlusPipeline",
        _QWEN,
        {},
        "qwen_image_edit_plus",
        "Edit with several references",
    ),
    ("HunyuanVideo15ImageToVideoPipeline", _HUNYUAN, {}, "hunyuan_video15", "1.5, from a first"),
    ("LTX2Pipeline", _LTX, {}, "ltx2", "LTX-2, from text"),
    ("LTX2Pipeline", _LTX | {"use_prompt_embeddings": False}, {}, "ltx2", "LTX-2.3, from text"),
    ("LTX2ImageToVideoPipeline", _LTX, {}, "ltx2", "LTX-2, from a first frame"),
    ("ZImagePipeline", {"_class_name": "ZImageTransformer2DModel"}, {}, "z_image", "Z-Image"),
    ("QwenImage21Pipeline", _QWEN21, {"sample_sigmas": None}, "qwen_image21", "Qwen-Image 2.1"),
    ("Krea2Pipeline", _KREA, {"is_distilled": True}, "krea2", "Krea 2 Turbo"),
    ("Krea2Pipeline", _KREA, {"is_distilled": False}, "krea2", "Krea 2"),
    ("Flux3ModularPipeline", _FLUX3, {"_blocks_class_name": "Flux3AutoBlocks"}, "flux3", "FLUX.3"),
    (None, _FLUX3, {}, "flux3", "FLUX.3"),
    ("MiniMaxH3ModularPipeline", _H3, {}, "minimax_h3", "MiniMax H3, from text"),
    ("Ideogram4Pipeline", _IDEOGRAM, {"unconditional_transformer": _PAIR}, "ideogram4", "Ideogram"),
]


@pytest.mark.parametrize(("pipeline", "config", "index", "family", "title"), _RELEASES)
def test_a_release_is_told_by_its_files(
    pipeline: str | None,
    config: dict[str, Any],
    index: dict[str, Any],
    family: str,
    title: str,
    tmp_path: Path,
) -> None:
    section = _release(tmp_path, pipeline, config, index)
    kind = recognise(section, _ALL)
    assert kind is not None
    assert kind.family == family
    assert title in kind.title
    if family not in FAMILIES:
        with pytest.raises(ModelError, match=r"which this version of longtake does not train\. Th"):
            recognise(section, FAMILIES)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.title)
def test_rows_name_classes_that_diffusers_has(kind: Kind) -> None:
    assert kind.transformer in dir(diffusers)
    assert not kind.modular or kind.modular in dir(diffusers)


@pytest.mark.parametrize(
    ("pipeline", "config", "index", "said"),
    [
        ("FluxControlNetPipeline", _FLUX, {}, "a ControlNet pipeline .*docs/guides/modules.md"),
        ("FluxFillPipeline", _FLUX | {"in_channels": 384}, {}, r"FLUX\.1 Fill, .* FLUX\.1 Kontext"),
        (None, _FLUX | {"in_channels": 128}, {}, r"FLUX\.1 Depth or Canny, .*guides/modules\.md"),
        ("Flux3DistilledModularPipeline", _FLUX3, {}, r"a FLUX\.3 distilled to a flow map"),
        (None, _FLUX3 | {"flow_map": True}, {}, r"a FLUX\.3 distilled .*flux-3-image-klein-base"),
        ("Flux2KleinKVPipeline", {"_class_name": "Flux2Transformer2DModel"}, {}, "FLUX.2 klein KV"),
        ("QwenImageLayeredPipeline", _QWEN, {}, "Qwen-Image-Layered"),
        (
            "QwenImage21Pipeline",
            _QWEN21,
            {"sample_sigmas": [1.0, 0.7]},
            r"a Qwen-Image 2\.1 distilled",
        ),
        (None, _QWEN | {"use_layer3d_rope": True}, {}, "Qwen-Image-Layered"),
        ("ZImageOmniPipeline", {"_class_name": "ZImageTransformer2DModel"}, {}, "Z-Image Omni"),
        ("WanVACEPipeline", {"_class_name": "WanVACETransformer3DModel"}, {}, "Wan VACE"),
        ("HunyuanVideoPipeline", {}, {}, "the first HunyuanVideo"),
        ("LTXPipeline", {}, {}, "LTX-Video .*Use LTX-2"),
        ("LTX2Pipeline", _LTX, {"duration_head": _PAIR}, r"LTX-2\.5 .*Start from LTX-2\.3"),
        (None, _LTX | {"use_keyframes_abs_pos_embedding": True}, {}, r"LTX-2\.5"),
        ("LTX2LatentUpsamplePipeline", {}, {}, "a part of LTX-2's generation in two stages"),
        ("LTX2InContextPipeline", _LTX, {}, "LTX-2 with reference videos"),
        ("StableDiffusion3Pipeline", {}, {}, "Stable Diffusion 3"),
        ("StableDiffusionXLPipeline", {}, {"unet": ["diffusers", "UNet2DConditionModel"]}, "a UN"),
        ("WanModularPipeline", {}, {}, "a modular pipeline"),
        ("Ideogram4Pipeline", _IDEOGRAM, {}, "an Ideogram 4 without its unconditional_transformer"),
    ],
)
def test_what_no_family_trains_is_refused_by_name(
    pipeline: str | None, config: dict[str, Any], index: dict[str, Any], said: str, tmp_path: Path
) -> None:
    section = _release(tmp_path, pipeline, config, index)
    with pytest.raises(
        ModelError, match=f"{tmp_path} is {said}.*This version trains releases of wan, flux"
    ):
        recognise(section, FAMILIES)


def test_another_familys_release_is_refused_by_its_name(tmp_path: Path) -> None:
    """Families with one transformer share releases; what no row names is left to its loader."""
    kontext = _release(tmp_path / "kontext", "FluxKontextPipeline", _FLUX, {})
    with pytest.raises(
        ModelError, match=r'is FLUX\.1 Kontext: set model\.family = "flux_kontext"; it is "wa'
    ):
        refuse_other_family(kontext, FAMILIES)
    unknown = _release(tmp_path / "unknown", None, {"_class_name": "TheirTransformer"}, {})
    shipped = ModelSection(family="flux", pretrained="black-forest-labs/FLUX.1-Kontext-dev")
    allowed = [
        kontext.model_copy(update={"family": "flux"}),
        kontext.model_copy(update={"family": "their_module:Family"}),
        kontext.model_copy(update={"pretrained": None}),
        unknown,
        shipped,
    ]
    for section in allowed:
        refuse_other_family(section, FAMILIES)
    assert recognise(unknown, FAMILIES) is None
    kind = recognise(shipped, FAMILIES)
    assert kind is not None
    assert kind.family == "flux_kontext"
