"""What is known of a run at the source."""

from dataclasses import dataclass

from longtake.run_dir import RunDirectory


@dataclass(frozen=True)
class RemoteRun:
    """A run at the source, and its mirror.

    Attributes:
        name: its folder below the source; "" where the source is the run.
        mirror: where it is mirrored to. It begins without checkpoints.
        index: what says there that something is whole: its checkpoints are those of the source,
            of each of which only COMMITTED is here.
    """

    name: str
    mirror: RunDirectory
    index: RunDirectory

    def below(self, folder: str) -> str:
        """A folder of the run, as it is called below the source."""
        return f"{self.name}/{folder}" if self.name else folder


@dataclass(frozen=True)
class Pulled:
    """A checkpoint that has arrived.

    Attributes:
        step: its step.
        bytes: how long its files are.
        seconds: how long it took; since the last interruption, where there was one.
    """

    step: int
    bytes: int
    seconds: float
