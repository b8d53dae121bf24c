"""Calls that wait for the next finding of a job."""

from __future__ import annotations

import asyncio

from probing.daemon.service.stored_findings import StoredFindings

LONG_S = 30.0


async def rounds() -> None:
    """Lets everything that is scheduled run."""
    for _ in range(10):
        await asyncio.sleep(0)


def test_a_row_answers_the_calls_about_its_job() -> None:
    async def scene() -> None:
        findings = StoredFindings()
        calls = {job: asyncio.ensure_future(findings.beyond(job, 0, LONG_S)) for job in ("j1", "j2")}
        await rounds()
        await asyncio.to_thread(findings.note, {"job": "j1", "sentence": "rank 1 waits"})
        assert await calls["j1"] == 1
        await rounds()
        assert not calls["j2"].done()
        # AND a caller that missed a row is answered at once, and the next row is the second
        assert await findings.beyond("j1", 0, LONG_S) == 1
        findings.note({"job": "j1"})
        assert await findings.beyond("j1", 1, LONG_S) == 2
        calls["j2"].cancel()

    asyncio.run(scene())


def test_a_wait_without_a_row_ends() -> None:
    async def scene() -> None:
        assert await StoredFindings().beyond("j1", 0, 0.01) == 0

    asyncio.run(scene())


def test_jobs_are_bounded() -> None:
    async def scene() -> None:
        findings = StoredFindings()
        for number in range(1025):
            findings.note({"job": f"j{number}"})
        # The job that was dropped counts from 0 again.
        assert await findings.beyond("j1024", 0, LONG_S) == 1
        assert await findings.beyond("j0", 1, LONG_S) == 0

    asyncio.run(scene())
