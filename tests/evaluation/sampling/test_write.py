"""What is written beside what: batches, numbers in names, and what is refused before sampling."""

from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
from PIL import Image
from rich.console import Console

from longtake.config import Bucket
from longtake.errors import RecipeError, RunError
from longtake.evaluation.analysis import Reread
from longtake.evaluation.comparing.cells import chosen_frames, num_frames, size_of
from longtake.evaluation.presets import Preset, find_preset
from longtake.evaluation.sampling.studio import Request, Sampler, load_sampler, settings_for
from longtake.evaluation.sampling.write import (
    check_out,
    sample_in_batches,
    sample_preset,
    write_samples,
)

_QUIET = Console(quiet=True)
_PROMPTS = ["a red circle moving up", "a blue square moving left", "a green cross moving down"]


@pytest.fixture(scope="module")
def sampler(tiny_run: Path) -> Sampler:
    """The newest averaged weights of the tiny run."""
    return load_sampler(tiny_run, device="cpu")


@pytest.mark.parametrize("batch_size", [1, 2, 5])
def test_the_batch_size_changes_nothing_that_can_be_seen(sampler: Sampler, batch_size: int) -> None:
    """One video per request, in order; at most a grey level apart, as matrix products round."""
    requests = [Request(prompt, seed) for seed, prompt in enumerate(_PROMPTS)]
    settings, bucket = settings_for(sampler.recipe)
    videos = sample_in_batches(sampler, requests, settings, bucket, batch_size, _QUIET)
    expected = sampler.sample(requests, settings, bucket)
    assert len(videos) == 3
    assert np.abs(np.stack(videos).astype(int) - expected).max() <= 1


def test_a_single_prompt_has_the_name_that_was_asked_for(sampler: Sampler, tmp_path: Path) -> None:
    """The file decodes to the bucket's frames at the frame rate, and the sheet is a picture."""
    settings, bucket = settings_for(sampler.recipe, fps=12.5)
    out = tmp_path / "one.mp4"
    written = write_samples(sampler, _PROMPTS[:1], 0, settings, bucket, out, 4, _QUIET)
    assert written == {"videos": [str(out)], "sheet": str(tmp_path / "one.png")}
    with av.open(out) as container:
        assert container.streams.video[0].average_rate == 12.5
        frames = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
    sampled = sampler.sample([Request(_PROMPTS[0], 0)], settings, bucket)[0]
    assert np.stack(frames).shape == sampled.shape
    # The picture is noisy colour, of which 4:2:0 keeps a quarter.
    assert np.abs(np.stack(frames).mean(-1) - sampled.mean(-1)).mean() < 12
    with Image.open(tmp_path / "one.png") as sheet:
        assert sheet.format == "PNG"


def test_several_prompts_are_numbered(sampler: Sampler, tmp_path: Path) -> None:
    """In the order of the prompts; nothing else is left in the folder."""
    settings, bucket = settings_for(sampler.recipe, num_inference_steps=1)
    out = tmp_path / "many.mp4"
    written = write_samples(sampler, _PROMPTS, 0, settings, bucket, out, 2, _QUIET)
    names = ["many_00.mp4", "many_01.mp4", "many_02.mp4"]
    assert written["videos"] == [str(tmp_path / name) for name in names]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["many.png", *names]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"width": 33}, "8 frames of 33x32 cannot be written .* such as 34x32"),
        ({"fps": 0.01}, "0.01 frames a second cannot be written"),
    ],
)
def test_what_cannot_be_written_is_refused_before_sampling(
    sampler: Sampler, tmp_path: Path, changes: dict[str, float], message: str
) -> None:
    """Odd sizes, and frame rates that the encoder would change in silence."""
    settings, bucket = settings_for(sampler.recipe, **changes)  # type: ignore[arg-type]
    with pytest.raises(RecipeError, match=message):
        write_samples(sampler, _PROMPTS, 0, settings, bucket, tmp_path / "x.mp4", 2, _QUIET)
    assert list(tmp_path.iterdir()) == []


def test_an_output_is_checked_before_weights_are_loaded(tmp_path: Path) -> None:
    """The folder is made; what is no mp4, or lies below a file, is refused."""
    video, image = (Bucket(num_frames=n, height=32, width=32) for n in (8, 1))
    check_out(tmp_path / "new" / "folder" / "x.mp4", video)
    check_out(tmp_path / "x.png", image)
    assert (tmp_path / "new" / "folder").is_dir()
    (tmp_path / "file").touch()
    (tmp_path / "folder.mp4").mkdir()
    for out in ("x.gif", "x", "folder.mp4", "x.png"):
        with pytest.raises(RunError, match=r"expected the name of an mp4 file|is no \.mp4 file"):
            check_out(tmp_path / out, video)
    with pytest.raises(RunError, match=r"is an image; expected the name of a PNG file, .*\.png\."):
        check_out(tmp_path / "x.mp4", image)
    with pytest.raises(RunError, match=r"cannot be written: .*\. Choose another folder\."):
        check_out(tmp_path / "file" / "x.mp4", video)


def test_a_sample_of_one_frame_is_an_image(sampler: Sampler, tmp_path: Path) -> None:
    """Its pixels are exact, whatever H.264 makes of odd sizes, and the sheet is beside it."""
    settings, bucket = settings_for(sampler.recipe, num_inference_steps=1)
    image = np.random.default_rng(0).integers(0, 255, (1, 1, 33, 35, 3), dtype=np.uint8)
    still = bucket.model_copy(update={"num_frames": 1, "height": 33, "width": 35})

    class Still:
        recipe, step, weights = sampler.recipe, sampler.step, sampler.weights
        unknown_words, num_steps = sampler.unknown_words, sampler.num_steps

        def sample(self, *args: object, **options: object) -> np.ndarray:
            return image

    out = tmp_path / "red.png"
    written = write_samples(Still(), _PROMPTS[:1], 0, settings, still, out, 4, _QUIET)  # type: ignore[arg-type]
    assert written == {"videos": [str(out)], "sheet": str(tmp_path / "red_sheet.png")}
    with Image.open(out) as found:
        assert np.array_equal(np.asarray(found), image[0, 0])
    assert _preset(sampler, bucket=still).file_name(0) == "00_s0.png"
    assert np.array_equal(Reread([out])[0], image[0])
    assert size_of(out) == (35, 33)
    assert len(chosen_frames(out, (35, 33), 1)) == num_frames(out) == 1


def _preset(sampler: Sampler, **changes: Any) -> Preset:
    found = find_preset(sampler.recipe, "demo")
    return Preset(**{**vars(found), "prompts": tuple(_PROMPTS), "batch_size": 2, **changes})


def test_a_presets_videos_are_given_as_soon_as_they_are_written(
    sampler: Sampler, tmp_path: Path
) -> None:
    """The first before the second batch has begun; the sheet when all are there."""
    preset, told = _preset(sampler, seeds=(0, 5)), list[tuple[int, int]]()
    steps = sampler.num_steps(preset.settings)
    videos = sample_preset(sampler, preset, tmp_path, lambda *done: told.append(done))
    first = next(videos)
    assert [path.name for path in tmp_path.iterdir()] == ["00_s0.mp4"]
    assert told == [(step, 3 * steps) for step in range(1, steps + 1)]
    rest = list(videos)
    assert told[-1] == (3 * steps, 3 * steps)
    names = ["00_s0", "00_s5", "01_s0", "01_s5", "02_s0", "02_s5"]
    assert [each.path.stem for each in (first, *rest)] == names
    assert [each.index for each in rest] == [1, 2, 3, 4, 5]
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        *(f"{name}.mp4" for name in names),
        "sheet.png",
    ]
    assert [each.request for each in (first, *rest)] == preset.requests()
    alone = sampler.sample([rest[4].request], preset.settings, preset.bucket)[0]
    assert np.abs(alone.astype(int) - rest[4].video.astype(int)).max() <= 1


def test_what_on_step_raises_ends_the_sampling(sampler: Sampler, tmp_path: Path) -> None:
    """Whoever has lost the work to another stops at the next step, not at the next video."""

    def lost(done: int, total: int) -> None:
        raise LookupError(f"{done} of {total}")

    with pytest.raises(LookupError, match="1 of 8"):
        next(sample_preset(sampler, _preset(sampler), tmp_path, lost))
    assert list(tmp_path.iterdir()) == []


def test_a_video_that_cannot_be_written_says_nothing_against_the_data(
    sampler: Sampler, tmp_path: Path
) -> None:
    """A RunError: other than a preset that is wrong, it may be mended and tried again."""
    with pytest.raises(RunError, match=r"00_s0\.mp4 cannot be written: No such file.*Make room"):
        next(sample_preset(sampler, _preset(sampler), tmp_path / "gone"))
