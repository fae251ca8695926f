"""Which part of a transformer a parameter belongs to, by its name."""

from collections.abc import Sequence

from torch import nn

from longtake.models.added_module import ADDED

_ATTENTION = ("attn", "attention")
_MLP = ("mlp", "ffn", "ff", "feed_forward", "proj_mlp", "proj_out")


def groups_of(model: nn.Module, blocks: Sequence[nn.Module]) -> dict[str, str]:
    """The group (`longtake.guard.history.GROUPS`) of each trained parameter, by its name.

    `embedding`: what comes before and after the blocks; `added`: a module of one's own; `other`:
    what a block has beside attention and MLP, such as norms and modulation.
    """
    names = {id(module): name for name, module in model.named_modules()}
    in_blocks = tuple(f"{names[id(block)]}." for block in blocks)
    return {
        name: _group(name, in_blocks)
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }


def _group(name: str, in_blocks: tuple[str, ...]) -> str:
    if name.startswith(f"{ADDED}."):
        return "added"
    if not name.startswith(in_blocks):
        return "embedding"
    parts = name.split(".")
    if any(word in part for part in parts for word in _ATTENTION):
        return "attention"
    if any(part == word or part.startswith(f"{word}_") for part in parts for word in _MLP):
        return "mlp"
    return "other"
