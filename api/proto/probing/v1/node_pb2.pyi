from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class QueryRequest(_message.Message):
    __slots__ = ("sql", "timeout_ms", "max_bytes", "progress", "statements", "whole")
    SQL_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_MS_FIELD_NUMBER: _ClassVar[int]
    MAX_BYTES_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    STATEMENTS_FIELD_NUMBER: _ClassVar[int]
    WHOLE_FIELD_NUMBER: _ClassVar[int]
    sql: str
    timeout_ms: int
    max_bytes: int
    progress: bool
    statements: _containers.RepeatedCompositeFieldContainer[Statement]
    whole: bool
    def __init__(self, sql: _Optional[str] = ..., timeout_ms: _Optional[int] = ..., max_bytes: _Optional[int] = ..., progress: _Optional[bool] = ..., statements: _Optional[_Iterable[_Union[Statement, _Mapping]]] = ..., whole: _Optional[bool] = ...) -> None: ...

class Statement(_message.Message):
    __slots__ = ("name", "sql")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SQL_FIELD_NUMBER: _ClassVar[int]
    name: str
    sql: str
    def __init__(self, name: _Optional[str] = ..., sql: _Optional[str] = ...) -> None: ...

class QueryReply(_message.Message):
    __slots__ = ("arrow", "end", "progress", "statement", "parts")
    ARROW_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    STATEMENT_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    arrow: bytes
    end: QueryEnd
    progress: QueryProgress
    statement: StatementEnd
    parts: _containers.RepeatedCompositeFieldContainer[QueryReply]
    def __init__(self, arrow: _Optional[bytes] = ..., end: _Optional[_Union[QueryEnd, _Mapping]] = ..., progress: _Optional[_Union[QueryProgress, _Mapping]] = ..., statement: _Optional[_Union[StatementEnd, _Mapping]] = ..., parts: _Optional[_Iterable[_Union[QueryReply, _Mapping]]] = ...) -> None: ...

class StatementEnd(_message.Message):
    __slots__ = ("name", "rows", "warnings", "error")
    NAME_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    WARNINGS_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    name: str
    rows: int
    warnings: _containers.RepeatedScalarFieldContainer[str]
    error: Error
    def __init__(self, name: _Optional[str] = ..., rows: _Optional[int] = ..., warnings: _Optional[_Iterable[str]] = ..., error: _Optional[_Union[Error, _Mapping]] = ...) -> None: ...

class QueryProgress(_message.Message):
    __slots__ = ("fraction", "rows_to_scan", "elapsed_ms")
    FRACTION_FIELD_NUMBER: _ClassVar[int]
    ROWS_TO_SCAN_FIELD_NUMBER: _ClassVar[int]
    ELAPSED_MS_FIELD_NUMBER: _ClassVar[int]
    fraction: float
    rows_to_scan: int
    elapsed_ms: int
    def __init__(self, fraction: _Optional[float] = ..., rows_to_scan: _Optional[int] = ..., elapsed_ms: _Optional[int] = ...) -> None: ...

class QueryEnd(_message.Message):
    __slots__ = ("node", "rows", "rows_scanned", "warnings", "node_time_ns")
    NODE_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    ROWS_SCANNED_FIELD_NUMBER: _ClassVar[int]
    WARNINGS_FIELD_NUMBER: _ClassVar[int]
    NODE_TIME_NS_FIELD_NUMBER: _ClassVar[int]
    node: str
    rows: int
    rows_scanned: int
    warnings: _containers.RepeatedScalarFieldContainer[str]
    node_time_ns: int
    def __init__(self, node: _Optional[str] = ..., rows: _Optional[int] = ..., rows_scanned: _Optional[int] = ..., warnings: _Optional[_Iterable[str]] = ..., node_time_ns: _Optional[int] = ...) -> None: ...

class QueryManyRequest(_message.Message):
    __slots__ = ("query", "addresses", "shown")
    QUERY_FIELD_NUMBER: _ClassVar[int]
    ADDRESSES_FIELD_NUMBER: _ClassVar[int]
    SHOWN_FIELD_NUMBER: _ClassVar[int]
    query: QueryRequest
    addresses: _containers.RepeatedScalarFieldContainer[str]
    shown: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, query: _Optional[_Union[QueryRequest, _Mapping]] = ..., addresses: _Optional[_Iterable[str]] = ..., shown: _Optional[_Iterable[str]] = ...) -> None: ...

class QueryManyReply(_message.Message):
    __slots__ = ("address", "parts", "done", "error")
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    address: str
    parts: _containers.RepeatedCompositeFieldContainer[QueryReply]
    done: bool
    error: Error
    def __init__(self, address: _Optional[str] = ..., parts: _Optional[_Iterable[_Union[QueryReply, _Mapping]]] = ..., done: _Optional[bool] = ..., error: _Optional[_Union[Error, _Mapping]] = ...) -> None: ...

class StacksRequest(_message.Message):
    __slots__ = ("pids", "job", "timeout_ms", "native", "locals")
    PIDS_FIELD_NUMBER: _ClassVar[int]
    JOB_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_MS_FIELD_NUMBER: _ClassVar[int]
    NATIVE_FIELD_NUMBER: _ClassVar[int]
    LOCALS_FIELD_NUMBER: _ClassVar[int]
    pids: _containers.RepeatedScalarFieldContainer[int]
    job: str
    timeout_ms: int
    native: bool
    locals: bool
    def __init__(self, pids: _Optional[_Iterable[int]] = ..., job: _Optional[str] = ..., timeout_ms: _Optional[int] = ..., native: _Optional[bool] = ..., locals: _Optional[bool] = ...) -> None: ...

class StacksReply(_message.Message):
    __slots__ = ("node", "threads", "failures")
    NODE_FIELD_NUMBER: _ClassVar[int]
    THREADS_FIELD_NUMBER: _ClassVar[int]
    FAILURES_FIELD_NUMBER: _ClassVar[int]
    node: str
    threads: _containers.RepeatedCompositeFieldContainer[Thread]
    failures: _containers.RepeatedCompositeFieldContainer[TargetFailure]
    def __init__(self, node: _Optional[str] = ..., threads: _Optional[_Iterable[_Union[Thread, _Mapping]]] = ..., failures: _Optional[_Iterable[_Union[TargetFailure, _Mapping]]] = ...) -> None: ...

class Thread(_message.Message):
    __slots__ = ("job", "run", "rank", "pid", "start_ns", "tid", "thread", "state", "gil", "complete", "frames", "native_missing", "trains")
    JOB_FIELD_NUMBER: _ClassVar[int]
    RUN_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    START_NS_FIELD_NUMBER: _ClassVar[int]
    TID_FIELD_NUMBER: _ClassVar[int]
    THREAD_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    GIL_FIELD_NUMBER: _ClassVar[int]
    COMPLETE_FIELD_NUMBER: _ClassVar[int]
    FRAMES_FIELD_NUMBER: _ClassVar[int]
    NATIVE_MISSING_FIELD_NUMBER: _ClassVar[int]
    TRAINS_FIELD_NUMBER: _ClassVar[int]
    job: str
    run: str
    rank: int
    pid: int
    start_ns: int
    tid: int
    thread: str
    state: str
    gil: bool
    complete: bool
    frames: _containers.RepeatedCompositeFieldContainer[Frame]
    native_missing: str
    trains: bool
    def __init__(self, job: _Optional[str] = ..., run: _Optional[str] = ..., rank: _Optional[int] = ..., pid: _Optional[int] = ..., start_ns: _Optional[int] = ..., tid: _Optional[int] = ..., thread: _Optional[str] = ..., state: _Optional[str] = ..., gil: _Optional[bool] = ..., complete: _Optional[bool] = ..., frames: _Optional[_Iterable[_Union[Frame, _Mapping]]] = ..., native_missing: _Optional[str] = ..., trains: _Optional[bool] = ...) -> None: ...

class Frame(_message.Message):
    __slots__ = ("func", "file", "lineno", "frame_type", "ip", "locals")
    FUNC_FIELD_NUMBER: _ClassVar[int]
    FILE_FIELD_NUMBER: _ClassVar[int]
    LINENO_FIELD_NUMBER: _ClassVar[int]
    FRAME_TYPE_FIELD_NUMBER: _ClassVar[int]
    IP_FIELD_NUMBER: _ClassVar[int]
    LOCALS_FIELD_NUMBER: _ClassVar[int]
    func: str
    file: str
    lineno: int
    frame_type: str
    ip: int
    locals: _containers.RepeatedCompositeFieldContainer[Variable]
    def __init__(self, func: _Optional[str] = ..., file: _Optional[str] = ..., lineno: _Optional[int] = ..., frame_type: _Optional[str] = ..., ip: _Optional[int] = ..., locals: _Optional[_Iterable[_Union[Variable, _Mapping]]] = ...) -> None: ...

class Variable(_message.Message):
    __slots__ = ("name", "type", "value", "number", "reason")
    NAME_FIELD_NUMBER: _ClassVar[int]
    TYPE_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    name: str
    type: str
    value: str
    number: float
    reason: str
    def __init__(self, name: _Optional[str] = ..., type: _Optional[str] = ..., value: _Optional[str] = ..., number: _Optional[float] = ..., reason: _Optional[str] = ...) -> None: ...

class VarsRequest(_message.Message):
    __slots__ = ("pids", "job", "timeout_ms", "names")
    PIDS_FIELD_NUMBER: _ClassVar[int]
    JOB_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_MS_FIELD_NUMBER: _ClassVar[int]
    NAMES_FIELD_NUMBER: _ClassVar[int]
    pids: _containers.RepeatedScalarFieldContainer[int]
    job: str
    timeout_ms: int
    names: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, pids: _Optional[_Iterable[int]] = ..., job: _Optional[str] = ..., timeout_ms: _Optional[int] = ..., names: _Optional[_Iterable[str]] = ...) -> None: ...

class VarsReply(_message.Message):
    __slots__ = ("node", "values", "failures")
    NODE_FIELD_NUMBER: _ClassVar[int]
    VALUES_FIELD_NUMBER: _ClassVar[int]
    FAILURES_FIELD_NUMBER: _ClassVar[int]
    node: str
    values: _containers.RepeatedCompositeFieldContainer[Value]
    failures: _containers.RepeatedCompositeFieldContainer[TargetFailure]
    def __init__(self, node: _Optional[str] = ..., values: _Optional[_Iterable[_Union[Value, _Mapping]]] = ..., failures: _Optional[_Iterable[_Union[TargetFailure, _Mapping]]] = ...) -> None: ...

class Value(_message.Message):
    __slots__ = ("job", "run", "rank", "pid", "start_ns", "tid", "func", "variable")
    JOB_FIELD_NUMBER: _ClassVar[int]
    RUN_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    START_NS_FIELD_NUMBER: _ClassVar[int]
    TID_FIELD_NUMBER: _ClassVar[int]
    FUNC_FIELD_NUMBER: _ClassVar[int]
    VARIABLE_FIELD_NUMBER: _ClassVar[int]
    job: str
    run: str
    rank: int
    pid: int
    start_ns: int
    tid: int
    func: str
    variable: Variable
    def __init__(self, job: _Optional[str] = ..., run: _Optional[str] = ..., rank: _Optional[int] = ..., pid: _Optional[int] = ..., start_ns: _Optional[int] = ..., tid: _Optional[int] = ..., func: _Optional[str] = ..., variable: _Optional[_Union[Variable, _Mapping]] = ...) -> None: ...

class AnnotateRequest(_message.Message):
    __slots__ = ("labels", "pids", "job", "rank")
    class LabelsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    LABELS_FIELD_NUMBER: _ClassVar[int]
    PIDS_FIELD_NUMBER: _ClassVar[int]
    JOB_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    labels: _containers.ScalarMap[str, str]
    pids: _containers.RepeatedScalarFieldContainer[int]
    job: str
    rank: int
    def __init__(self, labels: _Optional[_Mapping[str, str]] = ..., pids: _Optional[_Iterable[int]] = ..., job: _Optional[str] = ..., rank: _Optional[int] = ...) -> None: ...

class AnnotateReply(_message.Message):
    __slots__ = ("node", "ranks")
    NODE_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    node: str
    ranks: int
    def __init__(self, node: _Optional[str] = ..., ranks: _Optional[int] = ...) -> None: ...

class EvalRequest(_message.Message):
    __slots__ = ("pids", "job", "rank", "code", "timeout_ms", "limit_ms", "session", "ends")
    PIDS_FIELD_NUMBER: _ClassVar[int]
    JOB_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    CODE_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_MS_FIELD_NUMBER: _ClassVar[int]
    LIMIT_MS_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    ENDS_FIELD_NUMBER: _ClassVar[int]
    pids: _containers.RepeatedScalarFieldContainer[int]
    job: str
    rank: int
    code: str
    timeout_ms: int
    limit_ms: int
    session: str
    ends: bool
    def __init__(self, pids: _Optional[_Iterable[int]] = ..., job: _Optional[str] = ..., rank: _Optional[int] = ..., code: _Optional[str] = ..., timeout_ms: _Optional[int] = ..., limit_ms: _Optional[int] = ..., session: _Optional[str] = ..., ends: _Optional[bool] = ...) -> None: ...

class EvalReply(_message.Message):
    __slots__ = ("node", "results", "failures")
    NODE_FIELD_NUMBER: _ClassVar[int]
    RESULTS_FIELD_NUMBER: _ClassVar[int]
    FAILURES_FIELD_NUMBER: _ClassVar[int]
    node: str
    results: _containers.RepeatedCompositeFieldContainer[Evaluated]
    failures: _containers.RepeatedCompositeFieldContainer[TargetFailure]
    def __init__(self, node: _Optional[str] = ..., results: _Optional[_Iterable[_Union[Evaluated, _Mapping]]] = ..., failures: _Optional[_Iterable[_Union[TargetFailure, _Mapping]]] = ...) -> None: ...

class Evaluated(_message.Message):
    __slots__ = ("job", "run", "rank", "pid", "start_ns", "value", "type", "output", "dropped", "seconds", "raised", "stops", "longest_stop_us")
    JOB_FIELD_NUMBER: _ClassVar[int]
    RUN_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    START_NS_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    TYPE_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_FIELD_NUMBER: _ClassVar[int]
    DROPPED_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    RAISED_FIELD_NUMBER: _ClassVar[int]
    STOPS_FIELD_NUMBER: _ClassVar[int]
    LONGEST_STOP_US_FIELD_NUMBER: _ClassVar[int]
    job: str
    run: str
    rank: int
    pid: int
    start_ns: int
    value: str
    type: str
    output: str
    dropped: int
    seconds: float
    raised: Raised
    stops: int
    longest_stop_us: int
    def __init__(self, job: _Optional[str] = ..., run: _Optional[str] = ..., rank: _Optional[int] = ..., pid: _Optional[int] = ..., start_ns: _Optional[int] = ..., value: _Optional[str] = ..., type: _Optional[str] = ..., output: _Optional[str] = ..., dropped: _Optional[int] = ..., seconds: _Optional[float] = ..., raised: _Optional[_Union[Raised, _Mapping]] = ..., stops: _Optional[int] = ..., longest_stop_us: _Optional[int] = ...) -> None: ...

class Raised(_message.Message):
    __slots__ = ("type", "message", "frames")
    TYPE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    FRAMES_FIELD_NUMBER: _ClassVar[int]
    type: str
    message: str
    frames: _containers.RepeatedCompositeFieldContainer[CodeFrame]
    def __init__(self, type: _Optional[str] = ..., message: _Optional[str] = ..., frames: _Optional[_Iterable[_Union[CodeFrame, _Mapping]]] = ...) -> None: ...

class CodeFrame(_message.Message):
    __slots__ = ("file", "line", "function")
    FILE_FIELD_NUMBER: _ClassVar[int]
    LINE_FIELD_NUMBER: _ClassVar[int]
    FUNCTION_FIELD_NUMBER: _ClassVar[int]
    file: str
    line: int
    function: str
    def __init__(self, file: _Optional[str] = ..., line: _Optional[int] = ..., function: _Optional[str] = ...) -> None: ...

class TargetFailure(_message.Message):
    __slots__ = ("pid", "rank", "job", "error")
    PID_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    JOB_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    pid: int
    rank: int
    job: str
    error: Error
    def __init__(self, pid: _Optional[int] = ..., rank: _Optional[int] = ..., job: _Optional[str] = ..., error: _Optional[_Union[Error, _Mapping]] = ...) -> None: ...

class StatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StatusReply(_message.Message):
    __slots__ = ("node", "version", "instance", "state", "reason", "started_ns", "node_time_ns", "sources", "store_bytes", "processes", "boot_id", "engine", "notices")
    NODE_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    STARTED_NS_FIELD_NUMBER: _ClassVar[int]
    NODE_TIME_NS_FIELD_NUMBER: _ClassVar[int]
    SOURCES_FIELD_NUMBER: _ClassVar[int]
    STORE_BYTES_FIELD_NUMBER: _ClassVar[int]
    PROCESSES_FIELD_NUMBER: _ClassVar[int]
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    ENGINE_FIELD_NUMBER: _ClassVar[int]
    NOTICES_FIELD_NUMBER: _ClassVar[int]
    node: str
    version: str
    instance: str
    state: str
    reason: str
    started_ns: int
    node_time_ns: int
    sources: _containers.RepeatedCompositeFieldContainer[Source]
    store_bytes: int
    processes: int
    boot_id: str
    engine: str
    notices: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, node: _Optional[str] = ..., version: _Optional[str] = ..., instance: _Optional[str] = ..., state: _Optional[str] = ..., reason: _Optional[str] = ..., started_ns: _Optional[int] = ..., node_time_ns: _Optional[int] = ..., sources: _Optional[_Iterable[_Union[Source, _Mapping]]] = ..., store_bytes: _Optional[int] = ..., processes: _Optional[int] = ..., boot_id: _Optional[str] = ..., engine: _Optional[str] = ..., notices: _Optional[_Iterable[str]] = ...) -> None: ...

class Source(_message.Message):
    __slots__ = ("name", "state", "reason", "rows", "lost", "detail")
    NAME_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    LOST_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    name: str
    state: str
    reason: str
    rows: int
    lost: int
    detail: str
    def __init__(self, name: _Optional[str] = ..., state: _Optional[str] = ..., reason: _Optional[str] = ..., rows: _Optional[int] = ..., lost: _Optional[int] = ..., detail: _Optional[str] = ...) -> None: ...

class PeersRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class PeersReply(_message.Message):
    __slots__ = ("peers",)
    PEERS_FIELD_NUMBER: _ClassVar[int]
    peers: _containers.RepeatedCompositeFieldContainer[Peer]
    def __init__(self, peers: _Optional[_Iterable[_Union[Peer, _Mapping]]] = ...) -> None: ...

class Peer(_message.Message):
    __slots__ = ("node", "address", "state", "labels", "since_ns", "problem", "proof", "bound", "named")
    class LabelsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    NODE_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    LABELS_FIELD_NUMBER: _ClassVar[int]
    SINCE_NS_FIELD_NUMBER: _ClassVar[int]
    PROBLEM_FIELD_NUMBER: _ClassVar[int]
    PROOF_FIELD_NUMBER: _ClassVar[int]
    BOUND_FIELD_NUMBER: _ClassVar[int]
    NAMED_FIELD_NUMBER: _ClassVar[int]
    node: str
    address: str
    state: str
    labels: _containers.ScalarMap[str, str]
    since_ns: int
    problem: str
    proof: str
    bound: bool
    named: bool
    def __init__(self, node: _Optional[str] = ..., address: _Optional[str] = ..., state: _Optional[str] = ..., labels: _Optional[_Mapping[str, str]] = ..., since_ns: _Optional[int] = ..., problem: _Optional[str] = ..., proof: _Optional[str] = ..., bound: _Optional[bool] = ..., named: _Optional[bool] = ...) -> None: ...

class PauseRequest(_message.Message):
    __slots__ = ("paused",)
    PAUSED_FIELD_NUMBER: _ClassVar[int]
    paused: bool
    def __init__(self, paused: _Optional[bool] = ...) -> None: ...

class PauseReply(_message.Message):
    __slots__ = ("paused",)
    PAUSED_FIELD_NUMBER: _ClassVar[int]
    paused: bool
    def __init__(self, paused: _Optional[bool] = ...) -> None: ...

class ConfigRequest(_message.Message):
    __slots__ = ("key", "value", "job", "pid", "for_ms", "persist", "reset", "yes", "propose_value", "propose_reset")
    KEY_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    JOB_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    FOR_MS_FIELD_NUMBER: _ClassVar[int]
    PERSIST_FIELD_NUMBER: _ClassVar[int]
    RESET_FIELD_NUMBER: _ClassVar[int]
    YES_FIELD_NUMBER: _ClassVar[int]
    PROPOSE_VALUE_FIELD_NUMBER: _ClassVar[int]
    PROPOSE_RESET_FIELD_NUMBER: _ClassVar[int]
    key: str
    value: str
    job: str
    pid: int
    for_ms: int
    persist: bool
    reset: bool
    yes: bool
    propose_value: str
    propose_reset: bool
    def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ..., job: _Optional[str] = ..., pid: _Optional[int] = ..., for_ms: _Optional[int] = ..., persist: _Optional[bool] = ..., reset: _Optional[bool] = ..., yes: _Optional[bool] = ..., propose_value: _Optional[str] = ..., propose_reset: _Optional[bool] = ...) -> None: ...

class ConfigReply(_message.Message):
    __slots__ = ("node", "settings", "effect")
    NODE_FIELD_NUMBER: _ClassVar[int]
    SETTINGS_FIELD_NUMBER: _ClassVar[int]
    EFFECT_FIELD_NUMBER: _ClassVar[int]
    node: str
    settings: _containers.RepeatedCompositeFieldContainer[Setting]
    effect: Deletion
    def __init__(self, node: _Optional[str] = ..., settings: _Optional[_Iterable[_Union[Setting, _Mapping]]] = ..., effect: _Optional[_Union[Deletion, _Mapping]] = ...) -> None: ...

class Deletion(_message.Message):
    __slots__ = ("segments", "rows", "bytes", "begins_ns")
    SEGMENTS_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    BEGINS_NS_FIELD_NUMBER: _ClassVar[int]
    segments: int
    rows: int
    bytes: int
    begins_ns: int
    def __init__(self, segments: _Optional[int] = ..., rows: _Optional[int] = ..., bytes: _Optional[int] = ..., begins_ns: _Optional[int] = ...) -> None: ...

class Setting(_message.Message):
    __slots__ = ("key", "value", "default", "job", "pid", "until_ns", "persisted", "doc", "deletes")
    KEY_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    DEFAULT_FIELD_NUMBER: _ClassVar[int]
    JOB_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    UNTIL_NS_FIELD_NUMBER: _ClassVar[int]
    PERSISTED_FIELD_NUMBER: _ClassVar[int]
    DOC_FIELD_NUMBER: _ClassVar[int]
    DELETES_FIELD_NUMBER: _ClassVar[int]
    key: str
    value: str
    default: str
    job: str
    pid: int
    until_ns: int
    persisted: bool
    doc: str
    deletes: Deletion
    def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ..., default: _Optional[str] = ..., job: _Optional[str] = ..., pid: _Optional[int] = ..., until_ns: _Optional[int] = ..., persisted: _Optional[bool] = ..., doc: _Optional[str] = ..., deletes: _Optional[_Union[Deletion, _Mapping]] = ...) -> None: ...

class FactsRequest(_message.Message):
    __slots__ = ("job", "timeout_ms", "run", "hardware", "shallow", "connections")
    JOB_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_MS_FIELD_NUMBER: _ClassVar[int]
    RUN_FIELD_NUMBER: _ClassVar[int]
    HARDWARE_FIELD_NUMBER: _ClassVar[int]
    SHALLOW_FIELD_NUMBER: _ClassVar[int]
    CONNECTIONS_FIELD_NUMBER: _ClassVar[int]
    job: str
    timeout_ms: int
    run: str
    hardware: bool
    shallow: bool
    connections: bool
    def __init__(self, job: _Optional[str] = ..., timeout_ms: _Optional[int] = ..., run: _Optional[str] = ..., hardware: _Optional[bool] = ..., shallow: _Optional[bool] = ..., connections: _Optional[bool] = ...) -> None: ...

class FactsReply(_message.Message):
    __slots__ = ("node", "facts", "received_ns", "addresses", "peers")
    NODE_FIELD_NUMBER: _ClassVar[int]
    FACTS_FIELD_NUMBER: _ClassVar[int]
    RECEIVED_NS_FIELD_NUMBER: _ClassVar[int]
    ADDRESSES_FIELD_NUMBER: _ClassVar[int]
    PEERS_FIELD_NUMBER: _ClassVar[int]
    node: str
    facts: _containers.RepeatedScalarFieldContainer[bytes]
    received_ns: int
    addresses: _containers.RepeatedScalarFieldContainer[str]
    peers: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, node: _Optional[str] = ..., facts: _Optional[_Iterable[bytes]] = ..., received_ns: _Optional[int] = ..., addresses: _Optional[_Iterable[str]] = ..., peers: _Optional[_Iterable[str]] = ...) -> None: ...

class RecordRequest(_message.Message):
    __slots__ = ("findings",)
    FINDINGS_FIELD_NUMBER: _ClassVar[int]
    findings: bytes
    def __init__(self, findings: _Optional[bytes] = ...) -> None: ...

class RecordReply(_message.Message):
    __slots__ = ("node", "taken")
    NODE_FIELD_NUMBER: _ClassVar[int]
    TAKEN_FIELD_NUMBER: _ClassVar[int]
    node: str
    taken: int
    def __init__(self, node: _Optional[str] = ..., taken: _Optional[int] = ...) -> None: ...

class AwaitFindingRequest(_message.Message):
    __slots__ = ("job", "stored", "wait_ms")
    JOB_FIELD_NUMBER: _ClassVar[int]
    STORED_FIELD_NUMBER: _ClassVar[int]
    WAIT_MS_FIELD_NUMBER: _ClassVar[int]
    job: str
    stored: int
    wait_ms: int
    def __init__(self, job: _Optional[str] = ..., stored: _Optional[int] = ..., wait_ms: _Optional[int] = ...) -> None: ...

class AwaitFindingReply(_message.Message):
    __slots__ = ("node", "stored")
    NODE_FIELD_NUMBER: _ClassVar[int]
    STORED_FIELD_NUMBER: _ClassVar[int]
    node: str
    stored: int
    def __init__(self, node: _Optional[str] = ..., stored: _Optional[int] = ...) -> None: ...

class PreflightRequest(_message.Message):
    __slots__ = ("timeout_ms", "python", "master_addr", "master_port", "peers", "job", "bandwidth")
    TIMEOUT_MS_FIELD_NUMBER: _ClassVar[int]
    PYTHON_FIELD_NUMBER: _ClassVar[int]
    MASTER_ADDR_FIELD_NUMBER: _ClassVar[int]
    MASTER_PORT_FIELD_NUMBER: _ClassVar[int]
    PEERS_FIELD_NUMBER: _ClassVar[int]
    JOB_FIELD_NUMBER: _ClassVar[int]
    BANDWIDTH_FIELD_NUMBER: _ClassVar[int]
    timeout_ms: int
    python: str
    master_addr: str
    master_port: int
    peers: _containers.RepeatedScalarFieldContainer[str]
    job: str
    bandwidth: bool
    def __init__(self, timeout_ms: _Optional[int] = ..., python: _Optional[str] = ..., master_addr: _Optional[str] = ..., master_port: _Optional[int] = ..., peers: _Optional[_Iterable[str]] = ..., job: _Optional[str] = ..., bandwidth: _Optional[bool] = ...) -> None: ...

class SinkRequest(_message.Message):
    __slots__ = ("data",)
    DATA_FIELD_NUMBER: _ClassVar[int]
    data: bytes
    def __init__(self, data: _Optional[bytes] = ...) -> None: ...

class SinkReply(_message.Message):
    __slots__ = ("received_bytes",)
    RECEIVED_BYTES_FIELD_NUMBER: _ClassVar[int]
    received_bytes: int
    def __init__(self, received_bytes: _Optional[int] = ...) -> None: ...

class PreflightReply(_message.Message):
    __slots__ = ("node", "facts", "received_ns", "node_time_ns")
    NODE_FIELD_NUMBER: _ClassVar[int]
    FACTS_FIELD_NUMBER: _ClassVar[int]
    RECEIVED_NS_FIELD_NUMBER: _ClassVar[int]
    NODE_TIME_NS_FIELD_NUMBER: _ClassVar[int]
    node: str
    facts: bytes
    received_ns: int
    node_time_ns: int
    def __init__(self, node: _Optional[str] = ..., facts: _Optional[bytes] = ..., received_ns: _Optional[int] = ..., node_time_ns: _Optional[int] = ...) -> None: ...

class GossipRequest(_message.Message):
    __slots__ = ("message",)
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    message: GossipMessage
    def __init__(self, message: _Optional[_Union[GossipMessage, _Mapping]] = ...) -> None: ...

class GossipReply(_message.Message):
    __slots__ = ("message",)
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    message: GossipMessage
    def __init__(self, message: _Optional[_Union[GossipMessage, _Mapping]] = ...) -> None: ...

class GossipMessage(_message.Message):
    __slots__ = ("sender", "wall_ns", "updates", "digests", "buckets", "marks", "wanted", "relay", "reached", "nonce", "proof", "relayed")
    SENDER_FIELD_NUMBER: _ClassVar[int]
    WALL_NS_FIELD_NUMBER: _ClassVar[int]
    UPDATES_FIELD_NUMBER: _ClassVar[int]
    DIGESTS_FIELD_NUMBER: _ClassVar[int]
    BUCKETS_FIELD_NUMBER: _ClassVar[int]
    MARKS_FIELD_NUMBER: _ClassVar[int]
    WANTED_FIELD_NUMBER: _ClassVar[int]
    RELAY_FIELD_NUMBER: _ClassVar[int]
    REACHED_FIELD_NUMBER: _ClassVar[int]
    NONCE_FIELD_NUMBER: _ClassVar[int]
    PROOF_FIELD_NUMBER: _ClassVar[int]
    RELAYED_FIELD_NUMBER: _ClassVar[int]
    sender: MemberRecord
    wall_ns: int
    updates: _containers.RepeatedCompositeFieldContainer[MemberUpdate]
    digests: _containers.RepeatedScalarFieldContainer[int]
    buckets: _containers.RepeatedScalarFieldContainer[int]
    marks: _containers.RepeatedScalarFieldContainer[int]
    wanted: _containers.RepeatedScalarFieldContainer[int]
    relay: str
    reached: bool
    nonce: bytes
    proof: bytes
    relayed: bytes
    def __init__(self, sender: _Optional[_Union[MemberRecord, _Mapping]] = ..., wall_ns: _Optional[int] = ..., updates: _Optional[_Iterable[_Union[MemberUpdate, _Mapping]]] = ..., digests: _Optional[_Iterable[int]] = ..., buckets: _Optional[_Iterable[int]] = ..., marks: _Optional[_Iterable[int]] = ..., wanted: _Optional[_Iterable[int]] = ..., relay: _Optional[str] = ..., reached: _Optional[bool] = ..., nonce: _Optional[bytes] = ..., proof: _Optional[bytes] = ..., relayed: _Optional[bytes] = ...) -> None: ...

class MemberRecord(_message.Message):
    __slots__ = ("name", "address", "incarnation", "uid", "labels", "jobs", "version", "engine", "key", "signature")
    class LabelsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    NAME_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    UID_FIELD_NUMBER: _ClassVar[int]
    LABELS_FIELD_NUMBER: _ClassVar[int]
    JOBS_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    ENGINE_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    name: str
    address: str
    incarnation: int
    uid: int
    labels: _containers.ScalarMap[str, str]
    jobs: _containers.RepeatedScalarFieldContainer[int]
    version: str
    engine: str
    key: bytes
    signature: bytes
    def __init__(self, name: _Optional[str] = ..., address: _Optional[str] = ..., incarnation: _Optional[int] = ..., uid: _Optional[int] = ..., labels: _Optional[_Mapping[str, str]] = ..., jobs: _Optional[_Iterable[int]] = ..., version: _Optional[str] = ..., engine: _Optional[str] = ..., key: _Optional[bytes] = ..., signature: _Optional[bytes] = ...) -> None: ...

class MemberUpdate(_message.Message):
    __slots__ = ("record", "claim", "since_s")
    RECORD_FIELD_NUMBER: _ClassVar[int]
    CLAIM_FIELD_NUMBER: _ClassVar[int]
    SINCE_S_FIELD_NUMBER: _ClassVar[int]
    record: MemberRecord
    claim: int
    since_s: int
    def __init__(self, record: _Optional[_Union[MemberRecord, _Mapping]] = ..., claim: _Optional[int] = ..., since_s: _Optional[int] = ...) -> None: ...

class WorkReport(_message.Message):
    __slots__ = ("number", "workers", "version", "pid", "rows", "logs")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    LOGS_FIELD_NUMBER: _ClassVar[int]
    number: int
    workers: _containers.RepeatedScalarFieldContainer[str]
    version: str
    pid: int
    rows: bytes
    logs: _containers.RepeatedCompositeFieldContainer[LogPart]
    def __init__(self, number: _Optional[int] = ..., workers: _Optional[_Iterable[str]] = ..., version: _Optional[str] = ..., pid: _Optional[int] = ..., rows: _Optional[bytes] = ..., logs: _Optional[_Iterable[_Union[LogPart, _Mapping]]] = ...) -> None: ...

class WorkOrder(_message.Message):
    __slots__ = ("group", "leased", "generation", "report", "log", "master")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    LEASED_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    REPORT_FIELD_NUMBER: _ClassVar[int]
    LOG_FIELD_NUMBER: _ClassVar[int]
    MASTER_FIELD_NUMBER: _ClassVar[int]
    group: bytes
    leased: str
    generation: int
    report: int
    log: LogWanted
    master: str
    def __init__(self, group: _Optional[bytes] = ..., leased: _Optional[str] = ..., generation: _Optional[int] = ..., report: _Optional[int] = ..., log: _Optional[_Union[LogWanted, _Mapping]] = ..., master: _Optional[str] = ...) -> None: ...

class LogWanted(_message.Message):
    __slots__ = ("id", "group", "rank")
    ID_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    FROM_FIELD_NUMBER: _ClassVar[int]
    id: int
    group: str
    rank: int
    def __init__(self, id: _Optional[int] = ..., group: _Optional[str] = ..., rank: _Optional[int] = ..., **kwargs) -> None: ...

class LogPart(_message.Message):
    __slots__ = ("id", "data", "end", "problem")
    ID_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    PROBLEM_FIELD_NUMBER: _ClassVar[int]
    id: int
    data: bytes
    end: int
    problem: str
    def __init__(self, id: _Optional[int] = ..., data: _Optional[bytes] = ..., end: _Optional[int] = ..., problem: _Optional[str] = ...) -> None: ...

class GroupLogRequest(_message.Message):
    __slots__ = ("name", "rank")
    NAME_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    FROM_FIELD_NUMBER: _ClassVar[int]
    name: str
    rank: int
    def __init__(self, name: _Optional[str] = ..., rank: _Optional[int] = ..., **kwargs) -> None: ...

class GroupLogReply(_message.Message):
    __slots__ = ("node", "data", "end")
    NODE_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    node: str
    data: bytes
    end: int
    def __init__(self, node: _Optional[str] = ..., data: _Optional[bytes] = ..., end: _Optional[int] = ...) -> None: ...

class GroupRequest(_message.Message):
    __slots__ = ("name", "create", "order", "stop")
    NAME_FIELD_NUMBER: _ClassVar[int]
    CREATE_FIELD_NUMBER: _ClassVar[int]
    ORDER_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    name: str
    create: bytes
    order: bytes
    stop: bool
    def __init__(self, name: _Optional[str] = ..., create: _Optional[bytes] = ..., order: _Optional[bytes] = ..., stop: _Optional[bool] = ...) -> None: ...

class GroupReply(_message.Message):
    __slots__ = ("node", "groups")
    NODE_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    node: str
    groups: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, node: _Optional[str] = ..., groups: _Optional[_Iterable[bytes]] = ...) -> None: ...

class AgreeRequest(_message.Message):
    __slots__ = ("group", "id", "prepare", "accept", "learn", "lease", "rows", "port")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    ID_FIELD_NUMBER: _ClassVar[int]
    PREPARE_FIELD_NUMBER: _ClassVar[int]
    ACCEPT_FIELD_NUMBER: _ClassVar[int]
    LEARN_FIELD_NUMBER: _ClassVar[int]
    LEASE_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    PORT_FIELD_NUMBER: _ClassVar[int]
    group: str
    id: str
    prepare: Ballot
    accept: Proposal
    learn: Proposal
    lease: int
    rows: bool
    port: int
    def __init__(self, group: _Optional[str] = ..., id: _Optional[str] = ..., prepare: _Optional[_Union[Ballot, _Mapping]] = ..., accept: _Optional[_Union[Proposal, _Mapping]] = ..., learn: _Optional[_Union[Proposal, _Mapping]] = ..., lease: _Optional[int] = ..., rows: _Optional[bool] = ..., port: _Optional[int] = ...) -> None: ...

class Ballot(_message.Message):
    __slots__ = ("counter", "node")
    COUNTER_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    counter: int
    node: str
    def __init__(self, counter: _Optional[int] = ..., node: _Optional[str] = ...) -> None: ...

class Proposal(_message.Message):
    __slots__ = ("ballot", "record", "base")
    BALLOT_FIELD_NUMBER: _ClassVar[int]
    RECORD_FIELD_NUMBER: _ClassVar[int]
    BASE_FIELD_NUMBER: _ClassVar[int]
    ballot: Ballot
    record: bytes
    base: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, ballot: _Optional[_Union[Ballot, _Mapping]] = ..., record: _Optional[bytes] = ..., base: _Optional[_Iterable[str]] = ...) -> None: ...

class AgreeReply(_message.Message):
    __slots__ = ("node", "agrees", "promised", "accepted", "committed", "rows", "port")
    NODE_FIELD_NUMBER: _ClassVar[int]
    AGREES_FIELD_NUMBER: _ClassVar[int]
    PROMISED_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    PORT_FIELD_NUMBER: _ClassVar[int]
    node: str
    agrees: bool
    promised: Ballot
    accepted: Proposal
    committed: Proposal
    rows: bytes
    port: int
    def __init__(self, node: _Optional[str] = ..., agrees: _Optional[bool] = ..., promised: _Optional[_Union[Ballot, _Mapping]] = ..., accepted: _Optional[_Union[Proposal, _Mapping]] = ..., committed: _Optional[_Union[Proposal, _Mapping]] = ..., rows: _Optional[bytes] = ..., port: _Optional[int] = ...) -> None: ...

class Error(_message.Message):
    __slots__ = ("kind", "message", "hint", "code", "reason")
    KIND_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    HINT_FIELD_NUMBER: _ClassVar[int]
    CODE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    kind: str
    message: str
    hint: str
    code: str
    reason: str
    def __init__(self, kind: _Optional[str] = ..., message: _Optional[str] = ..., hint: _Optional[str] = ..., code: _Optional[str] = ..., reason: _Optional[str] = ...) -> None: ...
