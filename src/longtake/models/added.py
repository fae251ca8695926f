"""A module of the user's own beside a family's model: what it is asked, and how it is attached.

It changes the tokens that come out of named blocks. Forward hooks bring it in; neither the model's
class nor its code knows of it. It is a submodule of the model, so that parameters(), optimizers,
sharding, checkpoints and the EMA see it like any other part.
"""

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from longtake.errors import ModelError, RecipeError
from longtake.formatting import did_you_mean
from longtake.models.family import Conditioning, Family

ADDED = "added_module"
"""Its name as a submodule of the model."""


class AddedModule(Protocol):
    """What a `trainable.module` has to be: an nn.Module with these three.

    All that it is given is in its own dtype (under autocast: in what autocast makes of it), and
    what it returns is converted back.
    """

    def __init__(self, width: int, blocks: Sequence[str], latent_channels: int) -> None:
        """Build it.

        Args:
            width: D of the tokens.
            blocks: names of the blocks that it follows, in the model's order.
            latent_channels: C of the latents in the conditioning.
            **options: whatever else it takes by name comes from the recipe's trainable.options.
        """

    def prepare(self, conditioning: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Once in each forward pass, before the first block: what `forward` will need.

        Args:
            conditioning: `<name>_latents` [B, C, 1, h, w] of every name in data.references, and
                what the text encoder gave, such as `prompt_embeds` [B, T, D'].
        """
        ...

    def forward(self, block: str, tokens: Tensor, prepared: Mapping[str, Tensor]) -> Tensor:
        """After each of its blocks: the new tokens.

        Where a block is recomputed this runs again in the backward pass, so it must depend on
        nothing but its arguments and weights.

        Args:
            block: which, by name.
            tokens: the image's or video's [B, T, D], as the block left them.
            prepared: what `prepare` returned.
        """
        ...


def attach(
    model: nn.Module, module: nn.Module, family: Family, blocks: Sequence[str], dtype: torch.dtype
) -> None:
    """Let a module follow blocks; it becomes a submodule of the model.

    Call it before the model is sharded: the hooks then run while the weights are gathered.
    """
    host: Any = model
    casts = dtype != main_dtype(model)
    host.add_module(ADDED, module)
    attachment = _Attachment(module, family, dtype, casts=casts)
    attachment.hooks = [
        host.register_forward_pre_hook(attachment.before_model),
        host.register_forward_hook(attachment.after_model),
    ]
    for name in blocks:
        hook = partial(attachment.after_block, name)
        attachment.hooks.append(model.get_submodule(name).register_forward_hook(hook))
    host._attachment = attachment


def detach(model: nn.Module) -> None:
    """Take an added module off a model again; nothing without one."""
    host: Any = model
    if hasattr(host, "_attachment"):
        for hook in host._attachment.hooks:
            hook.remove()
        del host._attachment
        delattr(host, ADDED)


def condition(model: nn.Module, conditioning: Conditioning) -> None:
    """Give the added module what the next forward pass is conditioned on; nothing without one."""
    attachment: _Attachment | None = getattr(model, "_attachment", None)
    if attachment is not None:
        attachment.conditioning = conditioning


def added_module(model: nn.Module) -> nn.Module | None:
    module: nn.Module | None = getattr(model, ADDED, None)
    return module


def block_names(model: nn.Module, family: Family, patterns: Sequence[str]) -> list[str]:
    """Names of a model's blocks that patterns match, in the family's order.

    Raises:
        RecipeError: a pattern matches none; names the nearest.
    """
    by_identity = {id(part): name for name, part in model.named_modules()}
    names = [by_identity[id(block)] for block in family.blocks(model)]
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise RecipeError(
                f"trainable.blocks: {pattern!r} matches no block of the model; "
                f"{did_you_mean(pattern, names)}"
            )
    return [name for name in names if any(fnmatchcase(name, pattern) for pattern in patterns)]


def main_dtype(model: nn.Module) -> torch.dtype:
    """What most of a model's weights are in."""
    sizes: dict[torch.dtype, int] = {}
    for parameter in model.parameters():
        sizes[parameter.dtype] = sizes.get(parameter.dtype, 0) + parameter.numel()
    return max(sizes, key=lambda dtype: sizes[dtype])


class _Attachment:
    """Brings the module in; it keeps what was prepared until the next forward pass.

    So long, because a block that is recomputed asks for it again in the backward pass.
    """

    def __init__(
        self, module: nn.Module, family: Family, dtype: torch.dtype, *, casts: bool
    ) -> None:
        self.module: Any = module
        self.family = family
        self.dtype = dtype
        self.casts = casts
        """Whether tokens come in another dtype than the module's."""
        self.hooks: list[RemovableHandle] = []
        self.conditioning: Conditioning | None = None
        self.prepared: Mapping[str, Tensor] = {}

    def __getstate__(self) -> dict[str, Any]:
        """A copy begins without what a forward pass has left: torch copies no such tensors."""
        return self.__dict__ | {"conditioning": None, "prepared": {}}

    def before_model(self, model: nn.Module, args: object) -> None:
        self.prepared = {}  # the last pass's, before this one's are made
        given, self.conditioning = self.conditioning, None
        if given is None:
            raise ModelError(
                f"{self._name()} was not given this forward pass's conditioning. Call "
                "longtake.models.added.condition(model, conditioning) before model(...)."
            )
        self.prepared = self.module.prepare(
            {name: self._cast(each) for name, each in given.items()}
        )

    def after_model(self, model: nn.Module, args: object, output: object) -> None:
        if not torch.is_grad_enabled():  # no backward pass will ask for it
            self.prepared = {}

    def after_block(self, name: str, block: nn.Module, args: object, output: Any) -> Any:
        tokens = self.family.block_tokens(output)
        changed = self.module(name, tokens.to(self.dtype) if self.casts else tokens, self.prepared)
        if not isinstance(changed, Tensor) or changed.shape != tokens.shape:
            got = list(changed.shape) if isinstance(changed, Tensor) else type(changed).__name__
            raise ModelError(
                f"{self._name()} returned {got} after block {name}; its forward must return the "
                f"tokens it was given, changed: {list(tokens.shape)}."
            )
        return self.family.with_tokens(output, changed.to(tokens.dtype))

    def _cast(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.dtype) if tensor.is_floating_point() else tensor

    def _name(self) -> str:
        return f"The added module {type(self.module).__name__}"
