"""Runs users' probes with the rights that it was started with, and prints how many rows each rank made."""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from user_probes_support import CODE, Bench, Process, build_target, tell

PARENTS = """
description = "Calls of getppid."
[[attach]]
kind = "tracepoint"
tracepoint = "syscalls:sys_enter_getppid"
function = "asked"
[[columns]]
name = "number"
type = "i64"
doc = "Of the system call."
"""
ASKED = """
static int asked(struct tracepoint__syscalls__sys_enter_getppid *args)
{
	struct parents_event event = {.number = args->__syscall_nr};
	return probing_emit(&event);
}
"""


def main(folder: Path) -> None:
    bench, target = Bench(folder), build_target(folder)
    trainer, stranger = Process(target), Process(target)
    bench.known.add(trainer)
    bench.write("calls", tell(), CODE.replace("NAME", "calls"))
    bench.write("parents", PARENTS, ASKED)
    bench.probes.start()
    bench.attached("calls", "in 1 process")
    bench.attached("parents", "in all processes, for 1")
    for process, count in ((trainer, 53), (stranger, 59)):
        process.do("getppid", count)
        process.do("tell", count + 50)
    ranks = {name: Counter(row["rank"] for row in bench.drained(f"user.{name}")) for name in ("calls", "parents")}
    status = Path("/proc/self/status").read_text().split()
    losses = len(bench.rows.losses)
    bench.probes.stop()
    for process in (trainer, stranger):
        process.close()
    print(json.dumps({**ranks, "capabilities": status[status.index("CapEff:") + 1], "losses": losses}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
