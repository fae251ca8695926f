"""Tells whose configuration files are, and brings each trainer's into one form: flat settings."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Any

from longtake.formatting import join_words, printable
from longtake.migration.draft import show
from longtake.migration.reading import ConfigFile, arguments_of, command_words, flatten, plain
from longtake.migration.tables import TOOLS, Tool, refusal, shared, tool


@dataclass
class Source:
    """The settings of one training in another trainer, with the keys of its tables."""

    tool: Tool
    files: list[str] = field(default_factory=list)
    run: dict[str, Any] = field(default_factory=dict)
    clips: list[dict[str, Any]] = field(default_factory=list)
    """Settings of each set of clips, those for all of them included."""
    samples: list[dict[str, Any]] = field(default_factory=list)
    has_run: bool = False
    """False if only the file of the data was given."""
    common: dict[str, Any] = field(default_factory=dict)
    """Settings for sets of clips that have none of their own."""
    named: list[str] = field(default_factory=list)
    """Files that the configuration names and that hold a part of it."""


Content = Any
_Reader = Callable[[Source, Any], None]


def collect(files: Sequence[ConfigFile]) -> Source:
    """Return the settings of all files of one training.

    Raises:
        RecipeError: a file is of no known trainer, files are of several, or one is missing.
    """
    prompts = [each for each in files if each.content is None and not is_command(each)]
    found = [(each, *recognise(each)) for each in files if each not in prompts]
    names = {name for _, name, _ in found}
    if not found:
        titles = join_words((tool(name).title for name in TOOLS if tool(name).scripts), "or")
        raise refusal("no_command", name=files[0].name, titles=titles)
    if len(names) != 1:
        told = ", ".join(f"{each.name} ({tool(name).title})" for each, name, _ in found)
        raise refusal("several", told=told)
    source = Source(tool(names.pop()), [each.name for each in files])
    # The file of the settings first: those of the data may need it.
    order = list(source.tool.marks)
    for each, _, read in sorted(found, key=lambda each: order.index(each[2].__name__)):
        try:
            read(source, each.lines if each.content is None else each.content)
        except (TypeError, ValueError, LookupError, AttributeError):
            raise refusal("odd", name=each.name, title=source.tool.title) from None
    if source.run.get("lora_type") == "lycoris" and "lycoris.algo" not in source.run:
        raise refusal("lycoris", file=show(source.run.get("lycoris_config")))
    if source.tool.name == "onetrainer":
        # Masks and references lie beside the clips, by names that OneTrainer has fixed.
        for values in source.clips:
            if source.run.get("masked_training") is True:
                values["mask_folder"] = ["{stem}-masklabel.png"]
            if source.run.get("custom_conditioning_image") is True:
                values["control_folders"] = ["{stem}-condlabel.png"]
    source.clips = [{**source.common, **each} for each in source.clips]
    for each in prompts:
        source.samples += list(prompt_lines(each.lines))
    name, title = found[0][0].name, source.tool.title
    if not source.has_run:
        raise refusal("no_run", name=name, title=title)
    if not source.clips:
        named = ", ".join(source.named) or "its data's configuration"
        raise refusal("no_clips", name=name, named=printable(named))
    return source


def recognise(file: ConfigFile) -> tuple[str, _Reader]:
    """Return the trainer of a file, and the function that reads its content."""
    if file.content is None:
        return next(name for name in TOOLS if _commands(file.lines, name)), read_command
    keys = set(keys_of(file.content))
    for name in TOOLS:
        for reader, marks in tool(name).marks.items():
            if keys & set(marks):
                return name, globals()[reader]
    titles = ", ".join(tool(name).title for name in TOOLS)
    raise refusal("unknown", name=file.name, titles=titles)


def keys_of(content: Any) -> Iterator[str]:
    """Yield keys of two levels: `name`, `name.inner` and `*.inner`, `name[].inner` of a list."""
    if isinstance(content, list):
        yield from (f"[].{key}" for each in _tables(content) for key in each)
    elif isinstance(content, Mapping):
        for key, value in content.items():
            name = str(key).lstrip("-")
            yield name
            inner = value if isinstance(value, Mapping) else ()
            yield from (f"{outer}.{each}" for each in inner for outer in (name, "*"))
            yield from (f"{name}[].{each}" for table in _tables(value) for each in table)


# diffusion-pipe.


def read_diffusion_pipe(source: Source, content: Content) -> None:
    source.has_run = True
    source.run |= flatten(content)
    source.named += [str(content["dataset"])] if "dataset" in content else []


def read_directories(source: Source, content: Content) -> None:
    common = {key: value for key, value in content.items() if key != "directory"}
    for each in _tables(content["directory"]):
        source.clips.append({**common, **each})


# ai-toolkit.


def read_ai_toolkit(source: Source, content: Content) -> None:
    processes = list(_tables(content["config"].get("process")))
    if len(processes) != 1:
        raise refusal("processes", name=source.files[0], number=len(processes))
    process = dict(processes[0])
    source.has_run = True
    source.clips += [flatten(each) for each in _tables(process.pop("datasets", []))]
    sample = process.get("sample")
    if isinstance(sample, Mapping):
        sample = dict(sample)
        lists = sample.pop("samples", None), sample.pop("prompts", None)
        given = next((each for each in lists if isinstance(each, list)), [])
        samples = source.tool.samples
        common = {key: value for key, value in sample.items() if key in samples}
        for each in given:
            own = [dict(each)] if isinstance(each, Mapping) else prompt_lines([str(each)])
            source.samples += [{**common, **values} for values in own]
        process["sample"] = sample
    source.run |= {"name": content["config"].get("name"), **flatten(process)}


# musubi-tuner and sd-scripts.


def read_datasets(source: Source, content: Content) -> None:
    common = content.get("general") or {}
    for dataset in _tables(content["datasets"]):
        own = {key: value for key, value in dataset.items() if key != "subsets"}
        for subset in list(_tables(dataset.get("subsets"))) or [{}]:
            source.clips.append(flatten({**common, **own, **subset}))


def read_arguments(source: Source, content: Content) -> None:
    """A `--config_file`: sections have no meaning there."""
    values: dict[str, Any] = {}
    for key, value in content.items():
        values |= value if isinstance(value, Mapping) else {key: value}
    read_options(source, values)


def _commands(lines: Sequence[str], name: str) -> list[list[str]]:
    scripts = tool(name).scripts
    return command_words(lines, list(scripts)) if scripts else []


def is_command(file: ConfigFile) -> bool:
    return any(_commands(file.lines, name) for name in TOOLS)


def read_command(source: Source, lines: Sequence[str]) -> None:
    commands = _commands(lines, source.tool.name)
    if len(commands) > 1:
        raise refusal("commands", name=source.files[0], number=len(commands))
    words = commands[0]
    names = [PurePath(word.replace("\\", "/")).name for word in words]
    at = next(at for at, name in enumerate(names) if name in source.tool.scripts)
    launcher = arguments_of(words[:at])
    if isinstance(launcher.get("num_processes"), int):
        source.run["num_processes"] = launcher["num_processes"]
    options = arguments_of(words[at + 1 :])
    read_options(source, {"script": names[at], **options})


def read_options(source: Source, options: Mapping[str, Any]) -> None:
    source.has_run = True
    values = dict(options)
    for name in ("optimizer_args", "network_args", "lr_scheduler_args"):
        given = values.pop(name, None)
        pairs = given if isinstance(given, list) else [] if given is None else [given]
        for pair in pairs:
            key, _, value = str(pair).partition("=")
            values[f"{name}.{key.strip()}"] = plain(value.strip("\"'"))
    for name in ("dataset_config", "config_file"):
        source.named += [str(values[name])] if name in values else []
    # Options of the data that sd-scripts also takes on the command line.
    folder = {key: values.pop(key) for key in list(values) if key in source.tool.clips}
    if any(key in folder for key in ("train_data_dir", "image_dir", "in_json")):
        source.clips.append(folder)
    else:
        source.common |= folder
    source.run |= values


_FLAGS = re.compile(r"\s--([a-z_\d]{1,10})\s+")


def prompt_lines(lines: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Read `a prompt --w 832 --h 480 --d 1`, a line each; lines with # are comments."""
    for line in lines:
        if line.startswith("#"):
            continue
        prompt, *flags = _FLAGS.split(line)
        known = shared()["flags"]
        pairs = zip(flags[::2], flags[1::2], strict=True)
        values = {known.get(name, name): plain(value.strip()) for name, value in pairs}
        yield {"prompt": prompt.strip(), **values}


# SimpleTuner.


def read_simpletuner(source: Source, content: Content) -> None:
    source.has_run = True
    values = {str(key).lstrip("-").replace("-", "_"): value for key, value in content.items()}
    given = values.pop("optimizer_config", None)
    for pair in str(given or "").split(","):
        key, _, value = pair.partition("=")
        values |= {f"optimizer_config.{key.strip()}": plain(value)} if value else {}
    family, flavour = values.get("model_family"), values.pop("model_flavour", None)
    if flavour:
        values["model_family"] = f"{family}/{flavour}"
    source.named += [str(values["data_backend_config"])] if "data_backend_config" in values else []
    names = {f"validation_{name}": name for name in source.tool.samples if name != "prompt"}
    sample = {names[key]: value for key, value in values.items() if key in names}
    if values.get("validation_prompt"):
        source.samples.append({"prompt": values["validation_prompt"], **sample})
    source.run |= flatten(values)


def read_lycoris(source: Source, content: Content) -> None:
    # Its rank and alpha come before those of config.json.
    for name in ("lora_rank", "lora_alpha"):
        source.run.pop(name, None)
    source.run |= {f"lycoris.{key}": value for key, value in flatten(content).items()}


def read_backends(source: Source, content: Content) -> None:
    entries = [each for each in _tables(content) if not each.get("disabled")]
    by_id = {str(each.get("id")): each for each in entries}
    for each in entries:
        if each.get("dataset_type", "image") not in ("image", "video"):
            continue
        values = {"resolution": source.run.get("resolution"), **flatten(each)}
        ids = each.get("conditioning_data") or []
        for other in (by_id.get(str(name)) for name in (ids if isinstance(ids, list) else [ids])):
            if other is not None:
                is_mask = other.get("conditioning_type") == "mask"
                folders = values.setdefault("mask_folder" if is_mask else "control_folders", [])
                folders.append(other.get("instance_data_dir", ""))
        # Megapixels become the side of a square of as many pixels.
        if values.get("resolution_type") == "area" and values["resolution"] is not None:
            values["resolution"] = round((float(values["resolution"]) * 1e6) ** 0.5)
        source.clips.append(values)


# OneTrainer.


def read_onetrainer(source: Source, content: Content) -> None:
    source.has_run = True
    values = dict(content)
    concepts, samples = values.pop("concepts", None), values.pop("samples", None)
    # `save_every` = 2 and `save_every_unit` = "EPOCH" become `save_every.EPOCH` = 2.
    units = {"save_every": "NEVER", "backup_after": "MINUTE", "sample_after": "MINUTE"}
    for name, unit in units.items():
        unit = str(values.pop(f"{name}_unit", unit))
        if name in values:
            values[f"{name}.{unit}"] = values.pop(name)
    source.run |= flatten(values)
    read_concepts(source, concepts or [])
    read_onetrainer_samples(source, samples or [])
    source.named.append(str(values.get("concept_file_name", "training_concepts/concepts.json")))


def read_concepts(source: Source, content: Content) -> None:
    for each in _tables(content):
        if not each.get("enabled", True):
            continue
        if each.get("type") == "VALIDATION":
            source.run["validation_concepts"] = each.get("path")
            continue
        source.clips.append(flatten(each))


def read_onetrainer_samples(source: Source, content: Content) -> None:
    source.samples += [flatten(each) for each in _tables(content) if each.get("enabled", True)]


def _tables(values: Any) -> Iterator[Mapping[str, Any]]:
    if isinstance(values, list):
        yield from (each for each in values if isinstance(each, Mapping))
