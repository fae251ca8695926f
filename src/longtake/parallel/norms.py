"""Sums of squares over every rank's share of a model's tensors."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


def share(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor, sharing its memory; all of it where it is not spread."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def num_copies(model: nn.Module) -> int:
    """How many ranks hold the same share of a model, so that sums over ranks count it as often."""
    first = next((p for p in model.parameters() if isinstance(p, DTensor)), None)
    if first is None:
        return 1
    names = first.device_mesh.mesh_dim_names or ()
    return first.device_mesh.size(names.index("replicate")) if "replicate" in names else 1


@torch.no_grad()
def squares(tensors: Sequence[Tensor]) -> Tensor:
    """[N] fp64 on the tensors' device: the sum of squares of each; [0] where there are none.

    Norms are taken in fp32, whatever the tensors are in; beyond 3.4e38 they are infinite.
    """
    norms: dict[int, Tensor] = {}
    for dtype in sorted({tensor.dtype for tensor in tensors}, key=str):
        alike = [place for place, tensor in enumerate(tensors) if tensor.dtype == dtype]
        found = torch._foreach_norm([tensors[place] for place in alike], dtype=torch.float32)
        norms |= dict(zip(alike, found, strict=True))
    if not norms:
        return torch.zeros(0, dtype=torch.float64)
    return torch.stack([norms[place] for place in range(len(tensors))]).double().square()
