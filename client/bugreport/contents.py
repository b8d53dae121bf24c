"""Makes the files of a bug report and its archive. The redactor replaces names in the texts that nodes report, and the
archive names neither its maker nor the machine.
"""

from __future__ import annotations

import gzip
import io
import json
import os
import platform
import pwd
import socket
import sys
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import IO, Any

from probing.api.proto.probing.v1 import node_pb2 as pb
from probing.api.tables.schema import Row
from probing.client.bugreport.gather import Failure, Gathered
from probing.client.bugreport.questions import CONFIG, NAMES, OPTIONS, QUESTIONS, Question
from probing.client.bugreport.redaction import Kind, Redactor
from probing.client.version import program

__all__ = (
    "File",
    "contents",
    "write_archive",
)

FORMAT = 1
_TOP = "probingd-bugreport"
_CHECK = ("name", "state", "needed", "detail", "cost", "remedy")
_README = """\
A report about probingd, made by `probingctl bugreport`. docs/bugreport.md describes it.

Names are replaced by tokens, the same name by the same token in all files: job-1, run-1, host-1, user-1, path-1,
address-1, container-1, pod-1, finding-1. Texts, such as lines of the log, show only numbers, times, and words that
occur in the sources of probingd; every other word is name-N. Command lines, environments, stacks, values of variables
and lines of trainers are not asked for.
"""


# Kinds of columns whose values are not names; ``_meet`` leaves these columns out.
_TEXTUAL = frozenset({Kind.NUMBER, Kind.VERSION, Kind.TEXT, Kind.TEXTS})


@dataclass(frozen=True, slots=True)
class File:
    """A file of the report. If the content is missing, ``problem`` says why, and ``data`` has the same reason."""

    name: str
    about: str
    data: bytes
    problem: str = ""


def contents(gathered: Sequence[Gathered], redactor: Redactor, now: str) -> list[File]:
    """Returns all files of the report. ``now``: the time of the report."""
    _meet(gathered, redactor)
    files = [file for one in gathered for file in _of_node(one, redactor)]
    summary = {
        "format": FORMAT,
        "made": now,
        "client": _client(),
        "files": {file.name: file.problem or "ok" for file in files},
        "replaced": redactor.counts,
    }
    lists = "".join(f"\n{file.name}: {file.problem or file.about}" for file in files)
    return [
        File(f"{_TOP}/README.txt", "what this is", f"{_README}{lists}\n".encode()),
        File(f"{_TOP}/report.json", "version and system of the client; list of the files", _json(summary)),
        *files,
    ]


def _meet(gathered: Sequence[Gathered], redactor: Redactor) -> None:
    """Gives each name a token, the names of nodes first. Only names that have a token are replaced in texts."""
    for one in gathered:
        redactor.token(Kind.HOST, one.node or one.address)
    redactor.token(Kind.HOST, socket.gethostname())
    # "root" is a common word of texts, so this user name is not replaced.
    if os.getuid():
        with suppress(KeyError, OSError):
            redactor.token(Kind.USER, pwd.getpwuid(os.getuid()).pw_name)
    for one in gathered:
        for question in NAMES:
            _rows(question, one.names.get(question.name), redactor)
        for question in QUESTIONS:
            _rows(question, one.rows.get(question.name), redactor, names_only=True)


def _rows(
    question: Question, rows: list[Row] | Failure | None, redactor: Redactor, *, names_only: bool = False
) -> list[Row]:
    columns = {name: kind for name, kind in question.columns.items() if not (names_only and kind in _TEXTUAL)}
    found = rows if isinstance(rows, list) else []
    if question is CONFIG:
        return [_option(row, redactor) for row in found]
    return [{name: redactor.value(kind, row.get(name)) for name, kind in columns.items()} for row in found]


def _option(row: Mapping[str, Any], redactor: Redactor) -> Row:
    key, value, default = (str(row.get(name) or "") for name in ("key", "value", "default"))
    if value == default:
        shown = value
    elif key not in OPTIONS:
        shown = value if value in ("true", "false") or _is_number(value) else "(set)"
    elif OPTIONS[key] is Kind.ADDRESS:
        shown = ",".join(redactor.token(Kind.ADDRESS, part) for part in value.split(",") if part)
    else:
        shown = str(redactor.value(OPTIONS[key], value))
    return {"key": redactor.value(Kind.PLAIN, key), "value": shown, "changed": value != default}


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _of_node(one: Gathered, redactor: Redactor) -> Iterator[File]:
    folder = f"{_TOP}/{redactor.token(Kind.HOST, one.node or one.address)}"

    def file(name: str, about: str, value: Any) -> File:
        if isinstance(value, Failure):
            problem = redactor.text(value.message)
            data = _json({"missing": problem, "hint": redactor.text(value.hint)})
            return File(f"{folder}/{name}", about, data, f"missing: {problem}")
        data = value if isinstance(value, bytes) else _json(value)
        return File(f"{folder}/{name}", about, data)

    about = "state of the daemon, and of each source"
    yield file("status.json", about, one.status if isinstance(one.status, Failure) else _status(one.status, redactor))
    for question in QUESTIONS:
        rows = one.rows[question.name]
        shown = rows if isinstance(rows, Failure) else _rows(question, rows, redactor)
        yield file(f"{question.name}.json", question.about, shown)
    if one.interpreter is not None:
        versions = one.interpreter
        if not isinstance(versions, Failure):
            versions = {name: redactor.value(Kind.VERSION, value) for name, value in versions.items()}
        yield file("interpreter.json", "versions of Python, torch, CUDA and NCCL of the --python interpreter", versions)
    check = one.check
    if not isinstance(check, Failure):
        check = [{name: redactor.value(Kind.TEXT, found.get(name)) for name in _CHECK} for found in check]
    yield file("check.json", "what works on the machine, and what each problem costs", check)
    lines = one.log
    log = lines if isinstance(lines, Failure) else "".join(f"{redactor.text(line)}\n" for line in lines).encode()
    yield file("log.txt", "the last lines of the daemon's log", log)


def _status(reply: pb.StatusReply, redactor: Redactor) -> Row:
    def text(value: str) -> str | None:
        return redactor.text(value) or None

    return {
        "node": redactor.token(Kind.HOST, reply.node),
        "version": redactor.value(Kind.VERSION, reply.version),
        "engine": redactor.value(Kind.VERSION, reply.engine),
        "instance": text(reply.instance),
        "state": text(reply.state),
        "reason": text(reply.reason),
        "uptime_ns": max(0, reply.node_time_ns - reply.started_ns) if reply.started_ns else None,
        "processes": reply.processes,
        "store_bytes": reply.store_bytes,
        "sources": [
            {
                "name": text(s.name),
                "state": text(s.state),
                "reason": text(s.reason),
                "rows": s.rows,
                "lost": s.lost,
                "detail": text(s.detail),
            }
            for s in reply.sources
        ],
    }


def _client() -> Row:
    try:
        distribution = platform.freedesktop_os_release().get("PRETTY_NAME")
    except OSError:
        distribution = None
    return {
        "version": program(),
        "python": platform.python_version(),
        "implementation": sys.implementation.name,
        "kernel": platform.release(),
        "machine": platform.machine(),
        "distribution": distribution,
    }


def _json(value: Any) -> bytes:
    return (json.dumps(value, indent=1) + "\n").encode()


def write_archive(sink: IO[bytes], files: Sequence[File], now: int) -> None:
    """Writes ``files`` as an archive to ``sink``; ``now``, in s since 1970, becomes their modification time."""
    # The empty name keeps gzip from writing a file name into the header.
    with (
        gzip.GzipFile("", "wb", fileobj=sink, mtime=now) as packed,
        tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as archive,
    ):
        for file in files:
            entry = tarfile.TarInfo(file.name)
            entry.size, entry.mtime, entry.mode = len(file.data), now, 0o600
            archive.addfile(entry, io.BytesIO(file.data))
