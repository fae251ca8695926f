"""Memory of encoding in tiles, and how far its latents are from those of whole clips.

    python benchmarks/tiled_encoding.py [--clip VIDEO]

Memory and time are those that the plan predicts, for released autoencoders at usual sizes. The
difference is that of autoencoders of the released widths with random weights, on a CPU in fp32, on
a small cut of a video or, without one, of noise. Prints a table and writes it to
benchmarks/results/tiled_encoding.md. A minute and a half on an idle CPU core. No GPU is measured.
"""

import argparse
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import av
import torch
from torch import Tensor

from longtake.config import Bucket, CodecSection
from longtake.models.base import family
from longtake.models.codec import build_codec, outline_codec
from longtake.models.tiled_encoding import encode_tiles
from longtake.planner.devices import DEVICES
from longtake.planner.encoding import TILES, clip_trace, encode_clip, make_encoders_fake
from longtake.planner.fake_tensors import CachedFakeMode
from longtake.planner.trace import InferenceTrace

_RESULTS = Path(__file__).parent / "results" / "tiled_encoding.md"
_GIB = 2**30
_SIZES = (0, TILES[0], 512, 256)
PICTURES: dict[str, Any] = {"block_out_channels": [128, 256, 512, 512], "layers_per_block": 2}


class Row(NamedTuple):
    """An autoencoder: its family, its arguments, the usual clip, and the clip that is compared."""

    name: str
    family: str
    usual: tuple[int, int, int]  # frames, height, width
    compared: tuple[int, int, int] | None  # None: as the row before
    tile: int  # of the comparison
    config: dict[str, Any]


_ROWS = (
    Row("HunyuanVideo 1.5", "hunyuan_video15", (121, 480, 848), (5, 32, 480), 160, {}),
    Row("Wan 2.1", "wan", (81, 480, 832), (5, 32, 256), 64, {}),
    Row("Wan 2.1", "wan", (81, 720, 1280), None, 0, {}),
    Row("Qwen-Image", "qwen_image", (1, 1328, 1328), (1, 32, 256), 64, {}),
    Row("LTX-2", "ltx2", (121, 480, 832), (9, 64, 96), 64, {}),
    Row("FLUX.1", "flux", (1, 1024, 1024), (1, 96, 128), 48, PICTURES),
    Row("FLUX.2", "flux2", (1, 2048, 2048), (1, 96, 128), 48, PICTURES),
)


def main() -> None:
    """Trace and compare all autoencoders."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clip", type=Path)
    clip: Path | None = parser.parse_args().clip
    lines = [
        "# Encoding in tiles",
        "",
        f"`python benchmarks/tiled_encoding.py{' --clip VIDEO' if clip else ''}`: predicted GiB, "
        "weights included, and seconds on an H100; no GPU was measured. Pictures of FLUX are "
        "encoded in bands of as many rows. Difference: the largest between latents of tiles and of "
        "the whole, over the largest latent, and its root mean square over that of all latents; "
        f"released widths, random weights, fp32, on {'a cut of a video' if clip else 'noise'}.",
        "",
        "| autoencoder | clip | whole | one tile | tiles of 512 | of 256 | difference | rms |",
        "|---|---|---|---|---|---|---|---|",
        *(line for row in _ROWS for line in _lines(row, clip)),
    ]
    table = "\n".join(lines) + "\n"
    _RESULTS.write_text(table, encoding="utf-8")
    print(table)  # noqa: T201


def _lines(row: Row, clip: Path | None) -> Iterator[str]:
    frames, height, width = row.usual
    found = "|" if row.compared is None else _differences(row, row.compared, clip)
    for dtype in ("fp32", "bf16"):
        traces = [_traced(row, dtype, tile) for tile in _SIZES]
        cells = [f"{each.peak_bytes / _GIB:.1f} GiB, {each.seconds:.2f} s" for each in traces]
        compared = found if dtype == "fp32" else "|"
        size = f"{frames} x {width}x{height}" if frames > 1 else f"{width}x{height}"
        yield f"| {row.name}, {dtype} | {size} | {' | '.join(cells)} | {compared} |"


def _traced(row: Row, dtype: Any, tile: int) -> InferenceTrace:
    section = CodecSection(kind="autoencoder", encode_tile=tile, dtype=dtype, config=row.config)
    codec = outline_codec(section, family(row.family).frozen.codec)
    frames, height, width = row.usual
    mode = CachedFakeMode(allow_non_fake_inputs=True)
    with mode:
        make_encoders_fake(codec, SimpleNamespace(modules=list))
        shape = Bucket(num_frames=frames, height=height, width=width)
        return clip_trace(mode, codec, shape, encode_clip, DEVICES["h100"])


def _differences(row: Row, shape: tuple[int, int, int], clip: Path | None) -> str:
    torch.manual_seed(0)
    section = CodecSection(kind="autoencoder", config=row.config)
    codec: Any = build_codec(section, family(row.family).frozen.codec)
    autoencoder = codec.autoencoder
    pixels = read_pixels(shape, clip)
    if row.family.startswith("flux"):
        pixels = pixels[:, :, 0]
    with torch.no_grad():
        whole = autoencoder.encode(pixels).latent_dist.parameters
        tiled = encode_tiles(autoencoder, pixels, row.tile)
    difference = tiled - whole
    rms = difference.square().mean().sqrt() / whole.square().mean().sqrt()
    return f"{difference.abs().max() / whole.abs().max():.1e} | {rms:.1e}"


def read_pixels(shape: tuple[int, int, int], clip: Path | None) -> Tensor:
    """Return pixels [1, 3, F, H, W] in [-1, 1] of a video's middle, or of noise."""
    frames, height, width = shape
    if clip is None:
        return torch.rand(1, 3, *shape) * 2 - 1
    with av.open(str(clip)) as container:
        decoded = container.decode(video=0)
        pictures = [next(decoded).to_ndarray(format="rgb24") for _ in range(frames)]
    top, left = ((have - need) // 2 for have, need in zip(pictures[0].shape, (height, width)))  # noqa: B905 - channels are left out
    cut = [torch.from_numpy(each[top : top + height, left : left + width]) for each in pictures]
    return torch.stack(cut).permute(3, 0, 1, 2)[None] / 127.5 - 1


if __name__ == "__main__":
    main()
