"""Runs tests that have just failed three times more, alone; fails if any fails again. In CI only.

Most tests share a kernel and its clock with all else that runs on the machine, so one of thousands may fail for the
machine's sake. The first failure stays in the log, and each unstable test in a file of the user's cache, with the date
and the commit. ``python tests/run_again.py --recorded`` fails for tests that were unstable twice: mend them, and
remove their lines from the file.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path

__all__ = ("failed_tests", "main", "record", "recorded", "unstable_twice")

TIMES = 3
# More are no accident.
MOST = 4
# It may hide the home directory, where the record is: it wraps the tests only.
_HOST = "packaging/dev/as-daemon-host.sh"
_CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "probingd"


def record(tests: Sequence[str], commit: str, folder: Path = _CACHE) -> None:
    """Appends a line of date, commit and name to FOLDER/unstable-tests for each test."""
    folder.mkdir(parents=True, exist_ok=True)
    day = datetime.now(timezone.utc).date()
    with (folder / "unstable-tests").open("a") as file:
        file.writelines(f"{day} {commit} {test}\n" for test in tests)


def recorded(folder: Path = _CACHE) -> list[str]:
    """Returns the lines of FOLDER/unstable-tests, oldest first."""
    file = folder / "unstable-tests"
    return file.read_text().splitlines() if file.exists() else []


def unstable_twice(lines: Sequence[str]) -> list[str]:
    """Returns the names of tests that at least two lines name."""
    counts = Counter(line.split(" ", 2)[2] for line in lines)
    return sorted(test for test, count in counts.items() if count > 1)


def failed_tests(cache: Path) -> list[str]:
    """Returns the names of the tests that failed in the run with pytest's cache at ``cache``."""
    file = cache / "v/cache/lastfailed"
    return sorted(json.loads(file.read_text())) if file.exists() else []


def main(arguments: Sequence[str]) -> int:
    """Returns 0 if each test that failed in the run with the cache at the first argument passed every time; with
    ``--recorded``, if none was unstable twice."""
    if "--recorded" in arguments:
        lines = recorded()
        for test in unstable_twice(lines):
            print(f"unstable at least twice: {test}")
            print("\n".join(f"    {line}" for line in lines if line.endswith(f" {test}")))
        return int(bool(unstable_twice(lines)))
    failed = failed_tests(Path(arguments[0]))
    if not 0 < len(failed) <= MOST:
        print(f"{len(failed)} tests failed: at most {MOST} are run again")
        return 1
    for _ in range(TIMES):
        code = subprocess.run(
            [_HOST, sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *failed], check=False
        ).returncode
        if code:
            return code
    print(f"unstable, passed {TIMES} times alone: {' '.join(failed)}")
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    record(failed, commit.stdout.strip() or "unknown")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
