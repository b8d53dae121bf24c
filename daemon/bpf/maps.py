"""Reads and writes BPF maps by numpy; keys and values have the dtypes of the object's BTF."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np

from probing.daemon.bpf import syscalls

__all__ = ("Map",)

_PER_CPU = (5, 6, 10, 21)
# Map types whose keys are the numbers 0 to max_entries - 1.
_ARRAYS = (2, 6)
_BATCH = 4096
# ENOTSUPP, which the kernel returns for a map without batch operations; user space has no name for it.
_ENOTSUPP = 524


class Map:
    """A BPF map and its descriptor. A value of a per-CPU map is an array with an element for each possible CPU."""

    def __init__(
        self, name: str, fd: int, key: np.dtype[Any] | None = None, value: np.dtype[Any] | None = None
    ) -> None:
        info = syscalls.map_info(fd)
        self.name, self.fd, self.id, self.type = name, fd, info.id, info.type
        self.max_entries = info.max_entries
        self.key = key if key is not None else np.dtype((np.void, info.key_size))
        self.value = value if value is not None else np.dtype((np.void, info.value_size))
        self.cpus = syscalls.possible_cpus() if info.type in _PER_CPU else 0
        # The kernel stores the values of the CPUs at multiples of 8 bytes.
        self._stride = -(-info.value_size // 8) * 8 if self.cpus else info.value_size
        self._bytes = self._stride * (self.cpus or 1)
        self._row = self._row_dtype()

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def lookup(self, key: Any, *, delete: bool = False) -> Any:
        """Returns the value of ``key`` as a numpy scalar (per-CPU: array), or None. ``delete`` removes the entry in the
        same step (Linux 5.14 and newer).
        """
        raw = syscalls.map_lookup(self.fd, self._key_bytes(key), self._bytes, delete=delete)
        return None if raw is None else self._values(raw)[0]

    def update(self, key: Any, value: Any) -> None:
        """Sets the value of ``key``: bytes, or anything that the dtype accepts. Not for per-CPU maps."""
        raw = value if isinstance(value, bytes) else np.array(value, self.value).tobytes()
        syscalls.map_update(self.fd, self._key_bytes(key), raw)

    def insert(self, key: Any, value: Any) -> bool:
        """Like ``update``, but returns False and changes nothing when the key exists."""
        raw = value if isinstance(value, bytes) else np.array(value, self.value).tobytes()
        try:
            syscalls.map_update(self.fd, self._key_bytes(key), raw, new=True)
        except FileExistsError:
            return False
        return True

    def delete(self, key: Any) -> bool:
        return syscalls.map_delete(self.fd, self._key_bytes(key))

    def items(self) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        """Returns all keys and all values as two arrays. An entry that changes meanwhile may appear, be missing, or
        appear twice.
        """
        try:
            parts = self._batches()
        except OSError as e:
            if e.errno not in (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSPC, _ENOTSUPP):
                raise
            parts = self._one_by_one()
        keys = np.frombuffer(b"".join(k for k, _ in parts), self.key)
        return keys, self._values(b"".join(v for _, v in parts))

    def _batches(self) -> list[tuple[bytes, bytes]]:
        size = min(max(self.max_entries, 1), _BATCH)
        parts: list[tuple[bytes, bytes]] = []
        seen = 0
        for keys, values in syscalls.map_lookup_batch(self.fd, self.key.itemsize, self._bytes, size):
            parts.append((keys, values))
            seen += len(keys) // self.key.itemsize
            # The loop needs a bound, since a map may grow while it is read.
            if seen > 2 * self.max_entries:
                break
        return parts

    def _one_by_one(self) -> list[tuple[bytes, bytes]]:
        parts: list[tuple[bytes, bytes]] = []
        for key in self._keys():
            value = syscalls.map_lookup(self.fd, key, self._bytes)
            if value is not None:
                parts.append((key, value))
        return parts

    def _keys(self) -> Iterator[bytes]:
        if self.type in _ARRAYS:
            yield from (key.to_bytes(4, sys.byteorder) for key in range(self.max_entries))
            return
        key = None
        for _ in range(2 * self.max_entries):
            key = syscalls.map_next_key(self.fd, key, self.key.itemsize)
            if key is None:
                return
            yield key

    def _key_bytes(self, key: Any) -> bytes:
        return key if isinstance(key, bytes) else np.array(key, self.key).tobytes()

    def _row_dtype(self) -> np.dtype[Any]:
        if not self.cpus or self._stride == self.value.itemsize:
            return self.value
        return np.dtype({"names": ["value"], "formats": [self.value], "offsets": [0], "itemsize": self._stride})

    def _values(self, raw: bytes) -> np.ndarray[Any, Any]:
        values = np.frombuffer(raw, self._row)
        if self._row is not self.value:
            values = values["value"]
        return values.reshape(-1, self.cpus) if self.cpus else values
