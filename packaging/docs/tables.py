"""Makes docs/tables.md: every table and view of probing.api with its columns."""

from __future__ import annotations

from collections.abc import Iterator

from probing.api.tables import TABLES, Table
from probing.api.tables.schema import Column, View
from probing.api.tables.views import VIEWS

HEAD = """# Tables

Made from `api/tables` by `make docs`. `probingctl tables` shows the same for the nodes that it asks, with the tables of
[probes of your own](user-probes.md) and [your views](views.md). [query.md](query.md) explains how to query them.

A *stored* table keeps its rows for days ([config.md](config.md#how-long-rows-are-kept)). A *live* table is filled when
a query names it. A *view* is a SELECT over tables; [tables-of-probing.md](tables-of-probing.md) compares the names of
Probing with theirs.
Units stand in the names of columns: `_ns`, `_bytes`, `_pct`, `_gbps`. Times are UTC with nanoseconds.
"""


def page() -> str:
    """Returns docs/tables.md."""
    known: list[Table | View] = sorted([*TABLES.values(), *VIEWS.values()], key=lambda table: table.name)
    lines = [HEAD, "| table | kind | rows |", "|---|---|---|"]
    lines += [f"| [`{table.name}`](#{_anchor(table)}) | {_kind(table)} | {_cell(table.doc)} |" for table in known]
    for schema in sorted({table.name.partition(".")[0] for table in known}):
        lines += ["", f"## {schema}"]
        lines += [line for table in known if table.name.startswith(f"{schema}.") for line in _section(table)]
    return "\n".join([*lines, ""])


def _kind(table: Table | View) -> str:
    if isinstance(table, View):
        return "view"
    return "live" if table.live else "stored"


def _anchor(table: Table | View) -> str:
    # As GitHub and mkdocs make it of the heading.
    return table.name.replace(".", "")


def _section(table: Table | View) -> Iterator[str]:
    yield from ("", f"### {table.name}", f"A {_kind(table)}{'' if isinstance(table, View) else ' table'}. {table.doc}")
    if table.columns:
        yield from ("", "| column | type | meaning |", "|---|---|---|")
        yield from (_row(column) for column in table.columns)


def _row(column: Column) -> str:
    return f"| `{column.name}` | `{column.plain_type}` | {_cell(column.doc)} |"


def _cell(text: str) -> str:
    return text.replace("\n", " ").replace("|", "\\|")
