"""The service, SQL workers and parsers start without the modules that take longest to import."""

from __future__ import annotations

import subprocess
import sys

import pytest

SLOW = {"numpy", "pyarrow.compute", "pyarrow.dataset", "probing.diagnosis.facts"}
HIDDEN = "from probing.api.numpy_import import hide_numpy; hide_numpy(); "
SERVICE = "from probing.daemon.service.__main__ import _load; _load()"
WORKER = f"{HIDDEN}import probing.daemon.query.job, probing.daemon.query.database"
CHECKER = f"{HIDDEN}import probing.daemon.confined.sql_checker"
PARSER = "import probing.daemon.confined.parser"


@pytest.mark.parametrize(
    ("code", "slow"),
    [(SERVICE, SLOW | {"pyarrow"}), (WORKER, SLOW), (CHECKER, SLOW | {"pyarrow"}), (PARSER, SLOW | {"pyarrow"})],
    ids=["service", "worker", "checker", "parser"],
)
def test_slow_modules_are_not_imported(code: str, slow: set[str]) -> None:
    loaded = f"print(*{slow} & {{n for n, module in sys.modules.items() if module}})"
    ended = subprocess.run(
        [sys.executable, "-I", "-c", f"import sys; {code}; {loaded}"], capture_output=True, text=True, check=True
    )
    assert ended.stdout.split() == []
