"""An objective that aligns a block's tokens with features of another network, computed beforehand.

In the recipe (beside each clip lie its features, an array of numbers as .npy):

    [data]
    random_crop = false                        # features are of the whole clip
    [data.conditioning]
    features = { kind = "numbers", path = "../features/{stem}.npy", width = 196608 }
    [trainable]
    kind = "full"
    [trainable.modules.align]
    module = "examples.objectives.alignment:Projector"
    blocks = ["blocks.8"]                      # one of the first half
    options = { feature_width = 768 }
    [objective]
    kind = "examples.objectives.alignment:Alignment"
    inputs = ["features"]

It is REPA (Yu et al., arXiv:2410.06940): to the loss of flow matching comes 1 minus the cosine
between the projected tokens and features such as DINOv2's. `width` is that of one feature times
their number (256 of 768 numbers here); the tokens are cut into as many equal runs in their order,
and those of a run are averaged. With as many features as tokens each token has its own.
"""

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor, nn

from longtake.models.added_module import BlockCall, BlockInputs, added_modules
from longtake.models.numerics import in_backward
from longtake.models.objective import FlowBatch, Objective, Passes


class Projector(nn.Module):
    """Projects a block's tokens for the objective; the block itself stays as it is.

    As an added module it is trained, sharded, saved and averaged with the model.

    Args:
        width: D of the model's tokens.
        feature_width: numbers of a feature.
        hidden_size: width of the two hidden layers.
        first_token: number of tokens in front that have no features, such as a caption's.
    """

    def __init__(
        self, width: int, feature_width: int, hidden_size: int = 2048, first_token: int = 0
    ) -> None:
        super().__init__()
        self.feature_width, self.first_token = feature_width, first_token
        self.layers = nn.Sequential(
            nn.Linear(width, hidden_size),
            nn.SiLU(),
            nn.Linear(hidden_size, hidden_size),
            nn.SiLU(),
            nn.Linear(hidden_size, feature_width),
        )
        self.projected: list[Tensor] = []

    def around(self, block: str, call: BlockCall, inputs: BlockInputs) -> BlockInputs:
        """Run the block, and keep what its tokens are projected to until the loss takes it."""
        after = call(inputs)
        projected = self.layers(after.tokens[:, self.first_token :])
        # Not when the block is computed again in the backward pass, nor for samples.
        if self.training and not in_backward():
            self.projected = [projected]
        return after


class Alignment(Objective):
    """Flow matching and alignment with features (REPA).

    Args:
        weight: weight of the alignment; 0.5 in the paper.
        module: name of the `Projector` in trainable.modules.
        features: name of the features in data.conditioning.
    """

    def __init__(
        self, weight: float = 0.5, module: str = "align", features: str = "features"
    ) -> None:
        self.weight, self.module, self.features = weight, module, features
        self.inputs: Sequence[str] = (features,)

    def losses(self, passes: Passes, batch: FlowBatch) -> Tensor:
        losses = passes.velocity_losses(batch, passes.predict(batch))
        projector = added_modules(passes.model)[self.module]
        assert isinstance(projector, Projector)
        tokens = projector.projected.pop()  # [B, T, feature_width]
        features = batch.conditioning[self.features].unflatten(1, (-1, projector.feature_width))
        averaged = tokens.unflatten(1, (features.shape[1], -1)).mean(dim=2)
        similarity = F.cosine_similarity(averaged.float(), features.float(), dim=-1)
        # The paper has no 1, which changes no gradient; the guard judges losses above 0.
        return losses + self.weight * (1 - similarity.mean(dim=1))
