"""Processes do without the modules that take most memory and that they do not need."""

from __future__ import annotations

import subprocess
import sys

import pytest

LARGE = {"duckdb", "prometheus_client", "pyarrow.compute", "pyarrow.dataset", "pyarrow.parquet", "sqlglot"}
ARROW = {"numpy", "pyarrow"}
TYPES = {"msgspec"}
HIDDEN = "from probing.api.numpy_import import hide_numpy; hide_numpy(); "
SERVICE = "from probing.daemon.service.__main__ import _load; _load()"
WORKER = f"{HIDDEN}import probing.daemon.query.job, probing.daemon.query.database"
CHECKER = f"{HIDDEN}import probing.daemon.confined.sql_checker"
PARSER = "import probing.daemon.confined.parser"
PARSER_OF_ALL = "from probing.daemon.confined import parser; [parser._handler(op) for op in parser._MODULES]"
READER = "import probing.daemon.confined.reader"
NVML = "import probing.daemon.confined.nvml"
LAUNCHER = "import probing.launcher.launcher"


@pytest.mark.parametrize(
    ("code", "large"),
    [
        (SERVICE, LARGE),
        (WORKER, LARGE - {"duckdb"} | TYPES | {"numpy"}),
        (CHECKER, LARGE - {"duckdb", "sqlglot"} | TYPES | ARROW),
        (PARSER, LARGE | TYPES | ARROW),
        (PARSER_OF_ALL, TYPES),
        (READER, LARGE | TYPES | ARROW),
        (NVML, LARGE | TYPES | ARROW),
        (LAUNCHER, LARGE | ARROW | {"asyncio", "grpc", "subprocess"}),
    ],
    ids=["service", "worker", "checker", "parser", "parser of all", "reader", "nvml", "launcher"],
)
def test_large_modules_are_not_imported(code: str, large: set[str]) -> None:
    loaded = f"print(*{large} & {{n for n, module in sys.modules.items() if module}})"
    ended = subprocess.run(
        [sys.executable, "-I", "-c", f"import sys; {code}; {loaded}"], capture_output=True, text=True, check=True
    )
    assert ended.stdout.split() == []
