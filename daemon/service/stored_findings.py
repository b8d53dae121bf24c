"""Counts the stored rows of ``diagnosis.findings`` by job, and wakes the calls that wait for the next row of a job."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

__all__ = ("StoredFindings",)

# The maximum number of jobs whose rows are counted. If there are more, the job with the oldest last row is dropped: its
# number begins at 0 again, and calls that wait for that job report this as a change.
_MOST_JOBS = 1024


class StoredFindings:
    """The numbers of stored rows since the start. Belongs to one event loop."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._numbers: OrderedDict[str, int] = OrderedDict()
        self._changed = asyncio.Event()

    def note(self, row: Mapping[str, Any]) -> None:
        """Counts a row that was stored. Does not wait. Thread-safe."""
        # The thread that stores rows may still run when the loop has ended.
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._count, str(row["job"]))

    async def beyond(self, job: str, number: int, seconds: float) -> int:
        """Waits at most ``seconds`` until the number of rows about ``job`` is not ``number``. Returns the number of
        rows.
        """
        deadline = time.monotonic() + seconds
        while (stored := self._numbers.get(job, 0)) == number and (left := deadline - time.monotonic()) > 0:
            # Rows are rare, so each row wakes the calls about all jobs.
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._changed.wait(), left)
        return stored

    def _count(self, job: str) -> None:
        self._numbers[job] = self._numbers.pop(job, 0) + 1
        if len(self._numbers) > _MOST_JOBS:
            self._numbers.popitem(last=False)
        self._changed.set()
        self._changed = asyncio.Event()
