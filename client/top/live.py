"""Everything behind the screen except the drawing: the threads that ask nodes, the model, and the user's choices."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from probing.api.errors import ProbingError
from probing.client.collectives.ranks import process_of
from probing.client.collectives.silence import SilenceWatch
from probing.client.render.rows import Row
from probing.client.top.fetch import Fetcher, Functions
from probing.client.top.health import Fetched
from probing.client.top.model import Model, View, key_of
from probing.client.top.rank_page import RankFacts, ask_rank
from probing.client.top.repeat import Repeater
from probing.client.top.state import State

if TYPE_CHECKING:
    from probing.client.cluster import Cluster

__all__ = ("Live",)

_RANK_EVERY_S = 2.0


class Live:
    """Refreshes ``view`` every ``interval`` seconds from ``start`` on; after each refresh a thread calls ``changed``.

    ``where`` is an SQL condition on the job; ``window``: seconds over which rates are computed.
    """

    def __init__(self, cluster: Cluster, where: str, interval: float, window: float) -> None:
        self.view = View()
        self.state = State()
        self.changed: Callable[[], None] = lambda: None
        self._cluster = cluster
        self._model = Model(window, SilenceWatch(cluster))
        self._error = ""
        self._addresses: dict[str, str] = {}
        self._fetcher = Fetcher(cluster, where, interval, self._deliver, self._failed)
        self._functions = Functions(self._fetcher, cluster, self._functions_read)
        self._facts: RankFacts | None = None
        self._rank: Repeater | None = None

    def start(self) -> None:
        self._fetcher.repeater.start()
        self._functions.repeater.start()

    def stop(self) -> None:
        """Lets the threads end after their current work, without waiting for them."""
        self._fetcher.stop()
        self._functions.repeater.stop()
        self._close()

    @property
    def title(self) -> str:
        """The node that is asked, or the number of nodes, and the last error."""
        nodes = self.view.nodes
        whom = nodes[0] if len(nodes) == 1 else f"{len(nodes)} nodes" if nodes else self._cluster.target
        return f"{whom}  {self._error}" if self._error else whom

    def press(self, key: str, character: str | None, lines: int) -> str:
        """Applies a key. Returns ``quit``, ``pause``, ``open``, ``close`` or an empty text, like ``State.press``."""
        action = self.state.press(key, character, self.view, lines)
        if action == "pause":
            for repeater in (self._fetcher.repeater, self._functions.repeater, self._rank):
                if repeater is not None:
                    repeater.pause(self.state.paused)
        elif action == "open":
            self._open()
        elif action in ("close", "quit"):
            self._close()
        return action

    def chosen(self) -> tuple[Row | None, RankFacts | None]:
        """Returns the row of the rank whose page is open (None if the rank is gone), and the facts about the rank that
        were read so far.
        """
        row = next((row for row in self.view.ranks if key_of(row) == self.state.selected), None)
        facts = self._facts
        return row, facts if facts is not None and facts.key == self.state.selected else None

    def _open(self) -> None:
        self._close()
        key = self.state.selected
        address = None if key is None else self._addresses.get(key[0])
        if key is None:
            return
        if address is None:
            self._facts = RankFacts(key, reason="the node has not answered", problem="the node has not answered")
            return

        def ask() -> None:
            self._facts = ask_rank(self._cluster, address, key)
            self.changed()

        self._rank = Repeater("rank", ask, _RANK_EVERY_S, self._failed)
        self._rank.start()

    def _close(self) -> None:
        if self._rank is not None:
            self._rank.stop()
        self._rank = None

    def _deliver(self, fetched: Fetched) -> None:
        # Otherwise the list of outcomes would grow without limit, one entry for each refresh.
        self._cluster.outcomes.clear()
        self._addresses |= {rows.node: rows.address for rows in fetched.nodes}
        self._functions.watch(fetched.nodes)
        self.view = self._model.update(fetched, self._functions.found)
        self._error = ""
        self.changed()

    def _failed(self, error: ProbingError) -> None:
        self._error = error.message
        self.changed()

    def _functions_read(self) -> None:
        for row in self.view.ranks:
            row["python"] = self._functions.found.get(process_of(row), row["python"])
        self.changed()
