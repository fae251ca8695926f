"""Writes the reference from the code: `make reference`, or `python -m docs.reference.generate`.

recipe.md: every key, from the pydantic models. verbs.md: the command line. run-directory.md: files
and records. exit-codes.md and environment.md: tables here, checked against the code. The list of
core's modules in CONTRIBUTING.md has the first line of each module. A test compares what this
script would write with the files.
"""

import ast
import importlib
import inspect
import re
import sys
from collections import ChainMap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import typer
from benchmarks.structure import CORE

from longtake import config, errors, metrics, run_dir
from longtake.cli.app import app
from longtake.migration import tables as migration

HERE = Path(__file__).parent
_CONTRIBUTING = "../../CONTRIBUTING.md"
_SOURCE = Path(errors.__file__).parent
_GENERATED = "Generated from the code by `make reference`."
_MODULES_BEGIN = "<!-- modules of core, by `make reference` -->\n"
_MODULES_END = "<!-- end of the modules -->\n"

EXIT_CODES = (
    (0, "done"),
    (1, "a check found something: a plan that does not fit, a repeated clip, a failed drill"),
    (
        2,
        "a mistake of the user, in one sentence on stderr; the same command would end the same way",
    ),
    (69, "another rank or node was lost (`LostPeerError`); the launcher starts the ranks again"),
    (75, "saved after SIGUSR1: start it again"),
    (130, "saved after SIGINT (Ctrl-C)"),
    (143, "saved after SIGTERM"),
    ("128 + n", "a rank was killed by signal n"),
)

ENVIRONMENT = {
    "CUDA_VISIBLE_DEVICES": "GPUs that may be used; read by PyTorch",
    "GLOO_SOCKET_IFNAME": "network interface of gloo; preflight reports it",
    "HF_HOME": "where downloaded weights are kept; read by huggingface_hub",
    "HF_HUB_OFFLINE": "1: nothing is downloaded; read by huggingface_hub",
    "HF_TOKEN": "access to gated repositories such as FLUX; read by huggingface_hub",
    "LOCAL_RANK": "set by the launcher: rank on the node",
    "LOCAL_WORLD_SIZE": "set by the launcher: ranks on the node",
    "LONGTAKE_CLIP": "folder or hub id of the CLIP model of the measure `ClipScore`",
    "LONGTAKE_EVENT": "the alert, as JSON, for the command in `watch.hook`",
    "LONGTAKE_FEATURES": "extractor for the measure `FrechetDistance`: TorchScript file or class",
    "LONGTAKE_LAUNCH": "set by `longtake launch`: the launch on all of its nodes",
    "LONGTAKE_PLAN_CACHE": "off: no plan is read from `~/.cache/longtake/plans` or kept there",
    "LONGTAKE_REAL_FEATURES": "features of real videos for `FrechetDistance`: a .npy file, [N, D]",
    "MASTER_ADDR": "set by the launcher: host of the rendezvous",
    "MASTER_PORT": "set by the launcher: port of the rendezvous",
    "NCCL_IB_HCA": "InfiniBand adapters of NCCL; preflight reports it",
    "NCCL_SOCKET_IFNAME": "network interface of NCCL; preflight reports it",
    "NETRC": "file with W&B's key, if it is not `~/.netrc`",
    "NO_COLOR": "any value: no colours in the terminal; read by rich",
    "OMP_NUM_THREADS": "CPU threads of a rank; unset, ranks divide the cores, one measures",
    "ONEDNN_MAX_CPU_ISA": 'limits the CPU\'s instructions; `precision = "auto"` follows it',
    "PYTORCH_ALLOC_CONF": "settings of PyTorch's CUDA allocator; unset: expandable segments",
    "RANK": "set by the launcher: rank among all ranks",
    "RAY_ADDRESS": "the cluster that `--on ray` uses",
    "SLURM_JOB_ID": "set by Slurm; ranks of one job may take over its run at once",
    "TORCHINDUCTOR_CACHE_DIR": "compiled blocks; default `~/.cache/longtake/compiled`",
    "WANDB_API_KEY": "W&B's key",
    "WANDB_BASE_URL": "a W&B server of one's own",
    "WANDB_ENTITY": "the W&B team; read by wandb",
    "WANDB_NAME": "what W&B calls the run; without it the run directory's name",
    "WORLD_SIZE": "set by the launcher: number of ranks",
    "XDG_CACHE_HOME": "folder of caches; default `~/.cache`",
    "XDG_DATA_HOME": "folder of what is kept for this user; default `~/.local/share`",
}


def attribute_docstrings(source: str) -> dict[str, dict[str, str]]:
    """The text below each annotated field of each class of a module."""
    found: dict[str, dict[str, str]] = {}
    for node in ast.parse(source).body:
        if not isinstance(node, ast.ClassDef):
            continue
        fields = found.setdefault(node.name, {})
        for field, following in zip(node.body, [*node.body[1:], None], strict=False):
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
                is_text = isinstance(following, ast.Expr) and isinstance(
                    following.value, ast.Constant
                )
                text = following.value.value if is_text else ""  # type: ignore[union-attr]
                fields[field.target.id] = " ".join(str(text).split())
    return found


def recipe_page() -> str:
    """Every key of a recipe with its type, default and meaning."""
    schema = config.Recipe.model_json_schema()
    texts: dict[str, dict[str, str]] = {}
    models: dict[str, type] = {}
    for name in ("data", "model", "training", "sampling", "recipe"):
        module = importlib.import_module(f"longtake.config.{name}")
        texts |= attribute_docstrings(inspect.getsource(module))
        models |= dict(inspect.getmembers(module, inspect.isclass))
    lines = [
        *("# Recipe keys", "", _GENERATED, ""),
        "A recipe is TOML. A key can also be given on the command line: `--set seed=1`.",
        "Unknown keys are refused. A key without a default must be given.",
        "",
    ]
    lines += [
        "## Top level",
        "",
        *_keys("", schema, schema["$defs"], texts["Recipe"], skip_tables=True),
    ]
    for path, model in _tables("", schema, schema["$defs"]):
        summary = inspect.getdoc(models[model]) or ""
        table = schema["$defs"][model]
        lines += ["", f"## `[{path}]`", "", summary.partition("\n\n")[0].replace("\n", " "), ""]
        inherited = ChainMap(*(texts.get(each.__name__, {}) for each in models[model].__mro__))
        lines += _keys(path, table, schema["$defs"], inherited)
    return "\n".join(lines) + "\n"


def _tables(
    path: str, schema: Mapping[str, Any], definitions: Mapping[str, Any]
) -> Iterator[tuple[str, str]]:
    """Each table of a recipe, as its path and the name of its model."""
    for name, field in schema["properties"].items():
        inside = f"{path}.{name}" if path else name
        model = _model_of(field)
        if model and "properties" in definitions[model]:
            many = "array" in str(field) and "items" in str(field)
            by_name = bool({"additionalProperties", "patternProperties"} & field.keys())
            yield (f"[{inside}]" if many else f"{inside}.NAME" if by_name else inside), model
            yield from _tables(inside, definitions[model], definitions)


def _model_of(field: Mapping[str, Any]) -> str | None:
    found = re.search(r"#/\$defs/(\w+)", str(dict(field)))
    return found[1] if found else None


def _keys(
    path: str,
    schema: Mapping[str, Any],
    definitions: Mapping[str, Any],
    texts: Mapping[str, str],
    *,
    skip_tables: bool = False,
) -> list[str]:
    rows = ["| key | type | default | |", "|---|---|---|---|"]
    required = schema.get("required", ())
    for name, field in schema["properties"].items():
        model = _model_of(field)
        if skip_tables and model and "properties" in definitions[model]:
            continue
        default = "required" if name in required else _default(field)
        cells = (f"`{name}`", _type_of(field, definitions), default, _cell(texts.get(name, "")))
        rows.append(f"| {' | '.join(cells)} |")
    return rows


def _default(field: Mapping[str, Any]) -> str:
    value = field.get("default")
    if value is None or value in ({}, []):
        return "unset" if value is None else f"`{value}`"
    return f"`{_toml(value)}`"


def _toml(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return f"[{', '.join(map(_toml, value))}]"
    return f'"{value}"' if isinstance(value, str) else str(value)


_NO_LIMIT = 1e9  # a larger bound only keeps values representable
_NAMES = {"integer": "integer", "number": "number", "string": "text", "boolean": "true or false"}


def _type_of(field: Mapping[str, Any], definitions: Mapping[str, Any]) -> str:
    if "enum" in field:
        return ", ".join(f"`{_toml(each)}`" for each in field["enum"])
    if "const" in field:
        return f"`{_toml(field['const'])}`"
    if options := field.get("anyOf") or field.get("oneOf"):
        kinds = [_type_of(each, definitions) for each in options if each.get("type") != "null"]
        return " or ".join(dict.fromkeys(kinds))
    if field.get("type") == "array" and (options := field.get("items", {}).get("oneOf")):
        return f"list of {' or '.join(_type_of(each, definitions) for each in options)}"
    if reference := _model_of(field):
        inner = definitions[reference]
        if "properties" not in inner:
            return _type_of(inner, definitions)
        return "list of tables" if field.get("type") == "array" else "table"
    kind = field.get("type")
    if kind == "array":
        items = field.get("items") or (field.get("prefixItems") or [{}])[0]
        return f"list of {_type_of(items, definitions)}"
    if kind == "object":
        return "table"
    if field.get("format") == "path":
        return "path"
    return _NAMES.get(str(kind), "any") + _bounds(field)


def _bounds(field: Mapping[str, Any]) -> str:
    signs = {"exclusiveMinimum": ">", "minimum": ">=", "exclusiveMaximum": "<", "maximum": "<="}
    limits = {sign: field[name] for name, sign in signs.items() if name in field}
    found = [f"{sign} {limit:g}" for sign, limit in limits.items() if limit < _NO_LIMIT]
    return f" {', '.join(found)}" if found else ""


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def verbs_page() -> str:
    """Every verb with its arguments and options."""
    lines = ["# Verbs", "", _GENERATED, ""]
    lines += ["`longtake VERB --help` prints the same. [Exit codes](exit-codes.md).", ""]
    group = typer.main.get_command(app)
    for name, command in group.commands.items():  # type: ignore[attr-defined]
        for path, verb in _verbs(name, command):
            lines += [f"## longtake {path}", "", _paragraphs(verb.help or ""), ""]
            rows = [row for parameter in verb.params if (row := _parameter(parameter))]
            if rows:
                lines += ["| | default | |", "|---|---|---|", *rows, ""]
    return "\n".join(lines)


def _verbs(name: str, command: Any) -> Iterator[tuple[str, Any]]:
    if inner := getattr(command, "commands", None):
        for each, verb in inner.items():
            yield from _verbs(f"{name} {each}", verb)
    else:
        yield name, command


def _paragraphs(text: str) -> str:
    parts = inspect.cleandoc(text.replace("\b", "")).split("\n\n")
    return "\n\n".join(" ".join(part.split()) for part in parts)


def _parameter(parameter: Any) -> str:
    if getattr(parameter, "hidden", False) or "--help" in parameter.opts:
        return ""
    is_option = parameter.param_type_name == "option"
    names = (*parameter.opts, *parameter.secondary_opts)
    shown = ", ".join(f"`{each if is_option else each.upper()}`" for each in names)
    annotation = parameter.type_descriptor.annotation
    is_literal = get_origin(annotation) is Literal
    values = f" ({', '.join(map(str, get_args(annotation)))})" if is_literal else ""
    default = parameter.default
    is_plain = isinstance(default, int | float | str | Path) and not isinstance(default, bool)
    text = _cell(" ".join((getattr(parameter, "help", None) or "").split())) + values
    return f"| {shown} | {f'`{default}`' if is_plain else ''} | {text} |"


def run_directory_page() -> str:
    """The files of a run directory, and the fields of their records."""
    docstring = inspect.getdoc(run_dir) or ""
    tree = re.search(r"(?:^    .*\n?)+", docstring, re.MULTILINE)
    assert tree, "run_dir's docstring lists the files"
    texts = dict[str, dict[str, str]]()
    for module in (run_dir, metrics):
        texts |= attribute_docstrings(Path(str(module.__file__)).read_text(encoding="utf-8"))
    lines = [
        "# Files of a run directory",
        "",
        _GENERATED,
        "",
        "```",
        inspect.cleandoc(tree[0]),
        "```",
        "",
    ]
    lines += ["[Formats](files.md) have numbers. Every file has one writer at a time.", ""]
    kinds = ", ".join(f"`{kind}`" for kind in run_dir.EventKind.__args__)  # type: ignore[attr-defined]
    lines += ["## events.jsonl", "", f"`event` is one of {kinds}.", ""]
    records = (
        ("metrics.jsonl", "Metrics"),
        ("rollbacks.jsonl", "RolledBack"),
        ("run.json", "RunRecord"),
    )
    for file, model in records:
        lines += [f"## {file}", "", "| field | |", "|---|---|"]
        lines += [f"| `{name}` | {_cell(text)} |" for name, text in texts[model].items()]
        lines.append("")
    return "\n".join(lines)


def exit_codes_page() -> str:
    """What the exit codes mean."""
    known = {code for code, _ in EXIT_CODES}
    raised = {each.exit_code for each in _all_errors(errors.LongtakeError)}
    assert raised <= known, f"exit codes {raised - known} of errors.py are not in the table"
    rows = [f"| {code} | {text} |" for code, text in EXIT_CODES]
    return "\n".join(["# Exit codes", "", _GENERATED, "", "| code | |", "|---|---|", *rows, ""])


def migration_page() -> str:
    """What becomes of each setting of other trainers, from the tables of `init --from`."""
    lines = ["# Settings of other trainers", "", _GENERATED, ""]
    lines += [
        "What `longtake init --from` makes of each setting ([guide](../guides/migrating.md)). One",
        "without a key in the middle column has no equivalent; where *nothing* stands there, it",
        "changes nothing of what is trained. What is not set has the trainer's default.",
        "",
    ]
    parts = {"run": "setting", "clips": "setting of a set of clips", "samples": "of a prompt"}
    for name in migration.TOOLS:
        tool = migration.tool(name)
        lines += [f"## {tool.title}", "", f"Keys of {tool.facts}.", ""]
        trained = ", ".join(f"`{model}`" for model, families in tool.families.items() if families)
        lines += [f"Models that are trained here: {trained}.", ""]
        for part, title in parts.items():
            lines += [f"| {title} | longtake | |", "|---|---|---|"]
            rows: dict[str, migration.Row] = getattr(tool, part)
            for key, row in rows.items():
                to = f"`{row.to}`" if row.to else "*nothing*" if row.ignored else ""
                lines.append(f"| `{key}` | {to} | {_cell(row.note)} |")
            lines.append("")
        lines += [f"| default of {tool.title} | |", "|---|---|"]
        shown = {key: each for key, each in tool.defaults.items() if not key.startswith("fact.")}
        lines += [f"| `{key}` | `{_toml(each)}` |" for key, each in shown.items()]
        lines += [f"| `{key}` | {_cell(reason)} |" for key, reason in tool.kept.items()]
        lines.append("")
    return "\n".join(lines)


def _all_errors(base: type[errors.LongtakeError]) -> Iterator[type[errors.LongtakeError]]:
    yield base
    for each in base.__subclasses__():
        yield from _all_errors(each)


def environment_page() -> str:
    """Environment variables that a user may set, or that a launcher sets."""
    read = set()
    for path in _SOURCE.rglob("*.py"):
        read |= set(re.findall(r'"(LONGTAKE_[A-Z_]+)"', path.read_text(encoding="utf-8")))
    missing = read - set(ENVIRONMENT) - _INTERNAL
    assert not missing, f"{missing} are read in the code; add them to ENVIRONMENT or _INTERNAL"
    rows = [f"| `{name}` | {text} |" for name, text in ENVIRONMENT.items()]
    lines = [
        "# Environment variables",
        "",
        _GENERATED,
        "",
        "| variable | |",
        "|---|---|",
        *rows,
        "",
    ]
    return "\n".join(lines)


def contributing_page() -> str:
    """Return CONTRIBUTING.md with the list of core's modules as they are now."""
    text = (HERE / _CONTRIBUTING).read_text(encoding="utf-8")
    before, begin, rest = text.partition(_MODULES_BEGIN)
    _, end, after = rest.partition(_MODULES_END)
    return before + begin + "".join(_module_lines()) + end + after


def _module_lines() -> Iterator[str]:
    """Yield a heading for each package of core, and one line for each of its modules."""
    for package in ("", *CORE):
        modules = (_SOURCE / package).glob("*.py")
        yield f"\n**{package or 'at the top'}**\n\n"
        for path in sorted(modules):
            docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
            if docstring and not path.name.startswith("__"):
                yield f"- `{path.stem}`: {docstring.splitlines()[0]}\n"
    yield "\n"


_INTERNAL = {
    "LONGTAKE_BEAT",
    "LONGTAKE_HOOK",
    "LONGTAKE_HOSTS",
    "LONGTAKE_LAUNCHER",
    "LONGTAKE_LOG",
    "LONGTAKE_TERMINAL",
    "LONGTAKE_WATCH_SECTION",
    "LONGTAKE_WATCH_SETTINGS",
}

PAGES = {
    "recipe.md": recipe_page,
    "verbs.md": verbs_page,
    "migration.md": migration_page,
    "run-directory.md": run_directory_page,
    "exit-codes.md": exit_codes_page,
    "environment.md": environment_page,
    _CONTRIBUTING: contributing_page,
}

if __name__ == "__main__":
    for name, page in PAGES.items():
        (HERE / name).write_text(page(), encoding="utf-8")
    sys.stdout.write(f"wrote {', '.join(PAGES)}\n")
