"""What the server answers: to whom, with which headers, and nothing that lies elsewhere."""

import asyncio
import json
import os
import shutil
import socket
import stat
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from starlette.responses import PlainTextResponse
from starlette.testclient import TestClient
from tests.board.conftest import serving
from uvicorn.server import ServerState

from longtake.board import server
from longtake.board.pages import PAGES, ServerLinks
from longtake.errors import RunError
from longtake.fsio import open_below
from longtake.inspection.reader import RunList
from longtake.inspection.rows import read_rows
from longtake.run_dir import RunDirectory

_TOKEN = "the token of this test"  # noqa: S105 - it opens nothing
_SECRET = "what lies elsewhere"  # noqa: S105
_VIDEO = b"\0\0\0\x18ftypisom" + bytes(range(256)) * 4


@pytest.fixture
def runs(told: RunDirectory, tmp_path: Path) -> Path:
    """A folder with one run, and files beside it that no answer may show."""
    (told.path / "clip.mp4").write_bytes(_VIDEO)
    runs, elsewhere = tmp_path / "runs", tmp_path / "elsewhere"
    runs.mkdir()
    told.path.rename(runs / "run")
    elsewhere.mkdir()
    for name in ("secret.mp4", "secret.log", "heartbeat.json", "scores.json"):
        (elsewhere / name).write_text(json.dumps({"note": _SECRET}))
    return runs


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def _client(folder: Path, **options: Any) -> TestClient:
    app = server.make_app(folder, hosts=server.known_hosts("127.0.0.1"), **options)
    return TestClient(app, base_url="http://localhost:8420", raise_server_exceptions=False)


@pytest.fixture
def client(runs: Path) -> TestClient:
    return _client(runs)


def _elsewhere(runs: Path) -> Path:
    return runs.parent / "elsewhere"


def test_a_long_first_look_says_how_far_it_is(
    client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_over = threading.Event()

    def read_slowly(run: RunDirectory, before: Any, progress: Callable[[float], object]) -> Any:
        progress(0.42)
        is_over.wait(60)
        return read_rows(run, before)

    monkeypatch.setattr(server, "_PATIENCE_SECONDS", 0.1)
    monkeypatch.setattr("longtake.inspection.reader.read_rows", read_slowly)
    for _ in range(2):  # a second look waits for the same reading
        answer = client.get("/run/overview/run")
        assert (answer.status_code, "42" in answer.text) == (202, True)
        assert 'http-equiv="refresh"' in answer.text
    is_over.set()
    monkeypatch.setattr(server, "_PATIENCE_SECONDS", 60.0)
    assert client.get("/run/overview/run").status_code == 200


# --- Who may ask ------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "X"])
def test_only_get_is_answered(client: TestClient, method: str) -> None:
    answer = client.request(method, "/")
    assert answer.status_code == 405
    assert "only answers GET" in answer.text


def test_head_is_get_without_the_page(client: TestClient) -> None:
    for path in ("/", "/run/overview/run", "/media/run/clip.mp4", "/live", "/live/run"):
        answer = client.head(path)
        assert answer.status_code == 200, path
        assert answer.content == b""


@pytest.mark.parametrize(
    "host", ["localhost", "localhost:8420", "LocalHost:1", "127.0.0.1:8420", "[::1]:8420", "[::1]"]
)
def test_the_board_is_known_by_names_of_this_machine(client: TestClient, host: str) -> None:
    assert client.get("/", headers={"host": host}).status_code == 200


@pytest.mark.parametrize(
    "host",
    ["", "evil.example", "evil.example:8420", "localhost.evil.example", "127.0.0.1.evil.example",
     "evil.example#localhost", "[::2]:8420", "localhost@evil.example", "[::1]evil.example",
     "[::1]:8420.evil.example", "::1", "localhost:8420:8420", "0.0.0.0:8420"],
)  # fmt: skip
def test_other_names_in_the_host_header_are_refused(client: TestClient, host: str) -> None:
    """A page of another site could read the board if its name were made to point here."""
    for path in ("/", "/media/run/clip.mp4", "/static/x/board.js"):
        answer = client.get(path, headers={"host": host})
        assert answer.status_code == 421
        assert "The board is not known as" in answer.text


def test_a_board_that_others_reach_is_known_by_its_addresses_too() -> None:
    names = server.known_hosts("0.0.0.0")  # noqa: S104 - nothing listens
    assert {"localhost", "127.0.0.1", "[::1]", socket.gethostname().lower()} <= names
    assert "192.0.2.7" in server.known_hosts("192.0.2.7")
    assert server.known_hosts("127.0.0.1") == {"localhost", "127.0.0.1", "[::1]"}


def test_a_token_is_needed_where_there_is_one(runs: Path) -> None:
    client, cookie = _client(runs, token=_TOKEN), f"longtake_board_{server.DEFAULT_PORT}"
    paths = ["/", "/run/overview/run", "/series/run", "/media/run/clip.mp4", "/live/run", "/no"]
    for path in paths:
        for headers in (
            {},
            {"cookie": f"{cookie}=wrong"},
            {"cookie": f"{cookie}="},
            {"cookie": f"another={_TOKEN}"},
            {"authorization": "Bearer wrong"},
            {"authorization": "Bearer "},
            {"authorization": f"Basic {_TOKEN}"},
        ):
            answer = client.get(path, headers=headers)
            assert answer.status_code == 401, (path, headers)
            assert "needs a token" in answer.text
            assert _TOKEN not in answer.text
        assert client.get(f"{path}?token={_TOKEN}").status_code == 401
    given = _TOKEN.replace(" ", "_")
    client = _client(runs, token=given)
    for headers in ({"cookie": f"{cookie}={given}"}, {"authorization": f"Bearer {given}"}):
        for path in paths[:4]:
            answer = client.get(path, headers=headers)
            assert answer.status_code == 200
            assert given not in answer.text


def test_scripts_are_there_without_a_token(runs: Path) -> None:
    """The page that asks for it needs them."""
    client = _client(runs, token=_TOKEN)
    page = client.get("/").text
    urls = [part.partition('"')[0] for part in page.split('src="')[1:]]
    assert urls
    for url in urls:
        assert client.get(url).status_code == 200


def test_the_address_has_the_token_where_it_is_not_sent() -> None:
    url = server.address("192.0.2.7", 8420, token="a/b")
    assert url == "http://192.0.2.7:8420/#token=a/b"
    assert server.address("::1", 1) == "http://localhost:1/"
    assert server.address("2001:db8::1", 1) == "http://[2001:db8::1]:1/"
    assert len({server.new_token() for _ in range(9)}) == 9


def test_a_taken_port_is_named_and_the_default_one_replaced() -> None:
    first = server.listen("127.0.0.1", 0)
    with first, pytest.raises(RunError, match=r"cannot listen on 127\.0\.0\.1, port \d+: Address"):
        server.listen("127.0.0.1", first.getsockname()[1])
    with pytest.raises(RunError, match=r"--host no\.such\.host\.invalid cannot be found"):
        server.listen("no.such.host.invalid", 0)
    one, two = (server.listen("127.0.0.1", server.DEFAULT_PORT) for _ in range(2))
    with one, two:
        assert one.getsockname()[1] < two.getsockname()[1]


# --- Headers ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "headers", "status"),
    [
        ("/", {}, 200),
        ("/run/overview/run", {}, 200),
        ("/series/run", {}, 200),
        ("/static/x/board.css", {}, 200),
        ("/media/run/clip.mp4", {}, 200),
        ("/media/run/clip.mp4", {"range": "bytes=0-3"}, 206),
        ("/media/run/clip.mp4", {"range": "bytes=99999-"}, 416),
        ("/media/run/clip.mp4", {"range": "bytes"}, 400),
        ("/no/such/page", {}, 404),
        ("/media/run/no.mp4", {}, 404),
        ("/series/run?names=no", {}, 400),
        ("/", {"host": "evil.example"}, 421),
    ],
)
def test_every_answer_says_what_it_may_load(
    client: TestClient, path: str, headers: dict[str, str], status: int
) -> None:
    answer = client.get(path, headers=headers)
    assert answer.status_code == status
    policy = dict(
        part.split(" ", 1) for part in answer.headers["content-security-policy"].split("; ")
    )
    assert policy["default-src"] == policy["base-uri"] == policy["frame-ancestors"] == "'none'"
    for name in ("script-src", "style-src", "connect-src", "media-src"):
        assert policy[name] == "'self'"
    assert "unsafe" not in answer.headers["content-security-policy"]
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["referrer-policy"] == "no-referrer"
    assert answer.headers["cross-origin-resource-policy"] == "same-origin"
    assert not [name for name in answer.headers if name.startswith("access-control")]


def test_a_page_that_fails_says_so_in_a_sentence(
    client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> str:
        raise KeyError("<script>no</script>")

    monkeypatch.setattr(RunList, "summaries", fail)
    answer = client.get("/")
    assert answer.status_code == 500
    assert "This page failed: KeyError" in answer.text
    assert "<script>no" not in answer.text
    assert "default-src 'none'" in answer.headers["content-security-policy"]


def test_pages_have_no_script_or_style_of_their_own(client: TestClient) -> None:
    for path in ("/", "/run/overview/run", "/compare?run=run&run=run", "/no"):
        text = client.get(path).text
        scripts = [part.partition(">")[0] for part in text.split("<script")[1:]]
        assert all("src=" in each or 'type="application/json"' in each for each in scripts)
        assert "style=" not in text
        assert "<style" not in text
        assert "javascript:" not in text
        assert " onclick" not in text


# --- Files ------------------------------------------------------------------------------------


def test_videos_are_served_whole_and_in_part(client: TestClient) -> None:
    url = "/media/run/clip.mp4"
    answer = client.get(url)
    assert answer.content == _VIDEO
    assert answer.headers["content-type"] == "video/mp4"
    assert answer.headers["accept-ranges"] == "bytes"
    for asked, part in (
        ("0-3", _VIDEO[:4]),
        ("100-", _VIDEO[100:]),
        ("-7", _VIDEO[-7:]),
        ("5-99999", _VIDEO[5:]),
    ):
        answer = client.get(url, headers={"range": f"bytes={asked}"})
        assert (answer.status_code, answer.content) == (206, part)
        size = len(_VIDEO)
        assert answer.headers["content-range"].endswith(f"/{size}")
    for asked in ("9-5", "x-y", "-", "99999-", "0-0,1-1,x", "9" * 5000 + "-"):
        answer = client.get(url, headers={"range": f"bytes={asked}"})
        assert answer.status_code in (200, 206, 400, 416), asked


def test_html_in_a_video_stays_a_video(runs: Path, client: TestClient) -> None:
    (runs / "run" / "page.mp4").write_text("<html><script>alert(1)</script>")
    answer = client.get("/media/run/page.mp4")
    assert answer.headers["content-type"] == "video/mp4"
    assert answer.headers["x-content-type-options"] == "nosniff"


@pytest.mark.parametrize(
    "name", ["run.json", "recipe.toml", "metrics.jsonl", "page.html", "clip.mp4.html", "x.svg", ""]
)
def test_other_files_are_not_served(runs: Path, client: TestClient, name: str) -> None:
    if name and not (runs / "run" / name).exists():
        (runs / "run" / name).write_text("<html>")
    answer = client.get(f"/media/run/{name}")
    assert answer.status_code == 404
    assert "Only videos and pictures" in answer.text


_OUTSIDE = (
    "../elsewhere/secret.mp4",
    "run/../../elsewhere/secret.mp4",
    "..%2felsewhere%2fsecret.mp4",
    "%2e%2e/elsewhere/secret.mp4",
    "%2e%2e%2felsewhere%2fsecret.mp4",
    "run/%2e%2e/%2e%2e/elsewhere/secret.mp4",
    "..%252felsewhere/secret.mp4",
    "..%c0%afelsewhere%c0%afsecret.mp4",
    "..%5celsewhere%5csecret.mp4",
    "..;/elsewhere/secret.mp4",
    "run/./../../elsewhere/secret.mp4",
    "{absolute}",
    "/{absolute}",
    "%2f{absolute}",
    "file://{absolute}",
    "run/clip.mp4%00/../../../elsewhere/secret.mp4",
    "~root/secret.mp4",
)


def test_no_path_leads_out_of_the_folder(runs: Path) -> None:
    """Sent as they stand: a client may not tidy them up."""
    secret = _elsewhere(runs) / "secret.mp4"
    with serving(runs) as address:
        for path in _OUTSIDE:
            for place in ("media", "run/overview", "series", "live"):
                head, body = _raw(address, f"/{place}/{path.format(absolute=secret)}")
                assert head.split()[1] == b"404", (path, head)
                assert b'<p class="problem"' in body
                assert _SECRET.encode() not in body


def _raw(address: str, target: str) -> tuple[bytes, bytes]:
    host, port = address.removeprefix("http://").rstrip("/").split(":")
    with socket.create_connection(("127.0.0.1", int(port)), 30) as connection:
        request = f"GET {target} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n"
        connection.sendall(request.encode())
        found = b"".join(iter(lambda: connection.recv(2**16), b""))
    head, _, body = found.partition(b"\r\n\r\n")
    return head, body


def _make_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        folder = os.open(path.parent, os.O_RDONLY)
        made.bind(f"/proc/self/fd/{folder}/{path.name}")  # whose own path may be too long
        os.close(folder)


def _make_device(path: Path) -> None:
    try:
        os.mknod(path, 0o666 | stat.S_IFCHR, os.makedev(1, 5))
    except PermissionError:
        pytest.skip("only root makes devices")


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, _make_socket, _make_device])
def test_what_is_no_file_is_not_served(
    runs: Path, client: TestClient, make: Callable[[Path], None]
) -> None:
    make(runs / "run" / "odd.mp4")
    answer = client.get("/media/run/odd.mp4")
    assert (answer.status_code, "cannot be shown: " in answer.text) == (404, True)


@pytest.mark.parametrize(
    ("link", "target", "shown"),
    [
        ("run/linked.mp4", "{elsewhere}/secret.mp4", ""),
        ("run/linked.mp4", "../../elsewhere/secret.mp4", ""),
        ("run/evaluations/preset", "{elsewhere}", "/secret.mp4"),
        ("linked", "{elsewhere}", "/secret.mp4"),
        ("run/own.mp4", "clip.mp4", ""),
        ("run/loop.mp4", "loop.mp4", ""),
    ],
)
def test_links_are_not_served(
    runs: Path, client: TestClient, link: str, target: str, shown: str
) -> None:
    _link(runs / link, Path(target.format(elsewhere=_elsewhere(runs))))
    answer = client.get(f"/media/{link}{shown}")
    assert (answer.status_code, "cannot be shown: " in answer.text) == (404, True)
    assert _SECRET not in answer.text


def test_the_folder_itself_may_be_a_link(runs: Path) -> None:
    (runs.parent / "link").symlink_to(runs)
    client = _client(runs.parent / "link")
    assert client.get("/media/run/clip.mp4").content == _VIDEO
    assert client.get("/run/overview/run").status_code == 200


def test_what_was_opened_is_sent_though_a_link_takes_its_place(
    runs: Path, client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    def replaced(top: Path, name: str) -> Any:
        file = open_below(top, name)
        (top / name).unlink()
        (top / name).symlink_to(_elsewhere(runs) / "secret.mp4")
        return file

    monkeypatch.setattr(server, "open_below", replaced)
    assert client.get("/media/run/clip.mp4").content == _VIDEO
    assert client.get("/media/run/clip.mp4").status_code == 404


def test_files_are_closed_whatever_the_answer(client: TestClient) -> None:
    def num_open() -> int:
        return sum(1 for _ in Path("/proc/self/fd").iterdir())

    before = num_open()
    for asked in ({}, {"range": "bytes=0-3"}, {"range": "bytes=99999-"}, {"range": "x"}):
        for _ in range(20):
            client.get("/media/run/clip.mp4", headers=asked)
    assert num_open() < before + 20


# --- Runs that are hostile, or change ------------------------------------------------------------


def _all_pages(client: TestClient, run: str) -> Iterator[Any]:
    yield client.get("/")
    for page in PAGES:
        yield client.get(f"/run/{page}/{run}")
    yield client.get(f"/series/{run}")
    yield client.get(f"/compare?run={run}&run={run}")


def _said(client: TestClient, run: str = "run") -> str:
    answers = list(_all_pages(client, run))
    assert all(each.status_code in (200, 404) for each in answers), answers
    return "".join(each.text for each in answers)


def _link(path: Path, target: Path) -> None:
    if path.is_dir():
        path.rename(path.with_name(f"{path.name}-before"))
    path.unlink(missing_ok=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.symlink_to(target)


@pytest.mark.parametrize(
    ("name", "target"),
    [
        ("nodes", ""),
        ("nodes/x", ""),
        ("nodes/x/heartbeat.json", "heartbeat.json"),
        ("nodes/x/watcher.log", "secret.log"),
        ("nodes/x/logs", ""),
        ("nodes/x/logs/2026", ""),
        ("nodes/x/logs/2026/rank_0000.log", "secret.log"),
        ("nodes/x/stacks/t.json", "scores.json"),
        ("evaluate.log", "secret.log"),
        ("evaluations", ""),
        ("evaluations/preset", ""),
        ("evaluations/preset/step_00000004", ""),
        ("evaluations/preset/step_00000004/scores.json", "scores.json"),
        ("evaluations/servers/x", ""),
        ("lease/0.json", "scores.json"),
        ("guard", ""),
        ("run.json", "scores.json"),
        ("recipe.toml", "scores.json"),
        ("metrics.jsonl", "scores.json"),
        ("events.jsonl", "scores.json"),
    ],
)
def test_what_a_link_in_a_run_leads_to_is_not_shown(
    runs: Path, client: TestClient, name: str, target: str
) -> None:
    run, elsewhere = runs / "run", _elsewhere(runs)
    _link(run / name, elsewhere / target)
    said = _said(client)
    for part in (_SECRET, "secret.log", "secret.mp4"):
        assert part not in said.replace(f"evaluations{os.sep}secret", "")


def test_records_of_the_right_form_are_not_read_through_links(
    runs: Path, client: TestClient, add_scores: Callable[..., Path], tmp_path: Path
) -> None:
    """A link inside of a folder that pages list, to what is a record and lies elsewhere."""
    alarm = {"measure": "m", "kind": "drift", "message": _SECRET}
    result = add_scores(RunDirectory(runs / "run"), "tiny", 4, alarms=[alarm])
    assert _SECRET in _said(client)  # as a file it is shown
    (result / "scores.json").rename(tmp_path / "scores.json")
    (result / "scores.json").symlink_to(tmp_path / "scores.json")
    assert _SECRET not in _said(client)


def test_a_run_that_becomes_a_link_is_gone(runs: Path, client: TestClient) -> None:
    assert client.get("/run/overview/run").status_code == 200
    (runs / "run").rename(runs.parent / "taken away")
    (runs / "run").symlink_to(runs.parent / "taken away")
    for answer in _all_pages(client, "run"):
        assert "step 24" not in answer.text
    assert client.get("/run/overview/run").status_code == 404
    assert client.get("/media/run/clip.mp4").status_code == 404


def test_a_run_that_disappears_between_two_requests_is_said_to_be_gone(
    runs: Path, client: TestClient
) -> None:
    assert client.get("/run/overview/run").status_code == 200
    (runs / "run").rename(runs.parent / "taken away")
    for path in ("/run/overview/run", "/series/run", "/live/run", "/compare?run=run"):
        answer = client.get(path)
        assert answer.status_code == 404
        assert "There is no run run in" in answer.text
    assert client.get("/").status_code == 200
    (runs.parent / "taken away").rename(runs / "run")
    assert client.get("/run/overview/run").status_code == 200


_NAMES = (
    'a"b',
    "a'b",
    "<script>alert(1)",
    "a&amp;b",
    "new\nline",
    "\x1b[2J",
    "a b",
    "%2e%2e",
    "a#b?c=d",
    "\u202etxt",
    "{{ 7 * 7 }}",
    "-rf",
    "ünïcode",
)
_NEVER = (b"<script>alert", b"\x1b", "\u202e".encode(), b"{{ 49 }}", b" 49 ")


def test_names_are_escaped_in_pages_and_links(runs: Path) -> None:
    links = ServerLinks()
    for name in _NAMES:
        shutil.copytree(runs / "run", runs / name)
    with serving(runs) as address:
        _, home = _raw(address, "/")
        assert home.count(b"<tr data-run") == len(_NAMES) + 1
        assert all(part not in home for part in _NEVER)
        for name in _NAMES:
            urls = (links.page("overview", name), links.series(name), links.media(name, "clip.mp4"))
            for url in urls:
                head, body = _raw(address, str(url))
                assert head.split()[1] == b"200", url
                assert b"text/html" not in head or all(part not in body for part in _NEVER)


def test_a_name_that_is_not_utf_8_is_not_listed(runs: Path, client: TestClient) -> None:
    (runs / "run").rename(runs / os.fsdecode(b"r\xffn"))
    assert client.get("/").status_code == 200
    assert client.get("/run/overview/r%FFn").status_code == 404
    assert client.get("/media/r%FFn/clip.mp4").status_code == 404


def test_texts_of_a_run_are_escaped(runs: Path, client: TestClient) -> None:
    run = RunDirectory(runs / "run")
    hostile = "</script><script>alert(1)</script>\x1b[2J\u2028<img src=x onerror=alert(1)>"
    run.append_event("diverged", step=24, message=hostile)
    run.append_event("data_changed", step=3, message=hostile, stage=hostile, source=hostile)
    (run.path / "evaluate.log").write_text(hostile)
    node = run.path / "nodes" / "<script>alert(1)"
    node.mkdir(parents=True)
    (node / "watcher.log").write_text(hostile)
    said = _said(client)
    assert "alert(1)" in said
    for part in ("<script>alert", "<img src=x", "\x1b"):
        assert part not in said


def test_of_a_log_of_ten_gigabytes_the_end_is_shown(runs: Path, client: TestClient) -> None:
    log = runs / "run" / "evaluate.log"
    with log.open("wb") as file:
        file.seek(10 * 2**30)
        file.write(b"\nthe last line\n")
    answer = client.get("/run/overview/run?log=evaluate.log")
    assert "the last line" in answer.text
    assert len(answer.content) < 2**20


@pytest.mark.parametrize(
    "query",
    ["names=no", "x=hour", "first=-1", "first=" + "9" * 5000, "last=1e9", "pixels=x", "first=²",
     "names=loss&first=%00"],
)  # fmt: skip
def test_what_is_wrong_in_a_query_is_said(client: TestClient, query: str) -> None:
    answer = client.get(f"/series/run?{query}")
    assert answer.status_code == 400
    assert "is no series" in answer.text or "is not a number of steps" in answer.text
    assert len(answer.content) < 5000


def test_spans_and_pixels_of_any_size_are_answered(client: TestClient) -> None:
    for query in ("pixels=0", "pixels=999999999999999", "first=999999999999999", "first=9&last=2"):
        answer = client.get(f"/series/run?{query}")
        assert answer.status_code == 200, query


def test_ten_thousand_folders_and_deep_ones_are_listed_in_part(tmp_path: Path) -> None:
    folder = tmp_path / "many"
    for number in range(10_000):
        path = folder / f"run_{number}"
        path.mkdir(parents=True)
        if number < 3:
            (path / "run.json").write_text("{}")
    deep = folder / "deep"
    for _ in range(400):
        deep = deep / "d"
    deep.mkdir(parents=True)
    (deep / "run.json").write_text("{}")
    client = _client(folder)
    answer = client.get("/")
    assert answer.status_code == 200
    assert "run_2" in answer.text
    assert client.get("/run/overview/run_2").status_code == 200
    assert client.get(f"/run/overview/{'d/' * 400}").status_code == 404
    assert client.get(f"/media/{'d/' * 400}x.mp4").status_code == 404


def test_names_that_are_too_long_are_refused(client: TestClient) -> None:
    for place in ("media", "run/overview", "series"):
        answer = client.get(f"/{place}/{'x' * 5000}.mp4")
        assert answer.status_code == 404


def test_an_empty_folder_says_what_will_appear(tmp_path: Path) -> None:
    (tmp_path / "none").mkdir()
    answer = _client(tmp_path / "none").get("/")
    assert "There is no run in" in answer.text
    assert "A run appears here as soon as" in answer.text
    (tmp_path / "none").rmdir()
    answer = _client(tmp_path / "none").get("/")
    assert "is not a folder" in answer.text


def test_nothing_is_written_in_the_folder(runs: Path, client: TestClient) -> None:
    def state() -> dict[str, tuple[int, int]]:
        found = ((str(path), path.lstat()) for path in runs.rglob("*"))
        return {name: (each.st_mtime_ns, each.st_size) for name, each in found}

    before = state()
    _said(client)
    client.get("/media/run/clip.mp4")
    assert state() == before


# --- What is new ------------------------------------------------------------------------------


def _events(address: str, path: str, count: int) -> Iterator[dict[str, Any]]:
    host, port = address.removeprefix("http://").rstrip("/").split(":")
    with socket.create_connection(("127.0.0.1", int(port)), 30) as connection:
        connection.sendall(f"GET {path} HTTP/1.1\r\nHost: {host}\r\n\r\n".encode())
        file = connection.makefile("rb")
        while count and (line := file.readline()):
            if line.startswith(b"data: "):
                yield json.loads(line[6:])
                count -= 1


def test_a_stream_tells_each_new_step_and_goes_on_when_its_run_is_removed(runs: Path) -> None:
    run = RunDirectory(runs / "run")
    last = run.metrics()[-1]
    with serving(runs) as address:
        for each in _events(address, "/live", 1):
            assert [run["path"] for run in each["runs"]] == ["run"]
        events = _events(address, "/live/run", 3)
        assert next(events)["steps"] == last["step"]
        run.append_metrics({**last, "step": last["step"] + 1})
        assert next(events)["steps"] == last["step"] + 1
        (runs / "run").rename(runs.parent / "taken away")
        assert next(events)["problem"]
        assert _raw(address, "/")[0].split()[1] == b"200"


def test_pages_that_ask_at_once_are_not_all_granted_a_stream(runs: Path) -> None:
    """Streams count from when they are granted, not from when their first event is read."""
    with serving(runs) as address, ExitStack() as stack:
        host, port = address.removeprefix("http://").rstrip("/").split(":")
        pages = [
            stack.enter_context(socket.create_connection(("127.0.0.1", int(port)), 30))
            for _ in range(68)
        ]
        for each in pages:
            each.sendall(f"GET /live HTTP/1.1\r\nHost: {host}\r\n\r\n".encode())
        answers = Counter(each.recv(12).split()[1] for each in pages)
    assert answers == {b"200": 64, b"503": 4}


@pytest.mark.parametrize(("most", "seconds"), [(2, 60.0), (100, 0.01)])
def test_requests_that_are_sent_half_keep_nobody_waiting(
    monkeypatch: pytest.MonkeyPatch, most: int, seconds: float
) -> None:
    """The oldest are closed for newer ones, and each after a while."""
    monkeypatch.setattr(server, "_most_waiting", lambda: most)
    monkeypatch.setattr(server, "_REQUEST_SECONDS", seconds)
    half = b"GET / HTTP/1.1\r\nHost: localhost\r\n"

    async def ask() -> None:
        config = uvicorn.Config(PlainTextResponse("whole"), ws="none", lifespan="off")
        loop, state = asyncio.get_running_loop(), ServerState()
        made = partial(server._Connection, config, state, {})
        listening = await loop.create_server(made, "127.0.0.1", 0)
        port = listening.sockets[0].getsockname()[1]
        async with listening:
            opened = [await asyncio.open_connection("127.0.0.1", port) for _ in range(3)]
            for _, writer in opened:
                writer.write(half)
            with suppress(ConnectionResetError):  # it was closed before its half was read
                assert await opened[0][0].read() == b""
            monkeypatch.setattr(server, "_REQUEST_SECONDS", 60.0)
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(half + b"\r\n")
            assert (await reader.read(12)).endswith(b" 200")
            for _, each in (*opened, (reader, writer)):
                each.close()

    with ThreadPoolExecutor() as pool:  # in this thread a browser's loop may run
        pool.submit(asyncio.run, ask()).result()
