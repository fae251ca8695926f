"""What came of a drill."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Result:
    """One drill's outcome; its fields are the keys of `longtake drill --json`."""

    fault: str
    passed: bool
    detected_seconds: float | None
    """From the moment the fault met a running process until the run reported it; None: it has
    nothing to report, or did not."""
    samples_repeated: int | None
    """Over all epochs; None: the drill ended before they could be counted."""
    samples_missing: int | None
    """Likewise."""
    equal_to_undisturbed: bool | None
    """Whether every step's loss and gradient, and at the end weights, averages and optimizer, are
    those of the undisturbed run, to the bit; None: after such a fault they cannot be."""
    message: str
    """What happened, for people."""
    samples_unplanned: int | None = None
    """Trained in an epoch that they do not belong to."""
    samples_rejected: int | None = None
    """Planned, and left out because they could not be decoded."""
    detected_steps: int | None = None
    """From the step that the fault was in until the one in which the run reported it, where the
    fault is one of numbers; 0: its own step."""
    steps_lost: int | None = None
    """Steps that were trained and given up: to be trained again, or to be gone round."""
    samples_skipped: int | None = None
    """Left out by the guard on purpose: of batches that it goes round, and of updates that were
    not made."""
    drill_seconds: float = 0.0
    """How long the drill took."""
    skipped: str | None = None
    """Why it cannot be drilled on this machine; it has neither passed nor failed then."""

    @property
    def failed(self) -> bool:
        """Whether it was drilled, and did not pass."""
        return not self.passed and self.skipped is None
