"""The tables of the toy source: a stored one and a live one."""

from __future__ import annotations

from probing.api.tables.schema import F64, I32, NAME, TIME, Column, Table, stored

__all__ = ("LOAD", "LOAD_NOW")

_COLUMNS = (
    Column("node", NAME, "Node."),
    Column("ts", TIME, "When the load was read, UTC."),
    Column("load_1m", F64, "Load average of the last minute."),
    Column("running", I32, "Threads that run or could run."),
)

LOAD = Table("toy.load", "The load of the node, once a second.", _COLUMNS, stored(_COLUMNS))
LOAD_NOW = Table("toy.load_now", "The load of the node now.", _COLUMNS)
