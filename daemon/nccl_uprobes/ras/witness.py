"""Polls NCCL's own RAS for the state of each rank of each communicator, as a second witness besides the probes.

All processes of a network namespace share one address (SO_REUSEPORT), and the kernel picks the process that answers.
This process may belong to another job, or be stopped. So the job is identified by the communicators in an answer, not
by the address. Any user can listen at the address. So a listener is asked only if its user owns a process that uses
NCCL, and is believed only about the jobs of that user.
"""

from __future__ import annotations

import logging
import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from probing.api.errors import ProbingError, ProcessGone, TargetTimeout, UnsupportedTarget
from probing.daemon.arrow import batch_of
from probing.daemon.clock import Clock
from probing.daemon.context import Context
from probing.daemon.fairness import in_turn
from probing.daemon.nccl_uprobes.operations.source import CollectivesSource
from probing.daemon.nccl_uprobes.ras.client import (
    NobodyListens,
    RasAddress,
    RasSilent,
    ask_ras,
    connect_ras,
    listener_at,
    ras_address,
)
from probing.daemon.nccl_uprobes.ras.report import MAX_ROWS, RankRow, Report
from probing.daemon.processes.liveness import real_user
from probing.daemon.processes.namespaces import ListedSocket, own_namespace
from probing.daemon.processes.parsers import ParserPool, answer_of
from probing.daemon.processes.reader_pool import ReaderPool, payload_of
from probing.daemon.source import Identity, Loss, ProcessKey, Sink, Source
from probing.daemon.source_state import SourceState, Totals
from probing.daemon.worker import Worker

__all__ = ("RasWitness",)

TABLE = "comm.ras"
READ_TIMEOUT_S = 2.0
PARSE_TIMEOUT_S = 30.0
# The timeout for an answer, s. RAS waits 5 s twice for peers that do not answer, and for a text report it asks them
# twice.
ANSWER_TIMEOUT_S = 25.0
# The maximum number of connections to one address in a round. One connection is not enough, since it may reach a
# stopped process or another job.
MAX_TRIES = 8
# An address that gave no report is asked again after 1, 2, 4 ... intervals, at most after this many intervals.
MAX_SKIPPED = 16
MAX_PLACES = 64
# The limits for each user in a round: seconds for asking the user's places, seconds for looking up the places of the
# user's processes, and rows. The rest waits for the next round. Any user can have slow listeners at any number of
# addresses.
USER_S, USER_READ_S = 30.0, 10.0
USER_ROWS = MAX_ROWS
# The sockets of a namespace are listed through one of its processes. At most this many processes are tried, because
# some may have ended.
MAX_LISTED = 4
_log = logging.getLogger(__name__)


class _Place(NamedTuple):
    """A RAS address in a network namespace. ``namespace``: its (device, inode)."""

    namespace: tuple[int, int]
    address: RasAddress


@dataclass(slots=True)
class _Waiting:
    """A place to be asked again after ``left`` rounds. ``listens``: a process listens at the place, but gave no
    report; False: nobody listens.
    """

    left: int
    skipped: int
    listens: bool


@dataclass(slots=True)
class _Round:
    """The answers of one place in one round: the ``jobs`` that answered and the communicators ``seen``."""

    ts: int
    jobs: set[tuple[str, str]] = field(default_factory=set)
    seen: set[tuple[object, object]] = field(default_factory=set)


class RasWitness(Source):
    """Asks the RAS of all jobs on this node, in a thread.

    ``processes`` returns the live processes that use NCCL. ``owners`` takes the hash of a communicator (16 hex digits),
    and returns the processes of this node that have it. ``port``: the port of RAS unless a process's environment names
    another.
    """

    name = "ras"
    table = TABLE

    def __init__(
        self,
        processes: Callable[[], Iterable[Identity]],
        owners: Callable[[str], Sequence[Identity]],
        readers: ReaderPool,
        parsers: ParserPool,
        sink: Sink,
        clock: Clock,
        node: str,
        *,
        port: int = 28028,
        interval_s: Callable[[], float] = lambda: 60.0,
        enabled: Callable[[], bool] = lambda: True,
    ) -> None:
        self._processes = processes
        self._owners = owners
        self._readers = readers
        self._parsers = parsers
        self._sink = sink
        self._clock = clock
        self._node = node
        self._port = port
        self._enabled = enabled
        self._addresses: dict[ProcessKey, RasAddress | None] = {}
        self._waiting: dict[_Place, _Waiting] = {}
        self._reasons: dict[object, str] = {}
        self._asked_ns: dict[_Place, int] = {}
        # The places in the order in which they were last asked.
        self._turns: dict[_Place, None] = {}
        self._worker = Worker("ras", self._ask_if_enabled, interval_s, patience_s=READ_TIMEOUT_S)

    @classmethod
    def make(cls, context: Context) -> RasWitness:
        collectives, processes, options = context.find(CollectivesSource), context.processes, context.config.nccl

        def users() -> list[Identity]:
            return [p for p in processes.live() if "nccl" in collectives.backends_of(p.pid, p.start_ns)]

        def owners(comm: str) -> list[Identity]:
            identities = (processes.identity(*key) for key in collectives.processes_of(comm))
            return [process for process in identities if process is not None]

        return cls(
            users,
            owners,
            context.readers,
            context.parsers.files,
            context.sink,
            context.clock,
            context.node,
            port=options.ras_port,
            interval_s=lambda: options.ras_interval_s,
            enabled=lambda: options.ras,
        )

    def start(self) -> None:
        self._worker.start()

    def stop(self) -> None:
        """Waits for the thread, 2 s at most; a request in progress ends at its own deadline."""
        self._worker.stop()

    @property
    def reason(self) -> str:
        """Why the RAS of a process could not be asked at the last try; empty when no try failed."""
        return next(iter(list(self._reasons.values())), "")

    @property
    def detail(self) -> str:
        """The addresses at which no process listens, because NCCL is older than 2.24 or its RAS is switched off."""
        waiting = list(self._waiting.items())
        places = sorted(str(place.address) for place, how in waiting if not how.listens)
        return f"no NCCL RAS listens at {', '.join(places[:4])}" if places else ""

    def states(self, totals: Totals) -> list[SourceState]:
        if not self._enabled():
            return [totals.of(self.name, TABLE, state="stopped", detail=self.detail)]
        return [totals.of(self.name, TABLE, reason=self.reason, detail=self.detail)]

    def process_replaced(self, pid: int, start_ns: int) -> None:
        """Drops the RAS address of a process, since its environment has changed."""
        self._addresses.pop(ProcessKey(pid, start_ns), None)

    def ask_all(self) -> int:
        """Asks every place once; returns the number of rows written. The users take turns. A place that is not
        asked, because other places of its user took too long, is among the first of this user in the next round.
        """
        places = self._places()
        for known in (self._waiting, self._asked_ns, self._turns):
            for place in known.keys() - places.keys():
                del known[place]
        users = {place: frozenset(who.owner for who in members) for place, members in places.items()}
        last = {place: turn for turn, place in enumerate(self._turns)}
        spent: dict[frozenset[int], float] = defaultdict(float)
        rows: dict[frozenset[int], int] = defaultdict(int)
        for place in in_turn(sorted(places, key=lambda place: last.get(place, -1)), users.__getitem__)[:MAX_PLACES]:
            user = users[place]
            if self._worker.stopped:
                break
            if spent[user] < USER_S and rows[user] < USER_ROWS:
                self._turns.pop(place, None)
                self._turns[place] = None
                began = time.monotonic()
                rows[user] += self._ask_place(place, places[place])
                spent[user] += time.monotonic() - began
        return sum(rows.values())

    def _ask_if_enabled(self) -> None:
        if self._enabled():
            self.ask_all()

    def _places(self) -> dict[_Place, list[Identity]]:
        live = {who.key: who for who in self._processes()}
        for key in list(self._addresses.keys() - live.keys()):
            self._addresses.pop(key, None)
        places: dict[_Place, list[Identity]] = defaultdict(list)
        spent: dict[int, float] = defaultdict(float)
        for key, who in live.items():
            if spent[who.owner] >= USER_READ_S:
                continue
            began = time.monotonic()
            try:
                if (place := self._place(key)) is not None:
                    places[place].append(who)
            except ProcessGone:
                continue
            except ProbingError as e:
                self._explain(key, e.message)
            else:
                self._reasons.pop(key, None)
            finally:
                spent[who.owner] += time.monotonic() - began
        self._reasons = {about: why for about, why in self._reasons.items() if about in live or about in places}
        return places

    def _place(self, key: ProcessKey) -> _Place | None:
        pid, start_ns = key
        try:
            address = self._addresses[key]
        except KeyError:
            answer = self._readers.call("identity", pid=pid, start_ns=start_ns, timeout=READ_TIMEOUT_S)
            address = self._addresses[key] = ras_address(answer.header.get("environ", {}), self._port)
        if address is None:
            return None
        # The namespace is looked up each time, since a process can change it.
        answer = self._readers.call("network", pid=pid, start_ns=start_ns, timeout=READ_TIMEOUT_S)
        answer.close_fds()
        return _Place((answer.header["dev"], answer.header["inode"]), address)

    def _ask_place(self, place: _Place, members: list[Identity]) -> int:
        waiting = self._waiting.get(place)
        if waiting is not None and waiting.left > 0:
            waiting.left -= 1
            return 0
        now = self._clock.pair().real_ns
        try:
            rows = self._answers(place, members, now)
        except NobodyListens:
            self._wait(place, listens=False)
            self._reasons.pop(place, None)
            return 0
        except ProcessGone:
            return 0
        except ProbingError as e:
            # A silent process may be stopped and continue at any time, so it is asked in the next round. Other errors
            # cause a pause: a report that never ends would delay the other places in each round.
            if not isinstance(e, RasSilent):
                self._wait(place, listens=True)
            if self._explain(place, e.message):
                since = self._asked_ns.get(place, now)
                self._sink.lost(Loss(self.name, TABLE, "read", e.message, since, now))
            return 0
        self._waiting.pop(place, None)
        self._reasons.pop(place, None)
        self._asked_ns[place] = now
        return rows

    def _wait(self, place: _Place, *, listens: bool) -> None:
        before = self._waiting.get(place)
        skipped = min(MAX_SKIPPED, before.skipped * 2 if before else 1)
        self._waiting[place] = _Waiting(skipped, skipped, listens)

    def _answers(self, place: _Place, members: list[Identity], now: int) -> int:
        """Asks until each job of the place has answered, at most MAX_TRIES times, and not again after
        ANSWER_TIMEOUT_S. Returns the number of rows.
        """
        began = time.monotonic()
        jobs = {(who.job, who.run) for who in members}
        answers, rows, silent, answered = _Round(now), 0, None, False
        for _ in range(min(MAX_TRIES, 2 * len(jobs) + 2)):
            if time.monotonic() - began >= ANSWER_TIMEOUT_S:
                break
            try:
                address, believed = self._owned(place, members)
                report = self._ask(place._replace(address=address), members)
            except RasSilent as e:
                silent = e
                continue
            answered = True
            rows += self._write(report, believed, answers)
            if len(jobs) == 1 or jobs <= answers.jobs or rows >= USER_ROWS:
                break
        if silent is not None and not answered:
            raise silent
        return rows

    def _owned(self, place: _Place, members: list[Identity]) -> tuple[RasAddress, list[Identity]]:
        """Returns the address at which an owner of ``members`` listens, and the members of this owner.

        Raises NobodyListens, UnsupportedTarget if only other users listen.
        """
        targets = [list(who.key) for who in members[:MAX_LISTED]]
        answer = self._readers.call("tcp_sockets", timeout=READ_TIMEOUT_S, targets=targets)
        listed = payload_of(list[list[ListedSocket] | None], answer)
        sockets = next((found for found in listed if found is not None), None)
        if sockets is None:
            raise ProcessGone(
                "the sockets of a network namespace cannot be listed: the processes that were asked have ended"
            )
        address, strangers = place.address, set()
        for host in address.hosts:
            uid = listener_at(sockets, host, address.port)
            # A rootless container has many uids, which all belong to the owner of the container.
            believed = [who for who in members if uid is not None and uid in (who.owner, real_user(who.pid))]
            if believed:
                owners = {who.owner for who in believed}
                return replace(address, hosts=(host,)), [who for who in members if who.owner in owners]
            strangers.update([] if uid is None else [uid])
        if strangers:
            raise UnsupportedTarget(
                f"the listener at {address} belongs to uid {min(strangers)}, which owns no rank that uses this address"
            )
        raise NobodyListens(f"no NCCL RAS listens at {address}")

    def _ask(self, place: _Place, members: list[Identity]) -> Report:
        namespace = None
        if place.namespace != own_namespace():
            namespace = self._namespace_of(place, members)
        try:
            connection = connect_ras(place.address, namespace)
        except TargetTimeout as e:
            raise RasSilent(e.message) from e
        finally:
            if namespace is not None:
                os.close(namespace)
        with connection:
            answer = ask_ras(connection, ANSWER_TIMEOUT_S)
        parsed = self._parsers.call("ras_report", answer.report, timeout=PARSE_TIMEOUT_S, form=answer.form)
        return answer_of(Report, parsed)

    def _namespace_of(self, place: _Place, members: list[Identity]) -> int:
        for who in members:
            try:
                answer = self._readers.call("network", pid=who.pid, start_ns=who.start_ns, timeout=READ_TIMEOUT_S)
            except ProcessGone:
                continue
            if (answer.header["dev"], answer.header["inode"]) == place.namespace:
                return answer.take_fd()
            answer.close_fds()
        raise ProcessGone("the processes of a network namespace ended")

    def _write(self, report: Report, members: list[Identity], answers: _Round) -> int:
        owners: dict[str, RankRow] = {}
        rows: list[RankRow] = []
        for row in report["rows"]:
            comm = str(row["comm"])
            if comm not in owners:
                owners[comm] = self._owner(comm, members, answers)
            if _key(row) not in answers.seen:
                rows.append({"node": self._node, "ts": answers.ts, **owners[comm], **row})
        answers.seen.update(_key(row) for row in report["rows"])
        if rows:
            self._sink.put(TABLE, batch_of(TABLE, rows))
        if report["skipped"]:
            reason = "a report of NCCL RAS was malformed in parts, or too long"
            self._sink.lost(Loss(self.name, TABLE, "read", reason, answers.ts, answers.ts, report["skipped"]))
        return len(rows)

    def _owner(self, comm: str, members: list[Identity], answers: _Round) -> RankRow:
        """Returns job and run of a communicator whose calls were seen, and pid and start_ns if the job has only one
        process among ``members``. Jobs of users who own none of ``members`` are left out, because the process
        that answers can report any hashes.
        """
        owners = {who.owner for who in members}
        having = [who for who in self._owners(comm) if who.owner in owners]
        jobs = {(who.job, who.run) for who in having}
        answers.jobs |= jobs
        if len(jobs) != 1:
            return {}
        ((job, run),) = jobs
        theirs = [who for who in members if (who.job, who.run) == (job, run)]
        who = theirs[0] if len(theirs) == 1 else None
        return {"job": job, "run": run, "pid": who.pid if who else None, "start_ns": who.start_ns if who else None}

    def _explain(self, about: object, reason: str) -> bool:
        """Logs a new reason; returns whether it is new."""
        if self._reasons.get(about) == reason:
            return False
        self._reasons[about] = reason
        _log.warning("NCCL RAS: %s", reason)
        return True


def _key(row: RankRow) -> tuple[object, object]:
    return row["comm"], row.get("secondary_hash")
