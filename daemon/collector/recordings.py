"""Records the rings to a file (``probes.recordings``), and makes rows from a recording without BPF or processes.

``python -m probing.daemon.collector.recordings FILE`` counts the rows of each table.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy.typing as npt
import pyarrow as pa

from probing.api.errors import ConfigError
from probing.daemon.bpf import recording
from probing.daemon.bpf.recording import Recorder
from probing.daemon.clock import Clock, ClockPair
from probing.daemon.nccl_uprobes.communicators import rows as communicators
from probing.daemon.nccl_uprobes.operations.rows import finished_rows
from probing.daemon.nccl_uprobes.operations.source import RING
from probing.daemon.nccl_uprobes.records.operations import OperationDecoder
from probing.daemon.source import Identity
from probing.daemon.supervisor.health import guard

__all__ = (
    "Record",
    "Unknown",
    "main",
    "open_recorder",
    "replayed",
)

Record = Callable[[str, ClockPair, npt.NDArray[Any]], None]
"""A function that gets the name of a ring, the clock readings when the ring was read, and the records of the ring."""


def open_recorder(folder: Path, clock: Clock) -> Recorder:
    """Returns a recorder that writes to a new file in ``folder``. Raises ConfigError if it cannot be created."""
    path = folder / f"rings-{clock.pair().real_ns}.recording"
    try:
        return Recorder(path)
    except OSError as e:
        hint = "the directory must exist and belong to the collector's user"
        raise ConfigError(f"the recording {path} cannot be created: {e.strerror}", hint=hint) from e


class Unknown:
    """The ``Processes`` of a recording, in which each pid counts as a job of its own."""

    def identity(self, pid: int, start_ns: int) -> Identity | None:
        return Identity(pid, start_ns, f"pid:{pid}", "", "other")


def replayed(path: Path, node: str = "replay") -> Iterator[tuple[str, pa.RecordBatch]]:
    """Yields (table, batch) of all operations of a recording, in order. Raises FormatError for a damaged file."""
    decoder, groups = OperationDecoder(Unknown()), communicators.Communicators(node, Unknown())
    for drained in recording.replay(path):
        if drained.ring == RING:
            operations = decoder.decode(drained.records)
            yield "comm.ops", finished_rows(node, drained.records, operations, drained.clock)
            if (changed := groups.follow(operations, drained.clock)) is not None:
                yield communicators.TABLE, changed


def main() -> int:
    counts: Counter[str] = Counter()
    for table, batch in replayed(Path(sys.argv[1])):
        counts[table] += batch.num_rows
    for table, count in sorted(counts.items()):
        print(f"{table} {count}")
    return 0


if __name__ == "__main__":
    sys.exit(guard(main))
