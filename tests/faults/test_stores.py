"""The store on loopback that the drills lose and slow down."""

import urllib.error
import urllib.request
from pathlib import Path

import pytest

from longtake.faults.stores import LoopbackStore


def test_it_serves_ranges_until_it_is_gone_and_again_when_it_is_back(tmp_path: Path) -> None:
    (tmp_path / "a.bin").write_bytes(bytes(range(100)))
    store = LoopbackStore(tmp_path)

    def get(name: str = "a.bin") -> bytes:
        headers = {"Range": "bytes=10-19"}
        asked = urllib.request.Request(f"{store.address}/{name}", headers=headers)  # noqa: S310
        with urllib.request.urlopen(asked, timeout=10) as answer:  # noqa: S310
            content: bytes = answer.read()
            return content

    assert get() == bytes(range(10, 20))
    with pytest.raises(urllib.error.HTTPError, match="404"):
        get("none.bin")
    address = store.address
    store.lose()
    with pytest.raises(urllib.error.URLError, match="refused"):
        get()
    store.restore()
    assert store.address == address
    assert get() == bytes(range(10, 20))
    assert store.num_answers == 2
    store.lose()
