"""Trees of files as kernels write them: /proc of processes and threads, control groups of version 1 and 2."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

__all__ = ("FakeProc", "group_tree")

# Fields of stat behind the name: Linux 3.10 has 42 of them, 5.17 and later 50.
_STAT = "{state} 1 {pid} {pid} 0 -1 {flags} 100 0 {major} 0 {user} {sys} 0 0 20 0 {threads} 0 {start} 9999 {rss} 1" + (
    " 0" * 14 + " {cpu}" + " 0" * 13
)
_STATUS = """Name:\tpython
Umask:\t0022
State:\tS (sleeping)
Pid:\t{pid}
VmRSS:\t    4096 kB
Cpus_allowed:\tff
Cpus_allowed_list:\t{cpus}
Mems_allowed_list:\t0
voluntary_ctxt_switches:\t{voluntary}
nonvoluntary_ctxt_switches:\t{involuntary}
"""


class FakeProc:
    """A procfs in a folder. Values that are not named are zero; ``start`` is in ticks since boot."""

    def __init__(self, root: Path) -> None:
        self.root = root
        (root / "self").mkdir(parents=True)
        (root / "self" / "mountinfo").write_text("")

    def __str__(self) -> str:
        return str(self.root)

    def process(self, pid: int, *, name: bytes = b"python", threads: int = 1, **values: Any) -> None:
        path = self.root / str(pid)
        self._task(path, pid, name, threads=threads, **values)
        (path / "cgroup").write_text(values.get("cgroup", "0::/\n"))

    def thread(self, pid: int, tid: int, *, name: bytes = b"python", **values: Any) -> None:
        path = self.root / str(pid) / "task" / str(tid)
        self._task(path, tid, name, **values)
        times = values.get("exec_ns", 0), values.get("delay_ns", 0)
        self._write(path / "schedstat", b"%d %d 7\n" % times)

    def ends(self, pid: int) -> None:
        shutil.rmtree(self.root / str(pid))

    def _task(self, path: Path, pid: int, name: bytes, **values: Any) -> None:
        path.mkdir(parents=True, exist_ok=True)
        known = {
            "state": "S",
            "flags": 0,
            "major": 0,
            "user": 0,
            "sys": 0,
            "threads": 1,
            "start": 100,
            "rss": 1,
            "cpu": 0,
            "cpus": "0-3",
            "voluntary": 0,
            "involuntary": 0,
            "wchan": "do_wait",
            **values,
        }
        self._write(path / "stat", b"%d (%s) %s\n" % (pid, name, _STAT.format(pid=pid, **known).encode()))
        self._write(path / "status", _STATUS.format(pid=pid, **known).encode())
        self._write(path / "wchan", known["wchan"].encode())

    def _write(self, path: Path, data: bytes) -> None:
        # In place, as a counter changes: a descriptor that is open sees the new value.
        with path.open("r+b" if path.exists() else "wb") as file:
            file.truncate()
            file.write(data)


def group_tree(root: Path, version: int, files: dict[str, str], path: str = "job/rank") -> tuple[str, str]:
    """Makes a hierarchy with ``files`` in the group ``path``; returns its mountinfo and the cgroup file of a member."""
    folder = root / path
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name).write_text(text)
    if version == 2:
        return f"30 20 0:26 / {root} rw - cgroup2 cgroup2 rw\n", f"0::/{path}\n"
    options = "rw,cpu,cpuacct,memory"
    return f"30 20 0:26 / {root} rw - cgroup cgroup {options}\n", f"5:memory:/{path}\n4:cpu,cpuacct:/{path}\n0::/\n"
