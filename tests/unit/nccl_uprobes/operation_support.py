"""Decoded operations made by hand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from probing.daemon.clock import ClockPair
from probing.daemon.nccl_uprobes.records import names
from probing.daemon.nccl_uprobes.records.entities import Entity
from probing.daemon.nccl_uprobes.records.operations import Operations

__all__ = ("operations_of",)


def operations_of(rows: Sequence[Mapping[str, Any]], pair: ClockPair) -> Operations:
    """Rows of ``comm.ops`` as the operations that they are made from; absent columns are not known."""
    entities = [_entity(row) for row in rows]
    distinct = list(dict.fromkeys(entities))
    called = np.array([row["ts"] for row in rows], np.int64) - pair.mono_to_utc_ns

    def numbers(name: str) -> np.ndarray[Any, np.dtype[np.int64]]:
        return np.array([-1 if row.get(name) is None else row[name] for row in rows], np.int64)

    def indices(name: str, known: tuple[str, ...]) -> np.ndarray[Any, np.dtype[np.int32]]:
        return np.array([known.index(row[name]) if row.get(name) in known else -1 for row in rows], np.int32)

    started, exact, inexact = (numbers(name) for name in ("start_ns_after", "done_hi_ns", "done_hi"))
    return Operations(
        distinct,
        np.array([distinct.index(entity) for entity in entities], np.intp),
        indices("op", names.OPS),
        indices("dtype", names.DTYPES),
        indices("redop", names.REDOPS),
        numbers("count"),
        numbers("bytes"),
        numbers("seq"),
        called,
        np.where(started < 0, -1, called + started),
        np.where(exact >= 0, called + exact, np.where(inexact < 0, -1, inexact - pair.mono_to_utc_ns)),
    )


def _entity(row: Mapping[str, Any]) -> Entity:
    backend = names.BACKENDS.index(row["backend"]) + 1 if "backend" in row else names.GLOO
    return Entity(
        row["pid"],
        row["start_ns"],
        None,
        backend,
        row.get("comm"),
        row.get("comm_name"),
        row.get("comm_rank"),
        row.get("comm_size"),
        None,
    )
