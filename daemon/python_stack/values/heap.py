"""Reads the memory of a target's objects in batches. The bytes of a value are noted, so that a second read can prove
that they did not change.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Iterable, Sequence
from itertools import chain, islice
from typing import NamedTuple

from probing.api.errors import CorruptTarget, TargetTimeout
from probing.daemon.processes.memory import PAGE, Memory, Range
from probing.daemon.python_stack.walk.snapshot import Snapshot, is_count, word

__all__ = ("CHANGED", "Heap", "Proof", "Torn")

MAX_NOTED = 16_384
# The reason for a value that changed while it was read.
CHANGED = "it changed while it was read"


# A pair: whether the bytes begin with a reference count, and the bytes.
_Noted = tuple[bool, bytes]


class Proof(NamedTuple):
    """Noted bytes in a short form. ``ranges``: address, size, address, size, and so on. ``counted``: for each range,
    whether it begins with a reference count. ``digest``: a hash of the bytes without the reference counts.
    """

    ranges: array[int]
    counted: bytes
    digest: int | None

    @property
    def wanted(self) -> list[Range]:
        return list(zip(self.ranges[::2], self.ranges[1::2], strict=True))


class Torn(CorruptTarget):
    """An address does not hold the expected object: the object was freed or replaced meanwhile, or never existed."""


class Heap:
    """Bytes of a target by address. ``read`` notes the bytes that it returns; ``held`` reads all bytes noted since
    ``begin`` again, in one call.

    If everything from the variable to the last byte of its value is still equal, the value was whole at that moment.
    After ``deadline``, a time of time.monotonic(), every load raises TargetTimeout.
    """

    def __init__(self, memory: Memory, deadline: float) -> None:
        self._memory = memory
        self._deadline = deadline
        self._snapshot = Snapshot(memory)
        self._noted: dict[Range, _Noted] = {}
        self._kept: dict[Range, _Noted] = {}

    def begin(self) -> None:
        """Starts a new value: drops the notes of the last value."""
        self._noted.clear()

    def refresh(self) -> None:
        """Drops all bytes and notes, so that everything is read anew."""
        self._snapshot = Snapshot(self._memory)
        self._noted.clear()
        self._kept.clear()

    def reread(self) -> None:
        """Drops the bytes that were read, so that they are read again; keeps the notes that ``held`` compares."""
        self._snapshot = Snapshot(self._memory)

    def load(self, ranges: Iterable[Range]) -> None:
        """Reads the ``ranges`` that were not read before, in one batch."""
        self._check()
        self._snapshot.load(ranges)

    def load_near(self, ranges: Iterable[Range]) -> None:
        """Reads the pages of ``ranges`` in one batch: objects that are used together lie near each other."""
        self._check()
        self._snapshot.load_pages(r for r in ranges if PAGE <= r[0] < 1 << 56)

    def sample(self, ranges: Sequence[Range]) -> list[bytes | None]:
        """Returns the current bytes of each range, None for a range that cannot be read. Nothing is kept or noted."""
        self._check()
        return self._memory.read_many(ranges) if ranges else []

    def peek(self, address: int, size: int) -> bytes:
        """Returns ``size`` bytes at ``address``. Raises Torn when they cannot be read."""
        data = self._snapshot.get(address, size)
        if data is None:
            if size > PAGE:
                self.load([(address, size)])
            else:
                self.load_near([(address, size)])
            data = self._snapshot.get(address, size)
        if data is None:
            raise Torn("its memory cannot be read")
        return data

    def read(self, address: int, size: int, *, counted: bool = False) -> bytes:
        """Returns ``size`` bytes at ``address`` like ``peek``, and notes them. ``counted``: the bytes begin with a
        reference count, which may change.
        """
        data = self.peek(address, size)
        if len(self._noted) >= MAX_NOTED:
            raise CorruptTarget("the value has too many parts")
        self._noted[address, size] = (counted, data)
        return data

    def word(self, address: int) -> int:
        """Returns the word at ``address``, and notes it."""
        return word(self.read(address, 8), 0)

    def held(self) -> bool:
        """Returns whether all bytes noted since ``begin`` are still equal. If not, the next reads see the new bytes."""
        there, back = self._later(self._noted)
        same = _same(self._noted, there) and _same(self._noted, back)
        if not same:
            self._snapshot = Snapshot(self._memory)
            if there == back:
                self._snapshot.fill(zip(self._noted, there, strict=True))
        return same

    def keep(self) -> None:
        """Adds the notes of the present value to the notes that ``held_together`` checks."""
        if len(self._kept) < MAX_NOTED:
            self._kept.update(self._noted)

    def proof(self) -> Proof:
        """Returns a proof of the bytes noted since ``begin``."""
        counted = bytes(noted[0] for noted in self._noted.values())
        ranges = array("Q", chain.from_iterable(self._noted))
        return Proof(ranges, counted, _digest(counted, [noted[1] for noted in self._noted.values()]))

    def holds(self, proofs: Sequence[Proof]) -> list[bool]:
        """Returns for each of ``proofs`` whether its bytes are still the same, read in one batch. The proofs may come
        from another ``Heap``.
        """
        read = iter(self.sample([wanted for proof in proofs for wanted in proof.wanted]))
        now = [_digest(proof.counted, list(islice(read, len(proof.counted)))) for proof in proofs]
        return [digest is not None and digest == proof.digest for digest, proof in zip(now, proofs, strict=True)]

    def held_together(self) -> bool:
        """Returns whether the memory of all values kept since ``refresh`` is unchanged, apart from reference counts. If
        so, the values form a consistent snapshot.
        """
        there, back = self._later(self._kept)
        return _same(self._kept, there) and _same(self._kept, back)

    def _later(self, noted: dict[Range, _Noted]) -> tuple[list[bytes | None], list[bytes | None]]:
        # A read takes time, and addresses are reused. So one call reads all parts in order, and again in reverse order.
        self._check()
        wanted = list(noted)
        read = self._memory.read_many([*wanted, *reversed(wanted)]) if wanted else []
        return read[: len(wanted)], read[len(wanted) :][::-1]

    def _check(self) -> None:
        if time.monotonic() > self._deadline:
            raise TargetTimeout("the values could not be read in time")


def _same(noted: dict[Range, _Noted], later: list[bytes | None]) -> bool:
    return all(now is not None and _equal(*before, now) for before, now in zip(noted.values(), later, strict=True))


def _digest(counted: bytes, read: Sequence[bytes | None]) -> int | None:
    """Returns a digest of the bytes that must not change. None if bytes are missing, or if the first word of a counted
    range is not a reference count (``is_count``).
    """
    parts = []
    for has_count, data in zip(counted, read, strict=True):
        if data is None or (has_count and not is_count(word(data, 0))):
            return None
        parts.append(data[8:] if has_count else data)
    return hash(b"".join(parts))


def _equal(counted: bool, before: bytes, now: bytes) -> bool:
    # A freed object keeps the bytes behind its count for a while, so its count is checked, too.
    return is_count(word(now, 0)) and now[8:] == before[8:] if counted else now == before
