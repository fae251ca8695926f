"""What the conformance suite asks of each kind of model, and what releases are made of.

A `release_` module is imported by name: no order of a folder decides the order of rows.
"""

import json
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import transformers
from PIL import Image
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers
from torch import Tensor

WIDTH = 16  # of text encoders


@dataclass(frozen=True)
class Asked:
    """What a pipeline is asked for."""

    pipeline: Any
    prompt: str
    noise: Tensor  # [1, C, F, h, w], in the scale of the transformer
    frames: int
    height: int
    width: int
    guidance: float
    pictures: Mapping[str, Image.Image]
    sound: Tensor | None = None  # noise [1, L, D]


@dataclass(frozen=True)
class Row:
    """One kind of model: a row of the suite and of the table in docs/guides/families.md."""

    kind: str  # its name in the table
    family: str  # model.family
    make: Callable[[Path], None]  # writes a tiny release
    call: Callable[[Asked], dict[str, Any]]  # arguments of the pipeline's __call__
    bucket: tuple[int, int, int]  # frames, height and width in pixels
    unpack: Callable[[Asked, Tensor], Tensor] = lambda asked, latents: latents
    """The scheduler's latents as [1, C, F, h, w]."""
    unpack_sound: Callable[[Asked, Tensor], Tensor] = lambda asked, latents: latents
    """Those of the scheduler of its sound as [1, L, D]."""
    sound_scheduler: Callable[[Any], Any] | None = None  # of the pipeline; None: no sound
    sigma: Callable[[float], float] = lambda time: time / 1000  # of a time of the scheduler
    negates: bool = False  # the scheduler gets latents - noise
    further_sigmas: int = 0  # that the pipeline's number of steps counts
    pictures: tuple[str, ...] = ()  # names in data.conditioning; they are pictures
    task: str = "text"  # of the table
    keys: Mapping[str, Any] = field(default_factory=dict)  # of the recipe, by their sections
    solver: str = "euler"  # of the recipe, where the release's scheduler is another
    returns_latents: bool = False  # of the transformer's scale, which the scheduler's last are not
    guidance: float = 5.0  # of the pipeline's own call
    given_frames: int = 0  # latent frames that do not reach the pipeline's scheduler
    load: Callable[[Path], Any] = diffusers.DiffusionPipeline.from_pretrained  # its pipeline
    within: Callable[[], AbstractContextManager[Any]] = nullcontext  # entered for its tests
    refuses: Mapping[str, str] = field(default_factory=dict)
    """What of the suite it refuses, and what the message says: `context`, `nf4`, `comfyui`."""
    real: Mapping[str, Mapping[str, Any]] | None = None
    """The release's own sizes, by the folders of its parts, where they are known. What is left out
    of the transformer's is the default of its class; of the other parts' it is the tiny one's, of
    which a step of training sees nothing but channels and widths."""
    guidance_2: float | None = None  # of the low-noise expert; only with two transformers


def tokenizer(*, begins: bool = False) -> Any:
    """Subwords of a few captions; as CLIP's it begins captions too."""
    special = ["<pad>", "</s>", "<unk>", "<s>"]
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=90, special_tokens=special, unk_token="<unk>", show_progress=False
    )
    texts = [
        "a \u201cred\u201d  circle, moving &amp; it\u2019s up",
        "a 'red' circle moving up",
        "a blue square moving left",
        "a green triangle moves down & 'right' \"fast\"",
    ]
    tokenizer.train_from_iterator(texts, trainer)
    learnt = json.loads(tokenizer.to_str())["model"]["vocab"]
    pieces = sorted((piece, round(score, 6)) for piece, score in learnt[len(special) :])
    # The trainer's order is another in each process.
    vocabulary = [(each, 0.0) for each in special] + pieces
    tokenizer.model = models.Unigram(vocabulary, special.index("<unk>"), False)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>" if begins else "$A </s>", special_tokens=[("<s>", 3), ("</s>", 1)]
    )
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="</s>",
        unk_token="<unk>",
        bos_token="<s>",
        model_max_length=77 if begins else 512,
    )


def encoder_sizes(
    width: int = WIDTH, inner_width: int = 32, layers: int = 1, heads: int = 2
) -> dict[str, int]:
    """Sizes of an encoder by the names that most configurations of transformers have for them."""
    return {
        "hidden_size": width,
        "intermediate_size": inner_width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
    }


def t5(kind: str, vocabulary_size: int) -> Any:
    sizes = {"d_model": WIDTH, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2}
    settings = getattr(transformers, f"{kind}Config")(vocab_size=vocabulary_size, **sizes)
    return getattr(transformers, f"{kind}EncoderModel")(settings)


def write_edits(folder: Path, height: int, width: int, caption: str) -> None:
    """Four pictures of noise before and after an edit, with captions that may hold {number}."""
    random = np.random.default_rng(0)
    for name in ("before", "after"):
        (folder / name).mkdir()
        for number in range(4):
            pixels = random.integers(0, 256, (height, width, 3), np.uint8)
            Image.fromarray(pixels).save(folder / name / f"{number}.png")
            (folder / name / f"{number}.txt").write_text(caption.format(number=number))
