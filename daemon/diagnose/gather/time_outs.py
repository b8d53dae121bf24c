"""The time-outs of the groups in which the ranks of a job wait, read once from each process."""

from __future__ import annotations

import re
import threading
from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Mapping, Sequence

from probing.api.errors import ProbingError
from probing.daemon.diagnose.gather.processes import Key
from probing.daemon.diagnose.gather.tables import Collector, Row, seconds_left
from probing.diagnosis.facts import TimeOut

__all__ = ("TimeOuts",)

# torch/distributed/distributed_c10d.py of 2.13: the name of each group; for gloo it is also the communicator.
_GROUPS = "module:torch.distributed.distributed_c10d._pg_names"
_GROUP = re.compile(r"ProcessGroup\(rank=\d{1,9}, size=\d{1,9}, (gloo|nccl), timeout=(\d{1,12}) ms\): '([^']{1,128})'")
_MAX_KNOWN = 1024
_MAX_READ = 16
_PATIENCE_S = 1.0
_MS = 1_000_000


class TimeOuts:
    """Safe for many threads. Reads a process again when it waits in other communicators than before."""

    def __init__(self, collector: Collector) -> None:
        self._collector = collector
        self._lock = threading.Lock()
        self._known: OrderedDict[tuple[Key, frozenset[str]], tuple[TimeOut, ...]] = OrderedDict()

    def of_job(self, job: str, inflight: Iterable[Row], deadline: float) -> dict[Key, tuple[TimeOut, ...]]:
        """Returns the time-outs of the communicators with operations in flight, by process.

        ``inflight``: rows of comm.inflight; ``deadline``: time.monotonic(). What cannot be read is left out.
        """
        waits: dict[Key, dict[str, str]] = defaultdict(dict)
        for row in inflight:
            if row["comm"]:
                waits[Key.of(row)][row["comm"]] = row["backend"] or ""
        keys = {key: (key, frozenset(comms)) for key, comms in waits.items()}
        with self._lock:
            new = [key for key, known in keys.items() if known not in self._known][:_MAX_READ]
        if new:
            texts = self._read(job, [key.pid for key in new], deadline)
            with self._lock:
                for key in new:
                    if key in texts:
                        self._known[keys[key]] = _time_outs(texts[key], waits[key])
                while len(self._known) > _MAX_KNOWN:
                    self._known.popitem(last=False)
        with self._lock:
            return {key: self._known[known] for key, known in keys.items() if known in self._known}

    def _read(self, job: str, pids: Sequence[int], deadline: float) -> dict[Key, str]:
        try:
            answer = self._collector.variables(pids, job, [_GROUPS], min(seconds_left(deadline), _PATIENCE_S))
            return {Key.of(row): str(row["value"] or "") for row in answer["values"]}
        except (ProbingError, KeyError, TypeError):
            # Nothing is claimed then; the next look tries again.
            return {}


def _time_outs(text: str, comms: Mapping[str, str]) -> tuple[TimeOut, ...]:
    """Returns the time-out of each of ``comms``, which has their backends, by the groups in ``text``."""
    groups = {name: (backend, int(ms)) for backend, ms, name in _GROUP.findall(text)}
    # NCCL's communicators have other names. If all groups are alike, they need none. A text that is cut lacks groups.
    whole = text.count("ProcessGroup(") == len(groups) and text.endswith("}") and "..." not in text
    alike = set(groups.values()) if whole else set()
    found = []
    for comm, backend in sorted(comms.items()):
        of_backend = {ms for kind, ms in alike if kind == backend}
        group = groups.get(comm, (backend, of_backend.pop() if len(of_backend) == 1 else None))
        if group[0] == backend and group[1] is not None:
            found.append(TimeOut(comm, group[1] * _MS))
    return tuple(found)
