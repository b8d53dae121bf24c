"""The source of process.logs: records lines that trainers write to stdout and stderr, if ``logs.enabled`` is true."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy.typing as npt
import pyarrow as pa

from probing.api.tables.schema import Row
from probing.api.text import escape
from probing.daemon.arrow import batch_of
from probing.daemon.bpf.session import Session
from probing.daemon.clock import Clock, ClockPair
from probing.daemon.config import LogsConfig
from probing.daemon.context import Context
from probing.daemon.elf.symbols import SymbolFinder
from probing.daemon.logs.attachments import FUNCTIONS, Attachments
from probing.daemon.logs.lines import Line, Lines, Patterns, Piece, RateLimit, Tracebacks, Writer
from probing.daemon.processes.parsers import symbols_by
from probing.daemon.processes.reader_pool import ReaderPool
from probing.daemon.processes.redaction import redacted
from probing.daemon.source import Identity, Loss, ProbeSlot, Processes, Refused, RingConsumer, Sink, Source
from probing.daemon.source_state import SourceState, Totals

__all__ = ("OBJECTS", "RING", "LogSource", "shown")

OBJECTS = ("logs",)
RING = "log_writes"
TABLE = "process.logs"
STREAMS = {1: "stdout", 2: "stderr"}
# The value PIECE_CUT of enum piece_end in logs.bpf.c.
PIECE_IS_CUT = 2
MAX_ENDED = 1024
# Terminal sequences, for example colors, would split words.
_TERMINAL = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]")


class LogSource(Source):
    """The source of process.logs. ``enabled`` returns whether lines of a process are recorded now."""

    name = "logs"
    table = TABLE
    optional_objects = OBJECTS
    late_objects = OBJECTS

    def __init__(
        self,
        session: Session,
        processes: Processes,
        readers: ReaderPool,
        symbols: SymbolFinder,
        sink: Sink,
        clock: Clock,
        node: str,
        config: LogsConfig,
        enabled: Callable[[Identity], bool],
        *,
        fuse: bool = False,
    ) -> None:
        self._processes, self._sink, self._clock, self._node = processes, sink, clock, node
        self._enabled = enabled
        self._line_bytes = config.line_bytes
        self._attachments = Attachments(session, readers, symbols, fuse=fuse)
        self._trainers: dict[tuple[int, int], Identity] = {}
        # The lock guards the following attributes.
        self._lock = threading.Lock()
        self._patterns, self._limit, self._lines = Patterns(config.patterns), RateLimit(config.lines_per_s), Lines()
        self._tracebacks = Tracebacks()
        self._ended: dict[tuple[int, int], None] = {}

    @classmethod
    def make(cls, context: Context) -> Source:
        refused = context.session.refused.get(OBJECTS[0])
        if refused is not None:
            return Refused(cls.name, refused.message)
        return cls(
            context.session,
            context.processes,
            context.readers,
            symbols_by(context.parsers.stacks),
            context.sink,
            context.clock,
            context.node,
            context.config.logs,
            enabled=lambda process: bool(context.settings.value("logs.enabled", process)),
            fuse=context.config.probes.fuse,
        )

    def start(self) -> None:
        self._attachments.start()

    def finish(self) -> None:
        self.stop()

    def stop(self) -> None:
        """Detaches all probes, since nobody would make rows of their records."""
        self._attachments.stop()

    @property
    def rings(self) -> Mapping[str, RingConsumer]:
        return {RING: RingConsumer(self.assemble, TABLE)}

    @property
    def probe_slots(self) -> Mapping[int, ProbeSlot]:
        return {slot: ProbeSlot(name, self.name, TABLE) for slot, name in self.slots.items()}

    def states(self, totals: Totals) -> list[SourceState]:
        watched, reason = self.watched, self.reason
        state = "" if watched or reason else "stopped"
        return [totals.of(self.name, TABLE, state=state, reason=reason, detail=f"{watched} processes")]

    @property
    def slots(self) -> dict[int, str]:
        """Returns "PROGRAM FUNCTION" by slot: the function of libc whose calls the slot counts, and its program."""
        return {slot: f"{program} {name}" for name, (program, slot) in FUNCTIONS.items()}

    @property
    def watched(self) -> int:
        """Returns the number of processes with probes."""
        return self._attachments.watched

    @property
    def reason(self) -> str:
        """Returns why the output of some trainer cannot be watched; empty if there is no such trainer."""
        return next(iter(list(self._attachments.reasons.values())), "")

    def settings_changed(self) -> bool:
        """Calls ``enabled`` again for each trainer. Returns False."""
        for process in list(self._trainers.values()):
            self._follow(process)
        return False

    def process_identified(self, who: Identity) -> None:
        if who.role == "trainer":
            self._trainers[who.pid, who.start_ns] = who
            self._follow(who)
        elif self._trainers.pop((who.pid, who.start_ns), None) is not None:
            # The process is not a trainer any more: it called exec, or turned out to be a launcher.
            self._attachments.drop(who.pid, who.start_ns)

    def process_replaced(self, pid: int, start_ns: int) -> None:
        """Attaches the probes again, since the new program may have another libc."""
        if (who := self._trainers.get((pid, start_ns))) is not None:
            self._attachments.drop(pid, start_ns)
            self._follow(who)

    def process_exited(self, who: Identity) -> None:
        """Stores the unfinished lines of the process, and reports how many lines were suppressed."""
        key = (who.pid, who.start_ns)
        if self._trainers.pop(key, None) is None:
            return
        self._attachments.drop(*key)
        pair = self._clock.pair()
        with self._lock:
            if len(self._ended) >= MAX_ENDED:
                oldest = next(iter(self._ended))
                del self._ended[oldest]
                self._tracebacks.forget(*oldest)
            self._ended[key] = None
            rows = self._rows(self._lines.end(*key), pair)
            suppressed = self._limit.forget(*key)
        if rows:
            self._sink.put(TABLE, batch_of(TABLE, rows))
        if suppressed:
            now = pair.real_ns
            reason = f"more than {self._limit.lines_per_s} lines a second"
            self._sink.lost(Loss(self.name, TABLE, "rate", reason, now, now, suppressed, who.pid))

    def assemble(self, records: npt.NDArray[Any], pair: ClockPair) -> dict[str, pa.RecordBatch]:
        """Returns a batch of ``process.logs`` from records of the ring ``log_writes``, or an empty dict."""
        if not len(records):
            return {}
        with self._lock:
            lines = [line for record in records for line in self._lines.feed(_piece(record))]
            # The last output of a process may come after its exit was reported.
            for key in {(int(r["tgid"]), int(r["start_ns"])) for r in records} & set(self._ended):
                lines += self._lines.end(*key)
            rows = self._rows(lines, pair)
        return {TABLE: batch_of(TABLE, rows)} if rows else {}

    def _follow(self, who: Identity) -> None:
        change = self._attachments.want if self._enabled(who) else self._attachments.drop
        change(who.pid, who.start_ns)

    def _rows(self, lines: Iterable[Line], pair: ClockPair) -> list[Row]:
        rows = []
        for writer, mono_ns, text, cut in lines:
            kind = self._tracebacks.kind(writer, text, self._patterns.kind(text))
            if cut:
                self._tracebacks.end(writer)
            if kind is None:
                continue
            who = self._processes.identity(writer.pid, writer.start_ns)
            if who is None or who.role != "trainer":
                continue
            suppressed = self._limit.take(writer.pid, writer.start_ns, kind, mono_ns)
            if suppressed is None:
                continue
            rows.append(
                {
                    **who.row(self._node, mono_ns + pair.mono_to_utc_ns),
                    "tid": writer.tid,
                    "stream": STREAMS.get(writer.fd),
                    "kind": kind,
                    "line": shown(text, self._line_bytes),
                    "suppressed": suppressed,
                }
            )
        return rows


def shown(line: bytes, limit: int) -> str:
    """Returns the text of a line to store: redacted, only printable characters, at most ``limit`` bytes of UTF-8."""
    text = _TERMINAL.sub("", line.decode(errors="replace")).replace("\t", " ")
    text = escape(redacted(text))
    encoded = text.encode()
    return text if len(encoded) <= limit else encoded[: limit - 3].decode(errors="ignore") + "…"


def _piece(record: Any) -> Piece:
    # numpy strips trailing NULs from a bytes field.
    size = int(record["size"])
    text = bytes(record["text"])[:size].ljust(size, b"\0")
    writer = Writer(int(record["tgid"]), int(record["start_ns"]), int(record["tid"]), int(record["fd"]))
    return Piece(writer, int(record["t"]), int(record["offset"]), text, int(record["end"]) == PIECE_IS_CUT)
