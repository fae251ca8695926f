"""What all drills of one call share: an undisturbed run, and one that was killed in mid-epoch."""

from functools import cached_property
from pathlib import Path

from rich.console import Console

from longtake.drill.place import BATCH_SIZE, LONG, NUM_CLIPS, SHORT, Place
from longtake.errors import RunError

ON_TWO = ("data.workers=0",)
"""What is changed of the recipe for two ranks: half as many processes for as few cores."""
STEPS_PER_EPOCH = NUM_CLIPS // BATCH_SIZE


class Ground:
    """A folder with a place for each drill. What is shared is made when it is first asked for.

    Args:
        folder: an empty one.
        console: where a person looks.
        more: lines that every recipe gets besides.
    """

    def __init__(self, folder: Path, console: Console, more: str = "") -> None:
        self._folder = folder.resolve()
        self._console = console
        self._more = more

    def prepare(self) -> None:
        """Train the undisturbed run, without which nothing can be judged.

        Raises:
            RunError: it cannot be trained.
        """
        assert self.undisturbed.run.exists()

    def fresh(self, name: str, recipe: str = SHORT) -> Place:
        """A new place whose clips are indexed and whose run has not begun."""
        place = self._blank.copied_to(self._folder / name)
        place.write_recipe(recipe + self._more)
        return place

    def stopped(self, name: str) -> Place:
        """A new place whose run was killed in the middle of its first epoch.

        It has more than one checkpoint.
        """
        return self._killed.copied_to(self._folder / name)

    @cached_property
    def undisturbed(self) -> Place:
        """The run that nothing befell."""
        self._console.print("  trains the undisturbed run, which drills are compared with")
        return self._trained("undisturbed", SHORT)

    @cached_property
    def undisturbed_on_two(self) -> Place:
        """The run that nothing befell on two ranks, which decode without workers."""
        self._console.print("  trains an undisturbed run on two ranks")
        return self._trained("undisturbed-on-two", SHORT, *ON_TWO, processes=2)

    @cached_property
    def undisturbed_long(self) -> Place:
        """The longer run that nothing befell."""
        self._console.print("  trains a longer undisturbed run, for what needs a history")
        return self._trained("undisturbed-long", LONG)

    def _trained(self, name: str, recipe: str, *changes: str, processes: int = 1) -> Place:
        place = self.fresh(name, recipe)
        with place.launch(*changes, processes=processes) as launch:
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
            launch.wait_for_checkpoints(2)
            launch.kill()
        saved = place.run.checkpoint_steps()[-1]
        if saved >= STEPS_PER_EPOCH:
            raise RunError(
                f"{place.run.path} was to be killed in its first epoch, and its newest checkpoint "
                f"is of step {saved}. This machine is busy; run the drill again."
            )
        return place
