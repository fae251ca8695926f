"""Log mels are those of LTX-2's trainer, by a second implementation."""

import numpy as np
import pytest
import torch
from tests.data.sounding import noise
from transformers.audio_utils import mel_filter_bank, spectrogram, window_function

from longtake.models.audio import log_mels, mel_filters


@pytest.mark.parametrize(("rate", "bins"), [(16000, 64), (1600, 8)])
def test_triangles_are_those_of_slaneys_scale_and_norm(rate: int, bins: int) -> None:
    expected = mel_filter_bank(513, bins, 0.0, rate / 2, rate, norm="slaney", mel_scale="slaney").T
    assert np.abs(mel_filters(rate, bins).numpy() - expected).max() < 1e-7


def test_mels_are_those_of_a_second_implementation() -> None:
    """A discrete Fourier transform of each window, in numpy."""
    sound = torch.from_numpy(np.stack([noise(4321), noise(4321, seed=1)]))
    sound[:, :, 1500:3500] = 0  # of which the least value is left
    found = log_mels(sound, 16000, 160, 64)
    filters = mel_filter_bank(513, 64, 0.0, 8000.0, 16000, norm="slaney", mel_scale="slaney")
    assert found.shape == (2, 2, 1 + 4321 // 160, 64)
    for ours, waveform in zip(found.flatten(0, 1), sound.flatten(0, 1), strict=True):
        expected = spectrogram(
            waveform.double().numpy(),
            window_function(1024, "hann"),
            frame_length=1024,
            hop_length=160,
            power=1.0,
            pad_mode="reflect",
            mel_filters=filters,
            mel_floor=1e-5,
            log_mel="log",
        ).T
        assert np.abs(ours.numpy() - expected).max() < 1e-4
    assert found.min() == pytest.approx(np.log(1e-5))
