"""Optimizers whose states are fp32, whatever the dtype and the device of the weights.

A bf16 number has 8 significant bits: an update below 1/512 of a weight is rounded away, and at
usual learning rates nearly all are. So each bf16 weight has an fp32 *master*, which is updated in
its place and then rounded into it.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from longtake.parallel.fsdp import local_shard
from longtake.parallel.transfer import host_like

MAX_BATCH_ELEMENTS = 2**26
"""Most elements of weights that are updated together; their fp32 gradients take 256 MiB."""


class Fp32Optimizer(torch.optim.Optimizer):
    """Base class of optimizers whose states are fp32, on the device that `device_of` names."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update the parameters that have a gradient, by the subclass's `update`."""
        assert closure is None, "closures are not supported"
        for group in self.param_groups:
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            self.update(parameters, group)

    def update(self, parameters: list[Tensor], group: dict[str, Any]) -> None:
        raise NotImplementedError

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load an optimizer's state in fp32; torch would round it to the weights' dtype."""
        # torch loads the groups without states; the states follow in fp32.
        super().load_state_dict({**state_dict, "state": {}})
        saved = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
        ours = chain.from_iterable(group["params"] for group in self.param_groups)
        for key, parameter in zip(saved, ours, strict=True):
            if key in state_dict["state"]:
                device = self.device_of(parameter)
                values = state_dict["state"][key].items()
                state = {name: value.to(device, torch.float32) for name, value in values}
                self.state[parameter] = state

    def device_of(self, parameter: Tensor) -> torch.device:
        return parameter.device

    def add_master(self, parameter: Tensor) -> Tensor:
        """Return the tensor that an update changes for a parameter.

        It is the parameter itself, or a new fp32 copy (its master) in the optimizer's state.
        """
        device = self.device_of(parameter)
        if parameter.dtype == torch.float32 and parameter.device == device:
            return parameter
        master = parameter.detach().to(device, torch.float32)
        self.state[parameter]["master"] = master
        return master


class MasterAdamW(Fp32Optimizer):
    """AdamW for weights that are bf16, or whose updates are made in host memory.

    torch's own fused kernel makes the updates, so that fp32 weights move as with
    `torch.optim.AdamW(fused=True)`, to the last bit on the same device.

    The state of a parameter is AdamW's (`step`, `exp_avg`, `exp_avg_sq`), and `master` where the
    weight itself cannot be updated, because it is not fp32 or on another device. All of it is fp32
    and sharded like the parameter.

    Args:
        params: the weights, or groups of them.
        lr: learning rate.
        betas: shares of the running averages that a step keeps.
        eps: added to the denominator.
        weight_decay: decoupled.
        offload: keep states and masters in host memory and update there. Gradients and weights are
            copied through page-locked memory while the processor works on others.
    """

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]],
        lr: float,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        offload: bool = False,
    ) -> None:
        self._offload = offload
        super().__init__(
            params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        )

    def device_of(self, parameter: Tensor) -> torch.device:
        return torch.device("cpu") if self._offload else parameter.device

    def update(self, parameters: list[Tensor], group: dict[str, Any]) -> None:
        for parameter in parameters:
            if not self.state[parameter]:
                updated = self.add_master(parameter)
                self.state[parameter] |= {
                    "step": torch.zeros((), device=self.device_of(parameter)),
                    "exp_avg": torch.zeros_like(updated),
                    "exp_avg_sq": torch.zeros_like(updated),
                }
        comes_from_gpu = self._offload and any(each.device.type != "cpu" for each in parameters)
        for batch in _with_gradients(in_batches(parameters), comes_from_gpu):
            self._update(batch, group)

    def _update(self, batch: "_Batch", group: dict[str, Any]) -> None:
        states = [self.state[parameter] for parameter in batch.parameters]
        masters = [
            local_shard(state.get("master", parameter))
            for state, parameter in zip(states, batch.parameters, strict=True)
        ]
        beta1, beta2 = group["betas"]
        adamw(
            masters,
            # fp32 copies of bf16 gradients: MAX_BATCH_ELEMENTS bounds them.
            [gradient.float() for gradient in batch.gradients],
            [local_shard(state["exp_avg"]) for state in states],
            [local_shard(state["exp_avg_sq"]) for state in states],
            [],
            [state["step"] for state in states],
            fused=True,
            amsgrad=False,
            beta1=beta1,
            beta2=beta2,
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )
        for parameter, master, gradient in zip(
            batch.parameters, masters, batch.gradients, strict=True
        ):
            _round_into(local_shard(parameter), master, gradient)


class _Batch(NamedTuple):
    parameters: Sequence[Tensor]
    gradients: Sequence[Tensor]  # this rank's shards of them, on the device of the states


def in_batches(parameters: Iterable[Tensor]) -> list[list[Tensor]]:
    """Split parameters into batches of at most MAX_BATCH_ELEMENTS on this rank.

    A larger parameter is a batch of its own.
    """
    batches: list[list[Tensor]] = []
    room = 0
    for parameter in parameters:
        room -= local_shard(parameter).numel()
        if not batches or room < 0:
            batches.append([])
            room = MAX_BATCH_ELEMENTS - local_shard(parameter).numel()
        batches[-1].append(parameter)
    return batches


def _with_gradients(batches: Sequence[Sequence[Tensor]], comes_from_gpu: bool) -> Iterator[_Batch]:
    """Yield each batch of weights with its gradients, while the next batch's are being copied."""
    in_flight: deque[tuple[_Batch, torch.cuda.Event | None]] = deque()
    for number, parameters in enumerate(batches, start=1):
        gradients = [
            local_shard(parameter.grad) for parameter in parameters if parameter.grad is not None
        ]
        copied = None
        if comes_from_gpu:
            gradients = [host_like(part).copy_(part, non_blocking=True) for part in gradients]
            copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            copied.record()
        in_flight.append((_Batch(parameters, gradients), copied))
        # One batch is updated after the copies of the next were started, the last two at the end.
        while len(in_flight) == 2 or (in_flight and number == len(batches)):
            batch, copied = in_flight.popleft()
            if copied is not None:
                copied.synchronize()
            yield batch


def _round_into(weight: Tensor, master: Tensor, gradient: Tensor) -> None:
    """Round a parameter's fp32 master into its weight.

    To a GPU it goes through the gradient's page-locked memory.
    """
    if master.device != weight.device:
        # The gradient has been used: its memory has room for the rounded weight.
        pinned = gradient.view(-1).view(weight.dtype)[: weight.numel()].view(weight.shape)
        weight.copy_(pinned.copy_(master), non_blocking=True)
    elif master is not weight:
        weight.copy_(master)
