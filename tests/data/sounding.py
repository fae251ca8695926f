"""Videos with sound, written by PyAV, and what is read of them."""

from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
from numpy.typing import NDArray

from longtake.config import AudioFormat
from longtake.data.audio import audio_of, read_audio
from longtake.data.buckets import window_of
from longtake.data.clip import Clip, Media
from longtake.data.decode import probe
from longtake.data.window import crop

FPS = 24
Samples = NDArray[np.float32]


def write_clip(
    path: Path,
    sound: Samples | None,
    rate: int = 32000,
    *,
    num_frames: int = 48,
    codec: str = "flac",
    starts: Sequence[tuple[float, int, int]] = (),
    video_start: float = 0.0,
) -> Path:
    """A video of small grey frames with sound [channels, N].

    `starts` places parts of it: seconds at which one begins, its first sample and its end.
    """
    with av.open(path, "w") as container:
        video = container.add_stream("libx264", rate=FPS, options={"bf": "0", "g": "6"})
        video.width = video.height = 32
        track: Any = None
        if sound is not None:
            layout = {1: "mono", 2: "stereo", 6: "5.1"}[len(sound)]
            track = container.add_stream(codec, rate=rate, layout=layout)
        for number in range(num_frames):
            grey = np.full((32, 32, 3), 4 * number % 256, np.uint8)
            frame = av.VideoFrame.from_ndarray(grey, "rgb24")
            frame.time_base = Fraction(1, 24000)
            frame.pts = round(video_start * 24000) + number * 1000
            container.mux(video.encode(frame))
        container.mux(video.encode(None))
        if track is not None and sound is not None:
            for seconds, first, end in starts or [(0.0, 0, sound.shape[1])]:
                pcm = np.round(sound[:, first:end] * 32767).astype(np.int16)
                packed = np.ascontiguousarray(pcm.T.reshape(1, -1))
                audio = av.AudioFrame.from_ndarray(packed, format="s16", layout=layout)
                audio.sample_rate, audio.time_base = rate, Fraction(1, rate)
                audio.pts = round(seconds * rate)
                container.mux(track.encode(audio))
            container.mux(track.encode(None))
    return path


def noise(num_samples: int, channels: int = 2, seed: int = 0) -> Samples:
    random = np.random.default_rng(seed)
    return (0.3 * random.uniform(-1, 1, (channels, num_samples))).astype(np.float32)


def clip_of(path: Path) -> Clip:
    return Clip(media=Media(str(path)), caption="", **probe(Media(str(path))).clip_fields)


def read_sound(
    path: Path, start: int = 0, num_frames: int = 24, rate: int = 32000
) -> tuple[Samples, Samples]:
    """The sound of a window [2, N], and where there is any [N]."""
    clip = clip_of(path)
    frames = range(start, start + num_frames)
    window = window_of(clip, frames, crop(32, 32, clip), 32, 32)
    found = read_audio(audio_of(clip, window, AudioFormat(rate, 2, FPS)))
    return found[:-1], found[-1]
