"""Which videos stand beside each other, and what the sheet and the film of them show."""

import json
from collections.abc import Sequence
from pathlib import Path
from shutil import copytree

import av
import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from longtake.cli.evaluate import compare as verb
from longtake.data.decode import rgb
from longtake.data.encode import write_video
from longtake.drawing import Grid, Size
from longtake.errors import RunError
from longtake.evaluation.compare import (
    Comparison,
    check_out,
    choose,
    draw,
    fitting,
    grid_of,
    spread,
)
from longtake.evaluation_dir import Alarm, EvaluationDirectory, Scene, Scores
from longtake.run_dir import RunDirectory
from longtake.sampling.preset_files import kept_picture

_PROMPTS = ("a red circle moving up", "a blue square moving left", "a green cross")
_FRAMES = 8


def _run(
    path: Path,
    steps: Sequence[int] = (100, 200, 300),
    *,
    prompts: Sequence[str] = _PROMPTS,
    seeds: Sequence[int] = (0,),
    fps: float = 8.0,
    pictures: Sequence[int] = (),
) -> Path:
    """Results whose videos are grey: 40 x prompt + step / 10, and brighter from frame to frame."""
    path.mkdir()
    (path / "recipe.toml").write_text("")
    for step in steps:
        _result(RunDirectory(path), step, prompts, seeds, fps, pictures)
    preset = EvaluationDirectory(RunDirectory(path)).preset_path("p")
    for number, level in enumerate(pictures):
        copy = kept_picture(preset, number, "reference")
        copy.parent.mkdir(exist_ok=True)
        Image.new("RGB", (24, 16), (level, level, level)).save(copy)
    return path


def _result(
    run: RunDirectory,
    step: int,
    prompts: Sequence[str],
    seeds: Sequence[int],
    fps: float,
    pictures: Sequence[int],
) -> None:
    folder = EvaluationDirectory(run).result_path("p", step)
    folder.mkdir(parents=True)
    scores: Scores = {
        "preset": "p",
        "step": step,
        "key": "0",
        "weights": "model",
        "time": "2026-01-02T03:04:05.000+00:00",
        "server": "",
        "settings": {"fps": fps}
        | (
            {"conditioning": {"reference": [f"{level:016x}" for level in pictures]}}
            if pictures
            else {}
        ),
        "videos": [],
        "measures": {"brightness": step / 10},
        "held_out": {"mean": 1 / step},
        "alarms": [
            Alarm(measure="motion", kind="range", message=""),  # is told elsewhere, not in red
            *([Alarm(measure="brightness", kind="drift", message="")] if step > 200 else []),
        ],
        "seconds": {},
    }
    for number, prompt in enumerate(prompts):
        for seed in seeds:
            name = f"{number:02d}_s{seed}.mp4"
            frames = np.arange(_FRAMES, dtype=np.uint8)[:, None, None, None] * 8
            level = np.uint8(40 * number + step // 10 + 20)
            write_video(folder / name, np.broadcast_to(frames + level, (_FRAMES, 16, 24, 3)), fps)
            video = {"file": name, "prompt": prompt, "seed": seed, "measures": {}}
            scores["videos"].append(video)  # type: ignore[arg-type]
    (folder / "scores.json").write_text(json.dumps(scores))


def _steps(comparison: Comparison) -> list[int]:
    return [column.scores["step"] for column in comparison.columns]


def _grid(comparison: Comparison, size: Size, num_frames: int = 1) -> Grid:
    blank = Image.new("RGB", (num_frames * (size[0] + 3) - 3, size[1]))
    cells = [[blank] * len(comparison.columns)] * len(comparison.scenes)
    return grid_of(comparison, cells, size)


def _even(size: Size) -> Size:
    return size[0] + size[0] % 2, size[1] + size[1] % 2


def _level(picture: NDArray[np.uint8], corner: tuple[int, int], size: tuple[int, int]) -> float:
    (left, top), (width, height) = corner, size
    return float(picture[top + 2 : top + height - 2, left + 2 : left + width - 2].mean())


def test_a_runs_checkpoints_by_step(tmp_path: Path) -> None:
    found = choose([_run(tmp_path / "a")], "p")
    assert _steps(found) == [100, 200, 300]
    assert found.scenes == tuple(Scene(prompt, 0) for prompt in _PROMPTS)
    assert found.title == "a, preset p"
    assert [column.titles for column in found.columns] == [
        ("step 100",),
        ("step 200",),
        ("step 300",),
    ]
    measures = found.measures()
    assert measures["brightness"] == [(10.0, False), (20.0, False), (30.0, True)]
    assert [value for value, _ in measures["held-out loss"]] == [0.01, 0.005, 1 / 300]


def test_of_many_checkpoints_the_first_and_the_last_are_always_shown(tmp_path: Path) -> None:
    assert spread(range(1, 101), 8) == [1, 15, 29, 43, 58, 72, 86, 100]
    assert spread([5, 6], 8) == [5, 6]
    assert spread([5, 6, 7], 1) == [7]
    run = _run(tmp_path / "a", (1, 2, 3, 4, 5))
    assert _steps(choose([run], "p", columns=3)) == [1, 3, 5]
    assert _steps(choose([run], "p", steps=[4, 2])) == [4, 2]


def test_several_runs_stand_side_by_side_at_their_newest_common_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "x").mkdir()
    (tmp_path / "y").mkdir()
    first, second = _run(tmp_path / "x" / "a"), _run(tmp_path / "y" / "a", (200, 400))
    found = choose([first, second], "p")
    assert [column.titles for column in found.columns] == [("x/a", "step 200"), ("y/a", "step 200")]
    third = _run(tmp_path / "b", (50,))
    assert _steps(choose([first, third], "p")) == [300, 50]
    assert [c.titles[0] for c in choose([first, third], "p").columns] == ["a", "b"]
    assert _steps(choose([first, second], "p", steps=[200])) == [200, 200]


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [
        ("0:2", [0, 1]),
        ("1:", [1, 2]),
        (":1", [0]),
        ("2", [2]),
        (" 0:3 ", [0, 1, 2]),
        (None, [0, 1, 2]),
    ],
)
def test_prompts_by_their_numbers(wanted: str | None, expected: list[int], tmp_path: Path) -> None:
    found = choose([_run(tmp_path / "a", (1,), seeds=(0, 3))], "p", wanted)
    wanted_scenes = [Scene(_PROMPTS[number], seed) for number in expected for seed in (0, 3)]
    assert found.scenes == tuple(wanted_scenes)
    assert found.has_seeds


@pytest.mark.parametrize("wanted", ["0:4", "3", "2:2", "2:1", "3:"])
def test_prompts_that_there_are_not(wanted: str, tmp_path: Path) -> None:
    with pytest.raises(RunError, match="there are 3 prompts, counted from 0: choose from 0:3"):
        choose([_run(tmp_path / "a", (1,))], "p", wanted)


@pytest.mark.parametrize("wanted", ["a", "", "0-4", "-1"])
def test_what_is_no_range(wanted: str, tmp_path: Path) -> None:
    with pytest.raises(RunError, match="expected a range such as 0:4"):
        choose([_run(tmp_path / "a", (1,))], "p", wanted)


def test_what_cannot_be_compared(tmp_path: Path) -> None:
    run = _run(tmp_path / "a")
    with pytest.raises(RunError, match="none is not a run directory"):
        choose([tmp_path / "none"], "p")
    with pytest.raises(RunError, match=r"no results of preset q; there are: p\. Make some with: "):
        choose([run], "q")
    with pytest.raises(RunError, match=r"it has none of any preset\. .* evaluate .*b --preset p"):
        choose([_run(tmp_path / "b", ())], "p")
    with pytest.raises(RunError, match="no result of step 7; it has: 100, 200, 300"):
        choose([run], "p", steps=[100, 7])
    other = _run(tmp_path / "other", prompts=(_PROMPTS[0], "something else", _PROMPTS[2]))
    with pytest.raises(RunError, match=r"other, step 300, has no video of .*blue.* which .*a has"):
        choose([run, other], "p")
    assert len(choose([run, other], "p", "0").scenes) == 1
    for name in ("sheet.jpg", "sheet", "none/sheet.png"):
        with pytest.raises(RunError, match=f"--out .*{name}"):
            check_out(tmp_path / name)


def test_without_a_preset_the_only_common_one_is_compared(tmp_path: Path) -> None:
    first, second = _run(tmp_path / "a"), _run(tmp_path / "b")
    copytree(first / "evaluations/p", first / "evaluations/q")  # results of p still, by their text
    assert choose([second]).preset == choose([first, second]).preset == "p"
    with pytest.raises(
        RunError, match=r"a has results of 2 presets: p, q\. .* such as --preset p\."
    ):
        choose([first])
    with pytest.raises(RunError, match=r"The runs have results of 2 presets: p, q\."):
        choose([first, first, copytree(first, tmp_path / "d")])
    third = _run(tmp_path / "c", ())
    with pytest.raises(
        RunError, match=r"c has no results of any preset\. Make some with: .*evaluate"
    ):
        choose([first, third])
    (second / "evaluations/p").rename(second / "evaluations/other")
    with pytest.raises(RunError, match=r"no common preset: .*a has p, q; .*b has other\."):
        choose([first, second])
    with pytest.raises(RunError, match="none is not a run directory"):
        choose([tmp_path / "none"])


def test_the_sheet_shows_each_video_where_it_belongs(tmp_path: Path) -> None:
    found = choose([_run(tmp_path / "a")], "p")
    draw(found, tmp_path / "sheet.png")
    size = fitting((24, 16), 6)
    grid = _grid(found, size, num_frames=2)
    picture = np.asarray(Image.open(tmp_path / "sheet.png").convert("RGB"))
    assert picture.shape[1::-1] == _even(grid.size)
    for row in range(3):
        for column, step in enumerate((100, 200, 300)):
            for number, brighter in enumerate((0, 56)):  # the first frame and the last
                left, top = grid.corner(row, column)
                level = _level(picture, (left + number * (size[0] + 3), top), size)
                assert level == pytest.approx(40 * row + step // 10 + 20 + brighter, abs=3)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "sheet.png"]


def test_the_pictures_that_the_model_goes_by_stand_left_of_what_it_makes(tmp_path: Path) -> None:
    prompts, pictures = ["make it snow"] * 3, (200, 150, 100)
    run = _run(tmp_path / "a", prompts=prompts, pictures=pictures)
    found = choose([run], "p", "1:")
    assert [scene.prompt for scene in found.scenes] == prompts[1:]
    kept_picture(run / "evaluations/p/preset.json", 2, "reference").unlink()
    for name in ("sheet.png", "sheet.mp4"):
        draw(found, tmp_path / name)
    size = fitting((24, 16), 6)
    grid = _grid(found, size, num_frames=2)
    picture = np.asarray(Image.open(tmp_path / "sheet.png").convert("RGB"))
    assert picture.shape[1::-1] == _even(grid.size)
    assert _level(picture, grid.corner(0, 0), size) == 150
    assert _level(picture, grid.corner(1, 0), size) > 240
    level = _level(picture, grid.corner(1, 3), size)
    assert level == pytest.approx(40 * 2 + 30 + 20, abs=3)


def test_results_of_other_pictures_are_not_compared(tmp_path: Path) -> None:
    """They show something else, whatever the prompt."""
    first = _run(tmp_path / "a", (1,), pictures=(1, 2, 3))
    second = _run(tmp_path / "b", (1,), pictures=(1, 9, 3))
    with pytest.raises(
        RunError, match=r"blue.* and the same pictures \(reference\), which .*a has"
    ):
        choose([first, second], "p")
    assert len(choose([first, second], "p", "2").scenes) == 1


def test_one_picture_of_each_is_the_middle_one(tmp_path: Path) -> None:
    found = choose([_run(tmp_path / "a", range(10, 90, 10))], "p", "0")
    draw(found, tmp_path / "sheet.png")
    size = fitting((24, 16), 8)
    picture = np.asarray(Image.open(tmp_path / "sheet.png").convert("RGB"))
    level = _level(picture, _grid(found, size).corner(0, 7), size)
    assert level == pytest.approx(20 + 8 + 4 * 8, abs=3)


def test_in_the_film_all_videos_play_at_once(tmp_path: Path) -> None:
    first = _run(tmp_path / "a", (100,))
    found = choose([first, _run(tmp_path / "b", (100,), fps=4.0)], "p", "0:2")
    draw(found, tmp_path / "film.mp4")
    size = fitting((24, 16), 2)
    grid = _grid(found, size)
    with av.open(tmp_path / "film.mp4") as container:
        assert container.streams.video[0].codec_context.name == "h264"
        assert container.streams.video[0].average_rate == 8
        frames = [rgb(frame) for frame in container.decode(video=0)]
    assert len(frames) == 4 * 16
    assert frames[0].shape[1::-1] == _even(grid.size)
    for number, frame in enumerate(frames[:16]):
        quick = _level(frame, grid.corner(1, 0), size)
        slow = _level(frame, grid.corner(1, 1), size)
        assert quick == pytest.approx(70 + 8 * min(number, 7), abs=4)
        assert slow == pytest.approx(70 + 8 * (number // 2), abs=4)
    assert _level(frames[16], grid.corner(1, 0), size) == pytest.approx(70, abs=4)


def test_large_pictures_shrink_and_small_ones_grow_by_whole_factors() -> None:
    """Never below 112 pixels of height, so that something can be seen."""
    assert fitting((32, 32), 8, 12) == (128, 128)
    assert fitting((640, 360), 8) == (200, 112)
    assert fitting((1280, 720), 2) == (800, 450)
    assert fitting((1280, 720), 2, 12) == (199, 112)
    assert fitting((1280, 720), 2, 4) == (533, 300)
    assert fitting((160, 120), 8) == (160, 120)
    assert fitting((720, 1280), 16) == (100, 178)


def test_a_video_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    run = _run(tmp_path / "a", (1,))
    (run / "evaluations" / "p" / "step_00000001" / "01_s0.mp4").write_bytes(b"no video")
    for name in ("sheet.png", "sheet.mp4"):
        with pytest.raises(RunError, match=r"01_s0\.mp4, which was sampled, cannot be read"):
            draw(choose([run], "p"), tmp_path / name)
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_the_verb_says_what_it_wrote(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, out = _run(tmp_path / "a"), tmp_path / "sheet.png"
    verb([run], out, prompts="0:2", steps="100,300", as_json=True)
    said = json.loads(capsys.readouterr().out)
    assert (said["out"], said["preset"], said["videos"]) == (str(out), "p", 2)
    assert [column["step"] for column in said["columns"]] == [100, 300]
    with pytest.raises(RunError, match="--steps 100;300: expected steps such as 100,200"):
        verb([run], out, "p", steps="100;300")
