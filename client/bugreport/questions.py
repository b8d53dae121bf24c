"""Lists the SQL questions of a bug report: the columns that are read, and what the report may show of each column."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from probing.client.bugreport.redaction import Kind

__all__ = ("CONFIG", "NAMES", "OPTIONS", "QUESTIONS", "Question")


@dataclass(frozen=True, slots=True)
class Question:
    """A question whose rows become one file. ``source``: the SQL after FROM. Only ``columns`` are read."""

    name: str
    about: str
    columns: Mapping[str, Kind]
    source: str

    @property
    def sql(self) -> str:
        """The SELECT of the question."""
        columns = ", ".join(f'"{column}"' for column in self.columns)
        return f"SELECT {columns} FROM {self.source}"


_NUMBER, _TEXT = Kind.NUMBER, Kind.TEXT

CONFIG = Question(
    "config",
    "configuration that the daemon was started with; (set) stands for values that may hold a secret",
    {"key": Kind.PLAIN, "value": _TEXT, "default": Kind.PLAIN},
    "probing.config",
)
# Questions for names that texts may contain. These names are replaced in all texts; the rows are not written.
NAMES = (
    Question(
        "jobs",
        "",
        {"node": Kind.HOST, "job": Kind.JOB, "run": Kind.RUN, "container": Kind.CONTAINER, "pod": Kind.POD},
        "(SELECT DISTINCT node, job, run, container, pod FROM process.processes) LIMIT 5000",
    ),
    Question(
        "ended",
        "",
        {"job": Kind.JOB, "run": Kind.RUN},
        "(SELECT DISTINCT job, run FROM process.events WHERE ts > now() - INTERVAL 7 DAY) LIMIT 5000",
    ),
)
QUESTIONS = (
    Question(
        "versions",
        "versions of the daemon, its libraries, kernel and distribution",
        {"name": Kind.PLAIN, "version": Kind.PLAIN},
        "probing.versions",
    ),
    Question(
        "python",
        "training processes by role, state, Python and backends",
        {
            "role": _TEXT,
            "state": _TEXT,
            "python": Kind.VERSION,
            "backends": _TEXT,
            "job_source": _TEXT,
            "processes": _NUMBER,
        },
        "(SELECT role, state, python, backends, job_source, count(*) AS processes FROM process.processes"
        " GROUP BY role, state, python, backends, job_source) ORDER BY processes DESC LIMIT 200",
    ),
    Question(
        "gpus",
        "GPUs with driver and CUDA",
        {"name": Kind.PLAIN, "driver_version": Kind.VERSION, "cuda_version": Kind.VERSION, "devices": _NUMBER},
        "(SELECT name, driver_version, cuda_version, count(*) AS devices FROM gpu.devices"
        " WHERE ts > now() - INTERVAL 1 DAY GROUP BY name, driver_version, cuda_version) LIMIT 200",
    ),
    Question(
        "nccl",
        "versions of NCCL that its RAS reported",
        {"nccl_version": Kind.VERSION, "answers": _NUMBER},
        "(SELECT nccl_version, count(*) AS answers FROM comm.ras WHERE ts > now() - INTERVAL 1 DAY"
        " GROUP BY nccl_version) LIMIT 100",
    ),
    CONFIG,
    Question(
        "settings",
        "present settings, with changes for jobs and processes",
        {"key": Kind.PLAIN, "value": _TEXT, "default": _TEXT, "job": Kind.JOB, "pid": _NUMBER},
        "probing.settings LIMIT 1000",
    ),
    Question(
        "losses",
        "gaps: the newest 1,000 rows of probing.losses",
        {
            "ts": _NUMBER,
            "source": _TEXT,
            "table_name": _TEXT,
            "stage": _TEXT,
            "reason": _TEXT,
            "pid": _NUMBER,
            "ts_from": _NUMBER,
            "ts_to": _NUMBER,
            "count": _NUMBER,
        },
        "probing.losses ORDER BY ts DESC LIMIT 1000",
    ),
    Question(
        "cost",
        "CPU and memory of the daemon's processes: the newest 2,000 rows of probing.cost",
        {
            "ts": _NUMBER,
            "process": _TEXT,
            "pid": _NUMBER,
            "cpu_ns": _NUMBER,
            "rss_bytes": _NUMBER,
            "hits": _NUMBER,
            "net_bytes": _NUMBER,
            "cpu_pct": _NUMBER,
        },
        "probing.cost ORDER BY ts DESC LIMIT 2000",
    ),
    Question(
        "store",
        "segments of each table, and the log",
        {"kind": _TEXT, "table_name": _TEXT, "files": _NUMBER, "bytes": _NUMBER, "rows": _NUMBER, "oldest": _NUMBER},
        "probing.store",
    ),
    Question(
        "findings",
        "the newest 200 findings: verdict, times, ranks, evidence without names",
        {
            "ts": _NUMBER,
            "node": Kind.HOST,
            "job": Kind.JOB,
            "run": Kind.RUN,
            "finding_id": Kind.FINDING,
            "verdict": _TEXT,
            "severity": _TEXT,
            "state": _TEXT,
            "confidence": _NUMBER,
            "ranks": _TEXT,
            "victims": _TEXT,
            "nodes": Kind.HOSTS,
            "evidence": Kind.TEXTS,
            "missing": Kind.TEXTS,
            "since": _NUMBER,
            "opened": _NUMBER,
            "closed": _NUMBER,
            "found_by": Kind.HOST,
        },
        "(SELECT * FROM diagnosis.findings"
        " QUALIFY row_number() OVER (PARTITION BY job, run, finding_id ORDER BY ts DESC) = 1)"
        " ORDER BY ts DESC LIMIT 200",
    ),
    Question(
        "members",
        "nodes that the daemon knows: state, version, clock",
        {
            "member": Kind.HOST,
            "address": Kind.ADDRESS,
            "state": _TEXT,
            "version": Kind.VERSION,
            "engine": Kind.VERSION,
            "since": _NUMBER,
            "incarnation": _NUMBER,
            "heard_ns": _NUMBER,
            "rtt_ns": _NUMBER,
            "clock_offset_ns": _NUMBER,
            "problem": _TEXT,
        },
        "cluster.members LIMIT 1000",
    ),
)
# The kinds of options whose values are texts. The value of any other option is shown only if it is the default, a
# number, true or false.
OPTIONS = {
    "node_name": Kind.HOST,
    **dict.fromkeys(("listen", "http", "cluster.seeds", "cluster.advertise"), Kind.ADDRESS),
    **dict.fromkeys(("users.collector", "users.service", "users.worker", "users.group"), Kind.USER),
    **dict.fromkeys(
        (
            "state_dir",
            "socket",
            "runtime_dir",
            "cgroup",
            "token_file",
            "tls.cert",
            "tls.key",
            "tls.client_ca",
            "tls.peer_ca",
            "query.views_dir",
            "probes.bpffs",
            "probes.recordings",
            "probes.user_dir",
            "host.kernel_log",
            "net.sysfs",
            "gpu.library",
            "gpu.sysfs",
        ),
        Kind.PATH,
    ),
    **dict.fromkeys(
        (
            "instance",
            "cluster.labels",
            "variables.watch",
            "logs.patterns",
            "store.table_max_bytes",
            "store.table_max_age_days",
        ),
        Kind.TEXT,
    ),
}
