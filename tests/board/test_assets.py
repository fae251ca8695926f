"""Scripts of the pages, and the one script of a report."""

import re
from collections import Counter
from hashlib import sha256

from longtake.board import assets

_TOP_LEVEL = re.compile(r"^(?:export )?(?:async )?(?:function|const|let|class) (\w+)", re.MULTILINE)
_ANY_IMPORT = re.compile(r"^import\b", re.MULTILINE)


def _modules() -> dict[str, str]:
    files = assets.static_files()
    return {
        name: data.decode()
        for name, data in files.items()
        if name.endswith(".js") and name not in assets.SCRIPTS
    }


def test_a_name_is_defined_in_one_module() -> None:
    names = Counter(name for text in _modules().values() for name in _TOP_LEVEL.findall(text))
    assert [name for name, count in names.items() if count > 1] == []


def test_the_bundle_has_each_module_once_and_no_imports() -> None:
    bundle = assets.bundled_module()
    assert not _ANY_IMPORT.search(bundle)
    assert "export " not in re.sub(r"//.*", "", bundle)
    for name, text in _modules().items():
        for defined in _TOP_LEVEL.findall(text):
            found = re.findall(
                rf"^(?:async )?(?:function|const|let|class) {defined}\b", bundle, re.M
            )
            assert len(found) == 1, (name, defined)


def test_uplot_is_the_vendored_release() -> None:
    """UPlot 1.6.32 as its npm package has it, under the MIT licence."""
    hashes = dict(
        line.split()[::-1] for line in assets.static_files()["uPlot.sha256"].decode().splitlines()
    )
    for name, digest in hashes.items():
        assert sha256(assets.static_files()[name]).hexdigest() == digest
    assert "MIT" in assets.static_files()["uPlot.LICENSE"].decode()
