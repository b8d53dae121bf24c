"""Builds rows of process.events, process.processes and process.envs, and restores processes of this boot from rows that
an earlier daemon stored.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pyarrow as pa

from probing.api.tables.schema import Row
from probing.daemon.arrow_to_numpy import integers, texts_and_indices
from probing.daemon.processes.facts import Facts
from probing.daemon.processes.identity import Ranks
from probing.daemon.processes.ranking import SOURCES
from probing.daemon.processes.redaction import redacted
from probing.daemon.processes.registry import MAX_DEAD, Process
from probing.daemon.source import Identity, ProcessKey

__all__ = (
    "RESTORED",
    "detail_of",
    "env_rows",
    "event_row",
    "process_from_detail",
    "process_row",
    "state_name",
    "stored_processes",
)

MAX_DETAIL = 64 << 10
_STATES = {"T": "stopped", "t": "stopped", "D": "blocked", "Z": "zombie", "X": "exited"}


def state_name(letter: str) -> str:
    """Returns the name of a process state, given as the kernel's letter."""
    return _STATES.get(letter, "running")


def event_row(node: str, ts_ns: int, event: str, process: Process, **values: Any) -> Row:
    """Returns a row of process.events. ``ts_ns``: UTC."""
    return {**process.identity.row(node, ts_ns), "event": event, "role": process.identity.role, **values}


def process_row(node: str, ts_ns: int, process: Process, state: str | None) -> Row:
    """Returns a row of process.processes; ``state`` is None when it could not be read."""
    who = process.identity
    return {
        **process.identity.row(node, ts_ns),
        "local_rank": who.local_rank,
        "world_size": who.world_size,
        "node_rank": who.node_rank,
        "rank_source": process.ranks.source if process.ranks else None,
        "train_tid": who.train_tid,
        "ppid": process.facts.ppid,
        "uid": process.facts.uid if process.facts.uid < 1 << 31 else None,
        "owner": who.owner,
        "role": who.role,
        "state": state,
        "python": process.python,
        "backends": ",".join(sorted(process.backends)),
        "command": process.command,
        "container": process.container,
        "pod": process.pod,
        "job_source": process.job_source,
    }


def env_rows(node: str, ts_ns: int, process: Process) -> list[Row]:
    """Returns rows of process.envs, one for each variable."""
    identity = process.identity.row(node, ts_ns)
    return [{**identity, "name": name, "value": value} for name, value in sorted(_shown(process.facts.environ))]


def _shown(environ: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    return ((name, redacted(value)) for name, value in environ.items())


def detail_of(process: Process, boot_id: str) -> str:
    """Returns the state of a process as JSON, from which a later daemon of the same boot restores the process."""
    who, facts = process.identity, process.facts
    return json.dumps(
        {
            "boot_id": boot_id,
            "job": who.job,
            "run": who.run,
            "role": who.role,
            "rank": who.rank,
            "local_rank": who.local_rank,
            "world_size": who.world_size,
            "node_rank": who.node_rank,
            "train_tid": who.train_tid,
            "rank_source": process.ranks.source if process.ranks else None,
            "job_source": process.job_source,
            "ppid": facts.ppid,
            "uid": facts.uid,
            "owner": who.owner,
            "exe": facts.exe,
            "python": process.python,
            "container": process.container,
            "pod": process.pod,
            "command": process.command,
            "environ": dict(_shown(facts.environ)),
        },
        separators=(",", ":"),
    )


def process_from_detail(pid: int, start_ns: int, text: str, boot_id: str) -> tuple[Mapping[str, Any], Process] | None:
    """Returns the detail in ``text``, which ``detail_of`` wrote, and its process; None if the detail is malformed or
    from another boot.
    """
    try:
        detail = json.loads(text) if len(text) <= MAX_DETAIL else None
    except ValueError:
        return None
    if not isinstance(detail, dict) or detail.get("boot_id") != boot_id:
        return None
    numbers = [detail.get(name) for name in ("rank", "local_rank", "world_size", "node_rank", "train_tid")]
    texts = [detail.get(name) for name in ("job", "run", "role", "job_source")]
    if not all(n is None or isinstance(n, int) for n in numbers) or not all(isinstance(t, str) for t in texts):
        return None
    job, run, role, source = map(str, texts)
    ppid, uid = int(detail.get("ppid") or 0), int(detail.get("uid") or 0)
    owner = int(detail.get("owner", uid))
    facts = Facts(pid, start_ns, ppid, uid, owner, exe=str(detail.get("exe")))
    rank, local_rank, size, node_rank, train_tid = numbers
    identity = Identity(pid, start_ns, job, run, role, rank, local_rank, size, node_rank, train_tid, owner)
    container, pod, python = (detail.get(name) for name in ("container", "pod", "python"))
    evidence = detail.get("rank_source")
    ranks = None
    if rank is not None and size is not None:
        ranks = Ranks(rank, size, local_rank, node_rank, source=evidence if evidence in SOURCES else "")
    return detail, Process(facts, identity, source, ranks, container, pod, str(detail.get("command", "")), python)


# Mixes pid and start time into one number. Two processes get the same number with a probability of 1 in 2^64.
_MIX = np.uint64(0x9E37_79B9_7F4A_7C15)
# Columns of process.events that ``stored_processes`` needs.
RESTORED = ("pid", "start_ns", "event", "detail", "ts")


def stored_processes(rows: pa.Table, boot_id: str) -> Iterator[tuple[Mapping[str, Any], Process, bool]]:
    """Yields for each process of boot ``boot_id`` its detail, the process, and whether it has ended; at most MAX_DEAD.

    ``rows`` has the columns RESTORED, in their physical types.
    """
    identified, ended = _newest(rows)
    details = {key: detail for key, detail in identified if detail}
    for key in list(details)[-MAX_DEAD:]:
        if (found := process_from_detail(*key, details[key], boot_id)) is not None:
            yield *found, key in ended


def _newest(rows: pa.Table) -> tuple[list[tuple[ProcessKey, str | None]], set[ProcessKey]]:
    """Returns (key, detail) of the newest event ``identified`` of each process, and the keys of the processes that
    exited. Live processes come last.

    There can be very many rows, so no Python objects are made for most of them. pyarrow.compute is not used, because it
    is slow to import, see ``integers``.
    """
    texts, codes = texts_and_indices(rows.column("event").unify_dictionaries().combine_chunks())
    number = {text: code for code, text in enumerate(texts)}
    times, pids, starts = (integers(rows.column(name).combine_chunks()) for name in ("ts", "pid", "start_ns"))
    order = np.argsort(times, kind="stable")
    identified = order[codes[order] == number.get("identified", -1)]
    exits = codes == number.get("exit", -1)
    mixed = starts.astype(np.uint64) * _MIX + pids.astype(np.uint64)
    # Only the latest row of each process is kept: a process whose identity changes all the time has very many rows.
    latest = np.unique(mixed[identified][::-1], return_index=True)[1]
    identified = identified[np.sort(len(identified) - 1 - latest)]
    # If there are too many processes, ended processes are dropped first, even if they are newer than live processes.
    over = np.isin(mixed[identified], mixed[exits])
    known = np.concatenate([identified[over], identified[~over]])[-4 * MAX_DEAD :]
    gone = np.flatnonzero(exits & np.isin(pids, pids[known]))
    ended = set(map(ProcessKey, pids[gone].tolist(), starts[gone].tolist()))
    details = rows.column("detail").combine_chunks()
    keys = map(ProcessKey, pids[known].tolist(), starts[known].tolist())
    return [(key, details[row].as_py()) for key, row in zip(keys, known.tolist(), strict=True)], ended
