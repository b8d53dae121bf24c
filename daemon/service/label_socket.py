"""Accepts labels from jobs as datagrams on a Unix socket that every local user may send to.

A datagram is a JSON object with ``labels``, an object of strings. To label other ranks than the sender, it also has
``job``, ``rank`` or ``pids``. The kernel reports the process and the user of the sender. There is no answer; refused
datagrams are counted and logged. All local users share the queue of the socket, so a sender should not wait for room
in it (MSG_DONTWAIT).
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections import Counter, deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import msgspec

from probing.api.errors import NotFound, PeerError, ProbingError
from probing.daemon.fairness import Turns
from probing.daemon.query.caller import Caller
from probing.daemon.service.audit import Audit
from probing.daemon.source_state import SourceState

__all__ = ("NAME", "LabelSocket")

NAME = "labels.sock"
MAX_DATAGRAM = 4 << 10
# At most _BURST datagrams are read in a row, followed by a pause of _PAUSE_S, s. So a flood costs the service only a
# few percent of a CPU.
_BURST, _PAUSE_S = 32, 0.02
# The maximum number of waiting datagrams of a user, and the maximum number of users with waiting datagrams.
_MAX_WAITING, _MAX_USERS = 32, 64
# If the rank is not found or the collector does not answer, the datagram is passed on once more after this time, s: the
# rank may not be identified yet, or the collector may be restarting.
_AGAIN_S = 2.0
# struct ucred of include/linux/socket.h: pid, uid, gid.
_CREDENTIALS = struct.Struct("iII")
_WHAT = "labels"


class _Datagram(msgspec.Struct, frozen=True):
    labels: dict[str, str]
    job: str = ""
    rank: int | None = None
    pids: tuple[int, ...] = ()


class _Request(NamedTuple):
    """A request for the collector, and the user who sent it. ``again``: whether this is the second try."""

    fields: Mapping[str, object]
    uid: int
    again: bool = False


_decoded = msgspec.json.Decoder(_Datagram).decode


class LabelSocket:
    """The socket NAME in ``folder``. Belongs to one event loop.

    ``label`` passes a request of ``labels.source.LabelRequest`` to the collector, and may wait for it.
    """

    def __init__(self, folder: Path, label: Callable[[Mapping[str, object]], object], audit: Audit) -> None:
        self._path = folder / NAME
        self._label = label
        self._audit = audit
        self._socket: socket.socket | None = None
        self._problem = ""
        self._waiting: dict[int, deque[_Request]] = {}
        self._turns: Turns[int] = Turns()
        self._accepted = 0
        self._refused: Counter[str] = Counter()
        self._task: asyncio.Task[None] | None = None
        self._stopped = False

    def start(self) -> None:
        """Listens. A socket that cannot be bound is a problem of ``sources``."""
        try:
            self._socket = _bound(self._path)
        except OSError as e:
            self._problem = f"no labels by datagram: cannot bind {self._path}: {e.strerror or e}"
            return
        self._listen()

    async def stop(self) -> None:
        self._stopped = True
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        if self._socket is not None:
            asyncio.get_running_loop().remove_reader(self._socket)
            self._socket.close()
            self._path.unlink(missing_ok=True)

    def sources(self) -> list[SourceState]:
        """Returns the state of the socket for Status; empty before the first datagram."""
        if not (self._problem or self._accepted or self._refused):
            return []
        refused = "".join(f", {count} refused: {why}" for why, count in self._refused.most_common(3))
        detail = f"{self._accepted} datagrams accepted{refused}"
        return [SourceState("label_socket", "degraded" if self._problem else "running", self._problem, detail=detail)]

    def _listen(self) -> None:
        if self._socket is not None and self._socket.fileno() >= 0:
            asyncio.get_running_loop().add_reader(self._socket, self._receive)

    def _receive(self) -> None:
        assert self._socket is not None
        for _ in range(_BURST):
            try:
                data, control, flags, _ = self._socket.recvmsg(MAX_DATAGRAM, socket.CMSG_SPACE(_CREDENTIALS.size))
            except OSError:
                break
            self._take(data, control, cut=bool(flags & socket.MSG_TRUNC))
        else:
            loop = asyncio.get_running_loop()
            loop.remove_reader(self._socket)
            loop.call_later(_PAUSE_S, self._listen)
        self._pass_on_soon()

    def _take(self, data: bytes, control: list[tuple[int, int, bytes]], *, cut: bool) -> None:
        credentials = [value for level, kind, value in control if (level, kind) == _SENDER]
        if not credentials:
            return
        pid, uid, _ = _CREDENTIALS.unpack(credentials[0][: _CREDENTIALS.size])
        try:
            if cut:
                raise ValueError
            datagram = _decoded(data)
        except (ValueError, RecursionError):
            self._refuse(uid, f"it is not a JSON object with labels, or has more than {MAX_DATAGRAM:,} bytes")
            return
        self._queue(_Request({**msgspec.to_builtins(datagram), "by_pid": pid, "by_uid": uid}, uid))

    def _queue(self, request: _Request) -> None:
        queue = self._waiting.get(request.uid)
        if (queue is None and len(self._waiting) >= _MAX_USERS) or (queue and len(queue) >= _MAX_WAITING):
            self._refuse(request.uid, "too many datagrams at once")
        else:
            self._waiting.setdefault(request.uid, deque()).append(request)

    def _queue_again(self, request: _Request) -> None:
        self._queue(request)
        self._pass_on_soon()

    def _pass_on_soon(self) -> None:
        if self._waiting and self._task is None and not self._stopped:
            self._task = asyncio.create_task(self._pass_on())
            self._task.add_done_callback(self._passed)

    async def _pass_on(self) -> None:
        """Passes the waiting datagrams to the collector; users take turns."""
        while self._waiting:
            uid = min(self._waiting, key=self._turns.of)
            self._turns.took(uid)
            request = self._waiting[uid].popleft()
            if not self._waiting[uid]:
                del self._waiting[uid]
            try:
                await asyncio.to_thread(self._label, request.fields)
                self._accepted += 1
            except (NotFound, PeerError) as e:
                if request.again:
                    self._refuse(uid, e.message, kind=e.kind)
                else:
                    asyncio.get_running_loop().call_later(_AGAIN_S, self._queue_again, request._replace(again=True))
            except ProbingError as e:
                self._refuse(uid, e.message, kind=e.kind)

    def _passed(self, task: asyncio.Task[None]) -> None:
        self._task = None
        # A datagram that arrived after the task's last check of the queue would otherwise wait for the next datagram.
        self._pass_on_soon()
        with contextlib.suppress(asyncio.CancelledError):
            task.result()

    def _refuse(self, uid: int, why: str, *, kind: str = "") -> None:
        self._refused[kind or why] += 1
        self._audit.refused(Caller("datagram", f"uid {uid}"), _WHAT, why, kind=kind)


_SENDER = socket.SOL_SOCKET, socket.SCM_CREDENTIALS


def _bound(path: Path) -> socket.socket:
    """Returns a socket that does not block at ``path``, to which every user may send. Raises OSError."""
    bound = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        bound.setblocking(False)
        if path.is_socket():
            # The socket was left by a service that was killed, or belongs to another daemon in the same directory.
            with contextlib.suppress(ConnectionRefusedError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as other:
                other.connect(str(path))
                raise OSError("another daemon uses it")
            path.unlink()
        bound.bind(str(path))
        path.chmod(0o666)
    except OSError:
        bound.close()
        raise
    return bound
