"""Variables that are replaced all the time, always by values that agree with themselves; a thread does the same."""

import threading


class Box:
    def __init__(self, n):
        self.a = n
        self.b = str(n)


BOTH = threading.Barrier(2)


def work(who):
    step = 0
    while True:
        step += 1
        if step == 1:
            BOTH.wait()
            if who == "main":
                print("ready", flush=True)
        pair = (step, step + 10**12)
        state = {"a": step, "b": [step, str(step)]}
        box = Box(step)
        text = str(step) * 8
        del pair, state, box, text
        pair = (step, step + 10**12)
        state = {"a": step, "b": [step, str(step)]}
        box = Box(step)
        text = str(step) * 8


threading.Thread(target=work, args=("other",), daemon=True).start()
work("main")
