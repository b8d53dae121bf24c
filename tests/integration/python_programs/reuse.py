"""For each number read, forgets the code it ran before, and is stopped in new code, likely at the same addresses."""

import gc
import os
import sys
import threading

ARRIVED_R, ARRIVED_W = os.pipe()
GO_R, GO_W = os.pipe()


def park():
    os.write(ARRIVED_W, b"x"), os.read(GO_R, 1)


def main():
    for number in iter(lambda: os.read(GO_R, 1), b""):
        n = number[0]
        body = "    x = 1\n" * (n % 3)
        source = f"def func_{n:03}():\n{body}    park()\n\n\nfunc_{n:03}()\n"
        exec(compile(source, f"<file {n:03}>", "exec"), {"park": park})
        gc.collect()


def relay():
    for line in sys.stdin:
        os.write(GO_W, bytes([int(line)]))
        os.read(ARRIVED_R, 1)
        print("parked", flush=True)
        sys.stdin.readline()
        os.write(GO_W, b"x")


threading.Thread(target=relay, daemon=True).start()
print("ready", flush=True)
main()
