"""Runs the Python interpreter that a client named, to get its versions, and ends. The request comes over the connection
at descriptor 0.

The request ``versions`` has ``python``, a path, and ``deadline`` on time.monotonic(). The header of its answer has
``versions`` {python, torch, cuda, nccl}, without the versions that could not be found.

The file may be any program, so it runs without rights as the user of the parsers. Landlock lets it read and execute
files, but not write any; seccomp refuses sockets, forks, signals and changes of files; limits bound memory, CPU time,
descriptors and output. The program gets no environment variable of the daemon, has its own session, and is killed at
the deadline. torch itself is not imported: its versions are in torch/version.py and in the metadata of packages.
"""

from __future__ import annotations

import ctypes
import json
import os
import selectors
import signal
import subprocess
import time
from contextlib import suppress
from typing import Any

from probing.api.errors import ProbingError, TargetError, TargetTimeout, UnsupportedTarget, UsageError
from probing.daemon.confined.sandbox import confine, limit, stand_back
from probing.daemon.confined.seccomp import refuse_calls
from probing.daemon.confined.serving import inherit, internal_error
from probing.daemon.ipc import Header, Message

__all__ = ("main",)

RECEIVE_S = 5.0
MAX_S = 20.0
MEMORY_BYTES = 4 << 30
CPU_SECONDS = 20
MAX_OUTPUT = 64 << 10
MAX_WHY = 200
# include/uapi/linux/prctl.h
_PR_SET_PDEATHSIG = 1
_ENVIRONMENT = {"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8"}
_libc = ctypes.CDLL(None)
_STARTS = ("clone", "clone3", "fork", "vfork", "execve", "kill")
# ncclGetVersion and NCCL_VERSION of nccl.h: 22705 is 2.27.5. Before 2.9 the numbers are shorter: 2804 is 2.8.4.
_SCRIPT = r"""
import importlib.util, json, platform, runpy, sys
found = {"python": platform.python_version()}
try:
    from importlib import metadata
except ImportError:
    metadata = None
try:
    spec = importlib.util.find_spec("torch")
    if spec and spec.submodule_search_locations:
        own = runpy.run_path(list(spec.submodule_search_locations)[0] + "/version.py")
        found["torch"], found["cuda"] = str(own.get("__version__") or ""), str(own.get("cuda") or own.get("hip") or "")
except Exception as e:
    sys.stderr.write("torch: %s\n" % e)
for name in ("nvidia-nccl-cu13", "nvidia-nccl-cu12", "nvidia-nccl-cu11") if metadata else ():
    try:
        found["nccl"] = metadata.version(name)
        break
    except Exception:
        pass
if "nccl" not in found:
    try:
        import ctypes
        number = ctypes.c_int()
        ctypes.CDLL("libnccl.so.2").ncclGetVersion(ctypes.byref(number))
        base = 1000 if number.value < 10000 else 10000
        found["nccl"] = "%d.%d.%d" % (number.value // base, number.value % base // 100, number.value % 100)
    except Exception:
        pass
sys.stdout.write(json.dumps(found))
"""


def main() -> int:
    """Answers one request."""
    channel = inherit(_give_up_rights)
    try:
        request = channel.receive(RECEIVE_S)
        request.close_fds()
        answer = Message({"versions": _versions(request.header)})
    except ProbingError as e:
        answer = Message({"error": e.to_dict()})
    except Exception as e:
        answer = Message({"error": internal_error("the process of an interpreter", e).to_dict()})
    with suppress(ProbingError):
        channel.send(answer.header, timeout=RECEIVE_S)
    return 0


def _give_up_rights() -> None:
    stand_back()
    limit(MEMORY_BYTES, CPU_SECONDS)
    # The interpreter and its imports may be installed anywhere, so all files are readable and executable.
    confine((), executable=("/",), kept=_STARTS)


def _versions(request: Header) -> dict[str, str]:
    python = request.get("python")
    # The deadline is on the machine's clock, so the time includes the start of this process.
    timeout = min(float(request.get("deadline") or 0) - time.monotonic(), MAX_S)
    if not isinstance(python, str) or not python.startswith("/"):
        raise UsageError("the request does not have the path of an interpreter")
    code, output, errors = _run([python, "-I", "-B", "-c", _SCRIPT], timeout)
    try:
        found = json.loads(output)
        if code or not isinstance(found, dict):
            raise ValueError
    except ValueError:
        end = f"killed by signal {-code}" if code < 0 else f"exit status {code}"
        last = (errors.decode("utf-8", "replace").strip().splitlines() or [""])[-1][:MAX_WHY]
        why = f"{python} did not report its versions ({end})" + (f": {last}" if last else "")
        raise UnsupportedTarget(why, hint="name a Python interpreter, such as /opt/venv/bin/python") from None
    return {str(name): str(value) for name, value in found.items()}


def _run(command: list[str], timeout: float) -> tuple[int, bytes, bytes]:
    """Returns the exit status and the first bytes of both outputs. Raises TargetError, TargetTimeout."""
    # With subprocess.DEVNULL, /dev/null would be opened for writing, too, which the sandbox refuses.
    nothing = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    try:
        process = subprocess.Popen(
            command,
            stdin=nothing,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd="/",
            env=_ENVIRONMENT,
            start_new_session=True,
            preexec_fn=_start_nothing,
        )
    except (OSError, subprocess.SubprocessError) as e:
        reason = getattr(e, "strerror", None) or type(e).__name__
        hint = "the user of the parsers (users.worker) must be able to execute the file and to enter its directories"
        raise TargetError(f"{command[0]} cannot be started: {reason}", hint=hint) from None
    finally:
        os.close(nothing)
    try:
        outputs = _outputs(process, time.monotonic() + timeout)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        code = process.wait()
    if outputs is None:
        raise TargetTimeout(
            f"{command[0]} did not answer within {timeout:.0f} s", hint="check that it is a Python interpreter"
        )
    return code, *outputs


def _start_nothing() -> None:
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    refuse_calls(("execve",))


def _outputs(process: subprocess.Popen[bytes], deadline: float) -> tuple[bytes, bytes] | None:
    """Returns both outputs, cut to a limit, once the process has closed them; None at the deadline."""
    found: dict[Any, bytes] = {process.stdout: b"", process.stderr: b""}
    with selectors.DefaultSelector() as selector:
        for stream in found:
            selector.register(stream, selectors.EVENT_READ)
        while selector.get_map():
            ready = selector.select(deadline - time.monotonic())
            if not ready or time.monotonic() > deadline:
                return None
            for key, _ in ready:
                data = os.read(key.fd, MAX_OUTPUT)
                if not data:
                    selector.unregister(key.fileobj)
                found[key.fileobj] = (found[key.fileobj] + data)[:MAX_OUTPUT]
    process.wait()
    return found[process.stdout], found[process.stderr]


if __name__ == "__main__":
    raise SystemExit(main())
