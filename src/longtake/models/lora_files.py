"""Reads LoRA files with the names of diffusers, peft, ComfyUI, kohya's scripts and others.

Such files come from other tools: each setting that affects the strength is applied, or refused by
name.
"""

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from longtake import fsio
from longtake.config import EXPERT_FOLDERS, Expert
from longtake.errors import ModelError, RecipeError, RecordError
from longtake.formatting import first_line, printable
from longtake.models import lora_kinds
from longtake.models.base import Family
from longtake.models.lora_kinds import StoredLokr, StoredLora, Update
from longtake.models.trainable import ADAPTER, adapter_layers

_SUFFIXES = {
    ".lora_A.weight": "down",
    ".lora_B.weight": "up",
    ".lora_A.default.weight": "down",  # DiffSynth
    ".lora_B.default.weight": "up",
    ".lora_down.weight": "down",
    ".lora_up.weight": "up",
    ".alpha": "alpha",
    ".lora_magnitude_vector": "magnitude",
    ".lora_magnitude_vector.weight": "magnitude",
    ".dora_scale": "magnitude",
    **{f".{part}": part for part in lora_kinds.LYCORIS_PARTS},
}
_OF_TEXT_ENCODERS = ("lora_te", "text_encoder")
_PREFIXES = ("transformer.", "base_model.model.", "")
_FLAT_PREFIXES = ("lora_unet_", "lora_unet__", "lycoris_")  # kohya, VideoX-Fun, LyCORIS
_MAX_NAMED, _MAX_NAME_LETTERS = 3, 120
_MAX_CONVERTED = 20_000  # tensors; diffusers' converters take long for more
_MAX_ALPHA = 1e6  # the same limit as that of trainable.alpha

COMFYUI_DORA = {"longtake.dora_scale": "comfyui"}
"""Header entry of LoRA files whose `dora_scale` is made for ComfyUI, which divides by the norms of
W."""

# Settings of peft's LoraConfig that do not change the output of a trained LoRA. Of all others,
# only the fields of `_Settings` are applied; any other that is set is refused.
_WITHOUT_EFFECT = {
    "auto_mapping",
    "base_model_name_or_path",
    "decompose_both",
    "decompose_factor",
    "ensure_weight_tying",
    "eva_config",
    "exclude_modules",
    "inference_mode",
    "init_weights",
    "layers_pattern",
    "layers_to_transform",
    "lora_dropout",
    "megatron_core",
    "module_dropout",
    "peft_version",
    "qalora_group_size",
    "rank_dropout",
    "rank_dropout_scale",
    "revision",
    "target_modules",
    "task_type",
    "use_effective_conv2d",
}
_EXPECTED: Mapping[str, tuple[object, ...]] = {
    "bias": ("none",),
    # Other initialisations, such as PiSSA, also change the frozen weights.
    "init_lora_weights": (True, "gaussian", "eva", "orthogonal"),
}
_LAYER_NAME = re.compile(r"[\w.-]+")
_EXPERT = re.compile(r"(?:diffusion_model|transformer)\.transformer_([12])\.")
_EXPERT_PARTS = {"1": "transformer.", "2": "transformer_2."}


@dataclass(frozen=True)
class _Settings:
    """Settings in a LoRA file that determine its strength, under peft's names."""

    lora_alpha: Any = None  # None: the rank, that is a scale of 1
    r: Any = None
    alpha_pattern: Mapping[str, Any] | None = None  # by names that layers' names end with
    rank_pattern: Mapping[str, Any] | None = None
    use_rslora: bool = False
    use_dora: bool = False


def read_lora(
    path: Path, model: nn.Module, family: Family, expert: Expert | None = None
) -> dict[str, StoredLora | StoredLokr]:
    """Read the LoRA of a file for the layers of a model, by the layers' names.

    For a model with LoRA, LoHa and LoKr become LoRA; one with LoKr gets LoKr. The model may be on
    the meta device. From a file for both experts of a release, only the half of `expert` is read.

    Raises:
        ModelError: the file, or adapter_config.json beside it, cannot be read.
        RecipeError: it has no LoRA of this model, or one of a higher rank than the model's; or what
            it says of its strength is not understood.
    """
    _, lora = _read_layers(path, dict(adapter_layers(model)), family, expert)
    return lora


def read_adapter(
    path: Path, layers: Mapping[str, nn.Linear], family: Family, expert: Expert | None, key: str
) -> dict[str, StoredLora]:
    """Read the LoRA of a file, of any rank, for linear layers by their names (see `read_lora`).

    `key` is the recipe's key that names the file.
    """
    file, lora = _read_layers(path, layers, family, expert, key)
    complete = {name: each for name, each in lora.items() if isinstance(each, StoredLora)}
    if any(each.magnitude is not None for each in complete.values()):
        raise file.refusal(" holds DoRA, which a frozen adapter cannot be.")
    return complete


def _read_layers(
    path: Path,
    layers: Mapping[str, Any],
    family: Family,
    expert: Expert | None,
    key: str = "trainable.init_from",
) -> tuple["_LoraFile", dict[str, StoredLora | StoredLokr]]:
    file = _LoraFile(path, expert, key)
    names = dict(_names_of_layers(layers, family))
    by_layer, unknown, twice = _sort_by_layer(file.weights, names)
    has_dora = any(name.endswith(".dora_scale") for name in file.weights)
    if unknown and len(file.weights) <= _MAX_CONVERTED and not has_dora:
        # diffusers' converters know more names; their result is taken only if it fits better. They
        # leave DoRA's magnitudes out.
        import diffusers

        pipeline: Any = getattr(diffusers, getattr(family, "pipeline_class", ""), None)
        weights: Mapping[str, Tensor] | None = None
        with suppress(Exception):  # a file of another model; what they raise depends on the file
            weights = pipeline.lora_state_dict(dict(file.weights))
        if weights is not None:
            converted = _sort_by_layer(weights, names)
            if len(converted[1]) < len(unknown):
                by_layer, unknown, twice = converted
    if unknown:
        fitting = sum(map(len, by_layer.values()))
        named = ", ".join(map(_shorten, unknown[:_MAX_NAMED]))
        is_start = key == "trainable.init_from"
        advice = " If the layers are this model's, name them in trainable.targets."
        raise file.refusal(
            f": {fitting} of its {fitting + len(unknown)} weights fit the layers that this recipe "
            f"gives LoRA; the first that do not: {named}. Is it of another model?"
            f"{advice if is_start else ''}"
        )
    if twice:
        raise file.refusal(
            f" has LoRA of {twice[0]} twice: under two names, or alone and within a layer that "
            "joins several. Which of them counts is not known. Take a file that has it once."
        )
    if not by_layer:
        raise file.refusal(
            f": none of its {len(file.weights)} weights is LoRA of this model. LoRA of text "
            "encoders is not trained here."
        )
    return file, {
        name: lora
        for fused, parts in by_layer.items()
        for name, lora in file.join(fused, parts, layers)
    }


@torch.no_grad()
def load_lora(lora: Mapping[str, StoredLora | StoredLokr], model: nn.Module) -> None:
    """Load the LoRA of a file into a model; layers that the file lacks keep their values.

    What the model has of a higher rank than the file changes nothing at first, and trains.
    """
    for name, layer in adapter_layers(model):
        if (stored := lora.get(name)) is not None:
            stored.load(layer)


class _LoraFile:
    """Weights and settings of a LoRA file; of one for both transformers, the trained one's."""

    def __init__(self, path: Path, expert: Expert | None, key: str) -> None:
        self.path, self._name = path, f"{key} {path}"
        try:
            fsio.open_regular(path).close()  # a named pipe would make safetensors wait forever
            with safe_open(path, "pt") as file:
                self.weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
                self.header: dict[str, str] = file.metadata() or {}
        except (OSError, SafetensorError) as error:
            raise ModelError(
                f"{self._name} cannot be read: {first_line(error)}. Expected a safetensors file "
                "with LoRA."
            ) from error
        folder = "transformer"
        # ai-toolkit's one file for both has transformer_1 for the high-noise expert.
        self.weights = {
            _EXPERT.sub(lambda found: _EXPERT_PARTS[found[1]], name): value
            for name, value in self.weights.items()
        }
        if any(name.startswith("transformer_2.") for name in self.weights):
            folder = self._select_expert(expert)
        self.settings = self._check_settings(self._read_settings(folder))

    def refusal(self, text: str) -> RecipeError:
        """Return an error about this LoRA file, which it names."""
        return RecipeError(f"{self._name}{text}")

    def _select_expert(self, expert: Expert | None) -> str:
        """Keep the LoRA weights of one transformer of a release, renamed; return its folder.

        Their names then begin with `transformer.`.
        """
        if expert is None:
            raise self.refusal(
                " has LoRA of the low-noise expert of a release with two (transformer_2). Set "
                "model.expert, if the release has two."
            )
        mine = f"{EXPERT_FOLDERS[expert]}."
        others = tuple(f"{each}." for each in EXPERT_FOLDERS.values() if f"{each}." != mine)
        self.weights = {
            f"transformer.{name.removeprefix(mine)}" if name.startswith(mine) else name: value
            for name, value in self.weights.items()
            if not name.startswith(others)
        }
        return EXPERT_FOLDERS[expert]

    def _read_settings(self, folder: str) -> Mapping[str, Any]:
        """Read peft's settings from the LoRA file's header, or from adapter_config.json beside it.

        `folder` is the transformer's in a pipeline. Empty without either.
        """
        saved = self.header.get("lora_adapter_metadata")
        beside = self.path.with_name("adapter_config.json")
        try:
            if saved is None:
                return fsio.read_record(beside, dict[str, Any]) or {}
            settings = fsio.parse_record(saved.encode(), dict[str, Any], self.path)
        except RecordError as error:
            where = f"in {beside}" if saved is None else "in its header (lora_adapter_metadata)"
            raise ModelError(
                f"{self._name}: its settings {where} cannot be read: {first_line(error)}. Expected "
                'JSON such as {"lora_alpha": 16}; without it the strength is not known.'
            ) from error
        if not any("." in name for name in settings):
            return settings
        # Settings of a pipeline have the component's name in front.
        parts = ((name.partition("."), value) for name, value in settings.items())
        return {name: value for (component, _, name), value in parts if component == folder}

    def _check_settings(self, settings: Mapping[str, Any]) -> _Settings:
        kind = lora_kinds.kind_of(self.weights)
        if kind != "lora":  # peft has another name for its alpha
            other = {"alpha": "lora_alpha"}
            settings = {other.get(name, name): value for name, value in settings.items()}
        known = {field.name for field in fields(_Settings)}
        understood = {name: value for name, value in settings.items() if name in known}
        # Unknown settings count as refused: a setting of a later peft may change the strength.
        others = settings.keys() - known - _WITHOUT_EFFECT - {"peft_type"}
        refused = [n for n in settings if n in others and not _is_expected(n, settings[n])]
        if settings.get("peft_type", kind.upper()) != kind.upper():
            refused.append("peft_type")
        for name in ("use_rslora", "use_dora"):
            if not isinstance(understood.get(name, False), bool):
                refused.append(name)
        for name in ("alpha_pattern", "rank_pattern"):
            pattern = understood.get(name) or {}
            if not isinstance(pattern, dict) or not all(map(_LAYER_NAME.fullmatch, pattern)):
                refused.append(name)
        if refused:
            named = ", ".join(f"{_shorten(name)} = {_shorten(settings[name])}" for name in refused)
            raise self.refusal(
                f": of its settings {named} is not understood, and could change its strength. "
                "Expected LoRA, DoRA, LoHa or LoKr of peft with alpha, alpha_pattern and "
                "rank_pattern by layers' names, and use_rslora."
            )
        if settings and understood.get("lora_alpha") is None:
            raise self.refusal(
                ": its settings lack lora_alpha, and so its strength is not known. Add it where "
                "the file was trained, or remove adapter_config.json if it is of another file."
            )
        return _Settings(**understood)

    def join(
        self, fused: Sequence[str], parts: Mapping[str, Tensor], layers: Mapping[str, Any]
    ) -> Iterator[tuple[str, StoredLora | StoredLokr]]:
        """Yield the LoRA of one layer, or of several that are one in the file, from its tensors."""
        name = fused[0] if len(fused) == 1 else f"{fused[0]} to {fused[-1].rpartition('.')[2]}"
        missing = lora_kinds.missing_part(parts)
        if missing is None and self.settings.use_dora and "magnitude" not in parts:
            missing = "lora magnitude"
        if missing is not None:
            raise self.refusal(f": of {name} it lacks {missing}.")
        update = lora_kinds.read_update(parts)
        if update is None:
            shapes = ", ".join(f"{kind} {list(value.shape)}" for kind, value in parts.items())
            raise self.refusal(
                f": of {name} it has {shapes}. Expected "
                f"{lora_kinds.EXPECTED[lora_kinds.kind_of(parts)]} and one number as alpha."
            )
        self.refuse_other_numbers(name, parts)
        scale = self.scale(name, update, parts)
        chosen = [layers[each] for each in fused]
        heights = [getattr(each, "base_layer", each).out_features for each in chosen]
        magnitude = parts.get("magnitude")
        # By trainable.rules the layers may differ in rank.
        lowest = min(chosen, key=lambda each: getattr(each, "r", {}).get(ADAPTER, 0))
        self.refuse_other_shapes(name, update, magnitude, lowest, heights)
        if hasattr(chosen[0], "lokr_w1"):
            self.refuse_other_lokr(name, update, chosen)
            yield fused[0], StoredLokr(update.factors, scale, update.trained_rank or update.rank)
            return
        matrices = lora_kinds.divide(*update.as_lora(), heights)
        is_for_comfyui = COMFYUI_DORA.items() <= self.header.items()
        lengths: Sequence[Tensor | None] = [None] * len(fused)
        if magnitude is not None:
            lengths = torch.split(magnitude.flatten(), heights)
        for each, (down, up), length in zip(fused, matrices, lengths, strict=True):
            yield each, StoredLora(down, up, scale, length, is_for_comfyui)

    def scale(self, name: str, update: Update, parts: Mapping[str, Tensor]) -> float:
        """Return the strength at which a layer's update was trained."""
        # A stored alpha means alpha / rank. Peft's settings mean the same, or alpha / sqrt(rank)
        # with `use_rslora`; without either the scale is 1.
        settings, rank = self.settings, update.trained_rank
        is_stated = settings.lora_alpha is not None and "alpha" not in parts
        if rank is None:
            # LyCORIS ignores alpha for two full matrices, and stores any; peft does not.
            stated = _of_layer(settings.rank_pattern, name, settings.r)
            if not is_stated or not isinstance(stated, int) or stated < 1:
                return 1.0
            rank = stated
        if "alpha" in parts:
            alpha: Any = parts["alpha"].item()
        else:
            alpha = _of_layer(settings.alpha_pattern, name, settings.lora_alpha)
            alpha = rank if alpha is None else alpha
            stated = _of_layer(settings.rank_pattern, name, settings.r)
            if stated not in (None, rank):
                raise self.refusal(
                    f": its settings have rank {_shorten(stated)} for {name}, and its weights have "
                    f"rank {rank}. Are they of another file?"
                )
        is_number = isinstance(alpha, int | float) and not isinstance(alpha, bool)
        if not is_number or not 0 < alpha <= _MAX_ALPHA:
            raise self.refusal(
                f": of {name} alpha is {_shorten(alpha)}. Expected a number above 0, at most "
                f"{_MAX_ALPHA:g}."
            )
        is_rslora = settings.use_rslora and "alpha" not in parts
        return float(alpha / (math.sqrt(rank) if is_rslora else rank))

    def refuse_other_numbers(self, name: str, parts: Mapping[str, Tensor]) -> None:
        for kind, value in parts.items():
            is_finite = value.is_floating_point() and bool(value.float().isfinite().all())
            if kind != "alpha" and not is_finite:
                raise self.refusal(
                    f": of {name} the weights {kind} ({value.dtype}) are not all finite "
                    "floating-point numbers. The file is damaged, or its training diverged; take "
                    "another one."
                )

    def refuse_other_shapes(
        self,
        name: str,
        update: Update,
        magnitude: Tensor | None,
        layer: Any,
        heights: Sequence[int],
    ) -> None:
        """Refuse an update whose sizes or kind are not the layer's, or whose rank is higher.

        `heights` has the rows of each layer that is in it; all are like `layer` otherwise.
        """
        rows, columns = sum(heights), getattr(layer, "base_layer", layer).in_features
        if update.shape != (rows, columns):
            raise self.refusal(
                f" is of another model: its LoRA of {name} maps {update.shape[1]} to "
                f"{update.shape[0]} numbers, and the layer {columns} to {rows}."
            )
        if isinstance(layer, nn.Linear):  # not trained: any rank
            return
        if not hasattr(layer, "lora_A"):
            if magnitude is not None:
                raise self.refusal(f' holds DoRA. Set trainable.kind = "dora"{_rank(update)}.')
            return
        rank = len(layer.lora_A[ADAPTER].weight)
        if (needed := update.rank_in(heights)) > rank:
            kind = "" if update.kind == "lora" else f", as LoRA of the {_TITLES[update.kind]} in it"
            advice = f"Set trainable.rank = {needed} or more"
            if update.kind == "lokr":
                advice += ', or trainable.kind = "lokr" to train it as it is'
            raise self.refusal(
                f" has rank {needed}{kind} for {name}, and trainable.rank, or the rule of "
                f"trainable.rules for it, is {rank}. {advice}."
            )
        if magnitude is None:
            return
        if not layer.lora_magnitude_vector:
            raise self.refusal(' holds DoRA. Set trainable.kind = "dora".')
        if magnitude.shape not in ((rows,), (rows, 1)):  # [1, in]: of columns
            raise self.refusal(
                f": DoRA of {name} has magnitudes of shape {list(magnitude.shape)}, and the "
                f"layer has {rows} rows, which get one each."
            )

    def refuse_other_lokr(self, name: str, update: Update, layers: Sequence[Any]) -> None:
        """Refuse an update that the LoKr of a model's layer cannot hold."""
        as_lora = f'trainable.kind = "lora"{_rank(update)}'
        if update.kind != "lokr":
            title = _TITLES[update.kind]
            raise self.refusal(f" holds {title}, which LoKr cannot hold. Set {as_lora}.")
        if len(layers) > 1:
            raise self.refusal(
                f" has one LoKr for {name}, which cannot be divided as LoKr. Set {as_lora}."
            )
        own = lora_kinds.lokr_factors(layers[0])
        if any(a.shape != b.shape for a, b in zip(update.factors, own, strict=True)):
            theirs, ours = (
                " and ".join("{} x {}".format(*each.shape) for each in factors)
                for factors in (update.factors, own)
            )
            fitting = _factor_of(update)
            as_it_is = f"trainable.factor = {fitting} to train it as it is, or "
            raise self.refusal(
                f": of {name} its LoKr has factors of {theirs}, and the layer's have {ours}. Set "
                f"{'' if fitting is None else as_it_is}{as_lora}."
            )
        for factor, mine in zip(update.factors, own, strict=True):
            if mine.right is not None and factor.rank > mine.rank:
                # From half of the longer side on peft makes the factor one matrix.
                needed = min(factor.rank, math.ceil(max(factor.shape) / 2))
                raise self.refusal(
                    f" has LoKr of a higher rank than trainable.rank, which is {mine.rank}: set "
                    f"trainable.rank = {needed} or more (for {name})."
                )


_TITLES: Mapping[lora_kinds.Kind, str] = {"lora": "LoRA", "loha": "LoHa", "lokr": "LoKr"}


def _rank(update: Update) -> str:
    return f" and trainable.rank = {update.rank} or more"


def _factor_of(update: Update) -> int | None:
    """Return the trainable.factor with which a layer gets the factors of a file's LoKr, or None."""
    from peft.tuners.lokr.layer import factorization

    wanted = update.factors[0].shape
    for factor in sorted(wanted, reverse=True):
        if tuple(factorization(size, factor)[0] for size in update.shape) == wanted:
            return factor
    return None


def _is_expected(name: str, value: object) -> bool:
    """Return True for a setting of peft that is unset or has a value in `_EXPECTED`."""
    return not value or value in _EXPECTED.get(name, ())


def _of_layer(pattern: Mapping[str, Any] | None, layer: str, otherwise: Any) -> Any:
    """Return a layer's value in a pattern of peft's settings (`alpha_pattern`, `rank_pattern`).

    It is that of the first name with which the layer's name ends, or else `otherwise`.
    """
    ends = (value for name, value in (pattern or {}).items() if f".{layer}".endswith(f".{name}"))
    return next(ends, otherwise)


def _shorten(text: object) -> str:
    """Make text from a LoRA file short and printable, for a message."""
    shown = "".join(islice(str(text), _MAX_NAME_LETTERS + 1))
    cut = len(shown) > _MAX_NAME_LETTERS
    return printable(shown[:_MAX_NAME_LETTERS]) + ("..." if cut else "")


def _names_of_layers(
    layers: Mapping[str, Any], family: Family
) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield all names under which tools store a layer's LoRA, with the layer's own name.

    A name of the release's own code may stand for several layers.
    """
    for name in layers:
        originals = [name]
        with suppress(RecipeError):  # ComfyUI has no such model
            originals.append(family.comfyui_name(name, is_lora=False))
            yield family.comfyui_name(name, is_lora=True), (name,)
        for prefix in _PREFIXES:
            yield f"{prefix}{name}", (name,)
        for original in originals:
            yield from ((each, (name,)) for each in _under_prefixes(original))
    for original, parts in getattr(family, "original_layers", {}).items():
        front, _, last = parts[0].partition("*")
        for name in layers:
            number = name.removeprefix(front).removesuffix(last)
            fused = tuple(part.replace("*", number) for part in parts)
            if number.isdigit() and all(each in layers for each in fused):
                yield from (
                    (each, fused) for each in _under_prefixes(original.replace("*", number))
                )


def _under_prefixes(name: str) -> Iterator[str]:
    yield from (front + name for front in ("", "diffusion_model."))
    # Flat names, in which every dot of a layer's name is an underscore.
    yield from (front + name.replace(".", "_") for front in _FLAT_PREFIXES)


def _sort_by_layer(
    stored: Mapping[str, Tensor], names: Mapping[str, tuple[str, ...]]
) -> tuple[dict[tuple[str, ...], dict[str, Tensor]], list[str], list[str]]:
    """Group a file's LoRA weights by layer and kind.

    Returns:
        The weights, names in the file that fit no layer, and layers that the file has twice.
    """
    by_layer: dict[tuple[str, ...], dict[str, Tensor]] = {}
    unknown, twice = list[str](), list[str]()
    for key, value in stored.items():
        suffix = next((each for each in _SUFFIXES if key.endswith(each)), "")
        layer = names.get(key.removesuffix(suffix)) if suffix else None
        if layer is not None:
            parts = by_layer.setdefault(layer, {})
            twice += layer[:1] if _SUFFIXES[suffix] in parts else ()
            parts[_SUFFIXES[suffix]] = value
        elif not key.startswith(_OF_TEXT_ENCODERS):  # these are not trained here
            unknown.append(key)
    counts = Counter(name for layers in by_layer for name in layers)
    twice += [name for name, count in counts.items() if count > 1]
    return by_layer, unknown, twice
