"""What all drills of one call share: an undisturbed run, and one that was killed in mid-epoch."""

from functools import cached_property
from pathlib import Path

from rich.console import Console

from longtake.drill.place import BATCH_SIZE, NUM_CLIPS, STEPS, Place
from longtake.errors import RunError

_KILLED_AFTER_ROWS = 7
STEPS_PER_EPOCH = NUM_CLIPS // BATCH_SIZE


class Ground:
    """A folder with a place for each drill. What is shared is made when it is first asked for.

    Args:
        folder: an empty one.
        console: where a person looks.
    """

    def __init__(self, folder: Path, console: Console) -> None:
        self._folder = folder.resolve()
        self._console = console

    def prepare(self) -> None:
        """Train the undisturbed run, without which nothing can be judged.

        Raises:
            RunError: it cannot be trained.
        """
        assert self.undisturbed.run.exists()

    def fresh(self, name: str) -> Place:
        """A new place whose clips are indexed and whose run has not begun."""
        return self._blank.copied_to(self._folder / name)

    def stopped(self, name: str) -> Place:
        """A new place whose run was killed in the middle of its first epoch."""
        return self._killed.copied_to(self._folder / name)

    @cached_property
    def undisturbed(self) -> Place:
        """The run that nothing befell."""
        self._console.print("  trains the undisturbed run, which drills are compared with")
        place = self.fresh("undisturbed")
        with place.launch() as launch:
            launch.finish()
        return place

    @cached_property
    def _blank(self) -> Place:
        place = Place(self._folder / "blank")
        place.prepare()
        return place

    @cached_property
    def _killed(self) -> Place:
        self._console.print("  trains a run and kills it in mid-epoch, as kill -9 does")
        place = self.fresh("killed")
        with place.launch() as launch:
            launch.wait_for_rows(_KILLED_AFTER_ROWS)
            launch.kill()
        saved = place.run.checkpoint_steps()[-1:]
        if not saved or saved[0] == STEPS or saved[0] % STEPS_PER_EPOCH == 0:
            raise RunError(
                f"{place.run.path} was to be killed in mid-epoch, and its newest checkpoint is of "
                f"step {saved}. This machine is busy; run the drill again."
            )
        return place
