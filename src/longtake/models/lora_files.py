"""Reads LoRA files with the names of diffusers, peft, ComfyUI, kohya's scripts and others.

Such files come from other tools: each setting that affects the strength is applied, or refused by
name.
"""

import math
import re
from collections.abc import Iterator, Mapping
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
from longtake.models.base import Family
from longtake.models.trainable import ADAPTER, dora_norm_ratio, lora_layers

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
    "ensure_weight_tying",
    "eva_config",
    "exclude_modules",
    "inference_mode",
    "layers_pattern",
    "layers_to_transform",
    "lora_dropout",
    "megatron_core",
    "peft_version",
    "qalora_group_size",
    "revision",
    "target_modules",
    "task_type",
}
_EXPECTED: Mapping[str, tuple[object, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    # Other initialisations, such as PiSSA, also change the frozen weights.
    "init_lora_weights": (True, "gaussian", "eva", "orthogonal"),
}
_LAYER_NAME = re.compile(r"[\w.-]+")


@dataclass(frozen=True)
class StoredLora:
    """The LoRA of one layer as stored in a file."""

    down: Tensor  # [rank, in]
    up: Tensor  # [out, rank]
    scale: float
    magnitude: Tensor | None  # [out] of DoRA
    is_for_comfyui: bool = False
    """True if the DoRA magnitude must be divided by `dora_norm_ratio`, as it was made for
    ComfyUI."""

    @property
    def rank(self) -> int:
        return len(self.down)


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
) -> dict[str, StoredLora]:
    """Read the LoRA of a file for the layers of a model, by the layers' names.

    The model may be on the meta device. From a file for both experts of a release, only the half
    of `expert` is read.

    Raises:
        ModelError: the file, or adapter_config.json beside it, cannot be read.
        RecipeError: it has no LoRA of this model, or one of a higher rank than the model's; or what
            it says of its strength is not understood.
    """
    layers = dict(lora_layers(model))
    file, complete = _read_layers(path, layers, family, expert)
    for name, lora in complete.items():
        layer = layers[name]
        rank, columns = layer.lora_A[ADAPTER].weight.shape
        file.refuse_other_sizes(name, lora, len(layer.lora_B[ADAPTER].weight), columns)
        file.refuse_other_lora(name, lora, rank, layer)
    return complete


def read_adapter(
    path: Path, layers: Mapping[str, nn.Linear], family: Family, expert: Expert | None = None
) -> dict[str, StoredLora]:
    """Read the LoRA of a file, of any rank, for linear layers by their names (see `read_lora`)."""
    file, complete = _read_layers(path, layers, family, expert)
    for name, lora in complete.items():
        file.refuse_other_sizes(name, lora, layers[name].out_features, layers[name].in_features)
        if lora.magnitude is not None:
            raise file.refusal(" holds DoRA, which an adapter for training alone cannot be.")
    return complete


def _read_layers(
    path: Path, layers: Mapping[str, Any], family: Family, expert: Expert | None
) -> tuple["_LoraFile", dict[str, StoredLora]]:
    file = _LoraFile(path, expert)
    names = dict(_names_of_layers(layers, family))
    by_layer, unknown = _sort_by_layer(file.weights, names)
    if unknown and len(file.weights) <= _MAX_CONVERTED:
        # diffusers' converters know more names; their result is taken only if it fits better.
        import diffusers

        pipeline: Any = getattr(diffusers, getattr(family, "pipeline_class", ""), None)
        weights: Mapping[str, Tensor] | None = None
        with suppress(Exception):  # a file of another model; what they raise depends on the file
            weights = pipeline.lora_state_dict(dict(file.weights))
        if weights is not None:
            converted = _sort_by_layer(weights, names)
            if len(converted[1]) < len(unknown):
                by_layer, unknown = converted
    if unknown:
        fitting = sum(map(len, by_layer.values()))
        named = ", ".join(map(_shorten, unknown[:_MAX_NAMED]))
        raise file.refusal(
            f": {fitting} of its {fitting + len(unknown)} weights fit the layers that this recipe "
            f"gives LoRA; the first that do not: {named}. Is it of another model? If the layers "
            "are this model's, and the file is trainable.init_from, name them in trainable.targets."
        )
    if not by_layer:
        raise file.refusal(
            f": none of its {len(file.weights)} weights is LoRA of this model. LoRA of text "
            "encoders is not trained here."
        )
    return file, {name: file.join(name, parts) for name, parts in by_layer.items()}


@torch.no_grad()
def load_lora(lora: Mapping[str, StoredLora], model: nn.Module) -> None:
    """Load the LoRA of a file into a model; layers that the file lacks keep their values.

    A stored rank below the model's fills the first rows of A and columns of B. The other columns of
    B are zero: they change nothing at first, and train.
    """
    for name, layer in lora_layers(model):
        if (stored := lora.get(name)) is None:
            continue
        down, up = layer.lora_A[ADAPTER].weight, layer.lora_B[ADAPTER].weight
        # The file's scale is folded into B, because the layer multiplies by its own alpha / rank.
        scale = stored.scale / layer.scaling[ADAPTER]
        down[: stored.rank] = stored.down.to(down.dtype)
        up.zero_()
        up[:, : stored.rank] = (stored.up if scale == 1 else stored.up.float() * scale).to(up.dtype)
        if stored.magnitude is not None:
            ratio = dora_norm_ratio(layer) if stored.is_for_comfyui else 1.0
            magnitude = stored.magnitude.flatten().float() / ratio
            layer.lora_magnitude_vector[ADAPTER].weight.copy_(magnitude)


class _LoraFile:
    """Weights and settings of a LoRA file; of one for both transformers, the trained one's."""

    def __init__(self, path: Path, expert: Expert | None) -> None:
        self.path = path
        try:
            fsio.open_regular(path).close()  # a named pipe would make safetensors wait forever
            with safe_open(path, "pt") as file:
                self.weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
                self.header: dict[str, str] = file.metadata() or {}
        except (OSError, SafetensorError) as error:
            raise ModelError(
                f"trainable.init_from {path} cannot be read: {first_line(error)}. Expected a "
                "safetensors file with LoRA."
            ) from error
        folder = "transformer"
        if any(name.startswith("transformer_2.") for name in self.weights):
            folder = self._select_expert(expert)
        self.settings = self._check_settings(self._read_settings(folder))

    def refusal(self, text: str) -> RecipeError:
        """Return an error about this LoRA file, which it names."""
        return RecipeError(f"trainable.init_from {self.path}{text}")

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
                f"trainable.init_from {self.path}: its settings {where} cannot be read: "
                f'{first_line(error)}. Expected JSON such as {{"lora_alpha": 16}}; without it the '
                "strength is not known."
            ) from error
        if not any("." in name for name in settings):
            return settings
        # Settings of a pipeline have the component's name in front.
        parts = ((name.partition("."), value) for name, value in settings.items())
        return {name: value for (component, _, name), value in parts if component == folder}

    def _check_settings(self, settings: Mapping[str, Any]) -> _Settings:
        known = {field.name for field in fields(_Settings)}
        understood = {name: value for name, value in settings.items() if name in known}
        # Unknown settings count as refused: a setting of a later peft may change the strength.
        others = settings.keys() - known - _WITHOUT_EFFECT
        refused = [n for n in settings if n in others and not _is_expected(n, settings[n])]
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
                "Expected LoRA or DoRA of peft with lora_alpha, alpha_pattern and rank_pattern by "
                "layers' names, and use_rslora."
            )
        if settings and understood.get("lora_alpha") is None:
            raise self.refusal(
                ": its settings lack lora_alpha, and so its strength is not known. Add it where "
                "the file was trained, or remove adapter_config.json if it is of another file."
            )
        return _Settings(**understood)

    def join(self, name: str, parts: Mapping[str, Tensor]) -> StoredLora:
        """Combine the LoRA weights of one layer with the strength at which they were trained."""
        settings = self.settings
        needed = ("down", "up", "magnitude") if settings.use_dora else ("down", "up")
        missing = [kind for kind in needed if kind not in parts]
        if missing:
            raise self.refusal(f": of {name} it lacks lora {missing[0]}.")
        down, up = parts["down"], parts["up"]
        is_lora = down.ndim == up.ndim == 2 and len(down) == up.shape[1] > 0
        if not is_lora or ("alpha" in parts and parts["alpha"].numel() != 1):
            shapes = ", ".join(f"{kind} {list(value.shape)}" for kind, value in parts.items())
            raise self.refusal(
                f": of {name} it has {shapes}. Expected down [rank, in], up [out, rank] and one "
                "number as alpha."
            )
        rank = len(down)
        # A stored alpha means alpha / rank. Peft's settings mean the same, or alpha / sqrt(rank)
        # with `use_rslora`; without either the scale is 1.
        if "alpha" in parts:
            alpha: Any = parts["alpha"].item()
            divisor = float(rank)
        else:
            alpha = _of_layer(settings.alpha_pattern, name, settings.lora_alpha)
            alpha = rank if alpha is None else alpha
            divisor = math.sqrt(rank) if settings.use_rslora else float(rank)
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
        for kind, value in parts.items():
            is_finite = value.is_floating_point() and bool(value.float().isfinite().all())
            if kind != "alpha" and not is_finite:
                raise self.refusal(
                    f": of {name} the weights {kind} ({value.dtype}) are not all finite "
                    "floating-point numbers. The file is damaged, or its training diverged; take "
                    "another one."
                )
        is_for_comfyui = COMFYUI_DORA.items() <= self.header.items()
        return StoredLora(down, up, alpha / divisor, parts.get("magnitude"), is_for_comfyui)

    def refuse_other_sizes(self, name: str, lora: StoredLora, rows: int, columns: int) -> None:
        """Refuse LoRA whose sizes are not the layer's."""
        if (len(lora.up), lora.down.shape[1]) != (rows, columns):
            raise self.refusal(
                f" is of another model: its LoRA of {name} maps {lora.down.shape[1]} to "
                f"{len(lora.up)} numbers, and the layer {columns} to {rows}."
            )

    def refuse_other_lora(self, name: str, lora: StoredLora, rank: int, layer: Any) -> None:
        """Refuse LoRA of a higher rank than the layer's, or of another kind."""
        rows = len(lora.up)
        if lora.rank > rank:
            raise self.refusal(
                f" has rank {lora.rank}, and trainable.rank is {rank}. Set trainable.rank = "
                f"{lora.rank} or more."
            )
        if lora.magnitude is None:
            return
        if not getattr(layer, "lora_magnitude_vector", None):
            raise self.refusal(' holds DoRA. Set trainable.kind = "dora".')
        if lora.magnitude.shape not in ((rows,), (rows, 1)):  # [1, in]: of columns
            raise self.refusal(
                f": DoRA of {name} has magnitudes of shape {list(lora.magnitude.shape)}, and the "
                f"layer has {rows} rows, which get one each."
            )


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


def _names_of_layers(layers: Mapping[str, Any], family: Family) -> Iterator[tuple[str, str]]:
    """Yield all names under which tools store a layer's LoRA, with the layer's own name."""
    for name in layers:
        originals = [name]
        with suppress(RecipeError):  # ComfyUI has no such model
            originals.append(family.comfyui_name(name, is_lora=False))
            yield family.comfyui_name(name, is_lora=True), name
        for prefix in _PREFIXES:
            yield f"{prefix}{name}", name
        for original in originals:
            yield from ((front + original, name) for front in ("", "diffusion_model."))
            # Flat names, in which every dot of a layer's name is an underscore.
            yield from ((front + original.replace(".", "_"), name) for front in _FLAT_PREFIXES)


def _sort_by_layer(
    stored: Mapping[str, Tensor], names: Mapping[str, str]
) -> tuple[dict[str, dict[str, Tensor]], list[str]]:
    """Group a file's LoRA weights by layer and kind; also return names that fit no layer."""
    by_layer: dict[str, dict[str, Tensor]] = {}
    unknown = []
    for key, value in stored.items():
        suffix = next((each for each in _SUFFIXES if key.endswith(each)), "")
        layer = names.get(key.removesuffix(suffix)) if suffix else None
        if layer is not None:
            by_layer.setdefault(layer, {})[_SUFFIXES[suffix]] = value
        elif not key.startswith(_OF_TEXT_ENCODERS):  # these are not trained here
            unknown.append(key)
    return by_layer, unknown
