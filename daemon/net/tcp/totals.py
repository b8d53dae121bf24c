"""Sums of a whole network namespace, where its connections cannot be listed: net.tcp without addresses.

A list takes CAP_SYS_ADMIN to enter the namespace; /proc/PID/net/snmp and netstat (Documentation/networking/
snmp_counter.rst) of a process in it can be read without.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import pyarrow as pa

from probing.api.tables.net import TCP
from probing.daemon.arrow import batch_of
from probing.daemon.clock import ClockPair
from probing.daemon.net.counters import UNKNOWN, Counters
from probing.daemon.processes.readers import Readers
from probing.daemon.source import Identity, ProcessKey

__all__ = ("NamespaceTotals",)

TIMEOUT_S = 1.0
# Columns of net.tcp by the counters of ``reading.TOTALS``.
_COLUMNS = ("segs_out", "segs_in", "retrans")


class NamespaceTotals:
    """The last reading of each namespace. Not safe for two threads at once."""

    def __init__(self, readers: Readers) -> None:
        self._readers = readers
        self._counters = Counters()

    def rows(
        self, node: str, pair: ClockPair, namespaces: Mapping[int, ProcessKey], who: Mapping[ProcessKey, Identity]
    ) -> pa.RecordBatch | None:
        """Returns a row for each namespace, under the process of it that ``namespaces`` names; None: there are none.

        Raises ProbingError when the reader does not answer.
        """
        known = {netns: key for netns, key in namespaces.items() if key in who}
        if not known:
            return None
        targets = [list(key) for key in known.values()]
        found = json.loads(self._readers.call("tcp_totals", timeout=TIMEOUT_S, targets=targets).payload)
        read = [(netns, key, totals) for (netns, key), totals in zip(known.items(), found, strict=True) if totals]
        values = [[UNKNOWN if value is None else value for value in totals[1:]] for _, _, totals in read]
        shaped = np.array(values, np.int64).reshape(len(read), len(_COLUMNS))
        differences = self._counters.read([netns for netns, _, _ in read], shaped, pair.mono_ns)
        rows = []
        for row, (netns, key, totals) in enumerate(read):
            if not differences.new[row]:
                rise: dict[str, Any] = dict(zip(_COLUMNS, differences.rise[row].tolist(), strict=True))
                common = {"node": node, "ts": pair.real_ns, "netns": netns, "sockets": totals[0]}
                interval = {"interval_ns": int(differences.interval[row])}
                rows.append({**who[key]._asdict(), **common, **interval, **rise})
        return batch_of(TCP.name, rows) if rows else None
