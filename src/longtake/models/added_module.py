"""User-defined modules that are added around the blocks of a family's model.

The model's class and code do not change. As submodules of the model, added modules are seen by
parameters(), optimizers, sharding, checkpoints and the EMA. docs/guides/modules.md is the guide.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.hooks import RemovableHandle

from longtake.config import ModuleSection
from longtake.errors import ModelError, RecipeError
from longtake.formatting import did_you_mean
from longtake.models import numerics, pretrained
from longtake.models.base import AttentionInputs, BlockInputs, Conditioning, Family
from longtake.parallel.attention import AttentionMode
from longtake.trust import import_class

ADDED = "added_modules"
"""Name of the model's submodule that holds the added modules."""

_STREAMS = ("tokens", "text", "temb")  # fields that are converted to the module's dtype
_WRAPPERS = ("around", "around_attention")

BlockCall = Callable[[BlockInputs], BlockInputs]
Attend = Callable[[AttentionInputs], Tensor]


class AddedModule(Protocol):
    """Interface of a user's nn.Module around blocks, which `trainable.modules.<name>.module` names.

    It has `around`, `around_attention` or both, and `prepare` if it needs conditioning. `prepare`
    and `around` get tensors in the module's own dtype (under autocast: as autocast converts it),
    and what `around` returns is converted back. Queries, keys and values come in the model's dtype.
    """

    def __init__(self, width: int, blocks: Sequence[str], latent_channels: int) -> None:
        """Build the added module; its constructor may leave out arguments that it does not need.

        Args:
            width: D of the tokens.
            blocks: names of the blocks that it is around, in the model's order.
            latent_channels: C of the latents.
            **options: its other named arguments, from the recipe's options.
        """

    def prepare(self, conditioning: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Compute `inputs.prepared` once in each forward pass, before the first block.

        It is not recomputed: what it returns is kept until the backward pass ends.

        Args:
            conditioning: `noisy_latents` [B, C, F, H, W], `sigmas` [B], the text encoder's tensors,
                such as `prompt_embeds` [B, T', D'], and of every name in data.conditioning what
                `longtake.models.conditioning` says, such as `<name>_latents` [B, C, 1, h, w] of a
                picture.
        """

    def around(self, block: str, call: BlockCall, inputs: BlockInputs) -> BlockInputs:
        """Run a block of the model that the module is around; called in place of the block.

        It runs the block by `call`, on inputs that may be changed, and returns what `call`
        returned, which may be changed too: the same inputs with the block's new `tokens` and
        `text`. (Text that a block does not return, as Wan's, is changed for that block alone.) The
        shapes of what is returned must be those of the inputs.

        Where a block is recomputed this runs again in the backward pass, so it must depend on
        nothing but its arguments and weights.
        """

    def around_attention(self, block: str, attend: Attend, inputs: AttentionInputs) -> Tensor:
        """Compute an attention [B, H, T, d] of a block; called in place of each of its attentions.

        `attend` may be called several times, such as with keys and values of the module's own, for
        which `mask` is None.
        """


def build_module(
    name: str, section: ModuleSection, width: int, blocks: Sequence[str], latent_channels: int
) -> nn.Module:
    """Build an added module of the recipe with new weights; RecipeError if it does not fit."""
    key = f"trainable.modules.{name}"
    # nn.ModuleDict refuses keys that are attributes of its class, such as `keys` and `forward`.
    if hasattr(nn.ModuleDict(), name):
        raise RecipeError(f"{key}: PyTorch's modules have an attribute {name}. Take another name.")
    module_class: Any = import_class(section.module, f"{key}.module")
    named = f"{key}.module {section.module!r}"
    protocol = "See AddedModule in longtake.models.added_module for the methods that it can have."
    if not issubclass(module_class, nn.Module):
        raise RecipeError(f"{named} is not a torch.nn.Module. Make it a subclass. {protocol}")
    if not any(callable(getattr(module_class, method, None)) for method in _WRAPPERS):
        raise RecipeError(
            f"{named} has no method around(self, block, call, inputs), and no around_attention: it "
            f"would never be called. {protocol}"
        )
    sizes = {"width": width, "blocks": list(blocks), "latent_channels": latent_channels}
    arguments = pretrained.defaults(module_class.__init__)
    options = [option for option in arguments if option not in sizes]
    for option in section.options:
        if option not in options:
            raise RecipeError(
                f"{key}.options.{option} is not an option of {module_class.__name__}; "
                f"{did_you_mean(option, options)}"
            )
    needed = {argument: sizes[argument] for argument in arguments if argument in sizes}
    values = needed | section.options
    return pretrained.construct(f"{key}.options", module_class, values)


def block_names(
    model: nn.Module, family: Family, patterns: Sequence[str], key: str = "blocks"
) -> list[str]:
    """Return the names of a model's blocks that match patterns, in the family's order.

    `key` is the recipe key that names the patterns.
    """
    by_identity = {id(part): name for name, part in model.named_modules()}
    names = [by_identity[id(block)] for block in family.blocks(model)]
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise RecipeError(
                f"{key}: {pattern!r} matches no block of the model; {did_you_mean(pattern, names)}"
            )
    return [name for name in names if any(fnmatchcase(name, pattern) for pattern in patterns)]


def attach(
    model: Any,
    modules: Mapping[str, nn.Module],
    family: Family,
    blocks: Mapping[str, Sequence[str]],
    dtype: torch.dtype,
) -> None:
    """Run blocks of a model within user-defined modules, and make these submodules of the model.

    The first module is the outermost: it sees a block's inputs first and its outputs last. Call it
    before the model is compiled or sharded: a block then runs within its modules when it is
    recomputed, compiled, or has its weights gathered.

    Args:
        model: a model of the family.
        modules: the modules, in `dtype`, by their names in the recipe.
        family: the model's family.
        blocks: names of the blocks of each module.
        dtype: the modules' dtype.
    """
    attachment = _Attachment(modules, dtype, casts=dtype != numerics.main_dtype(model))
    model.add_module(ADDED, nn.ModuleDict(modules))
    for index, name in enumerate(block_names(model, family, ("*",))):
        own = [each for each in modules if name in blocks[each]]
        if own:
            block: Any = model.get_submodule(name)
            # FSDP, recomputation and the compiler call the block and not its forward: the modules'
            # work is then within the block's gathered weights, recomputed memory and compiled code.
            block.forward = _BlockForward(attachment, family, block, name, index, own)
            attachment.blocks.append(name)
    attachment.hooks = [
        model.register_forward_pre_hook(attachment.before_model),
        model.register_forward_hook(attachment.after_model),
    ]
    model._attachment = attachment


def detach(model: Any) -> None:
    """Remove the added modules from a model, if it has any."""
    if hasattr(model, "_attachment"):
        for hook in model._attachment.hooks:
            hook.remove()
        for name in model._attachment.blocks:
            block: Any = model.get_submodule(name)
            before = block.forward.forward
            # `del` uncovers the class's forward; one that was set on the instance before is put
            # back.
            del block.forward
            if block.forward != before:
                block.forward = before
        del model._attachment
        delattr(model, ADDED)


def condition(
    model: nn.Module, noisy_latents: Tensor, sigmas: Tensor, conditioning: Conditioning
) -> None:
    """Give the inputs of the next forward pass to the model's added modules, if it has any."""
    attachment: _Attachment | None = getattr(model, "_attachment", None)
    if attachment is not None:
        attachment.given = {**conditioning, "noisy_latents": noisy_latents, "sigmas": sigmas}


@contextmanager
def switched_off(model: nn.Module) -> Iterator[None]:
    """Run a model without its added modules in the context, if it has any."""
    attachment: _Attachment | None = getattr(model, "_attachment", None)
    if attachment is None:
        yield
        return
    attachment.is_off = True
    try:
        yield
    finally:
        attachment.is_off = False


def added_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Return a model's added modules by their names in the recipe; empty without any."""
    return dict(getattr(model, ADDED, nn.ModuleDict()).items())


class _Attachment:
    """State that a model's blocks share: the user's added modules, and tensors they prepared.

    Prepared tensors are kept until the next forward pass, because recomputed blocks need them in
    the backward pass.
    """

    def __init__(
        self, modules: Mapping[str, nn.Module], dtype: torch.dtype, *, casts: bool
    ) -> None:
        self.modules: dict[str, Any] = dict(modules)
        self.called: set[str] = set()  # modules whose forward is `around`, so that hooks see it
        for name, module in self.modules.items():
            if type(module).forward is nn.Module.forward and hasattr(module, "around"):
                module.forward = module.around
                self.called.add(name)
        self.dtype = dtype
        self.is_off = False  # true while blocks run without the modules
        self.casts = casts  # True if tokens come in another dtype than the modules'
        self.blocks: list[str] = []
        self.hooks: list[RemovableHandle] = []
        self.given: Conditioning | None = None
        self.sigmas: Tensor | None = None
        self.prepared: dict[str, Mapping[str, Tensor]] = {}

    def __getstate__(self) -> dict[str, Any]:
        # Tensors of a pass are neither copied nor pickled with the model.
        return self.__dict__ | {"given": None, "sigmas": None, "prepared": {}}

    def before_model(self, model: nn.Module, args: object) -> None:
        self.prepared = {}  # frees the last pass's tensors before new ones are made
        # Taken once: a later pass without `condition` fails instead of seeing these tensors.
        given, self.given = self.given, None
        if self.is_off:
            return
        if given is None:
            raise ModelError(
                f"The added modules ({', '.join(self.modules)}) were not given this forward pass's "
                "conditioning. Call longtake.models.added_module.condition(model, noisy_latents, "
                "sigmas, conditioning) before model(...)."
            )
        # fp32 also for bf16 modules, whose 8 bits do not tell neighbouring noise levels apart.
        self.sigmas = given["sigmas"].float()
        own = {
            name: tensor.to(self.dtype) if tensor.is_floating_point() else tensor
            for name, tensor in given.items()
        }
        own["sigmas"] = self.sigmas
        for name, module in self.modules.items():
            self.prepared[name] = module.prepare(own) if hasattr(module, "prepare") else {}

    def after_model(self, model: nn.Module, args: object, output: object) -> None:
        if not torch.is_grad_enabled():  # no backward pass will need it
            self.prepared = {}


class _BlockForward:
    """Replacement of a block's forward that runs it within user-defined modules.

    The first module is the outermost.
    """

    def __init__(
        self,
        attachment: _Attachment,
        family: Family,
        block: nn.Module,
        name: str,
        index: int,
        modules: Sequence[str],
    ) -> None:
        self.attachment = attachment
        self.forward: Callable[..., Any] = block.forward
        self.name = name
        self.index = index
        self.fields = dict(family.block.arguments_of(block))
        self.outputs = family.block.outputs_of(block)
        self.attentions = family.block.attentions
        self.parameters = tuple(inspect.signature(block.forward).parameters)
        self.around = [each for each in modules if hasattr(attachment.modules[each], "around")]
        self.attending = [
            each for each in modules if hasattr(attachment.modules[each], "around_attention")
        ]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.attachment.is_off:
            return self.forward(*args, **kwargs)
        # Families pass a block's arguments by position or by name; both are sorted into fields.
        given = dict(zip(self.parameters, args, strict=False)) | kwargs
        seen: dict[str, Any] = {
            field: given.get(argument) for field, argument in self.fields.items()
        }
        assert self.attachment.sigmas is not None
        inputs = BlockInputs(
            tokens=seen["tokens"],
            text=seen.get("text"),
            temb=seen["temb"],
            rope=seen.get("rope"),
            sigmas=self.attachment.sigmas,
            name=self.name,
            index=self.index,
            # Each module gets what its own `prepare` returned, in `_run_within`.
            prepared={},
            audio=seen.get("audio"),
        )
        call: BlockCall = partial(self._run, given)
        for name in reversed(self.around):
            call = partial(self._run_within, name, call)
        after = call(inputs)
        outputs = tuple(getattr(after, field) for field in self.outputs)
        return outputs if len(outputs) > 1 else outputs[0]

    def _run(self, given: Mapping[str, Any], inputs: BlockInputs) -> BlockInputs:
        """Run the block itself; its attentions run within modules that have `around_attention`."""
        changed = {
            argument: getattr(inputs, field)
            for field, argument in self.fields.items()
            if argument in given
        }
        if not self.attending:
            output = self.forward(**{**given, **changed})
        else:
            mode = _ModulesAroundAttention(self, inputs)
            with mode:
                output = self.forward(**{**given, **changed})
            if not mode.num_calls:
                raise ModelError(
                    f"The added module {self.attending[0]} has around_attention, but block "
                    f"{self.name} attends in another way than by torch's "
                    "scaled_dot_product_attention, so it would not be called. Use around."
                )
        outputs = output if isinstance(output, tuple) else (output,)
        return replace(inputs, **dict(zip(self.outputs, outputs, strict=True)))

    def _run_within(self, name: str, call: BlockCall, inputs: BlockInputs) -> BlockInputs:
        """Run a block (or an inner module) by `call` within one added module."""
        attachment = self.attachment
        module = attachment.modules[name]
        own = replace(inputs, prepared=attachment.prepared[name])
        run = module if name in attachment.called else module.around
        if not attachment.casts:
            after: BlockInputs = run(self.name, call, own)
            self._check(name, after, inputs)
            return replace(after, prepared=inputs.prepared)
        seen = _converted(own, attachment.dtype)
        returned = [seen, inputs]  # last result of `call`: converted, and as it was

        def call_converted(changed: BlockInputs) -> BlockInputs:
            result = call(_restored(changed, seen, inputs))
            returned[:] = [_converted(result, attachment.dtype), result]
            return replace(returned[0], prepared=own.prepared)

        after = run(self.name, call_converted, seen)
        self._check(name, after, inputs)
        return replace(_restored(after, *returned), prepared=inputs.prepared)

    def _check(self, name: str, after: Any, inputs: BlockInputs) -> None:
        what = f"The added module {name}"
        if not isinstance(after, BlockInputs):
            raise ModelError(
                f"{what} returned {type(after).__name__} around block {self.name}; its `around` "
                "must return what call(inputs) returned, changed by dataclasses.replace."
            )
        for field in self.outputs:
            got, expected = getattr(after, field), getattr(inputs, field)
            shape = list(got.shape) if isinstance(got, Tensor) else type(got).__name__
            if shape != list(expected.shape):
                raise ModelError(
                    f"{what} returned {field} of {shape} around block {self.name}; expected the "
                    f"shape that they came in, {list(expected.shape)}: the next block takes no "
                    "other."
                )


class _ModulesAroundAttention(AttentionMode):
    """Context in which a block's attentions run within user-defined modules.

    The first module is the outermost.
    """

    def __init__(self, forward: _BlockForward, inputs: BlockInputs) -> None:
        super().__init__()
        self._forward = forward
        self._inputs = inputs

    def attend(self, query: Tensor, key: Tensor, value: Tensor, **how: Any) -> Tensor:
        forward = self._forward
        attachment, number = forward.attachment, self.num_calls - 1
        names = forward.attentions
        name = names[number] if number < len(names) else f"attention {number}"
        call: Attend = partial(_attend, query.dtype, how)
        for each in reversed(forward.attending):
            module = attachment.modules[each]
            own = replace(self._inputs, prepared=attachment.prepared[each])
            # `partial` keeps this round's `call`, which a closure would see replaced.
            call = partial(_attend_within, module, forward.name, call, own)
        # `how` is the same object in `call`, which gets the mask in its inputs instead.
        mask = how.pop("attn_mask", None)
        mixed: Any = call(AttentionInputs(query, key, value, mask, name, self._inputs))
        if not isinstance(mixed, Tensor) or mixed.shape != query.shape:
            shape = list(mixed.shape) if isinstance(mixed, Tensor) else type(mixed).__name__
            raise ModelError(
                f"The added modules ({', '.join(forward.attending)}) returned {shape} around "
                f"{name} of block {forward.name}; expected the query's shape {list(query.shape)}."
            )
        return mixed


def _attend_within(
    module: Any, name: str, call: Attend, block: BlockInputs, inputs: AttentionInputs
) -> Any:
    return module.around_attention(name, call, replace(inputs, block=block))


def _attend(dtype: torch.dtype, how: Mapping[str, Any], inputs: AttentionInputs) -> Tensor:
    """Compute an attention in its block's dtype, converting an added module's keys and values."""
    key, value, mask = inputs.key.to(dtype), inputs.value.to(dtype), inputs.mask
    if mask is not None and mask.shape[-1] != key.shape[2]:
        raise ModelError(
            f"An added module attends to {key.shape[2]} keys around {inputs.name} of block "
            f"{inputs.block.name}, but its mask is of {mask.shape[-1]}. Replace the mask with the "
            "keys: mask=None where none of them is padding."
        )
    query = inputs.query.to(dtype)
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, **how)


def _converted(inputs: BlockInputs, dtype: torch.dtype) -> BlockInputs:
    streams = {field: getattr(inputs, field) for field in _STREAMS}
    return replace(inputs, **{f: s.to(dtype) for f, s in streams.items() if s is not None})


def _restored(changed: BlockInputs, seen: BlockInputs, original: BlockInputs) -> BlockInputs:
    """Convert what an added module changed of a block's inputs back to the block's dtypes.

    Values that it left as they are (`seen`) are replaced by the `original` ones, which saves
    rounding.
    """
    restored = {}
    for field in _STREAMS:
        value, before, own = (getattr(each, field) for each in (changed, seen, original))
        if own is not None:
            restored[field] = own if value is before else value.to(own.dtype)
    return replace(changed, **restored)
