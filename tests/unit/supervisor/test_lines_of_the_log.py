"""All processes of the daemon write their log in one form: time, level, process, module, message."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from datetime import datetime, timezone
from pathlib import Path

import pytest

PROGRAM = """
import logging, os, sys
from probing.daemon.supervisor.journal import log_to_stderr
if sys.argv[2:]:
    found = os.fstat(2)
    os.environ["JOURNAL_STREAM"] = f"{found.st_dev}:{found.st_ino}"
log_to_stderr(sys.argv[1])
logging.getLogger("probing.daemon.collector.drain").warning("no rows for %d s", 7)
logging.getLogger("other").info("done")
logging.getLogger("other").debug("not shown")
try:
    1 / 0
except ZeroDivisionError:
    logging.getLogger("probing.daemon.query.gate").exception("failed")
"""


def written(file: Path, *arguments: str, zone: str = "Asia/Shanghai") -> list[str]:
    with file.open("wb") as out:
        env = {**os.environ, "TZ": zone}
        env.pop("JOURNAL_STREAM", None)
        subprocess.run([sys.executable, "-c", PROGRAM, *arguments], stderr=out, check=True, env=env)
    return file.read_text().splitlines()


@pytest.mark.parametrize("process", ["supervisor", "collector", "service", "reader"])
def test_a_line_has_its_time_in_utc_and_its_process(tmp_path: Path, process: str) -> None:
    begun = time.time()
    first, second, third, *traceback = written(tmp_path / "log", process)
    at, rest = first.split(" ", 1)
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", at)
    told = datetime.strptime(at, "%Y-%m-%dT%H:%M:%S.%fZ").replace(tzinfo=timezone.utc).timestamp()
    assert begun - 0.001 <= told <= time.time()
    assert rest == f"WARNING {process} probing.daemon.collector.drain: no rows for 7 s"
    assert second.endswith(f"Z INFO {process} other: done")
    assert third.endswith(f"Z ERROR {process} probing.daemon.query.gate: failed")
    assert traceback[-1] == "ZeroDivisionError: division by zero"


def test_the_journal_has_the_time_itself(tmp_path: Path) -> None:
    first, second, third, *traceback = written(tmp_path / "log", "collector", "journal")
    assert first == "<4>WARNING collector probing.daemon.collector.drain: no rows for 7 s"
    assert (second, third) == ("<6>INFO collector other: done", "<3>ERROR collector probing.daemon.query.gate: failed")
    assert traceback[-1] == "<3>ZeroDivisionError: division by zero"
