"""Parses JSON reports of NCCL's RAS (2.28.7 and later) into rows of ``comm.ras``.

The keys come from src/ras/client_support.cc. Versions 2.28.7 and 2.28.9 omit the comma between ``nvml_dev`` and
``status`` of a missing rank (``jsonWriteMissingRank``): if a document does not parse, the comma is inserted.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from probing.api.errors import CorruptTarget, UsageError
from probing.daemon.ipc import Message
from probing.daemon.nccl_uprobes.ras.report import MAX_ROWS, OPERATION_COUNTS, RankRow, Report
from probing.daemon.nccl_uprobes.ras.text_report import text_report
from probing.daemon.processes.procfs import clean_text

__all__ = ("handlers", "json_report")

MAX_TEXT = 256
# The texts of ncclErrorToString of client_support.cc, by ncclResult_t.
_RESULTS = (
    "Success",
    "Unhandled CUDA error",
    "System error",
    "Internal error",
    "Invalid argument",
    "Invalid usage",
    "Remote process error",
    "NCCL operation in progress",
    "Timeout",
)
_NO_ERROR = (0, 7)
_LOST_COMMA = re.compile(r'("nvml_dev"[ \t]*:[ \t]*-?[0-9]{1,9})([ \t]*\n[ \t]*"status"[ \t]*:)')
_HASH = re.compile(r"0x[0-9a-fA-F]{1,16}")


def handlers() -> dict[str, Callable[[Message], bytes]]:
    """Returns the handler of the parser's request ``ras_report`` (``form``: "json" or "text"; payload: the report),
    which answers a Report as JSON.
    """
    return {"ras_report": _answer}


def json_report(report: bytes) -> Report:
    """Returns the rows of all ranks, missing ranks first. Raises CorruptTarget if ``report`` is not a JSON report of
    RAS.
    """
    document = _document(report.decode("utf-8", "replace"))
    collection = _object(document.get("ras"))
    common = {
        "nccl_version": _text(document.get("nccl_version")),
        "collection_ns": _ns(collection.get("collection_time_sec")),
        "timeouts": _int(collection, "timeouts_count"),
    }
    skipped = 0
    missing: list[RankRow] = []
    present: list[RankRow] = []
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
        raise UsageError('the form of a "ras_report" request must be "json" or "text"')
    report = json_report(request.payload) if form == "json" else text_report(request.payload)
    return json.dumps(report, separators=(",", ":")).encode()


def _document(text: str) -> dict[str, object]:
    try:
        try:
            document = json.loads(text)
        except json.JSONDecodeError:
            document = json.loads(_LOST_COMMA.sub(r"\1,\2", text))
    except (ValueError, RecursionError) as e:
        raise CorruptTarget("the report of NCCL RAS is not JSON") from e
    if not isinstance(document, dict) or not isinstance(document.get("communicators"), list):
        raise CorruptTarget("the report of NCCL RAS has no communicators")
    return document


def _ranks(document: Mapping[str, Any]) -> Iterator[RankRow | None]:
    """Yields the rows of all ranks of all communicators; None for a malformed entry."""
    for communicator in document["communicators"]:
        fields = _object(communicator)
        comm = fields.get("hash")
        if not isinstance(comm, str) or not _HASH.fullmatch(comm):
            yield None
            continue
        common = {
            "comm": f"{int(comm, 16):016x}",
            "secondary_hash": _text(fields.get("secondary_hash")),
            "size": _int(fields, "size"),
        }
        for name in ("missing_ranks", "ranks"):
            ranks = fields.get(name)
            for rank in ranks if isinstance(ranks, list) else ():
                yield {**common, **_rank(rank, missing=name == "missing_ranks")} if isinstance(rank, dict) else None


def _rank(rank: Mapping[str, Any], *, missing: bool) -> RankRow:
    status, counts = _object(rank.get("status")), _object(rank.get("collective_counts"))
    row: RankRow = {
        "comm_rank": _int(rank, "rank"),
        "host": _text(rank.get("host")),
        "rank_pid": _int(rank, "pid"),
        "cuda_device": _int(rank, "cuda_dev"),
        "nvml_device": _int(rank, "nvml_dev"),
        "missing": missing,
    }
    # For a missing rank of an unknown process RAS writes the host "unknown" and the pid -1.
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
        **{column: _int(counts, name, 1 << 63) for name, column in OPERATION_COUNTS.items()},
    }


def _object(value: Any) -> dict[str, object]:
    return value if isinstance(value, dict) else {}


def _int(fields: Mapping[str, Any], name: str, limit: int = 1 << 31) -> int | None:
    value = fields.get(name)
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
    # This comparison also refuses nan and infinity.
    return int(seconds * 1e9) if type(seconds) in (int, float) and 0 <= seconds < 1 << 32 else None
