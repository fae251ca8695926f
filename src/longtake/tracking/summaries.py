"""What TensorBoard shows at a step: numbers, lines of text, pictures, as its protobufs."""

import struct
from collections.abc import Mapping
from pathlib import Path

from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
from tensorboard.compat.proto.tensor_pb2 import TensorProto
from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto
from tensorboard.compat.proto.types_pb2 import DT_STRING

_PNG = b"\x89PNG\r\n\x1a\n"
_CHANNELS = {0: 1, 2: 3, 3: 3, 4: 2, 6: 4}  # by PNG's colour type
_LARGEST_BYTES = 16 * 2**20


def numbers(values: Mapping[str, float]) -> list[Summary.Value]:
    """A scalar for each."""
    return [Summary.Value(tag=tag, simple_value=value) for tag, value in values.items()]


def text(tag: str, lines: str) -> Summary.Value:
    """Markdown."""
    shape = TensorShapeProto(dim=[TensorShapeProto.Dim(size=1)])
    tensor = TensorProto(dtype=DT_STRING, string_val=[lines.encode()], tensor_shape=shape)
    plugin = SummaryMetadata.PluginData(plugin_name="text")
    return Summary.Value(tag=tag, metadata=SummaryMetadata(plugin_data=plugin), tensor=tensor)


def picture(tag: str, path: Path) -> Summary.Value | None:
    """A PNG file as it is; None if it is none, or too large to be looked at there."""
    if path.stat().st_size > _LARGEST_BYTES:
        return None
    data = path.read_bytes()
    if not data.startswith(_PNG) or len(data) < 26:
        return None
    width, height, _, colour = struct.unpack_from(">IIBB", data, 16)
    image = Summary.Image(
        height=height,
        width=width,
        colorspace=_CHANNELS.get(colour, 3),
        encoded_image_string=data,
    )
    return Summary.Value(tag=tag, image=image)
