"""The cost of open tabs of ``probingctl web`` to the daemon: CPU without tabs and with ten, in turns, beside a job.

Half of the tabs show all jobs, half the ranks of one job. The cost of the page's own server is shown as well.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import random
import statistics
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from at_rest import Tree
from running import BIN, BenchDaemon, cpu_ns, job
from statistics_of_blocks import table

HERE = Path(__file__).resolve().parent
# The cost budget of the page, % of a core.
BUDGET = 2.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tabs", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=20)
    parser.add_argument("--rounds", type=int, default=6)
    options = parser.parse_args()
    daemon = BenchDaemon()
    with contextlib.ExitStack() as ends:
        ends.callback(daemon.close)
        folder = Path(tempfile.mkdtemp(prefix="probingd-bench-"))
        ends.enter_context(job(HERE / "timed_job.py", folder / "steps", "64", "0.02"))
        daemon.start()
        while not (name := job_name(daemon)):
            time.sleep(0.5)
        server, port, cookie = ends.enter_context(page(daemon))
        found: dict[str, list[float]] = {"no tab": [], f"{options.tabs} tabs": [], "the page's server": []}
        chooser = random.Random(7)
        for _ in range(options.rounds):
            for phase in chooser.sample(["no tab", f"{options.tabs} tabs"], 2):
                with tabs(port, cookie, name, 0 if phase == "no tab" else options.tabs):
                    # A view goes on for some seconds after its last reader has left.
                    time.sleep(12)
                    used, own = measured(daemon, server, options.seconds)
                found[phase].append(used)
                if phase != "no tab":
                    found["the page's server"].append(own)
    rows = [
        {
            "state": state,
            "CPU, % of a core, median (range)": f"{statistics.median(v):.2f} ({min(v):.2f} to {max(v):.2f})",
            "rounds": len(v),
        }
        for state, v in found.items()
    ]
    print(table(rows))
    more = statistics.median(found[f"{options.tabs} tabs"]) - statistics.median(found["no tab"])
    print(f"\n{options.tabs} tabs cost the daemon {more:.2f} % of a core (budget {BUDGET:g})")


def job_name(daemon: BenchDaemon) -> str:
    lines = daemon.ctl("query", "SELECT DISTINCT job FROM comm.progress", "-f", "csv").splitlines()
    return lines[1] if len(lines) > 1 else ""


@contextlib.contextmanager
def page(daemon: BenchDaemon) -> Iterator[tuple[int, int, str]]:
    """Yields the pid of the server, its port and the cookie of a session."""
    command = [BIN / "probingctl", "-t", f"unix:{daemon.socket}", "web", "--port", "0", "--no-browser"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as made:
        try:
            assert made.stdout is not None
            host, _, key = made.stdout.readline().rpartition("http://127.0.0.1:")[2].strip().partition("/?key=")
            connection = http.client.HTTPConnection("127.0.0.1", int(host), timeout=30)
            connection.request("GET", f"/?key={key}")
            cookie = connection.getresponse().headers["set-cookie"].partition(";")[0]
            connection.close()
            yield made.pid, int(host), cookie
        finally:
            made.kill()


@contextlib.contextmanager
def tabs(port: int, cookie: str, name: str, number: int) -> Iterator[None]:
    """Reads ``number`` live views, as browsers do."""
    made = []
    for n in range(number):
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        path = "/api/live/jobs" if n % 2 else f"/api/live/job?job={name}"
        connection.request("GET", path, headers={"Cookie": cookie})
        made.append((connection, connection.getresponse()))
    threads = [threading.Thread(target=read, args=(answer,)) for _, answer in made]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        for connection, answer in made:
            with contextlib.suppress(OSError):
                connection.sock.shutdown(2)
            connection.close()
            del answer
        for thread in threads:
            thread.join()


def read(answer: http.client.HTTPResponse) -> None:
    # http.client raises these errors if its connection is closed while it reads.
    with contextlib.suppress(OSError, http.client.HTTPException, AttributeError):
        while answer.read1(1 << 16):
            pass


def measured(daemon: BenchDaemon, server: int, seconds: float) -> tuple[float, float]:
    """Returns the CPU of the daemon's processes, and of the page's server, in % of a core."""
    assert daemon.process is not None
    before, own, begun = Tree.of(daemon.process.pid), cpu_ns([server]), time.monotonic()
    time.sleep(seconds)
    passed = (time.monotonic() - begun) * 1e9
    used = sum(Tree.of(daemon.process.pid).since(before).values())
    return used / passed * 100, (cpu_ns([server]) - own) / passed * 100


if __name__ == "__main__":
    main()
