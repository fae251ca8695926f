"""A real S3 server on loopback, and a TCP proxy before it that can be slow, broken or gone."""

import importlib.util
import os
import re
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import partial
from http import HTTPStatus
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from ipaddress import IPv4Address
from pathlib import Path
from typing import Any, Literal

import pytest

Mode = Literal["open", "slow", "cut", "gone", "silent"]
KEYS = {"AWS_ACCESS_KEY_ID": "test-key", "AWS_SECRET_ACCESS_KEY": "test-secret"}
_CUT_BYTES = 3000  # of an answer, headers included
_SLOW_BYTES, _SLOW_SECONDS = 4096, 0.05
# It listens on a port that is free, and ends with who started it.
_SERVER = """
import sys
from moto.server import ThreadedMotoServer

server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
server.start()
print(server.get_host_and_port()[1], flush=True)
sys.stdin.read()
"""


def require(*modules: str) -> None:
    """Skip the test if a package of `[stores]` or of `[dev]` is missing."""
    missing = [name for name in modules if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(f"there is no {' and no '.join(missing)} (pip install -e '.[dev]')")


@contextmanager
def s3_server() -> Iterator[str]:
    """The address of moto's server, in a process of its own."""
    require("moto", "flask", "flask_cors", "s3fs")
    command = [sys.executable, "-c", _SERVER]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        assert process.stdout is not None
        try:
            port = int(process.stdout.readline())
            yield f"http://127.0.0.1:{port}"
        finally:
            process.kill()


@contextmanager
def https_server(folder: Path, authority: Path) -> Iterator[str]:
    """The address of a server of a folder's files, with ranges; its certificate is put aside."""
    require("cryptography", "aiohttp")
    authority.write_bytes(_certificate())
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(authority)
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(_Ranges, directory=folder)) as server:
        server.socket = context.wrap_socket(server.socket, server_side=True)
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        try:
            yield f"https://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()


class _Ranges(SimpleHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        asked = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        if asked is None:
            return super().do_GET()
        content = Path(self.translate_path(self.path)).read_bytes()
        first, last = int(asked[1]), min(int(asked[2]), len(content) - 1)
        self.send_response(HTTPStatus.PARTIAL_CONTENT)
        self.send_header("Content-Range", f"bytes {first}-{last}/{len(content)}")
        self.send_header("Content-Length", str(last + 1 - first))
        self.end_headers()
        self.wfile.write(content[first : last + 1])
        return None

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - its name there
        pass


def _certificate() -> bytes:
    """A new key, and its own certificate for 127.0.0.1."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "a test of longtake")])
    now, day = datetime.now(UTC), timedelta(days=1)
    address = x509.IPAddress(IPv4Address("127.0.0.1"))
    builder = x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
    builder = builder.not_valid_before(now - day).not_valid_after(now + day)
    builder = builder.add_extension(x509.SubjectAlternativeName([address]), critical=False)
    pem, form = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    private = key.private_bytes(pem, form, serialization.NoEncryption())
    return private + builder.sign(key, hashes.SHA256()).public_bytes(pem)


def put(address: str, bucket: str, files: dict[str, bytes]) -> None:
    """Make a bucket with these objects."""
    client = client_of(address)
    with suppress(client.exceptions.BucketAlreadyOwnedByYou):
        client.create_bucket(Bucket=bucket)
    for name, content in files.items():
        client.put_object(Bucket=bucket, Key=name, Body=content, ACL="public-read")


def client_of(address: str) -> Any:
    import boto3

    names = {"aws_access_key_id": "test-key", "aws_secret_access_key": "test-secret"}
    return boto3.client("s3", endpoint_url=address, region_name="us-east-1", **names)


def put_folder(address: str, bucket: str, folder: Path) -> None:
    files = {str(each.relative_to(folder)): each.read_bytes() for each in folder.rglob("*.*")}
    put(address, bucket, files)


def use(monkeypatch: pytest.MonkeyPatch, address: str) -> None:
    """Let this process, and those that it starts, take an address for S3's."""
    for name, value in {**KEYS, "AWS_ENDPOINT_URL": address}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.setenv("AWS_CONFIG_FILE", os.devnull)
    import s3fs

    s3fs.S3FileSystem.clear_instance_cache()  # a client keeps the address that it was made with


@dataclass
class Proxy:
    """Passes bytes between clients and a server, as its mode says."""

    target: int
    listener: socket.socket | None = None  # None: a new one on loopback
    mode: Mode = "open"
    num_connections: int = 0
    on_connection: Callable[[int], Mode] | None = None  # the mode of the n-th
    _sockets: list[socket.socket] = field(default_factory=list)

    def __enter__(self) -> "Proxy":
        self._listener = self.listener or socket.create_server(("127.0.0.1", 0))
        self.host, self.port = self._listener.getsockname()
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._close(self._listener)
        self.drop()

    @property
    def address(self) -> str:
        return f"http://{self.host}:{self.port}"

    def drop(self) -> None:
        """Reset every connection."""
        for each in self._sockets:
            self._close(each)
        self._sockets.clear()

    def become(self, mode: Mode) -> None:
        self.mode = mode
        self.drop()

    @staticmethod
    def _close(each: socket.socket) -> None:
        with suppress(OSError):
            each.shutdown(socket.SHUT_RDWR)
        each.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                self.num_connections += 1
                if self.on_connection:
                    self.mode = self.on_connection(self.num_connections)
                if self.mode == "gone":
                    self._close(client)
                    continue
                self._sockets.append(client)
                if self.mode == "silent":
                    continue
                server = socket.create_connection(("127.0.0.1", self.target))
                self._sockets.append(server)
                for source, sink, is_answer in ((client, server, False), (server, client, True)):
                    threading.Thread(
                        target=self._pass_on, args=(source, sink, is_answer), daemon=True
                    ).start()

    def _pass_on(self, source: socket.socket, sink: socket.socket, is_answer: bool) -> None:
        mode, passed = self.mode, 0
        with suppress(OSError):
            while data := source.recv(_SLOW_BYTES if mode == "slow" else 65536):
                if mode == "slow" and is_answer:
                    time.sleep(_SLOW_SECONDS)
                if mode == "cut" and is_answer and passed + len(data) > _CUT_BYTES:
                    sink.sendall(data[: _CUT_BYTES - passed])
                    break
                sink.sendall(data)
                passed += len(data)
        self._close(source)
        self._close(sink)
