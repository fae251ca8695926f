"""Finds out before training which kernels compute a model's attention correctly on this GPU.

Depending on the versions of torch, cuDNN and driver, a kernel may fail, or give wrong gradients
without an error. A separate process (`longtake.parallel.attention_trial`) tries all kinds and ends
before training allocates memory, so that an illegal access cannot spoil this process's CUDA
context.
"""

import hashlib
import json
import os
import subprocess
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import torch
from pydantic import TypeAdapter, ValidationError

from longtake import fsio, process
from longtake.parallel import attention_rules, attention_trial
from longtake.parallel.attention_rules import NAMES, AttentionKind, Kernel, KernelChoice
from longtake.parallel.attention_trial import Attempt, AttentionCase, Trials
from longtake.planner.calibration import device_facts

_PROGRAM = "longtake.parallel.attention_trial"
_SECONDS = 120.0
_MOST_CRASHES = 8
_VARIABLES = ("CUDNN", "CUDA_VISIBLE", "TORCH_CUDNN", "NVIDIA_TF32", "TORCH_ALLOW_TF32")


class AttentionAnswer(NamedTuple):
    """Attention kernels that were chosen for the attention calls of a model."""

    cases: tuple[AttentionCase, ...]
    choices: tuple[tuple[AttentionKind, KernelChoice], ...] = ()
    notes: tuple[str, ...] = ()


def choose_kernels(cases: Sequence[AttentionCase], device: torch.device) -> AttentionAnswer:
    """Choose a correct attention kernel for each attention call (case) of a model.

    All kernels are tried on all cases, which takes seconds, unless the cache folder has the answer.
    """
    path: Path | None = None
    with suppress(RuntimeError):  # raised for a user without a home directory
        path = fsio.cache_folder() / "attention" / f"{_key(cases, device)}.json"
        # A missing or damaged answer, or one of another version, is found again.
        with suppress(ValidationError):
            return _Kept.validate_python(fsio.read_json(path).get("answer"))
    answer, is_final = _try_all(tuple(cases), device)
    if path is not None and is_final:
        with suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            fsio.write_json(path, {"answer": _Kept.dump_python(answer, mode="json")})
    return answer


_Kept = TypeAdapter(AttentionAnswer)


class KernelChooser:
    """Chooses the attention kernels of a model before its memory is planned."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.answer: AttentionAnswer | None = None

    def choose(self, cases: Iterable[AttentionCase]) -> None:
        self.answer = choose_kernels(tuple(cases), self._device)
        attention_rules.CHOICES.update(self.answer.choices)


def _key(cases: Sequence[AttentionCase], device: torch.device) -> str:
    """Return a checksum of everything that the choice of attention kernels depends on."""
    facts = {
        "cases": list(cases),
        **device_facts(device),
        "cudnn": torch.backends.cudnn.version() if device.type == "cuda" else None,  # type: ignore[no-untyped-call]
        "variables": {name: os.environ[name] for name in os.environ if name.startswith(_VARIABLES)},
        "program": Path(attention_trial.__file__).read_text(),
    }
    return hashlib.sha256(json.dumps(facts, default=str).encode()).hexdigest()[:32]


def _try_all(
    cases: tuple[AttentionCase, ...], device: torch.device
) -> tuple[AttentionAnswer, bool]:
    """Try the attention kernels on all cases; return the answer, and whether it may be cached."""
    refused: list[dict[Kernel, str]] = [{} for _ in cases]
    chosen: list[Kernel] = ["math"] * len(cases)
    problem = ""
    # A crash ends the process: each further one skips the kernel that has crashed.
    for _ in range(_MOST_CRASHES):
        trials = Trials(str(device), cases, tuple(tuple(each) for each in refused))
        attempts, problem = _run(trials)
        for each in attempts:
            if each.why:
                refused[each.case][each.kernel] = each.why
            if each.why == "":  # "" is success; None: no result yet
                chosen[each.case] = each.kernel
        # The last attempt has no result: it was running when the process ended.
        if not problem or not attempts or attempts[-1].why is not None:
            break
        refused[attempts[-1].case][attempts[-1].kernel] = problem
    if problem:
        return AttentionAnswer(
            cases, (), (f"Attention's kernels were not tried: {problem}.",)
        ), False
    choices, notes = dict[AttentionKind, KernelChoice](), list[str]()
    for case, kernel, without in zip(cases, chosen, refused, strict=True):
        # Cases of one kind differ in lengths, and share a choice.
        before = choices.get(case.kind, KernelChoice(kernel)).refused
        choices[case.kind] = KernelChoice(kernel, tuple(dict.fromkeys((*before, *without))))
        (queries, keys), masked = case.lengths, ", masked" if case.kind.is_masked else ""
        described = f"{case.kind.dtype}, {queries} x {keys} tokens, heads of {case.kind.widths[0]}"
        notes += [
            f"{NAMES[name]} attention {why} ({described}{masked}); {NAMES[kernel]} attention takes "
            "its place."
            for name, why in without.items()
        ]
    return AttentionAnswer(cases, tuple(choices.items()), tuple(notes)), True


def _run(trials: Trials) -> tuple[list[Attempt], str]:
    """Run the kernels' trials in a process of their own; return attempts, and a problem or ""."""
    given = TypeAdapter(Trials).dump_json(trials)
    command, environment = process.program(_PROGRAM), process.environment()
    try:
        ended = subprocess.run(  # noqa: S603 - this program's own
            command,
            input=given,
            capture_output=True,
            env=environment,
            timeout=_SECONDS,
            check=False,
        )
        last = ended.stderr.decode(errors="replace").strip().rpartition("\n")[2][:200]
        output, how = ended.stdout, f"crashes its process (exit code {ended.returncode}: {last})"
    except subprocess.TimeoutExpired as late:
        output, how = late.stdout or b"", f"does not end within {_SECONDS:.0f} s"
    except OSError as error:
        return [], f"its process cannot be started: {error}"
    lines = [line for line in output.splitlines() if line.startswith((b"[", b'"end"'))]
    attempts = [Attempt(*json.loads(line)) for line in lines if line.startswith(b"[")]
    return attempts, "" if lines and lines[-1] == b'"end"' else how
