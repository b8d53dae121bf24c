"""Works like a trainer, and checks its own results: computes, allocates, and as the arguments say uses ``threads``,
``fork``s and gets ``signals``. Answers each line on stdin with "well" after 100 further rounds. Ends at a wrong result.
"""

import os
import select
import signal
import sys
import threading

step = 0
wrong = []
handled = [0]


class Point:
    def __init__(self, x):
        self.x = x


def compute():
    total = 0.0
    for i in range(300):
        total += i * 0.5
    parts = [str(i) * 3 for i in range(60)]
    table = {part: Point(len(part)) for part in parts}
    numbers = sum(point.x for point in table.values())
    try:
        int("x")
    except ValueError:
        numbers += 1
    return total, numbers, "".join(parts)[:9]


EXPECTED = (22425.0, 331, "000111222")


def check():
    found = compute()
    if found != EXPECTED:
        wrong.append(found)


def beside():
    while not wrong:
        check()


def forked():
    pid = os.fork()
    if not pid:
        os._exit(0 if compute() == EXPECTED else 3)
    if os.waitpid(pid, 0)[1]:
        wrong.append("child")


def on_alarm(_number, _frame):
    handled[0] += 1


def main(kinds):
    global step
    if "signals" in kinds:
        signal.signal(signal.SIGALRM, on_alarm)
        signal.setitimer(signal.ITIMER_REAL, 0.003, 0.003)
    if "threads" in kinds:
        for _ in range(2):
            threading.Thread(target=beside, daemon=True).start()
    print("ready", flush=True)
    answer_at = None
    while not wrong:
        check()
        step += 1
        if "forks" in kinds and step % 20 == 0:
            forked()
        if answer_at is None and step % 10 == 0 and select.select([0], [], [], 0)[0]:
            if not os.read(0, 64):
                return
            answer_at = step + 100
        if answer_at is not None and step >= answer_at:
            print("well", flush=True)
            answer_at = None
    print("wrong", wrong[0], flush=True)
    os._exit(3)


main(sys.argv[1:])
