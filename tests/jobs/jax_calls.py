"""Calls the double of JAX's gloo as it is told: ``jax_calls.py LIBRARY``, a command a line on stdin, then ``done``.

``create NAME FIRST COUNT RANK``; ``call NAME OPERATION TYPE COUNT KIND MICROSECONDS``; ``break NAME RANK RANKS``.
"""

from __future__ import annotations

import ctypes
import sys
import threading


def main() -> None:
    library = ctypes.CDLL(sys.argv[1])
    library.jax_double_create.restype = ctypes.c_void_p
    made: dict[str, ctypes.c_void_p] = {}
    print("ready", flush=True)
    for line in sys.stdin:
        word, name, *rest = line.split()
        numbers = [int(number) for number in rest]
        if word == "create":
            first, count, rank = numbers
            made[name] = ctypes.c_void_p(library.jax_double_create(first, count, ctypes.c_long(rank)))
        elif word == "break":
            library.jax_double_break(made[name], *map(ctypes.c_size_t, numbers))
        else:
            operation, kind_of_data, count, reduction, microseconds = numbers
            arguments = (made[name], operation, kind_of_data, ctypes.c_size_t(count), reduction, microseconds)
            if word == "begin":
                threading.Thread(target=library.jax_double_call, args=arguments, daemon=True).start()
            else:
                library.jax_double_call(*arguments)
        print("done", flush=True)


main()
