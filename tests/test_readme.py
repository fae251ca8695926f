"""What README and CONTRIBUTING show is what there is."""

import re
from pathlib import Path

import pytest

from longtake.cli import init

_ROOT = Path(__file__).resolve().parents[1]
_README = (_ROOT / "README.md").read_text(encoding="utf-8")
_PAGES = [_ROOT / "README.md", _ROOT / "CONTRIBUTING.md", *(_ROOT / "docs").rglob("*.md")]
_PAGES += (_ROOT / "benchmarks").glob("*.md")


def test_the_readme_is_short() -> None:
    assert len(_README.splitlines()) <= 180


def test_the_recipe_shown_is_what_init_writes() -> None:
    (shown,) = re.findall(r"```toml\n(.*?)```", _README, re.DOTALL)
    (arguments,) = re.findall(r"^longtake init (.*)$", _README, re.MULTILINE)
    given = dict(re.findall(r"--(\w+) (\S+)", arguments))
    template = init.find_template(given["family"], given["task"], given["size"])
    data, out = Path(given["data"]), Path(given["out"])
    assert shown == init.render_recipe(template, given["memory"], data, out)


@pytest.mark.parametrize("page", _PAGES, ids=lambda page: str(page.relative_to(_ROOT)))
def test_every_link_leads_somewhere(page: Path) -> None:
    text = re.sub(r"```.*?```|`[^`]*`", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", text):
        if "://" not in target:
            assert (page.parent / target).exists(), target


def test_every_page_is_in_the_index() -> None:
    """Decisions have an index of their own."""
    for folder, index in (
        ("docs", "docs/README.md"),
        ("docs/decisions", "docs/decisions/README.md"),
    ):
        text = (_ROOT / index).read_text(encoding="utf-8")
        for page in (_ROOT / folder).rglob("*.md"):
            if page != _ROOT / index and (folder != "docs" or page.parent.name != "decisions"):
                assert f"({page.relative_to((_ROOT / index).parent)})" in text, page


def test_the_captioned_tree_is_complete() -> None:
    """Packages and top-level modules, each with one line."""
    text = (_ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    (tree,) = re.findall(r"```\n(src/longtake/\n.*?)```", text, re.DOTALL)
    assert len(tree.splitlines()) <= 45
    source = _ROOT / "src" / "longtake"
    packages = {f"{path.parent.name}/" for path in source.glob("*/__init__.py")}
    modules = {path.name for path in source.glob("[!_]*.py")}
    assert set(re.findall(r"^  (\S+)", tree, re.MULTILINE)) == packages | modules
