"""The types of columns of jobs' tables that differ between nodes."""

from __future__ import annotations

import pyarrow as pa
import pytest

from probing.client import Cluster
from probing.client.queries import Queries


@pytest.mark.parametrize(
    ("kinds", "expected"),
    [
        (("int64", "double"), "DOUBLE"),
        (("double", "int64"), "DOUBLE"),
        (("int64", "int64"), "BIGINT"),
        (("int64", "string", "double"), "VARCHAR"),
    ],
)
def test_a_column_has_the_widest_type_of_all_nodes(
    monkeypatch: pytest.MonkeyPatch, kinds: tuple[str, ...], expected: str
) -> None:
    columns = [pa.table({"table": ["python.losses"], "column": ["loss"], "type": [kind]}) for kind in kinds]
    monkeypatch.setattr(Queries, "query_each", lambda *_: columns)
    plan = Cluster("unix:/none").plan("SELECT loss FROM python.losses")
    assert plan.columns == (("loss", expected),)
    assert [part.columns for part in plan.parts] == [(("c0", expected),)]
