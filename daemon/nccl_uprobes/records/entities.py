"""Finds the processes and communicators of records, with one lookup for each distinct (process, communicator) instead
of one for each record.
"""

from __future__ import annotations

import secrets
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from probing.api.text import escape
from probing.daemon.nccl_uprobes.records.names import BACKENDS
from probing.daemon.processes.ranking import Membership
from probing.daemon.source import Identity, Processes

__all__ = ("Entities", "Entity", "comm_text")

# Values of enum name_form of collectives.bpf.h.
NAME_TEXT, NAME_HASHED, NAME_NUMBER = 1, 2, 3
_HASH_BYTES = 8
# The maximum number of remembered entities, about 500 bytes each. Without a limit, a process that invents communicators
# could fill the daemon's memory.
_MAX_ENTITIES = 16384
# The values that torch uses as the description of a group to which the job gave none (distributed_c10d.py).
_NO_DESCRIPTION = ("", "undefined")
_KEY_FIELDS = (
    "start_ns",
    "comm",
    "tgid",
    "comm_rank",
    "comm_size",
    "cuda_device",
    "backend",
    "name_form",
    "name",
    "desc",
)
_PART = 4096
_Word = tuple[type[np.unsignedinteger[Any]], int, np.uint64]


class Entity(NamedTuple):
    """A process and one of its communicators. ``who``: None while the process is not identified."""

    pid: int
    start_ns: int
    who: Identity | None
    backend: int
    comm: str | None
    comm_name: str | None
    comm_rank: int | None
    comm_size: int | None
    cuda_device: int | None

    @property
    def process(self) -> tuple[int, int]:
        """(pid, start_ns)."""
        return self.pid, self.start_ns

    @property
    def backend_name(self) -> str | None:
        return BACKENDS[self.backend - 1] if 0 < self.backend <= len(BACKENDS) else None

    @property
    def membership(self) -> Membership | None:
        """The communicator with its size and the process's rank in it; None if one of them is unknown."""
        if self.comm is None or self.comm_rank is None or self.comm_size is None:
            return None
        return Membership(self.comm, self.comm_name, self.backend_name, self.comm_rank, self.comm_size)


class Entities:
    """Finds the entities of records and remembers them. Not thread-safe."""

    def __init__(self, processes: Processes) -> None:
        self._processes = processes
        self._known: dict[int, Entity] = {}
        # The multipliers of the hash are secret, so that a process cannot make its keys collide with the keys of
        # another process.
        self._random = np.random.default_rng(secrets.randbits(128))
        self._words: dict[np.dtype[Any], list[_Word]] = {}

    def of(self, records: npt.NDArray[np.void]) -> tuple[list[Entity], npt.NDArray[np.intp]]:
        """Returns the distinct entities of ``records``, and for each record the index of its entity."""
        keys, first, inverse = np.unique(self._keys(records), return_index=True, return_inverse=True)
        entities = [self._entity(int(key), records[index]) for key, index in zip(keys, first, strict=True)]
        return entities, inverse

    def _keys(self, records: npt.NDArray[np.void]) -> npt.NDArray[np.uint64]:
        """Returns for each record a multilinear hash of the fields that identify an entity."""
        words = self._words_of(records.dtype)
        keys = np.zeros(len(records), np.uint64)
        # Each part is read once for each word, so the parts are small enough for the CPU's cache.
        for start in range(0, len(records), _PART):
            part, sums = records[start : start + _PART], keys[start : start + _PART]
            for kind, column, multiplier in words:
                sums += part.view(kind).reshape(len(part), -1)[:, column] * multiplier
        return keys

    def _words_of(self, dtype: np.dtype[Any]) -> list[_Word]:
        if dtype not in self._words:
            self._words[dtype] = [
                (kind, column, np.uint64(self._random.integers(0, 1 << 64, dtype=np.uint64) | np.uint64(1)))
                for kind, column in _words(dtype)
            ]
        return self._words[dtype]

    def _entity(self, key: int, record: np.void) -> Entity:
        who = self._processes.identity(int(record["tgid"]), int(record["start_ns"]))
        entity = self._known.get(key)
        if entity is None or entity.who != who:
            entity = _entity_of(record, who)
            if len(self._known) >= _MAX_ENTITIES:
                self._known.clear()
            self._known[key] = entity
        return entity


def _entity_of(record: np.void, who: Identity | None) -> Entity:
    known = int(record["comm_size"]) > 0
    description = escape(bytes(record["desc"]))
    return Entity(
        pid=int(record["tgid"]),
        start_ns=int(record["start_ns"]),
        who=who,
        backend=int(record["backend"]),
        comm=comm_text(record),
        comm_name=None if description in _NO_DESCRIPTION else description,
        comm_rank=int(record["comm_rank"]) if known else None,
        comm_size=int(record["comm_size"]) if known else None,
        cuda_device=int(record["cuda_device"]) if int(record["cuda_device"]) >= 0 else None,
    )


def comm_text(record: np.void) -> str | None:
    """Returns the name of the communicator, the same on all ranks; None if it could not be read."""
    form = int(record["name_form"])
    # numpy strips trailing NULs from a bytes field, but a number needs them.
    raw = bytes(record["name"]).ljust(record.dtype["name"].itemsize, b"\0")
    if form == NAME_TEXT:
        return escape(raw.rstrip(b"\0"))
    if form == NAME_HASHED:
        return f"{escape(raw[:-_HASH_BYTES])}~{int.from_bytes(raw[-_HASH_BYTES:], 'little'):016x}"
    if form == NAME_NUMBER:
        return f"{int.from_bytes(raw[:8], 'little'):016x}"
    return None


def _words(dtype: np.dtype[Any]) -> list[tuple[type[np.unsignedinteger[Any]], int]]:
    """Returns (type, index) of the words that contain the key's fields. A word is 64 bits wide if all its bits belong
    to the key, else 32.
    """
    assert dtype.fields is not None
    covered = np.zeros(dtype.itemsize, bool)
    for name in _KEY_FIELDS:
        kind, offset = dtype.fields[name][:2]
        covered[offset : offset + kind.itemsize] = True
    halves = [bool(covered[at : at + 4].all()) for at in range(0, dtype.itemsize, 4)]
    whole = [n for n in range(len(halves) // 2) if halves[2 * n] and halves[2 * n + 1]]
    rest = [n for n in range(len(halves)) if halves[n] and n // 2 not in whole]
    return [*((np.uint64, n) for n in whole), *((np.uint32, n) for n in rest)]
