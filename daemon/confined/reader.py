"""The reader: a process whose only task is to read targets. It handles one request at a time, and can be killed at any
time.

A read of a target can block forever (memory behind userfaultfd, a file on a dead server). So callers close the
connection at their deadline, and this ends the process (``serving``).

Requests are ``{"op", "pid", "start_ns", ...}``; ``start_ns`` 0 accepts any process with this pid. Answers by op:

* ``ping``: ``pid`` of the reader.
* ``list`` (``pids``; default: all processes): payload, JSON ``[[pid, start_ns, ppid, state, comm, exe], ...]``.
* ``identity``: header, see ``processes.target.identity``.
* ``state`` (``targets`` [[pid, start_ns], ...], ``threads``, ``memory``): payload, JSON, a value or null for each
  target.
* ``maps`` (``files``: only lines with a path; ``names``: only executable mappings of files with these prefixes, at
  most 1,024): payload, the text of /proc/PID/maps; header ``truncated``.
* ``open`` (``start`` of a mapping, ``served``: also on FUSE): header ``identity``, ``dev``, ``inode``, ``size``,
  ``mtime_ns``; one descriptor.
* ``files`` (``process`` [pid, start_ns], pid 0: the reader; ``paths``): header, ``processes.files.find_files``.
* ``file`` (``process``, ``path``, ``uid``): header and one descriptor, ``processes.files.open_file``.
* ``condition``, ``loads``: payload, JSON, see ``processes.conditions.condition``.
* ``usage``: ``host.cpu.reading.UsageReader.answer``. ``node``: ``host.node.reading.NodeReader.answer``.
* ``space``: ``host.node.space.answer_space``.
* ``network``: header ``dev``, ``inode`` of the network namespace; its descriptor.
* ``memory`` (``ranges`` [[address, length], ...]): header ``lengths`` (-1: not readable), payload, the bytes.
* ``memory_files`` (``link``, ``known`` inodes): header ``inodes`` of other memory files with that link, and ``closed``
  of known files that are no longer open; descriptors.
* ``process_context`` (``address``, ``published_ns``): header, ``labels.process_context.answer_context``.
* ``stacks``: ``python_stack.stacks.dump``. ``native``: ``python_stack.native.registers``.
* ``blocked``, ``codes``, ``threads``: ``off_cpu.stacks``, ``codes`` and ``thread_states`` of ``python_stack.sampling``.
* ``vars``: ``python_stack.values.read``. ``modules``: ``python_stack.torch_modules.look``.
* ``sockets``, ``tcp_totals``, ``tcp_sockets``: ``net.tcp.reading``.
* ``links``, ``link_details``: ``net.interfaces.reading``.
* ``rdma_devices``, ``rdma_ports``: ``net.rdma.reading``.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice

from probing.api.errors import ProbingError, ProcessGone, UsageError
from probing.api.text import size
from probing.daemon.confined import serving
from probing.daemon.confined.sandbox import restrict
from probing.daemon.confined.seccomp import READER
from probing.daemon.confined.serving import inherit, internal_error
from probing.daemon.host.cpu.reading import answer_usage
from probing.daemon.host.node.reading import answer_node
from probing.daemon.host.node.space import answer_space
from probing.daemon.ipc import Channel, Header, Message
from probing.daemon.labels.process_context import answer_context
from probing.daemon.net.interfaces.reading import handlers as link_handlers
from probing.daemon.net.rdma.reading import handlers as rdma_handlers
from probing.daemon.net.tcp.reading import handlers as socket_handlers
from probing.daemon.processes.conditions.condition import answer_condition, answer_loads
from probing.daemon.processes.files import find_files, open_file, open_mapped, open_memory_files
from probing.daemon.processes.memory import ProcessMemory
from probing.daemon.processes.target import MAX_MAPS, Target, identity, list_processes, states
from probing.daemon.python_stack.native.registers import handlers as native_handlers
from probing.daemon.python_stack.sampling.codes import answer_codes
from probing.daemon.python_stack.sampling.off_cpu.stacks import answer_blocked
from probing.daemon.python_stack.sampling.thread_states import answer_threads
from probing.daemon.python_stack.stacks.dump import handlers as stack_handlers
from probing.daemon.python_stack.torch_modules.look import handlers as module_handlers
from probing.daemon.python_stack.values.read import handlers as value_handlers

__all__ = ("main", "serve")

MAX_RANGES = 4_096
MAX_NAMED = 1_024
MAX_MEMORY = 16 << 20


def main() -> int:
    """Serves the connection at descriptor 0 until it closes."""
    serve(inherit(lambda: restrict(READER)))
    return 0


def serve(channel: Channel) -> None:
    """Answers requests until the connection closes."""
    serving.serve(channel, lambda request: _answer(request.header), partial(internal_error, "a reader"))


def _answer(request: Header) -> Message:
    op = request.get("op")
    whole = _WHOLE.get(str(op))
    if whole is not None:
        return whole(request)
    handler = _OF_A_TARGET.get(str(op))
    if handler is None:
        raise UsageError(f"a reader has no request {op!r}")
    pid, start_ns = request.get("pid"), request.get("start_ns", 0)
    if not isinstance(pid, int) or not isinstance(start_ns, int) or pid <= 0:
        raise UsageError(f'the request "{op}" does not name a process')
    with Target(pid, start_ns) as target:
        try:
            answer = handler(target, request)
        except ProbingError:
            # If the target has ended, its end caused the error. In that case the check raises ProcessGone instead.
            target.check()
            raise
        try:
            target.check()
        except ProcessGone:
            answer.close_fds()
            raise
    return answer


def _ping(_: Header) -> Message:
    return Message({"pid": os.getpid()})


def _list(request: Header) -> Message:
    return Message({}, json.dumps(list_processes(request.get("pids"))).encode())


def _state(request: Header) -> Message:
    wanted, threads, memory = request.get("targets", []), request.get("threads"), request.get("memory")
    return Message({}, json.dumps(states(wanted, bool(threads), bool(memory))).encode())


def _identity(target: Target, _: Header) -> Message:
    return Message(identity(target))


def _maps(target: Target, request: Header) -> Message:
    text = target.read("maps", MAX_MAPS)
    truncated = len(text) == MAX_MAPS
    if truncated:
        text = text[: text.rfind(b"\n") + 1]
    if names := [b"/" + str(name).encode() for name in request.get("names", ())]:
        text = b"".join(islice(_executable(text, names), MAX_NAMED))
    elif request.get("files"):
        text = b"".join(line for line in text.splitlines(keepends=True) if b" /" in line)
    return Message({"truncated": truncated}, text)


def _executable(maps: bytes, names: list[bytes]) -> Iterator[bytes]:
    for line in maps.splitlines(keepends=True):
        if any(name in line for name in names) and b"x" in line.split(b" ", 2)[1]:
            yield line


def _open(target: Target, request: Header) -> Message:
    header, fd = open_mapped(target, request)
    return Message(header, fds=[fd])


def _memory_files(target: Target, request: Header) -> Message:
    known = {int(inode) for inode in request.get("known", ())}
    inodes, fds, closed = open_memory_files(target, str(request["link"]).encode(), known)
    return Message({"inodes": inodes, "closed": sorted(closed)}, fds=fds)


def _files(request: Header) -> Message:
    with _named(request) as target:
        return Message(find_files(target, request))


def _file(request: Header) -> Message:
    with _named(request) as target:
        header, fd = open_file(target, request)
    return Message(header, fds=[fd])


def _named(request: Header) -> Target:
    # The process is in the field ``process`` instead of ``pid`` and ``start_ns``: otherwise a hanging file system would
    # put the process in quarantine.
    pid, start_ns = request["process"]
    return Target(int(pid) or os.getpid(), int(start_ns))


def _network(target: Target, _: Header) -> Message:
    fd = target.open("ns/net")
    found = os.fstat(fd)
    return Message({"dev": found.st_dev, "inode": found.st_ino}, fds=[fd])


def _memory(target: Target, request: Header) -> Message:
    ranges = [(int(address), int(length)) for address, length in request.get("ranges", ())]
    if len(ranges) > MAX_RANGES or sum(length for _, length in ranges) > MAX_MEMORY:
        raise UsageError(f'the request "memory" takes at most {MAX_RANGES} ranges with {size(MAX_MEMORY)} in total')
    parts = ProcessMemory(target.pid).read_many(ranges)
    return Message(
        {"lengths": [-1 if part is None else len(part) for part in parts]}, b"".join(p or b"" for p in parts)
    )


def _by_request(handler: Callable[[Header], Message]) -> Callable[[Target, Header], Message]:
    return lambda _, request: handler(request)


def _in_header(handler: Callable[[Header], Header]) -> Callable[[Target, Header], Message]:
    return lambda _, request: Message(handler(request))


_WHOLE: dict[str, Callable[[Header], Message]] = {
    "file": _file,
    "files": _files,
    "list": _list,
    "loads": answer_loads,
    "node": answer_node,
    "ping": _ping,
    "space": answer_space,
    "state": _state,
    "usage": answer_usage,
    **link_handlers(),
    **rdma_handlers(),
    **socket_handlers(),
}
_OF_A_TARGET: dict[str, Callable[[Target, Header], Message]] = {
    "blocked": _by_request(answer_blocked),
    "codes": _by_request(answer_codes),
    "condition": answer_condition,
    "identity": _identity,
    "maps": _maps,
    "memory": _memory,
    "memory_files": _memory_files,
    "process_context": lambda target, request: Message(answer_context(target, request)),
    "network": _network,
    "open": _open,
    "threads": _by_request(answer_threads),
    **{op: _by_request(handler) for op, handler in native_handlers().items()},
    **{op: _by_request(handler) for op, handler in stack_handlers().items()},
    **{op: _in_header(handler) for op, handler in module_handlers().items()},
    **{op: _in_header(handler) for op, handler in value_handlers().items()},
}


if __name__ == "__main__":
    raise SystemExit(main())
