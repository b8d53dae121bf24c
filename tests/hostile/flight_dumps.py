"""Dumps of a flight recorder that are made to cost time: few bytes that name the same large values again and again."""

from __future__ import annotations

import pickle
from pathlib import Path

__all__ = ("many_groups", "one_entry_often", "repeated_values")


def repeated_values(path: Path, entries: int = 20_000) -> Path:
    """Entries of 15 bytes with 64 frames and 256 shapes each."""
    frames = [{"name": f"{n}{'f' * 250}", "filename": f"{n}{'p' * 250}", "line": n} for n in range(64)]
    shapes = [[n] * 16 for n in range(256)]
    names = [f"{n}{'d' * 250}" for n in range(256)]
    values = {"frames": frames, "input_sizes": shapes, "output_sizes": shapes, "input_dtypes": names}
    return _write(path, {"version": "2.4", "entries": [dict(values) for _ in range(entries)]})


def one_entry_often(path: Path, entries: int = 1_000_000) -> Path:
    """One entry, named by two bytes each time."""
    entry = {"record_id": 1, "frames": [{"name": "f" * 250, "filename": "p" * 250, "line": n} for n in range(64)]}
    return _write(path, {"version": "2.4", "entries": [entry] * entries})


def many_groups(path: Path, size: int = 16 << 20) -> Path:
    """Groups that all have the same endless list of ranks."""
    ranks = "[" + "0," * (size // 2) + "0]"
    return _write(path, {"version": "2.4", "entries": [], "pg_config": {str(n): {"ranks": ranks} for n in range(256)}})


def _write(path: Path, dump: object) -> Path:
    path.write_bytes(pickle.dumps(dump, protocol=2))
    return path
