"""Has a probe of a user compiled and loaded by a process with bcc."""

from __future__ import annotations

import logging
import os
import re
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from probing.api.errors import AttachError, ConfigError, InternalError, PrivilegeError, ProbingError
from probing.daemon.ipc import ChannelClosed, ChannelTimeout, Message
from probing.daemon.pool import Child
from probing.daemon.user_probes import kernel
from probing.daemon.user_probes.c_text import MAPS, entries, render
from probing.daemon.user_probes.spec import Spec

__all__ = ("PYTHON", "Loaded", "complaint_of", "load")

PYTHON = "/usr/bin/python3"
"""The Python that distributions install bcc for."""
TIMEOUT_S = 20.0
_log = logging.getLogger(__name__)
_CHILD = Path(__file__).with_name("child.py")
_NO_BCC = "install python3-bpfcc (Debian, Ubuntu) or python3-bcc, and the kernel's headers"
_ERROR = re.compile(r"^(\S+:\d+:\d+: (?:fatal )?error: .*)$", re.M)
_MAX_COMPLAINT = 300


@dataclass(slots=True)
class Loaded:
    """Descriptors of the programs, one for each attachment of the spec, and of the maps by name."""

    programs: list[int]
    maps: dict[str, int]

    def close(self) -> None:
        for fd in [*self.programs, *self.maps.values()]:
            os.close(fd)
        self.programs, self.maps = [], {}


def load(
    spec: Spec, folder: Path, scratch: Path, *, multi: bool = True, python: str = PYTHON, timeout: float = TIMEOUT_S
) -> Loaded:
    """Compile ``spec`` and have the kernel verify it, in about half a second. ``multi``: for uprobe_multi links.
    Trees of headers are merged in a temporary directory in ``scratch``.

    Raises ConfigError for code that does not compile, AttachError for what the kernel refuses, PrivilegeError where
    bcc or headers are missing; the output of compiler and verifier goes to the daemon's log.
    """
    source = render(spec, folder, kernel.task_offsets())
    header = {"entries": entries(spec, multi=multi), "maps": list(MAPS), "headers": kernel.header_trees()}
    try:
        # -I: neither the environment nor the working directory may change what is imported.
        child = Child([python, "-I", str(_CHILD)], {"TMPDIR": str(scratch)})
    except OSError as e:
        raise PrivilegeError(f"{python} cannot be run: {e.strerror}", hint=_NO_BCC) from e
    with closing(child):
        try:
            child.channel.send(header, source.encode())
            answer = child.channel.receive(timeout)
        except ChannelTimeout as e:
            raise ConfigError(f"{spec.name}.c was not compiled within {timeout:.0f} s", hint="make it smaller") from e
        except ChannelClosed as e:
            hint = "the daemon's log has what it wrote; it may use 4 GB of memory"
            raise InternalError(f"the compiler of {spec.name}.c ended without an answer", hint=hint) from e
    return _loaded(spec, answer)


def _loaded(spec: Spec, answer: Message) -> Loaded:
    log = answer.payload.decode(errors="replace")
    wanted = len(spec.attach) + len(MAPS)
    try:
        if failed := answer.header.get("failed"):
            raise _failure(spec, str(failed), str(answer.header.get("why", "")), log)
        if len(answer.fds) != wanted:
            raise InternalError(f"the compiler of {spec.name}.c gave {len(answer.fds)} of {wanted} descriptors")
        fds, answer.fds = answer.fds, []
    finally:
        answer.close_fds()
    count = len(spec.attach)
    return Loaded(fds[:count], dict(zip(MAPS, fds[count:], strict=True)))


def _failure(spec: Spec, failed: str, why: str, log: str) -> ProbingError:
    error: ProbingError
    if failed == "bcc":
        return PrivilegeError(f"bcc is not installed for {PYTHON}", hint=_NO_BCC)
    complaint = complaint_of(log)
    if failed == "compile":
        hint = "correct the C file; it is compiled again when it has changed"
        error = ConfigError(f"{spec.name}.c does not compile: {complaint or why}", hint=hint)
    else:
        hint = "the daemon's log has all that the kernel's verifier said"
        error = AttachError(f"the kernel refuses {spec.name}.c: {complaint or why}", hint=hint)
    _log.warning("%s\n%s", error.message, log)
    return error


def complaint_of(log: str) -> str:
    """Returns the line with the error in the log of the compiler or the verifier; empty where there is none."""
    if found := _ERROR.search(log):
        return found[1][:_MAX_COMPLAINT]
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    # The verifier's error comes last, before its statistics and the lines that bcc adds.
    ends = [i for i, line in enumerate(lines) if line.startswith("processed ")]
    if ends and ends[-1]:
        return lines[ends[-1] - 1][:_MAX_COMPLAINT]
    return ""
