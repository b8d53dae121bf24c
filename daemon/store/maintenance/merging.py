"""A merge of neighbouring segments that is under way: the file that it writes, and the job that makes its bytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from probing.api.errors import FormatError
from probing.api.tables import Table
from probing.daemon.store.files import Files
from probing.daemon.store.jobs.runner import Job, Worker
from probing.daemon.store.manifest import Segment
from probing.daemon.store.segments.reader import SegmentFile, all_jobs, segment_path

__all__ = ("Merge",)


class Merge:
    """Segments of one table and date, consecutive in ``parts``, on their way to be one.

    Each row group holds the rows of consecutive log parts, sorted as the table says: its statistics are as narrow in
    time as those of the segments that it came from. After an error only ``abort`` may be called.
    """

    def __init__(
        self, worker: Worker, files: Files, root: Path, sources: Sequence[Segment], table: Table | None
    ) -> None:
        self.sources = tuple(sources)
        self.written = 0
        self._worker = worker
        self._files = files
        self._root = root
        self._table = table
        self._job: Job | None = None
        self._file: SegmentFile | None = None
        self._made: Mapping[str, Any] | None = None

    @property
    def _parts(self) -> tuple[int, int]:
        return self.sources[0].parts[0], self.sources[-1].parts[1]

    def step(self) -> Segment | None:
        """Merge one more row group; the new segment when it was the last, in its place and synced.

        Raises FormatError when a source is damaged or they do not fit together, OSError, WorkerFailed.
        """
        job = self._job = self._job or self._begin()
        try:
            for header, payload in job.turn():
                self._take(header, payload)
        except (pa.ArrowException, OSError) as e:
            if getattr(e, "errno", None) is not None:
                raise
            raise FormatError(f"{self.sources[0].path} and its neighbours cannot be merged: {e}") from e
        return self._finish() if job.done else None

    def abort(self) -> None:
        """Leave nothing behind. Raises OSError."""
        job, self._job = self._job, None
        file, self._file = self._file, None
        if job is not None:
            job.close()
        if file is not None:
            file.abort()

    def _begin(self) -> Job:
        first = self.sources[0]
        physical = self._table.physical if self._table else pa.schema([])
        return self._worker.start(
            "merge",
            [(self._root / source.path, source.size) for source in self.sources],
            table=first.table,
            sort_by=list(self._table.sort_by if self._table else ("ts",)),
            coded=[f.name for f in physical if isinstance(f.type, pa.DictionaryType)],
            expected=[[source.path, source.size, source.crc] for source in self.sources],
        )

    def _take(self, header: Mapping[str, Any], payload: bytes | memoryview) -> None:
        if "made" in header:
            self._made = header["made"]
            return
        if self._file is None:
            date = self.sources[0].path.split("/")[1].removeprefix("date=")
            path = segment_path(self.sources[0].table, date, self._parts)
            self._file = SegmentFile(self._files, self._root, path)
        self._file.write(payload)
        self.written = self._file.size

    def _finish(self) -> Segment:
        made, file, rows = self._made, self._file, sum(s.rows for s in self.sources)
        if made is None or file is None or int(made["rows"]) != rows:
            had = made["rows"] if made else "no"
            raise FormatError(f"{self.sources[0].path} and its neighbours gave {had} rows instead of {rows}")
        file.finish(int(made["size"]), int(made["crc"]), set())
        self._file = None
        first, last = min(s.ts_min for s in self.sources), max(s.ts_max for s in self.sources)
        return Segment(
            self.sources[0].table, file.path, int(made["size"]), int(made["crc"]), rows, first, last, self._parts,
            all_jobs(self.sources),
        )  # fmt: skip
