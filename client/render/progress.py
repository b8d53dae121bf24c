"""How far a query is, on one line of the terminal, once it takes longer than a blink."""

from __future__ import annotations

import shutil
import sys
import threading
import time
from collections.abc import Iterator
from types import TracebackType
from typing import TYPE_CHECKING

from probing.client.render.text import count, plural

if TYPE_CHECKING:
    import pyarrow as pa

    from probing.api.proto.probing.v1 import node_pb2 as pb

__all__ = ("Progress",)

_PATIENCE_S = 0.5
_REFRESH_S = 0.2
_ERASE = "\r\x1b[K"


class Progress:
    """A context around a query. It writes to stderr, only where that is a terminal; ``update`` takes what nodes say."""

    def __init__(self) -> None:
        self._wanted = sys.stderr.isatty()
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._nodes: dict[str, pb.QueryProgress] = {}
        self._rows = 0
        self._begin = 0.0

    @property
    def wanted(self) -> bool:
        """Whether anybody looks: else nodes need not tell."""
        return self._wanted

    def __enter__(self) -> Progress:
        self._begin = time.monotonic()
        if self._wanted:
            self._thread = threading.Thread(target=self._draw, name="progress", daemon=True)
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def stop(self) -> None:
        """Takes the line away, before anything else is written to the terminal."""
        self._stopped.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def update(self, address: str, said: pb.QueryProgress) -> None:
        with self._lock:
            self._nodes[address] = said

    def counting(self, batches: Iterator[pa.RecordBatch], *, to_terminal: bool) -> Iterator[pa.RecordBatch]:
        """The same batches; they are counted, and where they go ``to_terminal`` themselves the line is taken away."""
        for batch in batches:
            if to_terminal:
                self.stop()
            self._rows += batch.num_rows
            yield batch
        if to_terminal:
            self.stop()

    def _draw(self) -> None:
        if self._stopped.wait(_PATIENCE_S):
            return
        while True:
            width = shutil.get_terminal_size((80, 24)).columns
            sys.stderr.write(_ERASE + self.line(time.monotonic() - self._begin)[: width - 1])
            sys.stderr.flush()
            if self._stopped.wait(_REFRESH_S):
                break
        sys.stderr.write(_ERASE)
        sys.stderr.flush()

    def line(self, elapsed: float) -> str:
        """What is shown ``elapsed`` seconds after the begin."""
        with self._lock:
            told = list(self._nodes.values())
        end = f"{elapsed:.1f} s, Ctrl-C ends it"
        if self._rows:
            return f"{plural(self._rows, 'row')}, {end}"
        known = [min(said.fraction, 1.0) for said in told if said.fraction >= 0]
        parts = [f"{sum(known) / len(known):4.0%}"] if known else []
        if scanned := sum(said.rows_to_scan for said in told):
            parts.append(f"of {count(scanned)} rows" if known else f"{count(scanned)} rows to scan")
        if len(told) > 1:
            parts.append(f"on {len(told)} nodes")
        return f"{' '.join(parts)}, {end}" if parts else end
