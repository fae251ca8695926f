"""Finds, downloads and loads parts of pretrained models, or makes them with random weights.

Torch is imported with a model, not for its configuration.
"""

import importlib
import inspect
import json
import logging
import re
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from longtake.errors import ModelError, RecipeError
from longtake.formatting import did_you_mean, printable

_REPOSITORY_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
_REACH_SECONDS = 10
_WEIGHTS = re.compile(r"(?:diffusion_pytorch_model|pytorch_model|model)(.*)\.(?:safetensors|bin)")
_VARIANT = re.compile(r"\.(\w+)")  # in group 1 above: .fp16 of model.fp16-00001-of-00002.bin
_OBJECTIVE_FILES = (
    "scheduler/scheduler_config.json",
    "guider/guider_config.json",
    "model_index.json",
    "modular_model_index.json",
)
_INSTEAD_OF_FILES = dict.fromkeys(
    (".ckpt", ".pt", ".pth", ".bin"),
    "Reading a file of this kind can run code that is in it, so that longtake reads "
    "safetensors and GGUF only. Take the model's safetensors file.",
)
"""Advice for files of weights that are never read, by their ending."""
_ONE_FILE = (".safetensors", ".sft", ".gguf", *_INSTEAD_OF_FILES)
_is_fetched: ContextVar[bool] = ContextVar("is_fetched", default=False)


@dataclass(frozen=True)
class PipelinePart:
    """A frozen part of a family's pipeline, such as its codec, as diffusers lays it out."""

    class_names: tuple[str, ...]  # usable ones; the first is taken if no file names one
    folder: str
    tokenizer: str = ""  # folder of a tokenizer, or of an image encoder's processor
    tokenizer_class: str = "AutoTokenizer"  # name in transformers
    module: str = "transformers"  # Python module that has the encoder's class
    reads_captions: bool = False  # in `FrozenParts.further`: False for encoders of pictures
    audio: tuple["PipelinePart", ...] = ()  # of a codec: the parts of the audio codec beside it
    codec_class: type[Any] | None = None  # of an autoencoder that the family wraps in its own way

    @property
    def class_name(self) -> str:
        return self.class_names[0]


@dataclass(frozen=True)
class FrozenParts:
    """The frozen codec, text encoders and processors of a family's diffusers pipeline."""

    codec: PipelinePart
    text: PipelinePart
    pooled: PipelinePart = PipelinePart(("CLIPTextModel",), "text_encoder", "tokenizer")
    further: tuple[PipelinePart, ...] = ()
    """Further encoders in the pipeline of `text.pretrained`, such as one of pictures; those that
    its model_index.json does not name are left out.
    """
    processor: PipelinePart | None = None
    """Processor of pictures that are encoded together with captions; it has no weights."""
    has_random_text: bool = True
    """True if text encoders can be made with random weights, over the words of a catalog."""


@contextmanager
def local_copies() -> Iterator[None]:
    """Load from the Hugging Face cache without requests: another process has downloaded already."""
    token = _is_fetched.set(True)
    try:
        yield
    finally:
        _is_fetched.reset(token)


def load_pretrained(loaded_class: Any, where: str, subfolder: str, **options: Any) -> Any:
    """Load a model or tokenizer from a local folder or a repository id, downloaded and cached.

    Raises:
        ModelError: the part cannot be found or loaded, or leaves tensors without values.
    """
    folder = locate(where, subfolder) / subfolder
    is_model = hasattr(loaded_class, "load_state_dict")  # else a tokenizer or processor
    if is_model:
        _refuse_unloadable(loaded_class, folder, where, subfolder)
        options["output_loading_info"] = True
    try:
        with quiet(loaded_class):
            # `locate` has downloaded all of it: a node without a network must not ask the hub.
            loaded = loaded_class.from_pretrained(str(folder), local_files_only=True, **options)
    except Exception as error:  # each format and library raises its own kinds
        raise ModelError(
            f"{loaded_class.__name__} cannot be loaded from {folder}: {_first_line(error)} "
            "Expected what save_pretrained writes. Check the folder."
        ) from error
    if not is_model:
        return loaded
    model, report = loaded
    # The libraries only warn of such tensors, and return the model all the same.
    if missing := without_values(report):
        raise ModelError(
            f"The weights in {folder} leave {len(missing)} tensors of {loaded_class.__name__} "
            f"without values, such as {missing[0]}. They belong to another class or another "
            "library version."
        )
    return model


def without_values(report: Mapping[str, Any]) -> list[str]:
    """Return the names of a model's tensors to which its files gave no values.

    Args:
        report: what `from_pretrained` of diffusers and transformers returns beside the model.
    """
    return sorted({*report["missing_keys"], *map(str, report["mismatched_keys"])})


def _refuse_unloadable(loaded_class: Any, folder: Path, where: str, subfolder: str) -> None:
    config = folder / "config.json"
    # An unreadable configuration is left to from_pretrained, whose error the caller reports.
    with suppress(OSError, ValueError):
        values = json.loads(config.read_text(encoding="utf-8"))
        if isinstance(values, dict):
            refuse_other_class(values, loaded_class, where, subfolder)
    names = sorted(path.name for path in folder.iterdir())
    middles = [match[1] for name in names if (match := _WEIGHTS.fullmatch(name))]
    variants = [variant[1] for middle in middles if (variant := _VARIANT.search(middle))]
    # All weights belong to a variant, and `from_pretrained` without one would find none.
    if variants and len(variants) == len(middles):
        raise ModelError(
            f"{folder} has weights of the variant {variants[0]} only, and longtake loads weights "
            f"without a variant. Load them with {loaded_class.__name__}.from_pretrained(..., "
            f"variant={variants[0]!r}), save them with save_pretrained(...), and name that folder."
        )


def refuse_other_class(
    config: Mapping[str, Any], model_class: Any, where: str, subfolder: str
) -> None:
    """Refuse a model configuration saved from another class: defaults would fill its gaps."""
    if hasattr(model_class, "load_config"):  # diffusers
        saved, needed = config.get("_class_name"), model_class.__name__
    else:
        saved, needed = config.get("model_type"), model_class.config_class.model_type
    if saved is not None and saved != needed:
        raise ModelError(
            f"{where}: its {subfolder} is of the class {saved}, but {needed} is needed. Name "
            "another model, or another model.subfolder, in the recipe."
        )


def construct(key: str, built_class: Any, values: Mapping[str, Any]) -> Any:
    """Call `built_class(**values)` with values of a recipe key; RecipeError if they are unfit."""
    check_arguments(key, built_class.__init__, values)
    known = defaults(built_class.__init__).items()
    if missing := [n for n, value in known if value is inspect.Parameter.empty and n not in values]:
        needed = ", ".join(missing)
        raise RecipeError(f"{key} lacks {needed}: {built_class.__name__} has no default for it.")
    try:
        return built_class(**values)
    except Exception as error:  # wrong sizes fail inside constructors in any way
        # A bare assert of a constructor has no text; its line of code says what does not fit.
        code = traceback.extract_tb(error.__traceback__)[-1]
        line = f" in {Path(code.filename).name}, line {code.lineno}: {code.line}"
        reason = f"{type(error).__name__}{f': {error}' if str(error) else line}"
        raise RecipeError(f"{key} does not fit {built_class.__name__}. {reason}") from error


def check_arguments(key: str, function: Callable[..., Any], values: Mapping[str, Any]) -> None:
    """Refuse recipe values that are no named arguments of the function they are for."""
    known = list(defaults(function))
    for name in values:
        if name not in known:
            owner = function.__qualname__.removesuffix(".__init__")
            near = did_you_mean(name, known, shown=len(known))
            raise RecipeError(f"{key}.{name} is not an argument of {owner}; {near}")


def defaults(function: Callable[..., Any]) -> dict[str, Any]:
    """Return a function's named arguments and defaults (`Parameter.empty` if required).

    Neither self nor `**kwargs` count: a name that only `**kwargs` takes is most likely misspelt.
    """
    parameters = inspect.signature(function).parameters.values()
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return {p.name: p.default for p in parameters if p.kind in named and p.name != "self"}


def refuse_unused(section: str, values: Mapping[str, object], because: str) -> None:
    """Refuse keys of a recipe section that are set but would not be used."""
    for name, value in values.items():
        if value:
            raise RecipeError(
                f"{section}.{name} is set, but it would not be used: {because}. Remove the one or "
                "change the other."
            )


@contextmanager
def quiet(speaker: Any) -> Iterator[None]:
    """Silence warnings and progress bars of the library that a class or an object comes from.

    Missing weights, which the library would only warn of, are raised as errors instead.
    """
    owner = speaker if inspect.isclass(speaker) else type(speaker)
    # The whole MRO, because a user's subclass has a module of its own.
    libraries = {each.__module__.partition(".")[0] for each in owner.__mro__}
    library = "diffusers" if "diffusers" in libraries else "transformers"
    log = importlib.import_module(f"{library}.utils.logging")
    verbosity, had_bars = log.get_verbosity(), log.is_progress_bar_enabled()
    log.set_verbosity(logging.ERROR)
    log.disable_progress_bar()
    try:
        yield
    finally:
        log.set_verbosity(verbosity)
        if had_bars:
            log.enable_progress_bar()


def is_repository_id(where: str) -> bool:
    """Return True if `where` names a repository: a path that is there, or a file, comes first."""
    path = Path(where).expanduser()
    is_local = path.exists() or path.suffix.lower() in _ONE_FILE
    return not is_local and _REPOSITORY_ID.fullmatch(where) is not None


def locate(where: str, subfolder: str, files: str = "*") -> Path:
    """Return the local folder that has the subfolder, downloaded if `where` is a repository id.

    Args:
        where: a local folder or a repository id.
        subfolder: folder of one part inside `where`.
        files: pattern of the subfolder's files to download. The configurations of pipeline,
            scheduler and guider are always downloaded: they state objective and guidance.

    Raises:
        ModelError: there is no such folder or repository, or it cannot be downloaded.
    """
    folder = Path(where).expanduser()
    if not folder.is_dir():
        if folder.suffix.lower() in _ONE_FILE or folder.is_file():
            other = (
                f"longtake loads folders in diffusers' layout, with {subfolder}/config.json and "
                "weights beside it: name such a folder or a repository id. Of a transformer one "
                "safetensors or GGUF file is enough as model.pretrained, with its release in "
                "model.config_from (init: --config-from)."
            )
            advice = _INSTEAD_OF_FILES.get(folder.suffix.lower(), other)
            raise ModelError(f"{where} is one file of weights. {advice}")
        # Before any request: a misspelt path must not be asked for on the network.
        if not _REPOSITORY_ID.fullmatch(where):
            raise ModelError(
                f"There is no folder {where}. Expected a diffusers folder on disk, or a repository "
                "id such as Wan-AI/Wan2.1-T2V-1.3B-Diffusers."
            )
        folder = _download(where, [f"{subfolder}/{files}", *_OBJECTIVE_FILES])
    if not (folder / subfolder).is_dir():
        raise _without_part(where, folder, subfolder)
    return folder


def _without_part(where: str, folder: Path, subfolder: str) -> ModelError:
    named: Any = None
    with suppress(ModelError):  # such as no file
        config = read_config(folder / "config.json")
        named = config.get("_class_name") or config.get("model_type")
    if named:
        return ModelError(
            f"{where} is one part of a release ({printable(named)}), and the whole is needed. "
            f"Name the folder or repository that has model_index.json and {subfolder}."
        )
    with suppress(ModelError, AttributeError, LookupError, TypeError):  # it may hold anything
        entry: Any = read_config(folder / "modular_model_index.json")[subfolder][2]
        if source := entry.get("pretrained_model_name_or_path") or entry.get("repo"):
            return ModelError(
                f"{where} has no subfolder {subfolder}; its modular_model_index.json takes it from "
                f"{printable(str(source))}, and longtake loads only from what a recipe names. Name "
                "that for this part (in model, codec or text.pretrained), or copy the folder "
                f"{subfolder} from there into a local copy of the release."
            )
    present = sorted(entry.name for entry in folder.iterdir() if entry.is_dir())
    other = ", or the right model.subfolder in a recipe" if "transformer" in subfolder else ""
    return ModelError(
        f"{where} has no subfolder {subfolder}; it has {', '.join(present) or 'no subfolders'}. "
        "Expected a release in diffusers' layout, with model_index.json and a subfolder for each "
        f"part. Name one{other}."
    )


def _download(repository: str, patterns: list[str]) -> Path:
    from huggingface_hub import HfApi, errors, snapshot_download

    if _is_fetched.get():
        # A part that the other process did not need is downloaded below after all.
        with suppress(errors.LocalEntryNotFoundError):
            return Path(
                snapshot_download(repository, allow_patterns=patterns, local_files_only=True)
            )
    unreachable = ""
    try:
        try:  # asked first, and once: a download retries for minutes before it gives up
            HfApi().model_info(repository, timeout=_REACH_SECONDS)
        except errors.RepositoryNotFoundError:
            raise
        # The hub's HTTP client, and with it the exceptions, changes by version.
        except Exception as error:
            unreachable = _first_line(error)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # advice to the hub's callers, not to ours
            return Path(
                snapshot_download(
                    repository, allow_patterns=patterns, local_files_only=bool(unreachable)
                )
            )
    except errors.GatedRepoError as error:
        raise ModelError(
            f"{repository} is a gated repository, and the hub does not let you download from it. "
            f"Accept the licence at https://huggingface.co/{repository}, then run `hf auth login`."
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise ModelError(
            f"There is no folder {repository}, and the hub has no such repository for you: "
            f"{_first_line(error)} Check the name, and `hf auth login` if it is a private one."
        ) from error
    except errors.LocalEntryNotFoundError as error:
        raise ModelError(
            f"There is no folder {repository}, nothing of that name was downloaded before, and the "
            f"hub cannot be reached: {unreachable} Name a diffusers folder on disk, or connect."
        ) from error
    except OSError as error:
        raise ModelError(f"{repository} cannot be downloaded: {_first_line(error)}") from error


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return f"{lines[0].rstrip('.')}."


def read_config(path: Path) -> dict[str, Any]:
    """Read a JSON object, such as a config.json; ModelError if the file holds none."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(
            f"{path} cannot be read: {error}. Expected what save_pretrained writes: save or "
            "download it again."
        ) from error
    if not isinstance(values, dict):
        raise ModelError(
            f"{path} holds no configuration. Expected what save_pretrained writes: save or "
            "download it again."
        )
    return values
