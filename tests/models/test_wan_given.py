"""Wan continues a video: its first frames are given instead of one, as the pipeline gives one."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.families import release_wan
from tests.models.tiny import make_recipe
from tests.sampling.build import make_sampler, sample_latents
from torch import Tensor

from longtake import config
from longtake.config import Recipe
from longtake.data.encode import write_video
from longtake.errors import DataError, RecipeError
from longtake.models import conditioning
from longtake.models.components import assemble, outline
from longtake.models.conditioning import outline_conditioning
from longtake.models.objective import FlowBatch, flow_losses
from longtake.sampling.presets import Request

_Make = Callable[[Path], None]
_SIZES: dict[_Make, int] = {
    release_wan.make_i2v: 32,
    release_wan.make_i2v_clip: 32,
    release_wan.make_ti2v: 64,
}
_PICTURE = {"kind": "picture", "path": "{stem}.png"}
_VIDEO = {"kind": "video", "frames": 5}


@pytest.fixture(scope="module")
def releases(tmp_path_factory: pytest.TempPathFactory) -> Callable[[_Make], Path]:
    """The folder of a tiny release; each is made once."""
    folder, made = tmp_path_factory.mktemp("releases"), dict[_Make, Path]()

    def of(make: _Make) -> Path:
        if make not in made:
            torch.manual_seed(0)
            made[make] = folder / make.__name__
            make(made[make])
        return made[make]

    return of


def _recipe(release: Path, size: int, **inputs: Mapping[str, Any]) -> Recipe:
    return make_recipe(
        "wan",
        (9, size, size),
        release,
        data={"conditioning": inputs},
        text={"max_tokens": 512},
        flow={"shift": 3.0},
    )


def _frames(count: int, size: int) -> Tensor:
    """[2, 3, F, H, W] of noise."""
    generator = torch.Generator().manual_seed(3)
    return torch.randint(0, 256, (2, 3, count, size, size), generator=generator, dtype=torch.uint8)


@pytest.mark.parametrize("make", _SIZES, ids=lambda make: make.__name__)
@torch.no_grad()
def test_several_given_frames_are_as_one_but_more(
    releases: Callable[[_Make], Path], make: _Make
) -> None:
    """A video of one frame is the picture, bit for bit; of five, it has two frames of latents."""
    size = _SIZES[make]
    recipe = _recipe(releases(make), size, first=_VIDEO)
    parts, bucket = assemble(recipe, (), None), recipe.data.buckets[0]
    frames = _frames(5, size)

    def told(section: Mapping[str, Any], given: Tensor) -> dict[str, Tensor]:
        sections = {"first": config.ConditioningSection.model_validate(section)}
        return conditioning.condition_on(parts, sections, {"first": given}, bucket)

    picture = told(_PICTURE, frames[:, :, :1])
    one = told({"kind": "video", "frames": 1}, frames[:, :, :1])
    assert one.keys() == picture.keys()
    assert all(torch.equal(one[name], each) for name, each in picture.items())
    five = told(_VIDEO, frames)
    own = parts.codec.encode(frames)
    latents = five["first_latents"]
    if make is not release_wan.make_ti2v:
        mask, latents = latents[:, :4], latents[:, 4:]
        assert torch.equal(mask[:, :, :2], torch.ones(2, 4, 2, 4, 4))
        assert not mask[:, :, 2:].any()
        latents = latents[:, :, :2]  # what is grey follows
    torch.testing.assert_close(latents, own, rtol=1e-4, atol=1e-4)
    if "first_embeds" in five:  # CLIP sees the first of them
        assert torch.equal(five["first_embeds"], picture["first_embeds"])
    outlined = outline_conditioning(outline(recipe), recipe, bucket, batch_size=2)
    assert {name: outlined[name].shape for name in five} == {
        name: each.shape for name, each in five.items()
    }


@torch.no_grad()
def test_given_frames_of_ti2v_have_time_0_and_no_loss(releases: Callable[[_Make], Path]) -> None:
    recipe = _recipe(releases(release_wan.make_ti2v), 64, first=_VIDEO)
    parts, bucket = assemble(recipe, (), None), recipe.data.buckets[0]
    sections = recipe.data.conditioning
    given = {"first": _frames(5, 64)}
    told = conditioning.condition_on(parts, sections, given, bucket)
    told |= parts.text.encode(["a red circle", "a blue square"])
    generator = torch.Generator().manual_seed(4)
    latents, noise, other = torch.randn(3, 2, 48, 3, 4, 4, generator=generator)
    other[:, :, 2:] = noise[:, :, 2:]
    sigmas = torch.tensor([0.3, 0.8])
    predict = parts.predict_velocity
    velocity = predict(noise, sigmas, told)
    assert torch.equal(predict(other, sigmas, told), velocity)  # what is noisy there is not seen
    model: Any = parts.model
    times = torch.zeros(2, 3, 2, 2)  # tokens of 1 x 2 x 2 latents
    times[:, 2] = 1000 * sigmas[:, None, None]
    whole = torch.cat([told["first_latents"], noise[:, :, 2:]], dim=2)
    expected = model(whole, times.flatten(1), told["prompt_embeds"]).sample
    torch.testing.assert_close(velocity, expected)

    def losses(clips: Tensor) -> Tensor:
        batch = FlowBatch(clips, noise, sigmas, told)
        return flow_losses(parts, batch, "fp32", torch.device("cpu"))

    changed = latents.clone()
    changed[:, :, :2] += 1
    assert torch.equal(losses(changed), losses(latents))
    changed[:, :, 2:] += 1
    assert (losses(changed) != losses(latents)).all()


def test_a_file_is_continued_in_sampling(releases: Callable[[_Make], Path], tmp_path: Path) -> None:
    """By its first frames, which the sampled latents keep; a file that is too short is refused."""
    sampler = make_sampler(_recipe(releases(release_wan.make_ti2v), 64, first=_VIDEO))
    random = np.random.default_rng(0)
    for name, count in (("long", 12), ("short", 3)):
        frames = random.integers(0, 256, (count, 64, 64, 3), np.uint8)
        write_video(tmp_path / f"{name}.mp4", frames, fps=8)
    settings = {"num_inference_steps": 2, "guidance_scale": 1.0}
    request = Request("a red circle", 3, {"first": tmp_path / "long.mp4"})
    latents = sample_latents(sampler, request, **settings)
    assert latents.shape == (1, 48, 3, 4, 4)
    told = sampler._guidance([request], sampler.recipe.data.buckets[0], 1.0, "").conditional
    torch.testing.assert_close(latents[:, :, :2], told["first_latents"], rtol=0, atol=0)
    short = Request("", 3, {"first": tmp_path / "short.mp4"})
    with pytest.raises(DataError, match=r"short\.mp4 .*ends before frame 3; 5 frames are needed"):
        sample_latents(sampler, short, **settings)


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        (
            {"first": {"frames": 9}},
            r"first\.frames = 9, but a bucket has 9 frames: nothing would be",
        ),
        ({"first": {"frames": 6}}, r"first\.frames = 6 cannot be encoded alone\. .* The nearest"),
        ({"first": {"path": "{stem}.mp4"}}, r'has it as "video".* Or take it from the clip: .*s ='),
        ({"first": {"frames": 1}, "last": {"frames": 5}}, r'image named last .* has it as "video"'),
    ],
)
def test_frames_that_cannot_be_continued_are_refused(
    releases: Callable[[_Make], Path], inputs: dict[str, dict[str, Any]], message: str
) -> None:
    videos = {name: {"kind": "video", **keys} for name, keys in inputs.items()}
    with pytest.raises(RecipeError, match=message):
        outline(_recipe(releases(release_wan.make_i2v), 32, **videos))
