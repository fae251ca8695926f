"""Tests and measurements on one CUDA GPU, the most valuable first, within eight minutes.

    make gpu                  in this repository's environment
    make gpu PY=python3       with the machine's Python and PyTorch; PYTHONPATH may add packages
    python benchmarks/gpu.py --minutes 4 --only gradients train

Each part, and each file of tests/gpu, has a process of its own with a limit, as an error of CUDA
spoils all that runs behind it in its process. Results are in benchmarks/results: gpu_tests.md is
written after each file, gpu_train.md and gpu_plan.md after each row. Without a GPU it ends with a
message.
"""

import argparse
import os
import re
import subprocess
import sys
import time
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[1]
_RESULTS = _ROOT / "benchmarks" / "results" / "gpu_tests.md"
_FILE_SECONDS = 75.0
_LEAST_SECONDS = 15.0
_PARTS = {
    "train": (130.0, ["benchmarks/gpu_train.py", "--minutes", "2.1"]),
    "plan": (150.0, ["benchmarks/gpu_plan.py"]),
}
# Not the project's options for pytest: they need plugins that the machine may not have.
_PYTEST = ["-q", "-c", os.devnull, "--rootdir", str(_ROOT), "--import-mode=importlib"]
_PYTEST += ["-p", "no:cacheprovider", "-p", "no:benchmark", "-p", "no:xdist"]
_ENDED = re.compile(r"\d+ (?:passed|failed|skipped|errors?|xfailed)[^\n]*")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=8.0)
    parser.add_argument("--only", nargs="+", help="names of parts, or words in names of test files")
    options = parser.parse_args()
    end = time.monotonic() + 60 * options.minutes - 5
    gpu = _gpu()
    if gpu is None:
        sys.exit("There is no CUDA GPU here: nothing was measured.")
    _say(gpu)
    lines = [f"# Tests on {gpu}", "", "| file | result | s |", "|---|---|---|"]
    failed = 0
    for file in sorted((_ROOT / "tests" / "gpu").glob("test_*.py")):
        name = file.stem.removeprefix("test_").removesuffix("_on_cuda")
        if _is_wanted(name, options.only):
            command = ["-m", "pytest", str(file), *_PYTEST]
            code, text, seconds = _run(command, min(_FILE_SECONDS, end - time.monotonic()))
            failed += code != 0
            result = (_ENDED.findall(text) or [_reason(code, text)])[-1]
            lines.append(f"| {file.name} | {result} | {seconds:.0f} |")
            _RESULTS.write_text("\n".join(lines) + "\n")
            _say(f"{file.name}: {result}")
            if code:
                _say("\n".join(re.findall(r"^(?:FAILED|ERROR|E  ).*", text, re.MULTILINE)[-20:]))
    for name, (limit, command) in _PARTS.items():
        if _is_wanted(name, options.only):
            code, text, seconds = _run(command, min(limit, end - time.monotonic()))
            failed += code != 0
            rows = [line for line in text.splitlines() if line.startswith("|")]
            _say("\n".join(rows) or text[-2000:])
            _say(f"{name}: {'done' if code == 0 else _reason(code, text)} in {seconds:.0f} s")
    sys.exit(1 if failed else 0)


def _gpu() -> str | None:
    """The GPU, its driver and PyTorch; None: there is no GPU."""
    found = _run(
        [
            "-c",
            "import torch; torch.cuda.is_available() or exit(3); "
            "print(torch.cuda.get_device_name(0), '· PyTorch', torch.__version__, "
            "'· cuDNN', torch.backends.cudnn.version())",
        ],
        120.0,
    )
    return found[1].strip() if found[0] == 0 else None


def _run(command: list[str], seconds: float) -> tuple[int, str, float]:
    """Exit code (124: stopped at the limit, 125: no time was left), output and seconds."""
    if seconds < _LEAST_SECONDS:
        return 125, "", 0.0
    begun = time.monotonic()
    environment = {**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "2")}
    try:
        done = subprocess.run(  # noqa: S603 - our own scripts
            [sys.executable, "-W", "ignore", *command],
            cwd=_ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=seconds,
        )
    except subprocess.TimeoutExpired as error:
        said = (error.stdout or b"").decode(errors="replace")  # bytes, in spite of `text`
        return 124, said, time.monotonic() - begun
    return done.returncode, done.stdout, time.monotonic() - begun


def _reason(code: int, text: str) -> str:
    if code == 125:
        return "no time was left"
    if code == 124:
        return "stopped at its limit"
    last = [line for line in text.splitlines() if line.strip()]
    return f"exit code {code}: {last[-1][:200] if last else 'no output'}"


def _is_wanted(name: str, only: list[str] | None) -> bool:
    return not only or any(word in name for word in only)


def _say(text: str) -> None:
    print(text, flush=True)  # noqa: T201 - the terminal's output


if __name__ == "__main__":
    main()
