"""Recipe keys of the model and its parts: `model`, `trainable`, `codec` and `text`."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from longtake.config.values import MAX_GUIDANCE, FilePath, FromList, Section, SectionName


def _with_counts_that_end(config: dict[str, Any]) -> dict[str, Any]:
    """Refuse absurd layer counts, which would be built until memory runs out."""
    for name, value in config.items():
        if name.startswith("num_") and isinstance(value, int) and value > _MOST_OF_A_MODEL:
            raise ValueError(
                f"model.config.{name} is {value:.3e}; expected at most {_MOST_OF_A_MODEL}"
            )
    return config


_MOST_OF_A_MODEL = 4096
Quantization = Literal["fp8", "int8", "nf4", "fp8_dynamic", "int8_dynamic"]
"""Data type of fewer bits for weights of frozen linear layers; "dynamic" ones multiply in it."""


Expert = Literal["high", "low"]
"""One of a release's two transformers, by the noise levels (sigmas) that it serves."""

EXPERT_FOLDERS: Mapping[Expert, str] = {"high": "transformer", "low": "transformer_2"}
"""Folder of each expert in a release."""


def is_one_file(where: str) -> bool:
    """Return True if `pretrained` names one file of weights, and no release."""
    return Path(where).suffix.lower() in (".safetensors", ".sft", ".gguf")


class ModelSection(Section):
    """The transformer: its family, the release to start from, and the precision of its weights."""

    family: str
    """Family (architecture) of the model: `wan`, `ltx2`, `minimax_h3`, `hunyuan_video15`, `flux`,
    `flux_kontext`, `flux2`, `flux3`, `qwen_image`, `qwen_image_edit`, `qwen_image_edit_plus`,
    `qwen_image21`, `z_image`, `krea2`, `ideogram4`, `tubelet`, or your own Family, as
    `package.module:Class`."""
    pretrained: str | None = None
    """Released model to start from, as a diffusers folder or repository id, or one safetensors or
    GGUF file of the transformer's weights; without it, random weights."""
    config_from: str | None = None
    """For a `pretrained` that is one file: the release that it was made of, as a diffusers folder
    or repository id. The configurations of transformer and scheduler are read from it."""
    qkv_layout: Literal["stacked", "interleaved"] | None = None
    """For one file of MiniMax H3 in its authors' layout, whose queries, keys and values are joined:
    the order of their rows, which no file tells. `stacked`: all queries first, as in files made for
    ComfyUI; `interleaved`: by head, as in MiniMax's own files."""
    transformer_class: str | None = Field(None, pattern=r"^[\w.]+:\w+$")
    """A class of your own to use instead of the family's diffusers transformer, with the same name,
    such as an edited copy of its file: "my_project.wan:WanTransformer3DModel". It is imported from
    the current directory first."""
    training_adapter: FilePath | None = None
    """A LoRA file that is part of the model in training alone, frozen, and absent in samples,
    held-out losses and exports: what is trained beside it leaves the distillation of a distilled
    release as it is. See docs/guides/objectives.md."""
    subfolder: str = "transformer"
    expert: Expert | None = None
    """The transformer to train, for a release with two (Wan 2.2 A14B): `high` serves sigmas from
    the release's boundary_ratio on, `low` those below it. Only its sigmas are drawn. Sampling takes
    the other one from the release, or from `sampling.other_expert`."""
    config: Annotated[dict[str, Any], AfterValidator(_with_counts_that_end)] = Field(
        default_factory=dict
    )
    """Arguments of the family's model class; those left out have the class's defaults."""
    dtype: Literal["fp32", "bf16"] = "fp32"
    """Data type of the weights. With fp32, autocast decides the precision of the arithmetic. With
    bf16, everything is computed in bf16 except the parts that diffusers keeps in fp32 (a few of
    Wan), and the optimizer keeps fp32 master copies of trained weights."""
    guidance: float = Field(1.0, gt=0, le=MAX_GUIDANCE)
    """Guidance scale given to a guidance-distilled model (FLUX.1-dev, Kontext) in training. At 1.0
    the model predicts the unguided velocity, which is the loss's target. At the scale used for
    sampling (2.5 to 3.5) the loss would pull the guided velocity to the unguided one and undo the
    distillation."""
    audio: Literal["train", "attend", "off"] | None = None
    """Required for a model that generates videos with audio (`ltx2`), unset for others. `train`:
    video and audio of the clips are learnt together. `attend`: the video alone is learnt, beside
    the noisy audio of its clip, which it attends to; the audio's own weights are frozen. `off`
    trains and samples the video alone, with attention between audio and video switched off; the
    audio's weights are frozen, and exported unchanged. Clips without sound are trained too: silence
    stands in its place, and has no loss."""
    audio_weight: float = Field(1.0, gt=0, le=1000)
    """Factor of the audio's loss, which is added to the video's, with `audio = "train"`."""
    quantize: Literal["none", "fp8", "int8", "nf4", "fp8_dynamic", "int8_dynamic", "auto"] = "none"
    """Data type of the blocks' frozen linear layers while a LoRA or a module is trained: `fp8` and
    `int8` take a byte per weight, `nf4` about half a byte. The arithmetic is the same, on rounded
    weights. `fp8_dynamic` and `int8_dynamic` round the layers' inputs and gradients, too, with a
    scale per token, and multiply in 8 bits: GPUs from Ada and Hopper (fp8) or Ampere (int8) on do
    that at twice the rate or more. `auto`: the plan chooses `int8` or `nf4` for each block, and the
    run keeps its choice."""
    quantize_gain: float = Field(0.1, ge=0, le=1)
    """With `quantize = "auto"`: the share of a block's time that weights of fewer bits must save to
    be chosen, int8 over exact ones and nf4 over int8. Of plans that fit, the more exact one is thus
    taken unless its step is longer by more than this. At 0 the fastest one is taken."""
    stream: Literal["none", "auto", "all"] = "auto"
    """Blocks whose frozen weights stay in host RAM and are copied to the GPU one block ahead;
    results are the same. `auto`: those that do not fit in the plan's GPU memory."""

    @model_validator(mode="after")
    def _expert_is_of_a_release(self) -> Self:
        if self.expert is None:
            return self
        if self.pretrained is None:
            raise ValueError(
                f'model.expert = "{self.expert}" names one of a release\'s two transformers, but '
                "model.pretrained is unset: name the release, or leave model.expert out"
            )
        if self.subfolder not in ("transformer", self.folder()):
            raise ValueError(
                f'model.expert = "{self.expert}" is in the folder {self.folder()}, but '
                f'model.subfolder = "{self.subfolder}": leave model.subfolder out'
            )
        return self

    @model_validator(mode="after")
    def _one_file_has_a_release(self) -> Self:
        is_file = self.pretrained is not None and is_one_file(self.pretrained)
        if is_file and self.config_from is None:
            raise ValueError(
                f"model.pretrained = {self.pretrained} is one file of weights, which has no "
                "configuration: set model.config_from to the release that it was made of (a folder "
                "in diffusers' layout or a repository id), and codec.pretrained and "
                "text.pretrained to the release of its VAE and text encoders, most often the same"
            )
        if self.config_from is not None and not is_file:
            raise ValueError(
                f"model.config_from = {self.config_from} is for a model.pretrained that is one "
                "safetensors or GGUF file: name the file there, or leave model.config_from out"
            )
        if self.qkv_layout is not None and not is_file:
            raise ValueError(
                f"model.qkv_layout = {self.qkv_layout} is for a model.pretrained that is one "
                "safetensors file of MiniMax H3: leave it out"
            )
        return self

    @property
    def uses_audio(self) -> bool:
        """True if the model gets the audio of its clips."""
        return self.audio in ("train", "attend")

    def release(self) -> str | None:
        """Return the release that has the model's configurations; None for random weights."""
        return self.config_from or self.pretrained

    def one_file(self) -> Path | None:
        """Return the file of the transformer's weights, where `pretrained` is one file."""
        return None if self.config_from is None else Path(str(self.pretrained)).expanduser()

    def without_file(self) -> Self:
        """Return a section for the release itself, where `pretrained` is one file."""
        without = {"config_from": None, "qkv_layout": None}
        return self.model_copy(update={"pretrained": self.release(), **without})

    def folder(self) -> str:
        """Return the folder of the trained transformer in the release."""
        return self.subfolder if self.expert is None else EXPERT_FOLDERS[self.expert]


class ModuleSection(Section):
    """A module of your own that is trained together with the model."""

    module: str = Field(pattern=r"^[\w.]+:\w+$")
    """Class of the added module, such as "my_project.adapter:PoseAdapter", imported from the
    current directory first. See docs/guides/modules.md."""
    blocks: Annotated[tuple[str, ...], FromList] = ("*",)
    """Blocks that the module wraps: names or patterns such as `single_transformer_blocks.*`."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the added module's class."""


class AdapterRule(Section):
    """Rank and strength of the adapter of some layers, or that they get none."""

    layers: Annotated[tuple[str, ...], FromList] = Field(min_length=1)
    """Layers of the rule among those of `targets`, written as in `targets`. Of several rules that
    name a layer the first one holds."""
    rank: int | None = Field(None, gt=0, le=2**14)
    """Rank of these layers, instead of `trainable.rank`."""
    alpha: float | None = Field(None, gt=0, le=1e6)
    """Alpha of these layers. Unset: `trainable.alpha`; where that is unset too, their rank."""
    exclude: bool = False
    """These layers get no adapter, whatever else the rule says."""


class TrainableSection(Section):
    """The parts of the model that are trained."""

    kind: Literal["full", "lora", "dora", "lokr", "frozen"] | None = None
    """Weights that are trained. `full`: all; `lora`: low-rank updates of the targets; `dora`: LoRA
    and a trained length of each row; `lokr`: updates that are Kronecker products; `frozen`: only
    the added modules. Unset: `frozen` if there are modules, else `full`."""
    targets: Annotated[tuple[str, ...], FromList] | None = Field(None, min_length=1)
    """Linear layers that get an adapter: last parts of their names, or patterns such as
    `transformer_blocks.*.attn.to_q` or `blocks.[0-5].*`. Unset: the family's attention
    projections."""
    exclude: Annotated[tuple[str, ...], FromList] = ()
    """Linear layers among the targets that get none, written as in `targets`."""
    rank: int = Field(16, gt=0, le=2**14)
    factor: int | None = Field(None, gt=0, le=2**14)
    """For LoKr: size of the smaller factor of each weight, in rows and in columns, or the largest
    divisor below it. Unset: as near the square root as the sizes divide."""
    alpha: float | None = Field(None, gt=0, le=1e6)
    """The adapter's updates are scaled by alpha / rank; unset: alpha = rank. LoKr of two full
    matrices always has the scale 1."""
    rules: Annotated[tuple[AdapterRule, ...], FromList] = ()
    """Ranks and strengths of some of the layers."""
    init_from: FilePath | None = None
    """A safetensors file with a LoRA of this model to start from, with the key names of diffusers,
    peft, ComfyUI, DiffSynth, VideoX-Fun, LyCORIS, ai-toolkit or kohya's scripts; its rank may be
    lower than `rank`. LoHa and LoKr become LoRA, or LoKr stays LoKr with `kind = "lokr"`."""
    dtype: Literal["model", "fp32", "bf16"] = "model"
    """Data type of trained LoRA and module weights; `model`: the same as `model.dtype`."""
    modules: dict[SectionName, ModuleSection] = Field(default_factory=dict)
    """Modules of your own, by names of your choice, under which they are saved and exported. If
    several wrap the same block, the first is the outermost."""

    @model_validator(mode="after")
    def _trains_something(self) -> Self:
        if self.kind == "frozen" and not self.modules:
            raise ValueError(
                'trainable.kind = "frozen" without trainable.modules leaves nothing to train'
            )
        if self.targets is not None and self.base() != "lora":
            raise ValueError('trainable.targets needs trainable.kind = "lora", "dora" or "lokr"')
        if self.exclude and self.base() != "lora":
            raise ValueError('trainable.exclude needs trainable.kind = "lora", "dora" or "lokr"')
        if self.rules and self.base() != "lora":
            raise ValueError('trainable.rules needs trainable.kind = "lora", "dora" or "lokr"')
        if self.factor is not None and self.kind != "lokr":
            raise ValueError('trainable.factor needs trainable.kind = "lokr"')
        if self.init_from is not None and self.base() != "lora":
            raise ValueError('trainable.init_from needs trainable.kind = "lora", "dora" or "lokr"')
        return self

    def base(self) -> Literal["full", "lora", "frozen"]:
        """Return the kind of training: `lora` for every kind of adapter, `full` or `frozen`."""
        if self.kind == "dora" or self.kind == "lokr":
            return "lora"
        return self.kind or ("frozen" if self.modules else "full")


class CodecSection(Section):
    """The codec, which converts pixels to latents and back."""

    kind: Literal["pixels", "autoencoder"] = "pixels"
    """Kind of codec. `pixels` trains on pixels themselves; `autoencoder` on a frozen diffusers
    VAE's latents."""
    pretrained: str | None = None
    config: dict[str, Any] = Field(default_factory=dict)
    dtype: Literal["fp32", "bf16"] = "fp32"
    """Data type of the autoencoder's weights and arithmetic; bf16 is faster and rounds latents."""
    encode_tile: Annotated[int, Field(ge=0, le=2**16)] | Literal["auto"] = "auto"
    """Most pixels of a tile, in a row and in a column, when clips are encoded tile by tile; 0
    encodes them as a whole. `auto`: as a whole where the device has the memory for it, else in the
    largest tiles that fit, and the run keeps its choice. Latents are the same up to rounding."""


class PooledSection(Section):
    """A second text encoder, which gives one pooled vector per caption."""

    pretrained: str | None = None
    """A diffusers folder or repository id with the second text encoder. Unset: that of the first
    one."""
    config: dict[str, Any] = Field(default_factory=dict)
    # CLIP, FLUX's second encoder, has 77 position embeddings.
    max_tokens: int = Field(77, gt=0, le=2**16)
    quantize: Literal["none", "fp8", "int8", "nf4"] = "none"
    """Data type of the second encoder's linear layers, like `text.quantize`."""

    def num_tokens(self) -> int:
        return self.max_tokens


class TextSection(Section):
    """The text encoders, which convert captions to the transformer's conditioning."""

    kind: Literal["words", "transformers"] = "words"
    """Kind of text encoder. `words`: word ids, whose embeddings the model learns; `transformers`: a
    frozen encoder."""
    pretrained: str | None = None
    config: dict[str, Any] = Field(default_factory=dict)
    max_tokens: int | None = Field(None, gt=0, le=2**16)
    """Number of tokens to which captions are cut or padded. Unset: that of the pretrained model's
    training (512 for Wan and FLUX.1-dev, 256 for FLUX.1-schnell); 64 without `pretrained`."""
    dtype: Literal["fp32", "bf16"] | None = None
    """Data type of the encoders' weights and arithmetic. Unset: bf16 if `pretrained` is set, as
    released pipelines are usually run, else fp32."""
    quantize: Literal["none", "fp8", "int8", "nf4"] = "none"
    """Data type of a pretrained encoder's linear layers; they are computed in `dtype`."""
    pooled: PooledSection | None = None
    """FLUX's second encoder. With it, padding tokens are encoded like words, as in FLUX's
    pipelines."""

    @model_validator(mode="after")
    def _quantizes_pretrained(self) -> Self:
        for key, section in (("text", self), ("text.pooled", self.second_encoder())):
            if section is not None and section.quantize != "none" and section.pretrained is None:
                raise ValueError(
                    f'{key}.quantize = "{section.quantize}" keeps a pretrained encoder in fewer '
                    f"bits, and {key}.pretrained is unset: name one, or leave {key}.quantize out"
                )
        return self

    def num_tokens(self) -> int:
        if self.max_tokens is not None:
            return self.max_tokens
        # Reached without a family: `models.components.text_section` fills in the family's number.
        return 64 if self.pretrained is None else 512

    def second_encoder(self) -> PooledSection | None:
        """Return the section `pooled` of the second text encoder; None if it is unset.

        It gets the first encoder's `pretrained` if it sets none.
        """
        # A `config` describes an encoder that is made with random weights, so no release is loaded.
        if self.pooled is None or self.pooled.pretrained is not None or self.pooled.config:
            return self.pooled
        return self.pooled.model_copy(update={"pretrained": self.pretrained})

    def kept_in(self) -> Literal["fp32", "bf16"]:
        return self.dtype or ("fp32" if self.pretrained is None else "bf16")
