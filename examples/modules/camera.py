"""An added module that lets a model follow a camera: numbers for each frame.

In the recipe (each clip's camera path lies beside it, a row of numbers for each frame):

    [data.conditioning]
    camera = { kind = "numbers", path = "../camera/{stem}.csv", width = 12, per_frame = true }
    [trainable.modules.camera]
    module = "examples.modules.camera:Camera"
    options = { width_of_camera = 12 }

The numbers, such as the 3 x 4 matrix of a camera's pose, become one vector for each latent frame,
which moves that frame's tokens before each block; the block's own layers decide what follows from
it. These layers start at zero, so training starts from the released model. After He et al.,
"CameraCtrl" (2024), in short: there each pixel's ray is given, here the pose of each frame.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch.nn.functional as F
from torch import Tensor, nn

from longtake.models.added_module import BlockCall, BlockInputs


class Camera(nn.Module):
    """Adds a vector of the camera to the tokens of each frame, before each block.

    Args:
        width: D of the model's tokens.
        blocks: names of its blocks.
        numbers: which of data.conditioning are the numbers [B, F, width_of_camera].
        width_of_camera: how many numbers a frame has.
        hidden_size: width of the vectors.
    """

    def __init__(
        self,
        width: int,
        blocks: Sequence[str],
        numbers: str = "camera",
        width_of_camera: int = 12,
        hidden_size: int = 128,
    ) -> None:
        super().__init__()
        self.numbers = numbers
        self.number = {block: number for number, block in enumerate(blocks)}
        self.read = nn.Sequential(
            nn.Linear(width_of_camera, hidden_size),
            nn.SiLU(),
            nn.Linear(hidden_size, hidden_size),
            nn.SiLU(),
        )
        self.write = nn.ModuleList(nn.Linear(hidden_size, width) for _ in blocks)
        for layer in self.write:
            nn.init.zeros_(layer.weight)
            nn.init.zeros_(layer.bias)

    def prepare(self, conditioning: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Vectors [B, F', hidden_size] of the F' latent frames: the mean over their frames."""
        _, _, num_frames, height, width = conditioning["noisy_latents"].shape
        vectors = F.adaptive_avg_pool1d(self.read(conditioning[self.numbers]).mT, num_frames).mT
        of_a_frame = (height // 2) * (width // 2)  # tokens: 2 x 2 latent pixels each
        return {"camera": vectors.repeat_interleave(of_a_frame, dim=1)}

    def around(self, block: str, call: BlockCall, inputs: BlockInputs) -> BlockInputs:
        """The noisy latents' tokens come first; a reference's come behind."""
        change = self.write[self.number[block]](inputs.prepared["camera"])
        behind = inputs.tokens.shape[1] - change.shape[1]
        return call(replace(inputs, tokens=inputs.tokens + F.pad(change, (0, 0, 0, behind))))
