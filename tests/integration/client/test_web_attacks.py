"""Who gets nothing from the page: other sites in the caller's browser, other users, and whoever holds connections."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

import pytest
from authority import Authority
from client_fake_node import FakeNode, process, thread
from waiting import until
from web_scene import KEY, Page, served

from probing.api.tcp_peer import CLOSED, peer_user
from probing.client.cluster import Cluster
from probing.client.web import app, downloads, live, server
from probing.client.web.peers import Peer, callers_alone

NOBODY = 65534
HOSTILE = "\"><script>alert(1)</script>\x1b]0;x\x07\u202e'; DROP TABLE x; --"
SQL = {"sql": "SELECT 1 AS one", "all_nodes": False}
FILE = {"sql": "SELECT repeat('x', 100000) FROM range(80)", "all_nodes": False, "format": "csv"}


@pytest.fixture
def page(pair: tuple[FakeNode, FakeNode]) -> Iterator[Page]:
    with Cluster(pair[0].address, all_nodes=True) as cluster, served(cluster) as page:
        page.enter()
        yield page


def test_without_a_session_there_is_nothing_but_the_login(pair: tuple[FakeNode, FakeNode], page: Page) -> None:
    page.cookie = ""
    for address in (
        "ps",
        "live/jobs",
        "live/job?job=j1",
        "diagnose",
        "finding.html",
        "timeline?job=j1",
        "stacks?job=j1",
        "groups",
        "group?name=g",
        "group/log?name=g&node=alpha",
        "workers",
    ):
        answer = page.ask(f"/api/{address}")
        assert (answer.status, answer.json["code"]) == (401, "Unauthenticated"), address
    for address in (
        "query",
        "query/plan",
        "query/download",
        "group/preview",
        "group/create",
        "group/start",
        "group/stop",
    ):
        assert page.ask(f"/api/{address}", SQL).status == 401
    session = page.ask("/api/session").json
    assert session == {
        **dict.fromkeys(("target", "all_nodes", "user", "version", "can")),
        "languages": ["en", "zh"],
        "login_needed": True,
        "login": "key",
    }
    assert [node.asked for node in pair] == [[], []]


def test_the_key_leads_to_a_cookie_that_scripts_and_other_sites_do_not_get(page: Page) -> None:
    answer = page.enter()
    assert (answer.status, answer.headers["location"]) == (303, "/jobs")
    assert KEY not in str(answer.headers)
    flags = {part.strip().lower() for part in answer.headers["set-cookie"].split(";")[1:]}
    assert {"httponly", "samesite=strict", "path=/"} <= flags
    assert page.ask("/api/session").json["login_needed"] is False
    page.ask("/api/logout", {})
    assert page.ask("/api/ps").status == 401


def test_a_wrong_key_is_refused_and_guesses_are_few(page: Page, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "_REFUSED_S", 0.01)
    page.cookie = ""
    assert page.log_in("\ud800").status == 400
    codes = [page.enter(f"guess-{n}").status for n in range(7)]
    # One attempt of five was the fixture's.
    assert codes == [401] * 4 + [429] * 3
    assert page.ask("/api/ps").status == 401


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:80", "127.0.0.1.evil.example", "[::2]", "169.254.1.1", ""]
)
def test_a_name_that_was_pointed_here_is_refused(page: Page, host: str) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", page.port, timeout=30)
    connection.putrequest("GET", "/api/ps", skip_host=True)
    if host:
        connection.putheader("Host", host)
    connection.putheader("Cookie", page.cookie)
    connection.endheaders()
    # HTTP itself wants a Host.
    assert connection.getresponse().status == (421 if host else 400)
    connection.close()


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "http://evil.example"},
        {"Origin": "null"},
        {"Origin": "https://127.0.0.1"},
        {"X-Probing": ""},
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "same-site"},
    ],
)
def test_another_page_posts_nothing(pair: tuple[FakeNode, FakeNode], page: Page, headers: dict[str, str]) -> None:
    answer = page.ask("/api/query", SQL, headers=headers)
    assert (answer.status, answer.json["code"]) == (403, "PrivilegeError")
    assert [node.asked for node in pair] == [[], []]


def test_another_port_of_this_host_gets_no_live_view(page: Page) -> None:
    assert page.ask("/api/live/jobs", headers={"Sec-Fetch-Site": "same-site"}).status == 403


def test_a_form_of_another_page_is_refused(page: Page) -> None:
    form = {"Content-Type": "text/plain", "X-Probing": "", "Origin": "http://evil.example"}
    assert page.ask("/api/query", json.dumps(SQL).encode(), headers=form).status == 403


def test_all_answers_have_the_headers_that_keep_others_out(page: Page) -> None:
    for address in ("/", "/jobs", "/job/a%2Fb%22/rank/3", "/api/session", "/api/ps", "/api/nothing", "/static/nothing"):
        answer = page.ask(address)
        policy = answer.headers["content-security-policy"]
        assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self';"), address
        assert "unsafe" not in policy
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["referrer-policy"] == "no-referrer"
        assert "cross-origin-opener-policy" not in answer.headers
        assert "access-control-allow-origin" not in answer.headers
        if address.startswith("/api/"):
            assert answer.headers["cache-control"] == "no-store"


@pytest.mark.parametrize(
    "path", ["/static/../app.py", "/static/..%2fapp.py", "/static/%2e%2e/%2e%2e/main.py", "//etc/passwd"]
)
def test_no_path_leads_to_another_file(page: Page, path: str) -> None:
    answer = page.ask(path)
    assert b"import" not in answer.body
    assert b"root:" not in answer.body
    assert answer.status == 404


def test_names_of_jobs_and_frames_are_data(pair: tuple[FakeNode, FakeNode], page: Page) -> None:
    long = HOSTILE + "x" * (1 << 20)
    pair[0].insert("process.processes", [process("alpha", 0, 1500, job=HOSTILE, command=long)])
    pair[0].threads.append(thread(0, 1500, 1500, "MainThread", (HOSTILE, long, 1)))
    pair[0].threads[-1].job = HOSTILE
    answer = page.ask("/api/ps")
    assert {row["job"] for row in answer.data} == {"j1", HOSTILE}
    assert answer.body.isascii()
    assert b"\x1b" not in answer.body
    assert answer.headers["content-type"] == "application/json"
    quoted = quote(HOSTILE)
    (found,) = page.ask(f"/api/stacks?job={quoted}").data
    assert found["frames"][0]["func"] == HOSTILE
    assert page.ask(f"/api/steps?job={quoted}").status == 200
    assert page.ask("/api/nccl?job=" + "x" * 5000).status == 400


def test_a_body_of_a_gigabyte_is_refused_before_it_comes(page: Page) -> None:
    with socket.create_connection(("127.0.0.1", page.port), timeout=30) as sock:
        sock.sendall(head(page, f"Content-Length: {1 << 30}"))
        answer = sock.recv(1 << 16)
        assert b" 413 " in answer.splitlines()[0]
        with contextlib.suppress(OSError):
            for _ in range(1 << 10):
                sock.sendall(b"x" * (1 << 20))
            pytest.fail("it took a gigabyte")


def test_a_body_without_a_length_ends_at_the_bound(page: Page) -> None:
    with socket.create_connection(("127.0.0.1", page.port), timeout=30) as sock:
        sock.sendall(head(page, "Transfer-Encoding: chunked"))
        with contextlib.suppress(OSError):
            for _ in range(64):
                sock.sendall(b"10000\r\n" + b"x" * 0x10000 + b"\r\n")
        assert b" 413 " in sock.recv(1 << 16).splitlines()[0]


def head(page: Page, more: str) -> bytes:
    lines = ("POST /api/query HTTP/1.1", f"Host: 127.0.0.1:{page.port}", f"Cookie: {page.cookie}", "X-Probing: 1", more)
    return "\r\n".join([*lines, "", ""]).encode()


def test_a_request_that_does_not_come_is_given_up(page: Page, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "_REQUEST_S", 0.5)
    with socket.create_connection(("127.0.0.1", page.port), timeout=30) as silent:
        assert silent.recv(1) == b""
    with socket.create_connection(("127.0.0.1", page.port), timeout=30) as sock:
        text = head(page, "X: " + "x" * 20_000)
        sent = 0
        with contextlib.suppress(OSError):
            while sent < len(text):
                sock.sendall(text[sent : sent + 1])
                sent += 1
                # As slow as the bound is short.
                time.sleep(0.02)
        assert sent < 1000


def test_one_peer_holds_a_bounded_number_of_connections(page: Page) -> None:
    held = [socket.create_connection(("127.0.0.1", page.port), timeout=30) for _ in range(server._MOST_OF_ONE)]
    try:
        with socket.create_connection(("127.0.0.1", page.port), timeout=30) as one_more:
            assert one_more.recv(1) == b""
    finally:
        for sock in held:
            sock.close()
    until(lambda: answers(page))


def test_handshakes_that_do_not_come_take_the_places_of_their_peer_for_a_short_time(
    pair: tuple[FakeNode, FakeNode], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "_HANDSHAKE_S", 0.5)
    authority = Authority(tmp_path)
    near = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    near.load_cert_chain(*authority.host("page"))
    far = ssl.create_default_context(cafile=authority.file)
    with Cluster(pair[0].address) as cluster, served(cluster, tls=(near, far)) as page:
        silent = [socket.create_connection(("127.0.0.1", page.port), timeout=30) for _ in range(server._MOST_OF_ONE)]
        assert [sock.recv(1) for sock in silent] == [b""] * len(silent)
        until(lambda: answers(page))
        large = page.ask("/static/licences.txt", headers={"Accept-Encoding": "gzip"})
        assert large.headers["content-encoding"] == "gzip"
        for sock in silent:
            sock.close()


def answers(page: Page) -> bool:
    try:
        return page.ask("/api/session").status == 200
    except OSError:
        return False


def test_a_visitor_has_a_bounded_number_of_streams_which_end_with_their_readers(page: Page) -> None:
    with contextlib.ExitStack() as streams:
        for _ in range(16):
            next(streams.enter_context(page.events("/api/live/jobs")))
        answer = page.ask("/api/live/jobs")
        assert (answer.status, answer.json["code"]) == (429, "Overloaded")
    until(lambda: stream_opens(page))


def stream_opens(page: Page) -> bool:
    try:
        with page.events("/api/live/jobs") as events:
            return bool(next(events))
    except AssertionError:
        return False


def test_a_live_view_ends_with_its_session(page: Page, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "_EVERY_S", 0.1)
    with page.events("/api/live/jobs") as events:
        next(events)
        page.ask("/api/logout", {})
        # It ends: a stream that goes on would be read for ever.
        for _ in events:
            pass


def test_a_reader_that_does_not_read_is_dropped(page: Page, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "_UNREAD_S", 0.5)
    with unread(page) as sock:
        near = sock.getsockname()[1]
        until(lambda: held(page, near), what="the connection")
        until(lambda: not held(page, near), what="the end of the connection")


@contextlib.contextmanager
def unread(page: Page) -> Iterator[socket.socket]:
    """A connection on which the visitor has asked for a file of 8 MB."""
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.settimeout(60)
        sock.connect(("127.0.0.1", page.port))
        body = json.dumps(FILE).encode()
        request = head(page, f"Content-Length: {len(body)}").replace(b"/api/query", b"/api/query/download")
        sock.sendall(request + body)
        yield sock


def test_a_visitor_writes_two_files_at_once_and_each_ends_in_time(page: Page, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(downloads, "_WAIT_S", 0.3)
    with unread(page) as first, unread(page) as second:
        assert (first.recv(12), second.recv(12)) == (b"HTTP/1.1 200", b"HTTP/1.1 200")
        answer = page.ask("/api/query/download", FILE)
        assert (answer.status, answer.json["code"]) == (429, "Overloaded")
        assert page.ask("/api/ps").status == 200
    monkeypatch.setattr(downloads, "_WAIT_S", 60.0)
    monkeypatch.setattr(downloads, "_SENT_S", 0.5)
    with unread(page) as slow:
        data = slow.recv(5)
        with unread(page), unread(page) as third:
            # A file that is not read in time leaves its place long before its connection is dropped.
            assert third.recv(12) == b"HTTP/1.1 200"
            assert held(page, slow.getsockname()[1])
        while part := slow.recv(1 << 16):
            data += part
    assert data.startswith(b"HTTP/1.1 200")
    # The last chunk of a whole answer is empty.
    assert not data.endswith(b"0\r\n\r\n")


def held(page: Page, near: int) -> bool:
    """Returns whether the server has a connection from port ``near``."""
    rows = [line.split()[1:4] for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    ends = f":{page.port:04X}", f":{near:04X}"
    return any(own.endswith(ends[0]) and other.endswith(ends[1]) and state == "01" for own, other, state in rows)


@pytest.mark.skipif(os.getuid() != 0, reason="starts a process of another user")
def test_another_user_gets_nothing_even_with_the_cookie_or_the_key(page: Page) -> None:
    program = (
        "import http.client, sys\n"
        "port, path, cookie = int(sys.argv[1]), sys.argv[2], sys.argv[3]\n"
        "connection = http.client.HTTPConnection('127.0.0.1', port, timeout=30)\n"
        "connection.request('GET', path, headers={'Cookie': cookie})\n"
        "print(connection.getresponse().status)\n"
    )
    rights = ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups"]
    for path in ("/", "/api/session", "/api/ps", f"/?key={KEY}"):
        argv = [*rights, sys.executable, "-I", "-c", program, str(page.port), path, page.cookie]
        done = subprocess.run(argv, capture_output=True, text=True, cwd="/", check=True, timeout=60)
        assert done.stdout == "403\n", path
    assert page.ask("/api/ps").status == 200


@pytest.mark.skipif(os.getuid() != 0, reason="starts a process of another user")
def test_another_user_who_has_closed_the_connection_stays_a_stranger() -> None:
    """The kernel forgets the user when the socket is closed, and soon the socket; what was sent can still be read."""
    program = (
        "import socket, sys\n"
        "connection = socket.create_connection(('127.0.0.1', int(sys.argv[1])))\n"
        "connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_LINGER2, 1)\n"
        "connection.sendall(b'POST /api/group/start HTTP/1.1')\n"
    )
    rights = ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups"]
    with socket.create_server(("127.0.0.1", 0)) as listener:
        argv = [*rights, sys.executable, "-I", "-c", program, str(listener.getsockname()[1])]
        subprocess.run(argv, cwd="/", check=True, timeout=60)
        near, _ = listener.accept()
        with near:
            assert (peer_user(near), callers_alone(near)) == (CLOSED, Peer("127.0.0.1", stranger=True))
            until(lambda: peer_user(near) is None)
            assert callers_alone(near) == Peer("127.0.0.1", stranger=True)
            assert near.recv(4) == b"POST"


def test_a_browser_keeps_files_whose_name_has_their_hash(page: Page) -> None:
    named = re.findall(rb'(?:src|href)="(/static/[^"]+)"', page.ask("/jobs").body)
    assert named
    for name in named:
        answer = page.ask(name.decode())
        assert answer.status == 200, name
        assert answer.headers["cache-control"].endswith("immutable")
    assert page.ask("/static/index.html").headers["cache-control"] == "no-cache"
