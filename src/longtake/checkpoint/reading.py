"""Reads torch's distributed checkpoints without trusting them: no pickle in one can run code."""

import io
from collections.abc import Mapping
from functools import cache
from pathlib import Path, PurePath
from typing import Any

import torch
from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import ReadItem
from torch.serialization import _get_layout

from longtake.fsio import open_regular
from longtake.unpickle import RestrictedUnpickler

_OF_METADATA = (
    "_MEM_FORMAT_ENCODING",
    "BytesStorageMetadata",
    "ChunkStorageMetadata",
    "Metadata",
    "MetadataIndex",
    "StorageMeta",
    "TensorProperties",
    "TensorStorageMetadata",
)


class Reader(FileSystemReader):
    """Reads `.metadata` by an unpickler that allows nothing but what torch writes there."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """What the checkpoint holds.

        Raises:
            OSError: it cannot be read.
            ValueError: it is not what torch writes.
        """
        path = Path(self._get_metadata_path(kwargs.get("rank")))
        with open_regular(path) as file:
            try:
                found = _checked(RestrictedUnpickler(file, _allowed()).load())
            except Exception as error:  # a damaged pickle can raise anything
                raise ValueError(f"{path.name} cannot be read: {error}") from error
        found.storage_meta = StorageMeta(load_id=self.load_id)
        return found


class Planner(DefaultLoadPlanner):
    """Reads what is not a tensor, such as a learning rate, by torch's restricted unpickler."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Put an object of the checkpoint where it belongs.

        Raises:
            pickle.UnpicklingError: it is neither plain data nor a tensor.
        """
        loaded = torch.load(value, weights_only=True)
        name = read_item.dest_index.fqn
        if self.flatten_state_dict:
            set_element(self.original_state_dict, self.mappings[name], loaded)
        else:
            self.state_dict[name] = loaded


def shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Shape of each entry of a part, by name; () where it is not a tensor.

    Args:
        folder: of the part. Its checksums must have been compared.

    Raises:
        OSError: it cannot be read.
        ValueError: it is not what torch writes.
    """
    saved = Reader(folder).read_metadata().state_dict_metadata
    return {name: tuple(getattr(each, "size", ())) for name, each in saved.items()}


def _checked(found: Any) -> Metadata:
    if not isinstance(found, Metadata) or not isinstance(found.storage_data, dict):
        raise TypeError("it does not describe a checkpoint")
    for each in found.storage_data.values():
        name = str(each.relative_path)
        if name != PurePath(name).name or name == "..":
            raise ValueError(f"it names the file {name!r} outside the checkpoint")
    return found


def _no_path(*_parts: object) -> None:
    """In place of the path at which a checkpoint was saved, which nothing needs."""


@cache
def _allowed() -> Mapping[tuple[str, str], Any]:
    named = {(metadata.__name__, name): getattr(metadata, name) for name in _OF_METADATA}
    dtypes = {
        ("torch", name): each for name, each in vars(torch).items() if type(each) is torch.dtype
    }
    return {
        **named,
        **dtypes,
        (filesystem.__name__, "_StorageInfo"): filesystem._StorageInfo,
        ("torch", "Size"): torch.Size,
        ("torch.serialization", "_get_layout"): _get_layout,
        ("pathlib", "PosixPath"): _no_path,
        ("pathlib._local", "PosixPath"): _no_path,  # Python 3.13
    }
