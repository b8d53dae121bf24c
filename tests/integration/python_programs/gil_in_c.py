"""The main thread sits in C and never gives the interpreter lock back; another one waits for it."""

import ctypes
import os
import threading


def waits():
    while True:
        sum(range(1000))


def hold():
    seconds = 10_000
    threading.Thread(target=waits, daemon=True).start()
    ctypes.PyDLL(None).write(1, b"ready\n", 6)
    ctypes.PyDLL(None).sleep(seconds)


hold()
os._exit(1)
