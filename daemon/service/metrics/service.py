"""/metrics and /healthz of the service: the reading of rows, the HTTP server and its port, as one part."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from probing.api.proto.probing.v1 import node_pb2 as pb
from probing.daemon.query.engine import Engine
from probing.daemon.service.audit import Audit
from probing.daemon.service.auth import Doorkeeper
from probing.daemon.service.listening import Listeners, TcpPort
from probing.daemon.service.metrics.exposition import RequestTimes
from probing.daemon.service.metrics.http import HttpServer
from probing.daemon.service.metrics.scrape import Scraper
from probing.daemon.service.tls import Tls

__all__ = ("Metrics",)


class Metrics:
    """Answers on ``address`` (HOST:PORT). Belongs to one event loop.

    ``status`` returns the collector's status within so many seconds, or raises PeerError; ``calls`` the calls under
    way, by kind, ``hooks`` the hooks of findings, by outcome.
    """

    def __init__(
        self,
        address: str,
        node: str,
        version: str,
        engine: Engine,
        status: Callable[[float], Mapping[str, Any]],
        keeper: Doorkeeper,
        tls: Tls,
        audit: Audit,
        calls: Callable[[], Mapping[str, int]],
        hooks: Callable[[], Mapping[str, int]],
        listeners: Listeners | None = None,
    ) -> None:
        self._scraper = Scraper(node, version, engine, status, refused=lambda: audit.counts, calls=calls, hooks=hooks)
        self._http = HttpServer(self._scraper, keeper, tls, audit)
        self._port = TcpPort("http", address, self._http.serve, listeners)

    async def start(self) -> None:
        """Listens; a port that is taken is tried again."""
        await self._port.start()

    def stop(self) -> None:
        self._port.stop()
        self._http.close()
        self._scraper.close()

    def sources(self) -> list[pb.Source]:
        """Returns the state of the port for Status, if it is degraded."""
        return self._port.sources()

    @property
    def times(self) -> RequestTimes:
        """Where calls and queries are counted."""
        return self._scraper.times
