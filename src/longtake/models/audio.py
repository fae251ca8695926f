"""Codecs between the sound of clips and audio latents, and their place beside a video's latents.

Audio latents are [B, L, D]: L positions in time, D numbers at each.
"""

import importlib
import math
import warnings
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from longtake.config import AUDIO, AudioFormat, Bucket, Recipe
from longtake.errors import RecipeError, SamplingError
from longtake.models import deferred_init, numerics, pretrained, releases

_FFT = 1024  # samples of a window of LTX-2's spectrogram
_LEAST_MEL = 1e-5
_MELS_BELOW_1000 = 15  # of Slaney's scale: linear to 1000 Hz, and 27 for each factor of 6.4 above
_PER_LOG = 27 / math.log(6.4)


class AudioCodec(ABC):
    """Codec between sound [B, channels, N] in fp32 and latents [B, L, D], normalised, in fp32.

    It is made of the frozen modules of a release, in the order of `PipelinePart.audio`.
    """

    rate: int
    """Samples per second of the sound that is encoded."""
    channels: int = 2
    output_rate: int
    """Samples per second of decoded sound."""
    dim: int
    """D."""

    def __init__(self, *parts: nn.Module) -> None:
        self.parts: list[Any] = [each.eval().requires_grad_(False) for each in parts]

    @abstractmethod
    def num_latents(self, seconds: float) -> int:
        """Return L for a video of this length, as the family's pipeline rounds it."""

    @abstractmethod
    def encode(self, sound: Tensor) -> Tensor:
        """Encode sound to the mode of the posterior; positions beyond `num_latents` are cut off."""

    @abstractmethod
    def decode(self, latents: Tensor) -> Tensor:
        """Decode latents to sound in fp32, at `output_rate`."""


class LTX2AudioCodec(AudioCodec):
    """Codec of LTX-2: log mels of both channels, an `AutoencoderKLLTX2Audio`, and a vocoder.

    The mels are those of Lightricks' trainer: magnitudes of a Hann window of 1024 samples, centred
    and reflected at the ends, in triangles of Slaney's scale and norm; log of at least 1e-5.
    """

    def __init__(self, autoencoder: Any, vocoder: Any) -> None:
        super().__init__(autoencoder, vocoder)
        config = autoencoder.config
        self.rate, self._hop = config["sample_rate"], config["mel_hop_length"]
        self._channels, self._bins = config["latent_channels"], config["mel_bins"]
        self._per_latent: int = autoencoder.temporal_compression_ratio
        self.dim = self._channels * (self._bins // autoencoder.mel_compression_ratio)
        self.output_rate = vocoder.config["output_sampling_rate"]

    def num_latents(self, seconds: float) -> int:
        # In the order of the pipeline's arithmetic, so that the same length is rounded alike.
        return max(1, round(seconds * (self.rate / self._hop / float(self._per_latent))))

    @torch.no_grad()
    def encode(self, sound: Tensor) -> Tensor:
        mels = log_mels(sound, self.rate, self._hop, self._bins)
        autoencoder = self.parts[0]
        mode = autoencoder.encode(mels.to(autoencoder.dtype)).latent_dist.mode().float()
        latents = mode.transpose(1, 2).flatten(2)
        return (latents - autoencoder.latents_mean) / autoencoder.latents_std

    @torch.no_grad()
    def decode(self, latents: Tensor) -> Tensor:
        autoencoder, vocoder = self.parts
        raw = latents.float() * autoencoder.latents_std + autoencoder.latents_mean
        size = *raw.shape[:2], self._channels, -1
        mels = autoencoder.decode(raw.reshape(size).transpose(1, 2)).sample
        sound: Tensor = vocoder(mels)
        return sound.float()


class MiniMaxH3AudioCodec(AudioCodec):
    """Codec of MiniMax H3: an `AutoencoderKLMiniMaxH3Audio`, which takes one channel at a time.

    Of a position in time the latents of the left channel come before those of the right.
    """

    def __init__(self, autoencoder: Any) -> None:
        super().__init__(autoencoder)
        config = autoencoder.config
        self.rate = self.output_rate = config["sampling_rate"]
        self.dim = self.channels * config["latent_channels"]
        self._statistics = torch.tensor([config["latents_mean"], config["latents_std"]])

    def num_latents(self, seconds: float) -> int:
        return round(seconds * (self.rate // self.parts[0].hop_length))

    @torch.no_grad()
    def encode(self, sound: Tensor) -> Tensor:
        mode = self.parts[0].encode(sound.flatten(0, 1)[:, None]).latent_dist.mode().float()
        mean, deviation = self._statistics[:, :, None].to(mode)
        latents: Tensor = (mode - mean) / deviation
        return latents.reshape(len(sound), self.dim, -1).mT

    @torch.no_grad()
    def decode(self, latents: Tensor) -> Tensor:
        mean, deviation = self._statistics[:, :, None].to(latents)
        raw = latents.mT.reshape(-1, self.dim // self.channels, latents.shape[1])
        sound: Tensor = self.parts[0].decode(raw * deviation + mean).sample
        return sound.float().reshape(len(latents), self.channels, -1)


def log_mels(sound: Tensor, rate: int, hop: int, num_bins: int) -> Tensor:
    """Return the log-mel spectrogram [B, C, T, bins] of sound [B, C, N], T = 1 + N // hop."""
    sound = F.pad(sound, (0, max(0, _FFT - sound.shape[2])))  # fewer could not be reflected
    window = torch.hann_window(_FFT, device=sound.device)
    spectrum = torch.stft(
        sound.flatten(0, 1), _FFT, hop, window=window, pad_mode="reflect", return_complex=True
    )
    mels = mel_filters(rate, num_bins).to(sound.device) @ spectrum.abs()
    return mels.clamp(min=_LEAST_MEL).log().mT.reshape(*sound.shape[:2], -1, num_bins)


def mel_filters(rate: int, num_bins: int) -> Tensor:
    """Return triangles [bins, frequencies] of equal area between 0 Hz and half the rate.

    They are of equal width on Slaney's mel scale (Auditory Toolbox, 1998).
    """
    highest = rate / 2
    last = 0.015 * highest
    if highest > 1000:
        last = _MELS_BELOW_1000 + _PER_LOG * math.log(highest / 1000)
    mels = torch.linspace(0, last, num_bins + 2, dtype=torch.float64)
    above = 1000 * ((mels - _MELS_BELOW_1000) / _PER_LOG).exp()
    hertz = torch.where(mels < _MELS_BELOW_1000, mels / 0.015, above)[:, None]
    frequencies = torch.linspace(0, highest, _FFT // 2 + 1, dtype=torch.float64)
    low, middle, high = hertz[:-2], hertz[1:-1], hertz[2:]
    rising, falling = (frequencies - low) / (middle - low), (high - frequencies) / (high - middle)
    return (torch.minimum(rising, falling).clamp(min=0) * 2 / (high - low)).float()


_AUDIO_CODECS: dict[str, type[AudioCodec]] = {
    "AutoencoderKLLTX2Audio": LTX2AudioCodec,
    "AutoencoderKLMiniMaxH3Audio": MiniMaxH3AudioCodec,
}
"""Audio codecs by the class of their autoencoder, the first of `PipelinePart.audio`."""


def build_audio_codec(
    parts: Sequence[pretrained.PipelinePart], where: str | None, *, outlined: bool
) -> AudioCodec:
    """Build a release's audio codec in fp32 on the CPU, or its outline on the meta device.

    Raises:
        RecipeError: no release is named.
        ModelError: a part cannot be loaded.
    """
    if where is None:
        raise RecipeError(
            f"Audio needs the {parts[0].folder} of a release: name it in codec.pretrained, or set "
            'model.audio = "off".'
        )
    found = [releases.find_part(where, part) for part in parts]
    modules = []
    for part in found:
        part_class = getattr(importlib.import_module(part.module), part.class_name)
        load = deferred_init.on_meta if outlined else pretrained.load_pretrained
        with warnings.catch_warnings():  # diffusers' own use of torch's older weight_norm
            warnings.filterwarnings("ignore", ".*weight_norm.* is deprecated", FutureWarning)
            modules.append(load(part_class, where, part.folder))
        numerics.keep_weights_in(modules[-1], torch.float32)
    return _AUDIO_CODECS[found[0].class_name](*modules)


def encode_sound(codec: AudioCodec, sound: Tensor, num_latents: int) -> dict[str, Tensor]:
    """Encode the sound [B, channels + 1, N] of clips, whose last row is 1 where there is any.

    Returns `audio_latents` [B, L, D], and `audio_present` [B, L]: 1 for positions all of whose
    samples are there, and 0 where silence stands in the place of any. Clips are encoded one by
    one, because convolutions round differently in other batch sizes.
    """
    latents = torch.cat([codec.encode(each[None, :-1])[:, :num_latents] for each in sound])
    missing = F.adaptive_max_pool1d(1 - sound[:, -1:], num_latents)
    return {"audio_latents": latents, "audio_present": 1 - missing[:, 0]}


def take_audio(
    recipe: Recipe, codec: AudioCodec | None, inputs: dict[str, Tensor], bucket: Bucket
) -> dict[str, Tensor]:
    """Take the sound out of the inputs of a batch, and encode it; {} if there is none."""
    sound, shape = inputs.pop(AUDIO, None), audio_shape(recipe, codec, bucket)
    if codec is None or sound is None or shape is None:
        return {}
    return encode_sound(codec, sound, shape[0])


def training_audio(
    recipe: Recipe, encoded: dict[str, Tensor], noise: Tensor | None
) -> dict[str, Tensor]:
    """Take the encoded audio out of the conditioning of a batch, as the objective gets it.

    It is `longtake.models.objective.FlowBatch.audio`; {} for the video alone.
    """
    if noise is None:
        return {}
    weight = recipe.model.audio_weight if recipe.model.audio == "train" else 0.0
    present = encoded.pop("audio_present")
    return {"latents": encoded.pop("audio_latents"), "noise": noise, "weights": present * weight}


def audio_format(recipe: Recipe, codec: AudioCodec | None) -> AudioFormat | None:
    """Return the sound that the model takes beside each window; None for the video alone."""
    if codec is None or recipe.data.fps is None:
        return None
    return AudioFormat(codec.rate, codec.channels, recipe.data.fps / recipe.data.frame_stride)


def audio_shape(recipe: Recipe, codec: AudioCodec | None, bucket: Bucket) -> tuple[int, int] | None:
    """Return L and D of the audio latents of a clip in a bucket; None for the video alone."""
    wanted = audio_format(recipe, codec)
    if codec is None or wanted is None:
        return None
    return codec.num_latents(wanted.seconds(bucket.num_frames)), codec.dim


class Streams(NamedTuple):
    """Shapes of a sample's latents of video and audio, which a solver steps as one flat tensor."""

    video: tuple[int, ...]
    audio: tuple[int, ...]

    def join(self, video: Tensor, audio: Tensor) -> Tensor:
        return torch.cat([video.flatten(1), audio.flatten(1)], dim=1)

    def split(self, joined: Tensor) -> tuple[Tensor, Tensor]:
        size = math.prod(self.video)
        video, audio = joined[:, :size], joined[:, size:]
        return video.reshape(-1, *self.video), audio.reshape(-1, *self.audio)


def refuse_not_finite(sound: Tensor) -> None:
    """Raise SamplingError if decoded sound has NaN or infinite samples."""
    if not bool(sound.isfinite().all()):
        raise SamplingError("The decoded sound has NaN or infinite samples.")
