"""``query``: rows of one SELECT, of one node or of all."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from probing.api.errors import UsageError
from probing.client.cluster import Cluster
from probing.client.render.output import write_stream, write_table
from probing.client.render.progress import Progress
from probing.client.render.table import Field
from probing.client.session import opened, warn
from probing.client.settings import Settings

__all__ = ("run", "show")

_MAX_TEXT = 1 << 20
_EXAMPLE = 'for example: probingctl query "SELECT * FROM comm.ops LIMIT 5"'


def run(settings: Settings, sql: str | None, given: Sequence[str] = (), *, explain: bool = False) -> None:
    """``sql`` None: of stdin, or a shell where that is a terminal. ``given`` are parameters as ``name=value``."""
    if sql is None and not explain and sys.stdin.isatty():
        from probing.client.shell.loop import run as run_shell

        run_shell(settings, _parameters(given))
        return
    text = sys.stdin.read(_MAX_TEXT) if sql in (None, "-") else sql
    if not text or not text.strip():
        raise UsageError("there is no SQL", hint=_EXAMPLE)
    params = _parameters(given)
    with opened(settings) as cluster:
        if explain:
            _explain(settings, cluster, text, params)
        else:
            show(settings, cluster, text, params)


def show(settings: Settings, cluster: Cluster, sql: str, params: dict[str, Any]) -> int:
    """Writes the rows as they come, then the warnings; how many rows."""
    with Progress() as progress:
        cluster.watch = progress.update if progress.wanted else None
        to_terminal = settings.output is None and sys.stdout.isatty()
        with cluster.stream(sql, params) as rows:
            written = write_stream(settings, rows.schema, progress.counting(iter(rows), to_terminal=to_terminal))
    for warning in rows.warnings:
        warn(warning)
    return written


def _parameters(given: Sequence[str]) -> dict[str, Any]:
    if not given:
        return {}
    from probing.federation.parameters import parameter

    found: dict[str, Any] = {}
    for text in given:
        name, value = parameter(text)
        if name.lower() in found:
            raise UsageError(f"--param {name} is given twice")
        found[name.lower()] = value
    return found


def _explain(settings: Settings, cluster: Cluster, sql: str, params: dict[str, Any]) -> None:
    """What would be asked of whom. Asks nothing but the peers."""
    from probing.federation.parameters import bind

    sql = bind(sql, params)
    rows: list[dict[str, str]] = []
    asked = cluster.asked(sql)
    if not asked:
        rows.append({"step": "node", "where": cluster.target, "sql": " ".join(sql.split())})
    else:
        split = cluster.plan(sql)
        where = f"each of {len(asked)} nodes"
        rows.extend({"step": split.kind, "where": where, "sql": part.sql} for part in split.parts)
        rows.append({"step": "merge", "where": "here", "sql": split.final})
    write_table(settings, (Field("STEP", "step"), Field("WHERE", "where"), Field("SQL", "sql")), rows)
