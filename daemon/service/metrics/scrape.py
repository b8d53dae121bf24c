"""Reads what a page shows, in a thread of its own and by one request, and keeps the page for a second.

However many scrape, one reads: the others get the same page. A page never holds up another call: it has a thread, a
deadline and one slot of the queries, and what it does not get in time is absent.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

import pyarrow as pa

from probing.api.errors import ProbingError
from probing.daemon.query.answer import Item, StatementEnd
from probing.daemon.query.caller import Caller
from probing.daemon.service.metrics.exposition import RequestTimes, page_text
from probing.daemon.service.metrics.page import Readings
from probing.daemon.service.metrics.parts import PARTS

__all__ = ("Scraper",)

KEPT_S = 1.0
# Below the 10 s after which Prometheus gives up.
QUERY_S = 5.0
STATUS_S = 1.0
MAX_BYTES = 16 << 20
_CALLER = Caller("http", "metrics")


class _Engine(Protocol):
    """``query.engine.Engine``."""

    @property
    def running(self) -> int: ...

    @property
    def waiting(self) -> int: ...

    def run_all(self, statements: Sequence[str], *, timeout: float, max_bytes: int, caller: Caller) -> Any: ...


@dataclass(frozen=True, slots=True)
class _Kept:
    text: bytes
    until: float


class Scraper:
    """``status`` returns the collector's status within so many seconds, ``refused`` the refusals so far, by
    reason, ``calls`` the calls under way, by kind. Belongs to one event loop."""

    def __init__(
        self,
        node: str,
        version: str,
        engine: _Engine,
        status: Callable[[float], Mapping[str, Any]],
        now: Callable[[], float] = time.monotonic,
        *,
        refused: Callable[[], Mapping[str, int]] = dict,
        calls: Callable[[], Mapping[str, int]] = dict,
    ) -> None:
        self.times = RequestTimes()
        self._node = node
        self._version = version
        self._engine = engine
        self._status = status
        self._now = now
        self._refused = refused
        self._calls = calls
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="metrics")
        self._kept: dict[str, _Kept] = {}
        self._making: dict[str, asyncio.Task[bytes]] = {}

    def close(self) -> None:
        """Waits for no thread."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def page(self) -> bytes:
        """Returns the text of /metrics, at most KEPT_S old."""
        return await self._shared("page", self._page)

    async def health(self) -> str:
        """Returns the state of the daemon in a word, ``lost`` where the collector does not answer."""
        return (await self._shared("health", lambda: self._state().encode())).decode()

    async def _shared(self, name: str, make: Callable[[], bytes]) -> bytes:
        kept = self._kept.get(name)
        if kept is not None and self._now() < kept.until:
            return kept.text
        if name not in self._making:
            self._making[name] = asyncio.create_task(self._make(name, make))
        return await asyncio.shield(self._making[name])

    async def _make(self, name: str, make: Callable[[], bytes]) -> bytes:
        try:
            text = await asyncio.get_running_loop().run_in_executor(self._threads, make)
            self._kept[name] = _Kept(text, self._now() + KEPT_S)
            return text
        finally:
            del self._making[name]

    def _page(self) -> bytes:
        begun = self._now()
        status = self._read_status()
        rows, failed = self._read_rows() if status["state"] != "lost" else ({}, {})
        readings = Readings(
            self._version,
            self._node,
            rows,
            failed,
            status,
            self._engine.running,
            self._now() - begun,
            refused=dict(self._refused()),
            waiting_queries=self._engine.waiting,
            calls=dict(self._calls()),
        )
        return page_text(readings, self.times)

    def _state(self) -> str:
        return str(self._read_status()["state"])

    def _read_status(self) -> Mapping[str, Any]:
        try:
            return {"state": "degraded", **self._status(STATUS_S)}
        except ProbingError as e:
            return {"state": "lost", "reason": e.message}

    def _read_rows(self) -> tuple[dict[str, list[dict[str, Any]]], dict[str, str]]:
        rows: dict[str, list[dict[str, Any]]] = {}
        failed: dict[str, str] = {}
        pieces: list[bytes] = []
        try:
            items: list[Item] | Any = self._engine.run_all(
                [part.statement for part in PARTS], timeout=QUERY_S, max_bytes=MAX_BYTES, caller=_CALLER
            )
            for item in items:
                if isinstance(item, bytes):
                    pieces.append(item)
                elif isinstance(item, StatementEnd):
                    name = PARTS[item.index].name
                    if item.error is None:
                        rows[name] = pa.ipc.open_stream(b"".join(pieces)).read_all().to_pylist()
                    else:
                        failed[name] = item.error.message
                    pieces = []
        except ProbingError as e:
            failed |= {part.name: e.message for part in PARTS if part.name not in rows}
        return rows, failed
