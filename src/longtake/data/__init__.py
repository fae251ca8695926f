"""From video files to batches: catalog, order, curriculum, ledger, supervised decoding.

For training loops other than longtake's own:

    from longtake.data import Bucket, DataSection, Loader

`examples/own_loop.py` shows how. Whoever only wants a catalog or an audit does not import torch.
"""

from typing import TYPE_CHECKING, Any

from longtake.config import Bucket, DataSection, Stage

if TYPE_CHECKING:
    from longtake.data.batch import Batch
    from longtake.data.loader import Loader

__all__ = ["Batch", "Bucket", "DataSection", "Loader", "Stage"]


def __getattr__(name: str) -> Any:
    if name not in ("Batch", "Loader"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from longtake.data import batch, loader  # only now, because they import torch

    return {"Batch": batch.Batch, "Loader": loader.Loader}[name]
