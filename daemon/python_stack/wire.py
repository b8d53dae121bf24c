"""Stacks between a reader and the collector: each name once, because the threads of a training repeat themselves."""

from __future__ import annotations

from typing import Any

from probing.api.errors import InternalError

__all__ = ("pack", "unpack")

# A message header holds 1 MiB of JSON (daemon/ipc.py), where a character takes up to 12 bytes.
_MAX_BYTES = 900_000
_FRAME_BYTES = 48
_THREAD_BYTES = 168


def pack(dump: dict[str, Any]) -> dict[str, Any]:
    """``dump`` with frames as [code, lineno, ip, entry] and codes as [func, file].

    Frames that do not fit into a message are cut, outermost first.
    """
    codes: dict[tuple[str, str], int] = {}
    threads = []
    left = _MAX_BYTES - _THREAD_BYTES * len(dump["threads"])
    for thread in dump["threads"]:
        frames: list[list[Any]] = []
        for frame in thread["frames"]:
            key = (frame["func"], frame["file"])
            left -= _FRAME_BYTES + (0 if key in codes else _json_bytes(*key))
            if left < 0:
                break
            frames.append([codes.setdefault(key, len(codes)), frame["lineno"], frame["ip"], int(frame["entry"])])
        cut = len(frames) < len(thread["frames"])
        threads.append({**thread, "frames": frames, "complete": thread["complete"] and not cut})
    return {**dump, "threads": threads, "codes": [list(key) for key in codes]}


def unpack(packed: dict[str, Any]) -> dict[str, Any]:
    """What ``pack`` was given, as far as it fitted. Raises InternalError for anything else."""
    try:
        codes = packed["codes"]
        threads = [{**t, "frames": [_frame(codes, *f) for f in t["frames"]]} for t in packed["threads"]]
    except (KeyError, IndexError, TypeError, ValueError) as e:
        raise InternalError("a reader's answer holds no stacks") from e
    return {**{k: v for k, v in packed.items() if k != "codes"}, "threads": threads}


def _frame(codes: list[Any], index: int, lineno: int | None, ip: int, entry: int) -> dict[str, Any]:
    func, file = codes[index]
    return {"func": func, "file": file, "lineno": lineno, "frame_type": "Python", "ip": ip, "entry": bool(entry)}


def _json_bytes(*texts: str) -> int:
    return 8 + sum(len(t) if t.isascii() else 12 * len(t) for t in texts)
