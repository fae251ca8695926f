"""What a thread waits for, told from its calls."""

from pathlib import Path

import pytest

import longtake
from longtake.watch.waiting import Wait, awaited, is_machinery, own_call, short_file

_SITE = "/opt/env/lib/python3.11/site-packages"
_LIB = "/usr/lib/python3.11"
_C10D = ("all_reduce", f"{_SITE}/torch/distributed/distributed_c10d.py", 3245)
_OWN = ("forward", "/home/me/project/model.py", 12)
_STEP = ("compute_gradients", f"{_SITE}/longtake/training/step.py", 73)
_RESULT = ("result", f"{_LIB}/concurrent/futures/_base.py", 451)
_QUALIFIED = ("Condition.wait", f"{_LIB}/threading.py", 327)
_WAIT = ("wait", f"{_LIB}/threading.py", 327)


@pytest.mark.parametrize(
    ("calls", "phase", "expected"),
    [
        ([_C10D, _OWN, _STEP], "forward", "collective"),
        (
            [("wait_for_unshard", f"{_SITE}/torch/distributed/fsdp/_p.py", 3), _STEP],
            "x",
            "collective",
        ),
        (
            [("sum_over_ranks", "/src/longtake/parallel/collectives.py", 23), _STEP],
            "x",
            "collective",
        ),
        ([("rendezvous", f"{_SITE}/torch/distributed/rendezvous.py", 9), _STEP], "x", "collective"),
        ([_OWN, _C10D, _STEP], "forward", "nothing"),
        ([_OWN, _STEP], "collective", "nothing"),
        ([_WAIT, _RESULT, ("wait", "/src/longtake/data/decoding.py", 120), _STEP], "data", "data"),
        ([_WAIT, _RESULT, _OWN], "forward", "lock"),
        ([_QUALIFIED, ("PixelPlaces.wait", "/src/longtake/data/d.py", 1), _STEP], "data", "data"),
        ([_WAIT, ("wait", "/src/longtake/checkpoint/saver.py", 121)], "optimizer", "checkpoint"),
        ([("write", f"{_SITE}/torch/distributed/checkpoint/filesystem.py", 5)], "x", "nothing"),
        ([("synchronize", f"{_SITE}/torch/cuda/__init__.py", 1), _STEP], "forward", "device"),
        ([("linear", f"{_SITE}/torch/nn/modules/linear.py", 125), _OWN], "forward", "nothing"),
        ([], "collective", "collective"),
        ([], "data", "data"),
        ([], "backward", "nothing"),
    ],
)
def test_calls_tell_what_is_waited_for(
    calls: list[tuple[str, str, int]], phase: str, expected: Wait
) -> None:
    """What lies below the innermost call that is no library's decides; without calls, the phase."""
    assert awaited(tuple(calls), phase) == expected


def test_the_driver_s_calls_tell_a_wait_for_the_device() -> None:
    """Python does not show that `.item()` waits for a card; C's calls do, where they were read."""
    native = (("cuStreamSynchronize", "libcuda.so.1", 0),)
    assert awaited((_OWN, _STEP), "forward", native) == "device"
    assert awaited((_OWN, _STEP), "forward", (("read", "libc.so.6", 0),)) == "nothing"


def test_the_line_to_look_at_is_that_of_whoever_called_a_library() -> None:
    """Of a sleep, a lock or a collective, the caller's; a library without a caller has its own."""
    assert own_call((_WAIT, _RESULT, _C10D, _OWN, _STEP)) == _OWN
    assert own_call((_C10D, _STEP)) == _STEP
    assert own_call((_WAIT, _RESULT)) is None


@pytest.mark.parametrize(
    ("file", "machinery", "short"),
    [
        (f"{_SITE}/torch/nn/modules/linear.py", True, "torch/nn/modules/linear.py"),
        (f"{_SITE}/torchvision/ops.py", False, "torchvision/ops.py"),
        (f"{_SITE}/longtake/data/decode.py", False, "longtake/data/decode.py"),
        ("/src/longtake/data/decode.py", False, "longtake/data/decode.py"),
        ("/home/me/.pyenv/versions/3.11.7/lib/python3.11/threading.py", True, "threading.py"),
        ("/usr/lib/python3/dist-packages/numpy/core.py", True, "numpy/core.py"),
        ("<frozen runpy>", True, "<frozen runpy>"),
        ("<string>", False, "<string>"),
        ("/home/me/python3.11/train.py", False, "/home/me/python3.11/train.py"),
    ],
)
def test_files_of_libraries_are_known_by_where_they_lie(
    file: str, machinery: bool, short: str
) -> None:
    """Python's own files and torch's are machinery; longtake's and the user's are not."""
    assert is_machinery(file) is machinery
    assert short_file(file) == short


def test_a_line_of_training_that_reads_values_waits_for_the_device() -> None:
    """Behind a collective of NCCL that never ends, `.tolist()` shows no call of torch's."""
    step = Path(longtake.__file__).parent / "training" / "step.py"
    lines = step.read_text().splitlines()
    (reads,) = (number for number, line in enumerate(lines, 1) if ".tolist()  # one wait" in line)
    other = next(number for number, line in enumerate(lines, 1) if line.startswith("import "))
    file = "/elsewhere/site-packages/longtake/training/step.py"
    assert awaited((("compute_gradients", file, reads),), "backward") == "device"
    assert awaited((("compute_gradients", file, other),), "backward") == "nothing"
    native = (("read", "libc.so.6", 0),)
    assert awaited((("compute_gradients", file, reads),), "backward", native) == "nothing"
