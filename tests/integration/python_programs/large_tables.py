"""Reads stdin below functions with a large line table each: as many as the argument says."""

import sys

MEGABYTE = 1 << 20


def innermost():
    print("ready", flush=True)
    sys.stdin.read()


def below(inner):
    def outer():
        inner()

    code = outer.__code__
    table = code.co_linetable + b"\xf8" * (MEGABYTE - 100 - len(code.co_linetable))
    outer.__code__ = code.replace(co_linetable=table)
    return outer


call = innermost
for _ in range(int(sys.argv[1])):
    call = below(call)
call()
