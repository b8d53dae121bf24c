"""Reads facts of the network: interfaces, the master's address and port, round trips to daemons.

Names are resolved in threads, since a resolver may take long. A round trip is the time that it takes to open a TCP
connection: the other node's kernel completes the handshake without its daemon. Formats: proc(5) for /proc/net/tcp,
sysfs-class-net of the kernel.
"""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from probing.daemon.service.names import OF_CALLERS, entries_of
from probing.diagnosis.preflight.facts import Interface, Master, Reached

__all__ = ("interfaces", "master", "port_state", "round_trips")

MAX_INTERFACES = 1024
MAX_SOCKETS_BYTES = 32 << 20
MAX_ADDRESSES = 16
TRIES = 5
# The maximum number of attempts to connect at the same time.
AT_ONCE = 32
CONNECT_S = 2.0
_LISTEN = "0A"
_TIME_WAIT = "06"


def interfaces(root: Path = Path("/sys/class/net")) -> tuple[Interface, ...]:
    """Returns the interfaces of the node. Raises OSError."""
    found = sorted(os.listdir(root))[:MAX_INTERFACES]  # noqa: PTH208
    return tuple(Interface(name, _state(root / name)) for name in found if (root / name).is_dir())


def _state(path: Path) -> str | None:
    try:
        with (path / "operstate").open() as file:
            return file.read(64).strip() or None
    except OSError:
        return None


def master(address: str, port: int) -> Master:
    """Returns the addresses of MASTER_ADDR, and the state of the port if one of these addresses belongs to this node.
    Raises OSError.
    """
    found = entries_of(address, port)
    addresses = tuple(dict.fromkeys(str(one[4][0]) for one in found))[:MAX_ADDRESSES]
    local = any(_is_local(one[0], one[4]) for one in found[:MAX_ADDRESSES])
    return Master(addresses, local, port_state(port) if local else None)


def _is_local(family: int, address: tuple[object, ...]) -> bool:
    """Returns whether the address belongs to this host, so that a socket can be bound to it."""
    with socket.socket(family, socket.SOCK_STREAM) as sock:
        try:
            sock.bind((address[0], 0, *address[2:]))
        except OSError as e:
            return e.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)
        return True


def port_state(port: int, paths: Sequence[Path] = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))) -> str:
    """Returns ``listening``; ``taken`` if a connection uses the port, so that no process can listen on it; else
    ``free``.
    """
    # psutil is not used: it would keep a row of each connection, however many there are, and look at the descriptors of
    # all processes.
    states = {state for path in paths for state in _states(path, port)}
    # Servers set SO_REUSEADDR, so that connections in TIME_WAIT do not keep them from listening.
    return "listening" if _LISTEN in states else "taken" if states - {_TIME_WAIT} else "free"


def _states(path: Path, port: int) -> Iterator[str]:
    wanted = f":{port:04X}"
    try:
        with path.open() as file:
            text = file.read(MAX_SOCKETS_BYTES)
    except OSError:
        return
    for line in text.splitlines()[1:]:
        words = line.split(None, 4)
        if len(words) > 3 and words[1].endswith(wanted):
            yield words[3]


async def round_trips(addresses: Sequence[str], seconds: float) -> tuple[Reached, ...]:
    """Returns the shortest of several round trips to each of ``addresses`` (HOST:PORT), or why there is none. The
    measurements of all addresses together take at most ``seconds``.
    """
    gate = asyncio.Semaphore(AT_ONCE)
    limit = time.monotonic() + seconds

    async def measured(address: str) -> Reached:
        async with gate:
            left = limit - time.monotonic()
            if left <= 0:
                return Reached(address, None, "there was no time left")
            return await _round_trip(address, min(left, CONNECT_S))

    return tuple(await asyncio.gather(*map(measured, addresses)))


async def _round_trip(address: str, seconds: float) -> Reached:
    host, _, port = address.rpartition(":")
    loop = asyncio.get_running_loop()
    best: int | None = None

    async def measure() -> None:
        nonlocal best
        found = await OF_CALLERS.entries(host.strip("[]"), int(port))
        for _ in range(TRIES):
            taken = await _connect(loop, found[0][0], found[0][4])
            best = taken if best is None else min(best, taken)

    why = ""
    try:
        await asyncio.wait_for(measure(), seconds)
    except asyncio.TimeoutError:
        why = f"no answer within {seconds:.1f} s"
    except OSError as e:
        # The text comes from the error number, because asyncio replaces the system's texts. Only a resolver's errors,
        # whose numbers are negative, keep their own text.
        why = os.strerror(e.errno) if e.errno is not None and e.errno > 0 else e.strerror or str(e)
    return Reached(address, best, "" if best is not None else why)


async def _connect(loop: asyncio.AbstractEventLoop, family: int, address: tuple[object, ...]) -> int:
    """Returns the time that a connection took, ns. Raises OSError."""
    with socket.socket(family, socket.SOCK_STREAM) as sock:
        sock.setblocking(False)
        begun = time.perf_counter_ns()
        await loop.sock_connect(sock, address)
        return time.perf_counter_ns() - begun
