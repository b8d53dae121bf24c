"""Processes of this boot that an earlier daemon identified, from stored rows of process.events."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pyarrow as pa

from probing.daemon.arrow_to_numpy import integers, texts_and_indices
from probing.daemon.processes.registry import MAX_DEAD, Process
from probing.daemon.processes.rows import process_from_detail
from probing.daemon.source import ProcessKey

__all__ = ("RESTORED", "stored_processes")

# Columns of process.events that ``stored_processes`` needs.
RESTORED = ("pid", "start_ns", "event", "detail", "ts")


def stored_processes(rows: pa.Table, boot_id: str) -> Iterator[tuple[Mapping[str, Any], Process, bool]]:
    """The detail of each process of boot ``boot_id``, the process, and whether it has ended; at most MAX_DEAD.

    ``rows`` has the columns RESTORED, in their physical types.
    """
    identified, ended = _newest(rows)
    details: dict[ProcessKey, str] = {}
    # Rows of one process can lie in several segments: the newest of each counts.
    for key, detail in identified:
        if detail:
            details.pop(key, None)
            details[key] = detail
    for key in list(details)[-MAX_DEAD:]:
        if (found := process_from_detail(*key, details[key], boot_id)) is not None:
            yield *found, key in ended


def _newest(rows: pa.Table) -> tuple[list[tuple[ProcessKey, str | None]], set[ProcessKey]]:
    """Returns key and detail of the newest identifying rows of process.events, by time, and the processes that ended.

    There can be very many rows: no Python object is made for most of them. Like ``integers``, does without
    pyarrow.compute.
    """
    texts, codes = texts_and_indices(rows.column("event").unify_dictionaries().combine_chunks())
    number = {text: code for code, text in enumerate(texts)}
    times, pids, starts = (integers(rows.column(name).combine_chunks()) for name in ("ts", "pid", "start_ns"))
    order = np.argsort(times, kind="stable")
    known = order[codes[order] == number.get("identified", -1)][-4 * MAX_DEAD :]
    gone = np.flatnonzero((codes == number.get("exit", -1)) & np.isin(pids, pids[known]))
    ended = set(map(ProcessKey, pids[gone].tolist(), starts[gone].tolist()))
    details = rows.column("detail").combine_chunks()
    keys = map(ProcessKey, pids[known].tolist(), starts[known].tolist())
    return [(key, details[row].as_py()) for key, row in zip(keys, known.tolist(), strict=True)], ended
