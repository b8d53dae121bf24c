"""Reports of NCCL's RAS in JSON (2.28.7 and later) as rows of ``comm.ras``; text goes to ``ras_text``.

Keys are those of src/ras/client_support.cc. Versions 2.28.7 and 2.28.9 leave out the comma between ``nvml_dev`` and
``status`` of a missing rank (``jsonWriteMissingRank``), which makes the whole document no JSON: it is put back in a
document that cannot be read without it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from probing.api.errors import CorruptTarget, UsageError
from probing.daemon.ipc import Message
from probing.daemon.nccl_uprobes.ras.text_report import text_report
from probing.daemon.processes.procfs import clean_text

__all__ = ("MAX_ROWS", "handlers", "json_report")

MAX_ROWS = 20_000
MAX_TEXT = 256
_COUNTS = {
    "Broadcast": "broadcast",
    "Reduce": "reduce",
    "AllGather": "all_gather",
    "ReduceScatter": "reduce_scatter",
    "AllReduce": "all_reduce",
}
# ncclErrorToString of client_support.cc, by ncclResult_t.
_RESULTS = (
    "Success", "Unhandled CUDA error", "System error", "Internal error", "Invalid argument", "Invalid usage",
    "Remote process error", "NCCL operation in progress", "Timeout",
)  # fmt: skip
_NO_ERROR = (0, 7)
_LOST_COMMA = re.compile(r'("nvml_dev"[ \t]*:[ \t]*-?[0-9]{1,9})([ \t]*\n[ \t]*"status"[ \t]*:)')
_HASH = re.compile(r"0x[0-9a-fA-F]{1,16}")


def handlers() -> dict[str, Callable[[Message], bytes]]:
    """For the parser: ``ras_report`` (``form`` json or text, payload the report): payload, JSON as below."""
    return {"ras_report": _answer}


def json_report(report: bytes) -> dict[str, Any]:
    """``rows`` of comm.ras without who and when, missing ranks first; ``skipped``: what made no sense or was too much.

    Raises CorruptTarget for what is no such document.
    """
    document = _document(report.decode("utf-8", "replace"))
    collection = _object(document.get("ras"))
    common = {
        "nccl_version": _text(document.get("nccl_version")),
        "collection_ns": _ns(collection.get("collection_time_sec")),
        "timeouts": _int(collection, "timeouts_count"),
    }
    skipped = 0
    missing: list[dict[str, Any]] = []
    present: list[dict[str, Any]] = []
    for row in _ranks(document):
        if row is None or len(missing) + len(present) >= MAX_ROWS:
            skipped += 1
        elif row["missing"]:
            missing.append({**common, **row})
        else:
            present.append({**common, **row})
    return {"rows": missing + present, "skipped": skipped}


def _answer(request: Message) -> bytes:
    form = request.header.get("form")
    if form not in ("json", "text"):
        raise UsageError("ras_report takes a report in json or text")
    found = json_report(request.payload) if form == "json" else text_report(request.payload)
    return json.dumps(found, separators=(",", ":")).encode()


def _document(text: str) -> dict[str, Any]:
    try:
        try:
            document = json.loads(text)
        except json.JSONDecodeError:
            document = json.loads(_LOST_COMMA.sub(r"\1,\2", text))
    except (ValueError, RecursionError) as e:
        raise CorruptTarget("the report of NCCL RAS is no JSON") from e
    if not isinstance(document, dict) or not isinstance(document.get("communicators"), list):
        raise CorruptTarget("the report of NCCL RAS has no communicators")
    return document


def _ranks(document: Mapping[str, Any]) -> Iterator[dict[str, Any] | None]:
    """Rows of all ranks of all communicators; None for one that makes no sense."""
    for communicator in document["communicators"]:
        found = _object(communicator)
        comm = found.get("hash")
        if not isinstance(comm, str) or not _HASH.fullmatch(comm):
            yield None
            continue
        common = {
            "comm": f"{int(comm, 16):016x}",
            "secondary_hash": _text(found.get("secondary_hash")),
            "size": _int(found, "size"),
        }
        for name in ("missing_ranks", "ranks"):
            ranks = found.get(name)
            for rank in ranks if isinstance(ranks, list) else ():
                yield {**common, **_rank(rank, missing=name == "missing_ranks")} if isinstance(rank, dict) else None


def _rank(rank: Mapping[str, Any], *, missing: bool) -> dict[str, Any]:
    status, counts = _object(rank.get("status")), _object(rank.get("collective_counts"))
    row = {
        "comm_rank": _int(rank, "rank"),
        "host": _text(rank.get("host")),
        "rank_pid": _int(rank, "pid"),
        "cuda_device": _int(rank, "cuda_dev"),
        "nvml_device": _int(rank, "nvml_dev"),
        "missing": missing,
    }
    # A missing rank whose process is not known is named "unknown", -1.
    if row["rank_pid"] == -1:
        row["rank_pid"] = row["host"] = None
    if missing:
        return {**row, **{name: _flag(status.get(name)) for name in ("unresponsive", "considered_dead")}}
    error = _int(status, "async_error")
    return {
        **row,
        "init_state": _result(_int(status, "init_state")),
        "async_error": None if error in _NO_ERROR else _result(error),
        **{name: _flag(status.get(name)) for name in ("finalize_called", "destroy_flag", "abort_flag")},
        **{column: _int(counts, name, 1 << 63) for name, column in _COUNTS.items()},
    }


def _object(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _int(found: Mapping[str, Any], name: str, limit: int = 1 << 31) -> int | None:
    value = found.get(name)
    return value if type(value) is int and -limit <= value < limit else None


def _flag(value: Any) -> bool | None:
    return value if isinstance(value, bool) else None


def _text(value: Any) -> str | None:
    return clean_text(value, MAX_TEXT) if isinstance(value, str) else None


def _result(code: int | None) -> str | None:
    if code is None:
        return None
    return _RESULTS[code] if 0 <= code < len(_RESULTS) else f"Unexpected error {code}"


def _ns(seconds: Any) -> int | None:
    # Also refuses what is no number (nan) and what is infinite.
    return int(seconds * 1e9) if type(seconds) in (int, float) and 0 <= seconds < 1 << 32 else None
