"""The sealing task turns the rows of log parts into one segment for each table and date."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pyarrow as pa

from probing.api.errors import FormatError
from probing.api.tables import Table
from probing.api.tables.schema import Stored, Type
from probing.daemon.store.log.decode import decode_part
from probing.daemon.store.log.records import unpack_header
from probing.daemon.store.segments.contents import split_by_date
from probing.daemon.store.tasks.messages import PartDecoded, Step
from probing.daemon.store.tasks.segment_output import Source, segment_steps

__all__ = ("pack_tables", "seal")


def seal(sources: Sequence[Source], fields: Mapping[str, Any]) -> Iterator[Step]:
    """Seals the log parts ``sources``. Fields: ``lengths`` of the parts in bytes; ``tables`` from ``pack_tables``."""
    known = _unpack_tables(fields["tables"])
    pieces: dict[str, list[pa.Table]] = {}
    for index, source in enumerate(sources):
        step, tables = _decoded(index, source.read(fields["lengths"][index]) or b"", known)
        yield step
        for name, rows in tables.items():
            if rows.num_rows:
                pieces.setdefault(name, []).append(rows)
    for name in sorted(pieces):
        rows = pa.concat_tables(pieces.pop(name), promote_options="permissive")
        sort_by = known[name].sort_by if name in known else ("ts",)
        for date, day in split_by_date(rows.unify_dictionaries(), sort_by):
            yield from segment_steps(name, date, day)


def pack_tables(tables: Mapping[str, Table]) -> dict[str, dict[str, object]]:
    """Returns the order of rows and the schema of each of ``tables``, as JSON values."""
    return {
        name: {"sort_by": list(table.sort_by), "schema": table.physical.serialize().to_pybytes().hex()}
        for name, table in tables.items()
    }


def _unpack_tables(packed: Mapping[str, Any]) -> dict[str, Table]:
    return {
        name: Table(name, "", (), _storage(bytes.fromhex(shape["schema"])), tuple(shape["sort_by"]))
        for name, shape in packed.items()
    }


def _storage(schema: bytes) -> tuple[Stored, ...]:
    def fixed(kind: pa.DataType) -> Type:
        return Type("", lambda _: kind)

    return tuple(Stored(field.name, fixed(field.type)) for field in pa.ipc.read_schema(pa.py_buffer(schema)))


def _decoded(index: int, data: bytes, known: Mapping[str, Table]) -> tuple[PartDecoded, Mapping[str, pa.Table]]:
    try:
        created = unpack_header(data)[0].created_ns
        part = decode_part(data, None, known)
    except FormatError as e:
        return PartDecoded(index, {}, 0, f"it cannot be read: {e}"), {}
    rows = {name: table.num_rows for name, table in part.tables.items()}
    return PartDecoded(index, rows, created, "; ".join(part.problems)), part.tables
