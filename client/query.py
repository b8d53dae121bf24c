"""``query``: rows of one SELECT, of one node or of all."""

from __future__ import annotations

import sys

from probing.api.errors import UsageError
from probing.client.cluster import Cluster
from probing.client.output import write_rows, write_table
from probing.client.render import Field
from probing.client.session import opened, warn
from probing.client.settings import Settings

__all__ = ("run",)


def run(settings: Settings, sql: str, *, explain: bool) -> None:
    text = sys.stdin.read() if sql == "-" else sql
    if not text.strip():
        raise UsageError("there is no SQL", hint='for example: probingctl query "SELECT * FROM comm.ops LIMIT 5"')
    with opened(settings) as cluster:
        if explain:
            _explain(settings, cluster, text)
            return
        answer = cluster.answer(text)
        write_rows(settings, answer.table)
        for warning in answer.warnings:
            warn(warning)


def _explain(settings: Settings, cluster: Cluster, sql: str) -> None:
    """What would be asked of whom. Asks nothing but the peers."""
    rows: list[dict[str, str]] = []
    if not cluster.many:
        rows.append({"step": "node", "where": cluster.target, "sql": " ".join(sql.split())})
    else:
        split = cluster.plan(sql)
        where = f"each of {len(cluster.addresses())} nodes"
        rows.extend({"step": split.kind, "where": where, "sql": part.sql} for part in split.parts)
        rows.append({"step": "merge", "where": "here", "sql": split.final})
    write_table(settings, (Field("STEP", "step"), Field("WHERE", "where"), Field("SQL", "sql")), rows)
