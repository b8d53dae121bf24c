"""As many waiting threads as the first argument says, each some frames deep."""

import sys
import threading

STARTED = threading.Semaphore(0)


def deep(n):
    if n:
        deep(n - 1)
    else:
        STARTED.release()
        threading.Event().wait()


for _ in range(int(sys.argv[1]) - 1):
    threading.Thread(target=deep, args=(10,), daemon=True).start()
for _ in range(int(sys.argv[1]) - 1):
    STARTED.acquire()
print("ready", flush=True)
threading.Event().wait()
