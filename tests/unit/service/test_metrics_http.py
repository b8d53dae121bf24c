"""The HTTP server of /metrics: what it answers, whom it refuses, and what hostile callers cost it."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from probing.api.errors import ConfigError, PeerError
from probing.daemon.config import TlsConfig
from probing.daemon.service import listening
from probing.daemon.service.audit import Audit
from probing.daemon.service.auth import Doorkeeper, check_listen
from probing.daemon.service.listening import TcpPort
from probing.daemon.service.metrics import http
from probing.daemon.service.metrics.http import EACH, PAGES_EACH, HttpServer
from probing.daemon.service.tls import Tls
from probing.daemon.service.tokens import Tokens
from probing.daemon.supervisor.ports import bind

TOKEN = "0123456789abcdef-token"
PAGE = b"probingd_build_info 1\n"


class Pages:
    def __init__(self, state: str = "running", error: Exception | None = None) -> None:
        self.state = state
        self.error = error

    async def page(self) -> bytes:
        if self.error:
            raise self.error
        return PAGE

    async def health(self) -> str:
        return self.state


@pytest.fixture
def keeper(tmp_path: Path) -> Doorkeeper:
    path = tmp_path / "token"
    path.write_text(TOKEN)
    path.chmod(0o600)
    return Doorkeeper(Tokens(str(path)), Tls(TlsConfig()), Audit())


def serve(pages: Pages, keeper: Doorkeeper, talk: Callable[[int], Awaitable[None]]) -> None:
    async def run() -> None:
        server = HttpServer(pages, keeper, Tls(TlsConfig()), Audit())
        listener = bind(socket.AF_INET, ("127.0.0.1", 0))
        port = listener.getsockname()[1]
        await server.serve(listener)
        try:
            await talk(port)
        finally:
            server.close()

    asyncio.run(run())


async def ask(port: int, request: bytes) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(request)
    try:
        return await asyncio.wait_for(reader.read(), 30)
    finally:
        writer.close()


def get(path: str, token: str = TOKEN, method: str = "GET") -> bytes:
    bearer = f"Authorization: Bearer {token}\r\n" if token else ""
    return f"{method} {path} HTTP/1.1\r\nHost: n\r\n{bearer}\r\n".encode()


def test_the_page_wants_the_token_and_health_does_not(keeper: Doorkeeper, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "WRONG_TOKEN_S", 0)

    async def talk(port: int) -> None:
        answer = await ask(port, get("/metrics?x=1"))
        assert answer.startswith(b"HTTP/1.1 200 OK\r\n")
        assert b"Content-Type: text/plain; version=0.0.4; charset=utf-8\r\n" in answer
        assert answer.endswith(b"\r\n\r\n" + PAGE)
        head = await ask(port, get("/metrics", method="HEAD"))
        assert head.partition(b"\r\n\r\n")[2] == b""
        assert f"Content-Length: {len(PAGE)}".encode() in head
        for wrong in (get("/metrics", "x" * 20), get("/metrics", "")):
            refused = await ask(port, wrong)
            assert refused.startswith(b"HTTP/1.1 401 ")
            assert PAGE not in refused
        assert (await ask(port, get("/healthz", ""))).endswith(b"\r\n\r\nrunning\n")

    serve(Pages(), keeper, talk)


@pytest.mark.parametrize(
    ("state", "status"), [("running", 200), ("paused", 200), ("degraded", 200), ("starting", 503), ("lost", 503)]
)
def test_health_is_a_status_and_a_word(state: str, status: int, keeper: Doorkeeper) -> None:
    async def talk(port: int) -> None:
        answer = await ask(port, get("/healthz", ""))
        assert answer.startswith(f"HTTP/1.1 {status} ".encode())
        assert answer.endswith(f"{state}\n".encode())

    serve(Pages(state), keeper, talk)


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        (get("/"), 404),
        (get("/metrics/../etc/passwd"), 404),
        (get("/metrics", method="POST"), 405),
        (b"hello\r\n\r\n", 400),
        (b"GET /metrics SPDY/9\r\n\r\n", 400),
        (b"\r\n\r\n", 400),
        (b"\xff\xfe\x00 \x01 \x02\r\n\r\n", 400),
        (b"GET /metrics HTTP/1.1\r\n" + b"X: y\r\n" * 5000, 400),
    ],
)
def test_what_is_no_request_gets_its_status(request_: bytes, status: int, keeper: Doorkeeper) -> None:
    async def talk(port: int) -> None:
        assert (await ask(port, request_)).startswith(f"HTTP/1.1 {status} ".encode())

    serve(Pages(), keeper, talk)


def test_a_page_that_fails_is_an_answer(keeper: Doorkeeper, caplog: pytest.LogCaptureFixture) -> None:
    async def talk(port: int) -> None:
        assert (await ask(port, get("/metrics"))).startswith(b"HTTP/1.1 503 ")

    serve(Pages(error=PeerError("no collector")), keeper, talk)

    async def talk_of_bugs(port: int) -> None:
        answer = await ask(port, get("/metrics"))
        assert answer.startswith(b"HTTP/1.1 500 ")
        assert b"secret" not in answer

    serve(Pages(error=RuntimeError("secret")), keeper, talk_of_bugs)


def test_the_oldest_of_callers_that_say_nothing_gives_way(keeper: Doorkeeper) -> None:
    async def talk(port: int) -> None:
        silent = [await asyncio.open_connection("127.0.0.1", port) for _ in range(EACH)]
        assert (await ask(port, get("/metrics"))).startswith(b"HTTP/1.1 200 ")
        assert await silent_end(silent.pop(0))
        for _, writer in silent:
            writer.close()

    serve(Pages(), keeper, talk)


def test_callers_that_say_nothing_have_a_time(keeper: Doorkeeper, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "READ_S", 0.2)

    async def talk(port: int) -> None:
        silent = [await asyncio.open_connection("127.0.0.1", port) for _ in range(EACH)]
        assert all([await silent_end(one) for one in silent])

    serve(Pages(), keeper, talk)


def test_pages_at_once_are_bounded_and_health_is_not(keeper: Doorkeeper) -> None:
    async def talk(port: int) -> None:
        waiting = [asyncio.create_task(ask(port, get("/metrics"))) for _ in range(PAGES_EACH + 1)]
        done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        assert [task.result().partition(b"\r\n\r\n")[2] for task in done] == [b"too many pages at once\n"]
        assert (await ask(port, get("/healthz", ""))).endswith(b"\r\n\r\nrunning\n")
        pages.made.set()
        assert sum(b" 200 OK" in answer for answer in await asyncio.gather(*waiting)) == PAGES_EACH

    pages = SlowPages()
    serve(pages, keeper, talk)


class SlowPages(Pages):
    def __init__(self) -> None:
        super().__init__()
        self.made = asyncio.Event()

    async def page(self) -> bytes:
        await self.made.wait()
        return PAGE


async def silent_end(streams: tuple[asyncio.StreamReader, asyncio.StreamWriter]) -> bool:
    reader, writer = streams
    try:
        return await asyncio.wait_for(reader.read(), 30) == b""
    except ConnectionError:
        return True
    finally:
        writer.close()


def test_a_port_that_is_taken_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listening, "RETRY_S", 0.02)
    served: list[socket.socket] = []

    async def run() -> None:
        taken = bind(socket.AF_INET, ("127.0.0.1", 0))
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        got = asyncio.Event()

        async def take(listener: socket.socket) -> None:
            served.append(listener)
            got.set()

        port = TcpPort("http", address, take)
        await port.start()
        [source] = port.sources()
        assert (source.name, source.state) == ("http", "degraded")
        assert address in source.reason
        taken.close()
        await asyncio.wait_for(got.wait(), 30)
        await asyncio.sleep(0)
        assert port.sources() == []
        port.stop()

    asyncio.run(run())
    served[0].close()


def test_http_follows_the_rules_of_tcp() -> None:
    with pytest.raises(ConfigError, match=r"^http = 127\.0\.0\.1:1 would answer everybody"):
        check_listen("127.0.0.1:1", token_file="", insecure=False, key="http")
    with pytest.raises(ConfigError, match=r"^http = 0\.0\.0\.0:1 would answer unencrypted"):
        check_listen("0.0.0.0:1", token_file="/t", insecure=False, key="http")
