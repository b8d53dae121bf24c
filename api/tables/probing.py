"""Tables of the daemon itself: sources, lost rows, costs, tables and columns."""

from __future__ import annotations

from probing.api.tables.schema import F64, I32, I64, NAME, TEXT, TIME, Column, Table, stored

__all__ = (
    "AUDIT",
    "COLUMN_DOCS",
    "CONFIG",
    "COST",
    "LOSSES",
    "SETTINGS",
    "SOURCES",
    "STORE",
    "TABLE_DOCS",
    "VERSIONS",
    "VIEWS",
)

_NODE = (
    Column("node", NAME, "Name of the node."),
    Column("ts", TIME, "When the row was written, UTC."),
)

SOURCES = Table(
    "probing.sources",
    "The sources of the daemon, and the state of each (live).",
    (
        *_NODE,
        Column("source", NAME, "Name of the source."),
        Column("state", NAME, "running, degraded, paused or stopped."),
        Column("reason", TEXT, "Why the source is not running."),
        Column("rows", I64, "Number of rows that the source made since the daemon started."),
        Column("lost", I64, "Number of rows that are known to be lost since the daemon started."),
        Column("detail", TEXT, "What the source is attached to."),
    ),
)

_LOSS_COLUMNS = (
    *_NODE,
    Column("source", NAME, "Source whose rows were lost."),
    Column("table_name", NAME, "Table in which rows are missing."),
    Column("stage", NAME, "Where rows were lost: attach, kernel, ring, assembly, log or store."),
    Column("reason", TEXT, "Why the rows are missing."),
    Column("pid", I32, "Process whose rows are missing; NULL for all processes."),
    Column("ts_from", TIME, "Begin of the interval in which rows may be missing, UTC."),
    Column("ts_to", TIME, "End of the interval in which rows may be missing, UTC."),
    Column("count", I64, "Number of rows lost; NULL if unknown."),
)

LOSSES = Table(
    "probing.losses",
    "Gaps: intervals in which rows are or may be missing. Counts over such an interval may be too low.",
    _LOSS_COLUMNS,
    stored(_LOSS_COLUMNS),
)

_COST_COLUMNS = (
    *_NODE,
    Column(
        "process",
        NAME,
        "What used the resources: collector, reader, service or worker (processes of the daemon), or probes (the time"
        " that probes and samples take from jobs).",
    ),
    Column("pid", I32, "Process id; NULL for probes."),
    Column("cpu_ns", I64, "CPU time since the previous row of this process, ns."),
    Column("rss_bytes", I64, "Resident memory, bytes; NULL for probes."),
    Column("hits", I64, "Number of probe hits since the previous row; NULL for processes."),
    Column("net_bytes", I64, "Always NULL: it is not measured; only rows of earlier versions have values."),
    Column("cpu_pct", F64, "CPU time in the interval as per cent of one core."),
)

COST = Table("probing.cost", "What the daemon itself costs: CPU time and memory.", _COST_COLUMNS, stored(_COST_COLUMNS))

_AUDIT_COLUMNS = (
    *_NODE,
    Column("job", NAME, "Job of the process; empty if the process has none."),
    Column("run", NAME, "The run of the job."),
    Column("rank", I32, "Rank of the process; NULL if the process has none."),
    Column("pid", I32, "Process in which code was to be run."),
    Column("start_ns", I64, "When the process started, ns since boot."),
    Column("caller", TEXT, "Who asked: the user of the socket, or the name of the token or certificate."),
    Column("action", NAME, "Requested action: eval."),
    Column("state", NAME, "begun in the first row of a request; ended, failed or refused in the second row."),
    Column("code", TEXT, "First 1,000 characters of the code."),
    Column("result", TEXT, "Why the code failed or was refused, or which exception it raised; else empty."),
)

AUDIT = Table(
    "probing.audit",
    "Code that callers asked to run in processes: a row when the request came, and a row when it had ended, failed or"
    " been refused.",
    _AUDIT_COLUMNS,
    stored(_AUDIT_COLUMNS),
)

STORE = Table(
    "probing.store",
    "What the state directory contains: the segments of each table, and the log (live).",
    (
        *_NODE,
        Column("kind", NAME, "segments, or log (for rows that are not yet in a segment)."),
        Column("table_name", NAME, "Table that the segments belong to; NULL for the log."),
        Column("files", I64, "Number of segments, or of parts of the log."),
        Column("bytes", I64, "Size of the segments, or of the log, bytes."),
        Column("rows", I64, "Number of rows in the segments; NULL for the log."),
        Column("oldest", TIME, "Smallest ts of the rows, UTC; NULL for the log."),
    ),
)

TABLE_DOCS = Table(
    "probing.table_docs",
    "All tables, with their descriptions (live).",
    (
        *_NODE,
        Column("table_schema", TEXT, "Schema of the table, the part of the name before the dot."),
        Column("table_name", TEXT, "Name of the table within its schema."),
        Column("description", TEXT, "Description of the table."),
        Column(
            "live",
            TEXT,
            "`yes` for a table whose rows are made when a query names the table, `view` for a view, else `no`.",
        ),
        Column("synonyms", TEXT, "Always NULL: probingd keeps no synonyms of tables, unlike Probing."),
        Column("notes", TEXT, "For a view, the tables that its rows are computed from; else NULL."),
        Column("global_name", TEXT, "Name under which a query reads the table on all nodes: global.SCHEMA.NAME."),
    ),
)

COLUMN_DOCS = Table(
    "probing.column_docs",
    "All columns of all tables, with their descriptions (live).",
    (
        *_NODE,
        Column("table_schema", TEXT, "Schema of the table, the part of the name before the dot."),
        Column("table_name", TEXT, "Name of the table within its schema."),
        Column("column_name", TEXT, "Name of the column."),
        Column("type", TEXT, "Arrow type of the column."),
        Column("description", TEXT, "Description of the column."),
    ),
)

VIEWS = Table(
    "probing.views",
    "The views that users wrote, named view.NAME, with their SQL (live).",
    (
        *_NODE,
        Column("name", TEXT, "Name of the view, without the prefix `view.`"),
        Column("sql", TEXT, "SELECT of the view; NULL if the view cannot be used (see problem)."),
        Column("doc", TEXT, "First comment lines of the view's file."),
        Column("problem", TEXT, "Why the view cannot be used; NULL if it can be used."),
    ),
)

SETTINGS = Table(
    "probing.settings",
    "Current settings, including settings that were changed for single jobs or processes (live).",
    (
        *_NODE,
        Column("key", TEXT, "Name of the setting."),
        Column("value", TEXT, "Value of the setting, written as in a configuration file."),
        Column("default", TEXT, "Default value of the setting."),
        Column("job", TEXT, "Job for which the setting holds; empty for all jobs."),
        Column("pid", I32, "Process for which the setting holds; 0 for all processes."),
        Column("doc", TEXT, "Description of the setting."),
    ),
)

CONFIG = Table(
    "probing.config",
    "All options with which the daemon was started, whether set in the file, set on the command line or left at the"
    " default (live).",
    (
        *_NODE,
        Column("key", TEXT, "Name of the option in a configuration file."),
        Column("value", TEXT, "Value of the option; `(set)` if the option is set and may hold a secret."),
        Column("default", TEXT, "Default value of the option."),
        Column("doc", TEXT, "Description of the option."),
    ),
)

VERSIONS = Table(
    "probing.versions",
    "Versions of the daemon, its libraries, and the system on which it runs (live).",
    (
        *_NODE,
        Column("name", NAME, "Component: probingd, kernel, distribution, machine, python, or a library."),
        Column("version", TEXT, "Version of the component; NULL if not yet known."),
    ),
)
