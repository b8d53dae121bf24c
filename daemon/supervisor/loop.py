"""``probingd run``: one thread and one select loop that starts, restarts and ends the other processes.

It never forks after it started a thread, imports no large library, and is the only process that keeps the rights it was
started with. On request it reads the configuration again, and refuses a configuration that it could not run with.
"""

from __future__ import annotations

import logging
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from probing.api.errors import ConfigError, InternalError, ProbingError, StateLocked
from probing.daemon.bpf.pins import cleanup
from probing.daemon.config import Config, options, text_of
from probing.daemon.supervisor.children import MemoryLimits, Service, Spawner, describe, end
from probing.daemon.supervisor.health import parse
from probing.daemon.supervisor.journal import line_of
from probing.daemon.supervisor.notify import notify, watchdog_interval
from probing.daemon.supervisor.ports import Ports
from probing.daemon.supervisor.requirements import raise_limits, require
from probing.daemon.supervisor.rights import RightsTable
from probing.daemon.supervisor.runtime import Runtime, pins_of

__all__ = ("Supervisor",)

# Options that a reload cannot change: the supervisor has applied them to users, sockets, directories, capabilities.
_FIXED = (
    "instance",
    "state_dir",
    "socket",
    "runtime_dir",
    "users.collector",
    "users.service",
    "users.worker",
    "users.group",
    "probes.bpffs",
    "probes.force_fallback",
)
_CHECK_S = 20.0


def _check_reload(before: Config, after: Config, rights: RightsTable) -> list[str]:
    """Returns the keys whose values differ. Raises ConfigError when the daemon cannot go on with ``after``.

    The check runs as the service's user, which has to be able to read the files that ``after`` names. It runs in
    another process, since its imports would stay in this process.
    """
    changed = [key for key, _ in options() if text_of(before, key) != text_of(after, key)]
    if fixed := [key for key in changed if key in _FIXED]:
        raise ConfigError(f"a reload cannot change {', '.join(fixed)}", hint="stop probingd and start it again")
    words = [*rights.command(rights.service), sys.executable, "-I", "-m", "probing.daemon.cli", "check"]
    # The arguments contain every value that differs from its default.
    words += ["--only-config", "--config=/dev/null", *after.to_args()]
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=_CHECK_S, check=False)
    except subprocess.TimeoutExpired:
        raise ConfigError(f"the configuration was not checked in {_CHECK_S:.0f} s", hint="reload again") from None
    if done.returncode:
        error, _, hint = done.stderr.strip().rpartition("\nhint: ")
        raise ConfigError((error or hint).rpartition("error: ")[2], hint=hint if error else "")
    return changed


log = logging.getLogger("probingd.supervisor")

READY_S = 120.0
STOP_S = 10.0
HELPERS_STOP_S = 1.0
FAILED_STARTS = 3
# A collector whose supervisor was killed releases its locks within this time, s.
LOCKED_S = 3.0
# A round of the loop takes a second at most; if it takes longer than this, s, this process itself was stopped.
STILL_S = 5.0
# A process that asks for more helpers than this on one socket has a fault.
MAX_HELPERS = 64
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGCHLD)


class Supervisor:
    """Runs the daemon until a signal ends it; raises the error that ended a failed start.

    SIGTERM and SIGINT stop the daemon and remove every pin. SIGUSR1 stops it and keeps the pins. SIGHUP restarts the
    children with the configuration that ``reread`` returns, unless that configuration is invalid.
    """

    def __init__(
        self,
        config: Config,
        rights: RightsTable,
        spawner: Spawner | None = None,
        reread: Callable[[], Config] | None = None,
    ) -> None:
        self._config = config
        self._reread = reread
        self._rights = rights
        self._runtime = Runtime(config, rights)
        self._ports = Ports(config)
        self._spawner = spawner or Spawner(rights, config)
        self._selector = selectors.DefaultSelector()
        self._collector = Service("collector")
        self._service = Service("service")
        self._helpers: dict[int, tuple[str, subprocess.Popen[bytes]]] = {}
        self._ready = False
        self._started = self._looked = 0.0
        self._ending: signal.Signals | None = None
        self._watchdog = watchdog_interval()
        self._limits = MemoryLimits()

    def run(self) -> int:
        require(self._rights)
        raise_limits()
        if not self._rights.switches:
            log.warning("cannot change the user: all processes run as uid %d", os.getuid())
        fresh = not pins_of(self._config).exists()
        # Signals arrive as bytes, so that one select waits for them and for connections.
        wake, wakened = socket.socketpair()
        wake.setblocking(False)
        wakened.setblocking(False)
        for number in SIGNALS:
            signal.signal(number, _noted)
        signal.set_wakeup_fd(wakened.fileno())
        keep = not fresh
        try:
            self._runtime.prepare()
            self._selector.register(wake, selectors.EVENT_READ, "signal")
            for name, listener in self._runtime.listeners.items():
                self._selector.register(listener, selectors.EVENT_READ, name)
            self._loop(wake)
            keep = self._ending == signal.SIGUSR1
        finally:
            notify("STOPPING=1")
            self._stop(keep)
            self._selector.close()
            signal.set_wakeup_fd(-1)
            wake.close()
            wakened.close()
        return 0

    def _loop(self, wake: socket.socket) -> None:
        self._started = self._looked = alive = time.monotonic()
        while self._ending is None:
            now = time.monotonic()
            for child in (self._collector, self._service):
                if child.due is not None and child.due <= now:
                    self._start(child)
            if self._ports.due <= now:
                self._ports.bind()
            self._runtime.keep_state_dir()
            self._press(now)
            if self._watchdog and now >= alive + self._watchdog and self._are_well(now):
                notify("WATCHDOG=1")
                alive = now
            if not self._ready and now > self._started + READY_S:
                hint = "its log on stderr says what it waits for; `probingd check` lists what is missing"
                raise InternalError(f"not ready after {READY_S:.0f} s", hint=hint)
            signalled = False
            for key, _ in self._selector.select(self._pause(now)):
                if key.data == "signal":
                    signalled = True
                elif not isinstance(key.data, Service):
                    self._accept(key.data)
                elif not key.data.listen():
                    self._selector.unregister(key.fd)
            if signalled:
                # Signals come last: handling them closes the pipes of ended children, which this round reads before.
                self._signals(wake)
            if not self._ready and self._collector.answers and self._service.answers:
                self._answered()

    def _start(self, child: Service) -> None:
        if child is self._service:
            # The previous process has ended, so a port that it bound itself is free.
            self._ports.bind(now=True)
            with self._ports.offer() as channel:
                child.start(self._spawner, channel.fileno())
        else:
            child.start(self._spawner)
        self._selector.register(child.errors, selectors.EVENT_READ, child)

    def _press(self, now: float) -> None:
        """Restarts hung children; a pause of this process itself does not count against them."""
        late, self._looked = now - self._looked > STILL_S, now
        for child in (self._collector, self._service):
            if late:
                child.seen = now
            elif self._config.hang_s:
                child.press(now, self._config.hang_s)

    def _are_well(self, now: float) -> bool:
        hang_s = self._config.hang_s
        return not hang_s or all(
            child.process and child.started < child.seen and now <= child.seen + hang_s
            for child in (self._collector, self._service)
        )

    def _pause(self, now: float) -> float:
        due = [child.due for child in (self._collector, self._service) if child.due is not None]
        return max(0.0, min([now + (self._watchdog or 1.0), now + 1.0, *due]) - now)

    def _signals(self, wake: socket.socket) -> None:
        for number in wake.recv(4096):
            if number == signal.SIGCHLD:
                continue
            if number == signal.SIGHUP:
                self._reload()
            else:
                self._ending = signal.Signals(number)
        self._reap()

    def _reload(self) -> None:
        try:
            if self._reread:
                config = self._reread()
                changed = _check_reload(self._config, config, self._rights)
                log.info("the configuration was read again; changed: %s", ", ".join(changed) or "nothing")
                self._config = config
                self._spawner.configure(config)
                self._ports.configure(config)
        except ProbingError as e:
            log.error("not reloaded, the daemon goes on as it is: %s", line_of(e))
            return
        log.info("restarting the collector and the service")
        for child in (self._service, self._collector):
            if child.process:
                child.process.terminate()

    def _accept(self, kind: str) -> None:
        try:
            connection, _ = self._runtime.listeners[kind].accept()
        except (BlockingIOError, ConnectionAbortedError):
            return
        with connection:
            if sum(name == kind for name, _ in self._helpers.values()) >= MAX_HELPERS:
                log.warning("refusing the connection: %d processes of kind %s run", MAX_HELPERS, kind)
                return
            connection.setblocking(True)
            try:
                process = self._spawner.start(kind, connection=connection)
            except OSError as e:
                log.error("cannot start a %s: %s", kind, e.strerror)
                return
        self._helpers[process.pid] = kind, process

    def _reap(self) -> None:
        for pid, (kind, process) in list(self._helpers.items()):
            code = process.poll()
            if code is not None:
                del self._helpers[pid]
                if code > 0:
                    log.warning("%s %d ended: %s", kind, pid, describe(code))
                elif code == -signal.SIGKILL and (limit := self._limits.reached()):
                    log.warning("%s %d ended: %s: %s", kind, pid, describe(code), limit)
        for child in (self._collector, self._service):
            if child.process and (code := child.process.poll()) is not None:
                self._ended(child, code)

    def _answered(self) -> None:
        self._ready = True
        also = f" and {self._config.listen}" if self._config.listen else ""
        where = f"unix:{self._config.socket}"
        log.info("answers at %s%s; ask it with `probingctl -t %s ps`", where, also, where)
        notify("READY=1\nSTATUS=collecting and answering")
        sys.stdout.write("ready\n")
        sys.stdout.flush()

    def _ended(self, child: Service, code: int) -> None:
        if child.errors in self._selector.get_map():
            self._selector.unregister(child.errors)
        error = parse(child.ended(again=True))
        if self._ending is not None:
            return
        if not self._ready and not self._may_pass(error):
            if error:
                raise error
            if child.ends >= FAILED_STARTS:
                hint = "read its log lines above"
                raise InternalError(f"the {child.kind} does not start: {describe(code)}", hint=hint)
        child.reason = f"{describe(code)}{f': {error.message}' if error else self._explained(child, code)}"
        log.warning("%s ended (%s); starting it again", child.kind, child.reason)

    def _explained(self, child: Service, code: int) -> str:
        if child.aborted is not None:
            return ": it stood still, and its stacks are in the log"
        limit = self._limits.reached() if code == -signal.SIGKILL else ""
        return f": {limit}" if limit else ""

    def _may_pass(self, error: ProbingError | None) -> bool:
        return isinstance(error, StateLocked) and time.monotonic() < self._started + LOCKED_S

    def _stop(self, keep: bool) -> None:
        services = [child.process for child in (self._service, self._collector) if child.process]
        helpers = [process for _, process in self._helpers.values()]
        end(services, STOP_S)
        end(helpers, HELPERS_STOP_S)
        if not keep and pins_of(self._config).exists():
            self._remove_pins()
        self._ports.close()
        self._runtime.close()

    def _remove_pins(self) -> None:
        try:
            cleanup(self._config.instance, Path(self._config.probes.bpffs))
        except ProbingError as e:
            log.error("%s; run `probingd cleanup`", e.message)


def _noted(number: int, frame: object) -> None:
    """Does nothing. The signal's number arrives on the wake-up descriptor, but only if the signal has a handler."""
    del number, frame
