"""New mappings, the capability matrix, and ring reading through the real map."""

from __future__ import annotations

import errno
import os
import select
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from probing.api.errors import StateLocked, UsageError
from probing.daemon.bpf import pins, syscalls
from probing.daemon.bpf.capabilities import Features, capabilities, detect, load_guarded
from probing.daemon.bpf.libbpf import kernel_types
from probing.daemon.bpf.maps import Map
from probing.daemon.bpf.mmap_events import Mapping, MmapWatch
from probing.daemon.bpf.probe_points import probe_point
from probing.daemon.elf.file import Elf
from probing.daemon.elf.symbols import read_symbol

UNPRIVILEGED = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]
NO_RIGHTS = [*UNPRIVILEGED, "--bounding-set=-all"]


def test_new_mapping_is_reported_with_its_build_id(target_path: Path, until: Callable[..., object]) -> None:
    name = os.fsencode(target_path)
    with MmapWatch(lambda path: path == name) as watch:
        pids = []
        found: list[Mapping] = []
        for _ in range(23):
            process = subprocess.Popen([target_path], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
            pids.append(process.pid)
            process.wait(20)
            # The mappings of all processes go through the same buffers.
            found.extend(watch.read())

        def all_there() -> bool:
            found.extend(watch.read())
            return len(found) >= len(pids)

        until(all_there)
        assert sorted(mapping.pid for mapping in found) == sorted(pids)
        assert watch.lost == 0
        with open(target_path, "rb") as file:
            elf = Elf(file.fileno())
            text = next(segment for segment in elf.segments if segment.flags & 1)
            assert {mapping.build_id for mapping in found} == {elf.build_id()}
        page = os.sysconf("SC_PAGESIZE")
        assert {mapping.offset for mapping in found} == {text.offset // page * page}


def test_mappings_on_a_cpu_that_came_online_are_reported(
    target_path: Path, until: Callable[..., object], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = sorted(os.sched_getaffinity(0))[:2]
    online = [first]
    monkeypatch.setattr("probing.daemon.bpf.mmap_events.online_cpus", lambda: list(online))
    with MmapWatch(lambda path: path == os.fsencode(target_path)) as watch:
        found: list[Mapping] = []

        def run(cpu: int) -> int:
            command = ["taskset", "-c", str(cpu), target_path]
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
            process.wait()
            return process.pid

        assert not watch.refresh()
        online.append(second)
        assert watch.refresh()
        assert not watch.refresh()
        for cpu in (first, second):
            pid = run(cpu)
            until(lambda: found.extend(watch.read()) or pid in [mapping.pid for mapping in found])  # noqa: B023
        online.remove(first)
        assert not watch.refresh()
        assert len(watch.filenos()) == 1
        pid = run(second)
        until(lambda: found.extend(watch.read()) or pid in [mapping.pid for mapping in found])


def test_descriptors_wake_the_waiting_and_a_burst_is_counted_not_hidden(target_path: Path) -> None:
    wanted: list[bytes] = []
    with MmapWatch(lambda path: wanted.append(path) or False) as watch:
        command = [target_path]
        subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, check=True)
        assert select.select(watch.filenos(), [], [], 20)[0]
        assert watch.read() == []
        assert os.fsencode(target_path) in wanted
        # More mappings than the buffers hold.
        script = (
            "import ctypes, mmap, os, sys; fd = os.open(sys.argv[1], os.O_RDONLY)\n"
            "executable = mmap.PROT_READ | mmap.PROT_EXEC\n"
            "for n in range(20000): mmap.mmap(fd, 4096, mmap.MAP_PRIVATE, executable, offset=n % 2 * 4096)\n"
        )
        subprocess.run([sys.executable, "-c", script, target_path], check=True)
        seen = len(wanted)
        watch.read()
        assert watch.lost + len(wanted) - seen >= 20000
        assert watch.lost > 0


def test_watching_mappings_without_the_right_is_a_privilege_error() -> None:
    script = (
        "from probing.api.errors import PrivilegeError\n"
        "from probing.daemon.bpf.mmap_events import MmapWatch\n"
        "try: MmapWatch(lambda path: True)\n"
        "except PrivilegeError as e: print(e.hint)\n"
    )
    done = subprocess.run([*NO_RIGHTS, sys.executable, "-c", script], capture_output=True, text=True, cwd="/")
    assert (done.returncode, done.stderr) == (0, "")
    assert "probingd check" in done.stdout


def test_matrix_lists_every_feature_with_its_cost() -> None:
    listed = capabilities()
    assert {c.name for c in listed} == set(Features.__dataclass_fields__)
    assert all(c.cost for c in listed)
    found = detect()
    assert all(getattr(found, c.name) == c.present for c in listed)
    assert all(bool(c.reason) != c.present for c in listed)


@pytest.mark.parametrize(
    ("mount", "rights", "possible"),
    [
        ("mount -t bpf bpf", (), True),
        ("mount -t bpf -o mode=0755 bpf", NO_RIGHTS, False),
        ("mount -t bpf -o ro bpf", (), False),
        ("mount -t tmpfs tmpfs", (), True),
        ("mount -t tmpfs tmpfs", ("setpriv", "--bounding-set=-sys_admin", "--inh-caps=-sys_admin"), False),
    ],
    ids=["there", "of another user", "read-only", "may be mounted", "may not be mounted"],
)
def test_pins_are_possible(mount: str, rights: Sequence[str], possible: bool, open_tmp_path: Path) -> None:
    script = "import sys; from pathlib import Path; from probing.daemon.bpf.pins import possible\n"
    script += "print(possible(Path(sys.argv[1]) / 'instance'))"
    mounted = ["unshare", "--mount", "sh", "-ec", f'{mount} "$1"; shift; exec "$@"', "-", str(open_tmp_path)]
    command = [*mounted, *rights, sys.executable, "-c", script, str(open_tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, cwd="/", check=False)
    assert (done.stdout, done.stderr) == (f"{possible}\n", "")
    assert not list(open_tmp_path.iterdir())


def test_preemption_is_a_feature_where_guarded_programs_may_call_global_functions() -> None:
    types = kernel_types("bpf_preempt_disable", "bpf_preempt_enable", "schedule")
    if not detect().preempt:
        pytest.skip("this kernel refuses it")
    os.close(load_guarded(types["bpf_preempt_disable"], types["bpf_preempt_enable"]))
    # Preemption that stays disabled, and a function that is not for programs: the program has been verified.
    for wrong, error in (("bpf_preempt_disable", errno.EINVAL), ("schedule", errno.EACCES)):
        with pytest.raises(OSError, match=os.strerror(error)):
            load_guarded(types["bpf_preempt_disable"], types[wrong])


def test_matrix_without_rights_says_why() -> None:
    script = (
        "from probing.daemon.bpf.capabilities import capabilities\n"
        "print({c.name: c.present for c in capabilities()}['ringbuf'],"
        " {c.name: c.reason for c in capabilities()}['ringbuf'])\n"
    )
    done = subprocess.run([*NO_RIGHTS, sys.executable, "-c", script], capture_output=True, text=True, cwd="/")
    assert (done.returncode, done.stdout, done.stderr) == (0, "False Operation not permitted\n", "")


def test_session_without_rights_is_a_privilege_error(pin_root: Path) -> None:
    pins.prepare("test", pin_root, owner=(65534, 65534))
    script = (
        "import sys; from pathlib import Path\n"
        "from probing.api.errors import PrivilegeError\n"
        "from probing.daemon.bpf.session import Session\n"
        "try: Session.open('test', ['lifecycle'], Path(sys.argv[1]))\n"
        "except PrivilegeError as e: print(e.hint)\n"
    )
    command = [*NO_RIGHTS, sys.executable, "-c", script, str(pin_root)]
    done = subprocess.run(command, capture_output=True, text=True, cwd="/")
    assert (done.returncode, done.stderr) == (0, "")
    assert "probingd check" in done.stdout


def test_cleanup_leaves_a_running_daemon_alone(pin_root: Path) -> None:
    folder = pins.prepare("test", pin_root)
    with pins.lock(folder), pytest.raises(StateLocked):
        pins.cleanup("test", pin_root)
    assert pins.cleanup("test", pin_root) == 0
    assert pins.cleanup(pin_root=pin_root) == 0


@pytest.mark.parametrize("name", ["", "../escape", "a/b", ".", "with space", "x" * 65])
def test_instance_names_cannot_leave_the_pin_root(name: str, pin_root: Path) -> None:
    with pytest.raises(UsageError):
        pins.prepare(name, pin_root)
    with pytest.raises(UsageError):
        pins.cleanup(name, pin_root)


def test_chosen_probe_points_are_hit_exactly(
    open_session: Callable[..., Any], probe_object: Path, target: Any, target_path: Path
) -> None:
    session = open_session(probe_object)
    with open(target_path, "rb") as file:
        elf = Elf(file.fileno())
        for slot, name in enumerate(("with_push", "without_push"), 1):
            symbol = read_symbol(file.fileno(), name)
            assert symbol is not None
            assert symbol.file_offset is not None
            point = probe_point(symbol.head, elf.machine, symbol.size)
            session.attach_uprobe("on_call", file.fileno(), [symbol.file_offset + point.offset], slot)
    target.call(23, 0)
    target.call(7, 1)
    records = session.rings["calls"].drain().records
    assert records["cookie"].tolist() == [1] * 23 + [2] * 7
    assert records["number"].tolist() == list(range(30))


def test_ring_through_many_wraps_loses_nothing(
    open_session: Callable[..., Any], probe_object: Path, target: Any, target_path: Path
) -> None:
    session = open_session(probe_object)
    with open(target_path, "rb") as file:
        session.attach_uprobe("on_call", file.fileno(), target.offsets[:1], 1)
    ring = session.rings["calls"]
    seen: list[int] = []
    for _ in range(37):
        target.call(523)
        while len(drained := ring.drain(max_bytes=4096)) and len(drained.records):
            seen.extend(drained.records["number"].tolist())
            ring.commit(drained.position)
    assert seen == list(range(37 * 523))
    assert ring.position > 10 * ring.size
    assert session.counters()["calls"]["lost"] == 0


HASH, ARRAY, PERCPU_ARRAY = 1, 2, 6
ENTRY = np.dtype([("a", "<u8"), ("b", "<u4"), ("c", "<u4")])


@pytest.fixture
def make_map() -> Iterator[Callable[..., Map]]:
    made: list[Map] = []

    def make(kind: int, key: str, value: np.dtype[Any], entries: int) -> Map:
        key_type = np.dtype(key)
        fd = syscalls.create_map(kind, key_type.itemsize, value.itemsize, entries)
        made.append(Map("test", fd, key_type, value))
        return made[-1]

    yield make
    for found in made:
        found.close()


@pytest.mark.parametrize("batches", [True, False])
def test_hash_map_gives_what_was_put(
    make_map: Callable[..., Map], batches: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not batches:
        monkeypatch.setattr(Map, "_batches", _refuse)
    found = make_map(HASH, "<u8", ENTRY, 8192)
    keys, values = found.items()
    assert (len(keys), len(values)) == (0, 0)
    for n in range(5003):
        found.update(n, (n, 7, 5))
    keys, values = found.items()
    assert sorted(keys.tolist()) == list(range(5003))
    assert (values["a"] == keys).all()
    assert set(values["b"].tolist()) == {7}
    assert found.lookup(23).item() == (23, 7, 5)
    assert found.lookup(23, delete=True).item() == (23, 7, 5)
    assert found.lookup(23) is None
    assert found.delete(7)
    assert not found.delete(7)
    assert len(found.items()[0]) == 5001


def _refuse(self: Map) -> list[tuple[bytes, bytes]]:
    raise OSError(errno.EINVAL, "no batches")


def test_per_cpu_map_gives_a_value_for_each_cpu(make_map: Callable[..., Map]) -> None:
    found = make_map(PERCPU_ARRAY, "<u4", np.dtype("<u4"), 3)
    keys, values = found.items()
    assert keys.tolist() == [0, 1, 2]
    assert values.shape == (3, syscalls.possible_cpus())
    assert found.lookup(1).shape == (syscalls.possible_cpus(),)
