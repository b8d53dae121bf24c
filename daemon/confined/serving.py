"""Serves requests on the connection that a confined process inherits as descriptor 0.

The process handles one request at a time, and may hang in any request. So callers close the connection at their
deadline, and a thread of the process waits for the end of the connection and then ends the process.
"""

from __future__ import annotations

import gc
import logging
import os
import select
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress

from probing.api.errors import InternalError, ProbingError
from probing.daemon.ipc import Channel, ChannelClosed, ChannelTimeout, Message
from probing.daemon.supervisor.journal import log_to_stderr

__all__ = ("inherit", "internal_error", "requests", "serve")

_log = logging.getLogger(__name__)


def inherit(give_up_rights: Callable[[], object]) -> Channel:
    """Calls ``give_up_rights``, then returns the connection at descriptor 0.

    From then on the process ends when the other end of the connection closes.
    """
    # The log names the process after its module.
    log_to_stderr(sys.argv[0].rpartition("/")[2].removesuffix(".py"))
    # Ctrl-C reaches every process of the terminal, but the supervisor ends the processes of the daemon.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    connection = socket.socket(fileno=0)
    # This comes before any thread starts, because Landlock and seccomp apply only to this thread and later threads.
    give_up_rights()
    _end_on_hangup(connection.fileno())
    return Channel(connection)


def requests(channel: Channel) -> Iterator[Message]:
    """Yields requests until the connection closes. Closes the descriptors that the handler of a request left open."""
    # Imported modules stay, so the garbage collector need not visit them.
    gc.freeze()
    while True:
        try:
            request = channel.receive()
        except ChannelClosed:
            return
        try:
            yield request
        finally:
            request.close_fds()


def serve(
    channel: Channel, answer: Callable[[Message], Message], error_of: Callable[[Exception], ProbingError]
) -> None:
    """Answers each request by ``answer(request)`` until the connection closes.

    The descriptors of an answer are closed after it is sent. A bad request does not end the process: a ProbingError is
    sent as the answer, and for any other exception the error that ``error_of`` returns. An answer that is too large for
    a message is replaced by an error.
    """
    with suppress(ChannelClosed):
        for request in requests(channel):
            try:
                reply = answer(request)
            except ChannelClosed:
                raise
            except ProbingError as e:
                reply = Message({"error": e.to_dict()})
            except Exception as e:
                reply = Message({"error": error_of(e).to_dict()})
            try:
                channel.send(reply.header, reply.payload, reply.fds)
            except (ChannelClosed, ChannelTimeout):
                raise
            except ProbingError as e:
                # An answer that is too large is refused before any byte of it is sent, so the error can be sent
                # instead.
                channel.send({"error": e.to_dict()})
            finally:
                reply.close_fds()


def internal_error(process: str, e: Exception) -> InternalError:
    """Logs ``e`` with its traceback, and returns an error with its text. ``process``: "a reader", "the gate", ..."""
    _log.error("%s failed", process, exc_info=e)
    return InternalError(f"{process} failed: {type(e).__name__}: {e}")


def _end_on_hangup(fd: int) -> None:
    poll = select.poll()
    poll.register(fd, select.POLLRDHUP | select.POLLHUP | select.POLLERR)

    def wait() -> None:
        poll.poll()
        os._exit(0)

    threading.Thread(target=wait, name="hangup", daemon=True).start()
