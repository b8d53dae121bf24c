"""A virtual machine with a kernel, the root image and a disk of files: ``Guest``.

QEMU translates every instruction here (no KVM), which costs a guest about nine tenths of its speed.
"""

from __future__ import annotations

import contextlib
import socket
import subprocess
import time
import timeit
from pathlib import Path

from guest_agent import AgentSilent, GuestAgent
from kernels import Kernel, run

__all__ = ("Guest", "GuestFailed")

# The limit of a boot, s, for a host that needs HOST_LOOP_S for the loop: the guest cannot be measured yet.
BOOT_S = 240.0
COMMAND_S = 300.0
OFF_S = 120.0
# A loop of Python that measures a guest, which is ten times slower than its host. Limits are for a guest that needs
# LOOP_S.
LOOP = ("for i in range(1000000): s += i", "s = 0")
LOOP_S, HOST_LOOP_S = 0.5, 0.07
# As long as a guest's loop: the share of the CPU that a process gets on a busy host shows only then.
HOST_LOOPS = 10
MEMORY_MB = 2048
CPUS = 2
# The registers and stacks of all CPUs, and the stacks of blocked tasks: by QEMU's monitor, and by a kernel that still
# answers keys. The key 8 lets all of them through to the serial port.
STATE = ("info registers -a", "sendkey alt-sysrq-8", "sendkey alt-sysrq-l", "sendkey alt-sysrq-w")
STATE_S = 5.0


class GuestFailed(AssertionError):
    """A command in the guest failed, or the guest itself did."""


class Guest:
    """A machine in ``folder``, which keeps its disk between boots. ``payload`` is mounted read-only at /payload.

    ``durable``: data that the guest has synced outlives a cut of power; else a flush of its disk costs nothing.
    """

    QEMU, CONSOLE = "qemu-system-x86_64", "ttyS0"
    MACHINE: tuple[str, ...] = ("-cpu", "max,la57=off")

    def __init__(self, folder: Path, kernel: Kernel, root: Path, payload: Path, *, durable: bool = False) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.kernel = kernel
        # The outputs of QEMU and of the guest's kernel.
        self._log = folder / "qemu.log"
        self._serial = folder / "serial.log"
        self._agent_port = folder / "agent"
        self._monitor_port = folder / "monitor"
        self._disk = folder / "disk.qcow2"
        self._payload = payload
        self._cache = "writeback" if durable else "unsafe"
        self._qemu: subprocess.Popen[bytes] | None = None
        self._agent: GuestAgent | None = None
        # The duration of the first boot.
        self.boot_s = 0.0
        self._loop_s: float | None = None
        run("qemu-img", "create", "-q", "-f", "qcow2", "-b", root.resolve(), "-F", "raw", self._disk)

    def boot(self, *, parameters: str = "") -> float:
        """Starts the machine; returns the seconds until its agent answered. Raises GuestFailed.

        The first boot also measures the guest.
        """
        host_loop_s = timeit.timeit(*LOOP, number=HOST_LOOPS) / HOST_LOOPS
        limit_s = BOOT_S * max(1.0, host_loop_s / HOST_LOOP_S)
        begun = time.monotonic()
        self._agent_port.unlink(missing_ok=True)
        with self._log.open("ab") as log:
            self._qemu = subprocess.Popen(self._command(parameters), stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        while not self._agent_answers():
            if self._qemu.poll() is not None:
                raise GuestFailed(f"QEMU ended with {self._qemu.returncode}:\n{self.console_end()}")
            if time.monotonic() > begun + limit_s:
                raise GuestFailed(f"no boot within {limit_s:.0f} s:\n{self.console_end()}")
            time.sleep(0.2)
        booted_s = time.monotonic() - begun
        if self._loop_s is None:
            self.boot_s = booted_s
            program = f"import timeit; print(min(timeit.repeat(*{LOOP}, repeat=3, number=1)))"
            self._loop_s = float(self.run(f'python3 -c "{program}"'))
        return booted_s

    @property
    def loop_s(self) -> float:
        """The seconds that LOOP took after the first boot."""
        assert self._loop_s is not None, "boot first"
        return self._loop_s

    @property
    def slowness(self) -> float:
        """The factor of limits on this guest; 1 if it needs at most LOOP_S, or has not booted yet."""
        return max(1.0, (self._loop_s or 0.0) / LOOP_S)

    def run(self, command: str, *, seconds: float = COMMAND_S, check: bool = True) -> str:
        """Runs ``command`` by sh as root; returns its standard output. Raises GuestFailed unless it exits with 0."""
        status, out, err = self.result(command, seconds)
        if check and status:
            raise GuestFailed(f"`{command}` exited with {status}\n{out[-4000:]}{err[-4000:]}")
        return out

    def result(self, command: str, seconds: float = COMMAND_S) -> tuple[int, str, str]:
        """Returns (exit status, stdout, stderr) of ``command``.

        Raises GuestFailed when it does not end within ``seconds``, times the slowness of the guest.
        """
        assert self._agent is not None, "boot first"
        try:
            return self._agent.shell(command, seconds * self.slowness)
        except AgentSilent as e:
            raise GuestFailed(f"{e}\n{self._state()}\n{self.console_end()}") from e

    def write(self, path: str, text: str) -> None:
        self.run(f"cat >{path} <<'END-OF-FILE'\n{text}\nEND-OF-FILE")

    def shut_down(self) -> None:
        """Shuts the guest down as an administrator does."""
        assert self._qemu is not None
        with contextlib.suppress(GuestFailed):
            # The agent may end before it answers.
            self.run("systemctl poweroff --no-block")
        self._qemu.wait(OFF_S * self.slowness)
        self._forget_agent()

    def cut_power(self) -> None:
        """Kills QEMU; the disk keeps the data that the guest had written by then."""
        assert self._qemu is not None
        self._qemu.kill()
        self._qemu.wait()
        self._forget_agent()

    def close(self) -> None:
        if self._qemu is not None and self._qemu.poll() is None:
            self.cut_power()

    @property
    def ended_by_qemu(self) -> bool:
        """Whether the kernel ended because a CPU ran an instruction that the other had just patched.

        Linux patches code for its static keys, with an int3 meanwhile. QEMU 7.2 was seen to make the mistake, with a
        thread for each CPU; with one for both, the tests take twice as long.
        """
        return self._serial.exists() and b" int3: 0000 [#" in self._serial.read_bytes()

    def console_end(self) -> str:
        """Returns the last output of QEMU and of the guest's kernel."""
        logs = (path for path in (self._log, self._serial) if path.exists())
        return "".join(path.read_text(errors="replace")[-20_000:] for path in logs)

    def _state(self) -> str:
        """Returns the registers of the CPUs; the stacks are then in the log of the serial port."""
        answer = b""
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as monitor:
            monitor.connect(str(self._monitor_port))
            for command in STATE:
                monitor.sendall(command.encode() + b"\n")
                time.sleep(STATE_S)
                answer += monitor.recv(1 << 16, socket.MSG_DONTWAIT)
        lines = answer.decode(errors="replace").splitlines()
        return "\n".join(line for line in lines if line.startswith(("CPU#", "R")))

    def _agent_answers(self) -> bool:
        if self._agent is None:
            try:
                self._agent = GuestAgent(self._agent_port)
            except OSError:
                return False
        return self._agent.answers(1.0)

    def _forget_agent(self) -> None:
        if self._agent is not None:
            self._agent.close()
            self._agent = None

    def _command(self, parameters: str) -> list[str]:
        line = f"console={self.CONSOLE} quiet panic=-1 random.trust_cpu=on sysrq_always_enabled {parameters}"
        port = "virtserialport,chardev=agent,name=org.qemu.guest_agent.0"
        return [
            *(self.QEMU, "-nodefaults", "-display", "none", "-no-reboot", "-nic", "none"),
            *("-accel", "tcg,thread=multi,tb-size=512", *self.MACHINE, "-smp", str(CPUS), "-m", str(MEMORY_MB)),
            *("-kernel", str(self.kernel.image), "-initrd", str(self.kernel.initrd), "-append", line),
            # By writeback flushes reach the image file; installing a package makes thousands.
            *("-drive", f"file={self._disk},if=virtio,cache={self._cache},discard=unmap"),
            *("-drive", f"file={self._payload},if=virtio,format=raw,readonly=on"),
            *("-serial", f"file:{self._serial}", "-monitor", f"unix:{self._monitor_port},server=on,wait=off"),
            *("-chardev", f"socket,id=agent,path={self._agent_port},server=on,wait=off"),
            *("-device", "virtio-serial-pci", "-device", port, "-device", "virtio-rng-pci"),
        ]
