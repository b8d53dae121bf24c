"""A merge of neighbouring segments in progress: the worker's task, and the file that its bytes go to."""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa

from probing.api.errors import FormatError
from probing.daemon.store.context import StoreContext
from probing.daemon.store.manifest import Segment
from probing.daemon.store.segments.contents import all_jobs
from probing.daemon.store.segments.paths import segment_path
from probing.daemon.store.segments.writer import SegmentFile
from probing.daemon.store.tasks.messages import Data, Made, Step
from probing.daemon.store.tasks.worker import Task

__all__ = ("Merge",)


class Merge:
    """Merges ``sources``, segments of one table and date that are consecutive in ``parts``.

    Each row group holds the rows of consecutive log parts in the table's order, so its statistics stay as narrow in
    time as those of the sources. After an error only ``abort`` may be called.
    """

    def __init__(self, context: StoreContext, sources: Sequence[Segment]) -> None:
        self.sources = tuple(sources)
        # Bytes of the new segment so far.
        self.written = 0
        self._context = context
        self._task: Task | None = None
        self._file: SegmentFile | None = None
        self._made: Made | None = None

    @property
    def _parts(self) -> tuple[int, int]:
        return self.sources[0].parts[0], self.sources[-1].parts[1]

    def step(self) -> Segment | None:
        """Merges one more row group. Returns the new segment, renamed and synced, after the last one.

        Raises FormatError when a source is damaged or they do not fit together, OSError, WorkerFailed.
        """
        task = self._task = self._task or self._begin()
        try:
            for step in task.turn():
                self._take(step)
        except (pa.ArrowException, OSError) as e:
            if getattr(e, "errno", None) is not None:
                raise
            raise FormatError(f"{self.sources[0].path} and its neighbours cannot be merged: {e}") from e
        return self._finish() if task.done else None

    def abort(self) -> None:
        """Ends the task and removes the unfinished file. Raises OSError."""
        task, self._task = self._task, None
        file, self._file = self._file, None
        if task is not None:
            task.close()
        if file is not None:
            file.abort()

    def _begin(self) -> Task:
        name = self.sources[0].table
        table = self._context.tables.get(name)
        physical = table.physical if table else pa.schema([])
        return self._context.worker.start(
            "merge",
            [(self._context.root / source.path, source.size) for source in self.sources],
            table=name,
            sort_by=list(table.sort_by if table else ("ts",)),
            coded=[f.name for f in physical if isinstance(f.type, pa.DictionaryType)],
            expected=[[source.path, source.size, source.crc] for source in self.sources],
        )

    def _take(self, step: Step) -> None:
        if isinstance(step, Made):
            self._made = step
            return
        if not isinstance(step, Data):
            raise FormatError(f"a merging task answered {type(step).__name__}")
        if self._file is None:
            date = self.sources[0].path.split("/")[1].removeprefix("date=")
            path = segment_path(self.sources[0].table, date, self._parts)
            self._file = SegmentFile(self._context.files, self._context.root, path)
        self._file.write(step.data)
        self.written = self._file.size

    def _finish(self) -> Segment:
        made, file, rows = self._made, self._file, sum(s.rows for s in self.sources)
        if made is None or file is None or made.rows != rows:
            had = made.rows if made else "no"
            raise FormatError(f"{self.sources[0].path} and its neighbours gave {had} rows instead of {rows}")
        file.finish(made.size, made.crc, set())
        self._file = None
        first, last = min(s.ts_min for s in self.sources), max(s.ts_max for s in self.sources)
        return Segment(
            self.sources[0].table,
            file.path,
            made.size,
            made.crc,
            rows,
            first,
            last,
            self._parts,
            all_jobs(self.sources),
        )
