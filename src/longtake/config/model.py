"""Keys of the model and its parts: `model`, `trainable`, `codec` and `text`."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from longtake.config.values import MAX_GUIDANCE, FilePath, FromList, Section, SectionName


def _with_counts_that_end(config: dict[str, Any]) -> dict[str, Any]:
    """A model of 2^63 layers would be built until memory ends."""
    for name, value in config.items():
        if name.startswith("num_") and isinstance(value, int) and value > _MOST_OF_A_MODEL:
            raise ValueError(
                f"model.config.{name} is {value:.3e}; expected at most {_MOST_OF_A_MODEL}"
            )
    return config


_MOST_OF_A_MODEL = 4096
Quantization = Literal["fp8", "int8", "nf4"]
"""Numbers of fewer bits that a frozen linear layer's weight can be kept in."""


Expert = Literal["high", "low"]
"""Which noise levels one of a release's two transformers serves."""

EXPERT_FOLDERS: Mapping[Expert, str] = {"high": "transformer", "low": "transformer_2"}
"""Their folders in a release."""


class ModelSection(Section):
    """The transformer."""

    family: str
    """`wan`, `ltx2`, `hunyuan_video15`, `flux`, `flux_kontext`, `flux2`, `qwen_image`,
    `qwen_image_edit`, `qwen_image_edit_plus`, `z_image`, `tubelet`, or your own Family, as
    `package.module:Class`."""
    pretrained: str | None = None
    """A diffusers folder or repository id to start from; without it, random weights."""
    transformer_class: str | None = Field(None, pattern=r"^[\w.]+:\w+$")
    """Instead of the family's transformer of diffusers a class of your own with its name, such as
    an edited copy of its file: "my_project.wan:WanTransformer3DModel", found from where you are."""
    subfolder: str = "transformer"
    expert: Expert | None = None
    """Of a release with two transformers (Wan 2.2 A14B) the one that is trained: `high`, which
    serves sigmas from the release's boundary_ratio on, or `low`, which serves those below it. Only
    its sigmas are drawn. The other one comes from the release, or from `sampling.other_expert`."""
    config: Annotated[dict[str, Any], AfterValidator(_with_counts_that_end)] = Field(
        default_factory=dict
    )
    """Arguments of the family's model class; what is left out is the class's default."""
    dtype: Literal["fp32", "bf16"] = "fp32"
    """What weights are kept in. With fp32 the arithmetic's precision is autocast's business; with
    bf16 all is computed in bf16, but for what diffusers keeps in fp32 in such a model (a few parts
    of Wan), and the optimizer keeps fp32 copies of what trains."""
    guidance: float = Field(1.0, gt=0, le=MAX_GUIDANCE)
    """Guidance scale given to a guidance-distilled model (FLUX.1-dev, Kontext) in training. At 1.0
    the model's output is the unguided velocity, which the loss compares with. At the scale of
    sampling (2.5 to 3.5) the loss would train the guided velocity to be the unguided one, and
    undo the distillation."""
    audio: Literal["off"] | None = None
    """Of a model that makes videos with audio (`ltx2`), which needs it: `off` trains and samples
    the video alone, with audio and video isolated from each other; the audio's weights are frozen,
    and exported as they were. Of others unset."""
    quantize: Literal["none", "fp8", "int8", "nf4", "auto"] = "none"
    """What the frozen linear layers of the blocks are kept in, where a LoRA or a module is trained:
    `fp8` and `int8` take a byte per weight, `nf4` about half a byte. They are computed as before,
    from rounded weights. `auto`: the plan chooses for each block, and the run keeps its choice."""
    stream: Literal["none", "auto", "all"] = "auto"
    """Which blocks' frozen weights stay in the computer's memory and are copied to the GPU one
    block ahead; results are the same. `auto`: those that the plan has no room for."""

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

    def folder(self) -> str:
        """The transformer's, in the release."""
        return self.subfolder if self.expert is None else EXPERT_FOLDERS[self.expert]


class ModuleSection(Section):
    """A module of your own that is trained beside the model."""

    module: str = Field(pattern=r"^[\w.]+:\w+$")
    """Its class, such as "my_project.adapter:PoseAdapter", found from where you are. See
    docs/guides/modules.md."""
    blocks: Annotated[tuple[str, ...], FromList] = ("*",)
    """Which blocks run within it: names or patterns such as `single_transformer_blocks.*`."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Arguments of its class."""


class TrainableSection(Section):
    """What of the model is trained."""

    kind: Literal["full", "lora", "dora", "lokr", "frozen"] | None = None
    """`full`: all weights; `lora`: low-rank updates of the targets; `dora`: LoRA, and a trained
    length of each row; `lokr`: updates that are Kronecker products; `frozen`: only the added
    modules. Unset: frozen where there are modules, else full."""
    targets: Annotated[tuple[str, ...], FromList] | None = Field(None, min_length=1)
    """Names of linear layers that get LoRA: their last parts, or patterns such as
    `transformer_blocks.*.attn.to_q` or `blocks.[0-5].*`. Unset: the family's attention
    projections."""
    rank: int = Field(16, gt=0, le=2**14)
    alpha: float | None = Field(None, gt=0, le=1e6)
    """LoRA's scale is alpha / rank; unset: alpha = rank. LoKr of two full matrices has the scale
    1."""
    init_from: FilePath | None = None
    """A safetensors file with LoRA of this model to begin with, with the names of diffusers, peft,
    ComfyUI, DiffSynth, VideoX-Fun, LyCORIS or kohya's scripts; its rank may be lower than
    `rank`."""
    dtype: Literal["model", "fp32", "bf16"] = "model"
    """What trained LoRA and module weights are kept in; `model`: what the model is in."""
    modules: dict[SectionName, ModuleSection] = Field(default_factory=dict)
    """Modules of your own, by names that you choose: they are saved and exported by these. Of
    several the first is the outermost."""

    @model_validator(mode="after")
    def _trains_something(self) -> Self:
        if self.kind == "frozen" and not self.modules:
            raise ValueError(
                'trainable.kind = "frozen" without trainable.modules leaves nothing to train'
            )
        if self.targets is not None and self.base() != "lora":
            raise ValueError('trainable.targets needs trainable.kind = "lora", "dora" or "lokr"')
        if self.init_from is not None and self.kind not in ("lora", "dora"):
            raise ValueError('trainable.init_from needs trainable.kind = "lora" or "dora"')
        return self

    def base(self) -> Literal["full", "lora", "frozen"]:
        """What is trained of the model; `lora` for every kind of adapter."""
        if self.kind == "dora" or self.kind == "lokr":
            return "lora"
        return self.kind or ("frozen" if self.modules else "full")


class CodecSection(Section):
    """From pixels to latents and back."""

    kind: Literal["pixels", "autoencoder"] = "pixels"
    """`pixels` trains on pixels themselves; `autoencoder` on a frozen diffusers VAE's latents."""
    pretrained: str | None = None
    config: dict[str, Any] = Field(default_factory=dict)
    dtype: Literal["fp32", "bf16"] = "fp32"
    """What the autoencoder is kept and computed in; bf16 is faster and rounds latents."""


class PooledSection(Section):
    """A second text encoder, which gives one vector for a whole caption."""

    pretrained: str | None = None
    """Unset: where the first encoder is from."""
    config: dict[str, Any] = Field(default_factory=dict)
    max_tokens: int = Field(77, gt=0, le=2**16)
    quantize: Literal["none", "fp8", "int8", "nf4"] = "none"
    """Like `text.quantize`, of this encoder."""

    def num_tokens(self) -> int:
        return self.max_tokens


class TextSection(Section):
    """From captions to what the transformer is conditioned on."""

    kind: Literal["words", "transformers"] = "words"
    """`words`: ids, embedded by a model that learns them; `transformers`: a frozen encoder."""
    pretrained: str | None = None
    config: dict[str, Any] = Field(default_factory=dict)
    max_tokens: int | None = Field(None, gt=0, le=2**16)
    """Tokens that captions are cut or padded to. Unset: what the pretrained model was trained with
    (512 for Wan and FLUX.1-dev, 256 for FLUX.1-schnell); 64 without `pretrained`."""
    dtype: Literal["fp32", "bf16"] | None = None
    """What the encoders are kept and computed in; unset: bf16 where `pretrained` is set, as people
    run released pipelines, else fp32."""
    quantize: Literal["none", "fp8", "int8", "nf4"] = "none"
    """What the linear layers of a pretrained encoder are kept in; computed in `dtype`."""
    pooled: PooledSection | None = None
    """FLUX's second encoder. With it padding is encoded like words, as FLUX's pipelines do it."""

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
        return 64 if self.pretrained is None else 512

    def second_encoder(self) -> PooledSection | None:
        """`pooled`, from where the first encoder is unless it says otherwise."""
        if self.pooled is None or self.pooled.pretrained is not None or self.pooled.config:
            return self.pooled
        return self.pooled.model_copy(update={"pretrained": self.pretrained})

    def kept_in(self) -> Literal["fp32", "bf16"]:
        return self.dtype or ("fp32" if self.pretrained is None else "bf16")
