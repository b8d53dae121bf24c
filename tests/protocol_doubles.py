"""Doubles of the protocols that sources are built with, one for each: a sink, and the identities of processes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pyarrow as pa

from probing.daemon.source import Identity, Loss

__all__ = ("Identities", "MemorySink")


class MemorySink:
    """A ``Sink`` that keeps what it was given. It takes rows of ``table`` only, and none if that is empty.

    ``rows`` have ``ts`` in UTC ns.
    """

    def __init__(self, table: str = "") -> None:
        self.rows: list[dict[str, Any]] = []
        self.batches: list[pa.RecordBatch] = []
        self.losses: list[Loss] = []
        self._table = table

    def put(self, table: str, batch: pa.RecordBatch) -> None:
        assert table == self._table
        self.batches.append(batch)
        times = batch.column("ts").cast(pa.int64()).to_pylist()
        self.rows += [{**row, "ts": ts} for row, ts in zip(batch.drop_columns(["ts"]).to_pylist(), times, strict=True)]

    def lost(self, loss: Loss) -> None:
        self.losses.append(loss)

    def events(self, *names: str) -> list[tuple[str, int]]:
        """(event, pid) of the rows of process.events, or of those events only."""
        return [(row["event"], row["pid"]) for row in list(self.rows) if not names or row["event"] in names]


class Identities:
    """The ``Processes`` that live: ``living``."""

    def __init__(self, living: Iterable[Identity]) -> None:
        self.living = list(living)

    def live(self) -> list[Identity]:
        return self.living

    def identity(self, pid: int, start_ns: int) -> Identity | None:
        return next((one for one in self.living if one.key == (pid, start_ns)), None)
