"""How sharp a video is."""

from longtake.evaluation.measures.signals import Signals


def sharpness(signals: Signals, fps: float) -> float | None:
    """Variance of the Laplacian of the luma, mean over frames; squared grey levels, 0 and up.

    The focus measure of Pech-Pacheco et al. ("Diatom autofocusing in brightfield microscopy",
    2000) with the Laplacian of four neighbours, of pixels inside of the border. None: fewer than 3
    rows or columns.
    """
    del fps
    return None if signals.edges is None else float(signals.edges.mean())
