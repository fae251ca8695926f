"""What the demo learns: a part of its training, with its own recipe."""

from pathlib import Path

import pytest
from rich.console import Console

from longtake import config
from longtake.demo import run as demo
from longtake.demo.oracle import read
from longtake.demo.shapes import held_out_captions, parse_caption
from longtake.run_dir import RunDirectory
from longtake.sampling.presets import Request, settings_for
from longtake.sampling.sampler import load_sampler
from longtake.sampling.videos import sample_in_batches
from longtake.training.train import train


@pytest.mark.drill
@pytest.mark.slow
def test_a_seventh_of_the_demo_learns_colours_and_directions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of combinations that it never saw it gets both right more often than not; chance is 1 in 48.

    The whole demo must show all three of nearly every prompt.
    """
    monkeypatch.setattr(demo, "NUM_CLIPS", 600)
    quiet = Console(quiet=True)
    unwatched = ("watch.enabled=false", "tracking.tensorboard=false")
    recipe = config.changed(demo.demo_recipe(tmp_path, steps=200, seed=0), unwatched)
    demo.make_catalog(RunDirectory(tmp_path), 0, quiet)
    train(recipe, quiet)
    sampler = load_sampler(tmp_path, device="cpu")
    captions = held_out_captions() * 2
    requests = [Request(caption, seed) for seed, caption in enumerate(captions)]
    videos = sample_in_batches(sampler, requests, *settings_for(recipe), 48, quiet)
    asked, shown = [parse_caption(caption) for caption in captions], [read(v) for v in videos]
    both = [
        (a.colour, a.direction) == (s.colour, s.direction)
        for a, s in zip(asked, shown, strict=True)
    ]
    assert sum(both) / len(both) >= 0.5
