"""Finds and reads the dumps of PyTorch's flight recorder that trainers write by themselves.

A trainer writes its dump when a collective has timed out. ProcessGroupNCCL then waits at least
TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC, 15 s, before it aborts the trainer. So a search every 5 s finds the dump while the
trainer lives. A dump that was written just before the exit is read after the exit, unless it lies in a container's own
file system, which goes away with the container.

A dump's name is a prefix and the rank, as in DebugInfoWriter::getWriter (torch/csrc/distributed/c10d/
FlightRecorder.cpp). A prefix that the job sets in its environment after its start is not visible; then only files with
the default prefixes are found.
"""

from __future__ import annotations

import logging
import os
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from probing.api.errors import InternalError, ProbingError, ProcessGone, TargetTimeout, UnsupportedTarget
from probing.daemon.arrow import batch_of
from probing.daemon.clock import Clock
from probing.daemon.context import Context
from probing.daemon.fairness import in_turn
from probing.daemon.nccl_uprobes.flight_recorder.known_dumps import DumpFile, KnownDumps, Stamp
from probing.daemon.nccl_uprobes.flight_recorder.report import Dump
from probing.daemon.processes.discovery import Discovery
from probing.daemon.processes.parsers import ParserPool, answer_of
from probing.daemon.processes.reader_pool import ReaderPool
from probing.daemon.source import Identity, Loss, ProcessKey, Sink, Source
from probing.daemon.source_state import SourceState, Totals
from probing.daemon.worker import Worker

__all__ = ("FlightRecorderWatch", "candidates")

TABLE = "python.torch_nccl_flight_record"
LOOK_S = 5.0
# The first and the longest pause after the files of a process could not be listed, s.
LEFT_ALONE_S, MOST_ALONE_S = 60.0, 960.0
MAX_TRIES = 3
MAX_FAILURES = 1_024
# The maximum number of ended processes whose dumps wait to be read.
MAX_ENDED = 1_024
READ_TIMEOUT_S = 2.0
PARSE_TIMEOUT_S = 30.0
# A dump that is written again and again is read again after 10, 20, 40 ... s.
FIRST_PAUSE_S, LAST_PAUSE_S = 10.0, 600.0
# If reading a dump took longer than SLOW_S, the other dumps of its user wait SLOW_FACTOR times as long as it took.
SLOW_S, SLOW_FACTOR = 2.0, 10
# A file that is older than its process by more than SLACK_NS belongs to an earlier process. The slack is needed because
# file systems have coarse clocks.
SLACK_NS = 1_000_000_000
_PREFIX_NAMES = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
_DEFAULTS = (
    "$XDG_CACHE_HOME/torch/comm_lib_trace_rank_",
    "$HOME/.cache/torch/comm_lib_trace_rank_",
    "$HOME/.cache/torch/nccl_trace_rank_",
    "/tmp/.cache/torch/comm_lib_trace_rank_",  # noqa: S108  where torch writes it without HOME
    "/tmp/nccl_trace_rank_",  # noqa: S108  where torch before 2.9 writes it
)
_log = logging.getLogger(__name__)


class _Pause(NamedTuple):
    """A pause before a path is read again. ``until`` is on time.monotonic()."""

    until: float
    span: float


@dataclass(slots=True)
class _Watched:
    """A watched trainer. ``last``: path -> stamp at the last look. ``pauses``: path -> when it may be read again.
    ``witness``: a process that sees the same files, through which ``places`` (absolute paths) are read after the
    trainer's exit."""

    who: Identity
    paths: tuple[str, ...]
    uid: int = -1
    places: tuple[str, ...] = ()
    witness: int | None = None
    last: dict[str, Stamp] = field(default_factory=dict)
    not_before: float = 0.0
    alone_s: float = LEFT_ALONE_S
    pauses: dict[str, _Pause] = field(default_factory=dict)
    looked: float | None = None


class FlightRecorderWatch(Source):
    """Reads the dumps that trainers write. ``remembered``: a file that lists dumps already read, so that the next
    daemon does not read them again. ``look`` is not thread-safe."""

    name = "flight_recorder"
    table = TABLE

    def __init__(
        self,
        processes: Discovery,
        readers: ReaderPool,
        parsers: ParserPool,
        sink: Sink,
        clock: Clock,
        node: str,
        *,
        remembered: Path | None = None,
        enabled: Callable[[], bool] = lambda: True,
        interval_s: float = LOOK_S,
    ) -> None:
        self._processes = processes
        self._readers = readers
        self._parsers = parsers
        self._sink = sink
        self._clock = clock
        self._node = node
        self._enabled = enabled
        self._interval_s = interval_s
        self._watched: dict[ProcessKey, _Watched] = {}
        self._done = KnownDumps(remembered)
        self._failures: dict[Stamp, int] = defaultdict(int)
        self._reasons: dict[ProcessKey, str] = {}
        # Owners with a process that did not answer in this look. Their other processes wait for the next look: each may
        # cost seconds, and the dumps of other users must not wait that long.
        self._silent: set[int] = set()
        # uid -> the time.monotonic() until which the user's dumps wait.
        self._rests: dict[int, float] = {}
        # Processes that have ended, whose dumps wait.
        self._ended: list[_Watched] = []
        self._worker = Worker("flight-recorder", self.look, lambda: interval_s, patience_s=READ_TIMEOUT_S + 1.0)

    @classmethod
    def make(cls, context: Context) -> FlightRecorderWatch:
        options = context.config.nccl
        return cls(
            context.processes,
            context.readers,
            context.parsers.files,
            context.sink,
            context.clock,
            context.node,
            remembered=Path(context.config.state_dir) / "flight_dumps.json",
            enabled=lambda: options.flight_recorder,
        )

    def start(self) -> None:
        self._worker.start()

    def stop(self) -> None:
        """Waits for the thread, 3 s at most; a request in progress ends at its own deadline."""
        self._worker.stop()

    @property
    def reason(self) -> str:
        """Why the last look for dumps of a trainer failed; empty when no look failed."""
        return next(iter(list(self._reasons.values())), "")

    def states(self, totals: Totals) -> list[SourceState]:
        if not self._enabled():
            return [totals.of(self.name, TABLE, state="stopped")]
        return [totals.of(self.name, TABLE, reason=self.reason)]

    def process_identified(self, who: Identity) -> None:
        """Looks for the trainer's paths at once, because the trainer may end early."""
        if who.role == "trainer":
            self._worker.wake()

    def process_replaced(self, pid: int, start_ns: int) -> None:
        """Drops the paths of a process that called exec, because its environment has changed."""
        if (watched := self._watched.get(ProcessKey(pid, start_ns))) is not None:
            watched.paths = ()

    def process_exited(self, who: Identity) -> None:
        """Wakes the thread, so that it looks for dumps at once."""
        if who.key in self._watched:
            self._worker.wake()

    def look(self) -> int:
        """Reads the dumps that are new and no longer change. Returns the number of dumps read."""
        # The ids are saved one look after the rows: if the daemon is killed in between, a dump is reported twice, not
        # lost.
        self._done.save()
        live = {who.key: who for who in self._processes.live() if who.role == "trainer"}
        self._ended += [self._watched.pop(key) for key in self._watched.keys() - live.keys()]
        count = self._look_at_ended()
        for key in self._reasons.keys() - live.keys():
            del self._reasons[key]
        if not self._enabled():
            self._watched.clear()
            self._ended.clear()
            return count
        finished: dict[Stamp, tuple[_Watched, DumpFile]] = {}
        self._silent.clear()
        for key, who in live.items():
            for watched, found in self._finished(key, who):
                finished.setdefault(found.stamp, (watched, found))
        for watched, found in in_turn(finished.values(), lambda one: one[0].uid):
            # An earlier dump in this loop may have taken so long that the other dumps of its user have to wait.
            if self._may_read(watched, found):
                count += self._read_finished(watched, found)
        return count

    def _finished(self, key: ProcessKey, who: Identity) -> list[tuple[_Watched, DumpFile]]:
        """Returns the dumps of a process that have not changed since the previous look."""
        watched = self._watched.setdefault(key, _Watched(who, ()))
        watched.who = who
        now = time.monotonic()
        # Two looks in quick succession, after a start or an exit, would not show that a file still grows.
        early = watched.looked is not None and now - watched.looked < self._interval_s / 2
        if early or now < watched.not_before or who.owner in self._silent:
            return []
        watched.looked = now
        try:
            files = self._files(watched)
        except ProcessGone:
            return []
        except ProbingError as e:
            watched.not_before = time.monotonic() + watched.alone_s
            watched.alone_s = min(2 * watched.alone_s, MOST_ALONE_S)
            if isinstance(e, TargetTimeout):
                self._silent.add(who.owner)
            if self._reasons.get(key) != e.message:
                _log.warning("cannot look for dumps of process %d: %s", who.pid, e.message)
            self._reasons[key] = e.message
            return []
        self._reasons.pop(key, None)
        watched.alone_s = LEFT_ALONE_S
        before, watched.last = watched.last, {found.path: found.stamp for found in files}
        return [(watched, f) for f in files if before.get(f.path) == f.stamp and self._may_read(watched, f)]

    def _may_read(self, watched: _Watched, found: DumpFile) -> bool:
        now = time.monotonic()
        pause = watched.pauses.get(found.path)
        return (pause is None or now >= pause.until) and not self._rests_now(watched.uid)

    def _rests_now(self, uid: int) -> bool:
        now = time.monotonic()
        return now < self._rests.get(uid, now)

    def _rest(self, uid: int, began: float) -> None:
        """Makes the dumps of a user wait if reading has taken long since ``began``."""
        now = time.monotonic()
        self._rests = {uid: until for uid, until in self._rests.items() if until > now}
        if now - began > SLOW_S:
            self._rests[uid] = now + SLOW_FACTOR * (now - began)

    def _files(self, watched: _Watched) -> list[DumpFile]:
        who = watched.who
        if not watched.paths:
            answer = self._readers.call("identity", pid=who.pid, start_ns=who.start_ns, timeout=READ_TIMEOUT_S)
            watched.paths = candidates(answer.header.get("environ", {}), who.rank)
            if not watched.paths:
                return []
        process = [who.pid, who.start_ns]
        header = self._readers.call("files", timeout=READ_TIMEOUT_S, process=process, paths=watched.paths).header
        watched.uid = header["uid"]
        watched.witness = header["witness"]
        watched.places = tuple(path for path in header["paths"] if path and path.startswith("/"))
        files = [DumpFile.of(found) for found in header["files"] if found is not None]
        return [found for found in files if self._is_new(who, found)]

    def _is_new(self, who: Identity, found: DumpFile) -> bool:
        began = who.start_ns + self._clock.pair().boot_to_utc_ns - SLACK_NS
        return bool(found.size) and found.mtime_ns >= began and found.snapshot_id not in self._done

    def _look_at_ended(self) -> int:
        """Reads the dumps of processes that have ended, unless their user has to wait (``_rest``). Returns the number
        of dumps read.
        """
        count = 0
        ended, self._ended = in_turn(self._ended, lambda watched: watched.uid), []
        for watched in ended:
            if self._rests_now(watched.uid):
                self._ended.append(watched)
                continue
            began = time.monotonic()
            count += self._last_look(watched, [other for other in ended if other is not watched])
            self._rest(watched.uid, began)
        if dropped := self._ended[MAX_ENDED:]:
            del self._ended[MAX_ENDED:]
            self._lost(None, f"too many ended processes have unread dumps: {len(dropped)} processes are left out")
        return count

    def _last_look(self, watched: _Watched, ended: list[_Watched]) -> int:
        """Reads the dumps of a process that has ended, even if they look unfinished. ``ended``: the other processes
        that have ended. Returns the number of dumps read.
        """
        if watched.witness is None:
            if watched.last:
                self._lost(watched.who, "the process ended, and its files with it, before its dump was read")
            return 0
        if watched.last.keys() - set(watched.places):
            self._lost(watched.who, "the process ended, and its working directory with it, before its dump was read")
        count = 0
        for place in watched.places:
            try:
                found, fd = self._open([watched.witness, 0], place, watched.uid)
            except (UnsupportedTarget, ProcessGone) as e:
                # Most processes leave no dump, so only a dump that was seen before counts as lost.
                if place in watched.last:
                    self._lost(watched.who, f"the process ended, and its dump cannot be read: {e.message}")
                continue
            except ProbingError as e:
                # The other places are on the same file system, and would take as long.
                self._lost(watched.who, f"the process ended, and it is not known whether it left a dump: {e.message}")
                break
            # Another job of the user may have written the dump.
            same = (watched.uid, watched.witness)
            others = (other for other in (*self._watched.values(), *ended) if (other.uid, other.witness) == same)
            owners = [other.who for other in others if place in other.places and self._is_new(other.who, found)]
            count += self._read(found, fd, [watched.who, *owners], final=True)
        return count

    def _read_finished(self, watched: _Watched, found: DumpFile) -> int:
        who, began = watched.who, time.monotonic()
        try:
            opened, fd = self._open([who.pid, who.start_ns], found.path, watched.uid)
        except ProcessGone:
            return 0
        except ProbingError as e:
            self._failed(found, who, e)
            self._rest(watched.uid, began)
            return 0
        # Two jobs of one user may write to the same file names.
        owners = [other.who for other in self._watched.values() if found.stamp in other.last.values()]
        watched.last.pop(found.path, None)
        count = self._read(opened, fd, owners)
        self._pause(watched, found.path, began)
        return count

    def _pause(self, watched: _Watched, path: str, began: float) -> None:
        now = time.monotonic()
        before = watched.pauses.get(path)
        span = min(2 * before.span, LAST_PAUSE_S) if before is not None else FIRST_PAUSE_S
        watched.pauses[path] = _Pause(now + span, span)
        self._rest(watched.uid, began)

    def _open(self, process: list[int], path: str, uid: int) -> tuple[DumpFile, int]:
        answer = self._readers.call("file", timeout=READ_TIMEOUT_S, process=process, path=path, uid=uid)
        return DumpFile.of(answer.header), answer.take_fd()

    def _read(self, found: DumpFile, fd: int, owners: list[Identity], *, final: bool = False) -> int:
        try:
            if not self._is_new(owners[0], found):
                return 0
            dump = answer_of(Dump, self._parsers.call("flight_dump", fds=[fd], timeout=PARSE_TIMEOUT_S))
            after = os.fstat(fd)
        except ProbingError as e:
            self._failed(found, owners[0], e, final=final)
            return 0
        finally:
            os.close(fd)
        if (after.st_size, after.st_mtime_ns) != (found.size, found.mtime_ns):
            return 0
        self._write(found, dump, owners)
        return 1

    def _write(self, found: DumpFile, dump: Dump, owners: list[Identity]) -> None:
        now = self._clock.pair().real_ns
        ts = min(found.mtime_ns, now)
        who = owners[0] if len(owners) == 1 else None
        common = {
            "node": self._node,
            "ts": ts,
            "job": who and who.job,
            "run": who and who.run,
            "pid": who and who.pid,
            "start_ns": who and who.start_ns,
            "rank": owners[0].rank,
            "world_size": (who and who.world_size) or dump["world_size"],
            "snapshot_id": found.snapshot_id,
            "dump": found.path,
            "version": dump["version"] or None,
        }
        self._sink.put(TABLE, batch_of(TABLE, [{**common, **row} for row in dump["rows"]]))
        if dump["skipped"]:
            reason = "records of a dump were malformed or too many"
            pid = who.pid if who is not None else None
            self._sink.lost(Loss(self.name, TABLE, "read", reason, ts, ts, dump["skipped"], pid))
        self._done.add(found.snapshot_id, owners[0].owner)

    def _failed(self, found: DumpFile, who: Identity, error: ProbingError, *, final: bool = False) -> None:
        stamp = found.stamp
        self._failures[stamp] += 1
        if len(self._failures) > MAX_FAILURES:
            # The oldest failure is dropped, because its file has usually been written again.
            del self._failures[next(iter(self._failures))]
        if not final and isinstance(error, TargetTimeout | InternalError) and self._failures[stamp] < MAX_TRIES:
            return
        del self._failures[stamp]
        self._done.add(found.snapshot_id, who.owner)
        self._lost(who, f"a dump cannot be read: {error.message}")

    def _lost(self, who: Identity | None, reason: str) -> None:
        pid = None if who is None else who.pid
        _log.warning("flight recorder%s: %s", "" if pid is None else f" of process {pid}", reason)
        ts = self._clock.pair().real_ns
        self._sink.lost(Loss(self.name, TABLE, "read", reason, ts, ts, None, pid))


def candidates(environ: dict[str, str], rank: int | None) -> tuple[str, ...]:
    """Returns the paths at which a trainer with this environment and rank would write its dump; empty without
    a rank.
    """
    if rank is None:
        return ()
    named = [environ[name] for name in _PREFIX_NAMES if environ.get(name)]
    prefixes = [prefix for prefix in named if not prefix.startswith("$")] or _DEFAULTS
    return tuple(dict.fromkeys(f"{prefix}{rank}" for prefix in prefixes))
