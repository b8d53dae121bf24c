"""Switches generators, functions, code objects and threads as fast as it can, so that a torn stack shows.

A comment ``# -> x y`` names all that is ever called from its line. What is made by exec has the same number in its
names, its file and its lines. A generator is resumed by many, and always calls the leaf of the one that resumes it; it
is closed when the function that made it has returned.
"""

import threading
import time


def leaf_a(n):
    return n + 1


def leaf_b(n):
    return n + 2


def leaf_c(n):
    return n + 3


def branch_a(n):
    n = leaf_a(n)  # -> leaf_a
    n += 1
    return n


def branch_b(n, m=0, k=0):
    n += m
    n = leaf_b(n)  # -> leaf_b
    n += 1
    return n


def shared():
    # Only send gets here, and what it sends is called at once.
    n = 0
    call = yield
    while True:
        n = call(n) & 255  # -> leaf_a leaf_b leaf_c
        call = yield n


def resume_a(generator):
    return generator.send(leaf_a)  # -> shared


def resume_b(generator):
    return generator.send(leaf_b)  # -> shared


def resume_c(generator, *rest):
    return generator.send(leaf_c)  # -> shared


def even(n):
    if n:
        return odd(n - 1)  # -> odd
    return 0


def odd(n):
    return even(n - 1)  # -> even


def functions(rounds):
    n = 0
    for _ in range(rounds):
        n = branch_a(n) & 255  # -> branch_a
        n = branch_b(n) & 255  # -> branch_b
        even(n & 6)  # -> even
    return n


def generators(rounds):
    one, two = shared(), shared()  # -> shared
    next(one), next(two)  # -> shared
    for _ in range(rounds):
        resume_a(one)  # -> resume_a
        resume_b(one)  # -> resume_b
        resume_c(one)  # -> resume_c
        resume_b(two)  # -> resume_b


def made(number):
    name = f"{number:03}"
    source = "\n" * number + f"def inner_{name}(n):\n    return n + {number}\n\n"
    source += f"def outer_{name}(n):\n    for i in range(30):\n        n = inner_{name}(n)\n    return n\n"
    space = {}
    exec(compile(source, f"<made {name}>", "exec"), space)  # -> <module>
    return space["outer_" + name]


def executed(rounds):
    for i in range(rounds):
        made(i)(0)  # -> made outer


def work():
    while True:
        functions(300)  # -> functions
        generators(200)  # -> generators shared
        executed(30)  # -> executed


def short_life():
    functions(20)  # -> functions
    generators(5)  # -> generators shared


def churn():
    while True:
        threads = []
        for _ in range(3):
            threads.append(threading.Thread(target=short_life))
            threads[-1].start()
        for thread in threads:
            thread.join()
        time.sleep(0.001)


def only_generators():
    while True:
        generators(1000)  # -> generators shared


def only_functions():
    while True:
        functions(1000)  # -> functions


def only_executed():
    while True:
        executed(60)  # -> executed


for target in (work, churn, only_generators, only_functions, only_executed):
    threading.Thread(target=target, daemon=True).start()
print("ready", flush=True)
threading.Event().wait()
