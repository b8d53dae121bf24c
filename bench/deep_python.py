"""A Python program with stacks of about 30 frames, like models of nested modules, in each of its threads.

``wait FILE THREADS``: each thread waits for ever; the file appears when all threads wait. ``work FILE``: makes steps of
pure Python, each as long as one or two ticks of a 19 Hz clock, and writes the monotonic time (ns, int64) of the end of
each step to the file.
"""

from __future__ import annotations

import sys
import threading
import time
from array import array
from collections.abc import Callable

LAYERS = 13


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


if __name__ == "__main__":
    if sys.argv[1] == "wait":
        wait(sys.argv[2], int(sys.argv[3]))
    else:
        work(sys.argv[2])
