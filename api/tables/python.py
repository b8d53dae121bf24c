"""What the interpreters do."""

from __future__ import annotations

from probing.api.tables.comm import IDENTITY
from probing.api.tables.schema import BOOL, I32, NAME, TEXT, U64, Column, Table

__all__ = ("BACKTRACE",)

BACKTRACE = Table(
    "python.backtrace",
    "Stacks of all threads of all training processes, read from outside when the query runs (live).",
    (
        *IDENTITY,
        Column("rank", I32, "Rank in the job, for a trainer."),
        Column("tid", I32, "Thread id as the host sees it."),
        Column("thread", TEXT, "Name of the thread."),
        Column("state", NAME, "Kernel state of the thread: running, sleeping, blocked, stopped or zombie."),
        Column("gil", BOOL, "Whether the thread holds the interpreter lock; NULL when it cannot be known."),
        Column("complete", BOOL, "False when the stack changed while it was read, or was cut."),
        Column("depth", I32, "0 is the innermost frame."),
        Column("ip", U64, "Address of the instruction or code object."),
        Column("file", TEXT, "Source file of the code."),
        Column("func", TEXT, "Qualified name of the function."),
        Column("lineno", I32, "Line that is being executed; NULL when the code has no line there."),
        Column("frame_type", NAME, "Python or Native."),
    ),
)
