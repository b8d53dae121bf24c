"""Gathers the facts of this node for one request: each part separately, and all parts before the deadline."""

from __future__ import annotations

import asyncio
import math
import os
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar

from probing.api.errors import ProbingError, TargetTimeout, UsageError
from probing.api.tables import TABLES
from probing.api.text import sql_text
from probing.daemon.diagnose.gather.tables import Row, query_rows
from probing.daemon.ipc import ChannelTimeout, connect
from probing.daemon.query.engine import Engine
from probing.daemon.service.names import OF_CALLERS
from probing.daemon.service.preflight import network
from probing.daemon.service.preflight.bandwidth import Bandwidth
from probing.diagnosis.preflight.facts import (
    Device,
    FileSystem,
    Interface,
    Master,
    NodeFacts,
    NodeRank,
    Port,
    Problem,
    Reached,
    Transfer,
    Variable,
    Version,
)

__all__ = (
    "Asked",
    "Interpreters",
    "Preflight",
)

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


class _Found:
    """The facts in the rows that the SQL of preflight returned."""

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


def _read_tables(queries: Engine, job: str, deadline: float) -> _Found:
    """Returns the facts from tables. A table that was not read by ``deadline`` (time.monotonic()) is a problem in the
    facts.
    """
    wanted = {name: sql for name, (tables, sql) in _STATEMENTS.items() if TABLES.keys() >= set(tables)}
    if job:
        wanted |= {"ranks": _RANKS.format(job=sql_text(job)), "variables": _VARIABLES.format(job=sql_text(job))}
    rows, missing = query_rows(queries, wanted, deadline)
    return _Found(rows, list(_problems(wanted, rows, [one.text for one in missing])))


def _problems(wanted: Mapping[str, str], rows: Mapping[str, Sequence[Row]], texts: Sequence[str]) -> Iterator[Problem]:
    for name in wanted:
        if name not in rows:
            own = [one for one in texts if f"the {name} " in one] or list(texts) or ["no answer"]
            yield Problem({"gpu_values": "gpus", "variables": "ranks"}.get(name, name), own[0])


def _made(kind: type[_T], row: Mapping[str, Any]) -> _T:
    """Returns a ``kind``, a dataclass, with the values of the columns that have the names of its fields."""
    values = {field.name: row.get(field.name) for field in fields(kind)}  # type: ignore[arg-type]
    return kind(**{name: None if isinstance(v, float) and not math.isfinite(v) else v for name, v in values.items()})


CONNECT_S = 2.0
NAMES = ("python", "torch", "cuda", "nccl")
MAX_PATH = 4096
MAX_VALUE = 100

# The time before the deadline, s, at which a part that is not yet gathered counts as missing.
MARGIN_S = 0.3
MAX_FILE = 4096
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_DRIVER = Path("/sys/module/nvidia/version")


@dataclass(frozen=True, slots=True)
class Asked:
    """The parts that a request asks for. ``refused``: problems about parts for which the caller has no scope."""

    python: str = ""
    master: tuple[str, int] | None = None
    peers: tuple[str, ...] = ()
    unmeasured: tuple[Reached, ...] = ()
    bandwidth: bool = False
    job: str = ""
    refused: tuple[Problem, ...] = field(default_factory=tuple)


class Preflight:
    """Gathers facts. Belongs to one event loop. Blocking parts run in separate threads, so that they delay no other
    call.
    """

    def __init__(
        self, node: str, queries: Engine, interpreters: Interpreters, bandwidth: Bandwidth | None = None
    ) -> None:
        self._node = node
        self._queries = queries
        self._interpreters = interpreters
        self.bandwidth = bandwidth or Bandwidth(0)
        self._threads = ThreadPoolExecutor(8, thread_name_prefix="preflight")

    def close(self) -> None:
        """Closes the thread pool, without waiting for running threads."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def facts(self, asked: Asked, timeout: float) -> NodeFacts:
        """Returns the facts; a part that fails or is late becomes a problem in the facts."""
        limit = time.monotonic() + timeout - MARGIN_S
        if asked.bandwidth:
            return await self._transfers(asked, limit - time.monotonic())
        problems: list[Problem] = list(asked.refused)

        def in_thread(function: Callable[[], _T]) -> Awaitable[_T]:
            return asyncio.get_running_loop().run_in_executor(self._threads, function)

        async def part(what: str, running: Awaitable[_T], default: _T) -> _T:
            try:
                return await asyncio.wait_for(running, max(limit - time.monotonic(), 0.01))
            except asyncio.TimeoutError:
                problems.append(Problem(what, "it took too long"))
            except ProbingError as e:
                problems.append(Problem(what, e.message))
            except OSError as e:
                problems.append(Problem(what, e.strerror or str(e)))
            return default

        empty: tuple[Interface, ...] = ()
        nothing: Master | None = None
        versions: list[Version] = []
        found, interfaces, master, of_python, of_node, reached = await asyncio.gather(
            part("tables", in_thread(lambda: _read_tables(self._queries, asked.job, limit)), _Found({}, ())),
            part("interfaces", in_thread(network.interfaces), empty),
            part("master", OF_CALLERS.run(lambda: network.master(*asked.master) if asked.master else nothing), nothing),
            part("versions", in_thread(lambda: self._versions(asked.python, limit)), versions),
            part("kernel", in_thread(_own_versions), versions),
            network.round_trips(asked.peers, limit - time.monotonic()),
        )
        if late := [problem for problem in problems if problem.what == "tables"]:
            names = ("gpus", "ports", "file_systems", "ranks")
            problems += [Problem(name, late[0].why) for name in names]
        driver = [Version("driver", found.driver)] if found.driver else []
        return NodeFacts(
            self._node,
            boot_id=_text(_BOOT_ID),
            versions=tuple({v.name: v for v in (*driver, *of_python, *of_node)}.values()),
            interfaces=interfaces,
            ports=found.ports,
            file_systems=found.file_systems,
            devices=found.devices,
            master=master,
            reached=(*reached, *asked.unmeasured),
            ranks=found.ranks,
            problems=(*problems, *found.problems),
        )

    async def _transfers(self, asked: Asked, seconds: float) -> NodeFacts:
        """Returns only the facts of bandwidth: no other part is gathered, so that the node is quiet."""
        try:
            transfers = await self.bandwidth.transfers(asked.peers, seconds)
        except ProbingError as e:
            transfers = tuple(Transfer(peer, why=e.message) for peer in asked.peers)
        strange = (Transfer(one.address, why=one.why) for one in asked.unmeasured)
        return NodeFacts(self._node, transfers=(*transfers, *strange))

    def _versions(self, python: str, limit: float) -> list[Version]:
        return self._interpreters.versions(python, max(limit - time.monotonic(), 0.1)) if python else []


def _own_versions() -> list[Version]:
    driver = _text(_DRIVER)
    return [Version("kernel", os.uname().release), *([Version("driver", driver)] if driver else [])]


def _text(path: Path) -> str:
    try:
        with path.open() as file:
            return file.read(MAX_FILE).strip()
    except OSError:
        return ""


class Interpreters:
    """Runs interpreters in confined processes (``daemon/confined/interpreter.py``). Each connection to the socket
    ``path`` starts a process for one request."""

    def __init__(self, path: str) -> None:
        self._path = path

    def versions(self, python: str, timeout: float) -> list[Version]:
        """Returns the versions that the interpreter at the path ``python`` prints. Raises TargetError, UsageError."""
        if not python.startswith("/") or len(python) > MAX_PATH or "\0" in python:
            raise UsageError(f"{python[:80]!r} is not the path of an interpreter")
        begun = time.monotonic()
        try:
            with connect(self._path, min(CONNECT_S, timeout)) as channel:
                header = {"op": "versions", "python": python, "deadline": begun + 0.85 * timeout}
                answer = channel.request(header, timeout=timeout)
        except ChannelTimeout:
            raise TargetTimeout(f"{python} did not answer within {timeout:.0f} s") from None
        answer.close_fds()
        found = answer.header.get("versions") or {}
        return [Version(name, str(found[name])[:MAX_VALUE]) for name in NAMES if found.get(name)]
