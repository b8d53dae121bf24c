"""Sessions on the live kernel, on each road to a uprobe: counts are exact, and pins outlive their daemon."""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import shutil
import signal
import struct
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from probing.api.errors import AttachError, NotFound, PrivilegeError, StateLocked
from probing.daemon.bpf import pins, syscalls
from probing.daemon.bpf.attach import program_in_map
from probing.daemon.bpf.build import compile_object
from probing.daemon.bpf.capabilities import detect
from probing.daemon.bpf.session import Session

SLOT = 3
COOKIE = 99 << 16 | SLOT
Open = Callable[..., Session]

LOADER = """
import os, sys, time
from pathlib import Path
from probing.daemon.bpf.session import Session

probe, target, root, offset, cookie, fallback = sys.argv[1:]
session = Session.open("test", [Path(probe)], Path(root), fallback == "True")
session.attach_uprobe("on_call", os.open(target, os.O_RDONLY), [int(offset)], int(cookie))
print("ready", flush=True)
time.sleep(600)
"""


# Linux 5.10 to 5.14.
OLD_KERNEL = ("uprobe_multi", "perf_link", "attach_cookie")


@pytest.fixture(params=["uprobe_multi", "fallback", "event_map"])
def fallback(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Each road to a uprobe."""
    monkeypatch.setenv("PROBINGD_WITHOUT", ",".join(OLD_KERNEL) if request.param == "event_map" else "")
    return bool(request.param != "uprobe_multi")


@pytest.fixture
def target_fd(target_path: Path) -> Iterator[int]:
    fd = os.open(target_path, os.O_RDONLY)
    yield fd
    os.close(fd)


def attach(session: Session, fd: int, target: Any, which: int = 0) -> Any:
    return session.attach_uprobe("on_call", fd, [target.offsets[which]], COOKIE)


def take(session: Session) -> np.ndarray[Any, Any]:
    ring = session.rings["calls"]
    drained = ring.drain()
    ring.commit(drained.position)
    return drained.records


def test_counts_and_arguments_are_exact(open_session: Open, probe_object: Path, target: Any, target_fd: int) -> None:
    session = open_session(probe_object)
    attach(session, target_fd, target)
    for count in (23, 7, 5):
        target.call(count)
    records = take(session)
    assert records["number"].tolist() == list(range(35))
    assert set(records["tgid"].tolist()) == {target.pid}
    columns = records[["fifth", "sixth", "seventh", "eighth", "cookie"]].tolist()
    assert set(columns) == {(44, 55, 66, 77, COOKIE)}
    fields = Path(f"/proc/{target.pid}/stat").read_text().rsplit(")", 1)[1].split()
    assert set(records["start_ns"].tolist()) == {int(fields[19]) * 10_000_000}
    counters = session.counters()
    assert counters["calls"] == {"pushed": 35, "lost": 0}
    assert counters[f"probe:{SLOT}"] == {"hits": 35, "refused": 0, "off_ns": 0}


def test_one_link_holds_many_points_with_their_cookies(
    open_session: Open, probe_object: Path, target: Any, target_fd: int
) -> None:
    session = open_session(probe_object)
    session.attach_uprobe("on_call", target_fd, target.offsets, [1 << 16 | 1, 2 << 16 | 2])
    target.call(23, 0)
    target.call(7, 1)
    cookies, counts = np.unique(take(session)["cookie"], return_counts=True)
    assert dict(zip(cookies.tolist(), counts.tolist(), strict=True)) == {1 << 16 | 1: 23, 2 << 16 | 2: 7}


@pytest.fixture
def overlays(target_path: Path, open_tmp_path: Path) -> Iterator[list[Path]]:
    """The target as two containers see it that share an image."""
    folders = [open_tmp_path / name for name in ("lower", "upper1", "work1", "1", "upper2", "work2", "2")]
    for folder in folders:
        folder.mkdir()
    shutil.copy(target_path, folders[0])
    mounted = [folders[3], folders[6]]
    for number, place in enumerate(mounted, 1):
        layers = f"lowerdir={folders[0]},upperdir={open_tmp_path}/upper{number},workdir={open_tmp_path}/work{number}"
        subprocess.run(["mount", "-t", "overlay", "overlay", "-o", layers, place], check=True)
    yield [place / target_path.name for place in mounted]
    for place in mounted:
        # Lazily, as container runtimes do it: a link that is going away still holds its path.
        subprocess.run(["umount", "-l", place], check=True)


def test_one_file_seen_through_two_overlays_counts_once(
    open_session: Open, probe_object: Path, target: Any, overlays: list[Path]
) -> None:
    session = open_session(probe_object)
    links = set()
    for path in overlays:
        with open(path, "rb") as file:
            links.add(attach(session, file.fileno(), target).name)
    assert len({path.stat().st_dev for path in overlays}) == 2
    assert len(links) == 1
    for count, path in zip((23, 7), overlays, strict=True):
        subprocess.run([path], input=f"0 {count}", text=True, stdout=subprocess.DEVNULL, check=True)
    assert len(take(session)) == 30


def test_identity_is_right_while_other_threads_ask_and_map(
    open_session: Open, probe_object: Path, overlays: list[Path], open_tmp_path: Path
) -> None:
    session = open_session(probe_object)
    over = threading.Event()
    wrong: list[tuple[Path, tuple[int, int]]] = []
    size = 1 << 24
    memory = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE)
    address = np.frombuffer(memory, "u1").ctypes.data
    libc = ctypes.CDLL(None)

    def change_mappings() -> None:
        """Holds the lock of the memory map, or waits for it."""
        while not over.is_set():
            for protection in (mmap.PROT_READ, mmap.PROT_READ | mmap.PROT_WRITE):
                libc.mprotect(ctypes.c_void_p(address), ctypes.c_size_t(size), protection)

    def ask(path: Path, below: Path) -> None:
        status = below.stat()
        with open(path, "rb") as file:
            found = [session.identity(file.fileno()) for _ in range(300)]
        wrong.extend((path, one) for one in found if one != (status.st_dev, status.st_ino))

    files = {overlays[0]: open_tmp_path / "lower" / overlays[0].name, probe_object: probe_object}
    asking = [threading.Thread(target=ask, args=pair) for pair in files.items()]
    mapping = threading.Thread(target=change_mappings)
    for thread in (*asking, mapping):
        thread.start()
    for thread in asking:
        thread.join()
    over.set()
    mapping.join()
    assert wrong == []


def test_identity_waits_while_the_memory_map_is_locked(
    open_session: Open,
    probe_object: Path,
    overlays: list[Path],
    open_tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    session = open_session(probe_object)
    run, busy = session.run_program, [2, 2]
    monkeypatch.setattr(session, "run_program", lambda *asked: busy.pop() if busy else run(*asked))
    status = (open_tmp_path / "lower" / overlays[0].name).stat()
    with open(overlays[0], "rb") as file:
        assert session.identity(file.fileno()) == (status.st_dev, status.st_ino)
        monkeypatch.setattr(session, "run_program", lambda *_: 2)
        monkeypatch.setattr("probing.daemon.bpf.session._PAUSE_S", 0)
        with pytest.raises(AttachError, match="changes its memory map"):
            session.identity(file.fileno())


def test_identity_of_an_ordinary_file_is_what_stat_says(open_session: Open, probe_object: Path, target_fd: int) -> None:
    status = os.fstat(target_fd)
    assert open_session(probe_object).identity(target_fd) == (status.st_dev, status.st_ino)


def test_environment_takes_features_away(pin_root: Path, monkeypatch: pytest.MonkeyPatch, probe_object: Path) -> None:
    monkeypatch.setenv("PROBINGD_WITHOUT", "uprobe_multi,perf_link")
    session = Session.open("test", [probe_object], pin_root)
    assert session.features == detect().without("uprobe_multi", "perf_link")
    session.close(keep=False)


@pytest.mark.parametrize("cookie", [[1], [1, 2, 3], 256])
def test_cookies_that_do_not_fit_are_an_attach_error(
    open_session: Open, probe_object: Path, target: Any, target_fd: int, cookie: Any
) -> None:
    with pytest.raises(AttachError):
        open_session(probe_object).attach_uprobe("on_call", target_fd, target.offsets, cookie)


def test_program_that_is_not_loaded_is_not_found(open_session: Open, probe_object: Path, target_fd: int) -> None:
    with pytest.raises(NotFound):
        open_session(probe_object).attach_uprobe("no_such", target_fd, [1], 1)


def test_programs_of_a_late_object_load_when_one_is_used(
    open_session: Open, probe_object: Path, target: Any, target_fd: int
) -> None:
    session = open_session(probe_object, late=["probe"])
    assert not session.programs.keys() & {"on_call", "add"}
    assert len(take(session)) == 0
    attach(session, target_fd, target)
    assert session.programs.keys() >= {"on_call", "add"}
    target.call(3)
    assert take(session)["number"].tolist() == [0, 1, 2]
    session.close(keep=True)
    session = open_session(probe_object, late=["probe"])
    assert session.adopted
    assert session.programs.keys() >= {"on_call", "add"}


def test_late_objects_load_together_and_a_needed_one_must(
    open_session: Open, probe_object: Path, tmp_path: Path
) -> None:
    refused = compile_object(_written(tmp_path / "refused.bpf.c", REFUSED))
    session = open_session(probe_object, optional=[refused], late=["probe", "refused"])
    assert session.refused == {}
    assert session.late == {"probe", "refused"}
    session.load_late()
    assert session.late == set()
    assert session.programs.keys() >= {"on_call", "add"}
    assert list(session.refused) == ["refused"]
    with pytest.raises((AttachError, PrivilegeError)):
        session.program("follow")
    session.close(keep=False)
    session = open_session(probe_object, refused, late=["refused"])
    for _ in range(2):
        with pytest.raises((AttachError, PrivilegeError)):
            session.load_late()


def test_killed_loader_loses_nothing_and_its_links_are_adopted(
    open_session: Open,
    probe_object: Path,
    target: Any,
    target_fd: int,
    target_path: Path,
    pin_root: Path,
    fallback: bool,
) -> None:
    arguments = [probe_object, target_path, pin_root, target.offsets[0], COOKIE, fallback]
    command = [sys.executable, "-c", LOADER, *map(str, arguments)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as loader:
        assert loader.stdout is not None
        assert loader.stdout.readline() == "ready\n"
        target.call(23)
        loader.send_signal(signal.SIGKILL)
        loader.wait(10)
    target.call(7)
    session = open_session(probe_object)
    link = attach(session, target_fd, target)
    assert session.adopted
    assert link.adopted
    target.call(5)
    assert take(session)["number"].tolist() == list(range(35))


def test_probe_that_nothing_can_pin_ends_with_its_loader(
    monkeypatch: pytest.MonkeyPatch, probe_object: Path, target: Any, target_fd: int, pin_root: Path
) -> None:
    monkeypatch.setenv("PROBINGD_WITHOUT", ",".join([*OLD_KERNEL, "event_map"]))
    session = Session.open("test", [probe_object], pin_root)
    link = attach(session, target_fd, target)
    assert (len(link.fds), link.pins) == (1, [])
    target.call(23)
    session.close(keep=True)
    target.call(7)
    session = Session.open("test", [probe_object], pin_root)
    assert session.adopted
    # A new one, so that the collector reports the time before as a gap.
    assert not attach(session, target_fd, target).adopted
    target.call(5)
    assert take(session)["number"].tolist() == [*range(23), *range(30, 35)]
    session.close(keep=False)


def test_probe_in_a_map_is_placed_again_at_once_and_counts_once(
    monkeypatch: pytest.MonkeyPatch, probe_object: Path, target: Any, target_fd: int, pin_root: Path
) -> None:
    """The kernel ends an event some time after its map; ``end`` waits for it, that of an adopted one too."""
    monkeypatch.setenv("PROBINGD_WITHOUT", ",".join(OLD_KERNEL))
    for _ in range(7):
        session = Session.open("test", [probe_object], pin_root)
        link = attach(session, target_fd, target)
        session.detach(link)
        attach(session, target_fd, target)
        target.call(5)
        assert len(take(session)) == 5
        session.close(keep=True)
    pins.cleanup("test", pin_root)


REFUSED = """
#include "guard.bpf.h"
SEC("raw_tp")
int follow(struct bpf_raw_tracepoint_args *ctx)
{
	return *(volatile int *)ctx->args[0];
}
char LICENSE[] SEC("license") = "GPL";
"""


def _written(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


@pytest.mark.parametrize(("without", "entries", "flags"), [("", 262144, 1), ("growing_maps", 16384, 0)])
def test_maps_do_not_grow_where_the_kernel_warns_of_it(
    monkeypatch: pytest.MonkeyPatch, pin_root: Path, without: str, entries: int, flags: int
) -> None:
    monkeypatch.setenv("PROBINGD_WITHOUT", without)
    session = Session.open("test", ["cuda_memory"], pin_root)
    (pin,) = pin_root.glob("test/*/map_cuda_memory_live")
    shown = subprocess.run(["bpftool", "-j", "map", "show", "pinned", pin], capture_output=True, check=True).stdout
    found = json.loads(shown)
    assert (found["max_entries"], found["flags"]) == (entries, flags)
    session.close(keep=False)


CRASHER = """
import os, signal, subprocess, sys
from pathlib import Path
from probing.daemon.bpf import syscalls
from probing.daemon.bpf.session import Session

probe, target, root, first, second, fallback = sys.argv[1:]
offsets = [int(first), int(second)]
fd = os.open(target, os.O_RDONLY)
real, count, limit = syscalls._bpf, 0, -1
# Only these leave something behind.
names = ("MAP_CREATE", "MAP_UPDATE", "OBJ_PIN", "RAW_TRACEPOINT_OPEN", "LINK_CREATE")
changing = {getattr(syscalls, name) for name in names}

def dying(command, *arguments):
    global count
    if command in changing:
        if count == limit:
            os.kill(os.getpid(), signal.SIGKILL)
        count += 1
    return real(command, *arguments)

def start():
    session = Session.open("test", [Path(probe)], Path(root), fallback == "True")
    session.attach_uprobe("on_call", fd, offsets, [1, 2])
    return session

syscalls._bpf = dying
start().close(keep=False)
total, died = count, 0
for limit in range(total):
    child = os.fork()
    if child == 0:
        count = 0
        start().close(keep=True)
        os._exit(0)
    died += os.WIFSIGNALED(os.waitpid(child, 0)[1])
    here, limit = limit, -1
    session = start()
    subprocess.run([target], input="0 5 1 7", text=True, stdout=subprocess.DEVNULL, check=True)
    drained = session.rings["calls"].drain()
    if sorted(drained.records["cookie"].tolist()) != [1] * 5 + [2] * 7:
        print("after call", here, drained.records["cookie"].tolist())
    session.close(keep=False)
print(total > 7, died == total)
"""


def test_daemon_killed_at_any_step_of_its_start_leaves_what_the_next_one_can_use(
    probe_object: Path, target: Any, pin_root: Path, fallback: bool
) -> None:
    arguments = [probe_object, target.path, pin_root, *target.offsets, fallback]
    command = [sys.executable, "-c", CRASHER, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr, done.stdout) == (0, "", "True True\n")


def test_position_of_the_log_is_taken_up_after_a_crash_between_log_and_commit(
    open_session: Open, probe_object: Path, target: Any, target_fd: int
) -> None:
    session = open_session(probe_object)
    attach(session, target_fd, target)
    target.call(23)
    logged = session.rings["calls"].drain()
    session.close(keep=True)
    target.call(7)
    session = open_session(probe_object)
    attach(session, target_fd, target)
    assert session.rings["calls"].reset(logged.position)
    assert [*logged.records["number"], *take(session)["number"]] == list(range(30))


def test_pause_stops_the_probes_and_a_restart_keeps_it(
    open_session: Open, probe_object: Path, target: Any, target_fd: int
) -> None:
    session = open_session(probe_object)
    attach(session, target_fd, target)
    session.pause(True)
    target.call(23)
    session.close(keep=True)
    session = open_session(probe_object)
    assert session.paused
    target.call(7)
    session.pause(False)
    target.call(5)
    assert take(session)["number"].tolist() == list(range(30, 35))


def test_links_that_are_removed_see_no_later_call(
    open_session: Open, probe_object: Path, target: Any, target_fd: int
) -> None:
    for _ in range(20):
        session = open_session(probe_object)
        attach(session, target_fd, target)
        session.close(keep=True)
        pins.remove_links(session.path)
        target.call(1)
    assert take(open_session(probe_object)).tolist() == []


@pytest.mark.parametrize("asked", [True, False])
def test_an_upgrade_keeps_a_pause_its_begin_and_who_asked(
    open_session: Open, probe_object: Path, target: Any, target_fd: int, asked: bool
) -> None:
    session = open_session(probe_object)
    session.pause(True, asked=asked)
    began = session.paused_ns
    session.close(keep=True)
    # Another size makes another layout, as another version does.
    session = open_session(probe_object, sizes={"calls": 1 << 17})
    assert session.foreign
    attach(session, target_fd, target)
    target.call(7)
    assert (session.paused, session.pause_asked, session.paused_ns) == (True, asked, began)
    session.pause(False)
    target.call(5)
    assert take(session)["number"].tolist() == list(range(7, 12))
    assert (session.paused, session.pause_asked, session.paused_ns) == (False, False, 0)


def test_programs_do_nothing_when_nobody_listened_for_a_minute(
    open_session: Open, probe_object: Path, target: Any, target_fd: int
) -> None:
    session = open_session(probe_object)
    attach(session, target_fd, target)
    stale = time.clock_gettime_ns(time.CLOCK_MONOTONIC) - 61_000_000_000
    session.maps["control"].update(0, (stale, 0, 0, 0))
    target.call(23)
    session.close(keep=True)
    session = open_session(probe_object)
    assert session.blind is not None
    assert session.blind[0] == stale + 60_000_000_000
    target.call(7)
    assert take(session)["number"].tolist() == list(range(23, 30))


def test_an_upgrade_after_a_minute_without_a_daemon_knows_the_gap(open_session: Open, probe_object: Path) -> None:
    session = open_session(probe_object)
    stale = time.clock_gettime_ns(time.CLOCK_MONOTONIC) - 61_000_000_000
    session.maps["control"].update(0, (stale, 0, 0, 0))
    session.close(keep=True)
    session = open_session(probe_object, sizes={"calls": 1 << 17})
    assert session.blind is not None
    assert session.blind[0] == stale + 60_000_000_000


def test_a_daemon_that_stood_still_for_a_minute_knows_what_it_missed(
    open_session: Open, probe_object: Path, target: Any, target_fd: int
) -> None:
    session = open_session(probe_object)
    attach(session, target_fd, target)
    assert session.heartbeat() is None
    control = session.maps["control"]
    generation = int(control.lookup(0)["generation"])
    stale = time.clock_gettime_ns(time.CLOCK_MONOTONIC) - 61_000_000_000
    control.update(0, (stale, 0, generation, 0))
    target.call(23)
    blind = session.heartbeat()
    assert blind is not None
    assert blind[0] == stale + 60_000_000_000
    # What calls began before is void.
    assert int(control.lookup(0)["generation"]) != generation
    assert session.heartbeat() is None
    target.call(7)
    assert take(session)["number"].tolist() == list(range(23, 30))


def test_full_ring_counts_what_it_lost(open_session: Open, probe_object: Path, target: Any, target_fd: int) -> None:
    session = open_session(probe_object)
    attach(session, target_fd, target)
    target.call(2311)
    records = take(session)
    counters = session.counters()["calls"]
    assert 0 < len(records) < 2311
    assert len(records) + counters["lost"] == 2311
    assert counters["pushed"] == len(records)
    target.call(5)
    assert take(session)["number"].tolist() == list(range(2311, 2316))


def test_detached_link_sees_nothing(open_session: Open, probe_object: Path, target: Any, target_fd: int) -> None:
    session = open_session(probe_object)
    link = attach(session, target_fd, target)
    target.call(5)
    assert list(session.path.glob("link_*")) == link.pins
    session.detach(link)
    target.call(23)
    assert len(take(session)) == 5
    assert not list(session.path.glob("link_*"))


def test_probes_of_a_file_end_and_hold_no_descriptor(
    open_session: Open, probe_object: Path, target: Any, target_fd: int
) -> None:
    session = open_session(probe_object)
    open_files = len(list(Path("/proc/self/fd").iterdir()))
    attach(session, target_fd, target)
    of_one_process = session.attach_uprobe("on_call", target_fd, [target.offsets[1]], COOKIE, pid=target.pid)
    assert len(list(Path("/proc/self/fd").iterdir())) == open_files + of_one_process.count
    identity = session.identity(target_fd)
    assert session.probed_files() == {identity}
    target.call(5)
    session.end_file((identity[0], identity[1] + 1))
    target.call(7)
    session.end_file(identity)
    assert session.probed_files() == set()
    assert not list(session.path.glob("link_*"))
    target.call(11)
    target.call(3, 1)
    assert len(take(session)) == 5 + 7 + 3


@pytest.mark.parametrize("how", ["close", "cleanup"])
def test_nothing_is_left(
    how: str,
    open_session: Open,
    probe_object: Path,
    target: Any,
    target_fd: int,
    pin_root: Path,
    until: Callable[..., object],
) -> None:
    session = open_session(probe_object, "lifecycle")
    link = attach(session, target_fd, target)
    programs = [syscalls.program_info(fd).id for fd in session.programs.values()]
    maps = [m.id for m in session.maps.values()] + [ring.map_id for ring in session.rings.values()]
    links = []
    for fd in [syscalls.object_get(path) for item in session.links.values() for path in item.pins]:
        if (program := program_in_map(fd)) is None:
            links.append(syscalls.link_info(fd)[1])
        else:
            programs.append(program)
            maps.append(syscalls.map_info(fd).id)
        os.close(fd)
    assert link.pins[0].exists()
    session.close(keep=how == "cleanup")
    if how == "cleanup":
        assert pins.cleanup("test", pin_root) == 1
        assert not (pin_root / "test").exists()
    assert not list(pin_root.rglob("*_*"))

    def gone() -> bool:
        alive = [(kind, i) for kind, of in (("program", programs), ("map", maps), ("link", links)) for i in of]
        return not any(i in syscalls.ids(kind) for kind, i in alive)

    until(gone)


def test_layout_of_another_version_is_stopped_and_drained_by_its_own_description(
    open_session: Open, probe_object: Path, target: Any, target_fd: int, pin_root: Path
) -> None:
    session = open_session(probe_object)
    attach(session, target_fd, target)
    target.call(23)
    session.close(keep=True)
    session = open_session("lifecycle")
    target.call(7)
    assert len(session.foreign) == 1
    foreign = session.foreign[0]
    assert foreign.rings["calls"].drain().records["number"].tolist() == list(range(23))
    assert foreign.maps["control"].lookup(0)["heartbeat_ns"] > 0
    foreign.remove()
    assert [path for path in (pin_root / "test").iterdir() if path.is_dir()] == [session.path]


def test_second_daemon_on_the_same_instance_is_refused(open_session: Open, probe_object: Path) -> None:
    open_session(probe_object)
    with pytest.raises(StateLocked):
        open_session(probe_object)
    open_session(probe_object, instance="other")


def test_raw_tracepoint_program_runs_on_demand(open_session: Open, probe_object: Path) -> None:
    session = open_session(probe_object)
    assert session.run_program("add", struct.pack("<QQ", 23, 7)) == 30


def test_offset_outside_the_file_is_an_attach_error(
    open_session: Open, probe_object: Path, target_fd: int, pin_root: Path
) -> None:
    session = open_session(probe_object)
    with pytest.raises(AttachError):
        session.attach_uprobe("on_call", target_fd, [1 << 40], COOKIE)
    assert not list(pin_root.rglob("link_on_call*"))


@pytest.mark.parametrize("perf_link", [True, False])
def test_kernel_without_attach_cookies_gets_a_program_for_each_symbol(
    perf_link: bool, pin_root: Path, probe_object: Path, target: Any, target_fd: int
) -> None:
    without = detect().without("uprobe_multi", "attach_cookie", *([] if perf_link else ["perf_link"]))
    session = Session.open("test", [probe_object], pin_root, features=without)
    try:
        session.attach_uprobe("on_call", target_fd, target.offsets, [1 << 16 | 1, 2 << 16 | 2])
        target.call(23, 0)
        target.call(7, 1)
        cookies, counts = np.unique(take(session)["cookie"], return_counts=True)
        assert dict(zip(cookies.tolist(), counts.tolist(), strict=True)) == {1 << 16 | 1: 23, 2 << 16 | 2: 7}
    finally:
        session.close(keep=False)


UNPRIVILEGED = textwrap.dedent("""
    import os, sys
    from pathlib import Path
    from probing.api.errors import PrivilegeError
    from probing.daemon.bpf.session import Session

    probe, root, target, offset, cookie, fallback = sys.argv[1:]
    assert os.geteuid() == 65534
    session = Session.open("test", [Path(probe)], Path(root), fallback == "True")
    try:
        link = session.attach_uprobe("on_call", int(target), [int(offset)], int(cookie))
    except PrivilegeError as e:
        print("refused", flush=True)
        sys.exit(0)
    print("ready", flush=True)
    sys.stdin.readline()
    print(len(session.rings["calls"].drain().records), session.counters()["calls"]["pushed"], flush=True)
    session.close(keep=False)
""")


def test_bpf_and_perfmon_are_enough_with_uprobe_multi(
    probe_object: Path, target: Any, target_fd: int, pin_root: Path, fallback: bool, open_tmp_path: Path
) -> None:
    pins.prepare("test", pin_root, owner=(65534, 65534))
    for path in probe_object.parent.glob("probe*.o"):
        shutil.copy(path, open_tmp_path)
    capabilities = "-all,+bpf,+perfmon"
    rights = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]
    rights += [f"--{kind}={capabilities}" for kind in ("inh-caps", "ambient-caps", "bounding-set")]
    arguments = [open_tmp_path / probe_object.name, pin_root, target_fd, target.offsets[0], COOKIE, fallback]
    command = [*rights, sys.executable, "-c", UNPRIVILEGED, *map(str, arguments)]
    pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, pass_fds=(target_fd,), cwd="/", **pipes) as child:
        assert child.stdout is not None
        assert child.stdin is not None
        if fallback:
            assert child.stdout.readline() == "refused\n"
        else:
            assert child.stdout.readline() == "ready\n"
            target.call(23)
            child.stdin.write("\n")
            child.stdin.flush()
            assert child.stdout.readline() == "23 23\n"
        assert child.wait(20) == 0


def test_pin_folder_of_another_user_is_a_privilege_error(probe_object: Path, pin_root: Path) -> None:
    pins.prepare("test", pin_root)
    script = (
        "import sys; from pathlib import Path\n"
        "from probing.daemon.bpf.session import Session\n"
        "from probing.api.errors import PrivilegeError\n"
        "try: Session.open('test', ['lifecycle'], Path(sys.argv[1]))\n"
        "except PrivilegeError as e: print(e.hint)\n"
    )
    rights = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]
    rights += [f"--{kind}=-all,+bpf,+perfmon" for kind in ("inh-caps", "ambient-caps", "bounding-set")]
    command = [*rights, sys.executable, "-c", script, str(pin_root)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd="/")
    assert (done.returncode, done.stderr) == (0, "")
    assert "user" in done.stdout


def test_kernel_without_preemption_control_gets_the_object_without_it(
    pin_root: Path, probe_object: Path, target: Any, target_fd: int, fallback: bool
) -> None:
    without = detect().without("preempt", *(["uprobe_multi"] if fallback else []))
    session = Session.open("test", [probe_object, "lifecycle"], pin_root, features=without)
    try:
        attach(session, target_fd, target)
        target.call(23)
        assert len(take(session)) == 23
    finally:
        session.close(keep=False)


def test_object_that_is_not_built_is_not_found(pin_root: Path, tmp_path: Path) -> None:
    with pytest.raises(NotFound) as caught:
        Session.open("test", [tmp_path / "nothing.bpf.o"], pin_root)
    assert "build" in caught.value.hint


def test_missing_right_is_a_privilege_error_with_a_hint(pin_root: Path) -> None:
    without = detect().without("ringbuf")
    with pytest.raises(PrivilegeError) as caught:
        Session.open("test", ["lifecycle"], pin_root, features=without)
    assert caught.value.hint
