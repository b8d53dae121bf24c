"""The server of the page in a thread, before nodes of ``client_fake_node``, and a browser's part of HTTP."""

from __future__ import annotations

import http.client
import json
import socket
import ssl
import threading
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from typing import Any, NamedTuple

from waiting import until

from probing.client.cluster import Cluster
from probing.client.commands.web import panels, posted_panels
from probing.client.web.app import Site, application
from probing.client.web.peers import callers_alone
from probing.client.web.server import WebServer
from probing.client.web.visitors import Door, KeyDoor, Sessions

KEY = "the-key-of-this-test"


class Answer(NamedTuple):
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def data(self) -> Any:
        assert self.status == 200, self.body
        return self.json["data"]


class Page:
    """The page at 127.0.0.1: ``port``, with ``tls`` by TLS. ``cookie`` is sent once ``enter`` has got it."""

    def __init__(self, port: int, tls: ssl.SSLContext | None = None) -> None:
        self.port = port
        self.cookie = ""
        self._tls = tls
        self._origin = f"http{'s' if tls else ''}://127.0.0.1:{port}"

    def _connection(self) -> http.client.HTTPConnection:
        if self._tls is None:
            return http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        return http.client.HTTPSConnection("127.0.0.1", self.port, timeout=30, context=self._tls)

    def ask(
        self, path: str, body: object = None, *, method: str = "", headers: Mapping[str, str] | None = None
    ) -> Answer:
        """Sends a request as a browser would, with ``headers`` in place of the usual ones; empty ones are left out."""
        connection = self._connection()
        usual = {"Host": f"127.0.0.1:{self.port}", "Cookie": self.cookie}
        if body is not None:
            usual |= {"X-Probing": "1", "Origin": self._origin, "Content-Type": "application/json"}
        sent = {name: text for name, text in {**usual, **(headers or {})}.items() if text}
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        try:
            connection.request(method or ("GET" if body is None else "POST"), path, data, sent)
            answer = connection.getresponse()
            return Answer(answer.status, {k.lower(): v for k, v in answer.getheaders()}, answer.read())
        finally:
            connection.close()

    def enter(self, key: str = KEY) -> Answer:
        answer = self.ask(f"/?key={key}")
        self.cookie = answer.headers.get("set-cookie", "").partition(";")[0]
        return answer

    def log_in(self, token: str) -> Answer:
        answer = self.ask("/api/login", {"token": token})
        self.cookie = answer.headers.get("set-cookie", "").partition(";")[0]
        return answer

    @contextmanager
    def events(self, path: str) -> Iterator[Iterator[tuple[str, Any]]]:
        """Opens a stream; yields (event, data) of each."""
        connection = self._connection()

        def read() -> Iterator[tuple[str, Any]]:
            name = ""
            while line := answer.readline().decode().rstrip("\n"):
                if line.startswith("event: "):
                    name = line.removeprefix("event: ")
                elif line.startswith("data: "):
                    yield name, json.loads(line.removeprefix("data: "))
                    assert answer.readline() == b"\n"

        with closing(connection):
            connection.request("GET", path, headers={"Cookie": self.cookie})
            with connection.getresponse() as answer:
                assert answer.status == 200, answer.read()
                yield read()


@contextmanager
def served(
    cluster: Cluster, door: Door | None = None, tls: tuple[ssl.SSLContext, ssl.SSLContext] | None = None, **site: Any
) -> Iterator[Page]:
    """Serves ``cluster`` to whoever has KEY, or whom ``door`` admits. ``tls``: contexts of the server and a browser."""
    sock = socket.create_server(("127.0.0.1", 0))
    port = sock.getsockname()[1]
    own = {"target": cluster.target, "all_nodes": True, "user": "alice", "names": ("127.0.0.1", "localhost")}
    described = Site(**{**own, "cookie": f"probing_{port}", "secure": tls is not None, **site})
    sessions = Sessions(door or KeyDoor(cluster, KEY))
    app = application(described, sessions, panels(), posted_panels(signs=described.signs))
    server = WebServer(app, sock, callers_alone, tls[0] if tls else None)
    thread = threading.Thread(target=server.run, name="web server")
    thread.start()
    until(lambda: server.serving, what="the server")
    try:
        yield Page(port, tls[1] if tls else None)
    finally:
        server.stop()
        thread.join(30)
        sock.close()
        sessions.close()
        assert not thread.is_alive()
