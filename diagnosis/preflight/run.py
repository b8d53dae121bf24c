"""Runs the checks: the one list of them, in the order in which their results are shown."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from probing.diagnosis.preflight.checks import (
    bandwidth,
    clocks,
    devices,
    disk,
    gpu_health,
    infiniband,
    interface,
    master,
    nodes,
    ranks,
    round_trips,
    shared_memory,
    variables,
    versions,
)
from probing.diagnosis.preflight.facts import Case
from probing.diagnosis.preflight.result import FAIL, Result

__all__ = ("CHECKS", "failed", "results")

CHECKS: tuple[Callable[[Case], Iterator[Result]], ...] = (
    nodes.check,
    versions.check,
    variables.check,
    ranks.check,
    interface.check,
    master.check,
    shared_memory.check,
    disk.check,
    devices.check,
    gpu_health.check,
    infiniband.check,
    clocks.check,
    round_trips.check,
    bandwidth.check,
)


def results(case: Case) -> list[Result]:
    """Returns what each check found."""
    return [result for check in CHECKS for result in check(case)]


def failed(found: list[Result]) -> bool:
    """Whether the job should not be started: a check failed."""
    return any(result.state == FAIL for result in found)
