"""The errors of probingd, as one tree of classes. ``message`` says what happened; ``hint`` says what to do; programs
read ``code``.

::

    ProbingError
    ├── UsageError            the command line or a request is invalid (exit 2)
    ├── ConfigError           the configuration is invalid (exit 2)
    ├── PrivilegeError        a right or a kernel feature is missing
    │   └── Unauthenticated   the token is missing or wrong
    ├── AttachError           a probe could not be placed
    ├── NotFound              no such job, pid, table or node
    ├── TargetError           a watched process cannot be read
    │   ├── ProcessGone       the process exited, or its pid belongs to another process now
    │   ├── NotPython         the process does not run CPython
    │   ├── UnsupportedTarget probingd cannot read this kind of CPython, library or file
    │   ├── CorruptTarget     the data read from the process is inconsistent
    │   └── TargetTimeout     reading the process took too long; the process is quarantined
    ├── StoreError            the state directory cannot be used
    │   ├── StateLocked       another daemon uses the state directory
    │   ├── StoreFull         no space is left
    │   └── FormatError       data is damaged, or has a newer format
    ├── QueryError            a query failed
    │   ├── QueryRejected     the query is not allowed, or is not valid
    │   │   └── EngineDiffers the query asks for aggregate states of another DuckDB version
    │   ├── QueryTimeout      the deadline of the query passed
    │   └── QueryMemory       the query needed more memory than a worker has
    ├── Overloaded            too many calls by one caller, or by all callers together
    ├── PeerError             a node did not answer
    ├── PartialAnswer         not every node answered, under --strict (exit 4)
    └── InternalError         a bug
"""

from __future__ import annotations

from typing import Any

__all__ = (
    "BROKEN",
    "LATE",
    "NO_TABLE",
    "SERVED",
    "TOO_LARGE",
    "UNKNOWN_CALL",
    "WORKER_ENDED",
    "AttachError",
    "ConfigError",
    "CorruptTarget",
    "EngineDiffers",
    "FormatError",
    "InternalError",
    "NotFound",
    "NotPython",
    "Overloaded",
    "PartialAnswer",
    "PeerError",
    "PrivilegeError",
    "ProbingError",
    "ProcessGone",
    "QueryError",
    "QueryMemory",
    "QueryRejected",
    "QueryTimeout",
    "StateLocked",
    "StoreError",
    "StoreFull",
    "TargetError",
    "TargetTimeout",
    "Unauthenticated",
    "UnsupportedTarget",
    "UsageError",
    "error_from",
)


# Codes for errors whose class does not tell a program what to do. LATE: the node may still answer later.
LATE = "late"
# The connection broke during the call; another call may succeed.
BROKEN = "broken"
# The node has no such table. A table that a job or a probe fills exists only on nodes with that job or probe.
NO_TABLE = "no_table"
# The answer is larger than the caller accepts.
TOO_LARGE = "too_large"
# The node's version does not have this call.
UNKNOWN_CALL = "unknown_call"
# The process that worked on the request has ended, perhaps because of the request.
WORKER_ENDED = "worker_ended"
# Another launcher serves the worker. If that launcher was killed, the node notices its silence some seconds later.
SERVED = "served"


class ProbingError(Exception):
    """The base class of all errors. ``message`` is one line; ``hint`` is one line that says what to do, or empty;
    ``code`` is a code such as LATE, or empty.

    ``reason``: the message without the address of the node, for lists that show the address in another column.
    """

    exit_code = 1
    default_hint = ""

    def __init__(self, message: str, *, hint: str = "", code: str = "", reason: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint or self.default_hint
        self.code = code
        self.reason = reason or message

    @property
    def kind(self) -> str:
        """The name by which another process recognizes the class of the error."""
        return type(self).__name__

    def to_dict(self) -> dict[str, str]:
        code = {"code": self.code} if self.code else {}
        return {"kind": self.kind, "message": self.message, "hint": self.hint, **code}

    def __reduce__(self) -> tuple[Any, ...]:
        return error_from, (self.kind, self.message, self.hint, self.code, self.reason)


class UsageError(ProbingError):
    exit_code = 2
    default_hint = "run the command with --help to see what it takes"


class ConfigError(ProbingError):
    exit_code = 2


class PrivilegeError(ProbingError):
    default_hint = "run `probingd check` to see which rights and kernel features are missing"


class Unauthenticated(PrivilegeError):
    default_hint = "give the node's token by --token-file or PROBING_AUTH_TOKEN"


class AttachError(ProbingError):
    default_hint = "run `probingd check` to see what the kernel offers"


class NotFound(ProbingError):
    pass


class TargetError(ProbingError):
    pass


class ProcessGone(TargetError, ProcessLookupError):
    default_hint = "`probingctl ps` lists the processes that run now"


class NotPython(TargetError):
    default_hint = "only processes that run CPython have Python stacks"


class UnsupportedTarget(TargetError):
    pass


class CorruptTarget(TargetError):
    default_hint = "the process changed while it was read; ask again"


class TargetTimeout(TargetError, TimeoutError):
    default_hint = "the process waits for storage or memory that does not respond; it is not read again for a while"


class StoreError(ProbingError):
    pass


class StateLocked(StoreError):
    default_hint = "stop the other daemon, or give this one its own --state-dir"


class StoreFull(StoreError):
    default_hint = "free space, or lower [store] max_bytes"


class FormatError(StoreError):
    default_hint = "run `probingd verify` on the state directory"


class QueryError(ProbingError):
    pass


class QueryRejected(QueryError):
    default_hint = "write one SELECT over the tables that `probingctl tables` lists"


class EngineDiffers(QueryRejected):
    default_hint = "run the same version of probingd on all nodes"


class QueryTimeout(QueryError, TimeoutError):
    default_hint = "narrow the time range, or raise --timeout"


class QueryMemory(QueryError):
    default_hint = "narrow the time range, or aggregate"


class Overloaded(ProbingError):
    default_hint = "ask again in a while"


class PeerError(ProbingError):
    default_hint = "is probingd running on that node, and does the address match its --socket or --listen?"


class PartialAnswer(ProbingError):
    exit_code = 4
    default_hint = "leave --strict out to get the rows of the nodes that answered"


class InternalError(ProbingError):
    default_hint = "this is a bug in probingd: please report it with `probingctl bugreport`"


def _tree(cls: type[ProbingError]) -> dict[str, type[ProbingError]]:
    found = {cls.__name__: cls}
    for sub in cls.__subclasses__():
        found.update(_tree(sub))
    return found


def error_from(kind: str, message: str, hint: str = "", code: str = "", reason: str = "") -> ProbingError:
    """Returns the error that another process sent: ``kind`` names its class; an unknown name becomes InternalError."""
    return _tree(ProbingError).get(kind, InternalError)(message, hint=hint, code=code, reason=reason)
