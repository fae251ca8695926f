"""The trained part of a model: all weights, low-rank updates (LoRA), or user-defined modules.

LoRA is peft's, and so are its names, which diffusers reads. A layer W becomes W + (alpha / rank) B
A, where A is random and B zero: training starts from the very model that was loaded.
"""

import copy
import re
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from itertools import chain
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from longtake.config import AdapterRule, TrainableSection
from longtake.errors import RecipeError
from longtake.formatting import did_you_mean
from longtake.models import added_module, deferred_init, numerics
from longtake.models.base import BlockContract, Family

ADAPTER = "default"
"""Name of the only adapter in peft's LoRA layers."""


def make_trainable(
    model: nn.Module,
    family: Family,
    section: TrainableSection,
    latent_channels: int,
    deferred: Sequence[deferred_init.DeferredParameter] = (),
) -> None:
    """Freeze a model, and add the LoRA or modules that the recipe trains.

    The model may be on any device. New weights depend on torch's last seed alone, not on how many
    numbers were drawn since.
    """
    base, dtype = section.base(), numerics.DTYPES.get(section.dtype) or numerics.main_dtype(model)
    blocks = {
        name: added_module.block_names(
            model, family, added.blocks, f"trainable.modules.{name}.blocks"
        )
        for name, added in section.modules.items()
    }
    # Deferred parameters are on the meta device, but what is added to them has values at once.
    device = torch.device("cpu") if deferred else next(model.parameters()).device
    untrained = set(family.block.untrained_parameters(model))
    if base != "full":
        model.requires_grad_(False)
    for name in untrained:
        model.get_parameter(name).requires_grad_(False)
    with torch.random.fork_rng(devices=[]), torch.device(device):
        torch.default_generator.manual_seed(torch.initial_seed())
        if base == "lora":
            with deferred_init.placeholders_on_cpu(deferred):
                layers = _adapted_layers(model, section, family.block, untrained)
                add_lora(model, layers, section, dtype)
        modules = {
            name: added_module.build_module(
                name, added, family.block.width(model), blocks[name], latent_channels
            )
            for name, added in section.modules.items()
        }
        if modules:
            moved = {name: module.to(device, dtype) for name, module in modules.items()}
            added_module.attach(model, moved, family, blocks, dtype)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        classes = ", ".join(added.module for added in section.modules.values())
        raise RecipeError(
            f"trainable.modules ({classes}) train nothing: the model is frozen, and so is every "
            "parameter that they have. Leave requires_grad on where they should learn, or train "
            'the model beside them with trainable.kind = "lora" or "full".'
        )


def trained_state(model: nn.Module) -> dict[str, Tensor]:
    """Return the state dict of the trained weights, which a checkpoint must hold.

    Frozen weights of added modules are included, because nothing else can make them again. The
    tensors share the model's memory.
    """
    frozen = {
        name
        for name, parameter in model.named_parameters(remove_duplicate=False)
        if not parameter.requires_grad and not name.startswith(f"{added_module.ADDED}.")
    }
    return {name: value for name, value in model.state_dict().items() if name not in frozen}


def load_trained(model: nn.Module, state: dict[str, Tensor]) -> None:
    # Frozen weights are in no checkpoint, so keys may be missing; none may be unknown.
    unexpected = model.load_state_dict(state, strict=False).unexpected_keys
    assert not unexpected, unexpected


@contextmanager
def without_adapter(model: nn.Module) -> Iterator[None]:
    """Run a model without its LoRA and added modules, also those that training began with.

    Raises:
        RecipeError: the model's own weights are trained, so that model is no longer there.
    """
    layers = [layer for _, layer in adapter_layers(model)]
    own = {id(parameter) for layer in layers for parameter in layer.parameters()}
    own |= {
        id(each)
        for part in added_module.added_modules(model).values()
        for each in part.parameters()
    }
    if any(each.requires_grad and id(each) not in own for each in model.parameters()):
        raise RecipeError(
            "The objective asks for the model without its adapter, but the recipe trains all "
            "weights, and keeps no copy of the first ones. Train an adapter (trainable.kind = "
            '"lora", "dora", "lokr", or "frozen" with trainable.modules).'
        )
    with added_module.switched_off(model):
        for layer in layers:
            layer._disable_adapters = True  # peft's method would also freeze the weights
        try:
            yield
        finally:
            for layer in layers:
                layer._disable_adapters = False


def plain_copy(model: nn.Module) -> nn.Module:
    """Copy a trained model to its original form: LoRA merged into weights, no added modules.

    The copy shares the memory of what is not merged; the model itself is unchanged.
    """
    # With the tensors in the memo `deepcopy` makes new modules that share them.
    tensors = chain(model.parameters(), model.buffers())
    plain = copy.deepcopy(model, {id(tensor): tensor for tensor in tensors})
    added_module.detach(plain)
    merge(plain)
    return plain


def add_lora(
    model: nn.Module, targets: Sequence[str], section: TrainableSection, dtype: torch.dtype
) -> None:
    """Add LoRA, DoRA or LoKr to linear layers; only these updates require gradients then.

    If `dtype` is not a layer's, its input is converted, and a copy is kept for the backward pass.
    """
    from peft import LoKrConfig, LoraConfig, inject_adapter_in_model

    layers, alpha = find_targets(model, targets), section.alpha or section.rank
    given: dict[str, Any] = {"r": section.rank, "rank_pattern": {}, "alpha_pattern": {}}
    # A regular expression: peft takes names in a list for suffixes of further names.
    given["target_modules"] = "|".join(re.escape(name) for name in layers)
    for rule, names in layers_by_rule(layers, section).items():
        # It searches for ranks by regular expressions, too, and at the end of names.
        pattern = f"^(?:{'|'.join(map(re.escape, names))})"
        rank = rule.rank or section.rank
        given["rank_pattern"][pattern] = rank
        given["alpha_pattern"][pattern] = rule.alpha or section.alpha or rank
    if section.kind == "lokr":
        config: Any = LoKrConfig(alpha=alpha, decompose_factor=section.factor or -1, **given)
    else:
        config = LoraConfig(lora_alpha=alpha, use_dora=section.kind == "dora", **given)
    inject_adapter_in_model(config, model, ADAPTER)
    for _, layer in adapter_layers(model):
        for part in layer.adapter_layer_names:
            getattr(layer, part).to(dtype)  # peft's own choice differs by device
        # Under autocast peft would convert the input to fp32, and autocast would convert it back
        # and keep that copy.
        layer.cast_input_dtype_enabled = layer.get_base_layer().weight.dtype != dtype
        if section.kind == "lokr":
            layer.forward = MethodType(_call_lokr, layer)
            # As in LyCORIS (lycoris/modules/lokr.py): without a low-rank factor alpha has no part.
            if is_full_lokr(layer):
                layer.scaling[ADAPTER] = 1.0


def _call_lokr(layer: Any, inputs: Tensor) -> Tensor:
    """Compute a layer with peft's LoKr, without its dropout: that draws numbers even if off."""
    plain: Tensor = layer.base_layer(inputs)
    if layer.disable_adapters:
        return plain
    update = layer.get_delta_weight(ADAPTER)
    given = inputs.to(update.dtype) if layer.cast_input_dtype_enabled else inputs
    return plain + nn.functional.linear(given, update).to(plain.dtype)


def is_full_lokr(layer: Any) -> bool:
    """Return True if a layer's LoKr update is the product of two full matrices."""
    return ADAPTER in layer.lokr_w1 and ADAPTER in layer.lokr_w2


def _adapted_layers(
    model: nn.Module, section: TrainableSection, contract: BlockContract, untrained: Collection[str]
) -> list[str]:
    found = find_targets(model, section.targets or contract.lora_targets)
    for target in section.targets or ():
        named = find_targets(model, [target])
        if all(f"{name}.weight" in untrained for name in named):
            raise RecipeError(
                f"trainable.targets: {target!r} names only layers that get no gradient in this "
                f"run, such as {named[0]}: LoRA there would train nothing. "
                f"{contract.untrained_because}"
            )
    found = [name for name in found if f"{name}.weight" not in untrained]
    left_out = find_targets(model, section.exclude, "trainable.exclude")
    kept = [name for name in found if name not in left_out]
    by_rule = layers_by_rule(kept, section)
    for place, rule in enumerate(section.rules):
        key = f"trainable.rules[{place}].layers"
        find_targets(model, rule.layers, key)
        if rule not in by_rule:
            raise RecipeError(
                f"{key}: {', '.join(rule.layers)} match no layer that "
                "gets an adapter, or only such as an earlier rule matches, which holds. Name them "
                "in trainable.targets, or put the narrower rule first."
            )
    none = {name for rule, names in by_rule.items() if rule.exclude for name in names}
    if not (kept := [name for name in kept if name not in none]):
        raise RecipeError(
            f"trainable.exclude ({', '.join(section.exclude)}) and trainable.rules leave out every "
            "layer that trainable.targets name. Exclude fewer."
        )
    return kept


def layers_by_rule(
    layers: Sequence[str], section: TrainableSection
) -> dict[AdapterRule, list[str]]:
    """Return the layers of each of `trainable.rules`; of several that match the first one holds."""
    found: dict[AdapterRule, list[str]] = {}
    for name in layers:
        matching = (each for each in section.rules if matches_any(name, each.layers))
        if (rule := next(matching, None)) is not None:
            found.setdefault(rule, []).append(name)
    return found


def find_targets(
    model: nn.Module, targets: Sequence[str], key: str = "trainable.targets"
) -> list[str]:
    """Return the names of the linear layers that the recipe's LoRA targets match, in order."""
    names = [name for name, part in model.named_modules() if isinstance(part, nn.Linear)]
    matches = {target: {name for name in names if _matches(name, target)} for target in targets}
    for target, matched in matches.items():
        if not matched:
            raise RecipeError(_explain_unmatched(key, target, names, model))
    return [name for name in names if any(name in matched for matched in matches.values())]


def lora_state(model: nn.Module) -> dict[str, Tensor]:
    """Return the tensors that peft reads: LoRA's A and B, DoRA's magnitude, LoKr's factors.

    The scale alpha / rank is multiplied into B, or into LoKr's first factor, because readers of
    such files assume 1. Empty for a model without any.
    """
    state = {}
    for name, layer in adapter_layers(model):
        parts = {part: getattr(layer, part) for part in layer.adapter_layer_names}
        for part, held in parts.items():
            if ADAPTER not in held:
                continue
            weight = getattr(held[ADAPTER], "weight", held[ADAPTER]).detach()
            is_scaled = part in ("lora_B", "lokr_w1", "lokr_w1_a")
            suffix = ".weight" if part in ("lora_A", "lora_B") else ""
            scale = layer.scaling[ADAPTER] if is_scaled else 1
            state[f"{name}.{part}{suffix}"] = weight * scale
    return state


def adapter_config(model: Any, base: str | None) -> Any:
    """Return peft's configuration for the adapter in `lora_state`, with a scale of 1.

    `base` is the name of the base model.
    """
    config = copy.deepcopy(model.peft_config[ADAPTER])
    ranks = {name: layer.r[ADAPTER] for name, layer in adapter_layers(model)}
    config.r = Counter(ranks.values()).most_common(1)[0][0]
    setattr(config, "lora_alpha" if hasattr(config, "lora_alpha") else "alpha", config.r)
    # peft takes the first name with which a layer's name ends: longer ones have to come first.
    others = {name for name, rank in ranks.items() if rank != config.r}
    is_like = {name for name in ranks if any(f".{name}".endswith(f".{each}") for each in others)}
    names = sorted(is_like, key=len, reverse=True)
    config.rank_pattern = config.alpha_pattern = {name: ranks[name] for name in names}
    # peft saves adapters this way, so that a reader that loads one gets it frozen.
    config.inference_mode = True
    config.base_model_name_or_path = base
    return config


@torch.no_grad()
def merge(model: nn.Module) -> None:
    """Add LoRA to the weights, in new tensors, and remove it; layers get their plain names."""
    for name, layer in list(adapter_layers(model)):
        plain = layer.get_base_layer()
        # In fp32, so that the sum is rounded to the weights' dtype once.
        weight = plain.weight.float()  # [out, in]
        if not hasattr(layer, "lora_A"):
            weight = weight + layer.get_delta_weight(ADAPTER).float()
        else:
            weight = weight + _lora_update(layer)
            if ADAPTER in layer.lora_magnitude_vector:  # DoRA gives each row its magnitude
                magnitude = layer.lora_magnitude_vector[ADAPTER].weight.float()
                weight = weight * (magnitude / torch.linalg.norm(weight, dim=1))[:, None]
        # A new tensor: the old one may be shared with the model that `plain_copy` copies.
        plain.weight = nn.Parameter(weight.to(plain.weight.dtype), requires_grad=False)
        parent, _, last = name.rpartition(".")
        setattr(model.get_submodule(parent), last, plain)
    if hasattr(model, "peft_config"):
        del model.peft_config


def _lora_update(layer: Any) -> Tensor:
    a, b = layer.lora_A[ADAPTER].weight.float(), layer.lora_B[ADAPTER].weight.float()
    return layer.scaling[ADAPTER] * (b @ a)


@torch.no_grad()
def dora_norm_ratio(layer: Any) -> Tensor:
    """Return |W| / |W + BA| by rows, [out] fp32, to convert DoRA magnitudes for ComfyUI.

    DoRA divides W + BA by |W + BA|, in peft and so in training; ComfyUI divides it by |W|
    (`weight_decompose` in comfy/weight_adapter/base.py). Magnitudes times this ratio make both the
    same, because W is frozen.
    """
    device = layer.lora_A[ADAPTER].weight.device  # streamed weights are in host RAM
    weight: Tensor = layer.get_base_layer().weight.to(device, torch.float32)
    return weight.norm(dim=1) / lora_row_norms(layer)


@torch.no_grad()
def lora_row_norms(layer: Any) -> Tensor:
    """Return |W + BA| by rows, [out] fp32."""
    update = _lora_update(layer)
    norms: Tensor = (layer.get_base_layer().weight.to(update.device) + update).norm(dim=1)
    return norms


def adapter_layers(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the name and module of each layer with LoRA, DoRA or LoKr."""
    if not hasattr(model, "peft_config"):
        return
    from peft.tuners.lokr import LoKrLayer
    from peft.tuners.lora import LoraLayer

    for name, part in model.named_modules():
        if isinstance(part, LoraLayer | LoKrLayer):
            yield name, part


def lora_layers(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the layers with LoRA or DoRA, which have `lora_A[ADAPTER]` and `lora_B[ADAPTER]`."""
    return ((name, layer) for name, layer in adapter_layers(model) if hasattr(layer, "lora_A"))


def matches_any(name: str, targets: Sequence[str]) -> bool:
    """Return True if one of the targets is the last part of a module's name, or its pattern."""
    return any(_matches(name, target) for target in targets)


def _matches(name: str, target: str) -> bool:
    if "*" in target:
        return fnmatchcase(name, target)
    return name == target or name.endswith(f".{target}")


_OTHER_NAMES = {
    **dict.fromkeys(("q", "q_proj", "query", "wq"), ("to_q", "add_q_proj")),
    **dict.fromkeys(("k", "k_proj", "key", "wk"), ("to_k", "add_k_proj")),
    **dict.fromkeys(("v", "v_proj", "value", "wv"), ("to_v", "add_v_proj")),
    **dict.fromkeys(("o", "out", "out_proj", "o_proj", "proj", "wo"), ("to_out.0", "to_out")),
    **dict.fromkeys(("qkv", "to_qkv"), ("to_q", "to_k", "to_v")),
    **dict.fromkeys(("fc1", "w1", "up_proj"), ("net.0.proj",)),
    **dict.fromkeys(("fc2", "w2", "down_proj"), ("net.2",)),
}
"""Names of linear layers in other trainers and models, with the names that diffusers' models
have."""


def _explain_unmatched(key: str, target: str, layers: Sequence[str], model: nn.Module) -> str:
    problem = f"{key}: {target!r} matches no linear layer of the model; "
    matched = [name for name, _ in model.named_modules() if name and _matches(name, target)]
    if any(layer.startswith(f"{name}.") for name in matched for layer in layers):
        return f"{problem}it has such layers inside: write {f'*{target}.*'!r} for all of them."
    endings = {name.rpartition(".")[2] for name in layers} | {
        ".".join(name.split(".")[-2:]) for name in layers
    }
    of_others = [each for each in _OTHER_NAMES.get(target.split(".")[-1], ()) if each in endings]
    if of_others:
        return f"{problem}here it is called {' or '.join(map(repr, of_others))}."
    if "*" in target:
        return problem + did_you_mean(
            target, {re.sub(r"\.\d+(?=\.|$)", ".*", name) for name in layers}
        )
    num_parts = target.count(".") + 1
    endings = {".".join(name.split(".")[-num_parts:]) for name in layers}
    return problem + did_you_mean(target, {each for each in endings if not each[0].isdigit()})
