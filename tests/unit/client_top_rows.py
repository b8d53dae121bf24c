"""Rows as nodes answer them, for the tests of the screen of ``top``."""

from __future__ import annotations

from typing import Any

from probing.client.top.health import Absent, Fetched, NodeRows
from probing.client.top.model import Model, View

SECOND = 1_000_000_000
Row = dict[str, Any]


def rank(number: int, *, node: str = "a", job: str = "j", world: int = 4) -> Row:
    return {
        "node": node,
        "job": job,
        "run": "r",
        "rank": number,
        "local_rank": number,
        "world_size": world,
        "pid": 100 + number,
        "start_ns": 7,
        "state": "running",
        "command": "python train.py",
    }


def progress(number: int, calls: int, now_s: float, *, node: str = "a", late_ns: int = 0) -> Row:
    now = int(now_s * SECOND)
    return {
        "node": node,
        "job": "j",
        "run": "r",
        "pid": 100 + number,
        "start_ns": 7,
        "comm": "c",
        "size": 4,
        "rank": number,
        "seq": calls,
        "calls": calls,
        "call_ns": now - SECOND + late_ns,
        "now_ns": now,
    }


def inflight(number: int, age_s: float, *, node: str = "a") -> Row:
    return {
        "node": node,
        "job": "j",
        "run": "r",
        "comm": "c",
        "comm_name": "c",
        "size": 4,
        "comm_rank": number,
        "rank": number,
        "pid": 100 + number,
        "op": "all_reduce",
        "seq": 9,
        "age_ns": int(age_s * SECOND),
    }


def finding(state: str, ts: str, *, severity: str = "error", verdict: str = "not_joined", job: str = "j") -> Row:
    return {
        "node": "a",
        "job": job,
        "run": "r",
        "finding_id": "f",
        "ts": ts,
        "verdict": verdict,
        "severity": severity,
        "state": state,
        "confidence": 0.9,
        "sentence": "rank 1 is late",
        "ranks": "1",
        "victims": "0,2-3",
        "opened": "2026-11-22T03:12:07Z",
    }


def gpu(at: float, used: float, *, uuid: str = "G", **more: Any) -> Row:
    return {
        "node": "a",
        "at": int(at * SECOND),
        "device_id": 0,
        "uuid": uuid,
        "mig": None,
        "name": "H100",
        "total_bytes": 80,
        "used_bytes": 40,
        "gpu_util_pct": used,
        "sm_active_pct": 3.0,
        "temperature_c": 60.0,
        "power_w": 300.0,
        "power_limit_w": 700.0,
        "sm_clock_mhz": 1980,
        "clock_event_reasons": "",
        **more,
    }


def use(number: int, uuid: str = "G") -> Row:
    return {
        "node": "a",
        "pid": 100 + number,
        "start_ns": 7,
        "uuid": uuid,
        "device_id": 0,
        "used_bytes": 30,
        "sm_pct": 5,
    }


def fetched(at: float, *absent: Absent, **rows: list[Row]) -> Fetched:
    """An answer of node ``a``, unless it is absent."""
    return Fetched(at, () if absent else (NodeRows("addr", "a", rows),), absent)


def update(model: Model, at: float = 0.0, **rows: list[Row]) -> View:
    return model.update(fetched(at, **rows), {})
