"""The example of a loop that is not longtake's own does what its first lines say."""

import json
import subprocess
from pathlib import Path

import pytest

from longtake.data.catalog import Catalog

_EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "own_loop.py"


def _clips(lines: list[str]) -> list[str]:
    return [clip for line in lines for clip in line.partition("clips ")[2].split()]


@pytest.mark.slow
def test_a_loop_of_ones_own_goes_on_where_it_was(
    shapes_catalog: Path, warm: list[str], tmp_path: Path
) -> None:
    def call(*arguments: object) -> subprocess.CompletedProcess[str]:
        command = [*warm, "1", str(_EXAMPLE), "clips.parquet", *map(str, arguments)]
        return subprocess.run(
            command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=300
        )

    catalog = Catalog.load(shapes_catalog)
    clips = list(catalog.clips())
    Catalog.of(clips[:48]).save(tmp_path / "clips.parquet")
    first = call("--steps", 7)
    assert first.returncode == 0, first.stderr
    catalog.save(tmp_path / "clips.parquet")
    refused = call("--steps", 9)
    assert refused.returncode == 1
    assert "16 clips added" in refused.stderr
    assert "Traceback" not in refused.stderr
    assert refused.stderr.endswith("--on-change merge (or another).\n")
    second = call("--steps", 9, "--on-change", "merge")
    assert second.returncode == 0, second.stderr
    lines = [*first.stdout.splitlines(), *second.stdout.splitlines()]
    assert [line.split()[1] for line in lines] == [str(step) for step in range(16)]
    seen = _clips(lines)
    assert len(seen) == len(set(seen)) == 64
    state = json.loads((tmp_path / "own_loop.json").read_text())
    assert (state["global_step"], state["epoch"], state["step_in_epoch"]) == (16, 1, 0)
