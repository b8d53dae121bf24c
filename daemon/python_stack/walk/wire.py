"""Stacks from a reader to the service: each name once, because the threads of a training repeat themselves."""

from __future__ import annotations

import json
from typing import Any

from probing.api.errors import InternalError

__all__ = ("CUT", "MAX_BYTES", "VARIABLE_BYTES", "json_bytes", "pack", "threads_of", "unpack")

CUT = "further variables did not fit"

# A message header holds 1 MiB of JSON (daemon/ipc.py), where a character takes up to 12 bytes.
MAX_BYTES = 900_000
_FRAME_BYTES = 48
_THREAD_BYTES = 168
VARIABLE_BYTES = 64
_VARIABLE = ("name", "type", "value", "number", "reason")


def pack(dump: dict[str, Any]) -> dict[str, Any]:
    """``dump`` with frames as [code, lineno, ip, entry] and codes as [func, file].

    Frames that do not fit into a message are cut, outermost first; then locals, those of outer frames first.
    """
    codes: dict[tuple[str, str], int] = {}
    threads = []
    left = MAX_BYTES - _THREAD_BYTES * len(dump["threads"])
    for thread in dump["threads"]:
        frames: list[list[Any]] = []
        for frame in thread["frames"]:
            key = (frame["func"], frame["file"])
            left -= _FRAME_BYTES + (0 if key in codes else json_bytes(*key))
            if left < 0:
                break
            frames.append([codes.setdefault(key, len(codes)), frame["lineno"], frame["ip"], int(frame["entry"])])
        cut = len(frames) < len(thread["frames"])
        threads.append({**thread, "frames": frames, "complete": thread["complete"] and not cut})
    _pack_locals(dump["threads"], threads, left)
    return {**dump, "threads": threads, "codes": [list(key) for key in codes]}


def unpack(packed: dict[str, Any]) -> dict[str, Any]:
    """What ``pack`` was given, as far as it fitted. Raises InternalError for anything else."""
    try:
        codes = packed["codes"]
        threads = [{**t, "frames": [_frame(codes, *f) for f in t["frames"]]} for t in packed["threads"]]
    except (KeyError, IndexError, TypeError, ValueError) as e:
        raise InternalError("a reader's answer holds no stacks") from e
    return {**{k: v for k, v in packed.items() if k != "codes"}, "threads": threads}


def threads_of(text: str | bytes) -> list[dict[str, Any]]:
    """The threads of a dump in JSON, packed or not. Raises InternalError for anything else."""
    try:
        dump = json.loads(text)
        return list((unpack(dump) if "codes" in dump else dump)["threads"])
    except (KeyError, TypeError, ValueError, RecursionError) as e:
        raise InternalError("an answer holds no stacks") from e


def _pack_locals(dumped: list[dict[str, Any]], threads: list[dict[str, Any]], left: int) -> None:
    # Frames that have no list of locals then are those for which there was no room.
    deepest = max((len(t["frames"]) for t in threads), default=0)
    for depth in range(deepest):
        for thread, packed in zip(dumped, threads, strict=True):
            if depth >= len(packed["frames"]) or "locals" not in thread["frames"][depth]:
                continue
            kept: list[list[Any]] = []
            packed["frames"][depth].append(kept)
            for row in thread["frames"][depth]["locals"]:
                left -= VARIABLE_BYTES + json_bytes(row["name"], row["type"], row["value"] or "", row["reason"])
                if left < 0:
                    kept.append(["...", "", None, None, CUT])
                    return
                kept.append([row[field] for field in _VARIABLE])


def _frame(
    codes: list[Any], index: int, lineno: int | None, ip: int, entry: int, variables: list[list[Any]] | None = None
) -> dict[str, Any]:
    func, file = codes[index]
    frame = {"func": func, "file": file, "lineno": lineno, "frame_type": "Python", "ip": ip, "entry": bool(entry)}
    if variables is not None:
        frame["locals"] = [dict(zip(_VARIABLE, row, strict=True)) for row in variables]
    return frame


def json_bytes(*texts: str) -> int:
    """What ``texts`` take in a message, at most."""
    return 8 + sum(len(t) if t.isascii() else 12 * len(t) for t in texts)
