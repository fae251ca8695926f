"""Finds near-duplicates of clips by hashes of their frames: other encodings, sizes and cuts.

A frame's hash has one bit for each of its 256 lowest spatial frequencies, which tells whether the
coefficient is above their median. Size, encoding and brightness change it little (C. Zauner,
"Implementation and benchmarking of perceptual image hash functions", 2010).
"""

from bisect import bisect_right
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import combinations, groupby, pairwise

import numpy as np
import pyarrow.compute as pc
from numpy.typing import NDArray

from longtake.data import buckets, decode_limits
from longtake.data.catalog import Catalog
from longtake.data.clip import Clip
from longtake.data.window import Crop, read_window
from longtake.data.workers import ClipTask

# Bits of 256 in which two similar frames may differ. Clips of one person at one place with other
# gestures of sign language differ in 20 to 34; see benchmarks/results/duplicates_and_cuts.md.
DISTANCE = 16
HASH_BYTES = 32

_FREQUENCIES, _SIDE = 16, 32  # a frame of 32 x 32 pixels has 16 x 16 frequencies
_MOST_FRAMES, _STEP_SECONDS = 8, 0.5  # the step is doubled until a clip has at most 8 frames
_SHARE = 2 / 3  # share of one clip's frames that must resemble frames of the other
_LEAST_CONTRAST = 1.0  # standard deviation of luma (0 to 255); flatter frames are ignored
_MOST_SHARED = 1000  # a frame in more different clips is a logo or a title
_LUMA = np.array([0.299, 0.587, 0.114], dtype=np.float64)  # luma of R'G'B', ITU-R BT.601
# The discrete cosine transform (DCT-II) without its scale, as only comparisons matter.
_DCT = np.cos(
    np.pi * np.outer(np.arange(_FREQUENCIES), 2 * np.arange(_SIDE) + 1) / (2 * _SIDE),
)
# A permutation, as 101 is odd: each of the 4 words of a hash gets low and high frequencies.
_SPREAD = np.arange(_FREQUENCIES**2) * 101 % _FREQUENCIES**2


@dataclass(frozen=True)
class HashTask(ClipTask[Clip, str]):
    """Task that hashes the frames of one clip, each to 64 hex digits; flat frames are left out."""

    limits: decode_limits.Limits = decode_limits.DEFAULT
    silence_seconds = 600.0  # progress is reported only after each passage
    doing = "hashing"

    @property
    def memory_gib(self) -> float:  # type: ignore[override]  # the limits decide it
        return self.limits.memory_gib

    def compute(self, item: Clip, progress: Callable[[], object]) -> str:
        return hash_frames(item, self.limits.timed(item.media, progress)).tobytes().hex()


def hash_frames(clip: Clip, progress: Callable[[], object] = lambda: None) -> NDArray[np.uint64]:
    """Return the hashes [F, 4] of up to 8 frames of a clip, 256 bits each; flat frames have none.

    Frames are 0.5 s apart, or 1, 2, 4 ... s if there would be more than 8. Thus a copy that was cut
    at its end has the same frames.

    Raises:
        ClipError: the clip cannot be decoded.
    """
    hashes = [np.empty((0, 4), np.uint64)]
    whole = Crop(_SIDE, _SIDE, top=0, left=0)
    step = max(1, round(clip.fps * _STEP_SECONDS))
    while (clip.num_frames - 1) // step >= _MOST_FRAMES:
        step *= 2
    numbers = range(0, clip.num_frames, step)
    # Frames after one keyframe are decoded in one window, so that each part is decoded once.
    for _, frames in groupby(numbers, lambda frame: bisect_right(clip.keyframes, frame)):
        window = buckets.window_of(clip, tuple(frames), whole, _SIDE, _SIDE)
        luma = np.einsum("c,cfhw->fhw", _LUMA, read_window(window))
        luma = luma[luma.std(axis=(1, 2)) >= _LEAST_CONTRAST]
        coefficients = (_DCT @ luma @ _DCT.T).reshape(-1, _FREQUENCIES**2)[:, _SPREAD]
        # Place 0 holds the mean, which is left out.
        bits = coefficients > np.median(coefficients[:, 1:], axis=1, keepdims=True)
        hashes.append(np.ascontiguousarray(np.packbits(bits, axis=1)).view(np.uint64))
        progress()
    return np.concatenate(hashes)


def near_pairs(
    hashes: NDArray[np.uint64], most: int, owners: NDArray[np.int64] | None = None
) -> NDArray[np.int64]:
    """Return each pair [P, 2] of rows of hashes [N, W] that differ in at most `most` bits.

    No pair is missed, by the pigeonhole principle: of the W words of such a pair, one differs in at
    most k = most // W bits, and of k + 2 blocks of that word two are equal. For each word and each
    two blocks, the rows are sorted by these blocks, and rows with equal ones are compared. With
    `owners` [N], rows of one owner are not compared.
    """
    most_of_word = most // hashes.shape[1]
    edges = np.linspace(0, 64, most_of_word + 3).astype(int).tolist()
    masks = [np.uint64((1 << end) - (1 << begin)) for begin, end in pairwise(edges)]
    found = [np.empty((0, 2), np.int64)]
    for word in range(hashes.shape[1]):
        column = np.ascontiguousarray(hashes[:, word])
        for first, second in combinations(range(len(masks)), 2):
            key = column & (masks[first] | masks[second])
            order = np.argsort(key)
            key, mine = key[order], None if owners is None else owners[order]
            left, step = np.flatnonzero(key[1:] == key[:-1]), 1
            # Rows with equal keys are neighbours. Each is compared with the next one, then with the
            # one after that, until no equal key is left so far away.
            while len(left):
                chosen = left if mine is None else left[mine[left] != mine[left + step]]
                pairs = np.stack([order[chosen], order[chosen + step]], axis=1)
                # Only once: in the first word with few differing bits, in its first two equal
                # blocks.
                bits = column[pairs[:, 0]] ^ column[pairs[:, 1]]
                is_near = np.bitwise_count(bits) <= most_of_word
                for number in {*range(second)} - {first}:
                    is_near &= (bits & masks[number]) != 0
                pairs = pairs[is_near]
                counts = np.bitwise_count(hashes[pairs[:, 0]] ^ hashes[pairs[:, 1]])
                is_near = counts.sum(axis=1, dtype=np.int64) <= most
                is_near &= (counts[:, :word] > most_of_word).all(axis=1)
                found.append(np.sort(pairs[is_near], axis=1))
                step += 1
                left = left[left + step < len(key)]
                left = left[key[left + step] == key[left]]
    return np.concatenate(found)


@dataclass(frozen=True)
class DuplicateGroups:
    """Groups of clips that show nearly the same, and which clip of each group is kept."""

    # [N] 0 for a kept clip or one without copies; 1, 2, ... for the copies of a kept clip; NaN if
    # the clip cannot be decoded.
    ranks: NDArray[np.float64]
    rows: tuple[NDArray[np.int64], ...]  # rows of each group, the kept clip first; largest first


def group(catalog: Catalog, hashes: Mapping[int, str], distance: int = DISTANCE) -> DuplicateGroups:
    """Group clips of which at least two thirds of the frames resemble those of another clip.

    Videos are compared with videos, images with images. Clips are visited in turn, those with a
    caption first, then those with the most seconds x pixels. Each is kept unless it is a
    near-duplicate of a kept one. Thus each clip that is not kept has a near copy that is.

    Args:
        catalog: the clips.
        hashes: hashes of the clips' frames by the clips' rows, from `HashTask`.
        distance: number of bits in which two similar frames differ at most.
    """
    is_video = pc.equal(catalog.table["kind"], "video").to_numpy()
    pixels = catalog.column("width").astype(np.float64) * catalog.column("height")
    size = pixels * np.where(is_video, catalog.column("duration_seconds"), 1.0)
    # Clips with a caption come first, then the largest.
    best_first = np.lexsort((-size, pc.equal(catalog.table["caption"], "").to_numpy()))
    turns = [row for row in best_first.tolist() if hashes.get(row)]
    names = [(bool(is_video[row]), hashes[row]) for row in turns]
    # Clips with the same hashes form one node, compared once; nodes have the order of their best
    # clips.
    nodes = {name: number for number, name in enumerate(dict.fromkeys(names))}
    node_of, rows = np.array([nodes[name] for name in names], np.int64), np.array(turns, np.int64)
    near = _near_nodes(list(nodes), distance)
    by_node, numbers = np.argsort(node_of, kind="stable"), np.arange(len(nodes) + 1)
    begins, near_begins = (
        np.searchsorted(node_of[by_node], numbers),
        np.searchsorted(near[0], numbers),
    )
    ranks, groups, is_taken = np.full(len(catalog), np.nan), [], np.zeros(len(nodes), bool)
    ranks[list(hashes)] = 0.0
    # Nodes come best first, so a node that is reached untaken is kept.
    for node in np.union1d(near[0], np.flatnonzero(np.diff(begins) > 1)).tolist():
        if is_taken[node]:
            continue
        others = near[1][near_begins[node] : near_begins[node + 1]]
        mine = [node, *others[~is_taken[others]].tolist()]
        is_taken[mine] = True
        places = np.concatenate([by_node[begins[each] : begins[each + 1]] for each in mine])
        if len(places) > 1:
            groups.append(rows[np.sort(places)])
            ranks[groups[-1]] = np.arange(len(places))
    return DuplicateGroups(ranks, tuple(sorted(groups, key=len, reverse=True)))


def _near_nodes(nodes: list[tuple[bool, str]], distance: int) -> NDArray[np.int64]:
    """Return pairs [2, P] of near-duplicate clips, each in both orders, sorted by the first."""
    frames = np.frombuffer(bytes.fromhex("".join(text for _, text in nodes)), np.uint64)
    frames = frames.reshape(-1, 4)
    node = np.repeat(np.arange(len(nodes)), [len(text) // (2 * HASH_BYTES) for _, text in nodes])
    _, which, times = np.unique(frames, axis=0, return_inverse=True, return_counts=True)
    # Logos and title cards would make pairs of unrelated films, and quadratically many.
    is_rare = times[which.reshape(-1)] <= _MOST_SHARED
    frames, node = frames[is_rare], node[is_rare]
    num_frames = np.bincount(node, minlength=len(nodes))
    is_video = np.array([video for video, _ in nodes], bool)
    one, other = near_pairs(frames, distance, node).T
    is_other = is_video[node[one]] == is_video[node[other]]
    one, other = one[is_other], other[is_other]
    # Each frame counts once for each node with similar frames.
    frame, like = np.concatenate([one, other]), np.concatenate([node[other], node[one]])
    frame, like = np.divmod(np.unique(frame * len(nodes) + like), len(nodes))
    pairs, counts = np.unique(node[frame] * len(nodes) + like, return_counts=True)
    first, second = np.divmod(pairs, len(nodes))
    # The share is of the first clip's frames: a short clip may lie inside of a long one.
    # 1e-9, since 2/3 of 3 may be more than 2 by rounding.
    is_near = counts >= _SHARE * num_frames[first] - 1e-9
    first, second = first[is_near], second[is_near]
    both = np.concatenate([first * len(nodes) + second, second * len(nodes) + first])
    return np.stack(np.divmod(np.unique(both), len(nodes)))
