"""A process that makes NCCL calls at a given rate; rows in the log and counted losses are compared with the calls.

The library is a double with NCCL's names and arguments, whose functions do nothing; probes, kernel, daemon and log are
real. Two runs stop the collector for a second in the middle.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path

from running import BenchDaemon, arguments, family
from statistics_of_blocks import table

# The functions begin with a push, like NCCL's functions: the kernel emulates this instruction, so a hit costs only a
# tenth of its usual cost.
FLAGS = ("-O1", "-w", "-fno-omit-frame-pointer", "-fcf-protection=none")
FUNCTIONS = ("AllReduce", "ReduceScatter", "AllGather", "Broadcast", "Reduce", "Send", "Recv", "GroupStart", "GroupEnd")
CALLER = r"""
#include <stdio.h>
#include <stdlib.h>
#include <time.h>
int ncclAllReduce(const void *, void *, size_t, int, int, void *, void *);
int enqueue(void) { return 0; }
static double now(void)
{
	struct timespec t;
	clock_gettime(CLOCK_MONOTONIC, &t);
	return t.tv_sec + t.tv_nsec / 1e9;
}
int main(int argc, char **argv)
{
	long calls = atol(argv[1]), rate = atol(argv[2]);
	char *comm = calloc(1, 1 << 21);
	getchar();
	double begin = now();
	for (long i = 0; i < calls; i++) {
		ncclAllReduce(comm, comm, 1000 + i % 7, 7, 0, comm, 0);
		if (i % 100 == 0)
			while (now() - begin < (double)i / rate)
				;
	}
	printf("%.0f\n", calls / (now() - begin));
	fflush(stdout);
	getchar();
	return 0;
}
"""


def build(folder: Path, source: str = CALLER) -> Path:
    library = "extern int enqueue(void);\n" + "".join(
        f"int nccl{name}(const void *s, void *r, unsigned long n, int t, int op, void *c, void *q)"
        " { return enqueue() + 1; }\n"
        for name in FUNCTIONS
    )
    (folder / "library.c").write_text(library)
    (folder / "caller.c").write_text(source)
    made = folder / "libnccl.so.2"
    subprocess.run(["cc", *FLAGS, "-shared", "-fPIC", "-o", made, folder / "library.c"], check=True)
    linked = ["-rdynamic", folder / "caller.c", made, f"-Wl,-rpath,{folder}"]
    subprocess.run(["cc", "-O1", "-w", "-o", folder / "caller", *linked], check=True)
    return folder / "caller"


def collector_of(daemon: BenchDaemon) -> int:
    assert daemon.process is not None
    for pid in family(daemon.process.pid):
        if "probing.daemon.collector" in arguments(pid):
            return pid
    raise SystemExit("the daemon has no collector")


def run(caller: Path, calls: int, rate: int, ring_bytes: int, stall_s: float) -> dict[str, object]:
    daemon = BenchDaemon()
    daemon.config.write_text(
        daemon.config.read_text() + f"[probes]\nhit_budget = 100000000\nring_bytes = {ring_bytes}\n"
    )
    with subprocess.Popen(
        [caller, str(calls), str(rate)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as job:
        daemon.start()
        assert job.stdin is not None
        assert job.stdout is not None
        job.stdin.write("\n")
        job.stdin.flush()
        if stall_s:
            time.sleep(1.0)
            os.kill(collector_of(daemon), signal.SIGSTOP)
            time.sleep(stall_s)
            os.kill(collector_of(daemon), signal.SIGCONT)
        reached = int(job.stdout.readline())
        time.sleep(2.5)
        where = f"WHERE pid = {job.pid} AND op = 'all_reduce'"
        rows = count(daemon, f"SELECT count(*) AS n FROM comm.ops {where}")
        lost = count(daemon, "SELECT coalesce(sum(count), 0)::BIGINT AS n FROM probing.losses WHERE stage = 'ring'")
        job.stdin.write("\n")
    daemon.close()
    return {
        "ring": f"{ring_bytes >> 20} MB",
        "stall of the collector": f"{stall_s:g} s",
        "calls": f"{calls:,}",
        "calls/s": f"{reached:,}",
        "rows": f"{rows:,}",
        "counted as lost": f"{lost:,}",
        "rows + lost == calls": rows + lost == calls,
    }


def count(daemon: BenchDaemon, sql: str) -> int:
    return int(json.loads(daemon.ctl("-f", "json", "query", sql))[0]["n"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rate", type=int, default=500_000)
    parser.add_argument("--seconds", type=float, default=4)
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="probingd-bench-nccl-"))
    folder.chmod(0o755)
    caller = build(folder)
    calls = int(options.rate * options.seconds)
    runs = [run(caller, calls, options.rate, ring << 20, stall) for ring, stall in ((16, 0), (16, 1), (256, 1))]
    shutil.rmtree(folder)
    print(table(runs))


if __name__ == "__main__":
    main()
