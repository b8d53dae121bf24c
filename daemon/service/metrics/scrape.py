"""Makes the page /metrics: reads its rows by one query in a thread, and keeps the page for a second. Also returns the
state of the daemon from memory.

However many callers scrape, rows are read once, and all callers get the same page. A page never delays another call: a
page has its own thread, a deadline and one slot of the queries. Parts that are not read in time are missing.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from probing.api.errors import ProbingError
from probing.api.tables.schema import Row
from probing.daemon.query.answer import Item, StatementEnd
from probing.daemon.query.caller import Caller
from probing.daemon.query.engine import Engine
from probing.daemon.service.metrics.page import Readings, RequestTimes, page_text
from probing.daemon.service.metrics.parts import PARTS

__all__ = ("BAD", "Scraper")

KEPT_S = 1.0
# The timeout of the query, s: below the 10 s after which Prometheus gives up.
QUERY_S = 5.0
STATUS_S = 1.0
# How long a state is returned from memory, s: longer than the usual interval of Kubernetes' health checks.
REMEMBERED_S = 15.0
# The timeout of the request for the collector's state, s; callers wait for less time.
STATE_S = 5.0
MAX_BYTES = 16 << 20
# States in which /healthz answers 503.
BAD = frozenset(("lost", "starting"))
_CALLER = Caller("http", "metrics")


@dataclass(frozen=True, slots=True)
class _Kept:
    text: bytes
    made: float


class Scraper:
    """Makes the page. ``status(seconds)`` returns the collector's status within this time. ``refused``, ``calls`` and
    ``hooks`` return counts: refusals so far by reason, calls in progress by kind, hooks by outcome. Belongs to one
    event loop."""

    def __init__(
        self,
        node: str,
        version: str,
        engine: Engine,
        status: Callable[[float], Mapping[str, Any]],
        now: Callable[[], float] = time.monotonic,
        *,
        refused: Callable[[], Mapping[str, int]] = dict,
        calls: Callable[[], Mapping[str, int]] = dict,
        hooks: Callable[[], Mapping[str, int]] = dict,
    ) -> None:
        self.times = RequestTimes()
        self._node = node
        self._version = version
        self._engine = engine
        self._status = status
        self._now = now
        self._refused = refused
        self._calls = calls
        self._hooks = hooks
        # One thread for the page, and one for the state.
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="metrics")
        self._kept: dict[str, _Kept] = {}
        self._making: dict[str, asyncio.Task[bytes]] = {}

    def close(self) -> None:
        """Closes the thread pool, without waiting for running threads."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def page(self) -> bytes:
        """Returns the text of /metrics, at most KEPT_S old."""
        kept = self._kept.get("page")
        if kept is not None and self._now() - kept.made < KEPT_S:
            return kept.text
        return await asyncio.shield(self._task("page", self._page))

    async def health(self) -> str:
        """Returns the state of the daemon as a word, ``lost`` if the collector does not answer. A good state that was
        read lately is returned from memory and read again in the background, so load from other calls does not delay
        the answer."""
        kept = self._kept.get("health")
        if kept is None or self._now() - kept.made >= KEPT_S:
            reading = self._task("health", self._state)
            if kept is None or kept.text.decode() in BAD or self._now() - kept.made >= REMEMBERED_S:
                await asyncio.wait((reading,), timeout=STATUS_S)
                kept = self._kept.get("health")
        return kept.text.decode() if kept is not None and self._now() - kept.made < REMEMBERED_S else "lost"

    def _task(self, name: str, make: Callable[[], bytes]) -> asyncio.Task[bytes]:
        if name not in self._making:
            self._making[name] = asyncio.create_task(self._make(name, make))
        return self._making[name]

    async def _make(self, name: str, make: Callable[[], bytes]) -> bytes:
        try:
            text = await asyncio.get_running_loop().run_in_executor(self._threads, make)
            self._kept[name] = _Kept(text, self._now())
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
            hooks=dict(self._hooks()),
        )
        return page_text(readings, self.times)

    def _state(self) -> bytes:
        return str(self._read_status(STATE_S)["state"]).encode()

    def _read_status(self, seconds: float = STATUS_S) -> Mapping[str, Any]:
        try:
            return {"state": "degraded", **self._status(seconds)}
        except ProbingError as e:
            return {"state": "lost", "reason": e.message}

    def _read_rows(self) -> tuple[dict[str, list[Row]], dict[str, str]]:
        rows: dict[str, list[Row]] = {}
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
