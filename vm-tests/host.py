"""A guest with probingd installed, as its administrator sees it: packages, units, files, rows, and a job beside it."""

from __future__ import annotations

import json
import re
import shlex
import time
from collections.abc import Callable
from itertools import groupby
from typing import Any, TypeVar

from figures import Figures
from guest import Guest
from waiting import until

__all__ = ("JOB", "Host")

JOB = "guest/127.0.0.1:29500"
RANKS = (0, 1)
CALLS_PER_S = 10
# Where a removal may leave nothing. Records and caches of dpkg and apt change with any package.
_FILES = (
    "find / -xdev -not -path '/var/*/dpkg*' -not -path '/var/*/apt/*' -not -path '/var/cache/*' -not -path '/var/log/*'"
    " -not -path '/tmp/*' -not -path '/var/tmp/*'; find /sys/fs/bpf; find /run -name 'probing*'"
)
# The deadline on a guest of the usual speed; Guest.slowness is the factor for slower guests.
_DEADLINE_S = 240.0
T = TypeVar("T")


class Host:
    """A guest with probingd. Methods raise GuestFailed for commands that fail in the guest."""

    def __init__(self, guest: Guest, figures: Figures) -> None:
        self.guest = guest
        self.figures = figures
        self.files_before = self.files()
        begun = time.monotonic()
        # apt would first hash the file for a minute; only the upgrade is made by apt.
        guest.run("dpkg --install /payload/old.deb")
        figures["install, s"] = round(time.monotonic() - begun, 1)
        if guest.slowness > 1:
            self._relax_units()

    @property
    def deadline_s(self) -> float:
        """The seconds for which a test waits for any condition on this guest."""
        return _DEADLINE_S * self.guest.slowness

    def until(self, condition: Callable[[], T], *, what: str | Callable[[], object], poll_s: float = 1.0) -> T:
        """``waiting.until`` with the deadline of this guest."""
        return until(condition, self.deadline_s, what=what, poll_s=poll_s)

    def files(self) -> set[str]:
        return set(self.guest.run(_FILES).splitlines())

    def _relax_units(self) -> None:
        """Multiplies the limits of our units by the slowness of the guest."""
        units = "/usr/lib/systemd/system/probingd*.service"
        lines = self.guest.run(f"grep -HE '^(TimeoutStartSec|WatchdogSec)=[0-9]+$' {units}").splitlines()
        for unit, group in groupby((line.rpartition("/")[2].split(":") for line in lines), lambda words: words[0]):
            limits = [words[1].split("=") for words in group]
            text = "".join(f"{name}={int(value) * self.guest.slowness:.0f}\n" for name, value in limits)
            folder = f"/etc/systemd/system/{unit}.d"
            self.guest.run(f"mkdir -p {folder}")
            self.guest.write(f"{folder}/slow-guest.conf", f"[Service]\n{text}")
            self.files_before |= {folder, f"{folder}/slow-guest.conf"}
        self.guest.run("systemctl daemon-reload")

    def start(self) -> float:
        """Starts the daemon; returns the seconds that `systemctl start` took."""
        begun = time.monotonic()
        self.guest.run("systemctl start probingd")
        return time.monotonic() - begun

    def start_job(self) -> None:
        """Starts two ranks that call all_reduce CALLS_PER_S times a second."""
        for rank in RANKS:
            self.guest.write(f"/run/systemd/system/rank{rank}.service", self.job_unit(rank))
        self.guest.run("systemctl daemon-reload; systemctl start rank0 rank1")
        self.until(lambda: min(self.calls()) > 1, what="calls of both ranks", poll_s=0.5)

    def job_unit(self, rank: int) -> str:
        """Returns the text of a unit that runs a rank."""
        size = len(RANKS)
        environment = f"RANK={rank} LOCAL_RANK={rank} WORLD_SIZE={size} MASTER_ADDR=127.0.0.1 MASTER_PORT=29500"
        return f"""[Service]
Environment=NCCL_DOUBLE_DIR=/run/job {environment}
ExecStartPre=mkdir -p /run/job
ExecStart=python3 /payload/train.py /payload/doubles /run/job {CALLS_PER_S}
[Install]
WantedBy=multi-user.target
"""

    def stop_job(self) -> None:
        self.guest.run("systemctl stop rank0 rank1; rm -rf /run/job")

    def calls(self) -> list[int]:
        """Returns the number of calls that have returned in each rank."""
        found = self.guest.run("cat /run/job/calls-*", check=False).split()
        return [int(number) for number in found] if len(found) == len(RANKS) else [0] * len(RANKS)

    def ctl(self, command: str) -> Any:
        """Returns the JSON that `probingctl` prints. Exit status 3 means a finding about a job: no error here."""
        status, out, err = self.guest.result(f"probingctl -f json --timeout {self.deadline_s:.0f} {command}")
        assert status in (0, 3), f"probingctl {command} exited with {status}: {err}"
        return json.loads(out)

    def check(self) -> dict[str, dict[str, str]]:
        """Returns the lines of `probingd check` by name."""
        lines = json.loads(self.guest.result("probingd check -f json")[1])
        return {line["name"]: line for line in lines}

    def rows(self, sql: str) -> list[dict[str, Any]]:
        return list(self.ctl(f"query {shlex.quote(sql)}"))

    def wait_for_rows(self) -> list[dict[str, Any]]:
        """Waits until the rows of each rank include the calls that it has made by now; returns their ``spans``."""
        wanted = self.calls()

        def there() -> list[dict[str, Any]]:
            spans = self.spans()
            last = {row["rank"]: row["hi"] for row in spans}
            return spans if all(last.get(rank, 0) >= wanted[rank] - 1 for rank in RANKS) else []

        return self.until(there, what=lambda: f"calls {wanted}; there are {self.spans()}")

    def spans(self, where: str = "true") -> list[dict[str, Any]]:
        """Returns, for each rank, the first and last sequence number of its operations, and its number of rows."""
        return self.rows(
            "SELECT rank, min(seq) AS lo, max(seq) AS hi, count(*) AS n, count(DISTINCT seq) AS different"
            f" FROM comm.ops WHERE job = '{JOB}' AND op = 'all_reduce' AND {where} GROUP BY rank ORDER BY rank"
        )

    def check_no_gap(self) -> None:
        """Checks that each call of the job, since the first call that the daemon saw, is one row."""
        spans = self.wait_for_rows()
        assert [span["rank"] for span in spans] == list(RANKS)
        for span in spans:
            assert span["n"] == span["different"] == span["hi"] - span["lo"] + 1, spans

    def show(self, unit: str, name: str) -> str:
        """Returns a property of a unit."""
        return self.guest.run(f"systemctl show --value -p {name} {unit}").strip()

    def kill(self, unit: str) -> None:
        """Kills the main process of ``unit`` and waits until another one runs and is ready."""
        killed = self.show(unit, "MainPID")
        self.guest.run(f"kill -9 {killed}")
        self.until(
            lambda: self.show(unit, "MainPID") not in (killed, "0") and self.show(unit, "ActiveState") == "active",
            what=f"a new process of {unit}",
            poll_s=0.5,
        )

    def processes(self) -> list[dict[str, str]]:
        """Returns the ``kind`` (collector, reader...) of each process, its ``user``, and two masks of capabilities."""
        script = (
            "for group in /sys/fs/cgroup/probingd.slice/*; do for pid in $(cat $group/cgroup.procs 2>/dev/null); do"
            " echo $(basename $group) $(stat -c %U /proc/$pid) $(sed -n 's/^CapPrm:\\t//p' /proc/$pid/status)"
            " $(sed -n 's/^CapBnd:\\t//p' /proc/$pid/status); done; done"
        )
        lines = (line.split() for line in self.guest.run(script).splitlines())
        names = ("kind", "user", "permitted", "bounding")
        found = [dict(zip(names, words, strict=True)) for words in lines if len(words) == len(names)]
        return [{**one, "kind": re.split("[@.]", one["kind"].removeprefix("probingd-"))[0]} for one in found]
