"""The service and the processes without rights start without the modules that take longest to import."""

from __future__ import annotations

import subprocess
import sys

import pytest

SLOW = {"numpy", "pyarrow.compute", "pyarrow.dataset", "probing.diagnosis.facts"}
TYPES = {"msgspec"}
HIDDEN = "from probing.api.numpy_import import hide_numpy; hide_numpy(); "
SERVICE = "from probing.daemon.service.__main__ import _load; _load()"
WORKER = f"{HIDDEN}import probing.daemon.query.job, probing.daemon.query.database"
CHECKER = f"{HIDDEN}import probing.daemon.confined.sql_checker"
PARSER = "import probing.daemon.confined.parser"
PARSER_OF_ALL = "from probing.daemon.confined import parser; [parser._handler(op) for op in parser._MODULES]"
READER = "import probing.daemon.confined.reader"
NVML = "import probing.daemon.confined.nvml"


@pytest.mark.parametrize(
    ("code", "slow"),
    [
        (SERVICE, SLOW | {"pyarrow"}),
        (WORKER, SLOW | TYPES),
        (CHECKER, SLOW | TYPES | {"pyarrow"}),
        (PARSER, SLOW | TYPES | {"pyarrow"}),
        (PARSER_OF_ALL, TYPES),
        (READER, SLOW | TYPES | {"pyarrow"}),
        (NVML, SLOW | TYPES | {"pyarrow"}),
    ],
    ids=["service", "worker", "checker", "parser", "parser of all", "reader", "nvml"],
)
def test_slow_modules_are_not_imported(code: str, slow: set[str]) -> None:
    loaded = f"print(*{slow} & {{n for n, module in sys.modules.items() if module}})"
    ended = subprocess.run(
        [sys.executable, "-I", "-c", f"import sys; {code}; {loaded}"], capture_output=True, text=True, check=True
    )
    assert ended.stdout.split() == []
