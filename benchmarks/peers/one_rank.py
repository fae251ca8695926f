"""One rank of another tool's loader, for benchmarks/data_changes.py, which starts it.

    python one_rank.py TOOL write FOLDER N         a data set of the numbers 0 to N - 1
    python one_rank.py TOOL take FOLDER BATCH STATE STEPS
                                                   STEPS batches of a new run; writes the state
    python one_rank.py TOOL resume FOLDER BATCH STATE
                                                   from that state to the end of the epoch

The rank and how many there are come from the environment, as torchrun sets it; BATCH is what one
rank takes a step. Prints the numbers that it was given, as JSON. Each tool is used as its
documentation says: shuffling, whole batches, a state at each rank where the tool has one there.
"""

import json
import os
import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

_SEED = 7
_RANK, _WORLD_SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


class TorchData:
    """StatefulDataLoader; with several ranks its StatefulDistributedSampler."""

    def write(self, folder: Path, size: int) -> None:
        """Write the numbers below `size` as the tool's data set."""
        (folder / "size.json").write_text(str(size), encoding="utf-8")

    def load(self, folder: Path, batch: int) -> Any:
        """Make this rank's loader."""
        import torch
        from torchdata.stateful_dataloader import (  # type: ignore[import-not-found,unused-ignore]
            StatefulDataLoader,
        )
        from torchdata.stateful_dataloader.sampler import (  # type: ignore[import-not-found,unused-ignore]
            StatefulDistributedSampler,
        )

        data = range(json.loads((folder / "size.json").read_text(encoding="utf-8")))
        if _WORLD_SIZE == 1:
            generator = torch.Generator().manual_seed(_SEED)
            return StatefulDataLoader(data, batch, shuffle=True, generator=generator)
        sampler = StatefulDistributedSampler(data, _WORLD_SIZE, _RANK, seed=_SEED)
        return StatefulDataLoader(data, batch, sampler=sampler)

    def batches(self, loader: Any) -> Iterator[list[int]]:
        """Give this rank's batches to the end of the epoch."""
        for batch in loader:
            yield batch.tolist()

    def state(self, loader: Any) -> Any:
        """The state of the loader."""
        return loader.state_dict()

    def restore(self, loader: Any, state: Any) -> None:
        """Restore the state in a new loader."""
        loader.load_state_dict(state)


class Streaming(TorchData):
    """mosaicml-streaming: StreamingDataset in its StreamingDataLoader."""

    def write(self, folder: Path, size: int) -> None:
        """Write the numbers below `size` as the tool's data set."""
        from streaming import MDSWriter  # type: ignore[import-not-found,unused-ignore]
        from streaming.base.util import (  # type: ignore[import-not-found,unused-ignore]
            clean_stale_shared_memory,
        )

        clean_stale_shared_memory()
        with MDSWriter(out=str(folder / "mds"), columns={"number": "int"}, size_limit=2048) as out:
            for number in range(size):
                out.write({"number": number})

    def load(self, folder: Path, batch: int) -> Any:
        """Make this rank's loader."""
        from streaming import (  # type: ignore[import-not-found,unused-ignore]
            StreamingDataLoader,
            StreamingDataset,
        )

        data = StreamingDataset(
            local=str(folder / "mds"), shuffle=True, shuffle_seed=_SEED, batch_size=batch
        )
        return StreamingDataLoader(data, batch_size=batch)

    def batches(self, loader: Any) -> Iterator[list[int]]:
        """Give this rank's batches to the end of the epoch."""
        for batch in loader:
            yield batch["number"].tolist()


class LitData(TorchData):
    """LitData: StreamingDataset in its StreamingDataLoader."""

    def write(self, folder: Path, size: int) -> None:
        """Write the numbers below `size` as the tool's data set."""
        from litdata.streaming.cache import Cache  # type: ignore[import-not-found,unused-ignore]

        cache = Cache(str(folder / "chunks"), chunk_size=50)
        for number in range(size):
            cache[number] = number
        cache.done()
        cache.merge()

    def load(self, folder: Path, batch: int) -> Any:
        """Make this rank's loader."""
        from litdata import (  # type: ignore[import-not-found,unused-ignore]
            StreamingDataLoader,
            StreamingDataset,
        )

        data = StreamingDataset(str(folder / "chunks"), shuffle=True, seed=_SEED, drop_last=False)
        return StreamingDataLoader(data, batch_size=batch)


class Grain(TorchData):
    """grain: DataLoader with a shuffling IndexSampler, sharded by rank."""

    def load(self, folder: Path, batch: int) -> Any:
        """Make this rank's loader."""
        from grain import python as grain  # type: ignore[import-not-found,unused-ignore]

        size = json.loads((folder / "size.json").read_text(encoding="utf-8"))
        shard = grain.ShardOptions(_RANK, _WORLD_SIZE, drop_remainder=False)
        sampler = grain.IndexSampler(
            size, shuffle=True, seed=_SEED, num_epochs=1, shard_options=shard
        )
        loader = grain.DataLoader(
            data_source=grain.RangeDataSource(0, size, 1),
            sampler=sampler,
            worker_count=0,
            operations=[grain.Batch(batch)],
        )
        return iter(loader)

    def state(self, loader: Any) -> Any:
        """The state of the loader."""
        return loader.get_state()

    def restore(self, loader: Any, state: Any) -> None:
        """Restore the state in a new loader."""
        loader.set_state(state)


TOOLS = {
    "torchdata": TorchData,
    "mosaicml-streaming": Streaming,
    "litdata": LitData,
    "grain": Grain,
}


def main() -> None:
    """Do what the command line says."""
    import torch

    name, what, folder, *rest = sys.argv[1:]
    tool, here = TOOLS[name](), Path(folder)
    if what == "write":
        tool.write(here, int(rest[0]))
        return
    batch, state = int(rest[0]), Path(rest[1]) / f"{_RANK}.pt"
    loader = tool.load(here, batch)
    if what == "take":
        given = list(islice(tool.batches(loader), int(rest[2])))
        torch.save(tool.state(loader), state)
    else:
        tool.restore(loader, torch.load(state, weights_only=False))
        given = list(tool.batches(loader))
    print(json.dumps([number for batch in given for number in batch]))  # noqa: T201


if __name__ == "__main__":
    main()
