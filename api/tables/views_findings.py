"""A view with one row for each finding. The table ``diagnosis.findings`` has a row for each change of a finding on
each node.
"""

from __future__ import annotations

from probing.api.tables.diagnosis import FINDINGS
from probing.api.tables.schema import I32, I64, TEXT, Column, view
from probing.api.tables.views_columns import chosen

__all__ = ("VIEWS",)

_KEY = ("job", "run", "finding_id")
_NEWEST = (
    *("verdict", "severity", "state", "confidence", "sentence", "ranks", "nodes", "victims", "about", "culprits"),
    *("evidence", "missing", "refuted_by", "next_steps", "advice", "advice_nodes", "advice_reason", "ends", "ends_by"),
    *("since", "opened", "closed", "found_by"),
)
# arg_max would ignore NULL, and so return an old `closed` for a finding that was opened again.
_ROWS = (
    f"SELECT {', '.join(_KEY)}, max(ts) AS ts, {', '.join(f'arg_max_null({name}, ts) AS {name}' for name in _NEWEST)}"
    f" FROM diagnosis.findings GROUP BY {', '.join(_KEY)}"
)
_FIRST = "json_extract_string(f.culprits, '$[0].{}')"

CURRENT = view(
    "diagnosis.current",
    "Present and past findings about jobs, one row for each finding in its newest state; node, rank and pid"
    " describe the first culprit.",
    (
        Column(
            "node",
            TEXT,
            "Node of the first culprit; NULL if there is no culprit.",
            sql=f"coalesce({_FIRST.format('node')}, nullif(split_part(f.nodes, ',', 1), ''))",
        ),
        *chosen(FINDINGS, "f", "ts", *_KEY, "verdict", "severity", "state", "sentence"),
        Column("rank", I32, "Rank of the first culprit.", sql=_FIRST.format("rank")),
        Column("pid", I32, "Process id of the first culprit.", sql=_FIRST.format("pid")),
        Column(
            "duration_ns",
            I64,
            "Duration of the finding's state, ns: from `since` (or `opened`, if `since` is NULL) to `closed` (or now).",
            sql="epoch_ns(coalesce(f.closed, now())) - epoch_ns(coalesce(f.since, f.opened))",
        ),
        *chosen(FINDINGS, "f", "since", "opened", "closed", "confidence", "ranks", "nodes", "victims", "about"),
        *chosen(FINDINGS, "f", "culprits", "evidence", "missing", "refuted_by", "next_steps"),
        *chosen(FINDINGS, "f", "advice", "advice_nodes", "advice_reason", "ends", "ends_by", "found_by"),
    ),
    f"({_ROWS}) AS f",
    local=False,
)

VIEWS = (CURRENT,)
