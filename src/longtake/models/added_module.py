"""A module of the user's own beside a family's model: found, built, and attached by forward hooks.

It changes the tokens that named blocks return. The model's class and code do not change; as a
submodule it is seen by parameters(), optimizers, sharding, checkpoints and the EMA.
"""

import importlib
import inspect
import pkgutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from functools import partial
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from longtake.config import TrainableSection
from longtake.errors import ModelError, RecipeError
from longtake.formatting import did_you_mean
from longtake.models import numerics, pretrained
from longtake.models.base import Conditioning, Family
from longtake.trust import run_around

ADDED = "added_module"
"""Its name as a submodule of the model."""

_GIVEN = ("width", "blocks", "latent_channels")  # arguments that it is built with


class AddedModule(Protocol):
    """What a `trainable.module` has to be: an nn.Module with these three methods.

    Its inputs come in its own dtype (under autocast: as autocast converts them), and its output is
    converted back.
    """

    def __init__(self, width: int, blocks: Sequence[str], latent_channels: int) -> None:
        """Build it.

        Args:
            width: D of the tokens.
            blocks: names of the blocks that it follows, in the model's order.
            latent_channels: C of the latents in the conditioning.
            **options: its other named arguments, from the recipe's trainable.options.
        """

    def prepare(self, conditioning: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Called once in each forward pass, before the first block; returns what `forward` needs.

        Args:
            conditioning: of every name in data.conditioning what `longtake.models.conditioning`
                says, such as `<name>_latents` [B, C, 1, h, w] of a picture, and the text encoder's
                tensors, such as `prompt_embeds` [B, T, D'].
        """
        ...

    def forward(self, block: str, tokens: Tensor, prepared: Mapping[str, Tensor]) -> Tensor:
        """Called after each of its blocks; returns the new tokens.

        Where a block is recomputed this runs again in the backward pass, so it must depend on
        nothing but its arguments and weights.

        Args:
            block: its name.
            tokens: the image's or video's [B, T, D], as the block returned them.
            prepared: what `prepare` returned.
        """
        ...


def build_module(
    section: TrainableSection, width: int, blocks: Sequence[str], latent_channels: int
) -> nn.Module:
    """The recipe's added module, with new weights."""
    assert section.module is not None
    found = import_class(section.module)
    _check(found, section)
    given = {"width": width, "blocks": list(blocks), "latent_channels": latent_channels}
    built: nn.Module = pretrained.construct("trainable.options", found, given | section.options)
    return built


def import_class(path: str, setting: str = "trainable.module") -> Any:
    """The class at "package.module:Class", found from the current directory first.

    `setting` is the recipe key that names it.

    Raises:
        RecipeError: there is none (names the nearest), or its file lies in a run directory.
    """
    name, _, class_name = path.partition(":")
    with _current_directory_first():
        _refuse_file_of_a_run(path, setting)
        try:
            module = importlib.import_module(name)
        except Exception as error:  # a user's file can fail in any way
            raise RecipeError(f"{setting} {path!r}: {_why_not(name, error)}") from error
    found = getattr(module, class_name, None)
    if not inspect.isclass(found):
        classes = [each for each, value in vars(module).items() if inspect.isclass(value)]
        raise RecipeError(
            f"{setting} {path!r}: {module.__file__} has no class {class_name}; "
            f"{did_you_mean(class_name, classes)}"
        )
    return found


def _refuse_file_of_a_run(path: str, setting: str) -> None:
    """Refuse a module, or a package above it, whose file is in a run directory; runs nothing."""
    parts = path.partition(":")[0].split(".")
    places: Sequence[str] | None = None
    for number, part in enumerate(parts, 1):
        name = ".".join(parts[:number])
        spec = None if name in sys.builtin_module_names else PathFinder.find_spec(name, places)
        if spec is None:
            return
        files = [spec.origin] if spec.has_location else list(spec.submodule_search_locations or ())
        for file in filter(None, files):
            if (run := run_around(Path(file) / part)) is not None:
                raise RecipeError(
                    f"{setting} {path!r}: {file} lies in the run directory {run.path}, from which "
                    "no code is run. Read it, and copy it to a folder of your own."
                )
        places = list(spec.submodule_search_locations or ())


def _check(found: Any, section: TrainableSection) -> None:
    name = f"trainable.module {section.module!r}"
    protocol = "See AddedModule in longtake.models.added_module for the three methods it must have."
    if not issubclass(found, nn.Module):
        raise RecipeError(f"{name} is not a torch.nn.Module. Make it a subclass. {protocol}")
    if not callable(getattr(found, "prepare", None)):
        raise RecipeError(f"{name} has no method prepare(self, conditioning). {protocol}")
    arguments = list(pretrained.defaults(found.__init__))
    if missing := [each for each in _GIVEN if each not in arguments]:
        raise RecipeError(
            f"{name} is built with width, blocks and latent_channels, but its __init__ does not "
            f"take {', '.join(missing)}. {protocol}"
        )
    options = [each for each in arguments if each not in _GIVEN]
    for option in section.options:
        if option not in options:
            raise RecipeError(
                f"trainable.options.{option} is not an option of {found.__name__}; "
                f"{did_you_mean(option, options)}"
            )


@contextmanager
def _current_directory_first() -> Iterator[None]:
    """Import from there first, as `python -m` does and the installed command does not."""
    here = str(Path.cwd())
    if run_around(Path(here) / "recipe.toml") is not None:
        yield  # any package could be there under the name of an installed one
        return
    sys.path.insert(0, here)
    importlib.invalidate_caches()  # a file may be seconds old
    try:
        yield
    finally:
        sys.path.remove(here)


def _why_not(name: str, error: Exception) -> str:
    missing = error.name if isinstance(error, ModuleNotFoundError) else None
    if missing is None or not f"{name}.".startswith(f"{missing}."):
        return f"importing it failed with {type(error).__name__}: {error}"
    package, _, last = missing.rpartition(".")
    where = package or Path.cwd()
    return f"{where} has no module {last}; {did_you_mean(last, _modules_in(package))}"


def _modules_in(package: str) -> set[str]:
    """Modules and folders of an imported package, or of the current directory."""
    paths = getattr(sys.modules[package], "__path__", ()) if package else [str(Path.cwd())]
    folders = [each.parent.name for path in paths for each in Path(path).glob("*/*.py")]
    files = [each.name for each in pkgutil.iter_modules(paths)]
    return {each for each in {*files, *folders} if each.isidentifier() and each[0] != "_"}


def attach(
    model: nn.Module, module: nn.Module, family: Family, blocks: Sequence[str], dtype: torch.dtype
) -> None:
    """Have a module called after blocks, and make it a submodule of the model.

    Before the model is sharded: the hooks then run while the weights are gathered.
    """
    host: Any = model
    casts = dtype != numerics.main_dtype(model)
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
    """Remove an added module from a model, if it has one."""
    host: Any = model
    if hasattr(host, "_attachment"):
        for hook in host._attachment.hooks:
            hook.remove()
        del host._attachment
        delattr(host, ADDED)


def condition(model: nn.Module, conditioning: Conditioning) -> None:
    attachment: _Attachment | None = getattr(model, "_attachment", None)
    if attachment is not None:
        attachment.conditioning = conditioning


def added_module(model: nn.Module) -> nn.Module | None:
    module: nn.Module | None = getattr(model, ADDED, None)
    return module


def block_names(model: nn.Module, family: Family, patterns: Sequence[str]) -> list[str]:
    """Names of a model's blocks that patterns match, in the family's order."""
    by_identity = {id(part): name for name, part in model.named_modules()}
    names = [by_identity[id(block)] for block in family.blocks(model)]
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise RecipeError(
                f"trainable.blocks: {pattern!r} matches no block of the model; "
                f"{did_you_mean(pattern, names)}"
            )
    return [name for name in names if any(fnmatchcase(name, pattern) for pattern in patterns)]


class _Attachment:
    """The hooks that call a module.

    What was prepared is kept until the next forward pass: recomputed blocks need it in the backward
    pass.
    """

    def __init__(
        self, module: nn.Module, family: Family, dtype: torch.dtype, *, casts: bool
    ) -> None:
        self.module: Any = module
        self.family = family
        self.dtype = dtype
        self.casts = casts  # tokens come in another dtype than the module's
        self.hooks: list[RemovableHandle] = []
        self.conditioning: Conditioning | None = None
        self.prepared: Mapping[str, Tensor] = {}

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"conditioning": None, "prepared": {}}

    def before_model(self, model: nn.Module, args: object) -> None:
        self.prepared = {}  # release the last pass's before this one's are made
        given, self.conditioning = self.conditioning, None
        if given is None:
            raise ModelError(
                f"{self._name()} was not given this forward pass's conditioning. Call "
                "longtake.models.added_module.condition(model, conditioning) before model(...)."
            )
        self.prepared = self.module.prepare(
            {name: self._cast(each) for name, each in given.items()}
        )

    def after_model(self, model: nn.Module, args: object, output: object) -> None:
        if not torch.is_grad_enabled():  # no backward pass will need it
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
