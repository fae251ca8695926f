"""Serves `longtake board`: a read-only web server for a folder of runs.

It only answers GET, only from this machine unless --host says otherwise, and opens no file outside
of the folder.
"""

import asyncio
import gzip
import hmac
import ipaddress
import json
import os
import re
import resource
import secrets
import socket
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from http import HTTPStatus
from io import BufferedReader
from pathlib import Path, PurePosixPath
from threading import Event, Lock
from types import FrameType
from typing import Any, ClassVar, Final
from urllib.parse import quote

import anyio
import uvicorn
from anyio import CapacityLimiter, to_thread
from starlette.applications import Starlette
from starlette.convertors import StringConvertor, register_url_convertor
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import FileResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

from longtake import errors, fsio, process
from longtake.board import assets, overview, runs_page, svg
from longtake.board.pages import ServerLinks, render
from longtake.board.plots import series_payload
from longtake.board.registry import RENDER
from longtake.formatting import one_line
from longtake.fsio import open_below
from longtake.inspection import posters
from longtake.inspection.files import MEDIA_TYPES, is_folder_below
from longtake.inspection.reader import RunList, RunReader
from longtake.inspection.run_list import RunSummary, find_runs, summarize
from longtake.run_dir import RunDirectory

DEFAULT_PORT: Final = 8420
_POLL_SECONDS = 1.0
_TICK_SECONDS = 0.2
_ALIVE_SECONDS = 15.0  # a proxy or a browser may close a connection that is silent for longer
_LIST_SECONDS = 5.0
_MOST_STREAMS = 64
_REQUEST_SECONDS = 20.0  # in which the headers of a request must arrive
_MOST_READERS = 16
_LISTED_SECONDS = 10.0
_PATIENCE_SECONDS = 2.0  # after it, a page shows the progress of reading metrics.jsonl
_POSTERS_AT_ONCE = CapacityLimiter(4)
"""Limits the threads that decode stills of videos, which is slow, so that pages do not wait."""
_GZIPPED_BYTES = 2048
_COLUMN_BYTES = 2**20  # size of a long run's columns: glibc would keep freed ones below 32 MiB
_STATIC_TYPES = {".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}
_POLICY: Final = "; ".join(
    (
        "default-src 'none'",
        *("script-src 'self'", "style-src 'self'", "connect-src 'self'"),
        *("img-src 'self' data:", "media-src 'self'"),
        *("base-uri 'none'", "form-action 'self'", "frame-ancestors 'none'"),
    )
)
_HEADERS: Final = {
    "content-security-policy": _POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
}


class Board:
    """The runs of the served folder, with readers of the runs that were opened most recently."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.links = ServerLinks()
        self.runs = RunList(folder)
        self._readers: OrderedDict[str, RunReader] = OrderedDict()
        self._lock = Lock()
        self._listed: tuple[float, list[str]] | None = None
        self.num_streams = 0
        self.stopping = Event()

    def reader(self, name: str) -> RunReader:
        """Return the reader of a run's facts by the run's path below the folder.

        Raises:
            HTTPException: there is no run of that name.
        """
        # The runs are looked for without the lock: in a large folder that takes seconds.
        with self._lock:
            known = self._readers.get(name)
            if known is not None and is_folder_below(self.folder, name):
                self._readers.move_to_end(name)
                return known
        if name not in self.run_names():
            raise HTTPException(404, f"There is no run {name or '.'} in {self.folder}.")
        with self._lock:
            # Another request may have added a reader meanwhile: all must share one and its cache.
            own = RunReader(self.folder, name, partial(self.other_runs, name))
            found = self._readers.setdefault(name, own)
            while len(self._readers) > _MOST_READERS:
                self._readers.popitem(last=False)
            return found

    def run_names(self) -> list[str]:
        """Return the paths of the runs below the served folder; empty for the folder itself."""
        names = (path.relative_to(self.folder).as_posix() for path in find_runs(self.folder))
        return ["" if name == "." else name for name in names]

    def other_runs(self, name: str) -> dict[str, RunDirectory]:
        """Return the runs except `name`, by name; the listing is cached for `_LISTED_SECONDS`."""
        now = time.monotonic()
        if self._listed is None or now - self._listed[0] > _LISTED_SECONDS:
            self._listed = now, self.run_names()
        names = (each for each in self._listed[1] if each != name)
        return {each: RunDirectory(self.folder / each) for each in names}


# --- Pages ------------------------------------------------------------------------------------


def _html(text: str, request: Request, status: int = 200) -> Response:
    return _compressed(text.encode(errors="replace"), "text/html; charset=utf-8", request, status)


def _compressed(data: bytes, kind: str, request: Request, status: int = 200) -> Response:
    headers = {"cache-control": "no-store", "vary": "accept-encoding"}
    if len(data) >= _GZIPPED_BYTES and "gzip" in request.headers.get("accept-encoding", ""):
        data = gzip.compress(data, 1)
        headers["content-encoding"] = "gzip"
    return Response(data, status, headers, kind)


def _board(request: Request) -> Board:
    return request.app.state.board


def show_runs(request: Request) -> Response:
    board = _board(request)
    return _html(runs_page.render_runs(board.folder, board.runs.summaries(), board.links), request)


def show_comparison(request: Request) -> Response:
    board, names = _board(request), request.query_params.getlist("run")
    facts = [board.reader(name).facts() for name in dict.fromkeys(names)]
    return _html(runs_page.render_comparison(facts, board.links), request)


def show_page(request: Request) -> Response:
    board, page = _board(request), request.path_params["page"]
    if page not in RENDER:
        raise HTTPException(404, f"There is no page {page}. There are: {', '.join(RENDER)}.")
    reader = board.reader(request.path_params["run"])
    if (share := reader.share_read(_PATIENCE_SECONDS)) is not None:
        waiting = render("reading.html", board.links, run=reader.name, share=share)
        return _html(waiting, request, 202)
    facts = reader.facts()
    return _html(RENDER[page](facts, board.links, request.query_params), request)


def show_series(request: Request) -> Response:
    rows = _board(request).reader(request.path_params["run"]).rows()
    try:
        payload = series_payload(rows, request.query_params)
    except ValueError as error:
        raise HTTPException(400, str(error)) from error
    text = json.dumps(payload, separators=(",", ":"), allow_nan=False)
    return _compressed(text.encode(), "application/json", request)


# --- Files ------------------------------------------------------------------------------------


def show_media(request: Request) -> Response:
    """Serve a video or picture below the folder, also single ranges of its bytes."""
    name = request.path_params["path"]
    kind = MEDIA_TYPES.get(PurePosixPath(name).suffix.lower())
    if kind is None:
        raise HTTPException(404, "Only videos and pictures of runs are served.")
    try:
        file = open_below(_board(request).folder, name)
    except OSError as error:
        raise HTTPException(404, f"{name} cannot be shown: {error.strerror}.") from error
    return _FileAnswer(file, kind)


class _FileAnswer(FileResponse):
    """Response that sends an open file, the one that was checked, even if its path is replaced."""

    def __init__(self, file: BufferedReader, kind: str) -> None:
        path, headers = f"/proc/self/fd/{file.fileno()}", {"cache-control": "private, max-age=60"}
        super().__init__(path, 200, headers, kind, stat_result=os.fstat(file.fileno()))
        self._file = file

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._file:
            await super().__call__(scope, receive, send)


async def show_poster(request: Request) -> Response:
    """Serve a still of a video below the folder, or an SVG that says why there is none."""
    name, top = request.path_params["path"], _board(request).folder
    if PurePosixPath(name).suffix.lower() not in MEDIA_TYPES:
        raise HTTPException(404, "Only stills of videos of runs are served.")
    try:
        found = await to_thread.run_sync(posters.still, top, name, limiter=_POSTERS_AT_ONCE)
    except OSError as error:
        raise HTTPException(404, f"{name} cannot be shown: {error.strerror}.") from error
    if found.problem:
        picture = svg.no_still(found.problem)
        return Response(picture, 200, {"cache-control": "no-store"}, "image/svg+xml")
    headers = {"cache-control": "private, max-age=86400", "etag": f'"{found.tag}"'}
    if request.headers.get("if-none-match") == headers["etag"]:
        return Response(None, 304, headers)
    return Response(found.data, 200, headers, found.kind)


def show_static(request: Request) -> Response:
    name = request.path_params["name"]
    kind = _STATIC_TYPES.get(PurePosixPath(name).suffix)
    data = assets.static_files().get(name)
    if kind is None or data is None:
        raise HTTPException(404, f"There is no file {name}.")
    # Other files have another digest, and so another URL.
    headers = {"cache-control": "public, max-age=31536000, immutable"}
    return Response(data, 200, headers, f"{kind}; charset=utf-8")


# --- What is new ------------------------------------------------------------------------------


async def stream_runs(request: Request) -> Response:
    board = _board(request)
    return _stream(
        request, lambda: {"runs": list(map(_as_live, board.runs.summaries()))}, _LIST_SECONDS
    )


async def stream_run(request: Request) -> Response:
    board = _board(request)
    reader = await to_thread.run_sync(board.reader, request.path_params["run"])
    # Only the ends of the run's files are read.
    path = reader.run.path
    return _stream(request, lambda: _as_live(summarize(board.folder, path)), _POLL_SECONDS)


def _as_live(summary: RunSummary) -> dict[str, Any]:
    seen = summary.last_seen
    facts = {**asdict(summary), "last_seen": None if seen is None else int(seen)}
    return {**facts, "line": overview.status_line(summary)}


def _stream(request: Request, read: Callable[[], dict[str, Any]], seconds: float) -> Response:
    """Stream server-sent events to a page: one whenever the result of `read` has changed.

    Nothing is read while no page is connected; the browser reconnects by itself.
    """
    board = _board(request)
    kind, headers = "text/event-stream", {"cache-control": "no-store"}
    if request.method == "HEAD":
        return Response(None, 200, headers, kind)
    if board.num_streams >= _MOST_STREAMS:
        raise HTTPException(503, f"{_MOST_STREAMS} pages are open; close some of them.")

    async def events() -> AsyncIterator[bytes]:
        last, silent = "", 0.0
        while not board.stopping.is_set() and not await request.is_disconnected():
            # A run may be moved or damaged while its page is open: the stream continues.
            with suppress(errors.LongtakeError, OSError):
                found = await to_thread.run_sync(read)
                text = json.dumps(found, separators=(",", ":"), sort_keys=True)
                if text != last or silent >= _ALIVE_SECONDS:
                    yield f"data: {text}\n\n".encode()
                    last, silent = text, 0.0
            # Short naps, so that a server that is stopped does not wait for the end of the pause.
            end = anyio.current_time() + seconds
            while not board.stopping.is_set() and anyio.current_time() < end:
                await anyio.sleep(_TICK_SECONDS)
            silent += seconds

    return _EventStream(board, events(), headers=headers, media_type=kind)


class _EventStream(StreamingResponse):
    """A stream of events that counts against the limit of streams from its creation on.

    So simultaneous requests obey the limit.
    """

    def __init__(self, board: Board, events: AsyncIterator[bytes], **options: Any) -> None:
        super().__init__(events, **options)
        self._board = board
        board.num_streams += 1

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._board.num_streams -= 1


# --- Who may ask ------------------------------------------------------------------------------


_HOST: Final = re.compile(r"(?P<name>\[[0-9A-Fa-f:.]+\]|[^][:@/\s]+)(:[0-9]{1,5})?")


class Guard:
    """Middleware that refuses other methods than GET, unknown hosts, and a missing token."""

    def __init__(
        self, app: Starlette, folder: Path, hosts: frozenset[str], token: str | None, port: int
    ) -> None:
        self.app, self.folder, self.hosts, self.token = app, folder, hosts, token
        self.cookie = f"longtake_board_{port}"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # The board has no WebSockets, the only other kind of connection.
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self.app(scope, receive, send)
            return
        request = Request(scope)

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                given = [(name.encode(), value.encode()) for name, value in _HEADERS.items()]
                message["headers"] = [*message["headers"], *given]
            await send(message)

        refused = self._refusal(request)
        # Whatever a page opens while this request is served has to be below the folder.
        with fsio.reading_below(self.folder):
            await (refused or self.app)(scope, receive, send_with_headers)

    def _refusal(self, request: Request) -> Response | None:
        if request.method not in ("GET", "HEAD"):
            return _error(request, 405, "The board only answers GET.")
        # A page of another site could reach this server by a domain that resolves to this machine
        # (DNS rebinding); the Host header then has that domain.
        host = request.headers.get("host", "")
        found = _HOST.fullmatch(host)
        if found is None or found["name"].lower() not in self.hosts:
            return _error(
                request, 421, f"The board is not known as {host!r}. Open it by the printed address."
            )
        # The page that asks for the token needs styles and scripts, which are no secret.
        if self.token is None or request.url.path.startswith("/static/"):
            return None
        given = request.cookies.get(self.cookie, "")
        bearer = request.headers.get("authorization", "").removeprefix("Bearer ")
        for each in (given, bearer):
            # Its time does not tell how much of a guess is right.
            if each and hmac.compare_digest(each.encode(), self.token.encode()):
                return None
        page = render("token.html", ServerLinks(), cookie=self.cookie)
        return _html(page, request, 401)


def _error(request: Request, status: int, sentence: str) -> Response:
    page = render("error.html", ServerLinks(), status=status, sentence=sentence)
    return _html(page, request, status)


def _show_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    is_said = error.detail != HTTPStatus(error.status_code).phrase
    sentence = error.detail if is_said else f"There is no page {request.url.path}."
    return _error(request, error.status_code, sentence)


def _show_failure(request: Request, error: Exception) -> Response:
    sentence = one_line(error)
    if not isinstance(error, errors.LongtakeError):
        sentence = f"This page failed: {type(error).__name__}: {sentence}"
    return _error(request, 500, sentence)


class _Text(StringConvertor):
    """Matches the rest of a URL's path, as a run's name may contain a newline."""

    regex = "(?s:.*)"


register_url_convertor("text", _Text())


def make_app(
    folder: Path, *, hosts: frozenset[str], token: str | None = None, port: int = DEFAULT_PORT
) -> Guard:
    """Return the board's web application; it answers requests for the given host names only."""
    app = Starlette(
        routes=[
            Route("/", show_runs),
            Route("/compare", show_comparison),
            Route("/run/{page}/{run:text}", show_page),
            Route("/series/{run:text}", show_series),
            Route("/media/{path:text}", show_media),
            Route("/poster/{path:text}", show_poster),
            Route("/static/{digest}/{name}", show_static),
            Route("/live", stream_runs),
            Route("/live/{run:text}", stream_run),
        ],
        exception_handlers={
            HTTPException: _show_http_error,
            errors.LongtakeError: _show_failure,
            OSError: _show_failure,
            Exception: _show_failure,
        },
    )
    app.state.board = Board(folder)
    app.router.redirect_slashes = False
    return Guard(app, folder, hosts, token, port)


class _Connection(H11Protocol):
    """Closes connections on which no request arrives: uvicorn waits for one without a limit.

    Each request must arrive within `_REQUEST_SECONDS`. When too many connections wait for a
    request, the oldest is closed, so that they never use up the process's file descriptors.
    """

    waiting: ClassVar[dict["_Connection", asyncio.TimerHandle]] = {}  # the oldest first

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._note_state()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._note_state()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._note_state()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        super().connection_lost(exc)

    def _note_state(self) -> None:
        cycle: RequestResponseCycle | None = self.cycle  # None before the first request
        # A response may take as long as it likes, such as a stream of events.
        if cycle is not None and not cycle.response_complete:
            self._stop_waiting()
        elif self not in self.waiting and not self.transport.is_closing():
            self.waiting[self] = self.loop.call_later(_REQUEST_SECONDS, self.transport.close)
            if len(self.waiting) > _most_waiting():
                oldest = next(iter(self.waiting))
                oldest._stop_waiting()
                oldest.transport.close()

    def _stop_waiting(self) -> None:
        if timer := self.waiting.pop(self, None):
            timer.cancel()


def _most_waiting() -> int:
    """Return the most connections that may wait: a quarter of the files this process may open."""
    return max(8, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4)


class _Server(uvicorn.Server):
    """The board's uvicorn server; ends event streams at the first signal, not waiting for them."""

    def __init__(self, config: uvicorn.Config, board: Board) -> None:
        super().__init__(config)
        self._board = board

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Handle a signal as `uvicorn.Server` does, after the event streams were told to stop."""
        self._board.stopping.set()
        super().handle_exit(sig, frame)


# --- The server -------------------------------------------------------------------------------


def is_loopback(host: str) -> bool:
    with suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens on `port`; if the default is taken, on a port after it.

    Raises:
        RunError: the address cannot be used.
    """
    # A port that was named must be that one; only the default may move on.
    tried = range(port, port + 20) if port == DEFAULT_PORT else (port,)
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
    except OSError as error:
        raise errors.RunError(f"--host {host} cannot be found: {error.strerror}.") from error
    why = ""
    for each in tried:
        found = socket.socket(family, socket.SOCK_STREAM)
        # Otherwise the port of a board that has just ended is taken for a minute.
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            found.bind((host, each))
        except OSError as error:
            found.close()
            why = error.strerror or str(error)
            continue
        found.listen(128)
        return found
    raise errors.RunError(
        f"The board cannot listen on {host}, port {port}: {why}. Choose another --port, or 0 for "
        "any that is free."
    )


def known_hosts(host: str) -> frozenset[str]:
    """Return the host names that the board accepts in a request's Host header."""
    names = {"localhost", "127.0.0.1", "[::1]"}
    if not is_loopback(host):
        own = socket.gethostname()
        names |= {own, socket.getfqdn(), host, f"[{host}]"}
        with suppress(OSError):
            found = socket.getaddrinfo(own, None)
            names |= {str(each[4][0]) for each in found} | {f"[{each[4][0]}]" for each in found}
        with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as outward:
            outward.connect(("192.0.2.1", 9))  # sends nothing: it asks for this host's address
            names.add(outward.getsockname()[0])
    return frozenset(name.lower() for name in names)


def address(host: str, port: int, token: str | None = None) -> str:
    """Return the board's URL; a token is placed after "#", which browsers never send or log."""
    shown = "localhost" if is_loopback(host) else host
    if host in ("0.0.0.0", "::"):  # noqa: S104 - it is compared
        shown = socket.gethostname()
    shown = f"[{shown}]" if ":" in shown else shown
    return f"http://{shown}:{port}/" + (f"#token={quote(token)}" if token else "")


def serve(folder: Path, host: str, sock: socket.socket, token: str | None) -> None:
    """Serve the board until Ctrl-C or SIGTERM."""
    port = sock.getsockname()[1]
    app = make_app(folder, hosts=known_hosts(host), token=token, port=port)
    process.return_large_blocks(_COLUMN_BYTES)
    config = uvicorn.Config(
        app,
        log_level="error",
        access_log=False,
        lifespan="off",
        timeout_graceful_shutdown=2,
        server_header=False,
        http=_Connection,
        ws="none",
    )
    _Server(config, app.app.state.board).run(sockets=[sock])


def new_token() -> str:
    return secrets.token_urlsafe(24)
