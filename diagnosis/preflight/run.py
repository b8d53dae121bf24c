"""Runs the checks, which are listed here in the order in which their results are shown."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from probing.diagnosis.preflight import hosts, network, ranks
from probing.diagnosis.preflight.facts import Case
from probing.diagnosis.preflight.result import FAIL, Result

__all__ = ("CHECKS", "failed", "results")

CHECKS: tuple[Callable[[Case], Iterator[Result]], ...] = (
    network.check_nodes,
    hosts.check_versions,
    ranks.check_variables,
    ranks.check_numbers,
    network.check_interfaces,
    network.check_master,
    hosts.check_shared_memory,
    hosts.check_disks,
    hosts.check_gpus,
    hosts.check_health,
    network.check_infiniband,
    network.check_clocks,
    network.check_round_trips,
    network.check_bandwidth,
)


def results(case: Case) -> list[Result]:
    """Returns the results of all checks."""
    return [result for check in CHECKS for result in check(case)]


def failed(found: list[Result]) -> bool:
    """Returns whether a check failed, so that the job should not be started."""
    return any(result.state == FAIL for result in found)
