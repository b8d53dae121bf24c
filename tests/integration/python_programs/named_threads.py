"""Threads with names. At each line of stdin, the last one gets the line as its name."""

import sys
import threading

EVENT = threading.Event()
NAMES = ("loader-\u00fc", "long " * 40, "red\x1b[31m", "last")
threads = [threading.Thread(target=EVENT.wait, name=name, daemon=True) for name in NAMES]
for thread in threads:
    thread.start()
print("ready", flush=True)
for line in sys.stdin:
    if line.strip() == "number":
        threads[-1]._name = 7
    elif line.strip() == "gone":
        threading._active = None
    else:
        threads[-1].name = line.strip()
    print("done", flush=True)
