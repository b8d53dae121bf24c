"""Sets bad files aside in ``corrupt/``."""

from __future__ import annotations

import contextlib
from pathlib import Path

from probing.daemon.clock import Clock
from probing.daemon.store.files import Files, write_all

__all__ = ("CORRUPT_DIR", "SetAside")

CORRUPT_DIR = "corrupt"
_MAX_CORRUPT = 32


class SetAside:
    """Moves bad files to ``corrupt/`` for inspection. Keeps the newest 32 files, or fewer if ``limit`` is exceeded."""

    def __init__(self, files: Files, root: Path, clock: Clock) -> None:
        self._files = files
        self._root = root
        self._clock = clock
        self.count = 0
        self._most_bytes: int | None = None

    def limit(self, most_bytes: int) -> None:
        """Limits the total size of the files to ``most_bytes`` from now on. Raises OSError."""
        self._most_bytes = most_bytes
        self._prune()

    def move(self, path: Path) -> None:
        """Moves the file ``path`` to ``corrupt/``. Raises OSError."""
        self._files.rename(path, self._target(path))
        self._prune()

    def copy(self, path: Path, data: bytes) -> None:
        """Writes ``data``, bytes of the file ``path``, to ``corrupt/``. Raises OSError."""
        fd = self._files.create(self._target(path))
        try:
            write_all(self._files, fd, data)
        finally:
            self._files.close(fd)
        self._prune()

    @property
    def bytes(self) -> int:
        """The size of all files that are set aside."""
        return sum(self._size(name) for name in self._files.listdir(self._root / CORRUPT_DIR))

    def _target(self, path: Path) -> Path:
        self.count += 1
        flat = "_".join(path.relative_to(self._root).parts)
        stamp = f"{self._clock.pair().real_ns:020d}-{self.count:04d}"
        return self._root / CORRUPT_DIR / f"{stamp}-{flat}.corrupt"

    def _prune(self) -> None:
        size = 0
        for kept, name in enumerate(reversed(self._files.listdir(self._root / CORRUPT_DIR)), 1):
            size += self._size(name)
            if kept > _MAX_CORRUPT or (self._most_bytes is not None and size > self._most_bytes):
                # A folder cannot be unlinked and stays; the files are still pruned.
                with contextlib.suppress(OSError):
                    self._files.unlink(self._root / CORRUPT_DIR / name)

    def _size(self, name: str) -> int:
        with contextlib.suppress(OSError):
            return self._files.size(self._root / CORRUPT_DIR / name)
        return 0
