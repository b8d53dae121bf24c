"""Probes that users write, compiled by bcc and attached to real processes: what they saw is what was done, exactly."""

from __future__ import annotations

import ctypes.util
import json
import os
import shlex
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from user_probes_support import CODE, Bench, Process, build_target, tell
from waiting import until

from probing.api.errors import InternalError, PrivilegeError
from probing.daemon.user_probes.compiler import load
from probing.daemon.user_probes.spec import read_spec

AS_DAEMON = Path(__file__).with_name("user_probes_as_daemon.py")
BOTH_ROADS = pytest.mark.parametrize("bench", [True, False], ids=["uprobe_multi", "perf"], indirect=True)
UNCHECKED = """
static int told(struct pt_regs *ctx)
{
	u64 key = 1;
	u64 *found = seen.lookup(&key);
	*found = PT_REGS_PARM1(ctx);
	return 0;
}
"""


@pytest.fixture(scope="module")
def target_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_target(tmp_path_factory.mktemp("target"))


@pytest.fixture
def bench(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Bench]:
    bench = Bench(tmp_path, multi=getattr(request, "param", True))
    bench.probes.start()
    yield bench
    bench.probes.stop()


@pytest.fixture
def run(target_file: Path, bench: Bench) -> Iterator[Callable[..., Process]]:
    started: list[Process] = []

    def make(rank: int | None = 0, role: str = "trainer") -> Process:
        started.append(Process(target_file))
        if rank is not None:
            bench.known.add(started[-1], rank, role)
        return started[-1]

    yield make
    for process in started:
        process.close()


@BOTH_ROADS
def test_rows_are_what_was_done_in_the_trainers_and_nowhere_else(bench: Bench, run: Callable[..., Process]) -> None:
    ranks = [run(0), run(1)]
    loader, stranger = run(2, "data_loader"), run(None)
    bench.write("calls", tell(), CODE.replace("NAME", "calls"))
    bench.attached("calls", "in 2 processes")
    for process, count in zip([*ranks, loader, stranger], (1009, 499, 101, 97), strict=True):
        process.do("tell", count, 5, "\x1b[31mlongerthanthirteen")
    rows = bench.drained("user.calls")
    assert Counter(row["rank"] for row in rows) == {0: 1009, 1: 499}
    assert [row["number"] for row in rows if row["rank"] == 1] == list(range(5, 504))
    assert {row["small"] for row in rows} == set(range(0, -1009, -1))
    assert {row["said"] for row in rows} == {"\\x1b[31mlongert"}
    who = {(row["pid"], row["start_ns"], row["tid"], row["job"], row["run"], row["node"]) for row in rows}
    assert who == {(p.pid, p.start_ns, p.pid, "job-1", "run-1", "node-1") for p in ranks}
    assert bench.rows.losses == []


def test_with_the_rights_of_the_collector(open_tmp_path: Path) -> None:
    """And a tracepoint, which is hit by all, is one of trainers only."""
    rights = "-all,+bpf,+perfmon,+sys_ptrace,+dac_read_search"
    folder = open_tmp_path / "own"
    folder.mkdir()
    shutil.chown(folder, "probing", "probing")
    words = [
        "setpriv",
        "--reuid=probing",
        "--regid=probing",
        "--clear-groups",
        f"--inh-caps={rights}",
        f"--ambient-caps={rights}",
        f"--bounding-set={rights}",
        sys.executable,
        str(AS_DAEMON),
        str(folder),
    ]
    # The kernel's tracing directory is not mounted everywhere.
    mount = "mountpoint -q /sys/kernel/tracing || mount -t tracefs tracefs /sys/kernel/tracing"
    script = f"{mount}; exec {shlex.join(words)}"
    done = subprocess.run(["unshare", "--mount", "sh", "-c", script], capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {
        "calls": {"0": 103},
        "parents": {"0": 53},
        "capabilities": "000000c000080004",
        "losses": 0,
    }


def test_the_examples_count_loads_and_allocations(bench: Bench, run: Callable[..., Process]) -> None:
    process = run(3)
    library = ctypes.util.find_library("m")
    for name in ("library_loads", "large_allocations"):
        bench.copy(name)
        bench.attached(name, "in 1 process")
    process.do("dlopen", 7, text=str(library))
    process.do("dlopen", 5, text="/no/such/library.so")
    process.do("malloc", 11, 64 << 20)
    process.do("malloc", 13, (64 << 20) - 8192)
    loads = bench.drained("user.library_loads")
    assert Counter((row["path"], row["failed"], row["rank"]) for row in loads) == {
        (library, 0, 3): 7,
        ("/no/such/library.so", 1, 3): 5,
    }
    assert all(0 < row["duration_ns"] < 60 * 10**9 for row in loads)
    allocations = bench.rows.of("user.large_allocations")
    assert Counter((row["anonymous"], row["rank"]) for row in allocations) == {(1, 3): 11}
    # malloc asks for its own header and whole pages.
    assert {row["size_bytes"] for row in allocations} == {(64 << 20) + 4096}
    maps = Path(f"/proc/{process.pid}/maps").read_text().splitlines()
    inside = [line.split()[0].split("-") for line in maps if "libc.so" in line]
    assert all(any(int(a, 16) <= row["caller"] < int(b, 16) for a, b in inside) for row in allocations)


def test_what_is_over_the_budget_is_counted_and_the_probe_rests(bench: Bench, run: Callable[..., Process]) -> None:
    process = run(0)
    bench.write("calls", tell(budget=211), CODE.replace("NAME", "calls"))
    bench.attached("calls", "in 1 process")
    with bench.known.held:
        process.do("tell", 20_011, 0, "x")
    bench.degraded("calls", "hit more than 211 times a second")
    bench.attached("calls", "in 0 processes")
    rows = len(bench.drained("user.calls"))
    assert rows >= 211
    until(lambda: rows + bench.rows.refused("user.calls") == 20_011, what="each call is a row or a loss")
    assert {loss.stage for loss in bench.rows.losses} == {"kernel"}
    # While it rests, it costs nothing and sees nothing.
    process.do("tell", 101, 0, "x")
    assert len(bench.drained("user.calls")) == rows
    assert bench.rows.refused("user.calls") == 20_011 - rows


def test_code_that_does_not_compile_says_where(bench: Bench, run: Callable[..., Process]) -> None:
    process = run(0)
    bench.write("calls", tell(), "\n\nstatic int told(struct pt_regs *ctx)\n{\n\treturn 1 +;\n}\n")
    bench.write("other", tell(), CODE.replace("NAME", "other"))
    where = f"{bench.folder}/calls.c:5:12"
    state = bench.degraded("calls", f"calls.c does not compile: {where}: error: expected expression")
    assert state.detail == ""
    bench.attached("other", "in 1 process")
    process.do("tell", 13, 0, "x")
    assert len(bench.drained("user.other")) == 13
    bench.write("calls", tell(), CODE.replace("NAME", "calls"))
    bench.attached("calls", "in 1 process")
    process.do("tell", 17, 0, "x")
    assert (len(bench.drained("user.calls")), len(bench.rows.of("user.other"))) == (17, 30)


def test_code_that_the_verifier_refuses_says_why(bench: Bench) -> None:
    bench.write("calls", tell(), "BPF_HASH(seen);\n" + UNCHECKED)
    state = bench.degraded("calls", "the kernel refuses calls.c: ")
    assert "invalid mem access" in state.reason


def test_where_there_is_no_bcc(bench: Bench) -> None:
    bench.probes.stop()
    bench.write("calls", tell(), CODE.replace("NAME", "calls"))
    spec = read_spec(bench.folder, "calls")
    with pytest.raises(PrivilegeError, match="bcc is not installed") as missing:
        load(spec, bench.folder, bench.tables.folder, python=sys.executable)
    assert "python3-bpfcc" in missing.value.hint
    with pytest.raises(PrivilegeError, match="/no/python cannot be run"):
        load(spec, bench.folder, bench.tables.folder, python="/no/python")
    with pytest.raises(InternalError, match="ended without an answer"):
        load(spec, bench.folder, bench.tables.folder, python=str(shutil.which("false")))


def test_a_function_that_is_missing_is_named(bench: Bench, run: Callable[..., Process]) -> None:
    run(0)
    bench.write("calls", tell().replace('symbol = "tell"', 'symbol = "told"'), CODE.replace("NAME", "calls"))
    bench.degraded("calls", "no function told in target")


def test_a_change_replaces_one_probe_and_rows_of_before_stay(bench: Bench, run: Callable[..., Process]) -> None:
    process = run(0)
    code = CODE.replace("NAME", "calls")
    bench.write("calls", tell(), code)
    bench.attached("calls", "in 1 process")
    process.do("tell", 23, 0, "x")
    before = bench.running("calls")
    wider = tell() + '[[columns]]\nname = "more"\ntype = "u8"\ndoc = "More."\n'
    bench.write("calls", wider, code.replace("return", "event.more = 9;\n\treturn"))
    until(lambda: bench.running("calls") not in (None, before))
    assert "more" in bench.tables["user.calls"].logical.names
    bench.attached("calls", "in 1 process")
    process.do("tell", 29, 0, "x")
    rows = bench.drained("user.calls")
    assert Counter(row.get("more") for row in rows) == {None: 23, 9: 29}
    # The column stays, and is NULL, when the probe has it no longer.
    bench.write("calls", tell(), code)
    until(lambda: (s := bench.state("calls")) and s.state == "running")
    bench.write("calls", tell(number="u64"), code)
    bench.degraded("calls", "user.calls.number was i64 and would now be u64")
    for suffix in (".toml", ".c"):
        (bench.folder / f"calls{suffix}").unlink()
    until(lambda: bench.probes.probes() == [])
    process.do("tell", 31, 0, "x")
    assert len(bench.drained("user.calls")) == 52
    assert "user.calls" in bench.tables


def test_a_file_that_others_may_write_is_not_run(bench: Bench) -> None:
    bench.write("calls", tell(), CODE.replace("NAME", "calls"))
    (bench.folder / "calls.c").chmod(0o666)
    state = bench.degraded("calls", "calls.c is writable by users other than its owner")
    assert "chmod go-w" in state.reason
    (bench.folder / "calls.c").chmod(0o644)
    until(lambda: (s := bench.state("calls")) and s.state == "running")
    os.chown(bench.folder / "calls.toml", 65534, -1)
    bench.degraded("calls", "calls.toml belongs to user 65534")


def test_a_pause_takes_probes_off_and_is_a_gap(bench: Bench, run: Callable[..., Process]) -> None:
    process = run(0)
    bench.write("calls", tell("uretprobe"), CODE.replace("NAME", "calls"))
    bench.attached("calls", "in 1 process")
    process.do("tell", 3, 0, "x")
    bench.probes.pause(True)
    bench.attached("calls", "in 0 processes")
    process.do("tell", 5, 0, "x")
    bench.probes.pause(False)
    bench.attached("calls", "in 1 process")
    process.do("tell", 7, 0, "x")
    assert len(bench.drained("user.calls")) == 10
    assert [(loss.reason, loss.count) for loss in bench.rows.losses] == [("all probes were paused", None)]


@BOTH_ROADS
def test_a_probe_in_all_processes(bench: Bench, run: Callable[..., Process], target_file: Path) -> None:
    trainer, stranger = run(0), run(None)
    toml = 'processes = "all"\n' + tell().replace('library = "target"', f'library = "{target_file}"')
    bench.write("calls", toml, CODE.replace("NAME", "calls"))
    bench.attached("calls", "in all processes")
    trainer.do("tell", 37, 0, "x")
    stranger.do("tell", 41, 0, "x")
    rows = bench.drained("user.calls")
    found = Counter((row["pid"], row["start_ns"], row["job"], row["rank"]) for row in rows)
    assert found == {(trainer.pid, trainer.start_ns, "job-1", 0): 37, (stranger.pid, stranger.start_ns, None, None): 41}
