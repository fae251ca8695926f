"""What of a model is trained: all of it, low-rank updates (LoRA), or a module of the user's own."""

import copy
from collections.abc import Sequence
from itertools import chain

import torch
from torch import Tensor, nn

from longtake.config import TrainableSection
from longtake.errors import RecipeError
from longtake.models.added import ADDED, attach, block_names, detach, main_dtype
from longtake.models.architecture import DTYPES
from longtake.models.family import Family
from longtake.models.imported import build_module
from longtake.models.lora import add_lora, merge
from longtake.models.unfilled import Slot, lent_memory


def make_trainable(
    model: nn.Module,
    family: Family,
    section: TrainableSection,
    latent_channels: int,
    slots: Sequence[Slot] = (),
) -> None:
    """Freeze, adapt and extend a model as the recipe says.

    New weights follow from the last seed that torch was given alone, and not from how the model
    came to its own. On torch's meta device all is done alike, without memory.

    Raises:
        RecipeError: targets or blocks match nothing, the module cannot be had as it is named, or
            nothing is left to train.
    """
    base, dtype = section.base(), DTYPES.get(section.dtype) or main_dtype(model)
    blocks = block_names(model, family, section.blocks)
    device = torch.device("cpu") if slots else next(model.parameters()).device
    if base != "full":
        model.requires_grad_(False)
    with torch.random.fork_rng(devices=[]), torch.device(device):
        torch.default_generator.manual_seed(torch.initial_seed())
        if base == "lora":
            with lent_memory(slots):
                add_lora(model, section.targets or family.lora_targets, section, dtype)
        if section.module is not None:
            module = build_module(section, family.width(model), blocks, latent_channels)
            attach(model, module.to(device, dtype), family, blocks, dtype)
    _refuse_nothing(model, section)


def _refuse_nothing(model: nn.Module, section: TrainableSection) -> None:
    """Only an added module can leave nothing to train: all else has weights, or adds them."""
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise RecipeError(
            f"trainable.module {section.module} trains nothing: the model is frozen, and so is "
            "every parameter that the module has. Leave requires_grad on where it should learn, "
            'or train the model beside it with trainable.kind = "lora" or "full".'
        )


def trained_state(model: nn.Module) -> dict[str, Tensor]:
    """What a checkpoint must hold of a model: its state dict without frozen weights.

    The tensors share the model's memory. Of an added module all is there, also what it has frozen
    of itself: nothing else can make it again.
    """
    frozen = {
        name
        for name, parameter in model.named_parameters(remove_duplicate=False)
        if not parameter.requires_grad and not name.startswith(f"{ADDED}.")
    }
    return {name: value for name, value in model.state_dict().items() if name not in frozen}


def load_trained(model: nn.Module, state: dict[str, Tensor]) -> None:
    """Put a `trained_state` back into a model that was made trainable in the same way."""
    unexpected = model.load_state_dict(state, strict=False).unexpected_keys
    assert not unexpected, unexpected


def plain_copy(model: nn.Module) -> nn.Module:
    """The model as its family knows it: LoRA merged into the weights, without an added module.

    It shares the memory of all that is not merged; the model itself stays as it is.
    """
    tensors = chain(model.parameters(), model.buffers())
    plain = copy.deepcopy(model, {id(tensor): tensor for tensor in tensors})
    detach(plain)
    merge(plain)
    return plain
