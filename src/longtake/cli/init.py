"""The command `init`: writes a commented recipe for a family, a task and a GPU."""

import functools
import json
import os
import shlex
import textwrap
import tomllib
from dataclasses import asdict, dataclass
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from longtake import errors, process
from longtake.cli import say
from longtake.config import EXPERT_FOLDERS, Bucket, Expert, ModelSection, is_one_file, memory_bytes
from longtake.formatting import did_you_mean, printable
from longtake.migration.settle import Answers
from longtake.models import recognition, release_checks, releases

_FOLDER = resources.files("longtake.cli").joinpath("recipes")
_SMALL_GIB = 20
"""Below so much GPU memory a release gets the smaller shape of its kind, and any recipe of LoRA
frozen weights in fewer bits where the plan needs them."""
_MODULE = "examples.modules.pose_adapter"
"""Name of the module that some templates import; a clone of longtake has it, recipes/ has a
copy."""


@dataclass(frozen=True)
class Shape:
    """A bucket (clip shape), and the GPU memory in GiB from which on `longtake plan` accepts it."""

    gib: int
    frames: int
    height: int
    width: int
    expected: str = ""

    def bucket(self) -> Bucket:
        return Bucket(num_frames=self.frames, height=self.height, width=self.width)


@dataclass(frozen=True)
class Template:
    """A recipe that `init` can write: its file in `recipes/`, and clip shapes by size."""

    family: str
    task: str
    size: str
    file: str
    title: str
    pretrained: str
    shapes: tuple[Shape, ...]
    fps: float | None = None
    references: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()
    has_pooled: bool = False
    is_distilled: bool = False
    shift: str = ""
    logit_std: float | None = None
    expert: Expert | None = None
    boundary: float = 0.0
    has_audio: bool = False
    advice: str = ""
    config_from: str = ""
    quantize: str = ""


@functools.cache
def templates() -> tuple[Template, ...]:
    """Return the templates for recipes that are listed in recipes/templates.toml."""
    listed = tomllib.loads(_FOLDER.joinpath("templates.toml").read_text("utf-8"))["template"]
    return tuple(
        Template(**{**each, "shapes": tuple(Shape(**shape) for shape in each["shapes"])})
        for each in listed
    )


def find_template(family: str, task: str | None, size: str | None) -> Template:
    """Return the recipe template of a model family; without task or size, the first that fits.

    Raises:
        RecipeError: no template fits; the message lists those of the family.
    """
    family, task, size = family.lower(), task and task.lower(), size and size.lower()
    of_family = [each for each in templates() if each.family == family]
    kinds = [kind for kind in recognition.KINDS if kind.family == family]
    releases = [name for kind in kinds for name in kind.releases]
    if not of_family and kinds:
        raise errors.RecipeError(
            f"A recipe for the family {family} is written from a release: leave --family out, and "
            f"name one, as in `{process.command()} init {(*releases, 'FOLDER')[0]}`."
        )
    if not of_family:
        known = {each.family for each in templates()} | {k.family for k in recognition.KINDS}
        hint = did_you_mean(family, known)
        raise errors.RecipeError(f"There is no template for the family {family!r}; {hint}")
    for each in of_family:
        if task in (None, each.task) and size in (None, each.size):
            return each
    there = ", ".join(f"--task {each.task} --size {each.size}" for each in of_family)
    asked = " ".join(
        f"--{name} {value}" for name, value in (("task", task), ("size", size)) if value
    )
    raise errors.RecipeError(f"There is no template for {family} with {asked}; there is: {there}.")


def _section_of(release: str, task: str | None, config_from: str | None) -> ModelSection:
    """Return a section that names a release, or one file and its release, without a family."""
    if is_one_file(release) and config_from is None:
        raise errors.RecipeError(
            f"{release} is one file of weights, which has no configuration. Name the release that "
            "it was made of, a folder in diffusers' layout or a repository, with --config-from: "
            "its VAE and text encoders are used, too."
        )
    if config_from is not None and not is_one_file(release):
        raise errors.RecipeError(
            f"--config-from {config_from} is for one safetensors or GGUF file, and {release} is "
            "none. Leave it out, or name the file."
        )
    if task not in (None, "lora", "full"):
        raise errors.RecipeError(
            f"There is no template for {release} with --task {task}; there are lora and full."
        )
    # The family is what is looked for; functions that read a release ask for a section.
    return ModelSection(family="", pretrained=release, config_from=config_from)


def template_of_release(
    release: str, task: str | None, expert: Expert | None = None, config_from: str | None = None
) -> Template:
    """Return the recipe template for a release (a folder or a hub's id), or for one file of it.

    `expert` is one transformer of a release that has two; None means the high-noise one.

    Raises:
        ModelError: `release` is not a release, or longtake does not train it.
        RecipeError: there is no template for the task.
    """
    from longtake.models import base, experts, weight_files

    task = task and task.lower()
    for each in templates():
        # A release that a template names need not be read, which could mean to download it.
        if each.pretrained == release and task in (None, each.task) and not (expert or config_from):
            return each
    section = _section_of(release, task, config_from)
    kind = recognition.recognise(section, base.FAMILIES)
    found = releases.read_release(section)
    if expert is not None or release_checks.has_two_transformers(found.pipeline):
        section = section.model_copy(update={"expert": expert or "high"})
    if kind is None:
        named = found.config.get("_class_name")
        if named is None:
            raise errors.ModelError(
                f"{release}: {section.folder()}/config.json names no class (_class_name). Expected "
                "what save_pretrained writes: save or download it again."
            )
        raise errors.ModelError(
            f"{release}: its transformer is {named}, which no family trains. A class of your own "
            f"can: see docs/guides/families.md. {recognition.trained(base.FAMILIES)}"
        )
    family: Any = base.family(kind.family)
    release_checks.refuse_untrained(found, getattr(family, "channel_ratios", ()), section)
    needed, taken = family.inputs.names(section)
    two, rule = experts.read_experts(section), family.defaults(section).shift
    file = section.one_file()
    what = "all weights fine-tuned" if task == "full" else "fine-tuned with LoRA"
    if two is not None:
        what = f"the {two.trained}-noise expert, {what}"
    return Template(
        kind.family,
        task or "lora",
        "",
        "release.toml.j2",
        f"{kind.title}: {what}",
        release,
        # From 0 GiB on: no plan of this release was made, so that --memory refuses no shape.
        (Shape(0, *kind.small_size), Shape(_SMALL_GIB, *kind.size)),
        kind.fps,
        needed,
        tuple(name for name in taken if name not in needed),
        kind.transformer == "FluxTransformer2DModel",
        bool(found.config.get("guidance_embeds")),
        str(rule),
        rule.logit_std,
        expert=None if two is None else two.trained,
        boundary=0.0 if two is None else two.boundary,
        has_audio=family.inputs.has_audio,
        advice=kind.advice,
        config_from=config_from or "",
        quantize="" if file is None else weight_files.proposed_quantization(file),
    )


def choose_shape(template: Template, memory: str | None) -> Shape:
    """Return the largest clip shape whose plan fits `memory`; without `memory`, the largest.

    Raises:
        RecipeError: the smallest shape needs more memory than there is.
    """
    if memory is None:
        return template.shapes[-1]
    gib = memory_bytes(memory) / 2**30
    fitting = [each for each in template.shapes if each.gib <= gib]
    if not fitting:
        raise errors.RecipeError(
            f"{template.title.partition(',')[0]} ({template.task}) needs {template.shapes[0].gib} "
            f"GiB for its smallest shape, and --memory is {memory}. A smaller model, or LoRA "
            f"instead of all weights, needs less: `{process.command()} init` lists all templates."
        )
    return fitting[-1]


def render_recipe(
    template: Template,
    memory: str | None,
    data: Path,
    recipe: Path,
    buckets: tuple[Bucket, ...] | None = None,
    module: str = _MODULE,
    host_memory: str | None = None,
) -> str:
    """Return the text of a recipe made from a template.

    Args:
        template: one of `templates()`.
        memory: the GPU's memory, such as "24GiB"; None: what is free when training starts.
        data: a folder of clips, or a catalog that exists already (`.parquet`).
        recipe: where the text will be written; names the run.
        buckets: buckets to use instead of the template's.
        module: path of the module, for a template that names one.
        host_memory: RAM of the computer, such as "32GiB"; None: that of the computer it runs on.

    Raises:
        RecipeError: the memory is too small, or a path cannot stand in a recipe.
    """
    import jinja2

    # Both paths stand in comments of the recipe, where a line break would begin a line of TOML.
    for path in (data, recipe):
        if printable(str(path)) != str(path):
            raise errors.RecipeError(
                f"the path {printable(str(path))!r} has control characters, which a recipe cannot "
                "hold. Rename it."
            )
    name = recipe.stem
    is_catalog = data.suffix == ".parquet"
    catalog = catalog_of(data)
    run = Path("runs") / name
    shape = choose_shape(template, memory)
    environment = jinja2.Environment(
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        # A name that is missing here fails, instead of leaving a gap in the recipe.
        undefined=jinja2.StrictUndefined,
        autoescape=False,  # noqa: S701 - TOML, whose strings are written by the filter `toml`
    )
    # A JSON string is also a basic string of TOML.
    environment.filters["toml"] = lambda value: json.dumps(str(value), ensure_ascii=False)
    environment.filters["comment"] = lambda text: textwrap.indent(textwrap.fill(text, 96), "# ")
    text = _FOLDER.joinpath(template.file).read_text("utf-8")
    facts = {**asdict(template), **asdict(shape)}
    other = "low" if template.expert == "high" else "high"
    return environment.from_string(text).render(
        **facts,
        memory=memory,
        pinned=None if host_memory is None else _pinned_share(host_memory),
        is_small=memory is not None and memory_bytes(memory) < _SMALL_GIB * 2**30,
        buckets=", ".join(bucket.toml() for bucket in buckets or (shape.bucket(),)),
        run=run,
        catalog=catalog,
        cache=Path("cache") / name,
        # A catalog does not say from which folder it was made.
        data_argument=shlex.quote(str(data if not is_catalog else "CLIPS")),
        catalog_argument=shlex.quote(str(catalog)),
        recipe_argument=shlex.quote(str(recipe)),
        run_argument=shlex.quote(str(run)),
        other=other,
        folder="" if template.expert is None else EXPERT_FOLDERS[template.expert],
        module=module,
        module_file=f"{module.replace('.', '/')}.py",
    )


def _pinned_share(host_memory: str) -> str:
    """Return the part of a computer's RAM that a run may page-lock, as a recipe has it."""
    from longtake.planner.devices import SHARE_OF_HOST_MEMORY

    return f"{memory_bytes(host_memory) * SHARE_OF_HOST_MEMORY / 2**30:.1f}GiB"


def module_beside(recipe: Path) -> str:
    """Return the import name of a template's module: the clone's, or that of a copy to write.

    The copy is placed beside the recipe, or in the current folder if the recipe's folder cannot be
    imported from here.
    """
    if Path(*_MODULE.split(".")).with_suffix(".py").is_file():
        return _MODULE
    *_, last = _MODULE.split(".")
    try:
        # Python imports from the current folder, by a path of identifiers.
        folders = recipe.parent.resolve().relative_to(Path.cwd()).parts
    except ValueError:
        return last
    return ".".join([*folders, last]) if all(map(str.isidentifier, folders)) else last


def write_module(module: str) -> None:
    """Write the module that a recipe made from a template imports, unless the file exists."""
    path = Path(*module.split(".")).with_suffix(".py")
    text = _FOLDER.joinpath(f"{_MODULE.rpartition('.')[2]}.py.txt").read_text("utf-8")
    try:
        # Mode "x": the user may have changed the copy that an earlier call wrote.
        with path.open("x", encoding="utf-8") as file:
            file.write(text.replace(_MODULE, module))
    except FileExistsError:
        say.line(f"{path} is there already, and the recipe names it as it is.")
    except OSError as error:
        raise errors.RecipeError(f"{path} cannot be written: {error.strerror}.") from error
    else:
        say.line(f"Wrote {path}: the module, to be changed.")


def catalog_of(data: Path) -> Path:
    """Return the path of the catalog: `data` itself, or one to make for a folder of clips."""
    folder = Path(os.path.abspath(data)).name or "clips"  # noqa: PTH100 - a link keeps its name
    return data if data.suffix == ".parquet" else Path("catalogs") / f"{folder}.parquet"


def buckets_for(template: Template, memory: str | None, data: Path) -> tuple[Bucket, ...]:
    """Return the template's bucket (clip shape), and others for clips that it would drop."""
    own = choose_shape(template, memory).bucket()
    catalog = catalog_of(data)
    if not (data.exists() or catalog.exists()):
        return (own,)
    from longtake.data.auto_buckets import glance, propose_buckets

    try:
        frames, aspects = glance(data, catalog, template.fps)
    except errors.DataError:  # `data index` will report what is wrong with it
        return (own,)
    found = propose_buckets(frames, aspects, (own,), 1)
    if len(found) > 1:
        more = ", ".join(map(str, found[1:]))
        say.line(
            f"Many of the clips in {data} do not fit {own}. Buckets for them were added: {more}."
        )
    return found


def init(
    release: Annotated[
        str | None,
        typer.Argument(
            help="The release to start from: a folder in diffusers' layout, or a repository; or "
            "one safetensors or GGUF file of a transformer, with --config-from."
        ),
    ] = None,
    family: Annotated[
        str | None, typer.Option(help="The model's family, to write a template without a release.")
    ] = None,
    task: Annotated[
        str | None, typer.Option(help="The part that is trained: lora, full, module or scratch.")
    ] = None,
    size: Annotated[str | None, typer.Option(help="The model's size, such as 1.3b.")] = None,
    memory: Annotated[
        str | None,
        typer.Option(help="The GPU's memory, such as 24GiB [default: what is free at the start]."),
    ] = None,
    host_memory: Annotated[
        str | None,
        typer.Option(
            help="The computer's RAM, such as 32GiB, of which a run may pin 60 % [default: that of "
            "the computer on which it is trained]."
        ),
    ] = None,
    expert: Annotated[
        Literal["high", "low"] | None,
        typer.Option(
            show_default=False,
            help="The transformer that is trained, if a release has one for high and one for low "
            "noise [default: high].",
        ),
    ] = None,
    config_from: Annotated[
        str | None,
        typer.Option(
            show_default=False,
            help="For one safetensors or GGUF file: the release that it was made of, a folder or a "
            "repository.",
        ),
    ] = None,
    data: Annotated[
        Path, typer.Option(help="The folder of clips, or a catalog that is already made.")
    ] = Path("my_clips"),
    out: Annotated[Path, typer.Option(help="The recipe to write.")] = Path("my_recipe.toml"),
    source: Annotated[
        list[Path] | None,
        typer.Option(
            "--from",
            metavar="FILE",
            help="A configuration file of another trainer to translate; once for each file.",
        ),
    ] = None,
    gpus: Annotated[
        int | None,
        typer.Option(min=1, help="With --from: the number of GPUs that its batches are for."),
    ] = None,
) -> None:
    """Write a commented recipe for a family, a task and a GPU, or from another trainer's files.

    The family of a release is read from its files; without a release and a family, the templates
    are listed. A file that exists is not overwritten.
    """
    if source:
        others = {"--family": family, "--task": task, "--size": size, "--host-memory": host_memory}
        unused = next((name for name, value in others.items() if value is not None), None)
        if unused is not None:
            raise errors.RecipeError(
                f"{unused} is not for --from, whose files say it: leave it out."
            )
        _translate(source, out, Answers(release, expert, gpus, memory))
        return
    if gpus is not None:
        raise errors.RecipeError("--gpus is for --from FILE, a configuration of another trainer.")
    if release is not None:
        if family is not None or size is not None:
            raise errors.RecipeError(
                f"{release} says its family and size by its files: leave --family and --size out."
            )
        template = template_of_release(release, task, expert, config_from)
    elif expert is not None:
        raise errors.RecipeError(
            f"--expert {expert} is for a release with two transformers: name the release."
        )
    elif config_from is not None:
        raise errors.RecipeError(
            f"--config-from {config_from} is for one safetensors or GGUF file: name the file."
        )
    elif family is not None:
        template = find_template(family, task, size)
    else:
        _list_templates()
        return
    module = module_beside(out)
    buckets = buckets_for(template, memory, data)
    _write_recipe(out, render_recipe(template, memory, data, out, buckets, module, host_memory))
    say.line(f"Wrote {out}: {template.title}.")
    if template.task == "module" and module != _MODULE:
        write_module(module)
    if data.suffix != ".parquet":
        missing = "" if data.exists() else f" ({data} does not exist yet)"
        say.line(
            f"Its first lines have the next commands: index {data}{missing}, then plan and train."
        )


def _translate(files: list[Path], out: Path, answers: Answers) -> None:
    """Write a recipe of another trainer's configuration, and print what has to be known of it."""
    from longtake.migration.migrate import migrate

    done = migrate(files, out, answers)
    _write_recipe(out, done.text)
    say.line("\n".join(done.notes))
    say.line(f"Wrote {out}: {done.title}. Next:")
    say.line("\n".join(f"  {command}" for command in done.commands))


def _write_recipe(out: Path, text: str) -> None:
    try:
        # Mode "x" also fails if the file appears just now: nothing is overwritten.
        with out.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise errors.RecipeError(
            f"{out} exists and is not overwritten. Choose another name with --out, or delete it."
        ) from None
    except OSError as error:
        raise errors.RecipeError(f"{out} cannot be written: {error.strerror}.") from error


def _list_templates() -> None:
    from rich.table import Table

    table = Table("--family", "--task", "--size", "memory", "what is trained", box=None)
    for each in templates():
        smallest = each.shapes[0]
        memory = f"{smallest.gib} GiB or more" if each.pretrained else "CPU"
        table.add_row(each.family, each.task, each.size, memory, each.title)
    say.stdout_console().print(table)
    releases = Table("RELEASE", "kind of model", box=None)
    with_template = {each.pretrained for each in templates()}
    for kind in recognition.KINDS:
        for release in kind.releases:
            if release not in with_template:
                releases.add_row(release, kind.title)
    say.stdout_console().print(releases)
    first = templates()[1]
    say.line(
        f"Write one: {process.command()} init --family {first.family} --task {first.task} "
        f"--size {first.size} --memory 24GiB --data my_clips --out my_recipe.toml\n"
        f"Of a release: {process.command()} init RELEASE --task lora --memory 24GiB, where RELEASE "
        "is a repository or a folder in diffusers' layout."
    )
