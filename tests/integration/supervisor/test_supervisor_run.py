"""The supervisor with stand-ins for its children: rights, restarts, signals, errors at start."""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

import pytest
from cgroup_support import memory_group
from long import long
from ports import free_port
from process_tree import arguments, family
from stranger import bind_attempts

from probing.daemon.bpf.pins import prepare

CHILD = Path(__file__).parents[1] / "supervisor_child.py"
RUN = textwrap.dedent(
    """
    import sys
    from probing.daemon.config import Config
    from probing.daemon.supervisor.children import PROGRAMS, Spawner
    from probing.daemon.supervisor.health import guard
    from probing.daemon.supervisor.loop import Supervisor
    from probing.daemon.supervisor.rights import rights_table
    import logging
    logging.basicConfig(level=logging.INFO)
    def main():
        config = Config.from_args(sys.argv[2:])
        rights = rights_table(config)
        programs = {kind: ("-I", sys.argv[1], kind) for kind in PROGRAMS}
        reread = lambda: Config.from_args(sys.argv[2:])
        return Supervisor(config, rights, Spawner(rights, config, programs), reread).run()
    sys.exit(guard(main))
    """
)
# Gives signals before all else that is ready.
SIGNALS_FIRST = textwrap.dedent(
    """
    import selectors
    class SignalsFirst(selectors.DefaultSelector):
        def select(self, timeout=None):
            return sorted(super().select(timeout), key=lambda ready: ready[0].data != "signal")
    from probing.daemon.supervisor import loop
    loop.selectors.DefaultSelector = SignalsFirst
    """
)
BITS = {"BPF": 39, "PERFMON": 38, "SYS_PTRACE": 19, "DAC_READ_SEARCH": 2, "SYSLOG": 34}
COLLECTOR = {"BPF", "PERFMON", "SYS_PTRACE", "DAC_READ_SEARCH", "SYSLOG"}
pytestmark = pytest.mark.skipif(os.getuid() != 0, reason="only root can give rights away")


def mask(names: set[str]) -> str:
    return f"{sum(1 << BITS[name] for name in names):016x}"


class Daemon:
    def __init__(self, base: Path, name: str = "a") -> None:
        self.base = base
        self.state = base / f"state-{name}"
        self.socket = base / f"run-{name}" / "p.sock"
        self.instance = f"test-{os.getpid()}-{name}"
        self.bpffs = Path(f"/sys/fs/bpf/probingd-test-{os.getpid()}")
        self.process: subprocess.Popen[str] | None = None
        self.prefix: list[str] = []
        self.script = RUN
        self.hang_s = 30.0
        self.config: Path | None = None
        self.errors: IO[str] | int = subprocess.PIPE
        self.more: list[str] = []

    def options(self) -> list[str]:
        return [
            f"--socket={self.socket}",
            f"--state_dir={self.state}",
            f"--instance={self.instance}",
            f"--probes.bpffs={self.bpffs}",
            "--users.collector=60001",
            "--users.service=60002",
            "--users.worker=60003",
            "--users.group=60004",
            f"--config={self.config}" if self.config else f"--hang_s={self.hang_s}",
            *self.more,
        ]

    def start(self) -> Daemon:
        self.process = subprocess.Popen(
            [*self.prefix, sys.executable, "-c", self.script, str(CHILD), *self.options()],
            stdout=subprocess.PIPE,
            stderr=self.errors,
            text=True,
        )
        return self

    def ready(self) -> Daemon:
        assert self.process is not None
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line == "ready\n", self.end()[1]
        return self

    def end(self, number: int = signal.SIGTERM) -> tuple[int, str]:
        assert self.process is not None
        if self.process.poll() is None:
            self.process.send_signal(number)
        _, errors = self.process.communicate(timeout=30)
        return self.process.returncode, errors

    def failed(self) -> tuple[int, list[str]]:
        """Exit code and the last two lines of one that ends by itself."""
        assert self.process is not None
        output, errors = self.process.communicate(timeout=30)
        assert output == ""
        assert "Traceback" not in errors
        return self.process.returncode, errors.splitlines()[-2:]

    def child(self, kind: str) -> int | None:
        assert self.process is not None
        pids = family(self.process.pid)
        return next((pid for pid in pids if arguments(pid)[2:4] == [str(CHILD), kind]), None)

    def connect(self, name: str) -> dict[str, str]:
        """What a helper says of itself."""
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(20)
            connection.connect(f"{self.socket}.d/{name}.sock")
            data = b""
            while part := connection.recv(65536):
                data += part
        return status(data.decode())


def status(text: str) -> dict[str, str]:
    return {key: " ".join(value.split()) for key, _, value in (line.partition(":") for line in text.splitlines())}


@pytest.fixture
def daemon(open_tmp_path: Path) -> Iterator[Daemon]:
    made = Daemon(open_tmp_path)
    yield made
    if made.process:
        made.process.kill()
        made.process.wait()
        for stream in filter(None, (made.process.stdout, made.process.stderr)):
            stream.close()
    for path in (made.bpffs / made.instance, made.bpffs):
        if path.exists():
            path.rmdir()


def test_each_process_gets_exactly_its_rights(daemon: Daemon, until: Callable[..., object]) -> None:
    daemon.start().ready()
    for kind, uid, gid, groups, caps in (
        ("collector", 60001, 60004, "", COLLECTOR),
        ("service", 60002, 60002, "60004", set()),
    ):
        pid = until(lambda kind=kind: daemon.child(kind))
        found = status(Path(f"/proc/{pid}/status").read_text())
        assert found["Uid"].split() == [str(uid)] * 4
        assert found["Gid"].split() == [str(gid)] * 4
        assert found["Groups"] == groups
        assert {found[f"Cap{name}"] for name in ("Inh", "Prm", "Eff", "Bnd", "Amb")} == {mask(caps)}
        assert found["NoNewPrivs"] == "1"
        assert found["Umask"] == "0027"
    for name, uid, gid, caps in (
        ("reader", 60001, 60004, {"SYS_PTRACE", "DAC_READ_SEARCH"}),
        ("parser", 60003, 60003, set()),
        ("maintenance", 60003, 60003, set()),
        ("sql", 60003, 60004, set()),
    ):
        found = daemon.connect(name)
        assert (found["Uid"].split()[1], found["Gid"].split()[1]) == (str(uid), str(gid))
        assert found["Groups"] == ""
        assert {found[f"Cap{name}"] for name in ("Inh", "Prm", "Eff", "Bnd", "Amb")} == {mask(caps)}
        assert found["NoNewPrivs"] == "1"
    only_those_concerned_reach_the_inner_sockets(daemon)
    code, errors = daemon.end()
    assert code == 0
    # It says where it answers.
    assert f"answers at unix:{daemon.socket}; ask it with `probingctl -t unix:{daemon.socket} ps`" in errors


def test_the_injectors_socket_exists_only_where_it_is_enabled(daemon: Daemon) -> None:
    daemon.start().ready()
    path = Path(f"{daemon.socket}.d") / "injector.sock"
    assert path.with_name("reader.sock").is_socket()
    assert not path.exists()
    assert daemon.end()[0] == 0
    daemon.more = ["--inject.enabled=true"]
    daemon.start().ready()
    found = path.stat()
    assert (found.st_uid, found.st_mode & 0o777) == (60001, 0o600)
    found_rights = daemon.connect("injector")
    assert found_rights["Uid"].split() == ["60001"] * 4
    assert {found_rights[f"Cap{name}"] for name in ("Inh", "Prm", "Eff", "Bnd", "Amb")} == {mask({"SYS_PTRACE"})}
    assert found_rights["NoNewPrivs"] == "1"
    assert daemon.end()[0] == 0
    assert not path.exists()


def test_a_deleted_state_directory_is_made_again(daemon: Daemon, until: Callable[..., object]) -> None:
    daemon.start().ready()
    shutil.rmtree(daemon.state)
    found = until(lambda: daemon.state.is_dir() and daemon.state.stat())
    assert (found.st_uid, found.st_gid, found.st_mode & 0o777) == (60001, 60004, 0o750)
    code, errors = daemon.end()
    assert code == 0
    assert errors.count("was deleted: it is made again") == 1


def only_those_concerned_reach_the_inner_sockets(daemon: Daemon) -> None:
    inner = Path(f"{daemon.socket}.d")
    assert (inner.stat().st_uid, inner.stat().st_gid, inner.stat().st_mode & 0o777) == (60001, 60004, 0o755)
    for name, uid in (("reader", 60001), ("parser", 60001), ("maintenance", 60001), ("sql", 60002)):
        found = (inner / f"{name}.sock").stat()
        assert (found.st_uid, found.st_mode & 0o777) == (uid, 0o600)
    control = (inner / "control").stat()
    assert (control.st_uid, control.st_gid, control.st_mode & 0o777) == (60001, 60002, 0o710)
    assert (daemon.state.stat().st_uid, daemon.state.stat().st_gid) == (60001, 60004)
    pins = (daemon.bpffs / daemon.instance).stat()
    assert (pins.st_uid, pins.st_mode & 0o777) == (60001, 0o700)


def test_a_killed_child_comes_back(daemon: Daemon, until: Callable[..., object]) -> None:
    daemon.start().ready()
    for kind in ("collector", "service", "collector"):
        before = until(lambda kind=kind: daemon.child(kind))
        assert isinstance(before, int)
        os.kill(before, signal.SIGKILL)
        until(lambda kind=kind, before=before: daemon.child(kind) not in (None, before))
    assert daemon.end()[0] == 0


def test_a_signal_that_comes_before_the_pipe_of_the_child(daemon: Daemon, until: Callable[..., object]) -> None:
    """The end of a child is a signal and the end of its pipe; the kernel promises no order of the two."""
    daemon.script = SIGNALS_FIRST + RUN
    daemon.start().ready()
    assert daemon.process is not None
    for _ in range(3):
        first = until(lambda: daemon.child("collector"))
        assert isinstance(first, int)
        # Stopped, it finds both at once.
        daemon.process.send_signal(signal.SIGSTOP)
        os.kill(first, signal.SIGKILL)
        until(lambda pid=first: "\nState:\tZ" in Path(f"/proc/{pid}/status").read_text())
        daemon.process.send_signal(signal.SIGCONT)
        until(lambda pid=first: daemon.child("collector") not in (None, pid))
    code, errors = daemon.end()
    assert code == 0
    assert "Traceback" not in errors


def test_hangup_restarts_the_children(daemon: Daemon, until: Callable[..., object]) -> None:
    daemon.start().ready()
    before = [until(lambda kind=kind: daemon.child(kind)) for kind in ("collector", "service")]
    assert daemon.process is not None
    daemon.process.send_signal(signal.SIGHUP)
    for kind, pid in zip(("collector", "service"), before, strict=True):
        until(lambda kind=kind, pid=pid: daemon.child(kind) not in (None, pid))
    assert daemon.end()[0] == 0


def test_no_stranger_takes_a_port_while_the_service_restarts(daemon: Daemon, until: Callable[..., object]) -> None:
    port = free_port()
    daemon.more = [f"--listen=127.0.0.1:{port}", "--insecure=true"]
    daemon.start().ready()
    assert bind_attempts(port) == []
    taken: list[list[str]] = []

    def replaced(before: int) -> bool:
        # Twenty ways each, and some of them fall into the time between two services.
        taken.extend(bind_attempts(port))
        return daemon.child("service") not in (None, before)

    assert daemon.process is not None
    for number in (signal.SIGKILL, signal.SIGHUP):
        before = until(lambda: daemon.child("service"))
        assert isinstance(before, int)
        os.kill(before if number == signal.SIGKILL else daemon.process.pid, number)
        until(lambda before=before: replaced(before))
    assert taken == []
    assert daemon.end()[0] == 0
    assert bind_attempts(port)


def test_hangup_takes_a_new_configuration_and_refuses_a_wrong_one(daemon: Daemon, until: Callable[..., object]) -> None:
    file, log = daemon.base / "probingd.toml", daemon.base / "log"
    file.write_text("hang_s = 30.0\n")
    daemon.config = file
    with log.open("w") as errors:
        daemon.errors = errors
        daemon.start().ready()
    before = until(lambda: daemon.child("collector"))
    assert isinstance(before, int)
    assert daemon.process is not None
    for text, wanted in (
        ("lisen = 'x'\n", "error: unknown configuration key 'lisen'; hint: did you mean listen?"),
        ("[store]\ntable_max_bytes = ['no.table=1']\n", "there is no stored table 'no.table'"),
        ("node_name = 'n'\ntoken_file = '/nowhere'\nlisten = '127.0.0.1:1'\n", "error: "),
        ("cgroup = '/x'\n[probes]\nforce_fallback = true\n", "a reload cannot change probes.force_fallback"),
    ):
        file.write_text(text)
        seen = log.stat().st_size
        daemon.process.send_signal(signal.SIGHUP)
        until(lambda seen=seen: "not reloaded" in log.read_text()[seen:])
        assert wanted in log.read_text()[seen:]
        assert daemon.child("collector") == before
    file.write_text("hang_s = 31.0\n")
    daemon.process.send_signal(signal.SIGHUP)
    after = until(lambda: daemon.child("collector") not in (None, before) and daemon.child("collector"))
    assert isinstance(after, int)
    assert "--hang_s=31.0" in arguments(after)
    assert "changed: hang_s" in log.read_text()
    assert daemon.end()[0] == 0


def test_children_die_with_the_supervisor(daemon: Daemon, until: Callable[..., object]) -> None:
    daemon.start().ready()
    pids = [until(lambda kind=kind: daemon.child(kind)) for kind in ("collector", "service")]
    daemon.end(signal.SIGKILL)
    until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids))


# tests/e2e/test_rights.py has both with the real programs in the gate.
@long
@pytest.mark.parametrize(("number", "kept"), [(signal.SIGTERM, False), (signal.SIGUSR1, True)])
def test_stop_removes_the_pins_unless_they_are_kept(daemon: Daemon, number: signal.Signals, kept: bool) -> None:
    daemon.start().ready()
    code, errors = daemon.end(number)
    assert (code, "error" in errors.lower()) == (0, False), errors
    assert (daemon.bpffs / daemon.instance).exists() == kept
    assert not daemon.socket.exists()
    assert not Path(f"{daemon.socket}.d").exists()


def test_two_daemons_do_not_share_a_socket(daemon: Daemon) -> None:
    daemon.start().ready()
    second = Daemon(daemon.base).start()
    code, (error, hint) = second.failed()
    assert code == 1
    assert daemon.process is not None
    assert error == f"error: socket {daemon.socket} is taken by probingd, pid {daemon.process.pid}"
    assert hint.startswith("hint: ")
    assert daemon.end()[0] == 0


def test_a_stranger_on_the_socket(daemon: Daemon) -> None:
    daemon.socket.parent.mkdir()
    os.chown(daemon.socket.parent, 60002, 60004)
    with socket.socket(socket.AF_UNIX) as stranger:
        stranger.bind(str(daemon.socket))
        stranger.listen()
        code, (error, _) = daemon.start().failed()
    assert (code, error) == (1, f"error: socket {daemon.socket} is taken by another process")
    assert daemon.socket.exists()


def test_what_is_left_of_a_killed_daemon_is_waited_for(daemon: Daemon) -> None:
    daemon.socket.parent.mkdir()
    with socket.socket(socket.AF_UNIX) as remains:
        remains.bind(str(daemon.socket))
        remains.listen()
        daemon.start()
        # It has found that the socket answers.
        remains.accept()[0].close()
    daemon.ready()
    assert daemon.end()[0] == 0


def order(daemon: Daemon, kind: str, what: str) -> None:
    """What the stand-in of ``kind`` is to do instead of running."""
    daemon.state.mkdir()
    (daemon.state / f"{kind}.order").write_text(what)
    os.chown(daemon.state, 60001, 60004)


def test_what_a_child_reports_is_what_the_user_reads(daemon: Daemon) -> None:
    order(daemon, "collector", "report")
    code, lines = daemon.start().failed()
    assert (code, lines) == (1, ["error: the log is of a newer version", "hint: install that version"])
    assert not (daemon.bpffs / daemon.instance).exists()


def test_a_child_that_never_starts(daemon: Daemon) -> None:
    order(daemon, "service", "kill")
    code, (error, hint) = daemon.start().failed()
    assert (code, error) == (1, "error: the service does not start: killed by signal 9")
    assert hint.startswith("hint: ")


def test_a_lock_that_is_let_go_soon_is_waited_for(daemon: Daemon) -> None:
    order(daemon, "collector", "locked once")
    daemon.start().ready()
    assert daemon.end()[0] == 0


def test_a_lock_that_stays_is_an_error(daemon: Daemon) -> None:
    order(daemon, "collector", "locked")
    code, (error, hint) = daemon.start().failed()
    assert (code, error) == (1, "error: another daemon uses it")
    assert "--state-dir" in hint


def test_a_state_directory_of_somebody_else(daemon: Daemon) -> None:
    daemon.state.mkdir()
    (daemon.state / "theirs").mkdir()
    code, (error, _) = daemon.start().failed()
    assert (code, error) == (1, f"error: state directory {daemon.state} is not writable for 60001")


def test_missing_capabilities_are_named(open_tmp_path: Path) -> None:
    command = ["setpriv", "--reuid=65534", "--clear-groups", "--inh-caps=-all", "--bounding-set=-all"]
    script = [sys.executable, "-c", RUN, str(CHILD), f"--socket={open_tmp_path}/r/s"]
    done = subprocess.run([*command, *script], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    error, hint = done.stderr.splitlines()
    assert error == "error: missing capabilities: CAP_BPF, CAP_PERFMON, CAP_SYS_PTRACE, CAP_DAC_READ_SEARCH"
    assert hint.startswith("hint: ")


def test_started_by_a_user_that_has_just_the_capabilities(daemon: Daemon, until: Callable[..., object]) -> None:
    user, caps = 60001, ",".join(f"+cap_{BITS[name]}" for name in sorted(COLLECTOR - {"SYSLOG"}))
    prepare(daemon.instance, daemon.bpffs, (user, user))
    daemon.base.chmod(0o777)
    daemon.prefix = ["setpriv", f"--reuid={user}", f"--regid={user}", "--clear-groups"]
    daemon.prefix += [f"--{kind}=-all,{caps}" for kind in ("inh-caps", "ambient-caps", "bounding-set")]
    daemon.start().ready()
    for kind, wanted in (("collector", COLLECTOR - {"SYSLOG"}), ("service", set())):
        pid = until(lambda kind=kind: daemon.child(kind))
        found = status(Path(f"/proc/{pid}/status").read_text())
        assert found["Uid"].split() == [str(user)] * 4
        assert {found[f"Cap{name}"] for name in ("Inh", "Prm", "Eff", "Amb")} == {mask(wanted)}
    assert daemon.connect("reader")["CapEff"] == mask({"SYS_PTRACE", "DAC_READ_SEARCH"})
    assert daemon.connect("parser")["CapEff"] == mask(set())
    assert daemon.end()[0] == 0


def command(name: str, daemon: Daemon, *more: str) -> subprocess.CompletedProcess[str]:
    words = [str(Path(sys.executable).with_name("probingd")), name, *daemon.options(), *more]
    return subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)


def test_stop_and_restart_from_outside(daemon: Daemon, until: Callable[..., object]) -> None:
    done = command("stop", daemon)
    assert (done.returncode, done.stderr.splitlines()[0]) == (1, f"error: no probingd runs for {daemon.socket}")
    daemon.start().ready()
    before = until(lambda: daemon.child("collector"))
    assert command("restart", daemon).returncode == 0
    until(lambda: daemon.child("collector") not in (None, before))
    done = command("cleanup", daemon)
    assert done.returncode == 2
    assert "uses the pins" in done.stderr
    assert command("stop", daemon, "--keep-pins").returncode == 0
    assert daemon.process is not None
    assert daemon.process.wait(30) == 0
    daemon.process.communicate()
    assert (daemon.bpffs / daemon.instance).exists()
    assert command("cleanup", daemon).returncode == 0
    assert not (daemon.bpffs / daemon.instance).exists()


STRANGER = 60009
HOLD = """
import fcntl, sys
file = open(sys.argv[1], sys.argv[2])
fcntl.lockf(file, fcntl.LOCK_SH if sys.argv[2] == "r" else fcntl.LOCK_EX)
print("held", flush=True)
sys.stdin.read()
"""


@contextlib.contextmanager
def held(path: Path, mode: str) -> Iterator[subprocess.Popen[str]]:
    """An ordinary user who holds a lock on ``path``, shared where it may only read it."""
    user = ["setpriv", f"--reuid={STRANGER}", f"--regid={STRANGER}", "--clear-groups"]
    words = [*user, sys.executable, "-I", "-c", HOLD]
    with subprocess.Popen(
        [*words, str(path), mode], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as stranger:
        assert stranger.stdout is not None
        assert stranger.stdout.readline() == "held\n"
        yield stranger


def test_nobody_else_may_open_the_lock(daemon: Daemon) -> None:
    daemon.start().ready()
    found = Path(f"{daemon.socket}.lock").stat()
    assert (found.st_uid, found.st_mode & 0o777) == (0, 0o600)
    assert daemon.end()[0] == 0


def test_a_strangers_shared_lock_keeps_no_daemon_from_starting_and_stop_spares_him(daemon: Daemon) -> None:
    path = Path(f"{daemon.socket}.lock")
    path.parent.mkdir()
    path.touch(0o644)
    path.chmod(0o644)
    with held(path, "r") as stranger:
        done = command("stop", daemon)
        assert (done.returncode, done.stderr.splitlines()[0]) == (1, f"error: no probingd runs for {daemon.socket}")
        daemon.start().ready()
        assert command("stop", daemon).returncode == 0
        assert daemon.end()[0] == 0
        assert stranger.poll() is None


def test_a_lock_of_somebody_else_is_not_taken_and_its_holder_not_signalled(daemon: Daemon) -> None:
    path = Path(f"{daemon.socket}.lock")
    path.parent.mkdir()
    path.touch()
    os.chown(path, STRANGER, STRANGER)
    with held(path, "r+") as stranger:
        code, (error, _) = daemon.start().failed()
        assert (code, error) == (1, f"error: {path} belongs to uid {STRANGER}")
        assert command("stop", daemon).returncode == 1
        assert stranger.poll() is None


@pytest.mark.parametrize("made", ["file", "directory"])
def test_a_pause_file_that_was_left_does_not_stop_a_start(daemon: Daemon, made: str) -> None:
    inner = Path(f"{daemon.socket}.d")
    inner.mkdir(parents=True)
    (inner / "pause").touch() if made == "file" else (inner / "pause").mkdir()
    os.chown(inner, 60001, 60004)
    daemon.start().ready()
    assert (inner / "pause").exists()
    assert (inner.stat().st_uid, inner.stat().st_mode & 0o777) == (60001, 0o755)
    assert daemon.end()[0] == 0
    assert [path.name for path in inner.iterdir()] == ["pause"]


def test_a_link_in_place_of_the_runtime_directory(daemon: Daemon) -> None:
    inner = Path(f"{daemon.socket}.d")
    inner.parent.mkdir()
    (daemon.base / "theirs").mkdir()
    inner.symlink_to(daemon.base / "theirs")
    code, (error, _) = daemon.start().failed()
    assert (code, error) == (1, f"error: {inner} exists and is not a directory")


def test_the_limit_of_memory_that_ended_a_child_is_named(daemon: Daemon, until: Callable[..., object]) -> None:
    order(daemon, "collector", "grow once")
    with memory_group(daemon.instance, 100 << 20) as group:
        daemon.prefix = ["sh", "-c", 'echo $$ > "$0/cgroup.procs"; exec "$@"', str(group)]
        daemon.start().ready()
        pid = until(lambda: daemon.child("collector"))
        reason = f"killed by signal 9: cgroup {group} reached its memory limit, 100 MiB"
        assert f"PROBINGD_RESTARTED={reason}".encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        code, errors = daemon.end()
        until(lambda: not (group / "cgroup.procs").read_text())
    assert code == 0
    assert f"collector ended ({reason}); starting it again" in errors


def test_few_descriptors_are_an_error_line(daemon: Daemon) -> None:
    # Without CAP_SYS_RESOURCE the limit stays as it is.
    daemon.prefix = ["prlimit", "--nofile=64:64", "setpriv", "--bounding-set=-sys_resource", "--inh-caps=-all"]
    code, (error, hint) = daemon.start().failed()
    assert (code, error) == (1, "error: only 64 files may be open")
    assert "ulimit -n" in hint


def test_a_silent_child_keeps_the_watchdog_of_the_whole_silent(daemon: Daemon, until: Callable[..., object]) -> None:
    """One that never gives a sign of life is replaced again and again, and no WATCHDOG=1 is sent meanwhile."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(daemon.base / "notify"))
        manager.settimeout(20)
        daemon.hang_s = 1.0
        daemon.prefix = ["env", f"NOTIFY_SOCKET={daemon.base}/notify", "WATCHDOG_USEC=200000"]
        daemon.start().ready()
        until(lambda: manager.recv(100) == b"WATCHDOG=1")
        (daemon.state / "service.order").write_text("say nothing")
        first = until(lambda: daemon.child("service"))
        assert isinstance(first, int)
        os.kill(first, signal.SIGKILL)
        second = until(lambda: daemon.child("service") not in (None, first) and daemon.child("service"))
        waiting(manager)
        until(lambda: daemon.child("service") not in (None, first, second))
        assert waiting(manager) == []
        code, errors = daemon.end()
    assert code == 0
    assert f"service, pid {second}, gave no sign of life for 4 s" in errors


def waiting(manager: socket.socket) -> list[bytes]:
    """What was sent to ``manager`` and not received yet."""
    found = []
    while select.select([manager], [], [], 0)[0]:
        found.append(manager.recv(100))
    return found
