"""Recognises which kind of model a release is, by its two configurations; imports no torch.

They are model_index.json and the transformer's config.json. `KINDS` has rows of families that this
version lacks, too: they are refused until they are in `longtake.models.base.FAMILIES`.
"""

from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from longtake.config import ModelSection
from longtake.errors import ModelError
from longtake.models import releases

Facts = Mapping[str, Any]
"""Values of a release's model_index.json and of its transformer's config.json, in one mapping;
`pipeline` and `transformer` are class names.
"""


def _always(_: Facts) -> bool:
    return True


def _takes_more(facts: Facts) -> bool:
    """Return True if a transformer takes more channels than it returns, as for a picture."""
    # FLUX's out_channels is None where it equals in_channels.
    return int(facts.get("in_channels") or 0) > int(facts.get("out_channels") or 10**9)


def _names(facts: Facts, part: str) -> bool:
    """Return True if the release's model_index.json names a class for this part of the pipeline."""
    # An entry is [library, class], and [null, null] for a part that the release leaves out.
    return (facts.get(part) or [None])[0] is not None


def _has_two(facts: Facts) -> bool:
    return _names(facts, "transformer_2") or bool(facts.get("boundary_ratio"))


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A kind of released model, such as Wan 2.1 or FLUX.1, and how it is recognised."""

    title: str
    family: str
    """Value of the recipe key model.family with which this kind is trained."""
    transformer: str
    """Class name of the transformer in the release's configuration."""
    fits: Callable[[Facts], bool] = _always
    task: Literal["text", "first frame", "edit"] = "text"
    size: tuple[int, int, int] = (1, 1024, 1024)
    """Frames, height and width that the kind's pipeline makes by default."""
    small_size: tuple[int, int, int] = (1, 512, 512)
    """Frames, height and width for GPUs of 8 to 16 GiB."""
    fps: float | None = None
    releases: tuple[str, ...] = ()
    """Ids of the kind's repositories in diffusers' layout; the first serves as an example."""
    modular: str = ""
    """Class name of its modular pipeline, for a kind that diffusers has no ordinary pipeline of."""
    advice: str = ""
    """Sentences for whoever is about to train it, such as of another release to start from."""


def _of(*pipelines: str) -> Callable[[Facts], bool]:
    return lambda facts: facts.get("pipeline") in pipelines


def makes_from_frame(facts: Facts) -> bool:
    """Return True for an image-to-video HunyuanVideo 1.5, whose class serves both tasks."""
    named = facts.get("pipeline")
    return bool(named == HUNYUAN_I2V if named else facts.get("task_type") == "i2v")


def _is_for_720p(facts: Facts) -> bool:
    return bool(facts.get("target_size") == 960)


_FLUX, _QWEN = "FluxTransformer2DModel", "QwenImageTransformer2DModel"
_HUNYUAN, _LTX = "HunyuanVideo15Transformer3DModel", "LTX2VideoTransformer3DModel"
_IDEOGRAM = "Ideogram4Transformer2DModel"
HUNYUAN_I2V = "HunyuanVideo15ImageToVideoPipeline"
_HUNYUAN_HUB = "hunyuanvideo-community/HunyuanVideo-1.5-Diffusers-"
_HUNYUAN_TITLES = (
    "HunyuanVideo 1.5, from a first frame and text to video",
    "HunyuanVideo 1.5, from text to video",
)

# What the kinds of one transformer have in common.
_wan = partial(
    Kind,
    family="wan",
    transformer="WanTransformer3DModel",
    size=(81, 480, 832),
    small_size=(33, 480, 832),
)
_flux = partial(Kind, transformer=_FLUX)
_flux2 = partial(Kind, family="flux2", transformer="Flux2Transformer2DModel")
_qwen = partial(Kind, transformer=_QWEN)
_krea2 = partial(Kind, family="krea2", transformer="Krea2Transformer2DModel")
_hunyuan = partial(
    Kind,
    family="hunyuan_video15",
    transformer=_HUNYUAN,
    small_size=(33, 480, 848),
    fps=24.0,
)
_hunyuan_720 = partial(_hunyuan, size=(121, 720, 1280))
_hunyuan_480 = partial(_hunyuan, size=(121, 480, 848))
_ltx = partial(
    Kind,
    family="ltx2",
    transformer=_LTX,
    size=(121, 512, 768),
    small_size=(33, 512, 768),
    fps=24.0,
)

KINDS = (  # in order: the first that fits is taken
    _wan(
        title="Wan 2.2 A14B, from a first frame and text to video",
        fits=lambda facts: _has_two(facts) and _takes_more(facts),
        task="first frame",
        fps=16.0,
        releases=("Wan-AI/Wan2.2-I2V-A14B-Diffusers",),
    ),
    _wan(
        title="Wan 2.2 A14B, from text to video",
        fits=_has_two,
        fps=16.0,
        releases=("Wan-AI/Wan2.2-T2V-A14B-Diffusers",),
    ),
    _wan(
        title="Wan 2.2 TI2V-5B, from text or a first frame to video",
        fits=lambda facts: bool(facts.get("expand_timesteps")) or facts.get("in_channels") == 48,
        releases=("Wan-AI/Wan2.2-TI2V-5B-Diffusers",),
    ),
    _wan(
        title="Wan 2.1, from a first and a last frame and text to video",
        fits=lambda facts: _takes_more(facts) and facts.get("pos_embed_seq_len") is not None,
        task="first frame",
        fps=16.0,
        releases=("Wan-AI/Wan2.1-FLF2V-14B-720P-diffusers",),
    ),
    _wan(
        title="Wan 2.1, from a first frame and text to video",
        fits=_takes_more,
        task="first frame",
        fps=16.0,
        releases=("Wan-AI/Wan2.1-I2V-14B-480P-Diffusers", "Wan-AI/Wan2.1-I2V-14B-720P-Diffusers"),
    ),
    _wan(
        title="Wan 2.1, from text to video",
        fps=16.0,
        releases=("Wan-AI/Wan2.1-T2V-14B-Diffusers", "Wan-AI/Wan2.1-T2V-1.3B-Diffusers"),
    ),
    _flux(
        title="FLUX.1 Kontext",
        family="flux_kontext",
        fits=_of("FluxKontextPipeline"),
        task="edit",
        releases=("black-forest-labs/FLUX.1-Kontext-dev",),
    ),
    _flux(title="FLUX.1", family="flux", releases=("black-forest-labs/FLUX.1-dev",)),
    _flux2(
        title="FLUX.2 klein",
        fits=_of("Flux2KleinPipeline"),
        releases=tuple(f"black-forest-labs/FLUX.2-klein-base-{size}" for size in ("4B", "9B")),
    ),
    _flux2(title="FLUX.2", releases=("black-forest-labs/FLUX.2-dev",)),
    _qwen(
        title="Qwen-Image-Edit",
        family="qwen_image_edit",
        fits=_of("QwenImageEditPipeline"),
        task="edit",
        releases=("Qwen/Qwen-Image-Edit",),
    ),
    _qwen(
        title="Qwen-Image-Edit with several references",
        family="qwen_image_edit_plus",
        fits=_of("QwenImageEditPlusPipeline"),
        task="edit",
        releases=("Qwen/Qwen-Image-Edit-2511", "Qwen/Qwen-Image-Edit-2509"),
    ),
    _qwen(title="Qwen-Image", family="qwen_image", releases=("Qwen/Qwen-Image",)),
    Kind(
        title="Qwen-Image 2.1",
        family="qwen_image21",
        transformer="QwenImage21Transformer2DModel",
        releases=("Qwen/Qwen-Image-2.1",),
    ),
    _hunyuan_720(
        title=_HUNYUAN_TITLES[0],
        fits=lambda facts: _is_for_720p(facts) and makes_from_frame(facts),
        task="first frame",
        releases=(f"{_HUNYUAN_HUB}720p_i2v",),
    ),
    _hunyuan_720(
        title=_HUNYUAN_TITLES[1], fits=_is_for_720p, releases=(f"{_HUNYUAN_HUB}720p_t2v",)
    ),
    _hunyuan_480(
        title=_HUNYUAN_TITLES[0],
        fits=makes_from_frame,
        task="first frame",
        releases=(f"{_HUNYUAN_HUB}480p_i2v",),
    ),
    _hunyuan_480(title=_HUNYUAN_TITLES[1], releases=(f"{_HUNYUAN_HUB}480p_t2v",)),
    _ltx(
        title="LTX-2, from a first frame and text to video",
        fits=_of("LTX2ImageToVideoPipeline"),
        task="first frame",
    ),
    _ltx(
        title="LTX-2.3, from text to video",
        fits=lambda facts: facts.get("use_prompt_embeddings") is False,
        releases=("diffusers/LTX-2.3-Diffusers",),
    ),
    _ltx(title="LTX-2, from text to video", releases=("Lightricks/LTX-2",)),
    Kind(
        title="Z-Image",
        family="z_image",
        transformer="ZImageTransformer2DModel",
        releases=("Tongyi-MAI/Z-Image",),
    ),
    _krea2(
        title="Krea 2 Turbo",
        fits=lambda facts: bool(facts.get("is_distilled")),
        releases=("krea/Krea-2-Turbo",),
        advice="It is distilled to few steps, which training undoes: a LoRA is better trained on "
        "krea/Krea-2-Raw, and used with Turbo.",
    ),
    _krea2(title="Krea 2", releases=("krea/Krea-2-Raw",)),
    Kind(
        title="FLUX.3",
        family="flux3",
        transformer="Flux3Transformer2DModel",
        modular="Flux3ModularPipeline",
        releases=("black-forest-labs/flux-3-image-klein-base",),
        advice="Without pictures in data.conditioning the parts of the model that read them "
        "(image_cond) get no gradient, and stay as they are.",
    ),
    Kind(
        title="MiniMax H3, from text to a video with sound",
        family="minimax_h3",
        transformer="MiniMaxH3Transformer3DModel",
        modular="MiniMaxH3ModularPipeline",
        size=(124, 768, 1344),
        small_size=(39, 480, 832),
        fps=24.0,
        releases=("MiniMaxAI/MiniMax-H3",),
        advice="It is distilled for guidance, which a plain LoRA undoes: after some hundred steps "
        "samples are as grey and vague as without guidance. Name an adapter for training that "
        "others made for it (model.training_adapter), or train toward guided predictions "
        '(objective.kind = "guided_target"): docs/guides/objectives.md.',
    ),
    Kind(
        title="Ideogram 4",
        family="ideogram4",
        transformer=_IDEOGRAM,
        advice="It was trained on captions that are JSON objects: yours should be, too "
        "(docs/guides/families.md).",
    ),
)


@dataclass(frozen=True)
class _Refused:
    title: str
    fits: Callable[[Facts], bool]
    instead: str


def _named(*beginnings: str) -> Callable[[Facts], bool]:
    """Return a test for releases whose pipeline's or transformer's class name begins so."""
    return lambda facts: any(
        str(facts[name]).startswith(beginnings) for name in ("pipeline", "transformer")
    )


_MODULAR = {kind.modular for kind in KINDS}

# In FLUX.1 a token has 64 channels: 16 latent channels of 2 x 2. Fill adds the masked latents (64)
# and the mask in pixels (256), Depth and Canny a control picture (64).
_REFUSED = (
    _Refused(
        "a ControlNet pipeline",
        lambda facts: "ControlNet" in str(facts["pipeline"]) or "controlnet" in facts,
        "Start from its base model, and train the control as a module of your own "
        "(docs/guides/modules.md).",
    ),
    _Refused(
        "FLUX.1 Fill, a model for inpainting",
        lambda facts: facts["transformer"] == _FLUX and facts.get("in_channels") == 384,
        "Start from FLUX.1, or from FLUX.1 Kontext to edit pictures.",
    ),
    _Refused(
        "FLUX.1 Depth or Canny, with a control picture as further channels",
        lambda facts: facts["transformer"] == _FLUX and facts.get("in_channels") == 128,
        "Start from FLUX.1, and train the control as a module of your own "
        "(docs/guides/modules.md).",
    ),
    _Refused(
        "a FLUX.3 distilled to a flow map",
        lambda facts: _named("Flux3Distilled")(facts) or bool(facts.get("flow_map")),
        "It learns where a step ends, another objective: start from "
        "black-forest-labs/flux-3-image-klein-base.",
    ),
    _Refused("FLUX.2 klein KV", _named("Flux2KleinKV"), "Start from FLUX.2 klein."),
    _Refused(
        "Qwen-Image-Layered",
        lambda facts: (
            _named("QwenImageLayered")(facts)
            or bool(facts.get("use_additional_t_cond") or facts.get("use_layer3d_rope"))
        ),
        "Start from Qwen-Image.",
    ),
    _Refused(
        "a Qwen-Image 2.1 distilled to a few sigmas of its own, such as Turbo",
        lambda facts: _named("QwenImage21")(facts) and bool(facts.get("sample_sigmas")),
        "Start from Qwen-Image 2.1.",
    ),
    _Refused(
        "Z-Image Omni",
        lambda facts: _named("ZImageOmni")(facts) or bool(facts.get("siglip_feat_dim")),
        "Start from Z-Image.",
    ),
    _Refused("Wan VACE", _named("WanVACE", "Wan22Vace"), "Start from Wan 2.1."),
    _Refused("Wan-Animate", _named("WanAnimate"), "Start from Wan 2.1."),
    _Refused(
        "LTX-2.5",
        lambda facts: (
            facts["transformer"] == _LTX
            and bool(facts.get("use_keyframes_abs_pos_embedding") or _names(facts, "duration_head"))
        ),
        "Start from LTX-2.3.",
    ),
    _Refused(
        "a part of LTX-2's generation in two stages",
        _named("LTX2LatentUpsample", "LTX2VideoDiffusionDecode", "LTX2DFR"),
        "Start from the LTX-2 or LTX-2.3 whose latents it takes.",
    ),
    _Refused(
        "LTX-2 with reference videos",
        _named("LTX2InContext", "LTX2HDR"),
        "Start from LTX-2 or LTX-2.3.",
    ),
    _Refused("LTX-Video", _named("LTXVideo", "LTXPipe", "LTXImage", "LTXCond"), "Use LTX-2."),
    _Refused(
        "a HunyuanVideo 1.5 distilled to few steps by MeanFlow",
        lambda facts: facts["transformer"] == _HUNYUAN and bool(facts.get("use_meanflow")),
        "Start from HunyuanVideo 1.5 of the same task and size that is not.",
    ),
    _Refused(
        "the first HunyuanVideo",
        lambda facts: _named("HunyuanVideo")(facts) and not _named("HunyuanVideo15")(facts),
        "Start from HunyuanVideo 1.5.",
    ),
    _Refused(
        "Stable Diffusion 3",
        _named("StableDiffusion3", "SD3"),
        "Start from FLUX.1 or Qwen-Image.",
    ),
    _Refused(
        "a UNet, such as Stable Diffusion's and SDXL's",
        lambda facts: "unet" in facts or _named("StableDiffusion")(facts),
        "longtake trains transformers by flow matching: start from FLUX.1 or Qwen-Image.",
    ),
    _Refused(
        "a modular pipeline",
        lambda facts: "Modular" in facts["pipeline"] and facts["pipeline"] not in _MODULAR,
        "Start from the release of the ordinary pipeline.",
    ),
    _Refused(
        "an Ideogram 4 without its unconditional_transformer, such as one distilled to few steps",
        lambda facts: (
            facts["transformer"] == _IDEOGRAM and not _names(facts, "unconditional_transformer")
        ),
        "Start from the folder or repository of the whole Ideogram4Pipeline.",
    ),
)


def recognise(section: ModelSection, families: Collection[str]) -> Kind | None:
    """Return the kind of the release that a model section names; None if no row of `KINDS` fits.

    Raises:
        ModelError: the release is refused by name, or its family is not in `families`.
    """
    where = section.release()
    assert where is not None
    index: Mapping[str, Any] = releases.pipeline_index(where)
    config: Mapping[str, Any] = {}
    with suppress(ModelError):  # a UNet has none; others fail when they are read
        config = releases.read_release(section).config
    # The transformer's values replace the pipeline's of the same name.
    facts = {
        **index,
        **config,
        "pipeline": str(index.get("_class_name", "")),
        "transformer": str(config.get("_class_name", "")),
    }
    # Refusals come first: such a release may have the transformer of a family that is trained.
    for refused in _REFUSED:
        if refused.fits(facts):
            raise ModelError(
                f"{where} is {_with_class(refused.title, facts)}, which longtake does not train. "
                f"{refused.instead} {trained(families)}"
            )
    kind = next((e for e in KINDS if e.transformer == facts["transformer"] and e.fits(facts)), None)
    if kind is not None and kind.family not in families:
        raise ModelError(
            f"{where} is {_with_class(kind.title, facts)}, which this version of longtake does not "
            f"train. {trained(families)}"
        )
    return kind


def _with_class(title: str, facts: Facts) -> str:
    named = facts["pipeline"] or facts["transformer"]
    return f"{title} ({named})" if named else title


def trained(families: Collection[str]) -> str:
    """Return a sentence that lists the model families of this version."""
    here = dict.fromkeys(kind.family for kind in KINDS if kind.family in families)
    return f"This version trains releases of {', '.join(here)}."


def refuse_other_family(section: ModelSection, families: Collection[str]) -> None:
    """Refuse a release that another family trains; families with one transformer may share it.

    Raises:
        ModelError: names the release and the value of model.family.
    """
    if section.pretrained is None or section.family not in families:  # a class of the user's own
        return
    kind = recognise(section, families)
    if kind is None:
        return
    may = {each.family for each in KINDS if each.transformer == kind.transformer}
    if section.family not in may:
        raise ModelError(
            f'{section.release()} is {kind.title}: set model.family = "{kind.family}"; it is '
            f'"{section.family}".'
        )
