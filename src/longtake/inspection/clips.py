"""The clips of one step: who they are, what their captions say, and where their files lie."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from longtake.data.catalog import Catalog
from longtake.data.clip import Clip
from longtake.data.ledger import IDENTITY_BYTES, Consumed, read_ledger, short_identity
from longtake.errors import DataError
from longtake.inspection.verdicts import Report
from longtake.run_dir import RunDirectory

Sample = dict[str, Any]
"""identity, caption, path, epoch; of a report also sigma, loss, rank and host."""


def reported_clips(run: RunDirectory, report: Report, step: int) -> list[Sample]:
    """The clips of a step by a guard's report, the highest loss first."""
    samples = report.samples_of(step)
    known = _known(run, [each["identity"] for each in samples], [])
    return [{**each, "path": _path(known.get(_short(each["identity"])))} for each in samples]


def consumed_clips(run: RunDirectory, batch: int) -> list[Sample]:
    """The clips of a batch by the ledger, in no order that means anything.

    Empty where the ledger has none: nobody could be decoded, or the batch was given up.

    Raises:
        DataError: the ledger is damaged.
    """
    try:
        consumed = read_ledger(run.ledger_path)
    except DataError:
        if run.ledger_path.exists():
            raise
        return []  # trained by something else than longtake's own loop
    mine = np.flatnonzero((consumed.step == batch) & ~consumed.is_rejected)
    names = [_name(identity) for identity in consumed.identity[mine].tolist()]
    known = _known(run, names, _editions(consumed, batch))
    epochs = consumed.epoch[mine].tolist()
    samples = zip(names, epochs, strict=True)
    return [_sample(name, epoch, known.get(_short(name))) for name, epoch in samples]


def _sample(name: str, epoch: int, clip: Clip | None) -> Sample:
    if clip is None:
        return {"identity": name, "caption": None, "epoch": epoch, "path": None}
    caption, path = clip.caption, clip.path
    return {"identity": clip.identity, "caption": caption, "epoch": epoch, "path": path}


def _editions(consumed: Consumed, batch: int) -> list[str]:
    """Of the catalogs that were in force when a batch was trained, the newest first."""
    entries = [entry for entry in consumed.history if entry["step"] <= batch]
    return [each["edition"] for entry in entries[::-1] for each in entry["catalogs"].values()]


def _known(run: RunDirectory, names: Sequence[str], editions: Sequence[str]) -> dict[int, Clip]:
    """Clips of the kept catalogs by the first bytes of their identities."""
    wanted = {_short(name) for name in names}
    found: dict[int, Clip] = {}
    for catalog in _kept(run, editions):
        if wanted <= found.keys():
            break
        whole = b"".join(catalog.identities.to_pylist())
        octets = np.frombuffer(whole, np.uint8).reshape(-1, catalog.identities.type.byte_width)
        short = short_identity(octets)
        for row in np.flatnonzero(np.isin(short, list(wanted - found.keys()))):
            found[int(short[row])] = catalog.clip(int(row))
    return found


def _kept(run: RunDirectory, editions: Sequence[str]) -> Iterator[Catalog]:
    """The catalogs that a run kept: some editions first, then whatever else there is."""
    first = [run.catalogs_path / f"{edition}.parquet" for edition in editions]
    paths = dict.fromkeys([*first, *sorted(run.catalogs_path.glob("*.parquet"))])
    return (Catalog.load(path) for path in paths if path.is_file())


def _short(identity: str) -> int:
    octets = np.frombuffer(bytes.fromhex(identity), np.uint8)
    return int(short_identity(octets[None])[0])


def _name(identity: int) -> str:
    """The beginning of an identity, as text."""
    return identity.to_bytes(8, "little").hex()[: 2 * IDENTITY_BYTES]


def _path(clip: Clip | None) -> str | None:
    return None if clip is None else clip.path
