"""Released models: their parts, found, downloaded and loaded, and those that are not trained here.

Configurations of models that people start from are shipped; others are read from their folder, or
are the only files that are downloaded. Torch is imported with a model, not for its configuration.
"""

import importlib
import inspect
import json
import logging
import re
import shutil
import traceback
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal

from longtake.config import ModelSection
from longtake.errors import ModelError, RecipeError
from longtake.flow.shift import MuLine, ShiftRule
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
_ONE_FILE = (".safetensors", ".sft", ".ckpt", ".pt", ".pth", ".bin", ".gguf")
_is_fetched: ContextVar[bool] = ContextVar("is_fetched", default=False)


@dataclass(frozen=True)
class PipelinePart:
    """A frozen part of a family's pipeline, as diffusers lays it out."""

    class_names: tuple[str, ...]  # that the family can use; the first where no file names one
    folder: str
    tokenizer: str = ""  # folder of a text encoder's, or of an image encoder's processor
    tokenizer_class: str = "AutoTokenizer"  # of transformers
    module: str = "transformers"  # that has a text encoder's class
    reads_captions: bool = False  # of `FrozenParts.further`; others encode pictures

    @property
    def class_name(self) -> str:
        return self.class_names[0]


@dataclass(frozen=True)
class FrozenParts:
    """Codec and text encoders of a family's pipeline."""

    codec: PipelinePart
    text: PipelinePart
    pooled: PipelinePart = PipelinePart(("CLIPTextModel",), "text_encoder", "tokenizer")
    further: tuple[PipelinePart, ...] = ()
    """Encoders that are in the pipeline of `text.pretrained` besides, such as one of pictures;
    those that its model_index.json does not name are left out."""
    processor: PipelinePart | None = None
    """Of pictures that are encoded together with captions; it has no weights."""
    has_random_text: bool = True
    """Whether text encoders can be made with random weights, over the words of a catalog."""


@contextmanager
def local_copies() -> Iterator[None]:
    """Use the hub's local cache without a request to the hub; another process has downloaded."""
    token = _is_fetched.set(True)
    try:
        yield
    finally:
        _is_fetched.reset(token)


def load_pretrained(loaded_class: Any, where: str, subfolder: str, **options: Any) -> Any:
    """A model or tokenizer from a local folder or, downloaded and cached, a repository id."""
    folder = locate(where, subfolder) / subfolder
    _refuse_unloadable(loaded_class, folder, where, subfolder)
    try:
        with quiet(loaded_class):
            loaded, missing = _load(loaded_class, folder, options)
    except Exception as error:  # each format and library raises its own kinds
        raise ModelError(
            f"{loaded_class.__name__} cannot be loaded from {folder}: {_first_line(error)} "
            "Expected what save_pretrained writes. Check the folder."
        ) from error
    if missing:
        raise ModelError(
            f"The weights in {folder} leave {len(missing)} tensors of {loaded_class.__name__} "
            f"without values, such as {missing[0]}. They belong to another class or another "
            "library version."
        )
    return loaded


def _refuse_unloadable(loaded_class: Any, folder: Path, where: str, subfolder: str) -> None:
    if not hasattr(loaded_class, "load_state_dict"):  # a tokenizer
        return
    config = folder / "config.json"
    with suppress(OSError, ValueError):
        values = json.loads(config.read_text(encoding="utf-8"))
        if isinstance(values, dict):
            refuse_other_class(values, loaded_class, where, subfolder)
    names = sorted(path.name for path in folder.iterdir())
    middles = [match[1] for name in names if (match := _WEIGHTS.fullmatch(name))]
    variants = [found[1] for middle in middles if (found := _VARIANT.search(middle))]
    if variants and len(variants) == len(middles):
        raise ModelError(
            f"{folder} has weights of the variant {variants[0]} only, and longtake loads weights "
            f"without a variant. Load them with {loaded_class.__name__}.from_pretrained(..., "
            f"variant={variants[0]!r}), save them with save_pretrained(...), and name that folder."
        )


def refuse_other_class(
    config: Mapping[str, Any], model_class: Any, where: str, subfolder: str
) -> None:
    """Refuse a configuration that was saved from another class; defaults would fill in the rest."""
    if hasattr(model_class, "load_config"):  # diffusers
        saved, wanted = config.get("_class_name"), model_class.__name__
    else:
        saved, wanted = config.get("model_type"), model_class.config_class.model_type
    if saved is not None and saved != wanted:
        raise ModelError(
            f"{where}: what lies in {subfolder} is of {saved}, but {wanted} is wanted. Name "
            "another model, or another model.subfolder, in the recipe."
        )


def construct(key: str, built_class: Any, values: Mapping[str, Any]) -> Any:
    """`built_class(**values)`, where the values come from the recipe's `key`."""
    check_arguments(key, built_class.__init__, values)
    known = defaults(built_class.__init__).items()
    if missing := [n for n, value in known if value is inspect.Parameter.empty and n not in values]:
        needed = ", ".join(missing)
        raise RecipeError(f"{key} lacks {needed}: {built_class.__name__} has no default for it.")
    try:
        return built_class(**values)
    except Exception as error:  # wrong sizes fail inside constructors in any way
        code = traceback.extract_tb(error.__traceback__)[-1]
        line = f" in {Path(code.filename).name}, line {code.lineno}: {code.line}"
        reason = f"{type(error).__name__}{f': {error}' if str(error) else line}"
        raise RecipeError(f"{key} does not fit {built_class.__name__}. {reason}") from error


def check_arguments(key: str, function: Callable[..., Any], values: Mapping[str, Any]) -> None:
    """Refuse arguments that a function does not take by name."""
    known = list(defaults(function))
    for name in values:
        if name not in known:
            owner = function.__qualname__.removesuffix(".__init__")
            near = did_you_mean(name, known, shown=len(known))
            raise RecipeError(f"{key}.{name} is not an argument of {owner}; {near}")


def defaults(function: Callable[..., Any]) -> dict[str, Any]:
    """Named arguments of a function and their defaults (`Parameter.empty` if required).

    Neither self nor `**kwargs` count: what would vanish in them was most likely misspelt.
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

    What matters in them (missing weights) is raised instead.
    """
    owner = speaker if inspect.isclass(speaker) else type(speaker)
    libraries = {each.__module__.partition(".")[0] for each in owner.__mro__}
    library = "diffusers" if "diffusers" in libraries else "transformers"  # or a class of a user's
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


def locate(where: str, subfolder: str, files: str = "*") -> Path:
    """The local folder that has the subfolder, downloaded if `where` is a repository id.

    Args:
        where: a local folder or a repository id.
        subfolder: of it.
        files: which of the subfolder's files are downloaded, as a pattern. The configurations
            of pipeline, scheduler and guider always are: objective and guidance.

    Raises:
        ModelError: there is no such folder or repository, or it cannot be downloaded.
    """
    folder = Path(where).expanduser()
    if not folder.is_dir():
        if folder.suffix.lower() in _ONE_FILE or folder.is_file():
            raise ModelError(
                f"{where} is one file of weights. longtake loads folders in diffusers' layout, "
                f"with {subfolder}/config.json and weights beside it: name such a folder or a "
                "repository id, or convert the file with a pipeline's from_single_file(...) and "
                "save_pretrained(...) of diffusers."
            )
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
            f"{where} is one part of a release ({printable(named)}), and the whole is wanted. "
            f"Name the folder or repository that has model_index.json and {subfolder}."
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
        with suppress(errors.LocalEntryNotFoundError):
            return Path(
                snapshot_download(repository, allow_patterns=patterns, local_files_only=True)
            )
    unreachable = ""
    try:  # asked first, and once: a download retries for minutes before it gives up
        HfApi().model_info(repository, timeout=_REACH_SECONDS)
    except errors.GatedRepoError as error:
        raise _gated(repository) from error
    except errors.RepositoryNotFoundError as error:
        raise ModelError(
            f"There is no folder {repository}, and the hub has no such repository for you: "
            f"{_first_line(error)} Check the name, and `hf auth login` if it is a private one."
        ) from error
    except Exception as error:  # the hub's HTTP client, hence its exceptions, changes by version
        unreachable = _first_line(error)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # advice to the hub's callers, not to ours
            snapshot = snapshot_download(
                repository, allow_patterns=patterns, local_files_only=bool(unreachable)
            )
    except errors.LocalEntryNotFoundError as error:
        raise ModelError(
            f"There is no folder {repository}, nothing of that name was downloaded before, and the "
            f"hub cannot be reached: {unreachable} Name a diffusers folder on disk, or connect."
        ) from error
    except errors.GatedRepoError as error:
        raise _gated(repository) from error
    except OSError as error:
        raise ModelError(f"{repository} cannot be downloaded: {_first_line(error)}") from error
    return Path(snapshot)


def _gated(repository: str) -> ModelError:
    return ModelError(
        f"{repository} is a gated repository, and the hub does not let you download from it. "
        f"Accept the licence at https://huggingface.co/{repository}, then run `hf auth login`."
    )


def _load(loaded_class: Any, folder: Path, options: dict[str, Any]) -> tuple[Any, list[str]]:
    """The model or tokenizer, and names of tensors without values in the folder."""
    if not hasattr(loaded_class, "load_state_dict"):  # a tokenizer
        return loaded_class.from_pretrained(str(folder), local_files_only=True, **options), []
    model, report = loaded_class.from_pretrained(
        str(folder), local_files_only=True, output_loading_info=True, **options
    )
    return model, sorted({*report["missing_keys"], *map(str, report["mismatched_keys"])})


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return f"{lines[0].rstrip('.')}."


SHIPPED = {
    "black-forest-labs/FLUX.1-dev": "flux_1_dev.json",
    "black-forest-labs/FLUX.1-Kontext-dev": "flux_1_dev.json",
    "Wan-AI/Wan2.1-T2V-1.3B-Diffusers": "wan_2_1_1_3b.json",
    "Wan-AI/Wan2.1-T2V-14B-Diffusers": "wan_2_1_14b.json",
}
"""Repository ids whose configurations come with longtake; Kontext's are those of FLUX.1-dev."""

SHIPPED_PIPELINES = {"black-forest-labs/FLUX.1-Kontext-dev": "FluxKontextPipeline"}
"""What model_index.json names, where the transformer does not tell it."""


@dataclass(frozen=True)
class Release:
    """What the files of a pretrained model say about it."""

    config: Mapping[str, Any]  # the transformer's; of a model from scratch the recipe's
    scheduler: Mapping[str, Any] | None  # None: the pipeline has none, or the model is from scratch
    pipeline: Mapping[str, Any]  # model_index.json; empty if there is none
    guider: Mapping[str, Any] | None = None  # of pipelines whose guidance is a component


def read_release(section: ModelSection) -> Release:
    """The configurations of the model that a section starts from."""
    where = section.pretrained
    if where is None:
        return Release(section.config, None, {})
    if Path(where).expanduser().is_dir():
        return _read_release(where, section.folder())
    return _read_repository(where, section.folder())


def _read_release(where: str, subfolder: str) -> Release:
    config = part_config(where, subfolder)
    if _is_shipped(where):
        return Release(config, _shipped(SHIPPED[where]).get("scheduler"), {})
    root = (locate(where, subfolder, files="config.json") / subfolder).resolve().parent
    scheduler = root / "scheduler" / "scheduler_config.json"
    index, guider = root / "model_index.json", root / "guider" / "guider_config.json"
    return Release(
        config,
        read_config(scheduler) if scheduler.is_file() else None,
        read_config(index) if index.is_file() else {},
        read_config(guider) if guider.is_file() else None,
    )


_read_repository = cache(_read_release)  # one request to the hub


def find_part(where: str, expected: PipelinePart) -> PipelinePart:
    """The part of a repository, by its model_index.json; `expected` where it names no such part.

    Raises:
        ModelError: the repository has it in a class that the family cannot use.
    """
    index = pipeline_index(where)
    named = {name: value[1] for name, value in index.items() if _is_class(value)}
    found = [name for name, value in named.items() if value in expected.class_names]
    if expected.folder in found or (found and expected.folder not in named):
        folder = expected.folder if expected.folder in found else found[0]
        beside = folder.replace("text_encoder", "tokenizer")
        has_own = "text_encoder" in folder and bool(expected.tokenizer) and beside in named
        tokenizer = beside if has_own else expected.tokenizer
        return replace(expected, class_names=(named[folder],), folder=folder, tokenizer=tokenizer)
    if expected.folder in named:
        raise ModelError(
            f"{where}: its model_index.json names {named[expected.folder]} as its "
            f"{expected.folder}, but {' or '.join(expected.class_names)} is wanted. Name another "
            "repository in the recipe, or another model.family."
        )
    return expected


def has_part(where: str, part: PipelinePart) -> bool:
    """Whether a pipeline's model_index.json names a class for a part."""
    index = _index(where) if Path(where).expanduser().is_dir() else _repository_index(where)
    return bool((index.get(part.folder) or [None])[0])


def _is_class(value: Any) -> bool:
    is_pair = isinstance(value, list) and len(value) == 2
    return is_pair and value[0] in ("diffusers", "transformers") and isinstance(value[1], str)


def pipeline_index(where: str) -> dict[str, Any]:
    """What model_index.json says, or that of a modular pipeline; empty if there is neither."""
    return _index(where) if Path(where).expanduser().is_dir() else _repository_index(where)


def _index(where: str) -> dict[str, Any]:
    if _is_shipped(where):
        return {"_class_name": SHIPPED_PIPELINES[where]} if where in SHIPPED_PIPELINES else {}
    try:
        folder = locate(where, ".", files="model_index.json")
    except ModelError:  # the part itself will not be found either, and that error says more
        return {}
    files = (folder / name for name in ("model_index.json", "modular_model_index.json"))
    return next((read_config(file) for file in files if file.is_file()), {})


_repository_index = cache(_index)  # one request to the hub


def copy_part(section: ModelSection, name: str, folder: Path) -> None:
    """Copy one part of the release that a section names into an exported pipeline."""
    assert section.pretrained is not None
    root = locate(section.pretrained, name)
    shutil.copytree(root / name, folder / name)
    index = read_config(folder / "model_index.json") | {name: pipeline_index(str(root))[name]}
    text = json.dumps(index, indent=2) + "\n"
    (folder / "model_index.json").write_text(text, encoding="utf-8")


def part_config(where: str, subfolder: str) -> dict[str, Any]:
    """The `config.json` of one part of a pipeline, from a folder, the shipped ones or the hub."""
    if _is_shipped(where):
        parts = _shipped(SHIPPED[where])
        if subfolder in parts:
            return dict(parts[subfolder])
        known = ", ".join(part for part in parts if part != "scheduler")
        raise ModelError(f"{where} has no subfolder {subfolder}; it has {known}.")
    try:
        folder = locate(where, subfolder, files="config.json")
    except ModelError as error:
        if not _REPOSITORY_ID.fullmatch(where) or Path(where).is_dir():
            raise
        raise ModelError(f"{error} Known without a download are: {', '.join(SHIPPED)}.") from error
    return read_config(folder / subfolder / "config.json")


def _is_shipped(where: str) -> bool:
    return where in SHIPPED and not Path(where).is_dir()


@cache
def _shipped(name: str) -> dict[str, Any]:
    return read_config(Path(__file__).parent / "architectures" / name)


def read_config(path: Path) -> dict[str, Any]:
    """The object in a JSON file of a pipeline."""
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


PipelineMu = Literal["line", "flux2"] | None
"""What a pipeline gives its scheduler as mu: by the line in its scheduler_config.json, by FLUX.2's
formula, or nothing, so that it can follow no rule."""

_LINE = {
    "base_image_seq_len": "base_tokens",
    "base_shift": "base_mu",
    "max_image_seq_len": "max_tokens",
    "max_shift": "max_mu",
}
"""Fields of `MuLine`, by diffusers' names."""

_OTHER_SIGMAS = (
    "use_karras_sigmas",
    "use_exponential_sigmas",
    "use_beta_sigmas",
    "invert_sigmas",
    "stochastic_sampling",
)
"""What of diffusers' flow-matching schedulers longtake does not sample by, if it is true."""


def scheduler_shift(
    scheduler: Mapping[str, Any] | None, mu: PipelineMu, where: str
) -> ShiftRule | None:
    """The shift in a pipeline's scheduler_config.json; None: it states none.

    Raises:
        ModelError: sampling by this scheduler needs more than a shift.
    """
    if scheduler is None:
        return None
    other = [name for name in _OTHER_SIGMAS if scheduler.get(name)]
    if scheduler.get("time_shift_type", "exponential") != "exponential":
        other.append(f'time_shift_type = "{scheduler["time_shift_type"]}"')
    if other:
        raise ModelError(
            f"{where}: its scheduler_config.json has {', '.join(other)}, by which longtake does "
            "not sample; it shifts evenly spaced sigmas exponentially. Copy the release and remove "
            "that from scheduler/scheduler_config.json, if the model serves without it."
        )
    names = (*_LINE, "shift_terminal")
    numbers = {name: scheduler[name] for name in names if scheduler.get(name) is not None}
    terminal = numbers.get("shift_terminal", 0.0)
    line = MuLine(**{_LINE[name]: value for name, value in numbers.items() if name in _LINE})
    if not all(isinstance(value, int | float) for value in numbers.values()) or not (
        line.base_tokens != line.max_tokens and 0 <= terminal < 1
    ):
        raise ModelError(
            f"{where}: its scheduler_config.json has {numbers}; expected two numbers of tokens, "
            "two shifts, and shift_terminal from 0 to below 1. Correct scheduler_config.json."
        )
    if scheduler.get("use_dynamic_shifting"):
        return ShiftRule("flux2" if mu == "flux2" else line, terminal)
    shift = scheduler.get("flow_shift", scheduler.get("shift"))
    is_number = isinstance(shift, int | float) and shift > 0
    return ShiftRule(float(shift), terminal) if is_number else None


def shift_values(rule: ShiftRule, mu: PipelineMu, bucket_shift: float) -> dict[str, Any]:
    """Values of scheduler_config.json for a rule, or for `bucket_shift` where `mu` is another."""
    terminal = {"shift_terminal": rule.terminal or None}
    if isinstance(rule.by, MuLine) and mu == "line":
        line = {name: getattr(rule.by, field) for name, field in _LINE.items()}
        return {"use_dynamic_shifting": True, **line, **terminal}
    if rule.by == "flux2" == mu:
        return {"use_dynamic_shifting": True, **terminal}
    fixed = {"shift": bucket_shift, "flow_shift": bucket_shift}
    return {"use_dynamic_shifting": False, **fixed, **terminal}


_TARGETS = {
    "epsilon": "the noise (epsilon)",
    "v_prediction": "a mixture of noise and latents (v-prediction)",
    "sample": "the latents themselves",
}
"""By `prediction_type` of diffusers' schedulers that do no flow matching."""


def refuse_other_objectives(scheduler: Mapping[str, Any] | None, where: str) -> None:
    """Refuse a checkpoint whose scheduler states another objective than flow matching."""
    if scheduler is None:
        return
    name = str(scheduler.get("_class_name", ""))
    predicts = scheduler.get("prediction_type")
    if not predicts:
        import diffusers

        found = getattr(diffusers, name, None)
        predicts = found and defaults(found.__init__).get("prediction_type")
    if name.startswith("FlowMatch") or predicts not in _TARGETS:
        return
    raise ModelError(
        f"{where} predicts {_TARGETS[predicts]}, as its scheduler says ({name}, prediction_type "
        f"{predicts}). longtake trains by flow matching, toward the velocity noise - latents: that "
        "is another target, along another path of noise levels, so training would undo what this "
        "checkpoint has learned. Start from a flow-matching checkpoint, such as Wan 2.1 or FLUX.1."
    )


def refuse_untrained(
    release: Release, channel_ratios: Collection[float], section: ModelSection
) -> None:
    """Refuse a release whose objective or inputs are none that its family trains."""
    where = str(section.pretrained)
    refuse_other_objectives(release.scheduler, where)
    refuse_wrong_expert(release.pipeline, section)
    refuse_further_inputs(release, channel_ratios, where)


def has_two_transformers(pipeline: Mapping[str, Any]) -> bool:
    """Whether a model_index.json says that another transformer serves low noise."""
    return (pipeline.get("transformer_2") or (None, None))[0] is not None


def refuse_wrong_expert(pipeline: Mapping[str, Any], section: ModelSection) -> None:
    """Refuse two transformers of which none is chosen, and a choice where there is only one."""
    where, boundary = str(section.pretrained), pipeline.get("boundary_ratio")
    has_two = has_two_transformers(pipeline)
    if not has_two and boundary is None:
        if section.expert is None:
            return
        raise ModelError(
            f'model.expert = "{section.expert}", but the model_index.json of {where} names one '
            "transformer and no boundary_ratio. Leave it (--expert) out, or name a release with "
            "two transformers, such as Wan-AI/Wan2.2-T2V-A14B-Diffusers."
        )
    if not has_two:
        raise ModelError(
            f"{where} has a boundary_ratio ({boundary}) between two transformers, but its "
            "model_index.json names no transformer_2. Name the whole release."
        )
    if not isinstance(boundary, int | float) or not 0 < boundary < 1:
        says = "no boundary_ratio" if boundary is None else f"boundary_ratio {boundary}"
        raise ModelError(
            f"{where} has two transformers, but its model_index.json has {says}: at which sigma "
            "one takes over from the other cannot be known. Add the boundary_ratio of the release, "
            "between 0 and 1 (Wan 2.2 A14B: 0.875 from text, 0.9 from a first frame)."
        )
    if section.expert is None:
        raise ModelError(
            f"{where} has two transformers, each for a part of the noise levels (boundary_ratio "
            f'{boundary}). Set model.expert = "high" to train the one for sigmas from {boundary} '
            'on, or "low" for those below it; a run trains one of them.'
        )


def refuse_further_inputs(release: Release, channel_ratios: Collection[float], where: str) -> None:
    """Refuse a transformer that takes more channels than it returns (image, mask, control).

    `channel_ratios`: in_channels / out_channels that its family trains besides 1.
    """
    takes, returns = release.config.get("in_channels"), release.config.get("out_channels")
    if not takes or not returns or takes <= returns:  # FLUX's out_channels is None if equal
        return
    if takes / returns in channel_ratios:
        return
    name, index = str(release.config.get("_class_name")), release.pipeline
    of_pipeline = f", {index['_class_name']}" if "_class_name" in index else ""
    raise ModelError(
        f"{where} is a variant of {name} with further inputs, which longtake does not train "
        f"(in_channels {takes}, out_channels {returns}{of_pipeline}). "
        "Start from a kind that longtake trains: docs/guides/families.md lists them."
    )
