"""The Python API of docs/python.md, and the notebook of the examples, cell by cell."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from client_fake_node import FakeNode

import probing.client
from probing.client import Cluster

ROOT = Path(__file__).resolve().parents[3]


def test_the_notebook_runs(pair: tuple[FakeNode, FakeNode], capsys: pytest.CaptureFixture[str]) -> None:
    cells = json.loads((ROOT / "examples/cluster.ipynb").read_text())["cells"]
    names: dict[str, Any] = {"__name__": "__main__"}
    for cell in cells:
        if cell["cell_type"] == "code":
            assert cell["outputs"] == []
            exec(compile("".join(cell["source"]), cell["id"], "exec"), names)
    assert capsys.readouterr().out == "rank 2 on beta is in read_batch\n"
    assert names["total"] == 200
    assert sorted(answered.node for answered in names["outcome"].answered) == ["alpha", "beta"]
    assert isinstance(names["by_rank"], pa.Table)
    # What pandas and Polars take.
    assert hasattr(names["by_rank"], "__arrow_c_stream__")


def test_the_documented_names_are_there_with_docstrings() -> None:
    assert probing.client.__all__ == ("Cluster",)
    text = (ROOT / "docs/python.md").read_text()
    methods = [line.split("`")[1].partition("(")[0] for line in text.splitlines() if line.startswith("| `")]
    for name in set(methods) - {"Cluster"}:
        assert getattr(Cluster, name).__doc__, name
    with pytest.raises(AttributeError):
        _ = probing.client.Clusters


def test_the_package_loads_grpc_only_when_it_is_used() -> None:
    code = "import sys, probing.client; assert 'grpc' not in sys.modules; probing.client.Cluster"
    subprocess.run([sys.executable, "-c", code], check=True)
