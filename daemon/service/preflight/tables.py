"""Makes the facts that tables have: GPUs, RDMA ports, file systems, interfaces, ranks. One request to the engine."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Any, TypeVar

from probing.api.tables import TABLES
from probing.api.text import sql_text
from probing.daemon.diagnose.gather.tables import Queries, Row, query_rows
from probing.diagnosis.preflight.facts import Device, FileSystem, NodeRank, Port, Problem, Variable

__all__ = ("Found", "read_tables")

_T = TypeVar("_T")
_RECENT = "ts > now() - INTERVAL 5 MINUTE"
_MOST = 4096
_STATEMENTS = {
    "gpus": (
        ("gpu.devices",),
        f"""
SELECT device_id, uuid, mig, name, state, reason, total_bytes, driver_version FROM gpu.devices LIMIT {_MOST}
""",
    ),
    "gpu_values": (
        ("gpu.utilization",),
        f"""
SELECT uuid, temperature_c, clock_event_reasons, ecc_uncorrected, remap_pending, remap_failed, retirement_pending,
  recovery_action
FROM gpu.utilization WHERE {_RECENT} QUALIFY row_number() OVER (PARTITION BY uuid ORDER BY ts DESC) = 1 LIMIT {_MOST}
""",
    ),
    "ports": (
        ("rdma.ports",),
        f"""
SELECT hca, port, link_layer, state, phys_state, rate_gbps
FROM rdma.ports WHERE {_RECENT} QUALIFY row_number() OVER (PARTITION BY hca, port ORDER BY ts DESC) = 1 LIMIT {_MOST}
""",
    ),
    "file_systems": (
        ("host.file_systems",),
        f"""
SELECT mount_point, fs_type, answers, read_only, size_bytes, available_bytes, inodes, inodes_used
FROM host.file_systems WHERE {_RECENT} AND job IS NULL
QUALIFY row_number() OVER (PARTITION BY mount_point ORDER BY ts DESC) = 1 LIMIT {_MOST}
""",
    ),
}
_RANKS = """
SELECT rank, local_rank, world_size, node_rank, pid, start_ns, coalesce(pod, container) AS box
FROM process.processes WHERE role = 'trainer' AND state <> 'exited' AND job = {job} LIMIT 4096
"""
_VARIABLES = "SELECT pid, start_ns, name, value FROM process.envs WHERE job = {job} LIMIT 65536"


class Found:
    """The rows of the statements, as facts."""

    def __init__(self, rows: Mapping[str, Sequence[Row]], problems: Sequence[Problem]) -> None:
        self.problems = tuple(problems)
        values = {row["uuid"]: row for row in rows.get("gpu_values", ())}
        self.devices = tuple(_made(Device, {**values.get(row["uuid"], {}), **row}) for row in rows.get("gpus", ()))
        self.ports = tuple(_made(Port, row) for row in rows.get("ports", ()))
        self.file_systems = tuple(_made(FileSystem, row) for row in rows.get("file_systems", ()))
        self.driver = next((str(v) for row in rows.get("gpus", ()) if (v := row.get("driver_version"))), "")
        variables: dict[tuple[int, int], list[Variable]] = {}
        for row in rows.get("variables", ()):
            variables.setdefault((row["pid"], row["start_ns"]), []).append(Variable(row["name"], row["value"] or ""))
        self.ranks = tuple(
            NodeRank(
                row["rank"],
                row["local_rank"],
                row["world_size"],
                row["node_rank"],
                row["pid"],
                row.get("box") or "",
                tuple(variables.get((row["pid"], row["start_ns"]), ())),
            )
            for row in rows.get("ranks", ())
        )


def read_tables(queries: Queries, job: str, deadline: float) -> Found:
    """Returns the facts of tables. What cannot be read by ``deadline`` (time.monotonic()) is a problem in them."""
    wanted = {name: sql for name, (tables, sql) in _STATEMENTS.items() if TABLES.keys() >= set(tables)}
    if job:
        wanted |= {"ranks": _RANKS.format(job=sql_text(job)), "variables": _VARIABLES.format(job=sql_text(job))}
    rows, missing = query_rows(queries, wanted, deadline)
    return Found(rows, list(_problems(wanted, rows, [one.text for one in missing])))


def _problems(wanted: Mapping[str, str], rows: Mapping[str, Sequence[Row]], texts: Sequence[str]) -> Iterator[Problem]:
    for name in wanted:
        if name not in rows:
            own = [one for one in texts if f"the {name} " in one] or list(texts) or ["no answer"]
            yield Problem({"gpu_values": "gpus", "variables": "ranks"}.get(name, name), own[0])


def _made(kind: type[_T], row: Mapping[str, Any]) -> _T:
    """Returns the dataclass with the values of the columns of its names."""
    values = {field.name: row.get(field.name) for field in fields(kind)}  # type: ignore[arg-type]
    return kind(**{name: None if isinstance(v, float) and not math.isfinite(v) else v for name, v in values.items()})
