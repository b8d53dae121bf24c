"""The source of process.kmsg: reads the kernel log each second without waiting. A token bucket limits the stored lines
of each kind.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import pyarrow as pa

from probing.api.tables.process import KMSG
from probing.api.tables.schema import Row
from probing.daemon.arrow import batch_of
from probing.daemon.clock import Clock, ClockPair
from probing.daemon.context import Context
from probing.daemon.host.kernel_log.records import Chunk, KernelLog, Meaning, Record, meaning_of
from probing.daemon.source import Identity, Loss, Sink, Source
from probing.daemon.source_state import SourceState, Totals

__all__ = (
    "Allowance",
    "KernelLogSource",
)


@dataclass(slots=True)
class _Bucket:
    left: float
    at_ns: int
    left_out: int = 0


class Allowance:
    """A token bucket for each kind of lines: at most ``burst`` lines at once, and ``rate`` lines a second in the long
    run.
    """

    def __init__(self, burst: int, rate: float) -> None:
        self._burst, self._rate = burst, rate
        self._buckets: dict[str, _Bucket] = {}

    def take(self, kind: str, now_ns: int) -> int | None:
        """Returns the number of lines of ``kind`` that were suppressed since the last stored line; None: this line must
        be suppressed, too.
        """
        bucket = self._buckets.setdefault(kind, _Bucket(self._burst, now_ns))
        seconds = max(0, now_ns - bucket.at_ns) / 1e9
        bucket.left, bucket.at_ns = min(self._burst, bucket.left + seconds * self._rate), now_ns
        if bucket.left < 1:
            bucket.left_out += 1
            return None
        left_out, bucket.left_out, bucket.left = bucket.left_out, 0, bucket.left - 1
        return left_out


MAX_READS = 4_096
BURST, RATE = 100, 1.0
# The limits for lines of kind other are higher, because a report that memory ran out has two hundred lines.
OTHER_BURST, OTHER_RATE = 400, 5.0
MAX_PROCESSES = 4_096
_OTHER = Meaning("other")
# Because the clocks differ, a line may seem to be up to this much older than the process that it names, ns.
_SLACK_NS = 2_000_000_000


class KernelLogSource(Source):
    """Stores lines of the kernel log ``path``. If the log is absent or cannot be read, the source is stopped, and tries
    again each minute."""

    name = "kernel_log"
    table = KMSG.name

    def __init__(self, path: str, sink: Sink, clock: Clock, node: str) -> None:
        self._path, self._sink, self._clock, self._node = path, sink, clock, node
        self._log: KernelLog | None = None
        self._rest = 0
        self._reason = ""
        self._known: dict[int, Identity] = {}
        self._stored = -1
        self._caught_up = False
        self._last_ns = 0
        self._kinds, self._others = Allowance(BURST, RATE), Allowance(OTHER_BURST, OTHER_RATE)

    @classmethod
    def make(cls, context: Context) -> KernelLogSource:
        return cls(context.config.host.kernel_log, context.sink, context.clock, context.node)

    @property
    def restored_tables(self) -> Mapping[str, tuple[Sequence[str], Callable[[pa.Table], None]]]:
        return {self.table: (("seq", "boot"), self._restore)}

    def stop(self) -> None:
        log, self._log = self._log, None
        if log is not None:
            log.close()

    def process_identified(self, process: Identity) -> None:
        self._known.pop(process.pid, None)
        self._known[process.pid] = process
        if len(self._known) > MAX_PROCESSES:
            self._known.pop(next(iter(self._known)))

    def tick(self) -> None:
        if self._log is None and not self._open():
            return
        assert self._log is not None
        pair = self._clock.pair()
        try:
            chunk = self._log.read(MAX_READS)
        except OSError as e:
            self._failed(e)
            return
        rows = list(self._rows(chunk, pair))
        # Until the first read reaches the end of the log, the records are older than the daemon.
        self._caught_up = self._caught_up or not chunk.more
        self._last_ns = pair.real_ns
        if rows:
            self._sink.put(self.table, batch_of(self.table, rows))

    def states(self, totals: Totals) -> list[SourceState]:
        off = not self._path or bool(self._reason)
        return [totals.of(self.name, self.table, state="stopped" if off else "", reason=self._reason)]

    def _open(self) -> bool:
        self._rest = max(0, self._rest - 1)
        if not self._path or self._rest:
            return False
        try:
            self._log = KernelLog(self._path)
        except OSError as e:
            self._failed(e)
            return False
        self._reason = ""
        self._caught_up, self._last_ns = False, self._clock.pair().boot_to_utc_ns
        return True

    def _failed(self, e: OSError) -> None:
        self.stop()
        self._rest = 60
        self._reason = f"{self._path} cannot be read: {e.strerror}; reading it takes CAP_SYSLOG"

    def _restore(self, rows: pa.Table) -> None:
        seqs = [row["seq"] for row in rows.to_pylist() if row["boot"] == self._clock.boot_id and row["seq"] is not None]
        self._stored = max(seqs, default=-1)

    def _rows(self, chunk: Chunk, pair: ClockPair) -> Iterator[Row]:
        left_out = 0
        for record in chunk.records:
            if record.seq <= self._stored:
                continue  # the record was stored before the daemon restarted, or before the log was opened again
            self._stored = record.seq
            meaning = meaning_of(record.text) if record.facility == "kern" else _OTHER
            if not self._caught_up and meaning.kind == "other":
                continue
            allowance = self._others if meaning.kind == "other" else self._kinds
            suppressed = allowance.take(meaning.kind, pair.mono_ns)
            if suppressed is None:
                left_out += 1
                continue
            yield self._row(record, meaning, pair) | {"suppressed": suppressed}
        if left_out:
            self._lose("suppress", "too many lines of one kind", left_out, pair)
        if chunk.lost:
            self._lose("read", "the kernel overwrote records", chunk.lost, pair)

    def _row(self, record: Record, meaning: Meaning, pair: ClockPair) -> Row:
        # The log's clock drifts from CLOCK_MONOTONIC by seconds a day. But a new line was written after the last read,
        # so ``ts`` is never earlier.
        at_ns = min(record.boot_us * 1000 + pair.mono_to_utc_ns, pair.real_ns)
        who = self._known.get(meaning.pid) if meaning.pid is not None else None
        if who is not None and not self._caught_up and who.start_ns > record.boot_us * 1000 + _SLACK_NS:
            who = None  # the pid belonged to another process at that time
        return {
            "node": self._node,
            "ts": max(at_ns, self._last_ns) if self._caught_up else at_ns,
            "job": who.job if who else None,
            "run": who.run if who else None,
            "pid": meaning.pid,
            "start_ns": who.start_ns if who else None,
            "rank": who.rank if who else None,
            "facility": record.facility,
            "level": record.level,
            "message": record.text,
            "kind": meaning.kind,
            "device": meaning.device,
            "code": meaning.code,
            "process": meaning.name,
            "seq": min(record.seq, (1 << 63) - 1),
            "boot": self._clock.boot_id,
        }

    def _lose(self, stage: str, reason: str, count: int, pair: ClockPair) -> None:
        self._sink.lost(Loss(self.name, self.table, stage, reason, self._last_ns, pair.real_ns, count))
