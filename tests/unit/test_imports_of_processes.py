"""The service and the SQL workers start without the modules that take longest to import."""

from __future__ import annotations

import subprocess
import sys

import pytest

SLOW = {"numpy", "pyarrow.compute", "pyarrow.dataset", "probing.diagnosis.facts"}
LOADED = f"print(*{SLOW} & {{n for n, module in sys.modules.items() if module}})"
HIDDEN = "from probing.api.numpy_import import hide_numpy; hide_numpy(); "
SERVICE = "from probing.daemon.service.__main__ import _load; _load()"
WORKER = f"{HIDDEN}import probing.daemon.query.job, probing.daemon.query.instance"
CHECKER = f"{HIDDEN}import probing.daemon.confined.sql_checker"


@pytest.mark.parametrize("code", [SERVICE, WORKER, CHECKER], ids=["service", "worker", "checker"])
def test_slow_modules_are_not_imported(code: str) -> None:
    ended = subprocess.run(
        [sys.executable, "-I", "-c", f"import sys; {code}; {LOADED}"], capture_output=True, text=True, check=True
    )
    assert ended.stdout.split() == []


def test_the_service_reads_arrow_with_numpy_later() -> None:
    later = "import pyarrow; from probing.daemon import arrow_to_numpy as a; print(a.integers(pyarrow.array([23, 7])))"
    ended = subprocess.run(
        [sys.executable, "-I", "-c", f"{SERVICE}; {later}"], capture_output=True, text=True, check=True
    )
    assert ended.stdout.strip() == "[23  7]"
