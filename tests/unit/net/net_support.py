"""Readers and sinks for the sources of ``daemon/net``."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pyarrow as pa

from probing.api.errors import ProbingError
from probing.daemon.ipc import Message
from probing.daemon.source import Identity, Loss
from probing.daemon.source_state import Totals

__all__ = ("TOTALS", "Kept", "Known", "Reads")

TOTALS = Totals("running", {}, {})


class Reads:
    """Answers as readers and parsers do, in this process, by functions for each operation."""

    size = 1

    def __init__(self, **answers: Callable[[dict[str, Any]], Any]) -> None:
        self.answers = answers
        self.asked: list[tuple[str, dict[str, Any]]] = []

    def call(self, op: str, payload: bytes = b"", **args: Any) -> Any:
        self.asked.append((op, args))
        answer = self.answers[op](args)
        if isinstance(answer, ProbingError):
            raise answer
        return answer if isinstance(answer, Message) else Message({}, json.dumps(answer).encode())

    def call_each(self, *_: Any, **__: Any) -> Any:
        raise AssertionError("one request is enough")

    def forget(self, pid: int, start_ns: int) -> None:
        del pid, start_ns

    def count(self, op: str) -> int:
        return sum(1 for asked, _ in self.asked if asked == op)


class Kept:
    """Keeps rows by table."""

    def __init__(self) -> None:
        self.rows: dict[str, list[dict[str, Any]]] = {}
        self.losses: list[Loss] = []

    def put(self, table: str, batch: pa.RecordBatch) -> None:
        self.rows.setdefault(table, []).extend(batch.to_pylist())

    def lost(self, loss: Loss) -> None:
        self.losses.append(loss)

    def take(self, table: str) -> list[dict[str, Any]]:
        return self.rows.pop(table, [])


class Known:
    """The watched processes."""

    def __init__(self, *who: Identity) -> None:
        self.who = list(who)

    def live(self) -> list[Identity]:
        return self.who

    def identity(self, pid: int, start_ns: int) -> Identity | None:
        return next((one for one in self.who if one.key == (pid, start_ns)), None)
