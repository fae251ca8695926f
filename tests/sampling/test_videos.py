"""Files of samples, their names, batches and contact sheets."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image
from rich.console import Console

from longtake.config import Bucket
from longtake.errors import RecipeError, RunError
from longtake.evaluation.evaluator import Reread
from longtake.sampling.presets import (
    Preset,
    PromptSettings,
    Request,
    find_preset,
    settings_for,
)
from longtake.sampling.sampler import Sampler, load_sampler
from longtake.sampling.videos import (
    FRAME_HEIGHT,
    MAX_FRAMES,
    SheetRow,
    check_out,
    contact_sheet,
    inputs_by_name,
    sample_in_batches,
    sample_preset,
    write_samples,
)

_QUIET = Console(quiet=True)
_PROMPTS = ["a red circle moving up", "a blue square moving left", "a green cross moving down"]
_GREEN, _RED = (47, 143, 91), (200, 69, 59)


@pytest.fixture(scope="module")
def sampler(tiny_run: Path) -> Sampler:
    return load_sampler(tiny_run, device="cpu")


@pytest.mark.parametrize("batch_size", [1, 2, 5])
def test_the_batch_size_changes_nothing_that_can_be_seen(sampler: Sampler, batch_size: int) -> None:
    requests = [Request(prompt, seed) for seed, prompt in enumerate(_PROMPTS)]
    settings, bucket = settings_for(sampler.recipe)
    videos = sample_in_batches(sampler, requests, settings, bucket, batch_size, _QUIET)
    expected = sampler.sample(requests, settings, bucket)
    assert len(videos) == 3
    assert np.abs(np.stack(videos).astype(int) - expected).max() <= 1


def test_a_single_prompt_has_the_name_that_was_asked_for(sampler: Sampler, tmp_path: Path) -> None:
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

        def sample_with_sound(
            self, *args: object, **options: object
        ) -> tuple[np.ndarray, list[None]]:
            return image, [None]

    out = tmp_path / "red.png"
    written = write_samples(Still(), _PROMPTS[:1], 0, settings, still, out, 4, _QUIET)  # type: ignore[arg-type]
    assert written == {"videos": [str(out)], "sheet": str(tmp_path / "red_sheet.png")}
    with Image.open(out) as found:
        assert np.array_equal(np.asarray(found), image[0, 0])
    assert _preset(sampler, bucket=still).requests()[0].file == "00_s0.png"
    assert np.array_equal(Reread([out])[0], image[0])


def _preset(sampler: Sampler, **changes: Any) -> Preset:
    preset = find_preset(sampler.recipe, "demo")
    return replace(preset, prompts=tuple(_PROMPTS), batch_size=2, **changes)


def test_a_presets_videos_are_given_as_soon_as_they_are_written(
    sampler: Sampler, tmp_path: Path
) -> None:
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
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        *(f"{name}.mp4" for name in names),
        "sheet.png",
    ]
    assert [each.request for each in (first, *rest)] == preset.requests()
    alone = sampler.sample([rest[4].request], preset.settings, preset.bucket)[0]
    assert np.abs(alone.astype(int) - rest[4].video.astype(int)).max() <= 1


def test_prompts_of_equal_settings_share_batches_and_the_sheet_keeps_their_order(
    sampler: Sampler, tmp_path: Path
) -> None:
    preset, told = _preset(sampler), list[tuple[int, int]]()
    settings, bucket = settings_for(sampler.recipe, num_inference_steps=1)
    own = {"num_inference_steps": 1}
    mixed = replace(preset, own={1: PromptSettings((7,), settings, bucket, own)})
    videos = {
        each.path.name: each.video
        for each in sample_preset(sampler, mixed, tmp_path, lambda *done: told.append(done))
    }
    assert list(videos) == ["00_s0.mp4", "02_s0.mp4", "01_s7.mp4"]
    assert told[-1] == (sampler.num_steps(preset.settings) + 1,) * 2
    alike = [Request(_PROMPTS[0], 0), Request(_PROMPTS[2], 0)]
    together = sampler.sample(alike, preset.settings, preset.bucket)
    assert np.array_equal(together, [videos["00_s0.mp4"], videos["02_s0.mp4"]])
    alone = sampler.sample([Request(_PROMPTS[1], 7)], settings, bucket)[0]
    assert np.array_equal(alone, videos["01_s7.mp4"])
    expected = [
        SheetRow(_PROMPTS[0], videos["00_s0.mp4"]),
        SheetRow(_PROMPTS[1], videos["01_s7.mp4"], note="seed 7, num_inference_steps 1"),
        SheetRow(_PROMPTS[2], videos["02_s0.mp4"]),
    ]
    with Image.open(tmp_path / "sheet.png") as sheet:
        title = f"demo, step {sampler.step}, {sampler.weights}"
        assert np.array_equal(
            np.asarray(sheet), _draw(tmp_path / "other.png", *expected, title=title)
        )


def test_what_on_step_raises_ends_the_sampling(sampler: Sampler, tmp_path: Path) -> None:

    def lost(done: int, total: int) -> None:
        raise LookupError(f"{done} of {total}")

    with pytest.raises(LookupError, match="1 of 8"):
        next(sample_preset(sampler, _preset(sampler), tmp_path, lost))
    assert list(tmp_path.iterdir()) == []


def test_a_video_that_cannot_be_written_says_nothing_against_the_data(
    sampler: Sampler, tmp_path: Path
) -> None:
    with pytest.raises(RunError, match=r"00_s0\.mp4 cannot be written: No such file.*Make room"):
        next(sample_preset(sampler, _preset(sampler), tmp_path / "gone"))


def test_further_inputs_are_given_by_name(tmp_path: Path) -> None:
    picture = tmp_path / "a=b.png"
    picture.touch()
    assert inputs_by_name([f"reference={picture}"]) == {"reference": picture}
    assert inputs_by_name([]) == {}
    for given in (str(picture), "reference=", f"={picture}", "reference"):
        with pytest.raises(
            RunError, match=r"--conditioning .*like --conditioning pose=picture\.png"
        ):
            inputs_by_name([given])
    with pytest.raises(RunError, match=r"there is no file nowhere\.png\. Give it like"):
        inputs_by_name(["pose=nowhere.png"])


def _flat(levels: list[int], height: int, width: int) -> NDArray[np.uint8]:
    return np.stack([np.full((height, width, 3), level, np.uint8) for level in levels])


def _draw(path: Path, *rows: SheetRow, title: str = "") -> NDArray[np.uint8]:
    contact_sheet(rows, path, title=title)
    with Image.open(path) as picture:
        assert picture.format == "PNG"
        return np.asarray(picture.convert("RGB"))


def _area(sheet: NDArray[np.uint8], colour: tuple[int, int, int]) -> int:
    return int((sheet == colour).all(axis=-1).sum())


def test_eight_evenly_spaced_frames_with_both_ends(tmp_path: Path) -> None:
    """Of 15 frames every second is drawn, left to right, each 3 times as large as its 32 pixels."""
    levels = [10 * index for index in range(15)]
    sheet = _draw(tmp_path / "sheet.png", SheetRow("", _flat(levels, 32, 32)))
    for level in levels:
        drawn = levels.index(level) % 2 == 0
        assert _area(sheet, (level, level, level)) == (96 * 96 if drawn else 0)
    middle = sheet[sheet.shape[0] // 2, :, 0].tolist()
    places = [middle.index(level) for level in levels[::2]]
    assert len(places) == MAX_FRAMES
    assert places == sorted(places)


@pytest.mark.parametrize(
    ("height", "width", "area"),
    [(48, 32, 96 * 64), (480, 960, 2 * FRAME_HEIGHT * FRAME_HEIGHT)],
    ids=["enlarged", "shrunk"],
)
def test_a_short_clip_shows_each_frame_once_in_proportion(
    height: int, width: int, area: int, tmp_path: Path
) -> None:
    sheet = _draw(tmp_path / "sheet.png", SheetRow("an image", _flat([77], height, width)))
    assert _area(sheet, (77, 77, 77)) == area


def test_small_frames_keep_their_pixels(tmp_path: Path) -> None:
    board = np.indices((40, 40)).sum(axis=0) % 2 * 255
    frames: NDArray[np.uint8] = np.repeat(board[None, :, :, None], 3, axis=3).astype(np.uint8)
    sheet = _draw(tmp_path / "sheet.png", SheetRow("", frames))
    assert _area(sheet, (0, 0, 0)) == _area(sheet, (255, 255, 255)) == 120 * 120 / 2


def test_a_long_caption_is_wrapped_beside_its_frames(tmp_path: Path) -> None:
    short = _draw(tmp_path / "short.png", SheetRow("two words", _flat([0], 96, 96)))
    for caption in ("many words " * 30, "w" * 300):
        sheet = _draw(tmp_path / "long.png", SheetRow(caption, _flat([0], 96, 96)))
        assert sheet.shape[0] > short.shape[0]
        assert sheet.shape[1] == short.shape[1]
        gap = sheet[:, 28 + 30 + 250 + 1 : 28 + 30 + 250 + 22]
        assert (gap == gap[0, 0]).all()
