"""Plans for a GPU, against that GPU; skipped where there is none.

`benchmarks/gpu_plan.py` measures the same at full size.
"""

import tomllib
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.build import fill_weights, hold_weights

from longtake import config
from longtake.models.objective import flow_losses
from longtake.planner.activation_checkpointing import ACTIVATIONS, caller, options_of
from longtake.planner.devices import DeviceBudget, device_for
from longtake.planner.memory import MetaStep, outline_step
from longtake.planner.profiler import MeasuredMemory, measured
from longtake.planner.record import BlockOption, BlockWeights, Options

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA GPU here")

_EXAMPLE = Path(__file__).parents[2] / "examples" / "flux_kontext_lora_48gb.toml"
_SIZES = {
    "num_layers": 2,
    "num_single_layers": 4,
    "num_attention_heads": 8,
    "attention_head_dim": 128,
    "guidance_embeds": True,
}


def _outlined(trained: str, dtype: str, gpu: DeviceBudget) -> MetaStep:
    """FLUX Kontext with a few narrow blocks: a quarter of a gigabyte of activations in each."""
    values: dict[str, Any] = tomllib.loads(_EXAMPLE.read_text(encoding="utf-8"))
    del values["model"]["pretrained"]
    values["model"] |= {"config": _SIZES, "dtype": dtype}
    values["data"]["buckets"] = [{"num_frames": 1, "height": 512, "width": 512}]
    values["training"] |= {"global_batch_size": 2, "micro_batch_size": 2}
    values["trainable"] = {"kind": trained}
    return outline_step(config.parse(values, source="test"), gpu)


def _filled(step: MetaStep) -> MetaStep:
    fill_weights(step.components.model, "cuda", 0.05)
    return step


def _run(
    step: MetaStep, options: Options, device: torch.device
) -> tuple[MeasuredMemory, float, float]:
    """Memory of a second step, its loss, and the norm of its gradients."""
    subject = step.tracer.subject
    subject.call_blocks_by(caller({subject.blocks[name]: each for name, each in options.items()}))
    for _ in range(2):  # in the first, libraries take what they keep
        subject.model.zero_grad(set_to_none=True)
        with measured(device) as memory:
            with device:
                examples = subject.make_inputs()
            for tensor in (examples.latents, examples.noise, examples.sigmas):
                tensor.fill_(0.5)
            for tensor in examples.conditioning.values():
                tensor.fill_(0.25)
            loss = flow_losses(step.components, examples, step.precision, device).mean()
            memory.mark("forward")
            torch.autograd.backward(loss)
    gradients = [p.grad.float() for p in subject.model.parameters() if p.grad is not None]
    norm = torch.stack([gradient.norm() for gradient in gradients]).norm()
    return memory, float(loss), float(norm)


def _num_large(step: MetaStep) -> int:
    """Tensors of a step that come from the allocator's large blocks, at least: one of a block."""
    return len(step.tracer.subject.blocks)


@pytest.mark.parametrize(
    ("trained", "dtype"), [("lora", "bf16"), ("full", "bf16"), ("lora", "fp32"), ("full", "fp32")]
)
def test_peaks_are_those_of_the_gpu(trained: str, dtype: str) -> None:
    """Forward's end and peak beside the weights to 3 %, in bf16 and under autocast.

    Loss and gradients are the same whatever is recomputed, but for the order of attention's sums.
    """
    gpu, device = device_for("cuda"), torch.device("cuda")
    planned, real = _outlined(trained, dtype, gpu), _filled(_outlined(trained, dtype, gpu))
    outcomes = []
    for policy in ("none", "all", "save-attention"):
        trace = planned.tracer.trace(options_of(policy, tuple(planned.tracer.subject.blocks)))
        options = options_of(policy, tuple(real.tracer.subject.blocks))
        memory, *outcome = _run(real, options, device)
        outcomes.append(outcome)
        predicted = trace.forward_end_bytes, trace.peak_bytes
        beside = [size - trace.weight_bytes for size in predicted]
        # The allocator counts up to 1 MiB more of a block that it does not split.
        unsplit = 2**20 * _num_large(real)
        measured_bytes = [memory.at["forward"], memory.peak_bytes]
        assert beside == pytest.approx(measured_bytes, rel=0.03, abs=unsplit), policy
    assert outcomes[1] == pytest.approx(outcomes[0], rel=1e-2)
    assert outcomes[2] == pytest.approx(outcomes[0], rel=1e-2)


@pytest.mark.parametrize("weights", ["keep", "stream", "int8", "nf4"])
def test_mixtures_take_what_was_predicted(weights: BlockWeights) -> None:
    """Offloaded, recomputed and kept blocks in turn, with their frozen weights in each place."""
    gpu, device = device_for("cuda"), torch.device("cuda")
    planned = _outlined("lora", "bf16", gpu)
    real = _filled(_outlined("lora", "bf16", gpu))
    names = tuple(real.tracer.subject.blocks)
    _, *kept = _run(real, {}, device)
    options = {
        name: BlockOption(activations, weights)
        for name, activations in zip(names, cycle(reversed(ACTIVATIONS)), strict=False)
    }
    hold_weights(real.tracer.subject.blocks, options, "cuda")
    trace = planned.tracer.trace(options)
    memory, *outcome = _run(real, options, device)
    beside = [size - trace.weight_bytes for size in (trace.forward_end_bytes, trace.peak_bytes)]
    unsplit = 2**20 * _num_large(real)
    assert beside == pytest.approx([memory.at["forward"], memory.peak_bytes], rel=0.03, abs=unsplit)
    assert outcome == pytest.approx(kept, rel=0.2 if weights == "nf4" else 0.05)
