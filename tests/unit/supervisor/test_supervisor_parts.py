"""Parts of the supervisor that need no processes: rights, errors across processes, sd_notify, locks."""

from __future__ import annotations

import errno
import os
import socket
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from probing.api.errors import ConfigError, FormatError, InternalError, PrivilegeError, ProbingError
from probing.daemon.cli.app import invoke
from probing.daemon.config import Config
from probing.daemon.supervisor import children, control, health, notify, rights, runtime
from probing.daemon.supervisor.children import Service, describe


def test_a_fatal_error_arrives_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    read, write = os.pipe()
    monkeypatch.setenv(health.ERROR_FD, str(write))
    health.report(FormatError("newer", hint="upgrade"))
    line = os.read(read, 10000)
    os.close(read)
    os.close(write)
    found = health.parse(line)
    assert isinstance(found, FormatError)
    assert (found.message, found.hint) == ("newer", "upgrade")


def test_without_a_supervisor_it_is_printed(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.delenv(health.ERROR_FD, raising=False)

    def main() -> int:
        raise ConfigError("two\nlines \x1b[31m", hint="a hint")

    assert health.guard(main) == 2
    assert capfd.readouterr().err == "error: two lines [31m\nhint: a hint\n"


def test_a_closed_pipe_does_not_swallow_it(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    read, write = os.pipe()
    os.close(read)
    monkeypatch.setenv(health.ERROR_FD, str(write))
    health.report(InternalError("broken", hint="h"))
    os.close(write)
    assert capfd.readouterr().err == "error: broken\nhint: h\n"


@given(st.binary(max_size=200))
def test_noise_is_no_error(noise: bytes) -> None:
    assert health.parse(noise) is None


@pytest.mark.parametrize("line", [b"{}", b"[]", b"1", b'{"kind": "X"}'])
def test_other_json_is_no_error(line: bytes) -> None:
    assert health.parse(line) is None


def test_notify_reaches_the_manager(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(tmp_path / "n"))
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "n"))
        notify.notify("READY=1")
        assert manager.recv(100) == b"READY=1"
    notify.notify("WATCHDOG=1")
    monkeypatch.delenv("NOTIFY_SOCKET")
    notify.notify("READY=1")


def test_watchdog_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WATCHDOG_USEC", raising=False)
    assert notify.watchdog_interval() is None
    monkeypatch.setenv("WATCHDOG_USEC", "30000000")
    assert notify.watchdog_interval() == 15.0
    monkeypatch.setenv("WATCHDOG_PID", "1")
    assert notify.watchdog_interval() is None


def test_setpriv_gets_numbers() -> None:
    account = rights.Account(7, 8, (9,))
    command = rights.Rights(account, ("BPF", "PERFMON")).command()
    assert "--reuid=7" in command
    assert "--regid=8" in command
    assert "--groups=9" in command
    assert "--ambient-caps=-all,+cap_39,+cap_38" in command
    assert "--bounding-set=-all,+cap_39,+cap_38" in command
    nothing = rights.Rights(rights.Account(7, 8, ()), ()).command()
    assert "--clear-groups" in nothing
    assert "--bounding-set=-all" in nothing


def test_unknown_users_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rights, "permitted", lambda: frozenset(rights.CAPABILITIES))
    users = [f"--users.{role}=0" for role in ("collector", "worker", "group")]
    with pytest.raises(ConfigError, match="no user 'nobody-knows' for the service") as caught:
        rights.rights_table(Config.from_args([*users, "--users.service=nobody-knows"]))
    assert "useradd" in caught.value.hint
    with pytest.raises(ConfigError, match="no group 'nobody-knows'"):
        rights.rights_table(Config.from_args(["--users.group=nobody-knows"]))


def test_sys_admin_only_where_it_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rights, "permitted", lambda: frozenset(rights.CAPABILITIES))
    users = [f"--users.{role}=1" for role in ("collector", "service", "worker", "group")]
    plain = rights.rights_table(Config.from_args(users))
    assert plain.collector.capabilities == (*rights.COLLECTOR, "SYSLOG")
    assert plain.reader.capabilities == rights.READER
    assert plain.parser.capabilities == plain.service.capabilities == plain.worker.capabilities == ()
    assert plain.missing == ()
    forced = rights.rights_table(Config.from_args([*users, "--probes.force_fallback"]))
    old = rights.rights_table(Config.from_args(users), sys_admin=True)
    assert forced.collector.capabilities == old.collector.capabilities == (*rights.COLLECTOR, "SYS_ADMIN", "SYSLOG")


@pytest.mark.parametrize(("mode", "found"), [(0o666, False), (0o660, True), (0o600, False), (0o640, False)])
def test_the_group_of_the_device_files_of_gpus(tmp_path: Path, mode: int, found: bool) -> None:
    control = tmp_path / "nvidiactl"
    control.touch()
    control.chmod(mode)
    group = control.stat().st_gid
    assert rights.device_groups(control) == ((group,) if found and group else ())
    assert rights.device_groups(tmp_path / "none") == ()


def test_who_may_create_where(tmp_path: Path) -> None:
    found = tmp_path.stat()
    tmp_path.chmod(0o700)
    inner = tmp_path / "inner"
    inner.mkdir(0o777)
    inner.chmod(0o777)
    assert not rights.Account(found.st_uid + 4000, 4000, ()).may_create_in(inner)
    assert not rights.Account(found.st_uid + 4000, 4000, ()).may_reach(inner)
    assert not rights.Account(4000, 4000, ()).may_create_in(tmp_path / "nowhere")


def test_nobody_holds_a_lock_that_is_not_there(tmp_path: Path) -> None:
    config = Config.from_args([f"--socket={tmp_path}/s"])
    assert control.owner_of(config) is None
    control.lock_path(config).touch()
    assert control.owner_of(config) is None


def test_a_child_that_fails_at_once_waits_longer_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [100.0]
    monkeypatch.setattr("probing.daemon.supervisor.children.time.monotonic", lambda: clock[0])
    child, delays = Service("collector"), []
    for _ in range(10):
        child.errors, write = os.pipe2(os.O_NONBLOCK)
        child.started = clock[0]
        os.close(write)
        assert child.ended(again=True) == b""
        assert child.due is not None
        delays.append(round(child.due - clock[0], 3))
    assert delays == [0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0, 5.0]
    child.errors, write = os.pipe2(os.O_NONBLOCK)
    os.write(write, b"first\nlast\nhalf")
    os.close(write)
    clock[0] += 2.0
    assert child.ended(again=True) == b"last"
    assert child.due == clock[0]


def test_exit_codes_are_described() -> None:
    assert describe(-9) == "killed by signal 9"
    assert describe(3) == "exit status 3"


def test_setpriv_must_be_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda *_, **__: None)
    with pytest.raises(PrivilegeError, match="setpriv is missing"):
        rights.Rights(None, ()).command()


def test_the_service_listens_behind_a_link_and_knows_the_address_of_clients() -> None:
    config = Config.from_args(["--socket=/run/x/p.sock"])
    inner = Config.from_args(runtime.service_config(config).to_args())
    assert inner.socket == "/run/x/p.sock.d/public/probingd.sock"
    assert inner.runtime_dir == config.runtime_dir
    assert inner.public_socket == config.public_socket == config.socket


def test_signs_of_life_are_no_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    child = Service("collector")
    child.errors, write = os.pipe2(os.O_NONBLOCK)
    monkeypatch.setenv(health.ERROR_FD, str(write))
    child.started = child.seen = time.monotonic()
    health.alive(answers=False)
    health.alive(answers=False)
    assert child.listen()
    assert child.seen > child.started
    assert not child.answers
    health.alive(answers=True)
    assert child.listen()
    assert child.answers
    health.report(FormatError("newer", hint="upgrade"))
    health.alive(answers=True)
    assert child.listen()
    assert child.listen(), "nothing more has come, and the pipe is open"
    os.close(write)
    assert not child.listen()
    error = health.parse(child.ended(again=False))
    assert error is not None
    assert error.message == "newer"


def test_limits_of_memory_in_both_versions_of_cgroups(tmp_path: Path) -> None:
    inner = tmp_path / "a" / "b"
    inner.mkdir(parents=True)
    own = tmp_path / "own"
    own.write_text("0::/a/b\n")
    for group in (inner, inner.parent):
        (group / "memory.events").write_text("low 0\noom 3\noom_kill 2\n")
    (inner / "memory.max").write_text("max\n")
    (inner.parent / "memory.max").write_text(f"{512 << 20}\n")
    limits = children.MemoryLimits(tmp_path, own)
    assert limits.reached() == ""
    (inner.parent / "memory.events").write_text("low 0\noom 4\noom_kill 3\n")
    assert limits.reached() == f"cgroup {inner.parent} reached its memory limit, 512 MiB"
    assert limits.reached() == ""
    first = tmp_path / "memory" / "c"
    first.mkdir(parents=True)
    own.write_text("4:memory:/c\n3:cpu,cpuacct:/c\n0::/\n")
    (first / "memory.oom_control").write_text("oom_kill_disable 0\nunder_oom 0\noom_kill 0\n")
    (first / "memory.limit_in_bytes").write_text("9223372036854771712\n")
    limits = children.MemoryLimits(tmp_path, own)
    (first / "memory.oom_control").write_text("oom_kill_disable 0\nunder_oom 0\noom_kill 1\n")
    assert limits.reached() == f"cgroup {first} reached its memory limit"


def test_without_descriptors_there_is_an_error_line(capfd: pytest.CaptureFixture[str]) -> None:
    def main() -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    assert health.guard(main) == 1
    assert capfd.readouterr().err.startswith("error: no descriptor is left: Too many open files\nhint: allow more")


@pytest.mark.parametrize("kept", [False, True])
def test_a_start_that_fails_leaves_no_state_directory_that_it_made(tmp_path: Path, kept: bool) -> None:
    state = tmp_path / "deep" / "state"
    nowhere = tmp_path / "file"
    nowhere.write_text("")
    options = [f"--socket={tmp_path}/s", f"--state-dir={state}", f"--probes.bpffs={nowhere}/bpf"]
    config = Config.from_args([*options, *(f"--users.{name}={os.getuid()}" for name in ("collector", "service"))])
    made = runtime.Runtime(config, rights.rights_table(config))
    with pytest.raises((ProbingError, OSError)):
        made.prepare()
    assert state.is_dir()
    if kept:
        # A row that was stored, or a directory that was there before.
        (state / "manifest").write_text("x")
    made.close()
    assert state.exists() == kept
    if not kept:
        state.mkdir()
        again = runtime.Runtime(config, rights.rights_table(config))
        with pytest.raises((ProbingError, OSError)):
            again.prepare()
        again.close()
        assert state.is_dir()


@pytest.mark.parametrize(
    ("layouts", "words", "said"),
    [
        (1, [], "the probes of instance default are removed\n"),
        (0, [], "there were no probes of instance default\n"),
        (0, ["--all"], "there were no probes\n"),
        (3, ["--all"], "the probes are removed\n"),
    ],
)
def test_cleanup_says_what_it_did(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    layouts: int,
    words: list[str],
    said: str,
) -> None:
    monkeypatch.setattr("probing.daemon.bpf.pins.cleanup", lambda *_: layouts)
    assert invoke(["cleanup", f"--socket={tmp_path}/s", *words]) == 0
    assert capsys.readouterr().out == said
