"""Links, files, modules and recipe keys that README, CONTRIBUTING and docs/ name exist."""

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from pydantic import BaseModel

from longtake.cli import init
from longtake.config import Recipe

_ROOT = Path(__file__).resolve().parents[1]
_README = (_ROOT / "README.md").read_text(encoding="utf-8")
_PAGES = [_ROOT / "README.md", _ROOT / "CONTRIBUTING.md", *(_ROOT / "docs").rglob("*.md")]
_PAGES += (_ROOT / "benchmarks").glob("*.md")
_SOURCE = _ROOT / "src" / "longtake"
_PACKAGES = "|".join(path.parent.name for path in _SOURCE.glob("*/__init__.py"))
_FENCE = re.compile(r"^ *```(\w*)\n(.*?)^ *```", re.DOTALL | re.MULTILINE)
_PYTHON = re.compile(r"^ *```python\n.*?^ *```", re.DOTALL | re.MULTILINE)
_CODE = re.compile(r"`([^`\n]+)`")
_PATH = re.compile(
    r"(?<![\w/.<-])(?:(?:src|longtake|tests|benchmarks|examples|docs)/[\w./*-]*"
    rf"|(?:(?:{_PACKAGES})/)?[a-z_*]+\.py\b)"
)
_MODULE = re.compile(r"(?<![\w/.-])(longtake(?:\.[a-z_]\w*)+)")
_NO_MODULES = {"longtake.catalog"}  # a key in the metadata of a Parquet file
_SECTIONS = {
    name: field.annotation.model_fields
    for name, field in Recipe.model_fields.items()
    if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel)
}
_KEY = re.compile(
    rf"(?<![\w/.:-])({'|'.join(_SECTIONS)})\.(?!py\b|md\b|json\b)([a-z]\w*)(?![\w(/])"
)
_OTHERS = _ROOT / "docs" / "reference" / "migration.md"  # has the keys of other trainers
_by_page = pytest.mark.parametrize("page", _PAGES, ids=lambda page: str(page.relative_to(_ROOT)))


def test_the_locked_set_for_cuda_repeats_no_package_and_is_installed_by_the_image() -> None:
    files = [(_ROOT / name).read_text() for name in ("constraints.txt", "constraints-cuda.txt")]
    pins = [re.findall(r"^([\w.-]+)==[\w.*]+$", text, re.MULTILINE) for text in files]
    assert len(pins[1]) == sum(not line.startswith("#") for line in files[1].splitlines())
    assert not {each.lower() for each in pins[0]} & {each.lower() for each in pins[1]}
    version = re.search(r"^torch==(.+)$", files[0], re.MULTILINE)
    assert version is not None
    assert f"torch {version[1]} of PyPI" in files[1]
    image = (_ROOT / "Containerfile").read_text()
    assert "--constraint constraints.txt --constraint constraints-cuda.txt" in image


def test_the_readme_is_short() -> None:
    assert len(_README.splitlines()) <= 180


def test_the_recipe_shown_is_what_init_writes() -> None:
    (shown,) = re.findall(r"```toml\n(.*?)```", _README, re.DOTALL)
    (arguments,) = re.findall(r"^longtake init (.*)$", _README, re.MULTILINE)
    given = dict(re.findall(r"--(\w+) (\S+)", arguments))
    template = init.find_template(given["family"], given["task"], given["size"])
    data, out = Path(given["data"]), Path(given["out"])
    assert shown == init.render_recipe(template, given["memory"], data, out)


@_by_page
def test_every_link_leads_somewhere(page: Path) -> None:
    text = re.sub(r"```.*?```|`[^`]*`", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", text):
        if "://" not in target:
            assert (page.parent / target).exists(), target


@_by_page
def test_every_file_and_module_that_a_page_names_exists(page: Path) -> None:
    """Paths from the root, from src or from src/longtake; `kernels.py` may be in any package."""
    pieces = list(_pieces_of_code(page.read_text(encoding="utf-8")))
    paths = {path.rstrip("/.") for piece in pieces for path in _PATH.findall(piece)}
    assert [path for path in paths if not _exists(path)] == []
    modules = {module for piece in pieces for module in _MODULE.findall(piece)}
    assert [module for module in modules - _NO_MODULES if not _is_in_a_module(module)] == []


def _pieces_of_code(text: str) -> Iterator[str]:
    """Blocks of code, and what is in backquotes."""
    yield from (block for _, block in _FENCE.findall(text))
    yield from _CODE.findall(_FENCE.sub("", text))


def _exists(path: str) -> bool:
    found = any(any(folder.glob(path)) for folder in (_ROOT, _SOURCE, _SOURCE.parent))
    return found or ("/" not in path and any(_ROOT.glob(f"*/**/{path}")))


def _is_in_a_module(name: str) -> bool:
    """Return whether a dotted name is that of a package, a module, or something in a module."""
    folder = _SOURCE.parent
    for part in name.split("."):
        if (folder / f"{part}.py").exists():
            return True
        folder /= part
    return (folder / "__init__.py").exists()


@_by_page
def test_every_recipe_key_that_a_page_names_exists(page: Path) -> None:
    text = "" if page == _OTHERS else page.read_text(encoding="utf-8")
    pieces = _pieces_of_code(_PYTHON.sub("", text))
    keys = {key for piece in pieces for key in _KEY.findall(piece)}
    for language, block in _FENCE.findall(text):
        if language == "toml":
            tables = [item for item in tomllib.loads(block).items() if item[0] in _SECTIONS]
            keys |= {(section, key) for section, table in tables for key in table}
    assert [f"{section}.{key}" for section, key in keys if key not in _SECTIONS[section]] == []


def test_every_page_is_in_the_index() -> None:
    for folder, index in (
        ("docs", "docs/README.md"),
        ("docs/decisions", "docs/decisions/README.md"),
    ):
        text = (_ROOT / index).read_text(encoding="utf-8")
        for page in (_ROOT / folder).rglob("*.md"):
            if page != _ROOT / index and (folder != "docs" or page.parent.name != "decisions"):
                assert f"({page.relative_to((_ROOT / index).parent)})" in text, page


def test_the_decision_on_layers_has_those_of_import_linter() -> None:
    settings = tomllib.loads((_ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    layers = settings["tool"]["importlinter"]["contracts"][0]["layers"]
    page = (_ROOT / "docs" / "decisions" / "0001-layers.md").read_text(encoding="utf-8")
    ((_, shown),) = _FENCE.findall(page)
    assert shown.splitlines() == [re.sub(r"[()]", "", layer) for layer in layers]


def test_the_captioned_tree_is_complete() -> None:
    text = (_ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    (tree,) = re.findall(r"```\n(src/longtake/\n.*?)```", text, re.DOTALL)
    assert len(tree.splitlines()) <= 45
    packages = {f"{path.parent.name}/" for path in _SOURCE.glob("*/__init__.py")}
    modules = {path.name for path in _SOURCE.glob("[!_]*.py")}
    assert set(re.findall(r"^  (\S+)", tree, re.MULTILINE)) == packages | modules
