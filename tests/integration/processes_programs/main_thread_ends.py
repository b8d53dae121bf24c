"""Ends its main thread; another one goes on with its work."""

import ctypes
import os
import threading
import time

os.environ["RANK"] = "5"


def train_on() -> None:
    while state() != "Z":
        time.sleep(0.01)
    print("ended", flush=True)
    while True:
        time.sleep(0.05)


def state() -> str:
    with open("/proc/self/stat", encoding="ascii") as file:
        return file.read().rpartition(")")[2].split()[0]


threading.Thread(target=train_on).start()
SYS_EXIT = {"x86_64": 60, "aarch64": 93}[os.uname().machine]
# Without the GIL, which ctypes releases around the call.
ctypes.CDLL(None).syscall(SYS_EXIT, 0)
