"""The guide on memory shows what really happens: its examples are run, messages compared."""

import contextlib
import io
import re
from pathlib import Path
from typing import Any

_GUIDE = Path(__file__).resolve().parents[2] / "docs" / "guides" / "memory.md"


def test_every_example_says_what_the_guide_shows() -> None:
    shown = re.findall(r"```python\n(.*?)```\n\n```text\n(.*?)```", _GUIDE.read_text(), re.DOTALL)
    assert len(shown) == _GUIDE.read_text().count("```python")
    names: dict[str, Any] = {"__name__": "guide"}
    for code, expected in shown:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(code, str(_GUIDE), "exec"), names)  # noqa: S102 - our own guide
        assert printed.getvalue().split() == expected.split()
