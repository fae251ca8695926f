from pathlib import Path

import pytest

from longtake.errors import RunError
from longtake.faults.sandbox import (
    TrainingProcess,
    stop_while_decoding,
)


def test_a_process_that_ends_too_early_is_an_error_with_its_output(tmp_path: Path) -> None:
    with TrainingProcess(tmp_path) as process:
        with pytest.raises(RunError, match=r"exit code 2.*There is no recipe recipe\.toml"):
            process.finish()
        with pytest.raises(RunError, match=r"before step 3.*There is no recipe"):
            process.wait_for_rows(3)
        with pytest.raises(RunError, match="before a decode worker could be stopped"):
            stop_while_decoding(process, tmp_path)
        assert process.wait_for_event("finished") is None
        assert not process.kill(), "it had ended by itself"
    with TrainingProcess(tmp_path) as process:
        assert process.kill()
