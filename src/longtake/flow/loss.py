"""What a training step minimises."""

from torch import Tensor


def velocity_loss(predicted: Tensor, target: Tensor) -> Tensor:
    """Return each sample's mean squared error, [B] fp32.

    Args:
        predicted: the model's velocity, [B, ...]; half precision is raised to fp32 first.
        target: `longtake.flow.path.velocity`, of the same shape.
    """
    # Unequal shapes would broadcast into a plausible number.
    assert predicted.shape == target.shape, f"{list(predicted.shape)} and {list(target.shape)}"
    return (predicted.float() - target.float()).square().flatten(1).mean(dim=1)
