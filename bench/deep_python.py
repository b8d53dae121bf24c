"""A Python program with stacks of about 30 frames, like models of nested modules, in each of its threads.

``wait FILE THREADS``: each thread waits for ever; the file appears when all of them wait. ``work FILE``: steps
of pure Python, as long as a tick or two of a clock of 19 Hz; the file gets the monotonic time (ns, int64) of the end of
each. ``spin FILE``: reads the clock in a loop; the mapped file is a histogram of the gaps between two readings
(``counter_of``).
"""

from __future__ import annotations

import mmap
import sys
import threading
import time
from array import array
from collections.abc import Callable

LAYERS = 13
# The counters of `spin`: 64 ns each up to 65 us, 4 us each beyond.
FINE_NS, COARSE_NS = 64, 4096
FINE = 1024
COUNTERS = 16_384


class Layer:
    def __init__(self, inner: Layer | None) -> None:
        self.inner = inner

    def __call__(self, leaf: Callable[[int], int], value: int) -> int:
        return self.forward(leaf, value)

    def forward(self, leaf: Callable[[int], int], value: int) -> int:
        return leaf(value) if self.inner is None else self.inner(leaf, value + 1)


def model() -> Layer:
    made = Layer(None)
    for _ in range(LAYERS - 1):
        made = Layer(made)
    return made


def add_up(value: int) -> int:
    for i in range(20_000):
        value = value * 3 + i & 0xFFFF
    return value


def wait(path: str, threads: int) -> None:
    there = threading.Barrier(threads + 1)
    never = threading.Event()

    def stay(value: int) -> int:
        there.wait()
        never.wait()
        return value

    for number in range(threads):
        threading.Thread(target=model(), args=(stay, number), name=f"loader-{number}", daemon=True).start()
    # The program's own thread is the last to arrive.
    while there.n_waiting < threads:
        time.sleep(0.01)
    open(path, "w").close()
    model()(stay, 0)


def work(path: str) -> None:
    layers = model()
    with open(path, "wb", buffering=0) as out:
        while True:
            for number in range(50):
                layers(add_up, number)
            out.write(array("q", [time.monotonic_ns()]).tobytes())


def counter_of(gap_ns: int) -> int:
    if gap_ns < FINE * FINE_NS:
        return gap_ns // FINE_NS
    return min(FINE + gap_ns // COARSE_NS, COUNTERS - 1)


def spin(path: str) -> None:
    with open(path, "w+b") as file:
        file.truncate(8 * COUNTERS)
        counters = memoryview(mmap.mmap(file.fileno(), 8 * COUNTERS)).cast("Q")
    clock = time.monotonic_ns

    def turn(value: int) -> int:
        before = clock()
        while True:
            now = clock()
            gap = now - before
            counters[gap // 64 if gap < 65_536 else counter_of(gap)] += 1
            before = now
        return value

    model()(turn, 0)


if __name__ == "__main__":
    if sys.argv[1] == "wait":
        wait(sys.argv[2], int(sys.argv[3]))
    else:
        {"work": work, "spin": spin}[sys.argv[1]](sys.argv[2])
