"""Turns rows of nodes, as Arrow batches, into columns of numbers and the dictionaries that the numbers refer to."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from probing.client.timeline.coding import UNKNOWN, Coder, Entries, Ints, distinct, mixed, numbers, reals
from probing.client.timeline.model import (
    SPANNING,
    Comm,
    Counter,
    Counters,
    Operations,
    Process,
    Samples,
    Steps,
    Thread,
)

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ("Dictionaries",)

_MOST_COMMS = 65_535
_MOST_PROCESSES = _MOST_NAMES = 1 << 17
_MOST_THREADS = 1 << 19
_TEXTS = 1 << 16
_OTHERS = "(others)"
# The maximum length of the name of an operation or a state, in characters.
_WORD = 64


class Dictionaries:
    """The processes, communicators, texts and so on that columns of a timeline refer to by index.

    ``ahead``: for each node, by how many ns its clock is ahead of ours. This is subtracted from all times of the node.
    """

    def __init__(self, ahead: Mapping[str, int]) -> None:
        self.processes: Entries[Process] = Entries(_MOST_PROCESSES, Process("", "", 0, 0, None))
        self.comms: Entries[Comm] = Entries(_MOST_COMMS, Comm("", "", _OTHERS, "", 0))
        self.threads: Entries[Thread] = Entries(_MOST_THREADS, Thread(0, 0, _OTHERS, trains=False))
        self.counters: Entries[Counter] = Entries(_MOST_THREADS, Counter("", "", _OTHERS, ""))
        self.ops, self.errors = Coder(limit=_WORD), Coder()
        self.states, self.timings = Coder(255, _WORD), Coder(255, _WORD)
        self.ahead = ahead
        self._nodes, self._runs, self._names, self._texts = Coder(), Coder(), Coder(_MOST_NAMES), Coder()
        self._process_keys: dict[int, int] = {}
        self._comm_keys: dict[int, int] = {}
        self._thread_keys: dict[int, int] = {}

    def sizes(self) -> Ints:
        """Returns the number of ranks of each communicator, 0 where it is not known."""
        return np.array([comm.size for comm in self.comms.values], np.int64)

    def label(self, process: int) -> str:
        """Returns the name of a process, such as ``rank 3 (pid 1234)``."""
        _, _, pid, _, rank = self.processes.values[process]
        return f"pid {pid}" if rank is None else f"rank {rank} (pid {pid})"

    def title(self, comm: int) -> str:
        """Returns the name of a communicator, such as ``default_pg (gloo, 8 ranks)``."""
        _, identity, name, backend, size = self.comms.values[comm]
        ranks = f", {size} ranks" if size else ""
        return f"{name or identity} ({backend}{ranks})"

    def of_ranks(self, run: str, ranks: Collection[int]) -> list[int]:
        """Returns the processes that have one of ``ranks`` in ``run``."""
        wanted = set(ranks)
        return [at for at, who in enumerate(self.processes.values) if who.run == run and who.rank in wanted]

    def processes_in(self, batch: pa.RecordBatch) -> None:
        """Adds the processes of the rows of ``batch``, which has the columns ``sections.WHO``."""
        self._processes(batch)

    def operations(self, batch: pa.RecordBatch) -> Operations:
        """Returns the rows of sections.OPS, or of sections.IN_FLIGHT, in their order."""
        rows = batch.num_rows
        process, ahead = self._processes(batch)
        flies = "t_done_hi" not in batch.schema.names
        nothing = np.full(rows, UNKNOWN)
        call = _time(batch["ts"], ahead)
        return Operations(
            process=process,
            comm=self._comms(batch),
            op=self.ops.codes(batch["op"]),
            seq=numbers(batch["seq"]),
            size=numbers(batch["bytes"]),
            call=call,
            start=nothing if flies else _time(batch["t_start"], ahead),
            done_lo=nothing if flies else _time(batch["t_done_lo"], ahead),
            done_hi=np.full(rows, SPANNING) if flies else _time(batch["t_done_hi"], ahead),
            state=self.states.codes(batch["state"]),
            timing=np.full(rows, self.timings.code("")) if flies else self.timings.codes(batch["timing_source"]),
            error=np.full(rows, self.errors.code("")) if flies else self.errors.codes(batch["error"]),
            step=nothing,
            last_call=nothing,
            last=nothing,
        )

    def steps(self, batch: pa.RecordBatch) -> Steps:
        """Returns the rows of sections.STEPS that have begin and end."""
        process, ahead = self._processes(batch)
        steps = Steps(
            process,
            numbers(batch["step"]),
            _time(batch["t_start"], ahead),
            _time(batch["t_end"], ahead),
            numbers(batch["comm_ns"]),
            numbers(batch["wait_ns"]),
        )
        return steps.taken((steps.begin != UNKNOWN) & (steps.end >= steps.begin))

    def samples(self, batch: pa.RecordBatch) -> Samples:
        """Returns the rows of sections.SAMPLES."""
        process, ahead = self._processes(batch)
        tid, trains = numbers(batch["tid"], 0), numbers(batch["trains"], 0)
        name = self._texts.codes(batch["thread"])

        def thread(row: int) -> int:
            text = self._texts.entries.values[name[row]]
            return self.threads.index(Thread(int(process[row]), int(tid[row]), text, bool(trains[row])))

        return Samples(
            distinct(mixed(process, tid, name, trains), thread, self._thread_keys),
            _time(batch["ts"], ahead),
            np.maximum(numbers(batch["duration_ns"], 0), 0),
            np.maximum(numbers(batch["samples"], 0), 0),
            numbers(batch["on_cpu"], 0),
            numbers(batch["stack_id"], 0),
        )

    def counter_values(self, batch: pa.RecordBatch, figures: Mapping[str, str]) -> Counters:
        """Returns the finite values of the columns in ``figures`` (units by column); rows have node, device and ts."""
        node, device = self._nodes.codes(batch["node"]), self._texts.codes(batch["device"])
        at = _time(batch["ts"], self._shift(node))
        # Pairs of a node and a device, numbered within this batch.
        pairs, where = np.unique(node * _TEXTS + device, return_inverse=True)
        parts = []
        for name, unit in figures.items():
            value = reals(batch[name])
            rows = np.flatnonzero(np.isfinite(value) & (at != UNKNOWN))
            if not len(rows):
                continue
            index = [
                self.counters.index(
                    Counter(self._nodes.text(int(pair) // _TEXTS), self._texts.text(int(pair) % _TEXTS), name, unit)
                )
                for pair in pairs
            ]
            parts.append(Counters(np.array(index, np.int64)[where[rows]], at[rows], value[rows]))
        return Counters.joined(parts)

    def _processes(self, batch: pa.RecordBatch) -> tuple[Ints, Ints]:
        """Returns the index of the process of each row, and by how much the clock of its node is ahead, ns."""
        node, run = self._nodes.codes(batch["node"]), self._runs.codes(batch["run"])
        pid, start_ns, rank = (numbers(batch[name], -1) for name in ("pid", "start_ns", "rank"))

        def entry(row: int) -> int:
            names = self._nodes.text(int(node[row])), self._runs.text(int(run[row]))
            number = int(rank[row])
            return self.processes.index(
                Process(*names, int(pid[row]), int(start_ns[row]), None if number < 0 else number)
            )

        return distinct(mixed(node, run, pid, start_ns), entry, self._process_keys), self._shift(node)

    def _comms(self, batch: pa.RecordBatch) -> Ints:
        run, comm = self._runs.codes(batch["run"]), self._names.codes(batch["comm"])
        name, backend = self._names.codes(batch["comm_name"]), self._texts.codes(batch["backend"])
        size = numbers(batch["comm_size"], 0)

        def entry(row: int) -> int:
            texts = self._runs.text(int(run[row])), self._names.text(int(comm[row])), self._names.text(int(name[row]))
            return self.comms.index(Comm(*texts, self._texts.text(int(backend[row])), int(size[row])))

        return distinct(mixed(run, comm), entry, self._comm_keys)

    def _shift(self, node: Ints) -> Ints:
        return np.array([self.ahead.get(name, 0) for name in self._nodes.entries.values] or [0], np.int64)[node]


def _time(column: pa.Array[Any], ahead: Ints) -> Ints:
    at = numbers(column)
    # Times are limited, so that the difference of two times fits into 64 bits.
    return np.where(at == UNKNOWN, UNKNOWN, np.clip(at, 0, SPANNING - 1) - ahead)
