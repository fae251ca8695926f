"""Faults of object stores: slow, or gone for a while; the store is an HTTP server on loopback."""

import csv
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from pathlib import Path

from longtake import fsio, node_dir
from longtake.data.catalog import Catalog
from longtake.data.index import index
from longtake.data.tasks import HERE
from longtake.faults.expect import BITWISE, Evidence
from longtake.faults.registry import NotPossibleHereError, fault
from longtake.faults.sandbox import TrainingSite

_GONE_SECONDS = 20.0  # longer than the shortest limit of a stall, so that it is reported
_SLOW_SECONDS = 0.4  # delay of each answer, with which some clips take longer than a step
_RANGE = re.compile(r"bytes=(\d+)-(\d+)")
_USUAL_STEPS = 6  # before the store is gone: a stall is found by comparing with them
_REPORT = ("watch.action=restart-worker", "data.store.timeout_seconds=2")


class LoopbackStore:
    """HTTP server for a folder's files, with byte ranges: an object store that can disappear."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.seconds = 0.0  # delay of each answer
        self.num_answers = 0
        self.is_gone = False
        self._server = self._start(0)

    def _start(self, port: int) -> ThreadingHTTPServer:
        server = ThreadingHTTPServer(("127.0.0.1", port), partial(_Handler, self))
        # Threads of clients that keep their connections open must not delay the end of the drill.
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        return server

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    def lose(self) -> None:
        """Make the store unreachable: refuse new connections, answer no request on open ones."""
        self.is_gone = True
        self._server.shutdown()
        self._server.server_close()

    def restore(self) -> None:
        self.is_gone = False
        # At the same port, which the URLs in the catalog contain.
        self._server = self._start(self._server.server_port)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = 60.0

    def __init__(self, store: LoopbackStore, *args: object) -> None:
        self._store = store
        with suppress(ConnectionError, TimeoutError):
            super().__init__(*args)  # type: ignore[arg-type]  # as the server calls it

    def do_HEAD(self) -> None:
        self._answer(has_body=False)

    def do_GET(self) -> None:
        self._answer(has_body=True)

    def _answer(self, *, has_body: bool) -> None:
        time.sleep(self._store.seconds)
        if self._store.is_gone:
            # Without an answer the client sees a broken connection, as of a store that is gone.
            self.close_connection = True
            return
        path = self._store.folder / Path(self.path).name
        if not path.is_file():
            self.send_error(404)
            return
        content, found = path.read_bytes(), _RANGE.fullmatch(self.headers.get("Range", ""))
        part = content[int(found[1]) : int(found[2]) + 1] if found else content
        self.send_response(206 if found else 200)
        if found:
            self.send_header("Content-Range", f"bytes {found[1]}-{found[2]}/{len(content)}")
        self.send_header("Content-Length", str(len(part)))
        self.send_header("ETag", f'"{path.stat().st_mtime_ns}"')
        self.send_header("Accept-Ranges", "bytes")
        self.end_headers()
        if has_body:
            self._store.num_answers += 1  # counted before the client can have the whole answer
            self.wfile.write(part)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - http.server's name
        pass


@contextmanager
def _clips_in_store(site: TrainingSite) -> Iterator[LoopbackStore]:
    """Serve a site's clips from a loopback store, and replace its catalog by one with URLs."""
    if find_spec("aiohttp") is None:
        raise NotPossibleHereError("it needs aiohttp: pip install 'longtake[stores]'")
    store = LoopbackStore(site.clips)
    try:
        table = site.folder / "data" / "urls.csv"
        with table.open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(("path", "caption"))
            for clip in Catalog.load(site.catalog_path).clips():
                writer.writerow((f"{store.address}/{Path(clip.path).name}", clip.caption))
        index([table], captions=None, out=site.catalog_path, work=HERE)
        yield store
    finally:
        if not store.is_gone:
            store.lose()


@fault(
    does="Trains from a store on loopback that answers each request after 0.4 s.",
    must="The loader waits; no sample is lost or repeated; every step is bitwise the same.",
)
def store_slow(site: TrainingSite, evidence: Evidence) -> None:
    with _clips_in_store(site) as store, site.launch() as process:
        process.wait_for_rows(_USUAL_STEPS)
        store.seconds, before = _SLOW_SECONDS, store.num_answers
        process.finish()
    evidence.expect(store.num_answers > before, "no clip was fetched while the store was slow")
    evidence.expect_undisturbed()
    evidence.message = (
        f"{store.num_answers - before} clips were fetched with {_SLOW_SECONDS:g} s before each "
        f"answer, and the training waited for them; {BITWISE}."
    )


@fault(
    does="Trains from a store on loopback that refuses connections for 20 s.",
    must="The stall names it; no sample is lost or repeated; every step is bitwise the same.",
)
def store_gone(site: TrainingSite, evidence: Evidence) -> None:
    with _clips_in_store(site) as store, site.launch(*_REPORT) as process:
        process.wait_for_rows(_USUAL_STEPS)
        store.lose()
        began = time.monotonic()
        timer = threading.Timer(_GONE_SECONDS, store.restore)
        timer.start()
        found = process.wait_for_node_event("stalled")
        cleared = process.wait_for_node_event("stall_cleared") if found else None
        timer.join()
        process.finish()
        restarted = [each for each in process.node_events() if each["event"] == "restarted_worker"]
    evidence.expect_event(found, began, "no event says that the training stalled", _GONE_SECONDS)
    evidence.expect(cleared is not None, "no event says that the stall ended")
    evidence.expect(not restarted, f"{len(restarted)} workers were ended that only waited")
    path = node_dir.diagnosis_path(site.run, found.event["token"]) if found else None
    sentence = str(fsio.read_json(path).get("sentence")) if path else ""
    named = f"The store {store.address} has given nothing for "
    evidence.expect(named in sentence, f"the stall does not name the store: {sentence}")
    evidence.expect_undisturbed()
    evidence.message = f"{sentence} After 20 s the store was back; {BITWISE}."
