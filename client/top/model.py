"""Combines the rows of many nodes and refreshes into one view: jobs with their ranks, jobs in trouble first. No input
or output.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from probing.api.text import pause_text
from probing.client.collectives.in_flight import in_flight
from probing.client.collectives.ranks import Seen, process_of, rank_rows
from probing.client.collectives.silence import Process
from probing.client.collectives.top_text import Frame
from probing.client.render.rows import Row
from probing.client.top.health import Absent, Fetched, NodeRows, merged
from probing.client.top.history import CPU_FIELDS, HISTORIES, Devices, Progress, Series, cpu_of
from probing.client.top.trouble import Job, jobs_of

__all__ = ("AWAY_S", "Model", "RankKey", "View", "key_of")

# The ranks of a node that does not answer stay on the screen for this many seconds.
AWAY_S = 600.0
_RECENT_NS = 10e9
_CALLS = ("collectives_per_s", "last_age_ns")
RankKey = tuple[str, int, int]


@dataclass(frozen=True, slots=True)
class View:
    """The content of the screen. ``jobs``: jobs in trouble first; ``absent``: the nodes that do not answer.

    ``at`` is time.monotonic() of the refresh; ``notes`` are lines of text.
    """

    jobs: tuple[Job, ...] = ()
    absent: tuple[Absent, ...] = ()
    notes: tuple[str, ...] = ()
    nodes: tuple[str, ...] = ()
    at: float | None = None

    @property
    def ranks(self) -> list[Row]:
        return [row for job in self.jobs for row in job.ranks]


class Model:
    """Keeps data from one refresh to the next: rates, lags, series, the last rows of absent nodes."""

    def __init__(
        self,
        window: float,
        silent: Callable[[list[Row]], list[Row]] = lambda _: [],
        histories: Sequence[str] = HISTORIES,
    ) -> None:
        """Makes the model. ``window``: seconds over which rates are computed. ``silent``: see
        ``collectives.ranks.rank_rows``. ``histories``: the names of the series to keep, from HISTORIES.
        """
        self._silent = silent
        self._histories = histories
        self._known: dict[str, NodeRows] = {}
        # By address: the time.monotonic() at which the kept findings of a node were read.
        self._findings_at: dict[str, float] = {}
        self._progress = Progress(window)
        self._devices = Devices(histories)
        self._series = Series()

    def update(self, fetched: Fetched, python: Mapping[Process, str]) -> View:
        """Returns the view after one refresh. ``python`` has the innermost frame of each process as text."""
        for answer in fetched.nodes:
            self._known[answer.address] = merged(self._known.get(answer.address), answer)
            if "findings" in answer.rows:
                self._findings_at[answer.address] = fetched.at
        # A node that answers at another address is not absent.
        names = {answer.node for answer in fetched.nodes}
        moved = {address for address, rows in self._known.items() if rows.node in names}
        moved -= {answer.address for answer in fetched.nodes}
        for address in moved:
            del self._known[address]
        lost = {absent.address: absent for absent in fetched.absent if absent.node not in names}
        for address, absent in lost.items():
            if fetched.at - absent.since > AWAY_S:
                self._known.pop(address, None)
        here = [rows for address, rows in self._known.items() if address not in lost]
        away = [rows for address, rows in self._known.items() if address in lost]
        ranks, runs = rank_rows(self._seen(here, away, python, fetched.at), self._silent)
        self._add_devices(ranks, here, away, fetched)
        paused = {rows.node: pause_text(rows.node, rows.paused) for rows in here if rows.paused}
        rows = (_all(here, name) for name in ("ranks", "inflight", "progress"))
        frame = Frame(ranks, runs, in_flight(*rows), paused)
        return View(
            jobs_of(frame),
            tuple(sorted(lost.values(), key=lambda absent: absent.address)),
            tuple(paused.values()),
            tuple(sorted(rows.node for rows in self._known.values())),
            fetched.at,
        )

    def _seen(
        self, here: Sequence[NodeRows], away: Sequence[NodeRows], python: Mapping[Process, str], at: float
    ) -> Seen:
        known, progress = [*here, *away], _all(here, "progress")
        # The activity of ranks on absent nodes is unknown, so they do not count as silent.
        unknown = {process_of(row): dict.fromkeys(_CALLS) for row in _all(away, "ranks")}
        inflight = sorted(_all(here, "inflight"), key=lambda row: row["age_ns"] or 0)
        return Seen(
            _all(known, "ranks"),
            _newest(self._findings(known, at)),
            _all(known, "ended"),
            {**unknown, **self._progress.calls(progress)},
            {process_of(row): row for row in _all(here, "steps")},
            {process_of(row): row for row in inflight},
            self._progress.lags(progress),
            python,
            {process_of(row): row["phase"] for row in _all(here, "phases")},
            _RECENT_NS,
        )

    def _findings(self, known: Iterable[NodeRows], at: float) -> Iterator[Row]:
        """Yields the rows of findings with their present age. The age is computed here because findings are not asked
        for in each refresh.
        """
        for node in known:
            passed = round((at - self._findings_at.get(node.address, at)) * 1e9)
            for row in node.rows.get("findings", ()):
                yield {**row, "row_age_ns": (row.get("row_age_ns") or 0) + passed}

    def _add_devices(
        self, ranks: Iterable[Row], here: Sequence[NodeRows], away: Sequence[NodeRows], fetched: Fetched
    ) -> None:
        """Adds to each rank the fields of its CPUs and GPUs, its series, and whether its node is absent."""
        self._devices.update(_all(here, "gpus"), (rows.node for rows in here))
        uses: dict[Process, list[Row]] = {}
        for use in _all([*here, *away], "gpu_processes"):
            uses.setdefault(process_of(use), []).append(use)
        cpu = cpu_of(_all(here, "cpu"), _all(here, "memory"))
        nothing: Row = dict.fromkeys(CPU_FIELDS)
        gone = {rows.node for rows in away}
        if "cpu_pct" in self._histories:
            self._add_history(here)
        keys: set[Hashable] = set()
        for row in ranks:
            row.update(cpu.get(process_of(row), nothing))
            row.update(self._devices.of(uses.get(process_of(row), ())))
            row["away"] = row["node"] in gone and row["ended"] is None
            key = key_of(row)
            if not row["away"] and row["ended"] is None:
                for name in self._histories:
                    # The values of CPUs have times of their own, so ``_add_history`` adds them.
                    if name != "cpu_pct":
                        self._series.add((key, name), fetched.at, row[name])
            keys.update((key, name) for name in self._histories)
            row["history"] = {name: self._series.of((key, name)) for name in self._histories}
            if len(row["gpus"]) == 1:
                # The series of the device replaces the series of the rank, because it began before this screen.
                row["history"] |= row["gpus"][0]["history"]
        self._series.keep(keys)

    def _add_history(self, here: Sequence[NodeRows]) -> None:
        for row in sorted(_all(here, "cpu"), key=lambda row: row["at"]):
            self._series.add(((row["node"], row["pid"], row["start_ns"]), "cpu_pct"), row["at"], row["cpu_pct"])


def key_of(row: Row) -> RankKey:
    """Returns the key of a process: node, pid and start, because pids are reused."""
    return row["node"], row["pid"], row["start_ns"]


def _all(nodes: Iterable[NodeRows], name: str) -> list[Row]:
    return [row for rows in nodes for row in rows.rows.get(name, ())]


def _newest(findings: Iterable[Row]) -> list[Row]:
    """Returns the newest row of each finding: a finding that is open on one node may have been closed by another."""
    newest = {
        (row["finding_id"], row["job"], row["run"]): row for row in sorted(findings, key=lambda row: str(row["ts"]))
    }
    return list(newest.values())
