"""What MiniMax H3 adds to what each family promises: its text, its codecs, video with its sound."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from diffusers.modular_pipelines.minimax_h3 import decoders, encoders
from safetensors.torch import save_file
from tests.families import release_minimax_h3
from tests.families.row import Row
from tests.families.tiny import Tiny
from torch import Tensor

from longtake.config import Bucket, CodecSection, TrainableSection
from longtake.errors import ModelError, RecipeError
from longtake.models.audio import MiniMaxH3AudioCodec
from longtake.models.base import family_of
from longtake.models.codec import MiniMaxH3Codec, build_codec
from longtake.models.components import outline
from longtake.models.lora_files import load_lora, read_lora
from longtake.models.minimax_h3 import MiniMaxH3, MiniMaxH3Text
from longtake.models.trainable import lora_state

(_ROW,) = release_minimax_h3.ROWS
_COLOURS = {"pixel_mean": (0.485, 0.456, 0.406), "pixel_std": (0.229, 0.224, 0.225)}


def _after(step: Any, pipeline: Any, **given: Any) -> Any:
    """The state of a pipeline after a step."""
    state = SimpleNamespace(**given)
    step.get_block_state, step.set_block_state = lambda _: state, lambda *_: None
    step(SimpleNamespace(_execution_device="cpu", **pipeline), None)
    return state


def test_a_text_is_cut_and_no_caption_is_a_space() -> None:
    """Of the encoder it takes the state after layer 50, of which there must be more."""
    seen = []

    def encode(input_ids: Tensor, **_: Any) -> Any:
        seen.append(input_ids[0].tolist())
        states = [input_ids[..., None].expand(-1, -1, 3).float() + layer for layer in range(53)]
        return SimpleNamespace(hidden_states=states)

    config = SimpleNamespace(num_hidden_layers=52)
    config.get_text_config = lambda: config
    pipeline = SimpleNamespace(
        tokenizer=lambda text, **_: SimpleNamespace(input_ids=[ord(each) for each in text]),
        text_encoder=SimpleNamespace(model=encode, config=config, device="cpu"),
    )
    text = MiniMaxH3Text(has_lengths=True)
    encoded = text.encode(pipeline, ["abcdef", "", "ab"], 4, {})
    assert seen == [[97, 98, 99, 100], [32], [97, 98]]
    assert encoded["prompt_length"].tolist() == [4, 1, 2]
    states = [[147, 148, 149, 150], [82, 0, 0, 0], [147, 148, 0, 0]]
    assert encoded["prompt_embeds"][:, :, 0].tolist() == states
    config.num_hidden_layers = 50
    with pytest.raises(ModelError, match=r"after layer 50 of its Qwen3-VL.* has 50 layers"):
        text.encode(pipeline, ["a"], 4, {})


@torch.no_grad()
@pytest.mark.parametrize("frames", [22, 39])
def test_a_video_is_encoded_and_decoded_as_by_the_pipeline(frames: int) -> None:
    """In the autoencoder's own tiles, which wide frames have."""
    torch.manual_seed(0)
    vae = release_minimax_h3.autoencoder()
    codec, bucket = MiniMaxH3Codec(vae), Bucket(num_frames=frames, height=32, width=288)
    pixels = torch.randint(0, 256, (1, 3, frames, 32, 288), dtype=torch.uint8)
    latents = codec.encode(pixels)
    assert latents.shape[2:] == codec.latent_shape(bucket)
    mean, std = (torch.tensor(each).view(1, 3, 1, 1, 1) for each in _COLOURS.values())
    mode = vae.encode((pixels / 255 - mean) / std).latent_dist.mode()
    centre, scale = (
        torch.tensor(vae.config[f"latents_{name}"]).view(1, -1, 1, 1, 1) for name in ("mean", "std")
    )
    torch.testing.assert_close(latents, (mode - centre) / scale, rtol=1e-4, atol=1e-5)
    processor = SimpleNamespace(postprocess_video=lambda video, output_type: video)
    pipeline = {"vae": vae, "video_processor": processor, **_COLOURS}
    step = decoders.MiniMaxH3VideoDecodeStep()
    shown = _after(step, pipeline, latents=latents, output_type="pt").videos
    for tiles in (False, True):
        decoded = codec.decode(latents, tiles=tiles)
        assert decoded.shape == pixels.shape
        assert (decoded.float() - shown * 255).abs().max() <= 0.51
    assert vae.use_tiling


@pytest.mark.parametrize(
    ("sizes", "nearest"),
    [((1, 64, 96), "22 frames of 96x64"), ((31, 64, 96), "39 frames"), ((124, 70, 96), "96x64")],
)
def test_clips_that_it_cannot_encode_are_refused_with_the_nearest(
    sizes: tuple[int, int, int], nearest: str
) -> None:
    section = CodecSection(kind="autoencoder", config=release_minimax_h3.CODEC)
    codec = build_codec(section, MiniMaxH3.frozen.codec)
    bucket = Bucket(**dict(zip(("num_frames", "height", "width"), sizes, strict=True)))
    with pytest.raises(RecipeError, match=rf"by 32 and 17 n \+ 5 frames.* is .*{nearest}"):
        codec.latent_shape(bucket, (1, 2, 2))


@torch.no_grad()
def test_sound_is_encoded_and_decoded_as_by_the_pipeline() -> None:
    """A video of 56 frames has fewer latents than its samples give."""
    torch.manual_seed(0)
    vae = release_minimax_h3.sound_autoencoder()
    codec = MiniMaxH3AudioCodec(vae)
    assert (codec.rate, codec.dim) == (32000, 64)
    counts = [codec.num_latents(frames / 24) for frames in (22, 39, 56, 124)]
    assert counts == [37, 65, 93, 207]
    sound = torch.rand(1, 2, 74667) * 2 - 1
    latents = codec.encode(sound)
    assert latents.shape == (1, 94, 64)
    pipeline = {"audio_vae": vae, "audio_latent_channels": 32, "audio_sampling_rate": 32000}
    heard = [SimpleNamespace(kind="audio", has_audio=True, audio=sound[0])]
    step = encoders.MiniMaxH3Ref2VAReferenceEncoderStep()
    (rows,) = _after(step, pipeline, normalized_references=heard).audio_condition_latents
    rows = rows.unflatten(0, (2, -1))
    torch.testing.assert_close(latents[0], rows.transpose(0, 1).flatten(1))
    found = _after(decoders.MiniMaxH3AudioDecodeStep(), pipeline, audio_latents=rows.mT).audio
    assert found.shape == (1, 2, 94 * 800)
    torch.testing.assert_close(codec.decode(latents), found)


def test_layers_of_sound_that_has_no_loss_are_frozen(tiny_of: Callable[[Row], Tiny]) -> None:
    """No token of the video depends on these; on all others it does."""
    tiny = tiny_of(_ROW)
    untrained = {
        audio: family_of(tiny.recipe(model={"audio": audio}).model).block.untrained_parameters(
            tiny.sampler.components.model
        )
        for audio in ("train", "attend")
    }
    names = ["audio_proj_out.weight", "audio_proj_out.bias"]
    assert untrained == {"train": [], "attend": names}


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"model": {"audio": "off"}}, r'is "off", but MiniMax H3 has video and audio in one sequ'),
        ({"model": {"subfolder": "transformer_ref"}}, "makes videos from references, which longt"),
        ({"data": {"fps": 16.0}}, r"24 frames a second, and data.fps / data.frame_stride is 16"),
        (
            {"data": {"conditioning": {"where": {"kind": "mask", "path": "m"}}}},
            "where is a mask, and",
        ),
        ({"data": {"fps": 48.0, "frame_stride": 3}}, "data.frame_stride is 16. Set data.fps = 24"),
    ],
)
def test_what_a_recipe_must_say(
    keys: dict[str, Any], message: str, tiny_of: Callable[[Row], Tiny]
) -> None:
    with pytest.raises(RecipeError, match=message):
        outline(tiny_of(_ROW).recipe(**keys))


def test_a_lora_of_other_trainers_is_read(tiny_of: Callable[[Row], Tiny], tmp_path: Path) -> None:
    """As ai-toolkit stores it, with one layer for queries, keys and values, and the gate first."""
    targets = ("*.to_q", "*.to_k", "*.to_v", "ff.net.0.proj")
    parts = tiny_of(_ROW).training(TrainableSection(kind="lora", rank=2, targets=targets))
    family, stored = parts.family, lora_state(parts.model)
    file = tmp_path / "theirs.safetensors"
    named = family.comfyui_lora(stored)
    save_file({name: each.contiguous() for name, each in named.items()}, file)
    wide = tiny_of(_ROW).training(TrainableSection(kind="lora", rank=6, targets=targets))
    load_lora(read_lora(file, wide.model, family), wide.model)
    read = lora_state(wide.model)
    assert read.keys() == stored.keys()
    for down in [name for name in stored if ".lora_A." in name]:
        up = down.replace(".lora_A.", ".lora_B.")
        torch.testing.assert_close(read[up] @ read[down], stored[up] @ stored[down])
