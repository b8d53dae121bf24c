"""Selects the rows of one job in a range of time by SQL, in slices of bounded size. Offsets of the nodes' clocks are
taken into account."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import TYPE_CHECKING, NamedTuple

from probing.api.errors import UsageError
from probing.api.text import sql_table, sql_text

if TYPE_CHECKING:
    from probing.client.cluster import Cluster

__all__ = ("CLOSE_NS", "Section", "Selection", "Slice", "slices")

# Clock offsets below this, ns, are ignored when rows are selected.
CLOSE_NS = 1_000_000_000
_MOST_NODES = 500
_BUCKETS = 512
# The maximum number of overfull buckets whose rows are counted again in smaller buckets. Further overfull buckets are
# split into equal time spans, without counting again.
_MOST_COUNTED = 16
_MOST_SLICES = 20_000


class Section(NamedTuple):
    """Rows of ``table``; ``columns`` has the SQL of each column by name. ``condition`` is added to the conditions on
    job and range. ``of_nodes``: rows are selected by the nodes of the job, not by the job."""

    table: str
    columns: Mapping[str, str]
    condition: str = ""
    of_nodes: bool = False

    def select(self, where: str) -> str:
        """Returns the SELECT of the rows that meet ``where``."""
        # A column is not renamed to its own name: with `ts AS ts` nodes do not recognize the condition on ts, and open
        # all of their files.
        columns = ", ".join(name if sql == name else f"{sql} AS {name}" for name, sql in self.columns.items())
        more = f" AND {self.condition}" if self.condition else ""
        return f"SELECT {columns} FROM {sql_table(self.table)} WHERE {where}{more}"


class Slice(NamedTuple):
    """A part of a range of time with about ``rows`` rows. ``low``, ``high``: UTC ns by the clock of this machine."""

    low: int
    high: int
    rows: int


class Selection(NamedTuple):
    """The rows of ``job`` in [``begin``, ``end``), UTC ns by our clock. ``ahead``: by how many ns the clocks of nodes
    are ahead of ours. ``nodes``: the nodes of the job."""

    job: str
    begin: int
    end: int
    ahead: Mapping[str, int]
    nodes: Collection[str] = ()

    def where(self, section: Section, low: int, high: int) -> str:
        """Returns the condition on the rows of ``section`` in [``low``, ``high``)."""
        far = self._far()
        first = low + min(0, *far.values(), 0)
        last = high + max(0, *far.values(), 0)
        parts = [self._whose(section)] if self._whose(section) else []
        parts += [f"ts >= {_instant(first)}", f"ts < {_instant(last)}"]
        if far:
            parts += [f"{self.time('ts')} >= {low}", f"{self.time('ts')} < {high}"]
        parts += [section.condition] if section.condition else []
        return " AND ".join(parts)

    def select(self, section: Section, low: int, high: int) -> str:
        """Returns the SELECT of the rows of ``section`` in [``low``, ``high``)."""
        return section._replace(condition="").select(self.where(section, low, high))

    def time(self, column: str) -> str:
        """Returns the SQL of ``column`` in ns; by our clock for nodes whose clock is off by CLOSE_NS or more."""
        far = "".join(f" WHEN {sql_text(node)} THEN {ahead}" for node, ahead in self._far().items())
        return f"(epoch_ns({column}) - CASE node{far} ELSE 0 END)" if far else f"epoch_ns({column})"

    def _far(self) -> dict[str, int]:
        return {node: ahead for node, ahead in self.ahead.items() if abs(ahead) >= CLOSE_NS}

    def _whose(self, section: Section) -> str:
        if not section.of_nodes:
            return f"job = {sql_text(self.job)}"
        if len(self.nodes) > _MOST_NODES:
            return ""
        return f"node IN ({', '.join(map(sql_text, sorted(self.nodes)))})" if self.nodes else "false"


def slices(cluster: Cluster, selection: Selection, section: Section, most: int) -> list[Slice]:
    """Returns slices of the range in the order of time, each with at most about ``most`` rows of ``section``.

    Raises UsageError for more rows than a trace can have.
    """
    parts: list[Slice] = []
    for piece in _pieces(cluster, selection, section, most):
        last = parts[-1] if parts else None
        if last is not None and last.rows + piece.rows <= most:
            parts[-1] = Slice(last.low, piece.high, last.rows + piece.rows)
        else:
            # Slices leave no gaps, because rows that are stored later must belong to a slice, too.
            parts.append(Slice(selection.begin if last is None else last.high, piece.high, piece.rows))
        if len(parts) > _MOST_SLICES:
            what = f"the range has more than {_MOST_SLICES * most:,} rows of {section.table}"
            raise UsageError(what, hint="narrow it by --since and --until")
    if parts:
        parts[-1] = parts[-1]._replace(high=selection.end)
    return parts


def _pieces(cluster: Cluster, selection: Selection, section: Section, most: int) -> Iterator[Slice]:
    buckets = _buckets(cluster, selection, section, selection.begin, selection.end)
    full = [bucket for bucket in buckets if bucket.rows > most][:_MOST_COUNTED]
    again = {bucket: _buckets(cluster, selection, section, bucket.low, bucket.high) for bucket in full}
    for bucket in buckets:
        for low, high, rows in again.get(bucket, [bucket]):
            parts = max(1, min(-(-rows // most), high - low))
            width = -(-(high - low) // parts)
            for begin in range(low, high, width):
                yield Slice(begin, min(high, begin + width), -(-rows // parts))


def _buckets(cluster: Cluster, selection: Selection, section: Section, low: int, high: int) -> list[Slice]:
    """Returns the buckets of the time [``low``, ``high``) that have rows."""
    width = max(1, -(-(high - low) // _BUCKETS))
    bucket = f"({selection.time('ts')} - {low}) // {width}"
    table, where = sql_table(section.table), selection.where(section, low, high)
    answer = cluster.query(f"SELECT {bucket} AS bucket, count(*) AS rows FROM {table} WHERE {where} GROUP BY {bucket}")
    counts = {row["bucket"]: row["rows"] for row in answer.to_pylist()}
    # Buckets outside of the range are ignored, because nodes are not trusted.
    return [
        Slice(low + place * width, min(high, low + (place + 1) * width), int(counts[place] or 0))
        for place in range(_BUCKETS)
        if place in counts and low + place * width < high
    ]


def _instant(ns: int) -> str:
    return f"make_timestamp_ns({max(0, ns)})"
