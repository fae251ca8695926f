"""The sound of clips beside their video: its latents, its loss, a cache of it, and samples."""

import dataclasses
import fnmatch
from collections.abc import Callable
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
import torch
from tests.build import QUIET, losses
from tests.data.build import indexed
from tests.data.sounding import FPS, noise, write_clip
from tests.families import release_ltx2
from tests.families.row import Row
from tests.families.tiny import LONG, Tiny, loss_and_gradients

from longtake.config import Recipe
from longtake.data.encode import Sound, write_video
from longtake.data.loader import Loader
from longtake.errors import RecipeError
from longtake.evaluation.held_out import HeldOut
from longtake.flow import path, solver
from longtake.models.audio import Streams, log_mels
from longtake.models.components import assemble, audio_wanted, outline
from longtake.models.objective import (
    FlowBatch,
    GuidedTarget,
    build_objective,
    training_losses,
)
from longtake.models.review import refuse_sharing
from longtake.planner.devices import CPU
from longtake.planner.memory import outline_step
from longtake.run_dir import RunDirectory
from longtake.sampling.guidance import refuse_wrong_settings
from longtake.sampling.presets import Request, settings_for
from longtake.sampling.videos import write_samples
from longtake.training.inputs import prepare
from longtake.training.latent_cache import cache_ahead
from longtake.training.train import train

_ROW = release_ltx2.ROWS[-1]
_RATE, _FRAMES = 16000, 17


@pytest.fixture
def tiny(tiny_of: Callable[[Row], Tiny]) -> Tiny:
    return tiny_of(_ROW)


@pytest.fixture(scope="module")
def catalog(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of two clips with sound, and of one without."""
    folder = tmp_path_factory.mktemp("sounding")
    for number in range(3):
        sound = noise(2 * _RATE, seed=number) if number < 2 else None
        write_clip(folder / f"{number}.mkv", sound, _RATE)
        (folder / f"{number}.txt").write_text(LONG)
    indexed(folder / "clips.parquet", folder)
    return folder / "clips.parquet"


def _recipe(tiny: Tiny, catalog: Path, out: Path, audio: str = "train", **data: Any) -> Recipe:
    _, height, width = _ROW.bucket
    bucket = {"num_frames": _FRAMES, "height": height, "width": width}
    given = {"catalog": str(catalog), "buckets": [bucket], "windows": 1, "workers": 0, "fps": FPS}
    recipe = tiny.recipe(
        data=given | data,
        model={"audio": audio, "audio_weight": 0.5},
        trainable={"kind": "lora", "rank": 2},
        training={"steps": 2, "global_batch_size": 3},
        watch={"enabled": False},
    )
    return recipe.model_copy(update={"out": out})


def _batch(recipe: Recipe) -> FlowBatch:
    loader = Loader(recipe.data, batch_size=3, seed=recipe.seed, audio=audio_wanted(recipe))
    (batch,) = loader.batches(1)
    return prepare(batch, assemble(recipe, (), None), recipe, torch.device("cpu"))


@torch.no_grad()
def test_latents_are_made_and_heard_as_by_the_pipeline(tiny: Tiny) -> None:
    codec, pipeline = tiny.sampler.components.codec.audio, tiny.released
    assert codec is not None
    vae, sound = pipeline.audio_vae, torch.from_numpy(noise(round(_FRAMES / FPS * _RATE)))[None]
    length = codec.num_latents(_FRAMES / FPS)
    mode = vae.encode(log_mels(sound, _RATE, 160, 16)).latent_dist.mode()
    statistics = vae.latents_mean, vae.latents_std
    expected = pipeline._normalize_audio_latents(pipeline._pack_audio_latents(mode), *statistics)
    found = codec.encode(sound)[:, :length]
    torch.testing.assert_close(found, expected[:, :length])
    assert length == round(_FRAMES / FPS * _RATE / 160 / 4)
    raw = pipeline._denormalize_audio_latents(found, *statistics)
    mels = vae.decode(pipeline._unpack_audio_latents(raw, length, 4)).sample
    torch.testing.assert_close(codec.decode(found), pipeline.vocoder(mels))
    assert codec.output_rate == 24000


def test_silence_in_place_of_sound_has_no_loss(tiny: Tiny, catalog: Path, tmp_path: Path) -> None:
    together, attended, alone = (
        _batch(_recipe(tiny, catalog, tmp_path, audio)) for audio in ("train", "attend", "off")
    )
    # The video's noise and sigma are the same with and without sound.
    assert torch.equal(together.noise, alone.noise)
    assert torch.equal(together.sigmas, alone.sigmas)
    assert not alone.audio
    assert sorted(together.audio["weights"].mean(1).tolist()) == [0, 0.5, 0.5]
    assert not attended.audio["weights"].any()
    silent = int(together.audio["weights"].mean(1).argmin())
    parts = tiny.sampler.components
    unlike = {**together.audio, "latents": together.audio["latents"].clone()}
    unlike["latents"][silent] += 1
    first, video = (
        dataclasses.replace(together, audio=audio)
        for audio in (together.audio, {**together.audio, "weights": torch.zeros(3, 18)})
    )
    own, without = (loss_and_gradients(parts, each) for each in (first, video))
    assert own[""] > without[""]
    name = "audio_proj_out.weight"
    assert own[name].any()
    assert not without[name].any()
    # Of the silent clip alone no gradient reaches what makes sound.
    row = slice(silent, silent + 1)
    told, audio = (
        {key: each[row] for key, each in group.items()}
        for group in (together.conditioning, together.audio)
    )
    latents, of_video, sigmas = (
        each[row] for each in (together.latents, together.noise, together.sigmas)
    )
    one = FlowBatch(latents, of_video, sigmas, told, audio=audio)
    assert not loss_and_gradients(parts, one)[name].any()


def test_a_guided_target_guides_the_audio_too(tiny: Tiny) -> None:
    parts, batch = tiny.sampler.components, tiny.batch()
    told = tiny.told(tiny.sampler, [""])
    batch.no_caption.update({name: told[name] for name in told if name.endswith("_embeds")})
    found = training_losses(GuidedTarget(2.0), parts, batch, "fp32", torch.device("cpu"))
    audio, expected = batch.audio, torch.zeros(2)
    clean, noise = (batch.latents, audio["latents"]), (batch.noise, audio["noise"])
    noisy = map(path.interpolate, clean, noise, [batch.sigmas] * 2)
    with torch.no_grad():
        video, sound = noisy
        own, plain = (
            parts.predict_streams(video, sound, batch.sigmas, each.conditioning)
            for each in (batch, batch.without_captions())
        )
    for part in range(2):
        target = plain[part] + 2 * (noise[part] - clean[part] - plain[part])
        errors = (own[part] - target).square()
        weights = audio["weights"][..., None] if part else torch.ones(())
        expected += (errors * weights).flatten(1).mean(1)
    torch.testing.assert_close(found, expected)


def test_only_the_video_learns_beside_sound_that_it_attends_to(tiny: Tiny) -> None:
    """All that is trained gets a gradient, and the audio's own weights are not trained."""
    recipe = tiny.recipe(model={"audio": "attend"}, trainable={"kind": "full"})
    step = outline_step(recipe, CPU)
    assert not step.tracer.watch_gradients().unreached()
    parameters = dict(step.components.model.named_parameters())
    trained = {name for name, each in parameters.items() if each.requires_grad}
    assert any("audio_to_video_attn" in name for name in trained)
    of_audio = ("audio_*", "*.audio_[!t]*", "*.video_to_audio_*")
    assert not {name for name in trained for like in of_audio if fnmatch.fnmatch(name, like)}
    lora = outline(tiny.recipe(model={"audio": "attend"}, trainable={"kind": "lora"})).model
    layers = {name for name, each in lora.named_parameters() if each.requires_grad}
    assert {name.split(".")[2] for name in layers} == {"attn1", "attn2", "audio_to_video_attn"}


def test_sound_from_a_cache_trains_bitwise_alike(tiny: Tiny, catalog: Path, tmp_path: Path) -> None:
    """Its entries are there beside those of a cache of the video alone, which stay valid."""
    cache = {"cache": str(tmp_path / "cache")}
    plain = _recipe(tiny, catalog, tmp_path / "plain")
    cached = _recipe(tiny, catalog, tmp_path / "cached", **cache)
    cache_ahead(_recipe(tiny, catalog, tmp_path / "off", "off", **cache), QUIET)
    facts = cache_ahead(cached, QUIET)
    assert facts["latents"] == {"present": 3, "computed": 0}
    assert facts["conditioning"] == {"present": 0, "computed": 3}
    for recipe in (plain, cached):
        train(recipe, console=QUIET)
    assert losses(cached) == losses(plain)
    assert len(losses(plain)) == 2


def test_the_held_out_loss_hears_the_clips(tiny: Tiny, catalog: Path, tmp_path: Path) -> None:
    found = []
    for audio in ("train", "attend"):
        recipe = _recipe(tiny, catalog, tmp_path / audio, audio)
        evaluation = recipe.evaluation.model_copy(update={"held_out": catalog})
        held_out = HeldOut.open(
            recipe.model_copy(update={"evaluation": evaluation}), RunDirectory(tmp_path / audio)
        )
        assert held_out is not None
        sampler = dataclasses.replace(tiny.sampler, recipe=recipe)
        found.append(held_out.loss(sampler)["mean"])
    assert found[0] > found[1]


def test_samples_have_their_sound(tiny: Tiny, tmp_path: Path) -> None:
    sampler, out = tiny.sampler, tmp_path / "a.mp4"
    settings, bucket = settings_for(sampler.recipe, num_inference_steps=1)
    write_samples(sampler, [LONG], 3, settings, bucket, out, 1, QUIET)
    with av.open(str(out)) as container:
        (track,) = container.streams.audio
        assert (track.rate, track.layout.name) == (24000, "stereo")
        assert len(list(container.decode(video=0))) == bucket.num_frames
    _, (sound,) = sampler.sample_with_sound([Request(LONG, 3)], settings, bucket)
    assert sound is not None
    with av.open(str(out)) as container:
        heard = np.concatenate([each.to_ndarray() for each in container.decode(audio=0)], axis=1)
    assert abs(heard.shape[1] - sound.samples.shape[1]) <= 1024


def test_written_sound_is_read_again(tmp_path: Path) -> None:
    times = np.arange(24000) / 24000
    tone = 0.5 * np.sin(2 * np.pi * 440 * times).astype(np.float32)
    frames = np.zeros((24, 32, 32, 3), np.uint8)
    write_video(tmp_path / "a.mp4", frames, 24, sound=Sound(np.stack([tone, tone]), 24000))
    with av.open(str(tmp_path / "a.mp4")) as container:
        heard = np.concatenate([each.to_ndarray() for each in container.decode(audio=0)], axis=1)
    assert np.abs(heard[0, 2000:20000] - tone[2000:20000]).max() < 0.02


def test_sound_of_its_own_shift_takes_steps_of_its_own(tiny: Tiny) -> None:
    """On a path of one velocity each part ends where its own sigmas lead."""
    parts = tiny.sampler.components
    shifted = dataclasses.replace(parts.defaults, audio_shift=0.25)
    components = dataclasses.replace(parts, defaults=shifted)
    sampler = dataclasses.replace(tiny.sampler, components=components)
    settings, bucket = settings_for(sampler.recipe, num_inference_steps=3)
    streams, sigmas = sampler.streams(bucket), [0.8, 0.5, 0.2]
    assert streams is not None
    velocity = sampler._at_own_sigmas(lambda x, _: torch.ones_like(x), streams, sigmas)
    ended = solver.integrate(velocity, streams.join(*map(torch.zeros, _sizes(streams))), sigmas)
    video, audio = streams.split(ended)
    assert torch.allclose(video, torch.tensor(-0.6))
    assert torch.allclose(audio, sampler.components.audio_sigmas(torch.tensor([0.2])) - 0.5)
    unlike = settings.model_copy(update={"solver": "heun"})
    with pytest.raises(RecipeError, match=r'Set sampling\.solver = "euler"'):
        refuse_wrong_settings(components, unlike)  # as a plan does


def _sizes(streams: Streams) -> list[tuple[int, ...]]:
    return [(1, *streams.video), (1, *streams.audio)]


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"model": {"audio": None}}, r'Set model\.audio = "train" to learn both, "attend"'),
        ({"data": {"fps": None}}, r"data\.fps is unset\. Set it, such as data\.fps = 24"),
        (
            {"codec": {"kind": "pixels", "pretrained": None}},
            'model.audio is "train", and a codec of the kind pixels has no part for sound',
        ),
        ({"codec": {"pretrained": None}}, "Audio needs the audio_vae of a release: name it in"),
        (
            {"objective": {"kind": "prior_preservation", "options": {"catalogs": ["catalog"]}}},
            'has a loss of the video alone, and model.audio is "train". Set it to "attend"',
        ),
        ({"parallel": {"context": 2}}, "the family ltx2 cannot: with model.audio"),
    ],
)
def test_what_a_recipe_with_sound_must_say(
    sections: dict[str, Any], message: str, tiny: Tiny
) -> None:
    recipe = tiny.recipe(**sections)
    with pytest.raises(RecipeError, match=message):  # noqa: PT012 - whichever refuses it
        parts = outline(recipe)
        build_objective(recipe)
        refuse_sharing(parts, recipe)
