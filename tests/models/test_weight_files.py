"""GGUF files give what gguf's own functions make of them, whole or in parts, or are refused."""

import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from safetensors.torch import save_file
from tests.models.gguf_files import dequantized, quantized, write_gguf
from torch import Tensor

from longtake.errors import ModelError
from longtake.models import weight_files
from longtake.models.weight_files import open_weights, read_weights


@pytest.mark.parametrize(
    "kind",
    ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"],
)
@pytest.mark.parametrize("shape", [(6, 256), (2, 3, 2, 1, 256), (512,)])
def test_a_tensor_is_what_ggufs_own_function_makes_of_it(
    kind: str, shape: tuple[int, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the bit, though it is made a few rows at a time."""
    monkeypatch.setattr(weight_files, "_DEQUANTIZED_AT_ONCE", 1024)
    file, stored = tmp_path / "model.gguf", quantized(torch.randn(shape), Kind[kind])
    write_gguf(file, {"weight": (stored, Kind[kind])})
    expected = dequantized(stored, Kind[kind])
    assert expected.isfinite().all()
    assert read_weights(file)["weight"][:2] == (shape, kind)
    with open_weights(file) as opened:
        found = opened.get_slice("weight")
        part = tuple(slice(1, max(2, size // 2)) for size in shape)
        for index in (..., part[:1], part):
            torch.testing.assert_close(found[index], expected[index], rtol=0, atol=0)


def test_a_folded_tensor_gets_the_shape_that_it_had(tmp_path: Path) -> None:
    """Converters fold tensors whose rows are no multiple of a block: here blocks cross rows."""
    values = torch.randn(8, 4, 2, 2)
    stored = quantized(values.view(-1, 64), Kind.Q8_0)
    file = tmp_path / "model.gguf"
    write_gguf(file, {"weight": (stored, Kind.Q8_0)}, {"weight": (8, 4, 2, 2)})
    expected = dequantized(stored, Kind.Q8_0).view_as(values)
    with open_weights(file) as opened:
        found = opened.get_slice("weight")
        for index in (..., (slice(3, 5), slice(1, 2))):
            torch.testing.assert_close(found[index], expected[index], rtol=0, atol=0)


def test_files_that_are_not_whole_or_of_unknown_formats_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    zeros = np.zeros((4, 64), np.int8)
    write_gguf(file, {"weight": (zeros, Kind.I8)})
    with pytest.raises(ModelError, match=r"weight is of a format that .* \(I8\)"):
        read_weights(file)
    write_gguf(file, {"weight": (zeros.astype(np.float32), Kind.F32)}, {"weight": (4, 63)})
    with pytest.raises(ModelError, match=r"weight has not the shape \[4, 63\]"):
        read_weights(file)
    write_gguf(file, {"weight": (zeros.astype(np.float32), Kind.F32)})
    whole = file.read_bytes()
    for length in (0, 3, 30, len(whole) // 2, len(whole) - 40):
        file.write_bytes(whole[:length])
        with pytest.raises(ModelError, match=r"cannot be read: .*copy it again"):
            read_weights(file)


def test_headers_that_claim_more_than_a_file_has_are_refused_at_once(tmp_path: Path) -> None:
    """Arrays of 2^45 bytes past the end, and of more bytes than any header has."""
    file = tmp_path / "model.gguf"
    head = struct.pack("<IIQQQ1sII", gguf.GGUF_MAGIC, 3, 0, 1, 1, b"a", 9, 0)
    for size, rest, message in ((2**45, 0, "ends too early"), (10**5, 10**5, "more than 9000 num")):
        file.write_bytes(head + struct.pack("<Q", size) + bytes(rest))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(weight_files, "_MOST_READS", 9000)
            with pytest.raises(ModelError, match=message):
                read_weights(file)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (torch.tensor(10**11), r"a.comfy_quant is I64 \[\], expected JSON"),
        ("{}" + " " * 2**16, r"is U8 \[65538\], expected JSON"),
        ("[" * 30000, "recursion"),
    ],
)
def test_settings_of_layers_that_are_no_short_json_are_refused(
    settings: Tensor | str, message: str, tmp_path: Path
) -> None:
    if isinstance(settings, str):
        settings = torch.tensor(list(settings.encode()), dtype=torch.uint8)
    save_file({"a.comfy_quant": settings}, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=f"cannot be read: .*{message}"):
        read_weights(tmp_path / "model.safetensors")
