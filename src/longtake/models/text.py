"""Text encoders from captions to conditioning: models of transformers, or ids of whole words."""

import importlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from inspect import Parameter
from pathlib import Path
from typing import Any, Protocol

import torch
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers
from torch import Tensor, nn

from longtake import errors, fsio
from longtake.config import PooledSection, TextSection
from longtake.formatting import reason_of
from longtake.models import deferred_init, modular, numerics, pretrained, releases
from longtake.models.caption_tokens import clean
from longtake.models.quantized import quantize_linears
from longtake.models.streamed import StreamedBlocks, layer_lists
from longtake.models.text_contract import TextContract

NO_CAPTION = ""
"""The empty caption, for the unconditional pass of guidance; training uses it for dropped
captions."""

LENGTH_STEP = 32
"""Multiple of tokens to which captions are padded by a family that encodes by length."""

MAX_WORDS = 8192
"""Most words in a vocabulary that is made of a catalog's captions (the most frequent ones)."""

_ROOM_TO_ENCODE = 2**30
"""Bytes that a GPU must have beside the weights of text encoders, for what they compute."""

_PAD, _UNKNOWN, _START, _END = "[PAD]", "[UNK]", "<s>", "</s>"
_SPECIAL = (_PAD, _UNKNOWN, _END)  # in the order of their ids: padding is 0
# CLIP takes an end token of id 2 for "the highest id", as its first release was configured.
_SPECIAL_POOLED = (_PAD, _UNKNOWN, _START, _END)


class TextEncoder(Protocol):
    """Interface of text encoders, which encode captions, `NO_CAPTION` among them."""

    vocabulary_size: int
    max_tokens: int
    """Number of tokens T to which captions are cut or padded for the encoder."""

    @property
    def embed_dim(self) -> int | None:
        """Return the width of `prompt_embeds`; None if the transformer embeds token ids itself."""

    @property
    def pooled_dim(self) -> int | None:
        """Return the width of `pooled_prompt_embeds`; None without a second text encoder."""

    def encode(
        self, captions: Sequence[str], pictures: Mapping[str, Tensor] | None = None
    ) -> dict[str, Tensor]:
        """Encode captions to named tensors, each [B, ...], for the family's model.

        Args:
            captions: B of them.
            pictures: [B, 3, 1, H, W] uint8 by their names in `data.conditioning`, for a family that
                encodes them together with the captions.
        """

    def outline(self, pictures: Sequence[tuple[int, int]] = ()) -> dict[str, Tensor]:
        """Outline what `encode` returns for one caption with pictures of sizes (height, width).

        It has shapes on the meta device, and no values.
        """

    def run_longest(self, pictures: Sequence[tuple[int, int]] = ()) -> None:
        """Run the text encoders for a caption of the greatest length, on fake tensors."""

    def unknown_words(self, caption: str) -> list[str]:
        """List the words of a caption that have no token; empty if tokens are pieces of words."""

    def modules(self) -> list[nn.Module]:
        """Return the frozen modules of the text encoders; empty if the transformer embeds ids."""

    def pipeline_parts(self) -> dict[str, Any]:
        """Return encoders, tokenizers and processors by their folders in a diffusers pipeline."""

    def to(self, device: torch.device, *, by_layer: bool = False) -> None:
        """Move the text encoders to a device.

        With `by_layer` the weights of their layers stay in host memory from then on, and are copied
        to the device one layer ahead: less memory, the same embeddings, and slower.
        """

    def save(self, folder: Path) -> None:
        """Save encoders and tokenizers that are not pretrained to a folder."""


class WordIds:
    """Text encoder that gives ids of whole words: `token_ids` [B, T] int64, padded by 0."""

    embed_dim = None
    pooled_dim = None

    def __init__(
        self, tokenizer: Tokenizer | None, max_tokens: int, vocabulary_size: int = 0
    ) -> None:
        self._tokenizer = tokenizer
        self.max_tokens = max_tokens
        self._device = torch.device("cpu")
        self.vocabulary_size: int = tokenizer.get_vocab_size() if tokenizer else vocabulary_size

    def encode(
        self, captions: Sequence[str], pictures: Mapping[str, Tensor] | None = None
    ) -> dict[str, Tensor]:
        assert self._tokenizer is not None, "an outline cannot encode"
        ids = torch.zeros(len(captions), self.max_tokens, dtype=torch.int64)
        for row, encoded in zip(ids, self._tokenizer.encode_batch(list(captions)), strict=True):
            ids_of_caption = encoded.ids[: self.max_tokens]
            row[: len(ids_of_caption)] = torch.tensor(ids_of_caption, dtype=torch.int64)
        return {"token_ids": _moved(ids, self._device)}

    def outline(self, pictures: Sequence[tuple[int, int]] = ()) -> dict[str, Tensor]:
        return {"token_ids": torch.empty(1, self.max_tokens, dtype=torch.int64, device="meta")}

    def run_longest(self, pictures: Sequence[tuple[int, int]] = ()) -> None:
        pass

    def unknown_words(self, caption: str) -> list[str]:
        return _unknown_words(self._tokenizer, caption) if self._tokenizer else []

    def modules(self) -> list[nn.Module]:
        return []

    def pipeline_parts(self) -> dict[str, Any]:
        return {}

    def to(self, device: torch.device, *, by_layer: bool = False) -> None:
        self._device = device

    def save(self, folder: Path) -> None:
        assert self._tokenizer is not None, "an outline has no words to save"
        (folder / "tokenizer").mkdir(parents=True, exist_ok=True)
        # The tokenizer's own `save` raises a bare Exception when the disk is full.
        fsio.write_text(
            folder / "tokenizer" / "tokenizer.json", self._tokenizer.to_str(pretty=True)
        )


class TextFamily(Protocol):
    """Interface of the part of a `longtake.models.base.Family` that encodes text."""

    @property
    def frozen(self) -> pretrained.FrozenParts: ...

    @property
    def text(self) -> TextContract: ...

    def pipeline_of(self, parts: Mapping[str, Any]) -> str:
        """Return the name of the diffusers pipeline class for given encoders and tokenizers."""


@dataclass(frozen=True)
class _EncoderSpec:
    """One text encoder of a model, as the recipe and the family describe it."""

    key: str  # recipe key of its section
    section: TextSection | PooledSection
    part: pretrained.PipelinePart  # the family's
    special: tuple[str, ...]  # tokens of a vocabulary of words, in the order of their ids
    dtype: torch.dtype
    is_further: bool = False  # one of `FrozenParts.further`, which only the family calls


class _Encoder:
    """A frozen encoder of transformers with its tokenizer; an outline has no tokenizer."""

    def __init__(self, module: nn.Module, tokenizer: Any, spec: _EncoderSpec) -> None:
        self.module = module.eval().requires_grad_(False)
        self.tokenizer = tokenizer
        self.part = spec.part
        self.is_further = spec.is_further
        self.max_tokens = spec.section.num_tokens()
        self._is_pretrained = spec.section.pretrained is not None
        # It has neither a limit of tokens nor a vocabulary that a recipe could set.
        if spec.is_further:
            return
        # After `requires_grad_(False)` above: only frozen layers are quantised.
        if spec.section.quantize != "none":
            quantize_linears(module, spec.section.quantize, f"{spec.key}.quantize")
        config: Any = module.config
        config = config.get_text_config()  # for models that also read pictures
        longest = getattr(config, "max_position_embeddings", self.max_tokens)
        if self.max_tokens > longest:
            raise errors.RecipeError(
                f"{spec.key}.max_tokens is {self.max_tokens}, but {type(module).__name__} reads "
                f"{longest} at most. Set it to {longest} or less."
            )
        self.width: int = config.hidden_size
        self.vocabulary_size: int = config.vocab_size if tokenizer is None else len(tokenizer)

    def unknown_words(self, caption: str) -> list[str]:
        tokenizer = getattr(self.tokenizer, "backend_tokenizer", None)
        if tokenizer is None or not isinstance(tokenizer.model, models.WordLevel):
            return []
        return _unknown_words(tokenizer, caption)

    def save(self, folder: Path) -> None:
        """Save the encoder and its tokenizer to a pipeline's folder, unless pretrained."""
        if not self._is_pretrained:
            assert self.tokenizer is not None, "an outline has no weights to save"
            with pretrained.quiet(self.module):
                self.module.save_pretrained(folder / self.part.folder)  # type: ignore[operator]
                self.tokenizer.save_pretrained(folder / self.part.tokenizer)


class TransformersText:
    """Text encoder of frozen transformers models, called through the family's pipeline.

    The tensors are kept in fp32. If the family encodes by length, captions of similar length are
    encoded together, padded to a multiple of `LENGTH_STEP` tokens; zeros fill the rest.
    """

    def __init__(
        self,
        family: TextFamily,
        encoders: Sequence[_Encoder],
        processors: Mapping[str, Any] | None = None,
    ) -> None:
        self._family, self._encoders = family, encoders
        self._processors = dict(processors or {})  # by their folders
        self._streamed: list[StreamedBlocks] = []
        first, *others = (each for each in encoders if not each.is_further)
        self.encoder, self.tokenizer = first.module, first.tokenizer
        self.max_tokens, self.embed_dim = first.max_tokens, first.width
        self.pooled_dim: int | None = others[0].width if others else None
        self.vocabulary_size = first.vocabulary_size

    @cached_property
    def pipeline(self) -> Any:
        """The family's diffusers pipeline with the text encoders and without a transformer."""
        import diffusers
        import transformers

        assert self.tokenizer is not None, "an outline cannot encode"
        parts = self._family.text.prepare(self.pipeline_parts())
        with (
            pretrained.quiet(diffusers.DiffusionPipeline),
            pretrained.quiet(transformers.CLIPTextModel),
        ):
            pipeline = getattr(diffusers, self._family.pipeline_of(parts))
            if modular.is_modular(pipeline):
                return modular.text_pipeline(pipeline, parts)
            arguments = pretrained.defaults(pipeline.__init__).items()
            # Components that the constructor requires but encoding does not, such as the
            # transformer.
            absent = {name: None for name, default in arguments if default is Parameter.empty}
            return pipeline(**{**absent, **parts})

    @torch.no_grad()
    def encode(
        self, captions: Sequence[str], pictures: Mapping[str, Tensor] | None = None
    ) -> dict[str, Tensor]:
        encode, pipeline = self._family.text.encode, self.pipeline
        with pretrained.quiet(pipeline), pretrained.quiet(self.encoder):
            if not self._family.text.by_length:
                encoded = encode(pipeline, list(captions), self.max_tokens, pictures or {})
                return {n: t.float() if t.is_floating_point() else t for n, t in encoded.items()}
            encoded = {}
            for length, rows in self._by_length(captions).items():
                together = encode(pipeline, [captions[row] for row in rows], length, {})
                for name, embeds in together.items():  # [n, length, D]
                    size = len(captions), self.max_tokens, embeds.shape[2]
                    whole = encoded.setdefault(name, torch.zeros(size, device=embeds.device))
                    for row, own in zip(rows, embeds, strict=True):  # a list would be copied
                        whole[row, :length] = own
        return encoded

    def _by_length(self, captions: Sequence[str]) -> dict[int, list[int]]:
        """Group captions (by row number) that are encoded with the same number of tokens."""
        rows_by_length = dict[int, list[int]]()
        # As Wan's pipeline cleans them, so that the counts are those of the tokens that it makes.
        cleaned = [clean(caption) for caption in captions]
        tokens = self.tokenizer(cleaned, truncation=True, max_length=self.max_tokens).input_ids
        for row, ids in enumerate(tokens):
            # Rounded up, so that captions of similar length share a batch.
            length = max(1, -(-len(ids) // LENGTH_STEP)) * LENGTH_STEP
            rows_by_length.setdefault(min(self.max_tokens, length), []).append(row)
        return rows_by_length

    def outline(self, pictures: Sequence[tuple[int, int]] = ()) -> dict[str, Tensor]:
        length = self.max_tokens + self._picture_tokens(pictures)
        return self._family.text.outline(self._modules(), length)

    def run_longest(self, pictures: Sequence[tuple[int, int]] = ()) -> None:
        more = self._picture_tokens(pictures)
        lengths = {e.part.folder: e.max_tokens + more for e in self._encoders if not e.is_further}
        self._family.text.run(self._modules(), lengths)

    def _picture_tokens(self, pictures: Sequence[tuple[int, int]]) -> int:
        processors = self._processors.values()
        return sum(self._family.text.picture_tokens(each, pictures) for each in processors)

    def unknown_words(self, caption: str) -> list[str]:
        return self._encoders[0].unknown_words(caption)

    def modules(self) -> list[nn.Module]:
        return list(self._modules().values())

    def _modules(self) -> dict[str, nn.Module]:
        return {each.part.folder: each.module for each in self._encoders}

    def to(self, device: torch.device, *, by_layer: bool = False) -> None:
        if by_layer and not self._streamed:
            # Not page-locked: a computer with a small GPU may have less of that than the encoder
            # takes, and each layer serves many captions.
            self._streamed = [
                StreamedBlocks(layers, device, pins=False)
                for module in self.modules()
                for layers in layer_lists(module)
            ]
        if device.type == "cpu":
            for layers in self._streamed:
                layers.free_buffers()
        for module in self.modules():
            module.to(device)

    def save(self, folder: Path) -> None:
        for each in self._encoders:
            each.save(folder)

    def pipeline_parts(self) -> dict[str, Any]:
        tokenizers = {each.part.tokenizer: each.tokenizer for each in self._encoders}
        named = {name: each for name, each in tokenizers.items() if name}
        return self._modules() | named | self._processors


def encodes_by_layer(weight_bytes: int, free_bytes: int) -> bool:
    """Return True if text encoders with these weights are to run layer by layer on a GPU."""
    return weight_bytes + _ROOM_TO_ENCODE > free_bytes


def place_text(text: TextEncoder, device: torch.device) -> None:
    """Move text encoders to a device; to a GPU that has no room for them whole, layer by layer."""
    held = (each for m in text.modules() for each in (*m.parameters(), *m.buffers()))
    coming = sum(each.nbytes for each in held if each.device.type != device.type)
    by_layer = False
    if device.type == "cuda" and coming:
        free, _ = torch.cuda.mem_get_info(device)
        by_layer = encodes_by_layer(coming, free)
    text.to(device, by_layer=by_layer)


def _moved(ids: Tensor, device: torch.device) -> Tensor:
    """Move token ids to a device, without waiting for a GPU."""
    if device.type != "cuda":
        return ids.to(device)
    return ids.pin_memory().to(device, non_blocking=True)


def build_text(
    section: TextSection, family: TextFamily, captions: Iterable[str], made: Path | None
) -> TextEncoder:
    """Build the recipe's text encoder on the CPU.

    Args:
        section: the recipe's text section.
        family: family of the model, which names the classes of its encoders.
        captions: the catalog's captions; without a saved vocabulary one is made of their words.
        made: the folder of frozen parts that the run made when it began; None when it begins.

    Raises:
        DataError: a vocabulary is needed, but the captions hold no words.
        ModelError: encoder or tokenizer cannot be loaded, or is of a class that the family cannot
            use.
        RecipeError: the class does not take the recipe's arguments.
    """
    if section.kind == "words":
        _refuse_encoders(section)
        saved = None if made is None else made / "tokenizer" / "tokenizer.json"
        if saved is None or not saved.exists():
            return WordIds(_word_tokenizer(captions, _SPECIAL), section.num_tokens())
        try:
            tokenizer = Tokenizer.from_str(fsio.read_regular(saved).decode())
        except Exception as error:  # tokenizers raises nothing more specific
            raise errors.ModelError(
                f"{saved} cannot be read: {reason_of(error)}. Restore it from another checkpoint "
                "of the run."
            ) from error
        return WordIds(tokenizer, section.num_tokens())
    if section.pooled is not None:
        captions = list(captions)  # read twice
    specs = _specs(section, family.frozen)
    encoders = [_build_encoder(spec, captions, made) for spec in specs]
    return TransformersText(family, encoders, _processors(section, family))


def outline_text(
    section: TextSection, family: TextFamily, captions: Sequence[str] = ()
) -> TextEncoder:
    """Outline the recipe's text encoder on the meta device: it has shapes, but cannot encode.

    Without `captions`, a vocabulary of their words is assumed to have its largest size.
    """
    if section.kind == "words":
        _refuse_encoders(section)
        if captions:
            return WordIds(_word_tokenizer(captions, _SPECIAL), section.num_tokens())
        return WordIds(None, section.num_tokens(), vocabulary_size=MAX_WORDS + len(_SPECIAL))
    encoders = []
    for spec in _specs(section, family.frozen):
        where = spec.section.pretrained
        if where is not None:
            part = releases.find_part(where, spec.part)
            module = deferred_init.on_meta(_encoder_class(part), where, part.folder)
        else:
            with torch.device("meta"):
                module = _random(spec, MAX_WORDS + len(spec.special))
        # A plan counts the outline's bytes, so it has the dtype that the real encoder is kept in.
        numerics.keep_weights_in(module, spec.dtype)
        encoders.append(_Encoder(module, None, spec))

    return TransformersText(family, encoders, _processors(section, family))


def _refuse_encoders(section: TextSection) -> None:
    given = {"pretrained": section.pretrained, "config": section.config, "pooled": section.pooled}
    pretrained.refuse_unused("text", given, 'text.kind is "words"')


def _specs(section: TextSection, parts: pretrained.FrozenParts) -> list[_EncoderSpec]:
    dtype, pooled = numerics.DTYPES[section.kept_in()], section.second_encoder()
    specs = [_EncoderSpec("text", section, parts.text, _SPECIAL, dtype)]
    if pooled is not None:
        specs += [_EncoderSpec("text.pooled", pooled, parts.pooled, _SPECIAL_POOLED, dtype)]
    for spec in specs:
        if spec.section.pretrained is not None:
            given = {"config": spec.section.config}
            pretrained.refuse_unused(spec.key, given, f"{spec.key}.pretrained brings its own")
    # Template tokens are cut off by their number, which holds for the release's tokenizer alone.
    if section.pretrained is None and not parts.has_random_text:
        raise errors.RecipeError(
            f"text.pretrained is unset, but a {parts.text.class_name} with random weights is not "
            "made here: its captions are framed by a template of its own tokenizer. Name the "
            "release's folder or repository in text.pretrained."
        )
    if section.pretrained is not None:
        for part in parts.further:
            if releases.has_part(section.pretrained, part):
                # Also a ByT5, which reads captions: its family calls it, with a length of its own.
                specs += [_EncoderSpec("text", section, part, (), dtype, is_further=True)]
    return specs


def _build_encoder(spec: _EncoderSpec, captions: Iterable[str], made: Path | None) -> _Encoder:
    """Build an encoder: pretrained, saved earlier by the run, or random over its own words."""
    part, where = spec.part, spec.section.pretrained
    if where is not None:
        return _Encoder(*_load_encoder(where, releases.find_part(where, part), spec.dtype), spec)
    if made is not None and (made / part.folder).is_dir():
        return _Encoder(*_load_encoder(str(made), part, spec.dtype), spec)
    words = _word_tokenizer(captions, spec.special)
    tokenizer = _transformers_tokenizer(words, spec)
    module = _random(spec, len(tokenizer))
    numerics.keep_weights_in(module, spec.dtype)
    return _Encoder(module, tokenizer, spec)


def _load_encoder(
    where: str, part: pretrained.PipelinePart, dtype: torch.dtype
) -> tuple[nn.Module, Any]:
    module = pretrained.load_pretrained(_encoder_class(part), where, part.folder, dtype=dtype)
    if not part.tokenizer:
        return module, None
    with pretrained.quiet(_encoder_class(part)):  # some warn of optional libraries
        tokenizer_class = getattr(importlib.import_module("transformers"), part.tokenizer_class)
    return module, pretrained.load_pretrained(tokenizer_class, where, part.tokenizer)


def _processors(section: TextSection, family: TextFamily) -> dict[str, Any]:
    """Load the processor of pictures encoded with captions, by its folder; {} without one."""
    part, where = family.frozen.processor, section.pretrained
    if part is None or where is None:
        return {}
    processor = releases.find_part(where, part)
    return {part.folder: family.text.load_processor(where, processor.folder)}


def _encoder_class(part: pretrained.PipelinePart) -> Any:
    return getattr(importlib.import_module(part.module), part.class_name)


def _random(spec: _EncoderSpec, vocabulary_size: int) -> nn.Module:
    """Build a text encoder with random weights over a vocabulary of the given size."""
    key, special = f"{spec.key}.config", spec.special
    fitted = {
        "vocab_size": vocabulary_size,
        "pad_token_id": special.index(_PAD),
        "eos_token_id": special.index(_END),
    }
    # Only CLIP has a start token here. It also learns a position for each token; T5's positions are
    # relative, and its configuration has no such key.
    if _START in special:
        fitted |= {"bos_token_id": special.index(_START)}
        fitted |= {"max_position_embeddings": spec.section.num_tokens()}
    encoder_class = _encoder_class(spec.part)
    config = pretrained.construct(key, encoder_class.config_class, fitted | spec.section.config)
    try:
        module: nn.Module = encoder_class(config)
    except Exception as error:  # wrong sizes fail inside constructors in any way
        raise errors.RecipeError(f"{key} does not fit {spec.part.class_name}: {error}.") from error
    return module


def _transformers_tokenizer(words: Tokenizer, spec: _EncoderSpec) -> Any:
    """Wrap a tokenizer of words for transformers, with the encoder's start and end tokens."""
    from transformers import PreTrainedTokenizerFast

    framing = [token for token in spec.special if token in (_START, _END)]
    # CLIP's vector of a caption is its hidden state at the end token, so every caption needs one.
    words.post_processor = processors.TemplateProcessing(
        single=" ".join([*framing[:-1], "$A", _END]),
        special_tokens=[(token, words.token_to_id(token)) for token in framing],
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=words,
        pad_token=_PAD,
        unk_token=_UNKNOWN,
        eos_token=_END,
        model_max_length=spec.section.num_tokens(),
        **({"bos_token": _START} if _START in framing else {}),
    )


def _word_tokenizer(captions: Iterable[str], special: Sequence[str]) -> Tokenizer:
    """Make a tokenizer of the most frequent words in captions."""
    tokenizer = Tokenizer(models.WordLevel(unk_token=_UNKNOWN))
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    trainer = trainers.WordLevelTrainer(
        vocab_size=MAX_WORDS + len(special), special_tokens=list(special), show_progress=False
    )
    tokenizer.train_from_iterator(captions, trainer)
    if tokenizer.get_vocab_size() <= len(special):
        raise errors.DataError(
            "The catalog's captions hold no words to make a vocabulary of. Give the clips captions "
            "and index them again, or name a pretrained text encoder in text.pretrained."
        )
    return tokenizer


def _unknown_words(tokenizer: Tokenizer, caption: str) -> list[str]:
    """Return the words of a caption that a tokenizer of whole words does not know."""
    unknown = tokenizer.token_to_id(_UNKNOWN)
    encoded = tokenizer.encode(caption, add_special_tokens=False)
    return [
        caption[start:end]
        for token, (start, end) in zip(encoded.ids, encoded.offsets, strict=True)
        if token == unknown
    ]
