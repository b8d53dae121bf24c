"""Findings that restart a group: only of the owner's job, made by this node, and each once."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from fakes import Now
from group_records import NS, running

from probing.daemon.groups.workers import Workers
from probing.daemon.service.group_peers import Entry, Records
from probing.daemon.service.groups import Groups

GROUP = running(on_hang="restart_without_node")
UID = GROUP.spec.uid


def row(**fields: Any) -> dict[str, Any]:
    finding = {"job": GROUP.spec.name, "run": "0", "finding_id": "f1", "found_by": "gn6", "severity": "error"}
    return {**finding, "state": "open", "ranks": "1", "sentence": "rank 1 holds up 1 rank", **fields}


def restarted(*rows: tuple[dict[str, Any], Any]) -> list[str]:
    """Returns the groups that are to be restarted after these findings, each with the owner of its job."""

    async def noted() -> list[str]:
        records = Records(None)  # type: ignore[arg-type]
        records.entries[GROUP.spec.name] = Entry(known=GROUP)
        groups = Groups("gn6", None, records, Workers("gn6", 2, 5))  # type: ignore[arg-type]
        groups._loop = asyncio.get_running_loop()
        for finding, owner in rows:
            groups.finding(finding, owner)
        await asyncio.sleep(0)
        return list(groups._hangs)

    return asyncio.run(noted())


@pytest.mark.parametrize(
    ("finding", "owner", "restarts"),
    [
        (row(), UID, True),
        (row(job=f"{GROUP.spec.name} (uid {UID})"), UID, True),
        # Anybody may start a job that has the name of a group, and let it hang.
        (row(), UID + 1, False),
        (row(job=f"{GROUP.spec.name} (uid {UID + 1})"), UID + 1, False),
        (row(), GROUP.spec.name, False),
        (row(job="another"), UID, False),
        (row(found_by="gn7"), UID, False),
        (row(severity="warning"), UID, False),
        (row(state="closed"), UID, False),
    ],
)
def test_whose_findings_restart_a_group(finding: dict[str, Any], owner: object, restarts: bool) -> None:
    assert restarted((finding, owner)) == [GROUP.spec.name] * restarts


@pytest.mark.parametrize(
    ("verdict", "since_s", "opened_s", "restarts"),
    [
        ("not_joined", -5, -1, False),
        ("rank_died", -1, 2, False),
        ("not_joined", None, -1, False),
        ("not_joined", None, 1, True),
        ("not_joined", 1, 12, True),
        # What is broken may have been so before.
        ("gpu_fault", -5, 12, True),
        ("gpu_fault", -5, -1, False),
    ],
)
@pytest.mark.parametrize("late_s", [0, 20])
def test_what_ended_with_an_earlier_generation_restarts_no_later_one(
    verdict: str, since_s: int | None, opened_s: int, restarts: bool, late_s: int
) -> None:
    async def noted() -> list[str]:
        wall, now = Now(GROUP.since_ns + late_s * NS), Now(50.0)
        records = Records(None)  # type: ignore[arg-type]
        groups = Groups("gn6", None, records, Workers("gn6", 2, 5), now, lambda: round(wall.now))  # type: ignore[arg-type]
        groups._loop = asyncio.get_running_loop()
        records.entries[GROUP.spec.name] = entry = Entry(known=GROUP)
        groups._learned(GROUP.spec.name, entry)
        wall.now, now.now = wall.now + 30 * NS, now.now + 30.0
        times = {"since": since_s, "opened": opened_s}
        found = {name: None if at_s is None else GROUP.since_ns + at_s * NS for name, at_s in times.items()}
        groups.finding(row(verdict=verdict, **found), UID)
        await asyncio.sleep(0)
        return list(groups._hangs)

    assert asyncio.run(noted()) == [GROUP.spec.name] * restarts


def test_the_finding_of_a_stranger_does_not_hide_that_of_the_owner() -> None:
    assert restarted((row(finding_id="s"), UID + 1), (row(), UID)) == [GROUP.spec.name]
