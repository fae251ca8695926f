"""All errors that a user can meet, by class.

    LongtakeError             what failed, with its values; what was expected; what to do
    ├── RecipeError           a recipe cannot be read, or its values do not fit together
    ├── DataError             clips, captions or a catalog cannot be used
    │   ├── ClipError         one video file cannot be decoded (path and reason)
    │   └── DataChangedError  a run was started on another catalog than it is resumed on
    ├── PlanError             a step does not fit the memory, or would leave weights untrained
    │   └── CannotBePlannedError  a plan cannot follow the model's code
    ├── ModelError            a family, codec or text encoder cannot be built or loaded
    ├── RunError              a run directory cannot be used
    │   └── RecipeChangedError  the run directory belongs to another recipe
    ├── RecordError           a file that a process wrote cannot be read (path and reason)
    ├── CheckpointError       saved state is missing, incomplete or of another shape
    ├── DivergedError         the loss or a gradient stopped being a finite number
    ├── SamplingError         sampling or decoding gave NaN or infinite values
    └── LostPeerError         another rank has ended, and this one cannot continue without it

The command line turns each into one message on stderr and its exit code; none of them ends in a
traceback. Anything else that is raised is a defect of longtake.
"""

import os
from pathlib import Path


class LongtakeError(Exception):
    """Base of all errors that a user can correct.

    Attributes:
        exit_code: exit code of a command that raises it; 2: the same command would fail again.
    """

    exit_code = 2


class RecipeError(LongtakeError):
    """A recipe cannot be read, or its values do not fit together."""


class DataError(LongtakeError):
    """Clips, captions or a catalog cannot be used as they are."""


class ClipError(DataError):
    """One video file cannot be decoded.

    Attributes:
        path: the file, or its address in a store.
        reason: the cause in a few words, without the path.
    """

    def __init__(self, path: Path | str, reason: str) -> None:
        super().__init__(f"{path}: {reason}")
        self.path = str(path) if "://" in str(path) else Path(path)
        self.reason = reason

    def __reduce__(self) -> "tuple[type[ClipError], tuple[str, str]]":
        return type(self), (str(self.path), self.reason)  # it is sent from process to process


class DataChangedError(DataError):
    """A run is resumed on another catalog than the one it was started on."""


class ModelError(LongtakeError):
    """A family, codec or text encoder cannot be built or loaded."""


class PlanError(LongtakeError):
    """A step does not fit the memory, or would leave trainable weights without gradients."""


class CannotBePlannedError(PlanError):
    """A plan cannot follow the model's code; the model may nevertheless train."""


class RunError(LongtakeError):
    """A run directory cannot be created, read or written."""


class RecordError(LongtakeError):
    """A file of a run, catalog or cache cannot be read, or does not hold what it should.

    Attributes:
        path: the file.
        reason: the cause as a part of a sentence, without the path.
    """

    def __init__(self, path: Path | str, reason: str) -> None:
        super().__init__(f"{path} cannot be read: {reason}.")
        self.path = Path(path)
        self.reason = reason

    def __reduce__(self) -> "tuple[type[RecordError], tuple[str, str]]":
        return type(self), (str(self.path), self.reason)  # it is sent from process to process


class RecipeChangedError(RunError):
    """A run directory belongs to another recipe; it is never overwritten."""


class CheckpointError(LongtakeError):
    """Saved state is missing, incomplete, or does not fit the model."""


class DivergedError(LongtakeError):
    """The loss or a gradient stopped being a finite number."""


class SamplingError(LongtakeError):
    """Sampled latents or pixels are NaN or infinite."""

    exit_code = 1


class JointWorkError(LongtakeError):
    """Another rank failed in work that all ranks do together; the message has its error."""


class LostPeerError(LongtakeError):
    """Another rank has ended, so this one cannot continue; a new launch may succeed."""

    exit_code = os.EX_UNAVAILABLE  # 69
