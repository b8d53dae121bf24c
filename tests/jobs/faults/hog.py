"""Six processes that keep one core busy once FOLDER/go exists: ``hog.py CPU FOLDER``; see slow.py.

A single one would leave a rank that mostly sleeps the time that it needs.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path


def main() -> None:
    folder = Path(sys.argv[2])
    os.sched_setaffinity(0, {int(sys.argv[1])})
    Path("/proc/self/comm").write_text("hog")
    while not (folder / "go").exists():
        time.sleep(0.05)
    note = folder / "fault-1"
    if not note.exists():
        note.write_text(f"{time.time_ns()}\n")
    for _ in range(5):
        if os.fork() == 0:
            # Else the kernel gives all of them the share of one, as they are of one session (sched(7), autogroup).
            os.setsid()
            break
    while True:
        pass


if __name__ == "__main__":
    main()
