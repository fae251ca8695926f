"""Clips in a real S3 server on loopback are those of local files, whatever the network does."""

import io
import os
import subprocess
import sys
import tarfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from tests.data import store
from tests.data.build import section, shape

from longtake.config import StoreSection
from longtake.data import clip_cache, stores
from longtake.data.batch import Batch
from longtake.data.cache import ContentHashes
from longtake.data.catalog import Catalog
from longtake.data.checks import refuse_missing_conditioning
from longtake.data.clip import Media
from longtake.data.encode import write_video
from longtake.data.index import index
from longtake.data.loader import Loader
from longtake.data.plan import begin
from longtake.data.sources import find
from longtake.data.tasks import HERE, Work
from longtake.errors import ClipError, DataError

_NUM_CLIPS = 6
_BUCKET = "clips-of-tests"
_NO_PLACE = ["path", "offset", "num_bytes", "file_bytes", "file_mtime_ns"]
_QUICK = {"timeout_seconds": 1.0, "retry_seconds": 600.0}


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with store.s3_server() as address:
        yield address


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Clips of their own, captioned beside; two more in a tar; a text that is no caption."""
    folder = tmp_path_factory.mktemp("clips") / "set"
    folder.mkdir()
    rng = np.random.default_rng(0)
    for number in range(_NUM_CLIPS):
        frames = rng.integers(0, 256, (8, 16, 16, 3), np.uint8)
        write_video(folder / f"{number}.mp4", frames, fps=8)
        (folder / f"{number}.txt").write_text(f"clip {number}")
    with tarfile.open(folder / "more.tar", "w") as tar:
        for number in (4, 5):
            for suffix in (".mp4", ".txt"):
                file = folder / f"{number}{suffix}"
                tar.add(file, f"in/{file.name}")
                file.unlink()
    (folder / "notes.md").write_text("no clip")
    (folder / ".hidden.mp4").write_bytes(b"left out")
    return folder


@pytest.fixture(scope="module")
def local_catalog(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("local") / "c.parquet"
    index([folder], captions=None, out=out, work=HERE)
    return out


@pytest.fixture(scope="module")
def remote_catalog(server: str, folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    store.put_folder(server, _BUCKET, folder.parent)
    out = tmp_path_factory.mktemp("remote") / "c.parquet"
    with pytest.MonkeyPatch.context() as patch:
        store.use(patch, server)
        index([Path(f"s3://{_BUCKET}/set")], captions=None, out=out, work=Work(workers=1))
    return out


@pytest.fixture
def proxy(
    server: str, remote_catalog: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[store.Proxy]:
    """A proxy before the server that has the clips of `remote_catalog`."""
    with store.Proxy(int(server.rpartition(":")[2])) as proxy:
        store.use(monkeypatch, proxy.address)
        yield proxy


def _media(name: str = "set/0.mp4", **fields: Any) -> Media:
    return Media(f"s3://{_BUCKET}/{name}", **fields)


def _read(media: Media, **how: Any) -> bytes:
    client = stores.StoreClient(StoreSection(**{**_QUICK, **how}))
    with stores.using(client), stores.local(media) as here:
        return here.file.read_bytes()


def _batches(catalog: Path, **values: Any) -> list[Batch]:
    data = section(catalog=catalog, frame_cache_gib=0.0, **values)
    return list(Loader(data, batch_size=2, seed=3).batches(8))


def _assert_same(batches: list[Batch], others: list[Batch]) -> None:
    for one, other in zip(batches, others, strict=True):
        for name in ("identities", "captions", "seeds"):
            assert getattr(one, name) == getattr(other, name)
        assert one.rejected == other.rejected == ()
        assert np.array_equal(one.videos, other.videos)


def test_a_prefix_is_indexed_as_a_folder(local_catalog: Path, remote_catalog: Path) -> None:
    here, there = Catalog.load(local_catalog), Catalog.load(remote_catalog)
    assert there.table.drop_columns(_NO_PLACE).equals(here.table.drop_columns(_NO_PLACE))
    assert there.fingerprint == here.fingerprint
    paths = there.table["path"].to_pylist()
    assert sorted(set(paths)) == [
        *(f"s3://{_BUCKET}/set/{number}.mp4" for number in range(4)),
        f"s3://{_BUCKET}/set/more.tar",
    ]


def test_unchanged_objects_are_not_read_again(proxy: store.Proxy, tmp_path: Path) -> None:
    out = tmp_path / "c.parquet"
    sources = [Path(f"s3://{_BUCKET}/set/0.mp4"), Path(f"s3://{_BUCKET}/set/more.tar")]
    assert index(sources, captions=None, out=out, work=HERE).unchanged == 0
    assert index(sources, captions=None, out=out, work=HERE).unchanged == 3


def test_a_table_names_objects(
    proxy: store.Proxy, server: str, local_catalog: Path, tmp_path: Path
) -> None:
    lines = [f"s3://{_BUCKET}/set/0.mp4,zero,0.5", f"{server}/{_BUCKET}/set/1.mp4,one,0.25"]
    table = tmp_path / "t.csv"
    table.write_text("\n".join(["path,caption,score", *lines]))
    store.put(server, _BUCKET, {"tables/t.jsonl": b'{"path": "../set/2.mp4", "caption": "two"}\n'})
    out = tmp_path / "c.parquet"
    index([table, Path(f"s3://{_BUCKET}/tables/t.jsonl")], captions=None, out=out, work=HERE)
    clips = {clip.path: clip for clip in Catalog.load(out).clips()}
    assert {path: clip.caption for path, clip in clips.items()} == {
        f"s3://{_BUCKET}/set/0.mp4": "zero",
        f"{server}/{_BUCKET}/set/1.mp4": "one",
        f"s3://{_BUCKET}/set/2.mp4": "two",
    }
    known = {clip.caption: clip.identity for clip in Catalog.load(local_catalog).clips()}
    assert [clips[path].identity for path in sorted(clips)] == [
        known[f"clip {number}"] for number in (1, 0, 2)
    ]


@pytest.mark.parametrize("source", ["lists", "lists/videos.txt"])
def test_a_list_of_captions_beside_a_list_of_objects(
    proxy: store.Proxy, server: str, source: str
) -> None:
    lists = {"lists/videos.txt": b"../set/0.mp4\n", "lists/prompts.txt": b"the zeroth\n"}
    store.put(server, _BUCKET, lists)
    (item,) = find([Path(f"s3://{_BUCKET}/{source}")]).items
    assert (item.media.path, item.caption) == (f"s3://{_BUCKET}/set/0.mp4", "the zeroth")


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_equal_those_of_local_files(
    proxy: store.Proxy, local_catalog: Path, remote_catalog: Path, workers: int
) -> None:
    _assert_same(_batches(remote_catalog, workers=workers), _batches(local_catalog, workers=0))


def test_further_inputs_are_those_of_local_files(
    server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng, rows = np.random.default_rng(0), ["file_name,mask,text"]
    for name in ("clips", "pose", "speed"):
        (tmp_path / "set" / name).mkdir(parents=True)
    for number in range(4):
        for name in ("clips", "pose"):
            picture = Image.fromarray(rng.integers(0, 256, (16, 16, 3), np.uint8))
            picture.save(tmp_path / "set" / name / f"{number}.png")
        np.save(tmp_path / "set" / "speed" / f"{number}.npy", rng.normal(size=3))
        rows.append(f"{number}.png,../pose/{number}.png,noise {number}")
    (tmp_path / "set" / "clips" / "metadata.csv").write_text("\n".join(rows))
    frames = rng.integers(0, 256, (2, 16, 16, 3), np.uint8)
    write_video(tmp_path / "set" / "style.mp4", frames, fps=8)
    store.put_folder(server, "posed", tmp_path)
    store.use(monkeypatch, server)
    inputs = {
        "pose": {"kind": "picture", "path": "../pose/{stem}.png"},
        "style": {"kind": "picture", "path": "../style.mp4"},
        "speed": {"kind": "numbers", "path": "../speed/{stem}.npy", "width": 3},
        "matte": {"kind": "mask", "column": "mask"},
    }
    still = shape(num_frames=1)

    def read(source: Path, workers: int) -> list[Batch]:
        out = tmp_path / f"{source.is_dir()}.parquet"
        index([source], captions=None, out=out, work=HERE, conditioning=["mask"])
        data = section(catalog=out, buckets=[still], conditioning=inputs, workers=workers)
        refuse_missing_conditioning(begin({"catalog": Catalog.load(out)}, data, 2, seed=0), data)
        return list(Loader(data, batch_size=2, seed=3).batches(4))

    here, there = tmp_path / "set" / "clips", Path("s3://posed/set/clips")
    for one, other in zip(read(here, 0), read(there, 1), strict=True):
        assert one.inputs.keys() == other.inputs.keys() == inputs.keys()
        assert all(np.array_equal(one.inputs[name], other.inputs[name]) for name in inputs)
    hashes = ContentHashes(tmp_path / "cache" / "hashes")
    pose = "s3://posed/set/pose/3.png"
    assert hashes.of(pose) == hashes.of(str(tmp_path / "set/pose/3.png")) == hashes.of(pose)
    store.client_of(server).delete_object(Bucket="posed", Key="set/pose/3.png")
    with pytest.raises(
        DataError, match=f"1 of 4 clips lack.*\\n  {pose}, of s3://posed/set/clips/3"
    ):
        read(there, 0)


def test_batches_are_the_same_while_the_store_fails(
    proxy: store.Proxy, local_catalog: Path, remote_catalog: Path
) -> None:
    modes: list[store.Mode] = ["cut", "open", "gone", "open", "silent", "open", "slow", "open"]
    proxy.on_connection = lambda number: modes[number % len(modes)]
    found = _batches(remote_catalog, workers=2, store=_QUICK)
    assert proxy.num_connections > len(modes)
    _assert_same(found, _batches(local_catalog, workers=0))


def test_spans_of_films_are_those_of_local_films(
    proxy: store.Proxy, folder: Path, tmp_path: Path
) -> None:
    batches = list[list[Batch]]()
    for place in (f"s3://{_BUCKET}/set", str(folder)):
        table, out = tmp_path / "t.csv", tmp_path / f"{len(batches)}.parquet"
        rows = [f"{place}/0.mp4,one,0,0.5", f"{place}/0.mp4,two,0.5,"]
        table.write_text("\n".join(["path,caption,start,end", *rows]))
        index([table], captions=None, out=out, work=HERE)
        batches.append(_batches(out, workers=0))
    _assert_same(*batches)


def test_what_has_come_is_not_asked_for_again(
    proxy: store.Proxy, server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stores, "_RANGE_BYTES", 2**16)
    content = os.urandom(2**20)
    store.put(server, _BUCKET, {"large.bin": content})
    proxy.on_connection = lambda number: "cut" if number % 5 == 1 else "open"
    client = stores.StoreClient(StoreSection.model_validate(_QUICK))
    with (
        stores.using(client),
        stores.local(_media("large.bin", num_bytes=len(content))) as here,
    ):
        assert here.file.read_bytes() == content
    fetched = client.take_fetched()
    assert fetched.retries
    assert fetched.num_bytes == len(content)


@pytest.mark.parametrize(
    ("media", "how", "kind", "words"),
    [
        (_media("set/no.mp4", num_bytes=9), {}, ClipError, "no.mp4: does not exist in its store"),
        (_media("set/no.mp4"), {}, ClipError, "does not exist in its store"),
        (_media(num_bytes=2**20), {}, ClipError, "Index it again"),
        (
            _media(num_bytes=2**20),
            {"memory_gib": 2**-12},
            ClipError,
            "of memory are allowed .raise data.sample_memory_gib",
        ),
        (
            _media("0.mp4"),
            {"mode": "gone"},
            stores.OutageError,
            r"^s3://clips-of-tests has given nothing for .* times asked; .*0\.mp4, and gives no",
        ),
    ],
)
def test_a_clip_that_cannot_be_had_says_why(
    proxy: store.Proxy, media: Media, how: dict[str, Any], kind: type[Exception], words: str
) -> None:
    proxy.mode = how.get("mode", "open")
    with (
        pytest.raises(kind, match=words),
        stores.using(stores.StoreClient(StoreSection(retry_seconds=0.5), how.get("memory_gib"))),
        stores.local(media),
    ):
        pass


def test_an_object_that_a_living_store_does_not_give_is_rejected_alone(
    remote_catalog: Path, proxy: store.Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    bad, *others = [clip.media for clip in Catalog.load(remote_catalog).clips()]
    get = stores._get

    async def give(fs: Any, path: str, *how: Any) -> tuple[bytes, str]:
        if f"s3://{path}" == bad.path:
            raise OSError("broken")
        return await get(fs, path, *how)

    monkeypatch.setattr(stores, "_get", give)
    with (
        pytest.raises(stores.UnreachableError, match="its store did not give it for"),
        stores.using(stores.StoreClient(StoreSection(retry_seconds=0.1), examples=tuple(others))),
        stores.local(bad),
    ):
        pass


def test_an_outage_ends_the_run_with_the_stores_name_and_rejects_no_clip(
    remote_catalog: Path, proxy: store.Proxy
) -> None:
    how = {"timeout_seconds": 20, "retry_seconds": 1}
    data = section(catalog=remote_catalog, workers=0, frame_cache_gib=0.0, store=how)
    loader = Loader(data, batch_size=2, prefetch_batches=1)
    batches = loader.batches()
    next(batches)
    proxy.become("gone")
    with pytest.raises(stores.OutageError, match=r"^s3://clips-of-tests has given nothing for"):
        list(batches)
    assert not loader.quarantine.failures


def test_a_server_that_leads_elsewhere_is_refused_at_once() -> None:
    asked = list[str]()

    class Leading(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            elsewhere = f"http://localhost:{leading.server_port}/inner"
            targets = {"/circle": "/circle", "/other": elsewhere, "/file": "file:///etc/passwd"}
            is_whole = self.path == "/whole"
            self.send_response(200 if is_whole else 302)
            if not is_whole:
                self.send_header("Location", targets[self.path])
            self.send_header("Content-Length", str(2**40 if is_whole else 0))
            self.end_headers()
            with suppress(OSError):
                self.wfile.write(b"0" * 1000 * is_whole)

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - its name there
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Leading) as leading:
        threading.Thread(target=leading.serve_forever, args=(0.05,), daemon=True).start()
        for name, words in (
            ("circle", "TooManyRedirects"),
            ("other", "redirects to http://localhost.* is in this network"),
            ("file", "redirects to file:"),
            ("whole", "does not serve ranges"),
        ):
            media = Media(f"http://127.0.0.1:{leading.server_port}/{name}", num_bytes=9)
            with pytest.raises(ClipError, match=words):
                _read(media, retry_seconds=0.0)
        leading.shutdown()
    assert "/inner" not in asked
    assert asked.count("/circle") <= 10


def test_refused_credentials_end_the_run_in_a_sentence_without_them(
    remote_catalog: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_files = len([each for each in folder.iterdir() if each.suffix])
    monkeypatch.setenv("INITIAL_NO_AUTH_ACTION_COUNT", str(1 + num_files))  # the bucket's first
    with store.s3_server() as guarded:
        store.put_folder(guarded, _BUCKET, folder.parent)
        store.use(monkeypatch, guarded)
        with pytest.raises(DataError, match=f"^s3://{_BUCKET} refused the credentials") as caught:
            _batches(remote_catalog, workers=1)
    assert not isinstance(caught.value, ClipError)
    assert not any(secret in str(caught.value) for secret in store.KEYS.values())


def test_a_web_server_serves_what_a_folder_has(
    folder: Path, local_catalog: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Certificates that a process trusts are read when it starts."""
    authority, out = tmp_path / "ca.pem", tmp_path / "c.parquet"
    with store.https_server(folder.parent, authority) as address:
        with pytest.raises(DataError, match=f"^{address}.*self-signed.*SSL_CERT_FILE"):
            stores.find_objects(f"{address}/set/0.mp4")
        monkeypatch.setenv("SSL_CERT_FILE", str(authority))
        command = [sys.executable, "-m", "longtake", "data", "index", f"{address}/set"]
        subprocess.run([*command, "--out", str(out), "--workers", "1"], check=True)
        _assert_same(_batches(out, workers=1), _batches(local_catalog, workers=0))


@pytest.mark.parametrize("address", ["https://me:word@host/a.mp4", "https://host/a.mp4?Sign=word"])
def test_an_address_with_a_secret_is_refused_without_it(address: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"https://host/a\.mp4 was given with") as caught:
        index([Path(address)], captions=None, out=tmp_path / "c.parquet", work=HERE)
    assert "word" not in str(caught.value).replace("password", "")


def test_a_lost_store_ends_an_index_that_the_next_one_continues(
    proxy: store.Proxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, names = tmp_path / "c.parquet", (f"set/{number}.mp4" for number in range(2))
    sources = [Path(f"s3://{_BUCKET}/{name}") for name in names]
    asked = stores.local

    def lose(media: Media) -> Any:
        if media.path.endswith("1.mp4"):
            proxy.become("gone")
        return asked(media)

    client = stores.StoreClient(StoreSection(retry_seconds=0.0))
    with monkeypatch.context() as patch, stores.using(client):
        patch.setattr(stores, "local", lose)
        with pytest.raises(stores.OutageError, match=f"^s3://{_BUCKET} has given nothing for"):
            index(sources, captions=None, out=out, work=HERE)
    proxy.become("open")
    report = index(sources, captions=None, out=out, work=HERE)
    assert (report.accepted, report.unchanged) == (2, 1)


def test_an_unknown_kind_of_store_is_refused() -> None:
    with (
        pytest.raises(DataError, match=r"^ftp://host/a\.mp4: expected .* s3://, gs://, http://"),
        stores.local(Media("ftp://host/a.mp4")),
    ):
        pass


def test_the_cache_serves_what_the_store_has_lost(
    proxy: store.Proxy, local_catalog: Path, remote_catalog: Path, tmp_path: Path
) -> None:
    how = {"workers": 2, "store": {**_QUICK, "cache": tmp_path / "cache"}}
    _batches(remote_catalog, **how)
    proxy.become("gone")
    _assert_same(_batches(remote_catalog, **how), _batches(local_catalog, workers=0))


def test_the_cache_keeps_what_was_used_last_within_its_size(tmp_path: Path) -> None:
    cache = clip_cache.ClipCache(tmp_path, 1000)
    filled = list[int]()

    def use(number: int) -> None:
        def write(descriptor: int) -> None:
            filled.append(number)
            os.write(descriptor, bytes([number]) * 300)

        descriptor, _ = cache.open(Media(f"s3://bucket/{number}"), 300, write)
        with os.fdopen(descriptor, "rb") as file:
            file.seek(0)
            assert file.read() == bytes([number]) * 300
        for each in tmp_path.glob("*.clip"):  # a clock may stand still for some milliseconds
            os.utime(each, ns=(0, each.stat().st_mtime_ns - 10**9))

    for number in (1, 2, 3, 1, 4, 1, 2, 4):
        use(number)
    assert filled == [1, 2, 3, 4, 2]  # 2 made room for 4, and 3 for 2
    assert sum(each.stat().st_size for each in tmp_path.glob("*.clip")) <= 1000


def test_a_cache_of_clips_leaves_files_of_others_alone(tmp_path: Path) -> None:
    folder, thesis = tmp_path / "cache", tmp_path / "thesis.tex"
    thesis.write_text("mine")
    folder.mkdir()
    (folder / "total").write_text("mine")
    cache, media = clip_cache.ClipCache(folder, 100), Media("s3://bucket/1")
    with pytest.raises(DataError, match="cache is no cache of longtake"):
        cache.open(media, 10, lambda file: None)
    assert (folder / "total").read_text() == "mine"
    (folder / "total").unlink()
    os.close(cache.open(media, 90, lambda file: None)[0])
    others = [folder / "film.clip", folder / "film.part"]
    for each in others:
        each.write_text("mine")
        os.utime(each, (0, 0))
    os.close(cache.open(Media("s3://bucket/2"), 90, lambda file: None)[0])
    assert all(each.exists() for each in others)
    (folder / "total").unlink()
    (folder / "total").symlink_to(thesis)
    with pytest.raises(DataError, match="total is a symbolic link"):
        cache.open(Media("s3://bucket/3"), 90, lambda file: None)
    assert thesis.read_text() == "mine"


def test_many_fill_the_cache_at_once(tmp_path: Path) -> None:
    sizes = [100 + number for number in range(12)]

    def use(number: int) -> bool:
        cache, size = clip_cache.ClipCache(tmp_path, 600), sizes[number % 12]
        media = Media(f"s3://bucket/{size}")
        descriptor, _ = cache.open(media, size, lambda file: write(file, size))
        with os.fdopen(descriptor, "rb") as file:
            return Path(f"/proc/self/fd/{file.fileno()}").read_bytes() == bytes([size]) * size

    def write(descriptor: int, size: int) -> None:
        for _ in range(size):
            os.write(descriptor, bytes([size]))

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(use, range(200)))
    assert sum(each.stat().st_size for each in tmp_path.glob("*.clip")) <= 600
    assert not list(tmp_path.glob("*.part"))


def test_an_object_is_a_file_to_read(proxy: store.Proxy, server: str) -> None:
    content = os.urandom(300_000)
    store.put(server, _BUCKET, {"file.bin": content})
    with stores.open_object(_media("file.bin", num_bytes=len(content))) as file:
        local = io.BytesIO(content)
        for offset, whence, size in ((0, 0, 10), (270_000, 0, 5), (-7, 2, 99), (-20, 1, 8)):
            file.seek(offset, whence)
            local.seek(offset, whence)
            assert file.read(size) == local.read(size)
