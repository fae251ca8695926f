"""Checks of a run's files after a fault, collected in one `Evidence`.

The clips that an epoch must have are computed here as sets of identities, independently of the
run's plan and of `longtake data audit`; both counts have to agree.
"""

import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import zip_longest
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from longtake.data.audit import audit
from longtake.data.catalog import Catalog
from longtake.data.ledger import read_ledger, short_identity
from longtake.faults.sandbox import ObservedEvent, RunObserver, TrainingSite
from longtake.fsio import read_json_lines
from longtake.run_dir import RunDirectory

if TYPE_CHECKING:
    from torch import Tensor

Identities = NDArray[np.uint64]

BITWISE = "every step, weights, EMA and optimizer are bitwise those of the undisturbed run"
RECOVERY_SECONDS = 120.0  # limit from a rank's loss to the next trained step; usually 3 to 15

_LARGEST_LOSS_ERROR = 1e-3  # relative, after some dozens of steps whose sums round differently
_LARGEST_WEIGHT_ERROR = 1e-5  # relative L2 distance of a tensor
_NONE: Identities = np.empty(0, np.uint64)
_NOTHING: Mapping[int, Identities] = MappingProxyType({})
# Columns that are equal in equal runs: times and memory are not.
_COMPARED = ("step", "epoch", "loss", "grad_norm", "learning_rate")
# Files that differ for equal states: they record the save itself.
_OF_THE_SAVE = {".metadata", "COMMITTED", "trainer.json"}
_STATE = ("global_step", "data", "guard", "last_update")  # compared keys of trainer.json


@dataclass(frozen=True)
class SampleCounts:
    """Counts of a run's trained samples against the clips that each epoch must have."""

    repeated: int
    missing: int
    unplanned: int
    rejected: int
    skipped: int = 0


@dataclass(frozen=True)
class Recovery:
    """The resumption of a run that lost a rank: its event, newest checkpoint and duration."""

    resumed: ObservedEvent | None
    newest: int  # step of the newest complete checkpoint at that time
    seconds: float  # time from the loss to the next trained step

    @property
    def step(self) -> int | None:
        return self.resumed.event["step"] if self.resumed else None


@dataclass
class Evidence:
    """The findings of a drill (a run with an injected fault); it passes without complaints.

    Args:
        site: the site of the run that gets the fault.
        get_undisturbed: returns the site of a run without the fault, with which it is compared. It
            may train that run, so it is called only when a drill compares.
    """

    site: TrainingSite
    get_undisturbed: Callable[[], TrainingSite]
    complaints: list[str] = field(default_factory=list)
    message: str = ""  # description of the outcome if the drill passes
    counts: SampleCounts | None = None
    detected_seconds: float | None = None
    detected_steps: int | None = None
    steps_lost: int | None = None
    samples_skipped: int | None = None
    is_equal: bool | None = None

    @cached_property
    def undisturbed(self) -> TrainingSite:
        return self.get_undisturbed()

    def expect(self, holds: bool, otherwise: str) -> None:
        if not holds:
            self.complaints.append(otherwise)

    def expect_event(
        self, found: ObservedEvent | None, since: float, otherwise: str, within: float = math.inf
    ) -> None:
        """Expect that an event was seen, at most `within` seconds after the time `since`."""
        self.expect(found is not None, otherwise)
        if found:
            seconds = self.detected_seconds = found.at - since
            late = f"it was reported after {seconds:.1f} s, not within {within:g}"
            self.expect(seconds <= within, late)

    def expect_exit(self, code: int, wanted: int, when: str) -> None:
        self.expect(code == wanted, f"{when} it ended with exit code {code}, not {wanted}")

    def expect_output(self, output: str, *wanted: str) -> None:
        # Messages are wrapped, so a line may break within the words.
        missing = [words for words in wanted if words not in " ".join(output.split())]
        self.expect(not missing, f"the output does not say {' or '.join(map(repr, missing))}")

    def expect_exact(
        self,
        first: Identities | None = None,
        rejected: int = 0,
        skipped: Mapping[int, Identities] = _NOTHING,
    ) -> None:
        """Expect that the run ended, and that each epoch trained each clip exactly once.

        Args:
            first: clips of epoch 0; None: those of the catalog, like in later epochs.
            rejected: number of clips that cannot be decoded.
            skipped: clips that a rollback excludes, by epoch.
        """
        run, later = self.site.run, identities_of(self.site.catalog())
        whole = {} if first is None else {0: first}
        counts = self.counts = count_samples(run, whole, later, skipped)
        audited, recipe = audit(run), run.recipe()
        trained = audited.end_step - audited.num_skipped
        self.expect(trained == recipe.training.steps, f"the run ended at step {trained}")
        self.expect(counts.repeated == 0, f"{counts.repeated} samples were repeated")
        self.expect(counts.missing == 0, f"{counts.missing} samples are missing")
        self.expect(counts.unplanned == 0, f"{counts.unplanned} samples belong to no such epoch")
        # An epoch that is not over may not have reached the clip that cannot be decoded.
        clips = {each.rejected for each in audited.epochs if each.is_over}
        self.expect(
            clips <= {rejected} and bool(counts.rejected) == bool(rejected),
            f"{counts.rejected} samples were rejected, in epochs of {sorted(clips)} each, and "
            f"{rejected} cannot be decoded",
        )
        names = ("repeated", "missing", "unplanned", "rejected", "skipped")
        found = tuple(sum(getattr(each, name) for each in audited.epochs) for name in names)
        ours = tuple(getattr(counts, name) for name in names)
        # Two independent counts: an error in one of them must not let a drill pass.
        self.expect(
            found == ours,
            f"longtake data audit counts {found} and the drill {ours} ({', '.join(names)})",
        )
        self.steps_lost = steps_given_up(run)
        # Samples of a skipped update were consumed, and count as lost like those of a rollback.
        self.samples_skipped = (
            counts.skipped + len(steps_skipped(run)) * recipe.training.global_batch_size
        )

    def expect_equal(self, until: int | None = None) -> None:
        """Expect bitwise the steps of the undisturbed run, up to `until` or to the end.

        Without `until`, the newest checkpoints must be equal too.
        """
        run, undisturbed = self.site.run, self.undisturbed.run
        different = first_difference(run, undisturbed, until)
        self.expect(different is None, f"step {different} is not the undisturbed run's")
        if until is None:
            saved = saved_differences(run, undisturbed)
            self.expect(not saved, f"it ends with another {', '.join(saved)} than the undisturbed")
            self.is_equal = different is None and not saved

    def expect_undisturbed(self) -> None:
        self.expect_exact()
        self.expect_equal()

    def expect_near(self) -> float:
        """Expect each clip once per epoch, and the undisturbed run's losses up to rounding.

        Returns:
            The largest relative difference of a loss.
        """
        self.expect_exact()
        error = largest_loss_error(self.site.run, self.undisturbed.run)
        far = f"a loss differs by {error:.1e} from the undisturbed"
        self.expect(error <= _LARGEST_LOSS_ERROR, far)
        return error

    def expect_near_weights(self) -> float:
        """Expect the undisturbed run's final weights and EMA up to rounding.

        Returns the relative distance.
        """
        distance = largest_weight_distance(self.site.run, self.undisturbed.run)
        far = f"weights end {distance:.1e} (relative) from the undisturbed run's"
        self.expect(distance <= _LARGEST_WEIGHT_ERROR, far)
        return distance

    def expect_world_sizes(self, *wanted: int) -> None:
        launches = self.site.run.record()["launches"]
        sizes = [launch["world_size"] for launch in launches]
        self.expect(sizes == [*wanted], f"it was trained by {sizes} ranks, not by {[*wanted]}")

    def expect_no_partial_checkpoints(self) -> None:
        partial = sorted(path.name for path in self.site.run.checkpoints_path.glob(".*"))
        self.expect(not partial, f"partial checkpoints were left: {', '.join(partial)}")

    def expect_resumed(self, found: ObservedEvent | None, newest: int) -> None:
        """Expect that the run resumed from its newest whole checkpoint."""
        self.expect(found is not None, "no event says that it resumed")
        step = found.event["step"] if found else newest
        self.expect(
            step == newest,
            f"it resumed from step {step}, and its newest whole checkpoint was of step {newest}",
        )

    def expect_lost_steps_reported(
        self, found: ObservedEvent | None, newest: int, output: str
    ) -> None:
        """Expect that the event `resumed` and the output report the number of lost steps."""
        lost = self.steps_lost or 0
        reported = found.event.get("lost_steps") if found else None
        self.expect(reported == lost, f"the event reports {reported} lost steps, and {lost} were")
        if lost:
            plural = "s" * (lost > 1)
            self.expect_output(output, f"{lost} step{plural} since the checkpoint of step {newest}")

    def expect_recovered(self, recovery: Recovery, within: float = RECOVERY_SECONDS) -> None:
        """Expect that the run resumed from its newest checkpoint, and trained again in time."""
        self.expect_resumed(recovery.resumed, recovery.newest)
        self.expect(
            recovery.seconds <= within,
            f"after {recovery.seconds:.1f} s it trained again, not within {within:g}",
        )
        self.detected_seconds = recovery.seconds

    def expect_lost_rank_named(self, observer: RunObserver, rank: int) -> None:
        """Expect that a watcher's event names the rank that was lost."""
        events = observer.node_events()
        named = {each.get("rank") for each in events if each["event"] == "rank_failed"}
        none = f"events name {named or 'no rank'}, and rank {rank} was lost"
        self.expect(rank in named, none)

    def outcome(self) -> dict[str, Any]:
        """Return the findings of the drill as fields of a `DrillResult`."""
        seconds, counts = self.detected_seconds, self.counts
        return {
            "passed": not self.complaints,
            "detected_seconds": None if seconds is None else round(seconds, 3),
            "samples_repeated": counts and counts.repeated,
            "samples_missing": counts and counts.missing,
            "samples_unplanned": counts and counts.unplanned,
            "samples_rejected": counts and counts.rejected,
            "equal_to_undisturbed": self.is_equal,
            "detected_steps": self.detected_steps,
            "steps_lost": self.steps_lost,
            "samples_skipped": self.samples_skipped,
            "message": (
                f"Failed: {'; '.join(self.complaints)}." if self.complaints else self.message
            ),
        }


def count_samples(
    run: RunDirectory,
    whole: Mapping[int, Identities],
    later: Identities,
    skipped: Mapping[int, Identities] = _NOTHING,
) -> SampleCounts:
    """Count a run's trained samples against the clips that each epoch must have exactly once.

    Args:
        run: the run directory.
        whole: clips of single epochs.
        later: clips of all other epochs.
        skipped: clips that are left out on purpose, by epoch.
    """
    consumed = read_ledger(run.ledger_path)
    last = int(consumed.epoch.max())
    repeated = missing = unplanned = 0
    for epoch in range(last + 1):
        is_its = consumed.epoch == epoch
        trained = consumed.identity[is_its & ~consumed.is_rejected]
        # A rejected clip was consumed, too: it is neither missing nor to be read again.
        had = consumed.identity[is_its]
        wanted = np.setdiff1d(whole.get(epoch, later), skipped.get(epoch, _NONE))
        repeated += len(trained) - len(np.unique(trained))
        unplanned += len(np.setdiff1d(had, wanted))
        # Batches reach over the end of an epoch: the last clips of the epoch before the last may
        # wait for a batch of the last one, so nothing of it can be missing yet.
        missing += len(np.setdiff1d(wanted, had)) if epoch < last - 1 else 0
    num_skipped = sum(map(len, skipped.values()))
    return SampleCounts(repeated, missing, unplanned, int(consumed.is_rejected.sum()), num_skipped)


def clips_between(run: RunDirectory, first: int, end: int) -> dict[int, Identities]:
    """Return identities of the clips that a run trained in batches `first` to `end - 1`.

    They are returned by epoch.
    """
    consumed = read_ledger(run.ledger_path)
    is_its = (consumed.step >= first) & (consumed.step < end)
    epochs, identities = consumed.epoch[is_its], consumed.identity[is_its]
    return {epoch: identities[epochs == epoch] for epoch in np.unique(epochs).tolist()}


def clips_at(site: TrainingSite, step: int) -> list[Path]:
    """Return the files of the clips that the run of a site trained at a step."""
    consumed = read_ledger(site.run.ledger_path)
    wanted = set(consumed.identity[consumed.step == step].tolist())
    catalog = site.catalog()
    names = identities_of(catalog).tolist()
    return [Path(catalog.clip(row).path) for row, name in enumerate(names) if name in wanted]


def identities_of(catalog: Catalog) -> Identities:
    return short_identity(np.frombuffer(b"".join(catalog.identities.to_pylist()), "V16"))


def steps_given_up(run: RunDirectory) -> int:
    """Count the steps that a run trained and later discarded, over all its launches."""
    given_up = done = 0
    # Every launch appends to one file: a step that is not after the last begins a repetition.
    for row in read_json_lines(run.metrics_path):
        given_up += max(0, done + 1 - row["step"])
        done = row["step"]
    return given_up


def steps_skipped(run: RunDirectory) -> list[int]:
    return [row["step"] for row in run.metrics() if row.get("verdict") == "skip"]


def first_difference(run: RunDirectory, other: RunDirectory, until: int | None) -> int | None:
    """Return the first step, up to `until`, whose metrics differ between two runs; or None."""
    # A run that has fewer steps differs, too.
    for step, pair in enumerate(zip_longest(_curve(run), _curve(other)), 1):
        if until is not None and step > until:
            return None
        if pair[0] != pair[1]:
            return step
    return None


def _curve(run: RunDirectory) -> list[list[Any]]:
    rows: list[Any] = list(run.metrics())
    return [[row[key] for key in _COMPARED] for row in rows]


def largest_loss_error(run: RunDirectory, other: RunDirectory, until: int | None = None) -> float:
    pairs = list(zip(run.metrics(), other.metrics(), strict=False))[:until]
    losses = ((one["loss"] or math.nan, two["loss"] or math.nan) for one, two in pairs)
    return _largest(abs(one / two - 1) for one, two in losses)


def saved_differences(run: RunDirectory, other: RunDirectory) -> list[str]:
    """Return names of parts that differ in any bit between the newest checkpoints of two runs.

    Weights, EMA and optimizer are compared as bytes of their files, which are deterministic for
    equal numbers of ranks; the rest of the state is compared as JSON.
    """
    if not run.checkpoint_steps() or not other.checkpoint_steps():
        return ["all of it: one of them has no checkpoint"]
    paths = [each.checkpoint_path(each.checkpoint_steps()[-1]) for each in (run, other)]
    one, two = map(_contents, paths)
    names = sorted(one.keys() | two.keys())
    return [name for name in names if name not in one or one[name] != two.get(name)]


def _contents(checkpoint: Path) -> dict[str, object]:
    """Return a checkpoint's files as bytes by name, and its trainer's state by key."""
    trainer = json.loads((checkpoint / "trainer.json").read_bytes())
    files = (path for path in checkpoint.rglob("*") if path.is_file())
    contents: dict[str, object] = {
        str(path.relative_to(checkpoint)): path.read_bytes()
        for path in files
        if path.name not in _OF_THE_SAVE
    }
    return contents | {name: trainer[name] for name in _STATE}


def largest_weight_distance(run: RunDirectory, other: RunDirectory) -> float:
    """Return the largest relative L2 distance of a tensor between two runs' newest checkpoints."""
    import torch

    paths = [each.checkpoint_path(each.checkpoint_steps()[-1]) for each in (run, other)]
    ours, theirs = map(_tensors, paths)
    if ours.keys() != theirs.keys():
        return math.inf
    norm = torch.linalg.vector_norm
    pairs = ((ours[name].double(), theirs[name].double()) for name in ours)
    return _largest(float(norm(one - two) / norm(two)) for one, two in pairs)


def _largest(errors: Iterable[float]) -> float:
    """Return the largest error; NaN counts as infinity (`max` keeps NaN only if it comes first)."""
    return max(math.inf if math.isnan(error) else error for error in errors)


def _tensors(checkpoint: Path) -> dict[str, "Tensor"]:
    """Load all weights and EMA of a checkpoint by name, whatever number of ranks saved it."""
    import torch
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    from longtake.checkpoint.store import CheckpointReader, load_parts

    parts = {"model", *(f"ema/{path.name}" for path in (checkpoint / "ema").iterdir())}
    states: dict[str, dict[str, Any]] = {}
    for part in parts:
        saved = CheckpointReader(checkpoint, part).read_metadata().state_dict_metadata
        sizes = {n: s.size for n, s in saved.items() if isinstance(s, TensorStorageMetadata)}
        states[part] = {name: torch.empty(size) for name, size in sizes.items()}
    load_parts(checkpoint, states)
    return {
        f"{part}/{name}": each for part, state in states.items() for name, each in state.items()
    }
