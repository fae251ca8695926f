"""Reads clips from object stores (s3, gs, http) with fsspec, retries and a cache on disk.

A clip is fetched as a whole into memory or into a file of the cache before it is decoded; a member
of a tar by its range of bytes. Credentials come from the environment and the libraries' own files.
"""

import asyncio
import hashlib
import io
import os
import posixpath
import random
import re
import threading
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping
from concurrent import futures
from contextlib import closing, contextmanager, suppress
from contextvars import ContextVar, copy_context
from dataclasses import dataclass, replace
from functools import cache
from importlib import import_module
from ipaddress import ip_address
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

from longtake.config import StoreSection
from longtake.data import content
from longtake.data.clip import Media
from longtake.data.clip_cache import ClipCache
from longtake.errors import ClipError, DataError

_T = TypeVar("_T")
_MODULES = {"s3": "s3fs", "gs": "gcsfs", "http": "aiohttp", "https": "aiohttp"}
_COLLAPSED = re.compile(f"({'|'.join(_MODULES)}):/+(.+)")  # a URL as pathlib leaves it
_RANGE_BYTES, _MIN_RANGE_BYTES = 8 * 2**20, 2**18  # size of one request
# Waits between retries double up to the limit.
_FIRST_WAIT_SECONDS, _MAX_WAIT_SECONDS = 0.25, 5.0
_POLL_SECONDS = 0.25
_PARALLEL = 32  # number of parallel requests about objects
_ASKED_AT_ONCE = 10_000  # number of objects held in memory while they are looked up
_REFUSED = (401, 403)  # HTTP statuses: unauthorized, forbidden
_MISSING = (404, 410)  # HTTP statuses: not found, gone
# Names of exceptions, as the clients that raise them may not be installed.
_REFUSED_ERRORS = (
    "PermissionError",
    "NoCredentialsError",
    "PartialCredentialsError",
    "CredentialRetrievalError",
    "ProfileNotFound",
    "TokenRetrievalError",
    "DefaultCredentialsError",
    "RefreshError",
)
_NEVER = (
    "TooManyRedirects",
    "InvalidURL",
    "InvalidUrlClientError",
    "InvalidUrlRedirectClientError",
    "NonHttpUrlClientError",
    "NonHttpUrlRedirectClientError",
)
_SYSTEM_RANDOM = random.SystemRandom()  # leaves seeded generators untouched


class MissingError(ClipError):
    """Raised when an object store does not have an object."""


class UnreachableError(ClipError):
    """Raised when a store did not give one object in time but gives others; may work later."""


class UnansweredError(ClipError):
    """Raised for a URL that can never answer, such as one that redirects to itself."""


ASKED_ENOUGH = (MissingError, UnreachableError, UnansweredError)
"""Errors of reading an object after which a second try is useless."""


class OutageError(DataError):
    """Raised when an object store answers no request at all."""


class _RedirectError(Exception):
    """Raised when a store's server redirects to a forbidden address; a second try cannot help."""


@dataclass(frozen=True)
class Fetched:
    """Bytes that were read from object stores, and the seconds and retries it took."""

    num_bytes: int = 0
    seconds: float = 0.0
    retries: int = 0

    def __add__(self, other: "Fetched") -> "Fetched":
        return Fetched(
            self.num_bytes + other.num_bytes,
            self.seconds + other.seconds,
            self.retries + other.retries,
        )


NOTHING = Fetched()


class StoreClient:
    """Settings of reading from object stores, and counters of what was read.

    Args:
        section: the recipe's section of object stores.
        memory_gib: limit for a clip that is fetched to memory; None for no limit.
        examples: objects to ask for, in addition to the last one read, when an object fails: they
            tell a missing object from a store that is down.
    """

    def __init__(
        self,
        section: StoreSection,
        memory_gib: float | None = None,
        examples: tuple[Media, ...] = (),
    ) -> None:
        self.section, self.memory_gib, self.examples = section, memory_gib, examples
        self.progress: Callable[[], object] = lambda: None
        """Function that is called repeatedly while an object is fetched."""
        self.waiting: Callable[[str], object] = lambda reason: None
        """Function called with a reason when a store is silent, with "" when it answers again."""
        self.last_read: dict[str, Media] = {}
        """The object that was read last from each store, by the store's URL."""
        self._fetched, self._lock = Fetched(), threading.Lock()

    def count(self, fetched: Fetched) -> None:
        with self._lock:
            self._fetched += fetched

    def take_fetched(self) -> Fetched:
        """Return bytes, seconds and retries of reading object stores since the last call."""
        with self._lock:
            taken, self._fetched = self._fetched, Fetched()
        return taken


# A context variable: threads that fetch for another one inherit its client (`copy_context`).
_client: ContextVar[StoreClient] = ContextVar("client", default=StoreClient(StoreSection()))  # noqa: B039


@contextmanager
def using(client: StoreClient) -> Iterator[None]:
    """Read object stores with this client in the context, also in threads of this module."""
    token = _client.set(client)
    try:
        yield
    finally:
        _client.reset(token)


def url_of(path: Path | str) -> str | None:
    """Return the URL that a command's argument names, or None for a local path.

    Raises:
        DataError: the URL holds a password or a signature, which a catalog would keep.
    """
    match = _COLLAPSED.fullmatch(str(path))
    if match is None:
        return None
    url = f"{match[1]}://{match[2]}"
    parts = urlsplit(url)
    if "@" in parts.netloc or parts.query or parts.fragment:
        raise DataError(
            f"{match[1]}://{parts.netloc.rpartition('@')[2]}{parts.path} was given with a user, a "
            "password or a query, which would be written into the catalog. Give the address alone; "
            "credentials are taken from the environment and the configuration files of the store's "
            "client."
        )
    return url


def store_of(url: str) -> str:
    """Return the part of a URL that names the object store: its bucket or host."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc}"


@contextmanager
def local(media: Media) -> Iterator[Media]:
    """Fetch the bytes of a clip if it lies in a store, and yield it as a local file.

    Raises:
        ClipError: the object does not exist, or the clip has changed since it was indexed.
        UnreachableError: after all retries the store gives other objects, but not this one.
        OutageError: the store gives no object at all.
        DataError: the store refuses the credentials, or its client is not installed.
    """
    if not media.is_remote or media.local:
        if not media.is_remote:
            content.check_unchanged(media, _client.get().progress)
        yield media
        return
    descriptor, num_bytes = _obtain(media)
    try:
        yield replace(media, offset=0, num_bytes=num_bytes, local=f"/proc/self/fd/{descriptor}")
    finally:
        os.close(descriptor)


def _obtain(media: Media) -> tuple[int, int]:
    """Fetch a clip from a store; return a file descriptor of its bytes, and their number."""
    client = _client.get()
    num_bytes = media.num_bytes
    if num_bytes is None:
        num_bytes = measured(media).num_bytes
        assert num_bytes is not None
    section = client.section
    if section.cache is not None and num_bytes <= section.cache_gib * 2**30:
        # A clip larger than the whole cache is fetched to memory.
        kept = ClipCache(section.cache, int(section.cache_gib * 2**30))
        with suppress(OSError):  # such as a full disk: memory is used instead
            return kept.open(media, num_bytes, lambda file: _fetch(media, num_bytes, file))
    if client.memory_gib is not None and num_bytes > client.memory_gib * 2**30:
        raise ClipError(
            str(media),
            f"has {num_bytes / 2**30:.2f} GiB, and {client.memory_gib:g} GiB of memory are allowed "
            "(raise data.sample_memory_gib in a recipe, or --memory-gib of data index; or set "
            "data.store.cache, so that clips are fetched to a disk)",
        )
    # A file in memory without a name, as /dev/shm is small in containers.
    descriptor = os.memfd_create("longtake-clip")
    try:
        _fetch(media, num_bytes, descriptor)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor, num_bytes


def _fetch(media: Media, num_bytes: int, descriptor: int) -> None:
    for position, data in _pieces(media, num_bytes):
        written = 0
        while written < len(data):
            written += os.pwrite(descriptor, data[written:], position + written)
    if media.indexed is not None:  # a stamp does not suffice: pieces may come from two versions
        here = replace(media, offset=0, num_bytes=num_bytes, local=f"/proc/self/fd/{descriptor}")
        if not content.is_indexed(here, content.content_hash(here, _client.get().progress)):
            raise content.changed(media, "another content")


def _pieces(media: Media, num_bytes: int) -> Iterator[tuple[int, bytes]]:
    """Yield pieces of a clip in a store, each with its position; retries fetch only the rest."""
    store, path = _open_store(media.path)
    position, size, request, tag = 0, _RANGE_BYTES, _Request(media), ""
    while position < num_bytes:
        start = media.offset + position
        end = media.offset + min(position + size, num_bytes)
        try:
            answer = request.once(store, lambda: _get(store, path, start, end, tag))  # noqa: B023
        except TimeoutError:
            # A slow connection may pass a smaller piece in time.
            size = max(size // 4, _MIN_RANGE_BYTES)
            continue
        if answer is None:
            continue
        # All pieces have the ETag of the first: those of two versions make a damaged clip.
        data, tag = answer[0], tag or answer[1]
        if len(data) < end - start:
            raise ClipError(
                str(media),
                f"ends after {start + len(data):,} bytes; {end:,} were indexed. Index it again",
            )
        if len(data) > end - start:
            raise ClipError(
                str(media),
                f"its server sent more than the {end - start:,} bytes that were asked for: it does "
                "not serve ranges of bytes",
            )
        yield position, data
        position += len(data)
    if num_bytes == 0:
        yield 0, b""


async def _get(store: Any, path: str, start: int, end: int, tag: str) -> tuple[bytes, str]:
    """Return a range of an object's bytes and its ETag; reads at most one byte more.

    With `tag` the request fails if the object has changed.
    """
    most, ask = end - start + 1, f"bytes={start}-{end - 1}"
    if hasattr(store, "_call_s3"):
        # `_cat_file` of s3fs takes no IfMatch and returns no ETag.
        bucket, key, version = store.split_path(path)
        further = {"VersionId": version, "IfMatch": tag}
        further = {name: value for name, value in further.items() if value}
        answer = await store._call_s3("get_object", Bucket=bucket, Key=key, Range=ask, **further)
        with closing(answer["Body"]) as body:
            return await _read_at_most(body, most), answer.get("ETag", "")
    if path.startswith("http"):
        # `_cat_file` of fsspec would read the whole answer of a server that ignores Range.
        headers = {"Range": ask, **({"If-Match": tag} if tag else {})}
        session = await store.set_session()
        async with session.get(store.encode_url(path), headers=headers) as answer:
            store._raise_not_found_for_status(answer, path)
            data, etag = await _read_at_most(answer.content, most), answer.headers.get("ETag", "")
            # Weak ETags (W/) may be equal for different bytes, and If-Match refuses them.
            return data, "" if etag.startswith("W/") else etag
    return await store._cat_file(path, start=start, end=end), ""


async def _read_at_most(body: Any, most: int) -> bytes:
    found = bytearray()
    while piece := await body.read(most - len(found)):  # one read may return less
        found += piece
    return bytes(found)


class _Request:
    """A request to an object store, repeated until the store answers or was silent too long."""

    def __init__(self, media: Media) -> None:
        self._media, self._client = media, _client.get()
        self._last, self._failures = time.monotonic(), 0

    def until_done(self, store: Any, ask: Callable[[], Coroutine[Any, Any, _T]]) -> _T:
        """Repeat the request until the store answers; raise if it was silent for too long."""
        while True:
            with suppress(TimeoutError):
                answer = self.once(store, ask)
                if answer is not None:
                    return answer

    def once(self, store: Any, ask: Callable[[], Coroutine[Any, Any, _T]]) -> _T | None:
        """Send the request once; return the answer, or None after a failure and a pause.

        Raises:
            TimeoutError: the answer did not come in time; the caller may repeat the request.
        """
        begun = time.monotonic()
        try:
            answer = self._result(store, ask())
        except Exception as error:  # each client has its own exceptions
            self._raise_or_wait(error)
            self._client.count(Fetched(0, time.monotonic() - begun, 1))
            if isinstance(error, TimeoutError):
                raise TimeoutError from None
            return None
        if self._failures:
            self._client.waiting("")
        self._last, self._failures = time.monotonic(), 0
        num_bytes = len(answer[0]) if isinstance(answer, tuple) else 0
        if num_bytes:
            self._client.last_read[store_of(self._media.path)] = self._media
        self._client.count(Fetched(num_bytes, self._last - begun))
        return answer

    def _result(self, store: Any, asked: Coroutine[Any, Any, _T]) -> _T:
        seconds = self._client.section.timeout_seconds
        future = asyncio.run_coroutine_threadsafe(asked, store.loop)
        end = time.monotonic() + seconds
        # Polled, so that progress is reported while a request waits.
        while not futures.wait([future], _POLL_SECONDS).done:
            self._client.progress()
            if time.monotonic() > end:
                future.cancel()
                raise TimeoutError
        return future.result()

    def _raise_or_wait(self, error: Exception) -> None:
        """Raise the error of a failed request if a retry is useless; else wait before the retry."""
        media, section = self._media, self._client.section
        status, name = _status_of(error), type(error).__name__
        # Errors are raised `from None`, as those of clients may show a signed address.
        if (reason := _never_answered(error)) is not None:
            raise UnansweredError(str(media), reason) from None
        # Precondition failed: the ETag is another one.
        if status == 412:
            raise content.changed(media, "while it was read") from None
        # fsspec's HTTP client raises FileNotFoundError for every failure, with the real cause.
        is_missing = isinstance(error, FileNotFoundError) and error.__cause__ is None
        if is_missing or status in _MISSING:
            raise MissingError(str(media), "does not exist in its store") from None
        if name in _REFUSED_ERRORS or status in _REFUSED:
            raise DataError(
                f"{store_of(media.path)} refused the credentials of this environment for "
                f"{media.path} ({_words_of(error)}). Set them as the store's client expects, such "
                "as AWS_PROFILE or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY for s3, "
                "GOOGLE_APPLICATION_CREDENTIALS for gs; and check that they may read it."
            ) from None
        # The field of ssl.SSLCertVerificationError says why a certificate was not accepted.
        causes = _causes(error, with_contexts=True)
        if reasons := list(filter(None, (getattr(each, "verify_message", "") for each in causes))):
            raise DataError(
                f"{store_of(media.path)} has a certificate that this node does not trust "
                f"({reasons[0]}). Install its authority's, or name a file of it: AWS_CA_BUNDLE for "
                "s3, SSL_CERT_FILE for gs and https."
            ) from None
        # Range not satisfiable: the object ends before it.
        if status == 416:
            raise ClipError(
                str(media), "is shorter than it was indexed. Run longtake data index again"
            ) from None
        if isinstance(error, TimeoutError):
            reason = f"no answer within {section.timeout_seconds:g} s"
        else:
            reason = _words_of(error)
        # Counted since the last answer: a store that gives something is not down.
        silent = time.monotonic() - self._last
        if silent > section.retry_seconds:
            asked = (
                f"for {silent:.0f} s (data.store.retry_seconds is {section.retry_seconds:g}), "
                f"{self._failures + 1} times asked; the last: {reason}"
            )
            # Only this object fails: reject one clip instead of ending the run.
            if self._gives_others():
                raise UnreachableError(str(media), f"its store did not give it {asked}") from None
            raise OutageError(
                f"{store_of(media.path)} has given nothing {asked}. It was asked for {media}, and "
                "gives no other object either. No clip was rejected for that. Start the same "
                "command again when it answers."
            ) from None
        wait = min(_FIRST_WAIT_SECONDS * 2**self._failures, _MAX_WAIT_SECONDS)
        self._failures += 1
        said = f"{store_of(media.path)} has given nothing for {silent:.0f} s: {reason}"
        self._client.waiting(said)
        # Random, so that many processes do not ask a recovering store at the same moment.
        end = time.monotonic() + wait * _SYSTEM_RANDOM.uniform(0.5, 1.0)
        while (left := end - time.monotonic()) > 0:
            time.sleep(min(left, _POLL_SECONDS))
            self._client.progress()

    def _gives_others(self) -> bool:
        """Return true if the store gives another object now, such as the last one that was read."""
        name = store_of(self._media.path)
        # The last read object is known to exist.
        known = self._client.last_read.get(name, self._media)
        others = [each for each in self._client.examples if store_of(each.path) == name]
        for other in {each.path: each for each in (known, *others)}.values():
            if other.path == self._media.path:
                continue
            store, path = _open_store(other.path)
            size = min(other.num_bytes or 1, _MIN_RANGE_BYTES)
            with suppress(Exception):  # each client has its own exceptions
                end = other.offset + size
                if self._result(store, _get(store, path, other.offset, end, ""))[0]:
                    return True
        return False


def _causes(error: BaseException, *, with_contexts: bool = False) -> Iterator[BaseException]:
    """Yield an error of a store's client and its causes, as clients wrap errors of libraries."""
    cause: BaseException | None = error
    while cause is not None:
        yield cause
        cause = cause.__cause__ or (cause.__context__ if with_contexts else None)


def _never_answered(error: BaseException) -> str | None:
    """Return the reason why a request to a store can never be answered, or None."""
    for each in _causes(error):
        if isinstance(each, _RedirectError):
            return str(each)
        if (name := type(each).__name__) in _NEVER:
            return f"its server redirects to where no answer can come from ({name})"
    return None


@cache
def _redirect_guard() -> Any:
    """Return a hook for HTTP requests that refuses redirects to addresses inside this network."""
    import aiohttp
    from yarl import URL

    async def look(session: Any, context: Any, answer: Any) -> None:
        # Servers of public data could otherwise make this machine ask internal services.
        target = answer.url.join(URL(answer.response.headers.get("Location", "")))
        if target.scheme not in ("http", "https"):
            raise _RedirectError(f"its server redirects to {target.scheme or 'nothing'}:")
        # Redirects within one server are harmless; elsewhere only to public addresses.
        if target.origin() == answer.url.origin():
            return
        found = await asyncio.get_running_loop().getaddrinfo(target.host, target.port)
        addresses = [str(each[4][0]).partition("%")[0] for each in found]
        if not all(ip_address(each).is_global for each in addresses):
            raise _RedirectError(
                f"its server redirects to {target.origin()}, which is in this network; name that "
                "address itself if you trust it"
            )

    guard = aiohttp.TraceConfig()
    guard.on_request_redirect.append(look)
    return guard


def _status_of(error: BaseException) -> int | None:
    """Return the HTTP status code of a store client's error or of its cause, or None."""
    for each in _causes(error):
        response = getattr(each, "response", None)
        if isinstance(response, Mapping):  # ClientError of botocore
            status = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
        else:
            # aiohttp's errors have a status, and a deprecated code that warns when it is read.
            status = getattr(each, "status" if hasattr(each, "status") else "code", None)
        if str(status).isdecimal():
            return int(status)
    return None


def _words_of(error: BaseException) -> str:
    """Describe an error without its message, in which the client may show a signed address."""
    status = _status_of(error)
    if status is not None:
        return f"{type(error).__name__}, HTTP status {status}"
    strerror = getattr(error, "strerror", None)
    return strerror if isinstance(strerror, str) and "://" not in strerror else type(error).__name__


def _open_store(url: str) -> tuple[Any, str]:
    """Return the fsspec file system of a URL, and the object's path in it."""
    import fsspec

    protocol = url.partition("://")[0]
    if protocol not in _MODULES:
        raise DataError(f"{url}: expected an address that begins with {'://, '.join(_MODULES)}://.")
    try:
        import_module(_MODULES[protocol])
    except ImportError as error:
        raise DataError(
            f"{url} needs {_MODULES[protocol]}, which cannot be imported: {error}. Install it: "
            "pip install 'longtake[stores]'."
        ) from error
    seconds = max(1.0, _client.get().section.timeout_seconds)
    options: dict[str, Any] = {}
    if protocol == "s3":
        config = {"connect_timeout": seconds, "read_timeout": seconds}
        # The clients' own retries are off: only this module knows when to give up.
        options["config_kwargs"] = {**config, "retries": {"total_max_attempts": 1}}
    if protocol in ("http", "https"):
        options["client_kwargs"] = {"trace_configs": [_redirect_guard()]}
    # fsspec keeps file systems, whose cached listings would hide objects that are added later.
    store = fsspec.filesystem(protocol, use_listings_cache=False, **options)
    if protocol == "s3":
        store.retries = 1  # `_Request` repeats requests itself
    return store, store._strip_protocol(url)


class StoreFile(io.RawIOBase):
    """Seekable file over an object in a store; each read is a request."""

    def __init__(self, media: Media) -> None:
        super().__init__()
        assert media.num_bytes is not None
        self._media, self._size, self._position = media, media.num_bytes, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        start = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._size}[whence]
        self._position = max(0, start + offset)
        return self._position

    def readinto(self, buffer: Any) -> int:
        room = memoryview(buffer).cast("B")
        wanted = min(len(room), max(0, self._size - self._position))
        part = replace(self._media, offset=self._position, num_bytes=wanted)
        for position, data in _pieces(part, wanted):
            room[position : position + len(data)] = data
        self._position += wanted
        return wanted


def open_object(media: Media) -> io.BufferedReader:
    """Open an object of known size, such as a large tar, as a file that reads by requests."""
    return io.BufferedReader(StoreFile(media), 2**18)


def read_object(media: Media) -> bytes:
    """Return the content of a small object in a store."""
    assert media.num_bytes is not None
    return b"".join(data for _, data in _pieces(media, media.num_bytes))


def read_objects(objects: Iterable[Media]) -> Iterator[bytes]:
    """Yield the contents of small objects in a store, in order."""
    yield from _asked_at_once(read_object, objects)


def find_objects(url: str) -> list[Media]:
    """Return the objects of a store below a prefix, or one object, with sizes and stamps, sorted.

    Hidden names are left out.

    Raises:
        DataError: nothing is found, or the store refuses the credentials.
        UnreachableError: the store does not answer.
    """
    store, path = _open_store(url)
    protocol = url.partition("://")[0]
    has_suffix = bool(posixpath.splitext(urlsplit(url).path)[1])
    if protocol.startswith("http") and has_suffix:
        return [measured(Media(url))]
    try:
        found = _Request(Media(url)).until_done(store, lambda: store._find(path, detail=True))
    except MissingError:  # the bucket does not exist
        found = {}
    objects = []
    for name, info in found.items():
        address = name if "://" in name else f"{protocol}://{name}"
        below = address.removeprefix(url).split("/")
        if info.get("type") == "file" and not any(part.startswith(".") for part in below):
            objects.append(_described(address, info))
    if not objects:
        raise DataError(
            f"There is nothing at {url}. Name an object, or a prefix such as {store_of(url)}/clips."
        )
    # Listings of web servers lack sizes, which each object is asked for.
    if any(each.num_bytes is None for each in objects):
        objects = [each for each in measure(objects) if each is not None]
    return sorted(objects, key=str)


def measure(objects: Iterable[Media]) -> Iterator[Media | None]:
    """Look up objects in stores; yield each with size and stamp, or None if it is missing.

    Raises:
        ClipError: a server does not tell an object's size, or does not answer.
    """

    def measured_or_none(media: Media) -> Media | None:
        try:
            return measured(media)
        except MissingError:
            return None

    yield from _asked_at_once(measured_or_none, objects)


def missing_of(urls: Iterable[str]) -> set[str]:
    """Return the URLs of the objects that do not exist.

    Raises:
        DataError: a store refuses the credentials, or does not answer.
    """
    left, gone = iter(urls), set[str]()
    while wanted := [Media(url) for url in islice(left, _ASKED_AT_ONCE)]:
        try:
            found = list(measure(wanted))
        except ClipError as error:
            raise DataError(str(error)) from error
        gone |= {media.path for media, each in zip(wanted, found, strict=True) if each is None}
    return gone


def _asked_at_once(ask: Callable[[Media], _T], objects: Iterable[Media]) -> Iterator[_T]:
    # Threads of a pool do not inherit context variables such as the client.
    context = copy_context()
    with futures.ThreadPoolExecutor(_PARALLEL) as pool:
        yield from pool.map(lambda media: context.copy().run(ask, media), objects)


def ask_each(urls: Iterable[str]) -> None:
    """Check that each store gives one of its objects.

    Raises:
        DataError: a store does not have it, refuses the credentials, or does not answer.
    """
    one_of_each = {store_of(url): Media(url) for url in urls}
    for media in one_of_each.values():
        measured(media)


def measured(media: Media) -> Media:
    """Look up an object in a store and return it with its size and stamp.

    Raises:
        ClipError: the object does not exist, or its server does not tell its size or answer.
        DataError: its store refuses the credentials.
    """
    store, path = _open_store(media.path)
    info: dict[str, Any] = _Request(media).until_done(store, lambda: store._info(path))
    found = _described(media.path, info)
    if found.num_bytes is None:
        raise ClipError(str(media), "its server does not say how many bytes it has")
    return found


def _described(url: str, info: Mapping[str, Any]) -> Media:
    marks = ("ETag", "etag", "LastModified", "Last-Modified", "updated", "mtime", "generation")
    known = [str(info[name]) for name in marks if info.get(name)]
    stamp = 0
    if known:
        digest = hashlib.blake2b("\n".join(known).encode(), digest_size=8).digest()
        # The stamp takes the place of a modification time, and must fit into int64.
        stamp = int.from_bytes(digest) >> 1
    size = info.get("size")
    return Media(url, num_bytes=None if size is None else int(size), stamp=stamp)
