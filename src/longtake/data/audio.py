"""Reads the sound of a clip's window: exactly the samples that belong to its frames.

Where a file has no sound, zeros stand in its place, and are marked: no stream of audio, a gap, a
later start or an earlier end than the video's, packets that cannot be decoded.
"""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from fractions import Fraction

import av
import numpy as np
from av.audio.frame import AudioFrame
from av.audio.resampler import AudioResampler
from av.audio.stream import AudioStream
from av.container import InputContainer
from av.packet import Packet
from numpy.typing import NDArray

from longtake.config import AudioFormat
from longtake.data.clip import Clip, Media
from longtake.data.decode import opened
from longtake.data.window import Window
from longtake.errors import ClipError

_LEAD = Fraction(1)  # seconds decoded before a window: decoders and the resampler settle in less
_TAIL = Fraction(1, 10)  # seconds decoded after it, which the resampler looks ahead
_TOLERANCE = Fraction(2, 1000)  # timestamps of some containers are rounded to milliseconds
_EXACT = Fraction(1, 8000)  # a time base at least as fine gives the place of each sample
_LAYOUTS = {1: "mono", 2: "stereo"}


@dataclass(frozen=True, slots=True)
class AudioWindow:
    """Specification of the sound to read from a clip: that of a window's frames."""

    identity: str  # identity of the clip
    media: Media
    stream_index: int | None  # of the video, whose time base `first` has; None: an image, silent
    first: int | None  # timestamp of the window's first frame; None: `offset` tells its time
    offset: float  # seconds from the video's first frame to the window's; 0 with `first`
    num_samples: int
    rate: int
    channels: int

    @property
    def shape(self) -> tuple[int]:
        """Number of bytes of float32 [channels + 1, num_samples]; workers return bytes."""
        return (4 * (self.channels + 1) * self.num_samples,)


def audio_of(clip: Clip, window: Window, wanted: AudioFormat) -> AudioWindow:
    """Return what to read for the sound of a clip's window."""
    is_timed = bool(window.timestamps)
    return AudioWindow(
        identity=window.identity,
        media=window.media,
        stream_index=window.stream_index if window.kind == "video" else None,
        first=window.timestamps[0] if is_timed else None,
        offset=0.0 if is_timed or not clip.fps else window.indices()[0] / clip.fps,
        num_samples=wanted.num_samples(window.num_frames),
        rate=wanted.rate,
        channels=wanted.channels,
    )


def has_sound(media: Media) -> bool:
    """Return true if a file has a track of sound; what cannot be opened has none."""
    with suppress(ClipError), opened(media) as (container, _):
        return bool(container.streams.audio)
    return False


def read_audio(wanted: AudioWindow) -> NDArray[np.float32]:
    """Read sound as float32 [channels + 1, num_samples], of which the last row is 1 where it is.

    The row is 0 where zeros stand in the place of sound that the file does not have. Samples are
    placed by timestamps, to the nearest one. One channel is repeated; more than two are mixed.

    Raises:
        ClipError: the file cannot be opened, or has no such video.
    """
    sound = np.zeros((wanted.channels + 1, wanted.num_samples), np.float32)
    if wanted.stream_index is None:
        return sound
    with opened(wanted.media, wanted.stream_index) as (container, video):
        stream = next(iter(container.streams.audio), None)
        if stream is None or getattr(stream, "codec_context", None) is None:
            return sound
        stream.codec_context.thread_count = 1
        base, first = video.time_base or Fraction(1), wanted.first
        if first is None:
            first = (video.start_time or 0) + round(Fraction(wanted.offset) / base)
        placed = _PlacedSound(sound, first * base, wanted.rate)
        for frame in _frames(container, stream, first * base, placed.end):
            placed.add(frame)
        placed.finish()
    return sound


def _frames(
    container: InputContainer, stream: AudioStream, begin: Fraction, end: Fraction
) -> Iterator[AudioFrame]:
    """Yield the decoded frames from before a window to its end; what is damaged is left out."""
    base = stream.time_base or Fraction(1)
    lead = begin - _LEAD
    # Of a file whose times are rounded the place of a sample is counted from the beginning.
    if base <= _EXACT and lead > (stream.start_time or 0) * base:
        with suppress(av.FFmpegError):
            container.seek(int(lead / base), stream=stream)
    # A file that cannot be read any further ends here; its video, which is strict, says so.
    with suppress(av.FFmpegError):
        for packet in container.demux(stream):
            for frame in _decoded(packet):
                if frame.pts is not None and frame.time_base is not None:
                    if frame.pts * frame.time_base >= end + _TAIL:
                        return
                    yield frame


def _decoded(packet: "Packet[AudioStream]") -> list[AudioFrame]:
    """Decode a packet; damaged sound is a gap, since the clip's video may still be trained."""
    try:
        return [] if packet.is_corrupt else list(packet.decode())
    except av.FFmpegError:
        return []


class _PlacedSound:
    """Resamples frames, and writes them to the places of a window that they belong to."""

    def __init__(self, sound: NDArray[np.float32], begin: Fraction, rate: int) -> None:
        self._sound, self._begin, self._rate = sound, begin, rate
        self.end = begin + Fraction(sound.shape[1], rate)
        self._resampler: AudioResampler | None = None  # of the frames that follow each other
        self._setup: tuple[object, ...] = ()  # format, channels and rate of these frames
        self._expected = begin  # time at which the next of them begins
        self._place = 0  # of the next resampled one, counted from the window's first

    def add(self, frame: AudioFrame) -> None:
        """Add a frame; one that does not follow the last one begins anew at its own time."""
        assert frame.pts is not None
        assert frame.time_base is not None
        begin = frame.pts * frame.time_base
        setup = frame.format.name, frame.layout.name, frame.sample_rate
        if (
            self._resampler is None
            or setup != self._setup
            or abs(begin - self._expected) > _TOLERANCE
        ):
            self.finish()
            # swresample would make one channel quieter where it makes two of it.
            channels = min(len(self._sound) - 1, frame.layout.nb_channels)
            self._resampler = AudioResampler("fltp", _LAYOUTS[channels], self._rate)
            self._setup, self._expected = setup, begin
            self._place = round((begin - self._begin) * self._rate)
        self._expected += Fraction(frame.samples, frame.sample_rate)
        self._write(self._resampler.resample(frame))

    def finish(self) -> None:
        """Write what the resampler holds back of the frames that follow each other."""
        if self._resampler is not None:
            self._write(self._resampler.resample(None))
            self._resampler = None

    def _write(self, frames: list[AudioFrame]) -> None:
        for frame in frames:
            samples = frame.to_ndarray()
            start, stop = self._place, self._place + samples.shape[1]
            first, end = max(0, start), min(stop, self._sound.shape[1])
            if first < end:
                self._sound[:-1, first:end] = samples[:, first - start : end - start]
                self._sound[-1, first:end] = 1
            self._place = stop
