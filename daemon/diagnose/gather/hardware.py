"""Reads the stored rows about the hardware of this node, and makes the facts of the hardware for one run of a job."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from probing.api.text import sql_text
from probing.daemon.diagnose.gather.processes import Key
from probing.daemon.diagnose.gather.tables import Row, Rows
from probing.diagnosis.hardware_facts import (
    Disk,
    FileSystem,
    Gpu,
    Hardware,
    HardwareEvent,
    NetworkPath,
    NetworkPort,
)
from probing.diagnosis.xids import NVLINK_CODES

__all__ = ("LIVE", "hardware_of", "hardware_statements")

LIVE = ("gpu.devices", "rdma.qps")
"""Live tables that ``hardware_of`` reads."""
_SECOND_NS = 1_000_000_000
# How far back values, increases of counters, and events are read, ns.
_VALUES_NS, _RISES_NS, _EVENTS_NS = 60 * _SECOND_NS, 120 * _SECOND_NS, 3600 * _SECOND_NS
_USUAL = "'ecc_single_bit', 'pstate', 'clocks', 'power_source', 'throttled', 'unthrottled', 'link_up', 'gpu_back'"
# Kinds of kernel lines that are left out, because they show no fault of the hardware. Other rules judge ended
# processes.
_OF_PROGRAMS = "'other', 'oom', 'oom_kill', 'segfault', 'page_allocation', 'link_up'"
_RISING = (
    "link_downed",
    "link_error_recovery",
    "symbol_error",
    "port_rcv_errors",
    "port_rcv_remote_physical_errors",
    "local_link_integrity_errors",
    "excessive_buffer_overrun_errors",
    "local_ack_timeout_err",
    "out_of_sequence",
    "packet_seq_err",
    "port_xmit_discards",
)
_LONGEST = 200


def hardware_statements(job: str, until_ns: int) -> dict[str, str]:
    """Returns the statements by name. ``until_ns``: now, or the end of a job that ended, UTC."""

    def since(ns: int) -> str:
        return f"ts BETWEEN make_timestamp_ns({max(until_ns - ns, 0)}) AND make_timestamp_ns({max(until_ns, 0)})"

    of_job = f"job = {sql_text(job)}"
    nvlink = f"kind = 'xid' AND code BETWEEN {min(NVLINK_CODES)} AND {max(NVLINK_CODES)}"
    # A disk has no rows for the time in which it is idle, so its share is taken of at least the whole window.
    whole = f"CASE WHEN sum(wall_ns) > {_VALUES_NS} THEN sum(wall_ns) ELSE {_VALUES_NS} END"
    rises = ", ".join(f"sum({name}_new) AS {name}" for name in _RISING)
    return {
        "readings of GPUs": f"""
SELECT device_id, arg_max(name, ts) AS name, avg(gpu_util_pct) / 100 AS busy, median(sm_clock_mhz) AS clock_mhz,
  max(temperature_c) AS temperature_c, sum(power_capped_ns) / sum(wall_ns) AS power_capped,
  (coalesce(sum(sw_thermal_ns), 0) + coalesce(sum(hw_thermal_ns), 0)) / sum(wall_ns) AS thermal,
  sum(power_brake_ns) / sum(wall_ns) AS power_brake, arg_max(remap_pending, ts) AS remap_pending,
  arg_max(remap_failed, ts) AS remap_failed, arg_max(remapped_uncorrected, ts) AS remapped_uncorrected,
  arg_max(retired_pages_dbe, ts) + coalesce(arg_max(retired_pages_sbe, ts), 0) AS retired_pages,
  arg_max(recovery_action, ts) AS recovery, arg_max(total_bytes, ts) AS total_bytes,
  bool_or(CASE WHEN nvlink_rx_bytes_per_s IS NOT NULL THEN true END) AS counts_nvlink
FROM gpu.utilization WHERE {since(_VALUES_NS)} AND mig IS NULL GROUP BY device_id ORDER BY device_id LIMIT 64
""",
        "events of GPUs": f"""
SELECT event AS kind, xid AS code, device_id, epoch_ns(min(ts)) AS first_ns, epoch_ns(max(ts)) AS last_ns,
  count(*) AS count, arg_max(detail, ts) AS text
FROM gpu.events WHERE {since(_EVENTS_NS)} AND event NOT IN ({_USUAL}) GROUP BY kind, code, device_id
ORDER BY last_ns DESC LIMIT 128
""",
        "users of GPUs": f"""
SELECT DISTINCT pid, start_ns, device_id FROM gpu.processes WHERE {since(_RISES_NS)} AND {of_job} LIMIT 4096
""",
        "log of the kernel": f"""
SELECT kind, device, CASE WHEN kind = 'xid' THEN code END AS code, epoch_ns(min(ts)) AS first_ns,
  epoch_ns(max(ts)) AS last_ns, count(*) AS count,
  arg_max(message, CASE WHEN {nvlink} THEN -epoch_ns(ts) ELSE epoch_ns(ts) END) AS text, arg_max(pid, ts) AS pid,
  CASE WHEN {nvlink} THEN regexp_extract(message, '[A-Z][A-Z0-9_/]+ +(?:Link )?(?:Fatal|Nonfatal)') END AS error
FROM process.kmsg WHERE {since(_EVENTS_NS)} AND kind NOT IN ({_OF_PROGRAMS}) GROUP BY ALL
ORDER BY last_ns DESC LIMIT 128
""",
        "ports of RDMA": f"""
SELECT hca, port, arg_max(netdev, ts) AS netdev, arg_max(state, ts) AS state, arg_max(phys_state, ts) AS physical_state,
  sum(interval_ns) / 1e9 AS seconds, {rises}
FROM rdma.ports WHERE {since(_RISES_NS)} GROUP BY hca, port ORDER BY hca, port LIMIT 64
""",
        "connections": f"""
SELECT pid, start_ns, peer_address AS peer, sum(segs_out) AS segments, sum(retrans) AS resent,
  arg_max(longest_timeouts, ts) AS timeouts, arg_max(rtt_ns, ts) AS round_trip_ns, bool_and(peer_local) AS local
FROM net.tcp WHERE {since(_RISES_NS)} AND {of_job} AND role = 'trainer' AND peer_address IS NOT NULL
GROUP BY ALL
ORDER BY resent DESC NULLS LAST LIMIT 1024
""",
        "disks": f"""
SELECT device AS name, sum(busy_ns) / {whole} AS busy, sum(read_ns) / nullif(sum(reads), 0) AS read_latency_ns,
  sum(write_ns) / nullif(sum(writes), 0) AS write_latency_ns, arg_max(in_flight, ts) AS in_flight
FROM host.disk WHERE {since(_VALUES_NS)} AND scope = 'device' GROUP BY device LIMIT 128
""",
        "file systems": f"""
SELECT mount_point, pid, start_ns, arg_max(fs_type, ts) AS kind,
  arg_max(used_bytes / nullif(used_bytes + available_bytes, 0), ts) AS used,
  arg_max(available_bytes, ts) AS available_bytes, arg_max(answers, ts) AS answers, arg_max(read_only, ts) AS read_only
FROM host.file_systems WHERE {since(_RISES_NS)} AND (scope = 'node' OR {of_job}) GROUP BY ALL LIMIT 256
""",
    }


def hardware_of(rows: Rows, live: Rows, ranks: Mapping[Key, int]) -> Hardware:
    """Returns the facts of the hardware, with the ranks that use each part.

    ``rows`` maps the name of each statement, a key of ``hardware_statements()``, to its rows. ``ranks``: the number of
    each rank of the run on this node.
    """
    devices = _numbered(live.get("gpu.devices", ()))
    return Hardware(
        _gpus(rows, devices, ranks),
        _events(rows, devices),
        _ports(rows, live.get("rdma.qps", ()), ranks),
        tuple(_path(row, ranks[Key.of(row)]) for row in rows.get("connections", ()) if Key.of(row) in ranks),
        tuple(Disk(**row) for row in rows.get("disks", ())),
        tuple(_file_systems(rows.get("file systems", ()), ranks)),
    )


def _users(rows: Iterable[Row], ranks: Mapping[Key, int], *names: str) -> Mapping[tuple[Any, ...], tuple[int, ...]]:
    found: defaultdict[tuple[Any, ...], set[int]] = defaultdict(set)
    for row in rows:
        if row["pid"] is not None and row["start_ns"] is not None and Key.of(row) in ranks:
            found[tuple(row[name] for name in names)].add(ranks[Key.of(row)])
    return {part: tuple(sorted(own)) for part, own in found.items()}


def _gpus(rows: Rows, devices: Sequence[Row], ranks: Mapping[Key, int]) -> tuple[Gpu, ...]:
    users = _users(rows.get("users of GPUs", ()), ranks, "device_id")
    readings = {row["device_id"]: row for row in rows.get("readings of GPUs", ())}
    known = {row["device_id"]: row for row in devices if row["mig"] is None}
    made = []
    for device in sorted({*readings, *known}):
        values = {name: value for name, value in readings.get(device, {}).items() if name != "device_id"}
        one = known.get(device, {})
        made.append(
            Gpu(
                **{"name": one.get("name"), "total_bytes": one.get("total_bytes"), **values},
                device=device,
                ranks=users.get((device,), ()),
                state=one.get("state") or "ok",
                reason=_cut(one.get("reason")),
                max_clock_mhz=one.get("max_sm_clock_mhz"),
                lanes=one.get("pcie_width"),
                max_lanes=one.get("pcie_width_max"),
                fabric=_fabric(one),
            )
        )
    return tuple(made[:64])


def _numbered(devices: Sequence[Row]) -> list[Row]:
    """Returns the devices. A device that is gone, and whose number another GPU has now, is left out."""
    listed = {row["device_id"] for row in devices if row["state"] != "gone"}
    return [row for row in devices if row["state"] != "gone" or row["device_id"] not in listed]


def _fabric(device: Row) -> str | None:
    cluster, clique = device.get("fabric_cluster"), device.get("fabric_clique")
    return None if cluster is None or clique is None else f"{cluster}/{clique}"


def _events(rows: Rows, devices: Sequence[Row]) -> tuple[HardwareEvent, ...]:
    # The driver reports an XID to NVML and to the kernel log, and only one report is kept. NVML's event is preferred,
    # because it has the number of the GPU. For errors of NVLink 5 the kernel's line is preferred, because it says more.
    driver, kernel = list(_gpu_events(rows)), list(_kernel_events(rows, devices))
    said = {_xid_of(event) for event in kernel if event.code in NVLINK_CODES and event.gpu is not None}
    known = {_xid_of(event) for event in driver if event.kind == "xid"} - said
    return (
        *(event for event in driver if event.kind != "xid" or _xid_of(event) not in said),
        *(event for event in kernel if event.kind != "xid" or _xid_of(event) not in known),
    )


def _xid_of(event: HardwareEvent) -> tuple[int | None, int | None]:
    return event.gpu, event.code


def _gpu_events(rows: Rows) -> Iterable[HardwareEvent]:
    for row in rows.get("events of GPUs", ()):
        yield HardwareEvent(
            "gpu",
            row["kind"],
            row["first_ns"],
            row["last_ns"],
            row["count"],
            _cut(row["text"]) or "",
            row["device_id"],
            None,
            row["code"],
        )


def _kernel_events(rows: Rows, devices: Sequence[Row]) -> Iterable[HardwareEvent]:
    numbers = {_address(row["bus_id"]): row["device_id"] for row in devices if row["bus_id"]}
    for row in rows.get("log of the kernel", ()):
        gpu = numbers.get(_address(row["device"])) if row["device"] else None
        yield HardwareEvent(
            "kernel",
            row["kind"],
            row["first_ns"],
            row["last_ns"],
            row["count"],
            _cut(row["text"]) or "",
            gpu,
            _cut(row["device"]),
            row["code"],
            row["pid"],
        )


def _address(bus_id: str) -> str:
    """Returns a PCI address without its function and without leading zeros of the domain."""
    return bus_id.lower().partition(".")[0].lstrip("0")


def _ports(rows: Rows, qps: Sequence[Row], ranks: Mapping[Key, int]) -> tuple[NetworkPort, ...]:
    users = _users(qps, ranks, "hca", "port")
    return tuple(
        NetworkPort(
            row["hca"],
            row["port"],
            users.get((row["hca"], row["port"]), ()),
            row["netdev"],
            row["state"],
            row["physical_state"],
            tuple((name, int(row[name])) for name in _RISING if row[name]),
            row["seconds"],
        )
        for row in rows.get("ports of RDMA", ())
    )


def _path(row: Row, rank: int) -> NetworkPath:
    return NetworkPath(
        rank,
        _cut(row["peer"]) or "",
        int(row["segments"] or 0),
        int(row["resent"] or 0),
        int(row["timeouts"] or 0),
        row["round_trip_ns"],
        bool(row["local"]),
    )


def _file_systems(rows: Sequence[Row], ranks: Mapping[Key, int]) -> Iterable[FileSystem]:
    for row in rows:
        own = None if row["pid"] is None else ranks.get(Key.of(row))
        if row["pid"] is None or own is not None:
            yield FileSystem(
                _cut(row["mount_point"]) or "",
                _cut(row["kind"]),
                own,
                row["used"],
                row["available_bytes"],
                row["answers"],
                row["read_only"],
            )


def _cut(value: str | None) -> str | None:
    return None if value is None else value[:_LONGEST]
