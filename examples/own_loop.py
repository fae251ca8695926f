"""longtake's loader in a training loop that is not longtake's.

    longtake data index my_clips --captions my_clips/captions.jsonl --out clips.parquet
    python examples/own_loop.py clips.parquet --steps 20
    python examples/own_loop.py clips.parquet --steps 20      # resumes where the first call ended

Expected: a line for each step, in seconds; the second call begins at step 20, and no clip is seen
twice before all have been seen once. Change the catalog in between, and it says what changed and
how one can resume; `--on-change merge` is one way.
"""

import argparse
import json
from pathlib import Path

import torch

from longtake.config import Bucket, DataSection
from longtake.data.loader import Loader
from longtake.errors import DataChangedError, LongtakeError


def main() -> None:
    """Train a model of one number on the brightness of clips."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("catalog", type=Path)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--on-change", default="refuse")
    parser.add_argument("--state", type=Path, default=Path("own_loop.json"))
    asked = parser.parse_args()

    data = DataSection(
        catalog=asked.catalog,
        buckets=(Bucket(num_frames=8, height=32, width=32),),
        workers=2,
        on_change=asked.on_change,
    )
    loader = Loader(data, batch_size=4, seed=0, kept=Path(f"{asked.state}.catalogs"))
    if asked.state.exists():
        loader.load_state_dict(json.loads(asked.state.read_text()))
    loader.keep_catalogs()

    brightness = torch.zeros((), requires_grad=True)
    optimizer = torch.optim.SGD([brightness], lr=0.1)
    for batch in loader.batches(loader.step + asked.steps):
        means = batch.videos.float().mean(dim=(1, 2, 3, 4)) / 255
        # What stands in for a clip that could not be decoded has weight 0.
        loss = (batch.weights * (means - brightness) ** 2).sum() / batch.weights.sum().clamp(min=1)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        trained = zip(batch.identities, batch.weights.tolist(), strict=True)
        clips = " ".join(identity[:6] for identity, weight in trained if weight)
        print(f"step {batch.step} epoch {batch.epoch} loss {loss.item():.4f} clips {clips}")  # noqa: T201
    # The state counts batches that were trained, not those that are decoded ahead.
    asked.state.write_text(json.dumps(loader.state_dict()))


if __name__ == "__main__":
    try:
        main()
    except DataChangedError as error:
        raise SystemExit(f"{error}\nHere it is set by --on-change merge (or another).") from None
    except LongtakeError as error:
        raise SystemExit(str(error)) from None
