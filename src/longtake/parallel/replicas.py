"""Compares, by checksums, the ranks whose weights should be bitwise equal (replicas)."""

import socket
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from longtake import errors
from longtake.formatting import plural
from longtake.parallel import collectives
from longtake.parallel.fsdp import local_shard
from longtake.parallel.mesh import World

_COLUMNS = 2**12
_BYTES_TOGETHER = 2**24
"""Size in bytes up to which small tensors are joined for one checksum, which takes fewer calls."""
_FACTOR = 6364136223846793005  # odd
_HALF = 2**32
_MAX_NAMED = 3


# --- Checksums --------------------------------------------------------------------------------


@torch.no_grad()
def checksum(tensors: Iterable[Tensor]) -> Tensor | None:
    """Return a checksum of tensors, [] int64, that depends on every bit and its place.

    It is the sum of all words of 64 bits, each times 2 p + 1 at place p, modulo 2^64: that factor
    is odd, so a change of one word always changes it. The order of integer additions does not
    matter. None without any numbers.
    """
    total: Tensor | None = None
    for words in _in_words(tensors):
        rows = len(words) // _COLUMNS
        body, rest = words[: rows * _COLUMNS].view(rows, _COLUMNS), words[rows * _COLUMNS :]
        place = torch.arange(max(rows, _COLUMNS), device=words.device)
        # Word (row r, column c) is at place p = r * _COLUMNS + c: 2 p + 1 splits into a row term
        # and a column term, and two sums replace a product with as many places as words.
        sum_of_words = (body.sum(1) * place[:rows]).sum() * (2 * _COLUMNS)
        sum_of_words += (body.sum(0) * (2 * place[:_COLUMNS] + 1)).sum()
        sum_of_words += (rest * (2 * (place[: len(rest)] + rows * _COLUMNS) + 1)).sum()
        total = sum_of_words if total is None else total * _FACTOR + sum_of_words.to(total.device)
    return total


def _in_words(tensors: Iterable[Tensor]) -> Iterator[Tensor]:
    """Yield the tensors' bytes as words of 64 bits, small ones together, padded with zeros."""
    together: list[Tensor] = []
    for tensor in tensors:
        each = local_shard(tensor.detach()).contiguous().flatten().view(torch.uint8)
        if len(each) >= _BYTES_TOGETHER:
            yield _words([each])
        elif len(each):
            if together and together[0].device != each.device:  # streamed weights are on the CPU
                yield _words(together)
                together = []
            together.append(each)
            if sum(map(len, together)) >= _BYTES_TOGETHER:
                yield _words(together)
                together = []
    if together:
        yield _words(together)


def _words(parts: Sequence[Tensor]) -> Tensor:
    # A view as int64 needs whole words that begin at a multiple of 8 bytes of the storage.
    missing = -sum(map(len, parts)) % 8
    if len(parts) > 1 or missing or parts[0].storage_offset() % 8:
        parts = [torch.cat([*parts, parts[0].new_zeros(missing)])]
    return parts[0].view(torch.int64)


# --- Replicas ---------------------------------------------------------------------------------


def replica_groups(world: World) -> list[list[int]]:
    """Return the groups of ranks that hold the same weights (replicas of the model or a shard)."""
    if world.num_copies < 2:
        return []
    assert world.mesh is not None
    ranks = world.mesh.mesh
    return (ranks[:, None] if ranks.ndim == 1 else ranks).T.tolist()


def find_unlike(values: Sequence[object], groups: Sequence[Sequence[int]]) -> list[int]:
    """Return the ranks whose checksum is not the majority's in their group of replicas.

    Without a majority it is the whole group.
    """
    unlike: list[int] = []
    for group in groups:
        (common, count), *others = Counter(values[rank] for rank in group).most_common()
        if others:
            # If two copies differ, neither can be called right.
            has_majority = 2 * count > len(group)
            unlike += [rank for rank in group if not has_majority or values[rank] != common]
    return sorted(unlike)


class ReplicaCheck:
    """Compares replicas' weights by checksums that travel in the step's sum over all ranks.

    Each rank has slots of its own in that sum.
    """

    def __init__(self, world: World, every: int) -> None:
        self._world, self._groups = world, replica_groups(world) if every else []
        self._every = every
        self._last_equal: int | None = None
        self._is_in_doubt = False

    def is_due(self, step: int) -> bool:
        return bool(self._groups) and (self._is_in_doubt or step % self._every == 0)

    def slots(self, own_checksum: Tensor | None) -> dict[str, float]:
        """Return this rank's checksum as two exact numbers, in its own slots of the sum.

        The slots of all other ranks are 0.
        """
        value = 0 if own_checksum is None else int(own_checksum) % _HALF**2
        slots = {f"replica.{n}.{h}": 0.0 for n in range(self._world.size) for h in (0, 1)}
        # The sum over ranks is in float64, exact up to 2^53: 64 bits go as two halves of 32.
        high, low = divmod(value, _HALF)
        return slots | {f"replica.{self._world.rank}.{h}": float((high, low)[h]) for h in (0, 1)}

    def unlike(self, sums: Mapping[str, float], step: int) -> list[int]:
        """Return the ranks whose weights differ from their replicas', by the summed `slots`."""
        pairs = [
            (sums[f"replica.{rank}.0"], sums[f"replica.{rank}.1"])
            for rank in range(self._world.size)
        ]
        unlike_ranks = find_unlike(pairs, self._groups)
        self._is_in_doubt = bool(unlike_ranks)
        if not unlike_ranks:
            self._last_equal = step
        return unlike_ranks

    def compare(self, tensors: Mapping[str, Tensor], step: int) -> list[int]:
        """Return the ranks whose weights differ, by an extra collective; all ranks must call it."""
        if not self._groups:
            return []
        slots = self.slots(checksum(tensors.values()))
        return self.unlike(collectives.sum_over_ranks(slots, self._world), step)

    def explain(self, unlike: Sequence[int], tensors: Mapping[str, Tensor], step: int) -> str:
        """Describe the nodes, GPUs and tensors of replicas that differ; all ranks must call it."""
        # Only after a difference: the comparison at each step has one checksum for all tensors.
        checksums = {name: checksum([each]) for name, each in tensors.items()}
        sums = {name: each for name, each in checksums.items() if each is not None}
        mine = (_place(self._world), {name: int(each) for name, each in sums.items()})
        everyone = collectives.gather_objects(mine, self._world)
        differing: dict[str, None] = {}
        for group in self._groups:
            of_group = [everyone[rank][1] for rank in group]
            for name in of_group[0] if set(group) & set(unlike) else ():
                if len({each.get(name) for each in of_group}) > 1:
                    differing[name] = None
        places = ", ".join(f"rank {rank} ({everyone[rank][0]})" for rank in unlike)
        listed = ", ".join(list(differing)[:_MAX_NAMED]) + ", ..." * (len(differing) > _MAX_NAMED)
        where = f"{len(differing)} of {plural(len(tensors), 'tensor')} ({listed})"
        copies = self._world.num_copies
        equal = self._last_equal
        since = "" if equal is None else f" They were equal before step {equal + 1}."
        if copies == 2 or any(set(group) <= set(unlike) for group in self._groups):
            said = f"{places} hold other bits than each other, and none of them can be called right"
        else:
            said = f"{places} is alone: of its {copies} copies the others are equal"
        return (
            f"Copies of the weights are unlike before step {step + 1}: {said}. They differ in "
            f"{where}.{since} A GPU, its memory or its node computes wrongly or loses bits: test "
            "it (longtake preflight), and leave it out if it is named again."
        )

    def refuse_unlike(self, tensors: Mapping[str, Tensor], step: int) -> None:
        """Refuse to begin training with replicas that differ; all ranks must call it.

        Raises:
            RunError: on every rank; it names them and the tensors.
        """
        if unlike := self.compare(tensors, step):
            raise errors.RunError(
                f"{self.explain(unlike, tensors, step)} If the nodes read other files, copy those "
                "of one node to the others."
            )


def _place(world: World) -> str:
    host = socket.gethostname()
    if world.device.type != "cuda":
        return f"{host}, {world.device}"
    uuid = torch.cuda.get_device_properties(world.device).uuid
    return f"{host}, GPU {world.device.index}, {uuid}"
