"""Runs tests that have just failed three times more, alone: ``python tests/run_again.py``; fails if any fails again.

Most tests share a kernel and its clock with all else that runs on the machine, so one of thousands may fail for the
machine's sake. Its first failure stays in the log, and is to be mended.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

__all__ = ("main",)

TIMES = 3
# More are no accident.
MOST = 4
_FAILED = Path(".pytest_cache/v/cache/lastfailed")


def main() -> int:
    """Returns 0 if each test passed every time."""
    failed = sorted(json.loads(_FAILED.read_text())) if _FAILED.exists() else []
    if not 0 < len(failed) <= MOST:
        print(f"{len(failed)} tests failed: at most {MOST} are run again")
        return 1
    for _ in range(TIMES):
        code = subprocess.run([sys.executable, "-m", "pytest", *failed], check=False).returncode
        if code:
            return code
    print(f"unstable, passed {TIMES} times alone: {' '.join(failed)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
