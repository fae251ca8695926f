"""Builds models of any size without weights, at once; each rank fills in its part later.

A parameter without values is on torch's meta device. Buffers are real from the beginning: they hold
what a constructor computes, such as tables of positions, and no file has them.
"""

import json
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakIdKeyDictionary

from longtake.config import ModelSection
from longtake.errors import ModelError, RecipeError
from longtake.models import numerics, pretrained, release_checks, releases
from longtake.models.quantized import QuantizedLinear
from longtake.models.stored_weights import (
    Rows,
    StoredTensor,
    find_in_one_file,
    refuse_misfits,
)
from longtake.models.weight_files import open_weights

Weights = bool | Literal["later"]
"""Choice for the weights of a model to build: True with values, False on the meta device, `later`
ready to be filled."""

Target = Tensor | QuantizedLinear
"""Destination of values read from a file: a tensor, or a layer that quantises them."""

_FILE = "diffusion_pytorch_model.safetensors"
_IS_META: Any = getattr(torch.Tensor.is_meta, "__get__")  # noqa: B009 - a property to mypy
_READING_THREADS = 4  # a network disk answers several at a time
_BYTES_PER_MAPPING = 2**25  # per mapping of a file: pages that were read would count as memory


class DeferredParameter(NamedTuple):
    """A parameter of a module whose values are still missing, on the meta device."""

    module: nn.Module
    name: str
    stored: str
    """Name of the parameter in the model as its family builds it, and in files of weights."""

    @property
    def parameter(self) -> nn.Parameter:
        parameter = getattr(self.module, self.name)
        assert isinstance(parameter, nn.Parameter)
        return parameter

    @property
    def target(self) -> "Target":
        """Tensor, or quantised layer, into which the parameter's values are read."""
        is_quantized = isinstance(self.module, QuantizedLinear) and self.name == "weight"
        return self.module if is_quantized else self.parameter  # type: ignore[return-value]


@dataclass(frozen=True)
class DeferredWeights:
    """The parameters of a model that have no values yet, and the source of their values."""

    parameters: Sequence[DeferredParameter] = ()
    files: Mapping[str, StoredTensor] | None = None
    """Place of each parameter in a file, by its stored name; if this and `program` are None, a
    checkpoint fills the parameters."""
    program: "InitProgram | None" = None
    """Recorded initialisation that draws the parameters at random."""

    def give_memory(self, model: Any, device: torch.device) -> None:
        """Replace a model's meta tensors by zeros on a device; of sharded ones only the shard."""
        if self.parameters:
            model._apply(
                lambda each: torch.zeros_like(each, device=device) if each.is_meta else each
            )

    def fill(self) -> None:
        if self.files is not None:
            read_into({each.stored: each.target for each in self.parameters}, self.files)
        elif self.program is not None:
            self.program.run({each.stored: each.parameter for each in self.parameters})


NOTHING_DEFERRED = DeferredWeights()


def build_transformer(
    model_class: Any,
    section: ModelSection,
    fitted: Mapping[str, int],
    *,
    weights: Weights,
    channel_ratios: Collection[float] = (),
) -> nn.Module:
    """Build a transformer: pretrained in the section's dtype, or random in fp32.

    Raises:
        RecipeError: an argument in `fitted` differs in the transformer's config.
    """
    model: Any
    if section.pretrained is None:
        with torch.device("cpu" if weights else "meta"):
            model = pretrained.construct("model.config", model_class, {**fitted, **section.config})
    else:
        pretrained.refuse_unused(
            "model", {"config": section.config}, "model.pretrained brings its own"
        )
        where, subfolder = str(section.release()), section.folder()
        file = section.one_file()
        folder = None
        if weights and file is None:
            folder = pretrained.locate(where, subfolder)
        release = releases.read_release(section)
        pretrained.refuse_other_class(release.config, model_class, where, subfolder)
        release_checks.refuse_untrained(release, channel_ratios, section)
        if file is not None:
            model = _from_one_file(model_class, section, file, weights)
        elif folder is None:
            model = on_meta(model_class, where, subfolder)
        elif weights == "later":
            config = pretrained.read_config(folder / subfolder / "config.json")
            model = _from_config(model_class, config, where, subfolder)
            # As from_pretrained does.
            model.register_to_config(_name_or_path=str(folder / subfolder))
            model.eval()
        else:  # the weights pass through no other dtype than the one they will be kept in
            model = pretrained.load_pretrained(
                model_class, str(folder), subfolder, torch_dtype=numerics.DTYPES[section.dtype]
            )
    for name, expected in fitted.items():
        if model.config[name] != expected:
            raise RecipeError(
                f"The transformer's {name} is {model.config[name]}, but codec and text encoder "
                f"give {expected}. Use the codec and text encoder that belong to it."
            )
    return model


def _from_one_file(
    model_class: Any, section: ModelSection, file: Path, weights: Weights
) -> nn.Module:
    """Build a transformer whose weights are one file, which is checked name by name."""
    where, subfolder = str(section.release()), section.folder()
    config = releases.part_config(where, subfolder)
    if weights:
        with parameters_on_meta():
            model = _from_config(model_class, config, where, subfolder)
        model.eval()  # as from_pretrained does
    else:
        model = on_meta(model_class, where, subfolder)
    found = find_in_one_file(file, model, section.qkv_layout)
    refuse_misfits(model, found, file, where)
    if weights is True:
        numerics.keep_weights_in(model, numerics.DTYPES[section.dtype])
        DeferredWeights(deferred_parameters(model)).give_memory(model, torch.device("cpu"))
        read_into(model.state_dict(), found)
    return model


def on_meta(model_class: Any, where: str, subfolder: str) -> nn.Module:
    """Outline a diffusers or transformers model: shapes and dtypes on the meta device only."""
    config = releases.part_config(where, subfolder)
    pretrained.refuse_other_class(config, model_class, where, subfolder)
    with torch.device("meta"):
        return _from_config(model_class, config, where, subfolder)


def _from_config(model_class: Any, config: dict[str, Any], where: str, subfolder: str) -> nn.Module:
    try:
        with pretrained.quiet(model_class):
            if hasattr(model_class, "load_config"):  # diffusers
                model: nn.Module = model_class.from_config(config)
            else:
                model = model_class(model_class.config_class.from_dict(config))
    except Exception as error:  # wrong sizes fail inside constructors in any way
        raise ModelError(
            f"{where}: the configuration of its {subfolder} does not fit {model_class.__name__}: "
            f"{error}. Check the folder."
        ) from error
    # transformers has renamed `torch_dtype` to `dtype`; releases have either.
    stored = config.get("torch_dtype") or config.get("dtype") or "float32"
    numerics.keep_weights_in(model, getattr(torch, str(stored)))
    return model


def deferred_parameters(model: nn.Module) -> list[DeferredParameter]:
    """List the parameters of a model that have no values, under their present names."""
    return [
        DeferredParameter(module, name, f"{prefix}.{name}" if prefix else name)
        for prefix, module in model.named_modules()
        for name, parameter in module.named_parameters(recurse=False)
        if parameter.is_meta
    ]


def can_be_filled(
    deferred: Iterable[DeferredParameter],
    model: nn.Module,
    files: Mapping[str, StoredTensor] | None,
) -> bool:
    """Return True if a model's missing parameters can be filled later, from `files` if given.

    They need one name each, and equal shapes in the files. Persistent buffers would have to come
    from files too, but `fill` reads none.
    """
    shared = len(list(model.named_parameters(remove_duplicate=False)))
    if shared != len(list(model.parameters())):
        return False
    if files is None:
        return True
    buffers = {name for name, _ in model.named_buffers()}
    expected = shapes_of(deferred)
    if buffers & model.state_dict().keys() or not expected.keys() <= files.keys():
        return False
    stored: dict[str, tuple[int, ...]] = {}
    try:
        for file in {files[name].file for name in expected}:
            with open_weights(file) as opened:
                held = [name for name in expected if files[name].file == file]
                stored |= {name: files[name].shape_in(opened) for name in held}
    except (OSError, ValueError, SafetensorError):
        return False
    return stored == expected


def shapes_of(deferred: Iterable[DeferredParameter]) -> dict[str, tuple[int, ...]]:
    return {each.stored: tuple(each.parameter.shape) for each in deferred}


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Put the parameters of modules built inside the context on the meta device, at no cost."""
    modules: Any = nn.Module
    register = modules.register_parameter
    known = WeakIdKeyDictionary()  # so that one parameter under two names stays one

    def register_on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        register(module, name, parameter)
        if parameter is not None and not parameter.is_meta:
            if parameter not in known:
                empty = nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad)
                known[parameter] = empty
            module._parameters[name] = known[parameter]

    # Patched for all modules, because constructors of other libraries make parameters anywhere.
    modules.register_parameter = register_on_meta
    try:
        yield
    finally:
        modules.register_parameter = register


@dataclass(frozen=True)
class _Place:
    """Memory layout of a tensor in a recorded call of an operator."""

    storage: int
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int


class _Call(NamedTuple):
    """A recorded call of a torch operator, with memory layouts in place of its tensors."""

    operator: Any
    args: Any
    kwargs: Any
    reads: frozenset[int]  # storages of its arguments
    writes: frozenset[int]  # storages of arguments that it changes
    outputs: tuple[int, ...]  # storages of what it returns

    @property
    def makes(self) -> frozenset[int]:
        return frozenset(self.outputs) - self.reads

    @property
    def is_random(self) -> bool:
        return torch.Tag.nondeterministic_seeded in self.operator.tags

    @property
    def has_own_generator(self) -> bool:
        return any(isinstance(each, torch.Generator) for each in pytree.tree_leaves(self[1:3]))


class _Recorder(TorchDispatchMode):
    """Dispatch mode that records every call of a torch operator, on any device."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[_Call] = []
        self._storages: dict[int, torch.UntypedStorage] = {}  # kept alive, so that no id is reused

    def place(self, tensor: Tensor) -> _Place:
        storage = tensor.untyped_storage()
        self._storages[storage._cdata] = storage
        shape, stride = tensor.shape, tensor.stride()
        offset = int(tensor.storage_offset())
        return _Place(storage._cdata, tensor.dtype, shape, stride, offset)

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        arguments = func._schema.arguments
        values = dict(zip((each.name for each in arguments), args, strict=False)) | kwargs
        # The schema alone says which arguments an operator changes, in place or by `out`.
        written = [each.name for each in arguments if each.alias_info and each.alias_info.is_write]
        changed = [values.get(name) for name in written]
        reads, writes, outputs = map(self._storages_of, ((args, kwargs), changed, result))
        args, kwargs = pytree.tree_map_only(Tensor, self.place, (args, kwargs))
        self.calls.append(_Call(func, args, kwargs, frozenset(reads), frozenset(writes), outputs))
        return result

    def _storages_of(self, values: Any) -> tuple[int, ...]:
        leaves = pytree.tree_leaves(values)
        return tuple(self.place(each).storage for each in leaves if isinstance(each, Tensor))


class _Questions(TorchFunctionMode):
    """Function mode that notes whether a model's constructor reads `Tensor.is_meta`.

    Some functions of `torch.nn.init` do, and draw nothing on the meta device.
    """

    was_asked = False

    def __torch_function__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.was_asked |= func == _IS_META
        return func(*args, **(kwargs or {}))


class InitProgram:
    """The random initialisation of a model, recorded to be run again parameter by parameter.

    A constructor's operators are recorded on the meta device. `run` calls them again in their
    order, on the CPU, from the same seed: parameters get the same numbers as by the constructor,
    but each exists only until the last operator that uses it, and then as this rank's shard.
    """

    def __init__(self, build: Callable[[], nn.Module]) -> None:
        self._seed, recorder, questions = torch.initial_seed(), _Recorder(), _Questions()
        with torch.random.fork_rng(devices=[]), recorder, questions:
            model = build()
        self._calls = recorder.calls
        self._places = {name: recorder.place(each) for name, each in model.named_parameters()}
        buffers = {recorder.place(each).storage for _, each in model.named_buffers()}
        storages = {place.storage for place in self._places.values()}
        # Calls that draw are all run again, even unused ones: they advance the generator.
        self._needed = self._contributing(storages, and_random=True)
        # A constructor whose parameters are on the meta device draws nothing for them, so a buffer
        # that it draws would get other numbers than in a model with weights.
        draws_buffers = any(self._calls[number].is_random for number in self._contributing(buffers))
        needed = [self._calls[number] for number in self._needed]
        made = frozenset[int]().union(*(call.makes for call in needed))
        # A storage that no recorded call makes, such as a tensor read from a file, cannot be made
        # again.
        is_known = storages <= made and all(call.reads <= made for call in needed)
        has_seed = not any(call.has_own_generator for call in needed)
        self.can_run = is_known and has_seed and not (draws_buffers or questions.was_asked)
        """True if every operator was recorded, and the model draws nothing but parameters."""

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tuple(place.shape) for name, place in self._places.items()}

    def run(self, targets: Mapping[str, Tensor]) -> None:
        """Fill tensors with initial values, by the parameters' names; a DTensor gets its shard."""
        last = {each: n for n in self._needed for each in self._touched(n)}
        ready = defaultdict[int, list[str]](list)
        for name in targets:
            ready[last[self._places[name].storage]].append(name)
        made: dict[int, torch.UntypedStorage] = {}

        def real(place: _Place) -> Tensor:
            # A view of the storage in the recorded layout: tensors share memory as in the
            # constructor.
            empty = torch.empty(0, dtype=place.dtype)
            return empty.set_(made[place.storage], place.offset, place.shape, place.stride)

        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(self._seed)
            for number in self._needed:
                call = self._calls[number]
                # Replace places by tensors, and the meta device of the recording by the CPU.
                args, kwargs = pytree.tree_map_only(_Place, real, (call.args, call.kwargs))
                args, kwargs = pytree.tree_map_only(
                    torch.device, lambda _: torch.device("cpu"), (args, kwargs)
                )
                result = call.operator(*args, **kwargs)
                given = [each for each in pytree.tree_leaves(result) if isinstance(each, Tensor)]
                # An in-place operator returns its argument, whose storage exists already.
                for storage, each in zip(call.outputs, given, strict=True):
                    if storage in call.makes:
                        made[storage] = each.untyped_storage()
                for name in ready[number]:
                    part, values = _part(targets[name]), real(self._places[name])
                    _local(targets[name]).copy_(values if part is None else values[part])
                # A storage is freed after its last use: few parameters are whole in memory at a
                # time.
                for storage in self._touched(number):
                    if last[storage] == number:
                        del made[storage]

    def _touched(self, number: int) -> frozenset[int]:
        call = self._calls[number]
        return call.reads | call.makes

    def _contributing(self, storages: Iterable[int], *, and_random: bool = False) -> list[int]:
        """Return the numbers of recorded calls that affect storages, and of those that draw."""
        wanted, numbers = set(storages), list[int]()
        for number, call in reversed(list(enumerate(self._calls))):
            if (call.writes | call.makes) & wanted or (and_random and call.is_random):
                wanted |= call.reads
                numbers.append(number)
        return numbers[::-1]


def record(build: Callable[[], nn.Module]) -> InitProgram | None:
    """Record a model's constructor on the meta device, to draw its parameters later.

    None if it cannot be run again.
    """
    try:
        program = InitProgram(build)
    except (NotImplementedError, RuntimeError):  # it reads values, of which there are none
        return None
    return program if program.can_run else None


@contextmanager
def placeholders_on_cpu(deferred: Sequence[DeferredParameter]) -> Iterator[None]:
    """Put parameters on the CPU, without values, for peft, which adds weights on their device."""
    before = [each.module._parameters.get(each.name) for each in deferred]
    for each in deferred:
        # peft makes A and B on the device of the layer's weight, and meta weights would get meta
        # LoRA.
        like = getattr(each.module, each.name)  # no parameter if the layer is quantised
        empty = nn.Parameter(torch.empty_like(like, device="cpu"), like.requires_grad)
        each.module._parameters[each.name] = empty
    try:
        yield
    finally:
        for each, parameter in zip(deferred, before, strict=True):
            # A quantised layer had no parameter of that name before.
            if parameter is None:
                del each.module._parameters[each.name]
            else:
                each.module._parameters[each.name] = parameter


def files_in(folder: Path) -> dict[str, StoredTensor] | None:
    """Find each tensor in safetensors files, as diffusers' `save_pretrained` writes them.

    None if the weights are in another format or incomplete; diffusers then loads them.
    """
    try:
        if (folder / _FILE).is_file():
            with safe_open(folder / _FILE, framework="pt") as opened:
                names = opened.keys()
                return {name: StoredTensor(folder / _FILE, (Rows(name),)) for name in names}
        listed = json.loads((folder / f"{_FILE}.index.json").read_bytes())["weight_map"]
        files = {str(n): StoredTensor(folder / file, (Rows(n),)) for n, file in listed.items()}
    except (OSError, ValueError, LookupError, TypeError, AttributeError, SafetensorError):
        return None
    return files if all(file.is_file() for file in {e.file for e in files.values()}) else None


def release_files(section: ModelSection) -> dict[str, StoredTensor] | None:
    """Find each tensor of a release's transformer; None where `files_in` returns it."""
    assert section.pretrained is not None
    folder = section.folder()
    return files_in(pretrained.locate(section.pretrained, folder) / folder)


def read_into(targets: Mapping[str, Target], files: Mapping[str, StoredTensor]) -> None:
    """Read values from files into tensors and quantised layers; a DTensor gets its own shard."""

    def read(file: Path, names: Sequence[str]) -> None:
        try:
            with open_weights(file) as opened:
                for name in names:
                    _fill_from(targets[name], files[name], opened)
        except (OSError, RuntimeError, ValueError, SafetensorError) as error:
            raise ModelError(
                f"{file} cannot be read: {error}. Download or copy it again."
            ) from error

    # Each batch is of one file, and of little more than `_BYTES_PER_MAPPING` bytes.
    batches: list[tuple[Path, list[str]]] = []
    size = 0
    for name in sorted(targets, key=lambda name: (files[name].file, name)):
        file = files[name].file
        if not batches or batches[-1][0] != file or size >= _BYTES_PER_MAPPING:
            batches.append((file, []))
            size = 0
        batches[-1][1].append(name)
        target = targets[name]
        size += target.nbytes if isinstance(target, Tensor) else target.weight_bytes
    with ThreadPoolExecutor(_READING_THREADS) as threads:
        # `list` makes the first error of a thread rise here; `map` alone would drop it.
        list(threads.map(lambda batch: read(*batch), batches))


@torch.no_grad()
def _fill_from(target: Target, stored: StoredTensor, opened: Any) -> None:
    if not isinstance(target, QuantizedLinear):
        part = _part(target)
        # A rank may have no rows of a small tensor.
        if part is None or all(each.stop > each.start for each in part):
            _local(target).copy_(stored.read(opened, part))
        return
    codes = stored.read_codes(opened)
    if codes is None or not target.load_codes(*codes):
        target.load(stored.read(opened))


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _part(tensor: Tensor) -> tuple[slice, ...] | None:
    """Return the part of a DTensor that this rank has; None for an ordinary tensor."""
    if not isinstance(tensor, DTensor):
        return None
    shape, offset = compute_local_shape_and_global_offset(
        tensor.shape, tensor.device_mesh, tensor.placements
    )
    return tuple(slice(at, at + size) for at, size in zip(offset, shape, strict=True))
