"""Defines panels of the page: a panel is a function that asks the nodes for the data of one address."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

from probing.api.errors import NotFound
from probing.client.absence import partial
from probing.client.jobs import job_named, silent_nodes
from probing.client.web.answers import Lacking, contract_of, encoded
from probing.client.web.parameters import Parameters

if TYPE_CHECKING:
    from probing.client.cluster import Cluster

__all__ = ("Panel", "Panels", "Question", "answer", "ask")

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Question:
    """A request: the cluster that answers it, with the visitor's rights, and its parameters.

    ``jobs``: names of jobs that the nodes have, as the visitor's live view shows them. ``lacking`` collects processes
    that could not be read, and parts of the answer that a node refused.
    """

    cluster: Cluster
    parameters: Parameters
    jobs: Collection[str] = ()
    lacking: list[Lacking] = field(default_factory=list)

    def job(self) -> str:
        """Returns the job that the parameter ``job`` names, in the same way as --job. Raises UsageError, NotFound."""
        text = self.parameters.text("job")
        # Names of the live view need no query: asking a thousand nodes takes as long as the answer itself.
        return text if text in self.jobs else job_named(self.cluster, text)

    def job_or_all(self) -> str | None:
        """Returns the same as ``job``; None if the parameter is missing."""
        return self.job() if self.parameters.text("job", "") else None

    def of_node(self, node: str) -> Cluster:
        """Returns the cluster of only ``node``, a name that the target knows; empty: the cluster of this question.

        The outcomes of the returned cluster count for this question.
        """
        return self._sharing(self.cluster.afresh(node=node)) if node else self.cluster

    def of_all_nodes(self, every: bool) -> Cluster:
        """Returns the cluster of all nodes, or of only the target. Its outcomes count for this question."""
        return self._sharing(self.cluster.afresh(all_nodes=every)) if every != self.cluster.many else self.cluster

    def _sharing(self, other: Cluster) -> Cluster:
        other.outcomes = self.cluster.outcomes
        return other


Panel = Callable[[Question], object]
"""Returns the data of an answer. Raises ProbingError."""
Panels = Mapping[str, Panel]
"""Panels by the last part of their address: ``/api/NAME``."""


def ask(question: Question, panel: Callable[[Question], T]) -> T:
    """Returns the data of ``panel``. Raises the panel's errors; PartialAnswer in place of NotFound if a node did not
    answer."""
    try:
        return panel(question)
    except NotFound as e:
        silent = silent_nodes(question.cluster, besides=(NotFound,))
        raise (partial(e.message, silent) if silent else e) from None


def answer(question: Question, panel: Panel, lost_rows: Callable[[], int | None]) -> bytes:
    """Returns the answer of ``panel`` as JSON, with its contract. Raises the errors of ``ask``."""
    data = ask(question, panel)
    contract = contract_of(question.cluster, lost_rows(), question.lacking)
    return encoded({"contract": contract, "data": data})
