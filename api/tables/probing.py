"""The daemon's own state: sources, losses, costs, tables and columns."""

from __future__ import annotations

from probing.api.tables.schema import F64, I32, I64, NAME, TEXT, TIME, Column, Table, stored

__all__ = (
    "AUDIT",
    "COLUMN_DOCS",
    "CONFIG",
    "COST",
    "LOSSES",
    "MEMBERS",
    "SETTINGS",
    "SOURCES",
    "STORE",
    "TABLE_DOCS",
    "VERSIONS",
    "VIEWS",
)

_NODE = (
    Column("node", NAME, "Name of the node."),
    Column("ts", TIME, "When the row was made, UTC."),
)

SOURCES = Table(
    "probing.sources",
    "What the daemon collects from, and how each source is (live).",
    (
        *_NODE,
        Column("source", NAME, "Name of the source."),
        Column("state", NAME, "running, degraded, paused or stopped."),
        Column("reason", TEXT, "Why it is not running."),
        Column("rows", I64, "Rows that it made since the daemon started."),
        Column("lost", I64, "Rows that it knows it lost since the daemon started."),
        Column("detail", TEXT, "What it is attached to."),
    ),
)

_LOSS_COLUMNS = (
    *_NODE,
    Column("source", NAME, "Source that lost rows."),
    Column("table_name", NAME, "Table whose rows are missing."),
    Column("stage", NAME, "Where: attach, kernel, ring, assembly, log or store."),
    Column("reason", TEXT, "Why the rows are missing."),
    Column("pid", I32, "Process concerned; NULL for all."),
    Column("ts_from", TIME, "Start of the interval in which rows may be missing, UTC."),
    Column("ts_to", TIME, "End of that interval, UTC."),
    Column("count", I64, "Rows lost; NULL when it cannot be known."),
)

LOSSES = Table(
    "probing.losses",
    "Gaps: rows that are missing for sure or possibly, so that no count is silently short.",
    _LOSS_COLUMNS,
    stored(_LOSS_COLUMNS),
)

_COST_COLUMNS = (
    *_NODE,
    Column("process", NAME, "collector, reader, service, worker or probes (what probes and samples cost the jobs)."),
    Column("pid", I32, "Process id; NULL for probes."),
    Column("cpu_ns", I64, "CPU time since the last row of this process, ns."),
    Column("rss_bytes", I64, "Resident memory; NULL for probes."),
    Column("hits", I64, "Probe hits since the last row; NULL for processes."),
    Column("net_bytes", I64, "NULL: it is not measured. The column is kept for what earlier versions stored."),
    Column("cpu_pct", F64, "CPU time as a share of one core over the interval, percent."),
)

COST = Table("probing.cost", "What the daemon itself costs.", _COST_COLUMNS, stored(_COST_COLUMNS))

_AUDIT_COLUMNS = (
    *_NODE,
    Column("job", NAME, "Job of the process; empty if it has none."),
    Column("run", NAME, "Launch of the job."),
    Column("rank", I32, "Rank of the process; NULL if it has none."),
    Column("pid", I32, "Process in which code was to be run."),
    Column("start_ns", I64, "When the process started, ns since boot."),
    Column("caller", TEXT, "Who asked: the user of the socket, or the name of the token or certificate."),
    Column("action", NAME, "What was asked for: eval."),
    Column("state", NAME, "begun, and later ended, failed or refused."),
    Column("code", TEXT, "The code, its first 1,000 characters."),
    Column("result", TEXT, "Why it failed or was refused, or the exception that the code raised; else empty."),
)

AUDIT = Table(
    "probing.audit",
    "Code that callers had run in processes: a row when it was asked for, and one when it was over.",
    _AUDIT_COLUMNS,
    stored(_AUDIT_COLUMNS),
)

STORE = Table(
    "probing.store",
    "What the state directory holds: the segments of each table, and the log (live).",
    (
        *_NODE,
        Column("kind", NAME, "segments, or log for the rows that are not sealed yet."),
        Column("table_name", NAME, "Table of the segments; NULL for the log."),
        Column("files", I64, "Segments, or parts of the log."),
        Column("bytes", I64, "Their bytes."),
        Column("rows", I64, "Their rows; NULL for the log."),
        Column("oldest", TIME, "First ts of the rows, UTC; NULL for the log."),
    ),
)

TABLE_DOCS = Table(
    "probing.table_docs",
    "Every table, with its description (live).",
    (
        *_NODE,
        Column("table_schema", TEXT, "Schema of the table."),
        Column("table_name", TEXT, "Name of the table in its schema."),
        Column("description", TEXT, "What it holds."),
        Column("live", TEXT, "yes for a table that is filled when a query names it, view for a view, else no."),
        Column("synonyms", TEXT, "Other words for it, as Probing has them; NULL: none are kept."),
        Column("notes", TEXT, "For a view, the tables that its rows come from; else NULL."),
        Column("global_name", TEXT, "Its name for the rows of all nodes: global.SCHEMA.NAME."),
    ),
)

COLUMN_DOCS = Table(
    "probing.column_docs",
    "Every column of every table, with its description (live).",
    (
        *_NODE,
        Column("table_schema", TEXT, "Schema of the table."),
        Column("table_name", TEXT, "Name of the table in its schema."),
        Column("column_name", TEXT, "Name of the column."),
        Column("type", TEXT, "Arrow type of the column."),
        Column("description", TEXT, "What it means."),
    ),
)

VIEWS = Table(
    "probing.views",
    "The views that users wrote, view.NAME, with their SQL (live).",
    (
        *_NODE,
        Column("name", TEXT, "Name of the view behind view."),
        Column("sql", TEXT, "Its SELECT; NULL where it cannot be used, see problem."),
        Column("doc", TEXT, "Its first comment lines."),
        Column("problem", TEXT, "Why it cannot be used; NULL where it can."),
    ),
)

SETTINGS = Table(
    "probing.settings",
    "Settings as they hold now, and those that were changed for single jobs or processes (live).",
    (
        *_NODE,
        Column("key", TEXT, "Name of the setting."),
        Column("value", TEXT, "Its value, as a configuration file would have it."),
        Column("default", TEXT, "Its value where nothing sets it."),
        Column("job", TEXT, "Job that it holds for; empty: all."),
        Column("pid", I32, "Process that it holds for; 0: all."),
        Column("doc", TEXT, "What it sets."),
    ),
)

CONFIG = Table(
    "probing.config",
    "The configuration that the daemon was started with: every option, by file, command line or default (live).",
    (
        *_NODE,
        Column("key", TEXT, "Name of the option, as a configuration file has it."),
        Column("value", TEXT, "Its value; (set) for one that may hold a secret."),
        Column("default", TEXT, "Its default."),
        Column("doc", TEXT, "What it means."),
    ),
)

VERSIONS = Table(
    "probing.versions",
    "Versions of the daemon, of what it runs on, and of its libraries (live).",
    (
        *_NODE,
        Column("name", NAME, "probingd, kernel, distribution, machine, python, or a library."),
        Column("version", TEXT, "Its version; NULL while not known."),
    ),
)

MEMBERS = Table(
    "cluster.members",
    "Nodes that this daemon knows, itself included (live).",
    (
        *_NODE,
        Column("member", TEXT, "Name of the node; empty for a seed that has not answered."),
        Column("address", TEXT, "Where it is asked."),
        Column("state", NAME, "healthy, suspect, failed, recovering, or unknown for a seed that has not answered."),
        Column("version", TEXT, "Version of its daemon; NULL while not known."),
        Column("since", TIME, "When the state began, as far as this daemon knows, UTC."),
        Column("incarnation", I64, "Rises when the node starts, changes, or refutes what others claim of it."),
        Column("labels", TEXT, "Its labels, as rack=r7,rail=2, in the order of their keys."),
        Column("engine", TEXT, "Version of DuckDB that answers its queries; NULL while not known."),
        Column("heard_ns", I64, "Time since it answered this daemon; NULL where it was not asked."),
        Column("rtt_ns", I64, "Time from the last ping to its answer; NULL where none was answered."),
        Column("clock_offset_ns", I64, "Its clock minus this node's, within half of rtt_ns; NULL where not measured."),
        Column("problem", TEXT, "Another node of its name, a clock that is off; NULL where there is none."),
        Column(
            "proof",
            NAME,
            "What proves its name to this daemon: certificate, key, or heard (a key that has not answered it yet); "
            "NULL: nothing, its version has no keys.",
        ),
    ),
)
