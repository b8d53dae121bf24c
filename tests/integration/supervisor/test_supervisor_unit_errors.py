"""The real collector, service and ``ready`` as systemd starts them: what they say of an error, and how they end."""

from __future__ import annotations

import contextlib
import json
import os
import select
import selectors
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from cgroup_support import memory_group
from long import long, long_unless

from probing.api.errors import InternalError
from probing.daemon.config import Config
from probing.daemon.store.format import FORMAT_VERSION
from probing.daemon.store.log.records import PartHeader, pack_header
from probing.daemon.supervisor import ready, unit

HELPERS = {"reader": "reader", "parser": "parser", "maintenance": "store_maintenance", "nvml": "nvml"}
CONFIG, UNAVAILABLE, DATAERR, TEMPFAIL = 78, 69, 65, 75
pytestmark = pytest.mark.skipif(os.getuid() != 0, reason="only root can mount and load programs")


class Units:
    """Starts processes with the environment of their units; ``stderr`` stands for the journal."""

    def __init__(self, base: Path) -> None:
        self.base = base
        self.runtime = base / "run"
        self.state = base / "state"
        self.config = base / "probingd.toml"
        self.journal = base / "journal"
        self.started: list[subprocess.Popen[bytes]] = []
        for path in (self.runtime / "control", self.runtime / "public", self.state):
            path.mkdir(parents=True)
        self.journal.touch()
        self.manager = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.manager.bind(str(base / "notify"))
        self.pins = f"/sys/fs/bpf/probingd-test-{os.getpid()}"

    def write(self, text: str = "") -> None:
        own = f'state_dir = "{self.state}"\nsocket = "{self.runtime}/public/probingd.sock"\n'
        own += f'runtime_dir = "{self.runtime}"\ninstance = "unit-{os.getpid()}"\n'
        ends = '[users]\nservice = "0"\ngroup = "0"\n[probes]\nbpffs = "' + self.pins + '"\n'
        self.config.write_text(own + text + ends)

    def start(self, kind: str, *prefix: str) -> subprocess.Popen[bytes]:
        module = "probing.daemon.supervisor.ready" if kind == "ready" else f"probing.daemon.{kind}"
        found = self.journal.stat()
        environment = {
            "PATH": os.environ["PATH"],
            "NOTIFY_SOCKET": str(self.base / "notify"),
            "JOURNAL_STREAM": f"{found.st_dev}:{found.st_ino}",
        }
        if kind != "ready":
            folder = "control" if kind == "collector" else "public"
            environment[unit.ERROR_FILE] = str(self.runtime / folder / "error")
        words = [*prefix, sys.executable, "-I", "-m", module, f"--config={self.config}"]
        # As systemd gives it to a unit whose configuration cannot be read.
        words.append(f"--runtime_dir={self.runtime}")
        with self.journal.open("a") as file:
            process = subprocess.Popen(words, env=environment, stderr=file, stdout=file)
        self.started.append(process)
        return process

    def run(self, kind: str, *prefix: str) -> tuple[int, list[str], list[str]]:
        """Exit status, lines of the journal and states sent to systemd of a process that ends by itself."""
        seen = len(self.lines())
        status = self.start(kind, *prefix).wait(60)
        return status, self.lines()[seen:], self.states()

    def lines(self) -> list[str]:
        return self.journal.read_text().splitlines()

    def states(self) -> list[str]:
        found = []
        while select.select([self.manager], [], [], 0)[0]:
            found += self.manager.recv(8192).decode().splitlines()
        return [state for state in found if state != "WATCHDOG=1"]

    def close(self) -> None:
        for process in self.started:
            process.kill()
            process.wait()
        self.manager.close()
        with contextlib.suppress(FileNotFoundError):
            pins = Path(self.pins)
            for folder in pins.iterdir():
                for layout in folder.iterdir():
                    for pin in layout.iterdir():
                        pin.unlink()
                    layout.rmdir()
                folder.rmdir()
            pins.rmdir()


@pytest.fixture
def units(open_tmp_path: Path) -> Iterator[Units]:
    made = Units(open_tmp_path)
    made.write()
    yield made
    made.close()


@contextlib.contextmanager
def mounted(path: Path, options: str) -> Iterator[None]:
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(path)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(path)], check=True)


WRONG = {
    "no TOML": ("listen =\n", "is not TOML: "),
    "an unknown key": ("lisen = 'x'\n", "error: unknown configuration key 'lisen'; hint: did you mean listen?"),
    "a wrong value": ("hang_s = -1.0\n", "hang_s = '-1.0' is wrong; hint: it must be at least 0"),
}


# All read it by the same code: the gate takes each case by the collector, and one by the others.
@pytest.mark.parametrize(
    ("case", "kind"),
    [
        long_unless(kind == "collector" or case == "an unknown key", case, kind)
        for case in WRONG
        for kind in ("collector", "service", "ready")
    ],
)
def test_a_wrong_configuration_is_one_line_and_no_restart_follows(units: Units, case: str, kind: str) -> None:
    text, wanted = WRONG[case]
    units.write(text)
    status, lines, states = units.run(kind)
    assert status == CONFIG
    assert len(lines) == 1
    assert lines[0].startswith("<3>error: ")
    assert wanted in lines[0]
    assert states == [f"STATUS={lines[0][3:]}"]


def test_what_only_the_service_finds_wrong(units: Units) -> None:
    units.write('listen = "0.0.0.0:7077"\n')
    status, lines, states = units.run("service")
    assert (status, len(lines), states) == (CONFIG, 1, [f"STATUS={lines[0][3:]}"])
    assert "unencrypted" in lines[0] or "everybody" in lines[0]
    # THEN ready ends at once with the line of the service, which lies beside its socket.
    left = unit.left_error(units.runtime / "public" / "error")
    assert left is not None
    assert unit.status_of(left) == CONFIG
    again, found, states = units.run("ready")
    assert (again, found, states) == (CONFIG, lines, [f"STATUS={lines[0][3:]}"])


def test_a_library_that_is_missing_is_one_line(units: Units) -> None:
    # pyarrow is hidden: the mount is seen by this process only.
    import pyarrow

    hide = f'mount -t tmpfs tmpfs {Path(pyarrow.__file__).parent} && exec "$@"'
    status, lines, states = units.run("collector", "unshare", "--mount", "sh", "-c", hide, "sh")
    assert status == UNAVAILABLE
    assert len(lines) == 1
    assert lines[0].startswith("<3>error: a library of probingd is missing or does not fit: ")
    assert "pyarrow" in lines[0]
    assert states == [f"STATUS={lines[0][3:]}"]


# In the gate: tests/e2e/test_bad_input.py, with the whole daemon.
@long
def test_a_host_without_libbpf_is_one_line(units: Units) -> None:
    found = subprocess.run(["/sbin/ldconfig", "-p"], capture_output=True, text=True, check=True).stdout
    path = next(line.split(" => ")[1] for line in found.splitlines() if "libbpf.so.1" in line)
    hide = f'mount --bind /dev/null {Path(path).resolve()} && exec "$@"'
    status, lines, states = units.run("collector", "unshare", "--mount", "sh", "-c", hide, "sh")
    errors = [line for line in lines if line.startswith("<3>")]
    assert status == UNAVAILABLE
    assert len(errors) == 1
    assert errors[0].startswith("<3>error: there is no usable libbpf: ")
    assert "; hint: install libbpf 1.x" in errors[0]
    assert states == [f"STATUS={errors[0][3:]}"]


# In the gate: tests/e2e/test_bad_input.py, test_capability_missing.
@long
def test_a_kernel_that_refuses_programs_is_one_line(units: Units) -> None:
    status, lines, _ = units.run("collector", "setpriv", "--bounding-set=-bpf,-sys_admin", "--inh-caps=-all")
    errors = [line for line in lines if line.startswith("<3>")]
    assert (status, len(errors)) == (UNAVAILABLE, 1)
    assert "BPF ring buffer" in errors[0]


def test_a_newer_format_is_one_line(units: Units) -> None:
    (units.state / "wal").mkdir()
    newer = PartHeader(1, 1, "n1", 0, {}, FORMAT_VERSION + 1)
    (units.state / "wal" / "000000000001.wal").write_bytes(pack_header(newer))
    status, lines, _ = units.run("collector")
    errors = [line for line in lines if line.startswith("<3>")]
    assert (status, len(errors)) == (DATAERR, 1)
    assert "newer than" in errors[0]


@contextlib.contextmanager
def units_running(units: Units) -> Iterator[subprocess.Popen[bytes]]:
    """A collector that is ready; no helper runs beside it."""
    process = units.start("collector")
    found: list[str] = []
    while "READY=1" not in found:
        assert select.select([units.manager], [], [], 60)[0], units.lines()
        found += units.manager.recv(8192).decode().splitlines()
        assert process.poll() is None, units.lines()
    yield process
    process.terminate()
    assert process.wait(30) == 0


@contextlib.contextmanager
def helpers(runtime: Path) -> Iterator[None]:
    """The sockets that systemd listens on: a process for each connection."""
    with contextlib.ExitStack() as undo, selectors.DefaultSelector() as selector:
        for name, module in HELPERS.items():
            listener = undo.enter_context(socket.socket(socket.AF_UNIX))
            listener.bind(str(runtime / f"{name}.sock"))
            listener.listen()
            selector.register(listener, selectors.EVENT_READ, module)
        ended, wake = socket.socketpair()
        selector.register(ended, selectors.EVENT_READ, "")
        thread = threading.Thread(target=_accept, args=(selector,))
        thread.start()
        yield
        wake.close()
        thread.join()
        ended.close()


def _accept(selector: selectors.BaseSelector) -> None:
    with contextlib.ExitStack() as started:
        while True:
            for key, _ in selector.select():
                if not key.data:
                    return
                connection, _ = key.fileobj.accept()  # type: ignore[union-attr]
                words = [sys.executable, "-I", "-m", f"probing.daemon.confined.{key.data}"]
                with connection:
                    # It ends with its connection.
                    started.enter_context(subprocess.Popen(words, stdin=connection.fileno(), stderr=subprocess.DEVNULL))


def fill(path: Path) -> None:
    with contextlib.suppress(OSError), path.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(1 << 16))


# In the gate: tests/e2e/test_bad_input.py, test_state_directory_full.
@long
def test_a_full_disk_is_shown_while_it_lasts(units: Units, until: Callable[..., object]) -> None:
    shown: list[str] = []

    def last() -> str:
        shown.extend(state for state in units.states() if state.startswith("STATUS="))
        return shown[-1] if shown else ""

    with mounted(units.state, "size=32m"), helpers(units.runtime), units_running(units):
        until(lambda: last().startswith("STATUS=collecting from "))
        filler = units.state / "filler"
        fill(filler)
        until(lambda: last().startswith("STATUS=degraded: "))
        assert str(units.state) in last()
        filler.unlink()
        until(lambda: last().startswith("STATUS=collecting from "))
        until(lambda: any("takes rows again" in line for line in units.lines()))
        loud = [line for line in units.lines() if line[:3] in ("<3>", "<4>") and "the log" in line]
        assert [line[:3] for line in loud] == ["<3>", "<4>"]
        assert "the log takes no rows" in loud[0]
        assert f"the state directory {units.state}" in loud[0]


def test_a_start_on_a_full_disk_fails_at_once_and_then_waits(units: Units, until: Callable[..., object]) -> None:
    # One inode, which the directory itself has: nothing can be made in it.
    with mounted(units.state, "nr_inodes=1"):
        status, lines, states = units.run("collector")
        errors = [line for line in lines if line.startswith("<3>")]
        assert (status, states) == (TEMPFAIL, [f"STATUS={errors[0][3:]}"])
        assert errors == [
            f"<3>error: the state directory {units.state} is full; hint: free space, or lower [store] max_bytes"
        ]
        # Not for good: the next start may succeed.
        assert unit.left_error(units.runtime / "control" / "error") is None
        # WHEN systemd starts it again, it waits before it ends, and ready does not wait for it
        second = units.start("collector")
        until(lambda: unit.left_error(units.runtime / "control" / "error"))
        until(lambda: f"{errors[0]}; tried again every 20 s" in units.lines())
        assert second.poll() is None
        status, lines, states = units.run("ready")
        assert (status, lines) == (TEMPFAIL, errors)
        assert f"STATUS={errors[0][3:]}; tried again every 20 s" in states
        # AND a stop is not delayed, and the next start by a person fails at once again
        second.send_signal(signal.SIGTERM)
        assert second.wait(10) == 0
        assert units.run("collector")[0] == TEMPFAIL
    with units_running(units):
        assert (units.runtime / "control" / "error").read_text() == ""


def test_an_error_of_our_own_is_a_line_below_its_traceback(units: Units) -> None:
    script = "from probing.daemon.supervisor.unit import run\nimport sys\nsys.exit(run(lambda: lambda: 1 // 0))"
    found = units.journal.stat()
    environment = {unit.ERROR_FILE: str(units.runtime / "control" / "error")}
    environment["JOURNAL_STREAM"] = f"{found.st_dev}:{found.st_ino}"
    with units.journal.open("a") as file:
        done = subprocess.run([sys.executable, "-c", script], env=environment, stderr=file, check=False)
    assert done.returncode == TEMPFAIL
    assert "Traceback (most recent call last):" in units.lines()
    assert units.lines()[-1].startswith("<3>error: ZeroDivisionError: ")


def test_ready_notices_that_a_unit_has_no_process(units: Units, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ready, "GONE_S", 0.2)
    config = Config.load(units.config)
    with memory_group(f"probingd-gone-{os.getpid()}", 100 << 20) as group:
        for name in ready.UNITS:
            (group / name).mkdir()
        try:
            found = ready.Units(config, float("inf"), group)
            with pytest.raises(InternalError, match=r"probingd-collector\.service does not run") as caught:
                found.wait_for("the collector", lambda: False)
            assert "journalctl -u probingd-collector.service" in caught.value.hint
            # A process in each of them: only the time ends the wait.
            with subprocess.Popen(["sleep", "60"]) as one, subprocess.Popen(["sleep", "60"]) as other:
                for name, process in zip(ready.UNITS, (one, other), strict=True):
                    (group / name / "cgroup.procs").write_text(str(process.pid))
                with pytest.raises(InternalError, match="the service does not answer"):
                    ready.Units(config, 0.0, group).wait_for("the service", lambda: False)
                assert not list(ready.Units(config, 0.0, group)._gone())
                one.kill()
                other.kill()
        finally:
            for name in ready.UNITS:
                (group / name).rmdir()


def test_the_file_of_the_error_holds_what_ready_needs(units: Units) -> None:
    units.write("lisen = 1\n")
    units.run("collector")
    left = json.loads((units.runtime / "control" / "error").read_text())
    assert left == {
        "kind": "ConfigError",
        "message": "unknown configuration key 'lisen'",
        "hint": "did you mean listen?",
        "lasts": True,
    }
