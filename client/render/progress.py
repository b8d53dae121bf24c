"""Shows a line on the terminal about the progress of a command that takes longer than half a second."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import TYPE_CHECKING

from probing.api.text import count, plural

if TYPE_CHECKING:
    import pyarrow as pa

    from probing.api.proto.probing.v1 import node_pb2 as pb

__all__ = ("Progress", "StatusLine")

_PATIENCE_S = 0.5
_REFRESH_S = 0.2


class StatusLine:
    """A context manager that shows ``text(elapsed seconds)`` on stderr, or nothing if stderr is not a terminal."""

    def __init__(self, text: Callable[[float], str]) -> None:
        self.wanted = sys.stderr.isatty()
        self._text = text
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None
        self._begin = 0.0

    def __enter__(self) -> StatusLine:
        self._begin = time.monotonic()
        if self.wanted:
            self._thread = threading.Thread(target=self._show, name="status line", daemon=True)
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def stop(self) -> None:
        """Erases the line; called before anything else is written to the terminal."""
        self._stopped.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _show(self) -> None:
        if self._stopped.wait(_PATIENCE_S):
            return
        # Importing rich takes 40 to 60 ms, which a quick command saves.
        from rich.console import Console
        from rich.live import Live
        from rich.text import Text

        class Screen(Console):
            def show_cursor(self, show: bool = True) -> bool:  # noqa: ARG002
                # Ctrl-C may end the process before a hidden cursor is shown again.
                return False

        def line() -> Text:
            return Text(self._text(time.monotonic() - self._begin), no_wrap=True, overflow="ellipsis")

        screen = Screen(stderr=True)
        with Live(
            line(), console=screen, auto_refresh=False, transient=True, redirect_stdout=False, redirect_stderr=False
        ) as live:
            while not self._stopped.wait(_REFRESH_S):
                live.update(line(), refresh=True)


class Progress:
    """A context manager that shows the progress of a query on a status line; ``update`` receives the nodes' reports."""

    def __init__(self) -> None:
        self._line = StatusLine(self.line)
        self._lock = threading.Lock()
        self._nodes: dict[str, pb.QueryProgress] = {}
        self._rows = 0
        self._done = (0, 0)

    @property
    def wanted(self) -> bool:
        """Whether the line is shown. Nodes have to report their progress only if it is."""
        return self._line.wanted

    def __enter__(self) -> Progress:
        self._line.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._line.stop()

    def stop(self) -> None:
        """Erases the line; called before anything else is written to the terminal."""
        self._line.stop()

    def update(self, address: str, reported: pb.QueryProgress) -> None:
        with self._lock:
            self._nodes[address] = reported

    def done(self, nodes: int, all_nodes: int) -> None:
        """Sets the number of nodes that have answered or failed, and the number of all nodes."""
        self._done = (nodes, all_nodes)

    def counting(self, batches: Iterator[pa.RecordBatch], *, to_terminal: bool) -> Iterator[pa.RecordBatch]:
        """Yields ``batches`` and counts their rows. ``to_terminal``: the line is erased before the first batch."""
        for batch in batches:
            if to_terminal:
                self.stop()
            self._rows += batch.num_rows
            yield batch
        if to_terminal:
            self.stop()

    def line(self, elapsed: float) -> str:
        """Returns the text of the line, ``elapsed`` seconds after the start."""
        with self._lock:
            reported = list(self._nodes.values())
        end = f"{elapsed:.1f} s, Ctrl-C ends it"
        if self._rows:
            return f"{plural(self._rows, 'row')}, {end}"
        known = [min(node.fraction, 1.0) for node in reported if node.fraction >= 0]
        parts = [f"{sum(known) / len(known):4.0%}"] if known else []
        if scanned := sum(node.rows_to_scan for node in reported):
            parts.append(f"of {count(scanned)} rows" if known else f"{count(scanned)} rows to scan")
        if self._done[1] > 1:
            parts.append(f"{'on ' if parts else ''}{count(self._done[0])} of {count(self._done[1])} nodes")
        elif len(reported) > 1:
            parts.append(f"on {len(reported)} nodes")
        return f"{' '.join(parts)}, {end}" if parts else end
