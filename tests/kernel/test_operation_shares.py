"""Open operations on the live kernel: a process with very many takes no room from others, and loses its own."""

from __future__ import annotations

import mmap
import signal
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fakes import Processes, Sink

from probing.daemon.bpf.build import compile_object
from probing.daemon.bpf.session import Session
from probing.daemon.clock import ClockPair, SystemClock
from probing.daemon.collector.losses import LossMeter
from probing.daemon.elf.symbols import find_symbols
from probing.daemon.nccl_uprobes.operations.source import OBJECTS, RING, CollectivesSource
from probing.daemon.processes.liveness import is_alive, process_now

# As in collectives.bpf.h: an eighth of the map.
SHARE = 4096
MANY = 40_000
PROBE = r"""
#include "collectives.bpf.h"

UPROBE(test_open)
{
	struct call *call = call_begin(ctx, probe, BACKEND_GLOO);
	struct operation_key key = operation_key(argument(ctx, 0));

	if (!call)
		return;
	call->record.object = key.object;
	operation_open(&key, &call->record);
}

UPROBE(test_close)
{
	struct operation_key key = operation_key(argument(ctx, 0));

	operation_done(&key, probe->now);
}

char LICENSE[] SEC("license") = "GPL";
"""
# Commands on stdin: a letter, the first object and the number of objects.
TARGET = r"""
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

#ifdef __x86_64__
void open_one(long object);
void close_one(long object);
asm(".globl open_one\n.type open_one, @function\nopen_one:\npush %rbp\npop %rbp\nret\n"
    ".size open_one, .-open_one\n.globl close_one\n.type close_one, @function\nclose_one:\npush %rbp\npop %rbp\nret\n"
    ".size close_one, .-close_one\n");
#else
__attribute__((noipa)) void open_one(long object) { asm volatile("" ::"r"(object) : "memory"); }
__attribute__((noipa)) void close_one(long object) { asm volatile("nop" ::"r"(object) : "memory"); }
#endif

static long first, count;

static void *close_all(void *none)
{
	for (long i = first; i < first + count; i++)
		close_one(i);
	return none;
}

static void *open_and_close(void *number)
{
	for (long i = first + (long)number; i < first + count; i += 4) {
		open_one(i);
		close_one(i);
	}
	return NULL;
}

int main(int argc, char **argv)
{
	pthread_t thread, threads[4];
	char command;
	pid_t child;

	setvbuf(stdin, NULL, _IONBF, 0);
	while (scanf(" %c %ld %ld", &command, &first, &count) == 3) {
		switch (command) {
		case 'o':
			for (long i = first; i < first + count; i++)
				open_one(i);
			break;
		case 'c':
			close_all(NULL);
			break;
		case 't': /* closes in another thread */
			pthread_create(&thread, NULL, close_all, NULL);
			pthread_join(thread, NULL);
			break;
		case 'm': /* opens and closes in four threads, each operation in one of them */
			for (long i = 0; i < 4; i++)
				pthread_create(&threads[i], NULL, open_and_close, (void *)i);
			for (long i = 0; i < 4; i++)
				pthread_join(threads[i], NULL);
			break;
		case 'w': /* closes each operation in two threads at once */
			for (long i = 0; i < 2; i++)
				pthread_create(&threads[i], NULL, close_all, NULL);
			for (long i = 0; i < 2; i++)
				pthread_join(threads[i], NULL);
			break;
		case 'f': /* from now on a child executes the commands */
			child = fork();
			if (child) {
				waitpid(child, NULL, 0);
				return 0;
			}
			break;
		case 'e':
			execv(argv[0], argv);
			return 1;
		}
		printf("%d\n", getpid());
		fflush(stdout);
	}
	return argc == 0;
}
"""


class Target:
    """A process that opens and closes operations when told to; ``pid`` is the process that executes the commands."""

    def __init__(self, path: Path) -> None:
        self.process = subprocess.Popen([path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.pid = self.process.pid

    @property
    def start_ns(self) -> int:
        now = process_now(self.pid)
        assert now is not None
        return now.start_ns

    def do(self, command: str, first: int = 0, count: int = 0) -> None:
        assert self.process.stdin
        assert self.process.stdout
        self.process.stdin.write(f"{command} {first} {count}\n")
        self.process.stdin.flush()
        self.pid = int(self.process.stdout.readline())

    def replace(self) -> None:
        """Calls exec: the new program has answered when this returns."""
        assert self.process.stdin
        self.process.stdin.write("e 0 0\n")
        self.process.stdin.flush()
        self.do("c")

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()


class Time:
    """A clock whose monotonic time is put forward by hand."""

    def __init__(self) -> None:
        self.ahead_ns = 0

    def pair(self) -> ClockPair:
        pair = SystemClock().pair()
        return ClockPair(pair.mono_ns + self.ahead_ns, pair.boot_ns, pair.real_ns)


class Watched:
    """A session with the probes on the program, its source and its meter of losses."""

    def __init__(self, session: Session, path: Path) -> None:
        self.session = session
        self.source = CollectivesSource(session, Processes(), "node", find_symbols)
        self.clock, self.sink = Time(), Sink()
        self.blinded: list[int | None] = []
        with open(path, "rb") as file:
            for program, name in (("test_open", "open_one"), ("test_close", "close_one")):
                offset = find_symbols(file.fileno(), [name])[0].file_offset
                assert offset is not None
                session.attach_uprobe(program, file.fileno(), [offset], [1])
        self._meter = LossMeter(
            session,
            self.clock,  # type: ignore[arg-type]
            self.sink,
            {RING: "comm.ops"},
            self.source.probe_slots,
            0,
            {},
            list,
            lambda _, pid: self.blinded.append(pid),
        )

    def finished(self) -> Counter[tuple[int, str]]:
        """The number of records that came since the last call, by pid and state."""
        ring = self.session.rings[RING]
        drained = ring.drain()
        ring.commit(drained.position)
        states = {3: "done", 5: "abandoned"}
        return Counter((int(r["tgid"]), states[int(r["state"])]) for r in drained.records)

    def open_by_pid(self) -> Counter[int]:
        return Counter(self.session.maps["operations"].items()[0]["tgid"].tolist())

    def counted(self) -> dict[int, int]:
        """The count of open operations by pid, as the programs keep it."""
        keys, shares = self.session.maps["operation_shares"].items()
        return dict(zip(keys["tgid"].tolist(), shares["open"].tolist(), strict=True))

    def new_losses(self) -> list[tuple[int | None, int | None]]:
        """(pid, count) of the losses since the last call."""
        self.clock.ahead_ns += 2_000_000_000
        before = len(self.sink.losses)
        self._meter.tick()
        losses = self.sink.losses[before:]
        assert all((loss.source, loss.table) == (RING, "comm.ops") for loss in losses)
        return [(loss.pid, loss.count) for loss in losses]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the program and of the object with its probes."""
    folder = tmp_path_factory.mktemp("operations")
    (folder / "target.c").write_text(TARGET)
    command = ["cc", "-O1", "-Wall", "-Werror", "-pthread", "-o", folder / "target", folder / "target.c"]
    subprocess.run(command, check=True)
    (folder / "operations.bpf.c").write_text(PROBE)
    compile_object(folder / "operations.bpf.c")
    return folder


@pytest.fixture
def targets(built: Path) -> Iterator[Callable[[], Target]]:
    started: list[Target] = []

    def start() -> Target:
        started.append(Target(built / "target"))
        return started[-1]

    yield start
    for target in started:
        target.close()


@pytest.fixture
def watch(built: Path, open_session: Callable[..., Session]) -> Callable[..., Watched]:
    def begin(**options: Any) -> Watched:
        return Watched(open_session(*OBJECTS, built / "operations.bpf.o", **options), built / "target")

    return begin


def test_a_process_with_very_many_open_operations_takes_none_from_another(
    watch: Callable[..., Watched], targets: Callable[[], Target]
) -> None:
    watched, many, other = watch(), targets(), targets()
    many.do("o", 0, MANY)
    other.do("o", 0, 1000)
    assert watched.open_by_pid() == {many.pid: SHARE, other.pid: 1000}
    other.do("c", 0, 1000)
    assert watched.finished() == {(other.pid, "done"): 1000}
    assert watched.new_losses() == [(many.pid, MANY - SHARE)]
    # No end was missed.
    assert watched.blinded == []
    # The first operations are followed to their ends; then there is room again.
    many.do("c", 0, MANY)
    assert watched.finished() == {(many.pid, "done"): SHARE}
    many.do("o", MANY, SHARE)
    assert watched.open_by_pid() == {many.pid: SHARE}
    assert watched.counted() == {many.pid: SHARE, other.pid: 0}
    assert watched.new_losses() == []
    assert watched.session.counters()[RING]["lost"] == 0


def test_operations_that_another_thread_closes_leave_the_share(
    watch: Callable[..., Watched], targets: Callable[[], Target]
) -> None:
    watched, target = watch(), targets()
    for number in range(3):
        target.do("o", number * SHARE, SHARE)
        target.do("t", number * SHARE, SHARE)
    # Several threads at once.
    target.do("m", 3 * SHARE, 2 * SHARE)
    assert watched.finished() == {(target.pid, "done"): 5 * SHARE}
    assert watched.counted() == {target.pid: 0}
    assert watched.new_losses() == []


def test_an_operation_for_which_two_threads_waited_ends_once(
    watch: Callable[..., Watched], targets: Callable[[], Target]
) -> None:
    watched, target = watch(), targets()
    for number in range(5):
        target.do("o", number * SHARE, SHARE)
        target.do("w", number * SHARE, SHARE)
    assert watched.finished() == {(target.pid, "done"): 5 * SHARE}
    assert watched.counted() == {target.pid: 0}
    assert watched.session.counters()[RING] == {"pushed": 5 * SHARE, "lost": 0}


def test_a_freed_object_is_replaced_when_the_share_is_used_up(
    watch: Callable[..., Watched], targets: Callable[[], Target]
) -> None:
    watched, target = watch(), targets()
    target.do("o", 0, SHARE)
    target.do("o", 0, 23)
    assert watched.finished() == {(target.pid, "abandoned"): 23}
    target.do("o", SHARE, 7)
    assert watched.new_losses() == [(target.pid, 7)]
    assert watched.counted() == watched.open_by_pid() == {target.pid: SHARE}


@pytest.mark.parametrize("reported", [True, False])
@pytest.mark.parametrize("end", ["exit", "kill"])
def test_the_end_of_a_process_frees_its_share(
    watch: Callable[..., Watched], targets: Callable[[], Target], end: str, reported: bool
) -> None:
    watched, target, other = watch(), targets(), targets()
    other.do("o", 0, 5)
    target.do("o", 0, SHARE + 1)
    start_ns = target.start_ns
    if end == "kill":
        target.process.send_signal(signal.SIGKILL)
    else:
        target.process.communicate()
    target.process.wait()
    if reported:
        assert watched.source.close_process(target.pid, start_ns) == SHARE
    else:
        assert watched.source.close_ended(is_alive) == SHARE
    assert watched.finished() == {(target.pid, "abandoned"): SHARE}
    assert watched.counted() == watched.open_by_pid() == {other.pid: 5}


def test_a_child_has_a_share_of_its_own(watch: Callable[..., Watched], targets: Callable[[], Target]) -> None:
    watched, target = watch(), targets()
    target.do("o", 0, SHARE + 1)
    parent = target.pid
    target.do("f")
    target.do("o", 0, SHARE + 3)
    assert parent != target.pid
    assert watched.counted() == watched.open_by_pid() == {parent: SHARE, target.pid: SHARE}
    assert sorted(watched.new_losses()) == sorted([(parent, 1), (target.pid, 3)])
    # What the child closes is its own.
    target.do("c", 0, SHARE)
    assert watched.counted() == {parent: SHARE, target.pid: 0}


def test_a_new_program_has_the_whole_share(watch: Callable[..., Watched], targets: Callable[[], Target]) -> None:
    watched, target = watch(), targets()
    target.do("o", 0, SHARE)
    before_ns = SystemClock().pair().mono_ns
    target.replace()
    target.do("o", SHARE, 1)
    assert watched.new_losses() == [(target.pid, 1)]
    # As the collector does when it reads of the exec.
    watched.source.ends_missed(before_ns, target.pid)
    assert watched.finished() == {(target.pid, "abandoned"): SHARE}
    target.do("o", 2 * SHARE, SHARE)
    assert watched.counted() == watched.open_by_pid() == {target.pid: SHARE}
    assert watched.new_losses() == []


def test_the_next_daemon_keeps_the_counts(watch: Callable[..., Watched], targets: Callable[[], Target]) -> None:
    watched, target = watch(), targets()
    target.do("o", 0, SHARE - 1)
    watched.session.close(keep=True)
    watched = watch()
    assert watched.session.adopted
    target.do("o", SHARE, 2)
    assert watched.new_losses() == [(target.pid, 1)]
    target.do("c", 0, 2 * SHARE)
    assert watched.counted() == {target.pid: 0}


def test_the_losses_of_a_full_ring_are_the_records_that_are_missing(
    watch: Callable[..., Watched], targets: Callable[[], Target]
) -> None:
    watched, target, other = watch(sizes={RING: mmap.PAGESIZE}), targets(), targets()
    ring = watched.session.rings[RING]
    room = ring.records_in(ring.size)
    target.do("o", 0, 2 * room + 3)
    start_ns = target.start_ns
    target.close()
    # What the ring cannot take stays open, and is no loss.
    assert watched.source.close_process(target.pid, start_ns) == room
    assert watched.open_by_pid() == {target.pid: room + 3}
    assert {int(record["state"]) for record in watched.session.maps["operations"].items()[1]} == {1}
    assert watched.new_losses() == []
    # Operations that end meanwhile are losses.
    other.do("o", 0, 5)
    other.do("c", 0, 5)
    assert watched.new_losses() == [(None, 5)]
    closed = [room]
    while watched.open_by_pid():
        assert watched.finished() == {(target.pid, "abandoned"): closed[-1]}
        closed.append(watched.source.close_ended(is_alive))
    assert watched.finished() == {(target.pid, "abandoned"): closed[-1]}
    assert closed == [room, room, 3]
    assert watched.session.counters()[RING] == {"pushed": 2 * room + 3, "lost": 5}


def test_operations_whose_ends_were_missed_are_closed_once_the_ring_has_room(
    watch: Callable[..., Watched], targets: Callable[[], Target]
) -> None:
    watched, target = watch(sizes={RING: mmap.PAGESIZE}), targets()
    ring = watched.session.rings[RING]
    room = ring.records_in(ring.size)
    target.do("o", 0, room + 3)
    watched.source.ends_missed(SystemClock().pair().mono_ns)
    target.do("o", room + 3, 5)
    watched.source.tick()
    assert watched.open_by_pid() == {target.pid: 3 + 5}
    assert watched.finished() == {(target.pid, "abandoned"): room}
    for _ in range(2):
        watched.source.tick()
    assert watched.finished() == {(target.pid, "abandoned"): 3}
    # What was called later goes on.
    assert watched.open_by_pid() == {target.pid: 5}
