"""A folder in which a small run is trained: its clips, its catalog, its recipe and the run.

    data/clips/*.mp4  data/catalog.parquet  recipe.toml  run/  launch_0.log ...

Everything in it is relative to it, so a copy of the folder is another run at the same point, and
`longtake train recipe.toml`, typed there, does what the drill does.
"""

import shutil
from dataclasses import dataclass
from pathlib import Path

from longtake.data.catalog import Catalog
from longtake.data.index import index
from longtake.demo.shapes import write_clips
from longtake.drill.harms import Sabotage
from longtake.drill.launch import Launch
from longtake.run_dir import RunDirectory

NUM_CLIPS = 64
BATCH_SIZE = 4
STEPS = 50
"""Three epochs of the clips, and the beginning of a fourth."""
LONG_STEPS = 168
"""Ten epochs, and the half of another."""
WINDOW = 32
"""Steps that the guard compares a new one with in runs of so many steps."""
SAMPLE_TIMEOUT_SECONDS = 1.5
"""A thousand times what one of these clips takes."""


def _recipe(steps: int, checkpoint_every: int, more: str = "") -> str:
    return f"""\
out = "run"
data.catalog = "data/catalog.parquet"
data.buckets = [{{ num_frames = 8, height = 32, width = 32 }}]
data.workers = 2
data.memory_gib = 0                 # so that every epoch decodes every clip
data.sample_timeout_seconds = {SAMPLE_TIMEOUT_SECONDS}
model.family = "tubelet"
model.config = {{ hidden_size = 48, num_blocks = 2 }}
text.max_tokens = 6
flow.mean = 2.0
optimizer.learning_rate = 3e-3
optimizer.warmup_steps = 4
training.steps = {steps}
training.batch_size = {BATCH_SIZE}
training.device = "cpu"
training.precision = "fp32"
ema.decay = 0.9
checkpoint.every = {checkpoint_every}
{more}"""


SHORT = _recipe(STEPS, checkpoint_every=5)  # never at the end of an epoch
"""The recipe of most drills."""
LONG = _recipe(
    LONG_STEPS,
    checkpoint_every=20,
    more=f"""\
guard.window = {WINDOW}
guard.warmup_steps = 16
""",
)
"""The recipe of drills that the guard needs a history for."""


@dataclass(frozen=True)
class Place:
    """One such folder."""

    folder: Path

    @property
    def run(self) -> RunDirectory:
        """The run that is trained here."""
        return RunDirectory(self.folder / "run")

    @property
    def clips(self) -> Path:
        """The folder of clips."""
        return self.folder / "data" / "clips"

    @property
    def catalog_path(self) -> Path:
        """The catalog that the recipe names."""
        return self.folder / "data" / "catalog.parquet"

    def catalog(self) -> Catalog:
        """The catalog as it is now."""
        return Catalog.load(self.catalog_path)

    def prepare(self, recipe: str = SHORT) -> None:
        """Write the clips, index them, and write the recipe."""
        self.write_clips(NUM_CLIPS, seed=0)
        self.index()
        self.write_recipe(recipe)

    def write_recipe(self, recipe: str) -> None:
        """Write the recipe, instead of the one that is there."""
        (self.folder / "recipe.toml").write_text(recipe, encoding="utf-8")

    def write_clips(self, num_clips: int, seed: int) -> None:
        """Write clips beside those that are there; of one seed, more of them keep the first."""
        write_clips(self.clips, num_clips, seed)

    def index(self) -> Catalog:
        """Bring the catalog up to date, as `longtake data index` does; returns it."""
        captions = self.clips / "captions.jsonl"
        index([self.clips], captions=captions, out=self.catalog_path, workers=0)
        return self.catalog()

    def copied_to(self, folder: Path) -> "Place":
        """The same again, with whatever was trained by now."""
        # Links are kept as they are: who copies a run copies no more than it.
        shutil.copytree(self.folder, folder, symlinks=True)
        return Place(folder)

    def launch(
        self,
        *changes: str,
        processes: int = 1,
        sabotage: Sabotage | None = None,
        restarts: int = 0,
    ) -> Launch:
        """Start `longtake train recipe.toml`, with `--set` for each change."""
        return Launch(self.folder, changes, processes, sabotage, restarts)
