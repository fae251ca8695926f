"""Does each node, or each card, compute as fast as the others: products of large matrices."""

import time
from statistics import median

import torch

from longtake.config import Recipe
from longtake.preflight.compare import far_below, middle
from longtake.preflight.finding import Finding, Judged, Measure, Severity, Skipped
from longtake.preflight.setting import Facts, Setting
from longtake.process import num_cores

NAME = "compute"

_CPU_SIDE, _CPU_SECONDS, _CPU_SLOW = 1024, 0.4, 0.6
_GPU_SIDE, _GPU_SECONDS, _GPU_SLOW = 8192, 1.0, 0.93
_ERROR = 0.4
_ADVICE = {
    "GPU": "Look at its temperature, power limit and clocks: nvidia-smi -q -d PERFORMANCE,POWER",
    "CPU": "Look for other programs on it (top), and at its clocks (cpupower frequency-info).",
}


def measure(setting: Setting) -> Facts:
    """TFLOP/s of this process's card, in bf16; without one, of its cores, in fp32."""
    card = setting.place.local_rank
    if card < torch.cuda.device_count():
        return {"on": "GPU", "tflops": _rate_of_card(torch.device("cuda", card))}
    if not setting.place.speaks:
        return {"on": "none"}
    torch.set_num_threads(num_cores())
    return {"on": "CPU", "tflops": _rate_of_cores()}


def judge(facts: dict[str, Facts], recipe: Recipe | None) -> Judged:
    """Who is far below the median of its kind."""
    judged = Judged()
    if not any(each["on"] == "GPU" for each in facts.values()):
        judged.skipped.append(Skipped("matrix products on GPUs", "no GPU"))
    judged.add(_judge_kind(facts, "GPU", "bf16", _GPU_SLOW))
    judged.add(_judge_kind(facts, "CPU", "fp32", _CPU_SLOW))
    return judged


def _judge_kind(facts: dict[str, Facts], kind: str, dtype: str, share: float) -> Judged:
    rates = {who: each["tflops"] for who, each in facts.items() if each["on"] == kind}
    if not rates:
        return Judged()
    slow = far_below(rates, share)
    judged = Judged(measures=[Measure(f"matrix products, {kind}, {dtype}", "TFLOP/s", rates, slow)])
    if slow:
        usual = middle(rates.values())
        what = f"matrix products run at {rates[slow[0]]:.3g} TFLOP/s"
        expected = f"at least {share:.0%} of the median, {usual:.3g} TFLOP/s"
        severity: Severity = (
            "error" if rates[slow[0]] < _ERROR * usual and kind == "GPU" else "warning"
        )
        judged.findings.append(Finding(severity, NAME, slow, what, expected, _ADVICE[kind]))
    return judged


def _rate_of_cores() -> float:
    left, right = (torch.rand(_CPU_SIDE, _CPU_SIDE) for _ in range(2))
    left @ right
    taken, end = [], time.perf_counter() + _CPU_SECONDS
    while time.perf_counter() < end:
        begun = time.perf_counter()
        left @ right
        taken.append(time.perf_counter() - begun)
    return 2 * _CPU_SIDE**3 / median(taken) / 1e12


def _rate_of_card(device: torch.device) -> float:
    """The median of many products, the first half of the time left out: clocks settle in it."""
    sides, taken = (_GPU_SIDE, _GPU_SIDE), list[float]()
    with torch.cuda.device(device):  # events are of the thread's current device
        left, right = (torch.rand(sides, device=device, dtype=torch.bfloat16) for _ in range(2))
        begun = time.perf_counter()
        while time.perf_counter() - begun < _GPU_SECONDS:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            start.record()
            left @ right
            end.record()
            end.synchronize()
            taken.append(start.elapsed_time(end) / 1000)
    return 2 * _GPU_SIDE**3 / median(taken[len(taken) // 2 :]) / 1e12
