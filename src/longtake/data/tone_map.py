"""Converts HDR (PQ and HLG of ITU-R BT.2100) to SDR in BT.709.

Light is mapped by the spline of ITU-R BT.2390, section 5.4, from a peak of 1000 cd/m2 to 203, the
white of BT.2408: up to 93 cd/m2 it stays, what is brighter is compressed, and what is above the
peak is white. The largest of red, green and blue decides, so that hues stay; colours outside of
BT.709 are cut off. The result is encoded for the gamma of 2.4 of SDR displays (BT.1886).
"""

from functools import cache

import numpy as np
from numpy.typing import NDArray

_Light = NDArray[np.float32]
_PEAK, _WHITE = 1000.0, 203.0  # cd/m2
_PEAK_SIGNAL, _WHITE_SIGNAL = 0.751827, 0.580689  # by PQ
# Constants of PQ: m1, m2, c1, c2, c3 of SMPTE ST 2084.
_M1, _M2, _C1, _C2, _C3 = 0.1593017578125, 78.84375, 0.8359375, 18.8515625, 18.6875
_LUMINANCE = np.array([0.2627, 0.6780, 0.0593], np.float32)  # of BT.2020
_TO_BT709 = np.array(
    [[1.6605, -0.5876, -0.0728], [-0.1246, 1.1329, -0.0083], [-0.0182, -0.1006, 1.1187]], np.float32
)
_CODES = np.rint(255 * np.linspace(0, 1, 4096) ** (2 / 2.4)).astype(np.uint8)  # by root of light


def _light_of(signal: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the light in cd/m2 of PQ signals in [0, 1]."""
    power = signal ** (1 / _M2)
    return np.asarray(1e4 * (np.maximum(power - _C1, 0) / (_C2 - _C3 * power)) ** (1 / _M1))


@cache
def _tables(transfer: str) -> tuple[_Light, _Light]:
    """Return the light of each level, and the factors that map light.

    Those of PQ are by the largest level of a pixel, those of HLG by its light in steps of equal
    size up to the peak.
    """
    signal = np.linspace(0, 1, 4096)
    light = _light_of(signal)
    white, part = _WHITE_SIGNAL / _PEAK_SIGNAL, np.minimum(signal / _PEAK_SIGNAL, 1)
    knee = 1.5 * white - 0.5
    t = np.maximum(part - knee, 0) / (1 - knee)
    spline = (2 * t**3 - 3 * t**2 + 1) * knee + (t**3 - 2 * t**2 + t) * (1 - knee)
    spline += (3 * t**2 - 2 * t**3) * white
    factors = _light_of(_PEAK_SIGNAL * np.where(part < knee, part, spline))[1:] / light[1:]
    if transfer == "hlg":  # light of the scene, of which the peak is 1
        a, b, c = 0.17883277, 0.28466892, 0.55991073
        bright = (np.exp((signal - c) / a) + b) / 12
        linear = np.interp(signal * _PEAK, light[1:], factors)
        light = np.where(signal <= 0.5, signal**2 / 3, bright)
        return light.astype(np.float32), linear.astype(np.float32)
    return light.astype(np.float32), np.append(1, factors).astype(np.float32)


def to_sdr(picture: NDArray[np.uint16], transfer: str) -> NDArray[np.uint8]:
    """Return the SDR picture of one in HDR, both [3, H, W] in red, green and blue.

    `picture` has 12 bits, in the primaries of BT.2020; `transfer` is "pq" or "hlg".
    """
    levels, factors = _tables(transfer)
    light, brightest = levels[picture], picture.max(0)
    if transfer == "hlg":  # as a display of this peak shows it, with a system gamma of 1.2
        light *= _PEAK * np.tensordot(_LUMINANCE, light, 1) ** 0.2
        brightest = (light.max(0) * (4095 / _PEAK) + 0.5).astype(np.uint16)
    light *= factors.take(brightest, mode="clip")
    light = np.tensordot(_TO_BT709 / np.float32(_WHITE), light, 1)
    # Powers are slow; the square root spreads the entries over dark light.
    np.sqrt(np.clip(light, 0, 1, out=light), out=light)
    light *= 4095
    light += 0.5
    return _CODES.take(light.astype(np.uint16))
