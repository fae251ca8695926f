"""What bf16 and batches of clips change in the latents of the frozen autoencoders.

    python -m benchmarks.codecs [VIDEO ...]

Autoencoders of the released widths with random weights (releases cannot be had here), on a CPU, on
cuts of videos or, without any, of noise. Prints tables and writes them to
benchmarks/results/codecs.md. Five minutes on an idle CPU core. No GPU is measured.
"""

import argparse
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from benchmarks.tiled_encoding import PICTURES, read_pixels
from torch import Tensor

from longtake.config import CodecSection
from longtake.models.base import family
from longtake.models.codec import Codec, build_codec

_RESULTS = Path(__file__).parent / "results" / "codecs.md"
_AT_ONCE = 4


class Row(NamedTuple):
    """An autoencoder: its family, its arguments, and the sizes of clips that are measured."""

    name: str
    family: str
    rounded: tuple[int, int, int]  # frames, height, width of clips in bf16
    batched: tuple[int, int, int]  # of clips in batches
    config: dict[str, Any]


_ROWS = (
    Row("Wan 2.1", "wan", (9, 128, 128), (5, 128, 128), {}),
    Row("HunyuanVideo 1.5", "hunyuan_video15", (9, 128, 128), (5, 64, 64), {}),
    Row("LTX-2", "ltx2", (9, 128, 128), (9, 128, 128), {}),
    Row("Qwen-Image", "qwen_image", (1, 256, 256), (1, 256, 256), {}),
    Row("FLUX.1", "flux", (1, 256, 256), (1, 256, 256), PICTURES),
    Row("FLUX.2", "flux2", (1, 256, 256), (1, 256, 256), PICTURES),
)


def main() -> None:
    """Measure all autoencoders."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("videos", type=Path, nargs="*")
    videos: list[Path] = parser.parse_args().videos
    torch.set_num_threads(1)
    rounded, batched = [], []
    for row in _ROWS:
        codec = _codec(row, "fp32")
        rounded.append(_rounding(row, codec, videos))
        batched.append(_batch(row, codec, videos))
        print(rounded[-1], batched[-1], sep="\n")  # noqa: T201
    clips = f"cuts of {len(videos)} videos" if videos else "noise"
    lines = [
        "# Numbers of codecs",
        "",
        f"`python -m benchmarks.codecs{' VIDEO ...' if videos else ''}`: autoencoders of the "
        f"released widths with random weights, on one CPU thread, on {clips}. No released weights "
        "and no GPU were measured.",
        "",
        "## bf16",
        "",
        'Latents of `codec.dtype` = "bf16" against those of fp32, as shares: the root mean square '
        "of the difference over that of the latents; over the standard deviation of a channel, "
        "which is 1 where a release's statistics normalise latents; and the largest difference "
        "over that deviation. The last column is the second one if only the latents are rounded "
        "to bf16, as `data.cache_dtype` does.",
        "",
        "| autoencoder | clip | over the rms | over the deviation | largest | latents rounded |",
        "|---|---|---|---|---|---|",
        *rounded,
        "",
        "## Batches",
        "",
        f"{_AT_ONCE} clips through the codec at once, in fp32, against each alone: whether the "
        "latents are bitwise equal, the largest difference over the largest latent, and the CPU "
        "seconds over those of the clips alone.",
        "",
        "| autoencoder | clip | bitwise | largest difference | CPU seconds |",
        "|---|---|---|---|---|",
        *batched,
    ]
    _RESULTS.write_text("\n".join(lines) + "\n", encoding="utf-8")


def _codec(row: Row, dtype: Any) -> Codec:
    torch.manual_seed(0)
    section = CodecSection(kind="autoencoder", dtype=dtype, config=row.config)
    return build_codec(section, family(row.family).frozen.codec)


def _clips(shape: tuple[int, int, int], videos: Sequence[Path], count: int) -> Iterator[Tensor]:
    for number in range(count):
        torch.manual_seed(number)
        yield read_pixels(shape, videos[number % len(videos)] if videos else None)


def _rounding(row: Row, codec: Codec, videos: Sequence[Path]) -> str:
    other, found = _codec(row, "bf16"), []
    for clip in _clips(row.rounded, videos, max(1, len(videos))):
        exact = codec.encode(clip)
        difference = other.encode(clip) - exact
        # Of a channel, since a recipe's latents are normalised by channel.
        deviation = exact.var(dim=(2, 3, 4)).mean().sqrt()
        rms = difference.square().mean().sqrt()
        alone = (exact.bfloat16().float() - exact).square().mean().sqrt()
        found.append(
            [
                rms / exact.square().mean().sqrt(),
                rms / deviation,
                difference.abs().max() / deviation,
                alone / deviation,
            ]
        )
    worst = torch.tensor(found).amax(dim=0).tolist()
    return f"| {row.name} | {_size(row.rounded)} | {' | '.join(f'{each:.1%}' for each in worst)} |"


def _batch(row: Row, codec: Codec, videos: Sequence[Path]) -> str:
    clips = list(_clips(row.batched, videos, _AT_ONCE))
    what = f"| {row.name} | {_size(row.batched)} |"
    try:
        begun = time.process_time()
        together = codec.encode(torch.cat(clips))
    except RuntimeError:  # diffusers makes HunyuanVideo 1.5's mask of one clip
        return f"{what} refused | - | - |"
    ended = time.process_time()
    alone = torch.cat([codec.encode(clip) for clip in clips])
    share = (ended - begun) / (time.process_time() - ended)
    equal = "yes" if torch.equal(together, alone) else "no"
    return (
        f"{what} {equal} | {(together - alone).abs().max() / alone.abs().max():.0e} | {share:.2f} |"
    )


def _size(shape: tuple[int, int, int]) -> str:
    frames, height, width = shape
    return f"{frames} x {width}x{height}" if frames > 1 else f"{width}x{height}"


if __name__ == "__main__":
    main()
