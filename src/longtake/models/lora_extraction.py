"""Extracts LoRA from a model whose weights were all trained: the nearest to each layer's change."""

import math
from collections.abc import Collection, Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

from longtake.config import ModelSection
from longtake.errors import ModelError, RecipeError
from longtake.models import deferred_init
from longtake.models.stored_weights import StoredTensor, find_in_one_file
from longtake.models.weight_files import open_weights


class ExtractedLora(NamedTuple):
    """LoRA of the linear layers that have changed, under peft's names, with a scale of 1."""

    weights: dict[str, Tensor]
    errors: dict[str, float]
    """Relative error (Frobenius norm) of each layer's change."""
    total_error: float
    """Relative error of the change of the whole model, with what is left out."""
    left_out: list[str]
    """Tensors that changed and are not in it, such as biases and norms."""


@torch.no_grad()
def extract_lora(
    model: nn.Module, section: ModelSection, rank: int, layers: Collection[str]
) -> ExtractedLora:
    """Extract the LoRA that is nearest to a trained model's difference from its release.

    The release is read tensor by tensor. `layers` are linear layers of the model by name. All get
    the same rank, for readers that know only one; one with fewer rows or columns gets zeros.

    Raises:
        RecipeError: the model has not changed.
        ModelError: the release cannot be read, or lacks a layer of the model.
    """
    base, state = _release_tensors(section, model), model.state_dict()
    matrices = {f"{name}.weight": name for name in layers}
    if lacking := sorted(matrices.keys() - base.keys()):
        raise ModelError(f"{section.pretrained} has no {lacking[0]}, which the trained model has.")
    weights, errors, left_out = dict[str, Tensor](), dict[str, float](), list[str]()
    changed = missed = 0.0  # squares of norms
    for name in sorted(base.keys() & state.keys()):
        with open_weights(base[name].file) as opened:
            change = state[name].float() - base[name].read(opened).float()
        if (square := float(change.double().square().sum())) == 0:
            continue
        changed, tail = changed + square, square
        if (layer := matrices.get(name)) is None:
            left_out.append(name)
        else:
            down, up, tail = nearest_lora(change, rank)
            weights |= {f"{layer}.lora_A.weight": down, f"{layer}.lora_B.weight": up}
            errors[layer] = math.sqrt(tail / square)
        missed += tail
    if not weights:
        raise RecipeError(
            f"No linear layer differs from {section.pretrained}: there is nothing to extract. Name "
            "a later step, or another run."
        )
    return ExtractedLora(weights, errors, math.sqrt(missed / changed), left_out)


def nearest_lora(change: Tensor, rank: int) -> tuple[Tensor, Tensor, float]:
    """Return A [rank, in] and B [out, rank] whose product is nearest to a change [out, in].

    Also returns the squared Frobenius norm of what is left, the sum of the other singular values'
    squares. These are eigenvalues of the change times itself, whose size is the shorter side: a
    fraction of the time of a singular value decomposition, and as exact in fp64 as the change.
    """
    is_wide = change.shape[0] <= change.shape[1]
    tall = (change.T if is_wide else change).double()  # [long, short]
    squares, vectors = torch.linalg.eigh(tall.T @ tall)  # ascending
    kept = min(rank, len(squares))
    short = vectors[:, -kept:].T.flip(0)  # [kept, short], orthonormal rows
    root = squares[-kept:].flip(0).clamp(min=0).pow(0.25)[:, None]
    # Both matrices get the same lengths; those of a value of 0 stay near 0.
    long = short @ tall.T / root.clamp(min=1e-6 * float(root[0]))
    down, up = (long, short * root) if is_wide else (short * root, long)
    zeros = (0, 0, 0, rank - kept)
    down, up = (nn.functional.pad(each, zeros).float() for each in (down, up))
    return down, up.T, float(squares[:-kept].clamp(min=0).sum())


def _release_tensors(section: ModelSection, model: nn.Module) -> Mapping[str, StoredTensor]:
    if (file := section.one_file()) is not None:
        return find_in_one_file(file, model, section.qkv_layout)
    if (files := deferred_init.release_files(section)) is None:
        raise ModelError(
            f"{section.pretrained} has no safetensors files of its weights as diffusers' "
            "save_pretrained writes them, and --extract-lora reads no others. Save it so."
        )
    return files
