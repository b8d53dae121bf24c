"""Two threads that call functions as fast as they can. ``leaf_x`` is only ever called by ``branch_x``."""

import threading


def leaf_a(n):
    return n + 1


def leaf_b(n):
    return n + 2


def branch_a(n):
    return leaf_a(leaf_a(n))


def branch_b(n, m=0, k=0):
    return leaf_b(n + m + k)


def deep_c(n):
    return deep_c(n - 1) if n else 0


def work():
    n = 0
    while True:
        n = branch_a(n) & 0xFF
        n = branch_b(n) & 0xFF
        deep_c(n & 15)


def waits():
    threading.Event().wait()


for target in (work, waits):
    threading.Thread(target=target, daemon=True).start()
print("ready", flush=True)
work()
