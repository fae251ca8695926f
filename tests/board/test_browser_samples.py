"""The page of samples in a real browser: real videos, which play."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.board.sampled_run import FPS, FRAMES, STEPS, add_result, add_results, make_run, square

pytestmark = pytest.mark.drill

WIDTHS = (1280, 390)
SEEN = """() => [...document.querySelectorAll('#samples-page video')].filter((video) => {
  const box = video.getBoundingClientRect();
  return box.width && box.bottom > 0 && box.top < innerHeight && box.right > 0
    && box.left < innerWidth && getComputedStyle(video).visibility === 'visible';
})"""
STATES = f"() => ({SEEN})().map((it) => [it.currentTime, it.readyState, it.paused])"
PIXELS = """(canvas) => {
  const {width, height} = canvas;
  const found = canvas.getContext('2d').getImageData(0, 0, width, height).data;
  return [0, 1, 2].map((channel) => found.filter((_, place) => place % 4 === channel)
    .reduce((most, value) => Math.max(most, value), 0));
}"""


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory, serve: Callable[[Path], str]) -> str:
    """Of the page of a run with two presets, beside a run with one of them."""
    runs = tmp_path_factory.mktemp("sampled")
    own, twin = make_run(runs / "own"), make_run(runs / "twin")
    add_results(own, "shapes", 0)
    add_results(own, "raw", 60, weights="model")
    add_results(twin, "shapes", 30)
    return f"{serve(runs)}/run/samples/own"


@pytest.fixture
def open_samples(open_page: Any, url: str) -> Callable[..., Any]:
    def open_samples(query: str = "?preset=shapes", *, plays: bool = False, **more: Any) -> Any:
        motion = "no-preference" if plays else "reduce"
        page = open_page(url + query, reduced_motion=motion, **more)
        page.wait_for_selector("#samples-page[data-started]")
        return page

    return open_samples


def playing(page: Any) -> list[list[Any]]:
    """Time, readiness and whether it is paused of each video that is seen, once all play."""
    page.wait_for_function(
        f"() => {{ const all = ({SEEN})(); "
        "return all.length && all.every((it) => it.readyState >= 2 && !it.paused); }"
    )
    found: list[list[Any]] = page.evaluate(STATES)
    return found


def stepped(page: Any, step: int) -> None:
    page.wait_for_selector(f"#samples-page[data-step='{step}']")


def shown(page: Any, places: str = ".samples-layers") -> list[str]:
    """What the stages show: step and file of each."""
    page.wait_for_function(
        "(places) => [...document.querySelectorAll(places)].every((each) => {"
        "const now = each.querySelector('.is-current'); return now && now.readyState >= 2; })",
        arg=places,
    )
    found: list[str] = page.eval_on_selector_all(
        f"{places} .is-current", "all => all.map((each) => each.src.split('/').slice(-3).join('/'))"
    )
    return found


def until_shown(page: Any, expected: list[str], places: str = ".samples-layers") -> None:
    page.wait_for_function(
        "([places, expected]) => JSON.stringify([...document.querySelectorAll("
        "places + ' .is-current')].map((each) => each.src.split('/').slice(-3).join('/')))"
        " === JSON.stringify(expected)",
        arg=[places, expected],
    )
    assert shown(page, places) == expected


@pytest.mark.parametrize("width", WIDTHS)
def test_videos_of_the_grid_play_in_step(open_samples: Any, width: int) -> None:
    page = open_samples(width=width, plays=True)
    before = playing(page)
    page.wait_for_timeout(1000)
    after = page.evaluate(STATES)
    assert len(after) >= 4
    assert before != after
    differences = []
    for _ in range(5):
        times = [time for time, _, _ in page.evaluate(STATES)]
        apart = max(times) - min(times)
        differences.append(min(apart, FRAMES / FPS - apart))
        page.wait_for_timeout(130)
    assert sorted(differences)[2] < 1 / FPS
    assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_space_the_frame_slider_and_the_speed_are_those_of_all_videos(open_samples: Any) -> None:
    page = open_samples(plays=True)
    playing(page)
    page.keyboard.press(" ")
    page.wait_for_function(f"() => ({SEEN})().every((it) => it.paused && !it.seeking)")
    assert page.locator("#samples-play").inner_text() == "play"
    page.locator("#samples-frame").fill("7")
    expected = 7.5 / FPS
    page.wait_for_function(
        f"() => ({SEEN})().every((it) => Math.abs(it.currentTime - {expected}) < {0.25 / FPS})"
    )
    assert page.locator("#samples-frame-note").inner_text() == f"frame 8 of {FRAMES}"
    page.keyboard.press(".")
    assert page.locator("#samples-frame-note").inner_text() == f"frame 9 of {FRAMES}"
    page.locator("#samples-speed").select_option("0.25")
    page.locator("#samples-play").click()
    playing(page)
    page.wait_for_function(f"() => ({SEEN})().every((it) => it.playbackRate < 0.3)")


def test_who_wants_little_motion_sees_stills_until_play_is_pressed(open_samples: Any) -> None:
    page = open_samples()
    page.wait_for_function(f"() => ({SEEN})().every((it) => it.poster)")
    assert [state[1:] for state in page.evaluate(STATES)] == [[0, True]] * 10
    stills = page.evaluate(f"() => ({SEEN})().map((it) => it.poster)")
    assert page.request.get(stills[0]).headers["content-type"] == "image/png"
    page.locator("#samples-play").click()
    playing(page)


@pytest.mark.parametrize("width", WIDTHS)
def test_keys_and_the_slider_step_through_checkpoints_and_the_url_follows(
    open_samples: Any, width: int
) -> None:
    page = open_samples("?preset=shapes&view=single&step=120", width=width)
    files = ("00_s0.mp4", "01_s0.mp4")
    until_shown(page, [f"shapes/step_00000120/{file}" for file in files])
    page.keyboard.press("j")
    stepped(page, 160)
    until_shown(page, [f"shapes/step_00000160/{file}" for file in files])
    for key in ("k", "ArrowLeft"):
        page.keyboard.press(key)
    stepped(page, 80)
    assert "step=80" in page.url
    page.locator("#samples-step").fill(str(len(STEPS) - 1))
    stepped(page, 200)
    until_shown(page, [f"shapes/step_00000200/{file}" for file in files])
    assert "240" in page.locator("[data-measure='0'] b").inner_text()
    assert "--step 200 " in page.locator("#samples-command").inner_text()
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    page.reload()
    stepped(page, 200)
    assert page.locator("#samples-stages").is_visible()


def test_pixels_are_sharp_and_neighbours_loaded_before_they_are_shown(open_samples: Any) -> None:
    page = open_samples("?preset=shapes&view=single&step=120")
    shown(page)
    found = page.locator(".samples-layers .is-current").first.evaluate(
        "it => [getComputedStyle(it).imageRendering, it.offsetWidth, it.offsetHeight]"
    )
    assert found == ["pixelated", 256, 256]
    page.wait_for_function(
        "() => { const all = [...document.querySelectorAll('.samples-layers video')]; "
        "return all.length === 6 && all.every((it) => it.readyState >= 2); }"
    )


def test_a_cell_opens_its_prompt_alone_and_a_key_shows_the_keys(open_samples: Any) -> None:
    page = open_samples()
    page.locator("td[data-step='80'][data-scene='1'] video").click()
    until_shown(page, ["shapes/step_00000080/01_s0.mp4"])
    assert {"view=single", "prompt=1", "step=80"} <= set(page.url.partition("?")[2].split("&"))
    page.locator("#samples-all").click()
    page.wait_for_function("() => document.querySelectorAll('.samples-figure').length === 2")
    page.keyboard.press("?")
    assert page.locator("#samples-keys-note").is_visible()


def test_c_compares_with_the_checkpoint_before(open_samples: Any) -> None:
    page = open_samples("?preset=shapes&step=80")
    page.keyboard.press("c")
    until_shown(
        page, [f"shapes/step_000000{step}/0{n}_s0.mp4" for n in (0, 1) for step in (80, 40)]
    )
    note = page.locator("#samples-compared").inner_text()
    assert note == "A: shapes, ema/main, step 80. B: shapes, ema/main, step 40."


@pytest.mark.parametrize("width", WIDTHS)
def test_raw_weights_are_compared_by_a_divider_that_keys_move(
    open_samples: Any, width: int
) -> None:
    page = open_samples("?preset=shapes&view=compare&mode=swipe&with=preset:raw", width=width)
    until_shown(
        page,
        [f"{preset}/step_00000200/0{n}_s0.mp4" for n in (0, 1) for preset in ("shapes", "raw")],
    )
    divider = page.locator(".samples-divider").first
    divider.fill("25")
    clip = "all => all.map((each) => each.style.clipPath)"
    assert page.eval_on_selector_all(".side-b", clip) == ["inset(0px 0px 0px 25%)"] * 2
    divider.focus()
    page.keyboard.press("ArrowRight")
    assert page.eval_on_selector_all(".side-b", clip) == ["inset(0px 0px 0px 25.5%)"] * 2
    assert page.locator("#samples-page").get_attribute("data-step") == "200"
    box = divider.bounding_box()
    page.mouse.move(box["x"] + 0.255 * box["width"], box["y"] + 20)
    page.mouse.down()
    page.mouse.move(box["x"] + 0.75 * box["width"], box["y"] + 20)
    page.mouse.up()
    assert 70 < float(divider.input_value()) < 80
    assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_the_difference_is_drawn_and_grows_with_the_factor(open_samples: Any) -> None:
    query = "?preset=shapes&view=compare&mode=difference&with=preset:raw&prompt=0"
    page = open_samples(query, plays=True)
    canvas = page.locator(".samples-pair canvas")
    page.wait_for_selector(".samples-pair canvas[data-frame]")
    page.locator("#samples-gain").select_option("1")
    page.wait_for_timeout(300)
    plain = canvas.evaluate(PIXELS)
    page.locator("#samples-gain").select_option("2")
    page.wait_for_timeout(300)
    twice = canvas.evaluate(PIXELS)
    frame = canvas.get_attribute("data-frame")
    page.wait_for_selector(f".samples-pair canvas[data-frame]:not([data-frame='{frame}'])")
    assert 40 < plain[0] < 80
    assert plain[0] * 1.7 < twice[0] <= plain[0] * 2.3
    assert max(plain[1:]) < 30
    assert "2 times as bright" in page.locator("#samples-compared").inner_text()


def test_equal_videos_have_a_black_difference(open_samples: Any) -> None:
    page = open_samples("?preset=shapes&view=compare&mode=difference&with=first&step=40&prompt=0")
    page.wait_for_selector(".samples-pair canvas[data-frame]")
    assert page.locator(".samples-pair canvas").evaluate(PIXELS) == [0, 0, 0]


def test_choosing_another_run_loads_it(open_samples: Any) -> None:
    page = open_samples("?preset=shapes&view=compare&step=80&prompt=0")
    page.locator("#samples-with").select_option("run:twin")
    page.wait_for_selector("#samples-with option[selected][value='run:twin']", state="attached")
    until_shown(page, ["shapes/step_00000080/00_s0.mp4"] * 2)
    assert "B: twin, shapes, step 80." in page.locator("#samples-compared").inner_text()
    assert "with=run%3Atwin" in page.url


def test_a_newer_checkpoint_is_said_while_the_page_is_open(
    tmp_path: Path, serve: Callable[[Path], str], open_page: Any
) -> None:
    run = make_run(tmp_path / "live")
    add_result(run, "shapes", 40, videos=[square(0, (90, 0, 0))], prompts=["a square"])
    page = open_page(f"{serve(tmp_path)}/run/samples/live")
    page.wait_for_selector("#samples-page[data-started]")
    assert page.locator("#samples-new").is_hidden()
    add_result(run, "shapes", 80, videos=[square(0, (0, 90, 0))], prompts=["a square"])
    page.locator("#samples-new a").click()
    page.wait_for_selector("#samples-page[data-step='80']")
