"""A rank whose threads are in known functions: ``known_work.py FLAG``; it counts its steps in ``state.step``."""

import sys
import threading
import time


class State:
    __slots__ = ("loss", "step")

    def __init__(self):
        self.step = 0
        self.loss = 8.0


state = State()
api_token = "do not show this"


def spin(seconds):
    end = time.process_time() + seconds
    while time.process_time() < end:
        pass


def work():
    spin(0.05)
    state.step += 1
    state.loss = 8.0 / (1 + state.step)


def rest():
    time.sleep(9999)


def main():
    threading.Thread(target=rest, daemon=True).start()
    open(sys.argv[1], "w").close()
    while True:
        work()


main()
