"""Sessions of visitors: each session has a random cookie, and each visitor has their own rights and connections.

On loopback the only visitor is the caller of ``probingctl web``, who shows the key that the command printed. For a team
each visitor shows a token of the nodes, which stays in the memory of this process.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import secrets
import threading
import time
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any, TypeVar

from anyio import CapacityLimiter, to_thread

from probing.api.errors import Overloaded, PrivilegeError, ProbingError, Unauthenticated
from probing.client.render.rows import rows_of
from probing.client.web.live import Live
from probing.client.web.panels import Question
from probing.client.web.parameters import Parameters
from probing.client.wire.loop import Waits, wait

if TYPE_CHECKING:
    from probing.client.cluster import Cluster

__all__ = ("Door", "KeyDoor", "Sessions", "TokenDoor", "Visitor")

T = TypeVar("T")
# The maximum number of questions in flight: _AT_ONCE of one visitor, _THREADS of all visitors. _WAIT_S: how long a
# question waits for the other questions of its visitor, s.
_AT_ONCE = 4
# With more than _MANY_NODES nodes a visitor has fewer questions in flight, because this process then computes most of
# the time, and parallel questions only slow each other down.
_FEW_AT_ONCE, _MANY_NODES = 2, 100
_THREADS = 24
_WAIT_S = 60.0
_MOST_STREAMS = 16
_FILES_AT_ONCE = 2
_LOST = 'SELECT sum("count") AS lost FROM probing.losses WHERE ts > now() - INTERVAL 10 MINUTE'
_LOST_EVERY_S, _LOST_S = 30.0, 5.0


class Visitor:
    """Asks nodes with the rights of one person; belongs to one event loop."""

    def __init__(self, cluster: Cluster, threads: CapacityLimiter) -> None:
        self.live = Live(cluster)
        self.files = CapacityLimiter(_FILES_AT_ONCE)
        self._cluster = cluster
        self._threads = threads
        self._places = asyncio.Semaphore(_AT_ONCE)
        self._few_places = asyncio.Semaphore(_FEW_AT_ONCE)
        self._streams = 0
        self._lost: int | None = None
        self._lost_at = float("-inf")
        self._losing = threading.Lock()

    def question(self, parameters: Parameters) -> Question:
        """Returns a question with the rights of the visitor."""
        return Question(self._cluster.afresh(), parameters, self.live.jobs)

    async def work(self, work: Callable[[], T], left: Coroutine[Any, Any, None]) -> T:
        """Runs ``work`` in a thread. Once ``left`` ends, ``work`` asks the nodes nothing more. Raises Overloaded if the
        visitor's other questions take too long."""
        leaving = asyncio.ensure_future(left)
        try:
            return await self._work(work, leaving)
        finally:
            leaving.cancel()

    async def _work(self, work: Callable[[], T], leaving: asyncio.Future[None]) -> T:
        many = self.live.nodes > _MANY_NODES
        places, most = (self._few_places, _FEW_AT_ONCE) if many else (self._places, _AT_ONCE)
        try:
            await asyncio.wait_for(places.acquire(), _WAIT_S)
        except asyncio.TimeoutError:
            raise Overloaded(f"{most} of your questions are still being answered") from None
        waits = Waits()

        def run() -> T:
            with waits:
                return work()

        try:
            running = asyncio.ensure_future(to_thread.run_sync(run, limiter=self._threads))
            await asyncio.wait((running, leaving), return_when=asyncio.FIRST_COMPLETED)
            if not running.done():
                waits.end()
            return await running
        finally:
            places.release()

    def enter_stream(self) -> None:
        """Counts a stream until ``leave_stream``. Raises Overloaded if the visitor has too many streams."""
        if self._streams >= _MOST_STREAMS:
            raise Overloaded(f"you have {_MOST_STREAMS} live views and downloads open", hint="close a tab")
        self._streams += 1

    def leave_stream(self) -> None:
        self._streams -= 1

    def lost_rows(self) -> int | None:
        """Returns how many rows the nodes lost in 10 min, from an answer that is at most 30 s old; None: unknown.

        Thread-safe.
        """
        with self._losing:
            if time.monotonic() - self._lost_at < _LOST_EVERY_S:
                return self._lost
            self._lost_at = time.monotonic()
        try:
            cluster = self._cluster.afresh()
            cluster.timeout = cluster.enough(min(cluster.timeout, _LOST_S))
            (row,) = rows_of(cluster.query(_LOST))
            self._lost = int(row["lost"] or 0)
        except ProbingError:
            self._lost = None
        return self._lost

    def close(self) -> None:
        self.live.close()
        self._cluster.close()


class KeyDoor:
    """Admits everyone who shows ``key``. All of them are one visitor, the caller of ``probingctl web``."""

    login = "key"

    def __init__(self, cluster: Cluster, key: str) -> None:
        self._key = key
        self._visitor = Visitor(cluster, CapacityLimiter(_THREADS))

    async def admit(self, secret: str) -> Visitor:
        """Returns the caller. Raises Unauthenticated for another key."""
        if not hmac.compare_digest(secret.encode("utf-8", "replace"), self._key.encode()):
            raise Unauthenticated("the key is wrong", hint="open the address that `probingctl web` printed")
        return self._visitor

    def gone(self, visitor: Visitor) -> None:
        """Does nothing: the caller may come again."""
        del visitor


# The minimum and maximum length of a token (docs/security.md). Other tokens are refused without asking a node.
_SHORTEST, _LONGEST = 16, 4096
_CHECK_S = 5.0
_MOST_VISITORS = 64


class TokenDoor:
    """Admits visitors who show a token that the target accepts. ``make`` returns the cluster of a token."""

    login = "token"

    def __init__(self, make: Callable[[str], Cluster]) -> None:
        self._make = make
        self._threads = CapacityLimiter(_THREADS)
        self._visitors: dict[bytes, Visitor] = {}
        self._checks = asyncio.Semaphore(4)

    async def admit(self, secret: str) -> Visitor:
        """Returns the visitor with the token ``secret``. Raises Unauthenticated if the target refuses the token, the
        target's error if the target does not answer, and Overloaded if there are too many visitors."""
        if not (
            _SHORTEST <= len(secret) <= _LONGEST and secret.isascii() and secret.isprintable() and " " not in secret
        ):
            raise Unauthenticated("this is not a token", hint="a token has 16 to 4,096 visible characters")
        cluster = self._make(secret)
        try:
            async with self._checks:
                await to_thread.run_sync(_check, cluster)
        except PrivilegeError:
            cluster.close()
            raise Unauthenticated("the node does not accept this token", hint="ask its administrator for one") from None
        except BaseException:
            cluster.close()
            raise
        # All browsers with one token are one visitor, so that nodes are asked once for their live views.
        name = hashlib.sha256(secret.encode()).digest()
        if name in self._visitors:
            cluster.close()
        elif len(self._visitors) >= _MOST_VISITORS:
            cluster.close()
            raise Overloaded(f"{_MOST_VISITORS} visitors are logged in")
        else:
            self._visitors[name] = Visitor(cluster, self._threads)
        return self._visitors[name]

    def gone(self, visitor: Visitor) -> None:
        """Removes a visitor whose last session has ended."""
        self._visitors = {name: one for name, one in self._visitors.items() if one is not visitor}
        visitor.close()


def _check(cluster: Cluster) -> None:
    wait(cluster.node(cluster.target).status(_CHECK_S))


_IDLE_S = 12 * 3600.0
_MOST_OF_ONE = 32
Door = KeyDoor | TokenDoor


class Sessions:
    """The sessions of visitors, by cookie value; a session ends after twelve hours without use."""

    def __init__(self, door: Door) -> None:
        self.door = door
        self._known: dict[str, tuple[Visitor, float]] = {}

    def visitor(self, cookie: str | None) -> Visitor:
        """Returns the visitor with ``cookie``. Raises Unauthenticated if there is no such session."""
        self._sweep()
        if cookie is None or not self.use(cookie):
            how = "open the address that `probingctl web` printed" if self.door.login == "key" else "log in"
            raise Unauthenticated("your session has ended" if cookie else "you are not logged in", hint=how)
        return self._known[cookie][0]

    def use(self, cookie: str) -> bool:
        """Returns whether ``cookie`` has a session, and counts the session as used now."""
        known = self._known.get(cookie)
        if known is not None:
            self._known[cookie] = known[0], time.monotonic()
        return known is not None

    async def begin(self, secret: str) -> str:
        """Returns the cookie of a new session. Raises the errors of the door's ``admit``."""
        visitor = await self.door.admit(secret)
        own = [cookie for cookie, (one, _) in self._known.items() if one is visitor]
        for cookie in sorted(own, key=lambda one: self._known[one][1])[: max(0, len(own) - _MOST_OF_ONE + 1)]:
            del self._known[cookie]
        cookie = secrets.token_urlsafe(32)
        self._known[cookie] = visitor, time.monotonic()
        return cookie

    def end(self, cookie: str | None) -> None:
        """Ends a session, if there is one."""
        known = self._known.pop(cookie, None) if cookie is not None else None
        if known is not None and all(one is not known[0] for one, _ in self._known.values()):
            self.door.gone(known[0])

    def close(self) -> None:
        """Ends all sessions, and closes the live views and connections of their visitors."""
        for visitor in {id(one): one for one, _ in self._known.values()}.values():
            visitor.close()
        self._known.clear()

    def _sweep(self) -> None:
        now = time.monotonic()
        for cookie in [cookie for cookie, (_, used) in self._known.items() if now - used > _IDLE_S]:
            self.end(cookie)
