"""What tests of users' probes share: a directory of probes, a target, and stand-ins for readers and discovery."""

from __future__ import annotations

import subprocess
import threading
from pathlib import Path
from typing import Any

import pyarrow as pa
from fakes import LiveReaders
from waiting import until

from probing.daemon.clock import SystemClock
from probing.daemon.elf.symbols import find_symbols
from probing.daemon.processes.procfs import parse_stat
from probing.daemon.source import Identity, Loss
from probing.daemon.user_probes.manager import ProbeState, UserProbes
from probing.daemon.user_tables import UserTables

EXAMPLES = Path(__file__).parents[2] / "examples" / "probes"

TARGET = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

__attribute__((noinline)) long tell(long number, int wide, const char *text)
{
	asm volatile("" ::"r"(number), "r"(wide), "r"(text) : "memory");
	return number;
}

int main(void)
{
	char what[16], text[4096];
	long count, value;
	void *volatile memory;

	while (scanf("%15s %ld %ld %4095s", what, &count, &value, text) == 4) {
		for (long i = 0; i < count; i++) {
			if (!strcmp(what, "tell"))
				tell(value + i, (int)-i, text);
			else if (!strcmp(what, "malloc"))
				free(memory = malloc(value));
			else if (!strcmp(what, "file"))
				munmap(mmap(0, value, PROT_READ, MAP_SHARED, 0, 0), value);
			else if (!strcmp(what, "dlopen"))
				dlopen(text, RTLD_NOW);
			else if (!strcmp(what, "getppid"))
				getppid();
			else if (!strcmp(what, "exec"))
				execl(text, text, NULL);
		}
		puts("done");
		fflush(stdout);
	}
	return 0;
}
"""


TELL = """
description = "Calls of tell."
budget = {budget}
[[attach]]
kind = "{kind}"
library = "target"
symbol = "tell"
function = "told"
[[columns]]
name = "number"
type = "{type}"
doc = "What it was told."
[[columns]]
name = "small"
type = "i32"
doc = "A negative number."
[[columns]]
name = "said"
type = "text"
bytes = 13
doc = "A text."
"""
CODE = """
static int told(struct pt_regs *ctx)
{
	struct NAME_event event = {};
	event.number = PT_REGS_PARM1(ctx);
	event.small = PT_REGS_PARM2(ctx);
	bpf_probe_read_user_str(event.said, sizeof(event.said), (void *)PT_REGS_PARM3(ctx));
	return probing_emit(&event);
}
"""


def tell(kind: str = "uprobe", budget: int = 1_000_000, number: str = "i64") -> str:
    return TELL.format(kind=kind, budget=budget, type=number)


def build_target(folder: Path) -> Path:
    source = folder / "target.c"
    source.write_text(TARGET)
    subprocess.run(["cc", "-O1", "-o", folder / "target", source, "-ldl"], check=True)
    return folder / "target"


class Process:
    """A target: executes commands, each of which returns when it is done."""

    def __init__(self, path: Path) -> None:
        self.process = subprocess.Popen([path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.pid = self.process.pid
        until(lambda: b"libc.so" in Path(f"/proc/{self.pid}/maps").read_bytes())
        self.start_ns = parse_stat(Path(f"/proc/{self.pid}/stat").read_bytes()).start_ns

    def do(self, what: str, count: int, value: int = 0, text: str = "-") -> None:
        assert self.process.stdin
        assert self.process.stdout
        self.process.stdin.write(f"{what} {count} {value} {text}\n")
        self.process.stdin.flush()
        assert self.process.stdout.readline() == "done\n"

    def close(self) -> None:
        assert self.process.stdin
        assert self.process.stdout
        self.process.stdin.close()
        self.process.wait(10)
        self.process.stdout.close()


class Known:
    """Discovery with the identities that the test gives. While ``held`` is, no probe is attached or detached."""

    def __init__(self) -> None:
        self.who: list[Identity] = []
        self.held = threading.Lock()

    def add(self, process: Process, rank: int = 0, role: str = "trainer") -> None:
        self.who.append(Identity(process.pid, process.start_ns, "job-1", "run-1", role, rank))

    def live(self) -> list[Identity]:
        with self.held:
            return list(self.who)

    def identity(self, pid: int, start_ns: int) -> Identity | None:
        return next((who for who in self.who if (who.pid, who.start_ns) == (pid, start_ns)), None)


class Rows:
    """A sink that keeps everything."""

    def __init__(self) -> None:
        self.batches: dict[str, list[pa.RecordBatch]] = {}
        self.losses: list[Loss] = []
        self._lock = threading.Lock()

    def put(self, table: str, batch: pa.RecordBatch) -> None:
        with self._lock:
            self.batches.setdefault(table, []).append(batch)

    def lost(self, loss: Loss) -> None:
        with self._lock:
            self.losses.append(loss)

    def of(self, table: str) -> list[dict[str, Any]]:
        with self._lock:
            batches = [batch.set_column(1, "ts", batch["ts"].cast(pa.int64())) for batch in self.batches.get(table, ())]
        return [row for batch in batches for row in batch.to_pylist()]

    def refused(self, table: str) -> int:
        with self._lock:
            return sum(loss.count or 0 for loss in self.losses if loss.table == table)


class Bench:
    """A directory of probes that is watched, with everything around it."""

    def __init__(self, folder: Path, *, multi: bool = True) -> None:
        self.folder = folder / "probes.d"
        self.folder.mkdir(mode=0o755)
        self.rows, self.known = Rows(), Known()
        self.tables = UserTables(folder / "user_tables.json")
        self.probes = UserProbes(
            self.folder,
            self.tables,
            self.rows,
            self.known,
            LiveReaders(),
            find_symbols,
            "node-1",
            SystemClock(),
            multi=multi,
        )

    def write(self, name: str, toml: str, code: str) -> None:
        (self.folder / f"{name}.c").write_text(code)
        (self.folder / f"{name}.toml").write_text(toml)

    def copy(self, name: str) -> None:
        self.write(name, (EXAMPLES / f"{name}.toml").read_text(), (EXAMPLES / f"{name}.c").read_text())

    def running(self, name: str) -> object:
        """What runs of a probe; another object after a change."""
        return self.probes._probes[name].running

    def state(self, name: str) -> ProbeState | None:
        return next((state for state in self.probes.probes() if state.name == f"user:{name}"), None)

    def attached(self, name: str, where: str) -> ProbeState:
        def is_so() -> ProbeState | None:
            state = self.state(name)
            return state if state and state.detail.endswith(f": {where}") else None

        found: ProbeState = until(is_so, what=f"{name} {where}")
        return found

    def degraded(self, name: str, reason: str) -> ProbeState:
        def is_so() -> ProbeState | None:
            state = self.state(name)
            return state if state and state.state == "degraded" and reason in state.reason else None

        try:
            found: ProbeState = until(is_so, what=f"{name}: {reason}")
        except AssertionError as e:
            raise AssertionError(f"{e}; it is {self.state(name)}") from e
        return found

    def drained(self, table: str) -> list[dict[str, Any]]:
        self.probes.drain()
        return self.rows.of(table)
